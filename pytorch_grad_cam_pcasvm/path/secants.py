"""Secants: from the path at a start to the path at the image, step by step, with nothing left over.

For every step f there is a matrix J(x0, x) with ``J (x - x0) = f(x) - f(x0)``; a chain of them is exact again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import cotangent
from pytorch_grad_cam_pcasvm.rules.registry import unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, values_in


@dataclass(frozen=True)
class PathStart:
    """What the path computes from the activations of a start.

    Attributes:
        values: the values of the tape that depend on the target layers, by position.
        output: the output of the network, or of its feature layer, in the structure of the recorded output.
        roots: the values that it starts from: one, or one of each branch.
    """

    values: dict[int, Tensor]
    output: Any
    roots: tuple[int, ...]


def through_secant(step: Step, here: Call, base: Call, smooth: set[int], grad: Any, **options: Any) -> Any:
    """Pull a gradient back through the secant of a step.

    Args:
        step: the step.
        here: its call.
        base: its call at the start.
        smooth: the values of the tape that have a gradient, of all branches.
        grad: gradient with respect to its output, shape (K, *y.shape), or a tuple of such.
        **options: further ones of the rule.

    Returns:
        The same as a rule: the gradient of the first argument, or a tuple.

    Raises:
        NoClosedFormError: the step has no secant.
    """
    rule = step.rule
    if rule is None or rule.secant is None:
        raise NoClosedFormError(
            f"{step.name} has no secant, without which maps do not add up",
            "choose a later target layer",
            "register one with @register_jacobian(..., secant=...)",
            "use a gradient method such as ClosedFormGradCAM",
        )
    pairs = values_in((step.arguments, step.options), (here.args, here.kwargs), (base.args, base.kwargs))
    switches = [(x, x0) for ref, x, x0 in pairs if ref.index not in smooth and x is not x0]
    if not switches or rule.secant == "elementwise":
        return rule.pulled(here, grad, base, **options)
    if not rule.is_by_number:
        if all(torch.equal(x, x0) for x, x0 in switches):
            return rule.pulled(here, grad, base, **options)
        raise NoClosedFormError(
            f"an argument of {step.name} depends on the target layer through a comparison or an index, and "
            "differs at the baseline",
            "choose a later target layer",
            "use a gradient method such as ClosedFormGradCAM",
        )
    same = torch.ones_like(here.y, dtype=torch.bool)
    for x, x0 in switches:
        same &= x == x0
    pulled = rule.pulled(here, grad * same, base, **options)
    return _where_switched(step, here, base, smooth, grad * ~same, pulled)


def _where_switched(step: Step, here: Call, base: Call, smooth: set[int], grad: Tensor, pulled: Any) -> Any:
    """Add the terms that share out dy among the arguments, where the start takes another branch of a switch."""
    places = [place for place, item in enumerate(step.arguments) if isinstance(item, Ref) and item.index in smooth]
    changes = {place: here.args[place] - base.args[place] for place in places}
    size = sum((change.square() for change in changes.values()), torch.zeros_like(here.y))
    dy = here.y - base.y
    jumps = (size == 0) & (dy != 0) & (grad != 0)
    if can_sync(jumps) and bool(jumps.any()):
        raise NoClosedFormError(
            f"{step.name} jumps between the baseline and the activations: a comparison changes, but none of the "
            "numbers that it chooses between does",
            "choose a later target layer",
            "use a gradient method such as ClosedFormGradCAM",
        )
    share = torch.where(size == 0, 0.0, dy / torch.where(size == 0, 1.0, size))
    parts = list(pulled) if isinstance(pulled, tuple) else [pulled]
    for place in places:
        rest = unbroadcast(torch.where(jumps, torch.nan, grad * (share * changes[place])), here.args[place])
        parts[place] = cotangent(parts[place]).dense() + rest
    return tuple(parts)
