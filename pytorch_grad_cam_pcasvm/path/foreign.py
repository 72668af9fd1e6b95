"""Rules of users: their first step on a tape is held against autograd, and against the sum of its secant."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.rules.cotangents import Cotangent, cotangent
from pytorch_grad_cam_pcasvm.rules.rule import Call, Rule
from pytorch_grad_cam_pcasvm.runtime.device import can_sync
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.rollback import without_inference
from pytorch_grad_cam_pcasvm.tape.step import Ref, Step, list_tensors, values_in
from pytorch_grad_cam_pcasvm.tape.tape import Tape, has_gradient


def verify(tape: Tape, step: Step, path: set[int], here: Call, base: Call | None) -> None:
    """Refuse a user's rule whose result for its first step on a tape differs from autograd's.

    Args:
        tape: the tape, whose numbers of this step are kept.
        step: the step.
        path: the values that lead on from the target layer.
        here: its call.
        base: its call at the start, for its secant; None: its gradient is compared.

    Raises:
        NoClosedFormError: the rule, its secant, ``keeps_sums`` or ``needs`` is wrong.
    """
    rule, outputs = step.rule, [y for y in list_tensors([here.y]) if has_gradient(y)]
    numbers = [x for x in (*list_tensors(here.args), *outputs) if has_gradient(x)]
    if rule is None or not outputs or not can_sync(outputs[0]) or not all(bool(x.isfinite().all()) for x in numbers):
        return
    generator = torch.Generator().manual_seed(0)
    output_gradients = [
        torch.randn((1, *y.shape), generator=generator, dtype=torch.float64, device="cpu").to(y) for y in outputs
    ]
    grad = output_gradients[0] if isinstance(here.y, Tensor) else tuple(output_gradients)
    eps = max(torch.finfo(tape.values[i].dtype).eps for i in (*step.inputs, *step.outputs) if i in path)
    pulled = rule.pulled(here if base is not None else _hide_unneeded(step, rule, path, here), grad, base)
    parts = pulled if isinstance(pulled, tuple) and not step.is_layer else (pulled,)
    pairs = list(_pairs(step.operands, (*parts, *[None] * len(step.operands)), path))
    if any(part is not None and part.shape != tape.values[ref.index].shape for ref, part in pairs):
        return  # which the walk refuses
    _verify_tokens(step, rule, tape, path, here, grad, base)
    terms = [(ref, torch.zeros(tape.values[ref.index].shape) if part is None else part) for ref, part in pairs]
    if base is not None:
        _verify_secant(step, terms, here, base, output_gradients, eps)
        return
    leaves = {ref.index: tape.values[ref.index].clone() for ref, _ in terms}
    try:
        with without_inference(), torch.enable_grad():
            for leaf in leaves.values():
                leaf.requires_grad_()
            # A step in place may not write into a leaf.
            result = tape.called(step, {index: leaf.clone() for index, leaf in leaves.items()})
            ends = [y for y in list_tensors([result]) if has_gradient(y)]
            grad_outputs = [seed[0].to(y) for y, seed in zip(ends, output_gradients, strict=True)]
            expected = torch.autograd.grad(ends, list(leaves.values()), grad_outputs, allow_unused=True)
    except RuntimeError:
        return  # what autograd cannot differentiate: the rule is all there is
    sums: dict[int, Tensor] = {}
    for ref, part in terms:
        sums[ref.index] = sums[ref.index] + part if ref.index in sums else part
    for part, reference in zip(sums.values(), expected, strict=True):
        exact = torch.zeros_like(part) if reference is None else reference.double()
        if not bool((part - exact).norm() <= max(eps**0.5, 1e-7) * exact.norm()):
            raise NoClosedFormError(
                f"the rule of {step.name} is not autograd's Jacobian of it"
                if bool(part.isfinite().all())
                else f"the rule of {step.name} returns NaN (does it read a tensor that needs= leaves out?)",
                "correct it in @register_jacobian",
            )
    _verify_sums(step, tape, terms, output_gradients, eps)


def misfit(step: Step, error: Exception, *, secant: bool) -> str:
    """Return why a rule, or its secant, failed: one of the user's may take other arguments."""
    rule, name = step.rule, step.name
    if rule is None or not rule.foreign:
        return f"the call of {name} is not understood ({error})"
    own = secant and callable(rule.secant)
    role, function = ("secant", rule.secant) if own else ("rule", rule.pull)
    keywords = dict.fromkeys(("y", "grad", "base") if own else ("y", "grad"))
    try:
        inspect.signature(function).bind(*step.arguments, **step.options, **keywords)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        takes = ", ".join(["layer, x" if step.is_layer else "..., *", *keywords])
        return f"the {role} of {name} does not take ({takes}): {error}"
    return f"the {role} of {name} raises {error!r}"


def _verify_tokens(
    step: Step, rule: Rule, tape: Tape, path: set[int], here: Call, grad: Any, base: Call | None
) -> None:
    """Refuse a wrong claim that tokens are treated separately: each must depend on its own token alone."""
    recorded = tape.recorded(step)
    for dim in range(recorded.y.dim()) if isinstance(grad, Tensor) else ():
        dims = rule.find_tokens(dim, recorded)
        for token in () if dims is None or recorded.y.shape[dim] < 2 else (0, -1):  # from the last, as in causal steps
            one = torch.zeros_like(grad)
            one.select(dim + 1, token).copy_(grad.select(dim + 1, token))
            pulled = rule.pulled(here, one, base)
            parts = pulled if isinstance(pulled, tuple) and not step.is_layer else (pulled,)
            own_dims = (dims or [])[len(step.arguments) - len(step.operands) :]
            for argument, part, own_dim in zip(step.operands, parts, own_dims, strict=False):
                for _, own in _pairs((argument,), (part,), path):
                    if own is not None and own_dim is not None and _reaches_others(own, own_dim, token):
                        name = step.name
                        raise NoClosedFormError(
                            f"{name} is registered as elementwise, but its rule mixes positions"
                            if rule.tokens is None
                            else f"the rule of {name} mixes tokens, or moves them elsewhere than its tokens= says",
                            "correct it in @register_jacobian",
                        )


def _reaches_others(part: Tensor, dim: int, token: int) -> bool:
    """Return whether there is more than rounding in any token but one."""
    changed = part.clone()
    changed.select(dim, token).zero_()
    return bool(changed.abs().max() > 1e-6 * part.abs().max())


def _hide_unneeded(step: Step, rule: Rule, path: set[int], here: Call) -> Call:
    """Return a call with NaN in place of the numbers that its rule says it does not need."""
    needs, own = rule.needs, [ref.index for (ref,) in values_in(step.operands) if ref.index in path]

    def unknown(argument: Any, item: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(map(unknown, argument, item))
        return torch.full_like(item, torch.nan) if isinstance(argument, Ref) and argument.index in path else item

    hides = needs in ("y", "nothing") or (needs == "others" and len(own) == 1)
    y = here.y
    if needs in ("inputs", "others", "nothing"):
        y = _fill_with_nan(y) if isinstance(y, Tensor) else tuple(map(_fill_with_nan, y))
    return Call(tuple(unknown(step.arguments, here.args)) if hides else here.args, here.kwargs, y)


def _fill_with_nan(y: Any) -> Any:
    return torch.full_like(y, torch.nan) if isinstance(y, Tensor) else y


def _pairs(arguments: Any, parts: Any, path: set[int]) -> Iterator[tuple[Ref, Tensor | None]]:
    """Yield the arguments on a path, each with its cotangent by a rule."""
    for ref, part in values_in(tuple(arguments), tuple(parts)):
        if ref.index in path:
            part = part() if callable(part) else part
            if part is not None and not isinstance(part, Tensor | Cotangent):
                part = torch.full((1, 0), torch.nan)  # of no value's shape
            yield ref, None if part is None else cotangent(part).dense()[0].double()


def _verify_sums(
    step: Step, tape: Tape, pairs: Sequence[tuple[Ref, Tensor]], output_gradients: Sequence[Tensor], eps: float
) -> None:
    """Refuse a wrong claim that sums over positions stay the same."""
    (_, part), seed = pairs[0], output_gradients[0][0].double()
    if min(seed.dim(), part.dim()) < 2 or part.shape[:2] != seed.shape[:2]:
        return
    if tape.keeps_sums(step):
        sums, sizes = (
            part.flatten(1).unflatten(1, (part.shape[1], -1)),
            seed.flatten(1).unflatten(1, (part.shape[1], -1)),
        )
        apart = sums.sum(-1) - sizes.sum(-1)
        if bool(apart.norm() > max(eps**0.5, 1e-7) * sizes.abs().sum(-1).norm()):
            raise NoClosedFormError(
                f"the rule of {step.name} says that sums over positions stay the same, and they do not",
                "correct keeps_sums= in @register_jacobian",
            )


def _verify_secant(
    step: Step,
    pairs: Sequence[tuple[Ref, Tensor]],
    here: Call,
    start: Call,
    output_gradients: Sequence[Tensor],
    eps: float,
) -> None:
    """Refuse a secant for which J (x - x0) is not f(x) - f(x0)."""
    numbers = {ref: (x, x0) for ref, x, x0 in values_in(step.arguments, here.args, start.args)}
    inputs = [(part, *(x.double() for x in numbers[ref])) for ref, part in pairs]
    ends = zip(output_gradients, list_tensors([here.y]), list_tensors([start.y]), strict=True)
    outputs = [(seed[0].double(), y.double(), y0.double()) for seed, y, y0 in ends]
    sums = [sum(float((part * (x - x0)).sum()) for part, x, x0 in terms) for terms in (inputs, outputs)]
    # Not the sum of their sizes: what is wrong here and there cancels among random seeds, as rounding does.
    size = sum(float((part * (x - x0)).square().sum()) for part, x, x0 in (*inputs, *outputs)) ** 0.5
    rounding = sum(float((part * (x.abs() + x0.abs())).square().sum()) for part, x, x0 in (*inputs, *outputs)) ** 0.5
    if not abs(sums[0] - sums[1]) <= eps**0.5 * size + 64 * eps * rounding:
        raise NoClosedFormError(
            f"the secant of {step.name} is wrong, as J (x - x0) is not f(x) - f(x0): contributions do not add up",
            "correct secant= in @register_jacobian",
            "use a gradient method such as ClosedFormGradCAM",
        )
