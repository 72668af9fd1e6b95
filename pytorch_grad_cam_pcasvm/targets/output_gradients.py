"""OutputGradients: how targets become gradients at the network's output, where the pullback through the path starts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.outputs import PlainOutput
from pytorch_grad_cam_pcasvm.runtime.columns import (
    Columns,
    OptionalPlain,
    OptionalScaled,
    Plain,
    join_columns,
    join_rows,
    order_columns,
)
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import tree_flatten, tree_leaves, tree_unflatten
from pytorch_grad_cam_pcasvm.targets.dense import differentiate_place, group_places
from pytorch_grad_cam_pcasvm.targets.questions import Question, resolve_targets
from pytorch_grad_cam_pcasvm.targets.rows import RowGradients, differentiate_starts
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import call_at_start, differentiate_rows, make_leaf


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

    @staticmethod
    def of(rows: RowGradients, dtype: torch.dtype) -> "OutputGradients":
        """Return the gradients at rows, or at all positions, that are the images."""
        numbers: dict[str, Any] = rows.columns
        return OutputGradients([numbers.pop("gradients").to(dtype).transpose(0, 1)], **numbers)

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
    ]
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
) -> OutputGradients:
    """Return the gradients of K targets, or where there is a start their secants from it to the images.

    Args:
        output: what a head computed, or an ordinary network returned, for N images.
        targets: K targets, each for all images, or the :class:`.Questions` that they were resolved to.
        dtype: dtype of the gradients.
        start: the output at the start, of N rows, or one for all.
        until: position of the head's value that the gradients are with respect to, instead of the features.

    Returns:
        The gradients.
    """
    questions = resolve_targets(targets, output)
    if questions.images is None:
        return _differentiate(output, questions.columns, dtype, start, until)
    parts = []
    for column, images in zip(questions.columns, questions.images, strict=True):
        at_start = start if start is None or start.count == 1 else start.rows(images)
        parts.append(_differentiate(output.rows(images), [column], dtype, at_start, until))
    return _join_images(parts, [image for images in questions.images for image in images])


def _differentiate(
    output: Any, columns: Sequence[Question], dtype: torch.dtype, start: Any, until: int
) -> OutputGradients:
    """Return the gradients of K questions that are asked of all images."""
    if output.head is None:
        return _differentiate_plain(output, columns, dtype, start)
    if output.grid is None:
        return OutputGradients.of(differentiate_starts(output, [(columns, start)], until)[0], dtype)
    places = group_places(columns)
    parts = [differentiate_place(output, [columns[k] for k in place], dtype, start) for place in places]
    gradients = [OutputGradients.of(part, dtype) for part in parts]
    return join_gradients(gradients, [k for target_indices in places for k in target_indices])


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
    before = None if start is None else torch.stack(at_start, 1)
    return OutputGradients(grads, torch.zeros_like(stacked_values), stacked_values, before)


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
