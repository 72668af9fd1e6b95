"""Products with a dense layer's weight, which is read once: W1 (D1, T P) becomes (D1, T) where positions are summed.

No sum is kept from call to call: a weight can change in ways that nothing shows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced, may_look

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
        moved = tangent.new_zeros(*grad.shape[:-1], weight.shape[-1])
        # Most targets are linear, with tangents of zeros.
        moving = tangent.flatten(1).any(1) if may_look(tangent) else slice(None)
        moved[moving] = by_weight(tangent[moving], weight)
        return forward_ad.make_dual(by_weight(primal, weight), moved)
    rows = grad.flatten(0, -2)  # copied if it lies in another order, in which a product takes three times as long
    active = reached(rows, weight) if may_look(rows) and len(rows) >= _MANY else None
    if active is not None:
        rows, weight = rows[:, active], weight[active]
    return (rows @ weight).reshape(*grad.shape[:-1], weight.shape[-1])


def reached(grad: Tensor, weight: Tensor) -> Tensor | None:
    """Return the rows of a large weight that a gradient (K, rows) reaches: behind a ReLU half of them; None: all."""
    if weight.numel() < LARGE or not may_look(grad):
        return None
    active = grad.any(0).nonzero()[:, 0]
    return active if len(active) < 0.8 * len(weight) else None
