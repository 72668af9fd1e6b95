"""How far rows are from those that a PCA has learned from, along all components and outside of them."""

from collections.abc import Sequence
from functools import reduce
from numbers import Real
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from pytorch_grad_cam_pcasvm.head.covariance_pca import CovariancePCA

_ROUNDING = 1e-10  # of the largest variance: less is none
SHRINKAGES = 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 0.75


class PCADistance(CovariancePCA):
    r"""The distance of rows from good ones: Hotelling's T² of a PCA and its residual Q in one sum.

    .. math:: d^2(x) = \sum_{i=1}^D \frac{(v_i^T (x - u))^2}{(1 - s)\, \lambda_i + s\, \bar\lambda}

    with all D directions v_i of a PCA, the variances along them, and their mean. It is the Mahalanobis distance with
    the covariance of :class:`sklearn.covariance.ShrunkCovariance`. A shrinkage s near 0 weighs components by their
    variances, as T² does; near 1 all count alike, as in the squared distance from the mean. What good rows hardly vary
    in, as the residual of a PCA, counts most in between, and never infinitely much.

    It is fitted like :class:`CovariancePCA`, in parts as well, and is exact however the parts are added.

    Args:
        shrinkage: s, above 0 and up to 1; :func:`choose_shrinkage` chooses it.

    Attributes:
        components_: all D directions, by falling variance, shape (D, D).
        explained_variance_: the variance along each, shape (D,).

    Example:
        >>> detector = make_pipeline(StandardScaler(), PCADistance(0.25)).fit(features)
        >>> detector.score_samples(features).shape
        (12,)
    """

    n_components = None  # all

    def __init__(self, shrinkage: float = 0.1) -> None:
        self.shrinkage = shrinkage

    @property
    def weights_(self) -> np.ndarray:
        """What the square along each component is multiplied by, shape (D,)."""
        if not isinstance(self.shrinkage, Real) or not 0 < self.shrinkage <= 1:
            raise ValueError(f"shrinkage must be above 0 and up to 1, such as 0.1, got {self.shrinkage!r}")
        variances = self._find_axes()[1]
        if not variances.any():
            raise ValueError("all rows are alike, so that any other is infinitely far: give rows that differ")
        return 1 / ((1 - self.shrinkage) * variances + self.shrinkage * variances.mean())

    def score_samples(self, X: Any) -> np.ndarray:
        """Return minus the squared distance of each row, shape (n,): larger for what is more like the good rows.

        Raises:
            NotFittedError: nothing was learned yet.
            ValueError: the shrinkage is out of range, or the rows have other features.
        """
        return -(self.transform(X) ** 2 @ self.weights_)

    @property
    def n_components_(self) -> int:
        """The number D of components."""
        return len(self.mean_)


def choose_shrinkage(
    parts: Sequence[CovariancePCA], candidates: Sequence[float] = SHRINKAGES
) -> tuple[float, dict[float, float]]:
    r"""Return the shrinkage under which rows that are left out are likeliest.

    Each part is left out in turn. Its rows have a mean log-likelihood under the normal distribution of the others,
    whose covariance C is standardised and shrunk; it is known by the part's sums alone:

    .. math:: -\tfrac12 \left(\log\det C + \mathrm{tr}\, C^{-1} \left(S / n + (u - u') (u - u')^T\right)\right)

    Directions in which no row of any part varies tell nothing, and are left out. No faulty row is needed. It says
    nothing of what faults are like: one that moves rows along the directions in which good ones vary most is missed
    under any shrinkage.

    Args:
        parts: sums of raw rows, such as of each photo, or of each fifth of them; two or more.
        candidates: what it is chosen from.

    Returns:
        The shrinkage, and the mean log-likelihood of each candidate.

    Raises:
        ValueError: there is one part only, or a candidate is no shrinkage.

    Example:
        >>> halves = [CovariancePCA().fit(features[:6]), CovariancePCA().fit(features[6:])]
        >>> choose_shrinkage(halves, [0.003, 0.5])[0]
        0.5
    """
    if not len(candidates) or not all(0 < one <= 1 for one in candidates):
        raise ValueError(f"candidates are shrinkages above 0 and up to 1, such as 0.1, got {list(candidates)}")
    if len(parts) < 2:
        raise ValueError(f"a shrinkage is chosen by parts that are left out in turn, two or more, got {len(parts)}")
    totals, whole = dict.fromkeys(candidates, 0.0), reduce(CovariancePCA.merge, parts, CovariancePCA())
    for place, part in enumerate(parts):
        others = reduce(CovariancePCA.merge, [*parts[:place], *parts[place + 1 :]], CovariancePCA())
        size = others.mean_, _find_deviations(others)
        spread, axes = np.linalg.eigh(_standardise(whole, *size).scatter_)
        axes = axes[:, spread > _ROUNDING * spread[-1]]
        known, left_out = _standardise(others, *size), _standardise(part, *size)
        variances, turned = np.linalg.eigh(axes.T @ known.scatter_ @ axes / (known.n_samples_seen_ - 1))
        axes = axes @ turned
        squares = ((left_out.scatter_ @ axes) * axes).sum(0) / part.n_samples_seen_ + (left_out.mean_ @ axes) ** 2
        for shrinkage in candidates:
            shrunk = (1 - shrinkage) * variances.clip(min=0) + shrinkage * variances.sum() / len(known.mean_)
            totals[shrinkage] -= 0.5 * float((squares / shrunk + np.log(shrunk)).sum()) / len(parts)
    return max(totals, key=totals.__getitem__), totals


def assemble_detector(sums: CovariancePCA, shrinkage: float) -> Pipeline:
    """Return ``make_pipeline(StandardScaler(), PCADistance(shrinkage))`` as fitted on all rows of some sums.

    Args:
        sums: of raw rows, such as ``CovariancePCA().partial_fit(...)``, batch after batch.
        shrinkage: see :class:`PCADistance`.

    Example:
        >>> sums = CovariancePCA().partial_fit(features[:6]).partial_fit(features[6:])
        >>> assemble_detector(sums, 0.25).score_samples(features).shape
        (12,)
    """
    scaler = StandardScaler()
    scaler.n_samples_seen_, scaler.n_features_in_ = sums.n_samples_seen_, sums.n_features_in_
    scaler.mean_, scaler.scale_ = sums.mean_, _find_deviations(sums)
    scaler.var_ = sums.scatter_.diagonal() / sums.n_samples_seen_
    return make_pipeline(scaler, PCADistance(shrinkage).merge(_standardise(sums, scaler.mean_, scaler.scale_)))


def _find_deviations(sums: CovariancePCA) -> np.ndarray:
    """Return the standard deviation of each feature as StandardScaler has it, shape (D,); 1 of one that is constant."""
    count, rounding = sums.n_samples_seen_, np.finfo(np.float64).eps
    variances = np.diag(sums.scatter_) / count
    return np.where(variances <= (count * rounding * sums.mean_) ** 2, 1.0, np.sqrt(variances))


def _standardise(sums: CovariancePCA, mean: np.ndarray, deviations: np.ndarray) -> CovariancePCA:
    """Return the sums of rows less a mean, divided by deviations."""
    scatter = sums.scatter_ / np.outer(deviations, deviations)
    return CovariancePCA().add_sums(sums.n_samples_seen_, (sums.mean_ - mean) / deviations, scatter)
