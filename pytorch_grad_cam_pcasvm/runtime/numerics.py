"""Precision: the dtypes of computations, and quotients that are more than rounding."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

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


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype a head computes in on ``device``: float64, or float32 if the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    device_type = device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
