"""A target: the value that a map explains. It can be called on the network's output and has a closed-form gradient."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm.targets.places import evaluate_place, make_place


class Target(Protocol):
    """What a map explains: called on a row of the network's output, it gives a number, a tensor without dimensions.

    Example:
        >>> def brightest(row):  # any function is one
        ...     return row.max()
        >>> ClosedFormGradCAM(backbone, ["layer2"]).explain(images, [brightest]).maps.shape
        torch.Size([2, 1, 8, 8])
    """

    def __call__(self, output: Any, /) -> Any:
        """Return the value."""


class BaseTarget:
    """What all targets of this package share.

    A target may mean another class in each image, as the predicted one. It stands for several *questions* then, each of
    which is a target that means the same in all images. Its repr is what one would type: defaults are left out.
    """

    def count_questions(self, head: Any) -> int:
        """Return the number of questions that a target stands for; 1 if it means the same in all images."""
        return 1

    def number_questions(self, output: Any) -> Tensor:
        """Return the number of each row's question, shape (N,)."""
        raise NotImplementedError

    def name_question(self, head: Any, number: int) -> "BaseTarget":
        """Return a question by its number, a target that names its classes."""
        return self

    def value_questions(self, output: Any, question_index: Tensor | None) -> Tensor:
        """Return the value of each row's question, by its number, shape (...); None: of the only one."""
        value: Tensor = self(output)  # type: ignore[operator]
        return value

    def boundary(self, head: Any) -> "BaseTarget | None":
        """Return the target whose zero is the boundary of a question; None for a value that has none."""
        return None

    def __repr__(self) -> str:
        arguments = []
        for number, field in enumerate(fields(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                typed = repr(value) if field.name == "at" else _typed(value)
                arguments.append(("" if number == 0 else f"{field.name}=") + typed)
        return f"{type(self).__name__}({', '.join(arguments)})"


class PlacedTarget(BaseTarget, ABC):
    """A target that can be about a place, where features are dense: its value there is the mean over the place."""

    at: Any = None

    def __call__(self, output: Any) -> Tensor:
        """Return the target's value: a number for a row of the output, shape (N,) for a batch.

        Of dense features, it is the mean over the place ``at``, or over all positions.
        """
        if self.at is None and getattr(output, "grid", None) is None:
            return self.value(output)
        head_of(output, self)
        return evaluate_place(self, output)

    def at_place(self, at: Any) -> Any:
        """Return the same question to another place; None: to all positions."""
        return replace(self, at=at)  # type: ignore[type-var]

    @property
    def unplaced(self) -> Any:
        """The same question without a place, as to single rows."""
        return self.at_place(None)

    @abstractmethod
    def value(self, output: Any) -> Tensor:
        """Return the value for a row, or for each row of several."""


class ClosedFormTarget(BaseTarget, ABC):
    """A target with a closed-form gradient: linear in one of the head's values, unless it defines its evaluation.

    Example:
        >>> isinstance(SVMTarget(), ClosedFormTarget)
        True
    """

    # Whether the components, or what follows them, are all that it reads.
    behind_reduction = True

    @abstractmethod
    def __call__(self, output: Any) -> Tensor:
        """Return the target's value: a number for a row of the output, shape (N,) for a batch."""

    @abstractmethod
    def seeds(self, output: Any, start: Any = None) -> dict[int, Tensor]:
        """Return the gradient, or the secant from a start of N rows, by position of the head's value.

        Its shape is (N, .), or (1, .) if it is the same for all images.
        """

    def evaluate_questions(
        self, output: Any, start: Any, question_index: Tensor | None
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Return the values of N rows, (N,), and their gradients or secants, each for its own question.

        Args:
            output: what a head computed.
            start: what it computed at a start; None: gradients.
            question_index: the number of each row's question, (N,); None: the target is its only question.

        Returns:
            Values, shape (N,), and by position of the head's value rows of shape (N, .), or (1, .).
        """
        return self.value_questions(output, question_index), self.seeds(output, start)


def head_of(output: Any, target: Any) -> Any:
    """Return the head of an output, or raise an error if it has none.

    Raises:
        ValueError: the output is not a PCASVMNet's.
    """
    # Not isinstance: softmax of a HeadOutput carries the head along too.
    head = getattr(output, "head", None)
    if head is None:
        instead = "for an ordinary classifier use ClassifierOutputTarget"
        raise ValueError(f"{target} needs the output of a PCASVMNet; {instead}")
    return head


def find_components(output: Any, target: ClosedFormTarget) -> tuple[int, Tensor]:
    """Return the position of the components, and these, (N, B), or (B,) of a row; a ValueError without a PCA."""
    head = head_of(output, target)
    if head.component_position is None:
        why = " needs a head with a PCA, but this one has none: use SVMTarget"
        if head.hides_reduction:
            pipeline = "make_pipeline(StandardScaler(), PCA(3), CalibratedClassifierCV(SVC()))"
            whole = "which is asked for its values as a whole"
            how = "and not the same one for all that decides" if head.enumerated is None else whole
            why = f": the PCA is inside a meta-estimator, {how}; put it in front, as in {pipeline}"
        raise ValueError(f"{target}{why}")
    return head.component_position, output.head_trace.values[head.component_position]


def _typed(value: Any) -> str:
    """Return a label, or labels, as one would type them."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_typed, value))}]"
    return repr(value.item() if isinstance(value, np.generic | Tensor) else value)


def check(target: Any) -> None:
    """Raise an error for an invalid sign or place, and keep the place in a form that can be compared.

    Raises:
        TypeError: the place is none.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or the place is empty.
    """
    check_sign(target.sign)
    if target.at is not None:
        object.__setattr__(target, "at", make_place(target.at))


def check_sign(sign: str) -> None:
    """Raise an error for an invalid sign.

    Raises:
        ValueError: the sign is neither ``"+"`` nor ``"-"``.
    """
    if sign not in ("+", "-"):
        raise ValueError(f"sign must be '+' or '-', got {sign!r}")


def find_sign(sign: str) -> float:
    """Return 1 or -1."""
    return 1.0 if sign == "+" else -1.0


def differentiate_rows(
    targets: Sequence[Any], rows: Sequence[Any], leaves: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Differentiate callables, one per row, on copies of small values alone.

    Args:
        targets: one callable for each row.
        rows: N rows of the output.
        leaves: what the rows are made of.

    Returns:
        Values, shape (N,), and the gradient of each leaf, of its shape.

    Raises:
        TypeError: a target is not callable, or gives no tensor.
        ValueError: a target gives more than one number, or depends on nothing that the network computed.
    """
    stacked = torch.stack([value_at(target, row) for target, row in zip(targets, rows, strict=True)])
    if not stacked.requires_grad:
        return stacked, [torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1)]
    return stacked.detach(), list(torch.autograd.grad(stacked.sum(), leaves, allow_unused=True))


def make_leaf(value: Tensor) -> Tensor:
    """Return a copy to differentiate by; a dual number's derivative along its direction stays with it."""
    primal, tangent = forward_ad.unpack_dual(value)
    leaf = primal.detach().clone().requires_grad_()
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def value_at(target: Any, row: Any) -> Tensor:
    """Return the value of a target for a row of the network's output, a tensor without dimensions."""
    if not callable(target):
        hint = f": use SVMTarget({target!r})" if isinstance(target, str | int) else ""
        raise TypeError(f"a target must be callable on a row of the network's output, got {target!r}{hint}")
    value = target(row)
    if not isinstance(value, Tensor):
        raise TypeError(f"the target {target!r} must return a tensor, but returned {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"the target {target!r} must return one number per image, but returned {value.numel()}")
    return value.reshape(())


def call_at_start(targets: Sequence[Any], rows: Sequence[Any], terms: Tensor, expected: Tensor) -> Tensor:
    """Return the values of a user's own targets at the start, (N,); refuse one that is not linear, as expected.

    Args:
        targets: one callable for each row.
        rows: N rows of the output at the start.
        terms: the size of what the expected values are sums of, shape (N,).
        expected: the values of a linear target, shape (N,).

    Returns:
        The values.

    Raises:
        ValueError: the target is not linear.
    """
    values = torch.stack([value_at(target, row) for target, row in zip(targets, rows, strict=True)])
    tolerance = max(1e-3, torch.finfo(values.dtype).eps ** 0.5)
    wrong = (values - expected).abs() > tolerance * (terms + values.abs())
    if bool(wrong.any()):
        name = _name_target(targets[int(wrong.nonzero()[0])])
        raise ValueError(
            f"{name} is not linear in the network's scores, so no map adds up to it: use "
            "SVMTarget or PCATarget, or a gradient method such as ClosedFormGradCAM"
        )
    return values


def _name_target(target: Any) -> str:
    """Return a target's name for error messages: its class, or name, where its ``repr`` is only an address."""
    if repr(target) == object.__repr__(target):
        return type(target).__name__
    return str(getattr(target, "__name__", target))
