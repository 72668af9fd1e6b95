"""OutputGradients: how targets become gradients at the network's output, where the pullback through the path starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pytorch_grad_cam_pcasvm.head.stack import HeadTrace
from pytorch_grad_cam_pcasvm.network.net import HeadOutput, HeadRun
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.targets import ClosedFormTarget, PCATarget, ScoreTarget, SVMTarget, Target


@dataclass
class OutputGradients:
    """The gradients of K targets with respect to the network's features or output.

    Attributes:
        grads: for every tensor of an ordinary network's output (of a HeadOutput: for its features, (K, N, D)) the
            gradient divided by ``exp(log_scale)``, of shape (K, *its shape); None where there is none.
        log_scale: natural logarithm of the factor taken out, shape (N, K).
        values: values of the targets, shape (N, K).
        baseline_values: values of the same targets at the baseline, shape (N, K); None without one.
        excess: by how much maps from the training mean add up to more than those from each target's own baseline,
            divided by ``exp(log_scale)``, shape (N, K); None where all start at one baseline.
    """

    grads: list[Tensor | None]
    log_scale: Tensor
    values: Tensor
    baseline_values: Tensor | None = None
    excess: Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[tuple[Sequence[int], "OutputGradients"]]) -> "OutputGradients":
        """Return the seeds of K targets from those of some of them each, with their numbers."""
        if len(parts) == 1:
            return parts[0][1]
        members = [k for numbers, _ in parts for k in numbers]

        def column(name: str) -> Any:
            tensors = [getattr(part, name) for _, part in parts]
            return None if tensors[0] is None else in_order(tensors, members)

        grads: Any = [in_order(pieces, members, 0) for pieces in zip(*(part.grads for _, part in parts), strict=True)]
        return OutputGradients(
            grads, column("log_scale"), column("values"), column("baseline_values"), column("excess")
        )


def in_order(tensors: Sequence[Any], members: Sequence[int], dim: int = 1) -> Tensor:
    """Return tensors joined along a dimension whose places bear these numbers, in the order of the numbers."""
    whole = tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)
    if list(members) == sorted(members):
        return whole
    # Not by an index, which a device would have to be sent, and wait for.
    places = whole.unbind(dim)
    return torch.stack([places[place] for place in sorted(range(len(members)), key=members.__getitem__)], dim)


@dataclass(frozen=True, eq=False)
class Rowwise:
    """One target per image, instead of one target for all images."""

    targets: list[Target]

    def __repr__(self) -> str:
        return ", ".join(dict.fromkeys(map(repr, self.targets)))


def gradients_of(
    output: Any, count: int, targets: Sequence[Any], dtype: torch.dtype, baseline: Any = None, *, until: int = 0
) -> OutputGradients:
    """Return the gradients of K targets, or with a baseline their secants from it to the images.

    Args:
        output: what a head computed, or the output of an ordinary network.
        count: number of images N.
        targets: K targets, each for all images or a :class:`Rowwise`.
        dtype: dtype of the gradients.
        baseline: the output at the baseline, of N rows, or one for all.
        until: position of the head's value that the gradients are with respect to, instead of the features.

    Returns:
        The seeds.
    """
    if not isinstance(output, HeadRun | HeadOutput):
        return _stacked([_of_output(output, count, _shared(target), dtype, baseline) for target in targets])
    if len(targets) == 1 and isinstance(targets[0], Rowwise):
        return _per_image(output, targets[0].targets, dtype, baseline)
    return _of_head(output, targets, dtype, baseline, until)


def values_of(output: Any, targets: Sequence[Any], image: int, changed: Any) -> Tensor:
    """Return the values of K targets for M changed versions of an image, (M, K), keeping its predicted class.

    Args:
        output: what a head computed, or the output of an ordinary network.
        targets: K targets, each for all images or a :class:`Rowwise`.
        image: number of the image.
        changed: the network's output for the changed versions, of the same kind.

    Returns:
        The values.
    """
    columns = []
    row, count = row_of(output, image), len(tree_leaves(changed)[0])
    for entry in targets:
        target = entry.targets[image] if isinstance(entry, Rowwise) else entry
        if isinstance(target, ClosedFormTarget):
            isolated = row if isinstance(row, HeadRun | HeadOutput) else row.reshape(1, -1)
            values = target.of_changed(changed, isolated)
            if values is not None:
                columns.append(values)
                continue
            ((position, seed),) = target.seeds(isolated).items()
            value = (
                changed.head_trace.values[position]
                if isinstance(changed, HeadRun | HeadOutput)
                else changed.reshape(count, -1)
            )
            columns.append((value * seed).sum(-1))
        else:
            parts = _head_rows(changed) if isinstance(changed, HeadRun | HeadOutput) else _rows(changed, count)
            columns.append(torch.stack([_value(target, part) for part in parts]))
    return torch.stack(columns, 1)


def row_of(output: Any, image: int) -> Any:
    """Return the output for one image, as from a batch of one."""
    if isinstance(output, HeadRun | HeadOutput):
        return output.rows([image])
    count = len(tree_leaves(output)[0])
    return tree_map(lambda t: t[image : image + 1] if isinstance(t, Tensor) and t.shape[:1] == (count,) else t, output)


def is_closed_form(target: Any) -> bool:
    """Return whether every target, also of a Rowwise, has a closed-form gradient by components or the decision."""
    targets = target.targets if isinstance(target, Rowwise) else [target]
    return all(isinstance(t, ClosedFormTarget) and t.behind_reduction for t in targets)


def _shared(target: Any) -> Any:
    """Return the target that all images of a Rowwise have, if they do."""
    if isinstance(target, Rowwise) and isinstance(target.targets[0], ClosedFormTarget):
        return target.targets[0] if all(other == target.targets[0] for other in target.targets) else target
    return target


def _per_image(
    output: HeadRun | HeadOutput, targets: Sequence[Target], dtype: torch.dtype, baseline: Any
) -> OutputGradients:
    """Return the gradient of each image's own target, as of one target: K is 1."""
    groups: dict[Any, list[int]] = {}
    for row, target in enumerate(targets):
        groups.setdefault(target if isinstance(target, ClosedFormTarget) else None, []).append(row)
    parts: list[tuple[list[int], OutputGradients]] = []
    for target, rows in groups.items():
        part, base = output, baseline
        if len(groups) > 1:
            part = output.rows(rows)
            base = base if base is None or base.count == 1 else base.rows(rows)
        shared = Rowwise([targets[row] for row in rows]) if target is None else target
        parts.append((rows, _of_head(part, [shared], dtype, base)))
    if len(parts) == 1:
        return parts[0][1]
    order = torch.tensor([row for rows, _ in parts for row in rows], device=output.device).argsort()

    def joined(name: str) -> Any:
        tensors = [getattr(part, name) for _, part in parts]
        return None if tensors[0] is None else torch.cat(tensors)[order]

    grad = torch.cat([part.grads[0] for _, part in parts], 1)[:, order]  # type: ignore[misc]
    return OutputGradients([grad], joined("log_scale"), joined("values"), joined("baseline_values"))


def _of_head(
    output: HeadRun | HeadOutput, targets: Sequence[Any], dtype: torch.dtype, baseline: Any = None, until: int = 0
) -> OutputGradients:
    count = output.count
    trace = None if baseline is None else baseline.head_trace
    parts: list[tuple[list[int], list[Tensor]]] = []
    for members, values, seeds in _grouped(targets, output, baseline):
        grad, log_scale = output.head.pullback(output.head_trace, seeds, trace, until)
        tensors = [grad.expand(count, -1, -1), log_scale.expand(count, -1), values]
        if baseline is not None:
            tensors.append(_at_baseline([targets[k] for k in members], seeds, values, output, baseline))
        parts.append((members, tensors))
    if len(parts) == 1:
        parts[0][1][2] = parts[0][1][2].clone()  # values that may be the output's own
    order = [k for members, _ in parts for k in members]
    grad, *others = (in_order(pieces, order) for pieces in zip(*(tensors for _, tensors in parts), strict=True))
    return OutputGradients([grad.to(dtype).transpose(0, 1)], *others)


def _at_baseline(
    targets: Sequence[Any],
    seeds: Mapping[int, Any],
    values: Tensor,
    output: HeadRun | HeadOutput,
    baseline: HeadRun | HeadOutput,
) -> Tensor:
    """Return the values of targets at the baseline, shape (N, K), by their values (N, K) and gradients at the image."""
    here, start = output.head_trace.values, baseline.head_trace.values
    at, terms = values, values.abs()
    for position, seed in seeds.items():
        if seed is None:  # each number of that value itself
            return start[position].expand_as(values).clone()
        rises = (here[position] - start[position]).unsqueeze(1) * seed
        at, terms = at - rises.sum(-1), terms + rises.abs().sum(-1)
    for k, target in enumerate(targets):
        first = target.targets[0] if isinstance(target, Rowwise) else target
        if not isinstance(first, ClosedFormTarget):
            rows = _head_rows(baseline)
            rows = rows * len(values) if len(rows) == 1 else rows
            at[:, k] = _called_at_baseline(target, rows, terms[:, k], at[:, k])
    return at


def _called_at_baseline(target: Any, rows: Sequence[Any], terms: Tensor, expected: Tensor) -> Tensor:
    """Return the values of a user's own target at the baseline, (N,); refuse one that is not linear, as expected.

    Args:
        target: a callable for all rows, or a :class:`Rowwise`.
        rows: N rows of the output at the baseline.
        terms: the size of what the expected values are sums of, shape (N,).
        expected: the values of a linear target, shape (N,).

    Returns:
        The values.

    Raises:
        ValueError: the target is not linear.
    """
    targets = target.targets if isinstance(target, Rowwise) else [target] * len(rows)
    values = torch.stack([_value(one, row) for one, row in zip(targets, rows, strict=True)])
    tolerance = max(1e-3, torch.finfo(values.dtype).eps ** 0.5)
    wrong = (values - expected).abs() > tolerance * (terms + values.abs())
    if bool(wrong.any()):
        name = _name_of(targets[int(wrong.nonzero()[0])])
        raise ValueError(
            f"{name} is not linear in the network's scores, so no map adds up to it: use "
            "SVMTarget or PCATarget, or a gradient method such as ClosedFormGradCAM"
        )
    return values


def _name_of(target: Any) -> str:
    """Return how a message calls a target: by its class, or name, where its ``repr`` is only an address."""
    if repr(target) == object.__repr__(target):
        return type(target).__name__
    return str(getattr(target, "__name__", target))


def _grouped(
    targets: Sequence[Any], output: HeadRun | HeadOutput, baseline: HeadRun | HeadOutput | None
) -> Iterator[tuple[list[int], Tensor, Mapping[int, Any]]]:
    """Yield targets whose gradients start at the same values: their numbers, values (N, K), seeds (N or 1, K, .)."""
    components = [k for k, target in enumerate(targets) if type(target) is PCATarget]
    if components:
        # Many at once: 64 of them are one row of a matrix each, and not 64 calls.
        yield components, *PCATarget.several([targets[k] for k in components], output)
    pairs = {
        k: _values_and_seeds(target, output, baseline)
        for k, target in enumerate(targets)
        if type(target) is not PCATarget
    }
    for positions in dict.fromkeys(frozenset(seeds) for _, seeds in pairs.values()):
        members = [k for k, (_, seeds) in pairs.items() if frozenset(seeds) == positions]
        values = torch.stack([pairs[k][0] for k in members], 1)
        yield members, values, {position: _stack([pairs[k][1][position] for k in members]) for position in positions}


def _values_and_seeds(
    target: Target | Rowwise, output: HeadRun | HeadOutput, baseline: HeadRun | HeadOutput | None
) -> tuple[Tensor, Mapping[int, Tensor]]:
    """Return a target's value for every image, (N,), and its gradient, or secant, by position, (N, .) or (1, .)."""
    if isinstance(target, SVMTarget):
        seeds = target.seeds(output)  # once: its value is their product with the decision values
        return (target.decision(output) * next(iter(seeds.values()))).sum(-1), seeds
    if isinstance(target, ClosedFormTarget):
        return target(output), target.seeds(output, baseline)
    with without_inference(), torch.enable_grad():
        # Every value is a leaf of its own: a target may read any of them.
        leaves = [_leaf(value) for value in output.head_trace.values]
        rows = _head_rows(HeadRun(output.head, HeadTrace(leaves, [])))
        values, grads = _differentiated(target, rows, leaves)
    return values, {position: grad for position, grad in enumerate(grads) if grad is not None}


def _of_output(
    output: Any, count: int, target: Target | Rowwise, dtype: torch.dtype, baseline: Any = None
) -> OutputGradients:
    """Return the gradient of one target with respect to every tensor that an ordinary network gave."""
    tensors, structure = tree_flatten(output)
    if isinstance(target, ScoreTarget):
        if not isinstance(output, Tensor) or output.dim() > 2:
            raise ValueError(
                f"targets=None explains the largest of scores (N, C), but the network returns {_described(output)}: "
                "say what to explain, as in targets=[SemanticSegmentationTarget(...)]"
            )
        scores = output.reshape(count, -1)
        values, seed = target(scores), target.seeds(scores)[0]
        grads: list[Tensor | None] = [seed.reshape(output.shape)]
        at_baseline = None if baseline is None else (baseline.reshape(count, -1) * seed).sum(-1)
    else:
        with without_inference(), torch.enable_grad():
            leaves = [_leaf(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]
            rows = _rows(tree_unflatten(leaves, structure), count)
            floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            values, leaf_grads = _differentiated(target, rows, floating)
        by_leaf = {id(leaf): grad for leaf, grad in zip(floating, leaf_grads, strict=True)}
        grads = [by_leaf.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor)]
        at_baseline = None
        if baseline is not None:
            changes = zip(grads, tensors, tree_leaves(baseline), strict=True)
            rises = torch.cat([(g * (t - t0)).reshape(count, -1) for g, t, t0 in changes if g is not None], 1)
            terms = values.abs() + rises.abs().sum(-1)
            at_baseline = _called_at_baseline(target, _rows(baseline, count), terms, values - rises.sum(-1))
    log_scale = values.new_zeros(count, 1)
    grads = [None if g is None else g.to(dtype).unsqueeze(0) for g in grads]
    return OutputGradients(
        grads, log_scale, values.unsqueeze(1), None if at_baseline is None else at_baseline.unsqueeze(1)
    )


def _stacked(parts: Sequence[OutputGradients]) -> OutputGradients:
    """Return the seeds of several targets as one."""
    if len(parts) == 1:
        return parts[0]
    grads: list[Tensor | None] = []
    for column in zip(*(part.grads for part in parts), strict=True):
        like = next((grad for grad in column if grad is not None), None)
        zeros = None if like is None else torch.zeros_like(like)
        grads.append(None if zeros is None else torch.cat([zeros if grad is None else grad for grad in column]))

    def joined(name: str) -> Any:
        tensors = [getattr(part, name) for part in parts]
        return None if tensors[0] is None else torch.cat(tensors, 1)

    return OutputGradients(grads, joined("log_scale"), joined("values"), joined("baseline_values"))


def _head_rows(output: Any) -> list[Any]:
    """Return what the target of each image gets of a head's output."""
    return list(output if isinstance(output, HeadOutput) else output.output())


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
        f"the network returns {_described(output)} for {count} images, but a target gets one item per image, as in "
        "pytorch-grad-cam: explain one image at a time, or wrap the network so that it returns one tensor"
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
    stacked = torch.stack([_value(one, row) for one, row in zip(targets, rows, strict=True)])
    if not stacked.requires_grad:
        return stacked, [torch.zeros_like(leaves[0]), *[None] * (len(leaves) - 1)]
    return stacked.detach(), list(torch.autograd.grad(stacked.sum(), leaves, allow_unused=True))


def _leaf(value: Tensor) -> Tensor:
    """Return a copy to differentiate by; a dual number's derivative along its direction stays with it."""
    primal, tangent = forward_ad.unpack_dual(value)
    leaf = primal.detach().clone().requires_grad_()
    return leaf if tangent is None else forward_ad.make_dual(leaf, tangent)


def _value(target: Any, row: Any) -> Tensor:
    """Return the value of a target for a row of the network's output, a tensor without dimensions."""
    if not callable(target):
        hint = f": use SVMTarget({target!r})" if isinstance(target, str | int) else ""
        raise TypeError(f"a target must be callable on a row of the network's output, got {target!r}{hint}")
    value = target(row)
    if not isinstance(value, Tensor):
        raise TypeError(f"the target {target!r} must return a tensor, but returned {type(value).__name__}")
    if value.numel() != 1:
        raise ValueError(f"the target {target!r} must return one number per image, but returned {value.numel()}")
    return value.reshape(())


def _stack(seeds: Sequence[Tensor]) -> Tensor:
    """Stack K seeds of shape (N, .) or (1, .) to (N, K, .), or (1, K, .) where none differs between images."""
    if len(seeds) == 1:
        return seeds[0].unsqueeze(1)
    return torch.stack(torch.broadcast_tensors(*seeds), 1)
