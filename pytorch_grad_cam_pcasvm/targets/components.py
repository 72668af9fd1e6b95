"""Targets of components: one of them, their distance from the mean, and the residual that they lose."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import residual
from pytorch_grad_cam_pcasvm.head.stages import Projection
from pytorch_grad_cam_pcasvm.network.outputs import OfHead
from pytorch_grad_cam_pcasvm.targets.target import (
    ClosedFormTarget,
    PlacedTarget,
    Target,
    check,
    find_components,
    find_sign,
)


@dataclass(frozen=True, repr=False)
class QuadraticTarget(PlacedTarget, ClosedFormTarget):
    """A target that is quadratic in the head's values.

    Args:
        sign: ``"+"``: what raises it; ``"-"``: what lowers it.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: ``at`` is no place.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> isinstance(HotellingTarget(), QuadraticTarget)
        True
    """

    sign: str = "+"
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check(self)

    def seeds(self, output: OfHead, start: OfHead | None = None) -> dict[int, Tensor]:
        """Return the gradient by position, or the secant: for a quadratic target, the mean of both ends' gradients."""
        here = self._gradient(output)
        if start is None:
            return here
        at_start = self._gradient(start)
        return {position: (seed + at_start[position]) / 2 for position, seed in here.items()}

    @abstractmethod
    def _gradient(self, output: OfHead) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value."""


@dataclass(frozen=True, repr=False)
class PCATarget(PlacedTarget, ClosedFormTarget):
    """Principal component ``p_b``, with b counted from 0: ``PCATarget(0)`` is the paper's P_1.

    Args:
        component: the component's number b, from 0.
        sign: ``"+"``: what raises the component (P_b^+); ``"-"``: what lowers it (P_b^-, the map of ``-p_b``).
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: the component is not an integer, or ``at`` is no place.
        ValueError: the component is negative, the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> cam.explain(images, [PCATarget(0), PCATarget(2, sign="-")]).maps.shape
        torch.Size([2, 2, 8, 8])
    """

    component: int
    sign: str = "+"
    at: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if isinstance(self.component, bool | np.bool_) or not isinstance(self.component, int | np.integer):
            raise TypeError(f"component must be an integer, counted from 0, got {self.component!r}")
        if self.component < 0:
            raise ValueError(f"component must be 0 or more, got {self.component}")
        check(self)

    def value(self, output: OfHead) -> Tensor:
        """Return ``p_b`` or ``-p_b`` for a row, or for each row of several."""
        _, components = self._read_components(output)
        return components[..., self.component] * find_sign(self.sign)

    def seeds(self, output: OfHead, start: OfHead | None = None) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: a one-hot row over the components, shape (1, B)."""
        position, components = self._read_components(output)
        seed = components.new_zeros(1, components.shape[-1])
        seed[0, self.component] = find_sign(self.sign)
        return {position: seed}

    def _read_components(self, output: OfHead) -> tuple[int, Tensor]:
        position, components = find_components(output, self)
        if self.component >= components.shape[-1]:
            raise ValueError(f"{self}: the head has {components.shape[-1]} components, numbered from 0")
        return position, components


@dataclass(frozen=True, repr=False)
class HotellingTarget(QuadraticTarget):
    """Hotelling's T^2: how far the components are from their mean, in units of their variances.

    ``T^2 = sum_b p_b^2 / lambda_b`` with lambda = ``explained_variance_``, shape (B,); for a whitened PCA,
    ``sum_b p_b^2``. Its gradient is ``2 p / lambda``, and its secant from a baseline is ``(p + p0) / lambda``. It takes
    only components that vary over the training images: those that do by rounding alone, of which a
    :class:`ConstantComponentWarning` told when the head was made, are left out. T^2 is the squared Mahalanobis distance
    of the features within the subspace of the components; :class:`ResidualTarget` measures what lies outside.

    The head needs a PCA or IncrementalPCA; one with another reduction, or none, raises a ValueError. Hotelling, The
    generalization of Student's ratio, Annals of Mathematical Statistics 2 (1931).

    Args:
        sign: ``"+"``: what makes an image unlike the training set; ``"-"``: what makes it like the training set.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: ``at`` is no place.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> maps = cam.explain(images, HotellingTarget())
    """

    def value(self, output: OfHead) -> Tensor:
        """Return ``T^2`` or ``-T^2`` for a row, or for each row of several."""
        _, components, variances = self._read_parts(output)
        return find_sign(self.sign) * (components.square() / variances).sum(-1)

    def _gradient(self, output: OfHead) -> dict[int, Tensor]:
        """Return the gradient by position of the head's value: ``2 p / lambda`` over the components, shape (N, B)."""
        position, components, variances = self._read_parts(output)
        return {position: 2 * find_sign(self.sign) * components / variances}

    def _read_parts(self, output: OfHead) -> tuple[int, Tensor, Tensor]:
        position, components = find_components(output, self)
        reduction: Any = output.head.stages[position - 1]
        variances = getattr(reduction, "variances", None)
        if variances is None:
            needs = "the variances of uncorrelated components, as PCA and IncrementalPCA have them"
            raise ValueError(f"{self} needs {needs}: {_why_unknown(reduction)}")
        return position, components, _find_varying(reduction, variances).to(components)


@dataclass(frozen=True, repr=False)
class ResidualTarget(QuadraticTarget):
    """The Q statistic: the squared distance of the PCA's input to the subspace of its components.

    ``Q = |r|^2``, where ``r = z - inverse_transform(p)``, shape (D,), is the part of an image that the components
    cannot express; z is the input of the PCA (after any scaler), and ``p = transform(z)``. Its gradient is ``2 r`` with
    respect to z and ``-2 R r`` with respect to p, where R, shape (B, D), contains the rows that ``inverse_transform``
    sums; for a PCA, the two combine to ``2 r``. Its secant from a baseline has ``r + r0`` instead of ``2 r``.

    The head needs a reduction with a linear ``inverse_transform``: PCA (also whitened), IncrementalPCA, TruncatedSVD,
    SparsePCA, FastICA or PLSRegression; one with another reduction, or none, raises a ValueError. If the components
    express an image fully, Q is 0 rather than a rounding error, and its map is blank. Jackson and Mudholkar, Control
    procedures for residuals associated with principal component analysis, Technometrics 21 (1979).

    Args:
        sign: ``"+"``: what makes an image unlike the training set; ``"-"``: what makes it like the training set.
        at: for dense features: a position (row, column); a boolean mask of the grid (h, w) or of the picture (H, W),
            whose mean is explained; ``"max"``: the position of each image with the largest value. None: all positions.

    Raises:
        TypeError: ``at`` is no place.
        ValueError: the sign is neither ``"+"`` nor ``"-"``, or ``at`` is empty.

    Example:
        >>> maps = cam.explain(images, ResidualTarget())
    """

    behind_reduction = False

    def value(self, output: OfHead) -> Tensor:
        """Return ``Q`` or ``-Q`` for a row, or for each row of several."""
        _, rest, _ = self._read_parts(output)
        return find_sign(self.sign) * rest.square().sum(-1)

    def _gradient(self, output: OfHead) -> dict[int, Tensor]:
        """Return the gradient by position: ``2 r`` over the input of the PCA, (N, D), ``-2 R r`` over p, (N, B)."""
        position, rest, restoring = self._read_parts(output)
        twice = 2 * find_sign(self.sign) * rest
        return {position - 1: twice, position: -twice @ restoring.mT}

    def _read_parts(self, output: OfHead) -> tuple[int, Tensor, Tensor]:
        position, components = find_components(output, self)
        reduction: Any = output.head.stages[position - 1]
        if getattr(reduction, "restoring", None) is None:
            needs = "a reduction with a linear inverse_transform, as of PCA, IncrementalPCA and TruncatedSVD"
            raise ValueError(f"{self} needs {needs}: {_why_unknown(reduction)}")
        z = output.head_trace.values[position - 1]
        if z is None:
            raise ValueError(
                f"{self} is not a function of the components, which are all that is known here: compute its maps with "
                "the network, cam.explain(x, [ResidualTarget()])"
            )
        return position, *residual(reduction, z, components)


def evaluate_components(targets: Sequence[PCATarget], output: OfHead) -> tuple[Tensor, dict[int, Tensor | None]]:
    """Return the values of K components, shape (N, K), and their gradient by position, shape (1, K, B).

    Many at once: 64 of them are one row of a matrix each. If they are all components in order, the gradient is the
    identity, returned as None.
    """
    position, components = max(targets, key=lambda target: target.component)._read_components(output)
    count = components.shape[1]
    if [(target.component, target.sign) for target in targets] == [(b, "+") for b in range(count)]:
        return components, {position: None}
    # Rows of a matrix made where it is needed: a list of numbers would have to be sent there, and waited for.
    plus = torch.eye(count, dtype=components.dtype, device=components.device)
    rows = {"+": plus.unbind(), "-": (-plus).unbind()}
    seeds = torch.stack([rows[target.sign][target.component] for target in targets])
    return components @ seeds.T, {position: seeds.unsqueeze(0)}


def _find_varying(reduction: Any, variances: Tensor) -> Tensor:
    """Return the variances of components, infinite where they are nothing but rounding, which so leaves T^2."""
    varying = reduction.facts.varying
    if varying is None:
        return variances
    # Those of whitened components are all 1, and so are the divisors of others.
    order = (variances * reduction.divisor).argsort(descending=True, stable=True)
    return variances.index_fill(0, order[int(varying) :], torch.inf)


def _why_unknown(reduction: Any) -> str:
    """Return why a reduction lacks the facts that a target needs."""
    if isinstance(reduction, Projection) and reduction.inverse is None and reduction.variances is None:
        again = "then save it again from the fitted estimator, Head.of(estimator).save(path)"
        return f"this one has none, or the head was read from a file of an earlier version; {again}"
    return "this one has none"


def every_component(output: OfHead) -> Sequence[Target]:
    """Return a target for every component of an output, if it has any.

    Args:
        output: what a network with a head returns.

    Example:
        >>> every_component(net(images))
        (PCATarget(0), PCATarget(1), PCATarget(2))
    """
    position = None if output.head is None else output.head.component_position
    return () if position is None else _read_components(output.head_trace.values[position].shape[-1])


@lru_cache(maxsize=8)
def _read_components(count: int) -> tuple[PCATarget, ...]:
    return tuple(PCATarget(b) for b in range(count))
