"""Localisation: does the evidence for a class lie where the class is?"""

import contextlib
from collections import defaultdict
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.studio.evaluation.pixels import RATE, TOLERANCE
from pytorch_grad_cam_pcasvm.studio.evaluation.positions import (
    ABOUT,
    CENTRE,
    OF_VOLUMES,
    POINT,
    PixelValues,
    Regions,
    measure_decisions,
    measure_positions,
)
from pytorch_grad_cam_pcasvm.studio.evaluation.result import SAME, Estimate, Result, Row
from pytorch_grad_cam_pcasvm.studio.evaluation.rivals import BLIND, RANDOM, RIVALS, Rivals
from pytorch_grad_cam_pcasvm.studio.evaluation.subject import Subject, generator, heat
from pytorch_grad_cam_pcasvm.studio.evaluation.turns import Steps, measured_whole
from pytorch_grad_cam_pcasvm.targets import SVMTarget, default_decision

SHARE = "share of positive evidence"
CHANCE = "chance"
NONE, NOWHERE = "maps without positive evidence", "maps that point nowhere"
DECIDING = CHANCE, BLIND, RANDOM  # controls, whether to stop early
_PASTED = 0.36  # of the side: 13 % of the area


@measured_whole
def localisation(  # noqa: D417 - of the study its class tells
    study: Subject,
    *,
    tiles: int = 2,
    pasted: bool = False,
    masks: Any = None,
    rivals: Sequence[str] = RIVALS,
    category: Any = None,
    tolerance: float = TOLERANCE,
    rate: float = RATE,
) -> Steps:
    """Measure how much of the evidence for a class lies on the image of that class, or inside masks.

    Without masks, images of different classes, each classified correctly on its own, are put side by side: two of them
    (an input twice as wide, for networks whose features are pooled), or four, each at half its size (the input keeps
    its size); or, with ``pasted``, a small image is put somewhere into a larger one. The class of one tile is
    explained, and two measures are taken: the share of the positive evidence on that tile, and whether the largest
    value is on it (the pointing game, in which equal values share the point). Chance is a half, a quarter, or about an
    eighth, the share of the small image. With masks, the predicted class of each image is explained, and chance is the
    mask's share of the image. Of a head without classes, what the study explains is, such as how anomalous an image is.

    With masks, it is also measured how well the maps tell pixels inside of masks from all others, of all images: those
    with an empty mask, on which there is nothing, too. See :func:`pixel_scores` for the measures; of several classes,
    each is also measured by itself, with the images on which there is nothing. The pointing game with tolerance is also
    played by the maps of the true class, by those of the predicted one if there is a normal class, and by the centre of
    the image.

    A head that decides at every position, ``pool="dense"``, is measured by these alone: by its anomalies, or by the
    margin of a class at every position.

    Args:
        tiles: 2 or 4.
        pasted: paste an image of the explained class, at 0.36 of its size, into one of another class, instead of using
            tiles.
        masks: where the object is: boolean, shape (R, H, W), for every image of the data set in order, or boxes, shape
            (R, 4), of x0, y0, x1, y1 in pixels, x1 and y1 exclusive. In a list of these, None for an image of which
            nobody knows: it is left out.
        rivals: the controls to compare with, as for :func:`faithfulness`.
        category: of a head that decides at every position, the class that masks are of; None: any but that of the
            background, which is called 0, False or ``"background"``.
        tolerance: how many pixels away from a mask the largest value may be, in a second pointing game.
        rate: with masks, the share of images on which there is nothing that may raise a false alarm; see
            :class:`.PixelScores`.

    Returns:
        Both measures for each method: against chance, random maps, another scene's map, the blind map and a randomised
        head's map; and the share of maps without a measure: those without positive evidence, and for the pointing game,
        also flat maps. With masks also those of :func:`pixel_scores`.

    Raises:
        ValueError: there are no labels, only one class, or too few correctly classified images; ``pasted`` is used with
            masks; the network does not take the tiles; masks have another size; or boxes are not in pixels.

    Example:
        >>> result = evaluation.localisation(
        ...     net, (training_images, labels), ["layer2"], images=6, progress=False
        ... )
        >>> result.check
        'localisation'
    """  # noqa: DOC202, DOC402 - as a function it returns a result
    if pasted and masks is not None:
        raise ValueError("pasted makes its own masks: leave masks out")
    if study.net.is_dense:
        yield from measure_positions(study, masks, category, tolerance, rate)
        return
    subject = _begin_subject(study, tiles, masks)
    on_nothing = [] if masks is None else _without_masks(subject, masks)
    pixels, answers = PixelValues(), PixelValues()
    against = Rivals(subject, rivals)
    measured = defaultdict[Any, list[np.ndarray]](list)  # by method, measure and rival
    chances: list[np.ndarray] = []

    def collect_result() -> Result:
        if not chances:
            raise ValueError("there is nothing to find: every mask is empty")
        chance, numbers = np.concatenate(chances), {key: np.concatenate(parts) for key, parts in measured.items()}
        rows = _make_rows(subject, against, numbers, chance)
        if masks is not None:
            rows += pixels.rows(subject, tolerance, rate) + answers.pointing(tolerance)
        return subject.result(
            "localisation",
            "does the evidence for a class lie on the image of that class?" + subject.without_normal
            if masks is None
            else "does the evidence lie inside of the masks?",
            rows,
            scenes=len(chance),
            tiles=tiles if masks is None and not pasted else None,
            pasted=pasted,
            chance=float(chance.mean()),
            alarms=None if masks is None else pixels.list_sentences(),
        )

    _refuse_nothing_to_find(subject, masks)
    yield None
    if masks is None:
        waiting = yield from _classified(subject)
        scenes = _tiled(subject, waiting, 0 if pasted else tiles)
    else:
        scenes = _masked(subject, masks)
    for x, targets, where, rows_of in scenes:
        size = x.shape[2:]
        chances.append(where.reshape(len(where), -1).mean(1))
        shared = {name: heat(maps, size) for name, maps in against.next(x, targets, rows_of).items()}
        for method in subject.named:
            maps = against.of(method)
            for source, values in (
                {name: heat(source_maps, size) for name, source_maps in maps.items()} | shared
            ).items():
                measured[method, SHARE, source].append(_shares(values, where))
                measured[method, POINT, source].append(_points(values, where))
            subject.add(method, -measured[method, SHARE, ""][-1], rows_of, x, maps[""])
        if masks is not None:
            own_maps = {method: against.of(method)[""] for method in subject.named}
            _add_pixels(subject, x, targets, where, rows_of, own_maps, pixels, answers)
            yield from _add_nothing(subject, on_nothing, pixels)
        yield subject.step(collect_result, lambda row: masks is None and bool(row.verdict) and row.against in DECIDING)


def _begin_subject(study: Subject, tiles: int, masks: Any) -> Subject:
    """Return the subject whose decisions are localised.

    Raises:
        ValueError: there is no such number of tiles, or the head has no classes, and there are no masks.
    """
    if tiles not in (2, 4):
        raise ValueError(f"tiles must be 2 or 4, got {tiles!r}")
    has_classes = study.net.head.classes_ is not None
    if not has_classes and masks is None:
        way = "measure faithfulness instead, or give masks="
        raise ValueError(f"localisation explains classes, and this head has none: {way}")
    return study.fresh(default_decision(study.net.head, study.normal) if has_classes else None)


def _add_pixels(
    subject: Subject, x: Tensor, targets: Any, where: np.ndarray, rows_of: Any, own_maps: Any, pixels: PixelValues,
    answers: PixelValues,
) -> None:  # fmt: skip
    """Add the maps of scenes with masks to the numbers at pixels: of their own classes, and of other ones."""
    pixels.add(where, rows_of, own_maps | {BLIND: subject.blind(x)})
    pixels.decide(measure_decisions(subject.net, x, subject.normal))
    other_maps = _explain_other_classes(subject, x, targets, rows_of, own_maps)
    answers.add(where, rows_of, other_maps | {CENTRE: _centre(x)})


def _make_rows(
    subject: Subject, against: Rivals, numbers_of: Mapping[Any, np.ndarray], chance: np.ndarray
) -> list[Row]:
    """Return the rows of both measures.

    Args:
        subject: what is measured.
        against: the controls.
        numbers_of: by method, measure and source, of each scene.
        chance: of each scene.
    """
    rows = []
    # Of tiles, chance is the same everywhere; that of masks may be anything.
    beyond = (-chance[0], 1 - chance[0]) if np.ptp(chance) == 0 else (-1, 1)
    for method in subject.named:
        for measure, without in ((SHARE, NONE), (POINT, NOWHERE)):
            own = numbers_of[method, measure, ""]
            rows.append(Row(method, measure, "", Estimate.of(own, bounds=(0, 1))))
            rows.append(Row(method, measure, CHANCE, Estimate.of(own - chance, bounds=beyond), 0.0))
            theirs = {rival: numbers_of[method, measure, rival] for rival in against.names}
            theirs |= {rival: numbers_of[rival, measure, ""] for rival in against.methods if rival != method}
            rows += [
                Row(method, measure, rival, Estimate.of(own - of_rival, bounds=(-1, 1)), 0.0)
                for rival, of_rival in theirs.items()
            ]
            rows.append(Row(method, without, "", Estimate.of(np.isnan(own))))
    rows += [
        Row(BLIND, measure, "", Estimate.of(numbers_of[method, measure, BLIND], bounds=(0, 1)))
        for measure in (SHARE, POINT)
    ]
    return rows


def _explain_other_classes(
    subject: Subject, x: Tensor, targets: Sequence[Any], rows: Sequence[int], own: Mapping[str, list[SignedMaps]]
) -> dict[str, list[SignedMaps]]:
    """Return the maps of the true class, and of the predicted one unless it is explained anyway, by method.

    Args:
        subject: what is measured.
        x: images, shape (N, ...).
        targets: what is explained in each.
        rows: of the images.
        own: the maps of these targets, by method.
    """
    questions = {} if subject.normal is None else {"the predicted class": subject.fresh(SVMTarget()).targets(x)}
    labels = subject.source.labels(rows) if subject.net.head.classes_ is not None else None
    with contextlib.suppress(ValueError):  # labels that are no classes of the head
        questions |= {"the true class": [SVMTarget(label) for label in _translate_labels(subject, labels or [None])]}
    maps = {}
    for question, asked in questions.items():
        differ = [n for n, (target, usual) in enumerate(zip(asked, targets, strict=True)) if target != usual]
        for method in subject.named:
            of_method = list(own[method])
            other_maps = subject.explained(method, x[differ], [asked[n] for n in differ]) if differ else []
            for n, image_map in zip(differ, other_maps, strict=True):
                of_method[n] = image_map
            maps[f"{method}{ABOUT}{question}"] = of_method
    return maps


def _centre(x: Tensor) -> Tensor:
    """Return maps (N, H, W) that are largest in the centre of each image, whatever is in it."""
    axes = torch.meshgrid(*(torch.linspace(-1, 1, side) for side in x.shape[2:]), indexing="ij")
    return -sum(axis.square() for axis in axes).expand(len(x), *x.shape[2:])  # type: ignore[union-attr]


def _add_nothing(subject: Subject, rows: list[int], pixels: PixelValues) -> Steps:
    """Measure the pixels of images on which there is nothing: all at the end, or as many as there are of others.

    Args:
        subject: what is measured; so many of its items are done.
        rows: of these images.
        pixels: where the pixels go.

    Yields:
        Nothing, after each batch.
    """
    share = subject.done / subject.total
    due = len(rows) if share == 1 else round(share * len(rows)) if subject.minutes is not None else 0
    begun, subject.nothing = subject.nothing, max(due, subject.nothing)
    some = rows[begun:due]
    for part in subject.parts(some, "images on which there is nothing", "image") if some else ():
        x, _ = subject.read(part)
        targets = subject.targets(x)
        own_maps = {method: subject.explained(method, x, targets) for method in subject.named}
        pixels.add(np.zeros((len(x), *x.shape[2:]), bool), part, own_maps | {BLIND: subject.blind(x)})
        pixels.decide(measure_decisions(subject.net, x, subject.normal))
        yield None


def _refuse_nothing_to_find(subject: Subject, masks: Any) -> None:
    """Refuse masks that are all empty, and without masks fewer than two classes."""
    if masks is None:
        _refuse_few_classes(subject)
    elif not len(subject.rows):
        raise ValueError("there is nothing to find: every mask is empty")


def _refuse_few_classes(subject: Subject) -> None:
    """Refuse images of fewer than two classes, where the data set tells labels without reading them."""
    labels = subject.source.labels(subject.rows.tolist())
    if labels is not None:
        _check_classes(set(_translate_labels(subject, labels)))


def _check_classes(present: Collection[Any]) -> None:
    if len(present) < 2:
        raise ValueError(f"images of {len(present)} class cannot be put beside another class: give several classes")


def _classified(subject: Subject) -> Generator[None, None, dict[Any, list[int]]]:
    """Return the rows of the images that are classified correctly, by class."""
    classes = subject.net.head.classes_
    assert classes is not None
    waiting: dict[Any, list[int]] = {label: [] for label in classes.tolist()}
    present: set[Any] = set()
    for x, labels, rows in subject.batches("localisation: which images are classified correctly?"):
        if x.dim() != 4:
            raise ValueError(OF_VOLUMES)
        true_labels = _translate_labels(subject, labels)
        present |= set(true_labels)
        for row, label, predicted in zip(rows, true_labels, subject.predicted(x), strict=True):
            if label == predicted:
                waiting[label].append(row)
        yield None
    _check_classes(present)
    return waiting


def _tiled(subject: Subject, waiting: Mapping[Any, list[int]], tiles: int) -> Any:
    """Yield scenes (N, ...), the target explained in each, where it is, (N, H, W), and its row; 0 tiles: pasted.

    Args:
        subject: what is measured.
        waiting: rows of images, by class.
        tiles: of each scene.

    Raises:
        ValueError: there are too few images.
    """
    random = generator(subject.seed, 2, 0)
    scenes = []
    available = {label: rows for label, rows in waiting.items() if rows}
    while chosen := _chosen(
        {label: len(rows) for label, rows in available.items()}, tiles or 2, random, subject.normal
    ):
        places = random.permutation(tiles) if tiles else random.random(2)  # which is in each tile, or where it is
        scenes.append(([available[label].pop() for label in chosen], chosen[0], places))
    if not scenes:
        raise ValueError("too few images of different classes are classified correctly to be put side by side")
    for number, part in enumerate(subject.parts(scenes, "localisation", "scene", looks=True)):
        pictures = [subject.read(rows)[0] for rows, _, _ in part]
        targets = [SVMTarget(label) for _, label, _ in part]
        if tiles:
            stacked = torch.stack([
                _scene([x[n] for n in places], tiles) for x, (_, _, places) in zip(pictures, part, strict=True)
            ])
            where = _tile_masks(stacked.shape[2:], tiles, [int(np.argmin(places)) for _, _, places in part])
        else:
            pasted = [_pasted(x[0], x[1], places) for x, (_, _, places) in zip(pictures, part, strict=True)]
            stacked, where = torch.stack([scene for scene, _ in pasted]), np.stack([mask for _, mask in pasted])
        if tiles and number == 0:
            _check_size(subject.net, stacked, tiles)
        yield stacked, targets, where, [rows[0] for rows, _, _ in part]


def _chosen(waiting: dict[Any, int], tiles: int, random: np.random.Generator, normal: Any) -> list[Any]:
    """Return the classes of a scene, the explained one first; none where too few images are waiting.

    They are those with most images. Which of them is explained is drawn, so that maps that lean to one class do not
    pass; it is never the normal one. With fewer classes than tiles the others come again.
    """
    order = sorted((label for label in waiting if waiting[label]), key=lambda label: -waiting[label])[:tiles]
    if len(order) < min(tiles, len(waiting)) or len(order) < 2:
        return []
    for first in random.permutation(len(order)).tolist():
        if order[first] == normal:
            continue
        rest = order[:first] + order[first + 1 :]
        chosen = [order[first], *(rest[n % len(rest)] for n in range(tiles - 1))]
        if all(waiting[label] >= chosen.count(label) for label in chosen):
            return chosen
    return []


def _translate_labels(subject: Subject, labels: Sequence[Any]) -> list[Any]:
    """Return labels in the head's form: classes, or the names that the data set has for their numbers."""
    if any(label is None for label in labels):
        raise ValueError("localisation needs labels: give (images, labels), or masks=")
    classes = set(subject.net.head.classes_.tolist())  # type: ignore[union-attr]
    if set(labels) <= classes:
        return list(labels)
    names = subject.source.names
    renamed = [names[label] if names is not None and isinstance(label, int) else label for label in labels]
    if not set(renamed) <= classes:
        unknown = sorted(set(renamed) - classes, key=str)
        raise ValueError(
            f"the labels {unknown[:5]} of the data are not classes of the head, which are {sorted(classes)}: rename "
            "them, or fit the head on them"
        )
    return renamed


def _scene(pictures: list[Tensor], tiles: int) -> Tensor:
    """Return two images side by side, or four at half their size."""
    if tiles == 2:
        return torch.cat(pictures, -1)
    height, width = pictures[0].shape[1:]
    halves = [(h, w) for h in (height // 2, height - height // 2) for w in (width // 2, width - width // 2)]
    small = [
        F.interpolate(picture[None], size, mode="bilinear", antialias=True)[0]
        for picture, size in zip(pictures, halves, strict=True)
    ]
    return torch.cat([torch.cat(small[:2], -1), torch.cat(small[2:], -1)], -2)


def _pasted(small: Tensor, large: Tensor, place: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Return an image with a small version of another one in it, and where that is, (H, W)."""
    size = [max(1, round(_PASTED * side)) for side in large.shape[1:]]
    top, left = (int(at * (side - less)) for at, side, less in zip(place, large.shape[1:], size, strict=True))
    scene, mask = large.clone(), np.zeros(large.shape[1:], bool)
    here = (slice(top, top + size[0]), slice(left, left + size[1]))
    scene[(slice(None), *here)] = F.interpolate(small[None], size, mode="bilinear", antialias=True)[0]
    mask[here] = True
    return scene, mask


def _tile_masks(size: Sequence[int], tiles: int, places: Sequence[int]) -> np.ndarray:
    y, x = np.ogrid[: size[0], : size[1]]
    tile = 2 * (y >= size[0] // 2) * (tiles == 4) + (x >= size[1] // 2)
    return tile == np.reshape(places, (-1, 1, 1))


def _check_size(net: PCASVMNet, scenes: Tensor, tiles: int) -> None:
    try:
        net.predict(scenes[:1])
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a network says of an input twice as wide
        if tiles == 4:
            raise
        raise ValueError(
            f"the network does not take an input of {tuple(scenes.shape[1:])}: use tiles=4, which keeps the size"
        ) from error


def _without_masks(subject: Subject, masks: Any) -> list[int]:
    """Return the rows of images on which there is nothing, and take them from the subject's."""
    regions = Regions.of(len(subject.source), masks)
    regions.leave_out(subject)
    empty = [row for row in subject.rows.tolist() if regions.is_empty(row)]
    subject.rows = subject.rows[~np.isin(subject.rows, empty)]
    if empty:
        subject.missing[f"{len(empty)} of {len(subject.rows) + len(empty)} images"] = "their mask or box is empty"
    return empty


def _masked(subject: Subject, masks: Any) -> Any:
    """Yield images, their targets, masks, and rows."""
    regions = Regions.of(len(subject.source), masks)
    for x, _, rows in subject.batches("localisation", looks=subject.minutes is not None):
        where = regions.draw(rows, tuple(x.shape[2:]))  # which refuses other sizes
        yield x, subject.targets(x), where, rows


def _shares(maps: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return how much of the positive part of each map is inside its mask; NaN where it has none."""
    positive = np.maximum(maps, 0).reshape(len(maps), -1)
    inside = (positive * where.reshape(len(maps), -1)).sum(1)
    total = positive.sum(1)
    return np.divide(inside, total, out=np.full(len(maps), np.nan), where=total > 0)


def _points(maps: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return how much of where a map is largest is inside its mask; NaN where it is flat, or nowhere positive."""
    axes = tuple(range(1, maps.ndim))
    top = (maps > 0) & (maps >= (1 - SAME) * maps.max(axes, keepdims=True))
    return _shares(top & ~top.all(axes, keepdims=True), where)
