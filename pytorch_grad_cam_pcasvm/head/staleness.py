"""The fit that a head was made from: whether its estimators were fitted again since."""

from collections.abc import Iterator
from typing import Any

from sklearn.base import BaseEstimator


class Fit:
    """Fitted estimators, and the objects that they held when a head was made from them.

    Fitting again gives an estimator new arrays, so identity tells; numbers are not compared, and parameters are
    no fit.
    """

    def __init__(self, fitted: Any) -> None:
        self._parts = list(_parts(fitted))
        self.told = False

    def __reduce__(self) -> Any:
        """Leave the estimators behind: a copy, or a head in a file, has no others to be compared with."""
        return Fit, ((),)

    def fitted_again(self) -> str | None:
        """Return the class of an estimator that was fitted again, or put in another's place; or None."""
        for owner, name, value in self._parts:
            held = owner[name : name + 1] if isinstance(owner, list) else [vars(owner).get(name)]
            if not held or held[0] is not value:
                part = value if isinstance(owner, list) else owner
                return type(part[-1] if isinstance(part, tuple) else part).__name__  # a step of a pipeline has a name
        return None


def _parts(fitted: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the owner, the name and the value of every fitted attribute, and of every estimator inside."""
    if isinstance(fitted, list | tuple):
        for place, item in enumerate(fitted):
            if isinstance(item, list | tuple | BaseEstimator):
                if isinstance(fitted, list):
                    yield fitted, place, item
                yield from _parts(item)
    elif isinstance(fitted, BaseEstimator):
        for name, value in vars(fitted).items():
            # What is private may be made anew by each prediction, as a stack's _n_feature_outs is.
            inside = isinstance(value, list | BaseEstimator) and not name.startswith("_")
            if name.endswith("_") or inside:
                yield fitted, name, value
            if inside:
                yield from _parts(value)
