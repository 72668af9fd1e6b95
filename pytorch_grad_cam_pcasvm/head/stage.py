"""The protocol of a stage of a head: its output, and its pullback (the vector-Jacobian product in closed form).

A stage maps ``x`` of shape (N, in) to (N, out). Its pullback takes ``grad``, the derivative of K targets with respect
to the stage's output, of shape (N, K, out), or (1, K, out) if it is the same for every image, and returns the
derivative with respect to its input, (N, K, in) or (1, K, in): ``grad @ dy/dx``.

A *secant* of a stage f between a start x0 and x is a matrix J with ``J (x - x0) = f(x) - f(x0)`` exactly; a chain of
secants is again a secant. The method ``secant`` returns ``grad @ J``, whose parts add up to the difference that is
explained. That of an affine stage is its pullback.

A gradient may come divided by a factor that is too small for its dtype, together with the factor's logarithm, of shape
(N, K) or (1, K): ``(grad, log_scale)``. A ``log_scale`` of None means that nothing was factored out.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.runtime.device import precision
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.runtime.torch_private import has_global_hook


class HeadModule(nn.Module):
    """A module whose ``evaluate`` computes its output and saves the numbers for its pullback."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Buffers and stages are found here."""

    def evaluate(self, x: Tensor) -> tuple[Any, Any]:
        """Return the output for x, shape (N, in), and numbers saved for the pullback, with the batch first."""
        raise NotImplementedError(f"{type(self).__name__} defines no evaluate(x) that returns (output, saved)")

    def forward(self, x: Tensor, results: list[Any] | None = None) -> Any:
        """Return the output for x; ``results``, for :func:`run`, receives the numbers before any forward hooks."""
        y, saved = self.evaluate(x)
        if results is not None:
            results += [x, y, [tensor.clone() for tensor in _tensors(y)], saved]
        return y


class HookedOutput:
    """Stands for the saved numbers of a module whose output a hook has changed."""

    def __init__(self, module: nn.Module) -> None:
        self.name = type(module).__name__

    def no_closed_form(self) -> Exception:
        """Return the error of a pullback through the module."""
        return NoClosedFormError(
            f"a hook on {self.name}, a part of the head, changes its input, output or gradient, which has no "
            "closed form",
            "remove it",
            "move what it does into the backbone",
            "register a stage that does it with stage_for.register(...)",
        )


def run(module: HeadModule, x: Tensor) -> tuple[Any, Any]:
    """Return ``module.evaluate(x)`` with the module's hooks; saved is a ``HookedOutput`` where they change it."""
    backward = module._backward_hooks or module._backward_pre_hooks
    if not (backward or module._forward_hooks or module._forward_pre_hooks or has_global_hook()):
        result = module.evaluate(x)
        if not isinstance(result, tuple):
            raise TypeError(f"evaluate of {type(module).__name__} must return (output, saved), not only the output")
        return result
    # A copy: what a hook writes into it is no other module's output.
    copied, results = x.clone(), list[Any]()
    output = nn.Module.__call__(module, copied, results=results)
    received, y, copies, saved = results
    looked = received is copied and output is y and _same([copied, *_tensors(y)], [x, *copies])
    return output, saved if looked and not backward else HookedOutput(module)


def _tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else y.values


def _same(tensors: list[Tensor], before: list[Tensor]) -> bool:
    return len(tensors) == len(before) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        for a, b in zip(tensors, before, strict=True)
    )


class Sampling(NamedTuple):
    """Which permutations stand for all, where there are too many coalitions.

    Attributes:
        permutations: their number, at least; half of them are the reverses of the others, in each of the groups.
        seed: of the random generator.
        max_bytes: limit on the memory of the rows that are evaluated at once.
        group: which of the groups of permutations is taken; None: all of them.
    """

    permutations: int = 64
    seed: int = 0
    max_bytes: int = 1 << 26
    group: int | None = None


GROUPS = 8  # of permutations, whose spread is the standard error


def split_sampling(decision: Any, sampling: Sampling) -> list[Sampling]:
    """Return each group of permutations, whose mean has all; the sampling itself if a decision needs none."""
    if decision is None or not decision.is_sampled:
        return [sampling]
    return [sampling._replace(group=group) for group in range(GROUPS)]


class Conditions(NamedTuple):
    """What a pullback through a stage is told.

    Attributes:
        eps: the relative size of rounding errors of numbers.
        errors: returns the errors of the stage's input, shape (N, in); None where they are unknown.
        sampling: the permutations of a decision without a gradient.
    """

    eps: float = torch.finfo(torch.float32).eps
    errors: Callable[[], Tensor | None] | None = None
    sampling: Sampling = Sampling()

    def bound_rounding(self, x: Tensor) -> Tensor:
        """Return the rounding errors of a stage's input x, shape (N, in)."""
        bounds = None if self.errors is None else self.errors()
        return 16 * self.eps * x.abs() if bounds is None else bounds


USUAL = Conditions()


@dataclass(frozen=True)
class Facts:
    """Numbers of the training set at a stage, written by the function of its estimator.

    Attributes:
        count: number of rows; infinite: not known.
        spread: sum of the variances of what the stage takes; 0: not known.
        low: of what a scaler gives, the smallest; None: not known.
        high: the largest.
        least: where the head's anomalies of rows start that were left out of it; None: not known.
        reach: what these anomalies reach.
        varying: how many components vary, if some do by rounding alone; otherwise None.
        density: 1 where the outputs are logarithms of weighted densities, whose sum is a mixture's; otherwise None.
    """

    count: float = math.inf
    spread: float = 0.0
    low: float | None = None
    high: float | None = None
    least: float | None = None
    reach: float | None = None
    varying: float | None = None
    density: float | None = None

    def to_numbers(self) -> dict[str, float]:
        """Return the numbers that are known, by name."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value != field.default}

    @staticmethod
    def from_numbers(numbers: Mapping[str, float]) -> "Facts":
        """Return the facts of numbers by name; of names that mean nothing here, as in a file, none."""
        names = {field.name for field in fields(Facts)}
        return Facts(**{name: float(number) for name, number in numbers.items() if name in names})


Scaled = tuple[Tensor, Tensor | None]


class Stage(HeadModule):
    """One step of a head. Subclasses define ``evaluate(x) -> (y, saved)`` and ``pullback(saved, grad)``.

    There are only gradients, unless the stage is linear or defines ``secant(saved, saved0, grad)``, too.

    Attributes:
        n_inputs: length of an input row, or None if any length will do.
        n_outputs: length of an output row, or None if it equals that of the input.
        reduces: whether the outputs are components, so that ``PCATarget(b)`` means output b of this stage.
        decides: whether the outputs are decision values, of which a later reduction gives no components.
        linear: whether the stage is affine, so that its secants are its derivative.
        asked_estimators: fitted estimators that it asks for its values in place of a formula: it has no gradient, only
            secants.
        is_sampled: whether its secants are means over some permutations of its inputs, not over all.
        has_poles: whether its output may be steep where the training set is not.
        constants: names of tensors that follow it to its device, but are no buffers: no state dict changes them.
        row_width: how many numbers of a row are computed at once, if its tensors do not show it.
        facts: what is known of the training set, in numbers; nothing is computed with them.
        input_mean: the mean of what the stage took of the training set, shape (in,); None: not known.
        input_deviations: its standard deviations; None: not known.
        output_deviations: the standard deviations of what it gives for the training set, shape (out,); None: not known.

    Example:
        >>> class Double(Stage):
        ...     linear = True
        ...     evaluate = lambda self, x: (2 * x, None)
        ...     pullback = lambda self, saved, grad: (2 * grad, None)
        >>> head = Head([Double(), stage_for(PCA(2).fit(2 * features))])
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "pullback" in vars(cls) and "secant" not in vars(cls):
            cls.secant = Stage.secant  # type: ignore[method-assign]  # an inherited one is of another function

    n_inputs: int | None = None
    n_outputs: int | None = None
    reduces: bool = False
    decides: bool = False
    linear: bool = False
    asked_estimators: Sequence[Any] = ()
    is_sampled: bool = False
    has_poles: bool = True
    constants: tuple[str, ...] = ()
    row_width: int = 1
    facts: Facts = Facts()
    input_mean: Tensor | None = None
    input_deviations: Tensor | None = None
    output_deviations: Tensor | None = None

    @property
    def seen(self) -> Mapping[str, float]:
        """The facts that are known, by name, as version 0.4 had them."""
        return self.facts.to_numbers()

    @seen.setter
    def seen(self, numbers: Mapping[str, float]) -> None:
        self.facts = Facts.from_numbers(numbers)

    def pullback(self, saved: Any, grad: Tensor) -> Scaled:
        """Return ``grad @ dy/dx`` from the numbers that ``evaluate`` saved (see the module docstring for shapes)."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no pullback(saved, grad) that returns (grad, log_scale)"
        )

    def secant(self, saved: Any, saved0: Any, grad: Tensor) -> Scaled:
        """Return ``grad @ J`` with ``J (x - x0) = y - y0``, from numbers saved at x and at a start x0.

        The start has N rows, or one for all of them. If x and x0 are equal, J is the derivative. By default, this is
        the pullback, if the stage is linear.

        Raises:
            NoClosedFormError: the stage defines no secant and is not linear.
        """
        if self.linear:
            return self.pullback(saved, grad)
        raise NoClosedFormError(
            f"{type(self).__name__} has no secant, so contributions through it cannot add up",
            "define secant(saved, saved0, grad)",
            "set linear = True if it is affine",
            "use a method that needs only the gradient",
        )

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return saved numbers together with conditions for ``pullback`` or ``secant``; here without."""
        return saved

    def why_blank(self, x: Tensor, seed: Tensor, conditions: Conditions) -> str | None:
        """Return why the map of a decision is blank at x, (1, in), by the seed of its values, (1, 1, out); or None."""
        return None

    def errors(self, errors: Tensor) -> Tensor | None:
        """Return bounds on the output's errors, (N, out), given the input's errors, (N, in); None if unknown."""
        return None

    def jacobian(self, saved: Any, y: Tensor) -> Scaled:
        """Return ``dy/dx``, shape (N, out, in) or (1, out, in), for the output y and the saved numbers."""
        return self.pullback(saved, identity(y))

    def keep(self, **tensors: Tensor | None) -> None:
        """Register buffers in one memory layout, so that products are the same to the last bit, even after loading."""
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.contiguous())

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move to another device, but keep the precision of the head, whatever its backbone is cast to."""

        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=tensor.device)).device
            return tensor.to(device, precision(device)) if tensor.is_floating_point() else tensor.to(device)

        self.move_constants(move)
        return super()._apply(move, recurse)

    def move_constants(self, move: Callable[[Tensor], Tensor]) -> None:
        """Move the constants to another device."""
        for name in self.constants:
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else move(tensor))


def identity(y: Tensor) -> Tensor:
    """Return one seed for each output, shape (1, out, out), for outputs y of shape (N, out)."""
    return torch.eye(y.shape[-1], dtype=y.dtype, device=y.device).unsqueeze(0)


def pulled_through(stage: Stage, scaled: Scaled, *saved: Any) -> Scaled:
    """Return the pullback of a gradient that may already be divided by a factor, and the logarithm of both factors.

    ``saved`` is what ``evaluate`` saved; if followed by what it saved at a start, the secant is used instead.
    """
    for end in saved:
        if isinstance(end, HookedOutput):
            raise end.no_closed_form()
    grad, before = scaled
    rule: Any = stage.pullback if len(saved) == 1 else stage.secant
    grad, log_scale = rule(*saved, grad)
    return grad, before if log_scale is None else log_scale if before is None else before + log_scale


def errors_after(stages: Iterable[Any], errors: Tensor | None) -> Tensor | None:
    """Return the errors of stages' outputs for inputs with errors, (N, in); None where a stage does not know."""
    for stage in stages:
        errors = None if errors is None else stage.errors(errors)
    return errors


def scaled_sum(terms: Sequence[Scaled]) -> tuple[Tensor, Tensor]:
    """Return the sum of gradients of different sizes, with the largest factor taken out, and its logarithm."""
    # A term that takes no part must not set the scale of the others.
    logarithms = [
        torch.where(grad.any(-1), 0.0 if log_scale is None else log_scale, -torch.inf).to(grad.dtype)
        for grad, log_scale in terms
    ]
    largest = torch.stack(torch.broadcast_tensors(*logarithms)).amax(0)
    largest = torch.where(largest.isfinite(), largest, 0.0)
    grads = [
        grad * (log_scale - largest).exp().unsqueeze(-1) for (grad, _), log_scale in zip(terms, logarithms, strict=True)
    ]
    return torch.stack(torch.broadcast_tensors(*grads)).sum(0), largest
