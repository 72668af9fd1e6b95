"""Interpolation: another size of the same picture."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.rules.registry import register_jacobian

_OF_ONE_AXIS = {"bilinear": "linear", "trilinear": "linear"}


@register_jacobian(F.interpolate, secant="linear", needs="nothing")
def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    *,
    y: Tensor,
    grad: Tensor,
) -> Tensor:
    """Every mode is separable: one small matrix per axis, what it makes of the unit vectors, transposed."""
    spatial = input.dim() - 2
    # A scale that is given counts itself, not the ratio of the sizes that come of it.
    scaled = size is None and not recompute_scale_factor
    factors = scale_factor if isinstance(scale_factor, list | tuple) else [scale_factor] * spatial
    for axis in range(-spatial, 0):
        units = torch.eye(input.shape[axis], dtype=grad.dtype, device=grad.device).unsqueeze(0)
        flat = mode == "bicubic" or antialias  # torch has these for pictures only, here of one row
        matrix = F.interpolate(
            units.unsqueeze(-2) if flat else units,
            size=None if scaled else (1, y.shape[axis]) if flat else y.shape[axis],
            scale_factor=((1.0, factors[axis]) if flat else factors[axis]) if scaled else None,
            mode=mode if flat else _OF_ONE_AXIS.get(mode, mode),
            align_corners=align_corners,
            antialias=antialias,
        ).reshape(input.shape[axis], y.shape[axis])
        grad = (grad.transpose(axis, -1) @ matrix.mT).transpose(axis, -1)
    return grad
