"""What a schema says of an operation of torch's dispatcher: whether it draws, writes, or only asks for shapes."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torchvision  # noqa: F401 - registers its operations
from torch import Tensor
from torch._ops import OpOverload

from pytorch_grad_cam_pcasvm.rules.places import take
from pytorch_grad_cam_pcasvm.runtime.errors import refuse

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

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, without the ones left to their defaults."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)

    def written_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes into."""
        if not self.written:
            return []
        named = self.named(args, kwargs)
        return list_tensors(named[name] for name in self.written if name in named)

    def is_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call draws random numbers: dropout in evaluation mode, or of probability 0, does not."""
        named = self.defaults | self.named(args, kwargs)
        training = named.get("train", named.get("training"))
        share = named.get("dropout_p", named.get("dropout", named.get("p")))
        return training is not False and not (isinstance(share, int | float) and share == 0)


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
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), key) for key in _DIFFERENTIABLE)


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
    """Return the tensors among arguments, also inside lists and dicts."""
    tensors = []
    for item in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, list | tuple | dict):
            tensors += list_tensors(item)
    return tensors
