"""The stages of a head: each one's forward and, beside it, its pullback (vector-Jacobian product in closed form).

A stage maps ``x`` of shape (N, in) to (N, out). Its pullback takes ``grad``, the derivative of K targets with respect
to the stage's output, of shape (N, K, out) or (1, K, out) where it is the same for every image, and gives the
derivative with respect to its input, (N, K, in) or (1, K, in): ``grad @ d stage(x)/dx``.
"""

import torch
from torch import Tensor, nn


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype a head computes in on ``device``: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Stage(nn.Module):
    """One step of a head. Subclasses define ``forward`` and ``pullback``.

    Attributes:
        n_inputs: length of an input row, or None where any length will do.
        n_outputs: length of an output row, or None where it is that of the input.
        reduces: whether the outputs are components, so that ``PCATarget(b)`` means output b of this stage.
    """

    n_inputs: int | None = None
    n_outputs: int | None = None
    reduces: bool = False

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``grad @ d forward(x)/dx``.

        Args:
            x: the stage's input, shape (N, in).
            grad: derivative with respect to the stage's output, shape (N, K, out) or (1, K, out).

        Returns:
            The derivative with respect to ``x``, shape (N, K, in) or (1, K, in).

        Raises:
            NotImplementedError: a subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no pullback")

    def pullback_scaled(self, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pullback divided by a factor, and the factor's logarithm, shape (N, K) or (1, K): usually 0."""
        grad = self.pullback(x, grad)
        return grad, grad.new_zeros(grad.shape[:2])

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move to another device, but keep the precision of a head whatever its backbone is cast to."""

        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=tensor.device)).device
            return tensor.to(device, precision(device)) if tensor.is_floating_point() else tensor.to(device)

        return super()._apply(move, recurse)


class Scale(Stage):
    """``y = (x - shift) / divisor + offset`` per feature, then clipped to ``limits`` if there are any.

    Args:
        shift: subtracted first, shape (D,).
        divisor: divided by, shape (D,).
        offset: added last, shape (D,).
        limits: (lowest, highest) value of y, or None.
    """

    shift: Tensor
    divisor: Tensor
    offset: Tensor

    def __init__(
        self, shift: Tensor, divisor: Tensor, offset: Tensor, limits: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.n_inputs = self.n_outputs = len(shift)
        self.register_buffer("shift", shift)
        self.register_buffer("divisor", divisor)
        self.register_buffer("offset", offset)
        self.limits = limits

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled x, shape (N, D)."""
        y = self._unclipped(x)
        return y if self.limits is None else y.clamp(*self.limits)

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``grad / divisor``, and 0 where x was clipped."""
        if self.limits is not None:
            y, (low, high) = self._unclipped(x), self.limits
            grad = grad * ((y >= low) & (y <= high)).unsqueeze(1)
        return grad / self.divisor

    def _unclipped(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.divisor + self.offset


class Projection(Stage):
    """``y = V^T (x - u)`` (the PCA layer of the paper), divided by ``divisor`` if PCA whitens.

    Args:
        components: V^T, shape (B, D).
        mean: u, shape (D,).
        divisor: square roots of the explained variances, shape (B,); ones without whitening.
    """

    reduces = True
    components: Tensor
    mean: Tensor
    divisor: Tensor

    def __init__(self, components: Tensor, mean: Tensor, divisor: Tensor) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = components.shape
        self.register_buffer("components", components)
        self.register_buffer("mean", mean)
        self.register_buffer("divisor", divisor)

    def forward(self, x: Tensor) -> Tensor:
        """Return the components p, shape (N, B)."""
        return (x - self.mean) @ self.components.T / self.divisor

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``(grad / divisor) V^T``."""
        return (grad / self.divisor) @ self.components
