"""Dense features: the positions that a target is about become rows, and their gradients dense ones again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun, find_grid
from pytorch_grad_cam_pcasvm.runtime.columns import join_rows
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.targets.places import OwnPositions, RegionRun, SharedPositions, take_region
from pytorch_grad_cam_pcasvm.targets.questions import Question
from pytorch_grad_cam_pcasvm.targets.rows import BYTES, RowGradients, differentiate_starts, evaluate_question
from pytorch_grad_cam_pcasvm.targets.target import call_at_start


def group_places(columns: Sequence[Question]) -> list[list[int]]:
    """Return the indices of questions to the same positions together; one to all scores of an image is alone."""
    groups: dict[Any, list[int]] = {}
    for k, column in enumerate(columns):
        groups.setdefault(column.positions or k, []).append(k)  # the same positions are the same object
    return list(groups.values())


def differentiate_place(
    output: HeadRun | HeadOutput, columns: Sequence[Question], dtype: torch.dtype, start: Any
) -> RowGradients:
    """Return the gradients of K questions to one place of each of N images, with respect to all P positions.

    Returns:
        The gradients, of shape (N, K, D, h, w), and the numbers beside them, (N, K).
    """
    positions = columns[0].positions
    if positions is None:
        return _differentiate_whole(output, columns[0], dtype, start)
    parts = list[RowGradients]()
    for block in _split_positions(output, positions, len(columns)):
        region = take_region(output, block)
        rows = RegionRun(output.head, _anew(region), size=block.size)
        at_start: HeadRun | None = None
        if start is not None:
            at_start = HeadRun(output.head, _anew(take_region(start, block)))
            if start.count < output.count and block.size > 1:  # one start for all
                at_start = at_start.rows(torch.arange(block.size, device=output.device).repeat(output.count))
        repeated = [column.repeat(block.size) for column in columns]
        of_rows = differentiate_starts(rows, [(repeated, at_start)])[0]
        of_rows = replace(of_rows, gradients=of_rows.gradients.to(dtype))  # before many rows are put together
        parts.append(of_rows.map_columns(lambda tensor: tensor.unflatten(0, (output.count, -1)).movedim(1, 0)))
    return _average_positions(output, positions, join_rows(parts))


def _split_positions(
    output: HeadRun | HeadOutput, positions: SharedPositions | OwnPositions, questions: int
) -> Sequence[SharedPositions | OwnPositions]:
    """Return positions in blocks that fit into memory."""
    at_once = positions.size
    if not is_traced():
        at_once = max(1, BYTES // (output.head.bytes_per_target(output.count) * questions))
    return positions.blocks(at_once)


def _average_positions(
    output: HeadRun | HeadOutput, positions: SharedPositions | OwnPositions, rows: RowGradients
) -> RowGradients:
    """Return the means over A positions, whose rows are given as (A, N, K, ...): each has the weight 1 / A."""
    log_scale = rows.log_scale.amax(0)
    share = (rows.log_scale - log_scale).exp() / positions.size
    gradients = (rows.gradients * share.unsqueeze(-1).to(rows.gradients)).permute(2, 1, 0, 3)
    before, remainder, effects = rows.baseline_values, rows.remainder, rows.effects
    return RowGradients(
        _arrange(output, positions.put(gradients)),
        log_scale,
        rows.values.mean(0),
        None if before is None else before.mean(0),
        None if remainder is None else (remainder * share).sum(0),
        None if effects is None else effects.mean(0),
    )


def _anew(run: HeadRun | HeadOutput) -> HeadTrace:
    """Return the trace of rows again, with the numbers for a pullback."""
    trace = run.head(run.head_trace.values[0])
    trace.eps = run.head_trace.eps
    return trace


def _differentiate_whole(
    output: HeadRun | HeadOutput, column: Question, dtype: torch.dtype, start: Any
) -> RowGradients:
    """Return the gradient of a callable that takes all scores of an image, as of one target: K is 1."""
    values, seeds = evaluate_question(column, output, start)
    at_start = None if start is None else HeadRun(start.head, start.head_trace, start.grid)
    before = None
    if at_start is not None:
        here = output.head_trace.values
        rises = [(here[place] - at_start.head_trace.values[place]) * seed for place, seed in seeds.items()]
        terms = [rise.unflatten(0, (output.count, -1)).flatten(1) for rise in rises]
        at = values - torch.stack([term.sum(1) for term in terms]).sum(0)
        size = values.abs() + torch.stack([term.abs().sum(1) for term in terms]).sum(0)
        before = call_at_start(column.callables(output.count), at_start.target_rows(), size, at).unsqueeze(1)
        at_start.head_trace = _anew(at_start)
    by_row = {place: seed.unsqueeze(1) for place, seed in seeds.items()}
    start_trace = None if at_start is None else at_start.head_trace
    grad, log_scale = output.head.pullback(_anew(output), by_row, start_trace, sampling=column.sampling)
    gradients = (grad * log_scale.exp().unsqueeze(-1)).to(dtype).transpose(0, 1).unflatten(1, (output.count, -1))
    values = values.unsqueeze(1)
    return RowGradients(_arrange(output, gradients), torch.zeros_like(values), values, before)


def _arrange(output: HeadRun | HeadOutput, gradients: Tensor) -> Tensor:
    """Return gradients at P positions, (K, N, P, D), as dense features are arranged, (N, K, D, h, w)."""
    return gradients.mT.unflatten(-1, find_grid(output).shape).transpose(0, 1)
