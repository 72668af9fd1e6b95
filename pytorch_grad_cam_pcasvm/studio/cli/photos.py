"""Photos that are left out of a fit: their scores by heads of patches, and of good ones a scale and a threshold."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold

from pytorch_grad_cam_pcasvm.head import Head, measure_anomaly, measure_reach
from pytorch_grad_cam_pcasvm.studio.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.training import TrainingFeatures
from pytorch_grad_cam_pcasvm.studio.model.choices import (
    Threshold,
    choose_threshold,
    count_needed,
    score_left_out,
    split_folds,
)

_MOST_PHOTOS = 500  # photos of which all pixels are compared


@dataclass
class Photos:
    """The photos that a head of patches is fitted on.

    Attributes:
        numbers: in the folder, of those that can be read, in order, (N,).
        labels: the class of each, (N,).
        objects: the number of the object of each photo of the folder; None: they all differ.
        normal: the class of good photos.
        folds: the numbers of the photos to fit on, and of those left out; empty: there are too few.
    """

    numbers: Any
    labels: Any
    objects: Any
    normal: Any
    folds: Sequence[Any]

    @classmethod
    def split(cls, numbers: Any, labels: Any, objects: Any, normal: Any) -> "Photos":
        """Return them with folds, having said if there are none."""
        try:
            parts = split_folds(labels, None if objects is None else objects[numbers])
        except ValueError:
            print("no cross-validation: it needs two photos of each class" + " and object" * (objects is not None))
            parts = []
        return cls(numbers, labels, objects, normal, [(numbers[fit], numbers[test]) for fit, test in parts])

    def index(self, numbers: Any) -> Any:
        """Return the places of photos among these, by their numbers in the folder."""
        return np.searchsorted(self.numbers, numbers)

    def number_labels(self) -> Any:
        """Return the labels as numbers from 0 on, (N,)."""
        return np.unique(self.labels, return_inverse=True)[1]

    def name_objects(self, numbers: Any) -> Any:
        """Return the numbers of the objects of photos."""
        return numbers if self.objects is None else self.objects[numbers]


@dataclass
class LeftOut:
    """What heads say of photos that they were fitted without.

    Attributes:
        photos: all of them.
        rate: of false alarms.
        masks: their masks and how these are resized, a :class:`.PatchOptions`; None: there are none.
        size: (H, W) of the network's input, of masks.
        evidence: of any fault, the largest of each photo, by its number.
    """

    photos: Photos
    rate: float
    masks: Any = None
    size: tuple[int, ...] = ()
    evidence: dict[int, float] = field(default_factory=dict)
    _maps: list[Any] = field(default_factory=list)
    _truths: list[Any] = field(default_factory=list)

    def score(self, read: Any, heads: Sequence[Any], spread: Any) -> None:
        """Ask the head of each fold about all positions of the photos that it was fitted without.

        Args:
            read: yields the features of all photos.
            heads: of each fold; None: there is none.
            spread: takes evidence, (1, 1, *grid), to the size of the network's input.
        """
        some = set(np.random.default_rng(0).permutation(self.photos.numbers)[:_MOST_PHOTOS].tolist())

        def keep(photo: int, evidence: Any) -> None:
            self.evidence[photo] = float(evidence.max())
            if self.masks is not None and photo in some:
                self._maps.append(spread(evidence[None, None], self.size)[0, 0].float().numpy())
                self._truths.append(self.masks.find_faults(photo, self.size))

        score_left_out(read, heads, self.photos.folds, self.photos.normal, keep)

    def tell(self, unit: str) -> dict[str, Any]:
        """Say how well photos are told, and pixels where there are masks; return it as a model's file holds it."""
        if not self.evidence:
            if self.photos.folds:
                print("no cross-validation: it needs patches of each class in two photos or more")
            return {}
        areas = self.measure_folds(self.evidence)
        words, score = "no fold has photos with faults and without", dict[str, Any](folds=len(self.photos.folds))
        if np.isfinite(areas).any():
            score |= {"image_auroc": float(np.nanmean(areas)), "error": measure_error(areas)}
            words = f"AUROC of photos {score['image_auroc']:.3f} \N{PLUS-MINUS SIGN} {score['error']:.3f}"
        faults = None
        truths = np.stack(self._truths) if self._truths else np.zeros(0, bool)
        if truths.any() and not truths.all():
            from pytorch_grad_cam_pcasvm.studio.evaluation import pixel_scores  # with all figures, which take a second

            scores = pixel_scores(np.stack(self._maps), truths, rate=self.rate)
            words += f", of pixels {scores.auroc.mean:.3f}, AUPRO {scores.aupro.mean:.3f}"
            score |= {"pixel_auroc": scores.auroc.mean, "aupro": scores.aupro.mean}
            faults = scores.found
        print(f"{len(self.photos.folds)}-fold cross-validation, by {unit}: {words}")
        if faults is not None:
            print(f"{faults.describe()}")
        return {"score": score}

    def measure_folds(self, evidence: Any) -> Any:
        """Return the AUROC of the photos of each fold, by the evidence for any fault; NaN: it has one kind only."""
        areas = []
        for _, test in self.photos.folds:
            faulty = self.photos.labels[self.photos.index(test)] != self.photos.normal
            has_scores = all(photo in evidence for photo in test.tolist()) and 0 < faulty.sum() < len(faulty)
            areas.append(roc_auc_score(faulty, [evidence[photo] for photo in test.tolist()]) if has_scores else np.nan)
        return np.array(areas)


def measure_error(values: Any) -> float:
    """Return the standard error of the mean of the known values."""
    finite = values[~np.isnan(values)]
    return float(finite.std(ddof=1) / np.sqrt(len(finite))) if len(finite) > 1 else float("nan")


def compare_areas(first: Any, second: Any) -> tuple[float, float]:
    """Return by how much the first areas of folds are larger than the second, and the standard error of that."""
    return float(np.nanmean(first - second)), measure_error(first - second)


RATE = 0.01  # of false alarms
_FOLDS = 5
_MOST_PATCHES = 5000  # patches of each fold that are asked
_ROWS = 2000  # that are asked at once


def split_left_out(training: TrainingFeatures, groups: Any, options: FitOptions) -> dict[int, int] | None:
    """Return the fold of each good photo, or object, by its number; None: there is one only, which is said.

    Args:
        training: the photos.
        groups: the number of the object of each photo of the folder, which are left out together; None: all differ.
        options: those of ``fit``.
    """
    own = _number_objects(training, groups)
    if len(set(own.tolist())) < 2:  # a bank's rows tell their scale themselves
        noun = "object" if options.groups else "photo"
        rate = options.rate or RATE
        print(
            f"no threshold: there is one good {noun} only; two promise at most 1 false alarm in 3, and "
            f"{count_needed(rate)} 1 in {1 / rate:g}"
        )
        return None
    return {number: fold for fold, (_, rows) in enumerate(split_good(own)) for number in own[rows].tolist()}


def _number_objects(training: TrainingFeatures, groups: Any) -> Any:
    """Return the number of the photo, or object, that each row is of."""
    photos = np.array(training.rows)
    return photos if groups is None else groups[photos]


def fit_left_out(
    pipeline: Any, training: TrainingFeatures, groups: Any, fold_of: Mapping[int, int], options: FitOptions
) -> list[Any]:
    """Return for each fold the head of the others, None if they are too few; none at all if all are, which is said."""
    own = np.array([fold_of[number] for number in _number_objects(training, groups).tolist()])
    count = options.components or 0
    rests = [np.flatnonzero(own != fold) for fold in sorted({*fold_of.values()})]
    heads = [_fit_others(pipeline, training.features.numpy()[rest]) for rest in rests]
    if all(head is None for head in heads):
        most = min(map(len, rests)) - 1
        print(
            f"no threshold: for it photos are left out in turn, and {count} components cannot be fitted on the others"
            + (f"; lower --components, to {most} or fewer" if count > most else "")
        )
        return []
    return heads


def keep_left_out(
    head: Any, heads: list[Any], fold_of: Mapping[int, int], training: TrainingFeatures, groups: Any,
    options: FitOptions,
) -> dict[int, float]:  # fmt: skip
    """Keep with a head the scale and the threshold of anomalies, from training photos that were left out.

    Returns:
        The score of each photo that was left out.

    Args:
        head: of good photos, or their patches.
        heads: of each fold, fitted on the others.
        fold_of: the fold of each photo, or object.
        training: the photos.
        groups: the number of the object of each photo of the folder; None: all differ.
        options: those of ``fit``.
    """
    if training.places.shape[1]:
        own = np.array([fold_of[number] for number in _number_objects(training, groups).tolist()])
        _keep_scale(head, training, heads, [np.flatnonzero(own == fold) for fold in range(len(heads))])
    scores = _score_photos(training, heads, fold_of, groups)
    threshold = choose_threshold(
        [*scores.values()], options.rate or RATE, None if groups is None else groups[[*scores]]
    )
    _keep_threshold(head, threshold, options)
    return scores


def split_good(groups: Any) -> list[tuple[Any, Any]]:
    """Return the folds of good photos, or of their patches: the numbers of rows to fit on, and of rows left out.

    Args:
        groups: the number of the object of each row, whose rows are left out together, of two or more objects.
    """
    return list(GroupKFold(min(_FOLDS, len(set(groups.tolist())))).split(groups, groups=groups))


def _fit_others(pipeline: Any, rows: Any) -> Any:
    """Return the head that is fitted on some of the rows; None: it cannot be."""
    try:
        return Head.of(clone(pipeline).fit(rows))
    except ValueError:  # too few, or all alike
        return None


def _keep_scale(head: Any, training: TrainingFeatures, heads: list[Any], folds: list[Any]) -> None:
    """Keep with a head where the colours of positions start and end, by positions that were left out."""
    drawn, values = np.random.default_rng(0), []
    for fitted, rows in zip(heads, folds, strict=True):
        some = drawn.permutation(rows)[:_MOST_PATCHES]
        if fitted is not None:
            values.append(_ask(fitted, training.features[some]))
    is_distance = head.decision_position is None or any(getattr(stage, "is_distance", False) for stage in head.stages)
    least, reach = measure_reach(np.concatenate(values), is_distance=is_distance)
    head.stages[0].facts = replace(head.stages[0].facts, least=least, reach=reach)


def _keep_threshold(head: Any, threshold: Any, options: FitOptions) -> None:
    """Keep with a head the largest score that passes, by photos that were left out, and say so."""
    head.training_set.preparation = (head.training_set.preparation or {}) | {"threshold": asdict(threshold)}
    things = "objects" if options.groups else "good photos"
    part = ", a fifth at a time" if threshold.count >= _FOLDS else ""
    tell_threshold(threshold, f"{things} that were left out{part}")


def _ask(head: Any, rows: Any) -> Any:
    """Return the anomalies of rows of features, shape (R,)."""
    return torch.cat([measure_anomaly(head, head.values_of(part.double())) for part in rows.split(_ROWS)]).numpy()


def _score_photos(
    training: TrainingFeatures, heads: list[Any], fold_of: Mapping[int, int], groups: Any
) -> dict[int, float]:
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


def tell_likeness(reached: Threshold | None) -> None:
    """Say by what photos are told that are unlike the training set; nothing where nothing tells them."""
    if reached is not None:
        print(
            f"explain says which photos are unlike these: what lies farther outside of all components than 1 in "
            f"{round(1 / reached.rate, 1):g} new ones like them, by {reached.count} photos that were left out"
        )


def tell_threshold(threshold: Threshold, left_out: str) -> None:
    """Say which score passes, how many good photos fail by that, and how many would do for the rate wanted."""
    parts = round(1 / threshold.rate, 1)
    more = ""
    if threshold.rate > threshold.wanted:
        things = left_out.partition(" that")[0]
        more = f"; for 1 in {1 / threshold.wanted:g}, {threshold.needed} {things} are needed"
    print(
        f"threshold {threshold.score:.4g}: photos above it fail, at most 1 in {parts:g} of new good ones, by the "
        f"scores of {threshold.count} {left_out}{more}"
    )
