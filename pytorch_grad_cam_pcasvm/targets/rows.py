"""The gradients of questions that are asked of rows: the core of all output gradients.

A row is what one vector of features becomes in a head: an image, or of dense features one of its positions. Every
question is asked of every row; what is special about images, places and starts is settled before, and summed after.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.head.stage import USUAL, Sampling
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun
from pytorch_grad_cam_pcasvm.runtime.columns import Columns, OptionalPlain, OptionalScaled, Plain, Scaled, join_columns
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.targets.components import PCATarget, evaluate_components
from pytorch_grad_cam_pcasvm.targets.places import RegionRun
from pytorch_grad_cam_pcasvm.targets.questions import Question
from pytorch_grad_cam_pcasvm.targets.target import (
    ClosedFormTarget,
    PlacedTarget,
    call_at_start,
    differentiate_rows,
    make_leaf,
)

BYTES = 1 << 28  # of the rows of a region, or of several starts, that are computed at once
_CACHED = 1 << 20  # of the rows of several starts on a CPU, which is faster with one start after the other


@dataclass(frozen=True, eq=False)
class RowGradients(Columns):
    """The gradients of K questions with respect to one of a head's values, at R rows.

    Attributes:
        gradients: divided by ``exp(log_scale)``, shape (R, K, D).
        log_scale: natural logarithm of the factor taken out, shape (R, K).
        values: values of the questions, shape (R, K).
        baseline_values: their values at the start, shape (R, K); None for gradients.
        remainder: what secants of a head without a gradient leave out, divided by ``exp(log_scale)``; else None.
        effects: the sum of the sizes of the Shapley values of such a head's inputs, 0 for other questions; else None.
    """

    gradients: Scaled
    log_scale: Plain
    values: Plain
    baseline_values: OptionalPlain = None
    remainder: OptionalScaled = None
    effects: OptionalPlain = None


@dataclass(frozen=True, eq=False)
class _Part:
    """Questions whose gradients begin at the same values of a head, from one start.

    Attributes:
        target_indices: of the questions.
        values: their values, shape (R, k).
        seeds: their gradients by those values, by position, shape (R or 1, k, .); None: each number of the value.
        start: where their secants start; None: gradients.
        sampling: of their coalitions.
    """

    target_indices: list[int]
    values: Tensor
    seeds: Mapping[int, Any]
    start: HeadRun | HeadOutput | None
    sampling: Sampling = USUAL.sampling


class _Pulled(NamedTuple):
    """The gradients of a part, their logarithms, and if it has no gradient the sizes of its Shapley values."""

    gradients: Tensor
    log_scale: Tensor
    sizes: Tensor | None = None


def differentiate_starts(
    rows: HeadRun | HeadOutput,
    groups: Sequence[tuple[Sequence[Question], HeadRun | HeadOutput | None]],
    until: int = 0,
) -> list[RowGradients]:
    """Return the gradients of questions, or their secants from a start each, in as few passes as may be.

    Starts of equally many questions pass the head together, as rows of a larger batch, where so many rows are faster
    than a pass each; not those of a head without a gradient.

    Args:
        rows: what a head computed for R rows, each of which is asked all questions.
        groups: questions, and the start of their secants; None: gradients.
        until: position of the head's value that the gradients are with respect to.
    """
    plans = [_plan_parts(columns, rows, start) for columns, start in groups]
    pulled = iter(_pull_together(rows, [part for parts in plans for part in parts], until))
    results = []
    for (columns, _), parts in zip(groups, plans, strict=True):
        tables = [_describe(rows, columns, part, next(pulled), until) for part in parts]
        order = [k for part in parts for k in part.target_indices]
        joined = join_columns(tables, order)
        # Values of one part may be the output's own.
        results.append(joined if len(parts) > 1 else replace(joined, values=joined.values.clone()))
    return results


def _plan_parts(
    columns: Sequence[Question], rows: HeadRun | HeadOutput, start: HeadRun | HeadOutput | None
) -> list[_Part]:
    """Return questions whose gradients begin at the same values, as one part each."""
    parts: list[_Part] = []
    components = [k for k, column in enumerate(columns) if type(column.target) is PCATarget]
    if components:
        parts.append(_Part(components, *evaluate_components([columns[k].target for k in components], rows), start))
    pairs = {
        k: evaluate_question(column, rows, start)
        for k, column in enumerate(columns)
        if type(column.target) is not PCATarget
    }
    kinds = {k: (frozenset(seeds), columns[k].sampling) for k, (_, seeds) in pairs.items()}
    for kind in dict.fromkeys(kinds.values()):
        (positions, sampling), target_indices = kind, [k for k, own in kinds.items() if own == kind]
        values = torch.stack([pairs[k][0] for k in target_indices], 1)
        seeds = {position: _stack([pairs[k][1][position] for k in target_indices]) for position in positions}
        parts.append(_Part(target_indices, values, seeds, start, sampling))
    return parts


def _describe(
    rows: HeadRun | HeadOutput, columns: Sequence[Question], part: _Part, pulled: _Pulled, until: int
) -> RowGradients:
    """Return the gradients of a part, with its values at the start."""
    gradients = pulled.gradients.expand(rows.count, -1, -1)
    log_scale = pulled.log_scale.expand(rows.count, -1)
    if part.start is None:
        return RowGradients(gradients, log_scale, part.values)
    before = _at_start([columns[k] for k in part.target_indices], part, part.start, rows)
    if rows.head.enumerated is None:
        return RowGradients(gradients, log_scale, part.values, before)
    remainder = effects = torch.zeros_like(before)
    if pulled.sizes is not None:
        scale = log_scale.exp()
        explained = (gradients * _change(rows.head_trace, part.start.head_trace, until)).sum(-1) * scale
        remainder, effects = (part.values - before - explained) / scale, pulled.sizes
    return RowGradients(gradients, log_scale, part.values, before, remainder, effects)


def _pull_together(rows: HeadRun | HeadOutput, parts: Sequence[_Part], until: int) -> list[_Pulled]:
    """Return the gradients of parts as :func:`_pull_back` does; parts of equal shapes in one pass."""
    head, count = rows.head, rows.count
    alike: dict[Any, list[int]] = {}
    apart = head.enumerated is not None or is_traced()
    for number, part in enumerate(parts):
        alone = apart or part.start is None or any(seed is None for seed in part.seeds.values())
        shape = number if alone else frozenset((position, seed.shape[1:]) for position, seed in part.seeds.items())
        alike.setdefault(shape, []).append(number)
    most = _CACHED if rows.device.type == "cpu" else BYTES
    pulled: dict[int, _Pulled] = {}
    for numbers in alike.values():
        at_once = 1
        if len(numbers) > 1:
            columns = max(seed.shape[1] for seed in parts[numbers[0]].seeds.values())
            at_once = max(1, most // (head.bytes_per_target(count) * columns))
        for first in range(0, len(numbers), at_once):
            block = numbers[first : first + at_once]
            if len(block) == 1:
                pulled[block[0]] = _pull_back(rows, parts[block[0]], until)
                continue
            some = [parts[number] for number in block]
            seeds = {
                position: torch.cat([part.seeds[position].expand(count, -1, -1) for part in some])
                for position in some[0].seeds
            }
            here = HeadTrace.cat([rows.head_trace] * len(block), count)
            at_start = HeadTrace.cat([part.start.head_trace for part in some if part.start is not None], count)
            pieces = zip(*(tensor.split(count) for tensor in head.pullback(here, seeds, at_start, until)), strict=True)
            pulled |= {number: _Pulled(*piece) for number, piece in zip(block, pieces, strict=True)}
    return [pulled[number] for number in range(len(parts))]


def _pull_back(rows: HeadRun | HeadOutput, part: _Part, until: int) -> _Pulled:
    """Return the gradients of one part."""
    head, trace, start = rows.head, rows.head_trace, None if part.start is None else part.start.head_trace
    seeds, sizes = part.seeds, None
    if start is not None and head.enumerated is not None and [*seeds] == [len(head.stages)]:
        # Pull back in two steps: the gradient in between, times the change, is the Shapley value.
        place = len(head.stages) - 1
        slopes, _ = head.pullback(trace, seeds, start, place, part.sampling)
        sizes = (slopes * _change(trace, start, place)).abs().sum(-1)
        seeds = {place: slopes}
    return _Pulled(*head.pullback(trace, seeds, start, until, part.sampling), sizes)


def _change(trace: HeadTrace, start: HeadTrace, position: int) -> Tensor:
    """Return the change of a value from the start, shape (N, 1, .)."""
    return (trace.values[position] - start.values[position]).unsqueeze(1)


def _at_start(
    columns: Sequence[Question], part: _Part, start: HeadRun | HeadOutput, rows: HeadRun | HeadOutput
) -> Tensor:
    """Return the values of a part's questions at its start, shape (R, k), by their values and gradients at the rows."""
    here, at_start, values = rows.head_trace.values, start.head_trace.values, part.values
    at, terms = values, values.abs()
    for position, seed in part.seeds.items():
        if seed is None:  # each number of that value itself
            return at_start[position].expand_as(values).clone()
        rises = (here[position] - at_start[position]).unsqueeze(1) * seed
        at, terms = at - rises.sum(-1), terms + rises.abs().sum(-1)
    for k, column in enumerate(columns):
        if not isinstance(column.target, ClosedFormTarget):
            of_rows = start.target_rows()
            of_rows = of_rows * len(values) if len(of_rows) == 1 else of_rows
            at[:, k] = call_at_start(column.callables(len(values)), of_rows, terms[:, k], at[:, k])
    return at


def evaluate_question(
    column: Question, output: HeadRun | HeadOutput, start: HeadRun | HeadOutput | None
) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return a question's value for every row, (N,), and its gradient, or secant, by position, (N, .) or (1, .)."""
    target = column.target
    if isinstance(target, ClosedFormTarget):
        return target.evaluate_questions(output, start, column.question_index)
    with without_inference(), torch.enable_grad():
        # Every value is a leaf of its own: a target may read any of them.
        leaves = [make_leaf(value) for value in output.head_trace.values]
        if isinstance(output, RegionRun) and isinstance(target, PlacedTarget):
            of_leaves = replace(output, head_trace=HeadTrace(leaves, []))
            values = target.value_questions(of_leaves, column.question_index)  # of all rows at once: they may be many
            grads: Sequence[Tensor | None] = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
            values = values.detach()
        else:
            rows = HeadRun(output.head, HeadTrace(leaves, []), output.grid).target_rows()
            values, grads = differentiate_rows(column.callables(len(rows)), rows, leaves)
    return values, {position: grad for position, grad in enumerate(grads) if grad is not None}


def _stack(seeds: Sequence[Tensor]) -> Tensor:
    """Stack K seeds of shape (N, .) or (1, .) to (N, K, .), or (1, K, .) where none differs between images."""
    if len(seeds) == 1:
        return seeds[0].unsqueeze(1)
    return torch.stack(torch.broadcast_tensors(*seeds), 1)
