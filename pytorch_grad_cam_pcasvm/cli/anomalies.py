"""How anomalous good photos are to estimators that were fitted on the others: a scale of colours, and a threshold."""

from dataclasses import asdict, replace
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.cli.training import TrainingSet

_FOLDS = 5
_MOST = 5000  # patches of each fold that are asked
_ROWS = 2000  # that are asked at once


def keep_left_out(head: Any, pipeline: Any, training: TrainingSet, groups: Any, options: FitOptions) -> None:
    """Keep with a head the scale and the threshold of anomalies, from training photos that were left out.

    Args:
        head: of the pipeline.
        pipeline: fitted on good photos, or their patches.
        training: these.
        groups: the number of the object of each photo of the folder, which are left out together; None: all differ.
        options: those of ``fit``.
    """
    import numpy as np

    from pytorch_grad_cam_pcasvm.model.thresholds import count_needed

    assert options.rate is not None
    photos = np.array(training.rows)
    own = photos if groups is None else groups[photos]
    if len(set(own.tolist())) < 2:  # a bank's rows tell their scale themselves
        kind = "object" if options.groups else "photo"
        print(f"no threshold: there is one good {kind} only, and {count_needed(options.rate)} would do")
        return
    folds, count = split_good(own), options.components or 0
    heads = [_fit_others(pipeline, training.features.numpy()[others]) for others, _ in folds]
    if all(head is None for head in heads):
        most = min(len(others) for others, _ in folds) - 1
        print(
            f"no threshold: for it photos are left out in turn, and {count} components cannot be fitted on the others"
            + (f"; lower --components, to {most} or fewer" if count > most else "")
        )
        return
    if training.places.shape[1]:
        _keep_scale(head, training, heads, [rows for _, rows in folds])
    fold_of = {number: place for place, (_, rows) in enumerate(folds) for number in own[rows].tolist()}
    scores = _score_photos(training, heads, fold_of, groups)
    _keep_threshold(head, scores, None if groups is None else groups[[*scores]], options)


def split_good(groups: Any) -> list[tuple[Any, Any]]:
    """Return the folds of good photos, or of their patches: the numbers of rows to fit on, and of rows left out.

    Args:
        groups: the number of the object of each row, whose rows are left out together, of two or more objects.
    """
    from sklearn.model_selection import GroupKFold

    return list(GroupKFold(min(_FOLDS, len(set(groups.tolist())))).split(groups, groups=groups))


def _fit_others(pipeline: Any, rows: Any) -> Any:
    """Return the head that is fitted on some of the rows; None: it cannot be."""
    from sklearn.base import clone

    from pytorch_grad_cam_pcasvm.head import Head

    try:
        return Head.of(clone(pipeline).fit(rows))
    except ValueError:  # too few, or all alike
        return None


def _keep_scale(head: Any, training: TrainingSet, heads: list[Any], folds: list[Any]) -> None:
    """Keep with a head where the colours of positions start and end, by positions that were left out."""
    import numpy as np

    from pytorch_grad_cam_pcasvm.head.anomaly_scale import measure_reach

    drawn, values = np.random.default_rng(0), []
    for fitted, rows in zip(heads, folds, strict=True):
        some = drawn.permutation(rows)[:_MOST]
        if fitted is not None:
            values.append(_ask(fitted, training.features[some]))
    is_distance = head.decision_position is None or any(getattr(stage, "is_distance", False) for stage in head.stages)
    least, reach = measure_reach(np.concatenate(values), is_distance=is_distance)
    head.stages[0].facts = replace(head.stages[0].facts, least=least, reach=reach)


def _keep_threshold(head: Any, scores: dict[int, float], groups: Any, options: FitOptions) -> None:
    """Keep with a head the largest score that passes, by photos that were left out, and say so."""
    from pytorch_grad_cam_pcasvm.model.thresholds import choose_threshold

    assert options.rate is not None
    threshold = choose_threshold([*scores.values()], options.rate, groups)
    head.training_set.preparation = (head.training_set.preparation or {}) | {"threshold": asdict(threshold)}
    _tell_threshold(threshold, options)


def _ask(head: Any, rows: Any) -> Any:
    """Return the anomalies of rows of features, shape (R,)."""
    import torch

    from pytorch_grad_cam_pcasvm.head.anomalies import measure_anomaly

    return torch.cat([measure_anomaly(head, head.values_of(part.double())) for part in rows.split(_ROWS)]).numpy()


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
        f"scores of {threshold.count} {things} that were left out, a fifth at a time{more}"
    )
