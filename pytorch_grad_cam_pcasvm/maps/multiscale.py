"""Levels: maps of several target layers as one, on the finest grid, with the same sums."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.scale import MethodResult
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.columns import average_columns

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
    for level in finer:
        coarsest.maps = shared_out(coarsest.maps, level.maps)
    return coarsest


def share_remainders(results: list[MethodResult]) -> list[MethodResult]:
    """Add the sums of the other branches' maps to the remainder of each branch."""
    sums = torch.stack([result.maps.flatten(2).sum(-1) for result in results])
    beside = sum(result.remainder for result in results if result.remainder is not None)
    for result, own in zip(results, sums, strict=True):
        result.remainder = beside + sums.sum(0) - own
    return results


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
