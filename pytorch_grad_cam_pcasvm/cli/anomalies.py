"""How anomalous good photos are to estimators that were fitted on the others: the scale of colours for all photos."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

_FOLDS = 5
_MOST = 5000  # patches of each fold that are asked


def keep_left_out(head: Any, pipeline: Any, features: Any, photos: Sequence[int]) -> None:
    """Keep with a head between which numbers anomalies of its training photos are where these are left out.

    Args:
        head: of the pipeline.
        pipeline: fitted on good patches.
        features: the patches, shape (R, D).
        photos: the number of the photo of each.
    """
    import numpy as np
    from sklearn.base import clone
    from sklearn.model_selection import GroupKFold

    from pytorch_grad_cam_pcasvm.head import Head, tensor
    from pytorch_grad_cam_pcasvm.head.anomalies import anomaly
    from pytorch_grad_cam_pcasvm.head.anomaly_scale import is_distance, reach_of

    count, drawn = len(set(photos)), np.random.default_rng(0)
    if count < 2:
        return  # a bank's rows tell it themselves
    values = []
    for others, own in GroupKFold(min(_FOLDS, count)).split(features, groups=photos):
        own = drawn.permutation(own)[:_MOST]
        try:
            fitted = Head.of(clone(pipeline).fit(features[others]))
        except ValueError:  # too few, or all alike
            continue
        values.append(anomaly(fitted, fitted.values_of(tensor(features[own]))).numpy())
    if values:
        least, reach = reach_of(np.concatenate(values), is_distance=is_distance(head))
        head.stages[0].facts = replace(head.stages[0].facts, least=least, reach=reach)
