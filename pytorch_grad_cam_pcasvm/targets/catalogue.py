"""The catalogue of targets: the default decision, and targets as JSON."""

from typing import Any

import numpy as np
from torch import Tensor

from pytorch_grad_cam_pcasvm.targets.components import HotellingTarget, PCATarget, ResidualTarget
from pytorch_grad_cam_pcasvm.targets.decisions import LogRatioTarget, SVMTarget
from pytorch_grad_cam_pcasvm.targets.places import Region
from pytorch_grad_cam_pcasvm.targets.scores import DensityTarget, PredictedScore, ProbabilityTarget, ScoreTarget


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

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return list(map(plain, value))
        if isinstance(value, Region):
            return value.encoded
        native = value.item() if isinstance(value, np.generic | Tensor) else value
        if not isinstance(native, None | bool | int | float | str):
            reason = f"a label must be a string, a number or a boolean, got {type(value).__name__}"
            raise TypeError(f"{target} cannot be saved: {reason}")
        return {"dtype": value.dtype.str, "value": native} if isinstance(value, np.generic) else native

    return {"target": target_class.__name__, "fields": {name: plain(value) for name, value in vars(target).items()}}


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
