"""Pooling, means and sums: over the last dimensions, whatever stands before them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.registry import aten, list_dims, register_jacobian, with_dims
from pytorch_grad_cam_pcasvm.rules.rule import Call


def _over_positions(input: Tensor, dim: Any = None, *args: Any, y: Tensor, **options: Any) -> bool:
    return list_dims(input, dim) == list(range(2, input.dim()))


def _image_by_image(input: Tensor, dim: Any = None, *args: Any, y: Tensor, **options: Any) -> bool:
    return 0 not in list_dims(input, dim)


@register_jacobian(
    *aten("mean"), keeps_sums=_over_positions, secant="linear", needs="nothing", by_image=_image_by_image
)
def mean(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Tensor, grad: Tensor, dtype: Any = None
) -> Tensor:
    """Grad / count at every position, which stays unexpanded in memory."""
    dims = list_dims(input, dim)
    return total(input, dim, keepdim, y=y, grad=grad / math.prod(input.shape[d] for d in dims))


@register_jacobian(*aten("sum"), secant="linear", needs="nothing", by_image=_image_by_image)
def total(
    input: Tensor, dim: Any = None, keepdim: bool = False, *, y: Tensor, grad: Tensor, dtype: Any = None
) -> Tensor:
    """Grad at every position, which stays unexpanded in memory."""
    return with_dims(grad, list_dims(input, dim), keepdim).expand(len(grad), *input.shape)


@register_jacobian(*aten("cumsum"), secant="linear", needs="nothing")
def cumsum(input: Tensor, dim: int, *, y: Tensor, grad: Tensor, dtype: Any = None) -> Tensor:
    """The sums from behind."""
    axis = dim % input.dim() + 1
    return grad.flip(axis).cumsum(axis).flip(axis)


def _average_axis(grad: Tensor, axis: int, start: Tensor, end: Tensor, divisor: Tensor, size: int) -> Tensor:
    """Multiply one axis of grad by the matrix that averages positions start_i <= j < end_i."""
    j = torch.arange(size, device=grad.device)
    inside = (j >= start.unsqueeze(1)) & (j < end.unsqueeze(1))
    matrix = inside.to(grad.dtype) / divisor.unsqueeze(1)
    return (grad.transpose(axis, -1) @ matrix).transpose(axis, -1)


def _adaptive_average(spatial: int) -> Callable[..., Tensor]:
    def rule(input: Tensor, output_size: Any, *, y: Tensor, grad: Tensor) -> Tensor:
        """Average pooling is separable: one small averaging matrix per axis, and the pullback multiplies by each."""
        # Of a mean over an axis the gradient is the same along it, and stays unexpanded in memory.
        grad = grad / math.prod(input.shape[axis] for axis in range(-spatial, 0) if y.shape[axis] == 1)
        for axis in range(-spatial, 0):
            size, count = input.shape[axis], y.shape[axis]
            if count == 1:
                continue
            i = torch.arange(count, device=grad.device)
            start, end = i * size // count, -(-(i + 1) * size // count)
            grad = _average_axis(grad, axis, start, end, end - start, size)
        return grad.expand(len(grad), *input.shape)

    return rule


def _average_pool(spatial: int) -> Callable[..., Tensor]:
    def rule(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        y: Tensor,
        grad: Tensor,
    ) -> Tensor:
        """One small averaging matrix per axis."""
        kernels, paddings, strides = (_expand(v, spatial) for v in (kernel_size, padding, stride or kernel_size))
        for axis, kernel, step, pad in zip(range(-spatial, 0), kernels, strides, paddings, strict=True):
            size = input.shape[axis]
            first = torch.arange(y.shape[axis], device=grad.device) * step - pad
            last = (first + kernel).clamp(max=size + pad)
            start, end = first.clamp(min=0), last.clamp(max=size)
            divisor = last - first if count_include_pad else end - start
            grad = _average_axis(grad, axis, start, end, torch.ones_like(first) if divisor_override else divisor, size)
        return grad / divisor_override if divisor_override else grad

    return rule


def _keeps_sums(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    y: Tensor,
) -> bool:
    padded = padding if isinstance(padding, int) else any(padding)
    return not divisor_override and not (padded and count_include_pad)


def _expand(value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _unpool(
    pool: Callable[[Tensor], tuple[Tensor, Tensor]], spatial: int, input: Tensor, grad: Tensor, base: Call | None
) -> Tensor:
    """Send the gradient of every pooled maximum to its position."""
    y, indices = pool(input)
    if base is not None:
        input0 = base.args[0]
        y0, indices0 = pool(input0)
        # As DeepLIFT: to where x has its maximum if that has grown, otherwise to where x0 had it. What the maximum has
        # changed by is a share, between 0 and 1, of what x has changed by there.
        indices = torch.where(y >= y0, indices, indices0)
        change = (input - input0).flatten(-spatial).gather(-1, indices.flatten(-spatial)).reshape(y.shape)
        grad = grad * torch.where(change == 0, 1.0, (y - y0) / change)
    flat = grad.flatten(-spatial)
    pulled = grad.new_zeros(*flat.shape[:-1], math.prod(input.shape[-spatial:]))
    return pulled.scatter_add(-1, indices.flatten(-spatial).expand_as(flat), flat).reshape(len(grad), *input.shape)


def _max_pool(spatial: int) -> Callable[..., Tensor]:
    pool = getattr(F, f"max_pool{spatial}d")

    def rule(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        *,
        y: Tensor,
        grad: Tensor,
        base: Call | None = None,
    ) -> Tensor:
        """A maximum sends its whole gradient to one position of its channel, so the sum over positions stays."""
        options = (kernel_size, stride or None, padding, dilation, ceil_mode)
        return _unpool(lambda x: pool(x, *options, return_indices=True), spatial, input, grad, base)

    return rule


def _adaptive_max_pool(spatial: int) -> Callable[..., Tensor]:
    pool = getattr(F, f"adaptive_max_pool{spatial}d")

    def rule(input: Tensor, output_size: Any, *, y: Any, grad: Any, base: Call | None = None) -> Tensor:
        """A maximum sends its whole gradient to one position of its channel, so the sum over positions stays."""
        size = y[0].shape[-spatial:]
        return _unpool(lambda x: pool(x, size, return_indices=True), spatial, input, grad[0], base)

    return rule


def _with_indices(rule: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of_values(input: Tensor, *args: Any, y: Any, grad: Any, base: Call | None = None) -> Tensor:
        """The same for a pool that returns the positions as well."""
        return rule(input, *args, y=y[0], grad=grad[0], base=base)

    return of_values


def _register(
    name: str, rule: Callable[..., Tensor], keeps_sums: Callable[..., bool] | None = None, **facts: Any
) -> None:
    spatial = int(name.partition("pool")[2][0])

    def keeps(input: Tensor, *args: Any, y: Tensor, **options: Any) -> bool:
        # An image without a batch, or features taken for one, have no positions behind (N, T).
        positions = input.dim() - spatial >= 2
        return positions and (keeps_sums is None or keeps_sums(input, *args, y=y, **options))

    register_jacobian(*aten(name), keeps_sums=keeps, by_image=True, **facts)(rule)


def _keeps_size(input: Tensor, *args: Any, y: Tensor) -> bool:
    return input.shape == y.shape


_MEANS: dict[str, Any] = {"secant": "linear", "needs": "nothing"}
_EXTREMES: dict[str, Any] = {"needs": "inputs", "relevance": "moved"}
for _spatial in (1, 2, 3):
    _register(f"adaptive_avg_pool{_spatial}d", _adaptive_average(_spatial), keeps_numbers=_keeps_size, **_MEANS)
    _register(f"avg_pool{_spatial}d", _average_pool(_spatial), _keeps_sums, **_MEANS)
    _register(f"max_pool{_spatial}d", _max_pool(_spatial), **_EXTREMES)
    _register(f"max_pool{_spatial}d_with_indices", _with_indices(_max_pool(_spatial)), **_EXTREMES)
    _register(f"adaptive_max_pool{_spatial}d", _adaptive_max_pool(_spatial), **_EXTREMES)
