"""Seeds: how targets become gradients of what the network gives, where the pullback through the path begins."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pytorch_grad_cam_pcasvm.head.head import HeadTrace
from pytorch_grad_cam_pcasvm.net import HeadOutput
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget, PCATarget, ScoreTarget, SVMTarget, Target


@dataclass
class Seeds:
    """The gradients of K targets with respect to the network's features or output.

    Attributes:
        grads: for every tensor of an ordinary network's output (of a HeadOutput: for its features, (K, N, D)) the
            gradient divided by ``exp(log_scale)``, of shape (K, *its shape); None where there is none.
        log_scale: shape (N, K).
        values: of the targets, shape (N, K).
    """

    grads: list[Tensor | None]
    log_scale: Tensor
    values: Tensor


def seeds_of(output: Any, count: int, targets: Sequence[Any], dtype: torch.dtype) -> Seeds:
    """Return the gradients of K targets, each for all images.

    Args:
        output: a HeadOutput, or what an ordinary network gave.
        count: number of images N.
        targets: K targets.
        dtype: of the gradients.

    Returns:
        The seeds.
    """
    if isinstance(output, HeadOutput):
        return _of_head(output, targets, dtype)
    return _stacked([_of_output(output, count, target, dtype) for target in targets])


def seeds_per_image(output: Any, count: int, targets: Sequence[Target], dtype: torch.dtype) -> Seeds:
    """Return the gradient of each image's own target, as of one target: K is 1.

    Args:
        output: a HeadOutput, or what an ordinary network gave.
        count: number of images N.
        targets: N targets.
        dtype: of the gradients.

    Returns:
        The seeds.
    """
    groups: dict[Any, list[int]] = {}
    for row, target in enumerate(targets):
        groups.setdefault(target if isinstance(target, ClosedFormTarget) else None, []).append(row)
    if not isinstance(output, HeadOutput):
        shared = targets[0] if len(groups) == 1 and None not in groups else Rowwise(list(targets))
        return seeds_of(output, count, [shared], dtype)
    parts: list[tuple[list[int], Seeds]] = []
    for target, rows in groups.items():
        part = output if len(groups) == 1 else output.rows(rows)
        shared = Rowwise([targets[row] for row in rows]) if target is None else target
        parts.append((rows, _of_head(part, [shared], dtype)))
    if len(parts) == 1:
        return parts[0][1]
    grad = torch.cat([part.grads[0] for _, part in parts], 1)  # type: ignore[misc]
    log_scale, values = (torch.cat([getattr(part, name) for _, part in parts]) for name in ("log_scale", "values"))
    order = torch.tensor([row for rows, _ in parts for row in rows], device=grad.device).argsort()
    return Seeds([grad[:, order]], log_scale[order], values[order])


@dataclass
class Rowwise:
    """One target per image."""

    targets: list[Target]


def _of_head(output: HeadOutput, targets: Sequence[Any], dtype: torch.dtype) -> Seeds:
    count = len(output)
    parts: list[tuple[list[int], tuple[Tensor, Tensor, Tensor]]] = []
    for members, values, seeds in _grouped(targets, output):
        grad, log_scale = output.head.pullback(output.head_trace, seeds)
        parts.append((members, (grad.to(dtype).expand(count, -1, -1), log_scale.expand(count, -1), values)))
    if len(parts) == 1:
        grad, log_scale, values = parts[0][1]
        return Seeds([grad.transpose(0, 1)], log_scale, values)
    grad, log_scale, values = (torch.cat(tensors, 1) for tensors in zip(*(part for _, part in parts), strict=True))
    order = [k for members, _ in parts for k in members]
    if order != sorted(order):
        back = sorted(range(len(order)), key=order.__getitem__)
        grad, log_scale, values = (
            torch.stack([columns[k] for k in back], 1) for columns in (t.unbind(1) for t in (grad, log_scale, values))
        )
    return Seeds([grad.transpose(0, 1)], log_scale, values)


def _grouped(targets: Sequence[Any], output: HeadOutput) -> Iterator[tuple[list[int], Tensor, Mapping[int, Any]]]:
    """Yield targets whose gradients start at the same values: their numbers, values (N, K), seeds (N or 1, K, .)."""
    components = [k for k, target in enumerate(targets) if type(target) is PCATarget]
    if components:
        # Many at once: 64 of them are one row of a matrix each, and not 64 calls.
        yield components, *PCATarget.several([targets[k] for k in components], output)
    pairs = {k: _values_and_seeds(target, output) for k, target in enumerate(targets) if type(target) is not PCATarget}
    for positions in dict.fromkeys(frozenset(seeds) for _, seeds in pairs.values()):
        members = [k for k, (_, seeds) in pairs.items() if frozenset(seeds) == positions]
        values = torch.stack([pairs[k][0] for k in members], 1)
        yield members, values, {position: _stack([pairs[k][1][position] for k in members]) for position in positions}


def _values_and_seeds(target: Target | Rowwise, output: HeadOutput) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return a target's value for every image, shape (N,), and its gradient by position, shape (N, .) or (1, .)."""
    if isinstance(target, SVMTarget):
        seeds = target.seeds(output)  # once: its value is their product with the decision values
        return (target.decision(output) * next(iter(seeds.values()))).sum(-1), seeds
    if isinstance(target, ClosedFormTarget):
        return target(output), target.seeds(output)
    with torch.inference_mode(False), torch.enable_grad():
        # Every value is a leaf of its own: a target may read any of them.
        leaves = [value.detach().clone().requires_grad_() for value in output.head_trace.values]
        rows = list(HeadOutput.of(output.head, HeadTrace(leaves, [])))
        values, grads = _differentiated(target, rows, leaves)
    return values, {position: grad for position, grad in enumerate(grads) if grad is not None}


def _of_output(output: Any, count: int, target: Target | Rowwise, dtype: torch.dtype) -> Seeds:
    """Return the gradient of one target with respect to every tensor that an ordinary network gave."""
    tensors, structure = tree_flatten(output)
    if isinstance(target, ScoreTarget):
        if not isinstance(output, Tensor) or output.dim() > 2:
            raise ValueError(
                f"targets=None explains the largest of scores (N, C), and the network gives {_described(output)}: "
                "say what to explain, as in targets=[SemanticSegmentationTarget(...)]"
            )
        scores = output.reshape(count, -1)
        values = target(scores)
        grads: list[Tensor | None] = [target.seeds(scores)[0].reshape(output.shape)]
    else:
        with torch.inference_mode(False), torch.enable_grad():
            leaves = [
                t.detach().clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
                for t in tensors
            ]
            rows = _rows(tree_unflatten(leaves, structure), count)
            floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            values, found = _differentiated(target, rows, floating)
        by_leaf = {id(leaf): grad for leaf, grad in zip(floating, found, strict=True)}
        grads = [by_leaf.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
    log_scale = values.new_zeros(count, 1)
    return Seeds([None if g is None else g.to(dtype).unsqueeze(0) for g in grads], log_scale, values.unsqueeze(1))


def _stacked(parts: Sequence[Seeds]) -> Seeds:
    """Return the seeds of several targets as one."""
    if len(parts) == 1:
        return parts[0]
    grads: list[Tensor | None] = []
    for column in zip(*(part.grads for part in parts), strict=True):
        like = next((grad for grad in column if grad is not None), None)
        zeros = None if like is None else torch.zeros_like(like)
        grads.append(None if zeros is None else torch.cat([zeros if grad is None else grad for grad in column]))
    log_scale, values = (torch.cat([getattr(part, name) for part in parts], 1) for name in ("log_scale", "values"))
    return Seeds(grads, log_scale, values)


def _rows(output: Any, count: int) -> list[Any]:
    """Return what the target of each image gets of an ordinary network's output, as in the host where that has one."""
    if isinstance(output, Tensor):
        return list(output)
    if isinstance(output, Mapping):

        def row(index: int) -> Any:
            return tree_map(lambda t: t[index] if isinstance(t, Tensor) and t.shape[:1] == (count,) else t, output)

        return [row(index) for index in range(count)]
    items = list(output)
    if count == 1:
        return items[:1]
    if len(items) == 1 and isinstance(items[0], Tensor):
        return list(items[0])
    raise ValueError(
        f"the network gives {_described(output)} for {count} images, of which a target gets one item an image, as in "
        "the host: explain one image at a time, or wrap the network so that it gives one tensor"
    )


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return f"a {type(output).__name__} of {len(tree_leaves(output))} tensors"


def _differentiated(
    target: Target | Rowwise, rows: Sequence[Any], leaves: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """Differentiate callables, one per row, on copies of small values alone.

    Args:
        target: one callable for all rows, or one for each.
        rows: N rows of the output.
        leaves: what the rows are made of.

    Returns:
        Values, shape (N,), and the gradient of each leaf, of its shape.

    Raises:
        TypeError: a target is not callable, or gives no tensor.
        ValueError: a target gives more than one number, or depends on nothing that the network computed.
    """
    targets = target.targets if isinstance(target, Rowwise) else [target] * len(rows)
    values = []
    for each, row in zip(targets, rows, strict=True):
        if not callable(each):
            hint = f": use SVMTarget({each!r})" if isinstance(each, str | int) else ""
            raise TypeError(f"a target must be callable on a row of the network's output, got {each!r}{hint}")
        value = each(row)
        if not isinstance(value, Tensor):
            raise TypeError(f"the target {each!r} must return a tensor, it returned {type(value).__name__}")
        if value.numel() != 1:
            raise ValueError(f"the target {each!r} must return one number per image, it returned {value.numel()}")
        values.append(value.reshape(()))
    stacked = torch.stack(values)
    if not stacked.requires_grad:
        return stacked, [torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1)]
    return stacked.detach(), list(torch.autograd.grad(stacked.sum(), leaves, allow_unused=True))


def _stack(seeds: Sequence[Tensor]) -> Tensor:
    """Stack K seeds of shape (N, .) or (1, .) to (N, K, .), or (1, K, .) where none differs between images."""
    if len(seeds) == 1:
        return seeds[0].unsqueeze(1)
    rows = max(len(seed) for seed in seeds)
    return torch.stack([seed.expand(rows, -1) for seed in seeds], 1)
