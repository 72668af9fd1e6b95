"""Resampled heads of a model: attached where they are wanted, and by default where they cost little."""

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.head import Head, resample_heads, storage
from pytorch_grad_cam_pcasvm.studio.model.encoding import LabelEncoded

COUNT = 30
_SECONDS, _BYTES = 60, 1 << 25  # of all of them: what costs more is not made unless it is asked for


def check_count(count: int | None) -> None:
    """Refuse what is no number of resampled heads.

    Raises:
        ValueError: it is 1, negative, or no integer.
    """
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0 or count == 1):
        raise ValueError(
            f"resample is a number of resampled heads, 2 or more, of which {COUNT} are usual, or 0 for none, got "
            f"{count!r}"
        )


def attach_resamples(
    head: Head, fitted: Any, rows: np.ndarray, labels: Any, count: int | None, *, groups: Any, seed: int, ask: str
) -> str | None:
    """Give a head refits on bootstrap samples of its rows, by which maps say how sure they are.

    Args:
        head: of the estimators.
        fitted: these, or a list of them.
        rows: of features, (R, D).
        labels: of the rows; None: there are none.
        count: number of refits; None: the usual one, where they are made within a minute, and are small in a file.
        groups: of the rows, which are drawn together; None: each is one of its own.
        seed: random seed.
        ask: how refits are asked for, for messages.

    Returns:
        In words why there are none; None: they were made, or 0 of them are wanted.

    Raises:
        TypeError: refits are asked for, and the estimators are not known.
        ValueError: refits are asked for, and cannot be made, for example of too few photos.
    """
    if count == 0:
        return None
    try:
        if count is None and (cost := _find_cost(head, fitted, rows, labels, groups, seed)):
            return f"{cost}; ask for them with {ask}"
        head.resamples = _refit(fitted, rows, labels, COUNT if count is None else count, groups, seed)
    except (TypeError, ValueError) as error:
        if count is not None:
            raise
        return str(error)
    return None


def measure_size(heads: Sequence[Head]) -> int:
    """Return how many bytes resampled heads have in a file."""
    return sum(tensor.nbytes for tensor in storage.encode_refits([list(head.stages) for head in heads]).values())


def _find_cost(head: Head, fitted: Any, rows: np.ndarray, labels: Any, groups: Any, seed: int) -> str | None:
    """Return in words what is too much of the usual number of refits; None: nothing is."""
    if head.enumerated is not None:
        return f"refits of a {head.enumerated.predictor.name} are slow to make, to read and to explain"
    size = COUNT * measure_size([head])
    if size > _BYTES:
        return f"refits would have {size / 1e6:.0f} MB in the model's file"
    began = time.monotonic()
    tried = _refit(fitted, rows, labels, 2, groups, seed)
    seconds = (time.monotonic() - began) / len(tried) * COUNT
    return f"refits would take {seconds:.0f} s" if seconds > _SECONDS else None


def _refit(fitted: Any, rows: np.ndarray, labels: Any, count: int, groups: Any, seed: int) -> list[Head]:
    """Return refits of a pipeline, also of one whose classifier takes numbers in place of labels."""
    names = None
    *before, classifier = (step for _, step in fitted.steps) if hasattr(fitted, "steps") else [fitted]
    if isinstance(classifier, LabelEncoded):
        names, labels = np.unique(labels, return_inverse=True)
        fitted = [*before, classifier.classifier_]
    with warnings.catch_warnings():  # which were told of the fit that these repeat
        warnings.simplefilter("ignore")
        refits = resample_heads(fitted, rows, labels, count, groups, seed)
    for refit in refits if names is not None else ():
        refit.name_classes(names)
    return refits
