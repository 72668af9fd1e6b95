"""The same numbers in another shape, order or selection."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torchvision.ops.stochastic_depth import stochastic_depth

from pytorch_grad_cam_pcasvm.autodiff.rules.cotangents import Part
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import constant, functions, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError

constant(torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__, torch.Tensor.grad.__get__)  # type: ignore[attr-defined,union-attr]
constant(*functions("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"))
constant(*functions("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))


_moving = partial(register_jacobian, secant="linear", needs="nothing", relevance="moved")


def _always(*args: Any, **options: Any) -> bool:
    return True  # whether a new shape still tells the channels is looked at for every step


def _unmoved(dim: int, *args: Any, **options: Any) -> int:
    return dim


def _in_old_shape(dim: int, input: Tensor, *args: Any, y: Tensor, **options: Any) -> int | None:
    before = [math.prod(y.shape[:dim]), y.shape[dim]]
    return next((d for d in range(input.dim()) if [math.prod(input.shape[:d]), input.shape[d]] == before), None)


_DROPOUTS = functions("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@_moving(*_DROPOUTS, stochastic_depth, keeps_sums=_always, keeps_numbers=_always, tokens=_unmoved)
def dropout(input: Tensor, p: float = 0.5, *rest: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The identity: a network is explained in evaluation mode."""
    if options.get("training", options.get("train", next((v for v in rest if isinstance(v, bool)), None))) is not False:
        raise NoClosedFormError("dropout that is always on changes every run", "pass training=self.training")
    return grad


_COPIES = functions(
    "clone", "contiguous", "float", "double", "half", "bfloat16", "to", "type_as", "type", "cpu", "cuda"
)


@_moving(*_COPIES, keeps_sums=_always, keeps_numbers=_always, tokens=_unmoved)
def copy(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The identity; of another tensor only the dtype or the device counts."""
    return grad, None


_RESHAPES = functions("flatten", "reshape", "squeeze", "unsqueeze", "unflatten", "view", "view_as", "reshape_as")


@_moving(*_RESHAPES, keeps_sums=_always, keeps_numbers=_always, tokens=_in_old_shape)
def reshape(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The gradient in the old shape; of another tensor only the shape counts."""
    return lambda: grad.reshape(len(grad), *input.shape), None


def _permuted(dim: int, input: Tensor, *dims: Any, y: Tensor, **options: Any) -> int:
    order = options.get("dims", dims[0] if len(dims) == 1 else dims)
    return int(order[dim]) % input.dim()


@_moving(*functions("permute"), tokens=_permuted)
def permute(input: Tensor, *dims: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The inverse permutation."""
    order = options.get("dims", dims[0] if len(dims) == 1 else dims)
    inverse = sorted(range(input.dim()), key=[dim % input.dim() for dim in order].__getitem__)
    return grad.permute(0, *(dim + 1 for dim in inverse))


def _transposed(dim: int, input: Tensor, dim0: int, dim1: int, *, y: Tensor) -> int:
    first, second = dim0 % input.dim(), dim1 % input.dim()
    return {first: second, second: first}.get(dim, dim)


@_moving(*functions("transpose", "swapaxes", "swapdims"), tokens=_transposed)
def transpose(input: Tensor, dim0: int, dim1: int, *, y: Tensor, grad: Tensor) -> Tensor:
    """The same two dimensions change places."""
    return grad.transpose(dim0 % input.dim() + 1, dim1 % input.dim() + 1)


@_moving(torch.Tensor.T.__get__, torch.Tensor.mT.__get__, *functions("t"))  # type: ignore[attr-defined]
def matrix_transpose(input: Tensor, *args: Any, y: Tensor, grad: Tensor) -> Tensor:
    """The last two dimensions change places."""
    if input.dim() == 1:
        return grad
    return grad.transpose(-1, -2)


@_moving(*functions("expand", "expand_as", "broadcast_to"))
def expand(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The sum over what was repeated; of another tensor only the shape counts."""
    return lambda: unbroadcast(grad, input), None


@_moving(*functions("roll"))
def roll(input: Tensor, shifts: Any, dims: Any = None, *, y: Tensor, grad: Tensor) -> Tensor:
    """The roll the other way round."""
    each = [shifts] if isinstance(shifts, int) else list(shifts)
    if dims is None:
        return grad.flatten(1).roll(-each[0], 1).reshape(grad.shape)
    axes = [dims] if isinstance(dims, int) else dims
    return grad.roll([-shift for shift in each], [axis % input.dim() + 1 for axis in axes])


@_moving(*functions("flip"))
def flip(input: Tensor, *dims: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The same flip."""
    axes = options.get("dims", dims[0] if len(dims) == 1 else dims)
    return grad.flip([axis % input.dim() + 1 for axis in ([axes] if isinstance(axes, int) else axes)])


def _moved(function: Any, input: Tensor, grad: Tensor, *args: Any, **options: Any) -> Tensor:
    """Send the gradient back to where a function that only moves numbers took each from, known by numbering them."""
    # float64 holds such numbers exactly, and torch pads no integers.
    numbers = torch.arange(input.numel(), dtype=torch.float64, device=grad.device).reshape(input.shape)
    places = function(numbers, *args, **options).long().flatten()
    pulled = grad.new_zeros(len(grad), input.numel())
    return pulled.index_add(1, places, grad.reshape(len(grad), -1)).reshape(len(grad), *input.shape)


def _move(function: Any) -> None:
    def rule(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
        """The sum of the gradients of all copies of a number."""
        return _moved(function, input, grad, *args, **options)

    _moving(function)(rule)


for _function in (
    *functions("repeat", "tile", "repeat_interleave", "index_select", "gather", "take_along_dim", "masked_select"),
    *functions("diagonal", "movedim", "moveaxis", "rot90", "ravel", "channel_shuffle", "pixel_shuffle"),
    *functions("pixel_unshuffle"),
    torch.Tensor.unfold,
):
    _move(_function)


@_moving(F.pad)
def pad(input: Tensor, pad: Any, mode: str = "constant", value: Any = None, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad without what was added; what was copied there goes back to where it is from."""
    if mode != "constant":
        return _moved(F.pad, input, grad, pad, mode)
    return F.pad(grad, [-size for size in pad])


@_moving(torch.Tensor.__getitem__)
def getitem(input: Tensor, index: Any, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where it was taken from, 0 elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    chosen = [dim for dim, item in enumerate(index) if type(item) is not slice or item != slice(None)]
    if len(chosen) == 1 and type(item := index[chosen[0]]) in (int, slice):
        (dim,) = chosen
        if isinstance(item, int):
            return select(input, dim, item, y=y, grad=grad)
        start, stop, stride = item.indices(input.shape[dim])
        if stride == 1 and stop > start:
            return Part(lambda: grad, input.shape, dim, start, stop - start)
    pulled = grad.new_zeros(len(grad), *input.shape)
    if any(isinstance(item, Tensor | list) for item in index):
        # A position that was taken several times gets the sum.
        targets = torch.arange(len(grad), device=grad.device).reshape(-1, *[1] * (grad.dim() - 1))
        places = torch.arange(input.numel(), device=grad.device).reshape(input.shape)[index]
        return pulled.flatten(1).index_put((targets, places), grad, accumulate=True).reshape(pulled.shape)
    pulled[(slice(None), *index)] = grad
    return pulled


@_moving(*functions("select"))
def select(input: Tensor, dim: int, index: int, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where it was taken from, 0 elsewhere."""
    dim = dim % input.dim()
    return Part(lambda: grad.unsqueeze(dim + 1), input.shape, dim, int(index) % input.shape[dim], 1)


@_moving(*functions("narrow"))
def narrow(input: Tensor, dim: int, start: Any, length: int, *, y: Tensor, grad: Tensor) -> Any:
    """Grad where it was taken from, 0 elsewhere."""
    dim = dim % input.dim()
    return Part(lambda: grad, input.shape, dim, int(start) % input.shape[dim], length)


def _beside(dim: int, input: Tensor, along: int = 0, *, y: Tensor) -> int:
    return dim + (dim >= along % input.dim())


@_moving(*functions("unbind"), tokens=_beside)
def unbind(input: Tensor, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> Tensor:
    """The parts stacked again."""
    return torch.stack(_filled(y, grad), dim % input.dim() + 1)


@_moving(*functions("chunk", "split", "tensor_split", "split_with_sizes"))
def split(
    input: Tensor, sizes: Any = None, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...], **_: Any
) -> Tensor:
    """The parts joined again."""
    return torch.cat(_filled(y, grad), dim % input.dim() + 1)


def _filled(y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return the gradients, zeros where an output leads nowhere."""
    like = next(g for g in grad if g is not None)
    return [like.new_zeros(len(like), *part.shape) if g is None else g for part, g in zip(y, grad, strict=True)]


@_moving(*functions("cat", "concat", "concatenate"))
def cat(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.split([part.shape[dim] for part in tensors], dim % y.dim() + 1))


@_moving(*functions("stack"))
def stack(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.unbind(dim % y.dim() + 1))
