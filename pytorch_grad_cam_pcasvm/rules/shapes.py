"""The same numbers in another shape, order or selection."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import Part
from pytorch_grad_cam_pcasvm.rules.registry import aten, constant, register_jacobian, unbroadcast

constant(*aten("detach", "detach_"))


_moving = partial(register_jacobian, secant="linear", needs="nothing", relevance="moved")


def _always(*args: Any, **options: Any) -> bool:
    return True  # whether a new shape still tells the channels is looked at for every step


def _unmoved(dim: int, *args: Any, **options: Any) -> int:
    return dim


def _in_old_shape(dim: int, input: Tensor, *args: Any, y: Tensor, **options: Any) -> int | None:
    before = [math.prod(y.shape[:dim]), y.shape[dim]]
    return next((d for d in range(input.dim()) if [math.prod(input.shape[:d]), input.shape[d]] == before), None)


_DROPOUTS = aten("dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_COPIES = aten(
    "clone", "contiguous", "to", "_to_copy", "type_as", "alias", "lift_fresh", "_autocast_to_full_precision",
    "_autocast_to_reduced_precision",
)  # fmt: skip


@_moving(*_DROPOUTS, *_COPIES, keeps_sums=_always, keeps_numbers=_always, tokens=_unmoved)
def copy(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The identity; of another tensor only the dtype or the device counts."""
    return grad, None


_RESHAPES = aten(
    *(
        "flatten",
        "reshape",
        "squeeze",
        "unsqueeze",
        "unflatten",
        "view.default",
        "view_as",
        "reshape_as",
        "_unsafe_view",
    ),
    *("_reshape_alias", "ravel"),
)


@_moving(*_RESHAPES, keeps_sums=_always, keeps_numbers=_always, tokens=_in_old_shape)
def reshape(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The gradient in the old shape; of another tensor only the shape counts."""
    return lambda: grad.reshape(len(grad), *input.shape), None


def _permuted(dim: int, input: Tensor, dims: Any, *, y: Tensor) -> int:
    return int(dims[dim]) % input.dim()


@_moving(*aten("permute"), tokens=_permuted)
def permute(input: Tensor, dims: Any, *, y: Tensor, grad: Tensor) -> Tensor:
    """The inverse permutation."""
    inverse = sorted(range(input.dim()), key=[dim % input.dim() for dim in dims].__getitem__)
    return grad.permute(0, *(dim + 1 for dim in inverse))


def _transposed(dim: int, input: Tensor, dim0: int, dim1: int, *, y: Tensor) -> int:
    first, second = dim0 % input.dim(), dim1 % input.dim()
    return {first: second, second: first}.get(dim, dim)


@_moving(*aten("transpose"), tokens=_transposed)
def transpose(input: Tensor, dim0: int, dim1: int, *, y: Tensor, grad: Tensor) -> Tensor:
    """The same two dimensions change places."""
    return grad.transpose(dim0 % input.dim() + 1, dim1 % input.dim() + 1)


@_moving(*aten("t", "mT"))
def matrix_transpose(input: Tensor, *args: Any, y: Tensor, grad: Tensor) -> Tensor:
    """The last two dimensions change places."""
    if input.dim() < 2:
        return grad
    return grad.transpose(-1, -2)


@_moving(*aten("expand", "expand_as"))
def expand(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The sum over repetitions; of another tensor only the shape counts."""
    return lambda: unbroadcast(grad, input), None


def _rolls_no_images(input: Tensor, shifts: Any, dims: Any = (), *, y: Tensor) -> bool:
    return bool(dims) and all(dim % input.dim() for dim in dims)


@_moving(*aten("roll"), by_image=_rolls_no_images)
def roll(input: Tensor, shifts: Any, dims: Any = (), *, y: Tensor, grad: Tensor) -> Tensor:
    """The roll the other way round."""
    if not dims:
        return grad.flatten(1).roll(-shifts[0], 1).reshape(grad.shape)
    return grad.roll([-shift for shift in shifts], [axis % input.dim() + 1 for axis in dims])


def _not_along_images(input: Tensor, dims: Any, *args: Any, y: Tensor, **options: Any) -> bool:
    dims = [dims] if isinstance(dims, int) else dims
    return all(dim % input.dim() for dim in dims)


@_moving(*aten("flip"), by_image=_not_along_images)
def flip(input: Tensor, dims: Any, *, y: Tensor, grad: Tensor) -> Tensor:
    """The same flip."""
    return grad.flip([axis % input.dim() + 1 for axis in dims])


def _is_batch(input: Tensor, *args: Any, y: Tensor, **options: Any) -> bool:
    return input.dim() > 2


@_moving(*aten("tril"), by_image=_is_batch)
def tril(input: Tensor, diagonal: int = 0, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad below the diagonal."""
    return grad.tril(diagonal)


@_moving(*aten("triu"), by_image=_is_batch)
def triu(input: Tensor, diagonal: int = 0, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad above the diagonal."""
    return grad.triu(diagonal)


def _rearrange(function: Any, input: Tensor, grad: Tensor, *args: Any, **options: Any) -> Tensor:
    """Send the gradient back to where a function that only moves numbers took each from, known by numbering them."""
    # float64 holds such numbers exactly, and torch pads no integers.
    numbers = torch.arange(input.numel(), dtype=torch.float64, device=grad.device).reshape(input.shape)
    places = function(numbers, *args, **options).long().flatten()
    pulled = grad.new_zeros(len(grad), input.numel())
    return pulled.index_add(1, places, grad.reshape(len(grad), -1)).reshape(len(grad), *input.shape)


def _move(function: Any) -> None:
    def pull_copies(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
        """The sum of the gradients of all copies of a number."""
        return _rearrange(function, input, grad, *args, **options)

    _moving(function)(pull_copies)


for _operation in aten(
    *("repeat", "tile", "repeat_interleave", "index_select", "gather", "take_along_dim", "masked_select", "take"),
    *("diagonal", "rot90", "channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "unfold", "numpy_T"),
):
    _move(_operation)


def _not_of_images(input: Tensor, pad: Any, *args: Any, y: Tensor) -> bool:
    return len(pad) < 2 * input.dim()


@_moving(*aten("pad", "constant_pad_nd"), by_image=_not_of_images)
def pad(input: Tensor, pad: Any, mode: Any = "constant", value: Any = None, *, y: Tensor, grad: Tensor) -> Tensor:
    """The gradient without the padding; copied numbers send theirs back to their source."""
    if isinstance(mode, str) and mode != "constant":
        return _rearrange(torch.ops.aten.pad.default, input, grad, pad, mode)
    return torch.constant_pad_nd(grad, [-size for size in pad])


@_moving(*aten("index"))
def index(input: Tensor, indices: Any, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where it was taken from, 0 elsewhere; a position that was taken several times gets the sum."""
    targets = torch.arange(len(grad), device=grad.device).reshape(-1, *[1] * (grad.dim() - 1))
    places = torch.ops.aten.index.Tensor(
        torch.arange(input.numel(), device=grad.device).reshape(input.shape), list(indices)
    )
    pulled = grad.new_zeros(len(grad), input.numel()).index_put((targets, places), grad, accumulate=True)
    return pulled.reshape(len(grad), *input.shape)


@_moving(*aten("slice"), by_image=lambda input, dim=0, *args, y: bool(dim % input.dim()))
def narrowed(
    input: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1, *, y: Tensor, grad: Tensor
) -> Any:
    """Grad where it was taken from, 0 elsewhere."""
    dim = dim % input.dim()
    size = input.shape[dim]
    # Not slice.indices, which would take a symbol for a number.
    first = 0 if start is None else start if start >= 0 else max(0, start + size)
    if step == 1:
        return Part(lambda: grad, input.shape, dim, first, y.shape[dim])
    pulled = grad.new_zeros(len(grad), *input.shape)
    return torch.slice_scatter(pulled, grad, dim + 1, start, end, step)


@_moving(*aten("select"), by_image=_not_along_images)
def select(input: Tensor, dim: int, index: int, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where it was taken from, 0 elsewhere."""
    dim = dim % input.dim()
    return Part(lambda: grad.unsqueeze(dim + 1), input.shape, dim, int(index) % input.shape[dim], 1)


def _beside(dim: int, input: Tensor, along: int = 0, *, y: Tensor) -> int:
    return dim + (dim >= along % input.dim())


@_moving(*aten("unbind"), tokens=_beside)
def unbind(input: Tensor, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> Tensor:
    """The parts stacked again."""
    return torch.stack(_fill_zeros(y, grad), dim % input.dim() + 1)


@_moving(*aten("chunk", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split"))
def split(
    input: Tensor, sizes: Any = None, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...], **_: Any
) -> Tensor:
    """The parts joined again."""
    return torch.cat(_fill_zeros(y, grad), dim % input.dim() + 1)


def _fill_zeros(y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return the gradients, zeros where an output leads nowhere."""
    like = next(g for g in grad if g is not None)
    return [like.new_zeros(len(like), *part.shape) if g is None else g for part, g in zip(y, grad, strict=True)]


@_moving(*aten("cat"))
def concatenate(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.split([part.shape[dim] for part in tensors], dim % y.dim() + 1))


@_moving(*aten("stack"))
def stack(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.unbind(dim % y.dim() + 1))
