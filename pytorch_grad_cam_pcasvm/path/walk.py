"""The walk back along a tape, one rule or one secant a step."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.path.secants import Baseline, Call, outputs_of, through_secant
from pytorch_grad_cam_pcasvm.path.tape import Ref, Step, Tape
from pytorch_grad_cam_pcasvm.rules.registry import Rule, rule_of


def pulled_back(tape: Tape, seeds: Sequence[Tensor | None], root: int, baseline: Baseline | None = None) -> Tensor:
    """Pull seeds back from the output of a tape to one of its values, through secants from a baseline if there is one.

    Returns:
        The derivative or its secant, shape (K, *value.shape).
    """
    tape.check_constants()
    steps, values = tape.following(root)
    grads: dict[int, Tensor] = {}
    for index, seed in zip(tape.outputs, seeds, strict=True):
        if index in values and seed is not None:
            _add(grads, index, seed)
    given = next(seed for seed in seeds if seed is not None)
    for step in reversed(steps):
        outputs = [None if output is None else grads.pop(output, None) for output in step.outputs]
        if any(output is not None for output in outputs):
            _pull(tape, step, outputs, values, grads, baseline)
    if root not in grads:  # what follows does not look at it
        return given.new_zeros(len(given), *tape.values[root].shape)
    return grads[root]


def _pull(
    tape: Tape,
    step: Step,
    outputs: list[Tensor | None],
    values: set[int],
    grads: dict[int, Tensor],
    baseline: Baseline | None,
) -> None:
    """Pull the gradients of a step's outputs back to its inputs, and add them to ``grads``."""
    rule = rule_of(step.function)
    if rule is None:
        raise _no_rule(step)
    ways = advice if baseline is None else _as_given  # autograd knows no secants
    like = next(output for output in outputs if output is not None)
    args, kwargs = arguments(rule, step.args, step.kwargs)
    call, grad = Call(step, rule, args, kwargs), outputs[0] if step.single else tuple(outputs)
    try:
        if baseline is None:
            y = outputs_of(step, tape.values, values, like.dtype)
            pulled = call.pull(*call.resolved(tape, like.dtype), y, grad)
        else:
            pulled = through_secant(tape, call, grad, like.dtype, values, baseline.values)
    except NoClosedFormError as error:
        raise NoClosedFormError(*ways(f"{_at(step)}{error.reason}", *error.ways_out)) from None
    except TypeError as error:
        raise NoClosedFormError(*ways(f"{_at(step)}the call of {step.name} is not understood ({error})")) from error
    if isinstance(step.function, type):
        args, pulled = args[1:], (pulled,)
    elif not isinstance(pulled, tuple):
        pulled = (pulled,)
    for argument, part in zip(args, pulled, strict=False):
        _give(tape, step, argument, part, values, grads, len(like))
    for argument in (*args[len(pulled) :], *kwargs.values()):
        if any(_leads(argument, index) for index in step.inputs if index in values):
            raise NoClosedFormError(
                *ways(
                    f"{_at(step)}an argument of {step.name} depends on the target layer, and its rule has no gradient "
                    "for it (a weight that is computed?)",
                    "choose a later target layer",
                )
            )


def _give(
    tape: Tape, step: Step, argument: Any, part: Any, values: set[int], grads: dict[int, Tensor], count: int
) -> None:
    """Add the gradient of one argument, a value of the tape or a list of such."""
    if isinstance(argument, list | tuple):
        if any(_leads(argument, index) for index in step.inputs if index in values):
            for item, of_item in zip(argument, part, strict=True):
                _give(tape, step, item, of_item, values, grads, count)
    elif isinstance(argument, Ref) and argument.index in values and part is not None:
        part = part() if callable(part) else part
        expected = (count, *tape.values[argument.index].shape)
        if not isinstance(part, Tensor) or part.shape != expected:
            shape = tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise NoClosedFormError(*advice(f"{_at(step)}the rule of {step.name} gives {shape}, not {expected}"))
        _add(grads, argument.index, part)


def _add(grads: dict[int, Tensor], index: int, part: Tensor) -> None:
    grads[index] = grads[index] + part if index in grads else part


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
    """Return what NoClosedFormError takes, with the way out that every path has."""
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
