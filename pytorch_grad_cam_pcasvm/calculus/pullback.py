"""The pullback of K targets to the activations of a target layer, as a tensor, as sums or as weights of channels."""

from collections.abc import Callable, Sequence

from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent


class Pullback:
    """The derivatives of K targets with respect to activations, or their secants from a start.

    Attributes:
        whole: the cotangent of the activations, in the network's own layout.
    """

    whole: Cotangent

    def __init__(self, whole: Cotangent) -> None:
        self.whole = whole

    def dense(self) -> Tensor:
        """Return the derivatives, shape (K, *activations.shape)."""
        return self.whole.dense()

    def arranged(self, by: Callable[[Tensor], Tensor]) -> Cotangent:
        """Return the derivatives as a layout arranges them."""
        return Cotangent(by(self.dense()))

    def sums(self) -> Tensor:
        """Return the sum over the positions of every channel, shape (K, N, T), for activations (N, T, ...)."""
        return self.whole.over_positions()

    def times(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """Return the products with x, summed over dimensions, which fall away: (K, ...)."""
        return self.whole.times(x, dims)

    def token_sums(self, dim: int, start: int, length: int) -> Tensor:
        """Return the sum over some tokens, with one in their place, shape (K, ...).

        Args:
            dim: dimension of the tokens in the activations.
            start: the first of them.
            length: their number.
        """
        return self.whole.narrow(dim, start, length).sum([dim])

    def contributions(self, change: Tensor, dims: tuple[int, int]) -> Tensor:
        """Return the secants times the change, summed over all but images and tokens, shape (K, N, L).

        Args:
            change: of the activations from the start of these secants.
            dims: dimensions of images and of tokens in the activations.
        """
        return self.whole.along(change, *dims)
