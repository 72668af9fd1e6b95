"""OutputGradients: how targets become gradients at the network's output, where the pullback through the path starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.head.stage import USUAL, Sampling
from pytorch_grad_cam_pcasvm.network.grid import Grid
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput, HeadRun, PlainOutput
from pytorch_grad_cam_pcasvm.runtime.columns import (
    Columns,
    OptionalPlain,
    OptionalScaled,
    Plain,
    join_columns,
    join_rows,
    order_columns,
)
from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_flatten, tree_leaves, tree_unflatten
from pytorch_grad_cam_pcasvm.targets.components import PCATarget, evaluate_components
from pytorch_grad_cam_pcasvm.targets.places import OwnPositions, RegionRun, SharedPositions, take_region
from pytorch_grad_cam_pcasvm.targets.questions import Question, resolve_targets
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import (
    ClosedFormTarget,
    PlacedTarget,
    call_at_start,
    differentiate_rows,
    make_leaf,
)

_BYTES = 1 << 28  # of the rows of a region, or of several starts, that are computed at once
_CACHED = (
    1 << 20
)  # of the rows of several starts on a CPU, which computes more of them faster one start after the other


@dataclass(frozen=True, eq=False)
class OutputGradients(Columns):
    """The gradients of K targets with respect to the network's features or output.

    Attributes:
        grads: for every tensor of an ordinary network's output (of a HeadOutput: for its features, (K, N, D), or dense
            ones, (K, N, D, h, w)) the gradient divided by ``exp(log_scale)``, of shape (K, *its shape); None where
            there is none.
        log_scale: natural logarithm of the factor taken out, shape (N, K).
        values: values of the targets, shape (N, K).
        baseline_values: values of the same targets at the start, shape (N, K); None for gradients.
        excess: by how much maps from the training mean add up to more than those from each target's own start,
            divided by ``exp(log_scale)``, shape (N, K); None where all start together.
        remainder: what secants of a head without a gradient leave out, where a component differs by rounding alone,
            divided by ``exp(log_scale)``, shape (N, K); None for other heads.
        effects: of decisions of such a head, the sum of the sizes of its inputs' Shapley values, shape (N, K), 0 for
            other targets; None for other heads.
    """

    grads: list[Tensor | None]
    log_scale: Plain
    values: Plain
    baseline_values: OptionalPlain = None
    excess: OptionalScaled = None
    remainder: OptionalScaled = None
    effects: OptionalPlain = None

    @property
    def by_image(self) -> Tensor:
        """The gradients with respect to a head's value, (N, K, D)."""
        (grad,) = self.grads
        assert grad is not None
        return grad.transpose(0, 1)


def join_gradients(parts: Sequence[OutputGradients], target_indices: Sequence[int]) -> OutputGradients:
    """Return the gradients of some targets each, which bear these numbers, as one in the order of the numbers."""
    if len(parts) == 1:
        return parts[0]
    grads: Any = [
        order_columns(pieces, target_indices, 0) for pieces in zip(*(part.grads for part in parts), strict=True)
    ]  # type: ignore[arg-type]
    return replace(join_columns(parts, target_indices), grads=grads)


def _join_images(parts: Sequence[OutputGradients], images: Sequence[int]) -> OutputGradients:
    """Return the gradients of some images each as one, in the order of the images' numbers."""
    order = torch.tensor(images, device=parts[0].values.device).argsort()
    grad = torch.cat([part.grads[0] for part in parts], 1)[:, order]  # type: ignore[misc]
    return join_rows(parts, grads=[grad]).map_columns(lambda tensor: tensor[order])


def differentiate_targets(
    output: Any,
    targets: Sequence[Any],
    dtype: torch.dtype,
    start: Any = None,
    *,
    until: int = 0,
    sampling: Sampling = USUAL.sampling,
) -> OutputGradients:
    """Return the gradients of K targets, or where there is a start their secants from it to the images.

    Args:
        output: what a head computed, or an ordinary network returned, for N images.
        targets: K targets, each for all images, or the :class:`.Questions` that they were resolved to.
        dtype: dtype of the gradients.
        start: the output at the start, of N rows, or one for all.
        until: position of the head's value that the gradients are with respect to, instead of the features.
        sampling: the permutations of a head without a gradient that has too many coalitions.

    Returns:
        The gradients.
    """
    questions = resolve_targets(targets, output)
    if questions.images is None:
        return _differentiate(output, questions.columns, dtype, start, until, sampling)
    parts = []
    for column, images in zip(questions.columns, questions.images, strict=True):
        at_start = start if start is None or start.count == 1 else start.rows(images)
        parts.append(_differentiate(output.rows(images), [column], dtype, at_start, until, sampling))
    return _join_images(parts, [image for images in questions.images for image in images])


def _differentiate(
    output: Any, columns: Sequence[Question], dtype: torch.dtype, start: Any, until: int, sampling: Sampling
) -> OutputGradients:
    """Return the gradients of K questions that are asked of all images."""
    if output.head is None:
        return _differentiate_plain(output, columns, dtype, start)
    if output.grid is not None:
        return _differentiate_places(output, columns, dtype, start, sampling)
    return differentiate_starts(output, [(columns, start)], dtype, until, sampling)[0]


def _differentiate_plain(
    output: PlainOutput, columns: Sequence[Question], dtype: torch.dtype, start: PlainOutput | None
) -> OutputGradients:
    """Return the gradients of K targets with respect to every tensor that an ordinary network gave."""
    by_target, values, at_start = zip(*(plain_gradients(output, column, start) for column in columns), strict=True)
    grads: list[Tensor | None] = []
    for column in zip(*by_target, strict=True):
        like = next((grad for grad in column if grad is not None), None)
        stacked = [torch.zeros_like(like) if grad is None else grad for grad in column] if like is not None else []
        grads.append(torch.stack(stacked).to(dtype) if stacked else None)
    stacked_values = torch.stack(values, 1)
    before = None if start is None else torch.stack(at_start, 1)  # type: ignore[arg-type]
    return OutputGradients(grads, torch.zeros_like(stacked_values), stacked_values, before)


def differentiate_starts(
    output: HeadRun | HeadOutput,
    groups: Sequence[tuple[Sequence[Question], HeadRun | HeadOutput | None]],
    dtype: torch.dtype,
    until: int = 0,
    sampling: Sampling = USUAL.sampling,
) -> list[OutputGradients]:
    """Return the secants of questions from a start each, as :func:`differentiate_targets`, in as few passes as may be.

    Starts of equally many questions pass the head together, as rows of a larger batch, where so many rows are faster
    than a pass each; not those of a head without a gradient.

    Args:
        output: what a head computed for N rows, each of which is asked all questions.
        groups: questions, and the start of their secants; None: gradients.
        dtype: dtype of the gradients.
        until: position of the head's value that the gradients are with respect to.
        sampling: the permutations of a head without a gradient that has too many coalitions.
    """
    asked = [(columns, start, _group_seeds(columns, output, start)) for columns, start in groups]
    ways = [(seeds, start) for _, start, parts in asked for _, _, seeds in parts]
    pulled = iter(_pull_together(output, ways, until, sampling))
    return [_gather(output, *group, pulled, dtype, until) for group in asked]


def _gather(
    output: HeadRun | HeadOutput,
    columns: Sequence[Question],
    start: Any,
    asked: Sequence[tuple[list[int], Tensor, Mapping[int, Any]]],
    pulled: Iterator[tuple[Tensor, Tensor, Tensor | None]],
    dtype: torch.dtype,
    until: int,
) -> OutputGradients:
    """Return the gradients of K questions with one start, from the pullbacks of their parts."""
    count, parts = output.count, list[tuple[list[int], list[Tensor]]]()
    for target_indices, values, seeds in asked:
        grad, log_scale, sizes = next(pulled)
        tensors = [grad.expand(count, -1, -1), log_scale.expand(count, -1), values]
        if start is not None:
            at_start = _at_start([columns[k] for k in target_indices], seeds, values, output, start)
            tensors.append(at_start)
            if output.head.enumerated is not None:
                scale = tensors[1].exp()
                explained = (tensors[0] * _change(output.head_trace, start.head_trace, until)).sum(-1) * scale
                none = torch.zeros_like(at_start)
                tensors += [none, none] if sizes is None else [(values - at_start - explained) / scale, sizes]
        parts.append((target_indices, tensors))
    if len(parts) == 1:
        ((_, (grad, *tables)),) = parts
        tables[1] = tables[1].clone()  # values that may be the output's own
    else:
        order = [k for target_indices, _ in parts for k in target_indices]
        pieces = zip(*(tensors for _, tensors in parts), strict=True)
        grad, *tables = (order_columns(piece, order) for piece in pieces)
    gradients = OutputGradients([grad.to(dtype).transpose(0, 1)], *tables[:3])
    return replace(gradients, remainder=tables[3], effects=tables[4]) if tables[3:] else gradients


def _pull_together(
    output: HeadRun | HeadOutput, ways: Sequence[tuple[Mapping[int, Any], Any]], until: int, sampling: Sampling
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return gradients as :func:`_pull_back` does, for several seeds and starts: equal shapes in one pass."""
    head, count = output.head, output.count
    alike: dict[Any, list[int]] = {}
    apart = head.enumerated is not None or is_traced()
    for number, (seeds, start) in enumerate(ways):
        alone = apart or start is None or any(seed is None for seed in seeds.values())
        shape = number if alone else frozenset((place, seed.shape[1:]) for place, seed in seeds.items())
        alike.setdefault(shape, []).append(number)
    most = _CACHED if output.device.type == "cpu" else _BYTES
    pulled: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
    for numbers in alike.values():
        at_once = 1
        if len(numbers) > 1:
            columns = max(seed.shape[1] for seed in ways[numbers[0]][0].values())
            at_once = max(1, most // (head.bytes_per_target(count) * columns))
        for first in range(0, len(numbers), at_once):
            block = numbers[first : first + at_once]
            if len(block) == 1:
                pulled[block[0]] = _pull_back(output, *ways[block[0]], until, sampling)
                continue
            some, starts = zip(*(ways[number] for number in block), strict=True)
            seeds = {place: torch.cat([one[place].expand(count, -1, -1) for one in some]) for place in some[0]}
            here = HeadTrace.cat([output.head_trace] * len(block), count)
            at_start = HeadTrace.cat([start.head_trace for start in starts], count)
            pieces = zip(*(tensor.split(count) for tensor in head.pullback(here, seeds, at_start, until)), strict=True)
            pulled |= {number: (*piece, None) for number, piece in zip(block, pieces, strict=True)}
    return [pulled[number] for number in range(len(ways))]


def _pull_back(
    output: HeadRun | HeadOutput, seeds: Mapping[int, Any], start: Any, until: int, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return gradients, their logarithms, and of a decision without a gradient the sizes of its Shapley values."""
    head, trace, start_trace = output.head, output.head_trace, None if start is None else start.head_trace
    sizes = None
    if start_trace is not None and head.enumerated is not None and [*seeds] == [len(head.stages)]:
        # Pull back in two steps: the gradient in between, times the change, is the Shapley value.
        place = len(head.stages) - 1
        slopes, _ = head.pullback(trace, seeds, start_trace, place, sampling)
        sizes = (slopes * _change(trace, start_trace, place)).abs().sum(-1)
        seeds = {place: slopes}
    return *head.pullback(trace, seeds, start_trace, until, sampling), sizes


def _differentiate_places(
    output: HeadRun | HeadOutput, columns: Sequence[Question], dtype: torch.dtype, start: Any, sampling: Sampling
) -> OutputGradients:
    """Return the gradients of K questions with respect to dense features, each at its place."""
    groups: dict[Any, list[int]] = {}
    for k, column in enumerate(columns):
        groups.setdefault(column.positions or k, []).append(k)  # the same positions are the same object
    parts = []
    for target_indices in groups.values():
        some = [columns[k] for k in target_indices]
        positions = some[0].positions
        if positions is not None:
            part = _differentiate_region(output, some, positions, dtype, start, sampling)
        else:
            part = _differentiate_whole(output, some[0], dtype, start, sampling)
        parts.append(part)
    return join_gradients(parts, [k for target_indices in groups.values() for k in target_indices])


def _differentiate_region(
    output: HeadRun | HeadOutput,
    columns: Sequence[Question],
    selection: SharedPositions | OwnPositions,
    dtype: torch.dtype,
    start: Any,
    sampling: Sampling,
) -> OutputGradients:
    """Return the gradients of the means of K questions over A positions of each image."""
    head, count = output.head, output.count
    parts = list[OutputGradients]()
    rows_at_once = selection.size
    if not is_traced():
        rows_at_once = max(1, _BYTES // (head.bytes_per_target(count) * len(columns)))
    for block in selection.blocks(rows_at_once):
        region = take_region(output, block)
        trace = _anew(region)
        rows = RegionRun(head, trace, size=block.size)
        at_start: HeadRun | None = None
        if start is not None:
            at_start = HeadRun(head, _anew(take_region(start, block)))
            if start.count < count and block.size > 1:  # one start for all
                at_start = at_start.rows(torch.arange(block.size, device=output.device).repeat(count))
        repeated = [column.repeat(block.size) for column in columns]
        parts += differentiate_starts(rows, [(repeated, at_start)], dtype, 0, sampling)

    def column(name: str) -> Any:
        """Return numbers of each position, (N, A, K)."""
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat([tensor.unflatten(0, (count, -1)) for tensor in tensors], 1)

    log_scale = column("log_scale")
    largest = log_scale.amax(1)
    share = (log_scale - largest.unsqueeze(1)).exp() / selection.size
    grads = torch.cat([part.grads[0].unflatten(1, (count, -1)) for part in parts], 2)  # type: ignore[union-attr]
    grads = grads * share.permute(2, 0, 1).unsqueeze(-1).to(grads)
    before, remainder, effects = map(column, ("baseline_values", "remainder", "effects"))
    return OutputGradients(
        [_arrange_positions(output, selection.put(grads))],
        largest,
        column("values").mean(1),
        baseline_values=None if before is None else before.mean(1),
        remainder=None if remainder is None else (remainder * share).sum(1),
        effects=None if effects is None else effects.mean(1),
    )


def _anew(run: HeadRun | HeadOutput) -> HeadTrace:
    """Return the trace of rows again, with the numbers for a pullback."""
    trace = run.head(run.head_trace.values[0])
    trace.eps = run.head_trace.eps
    return trace


def _differentiate_whole(
    output: HeadRun | HeadOutput, column: Question, dtype: torch.dtype, start: Any, sampling: Sampling
) -> OutputGradients:
    """Return the gradient of a callable that takes all scores of an image, as of one target: K is 1."""
    values, seeds = _evaluate(column, output, start)
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
    grad, log_scale = output.head.pullback(_anew(output), by_row, start_trace, sampling=sampling)
    grads = (grad * log_scale.exp().unsqueeze(-1)).to(dtype).transpose(0, 1).unflatten(1, (output.count, -1))
    values = values.unsqueeze(1)
    return OutputGradients([_arrange_positions(output, grads)], torch.zeros_like(values), values, before)


def _arrange_positions(output: HeadRun | HeadOutput, grads: Tensor) -> Tensor:
    """Return gradients at P positions, (K, N, P, D), as dense features are arranged, (K, N, D, h, w)."""
    return grads.mT.unflatten(-1, _grid(output).shape)


def _grid(output: HeadRun | HeadOutput) -> Grid:
    assert output.grid is not None
    return output.grid


def _change(trace: HeadTrace, start: HeadTrace, position: int) -> Tensor:
    """Return the change of a value from the start, shape (N, 1, .)."""
    return (trace.values[position] - start.values[position]).unsqueeze(1)


def _at_start(
    columns: Sequence[Question],
    seeds: Mapping[int, Any],
    values: Tensor,
    output: HeadRun | HeadOutput,
    start: HeadRun | HeadOutput,
) -> Tensor:
    """Return the values of questions at the start, shape (N, K), by their values (N, K) and gradients at the image."""
    here, at_start = output.head_trace.values, start.head_trace.values
    at, terms = values, values.abs()
    for position, seed in seeds.items():
        if seed is None:  # each number of that value itself
            return at_start[position].expand_as(values).clone()
        rises = (here[position] - at_start[position]).unsqueeze(1) * seed
        at, terms = at - rises.sum(-1), terms + rises.abs().sum(-1)
    for k, column in enumerate(columns):
        if not isinstance(column.target, ClosedFormTarget):
            rows = start.target_rows()
            rows = rows * len(values) if len(rows) == 1 else rows
            at[:, k] = call_at_start(column.callables(len(values)), rows, terms[:, k], at[:, k])
    return at


def _group_seeds(
    columns: Sequence[Question], output: HeadRun | HeadOutput, start: HeadRun | HeadOutput | None
) -> list[tuple[list[int], Tensor, Mapping[int, Any]]]:
    """Return questions whose gradients start at the same values: their numbers, values (N, K), seeds (N or 1, K, .)."""
    groups: list[tuple[list[int], Tensor, Mapping[int, Any]]] = []
    components = [k for k, column in enumerate(columns) if type(column.target) is PCATarget]
    if components:
        groups.append((components, *evaluate_components([columns[k].target for k in components], output)))
    pairs = {
        k: _evaluate(column, output, start) for k, column in enumerate(columns) if type(column.target) is not PCATarget
    }
    for positions in dict.fromkeys(frozenset(seeds) for _, seeds in pairs.values()):
        target_indices = [k for k, (_, seeds) in pairs.items() if frozenset(seeds) == positions]
        values = torch.stack([pairs[k][0] for k in target_indices], 1)
        seeds = {position: _stack([pairs[k][1][position] for k in target_indices]) for position in positions}
        groups.append((target_indices, values, seeds))
    return groups


def _evaluate(
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


def plain_gradients(
    output: PlainOutput, column: Question, start: PlainOutput | None
) -> tuple[list[Tensor | None], Tensor, Tensor | None]:
    """Return the gradient of one question by every tensor, with its value for each image, and that at a start.

    Args:
        output: what the network returned for N images.
        column: the question.
        start: what it returned at the start, if maps are to add up.

    Returns:
        For each tensor of the output a gradient of its shape, or None; values, shape (N,), and those at the start.

    Raises:
        TypeError: the target is not callable, or gives no tensor.
        ValueError: the target does not fit the output; or maps are to add up, and it is not linear.
    """
    if isinstance(column.target, ScoreTarget):
        return _of_scores(output, column.target, start)
    tensors, structure = tree_flatten(output.value)
    with without_inference(), torch.enable_grad():
        leaves = [make_leaf(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
        rows = PlainOutput(tree_unflatten(leaves, structure), output.count).target_rows()
        floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        values, leaf_grads = differentiate_rows(column.callables(len(rows)), rows, floating)
    by_leaf = {id(leaf): grad for leaf, grad in zip(floating, leaf_grads, strict=True)}
    grads = [by_leaf.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
    if start is None:
        return grads, values, None
    changes = zip(grads, tensors, tree_leaves(start.value), strict=True)
    rises = torch.cat([(g * (t - t0)).reshape(output.count, -1) for g, t, t0 in changes if g is not None], 1)
    terms = values.abs() + rises.abs().sum(-1)
    at_start = start.target_rows()
    return grads, values, call_at_start(column.callables(len(at_start)), at_start, terms, values - rises.sum(-1))


def _of_scores(output: PlainOutput, target: Any, start: PlainOutput | None) -> tuple[Any, Tensor, Tensor | None]:
    if not isinstance(output.value, Tensor) or output.value.dim() > 2:
        raise ValueError(
            f"targets=None explains the largest of scores (N, C), but the network returns {output}: "
            "say what to explain, as in targets=[SemanticSegmentationTarget(...)]"
        )
    scores = output.value.reshape(output.count, -1)
    grad = target.seeds(scores)[0]
    at_start = None if start is None else (start.value.reshape(output.count, -1) * grad).sum(-1)
    return [grad.reshape(output.value.shape)], target(scores), at_start
