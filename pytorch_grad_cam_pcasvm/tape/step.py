"""A step: one recorded call, with its rule and with its arguments in the order in which the rule takes them."""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import repeat
from types import FrameType
from typing import Any

import torch
import torchvision  # noqa: F401 - registers its operations
from torch import Tensor, nn
from torch.autograd.function import Function

from pytorch_grad_cam_pcasvm.rules.indexing import take
from pytorch_grad_cam_pcasvm.rules.registry import find_rule
from pytorch_grad_cam_pcasvm.rules.rule import Call, Rule
from pytorch_grad_cam_pcasvm.runtime.errors import refuse
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    BACKWARD_HOOK_CODE,
    MODULE_CALL_CODE,
    BackwardHookFunction,
    OpOverload,
    has_kernel,
)

aten = torch.ops.aten
# What depends on shape, dtype and device alone.
_DIFFERENTIABLE = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
_OF_SHAPE = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "is_same_size", "result_type"),
    *("size", "stride", "numel", "dim", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "device", "layout", "dtype"),
}

# Beside those that torch tags so.
_SIZED = {"nonzero_numpy", "where", "repeat_interleave", "tensor_split", "_pack_padded_sequence"}
_SIZED |= {"values", "indices", "_values", "_indices", "col_indices", "row_indices"}  # of sparse tensors


@dataclass(frozen=True)
class Operation:
    """What is known of an operation.

    Attributes:
        name: as in ``"aten::relu_"``.
        names: of its arguments, in order.
        defaults: of its arguments, by name.
        of_shape: whether what it returns depends on shape, dtype and device alone.
        draws: whether it may draw random numbers.
        written: names of the arguments that it writes into.
        reshapes: whether it changes the shape of its first argument in place.
        aliases: whether what it returns may share memory with an argument.
        sized: whether the shape of what it returns depends on numbers.
        differentiable: whether autograd knows it; what a library adds without that has gradients of 0, without a word.
    """

    name: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    of_shape: bool
    draws: bool
    written: tuple[str, ...]
    reshapes: bool
    aliases: bool
    sized: bool
    differentiable: bool

    def name_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without the ones left to their defaults."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)

    def written_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes into."""
        if not self.written:
            return []
        arguments = self.name_arguments(args, kwargs)
        return list_tensors([arguments[name] for name in self.written if name in arguments])

    def is_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call draws random numbers: dropout in evaluation mode, or of probability 0, does not."""
        arguments = self.defaults | self.name_arguments(args, kwargs)
        training = arguments.get("train", arguments.get("training"))
        share = arguments.get("dropout_p", arguments.get("dropout", arguments.get("p")))
        return training is not False and not (isinstance(share, float) and share == 0)


@cache
def operation(function: Any) -> Operation:
    """Return an operation's properties by its schema."""
    schema = getattr(function, "_schema", None)
    if schema is None:  # a higher-order operation, such as flex_attention
        return Operation(str(function), (), {}, False, False, (), False, False, True, True)
    name = schema.name.partition("::")[2]
    tags = function.tags
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    shares = name.startswith(("unsafe_", "_unsafe_", "atleast_", "broadcast_tensors", "meshgrid"))  # untold by schemas
    aliases = not written and (shares or any(value.alias_info is not None for value in schema.returns))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    # What libraries add says nothing of its shapes.
    sized = torch.Tag.dynamic_output_shape in tags or name in _SIZED or function.namespace != "aten"
    return Operation(
        schema.name, tuple(a.name for a in schema.arguments), defaults, name in _OF_SHAPE,
        torch.Tag.nondeterministic_seeded in tags, written, torch.Tag.inplace_view in tags, aliases, sized,
        _is_differentiable(function, name),
    )  # fmt: skip


def _is_differentiable(function: Any, name: str) -> bool:
    if function.namespace in ("aten", "prim", "prims"):
        return name != "to_mkldnn"  # behind which scripted code runs past the dispatcher
    return any(has_kernel(function.name(), key) for key in _DIFFERENTIABLE)


@cache
def functional(function: Any) -> Any:
    """Return the operation that gives a new tensor where this one writes into an argument; None: there is none."""
    space, _, name = function._schema.name.partition("::")
    inplace = name.endswith("_") and not name.endswith("__")
    packet = getattr(getattr(torch.ops, space), name[:-1] if inplace else name, None)
    if packet is None:
        return None
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    types = _types(function)
    return next((one for one in overloads if one is not function and _types(one) == types), None)


def _types(function: Any) -> list[tuple[str, bool]]:
    arguments = [argument for argument in function._schema.arguments if not argument.is_out]
    return [(str(argument.type), argument.kwarg_only) for argument in arguments]


def plain(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Return an operation, and its arguments, that gives the same wherever it is run again.

    A view of what a replay computes may not be possible, and of another tensor only the shape, or the dtype, counts.
    """
    name = function.overloadpacket.__name__ if isinstance(function, OpOverload) else None
    if function is aten.view.default or name == "_unsafe_view":
        return aten.reshape.default, args
    if name == "slice" and args[2:4] in ((), (0,), (None,), (0, sys.maxsize), (None, None)) and args[4:] in ((), (1,)):
        return aten.alias.default, args[:1]  # one of the slices that do nothing, as x[:, 0] sends
    if name in ("view_as", "reshape_as"):
        return aten.reshape.default, (args[0], list(args[1].shape))
    if name == "expand_as":
        return aten.expand.default, (args[0], list(args[1].shape))
    if name == "type_as":
        return aten.to.dtype, (args[0], args[1].dtype)
    if name == "as_strided" and (places := _strided_places(*args)) is not None:
        return take, (args[0], places)  # elsewhere a tensor may lie otherwise in its memory
    return function, args


def _strided_places(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: Any = None) -> Tensor | None:
    """Return the places in a tensor of the numbers that ``as_strided`` takes from its memory; None for symbols."""
    begin: Any = x.storage_offset()
    offset = begin if offset is None else offset
    if any(not isinstance(number, int) for number in (*size, *stride, offset, *x.shape)):
        return None
    reach = [
        start + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
        for start, shape, steps in ((begin, x.shape, x.stride()), (offset, size, stride))
    ]
    # Of shapes alone, so that nothing waits for a device.
    memory = torch.full((max(reach) + 1,), -1, device="cpu")
    own = torch.arange(x.numel(), device="cpu").reshape(x.shape)
    memory.as_strided(x.shape, x.stride(), begin).copy_(own)
    places = memory.as_strided(size, stride, offset)
    if bool((places < 0).any()):
        refuse(
            ValueError,  # autograd has no gradient of those
            "as_strided takes numbers from outside of the tensor that it is called on",
            "call it on the whole tensor",
        )
    return places.to(x.device)


def find_write_mask(function: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the mask of a call that writes one number where it is true, to be broadcast; None for other calls."""
    if function is not aten.index_put_.default or len(args) > 3 or args[2].numel() != 1:
        return None
    mask, before = args[1][-1], len(args[1]) - 1
    if mask is None or mask.dtype != torch.bool or any(item is not None for item in args[1][:-1]):
        return None
    behind = args[0].dim() - before - mask.dim()
    return mask.reshape(*[1] * before, *mask.shape, *[1] * behind)


def list_tensors(arguments: Any) -> list[Tensor]:
    """Return the tensors among arguments, also inside lists and dicts, in order."""
    tensors, items = [], deque([arguments])
    while items:
        item = items.popleft()
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple | dict):
            items.extendleft(reversed(item.values() if isinstance(item, dict) else item))
    return tensors


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

        def cast(tensor: Tensor, dim: int | None) -> Tensor:
            if tokens is not None and dim is not None:
                tensor = tensor.narrow(dim, tokens.start, tokens.length)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        def read(item: Any, here: Any, dim: int | None) -> Any:
            if like is not None and not (isinstance(item, Ref) and item.index in values):
                return here
            item = values[item.index] if isinstance(item, Ref) else item
            return cast(item, dim) if isinstance(item, Tensor) else item

        dims = [None] * len(self.arguments) if tokens is None else tokens.dims
        arguments = zip(self.arguments, self.arguments if like is None else like.args, dims, strict=True)
        options = (self.options if like is None else like.kwargs).values()
        kwargs = {
            name: _map_items(read, item, here) for (name, item), here in zip(self.options.items(), options, strict=True)
        }
        y_dim = None if tokens is None else tokens.dim
        y = [cast(values[index], y_dim) if index in smooth else None for index in self.outputs]
        args = tuple(_map_items(read, *items) for items in arguments)
        eps = 0.0
        if like is not None:
            floats = [values[index].dtype for index in (*self.inputs, *self.outputs) if index in smooth]
            eps = max((torch.finfo(precision).eps for precision in floats), default=0.0)
        return Call(args, kwargs, y[0] if self.single else tuple(y), eps)


def _map_items(function: Callable[[Any, Any, int | None], Any], item: Any, here: Any, dim: int | None = None) -> Any:
    """Return a function of an argument, or of every item of a list."""
    if type(item) in (list, tuple):
        return type(item)(_map_items(function, *items) for items in zip(item, here, strict=True))
    return function(item, here, dim)


_REPLACED = (Tensor, Ref, torch.dtype)
_WALKED = (*_REPLACED, list, tuple)  # not each number of a shape


def mapped(item: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with its tensors, Refs and dtypes replaced, in lists and tuples, too."""
    if isinstance(item, _REPLACED):
        return function(item)
    if not isinstance(item, list | tuple):
        return item
    parts = [mapped(part, function) if isinstance(part, _WALKED) else part for part in item]
    return parts if type(item) is list else tuple(parts)  # torch.Size and named tuples, too


def values_in(arguments: Any, *counterparts: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the Refs among arguments, also in lists and dicts, each with its counterparts in other arguments."""
    if isinstance(arguments, Ref):
        yield (arguments, *counterparts)
    elif isinstance(arguments, dict):
        for name, item in arguments.items():
            yield from values_in(item, *(other[name] for other in counterparts))
    elif isinstance(arguments, list | tuple):
        lists = (other if isinstance(other, list | tuple) else repeat(other) for other in counterparts)
        for items in zip(arguments, *lists, strict=False):
            if isinstance(items[0], Ref | dict | list | tuple):
                yield from values_in(*items)


_MODULE_CALL = MODULE_CALL_CODE


def module_around(frame: FrameType | None) -> nn.Module | None:
    """Return the module whose call a frame is in."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def function_around(frame: FrameType | None) -> type[Function]:
    """Return the ``autograd.Function`` whose forward a frame is in, or was, or ``Function`` itself."""
    functions: dict[Any, type[Function]] = {BACKWARD_HOOK_CODE: BackwardHookFunction}
    kinds = [Function]
    for function_class in kinds:  # which grows
        kinds += function_class.__subclasses__()
        functions.setdefault(getattr(inspect.unwrap(function_class.forward), "__code__", None), function_class)
    inner = frame
    while frame is not None and frame.f_code not in functions:
        frame = frame.f_back
    return _named_in(inner) if frame is None else functions[frame.f_code]


def _named_in(frame: FrameType | None) -> type[Function]:
    """Return the first ``autograd.Function`` that code around a frame names: one whose forward has ended already."""
    while frame is not None:
        for name in (*frame.f_code.co_names, *frame.f_code.co_freevars):
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            if isinstance(value, type) and issubclass(value, Function) and value is not Function:
                return value
        frame = frame.f_back
    return Function
