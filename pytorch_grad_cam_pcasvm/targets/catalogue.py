"""The catalogue of targets: the default decision, words for their values, and targets as JSON."""

from typing import Any

import numpy as np
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import find_clusters
from pytorch_grad_cam_pcasvm.head.distances import NearestDistance
from pytorch_grad_cam_pcasvm.targets.components import HotellingTarget, PCATarget, ResidualTarget
from pytorch_grad_cam_pcasvm.targets.decisions import LogRatioTarget, SVMTarget
from pytorch_grad_cam_pcasvm.targets.places import Region
from pytorch_grad_cam_pcasvm.targets.scores import DensityTarget, PredictedScore, ProbabilityTarget, ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import Target


def default_decision(head: Any, normal: Any = None) -> SVMTarget:
    """Return the decision that is explained where none is named.

    Args:
        head: the head.
        normal: the class that is an absence, such as ``"good"``; None: the one that the head knows, if any.

    Returns:
        The margin of the predicted class; with a normal class the evidence for any other one against it.

    Raises:
        ValueError: there is no such class.

    Example:
        >>> default_decision(net.head), default_decision(net.head, "cat")
        (SVMTarget(), SVMTarget(versus='cat'))
    """
    normal = head.normal if normal is None else normal
    if normal is None:
        return SVMTarget()
    head.class_index(normal)
    return SVMTarget(versus=normal)


_TARGETS: dict[str, Any] = {
    target_class.__name__: target_class
    for target_class in (
        PCATarget,
        SVMTarget,
        LogRatioTarget,
        ProbabilityTarget,
        ScoreTarget,
        PredictedScore,
        HotellingTarget,
        ResidualTarget,
        DensityTarget,
    )
}


def encoded(target: Any) -> Any:
    """Return a target as JSON: its class and fields, or only the name of one from outside this package.

    Raises:
        TypeError: it has a label that is neither a string, a number nor a boolean.

    Example:
        >>> encoded(PCATarget(0))
        {'target': 'PCATarget', 'fields': {'component': 0, 'sign': '+', 'at': None}}
    """
    target_class = type(target)
    if target_class not in _TARGETS.values():
        return target if isinstance(target, str) else getattr(target, "__name__", target_class.__name__)

    def simplify(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(map(simplify, value))
        if isinstance(value, Region):
            return value.encoded
        native = value.item() if isinstance(value, np.generic | Tensor) else value
        if not isinstance(native, None | int | float | str):  # a boolean is an integer
            reason = f"a label must be a string, a number or a boolean, got {type(value).__name__}"
            raise TypeError(f"{target} cannot be saved: {reason}")
        return {"dtype": value.dtype.str, "value": native} if isinstance(value, np.generic) else native

    return {"target": target_class.__name__, "fields": {name: simplify(value) for name, value in vars(target).items()}}


def decoded(target: Any) -> Any:
    """Return the target that :func:`encoded` wrote, or the name of one from outside this package.

    Raises:
        ValueError: it is a target of a later version.

    Example:
        >>> decoded(encoded(PCATarget(0)))
        PCATarget(0)
    """
    if isinstance(target, str):
        return target
    target_class = _TARGETS.get(target["target"])
    if target_class is None:
        raise ValueError(f"unknown target {target['target']!r}: the file is from a later version, update the package")

    def read(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(read, value))
        if isinstance(value, dict):
            return Region.decoded(**value) if "bits" in value else np.dtype(value["dtype"]).type(value["value"])
        return value

    return target_class(**{name: read(value) for name, value in target["fields"].items()})


_KINDS = {
    PCATarget: "position {}",
    HotellingTarget: "T\N{SUPERSCRIPT TWO} {} (squared distance from the mean, in units of the variances)",
    ResidualTarget: "Q {} (squared distance from what the components can express)",
    ProbabilityTarget: "probability {} (0 to 1)",
    ScoreTarget: "score {} (only differences between classes count)",
}
_PREDICTED = "predicted class"  # which stands for the class that is predicted for an image


def describe_meaning(target: Target, head: Any, dense: bool = False) -> str:
    """Return the meaning of a target's value and of its limits in words, with ``{}`` for the number.

    Args:
        target: the target.
        head: the head; None: an ordinary network decides.
        dense: whether it decides at every position.

    Example:
        >>> describe_meaning(SVMTarget("cat", versus="dog"), net.head).format(1.2)
        'margin 1.2: above 0 is cat rather than dog'
    """
    if isinstance(target, DensityTarget):
        return "anomaly {} (minus the log-density)" if target.sign == "-" else "log-density {}"
    if isinstance(target, SVMTarget | LogRatioTarget) and head is not None:
        return _decision_meaning(target, head, dense)
    return _KINDS.get(type(target), "value {}")


def describe_anomaly(head: Any, dense: bool) -> str:
    """Return a head's anomalies in words: distances, or a value that is higher the less a photo is like good ones.

    Args:
        head: a head that tells anomalies.
        dense: whether it decides at every position.

    Example:
        >>> describe_anomaly(Head.of(NearestNeighbors(n_neighbors=1).fit(features)), dense=True)
        'distance to the nearest good patch'
    """
    part = "patch" if dense else "photo"
    if find_clusters(head) is not None:
        return "minus the log-density"
    if head.decision_position is None:
        return "squared distance from what the components can express"
    nearest = next((stage for stage in head.stages if isinstance(stage, NearestDistance)), None)
    if nearest is not None:
        return f"distance to the nearest good {part}" if nearest.k == 1 else f"distance to the nearest good {part}es"
    return "above 0 is unlike good ones" if head.voting.about == "one class" else "higher is less like good ones"


def _decision_meaning(target: Any, head: Any, dense: bool) -> str:
    """Return the margin of a class, or between classes, in words; without classes the meaning of the only value."""
    voting, sign, versus = head.voting, getattr(target, "sign", "+"), getattr(target, "versus", None)
    if voting.about in ("one class", "likeness"):
        anomaly = describe_anomaly(head, dense) if voting.about == "likeness" else ""
        if sign == "-":
            return "anomaly {}" + (": above 0 is unlike good ones" if not anomaly else f" ({anomaly})")
        return "normality {}" + (": above 0 is like good ones" if not anomaly else ": higher is more like good ones")
    if head.classes_ is None:
        return (
            "value {} before the link function" if voting.inverse else "predicted value {} (in the unit of the labels)"
        )
    name = _PREDICTED if target.category is None else str(target.category)
    word = "log-ratio" if isinstance(target, LogRatioTarget) else "margin"
    against = "not " * (sign == "-")
    if target.category is None and versus in head.classes_.tolist():
        return f"{word} {{}}: above 0 is {versus if sign == '-' else f'anything but {versus}'}"
    if isinstance(versus, tuple) or versus == "others":
        rivals = "the others" if versus == "others" else ", ".join(map(str, versus))
        if sign == "+" and target.strength == 1:
            return f"{word} of {name} {{}}: above 0 is more {name} than the mean of {rivals}"
        return f"{word} of {name} against {rivals} {{}}: higher is {'less' if against else 'more'} {name}"
    if versus is not None:
        rival = "the runner-up" if versus == "runner-up" else versus
        return f"{word} {{}}: above 0 is {against}{name} rather than {rival}"
    if len(head.classes_) == 2 and _is_decided_by_sign(voting):
        return f"{word} {{}}: above 0 is {against}{name}"
    if voting.kind in ("OneVsRest", "OneVsOne"):
        return f"{word} of {name} {{}}: above 0 is {'less' if against else 'more'} {name} than the others"
    return f"{word} of {name} {{}}: higher is {'less' if against else 'more'} {name}"


def _is_decided_by_sign(voting: Any) -> bool:
    """Return whether of two classes that one is predicted whose margin is above 0."""
    opposite = bool((voting.matrix[0] == -voting.matrix[1]).all())
    return opposite and (
        voting.decide in ("sign", "votes") or (voting.decide, voting.compare) == ("comparison", "margins")
    )
