"""Sampling: pictures in another size, or read at points that a grid, boxes or offsets name."""

from typing import Any

import torch
import torchvision  # noqa: F401 - registers its operations
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.rules.registry import aten, ratio, register_jacobian
from pytorch_grad_cam_pcasvm.rules.rule import Call, mid

vision = torch.ops.torchvision


def _upsampling(mode: str, *, antialias: bool = False) -> Any:
    # torch has these for pictures only, here of one row
    flat, aligns = mode == "bicubic" or antialias, mode in ("linear", "bicubic")

    def pull_upsampling(input: Tensor, output_size: Any, *options: Any, y: Tensor, grad: Tensor) -> Tensor:
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

    return pull_upsampling


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


_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


@register_jacobian(*aten("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), needs="inputs")
def grid_sampler(
    input: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool, *, y: Tensor, grad: Tensor,
    base: Call | None = None,
) -> Any:  # fmt: skip
    """Each point's share of the numbers around it; of the grid, how the picture changes there."""
    # From a start, dy is half of what the picture's change gives at either grid, and what the grid's change gives of
    # the mean picture, one coordinate after another.
    options: Any = {"mode": _MODES[mode], "padding_mode": _PADDINGS[padding], "align_corners": align_corners}
    input0, grid0 = (input, grid) if base is None else base.args[:2]
    grids = (grid,) if grid0 is grid else (grid, grid0)

    def of_input() -> Tensor:
        rows = [torch.stack([_pull_by_torch(part, input, at, options)[0] for at in grids]).mean(0) for part in grad]
        return torch.stack(rows)

    def of_grid() -> Tensor:
        picture = mid(input, input0)
        slopes = torch.stack([_pull_by_torch(part, picture, grid, options)[1] for part in grad])
        if grid0 is grid:
            return slopes
        secants = torch.zeros_like(slopes)
        order = list(range(grid.shape[-1]))
        for turn in (order, order[::-1]):  # the mean of both, so that no coordinate comes first
            at = grid0.clone()
            for axis in turn:
                behind = at.clone()
                behind[..., axis] = grid[..., axis]
                step = F.grid_sample(picture, behind, **options) - F.grid_sample(picture, at, **options)
                change = grid[..., axis] - grid0[..., axis]
                secants[..., axis] += (grad * ratio(step, change.unsqueeze(1).expand_as(step))).sum(2) / 2
                at = behind
        return torch.where(grid == grid0, slopes, secants)

    return of_input, of_grid


def _pull_by_torch(grad: Tensor, input: Tensor, grid: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return torch's own gradients of the picture and of the grid."""
    backward = getattr(torch.ops.aten, f"grid_sampler_{input.dim() - 2}d_backward").default
    mode, padding = _MODES.index(options["mode"]), _PADDINGS.index(options["padding_mode"])
    grads: tuple[Tensor, Tensor] = backward(
        grad.contiguous(), input, grid, mode, padding, options["align_corners"], [True, True]
    )
    return grads


@register_jacobian(vision.roi_align, secant="linear", needs="nothing")
def roi_align(
    input: Tensor, rois: Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool, *, y: Tensor,
    grad: Tensor,
) -> Tensor:  # fmt: skip
    """Each bin's share of the numbers around its points; boxes have no gradient."""
    backward = vision._roi_align_backward.default
    options = (scale, height, width, *input.shape, ratio, aligned)
    return torch.stack([backward(part.contiguous(), rois, *options) for part in grad])
