"""Fitting on good photos alone by a PCA of all their patches, which is added up while they are read."""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.head import (
    CovariancePCA,
    Head,
    assemble_detector,
    choose_shrinkage,
    count_expressing,
    split_anomaly,
)
from pytorch_grad_cam_pcasvm.studio.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.choosing import add_resamples
from pytorch_grad_cam_pcasvm.studio.cli.folders import name_first
from pytorch_grad_cam_pcasvm.studio.cli.photos import RATE, keep_left_out, split_left_out
from pytorch_grad_cam_pcasvm.studio.cli.training import TrainingFeatures
from pytorch_grad_cam_pcasvm.studio.data.copies import name_file
from pytorch_grad_cam_pcasvm.studio.model.fitting import describe_estimator
from pytorch_grad_cam_pcasvm.studio.pictures.answers import EXPRESSED

_USUAL = 0.25  # where nothing can be left out
_FAR = 3.0  # times the median of the scores


def fit_good(
    options: FitOptions, training: TrainingFeatures, paths: Sequence[Path], groups: Any, *, skip_suspicious: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the head of good photos, and the model's description of its fit, having said what was chosen.

    Args:
        options: those of ``fit``.
        training: the photos' features.
        paths: the photos of the folder.
        groups: the number of the object of each photo of the folder; None: they all differ.
        skip_suspicious: leave out photos that are unlike all others.

    Raises:
        ValueError: all patches are alike.
    """
    fold_of = split_left_out(training, groups, options)
    parts = add_up(training, groups, fold_of)
    left_out = "photos that were left out" if fold_of else "quarters of the photo that were left out"
    shrinkage, about = _USUAL, "as nothing can be left out to choose it by"
    if len(parts) > 1:
        shrinkage, found = choose_shrinkage(parts)
        about = f"of {len(found)} from {min(found):g} to {max(found):g} that under which {left_out} are likeliest"
    sums = reduce(CovariancePCA.merge, parts, CovariancePCA())
    print(f"PCA of {sums.n_samples_seen_:,} patches with {len(sums.mean_)} features; shrinkage {shrinkage:g}, {about}")
    options.components = len(sums.mean_)
    pipeline = assemble_detector(sums, shrinkage)
    head = Head.of(pipeline)
    head.training_set.sums = sums
    scores, heads = dict[int, float](), list[Head]()
    if fold_of:
        rests = [[one for one in parts if one is not part] for part in parts]
        heads = [
            Head.of(assemble_detector(reduce(CovariancePCA.merge, rest, CovariancePCA()), shrinkage)) for rest in rests
        ]
        scores = keep_left_out(head, heads, fold_of, training, groups, options)
        if odd := list_suspicious([*scores.values()], scores):
            named = {paths[row].relative_to(options.images).as_posix(): scores[row] for row in odd}
            words = describe_suspicious([*scores.values()], named)
            if skip_suspicious:
                print(f"{words}: left out, and fitted again without them")
                return fit_good(options, training.without(odd), paths, groups, skip_suspicious=False)
            print(
                f"{words}: if they are not good, take them out, and fit again, as the threshold rests on them; "
                "--skip-suspicious leaves them out"
            )
    files = [] if options.no_pictures else [name_file(paths[row]) for row in sorted({*training.rows})]
    outside = _measure_outside(heads, training, fold_of, groups, shrinkage) if fold_of else None
    head.training_set.preparation = (head.training_set.preparation or {}) | {
        "good": {
            "outside": outside,
            "shrinkage": shrinkage,
            "scores": [*scores.values()],
            "objects": [int(row if groups is None else groups[row]) for row in scores],
            "rate": options.rate or RATE,
            "files": files,
        }
    }
    if options.resample:
        own = np.array(training.rows)
        own = own if groups is None else groups[own]
        add_resamples(options, head, pipeline, training.features.numpy(), None, own)
    about_fit = {"estimator": describe_estimator(pipeline)} | training.describe() | {"rows": sums.n_samples_seen_}
    return head, about_fit


def _measure_outside(
    heads: Sequence[Head], training: TrainingFeatures, fold_of: Mapping[int, int], groups: Any, shrinkage: float
) -> float:
    """Return which part of the anomaly of a photo's strongest patch is outside of the main components, in the median.

    Args:
        heads: of each fold, fitted on the others.
        training: the photos.
        fold_of: the fold of each photo, or object.
        groups: the number of the object of each photo of the folder; None: all differ.
        shrinkage: of the heads.
    """
    shares = []
    for head in heads:
        head.training_set.preparation = {"good": {"shrinkage": shrinkage}}
    counts = [count_expressing(head, EXPRESSED) for head in heads]
    for features, photos in training.read_all():
        for one, photo in zip(features, photos, strict=True):
            fold = fold_of[photo if groups is None else int(groups[photo])]
            rows = one[None] if one.dim() == 1 else one.flatten(1).T
            parts = split_anomaly(heads[fold], heads[fold].values_of(rows.double()), len(rows))
            if parts is not None:
                shares.append(float(parts[0, counts[fold] :].sum() / parts[0].sum()))
    return float(np.median(shares))


def list_suspicious(usual: Sequence[float], scores: Mapping[Any, float]) -> list[Any]:
    """Return the photos that are far more anomalous than usual ones, by what was fitted without them, in order."""
    middle = float(np.median(usual)) if len(usual) else np.inf
    return sorted((photo for photo, score in scores.items() if score > _FAR * middle), key=lambda one: -scores[one])


def describe_suspicious(usual: Sequence[float], scores: Mapping[str, float]) -> str:
    """Name photos that are far more anomalous than usual ones; empty: none are."""
    odd = list_suspicious(usual, scores)
    if not odd:
        return ""
    middle = float(np.median(usual))
    return f"unlike the other good photos: {name_first(odd)} (anomaly {scores[odd[0]]:.4g}, usually {middle:.4g})"


def add_up(training: TrainingFeatures, groups: Any, fold_of: Mapping[int, int] | None) -> list[CovariancePCA]:
    """Return the sums of all rows of each fold; of a photo alone those of its quarters, where it has positions."""
    sums: dict[int, CovariancePCA] = {}
    for features, photos in training.read_all():
        for one, photo in zip(features.double().numpy(), photos, strict=True):
            if fold_of:
                cells = [(fold_of[photo if groups is None else int(groups[photo])], one)]
            else:
                cells = list(enumerate(_quarter(one)))
            for fold, cell in cells:
                rows = cell.reshape(len(cell), -1).T
                sums.setdefault(fold, CovariancePCA()).partial_fit(rows)
    return [sums[fold] for fold in sorted(sums)]


def _quarter(features: Any) -> list[Any]:
    """Return the quarters of features (D, h, w); or what has too few positions as it is."""
    if features.ndim < 3 or min(features.shape[1:]) < 2:
        return [features]
    return [part for half in np.array_split(features, 2, 1) for part in np.array_split(half, 2, 2)]
