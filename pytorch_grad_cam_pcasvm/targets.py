"""Targets: what a map explains. Each is a callable on the network's output and knows its closed-form gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.net import HeadOutput

Target = Callable[[Any], Any]


class ClosedFormTarget(ABC):
    """A target that knows its gradient: linear in the head's values at one level."""

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Return the target's value: a number for a row of the output, shape (N,) for a batch."""

    @abstractmethod
    def seeds(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by level of the head, shape (N, .), or (1, .) where it is the same for every image."""


@dataclass(frozen=True)
class PCATarget(ClosedFormTarget):
    """Principal component ``p_b`` (b from 0: ``PCATarget(0)`` is the paper's P_1).

    Args:
        component: its number b, from 0.
        sign: ``"+"`` for what raises the component (P_b^+), ``"-"`` for what lowers it (P_b^-, of ``-p_b``).

    Raises:
        TypeError: the component is not an integer.
        ValueError: it is negative, or the sign is neither ``"+"`` nor ``"-"``.
    """

    component: int
    sign: str = "+"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if isinstance(self.component, bool | np.bool_) or not isinstance(self.component, int | np.integer):
            raise TypeError(f"component must be an integer, counted from 0, got {self.component!r}")
        if self.component < 0:
            raise ValueError(f"component must be 0 or more, got {self.component}")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return ``p_b`` or ``-p_b``: a number for a row, shape (N,) for a batch."""
        components = self._components(output)
        return components[..., self.component] * _factor(self.sign)

    def seeds(self, output: HeadOutput) -> dict[int, Tensor]:
        """Return the gradient by level of the head: a one-hot row over the components, shape (1, B)."""
        components = self._components(output)
        seed = components.new_zeros(1, components.shape[-1])
        seed[0, self.component] = _factor(self.sign)
        level = output.head.component_level
        assert level is not None
        return {level: seed}

    @staticmethod
    def several(targets: Sequence["PCATarget"], output: Any) -> tuple[Tensor, dict[int, Tensor | None]]:
        """Return values, shape (N, K), and gradient by level of the head, shape (1, K, B), of K components.

        The gradient of every component, in order, is the identity: None.

        Args:
            targets: the components.
            output: N rows.

        Returns:
            What ``__call__`` and ``seeds`` give of each.
        """
        components = max(targets, key=lambda target: target.component)._components(output)
        level = output.head.component_level
        assert level is not None
        count = components.shape[1]
        if [(target.component, target.sign) for target in targets] == [(b, "+") for b in range(count)]:
            return components.clone(), {level: None}
        # Rows of a matrix made where it is needed: a list of numbers would have to be sent there, and waited for.
        plus = torch.eye(count, dtype=components.dtype, device=components.device)
        rows = {"+": plus.unbind(), "-": (-plus).unbind()}
        seeds = torch.stack([rows[target.sign][target.component] for target in targets])
        return components @ seeds.T, {level: seeds.unsqueeze(0)}

    def _components(self, output: Any) -> Tensor:
        head = _head_of(output, self)
        if head.component_level is None:
            if any(getattr(module, "reduces", False) for module in head.modules()):
                raise ValueError(
                    f"{self}: the PCA is inside a meta-estimator; put it in front, as in "
                    "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC()))"
                )
            raise ValueError(f"{self} needs a head with a PCA, and this one has none: use SVMTarget")
        components = output.levels[head.component_level]
        if self.component >= components.shape[-1]:
            raise ValueError(f"{self}: the head has {components.shape[-1]} components, numbered from 0")
        return components


@dataclass(frozen=True)
class SVMTarget(ClosedFormTarget):
    """The margin of a class, or the decision between two classes.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image (also for regressors and one-class
            machines, whose only value it is).
        versus: another label: the pairwise decision of ``category`` against it; ``"runner-up"``: against the class that
            came second for each image.
        sign: ``"+"`` for what speaks for it, ``"-"`` for what speaks against it.

    Raises:
        TypeError: a label is a list or an array.
        ValueError: ``versus`` is the category itself, or the sign is neither ``"+"`` nor ``"-"``.
    """

    category: Any = None
    versus: Any = None
    sign: str = "+"

    def __post_init__(self) -> None:
        """Check the arguments."""
        for label in (self.category, self.versus):
            if (
                not isinstance(label, Hashable)
                or isinstance(label, tuple)
                or (isinstance(label, Tensor) and label.dim())
            ):
                raise TypeError(f"a class label must be one value of classes_, got {label!r:.80}")
        if self.category is not None and self.versus is not None and self.category == self.versus:
            raise ValueError(f"versus must be another class than the category, got {self.category!r} for both")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the margin: a number for a row, shape (N,) for a batch."""
        decision = self.decision(output)
        return (decision * self._seed(output, decision.detach())).sum(-1)

    def seeds(self, output: HeadOutput) -> dict[int, Tensor]:
        """Return the gradient by level of the head: rows over the decision values, shape (N, P) or (1, P)."""
        decision = self.decision(output).detach()
        level = output.head.decision_level
        assert level is not None
        named = self.category is not None and not self._against_runner_up(output.head)
        return {level: self._seed(output, decision[:1] if named else decision)}

    def decision(self, output: Any) -> Tensor:
        """Return the decision values of the output, shape (N, P), or (P,) of a row.

        Args:
            output: the output of a PCASVMNet.

        Returns:
            The decision values.

        Raises:
            ValueError: the head has no SVM.
        """
        head = _head_of(output, self)
        if head.decision_level is None:
            raise ValueError(f"{self} needs a head with an SVM, and this one has none: use PCATarget")
        return output.levels[head.decision_level]

    def _against_runner_up(self, head: Any) -> bool:
        return self.versus == "runner-up" and "runner-up" not in (head.classes_ if head.classes_ is not None else ())

    def _seed(self, output: HeadOutput, decision: Tensor) -> Tensor:
        head, voting = output.head, output.head.voting
        if head.classes_ is None and self.versus is not None:
            raise ValueError(f"{self}: the head has no classes to compare")

        def indices(label: Any) -> Tensor:
            return torch.full(decision.shape[:-1], head.class_index(label), device=decision.device)

        category = voting.predicted(decision) if self.category is None else indices(self.category)
        versus = None
        if self._against_runner_up(head):
            others = voting.ranking(decision).scatter(-1, category.unsqueeze(-1), -torch.inf)
            versus = others.argmax(-1)
        elif self.versus is not None:
            versus = indices(self.versus)
        seed = voting.seed(category, versus, decision)
        return seed if self.sign == "+" else -seed


@dataclass(frozen=True)
class ProbabilityTarget:
    """The calibrated probability of a class, exactly as ``predict_proba`` gives it.

    Far from the decision boundary a probability saturates and its gradient fades: ``SVMTarget`` explains the margin.

    Args:
        category: a label from ``classes_``; None: the class predicted for each image.
        sign: ``"+"`` for what raises the probability, ``"-"`` for what lowers it.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.
    """

    category: Any = None
    sign: str = "+"

    def __post_init__(self) -> None:
        """Check the arguments."""
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the probability: a number for a row, shape (N,) for a batch."""
        decision = SVMTarget(self.category).decision(output)
        voting, head = output.head.voting, output.head
        probabilities = voting.probabilities(decision)
        if self.category is not None:
            return probabilities[..., head.class_index(self.category)] * _factor(self.sign)
        index = voting.predicted(decision.detach()).unsqueeze(-1)
        return probabilities.gather(-1, index).squeeze(-1) * _factor(self.sign)


@dataclass(frozen=True)
class ScoreTarget(ClosedFormTarget):
    """A score of an ordinary classifier.

    Args:
        category: its index; None: the largest score of each image.
    """

    category: int | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return the score: a number for a row, shape (N,) for a batch."""
        return output.max(-1).values if self.category is None else output[..., self.category]

    def seeds(self, output: Tensor) -> dict[int, Tensor]:
        """Return a one-hot row per image, shape (N, C)."""
        index = output.argmax(-1) if self.category is None else torch.full_like(output[..., 0], self.category).long()
        return {0: torch.zeros_like(output).scatter(-1, index.unsqueeze(-1), 1.0)}


@dataclass(frozen=True)
class PredictedScore:
    """scikit-learn's score of each image's predicted class: what the host explains where no targets are given.

    Its map is that of ``SVMTarget()``. Only the size of its gradient differs, by the squash of one-vs-one scores, and
    the host's scaling, which adds 1e-7, feels that.
    """

    def __repr__(self) -> str:
        return "the predicted class"

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the score of a row."""
        decision = SVMTarget().decision(output)
        voting = output.head.voting
        return voting.ranking(decision)[voting.predicted(decision.detach())]


def feature_gradients(output: Tensor, targets: Sequence[Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of K targets with respect to the features, for every image.

    Args:
        output: a HeadOutput, or the output of an ordinary classifier (its features are the output itself), N rows.
        targets: K targets.
        dtype: of the gradients.

    Returns:
        Gradients divided by ``exp(log_scale)``, shape (N, K, D); ``log_scale``, shape (N, K); values, shape (N, K).
    """
    count = len(output)
    parts: list[tuple[list[int], tuple[Tensor, Tensor, Tensor]]] = []
    for members, values, seeds in _grouped(targets, output):
        if isinstance(output, HeadOutput):
            grad, log_scale = output.head.pullback(output.levels, seeds)
        else:
            grad, log_scale = seeds[0], seeds[0].new_zeros(seeds[0].shape[:2])
        parts.append((members, (grad.to(dtype).expand(count, -1, -1), log_scale.expand(count, -1), values)))
    if len(parts) == 1:
        return parts[0][1]
    grad, log_scale, values = (torch.cat(tensors, 1) for tensors in zip(*(part for _, part in parts), strict=True))
    order = [k for members, _ in parts for k in members]
    if order == sorted(order):
        return grad, log_scale, values
    back = sorted(range(len(order)), key=order.__getitem__)
    grad, log_scale, values = (
        torch.stack([columns[k] for k in back], 1) for columns in (t.unbind(1) for t in (grad, log_scale, values))
    )
    return grad, log_scale, values


def _grouped(targets: Sequence[Any], output: Tensor) -> Iterator[tuple[list[int], Tensor, Mapping[int, Any]]]:
    """Yield targets whose gradients start at the same levels: their numbers, values (N, K), seeds (N or 1, K, .)."""
    components = [k for k, target in enumerate(targets) if type(target) is PCATarget]
    if components:
        # Many at once: 64 of them are one row of a matrix each, and not 64 calls.
        yield components, *PCATarget.several([targets[k] for k in components], output)
    pairs = {k: _values_and_seeds(target, output) for k, target in enumerate(targets) if type(target) is not PCATarget}
    for levels in dict.fromkeys(frozenset(seeds) for _, seeds in pairs.values()):
        members = [k for k, (_, seeds) in pairs.items() if frozenset(seeds) == levels]
        values = torch.stack([pairs[k][0] for k in members], 1)
        yield members, values, {level: _stack([pairs[k][1][level] for k in members]) for level in levels}


def feature_gradients_per_image(output: Tensor, targets: Sequence[Target], dtype: torch.dtype) -> Tensor:
    """Return the gradient of each image's own target with respect to its features, shape (N, 1, D).

    Args:
        output: a HeadOutput, or the output of an ordinary classifier, N rows.
        targets: N targets.
        dtype: of the gradients.

    Returns:
        Gradients, each image's up to a positive factor.
    """
    groups: dict[Any, list[int]] = {}
    for row, target in enumerate(targets):
        groups.setdefault(target if isinstance(target, ClosedFormTarget) else None, []).append(row)
    parts: list[tuple[list[int], Tensor]] = []
    for target, rows in groups.items():
        part = output if len(groups) == 1 else output.rows(rows) if isinstance(output, HeadOutput) else output[rows]
        shared = _Rowwise([targets[row] for row in rows]) if target is None else target
        parts.append((rows, feature_gradients(part, [shared], dtype)[0]))
    if len(parts) == 1:
        return parts[0][1]
    grad = torch.cat([part for _, part in parts])
    order = torch.tensor([row for rows, _ in parts for row in rows], device=grad.device).argsort()
    return grad[order]


@dataclass
class _Rowwise:
    """One target per row of the output."""

    targets: list[Target]


def _values_and_seeds(target: Target | _Rowwise, output: Tensor) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return a target's value for every image, shape (N,), and its gradient by level, shape (N, .) or (1, .)."""
    if isinstance(target, SVMTarget) and isinstance(output, HeadOutput):
        seeds = target.seeds(output)  # once: its value is their product with the decision values
        return (target.decision(output) * next(iter(seeds.values()))).sum(-1), seeds
    if isinstance(target, ClosedFormTarget):
        return target(output), target.seeds(output)
    return _by_autograd(target.targets if isinstance(target, _Rowwise) else [target] * len(output), output)


def _by_autograd(targets: Sequence[Target], output: Tensor) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Differentiate any callables, one per row, on copies of the head's small values alone.

    Args:
        targets: N callables on a row of the output.
        output: a HeadOutput, or the output of an ordinary classifier, N rows.

    Returns:
        Values, shape (N,), and per level the gradients, shape (N, .).

    Raises:
        TypeError: a target is not callable, or gives no tensor.
        ValueError: a target gives more than one number.
    """
    with torch.inference_mode(False), torch.enable_grad():
        if isinstance(output, HeadOutput):
            head = output.head
            named = (0, head.component_level, head.decision_level, len(output.levels) - 1)
            levels = sorted({level for level in named if level is not None})
            leaves = {level: output.levels[level].detach().clone().requires_grad_() for level in levels}
            copies = [leaves.get(level, value) for level, value in enumerate(output.levels)]
            rows = list(HeadOutput.of(head, copies))
        else:
            leaves = {0: output.detach().clone().requires_grad_()}
            rows = list(leaves[0])
        values = []
        for target, row in zip(targets, rows, strict=True):
            if not callable(target):
                raise TypeError(f"a target must be callable on a row of the network's output, got {target!r}")
            value = target(row)
            if not isinstance(value, Tensor):
                raise TypeError(f"the target {target!r} must return a tensor, it returned {type(value).__name__}")
            if value.numel() != 1:
                raise ValueError(f"the target {target!r} must return one number per image, it returned {value.numel()}")
            values.append(value.reshape(()))
        stacked = torch.stack(values)
        if not stacked.requires_grad:
            return stacked, {0: torch.zeros_like(leaves[0])}
        grads = torch.autograd.grad(stacked.sum(), list(leaves.values()), allow_unused=True)
    return stacked.detach(), {level: grad for level, grad in zip(leaves, grads, strict=True) if grad is not None}


def _stack(seeds: Sequence[Tensor]) -> Tensor:
    """Stack K seeds of shape (N, .) or (1, .) to (N, K, .), or (1, K, .) where none differs between images."""
    if len(seeds) == 1:
        return seeds[0].unsqueeze(1)
    rows = max(len(seed) for seed in seeds)
    return torch.stack([seed.expand(rows, -1) for seed in seeds], 1)


def _head_of(output: Any, target: ClosedFormTarget) -> Any:
    # Not isinstance: softmax of a HeadOutput carries the head along too.
    head = getattr(output, "head", None)
    if head is None:
        raise ValueError(
            f"{target} needs the output of a PCASVMNet; for an ordinary classifier use ClassifierOutputTarget"
        )
    return head


def _check_sign(sign: str) -> None:
    if sign not in ("+", "-"):
        raise ValueError(f"sign must be '+' or '-', got {sign!r}")


def _factor(sign: str) -> float:
    return 1.0 if sign == "+" else -1.0
