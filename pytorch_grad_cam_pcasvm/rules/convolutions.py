"""Convolutions, transposed ones, and the patches that they look at."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn import grad as nn_grad

from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian

_INPUTS = (nn_grad.conv1d_input, nn_grad.conv2d_input, nn_grad.conv3d_input)
_WEIGHTS = (nn_grad.conv1d_weight, nn_grad.conv2d_weight, nn_grad.conv3d_weight)
_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)


_DENSE = aten("conv1d.default", "conv2d.default", "conv3d.default")


def _has_batch(input: Tensor, weight: Tensor, *args: Any, y: Tensor) -> bool:
    return input.dim() == weight.dim()


@register_jacobian(*_DENSE, secant="linear", needs="others", relevance="weighted", by_image=_has_batch)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    y: Tensor,
    grad: Tensor,
) -> Any:
    """The transposed convolution; of the weight, the patches of the input."""
    spatial = weight.dim() - 2
    options = (stride, padding, dilation, groups)

    def of_input() -> Tensor:
        # An image without a batch dimension has one here: that of the targets.
        batched = grad.flatten(0, -spatial - 2)
        shape = (batched.shape[0], *input.shape[-spatial - 1 :])
        return _INPUTS[spatial - 1](shape, weight, batched, *options).reshape(len(grad), *input.shape)

    def pull_weight(part: Tensor) -> Tensor:
        return _WEIGHTS[spatial - 1](_batch(input, spatial), weight.shape, _batch(part, spatial), *options)

    return of_input, lambda: torch.stack([pull_weight(part) for part in grad]), lambda: _sum_bias(grad, spatial)


def _batch(x: Tensor, spatial: int) -> Tensor:
    return x.unsqueeze(0) if x.dim() == spatial + 1 else x


def _sum_bias(grad: Tensor, spatial: int) -> Tensor:
    """Sum over images and positions."""
    return grad.flatten(-spatial).sum(-1).reshape(len(grad), -1, grad.shape[-spatial - 1]).sum(1)


@register_jacobian(*aten("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), secant="linear", needs="others")
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    y: Tensor,
    grad: Tensor,
) -> Any:
    """The convolution; of the weight, the patches of the input."""
    spatial = weight.dim() - 2
    options = (stride, padding, dilation, groups)

    def of_input() -> Tensor:
        pulled = _CONVOLUTIONS[spatial - 1](grad.flatten(0, -spatial - 2), weight, None, *options)
        for dim in range(-spatial, 0):  # an output_padding may bring one more
            pulled = pulled.narrow(dim, 0, input.shape[dim])
        return pulled.reshape(len(grad), *input.shape)

    def pull_weight(part: Tensor) -> Tensor:
        return _WEIGHTS[spatial - 1](_batch(part, spatial), weight.shape, _batch(input, spatial), *options)

    return of_input, lambda: torch.stack([pull_weight(part) for part in grad]), lambda: _sum_bias(grad, spatial)


@register_jacobian(*aten("convolution", "_convolution"), secant="linear", needs="others")
def either_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, *rest: Any, y: Tensor, grad: Tensor,
) -> Any:  # fmt: skip
    """A convolution or a transposed one, in the form that decompositions call."""
    if transposed:
        options = (stride, padding, output_padding, groups, dilation)
        return transposed_convolution(input, weight, bias, *options, y=y, grad=grad)
    return convolution(input, weight, bias, stride, padding, dilation, groups, y=y, grad=grad)


@register_jacobian(*aten("im2col"), secant="linear", needs="nothing", by_image=True)
def unfold(
    input: Tensor,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
    *,
    y: Tensor,
    grad: Tensor,
) -> Tensor:
    """The patches put back, overlapping ones added."""
    patches = grad.flatten(0, -3)
    return F.fold(patches, input.shape[-2:], kernel_size, dilation, padding, stride).reshape(len(grad), *input.shape)


@register_jacobian(*aten("col2im"), secant="linear", needs="nothing")
def fold(
    input: Tensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
    *,
    y: Tensor,
    grad: Tensor,
) -> Tensor:
    """The patches taken again."""
    images = grad.flatten(0, -4)
    return F.unfold(images, kernel_size, dilation, padding, stride).reshape(len(grad), *input.shape)
