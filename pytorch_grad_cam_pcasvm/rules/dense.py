"""Affine layers and norms."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn import grad as nn_grad

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.rules.registry import Base, functions, register_jacobian, unbroadcast


@register_jacobian(F.linear, secant="linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, y: Tensor, grad: Tensor) -> Any:
    """``y = x W^T + b``."""
    return (
        lambda: grad @ weight,
        lambda: torch.einsum("k...o,...i->koi", grad, input),
        lambda: grad.flatten(1, -2).sum(1) if grad.dim() > 2 else grad,
    )


@register_jacobian(*functions("matmul", "bmm", "mm"), torch.Tensor.__matmul__, secant="linear")
def matmul(input: Tensor, other: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """``y = A B`` for matrices, or stacks of them."""
    if input.dim() < 2 or other.dim() < 2:
        raise NoClosedFormError("a product of a matrix and a vector has no rule", "give the vector a second dimension")
    return lambda: unbroadcast(grad @ other.mT, input), lambda: unbroadcast(input.mT @ grad, other)


@register_jacobian(torch.conv1d, torch.conv2d, torch.conv3d, secant="linear")
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
) -> Tensor:
    """The transposed convolution."""
    spatial = weight.dim() - 2
    if padding == "valid":
        padding = 0
    elif padding == "same":
        dilations = [dilation] * spatial if isinstance(dilation, int) else dilation
        total = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):
            raise NoClosedFormError("a convolution with uneven 'same' padding has no rule")
        padding = [t // 2 for t in total]
    inputs = (nn_grad.conv1d_input, nn_grad.conv2d_input, nn_grad.conv3d_input)[spatial - 1]
    # An image without a batch dimension has one here: that of the targets.
    batched = grad.flatten(0, -spatial - 2)
    shape = (len(batched), *input.shape[-spatial - 1 :])
    return inputs(shape, weight, batched, stride, padding, dilation, groups).reshape(len(grad), *input.shape)


@register_jacobian(F.batch_norm, secant="linear")
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    y: Tensor,
    grad: Tensor,
) -> Tensor:
    """``grad weight / sqrt(var + eps)``, channel by channel."""
    if training or running_var is None:
        raise NoClosedFormError("a BatchNorm without running statistics mixes the images of a batch")
    scale = torch.rsqrt(running_var + eps)
    scale = scale if weight is None else scale * weight
    return grad * scale.reshape(-1, *[1] * (input.dim() - 2))


def layer_norm(
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
    y: Tensor,
    grad: Tensor,
    base: Base | None = None,
) -> Tensor:
    """``y = c / s``: ``dy = (dc - mean(y) ds) / mean(s)`` with ``ds = mean(mean(c) dc) / mean(s)``, s the deviation."""
    # c is x without its mean, s = sqrt(mean(c^2) + eps); without a baseline the means are the numbers themselves. With
    # 1 / s in place of s this would be exact, too, but of huge terms that cancel, where a baseline of zeros has no s.
    dims = [-1 - i for i in range(len(normalized_shape))]

    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        centred = x - x.mean(dims, keepdim=True)
        return centred, torch.sqrt(centred.square().mean(dims, keepdim=True) + eps)

    centred, deviation = parts(input)
    normal = centred / deviation
    if base is not None:
        centred0, deviation0 = parts(base.args[0])
        normal = (normal + centred0 / deviation0) / 2
        centred, deviation = (centred + centred0) / 2, (deviation + deviation0) / 2
    grad = grad if weight is None else grad * weight
    pulled = (grad - centred / deviation * (grad * normal).mean(dims, keepdim=True)) / deviation
    return pulled - pulled.mean(dims, keepdim=True)


register_jacobian(F.layer_norm, torch.layer_norm, secant=layer_norm)(layer_norm)
