"""A PCA of rows that come in parts: it keeps their number, mean and scatter, which are exact however they are added."""

from typing import Any

import numpy as np
from scipy.linalg import eigh
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.extmath import svd_flip
from sklearn.utils.validation import check_is_fitted

try:
    from sklearn.utils.validation import validate_data
except ImportError:  # before scikit-learn 1.6

    def validate_data(estimator: Any, *rows: Any, **options: Any) -> Any:
        """Return rows that were checked."""
        return estimator._validate_data(*rows, **options)


_ROWS = 4096  # that are centred at once


class CovariancePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    r"""PCA of rows that come in parts, equal to ``PCA(svd_solver="covariance_eigh")`` of all of them.

    It keeps the number of rows n, their mean u and their scatter S, D x D numbers in float64, whatever n is. Those of
    two sets of rows, a and b, are merged by (Chan, Golub, LeVeque, Algorithms for computing the sample variance, 1983):

    .. math:: S = S_a + S_b + \frac{n_a n_b}{n_a + n_b} (u_b - u_a) (u_b - u_a)^T

    Components are the eigenvectors of S / (n - 1), found when they are first asked for. ``set_params(n_components=)``
    needs no other fit.

    Args:
        n_components: the number B of components; or the share of the variance that they explain, between 0 and 1; None:
            as many as there are, the smaller one of n and D.

    Attributes:
        n_samples_seen_: the number of rows n.
        mean_: their mean, shape (D,).
        scatter_: the sum of products of deviations from the mean, shape (D, D).
        components_: directions of largest variance, shape (B, D).
        explained_variance_: the variance along each, shape (B,).
        explained_variance_ratio_: as a share of the whole, shape (B,).
        n_components_: B.

    Example:
        >>> pca = CovariancePCA(0.9).partial_fit(features[:6]).partial_fit(features[6:])
        >>> pca.transform(features).shape == (12, pca.n_components_)
        True
    """

    n_samples_seen_: int
    n_features_in_: int
    mean_: np.ndarray
    scatter_: np.ndarray
    _axes: list[np.ndarray]

    def __init__(self, n_components: int | float | None = None) -> None:
        self.n_components = n_components

    def fit(self, X: Any, y: Any = None) -> "CovariancePCA":
        """Learn from these rows alone.

        Args:
            X: shape (n, D), n of at least 2.
            y: ignored.

        Returns:
            Itself.

        Raises:
            ValueError: there are fewer than two rows, or they have NaN or infinite numbers.
        """
        rows = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        if hasattr(self, "n_samples_seen_"):
            del self.n_samples_seen_
        return self._add_rows(rows)

    def partial_fit(self, X: Any, y: Any = None) -> "CovariancePCA":
        """Add these rows to those that were learned from.

        Args:
            X: shape (n, D).
            y: ignored.

        Returns:
            Itself.

        Raises:
            ValueError: they have another number of features than those before, or NaN or infinite numbers.
        """
        first = not hasattr(self, "n_samples_seen_")
        return self._add_rows(validate_data(self, X, dtype=[np.float64, np.float32], reset=first))

    def merge(self, other: "CovariancePCA") -> "CovariancePCA":
        """Add the rows that another one has learned from, such as on another machine.

        Args:
            other: fitted, of as many features.

        Returns:
            Itself.

        Raises:
            NotFittedError: the other one has learned nothing yet.
            ValueError: it has another number of features.
        """
        check_is_fitted(other)
        if getattr(self, "n_features_in_", other.n_features_in_) != other.n_features_in_:
            raise ValueError(
                f"rows of {other.n_features_in_} features cannot be added to rows of {self.n_features_in_}: merge what "
                "was fitted on features of one network and layer"
            )
        return self.add_sums(other.n_samples_seen_, other.mean_, other.scatter_)

    def transform(self, X: Any) -> np.ndarray:
        """Return the components of rows, ``(X - mean_) @ components_.T``, shape (n, B).

        Raises:
            NotFittedError: nothing was learned yet.
            ValueError: there are more components asked for than rows or features.
        """
        check_is_fitted(self)
        rows = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return (rows - self.mean_) @ self.components_.T

    def inverse_transform(self, X: Any) -> np.ndarray:
        """Return the rows of D features nearest to which all rows of these components lie, (n, D)."""
        check_is_fitted(self)
        return np.asarray(X) @ self.components_ + self.mean_

    def _add_rows(self, rows: np.ndarray) -> "CovariancePCA":
        for start in range(0, len(rows), _ROWS):
            block = rows[start : start + _ROWS].astype(np.float64)
            mean = block.mean(0)
            block -= mean
            self.add_sums(len(block), mean, block.T @ block)
        return self

    def add_sums(self, count: int, mean: np.ndarray, scatter: np.ndarray) -> "CovariancePCA":
        """Add rows by their number, mean (D,), and scatter (D, D)."""
        self.n_features_in_ = len(mean)
        if not hasattr(self, "n_samples_seen_"):
            self.n_samples_seen_, self.mean_, self.scatter_ = count, mean.copy(), scatter.copy()
        else:
            total, step = self.n_samples_seen_ + count, mean - self.mean_
            self.scatter_ += scatter
            self.scatter_ += np.outer(step * (self.n_samples_seen_ * count / total), step)
            self.mean_ = self.mean_ + step * (count / total)
            self.n_samples_seen_ = total
        self._axes = []
        return self

    def _find_axes(self) -> list[np.ndarray]:
        """Return all eigenvectors of the covariance, the rows of (D, D), and the variances along them, (D,)."""
        if self.n_samples_seen_ < 2:
            raise ValueError("components need two rows at least, and one was learned from: add more by partial_fit")
        if not self._axes:
            variances, vectors = eigh(self.scatter_ / (self.n_samples_seen_ - 1))
            _, directions = svd_flip(None, vectors[:, ::-1].T, u_based_decision=False)
            self._axes += [directions, variances[::-1].clip(min=0.0)]
        return self._axes

    @property
    def components_(self) -> np.ndarray:
        """Directions of largest variance, shape (B, D)."""
        return self._find_axes()[0][: self.n_components_]

    @property
    def explained_variance_(self) -> np.ndarray:
        """The variance along each component, shape (B,)."""
        return self._find_axes()[1][: self.n_components_]

    @property
    def explained_variance_ratio_(self) -> np.ndarray:
        """The share of the variance along each component, shape (B,)."""
        return self.explained_variance_ / self._find_axes()[1].sum()

    @property
    def n_components_(self) -> int:
        """The number B of components."""
        variances, most = self._find_axes()[1], min(self.n_samples_seen_, len(self.mean_))
        count: Any = most if self.n_components is None else self.n_components
        if isinstance(count, float) and 0 < count < 1:
            count = np.searchsorted(np.cumsum(variances / variances.sum()), count, side="right") + 1
        if not isinstance(count, int | np.integer) or not 1 <= count <= most:
            raise ValueError(
                f"n_components must be a number from 1 to {most}, the smaller one of the numbers of rows and features, "
                f"a share of the variance between 0 and 1, or None, got {self.n_components!r}"
            )
        return int(count)

    @property
    def _n_features_out(self) -> int:
        return self.n_components_

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_samples_seen_")
