"""Patch heads: the choice of components and settings, and the scores of photos that were left out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.model.choices import (
    Candidate,
    Fold,
    allowed_components,
    compare_candidates,
    pick_simplest,
    split_folds,
    take_part,
)
from pytorch_grad_cam_pcasvm.model.teaching import Read

COMPONENTS = 64, 128  # fewer keep what all patches have in common, and lose small things
_MOST = 5000  # patches that are compared
_FOLDS = 3  # in which they are


def choose_candidate(
    rows: np.ndarray,
    labels: np.ndarray,
    photos: np.ndarray,
    classifier: Any,
    settings: Sequence[Mapping[str, Any]],
    components: Sequence[int],
) -> tuple[Candidate, list[Candidate]]:
    """Return the number of components and the settings of a head of patches, and all candidates.

    Patches of a photo are in one fold. At most 5,000 are compared, of whole photos.

    Args:
        rows: shape (R, D).
        labels: the class of each, shape (R,).
        photos: the number of its photo, or of the object, shape (R,).
        classifier: an estimator, not fitted.
        settings: of it, the simplest first.
        components: numbers of components; those that the data do not allow are left out.
    """
    part = take_part(labels, photos, _MOST, 0)
    x, numbers = rows[part].astype(np.float64), np.unique(labels[part], return_inverse=True)[1]
    folds = split_folds(numbers, photos[part], _FOLDS)
    components = allowed_components(components, min(len(fit) for fit, _ in folds), x.shape[1])
    candidates = compare_candidates(x, numbers, folds, classifier, settings, components)
    return pick_simplest(candidates), candidates


def measure_evidence(head: Head, rows: torch.Tensor, normal: Any) -> torch.Tensor:
    """Return by how much any fault is ahead of the normal class, (R,), of rows of features (R, D)."""
    assert head.classes_ is not None
    position, labels = head.decision_position, head.classes_.tolist()
    assert position is not None
    margins = head.voting.margins(head.values_of(rows.double()).values[position])
    faults = [number for number, name in enumerate(labels) if name != normal]
    return margins[:, faults].amax(1) - margins[:, labels.index(normal)]


def score_left_out(
    read: Read, heads: Sequence[Head | None], folds: Sequence[Fold], normal: Any, keep: Callable[[int, Any], None]
) -> None:
    """Pass on the evidence for any fault at every position of each photo, by the head that was fitted without it.

    Args:
        read: yields the features of all photos.
        heads: of each fold; None: there is none.
        folds: the numbers of the photos to fit on, and of those left out.
        normal: the class of good photos.
        keep: takes the number of a photo and its evidence, shape (*grid).
    """
    fold_of = {photo: number for number, (_, test) in enumerate(folds) for photo in test.tolist()}
    for features, photos in read():
        for one, photo in zip(features, photos, strict=True):
            head = heads[fold_of[int(photo)]] if int(photo) in fold_of else None
            if head is not None:
                keep(int(photo), measure_evidence(head, one.flatten(1).T, normal).unflatten(0, one.shape[1:]))
