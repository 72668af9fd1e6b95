"""The stages of a head: what each computes, and its pullback (the vector-Jacobian product in closed form).

A stage maps ``x`` of shape (N, in) to (N, out). Its pullback takes ``grad``, the derivative of K targets with respect
to the stage's output, of shape (N, K, out), or (1, K, out) if it is the same for every image, and returns the
derivative with respect to its input, (N, K, in) or (1, K, in): ``grad @ dy/dx``.

A *secant* of a stage f between a baseline x0 and x is a matrix J with ``J (x - x0) = f(x) - f(x0)`` exactly; a chain of
secants is again a secant. With ``saved0``, what was saved at a baseline, the pullback returns ``grad @ J``, whose parts
add up to the difference that is explained. That of an affine stage, whose J is its derivative, need not take it.

A gradient may come divided by a factor that is too small for its dtype, together with the factor's logarithm, of shape
(N, K) or (1, K): ``(grad, log_scale)``. A ``log_scale`` of None means that nothing was factored out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.errors import NoClosedFormError
from pytorch_grad_cam_pcasvm.head.guarded import Hookable, intact, run
from pytorch_grad_cam_pcasvm.head.kernels import At, Kernel, Linear, known, known_to
from pytorch_grad_cam_pcasvm.runtime.numerics import quotient

Scaled = tuple[Tensor, Tensor | None]


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype a head computes in on ``device``: float64, or float32 if the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


class Stage(Hookable):
    """One step of a head. Subclasses define ``evaluate(x) -> (y, saved)`` and ``pullback(saved, grad, saved0=None)``.

    A pullback without ``saved0`` gives gradients only, unless the stage is linear or defines ``secant``.

    Attributes:
        n_inputs: length of an input row, or None if any length will do.
        n_outputs: length of an output row, or None if it equals that of the input.
        reduces: whether the outputs are components, so that ``PCATarget(b)`` means output b of this stage.
        linear: whether the stage is affine, so that its secants are its derivative.

    Example:
        >>> class Double(Stage):
        ...     linear = True
        ...     evaluate = lambda self, x: (2 * x, None)
        ...     pullback = lambda self, saved, grad: (2 * grad, None)
        >>> head = Head([Double(), stage_for(PCA(2).fit(2 * features))])
    """

    n_inputs: int | None = None
    n_outputs: int | None = None
    reduces: bool = False
    linear: bool = False

    def pullback(self, saved: Any, grad: Tensor) -> Scaled:
        """Return ``grad @ dy/dx`` for what ``evaluate`` saved (see the module docstring for shapes)."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no pullback(saved, grad) that returns (grad, log_scale)"
        )

    def secant(self, saved: Any, saved0: Any, grad: Tensor) -> Scaled:
        """Return ``grad @ J`` with ``J (x - x0) = y - y0``, for what ``evaluate`` saved at x and at a baseline x0.

        The baseline has N rows, or one for all of them. Where x and x0 are equal, J is the derivative. Unless a
        subclass defines it, this is the pullback, if that takes ``saved0`` or the stage is linear.

        Raises:
            NoClosedFormError: the stage defines no secant and is not linear.
        """
        if _takes_baseline(type(self).pullback):
            return self.pullback(saved, grad, saved0=saved0)  # type: ignore[call-arg]
        if self.linear:
            return self.pullback(saved, grad)
        raise NoClosedFormError(
            f"{type(self).__name__} has no secant, so contributions through it cannot add up",
            "define secant(saved, saved0, grad)",
            "set linear = True if it is affine",
            "use a method that needs only the gradient",
        )

    def errors(self, errors: Tensor) -> Tensor | None:
        """Return how large errors of the input, (N, in), are at most in the output, (N, out); None: not known."""
        return None

    def jacobian(self, saved: Any, y: Tensor) -> Scaled:
        """Return ``dy/dx``, shape (N, out, in) or (1, out, in), for the output y and what ``evaluate`` saved."""
        return self.pullback(saved, identity(y))

    def keep(self, **tensors: Tensor | None) -> None:
        """Register buffers in one memory layout: in another, products differ in the last bit, also after loading."""
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.contiguous())

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Move to another device, but keep the precision of a head whatever its backbone is cast to."""

        def move(tensor: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=tensor.device)).device
            return tensor.to(device, precision(device)) if tensor.is_floating_point() else tensor.to(device)

        return super()._apply(move, recurse)


@lru_cache
def _takes_baseline(pullback: Callable[..., Scaled]) -> bool:
    return "saved0" in signature(pullback).parameters


def identity(y: Tensor) -> Tensor:
    """Return one seed for each output, shape (1, out, out), for outputs y of shape (N, out)."""
    return torch.eye(y.shape[-1], dtype=y.dtype, device=y.device).unsqueeze(0)


def pulled_through(stage: Stage, scaled: Scaled, *saved: Any) -> Scaled:
    """Return the pullback of a gradient that may already be divided by a factor, and the logarithm of both factors.

    ``saved`` is what ``evaluate`` saved; if followed by what it saved at a baseline, the secant is used instead.
    """
    grad, before = scaled
    rule: Any = stage.pullback if len(saved) == 1 else stage.secant
    grad, log_scale = rule(*map(intact, saved), grad)
    return grad, before if log_scale is None else log_scale if before is None else before + log_scale


def ends(saved: Any, saved0: Any) -> list[Any]:
    """Return what was saved at x and, if there is one, at a baseline."""
    return [saved] if saved0 is None else [saved, saved0]


def errors_after(stages: Iterable[Any], errors: Tensor | None) -> Tensor | None:
    """Return the errors of what stages make of numbers with errors, (N, in); None where a stage does not know."""
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


class Scale(Stage):
    """``y = (x - shift) / divisor + offset``, each of shape (D,), then clipped to ``limits`` (low, high) if given.

    ``shift_is_mean``: whether the shift is the mean of the training set, as in StandardScaler.

    Example:
        >>> stage_for(StandardScaler().fit(features))
        Scale()
    """

    def __init__(
        self,
        shift: Tensor,
        divisor: Tensor,
        offset: Tensor,
        limits: tuple[float, float] | None = None,
        shift_is_mean: bool = False,
    ) -> None:
        super().__init__()
        self.n_inputs = self.n_outputs = len(shift)
        self.keep(shift=shift, divisor=divisor, offset=offset)
        self.limits, self.shift_is_mean = limits, shift_is_mean

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Whether it does not clip."""
        return self.limits is None

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return y, shape (N, D), and with limits also y before and after clipping, and where it is inside them."""
        y = torch.addcdiv(self.offset, x - self.shift, self.divisor)
        if self.limits is None:
            return y, None
        low, high = self.limits
        # Not clamp, whose slope at the limits is another one in every version of torch.
        clipped = torch.where(y < low, low, torch.where(y > high, high, y))
        return clipped, (y, clipped, (y >= low) & (y <= high))

    def pullback(self, saved: Any, grad: Tensor, saved0: Any = None) -> Scaled:
        """Return ``grad / divisor``, and 0 where x was clipped; or times the share of ``y - y0`` that limits leave."""
        if saved is not None:
            y, clipped, left = saved
            if saved0 is not None:
                left = quotient(y, clipped, saved0[0], saved0[1], left.to(y.dtype))
            grad = grad * left.unsqueeze(1)
        return grad / self.divisor, None

    def errors(self, errors: Tensor) -> Tensor:
        """Return the errors divided by the divisor; clipping makes them no larger."""
        return errors / self.divisor.abs()


class Projection(Stage):
    """``y = V^T (x - u) / divisor`` (the PCA layer of the paper).

    Args:
        components: V^T, shape (B, D).
        mean: u, shape (D,).
        divisor: square roots of the explained variances if PCA whitens, otherwise ones, shape (B,).
        weighted: whether u differs from the mean of the training set, as with an LDA's priors.
        inverse: R, shape (B, D), of an ``inverse_transform`` that is ``p R + u``; or the factors, shape (B,), by which
            the rows of V^T are multiplied in R; None: there is none, or it is unknown.
        variances: variances of the outputs on the training set, shape (B,), if these are uncorrelated with mean 0;
            otherwise None.

    Example:
        >>> stage_for(PCA(2).fit(features))
        Projection()
    """

    reduces = True
    linear = True
    beside = ("inverse", "variances")  # buffers that do not change what it computes

    def __init__(
        self,
        components: Tensor,
        mean: Tensor,
        divisor: Tensor,
        weighted: bool = False,
        inverse: Tensor | None = None,
        variances: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.weighted = weighted
        self.n_outputs, self.n_inputs = components.shape
        self.keep(components=components, mean=mean, divisor=divisor, inverse=inverse, variances=variances)

    @property
    def restoring(self) -> Tensor | None:
        """R, shape (B, D): ``p R + u`` is the ``inverse_transform`` of p; None if unknown."""
        if self.inverse is None or self.inverse.dim() == 2:
            return self.inverse
        return self.inverse.unsqueeze(1) * self.components

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Take the state's inverse and variances, or that it knows none, as that of an earlier version."""
        for name in self.beside:
            found = state_dict.get(prefix + name)
            if found is None or getattr(self, name) is None:
                setattr(self, name, None if found is None else self.mean.new_empty(found.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the components p, shape (N, B)."""
        return (x - self.mean) @ self.components.T / self.divisor, None

    def pullback(self, saved: None, grad: Tensor) -> Scaled:
        """Return ``(grad / divisor) V^T``."""
        return torch.tensordot(grad / self.divisor, self.components, 1), None

    def errors(self, errors: Tensor) -> Tensor:
        """Return ``|V^T| errors / divisor``: all of them may point the same way."""
        return errors @ self.components.abs().T / self.divisor.abs()

    def jacobian(self, saved: None, y: Tensor) -> Scaled:
        """Return ``V^T / divisor``, shape (1, B, D), without a product."""
        return (self.components / self.divisor.unsqueeze(1)).unsqueeze(0), None


class Select(Stage):
    """``y = x[index]``: some of the ``n_inputs`` features, at the positions ``index``, shape (B,).

    Example:
        >>> stage_for(VarianceThreshold().fit(features))
        Select()
    """

    linear = True

    def __init__(self, index: Tensor, n_inputs: int) -> None:
        super().__init__()
        self.n_inputs: int = n_inputs
        self.n_outputs = len(index)
        self.keep(index=index)

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the selected features, shape (N, B)."""
        return x[:, self.index], None

    def errors(self, errors: Tensor) -> Tensor:
        """Return the errors of the selected features."""
        return errors[..., self.index]

    def pullback(self, saved: None, grad: Tensor) -> Scaled:
        """Return grad at the selected features, and 0 elsewhere."""
        return grad.new_zeros(*grad.shape[:2], self.n_inputs).index_copy(2, self.index, grad), None


_Normed = tuple[Tensor, Tensor, Tensor]  # x, y and the norms
_SMALLEST_NORM = 10 * torch.finfo(torch.float64).eps


class Normalise(Stage):
    """``y = x / |x|`` row by row, in the norm "l1", "l2" or "max"; as in scikit-learn, a row of zeros stays zero.

    Example:
        >>> stage_for(Normalizer().fit(features))
        Normalise()
    """

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.norm = norm

    def evaluate(self, x: Tensor) -> tuple[Tensor, _Normed]:
        """Return the rows divided by their norm, shape (N, D); and x, y and the norms."""
        orders = {"l1": 1.0, "l2": 2.0, "max": torch.inf}
        norm = torch.linalg.vector_norm(x, orders[self.norm], dim=1, keepdim=True)
        y = x / torch.where(norm < _SMALLEST_NORM, 1.0, norm)
        return y, (x, y, norm)

    def pullback(self, saved: _Normed, grad: Tensor, saved0: _Normed | None = None) -> Scaled:
        """Return ``(grad - <grad, y> d|x|/dx) / |x|``; from a baseline, ``mean(r) grad + <grad, mean(x)> J_r``.

        The latter is the product rule for ``y = x r``. ``J_r`` is the secant of ``r = 1 / |x|``,
        ``-J_norm / (|x| |x0|)``. A row of zeros, which was divided by 1, is left out of the means: with a baseline of
        zeros the result is ``grad / |x|``.
        """
        x, y, norm = saved
        # A row of zeros was divided by 1, which does not depend on it.
        zeros = norm < _SMALLEST_NORM
        size = torch.where(zeros, 1.0, norm)
        if saved0 is None:
            slope = torch.where(zeros, 0.0, self._norm_slope(x, y)).unsqueeze(1)
            return (grad - (grad * y.unsqueeze(1)).sum(-1, keepdim=True) * slope) / size.unsqueeze(1), None
        x0, _, norm0 = saved0
        zeros0 = norm0 < _SMALLEST_NORM
        size0 = torch.where(zeros0, 1.0, norm0)
        # Between the norms and what was divided by lies, at a row of zeros, a jump: its secant is as much steeper.
        steeper = torch.where(zeros | zeros0, (size - size0) / torch.where(norm == norm0, 1.0, norm - norm0), 1.0)
        slope = -self._norm_secant(x, x0, norm, norm0) * steeper / (size * size0)
        # The weight of x0's r, and with it of x.
        weight = torch.where(zeros == zeros0, 0.5, zeros.to(x.dtype))
        scale, mean = (1 - weight) / size + weight / size0, weight * x + (1 - weight) * x0
        along = (grad * mean.unsqueeze(1)).sum(-1, keepdim=True)
        return grad * scale.unsqueeze(1) + along * slope.unsqueeze(1), None

    def _norm_slope(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``d|x|/dx``, shape (N, D)."""
        if self.norm == "l1":
            return x.sign()
        if self.norm == "l2":
            return y
        at = x.abs().argmax(1, keepdim=True)
        return torch.zeros_like(x).scatter(1, at, x.gather(1, at).sign())

    def _norm_secant(self, x: Tensor, x0: Tensor, norm: Tensor, norm0: Tensor) -> Tensor:
        """Return J, shape (N, D), with ``J (x - x0) = |x| - |x0|``."""
        if self.norm == "l1":
            return quotient(x, x.abs(), x0, x0.abs(), x.sign())
        if self.norm == "l2":
            return (x + x0) / torch.where(norm + norm0 > 0, norm + norm0, 1.0)
        # As max pooling in DeepLIFT: all of it at the larger of the two maxima, which moved by as much at least.
        x, x0 = torch.broadcast_tensors(x, x0)
        at, at0 = (each.abs().argmax(1, keepdim=True) for each in (x, x0))
        at = torch.where(norm >= norm0, at, at0)
        here, here0 = x.gather(1, at), x0.gather(1, at)
        return torch.zeros_like(x).scatter(1, at, quotient(here, norm, here0, norm0, here.sign()))


class KernelMap(Stage):
    """``y = sum_i c_i K(x_i, x) + offset``: KernelPCA, whose centring is in c and offset, and Nystroem.

    Args:
        kernel: the kernel K.
        points: x_i, shape (I, D).
        coefficients: c_i, shape (I, B).
        offset: shape (B,).
        reduces: whether the outputs are components.

    Example:
        >>> coefficients = stage_for(KernelPCA(2, kernel="rbf").fit(features)).coefficients
    """

    def __init__(self, kernel: Kernel, points: Tensor, coefficients: Tensor, offset: Tensor, reduces: bool) -> None:
        super().__init__()
        self.kernel, self.reduces = kernel, reduces
        self.n_inputs, self.n_outputs = points.shape[1], coefficients.shape[1]
        self.keep(points=points, coefficients=coefficients, offset=offset)

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Whether the kernel is."""
        return isinstance(self.kernel, Linear)

    def evaluate(self, x: Tensor) -> tuple[Tensor, At]:
        """Return the outputs, shape (N, B); and x and the kernel's argument."""
        argument = self.kernel.argument(x, self.points)
        return self.kernel.value(argument) @ self.coefficients + self.offset, (x, argument)

    def pullback(self, saved: At, grad: Tensor, saved0: At | None = None) -> Scaled:
        """Return ``sum_i <grad, c_i> dK(x_i, x)/dx``, or the secant, shape (N, K, D), divided by its factor."""
        return self.kernel.pullback(saved, self.points, grad @ self.coefficients.T, saved0)


class FourierFeatures(Stage):
    """``y = amplitude cos(x W + phase)``, W of shape (D, B), phase (B,): the random features of RBFSampler.

    Example:
        >>> stage_for(RBFSampler().fit(features))
        FourierFeatures()
    """

    def __init__(self, weight: Tensor, phase: Tensor, amplitude: float) -> None:
        super().__init__()
        self.n_inputs, self.n_outputs = weight.shape
        self.amplitude = amplitude
        self.keep(weight=weight, phase=phase)

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features, shape (N, B), and the cosine's argument."""
        argument = x @ self.weight + self.phase
        return self.amplitude * torch.cos(argument), argument

    def pullback(self, saved: Tensor, grad: Tensor, saved0: Tensor | None = None) -> Scaled:
        """Return ``-amplitude (grad * sin(a)) W^T``, a = x W + phase.

        From a baseline, ``(cos(a) - cos(a0)) / (a - a0) = -sin((a + a0) / 2) sin(u) / u``, u = (a - a0) / 2.
        """
        slope = -self.amplitude * torch.sin(saved if saved0 is None else (saved + saved0) / 2)
        if saved0 is not None:
            slope = slope * torch.sinc((saved - saved0) / (2 * math.pi))
        return (grad * slope.unsqueeze(1)) @ self.weight.T, None


class Chain(Stage):
    """Several stages one after another, as one.

    Example:
        >>> scaled = Chain([stage_for(StandardScaler().fit(features)), stage_for(Normalizer())])
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__()
        stages = list(stages)
        self.stages: Any = nn.ModuleList(stages)
        self.n_inputs, self.n_outputs = stages[0].n_inputs, stages[-1].n_outputs

    @property
    def linear(self) -> bool:  # type: ignore[override]
        """Whether all of them are."""
        return all(stage.linear for stage in self.stages)

    def evaluate(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the last stage's output, and what each pullback needs."""
        needed = []
        for stage in self.stages:
            x, saved = run(stage, x)
            needed.append(saved)
        return x, needed

    def pullback(self, saved: list[Any], grad: Tensor, saved0: list[Any] | None = None) -> Scaled:
        """Return the pullback, or secant, through all stages, and the logarithm of the product of their factors."""
        scaled: Scaled = (grad, None)
        eps, errors = known.get()

        def before(place: int) -> Callable[[], Tensor | None]:
            return lambda: errors_after(self.stages[:place], errors())

        for place, of_stage in reversed(list(enumerate(zip(*ends(saved, saved0), strict=True)))):
            with known_to(eps, before(place)):
                scaled = pulled_through(self.stages[place], scaled, *of_stage)
        return scaled

    def errors(self, errors: Tensor) -> Tensor | None:
        """Return the errors after all stages."""
        return errors_after(self.stages, errors)
