"""Localisation: does the evidence for a class lie where the class is?"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.evaluation.faithfulness import ANOTHER, BLIND, HEAD, RANDOM
from pytorch_grad_cam_pcasvm.evaluation.result import Result, Row
from pytorch_grad_cam_pcasvm.evaluation.statistics import Estimate
from pytorch_grad_cam_pcasvm.evaluation.subject import DEFAULT, Methods, Subject, signed, upsampled
from pytorch_grad_cam_pcasvm.net import PCASVMNet
from pytorch_grad_cam_pcasvm.targets import SVMTarget

SHARE, POINT = "share of positive evidence", "pointing game"
_OF_VOLUMES = "volumes cannot be put side by side, and have no boxes: give masks of their size"


def localisation(
    net: PCASVMNet,
    data: Any,
    target_layers: Sequence[nn.Module | str],
    methods: Methods = DEFAULT,
    *,
    tiles: int = 2,
    masks: Any = None,
    images: int | None = 200,
    batch_size: int = 16,
    seed: int = 0,
    progress: bool = True,
    transform: Callable[[Any], Tensor] | None = None,
) -> Result:
    """Measure how much of the evidence for a class lies on the image of that class, or inside masks.

    Without masks, images of different classes, each classified correctly on its own, are put side by side: two of them
    (an input twice as wide, for networks whose features are pooled), or four, each at half its size (the input keeps
    its size). The class of one tile is explained: what share of the positive evidence lies on that tile, and does the
    largest value (the pointing game)? Chance is a half, or a quarter. With masks, the predicted class of each image is
    explained, and chance is the mask's share of the image.

    Args:
        net: the network; its head must have classes.
        data: ``(images, labels)``, or a data set with labels, as for ``atlas.build``.
        target_layers: one layer.
        methods: classes, ``(class, options)``, or a dict of these by name.
        tiles: 2 or 4.
        masks: where the object is: boolean, shape (R, H, W), for every image of the data set in order, or boxes, shape
            (R, 4), of x0, y0, x1, y1 in pixels, x1 and y1 exclusive.
        images: how many, chosen at random; None: all.
        batch_size: number of images at a time.
        seed: random seed of the choice, the random maps and the random head.
        progress: show a progress bar.
        transform: from a PIL image to a tensor for the network, for a folder or a data set of PIL images.

    Returns:
        Both measures for each method: against chance, random maps, another scene's map, the blind map and
        a randomised head's map.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: no labels, only one class, too few correctly classified images, tiles that the network does not
            take, or masks of another size.
    """
    if tiles not in (2, 4):
        raise ValueError(f"tiles must be 2 or 4, got {tiles!r}")
    subject = Subject(
        net, data, target_layers, methods,
        images=images, batch_size=batch_size, seed=seed, progress=progress, transform=transform,
    )  # fmt: skip
    if net.head.classes_ is None:
        raise ValueError("localisation needs a head with classes: for a regressor measure faithfulness instead")
    random = np.random.default_rng(seed + 1)
    other = subject.randomised()
    rivals = [RANDOM, ANOTHER, BLIND, *([HEAD] if other is not None else [])]
    found: dict[tuple[str, str, str], list[np.ndarray]] = {}
    chances: list[np.ndarray] = []
    scenes = _tiled(subject, tiles, random) if masks is None else _masked(subject, masks)
    for x, labels, where, images_of in scenes:
        targets = [SVMTarget(label) for label in labels]
        size = x.shape[2:]
        chances.append(where.reshape(len(where), -1).mean(1))
        blind = upsampled(subject.blind(x), size)
        for measure, of in ((SHARE, _shares), (POINT, _points)):
            found.setdefault((BLIND, measure, ""), []).append(of(blind, where))
        for method in subject.methods:
            maps = subject.explained(method, x, targets)
            seen = subject.seen(method, maps)
            heat = {"": upsampled(signed(maps), size), BLIND: blind}
            # Of a scene that is alone there is no other one.
            heat[ANOTHER] = np.roll(heat[""], 1, 0) if len(x) > 1 else np.full_like(heat[""], np.nan)
            heat[RANDOM] = upsampled(torch.from_numpy(random.normal(size=signed(maps).shape)), size)
            if other is not None:
                heat[HEAD] = upsampled(signed(subject.explained(method, x, targets, other)), size)
            subject.worst[method].add(np.where(seen, -_shares(heat[""], where), np.nan), images_of, x, maps)
            for source, values in heat.items():
                for measure, numbers in ((SHARE, _shares(values, where)), (POINT, _points(values, where))):
                    found.setdefault((method, measure, source), []).append(np.where(seen, numbers, np.nan))
    if not chances:
        raise ValueError("no image is classified correctly: there is nothing to find")
    chance = np.concatenate(chances)
    rows = []
    for method in subject.methods:
        for measure in (SHARE, POINT):
            own = np.concatenate(found[method, measure, ""])
            rows.append(Row(method, measure, "", Estimate.of(own)))
            estimate = Estimate.of(own - chance)
            rows.append(Row(method, measure, "chance", estimate, estimate.above(0)))
            for rival in rivals:
                estimate = Estimate.of(own - np.concatenate(found[method, measure, rival]))
                rows.append(Row(method, measure, rival, estimate, estimate.above(0)))
    rows += [
        Row(BLIND, measure, "", Estimate.of(np.concatenate(found[BLIND, measure, ""]))) for measure in (SHARE, POINT)
    ]
    return subject.result(
        "localisation",
        "does the positive evidence for a class lie on the image of that class"
        + ("?" if masks is None else ", inside its mask?"),
        rows,
        scenes=len(chance),
        tiles=tiles if masks is None else None,
        chance=float(chance.mean()),
    )


def _tiled(subject: Subject, tiles: int, random: np.random.Generator) -> Any:
    """Yield scenes: images (N, ...), the class that is explained of each, where it is, (N, H, W), and its row."""
    classes = subject.net.head.classes_
    assert classes is not None
    waiting: dict[Any, list[tuple[int, Tensor]]] = {label: [] for label in classes.tolist()}
    seen: set[Any] = set()
    found = False
    for x, labels, rows in subject.batches("localisation"):
        if x.dim() != 4:
            raise ValueError(_OF_VOLUMES)
        known = _labels_of(subject, labels)
        for row, image, label, predicted in zip(rows, x, known, subject.net.predict(x).tolist(), strict=True):
            seen.add(label)
            if label == predicted:
                waiting[label].append((row, image.clone()))  # not a view, which would keep its batch
        scenes = []
        while sum(map(bool, waiting.values())) >= min(tiles, len(waiting)) > 1:
            chosen = _chosen({label: len(found_of) for label, found_of in waiting.items()}, tiles, random)
            if not chosen:
                break
            numbers, pictures = zip(*(waiting[label].pop() for label in chosen), strict=True)
            places = random.permutation(tiles)
            scene = _scene([pictures[n] for n in places], tiles)
            scenes.append((scene, chosen[0], int(np.argwhere(places == 0)[0, 0]), numbers[0]))
        if scenes:
            found = True
            images, explained, places_of, explained_rows = zip(*scenes, strict=True)
            stacked = torch.stack(images)
            _check_size(subject.net, stacked, tiles)
            yield stacked, explained, _tile_masks(stacked.shape[2:], tiles, places_of), explained_rows
    if len(seen) < 2:
        raise ValueError(f"images of {len(seen)} class cannot be put beside another class: give several classes")
    if not found:
        raise ValueError("too few images of different classes are classified correctly to be put side by side")


def _chosen(waiting: dict[Any, int], tiles: int, random: np.random.Generator) -> list[Any]:
    """Return the classes of a scene, the explained one first; none where too few images are waiting.

    They are those with most images. Which of them is explained is drawn, so that maps that lean to one class do not
    pass. With fewer classes than tiles the others come again.
    """
    order = sorted((label for label in waiting if waiting[label]), key=lambda label: -waiting[label])[:tiles]
    for first in random.permutation(len(order)).tolist():
        others = order[:first] + order[first + 1 :]
        chosen = [order[first], *(others[n % len(others)] for n in range(tiles - 1))]
        if all(waiting[label] >= chosen.count(label) for label in chosen):
            return chosen
    return []


def _labels_of(subject: Subject, labels: Sequence[Any]) -> list[Any]:
    """Return labels as the head has them: classes, or the names that the data set has for their numbers."""
    classes = set(subject.net.head.classes_.tolist())  # type: ignore[union-attr]
    if any(label is None for label in labels):
        raise ValueError("localisation needs labels: give (images, labels), or masks=")
    if set(labels) <= classes:
        return list(labels)
    names = subject.data.names
    found = [names[label] if names is not None and isinstance(label, int) else label for label in labels]
    if not set(found) <= classes:
        unknown = sorted(set(found) - classes, key=str)
        raise ValueError(
            f"the labels {unknown[:5]} of the data are not classes of the head, which are {sorted(classes)}: rename "
            "them, or fit the head on them"
        )
    return found


def _scene(pictures: list[Tensor], tiles: int) -> Tensor:
    """Return two images side by side, or four at half their size."""
    if tiles == 2:
        return torch.cat(pictures, -1)
    small = [F.interpolate(p[None], scale_factor=0.5, mode="bilinear", antialias=True)[0] for p in pictures]
    return torch.cat([torch.cat(small[:2], -1), torch.cat(small[2:], -1)], -2)


def _tile_masks(size: Sequence[int], tiles: int, places: Sequence[int]) -> np.ndarray:
    height, width = size
    masks = np.zeros((len(places), height, width), bool)
    for mask, place in zip(masks, places, strict=True):
        if tiles == 2:
            mask[:, place * width // 2 : (place + 1) * width // 2] = True
        else:
            row, column = divmod(place, 2)
            mask[row * height // 2 : (row + 1) * height // 2, column * width // 2 : (column + 1) * width // 2] = True
    return masks


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


def _masked(subject: Subject, masks: Any) -> Any:
    """Yield images, their predicted classes, masks, and rows."""
    given = np.asarray(masks.cpu() if isinstance(masks, Tensor) else masks)
    if len(given) != len(subject.data):
        raise ValueError(f"{len(given)} masks for {len(subject.data)} images: give one for each, in order")
    for x, _, rows in subject.batches("localisation"):
        size = tuple(x.shape[2:])
        if given.ndim == 2 and given.shape[1] == 4:
            if x.dim() != 4:
                raise ValueError(_OF_VOLUMES)
            where = np.zeros((len(x), *size), bool)
            for mask, (x0, y0, x1, y1) in zip(where, given[rows].astype(int), strict=True):
                mask[y0:y1, x0:x1] = True
        elif given.shape[1:] == size:
            where = given[rows].astype(bool)
        else:
            raise ValueError(f"masks of {given.shape[1:]} for images of {size}: bring them to the size of the input")
        kept = where.reshape(len(where), -1).any(1)
        if kept.any():
            labels = subject.net.predict(x)[kept].tolist()
            yield x[torch.from_numpy(kept).to(x.device)], labels, where[kept], np.array(rows)[kept].tolist()


def _shares(maps: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return how much of the positive part of each map is inside its mask; NaN where it has none."""
    positive = np.maximum(maps, 0).reshape(len(maps), -1)
    inside = (positive * where.reshape(len(maps), -1)).sum(1)
    total = positive.sum(1)
    return np.divide(inside, total, out=np.full(len(maps), np.nan), where=total > 0)


def _points(maps: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return 1 where the largest value of a map is inside its mask, 0 where it is not; NaN where none is positive."""
    flat = maps.reshape(len(maps), -1)
    hits = where.reshape(len(maps), -1)[np.arange(len(maps)), flat.argmax(1)]
    return np.where(flat.max(1) > 0, hits, np.nan)
