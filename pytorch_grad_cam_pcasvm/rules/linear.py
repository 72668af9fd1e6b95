"""Linear operations: dense layers, products of matrices, convolutions, and the patches that these look at."""

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn import grad as nn_grad

from pytorch_grad_cam_pcasvm.rules.cotangents import BehindDense, by_rows, by_weight
from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian, unbroadcast
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError


def _find_row(dim: int, *args: Any, y: Tensor, **options: Any) -> int | None:
    return dim if dim < y.dim() - 1 else None


@register_jacobian(*aten("linear"), secant="linear", needs="others", tokens=_find_row, relevance="weighted")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, y: Tensor, grad: Tensor) -> Any:
    """``y = x W^T + b``."""
    return (
        lambda: BehindDense(grad, weight, input.shape) if input.dim() == 2 else by_weight(grad, weight),
        lambda: torch.einsum("k...o,...i->koi", grad, input),
        lambda: grad.flatten(1, -2).sum(1) if grad.dim() > 2 else grad,
    )


def _queries(dim: int, input: Tensor, *args: Any, y: Tensor) -> list[int | None] | None:
    rows = dim == y.dim() - 2 and input.dim() == y.dim() and input.layout is torch.strided
    return [dim, None] if rows else None


@register_jacobian(
    *aten("matmul", "bmm", "mm", "mv", "dot", "_sparse_mm"),
    secant="linear",
    needs="others",
    tokens=_queries,
    relevance="divided",
)
def matmul(input: Tensor, other: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """``y = A B`` for matrices, or stacks of them; a vector is a matrix of one column, or row."""
    if other.dim() == 1:
        of_input, of_column = matmul(input, other.unsqueeze(1), y=y, grad=grad.unsqueeze(-1))
        return of_input, lambda: of_column().squeeze(-1)
    if input.dim() == 1:
        of_row, of_other = matmul(input.unsqueeze(0), other, y=y, grad=grad.unsqueeze(-2))
        return lambda: of_row().squeeze(-2), of_other
    if input.layout is not torch.strided:  # a constant
        return None, lambda: torch.stack([input.t() @ part for part in grad])
    return (
        lambda: unbroadcast(by_rows(grad, other.mT), input),
        lambda: unbroadcast(by_rows(grad.mT, input).mT, other),
    )


@register_jacobian(*aten("addmm", "baddbmm", "addmv"), secant="linear", needs="others")
def addmm(
    input: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1, y: Tensor, grad: Tensor
) -> Any:
    """``y = beta C + alpha A B``."""
    return lambda: unbroadcast(beta * grad, input), *matmul(first, second, y=y, grad=alpha * grad)


@register_jacobian(*aten("outer"), secant="linear", needs="others")
def outer(input: Tensor, vec2: Tensor, *, y: Tensor, grad: Tensor) -> Any:
    """``y_ij = a_i b_j``."""
    return lambda: grad @ vec2, lambda: input @ grad


@register_jacobian(*aten("bilinear"), secant="linear", needs="others")
def bilinear(
    input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None, *, y: Tensor, grad: Tensor
) -> Any:
    """``y_o = a W_o b``."""
    return (
        lambda: torch.einsum("k...o,oij,...j->k...i", grad, weight, input2),
        lambda: torch.einsum("k...o,oij,...i->k...j", grad, weight, input1),
    )


def _takes_no_diagonal(equation: str, *rest: Any) -> bool:
    terms = equation.replace(" ", "").replace("...", "").partition("->")[0].split(",")
    return all(len(set(term)) == len(term) for term in terms)


@register_jacobian(*aten("einsum"), needs="others", holds=_takes_no_diagonal)
def einsum(
    equation: str, tensors: Sequence[Tensor], *rest: Any, y: Tensor, grad: Tensor, base: Call | None = None
) -> Any:
    """Grad in the place of the operand, for each of them."""
    factors = tensors
    if base is not None:
        tensors0 = base.args[1]
        if sum(x is not x0 for x, x0 in zip(tensors, tensors0, strict=True)) > 2:
            raise NoClosedFormError(
                "an einsum of more than two values that change has no secant", "multiply two at a time"
            )
        factors = [mid(*pair) for pair in zip(tensors, tensors0, strict=True)]
    terms, result, targets = _subscripts(equation, tensors)

    def pull(place: int) -> Tensor:
        remaining = [(term, x) for i, (term, x) in enumerate(zip(terms, factors, strict=True)) if i != place]
        available = result + "".join(term for term, _ in remaining)
        common = "".join(letter for letter in terms[place] if letter in available)
        sources = ",".join([targets + result, *(term for term, _ in remaining)])
        pulled = torch.einsum(f"{sources}->{targets}{common}", grad, *(x for _, x in remaining))
        # A letter that is in no other place was summed over: the gradient is the same all along it.
        for dim, letter in enumerate(terms[place]):
            pulled = pulled if letter in common else pulled.unsqueeze(dim + 1)
        pulled = unbroadcast(pulled, tensors[place])
        return pulled.expand(len(grad), *tensors[place].shape)

    return None, [lambda place=place: pull(place) for place in range(len(tensors))]


def _subscripts(equation: str, tensors: Sequence[Tensor]) -> tuple[list[str], str, str]:
    """Return the letters of every operand and of the result, an ellipsis written out, and a letter for the targets."""
    left, arrow, result = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    targets, *free = [letter for letter in string.ascii_letters if letter not in equation]
    spans = [x.dim() - len(term) + 3 if "..." in term else 0 for term, x in zip(terms, tensors, strict=True)]
    hidden = "".join(free[: max(spans)])
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        result = "..." * ("..." in left) + "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    terms = [term.replace("...", hidden[len(hidden) - span :]) for term, span in zip(terms, spans, strict=True)]
    return terms, result.replace("...", hidden), targets


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
