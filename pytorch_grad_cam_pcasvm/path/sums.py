"""Sums over positions moved into a dense weight: W1 (D1, T P) becomes (D1, T), as fast as memory can be read.

No sum is kept from call to call: a weight can change in ways that nothing shows.
"""

import torch
from torch import Tensor

_LARGE = 1 << 20  # elements: below this nothing is worth a thought
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
    if weight.shape[1] == channels:
        return grad @ weight.to(grad.dtype)
    if grad.shape[:-1].numel() == 1:  # the weight is read once either way
        return (grad @ weight.to(grad.dtype)).unflatten(-1, (channels, -1)).sum(-1)
    if weight.numel() < _LARGE or weight.device.type != "cpu" or weight.dtype != grad.dtype:
        return grad @ weight.unflatten(1, (channels, -1)).sum(-1, dtype=grad.dtype)
    active = grad.flatten(0, 1).any(0).nonzero()[:, 0]
    if len(active) > 0.8 * len(weight):
        return grad @ _summed(weight, channels)
    # Behind a ReLU half of the rows do not count for one image: they need not be read.
    return grad[..., active] @ torch.cat([_summed(weight[rows], channels) for rows in active.split(_BLOCK)])


def _summed(weight: Tensor, channels: int) -> Tensor:
    """Return the sums (D1, T) as a product with ones, which is read faster than a sum over a short dimension."""
    rows = weight.reshape(-1, weight.shape[1] // channels)
    return torch.mv(rows, rows.new_ones(rows.shape[1])).reshape(len(weight), channels)
