"""Interpolation: another size of the same picture."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.registry import aten, register_jacobian


def _upsampling(mode: str, *, antialias: bool = False) -> Any:
    # torch has these for pictures only, here of one row
    flat, aligns = mode == "bicubic" or antialias, mode in ("linear", "bicubic") or antialias

    def rule(input: Tensor, output_size: Any, *options: Any, y: Tensor, grad: Tensor) -> Tensor:
        """Every mode is separable: the transpose of one small matrix per axis, found by interpolating unit vectors."""
        align_corners, scales = (options[0], options[1:]) if aligns else (None, options)
        factors = list(scales[0]) if scales and isinstance(scales[0], list | tuple) else list(scales)
        for axis in range(2 - input.dim(), 0):
            factor = factors[axis] if any(factors) else None  # it counts itself, not the ratio of the sizes
            units = torch.eye(input.shape[axis], dtype=grad.dtype, device=grad.device).unsqueeze(0)
            matrix = F.interpolate(
                units.unsqueeze(-2) if flat else units,
                size=None if factor else (1, y.shape[axis]) if flat else y.shape[axis],
                scale_factor=((1.0, factor) if flat else factor) if factor else None,
                mode="bilinear" if flat and mode == "linear" else mode,
                align_corners=align_corners,
                antialias=antialias,
            ).reshape(input.shape[axis], y.shape[axis])
            grad = (grad.transpose(axis, -1) @ matrix.mT).transpose(axis, -1)
        return grad

    return rule


for _dims, _linear in enumerate(("linear", "bilinear", "trilinear"), start=1):
    for _name, _mode in (
        (f"upsample_nearest{_dims}d", "nearest"),
        (f"_upsample_nearest_exact{_dims}d", "nearest-exact"),
        (f"upsample_{_linear}{_dims}d", "linear"),
    ):
        register_jacobian(*aten(_name), secant="linear", needs="nothing", by_image=True)(_upsampling(_mode))
for _name, _mode, _antialias in (
    ("upsample_bicubic2d", "bicubic", False),
    ("_upsample_bilinear2d_aa", "linear", True),
    ("_upsample_bicubic2d_aa", "bicubic", True),
):
    register_jacobian(*aten(_name), secant="linear", needs="nothing", by_image=True)(
        _upsampling(_mode, antialias=_antialias)
    )
