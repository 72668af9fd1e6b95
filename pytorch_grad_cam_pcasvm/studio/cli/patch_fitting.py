"""The fit of heads that decide at every position: masks label patches, or the maps of photos teach which are faults."""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from pytorch_grad_cam_pcasvm.runtime.pictures import colour_table
from pytorch_grad_cam_pcasvm.studio.cli.arguments import RUN, FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.choosing import (
    add_resamples,
    describe_candidates,
    describe_head,
    fit_classifier,
    list_settings,
    make_classifier,
)
from pytorch_grad_cam_pcasvm.studio.cli.folders import name_first
from pytorch_grad_cam_pcasvm.studio.cli.photos import (
    RATE,
    LeftOut,
    Photos,
    compare_areas,
    measure_error,
    tell_likeness,
)
from pytorch_grad_cam_pcasvm.studio.cli.teaching import Teacher, choose_pooled, name_layers
from pytorch_grad_cam_pcasvm.studio.cli.training import PatchOptions, TrainingFeatures, training_set
from pytorch_grad_cam_pcasvm.studio.data.images import Images
from pytorch_grad_cam_pcasvm.studio.model.choices import COMPONENTS_OF_PATCHES, choose_candidate, measure_evidence
from pytorch_grad_cam_pcasvm.studio.model.fitting import describe_estimator
from pytorch_grad_cam_pcasvm.studio.model.likeness import keep_likeness_of_patches
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation
from pytorch_grad_cam_pcasvm.studio.model.teaching import GOOD, draw_places, gather_rows
from pytorch_grad_cam_pcasvm.studio.pictures.panels import GAP, TILE, Panel
from pytorch_grad_cam_pcasvm.studio.pictures.sheets import WRONG, Sheets

_SHOWN = 10  # names of photos in a line


@dataclass(frozen=True)
class PatchRows:
    """Rows of features to fit a head of patches on.

    Attributes:
        rows: shape (R, D).
        labels: the class of each, (R,).
        photos: the number of its photo in the folder, (R,).
    """

    rows: Any
    labels: Any
    photos: Any

    def select(self, photos: Any) -> "PatchRows":
        """Return the patches of some photos."""
        some = np.isin(self.photos, photos)
        return PatchRows(self.rows[some], self.labels[some], self.photos[some])

    def tell(self) -> None:
        """Say how many there are of each class.

        Raises:
            ValueError: there is one class only.
        """
        counts = Counter(self.labels.tolist())
        shares = ", ".join(f"{name} {count} ({count / len(self.labels):.1%})" for name, count in counts.items())
        print(f"patches: {shares}")
        if len(counts) < 2:
            raise ValueError(
                f"all patches are of {next(iter(counts))!r}, but a classifier needs two classes: do the masks belong "
                "to these photos? A patch needs --coverage of its area inside"
            )


def fit_labelled(
    options: FitOptions, training: TrainingFeatures, patches: PatchOptions, names: Sequence[str], objects: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the head of patches that masks label, and the model's description of its fit.

    Args:
        options: those of ``fit``; afterwards with what was chosen.
        training: the features of patches.
        patches: the masks.
        names: of their labels, the background's first.
        objects: the number of the object of each photo; None: they all differ.
    """
    own = PatchRows(training.features.numpy(), np.array(names)[training.numbers.numpy()], np.array(training.rows))
    own.tell()
    numbers, size = np.unique(own.photos), tuple(training.blocks.first.shape[2:])
    counted = [_count_faults(own, number, names[0]) for number in numbers.tolist()]
    unlearned = [
        number for number, counts in zip(numbers.tolist(), counted, strict=True)
        if not counts and patches.find_faults(number, size).any()
    ]  # fmt: skip
    marked = patches.name_marked(names)
    labels = np.array([
        counts.most_common(1)[0][0] if counts else marked[0] if number in unlearned else names[0]
        for number, counts in zip(numbers.tolist(), counted, strict=True)
    ])
    _tell_unlearned(options, own, marked, len(unlearned), len(unlearned) + sum(map(bool, counted)))
    photos = Photos.split(numbers, labels, objects, names[0])
    left_out = LeftOut(photos, options.rate or RATE, patches, size)
    heads = [_fit_fold(options, own.select(fit), photos) for fit, _ in photos.folds]
    left_out.score(training.read_all, heads, training.spread)
    score = left_out.tell("photo" if options.groups is None else "object")
    head, about = _fit_all(options, own, photos, training)
    return head, training.describe() | about | score


def teach_patches(
    options: FitOptions, training: TrainingFeatures, network: Any, preparation: Preparation, folder: Any, layer: Any,
    names: Sequence[str], objects: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the head of patches that the maps of photos teach, and the model's description of its fit.

    Args:
        options: those of ``fit``; afterwards with what was chosen.
        training: the features of patches.
        network: the backbone.
        preparation: of the photos.
        folder: the photos.
        layer: where the features of patches come from.
        names: of the classes.
        objects: the number of the object of each photo; None: they all differ.
    """
    whole, last, pool = choose_pooled(network, preparation)
    fine = name_layers(network.net, layer)
    with training_set(options, options.images, whole.net, preparation, last, pool, fine) as pooled:
        labels = np.array(names)[pooled.numbers.numpy()]
        photos = Photos.split(np.array(pooled.rows), labels, objects, options.normal)
        layers = [name for name in fine if name in pooled.means] or pooled.blocks.last
        teacher = Teacher(options, training, pooled, whole, folder, photos, last, pool, layers)
        lessons = teacher.teach()
    suspicions, doubtful = teacher.pick(lessons)
    all_patches = _gather(training, photos, lessons, suspicions, options.faults)
    all_patches[-1].tell()
    heads = [_fit_fold(options, own, photos) for own in all_patches[:-1]]
    left_out = LeftOut(photos, options.rate or RATE)
    left_out.score(training.read_all, heads, training.spread)
    score = left_out.tell("photo" if options.groups is None else "object")
    if score:
        score["score"] |= _compare_heads(options, left_out, photos, pooled, lessons)
    head, about = _fit_all(options, all_patches[-1], photos, training)
    _show_chosen(options, folder, training, suspicions[-1], doubtful)
    return head, training.describe() | about | score


def _count_faults(own: PatchRows, number: int, normal: str) -> "Counter[str]":
    """Return how many patches of a photo are of each class but the normal one."""
    return Counter(own.labels[(own.photos == number) & (own.labels != normal)].tolist())


def _tell_unlearned(options: FitOptions, own: PatchRows, marked: Sequence[str], count: int, faulty: int) -> None:
    """Print how many photos have faults too small for any patch, and which classes no patch has."""
    if not count:
        return
    lacking = [name for name in marked if name not in own.labels]
    classes = f"; the model has no class {' or '.join(map(repr, lacking))}" if lacking else ""
    print(
        f"hint: nothing is learned from {count} of {faulty} photos with faults, which fill less than "
        f"{options.coverage:.0%} of any patch{classes}: look closer, with --size or --tiles, or add "
        f"--coverage {options.coverage / 4:g}"
    )


def _gather(
    training: TrainingFeatures, photos: Photos, lessons: Sequence[Any], suspicions: Sequence[Any], count: int
) -> list[PatchRows]:
    """Return for each lesson the patches that are faults, and patches of its good photos."""
    is_good = photos.labels == photos.normal
    positions = next(iter(suspicions[-1].values())).contributions.shape[1]
    good = draw_places(photos.numbers[is_good], positions, GOOD)
    places, labels = [], []
    for lesson, by_class in zip(lessons, suspicions, strict=True):
        own, names = [good[np.isin(good[:, 0], lesson.fit)]], []
        names.append(np.full(len(own[0]), photos.normal, dtype=object))
        for name, suspicion in by_class.items():
            picked = suspicion.pick(count)
            own.append(np.stack([np.repeat(suspicion.photos, picked.shape[1]), picked.ravel()], 1))
            names.append(np.full(len(own[-1]), name, dtype=object))
        places.append(np.concatenate(own))
        labels.append(np.concatenate(names).astype(photos.labels.dtype))
    unique, index = np.unique(np.concatenate(places), axis=0, return_inverse=True)
    rows, index = gather_rows(training.read_all, unique), index.reshape(-1)
    ends = np.cumsum([len(part) for part in places])
    return [
        PatchRows(rows[part], names, where[:, 0])
        for part, names, where in zip(np.split(index, ends[:-1]), labels, places, strict=True)
    ]


def _compare_heads(
    options: FitOptions, left_out: LeftOut, photos: Photos, pooled: TrainingFeatures, lessons: Sequence[Any]
) -> dict[str, Any]:
    """Say whether patches or pooled features tell photos better that were left out; return it for the model's file."""
    evidence = dict[int, float]()
    for lesson, (_, test) in zip(lessons, photos.folds, strict=False):
        rows = pooled.features[torch.from_numpy(photos.index(test))]
        values = measure_evidence(lesson.head, rows, photos.normal)
        evidence |= dict(zip(test.tolist(), values.tolist(), strict=True))
    areas, of_pooled = left_out.measure_folds(left_out.evidence), left_out.measure_folds(evidence)
    difference, error = compare_areas(areas, of_pooled)
    mean = float(np.nanmean(of_pooled))
    words = f"by {abs(difference):.3f} \N{PLUS-MINUS SIGN} {error:.3f}"
    if abs(difference) <= error or np.isnan(error):
        verdict = f"no difference that so many photos show ({words[3:]})"
    else:
        verdict = f"patches are {'better' if difference > 0 else 'worse'} {words}"
    best, doubt = max((float(np.nanmean(one)), measure_error(one)) for one in (areas, of_pooled))
    if best - 2 * doubt <= 0.5:
        verdict = f"neither tells them better than by chance (0.5); {verdict}"
    print(f"the same photos by pooled features: AUROC {mean:.3f}; {verdict}")
    if difference < -error:
        print(f"hint: decide about whole photos instead: {RUN} fit {options.images} --normal {options.normal}")
    return {"pooled_image_auroc": mean}


def _fit_fold(options: FitOptions, own: PatchRows, photos: Photos) -> Any:
    """Return the head that is fitted on the patches of some photos; None: they are too few, or of one class."""
    if len(np.unique(own.labels)) < 2:
        return None
    chosen, _ = _choose(options, own, photos)
    return None if chosen is None else fit_classifier(chosen, own.rows, own.labels, 0)[1]


def _fit_all(
    options: FitOptions, own: PatchRows, photos: Photos, training: TrainingFeatures
) -> tuple[Any, dict[str, Any]]:
    """Return the head that is fitted on all patches, and its choices, having said them."""
    chosen, candidates = _choose(options, own, photos)
    if chosen is None:
        chosen = replace(options, components=min(options.components or 1, len(own.rows) - 1, own.rows.shape[1]),
                         class_weight=_weight(options))  # fmt: skip
    about: dict[str, Any] = {}
    if len(candidates) > 1:
        best = next(one for one in candidates if (one.components, one.settings.get("C", chosen.C))
                    == (chosen.components, chosen.C))  # fmt: skip
        wanted = ["--components"] * options.chooses_components + ["--C"] * (
            options.C is None and options.classifier == "svm"
        )
        print(
            f"chose {describe_head(chosen)}, by cross-validation of patches: AUROC of patches {best.score:.3f} "
            f"\N{PLUS-MINUS SIGN} {best.error:.3f}; choose yourself: {', '.join(wanted)}"
        )
        about["chosen"] = describe_candidates(best, candidates)
    options.components, options.C, options.class_weight = chosen.components, chosen.C, chosen.class_weight
    pipeline, head = fit_classifier(options, own.rows, own.labels, 0)
    add_resamples(options, head, pipeline, own.rows, own.labels, photos.name_objects(own.photos))
    args = own.rows, own.labels, own.photos, photos.objects, training.read_all
    tell_likeness(keep_likeness_of_patches(head, pipeline, *args))
    return head, {"estimator": describe_estimator(pipeline)} | about


def _choose(options: FitOptions, own: PatchRows, photos: Photos) -> tuple[FitOptions | None, Sequence[Any]]:
    """Return the options with a number of components and settings for some patches, and the candidates.

    None is returned in place of the options where there are too few photos.
    """
    options = replace(options, class_weight=_weight(options))
    settings: Sequence[Any] = [{}]
    components: Sequence[int] = [options.components or 1]
    if options.classifier == "svm":
        components = COMPONENTS_OF_PATCHES if options.chooses_components else components
        settings = list_settings(options, ["--C"] * (options.C is None))
    if len(settings) == 1 and len(components) == 1:
        fits = components[0] < min(own.rows.shape)
        return (replace(options, **settings[0]) if fits else None), []
    try:
        best, candidates = choose_candidate(
            own.rows, own.labels, photos.name_objects(own.photos), make_classifier(options, len(own.rows)), settings,
            components,
        )  # fmt: skip
    except ValueError:  # a class has patches of one photo only
        return None, []
    return replace(options, components=best.components, **best.settings), candidates


def _weight(options: FitOptions) -> str | None:
    """Return how much classes count: the same, if nothing is typed and the classifier knows of that."""
    if options.class_weight is not None or options.classifier not in ("svm", "forest", "boosting"):
        return options.class_weight
    return "balanced"


def _show_chosen(
    options: FitOptions, folder: Any, training: TrainingFeatures, suspicions: Mapping[str, Any], doubtful: Sequence[int]
) -> None:
    """Draw the patches that are taken for faults, and name the photos of which they are hardly suspicious."""
    picked = [
        (float(ranks.max()), int(number), name, positions)
        for name, suspicion in suspicions.items()
        for number, ranks, positions in zip(
            suspicion.photos, suspicion.rank(), suspicion.pick(options.faults), strict=True
        )
    ]
    picked.sort(key=lambda one: -one[0])
    images = Images(folder, thumbnails=0)
    names = [images.id(number) for number in doubtful]
    if names:
        print(
            f"doubtful: {len(names)} of {len(picked)} photos with a fault have no patch that is beyond those of good "
            f"photos: {name_first(names, _SHOWN)}. Is there a fault, and can it be seen at this size?"
        )
    file = options.out.with_name(f"{options.out.stem}-patches.png")
    grid = tuple(next(iter(training.read_all()))[0].shape[2:])
    count = draw_chosen(file, folder, [one[1:] for one in picked], grid, doubtful)
    print(f"wrote {file}: what is taken for faults, in {count} photos; look at it before you use the model")


_MOST_DRAWN, _COLUMNS = 40, 5  # photos, in all and side by side


def draw_chosen(
    file: Path, folder: Any, picked: Sequence[tuple[int, str, Any]], grid: Sequence[int], doubtful: Sequence[int]
) -> int:
    """Draw photos with the outlines of the patches that are taken for their faults, doubtful ones first.

    Args:
        file: where to write.
        folder: the photos.
        picked: number, class and positions of the patches of each faulty photo, the most suspicious photo first.
        grid: (h, w), the shape of the positions.
        doubtful: the numbers of the photos whose patches are hardly suspicious.

    Returns:
        The number of photos that are drawn.
    """
    order = [one for one in picked if one[0] in doubtful][: _MOST_DRAWN // 2]
    rest = [one for one in picked if one[0] not in doubtful]
    rest = rest[:: max(1, -(-len(rest) // (_MOST_DRAWN - len(order))))]  # from the most to the least suspicious
    order += rest
    images, panels = Images(folder, thumbnails=TILE), []
    for number, name, positions in order:
        batch = images.read([number])
        if not batch.thumbnails:
            continue
        photo = Image.open(io.BytesIO(batch.thumbnails[0])).convert("RGB")
        word, colour = ("doubtful", WRONG) if number in doubtful else (name, "black")
        boxes = tuple((*divmod(int(position), grid[1]), "") for position in positions)
        heading = f"{word}: {Path(images.id(number)).name}"
        panels.append(Panel(photo, heading=heading, boxes=boxes, grid=tuple(grid), colour=colour))
    doubtful_words = f", {len(doubtful)} doubtful, which come first" if doubtful else ""
    title = (
        "Outlined: the patches that are taken for faults. Look before you believe them.\n"
        f"{len(panels)} of {len(picked)} photos with a fault{doubtful_words}"
    )
    Sheets({"colours": colour_table()}).arrange(panels, title, most=_COLUMNS * (TILE + GAP)).save(file)
    return len(panels)
