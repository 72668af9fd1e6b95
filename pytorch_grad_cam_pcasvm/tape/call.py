"""Calls: the steps of a tape in the form in which their rules take them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.registry import rule_of
from pytorch_grad_cam_pcasvm.rules.rule import Rule
from pytorch_grad_cam_pcasvm.tape.tape import Ref, Step, Tape


@dataclass(frozen=True)
class Resolved:
    """A call with tensors in place of Refs, in the dtype of the gradients.

    Attributes:
        args: its arguments in the order of the rule's.
        kwargs: its other arguments.
        y: its output; of several a tuple, with None for those that have no gradient.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any


@dataclass(frozen=True)
class TokenRange:
    """Some of the tokens of a call.

    Attributes:
        dims: the dimension of the tokens in each argument; None for what all share.
        dim: their dimension in the outputs.
        start: the first.
        length: their number.
    """

    dims: Sequence[int | None]
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Call:
    """A step and its rule.

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

    @staticmethod
    def of(step: Step) -> "Call | None":
        """Return the call of a step; None if it has no rule."""
        rule = rule_of(step.function)
        if rule is None:
            return None
        args, named = step.args, dict(step.kwargs)
        for parameter in rule.parameters[len(args) :] if named else ():
            if parameter not in named:
                break
            args = (*args, named.pop(parameter))
        return Call(step, rule, args, named)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The arguments without the layer, if it is one."""
        return self.args[1:] if self.step.is_layer else self.args

    def recorded(self, tape: Tape) -> Resolved:
        """Return the call as it was recorded, for what its shapes tell; ``y`` is the first output."""
        first = next(index for index in self.step.outputs if index is not None)
        return Resolved(tape.resolved(self.args), tape.resolved(self.kwargs), tape.values[first])

    def keeps_numbers(self, tape: Tape) -> bool:
        """Return whether the step gives all of its numbers back in their order."""
        if self.rule.keeps_numbers is None:
            return False
        call = self.recorded(tape)
        return self.rule.keeps_numbers(*call.args, **call.kwargs, y=call.y)

    def resolved(
        self,
        values: Sequence[Tensor] | Mapping[int, Tensor],
        smooth: set[int],
        dtype: torch.dtype,
        tokens: TokenRange | None = None,
        like: Resolved | None = None,
    ) -> Resolved:
        """Return the call in a dtype.

        Args:
            values: of the tape, or those at a start.
            smooth: the values that have a gradient.
            dtype: of the gradients.
            tokens: those that it is for; None: all.
            like: the call as it is now, if the values are those at a start: what is the same stays the same object.
        """

        def one(item: Any, dim: int | None) -> Any:
            item = values[item.index] if isinstance(item, Ref) else item
            if tokens is not None and dim is not None and isinstance(item, Tensor):
                item = item.narrow(dim, tokens.start, tokens.length)
            return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

        def new(item: Any, here: Any, dim: int | None) -> Any:
            changed = like is None or (isinstance(item, Ref) and item.index in values)
            return one(item, dim) if changed else here

        dims = [None] * len(self.args) if tokens is None else tokens.dims
        args = zip(self.args, self.args if like is None else like.args, dims, strict=True)
        named = zip(self.kwargs.values(), (self if like is None else like).kwargs.values(), strict=True)
        kwargs = {name: _every(new, *items) for name, items in zip(self.kwargs, named, strict=True)}
        y = [
            one(Ref(index), None if tokens is None else tokens.dim) if index in smooth else None
            for index in self.step.outputs
        ]
        return Resolved(tuple(_every(new, *items) for items in args), kwargs, y[0] if self.step.single else tuple(y))


def _every(function: Callable[[Any, Any, int | None], Any], item: Any, here: Any, dim: int | None = None) -> Any:
    """Return a function of an argument, or of every item of a list."""
    if type(item) in (list, tuple):
        return type(item)(_every(function, *items) for items in zip(item, here, strict=True))
    return function(item, here, dim)


def values_in(arguments: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the Refs among arguments, also in lists and dicts, each with what is in its place in others."""
    if isinstance(arguments, Ref):
        yield (arguments, *others)
    elif isinstance(arguments, dict):
        for name, item in arguments.items():
            yield from values_in(item, *(other[name] for other in others))
    elif isinstance(arguments, list | tuple):
        lists = (other if isinstance(other, list | tuple) else [other] * len(arguments) for other in others)
        for items in zip(arguments, *lists, strict=False):
            yield from values_in(*items)
