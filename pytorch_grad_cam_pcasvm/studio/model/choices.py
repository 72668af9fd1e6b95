"""Choices: how many components, which settings of a classifier, and which threshold, by features that are left out.

Scaler and PCA are fitted within the folds, once each with the most components, of which the others are the first.
What is chosen is compared by AUROC; what is told of it comes from outer folds, in each of which it is chosen anew.
Of heads of patches, photos are left out, and score at all positions.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, combinations, product
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigh
from scipy.stats import rankdata
from sklearn.base import clone
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from sklearn.preprocessing import StandardScaler

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.studio.model.teaching import Read


@dataclass(frozen=True)
class Threshold:
    """Up to which score a photo is taken for a good one.

    Attributes:
        score: the largest score that passes.
        rate: of new good photos, at most this share fails, on average over sets of good photos.
        wanted: the share that was asked for, less than ``rate`` if there are too few photos.
        count: of different good photos, or of objects.
    """

    score: float
    rate: float
    wanted: float
    count: int

    @property
    def needed(self) -> int:
        """How many good photos, or objects, the share that was asked for needs."""
        return count_needed(self.wanted)


def choose_threshold(scores: Any, rate: float = 0.01, groups: Any = None) -> Threshold:
    """Return the threshold of n good scores: the ``ceil((n + 1)(1 - rate))``-th smallest, or the largest of too few.

    A new score that is exchangeable with these is above the k-th smallest of n with a probability of at most
    ``1 - k / (n + 1)`` (split conformal prediction). Scores of one object are not exchangeable with others: each object
    counts once, and its scores share that (Lee, Barber and Willett, 2023). The same file twice is such an object.

    Args:
        scores: of good photos, left out of what they were scored by, shape (N,).
        rate: the share of new good photos that may fail.
        groups: the number of the object of each; None: they are all different.

    Raises:
        ValueError: there are no scores, some are not finite, or the rate is no share above 0 and below 1.

    Example:
        >>> choose_threshold(range(1, 100)).score, choose_threshold(range(1, 41)).rate
        (99.0, 0.024390243902439025)
    """
    scores = np.asarray(scores, np.float64)
    if not scores.size or scores.ndim != 1 or not np.isfinite(scores).all():
        raise ValueError(
            "a threshold needs scores of good photos that were left out, (N,), none of them NaN or infinite, got "
            f"{scores.tolist()!r:.60}"
        )
    if not 0 < rate < 1:
        raise ValueError(f"rate={rate}: the share of good photos that may fail is above 0 and below 1, such as 0.01")
    own = np.arange(len(scores)) if groups is None else np.unique(groups, return_inverse=True)[1]
    sizes, order = np.bincount(own), np.argsort(scores, kind="stable")
    count = len(sizes)
    wanted = (count + 1) * (1 - Fraction(str(rate)))  # as it is typed, so that 0.01 of 100 is one
    if wanted > count:
        return Threshold(float(scores.max()), 1 / (count + 1), rate, count)
    common = math.lcm(*sizes.tolist())  # fractions of it are whole numbers
    least, reached = math.ceil(wanted * common), accumulate(common // size for size in sizes[own[order]].tolist())
    place = next(place for place, shares in enumerate(reached) if shares >= least)
    return Threshold(float(scores[order[place]]), rate, rate, count)


def count_needed(rate: float) -> int:
    """Return how many photos a rate needs at least: then not even the largest of their scores is beyond it."""
    return math.ceil((1 - Fraction(str(rate))) / Fraction(str(rate)))


COMPONENTS = 8, 16, 32, 64, 128
FEW = 10  # rows of a class, below which nothing is chosen
_FEW_GROUPS = 3  # of a class, below which inner folds have none
_FOLDS = 5
_MOST = 1000  # rows that are compared, in seconds
_ROUNDING = 1e-12  # of the largest variance: less is none

Fold = tuple[np.ndarray, np.ndarray]  # the numbers of the rows to fit on, and of those to test on


@dataclass(frozen=True)
class Candidate:
    """A number of components and settings of the classifier, and how good they are in cross-validation.

    Attributes:
        components: how many.
        settings: of the classifier, by name.
        score: the AUROC, mean over pairs of classes, then over folds; NaN: not known.
        error: its standard error, by how much folds differ.
    """

    components: int
    settings: Mapping[str, Any]
    score: float
    error: float


@dataclass(frozen=True)
class Choice:
    """What was chosen from what, and how good it is on rows that had no part in it.

    Attributes:
        chosen: the one of the candidates.
        candidates: those that were compared, the simplest first.
        score: the AUROC in outer folds, in each of which the choice was made anew; NaN: not known.
        error: its standard error.
        rows: the numbers of the rows that were compared, of large sets a part.
        folds: the outer folds of these rows, numbered from 0 on.
        predicted: for each of these rows its class, by what was fitted without its fold.
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    score: float
    error: float
    rows: np.ndarray
    folds: tuple[Fold, ...]
    predicted: np.ndarray

    def find(self, components: int) -> Candidate | None:
        """Return the best candidate of a number of components, or None."""
        return max((one for one in self.candidates if one.components == components),
                   key=lambda one: np.nan_to_num(one.score), default=None)  # fmt: skip


def choose_head(
    features: np.ndarray,
    labels: np.ndarray,
    classifier: Any,
    settings: Sequence[Mapping[str, Any]] = ({},),
    components: Sequence[int] = COMPONENTS,
    *,
    groups: np.ndarray | None = None,
    seed: int = 0,
) -> Choice:
    """Return the choice of a number of components and of settings, behind a scaler and a PCA.

    Of candidates within one standard error of the best it is the one of the fewest components, and of these the first
    settings.

    Args:
        features: shape (N, D).
        labels: the class of each row, shape (N,).
        classifier: an estimator, not fitted.
        settings: of it, the simplest first.
        components: numbers of components; those that the data do not allow are left out, unless there is only one.
        groups: the number of the object of each row, whose rows are in one fold; None: each is its own.
        seed: random seed of the part of a large set.

    Raises:
        ValueError: there are too few rows for any of it; see :func:`split_folds`.

    Example:
        >>> choice = choose_head(features, labels, SVC(), [{"C": 1.0}, {"C": 10.0}], [2, 4])
        >>> choice.chosen.components in (2, 4), len(choice.candidates)
        (True, 4)
    """
    rows = take_part(labels, groups, _MOST, seed)
    x = np.asarray(features, np.float64)[rows]
    names, numbers = np.unique(np.asarray(labels)[rows], return_inverse=True)
    own = None if groups is None else np.asarray(groups)[rows]
    outer = split_folds(numbers, own)
    several = len(settings) > 1 or len(components) > 1
    inner = [split_folds(numbers[fit], None if own is None else own[fit]) if several else [] for fit, _ in outer]
    if len(components) > 1:
        smallest = min(len(fit) for folds in inner for fit, _ in folds)
        components = allowed_components(components, smallest, x.shape[1])
    candidates = compare_candidates(x, numbers, outer, classifier, settings, components)
    scores, predicted = [], np.zeros(len(rows), int)
    for (fit, test), folds in zip(outer, inner, strict=True):
        chosen = candidates[0]
        if len(candidates) > 1:
            chosen = pick_simplest(compare_candidates(x[fit], numbers[fit], folds, classifier, settings, components))
        reduced, reduced_test = reduce_rows(x[fit], x[test], chosen.components)
        fitted = clone(classifier).set_params(**chosen.settings).fit(reduced, numbers[fit])
        predicted[test] = fitted.predict(reduced_test)
        scores.append(_measure_score(fitted, reduced_test, numbers[test], len(names)))
    mean, error = _average(np.array(scores))
    return Choice(pick_simplest(candidates), tuple(candidates), mean, error, rows, tuple(outer), names[predicted])


def allowed_components(components: Sequence[int], rows: int, features: int) -> list[int]:
    """Return the numbers of components that so many rows and features allow; at least one."""
    most = max(1, min(rows, features) - 1)
    return [count for count in components if count <= most] or [most]


def can_choose(labels: np.ndarray, groups: np.ndarray | None) -> bool:
    """Return whether every class has enough rows, of enough objects, to choose anything by them."""
    own = np.arange(len(labels)) if groups is None else groups
    return all(
        (labels == name).sum() >= FEW and len(np.unique(own[labels == name])) >= _FEW_GROUPS
        for name in np.unique(labels)
    )


def split_folds(labels: np.ndarray, groups: np.ndarray | None = None, most: int = _FOLDS) -> list[Fold]:
    """Return up to ``most`` folds with the same share of each class, none with rows of an object that others have, too.

    Raises:
        ValueError: a class has rows of one object only.
    """
    own = np.arange(len(labels)) if groups is None else groups
    count = min(most, *(len(np.unique(own[labels == name])) for name in np.unique(labels)))
    if count < 2:
        raise ValueError("a cross-validation needs two photos, or objects, of each class")
    splitter = StratifiedKFold if groups is None else StratifiedGroupKFold
    return list(splitter(count).split(labels, labels, groups))


def take_part(labels: np.ndarray, groups: np.ndarray | None, most: int, seed: int) -> np.ndarray:
    """Return the numbers of about so many rows, of small classes more than their share, of objects as a whole."""
    count = len(labels)
    if count <= most:
        return np.arange(count)
    own = np.arange(count) if groups is None else np.unique(groups, return_inverse=True)[1]
    order = np.argsort(np.random.default_rng(seed).permutation(own.max() + 1)[own], kind="stable")
    parts = []
    for name in np.unique(labels):
        of_class = order[labels[order] == name]
        parts.append(of_class[: max(round(len(of_class) * most / count), FEW * _FOLDS)])
    return np.sort(np.concatenate(parts))


def compare_candidates(
    features: np.ndarray,
    labels: np.ndarray,
    folds: Sequence[Fold],
    classifier: Any,
    settings: Sequence[Mapping[str, Any]],
    components: Sequence[int],
) -> list[Candidate]:
    """Return all candidates with their scores in cross-validation, the simplest first."""
    classes = len(np.unique(labels))
    scores = np.full((len(components), len(settings), len(folds)), np.nan)
    for place, (fit, test) in enumerate(folds):
        if len(np.unique(labels[fit])) < classes:  # all photos of a class are of one object, and left out
            continue
        reduced, reduced_test = reduce_rows(features[fit], features[test], max(components))
        for (b, count), (s, setting) in product(enumerate(components), enumerate(settings)):
            fitted = clone(classifier).set_params(**setting).fit(reduced[:, :count], labels[fit])
            scores[b, s, place] = _measure_score(fitted, reduced_test[:, :count], labels[test], classes)
    return [
        Candidate(count, setting, *_average(scores[b, s]))
        for (b, count), (s, setting) in product(enumerate(components), enumerate(settings))
    ]


def pick_simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the first candidate that is within one standard error of the best; if no score is known, the first."""
    scored = [one for one in candidates if not math.isnan(one.score)]
    if not scored:
        return candidates[0]
    best = max(scored, key=lambda one: one.score)
    return next(one for one in scored if one.score >= best.score - best.error)


def reduce_rows(rows: np.ndarray, test_rows: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return components of rows and of others, by a scaler and a PCA that are fitted on the rows alone.

    They are those of scikit-learn's ``StandardScaler`` and ``PCA(count, svd_solver="full")``, by the smaller of the two
    products of the rows with themselves, and the first of them those of a smaller count; there are no more than rows or
    features.
    """
    scaler = StandardScaler().fit(rows)
    z, z_others = scaler.transform(rows), scaler.transform(test_rows)
    centre = z.mean(0)
    z, z_others = z - centre, z_others - centre
    wide = z.shape[0] < z.shape[1]
    product_ = z @ z.T if wide else z.T @ z
    count = min(count, len(product_))
    values, vectors = eigh(product_, subset_by_index=(len(product_) - count, len(product_) - 1))
    values, axes = values[::-1], (z.T @ vectors if wide else vectors)[:, ::-1]
    if wide:
        axes = np.where(values > _ROUNDING * values[0], axes / np.sqrt(np.maximum(values, np.finfo(float).tiny)), 0.0)
    axes = axes * np.sign(axes[np.abs(axes).argmax(0), np.arange(count)])
    return z @ axes, z_others @ axes


def score_pairs(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve, the mean over pairs of classes (Hand and Till, 2001).

    Rows of a pair are ordered by the difference of the scores of its classes.

    Args:
        scores: of each class, shape (N, C).
        labels: the number of the class of each row, shape (N,).

    Returns:
        From 0 to 1, 0.5 by chance; NaN: there are rows of one class only.
    """
    areas = []
    for first, second in combinations(np.unique(labels), 2):
        of_pair = (labels == first) | (labels == second)
        is_first = labels[of_pair] == first
        ranks = rankdata(scores[of_pair, first] - scores[of_pair, second])
        count, rest = int(is_first.sum()), int((~is_first).sum())
        areas.append((ranks[is_first].sum() - count * (count + 1) / 2) / (count * rest))
    return float(np.mean(areas)) if areas else math.nan


def read_scores(fitted: Any, rows: np.ndarray, classes: int) -> np.ndarray:
    """Return a classifier's scores of each class, shape (N, C): decision values, or probabilities, or predictions."""
    fitted = _with_class_scores(fitted)
    for method in ("decision_function", "predict_proba"):
        if hasattr(fitted, method):
            scores = np.asarray(getattr(fitted, method)(rows))
            if scores.ndim == 1:
                scores = np.stack([-scores, scores], 1)
            if scores.shape[1] == classes:
                return scores
    return np.eye(classes)[np.asarray(fitted.predict(rows)).reshape(-1).astype(int)]


def _with_class_scores(fitted: Any) -> Any:
    """Return a classifier whose decision values are of classes, not of pairs: of three classes there are three, too."""
    settings = fitted.get_params() if hasattr(fitted, "get_params") else {}
    pairwise = [name for name, value in settings.items() if name.endswith("decision_function_shape") and value == "ovo"]
    return copy.deepcopy(fitted).set_params(**dict.fromkeys(pairwise, "ovr")) if pairwise else fitted


def _measure_score(fitted: Any, rows: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Return the score of a fitted classifier, NaN if it does not know all classes."""
    if len(getattr(fitted, "classes_", range(classes))) < classes:
        return math.nan
    return score_pairs(read_scores(fitted, rows, classes), labels)


def _average(scores: np.ndarray) -> tuple[float, float]:
    """Return the mean of the known scores of folds and its standard error."""
    scored = scores[~np.isnan(scores)]
    if not len(scored):
        return math.nan, math.nan
    return float(scored.mean()), float(scored.std(ddof=1) / math.sqrt(len(scored))) if len(scored) > 1 else 0.0


COMPONENTS_OF_PATCHES = 64, 128  # fewer keep what all patches have in common, and lose small things
_MOST_PATCHES = 5000  # patches that are compared
_FOLDS_OF_PATCHES = 3  # in which they are


def choose_candidate(
    rows: np.ndarray,
    labels: np.ndarray,
    photos: np.ndarray,
    classifier: Any,
    settings: Sequence[Mapping[str, Any]],
    components: Sequence[int],
) -> tuple[Candidate, list[Candidate]]:
    """Return the number of components and the settings of a head of patches, and all candidates.

    Patches of a photo are in one fold. At most 5,000 are compared, of whole photos.

    Args:
        rows: shape (R, D).
        labels: the class of each, shape (R,).
        photos: the number of its photo, or of the object, shape (R,).
        classifier: an estimator, not fitted.
        settings: of it, the simplest first.
        components: numbers of components; those that the data do not allow are left out.
    """
    part = take_part(labels, photos, _MOST_PATCHES, 0)
    x, numbers = rows[part].astype(np.float64), np.unique(labels[part], return_inverse=True)[1]
    folds = split_folds(numbers, photos[part], _FOLDS_OF_PATCHES)
    components = allowed_components(components, min(len(fit) for fit, _ in folds), x.shape[1])
    candidates = compare_candidates(x, numbers, folds, classifier, settings, components)
    return pick_simplest(candidates), candidates


def measure_evidence(head: Head, rows: torch.Tensor, normal: Any) -> torch.Tensor:
    """Return by how much any fault is ahead of the normal class, (R,), of rows of features (R, D)."""
    assert head.classes_ is not None
    position, labels = head.decision_position, head.classes_.tolist()
    assert position is not None
    margins = head.voting.margins(head.values_of(rows.double()).values[position])
    faults = [number for number, name in enumerate(labels) if name != normal]
    return margins[:, faults].amax(1) - margins[:, labels.index(normal)]


def score_left_out(
    read: Read, heads: Sequence[Head | None], folds: Sequence[Fold], normal: Any, keep: Callable[[int, Any], None]
) -> None:
    """Pass on the evidence for any fault at every position of each photo, by the head that was fitted without it.

    Args:
        read: yields the features of all photos.
        heads: of each fold; None: there is none.
        folds: the numbers of the photos to fit on, and of those left out.
        normal: the class of good photos.
        keep: takes the number of a photo and its evidence, shape (*grid).
    """
    fold_of = {photo: number for number, (_, test) in enumerate(folds) for photo in test.tolist()}
    for features, photos in read():
        for one, photo in zip(features, photos, strict=True):
            head = heads[fold_of[int(photo)]] if int(photo) in fold_of else None
            if head is not None:
                keep(int(photo), measure_evidence(head, one.flatten(1).T, normal).unflatten(0, one.shape[1:]))
