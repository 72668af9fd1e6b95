"""Predictor: fitted estimators as a function of rows: the number that decides, probabilities, and predictions."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from sklearn.base import OutlierMixin, RegressorMixin
from sklearn.ensemble import BaggingClassifier, RandomForestClassifier
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV

from pytorch_grad_cam_pcasvm.head import vote
from pytorch_grad_cam_pcasvm.head.elsewhere import with_arrays
from pytorch_grad_cam_pcasvm.runtime.errors import NoClosedFormError, warn

# Where decision_function is called otherwise: the module, and the arguments of predict.
_RAW: dict[str, dict[str, Any]] = {
    "xgboost": {"output_margin": True},
    "lightgbm": {"raw_score": True},
    "catboost": {"prediction_type": "RawFormulaVal"},
}

_CONTRADICTING = 0.2  # of the rows: what counts votes of members differs from their mean in a few
# Which predict the most probable class: they need not be asked twice.
_OF_MOST_PROBABLE = (RandomForestClassifier.predict, BaggingClassifier.predict)


def read_threshold(estimator: Any) -> tuple[Any, str, float, bool]:
    """Return how a classifier's threshold is moved.

    Returns:
        The classifier, the method whose values are compared, the second class's threshold, and whether a value that is
        just there is decided for that class, and not for the first.
    """
    fitted = getattr(estimator, "estimator_", estimator.estimator)
    tuned = isinstance(estimator, TunedThresholdClassifierCV)
    wanted = estimator._get_response_method()
    wanted = [wanted] if isinstance(wanted, str) else wanted
    method = next((name for name in wanted if hasattr(fitted, name)), "")
    threshold = estimator.best_threshold_ if tuned else estimator.threshold
    threshold = (0.5 if method == "predict_proba" else 0.0) if threshold == "auto" else float(threshold)
    pos_label = estimator._curve_scorer._get_pos_label() if tuned else estimator.pos_label
    first = pos_label is not None and pos_label == estimator.classes_[0]
    if first:  # of the first class, the other side of the threshold is the second
        threshold = 1 - threshold if method == "predict_proba" else -threshold
    return fitted, method, threshold, not first


class Predictor:
    """Fitted estimators as a function of rows.

    Args:
        steps: estimators in order: transformers, and one that has ``decision_function``, ``predict_proba`` or
            ``predict``.
        n_inputs: length B of a row, if the first step does not say.

    Attributes:
        classes: the labels of the last step: an array, of their numbers if it has no ``classes_`` and a value for each;
            of several labels a list of arrays; None where it has none.
        columns: what the values are, with the number of each: ``"decision"`` (raw margins), ``"probability"``,
            ``"vote"`` (1 for the predicted class), ``"prediction"``.

    Raises:
        NoClosedFormError: the last step predicts nothing that is a quantity or one of its classes, or several labels at
            a time; or its values are no function of a single row.
        ValueError: it is not known how many features the first step takes.
    """

    def __init__(self, steps: Sequence[Any], n_inputs: int | None = None) -> None:
        # As they are now, like the numbers of a closed form.
        self.steps = copy.deepcopy([with_arrays(step) for step in steps])
        *self.transformers, self.estimator = self.steps
        width = getattr(steps[0], "n_features_in_", None) or n_inputs
        if width is None:
            raise ValueError(f"{type(steps[0]).__name__} does not say how many features it takes")
        self.n_inputs: int = width
        self.dtype = self._find_dtype()
        self.classes = _read_classes(self.estimator)
        with _names_left_out():
            self._refuse_nan()
            rows = self._transformed(np.zeros((2, self.n_inputs)))
            if self.classes is None:
                self.classes = self._number_classes(rows)
            self.columns = {name: getattr(self, f"_{name}")(rows).shape[1] for name in self._list_columns(rows)}
        self.n_outputs = sum(self.columns.values())
        self._check_rows()

    def _find_dtype(self) -> Any:
        """Return the dtype of rows: float64, or float32 where parts that were fitted on it take no other."""
        rows = np.zeros((2, self.n_inputs))
        for dtype in (np.float64, np.float32):
            self.dtype = dtype
            with _names_left_out(), np.errstate(all="ignore"), suppress(Exception):
                transformed = self._transformed(rows)
                for name in ("predict", "decision_function", "predict_proba"):
                    if hasattr(self.estimator, name):
                        getattr(self.estimator, name)(transformed)
                return dtype
        return np.float64

    def _refuse_nan(self) -> None:
        """Refuse a transformer that makes no number of zeros, which components are at the training mean."""
        rows: Any = np.zeros((1, self.n_inputs), self.dtype)
        for step in self.transformers:
            with np.errstate(all="ignore"):
                rows = step.transform(rows)
            numbers = np.asarray(rows.data if hasattr(rows, "toarray") else rows, dtype=float)
            if not np.isfinite(numbers).all():
                raise NoClosedFormError(
                    f"{step!r:.80} makes NaN or infinity of a row of zeros, which the components of the training mean "
                    "are, where explanations start",
                    "fit Normalizer() if it divides rows by their lengths, which leaves zeros as they are",
                    "let it return numbers there",
                )

    def _check_rows(self) -> None:
        """Refuse a predictor that is no function of a single row, or predicts classes that it has not."""
        rows = np.random.default_rng(0).normal(size=(6, self.n_inputs))
        together, alone = self(rows), np.concatenate([self(row[None]) for row in rows])
        rounding = 64 * float(np.finfo(self.dtype).eps)
        least = max(1e-9, rounding) * np.nanmax(abs(together), initial=0)
        if not np.allclose(together, alone, rtol=max(1e-6, rounding), atol=least, equal_nan=True):
            raise NoClosedFormError(
                f"{self.name} gives other values for the same rows a second time, or in another batch, so that its "
                "decisions cannot be explained",
                "fix its random_state, or make its values depend on one row at a time",
            )
        if "vote" in self.columns:
            self._check_predictions(self(self._samples()))
        elif hasattr(self.estimator, "predict") and "decision" in self.columns and self.classes is None:
            rows = self._transformed(self._samples())
            self._check_decided(np.sign(self.estimator.predict(rows)) == np.sign(self._decision(rows)[:, 0]))

    def _check_predictions(self, values: np.ndarray) -> None:
        """Refuse predicted classes that the predictor has not, or that disagree with its values (R, P)."""
        votes = values[:, -len(self.classes) :]
        if not votes.any(1).all():
            raise NoClosedFormError(
                f"{self.name} predicts classes that are not in its classes_",
                "let predict return members of classes_, as scikit-learn's classifiers do",
            )
        deciding = values[:, : self.columns.get("decision", len(self.classes))]
        predicted, largest = votes.argmax(1), _find_largest(deciding)
        agrees = predicted == largest
        one_sided = len({*largest}) == 1 < len({*predicted})
        if not hasattr(self.estimator, "classes_"):  # that a class is the number of its value is only a guess
            self._check_decided(agrees)
        elif one_sided or (~agrees & _is_clear(deciding)).mean() > _CONTRADICTING:
            warn(
                f"{self.name} predicts another class than the one of its largest value for {(~agrees).sum()} of "
                f"{len(agrees)} rows that were tried: maps explain its values, which contradict its labels. Check the "
                "order of classes_, and that predict compares decision_function with 0, and with no other threshold",
                UserWarning,
            )

    def _check_decided(self, agrees: np.ndarray) -> None:
        """Refuse an estimator whose predictions do not agree with its values on all of some rows, (R,)."""
        if not agrees.all():
            raise NoClosedFormError(
                f"{self.name} has no classes_, and predicts another class than the one of its largest value",
                "give it the attribute classes_, and values of which the largest decides",
            )

    @property
    def name(self) -> str:
        """The class of the estimator that predicts."""
        return type(self.estimator).__name__

    def __call__(self, rows: np.ndarray, needed: np.ndarray | None = None) -> np.ndarray:
        """Return the values of rows (R, B), float64 of shape (R, P); of columns that are not ``needed`` (P,), zeros."""
        parts, first = dict[str, np.ndarray](), 0
        predict = getattr(type(self.estimator), "predict", None)
        with _names_left_out():
            rows = self._transformed(rows)
            for name, count in self.columns.items():
                if needed is not None and not needed[first : first + count].any():
                    parts[name] = np.zeros((np.shape(rows)[0], count))  # sparse rows have no length
                elif name == "vote" and needed is None and predict in _OF_MOST_PROBABLE:
                    parts[name] = _as_columns(parts["probability"].argmax(1)[:, None] == np.arange(count))
                else:
                    parts[name] = getattr(self, f"_{name}")(rows)
                first += count
        return np.concatenate([*parts.values()], 1)

    def make_vote(self) -> vote.Vote:
        """Return how the values become classes."""
        if isinstance(self.classes, list):
            return vote.outputs(self.n_outputs, labels=True)
        if self.classes is not None:
            return vote.compared(len(self.classes), self.columns.get("decision", 0), "probability" in self.columns)
        if "decision" in self.columns:
            return vote.one_class(zero_is_inlier=True)
        return vote.regression() if self.n_outputs == 1 else vote.outputs(self.n_outputs, labels=False)

    def _transformed(self, rows: Any) -> Any:
        rows = rows.astype(self.dtype, copy=False)
        for step in self.transformers:
            rows = step.transform(rows)
        return rows

    def _number_classes(self, rows: Any) -> np.ndarray | None:
        """Return the numbers of classes that have no labels; None if there are no classes."""
        estimator, count = self.estimator, 0
        if _is_outlier_detector(estimator):
            return None
        if hasattr(estimator, "predict_proba"):
            count = self._probability(rows).shape[1]
            if count == 1:
                raise NoClosedFormError(
                    f"predict_proba of {self.name} gives one number for a row",
                    "let it return a column for each class, as scikit-learn's classifiers do",
                )
        elif hasattr(estimator, "decision_function"):
            count = self._decision(rows).shape[1]
            if count == 1 and hasattr(estimator, "predict"):  # 0 and 1, or what is inside and what is outside
                count += {0, 1} >= {*np.asarray(estimator.predict(self._transformed(self._samples()))).tolist()}
        return np.arange(count) if count > 1 else None

    def _samples(self) -> np.ndarray:
        """Return rows of which some should be decided one way, and some the other."""
        rows = np.random.default_rng(1).normal(size=(64, self.n_inputs))
        return rows * np.repeat([4.0, 1.0, 0.25, 16.0], 16)[:, None]

    def _list_columns(self, rows: Any) -> Iterator[str]:
        """Yield the names of the columns that there are for a few rows."""
        estimator, count = self.estimator, 0 if self.classes is None else len(self.classes)
        one = hasattr(estimator, "decision_function") and not count and not isinstance(estimator, RegressorMixin)
        if isinstance(self.classes, list) or one:
            yield "decision"
        elif self.classes is None:
            predictions = np.asarray(estimator.predict(rows))
            if predictions.dtype.kind != "f" and not isinstance(estimator, RegressorMixin):
                raise NoClosedFormError(
                    f"{self.name} predicts labels, but has no classes_, by which they could be told apart",
                    "give it the attribute classes_, as scikit-learn's classifiers have",
                )
            yield "prediction"
        else:
            raw = (
                _has_threshold(estimator)
                or type(estimator).__module__.partition(".")[0] in _RAW
                or hasattr(estimator, "decision_function")
            )
            # Pairwise values do not belong to single classes.
            if raw and self._decision(rows).shape[1] in ({1, 2} if count == 2 else {count}):
                yield "decision"
            if hasattr(estimator, "predict_proba") and self._probability(rows).shape[1] == count:
                yield "probability"
            if hasattr(estimator, "predict") and np.asarray(estimator.predict(rows)).size != np.shape(rows)[0]:
                raise NoClosedFormError(
                    f"{self.name} predicts several labels at a time",
                    "fit one for each label, MultiOutputClassifier(...)",
                )
            yield "vote"

    def _decision(self, rows: Any) -> np.ndarray:
        """Return raw margins; of several labels, how much more probable each is than its absence."""
        if isinstance(self.classes, list):
            parts = self.estimator.predict_proba(rows)
            if isinstance(parts, list):
                return np.stack([part[:, 1] - part[:, 0] for part in parts], 1)
            return 2 * _as_columns(parts) - 1
        if _has_threshold(self.estimator):
            fitted, method, threshold, _ = read_threshold(self.estimator)
            return _as_columns(getattr(fitted, method)(rows))[:, -1:] - threshold
        options = _RAW.get(type(self.estimator).__module__.partition(".")[0])
        if options is not None:
            return _as_columns(self.estimator.predict(rows, **options))
        return _as_columns(self.estimator.decision_function(rows))

    def _probability(self, rows: Any) -> np.ndarray:
        return _as_columns(self.estimator.predict_proba(rows))

    def _vote(self, rows: Any) -> np.ndarray:
        if not hasattr(self.estimator, "predict"):
            own = self._decision if hasattr(self.estimator, "decision_function") else self._probability
            return _as_columns(_find_largest(own(rows))[:, None] == np.arange(len(self.classes)))
        return _as_columns(np.asarray(self.estimator.predict(rows)).reshape(-1, 1) == self.classes)

    def _prediction(self, rows: Any) -> np.ndarray:
        return _as_columns(self.estimator.predict(rows))


@contextmanager
def _names_left_out() -> Iterator[None]:
    """Say nothing of the names that columns had in fit: rows have none, and are in the order of fit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "X does not have valid feature names")
        yield


def _read_classes(estimator: Any) -> Any:
    """Return the labels of an estimator: an array, a list of arrays for several labels, or None.

    Raises:
        ValueError: it has several outputs of classes that are no labels.
    """
    classes = getattr(estimator, "classes_", None)
    if classes is None or not len(classes) or _is_outlier_detector(estimator):  # CatBoost's regressors
        return None
    if not isinstance(classes, list) or not np.ndim(classes[0]):
        return np.asarray(classes)
    if not hasattr(estimator, "predict_proba") or any([*labels] != [0, 1] for labels in classes):
        raise ValueError(f"{type(estimator).__name__} was fitted on several outputs that are no labels of 0 and 1")
    return classes


def _find_largest(values: np.ndarray) -> np.ndarray:
    """Return the number of each row's largest value, (R,); of a single one, 1 where it is above 0."""
    return (values[:, 0] > 0).astype(int) if values.shape[1] == 1 else values.argmax(1)


def _has_threshold(estimator: Any) -> bool:
    return isinstance(estimator, FixedThresholdClassifier | TunedThresholdClassifierCV)


def _is_outlier_detector(estimator: Any) -> bool:
    return isinstance(estimator, OutlierMixin) and hasattr(estimator, "decision_function")


def _is_clear(values: np.ndarray) -> np.ndarray:
    """Return in which rows one value is the largest, (R,); of a single one, where it is not 0."""
    if values.shape[1] == 1:
        return np.asarray(values[:, 0] != 0)
    second, first = np.sort(values, 1)[:, -2:].T
    return np.asarray(first - second > 1e-9 * abs(first))


def _as_columns(values: Any) -> np.ndarray:
    """Return numbers of R rows as float64 of shape (R, P)."""
    values = np.asarray(values, dtype=float)
    return values.reshape(len(values), -1)
