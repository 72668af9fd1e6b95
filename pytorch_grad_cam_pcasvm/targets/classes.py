"""Targets of a head's classes, and the default targets."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pytorch_grad_cam_pcasvm.targets.components import every_component
from pytorch_grad_cam_pcasvm.targets.decisions import SVMTarget
from pytorch_grad_cam_pcasvm.targets.scores import ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import Target


def every_class(output: Any) -> Sequence[Target]:
    """Return a target for every class of an output, or for its only value.

    Args:
        output: what a network returns.

    Raises:
        ValueError: it is no output of a head, and no scores (N, C).

    Example:
        >>> every_class(net(images))
        [SVMTarget('cat'), SVMTarget('dog'), SVMTarget('elk')]
    """
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

    Example:
        >>> default_decision(net.head), default_decision(net.head, "cat")
        (SVMTarget(), SVMTarget(versus='cat'))
    """
    normal = head.normal if normal is None else normal
    if normal is None:
        return SVMTarget()
    head.class_index(normal)
    return SVMTarget(versus=normal)


def list_targets(targets: Sequence[Target] | Target) -> list[Target]:
    """Return targets, or the only one, as a list.

    Raises:
        ValueError: there are none.
    """
    several = list(targets) if isinstance(targets, list | tuple) else [targets]
    if not several:
        raise ValueError("targets is empty: pass None for the default, or at least one target")
    return several  # type: ignore[return-value]


def list_default_targets(output: Any) -> list[Target]:
    """Return every component, then the predicted class, or all outputs of several."""
    if output.head is None:
        return [ScoreTarget()]
    if output.head.vote is not None and output.head.vote.about == "outputs":
        return [*every_component(output), *every_class(output)]
    return [*every_component(output), *([] if output.head.vote is None else [_PREDICTED])]


_PREDICTED = SVMTarget()
