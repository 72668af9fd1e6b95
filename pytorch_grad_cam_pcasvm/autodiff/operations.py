"""What a schema says of an operation of torch's dispatcher: whether it draws, writes, or only asks for shapes."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torchvision  # noqa: F401 - registers its operations
from torch import Tensor
from torch._decomp import decomposition_table, decompositions
from torch._ops import OpOverload

aten = torch.ops.aten
# What depends on shape, dtype and device alone.
_DIFFERENTIABLE = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
_OF_SHAPE = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "is_same_size", "result_type"),
    *("size", "stride", "numel", "dim", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "device", "layout", "dtype"),
}


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
    differentiable: bool

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, those left to their defaults excepted."""
        return dict(zip(self.names, args, strict=False)) | dict(kwargs)

    def written_in(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors that a call writes into."""
        if not self.written:
            return []
        named = self.named(args, kwargs)
        return list(tensors_in(named[name] for name in self.written if name in named))

    def is_random(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call draws random numbers: dropout in evaluation mode, or of probability 0, does not."""
        if not self.draws:
            return False
        named = self.defaults | self.named(args, kwargs)
        training = named.get("train", named.get("training"))
        share = named.get("dropout_p", named.get("dropout", named.get("p")))
        return training is not False and not (isinstance(share, int | float) and share == 0)


@cache
def operation(function: Any) -> Operation:
    """Return what the schema of an operation says."""
    schema = getattr(function, "_schema", None)
    if schema is None:  # a higher-order operation, such as flex_attention
        return Operation(str(function), (), {}, False, False, (), False, False, True)
    name = schema.name.partition("::")[2]
    tags = function.tags
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    shares = name.startswith(("unsafe_", "_unsafe_"))  # which their schemas do not tell
    aliases = not written and (shares or any(value.alias_info is not None for value in schema.returns))
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return Operation(
        schema.name, tuple(a.name for a in schema.arguments), defaults, name in _OF_SHAPE,
        torch.Tag.nondeterministic_seeded in tags, written, torch.Tag.inplace_view in tags, aliases,
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
    return function, args


def mask_of(function: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Return the mask of a call that writes one number where it is true, to be broadcast; None for other calls."""
    if function is not aten.index_put_.default or len(args) > 3 or args[2].numel() != 1:
        return None
    mask, before = args[1][-1], len(args[1]) - 1
    if mask is None or mask.dtype != torch.bool or any(item is not None for item in args[1][:-1]):
        return None
    behind = args[0].dim() - before - mask.dim()
    return mask.reshape(*[1] * before, *mask.shape, *[1] * behind)


def tensors_in(arguments: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also those in lists."""
    for item in arguments:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors_in(item)


def decomposed(function: Any) -> Any:
    """Return what computes the same by other operations; None if torch knows no such."""
    if function in _OWN:
        return _OWN[function]
    if getattr(function, "_schema", None) is None:
        return None
    by_table = function._schema.name.partition("::")[2] in _BY_TABLE
    return decomposition_table.get(function) if by_table else function.decompose if function._can_decompose() else None


def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """Return what torch's own decomposition gives, which in single precision is one operation of a library again."""
    parameters = decompositions.gather_params(params, has_biases, hx[0].size(2) != hx[1].size(2))
    output, hidden = decompositions._rnn_helper(
        input, list(zip(*hx, strict=True)), parameters, has_biases, num_layers, dropout, train, bidirectional,
        batch_first, decompositions.one_layer_lstm,
    )  # fmt: skip
    # Older versions of torch leave the states a dimension too many.
    states = (
        torch.stack(one, 0).reshape(start.shape) for one, start in zip(zip(*hidden, strict=True), hx, strict=True)
    )
    return output, *states


def _batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Any, var: Any, training: bool, momentum: float,
    eps: float, *rest: Any,
) -> Tensor:  # fmt: skip
    """Return what a batch norm makes of the statistics of the batch itself."""
    dims = [dim for dim in range(input.dim()) if dim != 1]
    variance, centre = torch.var_mean(input, dims, correction=0, keepdim=True)
    y = (input - centre) * torch.rsqrt(variance + eps)
    shape = (-1, *[1] * (input.dim() - 2))
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _deform_conv2d(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int, stride_w: int, pad_h: int,
    pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    """Return the same as samples of the picture at each tap of the kernel, and a 1x1 convolution over them."""
    (count, channels, height, width), (rows, columns) = input.shape, offset.shape[-2:]
    kernel_h, kernel_w = weight.shape[-2:]
    offset = offset.reshape(count, offset_groups, kernel_h * kernel_w, 2, rows, columns)
    y = torch.arange(rows, device=input.device).mul(stride_h).sub(pad_h).to(offset.dtype)
    x = torch.arange(columns, device=input.device).mul(stride_w).sub(pad_w).to(offset.dtype)
    pictures = input.reshape(count * offset_groups, channels // offset_groups, height, width)
    samples = []
    for tap in range(kernel_h * kernel_w):
        at_y = offset[:, :, tap, 0] + (y + tap // kernel_w * dilation_h).unsqueeze(1)
        at_x = offset[:, :, tap, 1] + (x + tap % kernel_w * dilation_w)
        grid = torch.stack([(2 * at_x + 1) / width - 1, (2 * at_y + 1) / height - 1], -1).flatten(0, 1)
        sample = torch.nn.functional.grid_sample(pictures, grid, align_corners=False)
        sample = sample.reshape(count, offset_groups, channels // offset_groups, rows, columns)
        if use_mask:
            shares = mask.reshape(count, offset_groups, kernel_h * kernel_w, 1, rows, columns)
            sample = sample * shares[:, :, tap]
        samples.append(sample.reshape(count, channels, rows, columns))
    stacked = torch.stack(samples, 2).reshape(count, channels * kernel_h * kernel_w, rows, columns)
    return torch.conv2d(stacked, weight.reshape(len(weight), -1, 1, 1), bias, groups=groups)


_BY_TABLE = {"affine_grid_generator", "addr", "gru", "linalg_vector_norm", "lstm", "norm", "rnn_relu", "rnn_tanh"}
_OWN = {
    aten.lstm.input: _lstm,
    aten.batch_norm.default: _batch_norm,
    torch.ops.torchvision.deform_conv2d.default: _deform_conv2d,
}
