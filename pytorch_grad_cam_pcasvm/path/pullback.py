"""The closed form: a tape walked backwards, one rule a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.path.record import Ref, Step, Tape
from pytorch_grad_cam_pcasvm.path.sums import through_sums
from pytorch_grad_cam_pcasvm.rules.registry import Rule, rule_of


class Pass(Protocol):
    """One forward pass, ready for pullbacks.

    Attributes:
        activations: outputs of the target layers, (N, T, ...) each.
        output: what the network, or its feature layer, gave.
    """

    activations: list[Tensor]
    output: Any

    def pullback(self, seeds: Sequence[Tensor | None], target: int) -> Tensor:
        """Return the derivative of K targets with respect to ``activations[target]``.

        Args:
            seeds: for every tensor of the output the targets' derivatives with respect to it, of shape (K, *its shape),
                or None.
            target: position of the target layer.

        Returns:
            The derivative, shape (K, *activations.shape).
        """

    def weights(self, seeds: Sequence[Tensor | None], target: int) -> Tensor:
        """Return the sum of ``pullback`` over the positions of every channel, shape (K, N, T)."""

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch."""


@dataclass
class ClosedFormPass:
    """The pass of a tape."""

    tape: Tape
    names: Sequence[str]
    activations: list[Tensor] = field(init=False)
    output: Any = field(init=False)

    def __post_init__(self) -> None:
        """Look up the activations."""
        self.activations = [self.tape.values[self.tape.roots[name]] for name in self.names]
        self.output = self.tape.output

    def pullback(self, seeds: Sequence[Tensor | None], target: int) -> Tensor:
        """Return the derivative with respect to ``activations[target]``, shape (K, *activations.shape)."""
        return pulled_back(self.tape, seeds, self.tape.roots[self.names[target]])

    def weights(self, seeds: Sequence[Tensor | None], target: int) -> Tensor:
        """Return the sum of the pullback over the positions of every channel, shape (K, N, T).

        Steps that keep such sums (flatten, pooling) are passed without a pullback, and the sum moves into the weight of
        a first dense layer: W1 (D1, T H W) becomes (D1, T).
        """
        tape, value = self.tape, self.tape.roots[self.names[target]]
        steps, _ = tape.following(value)
        rows, channels = tape.values[value].shape[:2]
        while value not in tape.outputs:
            users = [step for step in steps if value in step.inputs]
            if len(users) != 1 or not users[0].single or _first(users[0]) != Ref(value):
                break
            step, shape = users[0], tape.values[value].shape
            if step.function is F.linear and len(shape) == 2:
                grad = pulled_back(tape, seeds, _output(step))
                weight = tape.resolved(step.args[1] if len(step.args) > 1 else step.kwargs["weight"])
                return through_sums(grad, weight, channels)
            after = tape.values[_output(step)].shape
            if after[:2] != (rows, channels) and not (len(after) == 2 and after[0] == rows and shape[0] == rows):
                break
            if not _keeps_sums(tape, step):
                break
            value = _output(step)
        grad = pulled_back(tape, seeds, value)
        return grad.reshape(len(grad), rows, channels, -1).sum(-1)

    def bytes_per_target(self) -> int:
        """Return about how much memory one target takes for the batch: a few times the widest value of the path."""
        return 4 * max(value.numel() * max(4, value.element_size()) for value in self.tape.values)


def pulled_back(tape: Tape, seeds: Sequence[Tensor | None], root: int) -> Tensor:
    """Pull seeds back from the output of a tape to one of its values: (K, *value.shape)."""
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
            _pull(tape, step, outputs, values, grads)
    if root not in grads:  # what follows does not look at it
        return given.new_zeros(len(given), *tape.values[root].shape)
    return grads[root]


def _pull(tape: Tape, step: Step, outputs: list[Tensor | None], values: set[int], grads: dict[int, Tensor]) -> None:
    """Pull the gradients of a step's outputs back to its inputs, and add them to ``grads``."""
    rule = rule_of(step.function)
    if rule is None:
        raise _no_rule(step)
    like = next(output for output in outputs if output is not None)
    args, kwargs = _arguments(rule, step.args, step.kwargs)
    y = tuple(None if output is None else tape.values[output].to(like.dtype) for output in step.outputs)
    positional, named = _precise(tape.resolved((args, tuple(kwargs.values()))), like.dtype)
    try:
        pulled = rule.pull(
            *positional,
            **dict(zip(kwargs, named, strict=True)),
            y=y[0] if step.single else y,
            grad=outputs[0] if step.single else tuple(outputs),
        )
    except NoClosedFormError as error:
        raise NoClosedFormError(*advice(f"{_at(step)}{error.reason}", *error.ways_out)) from None
    except TypeError as error:
        raise NoClosedFormError(*advice(f"{_at(step)}the call of {step.name} is not understood ({error})")) from error
    if isinstance(step.function, type):
        args, pulled = args[1:], (pulled,)
    elif not isinstance(pulled, tuple):
        pulled = (pulled,)
    for argument, part in zip(args, pulled, strict=False):
        _give(tape, step, argument, part, values, grads, len(like))
    for argument in (*args[len(pulled) :], *kwargs.values()):
        if any(_leads(argument, index) for index in step.inputs if index in values):
            raise NoClosedFormError(
                *advice(
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
        if any(_leads(argument, index) for index in step.inputs):
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


def _arguments(rule: Rule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with those that the rule takes by position in their places."""
    if not kwargs:
        return args, {}
    named = {_ALIASES.get(name, name): value for name, value in kwargs.items()}
    for parameter in rule.parameters[len(args) :]:
        if parameter not in named:
            break
        args = (*args, named.pop(parameter))
    return args, named


def _precise(item: Any, dtype: torch.dtype) -> Any:
    """Return the arguments of a call with floating-point tensors in the dtype of the gradient."""
    if isinstance(item, Tensor):
        return item.to(dtype) if item.is_floating_point() else item
    if type(item) in (list, tuple):
        return type(item)(_precise(part, dtype) for part in item)
    return item


def _keeps_sums(tape: Tape, step: Step) -> bool:
    rule = rule_of(step.function)
    if rule is None:
        return False
    args, kwargs = _arguments(rule, step.args, step.kwargs)
    args, kwargs = tape.resolved(args), {name: tape.resolved(value) for name, value in kwargs.items()}
    return rule.keeps_sums(*args, **kwargs, y=tape.values[_output(step)])


def _first(step: Step) -> Any:
    """Return the first argument of a call; of a layer, what it was called with."""
    args = step.args[1:] if isinstance(step.function, type) else step.args
    return args[0] if args else None


def _output(step: Step) -> int:
    index = step.outputs[0]
    assert index is not None
    return index


def _leads(argument: Any, index: int) -> bool:
    if isinstance(argument, list | tuple):
        return any(_leads(item, index) for item in argument)
    return isinstance(argument, Ref) and argument.index == index


def _at(step: Step) -> str:
    return f"in {step.where!r}: " if step.where else ""


def advice(reason: str, *ways_out: str) -> list[str]:
    """Return what NoClosedFormError takes, with the way out that every path has."""
    return [reason, *ways_out, "pass jacobian='auto' to use autograd on the path"]


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
