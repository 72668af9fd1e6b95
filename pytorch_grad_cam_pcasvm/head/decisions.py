"""Decision stages: support vector machines, linear decisions, and several of these side by side.

A decision stage maps the components p, shape (N, B), to ``decision``, shape (N, P): the values on which its estimator
decides. Its *vote* says how they become classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.kernels import RBF, At, Kernel, Linear
from pytorch_grad_cam_pcasvm.head.stage import Conditions, Scaled, Stage
from pytorch_grad_cam_pcasvm.head.stages import Affine, Chain, Union
from pytorch_grad_cam_pcasvm.head.vote import Vote, pairs

_DENSE = 1 << 22  # coefficients of all classes' SVMs, beyond which each class's are kept apart


class Decision(Stage):
    """A stage that ends a head: components (N, B) to decision values (N, P), with a vote and labels.

    Args:
        voting: how decision values become classes.
        classes: class labels in the estimator's order, or None for a regressor.
        *arguments: those of the stage that computes the values.

    Example:
        >>> margins = net.head.voting.margins(net(images).decision)
    """

    n_outputs: int
    decides = True

    def __init__(self, voting: Vote, classes: Sequence[Any] | None, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.voting = voting
        self.classes = list(classes) if isinstance(classes, range) else classes

    def move_constants(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the vote, too."""
        super().move_constants(move)
        self.voting = self.voting.move_tensors(move)


class LinearDecision(Decision, Affine):
    """``a(p) = w p + g``, w of shape (P, B), g (P,): LinearSVC and every other linear decision.

    Example:
        >>> weight = stage_for(LogisticRegression().fit(features, labels)).weight
    """

    def __init__(self, weight: Tensor, bias: Tensor, voting: Vote, classes: Sequence[Any] | None) -> None:
        super().__init__(voting, classes, weight, bias)


@dataclass(frozen=True)
class SupportVectorEffect:
    """How strongly each support vector affects the maps of an SVM at given components, and its part in the decision.

    The gradient of a decision is a sum over support vectors, ``da(p)/dp = sum_i alpha_i c_i dK(p_i, p)/dp``, and the
    weights of a map are its product with the weights of the components. E is the length of one summand's second factor:

    ========== ============================== ==============================================================
    kernel     dK(p_i, p)/dp                  E(p_i, p)
    ========== ============================== ==============================================================
    RBF        2 gamma K (p_i - p)            2 gamma d exp(-gamma d^2), ``d = |p_i - p|``; 0 at distance 0 and at
                                              infinity, largest at 1 / sqrt(2 gamma): sqrt(2 gamma) e^(-1/2)
    linear     p_i                            ``|p_i|``, the same at every p
    polynomial degree gamma z^(degree-1) p_i  ``|degree gamma z^(degree-1)| |p_i|``, z = gamma <p_i, p> + coef0:
                                              grows with the projection on p_i and has no largest value
    sigmoid    gamma sech(z)^2 p_i            ``|gamma| sech(z)^2 |p_i|``: largest where z = 0
    ========== ============================== ==============================================================

    ``decision`` is each vector's part in the value itself. Far from all vectors of an RBF SVM, it is almost nothing,
    whatever the map shows; :meth:`share` distinguishes a decision driven by a few vectors from one to which all
    contribute a little.

    Attributes:
        norm: ``E(p_i, p) = |dK(p_i, p)/dp|`` in the paper, shape (N, I).
        signed: ``alpha_i c_i E(p_i, p)``, shape (N, P, I); 0 if the vector takes no part. For a given class, P is 1,
            and the sign is plus if the training image is evidence for that class. Otherwise there is one row per
            decision value: for two classes a single one, plus for the second of ``classes_``; for more classes, those
            of the pairs (0, 1), (0, 2), ..., (1, 2), ..., plus for the first of the pair.
        indices: positions of the support vectors in the training set (scikit-learn's ``support_``), shape (I,).
        decision: ``alpha_i c_i K(p_i, p)``, shape (N, P, I), with the rows and signs of ``signed``. Its sum over the
            vectors plus the intercept is the decision value; for a class, this is its margin, up to the intercepts'
            part.

    Example:
        >>> effect = net.head.support_vector_effect(net(images).components, "cat")
        >>> strongest = effect.indices[effect.signed[0, 0].argmax()]  # most in favour of a cat
    """

    norm: Tensor
    signed: Tensor
    indices: Tensor
    decision: Tensor

    def share(self, count: int) -> Tensor:
        """Return the share of the ``count`` strongest vectors in ``sum_i |decision_i|``, shape (N, P).

        It is 1 if they alone drive the decision, near ``count / I`` if no vector stands out, and 0 if all parts are 0.
        """
        size = self.decision.abs()
        total = size.sum(-1)
        strongest = size.topk(min(count, size.shape[-1]), -1).values.sum(-1)
        return torch.where(total > 0, strongest / total, 0.0)


class KernelSVM(Decision):
    """``a(p) = sum_i alpha_i c_i K(p_i, p) + g`` for every pair of classes (the SVM layer of the paper).

    The pairwise SVMs share their support vectors: vector i of class c takes part in the C - 1 decisions of c, with the
    coefficients of its column in ``dual_coef`` (scikit-learn's layout). A single SVM has one row.

    Args:
        support_vectors: p_i, shape (I, B), grouped by class.
        dual_coef: alpha_i c_i, shape (C - 1, I), or (1, I) for a single SVM.
        intercept: g, shape (P,).
        n_support: support vectors per class, C numbers.
        support: positions of the support vectors in the training set, shape (I,).

    Example:
        >>> support_vectors = stage_for(SVC().fit(features, labels)).support_vectors
    """

    constants = ("_first", "_second", "_rows", "_takes_part")
    has_poles = False  # it is smooth, and may be steep where its training set is

    def __init__(
        self,
        kernel: Kernel,
        support_vectors: Tensor,
        dual_coef: Tensor,
        intercept: Tensor,
        n_support: Sequence[int],
        support: Tensor,
        voting: Vote,
        classes: Sequence[Any] | None,
    ) -> None:
        super().__init__(voting, classes)
        self.kernel, self.linear = kernel, isinstance(kernel, Linear)
        self.n_inputs, self.n_outputs = support_vectors.shape[1], len(intercept)
        self.n_support = [int(n) for n in n_support]
        self.keep(support_vectors=support_vectors, dual_coef=dual_coef, intercept=intercept, support=support)
        first, second = pairs(len(self.n_support))
        # Of the coefficients of class c, row r is for its decision against class r or r + 1.
        self._first, self._second = first * len(dual_coef) + second - 1, second * len(dual_coef) + first
        self._rows = self._takes_part = None
        if len(dual_coef) > 1 and len(first) * len(support_vectors) <= _DENSE:
            of_class = torch.arange(len(self.n_support)).repeat_interleave(torch.tensor(self.n_support))
            of_first, of_second = (of_class == side.unsqueeze(1) for side in (first, second))
            self._takes_part = of_first | of_second
            self._rows = torch.where(of_first, second.unsqueeze(1) - 1, first.unsqueeze(1))

    def effect(self, x: Tensor, seeds: Tensor | None = None) -> SupportVectorEffect:
        """Return the effect at x (N, B) on K targets with seeds (K, P), or on the decision values themselves."""
        norm = self.kernel.effect(x, self.support_vectors)
        values = self.kernel.value(self.kernel.argument(x, self.support_vectors))
        seeds = torch.eye(len(self.intercept), dtype=x.dtype, device=x.device) if seeds is None else seeds
        of_seeds = self._coefficients(seeds.unsqueeze(0))
        signed, decision = (of_seeds * factor.unsqueeze(1) for factor in (norm, values))
        return SupportVectorEffect(norm, signed, self.support, decision)

    def evaluate(self, x: Tensor) -> tuple[Tensor, At]:
        """Return the decision values, shape (N, P), with x and the kernel's argument."""
        argument = self.kernel.argument(x, self.support_vectors)
        values, machines = self.kernel.value(argument), self._machines()
        if machines is not None:
            return torch.addmm(self.intercept, values, machines.T), At(x, argument)
        blocks = zip(values.split(self.n_support, 1), self.dual_coef.split(self.n_support, 1), strict=True)
        parts = torch.cat([value @ coef.T for value, coef in blocks], 1)
        return parts[:, self._first] + parts[:, self._second] + self.intercept, At(x, argument)

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return x and the kernel's argument, with how exactly x is known."""
        return saved._replace(conditions=conditions) if isinstance(saved, At) else saved

    def pullback(self, saved: At, grad: Tensor) -> Scaled:
        """Return ``grad da/dp``, shape (N, K, B), divided by its factor."""
        return self.kernel.pullback(saved, self.support_vectors, self._coefficients(grad))

    def secant(self, saved: At, saved0: At, grad: Tensor) -> Scaled:
        """Return the same of the kernel's secants."""
        return self.kernel.secant(saved, saved0, self.support_vectors, self._coefficients(grad))

    def why_blank(self, x: Tensor, seed: Tensor, conditions: Conditions) -> str | None:
        """Return that x lies on a support vector of an RBF kernel, if it does and has no gradient; otherwise None."""
        if not isinstance(self.kernel, RBF):
            return None
        _, saved = self.evaluate(x)
        same = self.kernel.coincides(saved.x, self.support_vectors, conditions)[0].nonzero()
        saved = self.attach_conditions(saved, conditions)
        if not len(same) or bool(self.pullback(saved, seed)[0].any()):
            return None
        return (
            f"it lies on a support vector (training image {int(self.support[same[0, 0]])}), where the kernel is "
            "flat and its gradient nothing but rounding: use ContributionCAM"
        )

    def _machines(self) -> Tensor | None:
        """Return the coefficients of all SVMs, shape (P, I); None if they are too many."""
        if len(self.dual_coef) == 1:
            return self.dual_coef
        return None if self._rows is None else self.dual_coef.gather(0, self._rows) * self._takes_part

    def _coefficients(self, grad: Tensor) -> Tensor:
        """Return the coefficient of every support vector, shape (N, K, I), for seeds of shape (N, K, P)."""
        machines = self._machines()
        if machines is not None:
            return torch.tensordot(grad, machines, 1)
        parts = grad.new_zeros(*grad.shape[:2], len(self.n_support) * len(self.dual_coef))
        parts[..., self._first] = grad
        parts[..., self._second] = grad
        blocks = zip(parts.split(len(self.dual_coef), -1), self.dual_coef.split(self.n_support, 1), strict=True)
        return torch.cat([part @ coef for part, coef in blocks], -1)


class Ensemble(Decision, Union):
    """Decision values of several estimators side by side, times ``sign``; each is the last stage of a chain.

    Example:
        >>> machines = stage_for(OneVsRestClassifier(SVC()).fit(features, labels)).members
    """

    def __init__(self, members: Sequence[Chain], sign: float, voting: Vote, classes: Sequence[Any] | None) -> None:
        super().__init__(voting, classes, members)
        self.sign, self.reduces = sign, False

    def with_members(self, members: Sequence[Chain]) -> "Ensemble":
        """Return the same of other members."""
        return Ensemble(members, self.sign, self.voting, self.classes)
