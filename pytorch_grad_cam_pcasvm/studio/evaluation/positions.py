"""Positions: how well a head that decides at every position, or a map, tells the inside of true masks or boxes."""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from pytorch_grad_cam_pcasvm.head.anomalies import tells_anomalies
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation.pixels import (
    RATE,
    FoundFaults,
    by_class,
    find_faults,
    measure_image_auroc,
    pixel_scores,
    pointing,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.result import Estimate, Result, Row, in_words
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import BLIND
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, heat
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import Steps

POINT = "pointing game"
AUROC, AUPRO, F1, IMAGE_AUROC = "pixel AUROC", "AUPRO to 30 % of false positives", "best F1", "image AUROC"
DECISION = "the decision"  # of a head that decides about whole images
POSITIONS = "every position"  # of a head that decides there
CENTRE = "the centre of the image"
ABOUT = ", asked about "  # between a method and a question other than that of the study
BACKGROUNDS = (0, "0", "background")  # names of the class outside of masks


_SENTENCES = {
    "scores": "{measures} (1: all are told from the others; by chance 0.5, AUPRO 0.15).",
    "threshold": "By the threshold of the model, {threshold:.4g}, {missed} of {faulty} photos with a fault pass, and "
    "{alarms} of {good} good ones fail.",
    "place": "{maps} find the marked place in {share:.0%} of the images that have one: the strongest evidence is on "
    "it, or at most {pixels} pixels beside it, as the network sees them.{controls}{others}",
}
_CLAUSES = {  # of a sentence about a place
    "maps": "The maps of {method}",
    "values": "The values of every position",
    "control": "{control} does so in {share:.0%}",
    "controls": " To compare, {clauses}.",
    "other": "of {question}: {share:.0%}",
    "others": " Maps {clauses}.",
}


def describe_localisation(result: Result) -> list[str]:
    """Return the results of localisation in sentences: how well faults are told, and how often maps find their place.

    Args:
        result: of localisation; without masks there is nothing to say.
    """
    near = {
        row.method: (row.estimate.mean, distance[1])
        for row in result.rows
        if (distance := re.fullmatch(rf"{POINT}, within (\S+) pixels", row.measure))
    }
    shares = {in_words(name): near[name][0] for name in (BLIND, CENTRE) if name in near}
    if (chance := result.settings.get("chance")) is not None:
        shares["a place at random"] = chance
    controls = [_CLAUSES["control"].format(control=name, share=share) for name, share in shares.items()]
    sentences = []
    for method, (share, pixels) in near.items():
        if method in (BLIND, CENTRE) or ABOUT in method:
            continue
        questions = [
            _CLAUSES["other"].format(question=name.removeprefix(method + ABOUT), share=other)
            for name, (other, _) in near.items()
            if name.startswith(method + ABOUT)
        ]
        sentences.append(_SENTENCES["place"].format(
            maps=_CLAUSES["values" if method == POSITIONS else "maps"].format(method=method),
            share=share, pixels=pixels,
            controls=_list_clauses("controls", controls, " and "), others=_list_clauses("others", questions, ", "),
        ))  # fmt: skip
    return [*_describe_scores(result), *(result.settings.get("alarms") or ()), *sentences]


def _list_clauses(sentence: str, clauses: Sequence[str], between: str) -> str:
    """Return a sentence that lists clauses; empty if there are none."""
    return _CLAUSES[sentence].format(clauses=between.join(clauses)) if clauses else ""


def _describe_scores(result: Result) -> list[str]:
    """Return in a sentence how well the values of every position tell photos and pixels with a fault."""
    means = {row.measure: row.estimate.mean for row in result.rows if row.method == POSITIONS}
    words = ", ".join(f"{measure} {means[measure]:.3f}" for measure in (IMAGE_AUROC, AUROC, AUPRO) if measure in means)
    return [_SENTENCES["scores"].format(measures=words[0].upper() + words[1:])] if words else []


class PixelValues:
    """What is known of the pixels of images, as these come: the values of maps, and true masks."""

    def __init__(self) -> None:
        self._masks, self._numbers = list[np.ndarray](), list[int]()
        self._values = defaultdict[str, list[np.ndarray]](list)
        self._decisions = list[np.ndarray]()
        self.alarms = dict[str, str]()  # what is found at a rate of false alarms, in words
        self._scores = list[np.ndarray]()  # of photos

    def add(self, masks: np.ndarray, numbers: Sequence[int], maps: Mapping[str, Any]) -> None:
        """Add some images.

        Args:
            masks: shape (N, H, W).
            numbers: their numbers in the data set.
            maps: by name, tensors (N, h, w), or maps of one target each.
        """
        self._masks.append(masks)
        self._numbers += numbers
        for name, values in maps.items():
            self._values[name].append(heat(values, masks.shape[1:]).astype(np.float32))

    def decide(self, evidence: np.ndarray | None) -> None:
        """Add the evidence for any fault that the decisions about some images have, (N,); None: there is none."""
        if evidence is not None:
            self._decisions.append(evidence)

    def score(self, scores: np.ndarray) -> None:
        """Add how anomalous some images are, (N,)."""
        self._scores.append(scores)

    def tell_threshold(self, threshold: float | None) -> list[str]:
        """Return in a sentence how many good photos fail by a head's own threshold, and how many with a fault pass."""
        if threshold is None or not self._scores:
            return []
        masks, fails = np.concatenate(self._masks), np.concatenate(self._scores) > threshold
        faulty = masks.reshape(len(masks), -1).any(1)
        counts = {"missed": ~fails & faulty, "faulty": faulty, "alarms": fails & ~faulty, "good": ~faulty}
        numbers = {name: int(photos.sum()) for name, photos in counts.items()}
        return [_SENTENCES["threshold"].format(threshold=threshold, **numbers)]

    def measure_chance(self, tolerance: float) -> float | None:
        """Return the mean share of the places that are at most so many pixels away from the mask of their image."""
        masked = [mask for mask in np.concatenate(self._masks) if mask.any()]
        if not masked:
            return None
        return float(np.mean([(ndimage.distance_transform_edt(~mask) <= tolerance).mean() for mask in masked]))

    def rows(self, subject: Subject, tolerance: float, rate: float) -> list[Row]:
        """Return how well the values of every pixel tell masks, of all images and of each class.

        Args:
            subject: what is measured.
            tolerance: of the second pointing game.
            rate: of false alarms.
        """
        masks, labels = np.concatenate(self._masks), subject.source.labels(self._numbers)
        if masks.all():
            subject.missing["pixels"] = "all lie inside of masks"
            return []
        rows = self._measure_decisions(masks, rate)
        options: Any = {"tolerance": tolerance, "rate": rate, "seed": subject.seed}
        for name, parts in self._values.items():
            values = np.concatenate(parts)
            scores = {"": pixel_scores(values, masks, **options)}
            if labels is not None and labels[0] is not None:
                of_names = subject.source.names
                classes = [of_names[label] if of_names and isinstance(label, int) else label for label in labels]
                scores |= by_class(values, masks, classes, **options)
            for label, of_class in scores.items():
                measures = {AUROC: of_class.auroc, AUPRO: of_class.aupro, F1: of_class.f1}
                measures |= {f"{POINT}, within {tolerance:g} pixels": of_class.near}
                if name == POSITIONS:
                    measures |= {POINT: of_class.pointing, IMAGE_AUROC: of_class.image_auroc}
                    measures |= self._measure_alarms(of_class.found, label)
                rows += [
                    Row(name, f"{measure}, {label}" if label else measure, "", estimate)
                    for measure, estimate in measures.items()
                    if estimate.n
                ]
        return rows

    def _measure_decisions(self, masks: np.ndarray, rate: float) -> list[Row]:
        """Return how well decisions tell images with a mask from the others."""
        masked = np.asarray(masks.reshape(len(masks), -1).any(1))
        if not self._decisions or masked.all() or not masked.any():
            return []
        evidence = np.concatenate(self._decisions)
        # Of a decision all pixels of a photo have the same evidence.
        faults = find_faults(evidence[:, None], masked[:, None], rate)
        measures = {IMAGE_AUROC: measure_image_auroc(evidence, masked)} | self._measure_alarms(
            faults, "", photos_only=True
        )
        return [Row(DECISION, measure, "", estimate) for measure, estimate in measures.items()]

    def _measure_alarms(
        self, faults: FoundFaults | None, label: str, *, photos_only: bool = False
    ) -> dict[str, Estimate]:
        """Return the share of faults found at the rate of false alarms, by measure, and note it in words."""
        if faults is None:
            return {}
        at = f" at 1 in {1 / faults.rate:.3g} false alarms"
        photos = {f"photos found{at}": faults.photos}
        if photos_only:
            self.alarms[label] = faults.describe_photos()
            return photos
        self.alarms[label] = faults.describe()
        sizes = {f"faults found{at}, {size}": share for size, share in faults.by_size.items()}
        return {f"faults found{at}": faults.faults} | sizes | photos

    def list_sentences(self) -> list[str]:
        """Return a sentence for each class: the faults found at the rate of false alarms."""
        return [
            f"{label}: {words}." if label else f"{words[0].upper()}{words[1:]}." for label, words in self.alarms.items()
        ]

    def pointing(self, tolerance: float) -> list[Row]:
        """Return how often the largest value of each map is at most so many pixels away from a mask."""
        masks, measure = np.concatenate(self._masks), f"{POINT}, within {tolerance:g} pixels"
        near = {
            name: [
                pointing(values, mask, tolerance)[1]
                for values, mask in zip(np.concatenate(parts), masks, strict=True)
                if mask.any()
            ]
            for name, parts in self._values.items()
        }
        return [
            Row(name, measure, "", Estimate.of(shares, bounds=(0, 1)))
            for name, shares in near.items()
            if not masks.all()
        ]


def measure_positions(study: Subject, masks: Any, category: Any, tolerance: float, rate: float = RATE) -> Steps:
    """Measure how well the values of a head at every position tell masks."""
    if masks is None:
        raise ValueError(
            "a head that decides at every position is measured by true masks: give masks=, of the size of the input, "
            "zeros where there is nothing"
        )
    subject = copy.copy(study)
    subject._forget()
    regions = Regions.of(len(subject.source), masks)
    regions.leave_out(subject)
    pixels = PixelValues()
    question = "do the values of every position tell what lies inside of masks?"
    anomalies = tells_anomalies(subject.net.head)
    yield None
    for x, _, rows in subject.batches("localisation", looks=subject.minutes is not None):
        size = tuple(x.shape[2:])
        values = torch.from_numpy(np.asarray(values_of_positions(subject.net, x, category, subject.normal)))
        scores = values.flatten(1).amax(1).numpy()
        cells = subject.net.feature_source(x)[1].cells
        if cells is not None:
            values = cells.spread(values.unsqueeze(1), size)[:, 0]
        if anomalies:
            pixels.score(scores)
        pixels.add(regions.draw(rows, size), rows, {POSITIONS: values})

        def look() -> Result:
            rows = pixels.rows(subject, tolerance, rate)
            alarms = [
                *pixels.list_sentences(),
                *pixels.tell_threshold(subject.net.head.threshold if anomalies else None),
            ]
            chance = pixels.measure_chance(tolerance)
            return subject.result("localisation", question, rows, alarms=alarms, chance=chance)

        yield subject.step(look, lambda _: False)


def measure_decisions(net: PCASVMNet, x: Tensor, normal: Any) -> np.ndarray | None:
    """Return by how much any fault is ahead of the normal class in the decisions about images, (N,).

    Args:
        net: the network, whose head decides about whole images.
        x: images, shape (N, ...).
        normal: the class that is an absence; None: there is none.

    Returns:
        The evidence; None: the head has no normal class, or no margins.
    """
    classes = [] if net.head.classes_ is None else net.head.classes_.tolist()
    if normal is None or normal not in classes:
        return None
    return _measure_leads(net, x, [number for number, name in enumerate(classes) if name != normal])


def values_of_positions(net: PCASVMNet, x: Tensor, category: Any = None, normal: Any = None) -> np.ndarray:
    """Return the evidence for defects at every position: anomalies, or the lead of a class, shape (N, h, w).

    Args:
        net: the network.
        x: images, shape (N, ...).
        category: the class; None: any but the background.
        normal: what the background is called, if not 0, False or ``"background"``.

    Raises:
        ValueError: there is no such class, or none is the background's.
    """
    if tells_anomalies(net.head):
        return net.anomaly_map(x)
    classes = [] if net.head.classes_ is None else net.head.classes_.tolist()
    wanted = [name for name in classes if name not in BACKGROUNDS and name != normal]
    wanted = wanted if category is None else [category]
    if not wanted or not set(wanted) <= set(classes) or len(wanted) == len(classes):
        raise ValueError(
            f"the head's classes are {classes}, none of which is called 0 or 'background': name the class that is an "
            "absence, normal=, or the one that the masks are of, category="
            if category is None
            else f"there is no class {category!r}: the head's classes are {classes}"
        )
    margins = _measure_leads(net, x, [classes.index(name) for name in wanted])
    assert margins is not None
    return margins


def _measure_leads(net: PCASVMNet, x: Tensor, wanted: Sequence[int]) -> np.ndarray | None:
    """Return by how much some classes are ahead of all others, (N, *grid); None: the head has no margins."""
    with evaluation_mode(net), torch.no_grad():
        margins = net(x).margins
    if margins is None:
        return None
    # Only the difference between classes is comparable between positions.
    rivals = [number for number in range(margins.shape[1]) if number not in wanted]
    return (margins[:, wanted].amax(1) - margins[:, rivals].amax(1)).cpu().numpy()


OF_VOLUMES = "only pictures can be put side by side, or have boxes: give masks of the input's size"


@dataclass(frozen=True)
class Regions:
    """True masks, or boxes, one for each image of a data set.

    Attributes:
        values: masks, shape (R, H, W), or boxes, (R, 4).
        are_boxes: whether they are boxes.
        unknown: the numbers of images of which nobody knows them.
    """

    values: np.ndarray
    are_boxes: bool
    unknown: Sequence[int] = ()

    @classmethod
    def of(cls, count: int, masks: Any) -> "Regions":
        """Return the regions of so many images, as they were passed.

        Raises:
            ValueError: they are neither masks nor boxes, or not of each image.
        """
        kinds = "masks must be an array of shape (R, H, W), nonzero inside, or boxes of shape (R, 4)"
        masks, unknown = _fill_unknown(masks)
        try:
            values = np.asarray(masks.cpu() if isinstance(masks, Tensor) else masks)
        except ValueError as error:
            raise ValueError(f"{kinds}; these differ in size: bring them to the size of the input") from error
        if values.dtype.kind not in "biuf" or not np.isfinite(values).all():
            raise ValueError(f"{kinds}; these are no finite numbers: use zeros for an image without an object")
        if len(values) != count:
            raise ValueError(f"{len(values)} masks for {count} images: give one for each, in order")
        are_boxes = values.ndim == 2 and values.shape[1] == 4
        if are_boxes:
            _check_boxes(values)
        return cls(values, are_boxes, unknown)

    def leave_out(self, subject: Subject) -> None:
        """Take the images of which nobody knows what is on them from the subject's, and say so."""
        rows = subject.rows[~np.isin(subject.rows, self.unknown)]
        if left_out := len(subject.rows) - len(rows):
            subject.missing[f"{left_out} of {len(subject.rows)} images"] = (
                "they have no mask: what is on them is unknown"
            )
        subject.rows = rows

    def is_empty(self, row: int) -> bool:
        """Return whether there is nothing on an image."""
        own = self.values[row]
        return not ((own[2:] > own[:2]).all() if self.are_boxes else own.any())

    def draw(self, rows: Sequence[int], size: tuple[int, ...]) -> np.ndarray:
        """Return the masks of some images, (N, H, W).

        Raises:
            ValueError: masks have another size, or boxes lie beyond it.
        """
        if not self.are_boxes and self.values.shape[1:] != size:
            raise ValueError(
                f"masks of {self.values.shape[1:]} for images of {size}: bring them to the size of the input"
            )
        if not self.are_boxes:
            return self.values[rows].astype(bool)
        if len(size) != 2:
            raise ValueError(OF_VOLUMES)
        right, bottom = self.values[:, 2:].max(0)
        if right > size[1] or bottom > size[0]:
            raise ValueError(
                f"boxes reach x = {right:g} and y = {bottom:g}, beyond the input of {size[1]} x {size[0]} pixels: "
                "scale them as the transform scales the images"
            )
        y, x = np.ogrid[: size[0], : size[1]]
        x0, y0, x1, y1 = self.values[rows].astype(int).T[..., None, None]
        return (x0 <= x) & (x < x1) & (y0 <= y) & (y < y1)


def _fill_unknown(masks: Any) -> tuple[Any, list[int]]:
    """Return masks with zeros in place of None, and the numbers of these, if any is known."""
    known = [mask for mask in masks if mask is not None] if isinstance(masks, list | tuple) else []
    if not known or len(known) == len(masks):
        return masks, []
    unknown = [row for row, mask in enumerate(masks) if mask is None]
    return [np.zeros_like(known[0]) if mask is None else mask for mask in masks], unknown


def _check_boxes(boxes: np.ndarray) -> None:
    if 0 < boxes.max() <= 1:
        raise ValueError("boxes must be in pixels, but none goes beyond 1: multiply x by the width and y by the height")
    if (boxes < 0).any():
        raise ValueError("boxes must lie in the image, but some begin below 0: clip them")
    if (boxes[:, 2:] < boxes[:, :2]).any():
        raise ValueError("boxes must be x0, y0, x1, y1, from one corner to the other: are yours x, y, width, height?")
