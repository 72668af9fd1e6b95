"""Jumps: where the value of a target changes its sign, for heads without a gradient, whose values may jump over 0."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.network.outputs import HeadRun

_SIZES = (1.0, 2.0, 4.0)  # of the samples, in standard deviations; the next if none of the last is on the other side
_SAMPLES = 128  # of each size
_LINES = 48  # on which crossings are looked for
_PARTS = 32  # of a line, and of each part in turn
_ROUNDS = 6  # of that: to 32^-6 of a line
_CELLS = 8  # looked into on each line, where both sides of all near crossings are far from 0
_NEAR = 1.5  # times as far as the nearest crossing
_SMALL = 0.04  # of the median size of values at the ends of these lines
_INSIDE = 1e-3  # standard deviations from a jump
_SMOOTH = 1e-6  # of the value at the mean, below which two sides of a crossing are the same: no jump
_STEPS = 20  # to features with components
_REACHED = 1e-9  # of a component and its standard deviation


def find_deviations(head: Head) -> tuple[int, Tensor] | None:
    """Return where a head without a gradient knows the standard deviations of its training set, and these, (B,).

    The position is that of its first components, or of what a scaler gives; None: it knows none.
    """
    if head.enumerated is None:
        return None
    # What a second reduction gives need not be free: rows of length 1 in front of it leave a sphere.
    stages = list(enumerate(head.stages, 1))
    places = [place for place, stage in stages if stage.reduces] or [
        place for place, stage in stages if stage.output_deviations is not None
    ]
    spread = head.stages[places[0] - 1].output_deviations if places else None
    return None if spread is None else (places[0], spread)


def features_at(head: Head, features: Tensor, position: int, goal: Tensor, deviations: Tensor) -> Tensor | None:
    """Return the features nearest to others, (D,), that lead to given values at a position, (B,); None: none found.

    Those that stages leave out stay as they are.
    """
    for _ in range(_STEPS):
        trace = head(features.unsqueeze(0))
        missing = goal - trace.values[position][0]
        if not position or bool((missing.abs() <= _REACHED * (deviations + goal.abs())).all()):
            return features + missing if not position else features
        jacobian, _ = head.pullback(trace, {position: None})
        features = features + torch.linalg.lstsq(jacobian[0], missing.unsqueeze(1), driver="gelsd").solution[:, 0]
    return None


class Jumps:
    """The search for a point near a start at which a target's value is about 0, inside of a cell with that value.

    Args:
        head: a head, on the CPU.
        target: the target.
        position: of the values among which the point is.
        deviations: their standard deviations on the training set, (B,).
    """

    def __init__(self, head: Head, target: Any, position: int, deviations: Tensor) -> None:
        self._head, self._target, self._position, self._deviations = head, target, position, deviations
        self._units = torch.where(deviations > 0, deviations, 1.0)  # a component may never vary

    def find_jump(self, start: Tensor) -> Tensor | None:
        """Return the point for a start, both (B,); None if no sample of the training set is on the other side.

        Of the crossings on the ways to seeded samples, among those about as near as the nearest, it is the one whose
        value is closest to 0, or below it if that is a tie; where all of them are far from 0, another point on these
        ways that is not. A start on the jump itself would be another after the least rounding: it is moved into the
        inside of the cell.
        """
        before = self._evaluate_rows(start.unsqueeze(0))
        generator = torch.Generator().manual_seed(0)
        for size in _SIZES:
            ways = (
                size
                * torch.randn(_SAMPLES, len(start), generator=generator, dtype=start.dtype, device="cpu")
                * self._deviations
            )
            across = self._evaluate_rows(start + ways) * before <= 0
            if bool(across.any()):
                return self._best(start, ways[across][:_LINES], float(before))
        return None

    def _best(self, start: Tensor, ways: Tensor, before: float) -> Tensor:
        low, high = self._crossed(start, ways, before)
        lengths = (ways / self._units).norm(dim=1) * high
        sides = torch.stack([low, high], 1)  # of each crossing
        values = self._evaluate_ways(start, ways, sides)
        near = torch.where((lengths <= _NEAR * lengths.min()).unsqueeze(1), self._sizes(values), torch.inf)
        side, line = divmod(int(near.T.argmin()), len(ways))
        if float(near.min()) > _SMALL * float(self._evaluate_rows(start + ways).abs().median()):
            elsewhere = self._elsewhere(start, ways, before, float(near.min()))
            if elsewhere is not None:
                return elsewhere
        place, way = float(sides[line, side]), ways[line]
        if float((values[line, 0] - values[line, 1]).abs()) > _SMOOTH * abs(before):
            # Away from the jump, half-way to the next.
            step = _INSIDE / float((way / self._units).norm()) * (1.0 if side else -1.0)
            steps = step * 2.0 ** -torch.arange(20.0, dtype=way.dtype)
            ahead = self._evaluate_rows(start + (place + steps.unsqueeze(1)) * way)
            same = (ahead - values[line, side]).abs() <= _SMOOTH * abs(before)
            # The longest of which all that are shorter lead to the same value.
            reach = int(same.flip(0).long().cumprod(0).sum())
            place += float(steps[20 - reach]) / 2 if reach else 0.0
        return start + place * way

    def _elsewhere(self, start: Tensor, ways: Tensor, before: float, least: float) -> Tensor | None:
        """Return the nearest point on the ways, and on no jump, with a small value; or with one below the least."""
        places = torch.arange(1, _CELLS + 1, dtype=ways.dtype).expand(len(ways), -1) / _CELLS
        lengths = (ways / self._units).norm(dim=1, keepdim=True)
        values, sizes = self._evaluate_ways(start, ways, places), self._evaluate_rows(start + ways).abs()
        for sign in (1, -1):
            beside = self._evaluate_ways(start, ways, places + sign * _INSIDE / lengths)
            values = torch.where((beside - values).abs() <= _SMOOTH * abs(before), values, torch.inf)
        size = self._sizes(values)
        small = size <= max(_SMALL * float(sizes.median()), float(size.min()))
        if float(size.min()) >= least:
            return None
        line, number = divmod(int(torch.where(small, lengths * places, torch.inf).argmin()), _CELLS)
        return start + places[line, number] * ways[line]

    @staticmethod
    def _sizes(values: Tensor) -> Tensor:
        """Return the sizes of values, by which one is chosen.

        Votes for one of two classes are 1 on one side and -1 on the other: of equals, it is what is below 0.
        """
        return values.abs() + _SMOOTH * values

    def _crossed(self, start: Tensor, ways: Tensor, before: float) -> tuple[Tensor, Tensor]:
        """Return two places on each way, (M,), very close, between which the value first changes its sign."""
        low, width = torch.zeros(len(ways), dtype=ways.dtype), torch.ones(len(ways), dtype=ways.dtype)
        parts = torch.arange(1, _PARTS + 1, dtype=ways.dtype) / _PARTS
        for _ in range(_ROUNDS):
            places = low.unsqueeze(1) + width.unsqueeze(1) * parts
            across = self._evaluate_ways(start, ways, places) * before <= 0
            across[:, -1] = True  # as it was found, whatever rounding of a place between does
            first = across.long().argmax(1)
            low, width = low + width * first / _PARTS, width / _PARTS
        return low, low + width

    def _evaluate_ways(self, start: Tensor, ways: Tensor, places: Tensor) -> Tensor:
        """Return the target's values at places (M, L) on M ways, (M, L)."""
        points = start + places.unsqueeze(-1) * ways.unsqueeze(1)
        return self._evaluate_rows(points.flatten(0, 1)).reshape(places.shape)

    def _evaluate_rows(self, points: Tensor) -> Tensor:
        """Return the target's values at points (M, B), shape (M,)."""
        return self._target(HeadRun(self._head, self._head.resume(self._position, points)))
