"""The stages of a head: each one's forward and, beside it, its pullback (vector-Jacobian product in closed form).

A stage maps ``x`` of shape (N, in) to (N, out). Its pullback takes ``grad``, the derivative of K targets with respect
to the stage's output, of shape (N, K, out) or (1, K, out) where it is the same for every image, and gives the
derivative with respect to its input, (N, K, in) or (1, K, in): ``grad @ d stage(x)/dx``.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.kernels import Kernel


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype a head computes in on ``device``: float64, or float32 where the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


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

    def jacobian_scaled(self, x: Tensor, y: Tensor, kept: Any = None) -> tuple[Tensor, Tensor | None]:
        """Return ``pullback_scaled`` of the identity: all outputs y by all inputs x, shape (N or 1, out, in)."""
        identity = torch.eye(y.shape[-1], dtype=x.dtype, device=x.device)
        return self.pullback_scaled(x, identity.unsqueeze(0), kept)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Keep a tensor in one layout: products of another layout differ in the last bit, also after loading."""
        super().register_buffer(name, None if tensor is None else tensor.contiguous(), persistent)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the output for x, and what ``pullback_scaled`` would otherwise compute a second time, or None."""
        return self(x), None

    def pullback_scaled(self, x: Tensor, grad: Tensor, kept: Any = None) -> tuple[Tensor, Tensor | None]:
        """Return the pullback divided by a factor, and the factor's logarithm, shape (N, K), or None where it is 0.

        Args:
            x: the stage's input, shape (N, in).
            grad: derivative with respect to the stage's output, shape (N, K, out) or (1, K, out).
            kept: what ``evaluate`` gave beside the output.

        Returns:
            The derivative with respect to ``x``, and the logarithm.
        """
        return self.pullback(x, grad), None

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

    def jacobian_scaled(self, x: Tensor, y: Tensor, kept: Any = None) -> tuple[Tensor, None]:
        """Return ``V^T / divisor``, shape (1, B, D), without a product."""
        return (self.components / self.divisor.unsqueeze(1)).unsqueeze(0), None


class Select(Stage):
    """``y = x[index]``: some of the features.

    Args:
        index: positions, shape (B,).
        n_inputs: number of features D.
    """

    index: Tensor

    def __init__(self, index: Tensor, n_inputs: int) -> None:
        super().__init__()
        self.n_inputs, self.n_outputs = n_inputs, len(index)
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        """Return the selected features, shape (N, B)."""
        return x[:, self.index]

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return grad at the selected features, and 0 elsewhere."""
        return grad.new_zeros(*grad.shape[:2], x.shape[1]).index_copy(2, self.index, grad)


_SMALLEST_NORM = 10 * torch.finfo(torch.float64).eps


class Normalise(Stage):
    """``y = x / |x|`` row by row; a row of zeros (to rounding, as scikit-learn has it) stays.

    Args:
        norm: ``"l1"``, ``"l2"`` or ``"max"`` (of absolute values).
    """

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows divided by their norm, shape (N, D)."""
        return x / self._size(x)

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``(grad - <grad, y> d|x|/dx) / |x|``."""
        size = self._size(x).unsqueeze(1)
        y = (x / size[:, 0]).unsqueeze(1)
        if self.norm == "l1":
            slope = x.sign().unsqueeze(1)
        elif self.norm == "l2":
            slope = y
        else:
            at = x.abs().argmax(1, keepdim=True)
            slope = torch.zeros_like(x).scatter(1, at, x.gather(1, at).sign()).unsqueeze(1)
        # A row of zeros was divided by 1, which does not depend on it.
        slope = slope * (self._norm(x) >= _SMALLEST_NORM).unsqueeze(1)
        return (grad - (grad * y).sum(-1, keepdim=True) * slope) / size

    def _size(self, x: Tensor) -> Tensor:
        size = self._norm(x)
        return torch.where(size < _SMALLEST_NORM, 1.0, size)

    def _norm(self, x: Tensor) -> Tensor:
        orders = {"l1": 1.0, "l2": 2.0, "max": torch.inf}
        return torch.linalg.vector_norm(x, orders[self.norm], dim=1, keepdim=True)


class KernelMap(Stage):
    """``y = sum_i c_i K(x_i, x) + offset``: KernelPCA, whose centring is in c and offset, and Nystroem.

    Args:
        kernel: the kernel K.
        points: x_i, shape (I, D).
        coefficients: c_i, shape (I, B).
        offset: shape (B,).
        reduces: whether the outputs are components.
    """

    points: Tensor
    coefficients: Tensor
    offset: Tensor

    def __init__(self, kernel: Kernel, points: Tensor, coefficients: Tensor, offset: Tensor, reduces: bool) -> None:
        super().__init__()
        self.kernel, self.reduces = kernel, reduces
        self.n_inputs, self.n_outputs = points.shape[1], coefficients.shape[1]
        self.register_buffer("points", points)
        self.register_buffer("coefficients", coefficients)
        self.register_buffer("offset", offset)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (N, B)."""
        return self.evaluate(x)[0]

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the kernel's argument."""
        argument = self.kernel.argument(x, self.points)
        return self.kernel.value(argument) @ self.coefficients + self.offset, argument

    def pullback_scaled(self, x: Tensor, grad: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``sum_i <grad, c_i> dK(x_i, x)/dx / exp(log_scale)``, shape (N, K, D), and ``log_scale``, (N, K)."""
        argument = self.kernel.argument(x, self.points) if kept is None else kept
        return self.kernel.pullback(argument, x, self.points, grad @ self.coefficients.T)


class FourierFeatures(Stage):
    """``y = amplitude cos(x W + phase)``: the random features of RBFSampler.

    Args:
        weight: W, shape (D, B).
        phase: shape (B,).
        amplitude: a number.
    """

    weight: Tensor
    phase: Tensor

    def __init__(self, weight: Tensor, phase: Tensor, amplitude: float) -> None:
        super().__init__()
        self.n_inputs, self.n_outputs = weight.shape
        self.amplitude = amplitude
        self.register_buffer("weight", weight)
        self.register_buffer("phase", phase)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features, shape (N, B)."""
        return self.amplitude * torch.cos(x @ self.weight + self.phase)

    def pullback(self, x: Tensor, grad: Tensor) -> Tensor:
        """Return ``-amplitude (grad * sin(x W + phase)) W^T``."""
        slope = -self.amplitude * torch.sin(x @ self.weight + self.phase)
        return (grad * slope.unsqueeze(1)) @ self.weight.T


class Chain(Stage):
    """Several stages one after another, as one.

    Args:
        stages: the stages in order.
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.n_inputs = stages_in(self.stages)[0].n_inputs
        self.n_outputs = stages_in(self.stages)[-1].n_outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the last stage's output."""
        return self.evaluate(x)[0]

    def evaluate(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return the last stage's output, and every stage's input with what it kept."""
        inputs = []
        for stage in stages_in(self.stages):
            y, kept = stage.evaluate(x)
            inputs.append((x, kept))
            x = y
        return x, inputs

    def pullback_scaled(self, x: Tensor, grad: Tensor, kept: Any = None) -> tuple[Tensor, Tensor | None]:
        """Return the pullback through all stages divided by a factor, and the factor's logarithm."""
        total: Tensor | None = None
        inputs = self.evaluate(x)[1] if kept is None else kept
        for stage, (value, of_stage) in zip(reversed(stages_in(self.stages)), reversed(inputs), strict=True):
            grad, log_scale = stage.pullback_scaled(value, grad, of_stage)
            total = log_scale if total is None else total if log_scale is None else total + log_scale
        return grad, total


def stages_in(modules: nn.ModuleList) -> list[Stage]:
    """Return a module list as what it holds, for the type checker."""
    return list(modules)  # type: ignore[arg-type]
