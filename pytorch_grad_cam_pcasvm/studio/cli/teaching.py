"""Teaching: heads on pooled features say which patches of faulty photos are the faults, anew in each fold."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet
from pytorch_grad_cam_pcasvm.network.auto_layers import last_features
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.network.tiles import TiledNet
from pytorch_grad_cam_pcasvm.runtime.errors import BaselineWarning
from pytorch_grad_cam_pcasvm.studio.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.choosing import choose, fit_classifier, make_classifier
from pytorch_grad_cam_pcasvm.studio.cli.models import first_image
from pytorch_grad_cam_pcasvm.studio.cli.photos import Photos
from pytorch_grad_cam_pcasvm.studio.cli.training import TrainingFeatures
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.model.choices import compare_candidates, pick_simplest, split_folds
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation
from pytorch_grad_cam_pcasvm.studio.model.teaching import Suspicion, explain_faults, measure_distances, reduce_patches

_BATCH = 16  # photos that are explained at once
_TRUSTED = 0.8  # AUROC of a head on pooled features, from which on its maps taught better than distance alone
_USUAL = 16  # components of a head on pooled features, where nothing is chosen


@dataclass
class Lesson:
    """What the photos of all folds but one teach, or all photos.

    Attributes:
        fit: the numbers of the photos that teach.
        fold: the number of the fold that is left out; None: none is.
        head: the head on their pooled features.
        trusted: whether that head tells faulty photos well enough; otherwise distances alone teach.
        maps: the contributions at the positions of patches, by number of a faulty photo.
        good_maps: the same of good photos, to each class of faults.
    """

    fit: Any
    fold: int | None
    head: Any
    trusted: bool
    maps: dict[int, Any] = field(default_factory=dict)
    good_maps: dict[Any, dict[int, Any]] = field(default_factory=dict)


class Teacher:
    """Chooses the patches of faulty photos that are their faults.

    Args:
        options: those of ``fit``.
        training: the features of patches.
        pooled: those of whole photos.
        network: the backbone.
        folder: the photos.
        photos: which of them can be read, their labels and folds.
        layer: where the pooled features come from.
        pool: of these.
        layers: of contributions.
    """

    def __init__(
        self, options: FitOptions, training: TrainingFeatures, pooled: TrainingFeatures, network: Any, folder: Any,
        photos: Photos, layer: Any, pool: Any, layers: Sequence[str],
    ) -> None:  # fmt: skip
        self._options, self._training, self._pooled = options, training, pooled
        self._network, self._folder, self._photos = network, folder, photos
        self._layer, self._pool, self._layers = layer, pool, layers

    def teach(self) -> list[Lesson]:
        """Return the lesson of each fold, and last the lesson of all photos, with their maps."""
        photos = self._photos
        features = self._pooled.features.numpy()
        labels, objects = photos.labels, None if photos.objects is None else photos.objects[photos.numbers]
        fewest = min((len(fit) for fit, _ in photos.folds), default=len(features))
        plain = replace(
            self._options, classifier="svm", kernel=None, C=None, gamma=None, class_weight=None,
            chooses_components=True, components=max(1, min(_USUAL, fewest - 1, features.shape[1] - 1)),
        )  # fmt: skip
        print("a head on pooled features, whose maps say where to look:")
        choice = choose(plain, features, labels, objects, make_svm)
        trusted = choice is None or _is_trusted(choice)
        if not trusted:
            print(
                f"this head tells photos too badly for its maps to teach (AUROC {choice.score:.3f} \N{PLUS-MINUS SIGN} "
                f"{choice.error:.3f}): the patches farthest from good ones are taken for faults, without its maps"
            )
        lessons = []
        for number, (fit, _) in enumerate(photos.folds):
            own = photos.index(fit)
            options, own_trusted = (plain, trusted) if choice is None else self._choose_again(plain, choice, own)
            lessons.append(self._make_lesson(options, fit, number, own_trusted))
        lessons.append(self._make_lesson(plain, photos.numbers, None, trusted))
        self._explain(lessons)
        return lessons

    def _choose_again(self, options: FitOptions, choice: Any, own: Any) -> tuple[FitOptions, bool]:
        """Return the options of a head chosen by some photos alone, and whether it tells them well enough."""
        if len(choice.candidates) == 1:
            return options, _is_trusted(choice)
        features, labels = self._pooled.features.double().numpy()[own], self._photos.number_labels()[own]
        objects = None if self._photos.objects is None else self._photos.objects[self._photos.numbers][own]
        components = sorted({one.components for one in choice.candidates})
        settings = [one.settings for one in choice.candidates if one.components == components[0]]
        folds = split_folds(labels, objects)
        components = [count for count in components if count < min(len(fit) for fit, _ in folds)] or components[:1]
        chosen = pick_simplest(compare_candidates(features, labels, folds, make_svm(options), settings, components))
        return replace(options, components=chosen.components, **chosen.settings), _is_trusted(chosen)

    def _make_lesson(self, options: FitOptions, fit: Any, fold: int | None, trusted: bool) -> Lesson:
        """Return the head that is fitted on the pooled features of some photos."""
        own = self._photos.index(fit)
        _, head = fit_classifier(options, self._pooled.features.numpy()[own], self._photos.labels[own], 0)
        head.training_set.means |= self._pooled.means
        return Lesson(fit, fold, head, trusted)

    def _explain(self, lessons: Sequence[Lesson]) -> None:
        """Compute the maps of all lessons; each photo is read once."""
        images, normal = Images(self._folder, thumbnails=0), self._photos.normal
        label_of = dict(zip(self._photos.numbers.tolist(), self._photos.labels.tolist(), strict=True))
        grid = tuple(next(iter(self._training.read_all()))[0].shape[2:])
        faults = [name for name in dict.fromkeys(label_of.values()) if name != normal]
        numbers = sorted(label_of, key=lambda number: label_of[number] == normal)
        device = find_device(self._network.net)
        for lesson in lessons:
            if not lesson.trusted:
                blank = torch.zeros(math.prod(grid))
                lesson.maps = dict.fromkeys(numbers, blank)
                lesson.good_maps = dict.fromkeys(faults, lesson.maps)
        # All start where the head of all photos does, which is looked for once.
        taught = [lesson for lesson in (lessons[-1], *lessons[:-1]) if lesson.trusted]
        net = PCASVMNet(self._network.net, lessons[-1].head, self._layer, pool=self._pool).eval()
        cam = ContributionCAM(net, list(self._layers))
        with tqdm(total=len(numbers), desc="maps", unit="photo", disable=not taught) as bar, warnings.catch_warnings():
            warnings.simplefilter("ignore", BaselineWarning)  # only the order of positions is used
            for start in range(0, len(numbers), _BATCH) if taught else ():
                batch = images.read(numbers[start : start + _BATCH])
                x, rows = batch.images.to(device), batch.rows
                faulty = [place for place, row in enumerate(rows) if label_of[row] != normal]
                good = [place for place, row in enumerate(rows) if label_of[row] == normal]
                numbered, labels = [rows[place] for place in faulty], [label_of[rows[place]] for place in faulty]
                all_maps = explain_faults(cam, [one.head for one in taught], x[faulty], labels, normal, grid)
                for lesson, maps in zip(taught, all_maps, strict=True):
                    lesson.maps |= {number: one.flatten() for number, one in zip(numbered, maps, strict=True)}
                for name in faults if good and lessons[-1].trusted else ():
                    (maps,) = explain_faults(cam, [lessons[-1].head], x[good], [name] * len(good), normal, grid)
                    own = lessons[-1].good_maps.setdefault(name, {})
                    own |= {rows[place]: one.flatten() for place, one in zip(good, maps, strict=True)}
                bar.update(len(rows))

    def pick(self, lessons: Sequence[Lesson]) -> tuple[list[dict[str, Any]], list[int]]:
        """Return the suspicion of the photos of each lesson, by class, and the doubtful ones of all photos."""
        photos = self._photos
        total = int(photos.numbers.max()) + 1
        parts, objects = np.zeros(total, int), np.arange(total)
        for number, (_, test) in enumerate(photos.folds):
            parts[test] = number
        if photos.objects is not None:
            objects[photos.numbers] = photos.objects[photos.numbers] + total
        reduced = reduce_patches(self._training.read_all, total)
        is_good = photos.labels == photos.normal
        faulty, good = photos.numbers[~is_good], photos.numbers[is_good]
        distances = measure_distances(reduced, faulty, good, parts, objects=objects)
        of_good = measure_distances(reduced, good, good, parts, objects=objects).min(2)
        suspicions, doubtful = [], []
        for lesson in lessons:
            fitted_parts = [part for part in range(distances.shape[2]) if part != lesson.fold]
            by_class = {}
            for name in dict.fromkeys(photos.labels[~is_good].tolist()):
                some = np.isin(faulty, lesson.fit) & (photos.labels[~is_good] == name)
                maps = torch.stack([lesson.maps[number] for number in faulty[some].tolist()]).numpy()
                by_class[name] = Suspicion(faulty[some], maps, distances[some][..., fitted_parts].min(2))
                if lesson.fold is None:
                    maps = torch.stack([lesson.good_maps[name][number] for number in good.tolist()]).numpy()
                    reached = np.isfinite(of_good).all(1)  # a single good photo has no other
                    if reached.any():
                        usual = Suspicion(good[reached], maps[reached], of_good[reached])
                        doubtful += by_class[name].list_doubtful(usual).tolist()
            suspicions.append(by_class)
        return suspicions, doubtful


def _is_trusted(candidate: Any) -> bool:
    """Return whether an AUROC, of a candidate or a choice, is high enough for its maps to teach; also if unknown."""
    return not (candidate.score < _TRUSTED or candidate.score - 2 * candidate.error <= 0.5)


def make_svm(options: FitOptions) -> Any:
    """Return the SVM of options, not fitted."""
    return make_classifier(options, 0)


def choose_pooled(network: Any, preparation: Preparation) -> tuple[Any, Any, Any]:
    """Return the backbone of pooled features, the layer of these, the last block, and their pool.

    Args:
        network: the backbone of the features of patches, which may be on tiles.
        preparation: of the photos.
    """
    x = first_image(preparation).to(find_device(network.net))
    if not isinstance(network.net, TiledNet):
        return network, last_features(network.net, x), "mean"
    last = last_features(network.net.net, network.net.find_tiling(x).cut(x)[:1])
    return replace(network, net=network.net.with_features(last, "mean")), None, None


def name_layers(net: Any, layer: Any) -> list[str]:
    """Return the names of the layers of patches' features; on tiles, the names inside of the tiled network."""
    if isinstance(net, TiledNet):
        return [net.prefix + part.layer for part in net.source.parts or (net.source,) if part.layer]
    return [layer] if isinstance(layer, str) else [*layer]
