"""Targets: what a map explains. Each is a callable on the network's output and knows its closed-form gradient."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.net import HeadOutput

Target = Callable[[Any], Any]


class ClosedFormTarget(ABC):
    """A target that knows its gradient: linear in one of the head's values."""

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Return the target's value: a number for a row of the output, shape (N,) for a batch."""

    @abstractmethod
    def seeds(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position of a head's value, (N, .), or (1, .) if it is the same for every image."""


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
        if isinstance(self.component, bool | np.bool_) or not isinstance(self.component, int | np.integer):
            raise TypeError(f"component must be an integer, counted from 0, got {self.component!r}")
        if self.component < 0:
            raise ValueError(f"component must be 0 or more, got {self.component}")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return ``p_b`` or ``-p_b``: a number for a row, shape (N,) for a batch."""
        components = self._components(output)
        return components[..., self.component] * _factor(self.sign)

    def seeds(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: a one-hot row over the components, shape (1, B)."""
        components = self._components(output)
        seed = components.new_zeros(1, components.shape[-1])
        seed[0, self.component] = _factor(self.sign)
        return {output.head.component_position: seed}

    @staticmethod
    def several(targets: Sequence["PCATarget"], output: Any) -> tuple[Tensor, dict[int, Tensor | None]]:
        """Return values, shape (N, K), and gradient by position of the head's value, shape (1, K, B), of K components.

        The gradient of every component, in order, is the identity: None.
        """
        components = max(targets, key=lambda target: target.component)._components(output)
        position, count = output.head.component_position, components.shape[1]
        if [(target.component, target.sign) for target in targets] == [(b, "+") for b in range(count)]:
            return components.clone(), {position: None}
        # Rows of a matrix made where it is needed: a list of numbers would have to be sent there, and waited for.
        plus = torch.eye(count, dtype=components.dtype, device=components.device)
        rows = {"+": plus.unbind(), "-": (-plus).unbind()}
        seeds = torch.stack([rows[target.sign][target.component] for target in targets])
        return components @ seeds.T, {position: seeds.unsqueeze(0)}

    def _components(self, output: Any) -> Tensor:
        head = _head_of(output, self)
        if head.component_position is None:
            why = " needs a head with a PCA, and this one has none: use SVMTarget"
            if any(getattr(module, "reduces", False) for module in head.modules()):
                pipeline = "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC()))"
                why = f": the PCA is inside a meta-estimator; put it in front, as in {pipeline}"
            raise ValueError(f"{self}{why}")
        components = output.head_trace.values[head.component_position]
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
        for label in (self.category, self.versus):
            array = isinstance(label, Tensor) and label.dim() > 0
            if array or isinstance(label, tuple) or not isinstance(label, Hashable):
                raise TypeError(f"a class label must be one value of classes_, got {label!r:.80}")
        if self.category is not None and self.versus is not None and self.category == self.versus:
            raise ValueError(f"versus must be another class than the category, got {self.category!r} for both")
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the margin: a number for a row, shape (N,) for a batch."""
        decision = self.decision(output)
        return (decision * self._seed(output, decision.detach())).sum(-1)

    def seeds(self, output: Any) -> dict[int, Tensor]:
        """Return the gradient by position of a head's value: rows over the decision values, (N, P) or (1, P)."""
        decision = self.decision(output).detach()
        named = self.category is not None and not self._against_runner_up(output.head)
        return {output.head.decision_position: self._seed(output, decision[:1] if named else decision)}

    def why_blank(self, output: HeadOutput) -> str | None:
        """Return why the map of a row of the output is blank, if it is the class that is compared with itself."""
        same = self.category is None and self.versus is not None and self.versus == output.labels()
        return f"the predicted class is {self.versus!r} itself" if same else None

    def decision(self, output: Any) -> Tensor:
        """Return the decision values of the output, shape (N, P), or (P,) of a row; a ValueError without an SVM."""
        head = _head_of(output, self)
        if head.decision_position is None:
            raise ValueError(f"{self} needs a head with an SVM, and this one has none: use PCATarget")
        return output.head_trace.values[head.decision_position]

    def _against_runner_up(self, head: Any) -> bool:
        return self.versus == "runner-up" and (head.classes_ is None or "runner-up" not in head.classes_)

    def _seed(self, output: HeadOutput, decision: Tensor) -> Tensor:
        head, voting = output.head, output.head.voting
        if head.classes_ is None and self.versus is not None:
            raise ValueError(f"{self}: the head has no classes to compare")

        def indices(label: Any) -> Tensor:
            return torch.full(decision.shape[:-1], head.class_index(label), device=decision.device)

        category = voting.predicted(decision) if self.category is None else indices(self.category)
        versus = None
        if self._against_runner_up(head):
            versus = voting.ranking(decision).scatter(-1, category.unsqueeze(-1), -torch.inf).argmax(-1)
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
        _check_sign(self.sign)

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the probability: a number for a row, shape (N,) for a batch."""
        decision = SVMTarget(self.category).decision(output)
        voting = output.head.voting
        probabilities = voting.probabilities(decision) * _factor(self.sign)
        if self.category is not None:
            return probabilities[..., output.head.class_index(self.category)]
        return probabilities.gather(-1, voting.predicted(decision.detach()).unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class ScoreTarget(ClosedFormTarget):
    """A score of an ordinary classifier, by its index; None: the largest of each image."""

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

    Its map is that of ``SVMTarget()``, but for the size of the gradient, which the host's scaling, adding 1e-7, feels.
    """

    def __repr__(self) -> str:
        return "the predicted class"

    def __call__(self, output: HeadOutput) -> Tensor:
        """Return the score of a row."""
        decision = SVMTarget().decision(output)
        voting = output.head.voting
        return voting.ranking(decision)[voting.predicted(decision.detach())]


def _head_of(output: Any, target: ClosedFormTarget) -> Any:
    # Not isinstance: softmax of a HeadOutput carries the head along too.
    head = getattr(output, "head", None)
    if head is None:
        instead = "for an ordinary classifier use ClassifierOutputTarget"
        raise ValueError(f"{target} needs the output of a PCASVMNet; {instead}")
    return head


def _check_sign(sign: str) -> None:
    if sign not in ("+", "-"):
        raise ValueError(f"sign must be '+' or '-', got {sign!r}")


def _factor(sign: str) -> float:
    return 1.0 if sign == "+" else -1.0


def every_component(output: Any) -> Sequence[Target]:
    """Return a target for every component of an output, if it has any."""
    components = output.components if isinstance(output, HeadOutput) else None
    return () if components is None else _components(components.shape[-1])


@lru_cache(maxsize=8)
def _components(count: int) -> tuple[PCATarget, ...]:
    return tuple(PCATarget(b) for b in range(count))


def every_class(output: Any) -> Sequence[Target]:
    """Return a target for every class of an output, or for its only value."""
    if not isinstance(output, HeadOutput):
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise ValueError("jacobians needs a network that gives scores (N, C), or a PCASVMNet: use explain")
        return [ScoreTarget(category) for category in range(output.shape[-1])]
    if output.decision is None:
        return ()
    classes = output.head.classes_
    return [SVMTarget()] if classes is None else [SVMTarget(label) for label in classes.tolist()]
