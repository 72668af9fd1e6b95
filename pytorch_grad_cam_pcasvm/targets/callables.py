"""Callables: targets that are called on rows of a network's output, and differentiated there."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


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
