"""Players: what a channel or a position of the activations brings to the end of the path's affine beginning."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.backward import arguments
from pytorch_grad_cam_pcasvm.autodiff.cotangents import player_rows
from pytorch_grad_cam_pcasvm.autodiff.rules import arithmetic, shapes
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import rule_of
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape, has_gradient

_KEEP_NUMBERS = (shapes.dropout, shapes.copy, shapes.reshape)


def first_dense(tape: Tape, value: int) -> Step | None:
    """Return the dense layer behind a value (N, T, ...), if nothing but new shapes lies between."""
    shape = tape.values[value].shape
    if len(shape) < 2:
        return None
    for step in tape.line(value, tape.following(value)[0]):
        if step.first != Ref(value):
            return None
        now = tape.values[value].shape
        if step.function is F.linear and now == (shape[0], shape[1:].numel()):
            return step
        if not _keeps_numbers(tape, step):
            return None
        value = step.output
    return None


def weight_of(tape: Tape, dense: Step) -> Tensor:
    """Return the weight of a dense layer, shape (D1, D)."""
    return tape.resolved(dense.args[1] if len(dense.args) > 1 else dense.kwargs["weight"]).detach()


def _keeps_numbers(tape: Tape, step: Step) -> bool:
    """Return whether a step gives all of its numbers back in their order."""
    rule = rule_of(step.function)
    if rule is None or isinstance(step.function, type):
        return False
    same = tape.values[step.output].shape == tape.values[step.inputs[0]].shape
    return rule.pull in _KEEP_NUMBERS or (same and step.name.startswith("adaptive_avg_pool"))


def cut(tape: Tape, root: int, *, checked: bool) -> tuple[int, bool]:
    """Return up to which value what follows a target layer is affine, image by image.

    Args:
        tape: the path.
        root: the target layer's value.
        checked: whether a pass of these steps was found not to mix images.

    Returns:
        The value, and whether its affine part is known not to mix images.
    """
    count, value = len(tape.values[root]), root
    line = [root]
    for step in tape.line(root, tape.following(root, switches=True)[0]):
        if not _is_affine(step, line[-1]) or not has_gradient(tape.values[step.output]):
            break
        line.append(step.output)
    value = next(index for index in reversed(line) if tape.values[index].shape[:1] == (count,))
    if value == root or count == 1 or checked:
        return value, count > 1
    # With another first image the others must stay as they are.
    activations = tape.values[root].clone()
    activations[0] = torch.randn(activations.shape[1:], generator=torch.Generator().manual_seed(0)).to(activations)
    before, after = tape.values[value][1:].double(), tape.replay(root, activations, value)[value][1:].double()
    eps = torch.finfo(tape.values[value].dtype).eps
    mixed = bool((before - after).abs().max() > eps**0.5 * before.abs().max())
    return (root, False) if mixed else (value, True)


def _is_affine(step: Step, value: int) -> bool:
    rule = rule_of(step.function)
    if rule is None:
        return False
    return rule.secant == "linear" or (
        rule.pull is arithmetic.div and step.first == Ref(value) and not step.kwargs.get("rounding_mode")
    )


def interchangeable(tape: Tape, value: int) -> bool:
    """Return whether what follows a value does the same with the row of every image."""
    recorded = tape.values[value]
    if len(recorded) == 1:
        return True
    found = tape.outputs_of(tape.replay(value, recorded[:1].expand_as(recorded)))

    def repeats(tensor: Tensor) -> bool:
        if tensor.shape[:1] != recorded.shape[:1]:
            return False
        bound = torch.finfo(tensor.dtype).eps ** 0.5 * tensor.abs().max()
        return bool(((tensor - tensor[:1]).abs() <= bound).all())

    return all(repeats(tensor) for tensor in found if has_gradient(tensor))


def rows(tape: Tape, root: int, value: int, x: Tensor, over: str, chunk: slice) -> Tensor:
    """Return the linear part of the steps from a root to a value, for x (N, T, ...) of one player alone.

    Args:
        tape: the path.
        root: the target layer's value.
        value: up to which the path is affine.
        x: activations, or a difference of two, shape (N, T, ...).
        over: ``"channels"`` or ``"positions"``: who the players are.
        chunk: of the players.

    Returns:
        Shape (N, J, *value.shape[1:]).
    """
    line = [root]
    for step in tape.line(root, tape.following(root, switches=True)[0]):
        if line[-1] == value:
            break
        line.append(step.output)
    parts = x.flatten(2) if x.dim() > 2 else x.unsqueeze(2)
    dense = first_dense(tape, root)
    if dense is not None and dense.output in line:
        return through(tape, dense.output, value, player_rows(weight_of(tape, dense), parts, over, chunk))
    pooled = _first_mean(tape, root)
    if pooled is not None and pooled.output in line:
        mean = parts / parts.shape[2]
        given = mean[:, :, chunk].mT if over == "positions" else torch.diag_embed(mean.sum(2))[:, chunk]
        shape = tape.values[pooled.output].shape[1:]
        return through(tape, pooled.output, value, given.reshape(*given.shape[:2], *shape))
    found = []
    for player in range(parts.shape[1 if over == "channels" else 2])[chunk]:
        alone = torch.zeros_like(parts)
        place = (slice(None), player) if over == "channels" else (slice(None), slice(None), player)
        alone[place] = parts[place]
        found.append(through(tape, root, value, alone.reshape(len(x), 1, *x.shape[1:])))
    return torch.cat(found, 1)


def _first_mean(tape: Tape, value: int) -> Step | None:
    """Return the step that averages a value (N, T, ...) over all positions, if nothing but copies lies before it."""
    shape = tape.values[value].shape
    for step in tape.line(value, tape.following(value)[0]):
        rule = rule_of(step.function)
        if step.first != Ref(value) or rule is None or tape.values[value].shape != shape:
            return None
        after = tape.values[step.output].shape
        if after[:2] == shape[:2] and after[2:].numel() == 1 and len(shape) > 2:
            args, kwargs = arguments(rule, tape.resolved(step.args), tape.resolved(step.kwargs))
            mean = step.name == "mean" and rule.keeps_sums(*args, **kwargs, y=tape.values[step.output])
            return step if mean or step.name.startswith("adaptive_avg_pool") else None
        if not _keeps_numbers(tape, step):
            return None
        value = step.output
    return None


def through(tape: Tape, start: int, value: int, given: Tensor) -> Tensor:
    """Return the linear part of the steps between two values for rows (N, J, ...) of the first."""
    for step in tape.line(start, tape.following(start)[0]):
        after = tape.values[step.output].shape
        if start == value or step.first != Ref(start):
            break
        if _keeps_numbers(tape, step) and after[:1] == given.shape[:1]:
            given = given.reshape(*given.shape[:2], *after[1:])
        elif step.function is F.linear:
            given = F.linear(given, weight_of(tape, step).to(given.dtype))
        else:
            break
        start = step.output
    if start == value:
        return given
    # One player of all images is a block, so that every row meets what goes around the path for its image.
    recorded = tape.values[start]
    offset = tape.replay(start, torch.zeros_like(recorded), value)[value]
    found = [tape.replay(start, block.to(recorded), value)[value] - offset for block in given.unbind(1)]
    return torch.stack(found, 1).to(given.dtype)
