"""Targets of the classes that a head has, and those that are meant for an image."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from pytorch_grad_cam_pcasvm.network.outputs import OfHead
from pytorch_grad_cam_pcasvm.targets.decisions import LogRatioTarget, SVMTarget
from pytorch_grad_cam_pcasvm.targets.places import Chosen, region_of, selection_of
from pytorch_grad_cam_pcasvm.targets.scores import ProbabilityTarget, ScoreTarget
from pytorch_grad_cam_pcasvm.targets.target import PlacedTarget, Target


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


def fixed(target: Any, output: Any) -> Any:
    """Return a target that means the same class for every copy of an image.

    Args:
        target: any target.
        output: the network's output for the image, a batch of one.

    Returns:
        The target with the class that it is about in this image, and its runner-up, by name.
    """
    if isinstance(target, ScoreTarget) and target.category is None:
        return ScoreTarget(int(output.reshape(-1).argmax()))
    if isinstance(target, PlacedTarget) and isinstance(output, OfHead) and output.grid is not None:
        selection = selection_of(target, output)
        named = fixed(target.unplaced, region_of(output, selection))
        at = target.at
        if isinstance(selection, Chosen):
            at = tuple(map(int, np.unravel_index(int(selection.index[0]), output.grid.shape)))
        return named.at_place(at)
    if isinstance(target, ProbabilityTarget) and target.category is None:
        return replace(target, category=output.head.classes_[int(output.predicted()[0])].item())
    if (
        not isinstance(target, SVMTarget | LogRatioTarget)
        or not isinstance(output, OfHead)
        or output.head.classes_ is None
    ):
        return target
    labels = output.head.classes_.tolist()
    category, versus = target.category, target.versus
    if category is None:
        category = labels[int(target.categories(output)[0])]
    if isinstance(versus, str) and versus == "runner-up" and "runner-up" not in labels:
        order = output.ranking()[0].argsort(descending=True).tolist()
        versus = next(labels[index] for index in order if labels[index] != category)
    return replace(target, category=category, versus=versus)
