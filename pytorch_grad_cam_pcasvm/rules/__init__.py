"""Closed-form Jacobians of torch layers: one short rule per layer.

A rule takes ``(layer, x, y, grad)``: the module, its input x (N, ...), its output y (N, ...) and ``grad``, the
derivative of K targets with respect to y, of shape (N, K, *y.shape[1:]). It returns the derivative with respect to x,
of shape (N, K, *x.shape[1:]), that is ``grad @ dy/dx``. Where a layer joins several tensors (add, cat), x is a tuple
of them and so is the result. ``register_jacobian`` adds a rule::

    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    @register_jacobian(Swish)
    def swish(layer, x, y, grad):
        s = torch.sigmoid(x)
        return grad * (s + y * (1 - s)).unsqueeze(1)

Functions and tensor methods (``F.relu``, ``x.flatten(1)``) are read as the module that does the same.
"""

import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn import grad as nn_grad
from torchvision.ops import Permute as TorchvisionPermute
from torchvision.ops import StochasticDepth
from torchvision.ops.stochastic_depth import stochastic_depth

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError

JacobianRule = Callable[[Any, Any, Tensor, Tensor], Any]

_rules: dict[type, JacobianRule] = {}
_keeps_sums: dict[type, Callable[[Any, Tensor, Tensor], bool]] = {}
_readings: dict[Any, Callable[..., tuple[type, Any, tuple[Any, ...]]]] = {}


def register_jacobian(
    *layers: type[nn.Module], keeps_sums: Callable[[Any, Tensor, Tensor], bool] | None = None
) -> Callable[[JacobianRule], JacobianRule]:
    """Register the closed-form Jacobian of one or more layer classes.

    The decorated rule takes ``(layer, x, y, grad)`` and returns ``grad @ dy/dx`` (see the module's text for shapes). It
    serves subclasses too, unless they define a ``forward`` of their own.

    Args:
        *layers: the module classes.
        keeps_sums: given ``(layer, x, y)``, whether the sum of the gradient over the positions of a channel is the same
            before and after the layer; the layer's pullback is then not needed for the weights of a map.

    Returns:
        A decorator that gives the rule back unchanged.

    Raises:
        TypeError: a layer is not a module class.
    """
    if not layers or not all(isinstance(layer, type) and issubclass(layer, nn.Module) for layer in layers):
        raise TypeError(f"register_jacobian takes layer classes, as in @register_jacobian(nn.ReLU), got {layers!r:.80}")

    def register(rule: JacobianRule) -> JacobianRule:
        for layer in layers:
            _rules[layer] = rule
            if keeps_sums is not None:
                _keeps_sums[layer] = keeps_sums
        return rule

    return register


def rule_kind(kind: type) -> type | None:
    """Return the registered class whose rule serves modules of class ``kind``, or None."""
    for base in kind.__mro__:
        if base in _rules:
            return base if getattr(kind, "forward", None) is getattr(base, "forward", None) else None
    return None


def rule_of(kind: type) -> JacobianRule:
    """Return the rule registered for exactly this class."""
    return _rules[kind]


def keeps_sums(kind: type, layer: Any, x: Tensor, y: Tensor) -> bool:
    """Return whether the layer leaves the gradient's sum over the positions of every channel as it is."""
    return kind in _keeps_sums and _keeps_sums[kind](layer, x, y)


def reading_of(function: Any) -> Callable[..., tuple[type, Any, tuple[Any, ...]]] | None:
    """Return what reads a call of a function or method as (registered class, its attributes, its tensor inputs)."""
    return _readings.get(function)


def _reads(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(reading: Callable[..., Any]) -> Callable[..., Any]:
        _readings.update(dict.fromkeys(functions, reading))
        return reading

    return register


def _always(layer: Any, x: Tensor, y: Tensor) -> bool:
    return True


# --- elementwise: y_i = f(x_i), so the Jacobian is diag(f'(x)) ------------------------------------------------------


def _elementwise(
    *layers: type[nn.Module], functions: Sequence[Any]
) -> Callable[[Callable[[Any, Tensor, Tensor], Tensor]], Callable[[Any, Tensor, Tensor], Tensor]]:
    """Register ``slope(layer, x, y)``, the derivative f'(x) of shape (N, ...), for layers and their functions."""

    def register(slope: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
        @register_jacobian(*layers)
        def rule(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
            return grad * slope(layer, x.to(grad.dtype), y.to(grad.dtype)).unsqueeze(1)

        @_reads(*functions)
        def reading(x: Any, *args: Any, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
            return layers[0], layers[0](*args, **kwargs), (x,)

        return slope

    return register


@_elementwise(nn.ReLU, functions=[F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"])
def _relu(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return (y > 0).to(y.dtype)


@_elementwise(nn.ReLU6, nn.Hardtanh, functions=[F.relu6])
def _hardtanh(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((x > layer.min_val) & (x < layer.max_val)).to(x.dtype)


@_elementwise(nn.LeakyReLU, functions=[F.leaky_relu])
def _leaky_relu(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > 0, torch.ones_like(x), layer.negative_slope)


@_elementwise(nn.ELU, functions=[F.elu])
def _elu(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x > 0, 1.0, layer.alpha * x.clamp(max=0).exp())


@_elementwise(nn.Sigmoid, functions=[F.sigmoid, torch.sigmoid, "sigmoid"])
def _sigmoid(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return y * (1 - y)


@_elementwise(nn.Tanh, functions=[F.tanh, torch.tanh, "tanh"])
def _tanh(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return 1 - y * y


@_elementwise(nn.SiLU, functions=[F.silu])
def _silu(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


@_elementwise(nn.GELU, functions=[F.gelu])
def _gelu(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    if layer.approximate == "tanh":
        c = math.sqrt(2 / math.pi)
        t = torch.tanh(c * (x + 0.044715 * x**3))
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


@_elementwise(nn.Hardsigmoid, functions=[F.hardsigmoid])
def _hardsigmoid(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return ((x > -3) & (x < 3)).to(x.dtype) / 6


@_elementwise(nn.Hardswish, functions=[F.hardswish])
def _hardswish(layer: Any, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x >= 3, 1.0, torch.where(x <= -3, 0.0, x / 3 + 0.5))


# --- the same numbers in another shape ------------------------------------------------------------------------------


class _Reshape(nn.Module):
    """Any change of shape that keeps the order of the numbers and the batch dimension first."""


@register_jacobian(
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, keeps_sums=_always
)
@register_jacobian(nn.FeatureAlphaDropout, StochasticDepth, keeps_sums=_always)
def _identity(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return grad


@register_jacobian(nn.Flatten, nn.Unflatten, _Reshape, keeps_sums=lambda layer, x, y: y.dim() == 2)
def _reshape(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    if x.shape[0] != y.shape[0]:
        raise NoClosedFormError(f"a reshape from {tuple(x.shape)} to {tuple(y.shape)} moves the batch dimension")
    return grad.reshape(*grad.shape[:2], *x.shape[1:])


@_reads(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)
@_reads(stochastic_depth, "contiguous", "clone", torch.clone, "float", "double", "half", "bfloat16", "to", "type_as")
def _read_identity(x: Any, *args: Any, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
    return nn.Identity, None, (x,)


@_reads(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze)
@_reads("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten", "view_as", "reshape_as")
def _read_reshape(x: Any, *args: Any, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
    return _Reshape, None, (x,)


@register_jacobian(TorchvisionPermute)
def _permute(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    inverse = [0] * x.dim()
    for position, dim in enumerate(layer.dims):
        inverse[dim % x.dim()] = position
    if inverse[0] != 0:
        raise NoClosedFormError(f"a permutation to {tuple(layer.dims)} moves the batch dimension")
    return grad.permute(0, 1, *(dim + 1 for dim in inverse[1:]))


@_reads(torch.permute, "permute")
def _read_permute(x: Any, *dims: Any, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
    dims = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
    return TorchvisionPermute, SimpleNamespace(dims=list(dims)), (x,)


class _Transpose(nn.Module):
    """Two dimensions change places."""


@register_jacobian(_Transpose)
def _transpose(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    first, second = layer.dim0 % x.dim(), layer.dim1 % x.dim()
    if 0 in (first, second):
        raise NoClosedFormError("a transpose moves the batch dimension")
    return grad.transpose(first + 1, second + 1)


@_reads(torch.transpose, "transpose", torch.swapaxes, "swapaxes")
def _read_transpose(
    x: Any, dim0: int | None = None, dim1: int | None = None, *, axis0: int = 0, axis1: int = 0
) -> tuple[type, Any, tuple[Any, ...]]:
    dim0, dim1 = (axis0 if dim0 is None else dim0), (axis1 if dim1 is None else dim1)
    return _Transpose, SimpleNamespace(dim0=dim0, dim1=dim1), (x,)


# --- affine layers --------------------------------------------------------------------------------------------------


@register_jacobian(nn.Linear)
def _linear(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return grad @ layer.weight.to(grad.dtype)


@_reads(F.linear)
def _read_linear(x: Any, weight: Any, bias: Any = None) -> tuple[type, Any, tuple[Any, ...]]:
    return nn.Linear, SimpleNamespace(weight=weight), (x,)


@register_jacobian(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    padding = layer.padding
    if padding == "valid":
        padding = 0
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.weight.shape[2:], strict=True)]
        if any(t % 2 for t in total):
            raise NoClosedFormError("a convolution with uneven 'same' padding has no rule")
        padding = [t // 2 for t in total]
    if getattr(layer, "padding_mode", "zeros") != "zeros":
        raise NoClosedFormError(f"a convolution with {layer.padding_mode!r} padding has no rule")
    inputs = {3: nn_grad.conv1d_input, 4: nn_grad.conv2d_input, 5: nn_grad.conv3d_input}[x.dim()]
    flat = inputs(
        (grad.shape[0] * grad.shape[1], *x.shape[1:]),
        layer.weight.to(grad.dtype),
        grad.flatten(0, 1),
        layer.stride,
        padding,
        layer.dilation,
        layer.groups,
    )
    return flat.unflatten(0, grad.shape[:2])


@register_jacobian(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def _batch_norm(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    if layer.running_var is None:
        raise NoClosedFormError("a BatchNorm without running statistics mixes the images of a batch")
    scale = torch.rsqrt(layer.running_var.to(grad.dtype) + layer.eps)
    if layer.weight is not None:
        scale = scale * layer.weight.to(grad.dtype)
    return grad * scale.reshape(-1, *[1] * (x.dim() - 2))


@_reads(F.batch_norm)
def _read_batch_norm(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[type, Any, tuple[Any, ...]]:
    running_var = None if training else running_var
    return nn.BatchNorm2d, SimpleNamespace(running_var=running_var, weight=weight, eps=eps), (x,)


@register_jacobian(nn.LayerNorm)
def _layer_norm(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    dims = [-1 - i for i in range(len(layer.normalized_shape))]
    x = x.to(grad.dtype).unsqueeze(1)
    centred = x - x.mean(dims, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dims, keepdim=True) + layer.eps)
    normal = centred * inverse
    if layer.weight is not None:
        grad = grad * layer.weight.to(grad.dtype)
    return inverse * (grad - grad.mean(dims, keepdim=True) - normal * (grad * normal).mean(dims, keepdim=True))


@_reads(F.layer_norm)
def _read_layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> tuple[type, Any, tuple[Any, ...]]:
    return nn.LayerNorm, SimpleNamespace(normalized_shape=normalized_shape, weight=weight, eps=eps), (x,)


# --- pooling --------------------------------------------------------------------------------------------------------


class _Mean(nn.Module):
    """The mean over some dimensions."""


def _mean_dims(layer: Any, x: Tensor) -> list[int]:
    dims = range(x.dim()) if layer.dim is None else [layer.dim] if isinstance(layer.dim, int) else layer.dim
    return sorted(dim % x.dim() for dim in dims)


@register_jacobian(_Mean, keeps_sums=lambda layer, x, y: _mean_dims(layer, x) == list(range(2, x.dim())))
def _mean(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    dims = _mean_dims(layer, x)
    if 0 in dims:
        raise NoClosedFormError("a mean over the batch mixes its images")
    if not layer.keepdim:
        for dim in dims:
            grad = grad.unsqueeze(dim + 1)
    return (grad / math.prod(x.shape[dim] for dim in dims)).expand(*grad.shape[:2], *x.shape[1:])


@_reads(torch.mean, "mean")
def _read_mean(
    x: Any, dim: Any = None, keepdim: bool = False, *, axis: Any = None, dtype: Any = None
) -> tuple[type, Any, tuple[Any, ...]]:
    dim = axis if dim is None else dim
    return _Mean, SimpleNamespace(dim=dim, keepdim=keepdim), (x,)


@register_jacobian(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, keeps_sums=_always)
def _adaptive_avg_pool(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    # Average pooling is separable: one small averaging matrix per axis, and the pullback multiplies by each.
    for axis in range(2, x.dim()):
        i = torch.arange(y.shape[axis], device=grad.device)
        size, count = x.shape[axis], y.shape[axis]
        start, end = i * size // count, -(-(i + 1) * size // count)
        grad = _average(grad, axis, start, end, end - start, size)
    return grad


def _keeps_sums_avg_pool(layer: Any, x: Tensor, y: Tensor) -> bool:
    padded = any(_each(layer.padding, x.dim() - 2))
    return getattr(layer, "divisor_override", None) is None and not (padded and layer.count_include_pad)


@register_jacobian(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, keeps_sums=_keeps_sums_avg_pool)
def _avg_pool(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    spatial = x.dim() - 2
    kernels, paddings = _each(layer.kernel_size, spatial), _each(layer.padding, spatial)
    strides = _each(layer.stride if layer.stride is not None else layer.kernel_size, spatial)
    override = getattr(layer, "divisor_override", None)
    for axis, kernel, stride, padding in zip(range(2, x.dim()), kernels, strides, paddings, strict=True):
        size = x.shape[axis]
        first = torch.arange(y.shape[axis], device=grad.device) * stride - padding
        last = (first + kernel).clamp(max=size + padding)
        start, end = first.clamp(min=0), last.clamp(max=size)
        divisor = torch.ones_like(first) if override else last - first if layer.count_include_pad else end - start
        grad = _average(grad, axis, start, end, divisor, size)
    return grad / override if override else grad


def _average(grad: Tensor, axis: int, start: Tensor, end: Tensor, divisor: Tensor, size: int) -> Tensor:
    """Multiply one axis of grad by the matrix that averages positions start_i <= j < end_i: (N, K, ...)."""
    j = torch.arange(size, device=grad.device)
    inside = (j >= start.unsqueeze(1)) & (j < end.unsqueeze(1))
    matrix = inside.to(grad.dtype) / divisor.unsqueeze(1)
    return (grad.transpose(axis + 1, -1) @ matrix).transpose(axis + 1, -1)


def _each(value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _unpool(x: Tensor, indices: Tensor, grad: Tensor) -> Tensor:
    """Send the gradient of every pooled maximum to its position: (N, K, T, ...)."""
    flat = grad.flatten(3)
    index = indices.flatten(2).unsqueeze(1).expand_as(flat)
    zeros = flat.new_zeros(*flat.shape[:3], math.prod(x.shape[2:]))
    return zeros.scatter_add(-1, index, flat).reshape(*grad.shape[:2], *x.shape[1:])


# A maximum sends its whole gradient to one position of its channel, so the sum over positions stays.
@register_jacobian(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, keeps_sums=_always)
def _max_pool(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.dim()]
    _, indices = pool(
        x, layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, return_indices=True
    )
    return _unpool(x, indices, grad)


@register_jacobian(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d, keeps_sums=_always)
def _adaptive_max_pool(layer: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    pool = {3: F.adaptive_max_pool1d, 4: F.adaptive_max_pool2d, 5: F.adaptive_max_pool3d}[x.dim()]
    _, indices = pool(x, y.shape[2:], return_indices=True)
    return _unpool(x, indices, grad)


def _read_as(layer: type[nn.Module], *functions: Any) -> None:
    @_reads(*functions)
    def reading(x: Any, *args: Any, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
        return layer, layer(*args, **kwargs), (x,)


_read_as(nn.Hardtanh, F.hardtanh)
_read_as(nn.AdaptiveAvgPool1d, F.adaptive_avg_pool1d, torch.adaptive_avg_pool1d)
_read_as(nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d)
_read_as(nn.AdaptiveAvgPool3d, F.adaptive_avg_pool3d)
_read_as(nn.AvgPool1d, F.avg_pool1d)
_read_as(nn.AvgPool2d, F.avg_pool2d)
_read_as(nn.AvgPool3d, F.avg_pool3d)
_read_as(nn.AdaptiveMaxPool1d, F.adaptive_max_pool1d)
_read_as(nn.AdaptiveMaxPool2d, F.adaptive_max_pool2d)
_read_as(nn.AdaptiveMaxPool3d, F.adaptive_max_pool3d)


@_reads(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool1d, torch.max_pool2d, torch.max_pool3d)
def _read_max_pool(
    x: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> tuple[type, Any, tuple[Any, ...]]:
    # The rule is that of every dimension. The function's order of arguments is not the module's.
    return nn.MaxPool2d, nn.MaxPool2d(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode), (x,)


# --- joins of several tensors ---------------------------------------------------------------------------------------


class _Add(nn.Module):
    """``y = a + factor b``."""


class _Multiply(nn.Module):
    """``y = a b``."""


class _Concatenate(nn.Module):
    """The tensors one after another along a dimension."""


@register_jacobian(_Add)
def _add(layer: Any, x: tuple[Any, Any], y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    second = grad if layer.factor == 1 else layer.factor * grad
    return _like(grad, x[0]), _like(second, x[1])


@register_jacobian(_Multiply)
def _multiply(layer: Any, x: tuple[Any, Any], y: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    def factor(other: Any) -> Any:
        if not isinstance(other, Tensor) or other.dim() == 0:
            return other
        batched = other.to(grad.dtype)
        return batched.unsqueeze(1) if other.dim() == y.dim() else batched

    return _like(grad * factor(x[1]), x[0]), _like(grad * factor(x[0]), x[1])


@register_jacobian(_Concatenate)
def _concatenate(layer: Any, x: tuple[Tensor, ...], y: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    dim = layer.dim % y.dim()
    if dim == 0:
        raise NoClosedFormError("a concatenation along the batch dimension has no rule")
    return grad.split([part.shape[dim] for part in x], dim + 1)


def _like(grad: Tensor, x: Any) -> Tensor:
    """Sum grad (N, K, ...) over the dimensions along which x (N, ...) was broadcast."""
    if not isinstance(x, Tensor) or x.dim() != grad.dim() - 1:
        return grad
    dims = [dim + 1 for dim in range(1, x.dim()) if x.shape[dim] == 1 and grad.shape[dim + 1] != 1]
    return grad.sum(dims, keepdim=True) if dims else grad


@_reads(operator.add, operator.iadd, torch.add, "add", "add_")
def _read_add(x: Any, other: Any, *, alpha: float = 1) -> tuple[type, Any, tuple[Any, ...]]:
    return _Add, SimpleNamespace(factor=alpha), (x, other)


@_reads(operator.sub, operator.isub, torch.sub, "sub", "sub_")
def _read_sub(x: Any, other: Any, *, alpha: float = 1) -> tuple[type, Any, tuple[Any, ...]]:
    return _Add, SimpleNamespace(factor=-alpha), (x, other)


@_reads(operator.mul, operator.imul, torch.mul, "mul", "mul_")
def _read_mul(x: Any, other: Any) -> tuple[type, Any, tuple[Any, ...]]:
    return _Multiply, None, (x, other)


@_reads(torch.cat, torch.concat, torch.concatenate)
def _read_cat(tensors: Any, dim: int = 0, **kwargs: Any) -> tuple[type, Any, tuple[Any, ...]]:
    return _Concatenate, SimpleNamespace(dim=kwargs.get("axis", dim)), tuple(tensors)
