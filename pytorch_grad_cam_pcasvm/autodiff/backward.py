"""The walk back along a tape, one rule or one secant a step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import Outer, Rule, rule_of
from pytorch_grad_cam_pcasvm.autodiff.secants import Baseline, Call, outputs_of, through_secant
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape
from pytorch_grad_cam_pcasvm.autodiff.token_dims import (
    Part,
    added,
    cut,
    dims_of_arguments,
    selected,
    whole,
)
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError


def pulled_back(
    tape: Tape, seeds: Sequence[Tensor | None], root: int, baseline: Baseline | None = None, *, heads: bool = False
) -> Tensor:
    """Pull seeds back from the output of a tape to one of its values, through secants from a baseline if there is one.

    Args:
        tape: the path.
        seeds: of K targets.
        root: the value.
        baseline: of secants; None: gradients.
        heads: keep the heads of the first attention apart, as so many targets in place of each.

    Returns:
        The derivative or its secant, shape (K, *value.shape).
    """
    walk = Walk(tape, root, baseline, heads=heads)
    walk.back(seeds)
    if root not in walk.grads:  # what follows does not look at it
        given = next(seed for seed in seeds if seed is not None)
        return given.new_zeros(walk.count, *tape.values[root].shape)
    return whole(walk.grads[root])


class Walk:
    """One walk: gradients of values that have been reached, by position."""

    def __init__(self, tape: Tape, root: int, baseline: Baseline | None, *, heads: bool = False) -> None:
        tape.check_constants()
        self.tape, self.baseline = tape, baseline
        self.steps, self.values = tape.following(root)
        self.grads: dict[int, Tensor | Part] = {}
        self.attention = self._first_attention() if heads else None

    def back(self, seeds: Sequence[Tensor | None]) -> None:
        """Walk all the way, from the gradients of the outputs."""
        self.count = next(len(seed) for seed in seeds if seed is not None)
        for index, seed in zip(self.tape.outputs, seeds, strict=True):
            if index in self.values and seed is not None:
                self.give(index, seed)
        for step in reversed(self.steps):
            outputs = [None if output is None else self.grads.pop(output, None) for output in step.outputs]
            if any(output is not None for output in outputs):
                self.pull(step, outputs)

    def _first_attention(self) -> Step:
        for step in self.steps:
            if step.function is F.scaled_dot_product_attention:
                return step
        written_out = any(getattr(step.function, "__name__", "") == "softmax" for step in self.steps)
        way = "load Hugging Face models with attn_implementation='sdpa'; for timm's Swin set TIMM_FUSED_ATTN=2"
        raise NoClosedFormError(
            "heads can be separated in torch's scaled_dot_product_attention only, and there is none after the target "
            "layer",
            way if written_out else "choose the norm before an attention",
            "leave heads=False",
        )

    def waiting(self) -> bool:
        """Whether anything has a gradient that is not on its way through a step."""
        return bool(self.grads)

    def _apart(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the gradients of attention's arguments, head by head: K targets become K times as many."""
        if self.waiting():
            raise NoClosedFormError(
                "not everything after the target layer goes through one attention whose heads could be separated",
                "choose the norm before the attention of the last block",
            )
        assert self.attention is not None
        shape = self.tape.values[self.attention.output].shape
        if len(shape) != 4:
            raise NoClosedFormError(
                f"heads and images cannot be told apart in attention's output {tuple(shape)}", "leave heads=False"
            )
        heads = shape[-3]
        self.count *= heads

        def split(grad: Tensor) -> Tensor:
            chosen = torch.eye(heads, dtype=grad.dtype, device=grad.device)[:, None, :, None, None]
            return (grad.unsqueeze(1) * chosen).flatten(0, 1)

        def each(part: Any) -> Any:
            if isinstance(part, Part):
                whole = part.grad
                return replace(part, make=lambda: split(whole))
            return None if part is None else split(part() if callable(part) else part)

        return tuple(map(each, found[:3]))

    def give(self, index: int, part: Any) -> None:
        """Take the gradient of a value, or what gives it when it is called."""
        part = part() if callable(part) else part
        self.grads[index] = added(self.grads[index], part) if index in self.grads else part

    def pull(self, step: Step, outputs: list[Any]) -> None:
        """Pull the gradients of a step's outputs back to its inputs."""
        rule = rule_of(step.function)
        if rule is None:
            raise _no_rule(step)
        args, kwargs = arguments(rule, step.args, step.kwargs)
        if step.single:
            (grad,) = outputs
            if isinstance(grad, Tensor) and rule.secant == "linear":
                part = selected(self.tape, step, grad)
                if part is not None:
                    self.give(step.inputs[0], part)
                    return
            if isinstance(grad, Part) and not any(isinstance(item, Ref | Tensor) for item in kwargs.values()):
                dims = dims_of_arguments(self.tape, step, rule, args, grad.dim)
                if dims is not None:
                    place = grad.dim, grad.start, grad.length
                    self.pull_at(step, rule, args, kwargs, [grad.grad], dims, place)
                    return
        outputs = [None if output is None else whole(output) for output in outputs]
        values = None if self.baseline is None else self.baseline.values
        self._hand_out(step, args, kwargs, _pulled(self.tape, step, rule, args, kwargs, outputs, values, self.values))

    def pull_at(
        self,
        step: Step,
        rule: Rule,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Any],
        dims: list[int | None],
        place: tuple[int, int, int],
    ) -> None:
        """Pull back the gradients of some tokens of a step's outputs."""
        values = None if self.baseline is None else self.baseline.values
        tape, few, given, then, smooth = cut(self.tape, step, args, dims, place, values, self.values)
        found = _pulled(tape, few, rule, given, kwargs, outputs, None if values is None else then, smooth)

        def placed(part: Any, argument: Any, dim: int | None) -> Any:
            if part is None or dim is None or not isinstance(argument, Ref):
                return part
            # One that nobody asks for, as that of a class token in a sum over patches, need not be computed.
            size = self.tape.values[argument.index].shape[dim]
            return Part(part if callable(part) else lambda: part, dim, place[1], place[2], size)

        self._hand_out(step, args, kwargs, tuple(map(placed, found, args, dims)))

    def _hand_out(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[Any, ...]) -> None:
        """Give every argument its gradient."""
        if step is self.attention:
            found = self._apart(found)
        args = args[1:] if isinstance(step.function, type) else args
        for argument, part in zip(args, found, strict=False):
            self._give(step, argument, part)
        for argument in (*args[len(found) :], *kwargs.values()):
            if any(_leads(argument, index) for index in step.inputs if index in self.values):
                raise NoClosedFormError(
                    *(advice if self.baseline is None else _as_given)(
                        f"{_at(step)}an argument of {step.name} depends on the target layer, and its rule has no "
                        "gradient for it (a computed weight?)",
                        "choose a later target layer",
                    )
                )

    def _give(self, step: Step, argument: Any, part: Any) -> None:
        """Give an argument, a value of the tape or a list of such, its gradient."""
        if isinstance(argument, list | tuple):
            if any(_leads(argument, index) for index in step.inputs if index in self.values):
                for item, of_item in zip(argument, part, strict=True):
                    self._give(step, item, of_item)
        elif isinstance(argument, Ref) and argument.index in self.values and part is not None:
            self.give(argument.index, self._checked(step, argument, part))

    def _checked(self, step: Step, argument: Ref, part: Any) -> Any:
        """Return the gradient of an argument; refuse one of another shape."""
        if isinstance(part, Outer | Part):
            return part
        part = part() if callable(part) else part
        expected = (self.count, *self.tape.values[argument.index].shape)
        if not isinstance(part, Tensor) or part.shape != expected:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise NoClosedFormError(*advice(f"{_at(step)}the rule of {step.name} returns {shape}, not {expected}"))
        return part


def _pulled(
    tape: Tape,
    step: Step,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: list[Any],
    at_baseline: Mapping[int, Tensor] | None,
    smooth: set[int],
) -> tuple[Any, ...]:
    """Return what the rule of a step, or its secant, gives for its arguments."""
    ways = advice if at_baseline is None else _as_given  # autograd knows no secants
    like = next(output for output in outputs if output is not None)
    call, grad = Call(step, rule, args, kwargs), outputs[0] if step.single else tuple(outputs)
    try:
        if at_baseline is None:
            y = outputs_of(step, tape.values, smooth, like.dtype)
            pulled = call.pull(*call.resolved(tape, like.dtype), y, grad)
        else:
            pulled = through_secant(tape, call, grad, like.dtype, smooth, at_baseline)
    except NoClosedFormError as error:
        raise NoClosedFormError(*ways(f"{_at(step)}{error.reason}", *error.ways_out)) from None
    except TypeError as error:
        raise NoClosedFormError(*ways(f"{_at(step)}the call of {step.name} is not understood ({error})")) from error
    return pulled if isinstance(pulled, tuple) and not isinstance(step.function, type) else (pulled,)


# What torch calls the same thing elsewhere, in the manner of numpy.
_ALIASES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "axis0": "dim0",
    "axis1": "dim1",
    "x": "input",
    "x1": "input",
    "x2": "other",
}


def arguments(rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with those that the rule takes by position in their places."""
    if not kwargs:
        return args, {}
    named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    for parameter in rule.parameters[len(args) :]:
        if parameter not in named:
            break
        args = (*args, named.pop(parameter))
    return args, named


def _leads(argument: Any, index: int) -> bool:
    if isinstance(argument, list | tuple):
        return any(_leads(item, index) for item in argument)
    return isinstance(argument, Ref) and argument.index == index


def _at(step: Step) -> str:
    return f"in {step.where!r}: " if step.where else ""


def advice(reason: str, *ways_out: str) -> list[str]:
    """Return the arguments of a NoClosedFormError, with the way out that every path has."""
    return [reason, *ways_out, "pass jacobian='auto' to use autograd on the path"]


def _as_given(*words: str) -> list[str]:
    return list(words)


def _no_rule(step: Step) -> NoClosedFormError:
    layer = f" of {step.where!r}" if step.where else ""
    return NoClosedFormError(
        *advice(
            f"the path from the target layer to the features goes through {step.name}{layer}, which has no closed-form "
            "rule",
            "choose a later target layer",
            "register its Jacobian with @register_jacobian",
        )
    )
