"""The same numbers in another shape, order or selection."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torchvision.ops.stochastic_depth import stochastic_depth

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import constant, functions, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError

constant(torch.Tensor.detach, torch.detach, torch.Tensor.data.__get__, torch.Tensor.grad.__get__)  # type: ignore[attr-defined,union-attr]
constant(*functions("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"))
constant(*functions("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"))


def _always(*args: Any, **options: Any) -> bool:
    return True  # whether a new shape still tells the channels is looked at for every step


_DROPOUTS = functions("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@register_jacobian(*_DROPOUTS, stochastic_depth, keeps_sums=_always, secant="linear")
def dropout(input: Tensor, p: float = 0.5, *rest: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The identity: a network is explained in evaluation mode."""
    if options.get("training", options.get("train", next((v for v in rest if isinstance(v, bool)), None))) is not False:
        raise NoClosedFormError("dropout that is always on changes every run", "pass training=self.training")
    return grad


_COPIES = functions(
    "clone", "contiguous", "float", "double", "half", "bfloat16", "to", "type_as", "type", "cpu", "cuda"
)


@register_jacobian(*_COPIES, keeps_sums=_always, secant="linear")
def copy(input: Tensor, *args: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The identity; of another tensor only the dtype or the device counts."""
    return grad, None


_RESHAPES = functions("flatten", "reshape", "squeeze", "unsqueeze", "unflatten", "view", "view_as", "reshape_as")


@register_jacobian(*_RESHAPES, keeps_sums=_always, secant="linear")
def reshape(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The gradient in the old shape; of another tensor only the shape counts."""
    return lambda: grad.reshape(len(grad), *input.shape), None


@register_jacobian(*functions("permute"), secant="linear")
def permute(input: Tensor, *dims: Any, y: Tensor, grad: Tensor, **options: Any) -> Tensor:
    """The inverse permutation."""
    order = options.get("dims", dims[0] if len(dims) == 1 else dims)
    inverse = sorted(range(input.dim()), key=[dim % input.dim() for dim in order].__getitem__)
    return grad.permute(0, *(dim + 1 for dim in inverse))


@register_jacobian(*functions("transpose", "swapaxes", "swapdims"), secant="linear")
def transpose(input: Tensor, dim0: int, dim1: int, *, y: Tensor, grad: Tensor) -> Tensor:
    """The same two dimensions change places."""
    return grad.transpose(dim0 % input.dim() + 1, dim1 % input.dim() + 1)


@register_jacobian(torch.Tensor.T.__get__, torch.Tensor.mT.__get__, *functions("t"), secant="linear")  # type: ignore[attr-defined]
def matrix_transpose(input: Tensor, *args: Any, y: Tensor, grad: Tensor) -> Tensor:
    """The last two dimensions change places."""
    if input.dim() == 1:
        return grad
    return grad.transpose(-1, -2)


@register_jacobian(*functions("expand", "expand_as", "broadcast_to"), secant="linear")
def expand(input: Tensor, *shape: Any, y: Tensor, grad: Tensor, **options: Any) -> Any:
    """The sum over what was repeated; of another tensor only the shape counts."""
    return lambda: unbroadcast(grad, input), None


@register_jacobian(*functions("roll"), secant="linear")
def roll(input: Tensor, shifts: Any, dims: Any = None, *, y: Tensor, grad: Tensor) -> Tensor:
    """The roll the other way round."""
    each = [shifts] if isinstance(shifts, int) else list(shifts)
    if dims is None:
        return grad.flatten(1).roll(-each[0], 1).reshape(grad.shape)
    axes = [dims] if isinstance(dims, int) else dims
    return grad.roll([-shift for shift in each], [axis % input.dim() + 1 for axis in axes])


@register_jacobian(*functions("flip"), secant="linear")
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

    register_jacobian(function, secant="linear")(rule)


for _function in (
    *functions("repeat", "tile", "repeat_interleave", "index_select", "gather", "take_along_dim", "masked_select"),
    *functions("diagonal", "movedim", "moveaxis", "rot90", "ravel", "channel_shuffle", "pixel_shuffle"),
    *functions("pixel_unshuffle"),
    torch.Tensor.unfold,
):
    _move(_function)


@register_jacobian(F.pad, secant="linear")
def pad(input: Tensor, pad: Any, mode: str = "constant", value: Any = None, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad without what was added; what was copied there goes back to where it is from."""
    if mode != "constant":
        return _moved(F.pad, input, grad, pad, mode)
    return F.pad(grad, [-size for size in pad])


@register_jacobian(torch.Tensor.__getitem__, secant="linear")
def getitem(input: Tensor, index: Any, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad where it was taken from, 0 elsewhere."""
    index = index if isinstance(index, tuple) else (index,)
    pulled = grad.new_zeros(len(grad), *input.shape)
    if any(isinstance(item, Tensor | list) for item in index):
        # A position that was taken several times gets the sum.
        targets = torch.arange(len(grad), device=grad.device).reshape(-1, *[1] * (grad.dim() - 1))
        places = torch.arange(input.numel(), device=grad.device).reshape(input.shape)[index]
        return pulled.flatten(1).index_put((targets, places), grad, accumulate=True).reshape(pulled.shape)
    pulled[(slice(None), *index)] = grad
    return pulled


@register_jacobian(*functions("select"), secant="linear")
def select(input: Tensor, dim: int, index: int, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad where it was taken from, 0 elsewhere."""
    pulled = grad.new_zeros(len(grad), *input.shape)
    pulled.select(dim % input.dim() + 1, index).copy_(grad)
    return pulled


@register_jacobian(*functions("narrow"), secant="linear")
def narrow(input: Tensor, dim: int, start: int, length: int, *, y: Tensor, grad: Tensor) -> Tensor:
    """Grad where it was taken from, 0 elsewhere."""
    pulled = grad.new_zeros(len(grad), *input.shape)
    pulled.narrow(dim % input.dim() + 1, start, length).copy_(grad)
    return pulled


@register_jacobian(*functions("unbind"), secant="linear")
def unbind(input: Tensor, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> Tensor:
    """The parts stacked again."""
    return torch.stack(_filled(y, grad), dim % input.dim() + 1)


@register_jacobian(*functions("chunk", "split", "tensor_split", "split_with_sizes"), secant="linear")
def split(
    input: Tensor, sizes: Any = None, dim: int = 0, *, y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...], **_: Any
) -> Tensor:
    """The parts joined again."""
    return torch.cat(_filled(y, grad), dim % input.dim() + 1)


def _filled(y: tuple[Tensor, ...], grad: tuple[Tensor | None, ...]) -> list[Tensor]:
    """Return the gradients, zeros where an output leads nowhere."""
    like = next(g for g in grad if g is not None)
    return [like.new_zeros(len(like), *part.shape) if g is None else g for part, g in zip(y, grad, strict=True)]


@register_jacobian(*functions("cat", "concat", "concatenate"), secant="linear")
def cat(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.split([part.shape[dim] for part in tensors], dim % y.dim() + 1))


@register_jacobian(*functions("stack"), secant="linear")
def stack(tensors: Any, dim: int = 0, *, y: Tensor, grad: Tensor) -> Any:
    """Each part gets its own piece."""
    return list(grad.unbind(dim % y.dim() + 1))
