"""Maps of targets as a method computes them: their scale, why some are blank, and those of several layers as one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.inputs import all_finite
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.columns import (
    Columns,
    OptionalPlain,
    OptionalScaled,
    Plain,
    Scaled,
    average_columns,
)
from pytorch_grad_cam_pcasvm.runtime.device import full_precision
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning, warn


@dataclass(eq=False)
class MethodResult(Columns):
    """The result of a method for K targets, with the attributes of :class:`SignedMaps`: its columns.

    Example:
        >>> zeros = torch.zeros(2, 1)
        >>> MethodResult(maps=torch.ones(2, 1, 4, 4), weights=torch.ones(2, 1, 8), values=zeros, log_scale=zeros).heads
    """

    maps: Scaled
    weights: Scaled
    values: Plain
    log_scale: Plain
    opposite: OptionalScaled = None
    baseline_values: OptionalPlain = None
    remainder: OptionalScaled = None
    standard_errors: OptionalScaled = None
    heads: OptionalScaled = None
    effects: OptionalPlain = None
    error: OptionalScaled = None
    values_error: OptionalPlain = None
    resampled: OptionalScaled = None


def average_samples(sampled: MethodResult, count: int) -> MethodResult:
    """Return the means of independent samples of the same maps, with their standard errors; the only one as it is.

    Args:
        sampled: the maps of K targets, one sample after the other.
        count: K.
    """
    total = sampled.maps.shape[1]
    if total == count:
        return sampled
    pieces = [partial(Tensor.narrow, dim=1, start=first, length=count) for first in range(0, total, count)]
    samples = [sampled.map_columns(piece) for piece in pieces]
    mean = average_columns(samples)
    errors = torch.stack([sample.rescale(mean.log_scale).maps for sample in samples]).std(0) / len(samples) ** 0.5
    return replace(mean, standard_errors=errors)


def signed_maps(weights: Tensor, activations: Tensor) -> Tensor:
    """Return the signed maps ``sum_t weights[n, k, t] activations[n, t]``, (N, K, H, W), in the dtype of the weights.

    Args:
        weights: shape (N, K, T).
        activations: shape (N, T, H, W) or (N, T, D, H, W).

    Returns:
        The maps.

    Example:
        >>> signed_maps(torch.ones(1, 2, 3), torch.ones(1, 3, 4, 4)).shape
        torch.Size([1, 2, 4, 4])
    """
    with full_precision(weights.device):
        return torch.bmm(weights, activations.flatten(2).to(weights.dtype)).unflatten(2, activations.shape[2:])


def find_nu(maps: Tensor, opposite: Tensor | None = None) -> Tensor:
    """Return nu, shape (N, K): the largest absolute value of each map; with ``opposite``, the largest value of both."""
    if opposite is None:
        return torch.linalg.vector_norm(maps.flatten(2), torch.inf, -1)
    return torch.maximum(maps, opposite).relu().flatten(2).amax(-1)


def divided(maps: Tensor, nu: Tensor) -> Tensor:
    """Return maps (N, K, ...) divided by nu (N, K); a map of zeros stays zero."""
    # A division, not a product with 1 / nu: x / x is exactly 1.
    return maps / per_map(torch.where(nu > 0, nu, 1.0), maps)


def warn_of_blanks(
    shown: Tensor, nu: Tensor, target_of: Callable[[int, int], Any], output: Any = None, part: str = ""
) -> None:
    """Warn if a shown part of signed maps (N, K, ...) is zero everywhere, with the reason; nu has shape (N, K).

    ``target_of(n, k)`` returns the target of a map; the network's output may add to the reason.
    """
    blank = ~shown.flatten(2).any(-1)
    if not bool(blank.any()):
        return
    dead = nu == 0
    reasons, hidden = [], False
    for mask, reason in ((dead, "there is no gradient at all"), (blank & ~dead, "all its evidence has the other sign")):
        for image, k in mask.nonzero().tolist():
            target = target_of(image, k)
            knows = isinstance(output, HeadOutput) and hasattr(target, "why_blank")
            more = target.why_blank(output[image]) if knows else None
            reasons.append(f"image {image}, {part}{target}: {more or reason}")
            hidden = hidden or (more is None and mask is not dead)
    shortened = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
    both = f". {'See .maps' if part else 'Use explain()'}, which keeps both signs" if hidden else ""
    warn(f"blank map: {shortened}{both}", BlankMapWarning)


def per_map(value: Tensor, maps: Tensor) -> Tensor:
    """Return numbers (N, K) in a shape that multiplies maps (N, K, ...)."""
    return value.reshape(*value.shape, *[1] * (maps.dim() - 2))


def check_finite(maps: Tensor) -> None:
    """Refuse maps that are not finite, which ``explain`` does not look at on a GPU; waits for the device.

    Args:
        maps: any numbers, such as ``maps.maps``.

    Raises:
        ValueError: some are NaN or infinite.

    Example:
        >>> check_finite(maps.maps)
    """
    if not all_finite(maps):
        raise ValueError(
            "the maps are not finite: the input, the network or the head has NaN or infinite values; or, on a GPU, "
            "weights or means were overwritten through .data after the first maps, and the method has to be made again"
        )


def shift_baseline(maps: Tensor, excess: Tensor) -> Tensor:
    """Return maps (N, K, ...) whose baseline is moved by the same at all positions: each gives its share, (N, K).

    Args:
        maps: maps that add up.
        excess: by how much the sum of each is to be smaller, shape (N, K).

    Example:
        >>> shift_baseline(torch.ones(1, 1, 2, 2), torch.ones(1, 1)).sum()
        tensor(3.)
    """
    return maps - (excess / maps[0, 0].numel()).to(maps).reshape(*excess.shape, *[1] * (maps.dim() - 2))


WAYS = ("shared", "mean")
_EVEN = 1e-3  # of the mean evidence, what each position has besides: where there is none, a share is even


def as_one(results: Sequence[MethodResult], way: str) -> MethodResult:
    """Return the maps of several layers as one, on the finest grid, without channel weights.

    Args:
        results: maps of each layer that add up to the same values.
        way: ``"shared"``: the coarsest maps say how much, finer ones say where: each coarse position's contribution is
            distributed over the finer positions around it, in proportion to their own contributions of the same sign;
            ``"mean"``: the mean of all maps. For ``"shared"``, layers on the same grid are averaged first.
    """
    grids = [list(group) for _, group in groupby(sorted(results, key=_size), key=_size)]
    if way == "mean":
        return _average_levels(results, grids[-1][0].maps.shape[2:])
    coarsest, *finer = (_average_levels(group, group[0].maps.shape[2:]) for group in grids)
    maps = coarsest.maps
    for level in finer:
        maps = shared_out(maps, level.maps)
    return replace(coarsest, maps=maps)


def share_remainders(results: Sequence[MethodResult]) -> list[MethodResult]:
    """Return results of several branches, with the sums of the other branches' maps in the remainder of each."""
    sums = torch.stack([result.maps.flatten(2).sum(-1) for result in results])
    beside = sum(result.remainder for result in results if result.remainder is not None)
    return [replace(result, remainder=beside + sums.sum(0) - own) for result, own in zip(results, sums, strict=True)]


def _size(level: MethodResult) -> int:
    return level.maps[0, 0].numel()


def _average_levels(results: Sequence[MethodResult], size: Sequence[int]) -> MethodResult:
    """Return the mean of maps on one grid, without channel weights."""
    none = results[0].maps.new_zeros(*results[0].maps.shape[:2], 0)
    return average_columns([replace(result, maps=refined(result.maps, size), weights=none) for result in results])


def shared_out(coarse: Tensor, fine: Tensor) -> Tensor:
    """Return coarse maps (N, K, h, w) distributed over the positions of finer ones, (N, K, H, W).

    For each sign ``E * U(C / U^T E)``: C the coarse contributions of that sign, E the finer ones, U bilinear
    upsampling. So each coarse position's contribution is kept whole.
    """
    sizes = coarse.shape[2:], fine.shape[2:]
    parts = []
    for sign in (1, -1):
        evidence = (sign * fine).relu()
        even = evidence.flatten(2).mean(-1)
        even = torch.where(even > 0, _EVEN * even, 1.0)
        evidence = evidence + even.reshape(*even.shape, *[1] * (fine.dim() - 2))
        share = (sign * coarse).relu() / _upsampled(evidence, *sizes, transposed=True)
        parts.append(evidence * _upsampled(share, *sizes))
    return parts[0] - parts[1]


def refined(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps (N, K, h, w) upsampled to a size, (N, K, H, W); each position's contribution is kept whole."""
    return maps if maps.shape[2:] == tuple(size) else shared_out(maps, maps.new_zeros(*maps.shape[:2], *size))


def _upsampled(maps: Tensor, coarse: Sequence[int], fine: Sequence[int], *, transposed: bool = False) -> Tensor:
    """Return the product of linear upsampling from a coarse to a fine grid, or of its transpose, with maps."""
    for dim, (low, high) in enumerate(zip(coarse, fine, strict=True), 2):
        rows = upsample_maps(torch.eye(low, dtype=maps.dtype, device=maps.device).unsqueeze(0), (high,))[
            0
        ]  # (low, high)
        maps = torch.tensordot(maps, rows.mT if transposed else rows, dims=([dim], [0])).movedim(-1, dim)
    return maps
