"""Decision stages: support vector machines and linear decisions, and how decision values become classes.

A decision stage maps the components p, shape (N, B), to ``decision``, shape (N, P): the values the fitted estimator is
made of (one per pair of classes for one-vs-one, one per class for one-vs-rest, a single one for two classes or a
regressor). A *rule* turns them into per-class margins, scores and predictions; margins are linear in the decision
values, so the gradient of a target is a row vector over them, its *seed*.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.calibration import Calibration
from pytorch_grad_cam_pcasvm.kernels import Kernel
from pytorch_grad_cam_pcasvm.stages import Chain, Stage, stages_in


class Rule(ABC):
    """How P decision values of an image become margins and scores of C classes."""

    n_classes: int

    @abstractmethod
    def margins(self, decision: Tensor) -> Tensor:
        """Return what is explained of each class: (..., P) to (..., C), linear."""

    @abstractmethod
    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return the derivative of a class's margin, or of its decision against ``versus``, by the decision values.

        Args:
            category: class indices, shape (...).
            versus: class indices, shape (...), or None.
            decision: decision values, shape (..., P), for dtype and device.

        Returns:
            Seeds, shape (..., P).
        """

    def scores(self, decision: Tensor) -> Tensor:
        """Return what scikit-learn's ``decision_function`` gives, with columns [-a, a] for two classes."""
        return self.margins(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return per-class values, shape (..., C), whose order is that of the classes."""
        return self.margins(decision)

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the index of the predicted class, shape (...)."""
        return self.ranking(decision).argmax(-1)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return calibrated probabilities of the classes as ``predict_proba`` gives them, shape (..., C)."""
        raise ValueError(
            "the head gives no calibrated probabilities: put its classifier into a CalibratedClassifierCV, e.g. "
            "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC(), ensemble=False))"
        )


class Single(Rule):
    """A regressor: one value and no classes."""

    n_classes = 1

    def margins(self, decision: Tensor) -> Tensor:
        """Return the value itself."""
        return decision

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return ones."""
        return torch.ones_like(decision)

    def prediction(self, decision: Tensor) -> Tensor:
        """Return what the estimator predicts, shape (N,)."""
        return decision[..., 0]


class OneClass(Single):
    """A one-class machine: inliers are 1, outliers -1."""

    def prediction(self, decision: Tensor) -> Tensor:
        """Return 1 where the value is positive, otherwise -1."""
        return torch.where(decision[..., 0] > 0, 1, -1)


class Binary(Rule):
    """Two classes, one value a: positive for the second class.

    Args:
        zero_is_second: a value of exactly 0 is the second class, as in libsvm, not the first, as in linear classifiers.
    """

    n_classes = 2

    def __init__(self, *, zero_is_second: bool = False) -> None:
        self.zero_is_second = zero_is_second

    def margins(self, decision: Tensor) -> Tensor:
        """Return [-a, a]."""
        return torch.cat([-decision, decision], -1)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return 1 for the second class and -1 for the first: each is also its decision against the other."""
        sign = 2 * category - 1 if versus is None else category - versus
        return sign.to(decision.dtype).unsqueeze(-1)

    def predicted(self, decision: Tensor) -> Tensor:
        """Return 1 where the value is positive."""
        value = decision[..., 0]
        return ((value >= 0) if self.zero_is_second else (value > 0)).long()


class BinaryVote(Binary):
    """Two classes of a OneVsOneClassifier, whose score is a vote plus the squashed value."""

    def scores(self, decision: Tensor) -> Tensor:
        """Return [-s, s] with ``s = (a > 0) + a / (3 (|a| + 1))``."""
        return self.margins((decision > 0) + decision / (3 * (decision.abs() + 1)))


class OneVsRest(Rule):
    """One value per class; the decision between two classes is their difference."""

    def __init__(self, n_classes: int) -> None:
        self.n_classes = n_classes

    def margins(self, decision: Tensor) -> Tensor:
        """Return the values themselves."""
        return decision

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return e_c, or e_c - e_d for class c against d."""
        seed = _one_hot(category, decision)
        return seed if versus is None else seed - _one_hot(versus, decision)


class OneVsOne(Rule):
    """One value per pair of classes i < j, positive for i (the order of libsvm).

    Args:
        n_classes: number of classes C.
        pairwise_scores: scores are the pairwise values (``decision_function_shape="ovo"``).
        break_ties: the largest score wins (``break_ties=True``), not the lowest of the classes with most votes.
    """

    def __init__(self, n_classes: int, *, pairwise_scores: bool = False, break_ties: bool = False) -> None:
        self.n_classes = n_classes
        self.pairwise_scores = pairwise_scores
        self.break_ties = break_ties

    def margins(self, decision: Tensor) -> Tensor:
        """Return the sum of each class's signed pairwise values."""
        return self._tally(decision, -decision)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return +1 where c is the pair's first class, -1 where it is the second; only the pair {c, d} against d."""
        first, second = pairs(self.n_classes, decision.device)
        c = category.unsqueeze(-1)
        wins, loses = c == first, c == second
        if versus is not None:
            d = versus.unsqueeze(-1)
            wins, loses = wins & (d == second), loses & (d == first)
        return wins.to(decision.dtype) - loses.to(decision.dtype)

    def scores(self, decision: Tensor) -> Tensor:
        """Return the pairwise values, or votes plus squashed margins ``s / (3 (|s| + 1))``, as scikit-learn does."""
        return decision if self.pairwise_scores else self.ranking(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return votes plus squashed margins, shape (..., C)."""
        margins = self.margins(decision)
        votes = self._tally((decision >= 0).to(decision.dtype), (decision < 0).to(decision.dtype))
        return votes + margins / (3 * (margins.abs() + 1))

    def predicted(self, decision: Tensor) -> Tensor:
        """Return the class with most votes, the lowest index among equals; with ``break_ties`` the best score."""
        if self.break_ties:
            return self.ranking(decision).argmax(-1)
        # libsvm gives a value of exactly 0 to the second class, decision_function to the first.
        wins = decision > 0
        return self._tally(wins.to(decision.dtype), (~wins).to(decision.dtype)).argmax(-1)

    def _tally(self, for_first: Tensor, for_second: Tensor) -> Tensor:
        """Add up pairwise values (..., P) per class (..., C)."""
        first, second = pairs(self.n_classes, for_first.device)
        total = for_first.new_zeros(*for_first.shape[:-1], self.n_classes)
        return total.index_add(-1, first, for_first).index_add(-1, second, for_second)


class Calibrated(Rule):
    """Probabilities of calibrated classifiers: the mean over members, each a rule on its own decision values.

    Margins are the mean of the members' margins: they are explained, since probabilities saturate.

    Args:
        rules: one per member.
        sizes: decision values of each member.
        calibrations: one per member, from its scores (..., C), or (..., 1) for two classes, to probabilities (..., C).
    """

    def __init__(self, rules: Sequence[Rule], sizes: Sequence[int], calibrations: Sequence[Calibration]) -> None:
        self.n_classes = rules[0].n_classes
        self.rules, self.sizes, self.calibrations = list(rules), list(sizes), list(calibrations)

    def margins(self, decision: Tensor) -> Tensor:
        """Return the mean of the members' margins."""
        parts = decision.split(self.sizes, -1)
        return torch.stack([rule.margins(part) for rule, part in zip(self.rules, parts, strict=True)]).mean(0)

    def seed(self, category: Tensor, versus: Tensor | None, decision: Tensor) -> Tensor:
        """Return the members' seeds, divided by their number."""
        parts = decision.split(self.sizes, -1)
        seeds = [rule.seed(category, versus, part) for rule, part in zip(self.rules, parts, strict=True)]
        return torch.cat(seeds, -1) / len(self.rules)

    def probabilities(self, decision: Tensor) -> Tensor:
        """Return the mean of the members' calibrated probabilities."""
        probabilities = []
        parts = decision.split(self.sizes, -1)
        for rule, part, calibration in zip(self.rules, parts, self.calibrations, strict=True):
            scores = rule.scores(part)
            probabilities.append(calibration(scores[..., 1:] if self.n_classes == 2 else scores))
        return torch.stack(probabilities).mean(0)

    def scores(self, decision: Tensor) -> Tensor:
        """Return the probabilities: what ``predict_proba`` gives."""
        return self.probabilities(decision)

    def ranking(self, decision: Tensor) -> Tensor:
        """Return the probabilities."""
        return self.probabilities(decision)


def pairs(n_classes: int, device: torch.device) -> Tensor:
    """Return the classes i < j of each pair in the order of libsvm, shape (2, C (C - 1) / 2)."""
    return torch.triu_indices(n_classes, n_classes, 1, device=device)


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index.unsqueeze(-1), 1.0)


class Decision(Stage):
    """A stage that ends a head: components (N, B) to decision values (N, P).

    Args:
        rule: how decision values become classes.
        classes: class labels in the estimator's order, or None for a regressor.

    Attributes:
        n_outputs: P.
    """

    n_outputs: int

    def __init__(self, rule: Rule, classes: Sequence[Any] | None) -> None:
        super().__init__()
        self.rule = rule
        self.classes = classes


class LinearDecision(Decision):
    """``a(p) = w p + g``: LinearSVC and every other linear decision.

    Args:
        weight: shape (P, B).
        bias: shape (P,).
        rule: how decision values become classes.
        classes: class labels, or None for a regressor.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, rule: Rule, classes: Sequence[Any] | None) -> None:
        super().__init__(rule, classes)
        self.n_outputs, self.n_inputs = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the decision values, shape (N, P)."""
        return x @ self.weight.T + self.bias

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``grad w``."""
        return grad @ self.weight


@dataclass(frozen=True)
class SupportVectorEffect:
    """How strongly each support vector pulls on the maps of an SVM at given components.

    The gradient of a decision is a sum over support vectors, ``da(p)/dp = sum_i alpha_i c_i dK(p_i, p)/dp``, and the
    weights of a map are its product with the weights of the components. E is the length of one summand's second factor:

    ========== ============================== ==============================================================
    kernel     dK(p_i, p)/dp                  E(p_i, p)
    ========== ============================== ==============================================================
    RBF        2 gamma K (p_i - p)            2 gamma d exp(-gamma d^2), d = |p_i - p|; 0 at distance 0 and at
                                              infinity, largest at 1 / sqrt(2 gamma): sqrt(2 gamma) e^(-1/2)
    linear     p_i                            |p_i|, the same at every p
    polynomial degree gamma z^(degree-1) p_i  |degree gamma z^(degree-1)| |p_i|, z = gamma <p_i, p> + coef0:
                                              grows with the projection on p_i and has no largest value
    sigmoid    gamma sech(z)^2 p_i            |gamma| sech(z)^2 |p_i|: largest where z = 0
    ========== ============================== ==============================================================

    Attributes:
        norm: ``E(p_i, p) = |dK(p_i, p)/dp|`` of the paper, shape (N, I).
        signed: ``alpha_i c_i E(p_i, p)``, shape (N, P, I); 0 where the vector takes no part. For a class that was asked
            for P is 1, and the sign is plus where the training image speaks for that class. Otherwise there is one row
            per decision value: for two classes a single one, plus for the second of ``classes_``; for more, those of
            the pairs (0, 1), (0, 2), ..., (1, 2), ..., plus for the first of the pair.
        indices: positions of the support vectors in the training set (scikit-learn's ``support_``), shape (I,).
    """

    norm: Tensor
    signed: Tensor
    indices: Tensor


class KernelSVM(Decision):
    """``a(p) = sum_i alpha_i c_i K(p_i, p) + g`` for every pair of classes (the SVM layer of the paper).

    The machines share their support vectors: vector i of class c takes part in the C - 1 decisions of c, with the
    coefficients of its column in ``dual_coef`` (scikit-learn's layout). One machine alone has a single row.

    Args:
        kernel: the kernel K.
        support_vectors: p_i, shape (I, B), grouped by class.
        dual_coef: alpha_i c_i, shape (C - 1, I), or (1, I) for a single machine.
        intercept: g, shape (P,).
        n_support: support vectors per class, C numbers.
        support: positions of the support vectors in the training set, shape (I,).
        rule: how decision values become classes.
        classes: class labels, or None for a regressor.
    """

    support_vectors: Tensor
    dual_coef: Tensor
    intercept: Tensor
    support: Tensor

    def __init__(
        self,
        kernel: Kernel,
        support_vectors: Tensor,
        dual_coef: Tensor,
        intercept: Tensor,
        n_support: Sequence[int],
        support: Tensor,
        rule: Rule,
        classes: Sequence[Any] | None,
    ) -> None:
        super().__init__(rule, classes)
        self.kernel = kernel
        self.n_inputs, self.n_outputs = support_vectors.shape[1], len(intercept)
        self.n_support = [int(n) for n in n_support]
        self.register_buffer("support_vectors", support_vectors)
        self.register_buffer("dual_coef", dual_coef)
        self.register_buffer("intercept", intercept)
        self.register_buffer("support", support)

    def effect(self, x: Tensor, seeds: Tensor | None = None) -> SupportVectorEffect:
        """Return how strongly each support vector pulls at x, shape (N, B).

        Args:
            x: components.
            seeds: derivatives of K targets by the decision values, shape (K, P); None: the decision values themselves.

        Returns:
            The effect, ``signed`` of shape (N, K, I).
        """
        norm = self.kernel.effect(self.kernel.argument(x, self.support_vectors), self.support_vectors)
        seeds = torch.eye(len(self.intercept), dtype=x.dtype, device=x.device) if seeds is None else seeds
        return SupportVectorEffect(norm, self._coefficients(seeds.unsqueeze(0)) * norm.unsqueeze(1), self.support)

    def forward(self, x: Tensor) -> Tensor:
        """Return the decision values, shape (N, P)."""
        return self.evaluate(x)[0]

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decision values, and the kernel's argument."""
        argument = self.kernel.argument(x, self.support_vectors)
        return self._decision(self.kernel.value(argument)), argument

    def _decision(self, values: Tensor) -> Tensor:
        """Return the decision values for the kernel's values, shape (N, I)."""
        if len(self.dual_coef) == 1:
            return values @ self.dual_coef.T + self.intercept
        blocks = zip(values.split(self.n_support, 1), self.dual_coef.split(self.n_support, 1), strict=True)
        # parts[:, c, r]: what the vectors of class c give to its r-th decision, that against class r or r + 1.
        parts = torch.stack([value @ coef.T for value, coef in blocks], 1)
        first, second = pairs(len(self.n_support), values.device)
        return parts[:, first, second - 1] + parts[:, second, first] + self.intercept

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``grad da/dp``, which underflows to 0 far from every support vector: see ``pullback_scaled``."""
        scaled, log_scale = self.pullback_scaled(x, grad)
        return scaled * log_scale.exp().unsqueeze(-1)

    def pullback_scaled(self, x: Tensor, grad: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``grad da/dp / exp(log_scale)``, shape (N, K, B), and ``log_scale``, shape (N, K)."""
        argument = self.kernel.argument(x, self.support_vectors) if kept is None else kept
        return self.kernel.pullback(argument, x, self.support_vectors, self._coefficients(grad))

    def _coefficients(self, grad: Tensor) -> Tensor:
        """Return the coefficient of every support vector, shape (N, K, I), for seeds of shape (N, K, P)."""
        if len(self.dual_coef) == 1:
            return grad @ self.dual_coef
        n_classes = len(self.n_support)
        first, second = pairs(n_classes, grad.device)
        parts = grad.new_zeros(*grad.shape[:2], n_classes, n_classes - 1)
        parts[..., first, second - 1] = grad
        parts[..., second, first] = grad
        blocks = zip(parts.unbind(2), self.dual_coef.split(self.n_support, 1), strict=True)
        return torch.cat([part @ coef for part, coef in blocks], -1)


class Ensemble(Decision):
    """Decision values of several machines side by side, each behind stages of its own.

    Args:
        members: the stages of each machine, a decision at the end.
        sign: factor on all decision values.
        rule: how decision values become classes.
        classes: class labels.
    """

    def __init__(self, members: Sequence[Chain], sign: float, rule: Rule, classes: Sequence[Any] | None) -> None:
        super().__init__(rule, classes)
        self.n_inputs = members[0].n_inputs
        self.sizes = [member.n_outputs for member in members if member.n_outputs is not None]
        self.n_outputs = sum(self.sizes)
        self.sign = sign
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        """Return the decision values of all members, shape (N, P)."""
        return self.evaluate(x)[0]

    def evaluate(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the decision values of all members, and what each of them kept."""
        values, kept = zip(*(member.evaluate(x) for member in stages_in(self.members)), strict=True)
        return self.sign * torch.cat(values, -1), kept

    def pullback_scaled(self, x: Tensor, grad: Tensor, kept: Any = None) -> tuple[Tensor, Tensor]:
        """Return the sum of the members' pullbacks, their largest factor taken out, and its logarithm."""
        pulled = []
        kept = [None] * len(self.members) if kept is None else kept
        for member, seed, of_member in zip(stages_in(self.members), grad.split(self.sizes, -1), kept, strict=True):
            part, log_scale = member.pullback_scaled(x, self.sign * seed, of_member)
            log_scale = part.new_zeros(part.shape[:2]) if log_scale is None else log_scale
            # A member that takes no part must not set the scale of the others.
            pulled.append((part, torch.where(part.any(-1), log_scale, -torch.inf)))
        largest = torch.stack(torch.broadcast_tensors(*(log_scale for _, log_scale in pulled))).amax(0)
        largest = torch.where(largest.isfinite(), largest, 0.0)
        terms = [part * (log_scale - largest).exp().unsqueeze(-1) for part, log_scale in pulled]
        return torch.stack(torch.broadcast_tensors(*terms)).sum(0), largest
