"""Cotangents: derivatives of K targets with respect to a value, multiplied out no further than somebody asks."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced


class Cotangent:
    """The derivatives of K targets with respect to a value of shape S; where they are all the same, held once.

    Dimensions are those of the value: K, which leads, is not counted.

    Args:
        grad: shape (K, *S); dimensions along which it was expanded are kept with size 1.

    Attributes:
        shape: S.
        same: the dimensions along which the derivatives are known to be the same.
    """

    shape: torch.Size
    same: Sequence[int] = ()

    def __init__(self, grad: Tensor) -> None:
        self.shape = grad.shape[1:]
        self.same = [dim for dim, size in enumerate(self.shape) if size == 1 or (size and not grad.stride(dim + 1))]
        for dim in self.same:
            grad = grad.narrow(dim + 1, 0, 1)
        self.base = grad

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the derivatives."""
        return self.base.dtype

    def dense(self) -> Tensor:
        """Return the derivatives, shape (K, *S)."""
        return self.base.expand(len(self.base), *self.shape)

    def reaches(self, dim: int, start: int, length: int) -> bool:
        """Return whether the derivatives at some positions of a dimension may be other than 0."""
        return True

    def map(self, function: Callable[[Tensor], Tensor]) -> "Cotangent":
        """Return a function of every number."""
        return Cotangent(function(self.base).expand(len(self.base), *self.shape))

    def narrow(self, dim: int, start: int, length: int) -> "Cotangent":
        """Return the derivatives at some positions of a dimension."""
        return self if length == self.shape[dim] else Cotangent(self.dense().narrow(dim + 1, start, length))

    def view(self, shape: Sequence[int]) -> "Cotangent":
        """Return the derivatives with respect to the same numbers in another shape."""
        if tuple(shape) == self.shape:
            return self
        grad = self.dense()
        return Cotangent(grad.reshape(len(grad), *shape))

    def sum(self, dims: Sequence[int]) -> Tensor:
        """Return the sum over dimensions, shape (K, *S) with size 1 in their places."""
        repeated = 1
        for dim in dims:
            repeated *= self.shape[dim] if dim in self.same else 1
        left = [dim + 1 for dim in dims if dim not in self.same]
        total = self.base.sum(left, keepdim=True) if left else self.base
        total = total if repeated == 1 else total * repeated
        return total.expand(-1, *(1 if dim in dims else size for dim, size in enumerate(self.shape)))

    def over_positions(self) -> Tensor:
        """Return the sum over all dimensions but the first two, (K, N, T) for a value (N, T, ...)."""
        sums = self.sum(range(2, len(self.shape)))
        return sums.reshape(sums.shape[:3])

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x (S), summed over dimensions, which fall away: (K, ...)."""
        x = x.to(self.base.dtype)
        same = [dim for dim in dims if dim in self.same]
        x = x.sum(same, keepdim=True) if same else x
        left = [dim for dim in dims if dim not in same]
        if not left:
            return (self.base * x).squeeze([dim + 1 for dim in dims])
        if not any(dim in self.same and x.shape[dim] > 1 for dim in range(x.dim())):
            return torch.stack([(part * x).sum(list(dims)) for part in self.base])
        # One number for several positions, as behind a mean: a product of matrices.
        letters = "abcdefgh"[: x.dim()]
        own = "".join(letter for dim, letter in enumerate(letters) if dim not in self.same)
        result = "".join(letter for dim, letter in enumerate(letters) if dim not in dims)
        base = self.base.squeeze([dim + 1 for dim in range(x.dim()) if dim in self.same])
        return torch.einsum(f"z{own},{letters}->z{result}", base, x)

    def along(self, x: Tensor, images: int, tokens: int) -> Tensor:
        """Return the products with x (S), summed over all but two dimensions, shape (K, N, L)."""
        products = self.times(x, [dim for dim in range(x.dim()) if dim not in (images, tokens)])
        return products if images < tokens else products.transpose(1, 2)


class Part(Cotangent):
    """Derivatives that are zero outside some positions of one dimension.

    Args:
        make: returns the derivatives at these positions, shape (K, ...), or what gives them in turn; called only if
            somebody asks for them.
        shape: of the value.
        dim: the dimension.
        start: the first position.
        length: the number of positions.
    """

    def __init__(self, make: Callable[[], Any], shape: Sequence[int], dim: int, start: int, length: int) -> None:
        self._make, self.shape = make, torch.Size(shape)
        self.dim, self.start, self.length = dim, start, length

    @cached_property
    def inner(self) -> Cotangent:
        """The derivatives at these positions."""
        return cotangent(self._make())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the derivatives."""
        return self.inner.dtype

    def map(self, function: Callable[[Tensor], Tensor]) -> Cotangent:
        """Return a function of every number."""
        return Cotangent(function(self.dense()))

    @property
    def place(self) -> tuple[int, int, int]:
        """Dimension, first position and number of positions."""
        return self.dim, self.start, self.length

    def reaches(self, dim: int, start: int, length: int) -> bool:
        """Return whether the derivatives at some positions of a dimension may be other than 0."""
        return dim != self.dim or (self.start < start + length and start < self.start + self.length)

    def dense(self) -> Tensor:
        """Return the derivatives with their zeros."""
        return self._padded(self.inner.dense(), self.dim + 1)

    def _padded(self, part: Tensor, axis: int) -> Tensor:
        whole = part.new_zeros(*part.shape[:axis], self.shape[self.dim], *part.shape[axis + 1 :])
        whole.narrow(axis, self.start, self.length).copy_(part)
        return whole

    @property
    def same(self) -> Sequence[int]:  # type: ignore[override]
        """The dimensions along which the derivatives at these positions are known to be the same."""
        return self.inner.same

    def narrow(self, dim: int, start: int, length: int) -> Cotangent:
        """Return the derivatives at some positions of a dimension."""
        if dim != self.dim:
            return Cotangent(self.dense().narrow(dim + 1, start, length))
        first, last = max(start, self.start), min(start + length, self.start + self.length)
        shape = [length if d == dim else size for d, size in enumerate(self.shape)]
        if last <= first:
            return Part(lambda: self.inner.narrow(dim, 0, 0), shape, dim, 0, 0)
        return Part(
            lambda: self.inner.narrow(dim, first - self.start, last - first), shape, dim, first - start, last - first
        )

    def sum(self, dims: Sequence[int]) -> Tensor:
        """Return the sum over dimensions, shape (K, *S) with size 1 in their places."""
        total = self.inner.sum(dims)
        return total if self.dim in dims else self._padded(total, self.dim + 1)

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x (S), summed over dimensions, which fall away: (K, ...)."""
        products = self.inner.times(x.narrow(*self.place), dims)
        return products if self.dim in dims else self._padded(products, 1 + sum(d not in dims for d in range(self.dim)))


class Outer(Cotangent):
    """Derivatives ``left^T right`` (K, ..., L, D) of a step that mixes L tokens, not multiplied out.

    Args:
        left: the left factor, shape (..., M, L), possibly with a leading K.
        right: the right factor, shape (..., M, D), possibly with a leading K.
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.shape = torch.Size([*min(left.shape[:-2], right.shape[:-2], key=len), left.shape[-1], right.shape[-1]])

    @cached_property
    def base(self) -> Tensor:  # type: ignore[override]
        """The derivatives, shape (K, ..., L, D)."""
        left = self.left.mT
        return by_rows(left, self.right) if left.dim() > self.right.dim() else by_rows(self.right.mT, left.mT).mT

    def narrow(self, dim: int, start: int, length: int) -> Cotangent:
        """Return the derivatives at some positions of a dimension."""
        if dim == len(self.shape) - 2 and length < self.shape[dim]:
            return Outer(self.left.narrow(-1, start, length), self.right)
        return super().narrow(dim, start, length)

    def sum(self, dims: Sequence[int]) -> Tensor:
        """Return the sum over dimensions, shape (K, *S) with size 1 in their places."""
        if list(dims) == [len(self.shape) - 2]:
            return Outer(self.left.sum(-1, keepdim=True), self.right).dense()
        return super().sum(dims)

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x (S), summed over dimensions, which fall away: (K, ...)."""
        tokens = x.dim() - 2
        if [dim for dim in range(x.dim()) if dim not in dims] != [0, tokens]:
            return super().times(x, dims)
        x = x.to(self.right.dtype).mT.contiguous()
        if self.right.dim() == x.dim():
            looked = self.right @ x
            products = [(part * looked).sum(-2) for part in self.left]
        else:
            products = [(self.left * (part @ x)).sum(-2) for part in self.right]
        return torch.stack([part.flatten(1, -2).sum(1) if part.dim() > 2 else part for part in products])


class BehindDense(Cotangent):
    """Derivatives with respect to the input of a dense layer, ``grad W``, whose weight (D1, D) may be large.

    Args:
        grad: with respect to the layer's output, shape (K, N, D1).
        weight: shape (D1, D), any floating dtype.
        shape: of the input, (N, ...), D numbers for each image.
    """

    def __init__(self, grad: Tensor, weight: Tensor, shape: Sequence[int]) -> None:
        self.grad, self.weight, self.shape = grad, weight, torch.Size(shape)

    @cached_property
    def base(self) -> Tensor:  # type: ignore[override]
        """The derivatives, shape (K, N, ...)."""
        return by_weight(self.grad, self.weight.to(self.grad.dtype)).reshape(len(self.grad), *self.shape)

    def view(self, shape: Sequence[int]) -> Cotangent:
        """Return the derivatives with respect to the same numbers in another shape."""
        return BehindDense(self.grad, self.weight, shape) if shape[0] == self.shape[0] else super().view(shape)

    def sum(self, dims: Sequence[int]) -> Tensor:
        """Return the sum over dimensions, shape (K, *S) with size 1 in their places."""
        if list(dims) != list(range(2, len(self.shape))):
            return super().sum(dims)
        sums = through_sums(self.grad, self.weight, self.shape[1])
        return sums.reshape(*sums.shape, *[1] * len(dims))

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x (S), summed over dimensions, which fall away: (K, ...)."""
        over = "channels" if list(dims) == [1] else "positions" if list(dims) == list(range(2, x.dim())) else None
        if over is None or len(self.grad) <= FEW:
            return super().times(x, dims)
        return through_products(self.grad, self.weight, x, over)


class Shared(Cotangent):
    """Derivatives of tokens whose derivatives behind a step are the same, which it sums faster than it gives them.

    Args:
        make: returns the derivatives, shape (K, *S).
        summed: returns their sum over a dimension for the derivatives behind the step of a single token.
        behind: the derivatives behind the step.
    """

    def __init__(self, make: Callable[[], Tensor], summed: Callable[[Tensor, int], Tensor], behind: Cotangent) -> None:
        self._make, self._summed, self._behind, self.shape = make, summed, behind, behind.shape

    @cached_property
    def base(self) -> Tensor:  # type: ignore[override]
        """The derivatives, shape (K, *S)."""
        return self._make()

    def sum(self, dims: Sequence[int]) -> Tensor:
        """Return the sum over dimensions, shape (K, *S) with size 1 in their places."""
        (dim, *rest) = dims
        if rest or dim not in self._behind.same or dim == len(self.shape) - 1:
            return super().sum(dims)
        return self._summed(self._behind.narrow(dim, 0, 1).dense(), dim)


def cotangent(part: Any) -> Cotangent:
    """Return the result of a rule, a tensor (K, *S) or a function that returns one, as a cotangent."""
    part = part() if callable(part) else part
    return part if isinstance(part, Cotangent) else Cotangent(part)


def added(first: Cotangent, second: Cotangent) -> Cotangent:
    """Return the sum of two cotangents of one value."""
    if isinstance(first, Part) and isinstance(second, Part) and first.place == second.place:
        return Part(lambda: added(first.inner, second.inner), first.shape, *first.place)
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Part):
            whole = other.dense().clone()
            whole.narrow(one.dim + 1, one.start, one.length).add_(one.inner.dense())
            return Cotangent(whole)
    return Cotangent(first.dense() + second.dense())


def by_rows(grad: Tensor, matrix: Tensor) -> Tensor:
    """Return ``grad @ matrix`` for grad (K, ..., M, D) and a matrix (..., D, E) that is not copied for every target."""
    if matrix.dim() != grad.dim() - 1 or matrix.dim() < 3 or matrix.shape[:-2] != grad.shape[1:-2]:
        return grad @ matrix
    rows = grad.movedim(0, -3)
    return (rows.flatten(-3, -2) @ matrix).unflatten(-2, rows.shape[-3:-1]).movedim(-3, 0)


LARGE = 1 << 20  # elements of a weight, and rows of a gradient, from which on a copy of some of its rows
_MANY = 128  # takes less than products with all of them
FEW = 8  # targets: up to here the pulled gradient itself costs no more than what saves it
_BLOCK = 32  # rows that stay in the cache between being gathered and being summed


def through_sums(grad: Tensor, weight: Tensor, channels: int) -> Tensor:
    """Pull a gradient through a dense layer and sum it over the positions of every channel.

    Args:
        grad: with respect to the layer's output, shape (K, N, D1).
        weight: shape (D1, T P), any floating dtype.
        channels: T.

    Returns:
        ``sum_p (grad W)[..., t, p]``, shape (K, N, T).
    """
    weight = weight.detach()
    primal, tangent = forward_ad.unpack_dual(grad)
    if tangent is not None:  # both at once, since the weight is what takes time
        return forward_ad.make_dual(*through_sums(torch.cat([primal, tangent]), weight, channels).chunk(2))
    if weight.shape[1] == channels:
        return by_weight(grad, weight.to(grad.dtype))
    if grad[..., 0].numel() == 1:  # the weight is read once either way
        return (grad @ weight.to(grad.dtype)).unflatten(-1, (channels, -1)).sum(-1)
    if weight.numel() < LARGE or weight.dtype != grad.dtype:
        return by_weight(grad, weight.unflatten(1, (channels, -1)).sum(-1, dtype=grad.dtype))
    active = reached(grad.flatten(0, 1), weight)
    if active is None:
        return by_weight(grad, _summed(weight, channels))
    summed = torch.cat([_summed(weight[rows], channels) for rows in active.split(_BLOCK)])
    return by_weight(grad[..., active], summed)


def _summed(weight: Tensor, channels: int) -> Tensor:
    """Return the sums (D1, T) as a product with ones, which is read faster than a sum over a short dimension."""
    rows = weight.reshape(-1, weight.shape[1] // channels)
    return torch.mv(rows, rows.new_ones(rows.shape[1])).reshape(len(weight), channels)


def through_products(grad: Tensor, weight: Tensor, x: Tensor, over: str) -> Tensor:
    """Pull a gradient through a dense layer, multiply it by x and sum it over channels or positions.

    With ``M[n,d,i] = sum_t W[d,t,i] x[n,t,i]`` that is ``grad M``: N D1 T P products instead of K N D1 T P.

    Args:
        grad: with respect to the layer's output, shape (K, N, D1).
        weight: shape (D1, T P), any floating dtype.
        x: the layer's input before it was flattened, shape (N, T, *positions).
        over: ``"channels"`` or ``"positions"``: what is summed over.

    Returns:
        ``sum_t (grad W)[k,n,t,i] x[n,t,i]``, shape (K, N, *positions), or the sum over i, (K, N, T).
    """
    x = x.to(grad.dtype)
    count, images = grad.shape[:2]
    parts = x.reshape(*x.shape[:2], -1)
    by_image = grad.transpose(0, 1)
    products = grad.new_zeros(images, count, parts.shape[2 if over == "channels" else 1])
    for rows, block in _products(weight.detach(), parts, over, reached(grad.flatten(0, 1), weight)):
        products.baddbmm_(by_image[..., rows], block)
    shape = x.shape[2:] if over == "channels" else x.shape[1:2]
    return products.transpose(0, 1).reshape(count, images, *shape)


def player_rows(weight: Tensor, x: Tensor, over: str, chunk: slice) -> Tensor:
    """Return the output of a dense layer for one channel, or one position, of its input alone.

    Args:
        weight: shape (D1, T P).
        x: shape (N, T, P).
        over: ``"channels"`` or ``"positions"``: who the players are.
        chunk: of the players.

    Returns:
        Shape (N, J, D1).
    """
    parts = weight.unflatten(1, x.shape[1:])
    if over == "channels":
        parts, x, summed = parts[:, chunk], x[:, chunk], "positions"
    else:
        parts, x, summed = parts[..., chunk], x[..., chunk], "channels"
    return torch.cat([block.mT for _, block in _products(parts, x, summed)], 2)


def _products(
    weight: Tensor, x: Tensor, over: str, active: Tensor | None = None
) -> Iterator[tuple[slice | Tensor, Tensor]]:
    """Yield ``sum_t W[d,t,i] x[n,t,i]``, or the sum over i, for some rows of a weight at a time: (N, rows, P or T)."""
    weight = weight.reshape(len(weight), *x.shape[1:])
    factors = x.permute(2, 0, 1) if over == "channels" else x.transpose(0, 1)
    size = (4 if over == "channels" else 8) * _BLOCK  # what is not copied need not stay in the cache
    alone = over == "channels" and not is_traced() and len(x) == 1
    size = _BLOCK // 2 if alone else size
    chunks = (
        [slice(start, start + size) for start in range(0, len(weight), size)] if active is None else active.split(size)
    )
    for rows in chunks:
        block = weight[rows].to(x.dtype)
        if alone:  # of one image a product of each number is faster than rows side by side
            yield rows, (x.new_ones(1, x.shape[1]) @ (block * x[0])).transpose(0, 1)
            continue
        # One product for every position (or channel), whose rows stand side by side for it.
        if over == "channels":
            block = block.flatten(1).t().contiguous().unflatten(0, x.shape[1:]).transpose(0, 1)
        else:
            block = block.permute(1, 2, 0)
        yield rows, (factors @ block).permute(1, 2, 0)


def by_weight(grad: Tensor, weight: Tensor) -> Tensor:
    """Return ``grad @ weight``, without the rows of a large weight that no gradient reaches, as behind a ReLU."""
    if forward_ad.unpack_dual(weight).tangent is not None:
        return grad @ weight
    primal, tangent = forward_ad.unpack_dual(grad)
    if tangent is not None:
        product = tangent.new_zeros(*grad.shape[:-1], weight.shape[-1])
        # Most targets are linear, with tangents of zeros.
        moving = tangent.flatten(1).any(1) if can_sync(tangent) else slice(None)
        product[moving] = by_weight(tangent[moving], weight)
        return forward_ad.make_dual(by_weight(primal, weight), product)
    rows = grad.flatten(0, -2)  # copied if it lies in another order, in which a product takes three times as long
    active = reached(rows, weight) if can_sync(rows) and len(rows) >= _MANY else None
    if active is not None:
        rows, weight = rows[:, active], weight[active]
    return (rows @ weight).reshape(*grad.shape[:-1], weight.shape[-1])


def reached(grad: Tensor, weight: Tensor) -> Tensor | None:
    """Return the rows of a large weight that a gradient (K, rows) reaches: behind a ReLU half of them; None: all."""
    if weight.numel() < LARGE or not can_sync(grad):
        return None
    active = grad.any(0).nonzero()[:, 0]
    return active if len(active) < 0.8 * len(weight) else None
