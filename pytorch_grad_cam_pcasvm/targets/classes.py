"""Targets of the classes that a head has."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.targets.decisions import SVMTarget
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import Target


def every_class(output: Any) -> Sequence[Target]:
    """Return a target for every class of an output, or for its only value."""
    if output.head is None:
        scores = output.value
        if not isinstance(scores, Tensor) or scores.dim() != 2:
            raise ValueError("jacobians needs a network that returns scores (N, C), or a PCASVMNet: use explain")
        return [ScoreTarget(category) for category in range(scores.shape[-1])]
    if output.decision is None:
        return ()
    classes = output.head.classes_
    return [SVMTarget()] if classes is None else [SVMTarget(label) for label in classes.tolist()]


def default_decision(head: Any, normal: Any = None) -> SVMTarget:
    """Return the decision that is explained where none is named.

    Args:
        head: the head.
        normal: the class that is an absence, such as ``"good"``; None: the one that the head knows, if any.

    Returns:
        The margin of the predicted class; with a normal class the evidence for any other one against it.

    Raises:
        ValueError: there is no such class.
    """
    normal = head.normal if normal is None else normal
    if normal is None:
        return SVMTarget()
    head.class_index(normal)
    return SVMTarget(versus=normal)
