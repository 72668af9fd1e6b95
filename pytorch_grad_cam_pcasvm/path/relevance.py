"""Layer-wise relevance propagation: a path's output is distributed over its inputs, step by step."""

from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import cotangent
from pytorch_grad_cam_pcasvm.rules.rule import Call
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, values_in
from pytorch_grad_cam_pcasvm.tape.tape import Tape


def propagate_relevance(tape: Tape, of_output: list[Tensor | None], root: int) -> Tensor:
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
        of_step = {index: shares.pop(index) for index in step.outputs if index in shares}
        for index, part in _shared(tape, step, of_step, values) if of_step else ():
            shares[index] = shares[index] + part if index in shares else part
    return shares[root]


def _shared(tape: Tape, step: Step, shares: dict[int, Tensor], values: set[int]) -> list[tuple[int, Tensor]]:
    """Return the relevance of a step's inputs, by their positions, from the relevance of its outputs."""
    rule, args = step.rule, step.arguments
    if rule is None or len(step.outputs) > 1 or rule.relevance is None:
        raise _no_rule(step)
    (share,) = shares.values()
    inputs = [index for index in dict.fromkeys(step.inputs) if index in values]
    if rule.relevance == "kept":
        if len(inputs) != 1:
            raise _no_rule(step)
        return [(inputs[0], share)]
    if rule.relevance == "moved":
        relevance = values_in(step.operands, _several(rule.pulled(tape.recorded(step), share)))
        return [(ref.index, cotangent(x).dense()) for ref, x in relevance if ref.index in values and x is not None]
    weighted = rule.relevance == "weighted"
    if weighted and (isinstance(args[1], Ref) or not (isinstance(args[0], Ref) and args[0].index in values)):
        raise _no_rule(step)  # it is a weight, or only a bias, that depends on the layer
    if rule.relevance == "divided":  # each factor gets its part
        share = share / sum(isinstance(item, Ref) and item.index in values for item in args)
    tensors = {index: tape.values[index].to(share.dtype) for index in inputs}
    signed = [{index: x.clamp(min=0) for index, x in tensors.items()}]
    # Where nothing is negative a second call gives zeros.
    if weighted and any(not can_sync(x) or bool((x < 0).any()) for x in tensors.values()):
        signed.append({index: x.clamp(max=0) for index, x in tensors.items()})
    resolved = step.resolve(tape.values, set(), share.dtype)
    calls = []
    for sign, changed in zip((1, -1), signed, strict=False):
        numbers = list(step.resolve(changed, set(), share.dtype, like=resolved).args)
        if weighted:
            numbers[1] = numbers[1].clamp(min=0) if sign > 0 else numbers[1].clamp(max=0)
            numbers[2:3] = [None]  # a bias takes no share
        calls.append((changed, tuple(numbers)))
    with torch.no_grad():
        total = torch.stack([_call_step(step, terms, resolved.kwargs) for _, terms in calls]).sum(0)
    share = torch.where(total == 0, 0.0, share / torch.where(total == 0, 1.0, total))
    sums: dict[int, Tensor] = {}
    for changed, terms in calls:
        for ref, part in values_in(step.operands, _several(rule.pulled(Call(terms, resolved.kwargs, total), share))):
            if (index := ref.index) in changed and part is not None:
                term = changed[index] * cotangent(part).dense()
                sums[index] = sums[index] + term if index in sums else term
    return list(sums.items())


def _call_step(step: Step, args: Any, kwargs: Any) -> Tensor:
    if step.is_layer:
        return args[0].forward(args[1], **kwargs)
    return step.function(*args, **kwargs)


def _several(pulled: Any) -> tuple[Any, ...]:
    return pulled if isinstance(pulled, tuple) else (pulled,)


def _no_rule(step: Step) -> NoClosedFormError:
    return NoClosedFormError(
        # Not jacobian="auto": autograd knows no relevance either.
        f"{step.name} has no rule of relevance",
        "use ContributionCAM or LIFTCAM",
        "choose a later target layer",
    )
