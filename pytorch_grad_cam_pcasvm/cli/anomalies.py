"""How anomalous good photos are to estimators that were fitted on the others: a scale of colours, and a threshold."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.cli.training import TrainingSet

_FOLDS = 5
_MOST = 5000  # patches of each fold that are asked
_ROWS = 2000  # that are asked at once


def keep_left_out(head: Any, pipeline: Any, training: TrainingSet, groups: Any, options: FitOptions) -> None:
    """Keep with a head what anomalies of its training photos are where these are left out: their scale, a threshold.

    Args:
        head: of the pipeline.
        pipeline: fitted on good photos, or their patches.
        training: these.
        groups: the number of the object of each photo of the folder, which are left out together; None: all differ.
        options: those of ``fit``.
    """
    import numpy as np

    from pytorch_grad_cam_pcasvm.head.anomaly_scale import is_distance, reach_of
    from pytorch_grad_cam_pcasvm.model.thresholds import choose_threshold, count_needed

    assert options.rate is not None
    photos = np.array(training.rows)
    own = photos if groups is None else groups[photos]
    if len(set(own.tolist())) < 2:  # a bank's rows tell their scale themselves
        kind = "object" if options.groups else "photo"
        print(f"no threshold: there is one good {kind} only, and {count_needed(options.rate)} would do")
        return
    drawn, values, heads, fold_of = np.random.default_rng(0), [], list[Any](), dict[int, int]()
    for fitted, rows in _fit_folds(pipeline, training.features.numpy(), own):
        fold_of |= dict.fromkeys(own[rows].tolist(), len(heads))
        rows = drawn.permutation(rows)[:_MOST]
        if fitted is not None:
            values.append(_ask(fitted, training.features[rows]))
        heads.append(fitted)
    if not values:
        return
    if training.places.shape[1]:  # the colours of positions
        least, reach = reach_of(np.concatenate(values), is_distance=is_distance(head))
        head.stages[0].facts = replace(head.stages[0].facts, least=least, reach=reach)
    scores = _score_photos(training, heads, fold_of, groups)
    threshold = choose_threshold([*scores.values()], options.rate, None if groups is None else groups[[*scores]])
    head.training_set.preparation = (head.training_set.preparation or {}) | {"threshold": asdict(threshold)}
    _tell_threshold(threshold, options)


def _fit_folds(pipeline: Any, features: Any, groups: Any) -> Iterator[tuple[Any, Any]]:
    """Yield for each fold the head that is fitted on the others, None if it cannot be, and the numbers of its rows."""
    from sklearn.base import clone
    from sklearn.model_selection import GroupKFold

    from pytorch_grad_cam_pcasvm.head import Head

    for others, own in GroupKFold(min(_FOLDS, len(set(groups.tolist())))).split(features, groups=groups):
        try:
            yield Head.of(clone(pipeline).fit(features[others])), own
        except ValueError:  # too few, or all alike
            yield None, own


def _ask(head: Any, rows: Any) -> Any:
    """Return the anomalies of rows of features, shape (R,)."""
    import torch

    from pytorch_grad_cam_pcasvm.head.anomalies import anomaly

    return torch.cat([anomaly(head, head.values_of(part.double())) for part in rows.split(_ROWS)]).numpy()


def _score_photos(training: TrainingSet, heads: list[Any], fold_of: dict[int, int], groups: Any) -> dict[int, float]:
    """Return the highest anomaly of all positions of each photo, by a head that was fitted without it."""
    scores = {}
    for features, photos in training.read_all():
        for one, photo in zip(features, photos, strict=True):
            # An object of which a coreset has nothing was left out of all of them.
            head = heads[fold_of.get(photo if groups is None else int(groups[photo]), 0)]
            if head is not None:
                rows = one[None] if one.dim() == 1 else one.flatten(1).T
                scores[photo] = float(_ask(head, rows).max())
    return scores


def _tell_threshold(threshold: Any, options: FitOptions) -> None:
    """Say which score passes, how many good photos fail by that, and how many would do for the rate wanted."""
    things = "objects" if options.groups else "good photos"
    parts = round(1 / threshold.rate, 1)
    more = ""
    if threshold.rate > threshold.wanted:
        more = f"; for 1 in {1 / threshold.wanted:g}, {threshold.needed} {things} are needed"
    print(
        f"threshold {threshold.score:.4g}: photos above it fail, at most 1 in {parts:g} of new good ones, by the "
        f"scores of {threshold.count} {things}, each left out in turn{more}"
    )
