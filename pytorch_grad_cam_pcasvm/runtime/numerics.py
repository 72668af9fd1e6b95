"""Numerics: quotients that are more than rounding."""

import torch
from torch import Tensor


def quotient(x: Tensor, y: Tensor, x0: Tensor, y0: Tensor, slope: Tensor, eps: float | None = None) -> Tensor:
    """Return ``(y - y0) / (x - x0)``, or the slope at x where only rounding would be left of the quotient.

    ``eps``: machine epsilon that the numbers are known to; None: that of their dtype.
    """
    dx, dy, eps = x - x0, y - y0, torch.finfo(y.dtype).eps if eps is None else eps
    rounding = (dy - slope * dx).abs() <= 4 * eps * (y.abs() + y0.abs())
    # Where nothing changes any number is exact, but an infinite one, as that of sqrt at 0, would make NaN of the zeros.
    slope = torch.where((dx == 0) & ~slope.isfinite(), 0.0, slope)
    return torch.where((dx == 0) | rounding, slope, dy / dx)
