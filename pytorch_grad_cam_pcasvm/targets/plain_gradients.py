"""Gradients of targets by an ordinary network's output, which may be any tree of tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from pytorch_grad_cam_pcasvm.network.outputs import PlainOutput
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.targets.callables import call_at_start, differentiate_rows, make_leaf
from pytorch_grad_cam_pcasvm.targets.questions import Question
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget


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
