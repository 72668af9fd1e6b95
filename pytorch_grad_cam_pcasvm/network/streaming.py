"""Streaming: a reduction of features that do not fit into memory, fitted batch by batch."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer
from torch import Tensor


class Streamed:
    """A reduction that is fitted batch by batch, each of its steps in a pass of its own over the data.

    Every step is fitted anew, and is as it was before if its pass does not end.

    Args:
        reduction: an estimator with ``partial_fit`` and ``transform``, or a pipeline of such; None: nothing is fitted.

    Attributes:
        steps: its estimators.

    Raises:
        TypeError: a step needs all data at once, or does not transform.
    """

    def __init__(self, reduction: Any) -> None:
        pipeline = [step for _, step in reduction.steps] if isinstance(reduction, Pipeline) else [reduction]
        self.steps = [step for step in pipeline if step is not None and step != "passthrough"]
        self._fitted: list[Any] = []
        for step in self.steps:
            name = type(step).__name__
            if not hasattr(step, "transform"):
                raise TypeError(f"fit takes a reduction, but {name} has no transform: fit it on what is returned")
            if not (hasattr(step, "partial_fit") or isinstance(step, _STATELESS)):
                raise TypeError(
                    f"{name} has no partial_fit, so it needs all features at once: use IncrementalPCA, or leave fit out"
                )

    def passes(self) -> Iterator[Callable[..., None]]:
        """Yield, for each pass over the data, a function that takes rows of features; its end fits a step."""
        for step in self.steps:
            if hasattr(step, "partial_fit"):
                anew = _Held(clone(step), self.transform)
                yield anew.add
                vars(step).update(vars(anew.fitted()))
            self._fitted.append(step)

    def transform(self, rows: np.ndarray) -> np.ndarray:
        """Return rows of features as the fitted steps transform them."""
        for step in self._fitted:
            rows = step.transform(rows)
        return rows


_STATELESS = (FunctionTransformer, Normalizer)


class _Held:
    """Rows on their way to an estimator that takes no fewer of them at once than it has components."""

    def __init__(self, step: Any, before: Callable[[np.ndarray], np.ndarray]) -> None:
        self._step, self._before = step, before
        self._rows: list[np.ndarray] = []

    def add(self, features: Tensor, *others: Any) -> None:
        rows = self._before(features.cpu().numpy())
        self._rows.append(rows)
        least = getattr(self._step, "n_components", 1) or rows.shape[1]
        if sum(map(len, self._rows)) >= 2 * least:
            held = np.concatenate(self._rows)
            self._step.partial_fit(held[:-least])
            self._rows = [held[-least:]]

    def fitted(self) -> Any:
        return self._step.partial_fit(np.concatenate(self._rows))
