"""Positions: how well a head that decides at every position, or a map, tells what lies inside of true masks."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.evaluation.pixels import by_class, pixel_scores
from pytorch_grad_cam_pcasvm.evaluation.regions import masks_of, regions_of
from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.subject import Subject, heat
from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.network.modules import evaluating
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet

POINT = "pointing game"
AUROC, AUPRO, F1, IMAGE_AUROC = "pixel AUROC", "AUPRO to 30 % of false positives", "best F1", "image AUROC"
POSITIONS = "every position"  # of a head that decides there
BACKGROUNDS = (0, "0", "background")  # names of the class outside of masks


def rows_of_pixels(subject: Subject, pixels: dict[Any, list[Any]], names: Sequence[str], tolerance: float) -> list[Row]:
    """Return how well the values of every pixel tell masks, of all images and of each class.

    Args:
        subject: what is measured.
        pixels: by name, the values of the images' pixels; ``masks``; and ``rows``, the images' numbers.
        names: of the values.
        tolerance: of the second pointing game.
    """
    where, labels = np.concatenate(pixels["masks"]), subject.source.labels(pixels["rows"])
    if where.all():
        subject.missing["pixels"] = "all lie inside of masks"
        return []
    rows = []
    for name in names:
        values = np.concatenate(pixels[name])
        scores = {"": pixel_scores(values, where, tolerance=tolerance, seed=subject.seed)}
        if labels is not None and labels[0] is not None:
            of_names = subject.source.names
            classes = [of_names[label] if of_names and isinstance(label, int) else label for label in labels]
            scores |= by_class(values, where, classes, tolerance=tolerance, seed=subject.seed)
        for label, of_class in scores.items():
            measures = {AUROC: of_class.auroc, AUPRO: of_class.aupro, F1: of_class.f1}
            measures |= {f"{POINT}, within {tolerance:g} pixels": of_class.near}
            if name == POSITIONS:
                measures |= {POINT: of_class.pointing, IMAGE_AUROC: of_class.image_auroc}
            rows += [
                Row(name, f"{measure}, {label}" if label else measure, "", estimate)
                for measure, estimate in measures.items()
                if estimate.n
            ]
    return rows


def of_positions(study: Subject, masks: Any, category: Any, tolerance: float) -> Result:
    """Return how well the values of a head at every position tell masks."""
    if masks is None:
        raise ValueError(
            "a head that decides at every position is measured by true masks: give masks=, of the size of the input, "
            "zeros where there is nothing"
        )
    subject = copy.copy(study)
    subject._forget()
    regions, boxes = regions_of(len(subject.source), masks)
    pixels = defaultdict[Any, list[Any]](list)
    for x, _, rows in subject.batches("localisation"):
        size = tuple(x.shape[2:])
        values = torch.from_numpy(values_of_positions(subject.net, x, category))
        pixels[POSITIONS].append(heat(values, size).astype(np.float32))
        pixels["masks"].append(masks_of(regions, boxes, rows, size))
        pixels["rows"] += rows
    measured = rows_of_pixels(subject, pixels, [POSITIONS], tolerance)
    return subject.result("localisation", "do the values of every position tell what lies inside of masks?", measured)


def values_of_positions(net: PCASVMNet, x: Tensor, category: Any = None) -> np.ndarray:
    """Return what tells defects at every position: anomalies, or by how much a class is ahead, shape (N, h, w).

    Args:
        net: the network.
        x: images, shape (N, ...).
        category: the class; None: any but the background.

    Raises:
        ValueError: there is no such class, or none is the background's.
    """
    if tells_anomalies(net.head):
        return net.anomaly_map(x)
    classes = [] if net.head.classes_ is None else net.head.classes_.tolist()
    wanted = [name for name in classes if name not in BACKGROUNDS] if category is None else [category]
    if not wanted or not set(wanted) <= set(classes) or len(wanted) == len(classes):
        raise ValueError(
            f"the head's classes are {classes}, none of which is called 0 or 'background': name the class that the "
            "masks are of, category="
            if category is None
            else f"there is no class {category!r}: the head's classes are {classes}"
        )
    with evaluating(net), torch.no_grad():
        margins = net(x).margins
    assert margins is not None
    # Only the difference between classes is comparable between positions.
    of_wanted = [classes.index(name) for name in wanted]
    others = [number for number in range(len(classes)) if number not in of_wanted]
    return (margins[:, of_wanted].amax(1) - margins[:, others].amax(1)).cpu().numpy()
