"""Secants: from the path at a baseline to the path at the image, step by step, with nothing left over.

For every step f there is a matrix J(x0, x) with ``J (x - x0) = f(x) - f(x0)``; a chain of them is exact again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.autodiff.rules import arithmetic
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import Base, Rule, mid, quotient, unbroadcast
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape, mapped
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError

# Their outputs are made number by number of their inputs, broadcast to one another.
BY_NUMBER = (
    arithmetic.add,
    arithmetic.sub,
    arithmetic.rsub,
    arithmetic.mul,
    arithmetic.div,
    arithmetic.rdiv,
    arithmetic.where,
    arithmetic.where_method,
    arithmetic.masked_fill,
    arithmetic.addcmul,
    arithmetic.addcdiv,
    arithmetic.lerp,
)


@dataclass(frozen=True)
class Baseline:
    """What the path computes from the activations of a baseline.

    Attributes:
        values: the values of the tape that depend on the target layer, by position.
        output: the output of the network, or of its feature layer, in the structure of the recorded output.
    """

    values: dict[int, Tensor]
    output: Any


@dataclass(frozen=True)
class Call:
    """A step in the form in which its rule is called, in the dtype of the gradients.

    Attributes:
        step: the step.
        rule: its rule.
        args: arguments that the rule takes by position, with Refs.
        kwargs: its other arguments, with Refs.
    """

    step: Step
    rule: Rule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def resolved(self, tape: Tape, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with tensors in place of Refs."""
        args, kwargs = tape.resolved(self.args), tape.resolved(self.kwargs)
        return precise(args, dtype), {name: precise(argument, dtype) for name, argument in kwargs.items()}

    def pull(self, args: Any, kwargs: Mapping[str, Any], y: Any, grad: Any) -> Any:
        """Return the rule's result."""
        return self.rule.pull(*args, **kwargs, y=y, grad=grad)


def through_secant(
    tape: Tape, call: Call, grad: Any, dtype: torch.dtype, smooth: set[int], values: Mapping[int, Tensor]
) -> Any:
    """Pull a gradient back through the secant of a step.

    Args:
        tape: the path.
        call: the step.
        grad: gradient with respect to its output, shape (K, *y.shape), or a tuple of such.
        dtype: dtype of the gradients.
        smooth: the values of the tape that have a gradient.
        values: the values at the baseline.

    Returns:
        The same as a rule: the gradient of the first argument, or a tuple.

    Raises:
        NoClosedFormError: the step has no secant.
    """
    step, rule = call.step, call.rule
    if rule.secant is None:
        raise NoClosedFormError(
            f"{step.name} has no secant, without which maps do not add up",
            "choose a later target layer",
            "register one with @register_jacobian(..., secant=...)",
            "use a gradient method such as ClosedFormGradCAM",
        )
    args, kwargs = call.resolved(tape, dtype)
    args0, kwargs0 = (_at(given, now, values, dtype) for given, now in ((call.args, args), (call.kwargs, kwargs)))
    y, y0 = (outputs_of(step, found, smooth, dtype) for found in (tape.values, values))
    floats = [tape.values[i].dtype for i in (*step.inputs, *step.outputs) if i is not None and i in smooth]
    base = Base(args0, kwargs0, y0, max(torch.finfo(each).eps for each in floats))
    pull = partial(_pulled, call, smooth, args, kwargs, y, base)
    changed = [
        index
        for index in dict.fromkeys(step.inputs)
        if index in values and index not in smooth and not torch.equal(values[index], tape.values[index])
    ]
    if not changed or rule.secant == "elementwise":
        return pull(grad)
    if rule.pull not in BY_NUMBER:
        raise NoClosedFormError(
            f"an argument of {step.name} depends on the target layer through a comparison or an index, and differs at "
            "the baseline",
            "choose a later target layer",
            "use a gradient method such as ClosedFormGradCAM",
        )
    same = torch.ones_like(y, dtype=torch.bool)
    for index in changed:
        same &= tape.values[index] == values[index]
    return _where_switched(step, call.args, smooth, args, y, base, grad * ~same, pull(grad * same))


def _pulled(call: Call, smooth: set[int], args: Any, kwargs: Any, y: Any, base: Base, grad: Any) -> Any:
    secant = call.rule.secant
    if callable(secant):
        return secant(*args, **kwargs, y=y, grad=grad, base=base)
    if secant == "elementwise":
        position = int(isinstance(call.step.function, type))
        slope = call.pull(args, kwargs, y, torch.ones_like(y).unsqueeze(0))
        slope = slope[0] if isinstance(slope, tuple) else slope
        slope = slope() if callable(slope) else slope
        return grad * quotient(args[position], y, base, base.args[position], slope[0])
    if sum(index in smooth for index in call.step.inputs) == 1:
        return call.pull(args, kwargs, y, grad)  # affine in the one argument that changes: the same everywhere
    # Affine in each argument alone: what changes with one is to be taken where the others are half-way.
    half_way = tuple(_half_way(*each, smooth) for each in zip(call.args, args, base.args, strict=True))
    named = {name: _half_way(call.kwargs[name], kwargs[name], base.kwargs[name], smooth) for name in kwargs}
    middle = tuple(mid(*pair) for pair in zip(y, base.y, strict=True)) if isinstance(y, tuple) else mid(y, base.y)
    return call.pull(half_way, named, middle, grad)


def _where_switched(
    step: Step, given: Sequence[Any], smooth: set[int], args: Any, y: Tensor, base: Base, grad: Tensor, pulled: Any
) -> Any:
    """Add, where a switch is another one at the baseline, what shares dy out among the arguments that change."""
    places = [place for place, item in enumerate(given) if isinstance(item, Ref) and item.index in smooth]
    changes = {place: args[place] - base.args[place] for place in places}
    size = sum((change.square() for change in changes.values()), torch.zeros_like(y))
    dy = y - base.y
    if bool(((size == 0) & (dy != 0) & (grad != 0).any(0)).any()):
        raise NoClosedFormError(
            f"{step.name} jumps between the baseline and the activations: a comparison changes, but none of the "
            "numbers that it chooses between does",
            "choose a later target layer",
            "use a gradient method such as ClosedFormGradCAM",
        )
    share = torch.where(size == 0, 0.0, dy / torch.where(size == 0, 1.0, size))
    parts = list(pulled) if isinstance(pulled, tuple) else [pulled]
    for place in places:
        part = parts[place]
        parts[place] = (part() if callable(part) else part) + unbroadcast(grad * (share * changes[place]), args[place])
    return tuple(parts)


def _at(given: Any, now: Any, values: Mapping[int, Tensor], dtype: torch.dtype) -> Any:
    """Return arguments at the baseline; those that are the same there stay the same objects."""
    if isinstance(given, Ref):
        return precise(values[given.index], dtype) if given.index in values else now
    if isinstance(given, Mapping):
        return {name: _at(item, now[name], values, dtype) for name, item in given.items()}
    if type(given) in (list, tuple) and given:
        return type(given)(_at(*pair, values, dtype) for pair in zip(given, now, strict=True))
    return now


def _half_way(given: Any, now: Any, then: Any, smooth: set[int]) -> Any:
    """Return arguments at the midpoint of what they are now, and of what they are at the baseline."""
    if type(given) in (list, tuple):
        return type(given)(_half_way(*each, smooth) for each in zip(given, now, then, strict=True))
    return mid(now, then) if isinstance(given, Ref) and given.index in smooth else now


def outputs_of(step: Step, values: Any, smooth: set[int], dtype: torch.dtype) -> Any:
    """Return the output of a step, or a tuple of them with None for those that have no gradient."""
    y = tuple(values[index].to(dtype) if index in smooth else None for index in step.outputs)
    return y[0] if step.single else y


def precise(item: Any, dtype: torch.dtype) -> Any:
    """Return the arguments of a call with floating-point tensors in the dtype of the gradient."""
    return mapped(item, lambda part: part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part)
