"""Layer-wise relevance propagation: a path's output is distributed over its inputs, step by step."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.autodiff.backward import advice, arguments
from pytorch_grad_cam_pcasvm.autodiff.rules import arithmetic, dense, shapes
from pytorch_grad_cam_pcasvm.autodiff.rules.registry import rule_of
from pytorch_grad_cam_pcasvm.autodiff.secants import precise
from pytorch_grad_cam_pcasvm.autodiff.tape import Ref, Step, Tape
from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.looks import may_look

_WEIGHTED = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}


def relevance(tape: Tape, of_output: list[Tensor | None], root: int) -> Tensor:
    """Share the relevance of a path's output out among the numbers of one of its values.

    A dense layer or convolution shares by the z+ rule, ``R_i = sum_j x_i+ w_ij+ / (sum_i x_i+ w_ij+) R_j`` with
    negative x and w likewise, means and sums by what their positive inputs give; new shapes, activations and BatchNorm
    hand it on as it is, and a maximum to the winner (Montavon et al., Layer-Wise Relevance Propagation, 2019).

    Args:
        tape: the path.
        of_output: for every tensor of its output the relevance for K targets, shape (K, *its shape), or None.
        root: position of the value.

    Returns:
        The relevance, shape (K, *value.shape).
    """
    steps, values = tape.following(root)
    shares: dict[int, Tensor] = {}
    for output, share in zip(tape.outputs, of_output, strict=True):
        if output in values and share is not None:
            shares[output] = share
    for step in reversed(steps):
        given = {index: shares.pop(index) for index in step.outputs if index in shares}
        for index, part in _shared(tape, step, given, values) if given else ():
            shares[index] = shares[index] + part if index in shares else part
    return shares[root]


def _shared(tape: Tape, step: Step, shares: dict[int, Tensor], values: set[int]) -> list[tuple[int, Tensor]]:
    """Return the relevance of a step's inputs, by their positions, for that of its outputs."""
    rule = rule_of(step.function)
    if rule is None or len(step.outputs) > 1:
        raise _no_rule(step)
    (share,) = shares.values()
    inputs = [index for index in dict.fromkeys(step.inputs) if index in values]
    args, kwargs = arguments(rule, step.args, step.kwargs)
    if step.function is F.batch_norm or rule.secant == "elementwise":
        if len(inputs) != 1:
            raise _no_rule(step)
        return [(inputs[0], share)]
    if "max_pool" in step.name or rule.pull.__module__ == shapes.__name__:
        # Numbers are moved, and their relevance moves with them.
        pulled = rule.pull(*tape.resolved(args), **tape.resolved(kwargs), y=tape.values[step.output], grad=share)
        parts = zip(args, pulled if isinstance(pulled, tuple) else (pulled,), strict=False)
        moved = [pair for argument, part in parts for pair in _pairs(argument, part)]
        return [(index, part() if callable(part) else part) for index, part in moved if index in values]
    if rule.secant != "linear" or isinstance(step.function, type):
        raise _no_rule(step)
    weighted = step.function in _WEIGHTED
    if weighted and (isinstance(args[1], Ref) or not (isinstance(args[0], Ref) and args[0].index in values)):
        raise _no_rule(step)  # it is a weight, or only a bias, that depends on the layer
    if rule.pull in (arithmetic.mul, dense.matmul):
        share = share / sum(
            isinstance(item, Ref) and item.index in values for item in args
        )  # each factor gets its part
    now = {index: tape.values[index].to(share.dtype) for index in inputs}
    given = [{index: x.clamp(min=0) for index, x in now.items()}]
    # Where nothing is negative a second call gives zeros.
    if weighted and any(not may_look(x) or bool((x < 0).any()) for x in now.values()):
        given.append({index: x.clamp(max=0) for index, x in now.items()})
    calls = []
    for sign, changed in zip((1, -1), given, strict=False):
        resolved = list(precise(tape.resolved(args, changed), share.dtype))
        if weighted:
            resolved[1] = resolved[1].clamp(min=0) if sign > 0 else resolved[1].clamp(max=0)
            resolved[2:3] = [None]  # a bias takes no share
        calls.append((changed, resolved))
    named = {name: precise(item, share.dtype) for name, item in tape.resolved(kwargs).items()}
    with torch.no_grad():
        total = torch.stack([_called(step, resolved, named) for _, resolved in calls]).sum(0)
    share = torch.where(total == 0, 0.0, share / torch.where(total == 0, 1.0, total))
    found: dict[int, Tensor] = {}
    for changed, resolved in calls:
        pulled = rule.pull(*resolved, **named, y=total, grad=share)
        for argument, part in zip(args, pulled if isinstance(pulled, tuple) else (pulled,), strict=False):
            for index, gradient in _pairs(argument, part):
                if index in changed:
                    term = changed[index] * (gradient() if callable(gradient) else gradient)
                    found[index] = found[index] + term if index in found else term
    return list(found.items())


def _called(step: Step, args: Any, kwargs: Any) -> Tensor:
    args = [args[0].clone(), *args[1:]] if step.inplace else args
    return step.function(*args, **kwargs)


def _pairs(argument: Any, part: Any) -> list[tuple[int, Any]]:
    if isinstance(argument, Ref) and part is not None:
        return [(argument.index, part)]
    if isinstance(argument, list | tuple) and part is not None:
        return [pair for each, of_each in zip(argument, part, strict=True) for pair in _pairs(each, of_each)]
    return []


def _no_rule(step: Step) -> NoClosedFormError:
    return NoClosedFormError(
        *advice(
            f"{step.name} has no rule of relevance", "use ContributionCAM or LIFTCAM", "choose a later target layer"
        )
    )
