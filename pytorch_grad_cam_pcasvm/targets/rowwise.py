"""Rowwise: one target per image; and targets called on rows of a network's output, which are differentiated there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm.targets.places import OfImages
from pytorch_grad_cam_pcasvm.targets.target import ClosedFormTarget, Target


@dataclass(frozen=True, eq=False)
class Rowwise:
    """One target per image, instead of one target for all images."""

    targets: list[Target]

    def __repr__(self) -> str:
        return ", ".join(dict.fromkeys(map(repr, self.targets)))


def target_at(target: Any, image: int) -> Any:
    """Return the target of one image."""
    target = target.targets[image] if isinstance(target, Rowwise) else target
    at = getattr(target, "at", None)
    return target.at_place(at.places[image]) if isinstance(at, OfImages) else target


def is_closed_form(target: Any) -> bool:
    """Return whether every target, also of a Rowwise, has a closed-form gradient by components or the decision."""
    targets = target.targets if isinstance(target, Rowwise) else [target]
    return all(isinstance(t, ClosedFormTarget) and t.behind_reduction for t in targets)


def differentiated(
    target: Target | Rowwise, rows: Sequence[Any], leaves: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Differentiate callables, one per row, on copies of small values alone.

    Args:
        target: one callable for all rows, or one for each.
        rows: N rows of the output.
        leaves: what the rows are made of.

    Returns:
        Values, shape (N,), and the gradient of each leaf, of its shape.

    Raises:
        TypeError: a target is not callable, or gives no tensor.
        ValueError: a target gives more than one number, or depends on nothing that the network computed.
    """
    stacked = torch.stack([value_at(target_at(target, image), row) for image, row in enumerate(rows)])
    if not stacked.requires_grad:
        return stacked, [torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1)]
    return stacked.detach(), list(torch.autograd.grad(stacked.sum(), leaves, allow_unused=True))


def leaf_of(value: Tensor) -> Tensor:
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


def called_at_start(target: Any, rows: Sequence[Any], terms: Tensor, expected: Tensor) -> Tensor:
    """Return the values of a user's own target at the start, (N,); refuse one that is not linear, as expected.

    Args:
        target: a callable for all rows, or a :class:`Rowwise`.
        rows: N rows of the output at the start.
        terms: the size of what the expected values are sums of, shape (N,).
        expected: the values of a linear target, shape (N,).

    Returns:
        The values.

    Raises:
        ValueError: the target is not linear.
    """
    values = torch.stack([value_at(target_at(target, image), row) for image, row in enumerate(rows)])
    tolerance = max(1e-3, torch.finfo(values.dtype).eps ** 0.5)
    wrong = (values - expected).abs() > tolerance * (terms + values.abs())
    if bool(wrong.any()):
        name = _name_of(target_at(target, int(wrong.nonzero()[0])))
        raise ValueError(
            f"{name} is not linear in the network's scores, so no map adds up to it: use "
            "SVMTarget or PCATarget, or a gradient method such as ClosedFormGradCAM"
        )
    return values


def _name_of(target: Any) -> str:
    """Return how a message calls a target: by its class, or name, where its ``repr`` is only an address."""
    if repr(target) == object.__repr__(target):
        return type(target).__name__
    return str(getattr(target, "__name__", target))
