"""The stages of a head before its decision: scalings, projections, and other transformers; see :mod:`.stage`."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head.kernels import At, Kernel, Linear
from pytorch_grad_cam_pcasvm.head.stage import Conditions, Scaled, Stage, errors_after, pulled_through, run, scaled_sum
from pytorch_grad_cam_pcasvm.rules.rule import quotient


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
        self.linear = limits is None

    @property
    def input_mean(self) -> Tensor | None:  # type: ignore[override]
        """The shift, if it is the mean."""
        return self.shift if self.shift_is_mean else None

    @property
    def input_deviations(self) -> Tensor | None:  # type: ignore[override]
        """The divisor, if the stage subtracts the mean and divides."""
        return self.divisor if self.shift_is_mean and bool((self.divisor != 1).any()) else None

    @property
    def output_deviations(self) -> Tensor | None:  # type: ignore[override]
        """Ones, if the stage divides by the standard deviations."""
        return None if self.input_deviations is None else torch.ones_like(self.divisor)

    def evaluate(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """Return y, shape (N, D), and with limits also y before and after clipping, and where it is inside them."""
        y = torch.addcdiv(self.offset, x - self.shift, self.divisor)
        if self.limits is None:
            return y, None
        low, high = self.limits
        # Not clamp, whose slope at the limits is another one in every version of torch.
        clipped = torch.where(y < low, low, torch.where(y > high, high, y))
        return clipped, (y, clipped, (y >= low) & (y <= high))

    def pullback(self, saved: Any, grad: Tensor) -> Scaled:
        """Return ``grad / divisor``, 0 where x was clipped."""
        return (grad if saved is None else grad * saved[2].unsqueeze(1)) / self.divisor, None

    def secant(self, saved: Any, saved0: Any, grad: Tensor) -> Scaled:
        """Return ``grad / divisor``, times the unclipped share of ``y - y0``."""
        if saved is not None:
            y, clipped, inside = saved
            grad = grad * quotient(y, clipped, saved0[0], saved0[1], inside.to(y.dtype)).unsqueeze(1)
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
        self._look()

    def _look(self) -> None:
        """Look at numbers once, where it costs nothing: a reduction that does not centre has zeros for a mean."""
        self._centres = bool(self.mean.any())

    @property
    def input_mean(self) -> Tensor | None:  # type: ignore[override]
        """The mean of the training set; None of TruncatedSVD, which does not centre."""
        return self.mean if self._centres and not self.weighted else None

    @property
    def output_deviations(self) -> Tensor | None:  # type: ignore[override]
        """The roots of the variances."""
        return None if self.variances is None else self.variances.sqrt()

    @property
    def restoring(self) -> Tensor | None:
        """R, shape (B, D): ``p R + u`` is the ``inverse_transform`` of p; None if unknown."""
        if self.inverse is None or self.inverse.dim() == 2:
            return self.inverse
        return self.inverse.unsqueeze(1) * self.components

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Take over the state's inverse and variances, which states of earlier versions may lack."""
        for name in self.beside:
            saved = state_dict.get(prefix + name)
            if saved is None or getattr(self, name) is None:
                setattr(self, name, None if saved is None else self.mean.new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._look()

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the components p, shape (N, B)."""
        return (x - self.mean) @ self.components.T / self.divisor, None

    def pullback(self, saved: None, grad: Tensor) -> Scaled:
        """Return ``(grad / divisor) V^T``."""
        return torch.tensordot(grad / self.divisor, self.components, 1), None

    def errors(self, errors: Tensor) -> Tensor:
        """Return ``|V^T| errors / divisor``, because all errors may have the same sign."""
        return errors @ self.components.abs().T / self.divisor.abs()

    def jacobian(self, saved: None, y: Tensor) -> Scaled:
        """Return ``V^T / divisor``, shape (1, B, D), without a product."""
        return (self.components / self.divisor.unsqueeze(1)).unsqueeze(0), None


class Affine(Stage):
    """``y = W x + b``, W of shape (P, D), b (P,).

    Example:
        >>> stage_for(MLPClassifier((4,)).fit(features, labels)).stages[0].weight.shape
        torch.Size([4, 8])
    """

    linear = True

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.n_outputs, self.n_inputs = weight.shape
        self.keep(weight=weight, bias=bias)

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        """Return y, shape (N, P)."""
        return x @ self.weight.T + self.bias, None

    def pullback(self, saved: None, grad: Tensor) -> Scaled:
        """Return ``grad W``."""
        return grad @ self.weight, None

    def errors(self, errors: Tensor) -> Tensor:
        """Return ``|W| errors``: all of them may point the same way."""
        return errors @ self.weight.abs().T


class Select(Stage):
    """``y = x[index]``: some of the ``n_inputs`` features, at the positions ``index``, shape (B,), which may repeat.

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
        """Return grad at the selected features, added up where one is selected twice, and 0 elsewhere."""
        return grad.new_zeros(*grad.shape[:2], self.n_inputs).index_add(2, self.index, grad), None


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
        """Return the rows divided by their norm, shape (N, D), with x, y and the norms."""
        orders = {"l1": 1.0, "l2": 2.0, "max": torch.inf}
        norm = torch.linalg.vector_norm(x, orders[self.norm], dim=1, keepdim=True)
        y = x / torch.where(norm < _SMALLEST_NORM, 1.0, norm)
        return y, (x, y, norm)

    def pullback(self, saved: _Normed, grad: Tensor) -> Scaled:
        """Return ``(grad - <grad, y> d|x|/dx) / |x|``."""
        x, y, norm = saved
        zeros = norm < _SMALLEST_NORM
        slope = torch.where(zeros, 0.0, self._norm_slope(x, y)).unsqueeze(1)
        along = (grad * y.unsqueeze(1)).sum(-1, keepdim=True)
        return (grad - along * slope) / torch.where(zeros, 1.0, norm).unsqueeze(1), None

    def secant(self, saved: _Normed, saved0: _Normed, grad: Tensor) -> Scaled:
        """Return ``mean(r) grad + <grad, mean(x)> J_r``, the product rule for ``y = x r``.

        ``J_r`` is the secant of ``r = 1 / |x|``, ``-J_norm / (|x| |x0|)``. A row of zeros, which was divided by 1, is
        left out of the means: with a start of zeros, the result is ``grad / |x|``.
        """
        (x, _, norm), (x0, _, norm0) = saved, saved0
        # A row of zeros was divided by 1, which does not depend on it.
        zeros, zeros0 = norm < _SMALLEST_NORM, norm0 < _SMALLEST_NORM
        size, size0 = torch.where(zeros, 1.0, norm), torch.where(zeros0, 1.0, norm0)
        # A row of zeros is divided by 1, not by its norm 0: the secant must include this jump.
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
        at, at0 = (point.abs().argmax(1, keepdim=True) for point in (x, x0))
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
        self.kernel, self.reduces, self.linear = kernel, reduces, isinstance(kernel, Linear)
        self.n_inputs, self.n_outputs = points.shape[1], coefficients.shape[1]
        self.keep(points=points, coefficients=coefficients, offset=offset)

    def evaluate(self, x: Tensor) -> tuple[Tensor, At]:
        """Return the outputs, shape (N, B), with x and the kernel's argument."""
        argument = self.kernel.argument(x, self.points)
        return self.kernel.value(argument) @ self.coefficients + self.offset, At(x, argument)

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return x and the kernel's argument, with how exactly x is known."""
        return saved._replace(conditions=conditions) if isinstance(saved, At) else saved

    def pullback(self, saved: At, grad: Tensor) -> Scaled:
        """Return ``sum_i <grad, c_i> dK(x_i, x)/dx``, shape (N, K, D), divided by its factor."""
        return self.kernel.pullback(saved, self.points, grad @ self.coefficients.T)

    def secant(self, saved: At, saved0: At, grad: Tensor) -> Scaled:
        """Return the same of the kernel's secants."""
        return self.kernel.secant(saved, saved0, self.points, grad @ self.coefficients.T)


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

    def pullback(self, saved: Tensor, grad: Tensor) -> Scaled:
        """Return ``-amplitude (grad * sin(a)) W^T``, a = x W + phase."""
        return (grad * (-self.amplitude * torch.sin(saved)).unsqueeze(1)) @ self.weight.T, None

    def secant(self, saved: Tensor, saved0: Tensor, grad: Tensor) -> Scaled:
        """Return the same with ``(cos(a) - cos(a0)) / (a - a0) = -sin((a + a0) / 2) sin(u) / u``, u = (a - a0) / 2."""
        slope = -self.amplitude * torch.sin((saved + saved0) / 2) * torch.sinc((saved - saved0) / (2 * math.pi))
        return (grad * slope.unsqueeze(1)) @ self.weight.T, None


class Chain(Stage):
    """Several stages one after another, as a single stage.

    Example:
        >>> scaled = Chain([stage_for(StandardScaler().fit(features)), stage_for(Normalizer())])
    """

    def __init__(self, stages: Iterable[Stage]) -> None:
        super().__init__()
        stages = list(stages)
        self.stages: Any = nn.ModuleList(stages)
        self.n_inputs, self.n_outputs = (
            next((size for size in sizes if size is not None), None)
            for sizes in ([stage.n_inputs for stage in stages], [stage.n_outputs for stage in reversed(stages)])
        )
        self.linear = all(stage.linear for stage in stages)

    def flat(self) -> list[Stage]:
        """Return the stages, with nested chains taken apart."""
        return [part for stage in self.stages for part in (stage.flat() if isinstance(stage, Chain) else [stage])]

    @property
    def output_deviations(self) -> Tensor | None:  # type: ignore[override]
        """Those of the last stage."""
        return self.stages[-1].output_deviations

    def evaluate(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the last stage's output, and the numbers saved for each pullback."""
        needed = []
        for stage in self.stages:
            x, saved = run(stage, x)
            needed.append(saved)
        return x, needed

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return the numbers saved for each pullback, with its conditions."""
        if not isinstance(saved, list):
            return saved

        def behind(place: int) -> Conditions:
            errors = conditions.errors
            return conditions._replace(
                errors=lambda: None if errors is None else errors_after(self.stages[:place], errors())
            )

        return [
            stage.attach_conditions(part, behind(place))
            for place, (stage, part) in enumerate(zip(self.stages, saved, strict=True))
        ]

    def pullback(self, saved: list[Any], grad: Tensor) -> Scaled:
        """Return the pullback through all stages, and the logarithm of the product of their factors."""
        return self._pull_through([(of_stage,) for of_stage in saved], grad)

    def secant(self, saved: list[Any], saved0: list[Any], grad: Tensor) -> Scaled:
        """Return the secant through all stages, in the same way."""
        return self._pull_through(list(zip(saved, saved0, strict=True)), grad)

    def _pull_through(self, saved: list[tuple[Any, ...]], grad: Tensor) -> Scaled:
        scaled: Scaled = (grad, None)
        for place, of_stage in reversed(list(enumerate(saved))):
            scaled = pulled_through(self.stages[place], scaled, *of_stage)
        return scaled

    def errors(self, errors: Tensor) -> Tensor | None:
        """Return the errors after all stages."""
        return errors_after(self.stages, errors)


class Union(Stage):
    """The outputs of several chains side by side: FeatureUnion, ColumnTransformer, the members of an ensemble.

    Example:
        >>> both = make_union(PCA(2), KernelPCA(2, kernel="rbf")).fit(features)
        >>> stage_for(both).n_outputs
        4
    """

    sign = 1.0

    def __init__(self, members: Sequence[Chain]) -> None:
        super().__init__()
        self.n_inputs = members[0].n_inputs
        self.sizes = [member.n_outputs for member in members if member.n_outputs is not None]
        self.n_outputs = sum(self.sizes)
        inside = [stage for member in members for stage in member.stages]
        self.decides = any(stage.decides for stage in inside)
        self.reduces = not self.decides and any(stage.reduces for stage in inside)
        self.linear = all(member.linear for member in members)
        self.members: Any = nn.ModuleList(members)

    def with_members(self, members: Sequence[Chain]) -> "Union":
        """Return the same of other members."""
        return Union(members)

    @property
    def output_deviations(self) -> Tensor | None:  # type: ignore[override]
        """Those of all members."""
        parts = [member.output_deviations for member in self.members]
        return None if any(part is None for part in parts) else torch.cat(parts)

    def evaluate(self, x: Tensor) -> tuple[Tensor, list[Any]]:
        """Return the outputs of all members, shape (N, P), times ``sign``, and the numbers saved for each pullback."""
        values, saved = zip(*(run(member, x) for member in self.members), strict=True)
        return self.sign * torch.cat(values, -1), list(saved)

    def attach_conditions(self, saved: Any, conditions: Conditions) -> Any:
        """Return the numbers saved for each pullback, with their conditions; all members take the same input."""
        if not isinstance(saved, list):
            return saved
        return [member.attach_conditions(part, conditions) for member, part in zip(self.members, saved, strict=True)]

    def pullback(self, saved: list[Any], grad: Tensor) -> Scaled:
        """Return the sum of the members' pullbacks, their largest factor taken out, and its logarithm."""
        return self._sum(grad, saved)

    def secant(self, saved: list[Any], saved0: list[Any], grad: Tensor) -> Scaled:
        """Return the sum of the members' secants, in the same way."""
        return self._sum(grad, saved, saved0)

    def _sum(self, grad: Tensor, *ends: list[Any]) -> Scaled:
        members = zip(self.members, (self.sign * grad).split(self.sizes, -1), *ends, strict=True)
        return scaled_sum([pulled_through(member, (seed, None), *saved) for member, seed, *saved in members])

    def errors(self, errors: Tensor) -> Tensor | None:
        """Return the errors of all members' outputs."""
        parts = [member.errors(errors) for member in self.members]
        return None if any(part is None for part in parts) else torch.cat(parts, -1)
