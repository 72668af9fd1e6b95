"""A step: one recorded call, with its rule and with its arguments in the order in which the rule takes them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from pytorch_grad_cam_pcasvm.rules.registry import find_rule
from pytorch_grad_cam_pcasvm.rules.rule import Call, Rule


@dataclass(frozen=True)
class Ref:
    """Stands for a value of the tape in the arguments of a step."""

    index: int


@dataclass(frozen=True)
class TokenRange:
    """Some of the tokens of a step.

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


@dataclass(slots=True, eq=False)
class Step:
    """One recorded call.

    Attributes:
        function: an operation of torch's dispatcher, or what has a rule as a whole: a function, an
            ``autograd.Function``, the registered class of a layer.
        args: its arguments, a :class:`Ref` for every value of the tape; for a layer, the layer and its inputs.
        kwargs: its keyword arguments, likewise.
        inputs: the values of the tape among the arguments.
        outputs: the values that it returned; None for an output that is not a tensor.
        single: whether it returned one tensor, not several.
        inplace: whether it wrote into its arguments, as only what has a rule as a whole may.
        where: the module that called it.
        several: whether a layer was called with several arguments, which are then in a tuple.
        autocast: the dtype of autocast, if it ran under that.
        rule: its rule; None: it has none.
        arguments: those that its rule takes by position.
        options: its other arguments.
        is_layer: whether it is a layer with a rule of its own.
        operands: the arguments without the layer, if it is one.
        first: the first of these; None: there is none.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...] = ()
    single: bool = True
    inplace: bool = False
    where: nn.Module | None = None
    several: bool = False
    autocast: torch.dtype | None = None
    rule: Rule | None = field(init=False)
    arguments: tuple[Any, ...] = field(init=False)
    options: dict[str, Any] = field(init=False)
    is_layer: bool = field(init=False)
    operands: tuple[Any, ...] = field(init=False)
    first: Any = field(init=False)

    def __post_init__(self) -> None:
        """Look up the rule, and arrange the arguments for it."""
        self.rule = find_rule(self.function)
        self.arguments, self.options = self.args, self.kwargs
        if self.rule is not None and self.kwargs:
            self.options = dict(self.kwargs)
            for parameter in self.rule.parameters[len(self.args) :]:
                if parameter not in self.options:
                    break
                self.arguments = (*self.arguments, self.options.pop(parameter))
        self.is_layer = isinstance(self.function, type) and issubclass(self.function, nn.Module)
        self.operands = self.arguments[1:] if self.is_layer else self.arguments
        self.first = self.operands[0] if self.operands else None

    @property
    def name(self) -> str:
        """Name of the operation, as in ``"aten.relu"``, or of the function or class."""
        if isinstance(self.function, OpOverload):
            return str(self.function.overloadpacket)
        return getattr(self.function, "__name__", str(self.function))

    @property
    def output(self) -> int:
        """The value of a step that returned only one."""
        (index,) = self.outputs
        assert index is not None
        return index

    def with_arguments(self, function: Callable[[Any], Any]) -> "Step":
        """Return the same step with a function of every argument in its place."""
        kwargs = {name: mapped(item, function) for name, item in self.kwargs.items()}
        return replace(self, args=mapped(self.args, function), kwargs=kwargs)

    def resolve(
        self,
        values: Sequence[Tensor] | Mapping[int, Tensor],
        smooth: set[int],
        dtype: torch.dtype,
        tokens: TokenRange | None = None,
        like: Call | None = None,
    ) -> Call:
        """Return the call with numbers, in the dtype of gradients.

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

        dims = [None] * len(self.arguments) if tokens is None else tokens.dims
        places = zip(self.arguments, self.arguments if like is None else like.args, dims, strict=True)
        others = (self.options if like is None else like.kwargs).values()
        kwargs = {
            name: _every(new, item, here) for (name, item), here in zip(self.options.items(), others, strict=True)
        }
        y = [
            one(Ref(index), None if tokens is None else tokens.dim) if index in smooth else None
            for index in self.outputs
        ]
        args = tuple(_every(new, *items) for items in places)
        eps = 0.0
        if like is not None:
            floats = [values[index].dtype for index in (*self.inputs, *self.outputs) if index in smooth]  # type: ignore[index]
            eps = max((torch.finfo(precision).eps for precision in floats), default=0.0)
        return Call(args, kwargs, y[0] if self.single else tuple(y), eps)


def _every(function: Callable[[Any, Any, int | None], Any], item: Any, here: Any, dim: int | None = None) -> Any:
    """Return a function of an argument, or of every item of a list."""
    if type(item) in (list, tuple):
        return type(item)(_every(function, *items) for items in zip(item, here, strict=True))
    return function(item, here, dim)


def mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with its tensors and Refs replaced, in lists and tuples, too."""
    if not isinstance(item, list | tuple):
        return function(item)
    parts = [mapped(part, function) if isinstance(part, list | tuple) else function(part) for part in item]
    return parts if type(item) is list else tuple(parts)  # torch.Size and named tuples, too


def values_in(arguments: Any, *others: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the Refs among arguments, also in lists and dicts, each with its counterparts in other arguments."""
    if isinstance(arguments, Ref):
        yield (arguments, *others)
    elif isinstance(arguments, dict):
        for name, item in arguments.items():
            yield from values_in(item, *(other[name] for other in others))
    elif isinstance(arguments, list | tuple):
        lists = (other if isinstance(other, list | tuple) else [other] * len(arguments) for other in others)
        for items in zip(arguments, *lists, strict=False):
            yield from values_in(*items)
