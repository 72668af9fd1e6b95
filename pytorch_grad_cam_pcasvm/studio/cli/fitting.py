"""The command that fits a head."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import cross_val_predict

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.head.storage import Example
from pytorch_grad_cam_pcasvm.network.auto_layers import fine_features, last_features, refuse_unmappable
from pytorch_grad_cam_pcasvm.network.features import FeatureSource
from pytorch_grad_cam_pcasvm.network.layer_means import BlockMeans
from pytorch_grad_cam_pcasvm.network.modules import find_device
from pytorch_grad_cam_pcasvm.network.pools import parse_pool
from pytorch_grad_cam_pcasvm.studio.cli.arguments import BACKGROUND, CLASSIFIERS, FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.choosing import (
    add_resamples,
    assemble_pipeline,
    balance,
    choose,
    describe_choice,
    explain_poor,
    fit_classifier,
    make_classifier,
    tell_next_step,
    tell_score,
    tell_search,
)
from pytorch_grad_cam_pcasvm.studio.cli.copies import describe_copies, describe_labels, hash_photos, list_copies
from pytorch_grad_cam_pcasvm.studio.cli.dicom_checking import tell_windows
from pytorch_grad_cam_pcasvm.studio.cli.folders import (
    accuracy,
    group_photos,
    name_objects,
    tell_bad,
    tell_empty,
)
from pytorch_grad_cam_pcasvm.studio.cli.good_fitting import fit_good
from pytorch_grad_cam_pcasvm.studio.cli.models import check_layers, choose_device, first_image, make_named
from pytorch_grad_cam_pcasvm.studio.cli.patch_fitting import fit_labelled, teach_patches
from pytorch_grad_cam_pcasvm.studio.cli.photos import (
    fit_left_out,
    keep_left_out,
    split_good,
    split_left_out,
    tell_likeness,
)
from pytorch_grad_cam_pcasvm.studio.cli.preparation import (
    apply_tiles,
    check_photos,
    choose_preparation,
    resize_of_masks,
    tell_crop,
    tell_stretched,
    with_whites,
)
from pytorch_grad_cam_pcasvm.studio.cli.refusals import learns_from_good_parts
from pytorch_grad_cam_pcasvm.studio.cli.training import PatchOptions, TrainingFeatures, training_set
from pytorch_grad_cam_pcasvm.studio.data import name_classes
from pytorch_grad_cam_pcasvm.studio.data.copies import write_hashes
from pytorch_grad_cam_pcasvm.studio.data.images import Images, image_folder
from pytorch_grad_cam_pcasvm.studio.data.mask_classes import UNLABELLED
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.model.backbones import check_backbone
from pytorch_grad_cam_pcasvm.studio.model.choices import split_folds
from pytorch_grad_cam_pcasvm.studio.model.fitting import assemble_model, describe_estimator
from pytorch_grad_cam_pcasvm.studio.model.likeness import keep_likeness, keep_likeness_of_patches
from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation

_COMPONENTS = {"svm": 16, "neighbours": 64, "residual": 16}  # of others 8, whose coalitions are few
_MOST_NEIGHBOURS = 50_000  # patches to choose from
_CORESET = 0.1  # of patches, as PatchCore
_PICTURE = 64  # pixels, of the picture of a support vector
_IMBALANCED = 0.8  # the share of the largest class from which accuracy says little


def fit(options: FitOptions) -> None:
    """Fit scaler, PCA and classifier on a folder of images, and write a model."""
    of_good_parts, classes = learns_from_good_parts(options), name_classes(options.images)
    has_classes = classes is not None and not of_good_parts
    is_taught = _is_taught(options, of_good_parts)
    _check(options)
    check_backbone(options.backbone, options.weights)
    paths = image_folder(options.images, lambda picture: picture).paths
    masks = _open_masks(options, paths)
    hashes = hash_photos(options, paths)
    objects = _name_objects(options, paths, has_classes=has_classes)
    groups = group_photos(paths, objects) if objects else _group_copies(options, paths, hashes, classes)
    network = make_named(options, options.size)
    check_layers(network.net, [*options.features, *options.layer])
    network.net.to(choose_device(options.device))
    preparation = choose_preparation(network, options, None, fits=True)
    layer, pool = _choose_features(options, network.net, preparation), parse_pool(options.pool or "mean")
    network, preparation, layer, pool = apply_tiles(options, network, preparation, layer, pool)
    folder = preparation.folder(options.images)
    check_photos(options, preparation, folder.paths, one_size=f"--pool {options.pool}" if options.is_dense else "")
    tell_stretched(network.net, preparation, folder.paths)
    with_whites(preparation, folder.paths, options.images)
    for line in tell_windows(folder.paths, preparation.window, preparation.page):
        print(line)
    tell_crop(preparation, folder.paths)
    patches = _patches(options, preparation, masks)
    _check_maps(options, network.net, FeatureSource.of(network.net, layer, pool), first_image(preparation))
    with training_set(
        options, options.images, network.net, preparation, layer, pool, options.layer, patches
    ) as training:
        if is_taught:
            tell_bad(training.bad)
            fitted, about = teach_patches(options, training, network, preparation, folder, layer, classes or [], groups)
        else:
            fitted, about = _fit_head(
                options, training, classes, patches, preparation, groups, of_good_parts=of_good_parts
            )
    if not options.no_pictures:
        about |= {"photos": write_hashes(np.stack([hashes[paths[row]] for row in sorted({*training.rows})]))}
    _write_model(options, network, fitted, layer, pool, training, preparation, about)
    if of_good_parts:
        print("it was fitted on good parts alone: to see how well it finds defects, evaluate it with --masks")
    if fitted.enumerated is not None:
        print(f"{fitted.enumerated.extra_repr()}. Methods that need a gradient do not explain it; ContributionCAM does")


def _check_maps(options: FitOptions, net: Any, source: FeatureSource, x: Any) -> None:
    """Refuse, before anything takes long, layers that no map can be of, and a network without any where none is named.

    Raises:
        ValueError: there would be no maps.
    """
    if options.layer:
        x = x.to(find_device(net))
        refuse_unmappable(net, source.at(net, x), options.layer, x, "--layer {}")
        return
    blocks = BlockMeans(net, source)
    blocks.begin_batch(x)
    if not blocks.last:
        raise ValueError(
            f"no layer of {options.backbone} was found that has positions, and that all on the way to the features "
            "goes through, so that explain would have nothing to draw: name one, --layer NAME"
        )


def _fit_head(
    options: FitOptions, training: TrainingFeatures, classes: Sequence[str] | None, patches: PatchOptions | None,
    preparation: Preparation, groups: Any, *, of_good_parts: bool,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the fitted head, and the model's description of its fit."""
    features = training.features.numpy()
    tell_bad(training.bad)
    if options.classifier == "pca":
        paths = preparation.folder(options.images).paths
        return fit_good(options, training, paths, groups, skip_suspicious=options.skip_suspicious)
    unit = "images" if patches is None else "patches"
    if patches is not None:
        print(f"{len(features)} patches of {len(set(training.rows))} images")
    most = max(1, min(features.shape) - 1)
    fewest = len(features)
    if options.chooses_components:
        fewest = _count_fewest(training, groups, of_good_parts=of_good_parts, unit=unit)
    allowed = max(1, min(most, fewest - 1))
    if options.components > allowed and options.chooses_components:
        options.components = allowed
        if of_good_parts or patches is not None or options.search:
            some = f", of which {fewest} are fitted on where others are left out" if allowed < most else ""
            print(f"{allowed} components, as there are {len(features)} {unit} with {features.shape[1]} features{some}")
    if options.components > min(features.shape):
        raise ValueError(
            f"{len(features)} {unit} with {features.shape[1]} features have fewer components: lower --components, to "
            f"{most} or fewer"
        )
    about: dict[str, Any] = {}
    if of_good_parts:
        pipeline = assemble_pipeline(options, len(features)).fit(features)
        fitted = package.Head.of(pipeline)
        fold_of = split_left_out(training, groups, options)
        heads = fit_left_out(pipeline, training, groups, fold_of, options) if fold_of else []
        if fold_of and heads:
            keep_left_out(fitted, heads, fold_of, training, groups, options)
        photos = np.array(training.rows)
        add_resamples(options, fitted, pipeline, features, None, photos if groups is None else groups[photos])
    else:
        names = list(classes or []) if patches is None else patches.names(classes)
        if patches is not None and patches.masks is not None:
            options.normal = names[0]
            return fit_labelled(options, training, patches, names, groups)
        pipeline, fitted, about = _with_labels(options, training, names, unit, preparation, groups)
    svm = pipeline[-1].best_estimator_ if options.search else pipeline[-1]
    if not options.no_pictures and patches is None and hasattr(svm, "support_"):
        rows = {i: training.rows[i] for i in svm.support_.tolist()}
        fitted.training_set.examples = _make_examples(preparation.folder(options.images), rows)
    return fitted, {"estimator": describe_estimator(pipeline)} | training.describe() | about


def _is_taught(options: FitOptions, of_good_parts: bool) -> bool:
    """Return whether the maps of photos say which patches are faults: there are a normal class, and no masks."""
    dense = (options.pool or "").startswith("dense")
    return dense and not of_good_parts and options.masks is None and options.normal is not None


def _count_fewest(training: TrainingFeatures, groups: Any, *, of_good_parts: bool, unit: str) -> int:
    """Return the number of rows that the smallest part of a cross-validation is fitted on; all where there is none."""
    rows, numbers = np.array(training.rows), training.numbers.numpy()
    own = rows if groups is None else groups[rows]
    if len(set(own.tolist())) < 2:
        return len(rows)
    try:
        alone = groups is None and unit == "images"
        folds = split_good(own) if of_good_parts else split_folds(numbers, None if alone else own)
    except ValueError:  # a class has one photo
        return len(rows)
    return min(len(fit) for fit, _ in folds)


def _write_model(
    options: FitOptions, network: Any, fitted: Any, layer: Any, pool: Any, training: TrainingFeatures,
    preparation: Preparation, about: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the model, and say so."""
    model = assemble_model(
        network, fitted, training.blocks.first, layer, pool, layers=options.layer or training.blocks.last,
        means=training.means, preparation=preparation, normal=options.normal, about=about,
    )  # fmt: skip
    _tell_left_out(training.blocks.left_out)
    replaced = ", in place of the one that was there" if options.out.exists() else ""
    model.save(options.out)
    note = f"names and small pictures of {len(fitted.examples)} support vectors (leave out with --no-pictures)"
    components = "" if options.classifier == "pca" else f": {options.components} components"
    print(f"wrote {options.out}{replaced}{components}" + (f", {note}" if fitted.examples else ""))


def _name_objects(options: FitOptions, paths: Sequence[Path], *, has_classes: bool) -> list[str] | None:
    """Return the name of the object of each photo, by the level that is typed; None: none is."""
    if options.groups is None:
        return None
    return name_objects(paths, options.images, options.groups, has_classes=has_classes)


def _choose_features(options: FitOptions, backbone: Any, preparation: Preparation) -> Any:
    """Return the layer that features come from, or a list of several: the typed ones, or the last block.

    Raises:
        ValueError: no block has positions.
    """
    if options.features:
        return options.features[0] if len(options.features) == 1 else options.features
    x = first_image(preparation).to(find_device(backbone))
    fine = fine_features(backbone, x) if options.is_dense else []
    if fine:
        print(f"features: {' and '.join(fine)}, whose positions are fine enough for small things (another: --features)")
        return fine[0] if len(fine) == 1 else fine
    layer = last_features(backbone, x)
    print(f"features: {layer}, the last block (another: --features)")
    return layer


def _tell_left_out(left_out: Mapping[str, str]) -> None:
    """Say which blocks have no means, so that maps there would start at zeros."""
    for name, reason in left_out.items():
        print(f"no mean activations of {name} are kept: {reason}")


def _open_masks(options: FitOptions, paths: Sequence[Path]) -> MaskFolder | None:
    """Return the masks of photos, having said which have one; None: none are named."""
    if options.masks is None:
        return None
    names = [path.relative_to(options.images).as_posix() for path in paths]
    masks = MaskFolder(options.masks, names, paths, exif=True, normal=options.normal, page=options.tiff_page)
    unlabelled = f"; {UNLABELLED} is not labelled, and left out" if UNLABELLED in masks.values else ""
    print(f"{masks.describe()}{unlabelled}")
    return masks


def _group_copies(
    options: FitOptions, paths: Sequence[Path], hashes: Mapping[Path, Any], classes: Sequence[str] | None
) -> Any:
    """Return the number of the group of each photo, those that look like copies in one, having said so; None: none do.

    Copies that leave too few groups for a cross-validation are in one only if their files are equal.
    """
    copies = list_copies(paths, hashes)
    groups = [[paths[row] for row in own] for own in copies]
    for line in describe_labels(options.images, groups):
        print(line)
    joined, equal = group_photos(paths, None, copies), group_photos(paths)
    names = [path.relative_to(options.images).parts[0] if classes else "" for path in paths]
    apart = not _can_split(names, joined) and _can_split(names, equal)
    folds = "may be in different folds, as there are too few others" if apart else "are in one fold"
    for line in describe_copies(options.images, groups):
        print(f"{line}; those of one {folds} (--groups decides otherwise)")
    return equal if apart else joined


def _can_split(names: Sequence[str], groups: Any) -> bool:
    """Return whether a cross-validation has photos of each class in two groups."""
    own = range(len(names)) if groups is None else groups.tolist()
    return all(count > 1 for count in Counter(name for name, _ in {*zip(names, own, strict=True)}).values())


def _patches(options: Any, preparation: Preparation, masks: Any) -> PatchOptions | None:
    """Return which patches are kept, and the source of their labels; None: there is one row for each image."""
    if not options.is_dense:
        return None
    resize = None if masks is None else resize_of_masks(preparation)
    neighbours = options.classifier == "neighbours"
    coreset = _CORESET if neighbours and options.coreset is None else options.coreset
    most = {"most": _MOST_NEIGHBOURS} if neighbours else {}
    return PatchOptions(
        masks, resize, options.purity, options.coverage, options.normal or BACKGROUND, options.sample, coreset, **most
    )


def _with_labels(
    options: FitOptions, training: TrainingFeatures, names: Sequence[str], unit: str,
    preparation: Preparation, groups: Any,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Return the fitted pipeline of a classifier, its head, and its choices and scores, having said them."""
    features = training.features.numpy()
    labels = np.array(names)[training.numbers.numpy()]
    counts = Counter(labels.tolist())
    shares = ", ".join(f"{name} {count} ({count / len(labels):.0%})" for name, count in counts.items())
    print(f"{len(counts)} classes: {shares}")
    if options.masks is None:
        tell_empty(options.images, names)
    if len(counts) < 2:
        raise ValueError(f"only {unit} of {labels.tolist()[0]!r} can be read, but a classifier needs two classes")
    own = None if groups is None else groups[training.rows]
    if unit == "patches" or options.search:
        pipeline, fitted, about = _fit_unchosen(options, training, labels, unit, own)
    else:
        if options.classifier not in CLASSIFIERS:  # refuse what is no classifier before the search
            fit_classifier(options, features, labels, 0)
        as_typed, make = replace(options), partial(make_classifier, count=len(labels))
        choice = choose(options, features, labels, own, make)
        pipeline, fitted = fit_classifier(options, features, labels, 0)
        about = {} if choice is None else describe_choice(choice) | tell_score(options, choice, labels)
        if choice is not None:
            tell_next_step(as_typed, choice, features, labels, own, make, preparation.resize)
    share = pipeline.score(features, labels)
    print(f"{share:.0%} correct on the {unit} it was fitted on: training accuracy, not a test score")
    ((largest, count),) = counts.most_common(1)
    if count > _IMBALANCED * len(labels) and options.class_weight != "balanced":
        print(
            f"hint: calling every {'image' if unit == 'images' else 'patch'} {largest!r} would be "
            f"{count / len(labels):.0%} correct, too. Look at the balanced accuracy, and try --class-weight balanced"
        )
    add_resamples(options, fitted, pipeline, features, labels, np.array(training.rows) if own is None else own)
    if unit == "images":
        tell_likeness(keep_likeness(fitted, pipeline, features, labels, own))
    else:
        args = features, labels, np.array(training.rows), groups, training.read_all
        tell_likeness(keep_likeness_of_patches(fitted, pipeline, *args))
    return pipeline, fitted, about


def _fit_unchosen(
    options: FitOptions, training: TrainingFeatures, labels: Any, unit: str, groups: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the fitted pipeline of patches, or of a search, its head and its score, having said how good it is."""
    assert options.components is not None
    features, folds = training.features.numpy(), None
    if unit == "patches" and groups is None:
        groups = np.array(training.rows)  # none of a photo that the others have, too
    if options.search:
        print(f"--search chooses C and gamma alone: {options.components} components (choose yourself: --components)")
    try:
        folds = split_folds(labels, groups)
    except ValueError:
        print("no cross-validation: it needs two images of each class")
    if folds is not None and min(len(rest) for rest, _ in folds) < options.components:
        print(f"no cross-validation: it trains on fewer than {options.components} images; lower --components")
        folds = None
    pipeline, fitted = fit_classifier(options, features, labels, 0 if folds is None else len(folds))
    if options.search:
        tell_search(pipeline[-1])
    if folds is None:
        return pipeline, fitted, {}
    guessed = cross_val_predict(clone(pipeline), features, labels, cv=folds)
    print(f"{len(folds)}-fold cross-validation: {accuracy(labels.tolist(), labels == guessed)}")
    why = explain_poor(labels, guessed)
    if why is not None and unit == "patches":
        weights = ", or --class-weight balanced" if options.class_weight != "balanced" else ""
        print(
            f"hint: {why}. Try finer --features: a patch has the label of most of it, so few are of thin defects"
            f"{weights}. Whatever leaves the features as they are takes seconds"
        )
    elif why is not None:
        print(f"hint: {why}. Leave out --search, and more is chosen, and tried")
    return pipeline, fitted, {"score": {"balanced_accuracy": balance(labels, guessed), "folds": len(folds)}}


def _check(options: FitOptions) -> None:
    """Refuse classifiers that there are not, or whose library is missing, before anything takes long."""
    options.chooses_components = options.components is None
    if options.components is None:
        options.components = _COMPONENTS.get(options.classifier, 8)
    if options.classifier in ("forest", "boosting"):
        from pytorch_grad_cam_pcasvm.head import storage

        storage.skops_io()


def _make_examples(folder: Any, rows: Mapping[int, int]) -> dict[int, Any]:
    """Return the names and small pictures of the support vectors, by their position in the training set."""
    images = Images(folder, thumbnails=_PICTURE)
    return {i: Example(images.id(row), *images.read([row]).thumbnails) for i, row in rows.items()}
