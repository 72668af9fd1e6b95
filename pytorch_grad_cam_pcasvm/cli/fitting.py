"""The command that fits a head."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm.cli.anomalies import keep_left_out
from pytorch_grad_cam_pcasvm.cli.arguments import CLASSIFIERS, FitOptions
from pytorch_grad_cam_pcasvm.cli.choosing import (
    choose,
    describe_choice,
    explain_poor,
    list_recalls,
    tell_next_step,
    tell_score,
)
from pytorch_grad_cam_pcasvm.cli.folders import accuracy, classes_in, tell_bad, tell_empty, two_classes
from pytorch_grad_cam_pcasvm.cli.groups import group_photos, name_objects
from pytorch_grad_cam_pcasvm.cli.models import choose_device, first_image, make_named
from pytorch_grad_cam_pcasvm.cli.patches import PatchOptions
from pytorch_grad_cam_pcasvm.cli.preparation import (
    choose_preparation,
    resize_of_masks,
    tell_crop,
    with_whites,
)
from pytorch_grad_cam_pcasvm.cli.tiling import apply_tiles, check_photos, tell_stretched
from pytorch_grad_cam_pcasvm.cli.training import TrainingSet, training_set
from pytorch_grad_cam_pcasvm.model.backbones import call_by_name
from pytorch_grad_cam_pcasvm.model.preparation import Preparation

_CLASSIFIERS = (
    "a classifier is svm, forest, boosting, neighbours, residual, or module:Class such as "
    "sklearn.ensemble:ExtraTreesClassifier"
)
_COMPONENTS = {"svm": 16, "neighbours": 64, "residual": 16}  # of others 8, whose coalitions are few
_OF_GOOD_PARTS = ("neighbours", "residual")
_MOST_NEIGHBOURS = 50_000  # patches to choose from
_CORESET = 0.1  # of patches, as PatchCore
_PICTURE = 64  # pixels, of the picture of a support vector
_NORMAL = ("good", "normal", "ok", "healthy", "negative", "background", "clean")  # classes that may be an absence
_IMBALANCED = 0.8  # the share of the largest class from which accuracy says little


def fit(options: FitOptions) -> None:
    """Fit scaler, PCA and classifier on a folder of images, and write a model."""
    from pytorch_grad_cam_pcasvm.network.pools import is_dense

    typed = options.components is not None
    _check(options)
    of_good_parts = _of_good_parts(options)
    classes = classes_in(options.images, ("train", "training"))
    if of_good_parts:
        _one_class(options, classes)
    elif options.masks is None:
        classes = two_classes(options.images, classes)
    _check_normal(options, classes, of_good_parts)
    objects = _name_objects(options, of_good_parts)
    made = make_named(options, options.size)
    made.net.to(choose_device(options.device))
    preparation = choose_preparation(made, options, None, fits=True)
    layer, pool = _choose_features(options, made.net, preparation), _parse_pool(options)
    made, preparation, layer, pool = apply_tiles(options, made, preparation, layer, pool)
    folder = preparation.folder(options.images)
    check_photos(options, preparation, folder.paths, one_size=f"--pool {options.pool}" if is_dense(pool) else "")
    tell_stretched(made.net, preparation, folder.paths)
    with_whites(preparation, folder.paths, options.images)
    tell_crop(preparation, folder.paths)
    patches = _patches(options, preparation, folder)
    groups = group_photos(folder.paths, objects)
    with training_set(options, options.images, made.net, preparation, layer, pool, options.layer, patches) as training:
        fitted, about = _fit_head(options, training, classes, patches, preparation, groups, typed=typed)
    _write_model(options, made, fitted, layer, pool, training, preparation, about)
    if of_good_parts:
        print("it was fitted on good parts alone: to see how well it finds defects, evaluate it with --masks")
    if fitted.enumerated is not None:
        print(f"{fitted.enumerated.extra_repr()}. Methods that need a gradient do not explain it; ContributionCAM does")


def _fit_head(
    options: FitOptions, training: TrainingSet, classes: Sequence[str] | None, patches: PatchOptions | None,
    preparation: Preparation, groups: Any, *, typed: bool,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """Return the fitted head, and what the model says of its fit."""
    from pytorch_grad_cam_pcasvm.model.fitting import describe_estimator

    features = training.features.numpy()
    tell_bad(training.bad)
    unit = "images" if patches is None else "patches"
    if patches is not None:
        print(f"{len(features)} patches of {len(set(training.rows))} images")
    most = max(1, min(features.shape) - 1)
    if options.components > most and not typed:
        options.components = most
        if _of_good_parts(options) or patches is not None or options.search:
            print(f"{most} components, as there are {len(features)} {unit} with {features.shape[1]} features")
    if options.components > min(features.shape):
        raise ValueError(
            f"{len(features)} {unit} with {features.shape[1]} features have fewer components: lower --components, to "
            f"{most} or fewer"
        )
    about: dict[str, Any] = {}
    if _of_good_parts(options):
        pipeline = _pipeline(options, len(features)).fit(features)
        fitted = package.Head.of(pipeline)
        keep_left_out(fitted, pipeline, training, groups, options)
    else:
        names = list(classes or []) if patches is None else patches.names(classes)
        pipeline, fitted, about = _with_labels(options, training, names, unit, preparation, groups, typed=typed)
    svm = pipeline[-1].best_estimator_ if options.search else pipeline[-1]
    if not options.no_pictures and patches is None and hasattr(svm, "support_"):
        rows = {i: training.rows[i] for i in svm.support_.tolist()}
        fitted.training_set.examples = _examples(preparation.folder(options.images), rows)
    counts = {"images": len(set(training.rows)), "rows": len(features), "left_out": training.blocks.left_out}
    return fitted, {"estimator": describe_estimator(pipeline)} | counts | about


def _write_model(
    options: FitOptions, made: Any, fitted: Any, layer: Any, pool: Any, training: TrainingSet, preparation: Preparation,
    about: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write the model, and say so."""
    from pytorch_grad_cam_pcasvm.model.fitting import assemble_model

    model = assemble_model(
        made, fitted, training.blocks.first, layer, pool, layers=options.layer or training.blocks.last,
        means=training.means, preparation=preparation, normal=options.normal, about=about,
    )  # fmt: skip
    _tell_left_out(training.blocks.left_out)
    replaced = ", in place of the one that was there" if options.out.exists() else ""
    model.save(options.out)
    note = f"names and small pictures of {len(fitted.examples)} support vectors (leave out with --no-pictures)"
    print(f"wrote {options.out}{replaced}: {options.components} components" + (f", {note}" if fitted.examples else ""))


def _name_objects(options: FitOptions, of_good_parts: bool) -> list[str] | None:
    """Return the name of the object of each photo, by the level that is typed; None: none is."""
    from pytorch_grad_cam_pcasvm.data.images import Images

    if options.groups is None:
        return None
    images = Images(options.images, lambda picture: picture, thumbnails=0)
    has_classes = images.names is not None and not of_good_parts
    return name_objects(images.data.paths, options.images, options.groups, has_classes=has_classes)


def _choose_features(options: FitOptions, backbone: Any, preparation: Preparation) -> Any:
    """Return the layer that features come from, or a list of several: those typed, or the last block.

    Raises:
        ValueError: no block has positions.
    """
    from pytorch_grad_cam_pcasvm.network.auto_layers import last_features
    from pytorch_grad_cam_pcasvm.network.modules import device_of

    if options.features:
        return options.features[0] if len(options.features) == 1 else options.features
    layer = last_features(backbone, first_image(preparation).to(device_of(backbone)))
    print(f"features: {layer}, the last block (another: --features)")
    return layer


def _parse_pool(options: FitOptions) -> Any:
    from pytorch_grad_cam_pcasvm.network.pools import parse_pool

    return parse_pool(options.pool or "mean")


def _tell_left_out(left_out: Mapping[str, str]) -> None:
    """Say which blocks have no means, so that maps there would start at zeros."""
    for name, reason in left_out.items():
        print(f"no mean activations of {name} are kept: {reason}")


def _of_good_parts(options: Any) -> bool:
    """Return whether the estimator learns what is normal, from images without classes."""
    from sklearn.base import is_outlier_detector

    if options.classifier in _OF_GOOD_PARTS:
        return True
    estimator = _classifier(options, 0)
    return is_outlier_detector(estimator) or not hasattr(estimator, "predict")


def _one_class(options: Any, classes: Sequence[str] | None) -> None:
    """Refuse images of several classes for what learns from good parts alone."""
    if options.masks is not None:
        raise ValueError(
            f"--classifier {options.classifier} learns from good parts alone: leave out --masks, and measure with "
            "evaluate --masks"
        )
    if classes is not None and len(classes) > 1 and options.groups != 1:
        raise ValueError(
            f"--classifier {options.classifier} learns from good parts alone, but {options.images} has folders of "
            f"{', '.join(classes)}: name that of the good ones, such as {options.images / classes[0]}"
        )


def _check_normal(options: Any, classes: Sequence[str] | None, of_good_parts: bool) -> None:
    """Refuse a normal class that there is not; say that one may be it."""
    if options.normal is None:
        likely = [name for name in classes or () if name.lower() in _NORMAL]
        if likely and not of_good_parts:
            print(
                f"hint: if {likely[0]!r} means that there is no defect, add --normal {likely[0]}: maps then show what "
                "speaks against it"
            )
        return
    if of_good_parts:
        raise ValueError(f"--classifier {options.classifier} learns from good parts alone: leave out --normal")
    if options.normal not in (classes or ()):
        folders = f"the folders are {', '.join(classes)}" if classes else "there are no folders of classes"
        raise ValueError(f"--normal: there is no class {options.normal!r}, {folders}")


def _patches(options: Any, preparation: Preparation, folder: Any) -> PatchOptions | None:
    """Return which patches are kept, and what labels them; None: there is one row for each image."""
    from pytorch_grad_cam_pcasvm.network.pools import is_dense

    if not is_dense(_parse_pool(options)):
        return None
    masks, resize = None, None
    if options.masks is not None:
        from pytorch_grad_cam_pcasvm.data.images import Images
        from pytorch_grad_cam_pcasvm.data.mask_classes import UNLABELLED
        from pytorch_grad_cam_pcasvm.data.masks import MaskFolder

        resize = resize_of_masks(preparation)
        images = Images(folder, thumbnails=0)
        names = [images.id(row) for row in range(len(images))]
        masks = MaskFolder(options.masks, names, folder.paths, exif=preparation.exif)
        unlabelled = f"; {UNLABELLED} is not labelled, and left out" if UNLABELLED in masks.values else ""
        print(f"masks of {masks.count} of {len(images)} images; on the others there is nothing{unlabelled}")
    neighbours = options.classifier == "neighbours"
    coreset = _CORESET if neighbours and options.coreset is None else options.coreset
    most = {"most": _MOST_NEIGHBOURS} if neighbours else {}
    return PatchOptions(masks, resize, options.purity, options.sample, coreset, **most)


def _with_labels(
    options: FitOptions, training: TrainingSet, names: Sequence[str], unit: str, preparation: Preparation, groups: Any,
    *, typed: bool,
) -> tuple[Any, Any, dict[str, Any]]:  # fmt: skip
    """Return the fitted pipeline of a classifier, its head, and what was chosen and measured, having said so."""
    import numpy as np

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
        if options.classifier not in CLASSIFIERS:  # another may be none, which is told before anything is chosen
            _fit_classifier(options, features, labels, 0)
        as_typed, make = replace(options), partial(_classifier, count=len(labels))
        choice = choose(options, features, labels, own, make, typed=typed)
        pipeline, fitted = _fit_classifier(options, features, labels, 0)
        about = {} if choice is None else describe_choice(options, choice) | tell_score(options, choice, labels)
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
    return pipeline, fitted, about


def _fit_unchosen(
    options: FitOptions, training: TrainingSet, labels: Any, unit: str, groups: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the fitted pipeline of patches, or of a search, its head and its score, having said how good it is."""
    import numpy as np
    from sklearn.base import clone
    from sklearn.model_selection import cross_val_predict

    from pytorch_grad_cam_pcasvm.model.choices import split_folds

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
    pipeline, fitted = _fit_classifier(options, features, labels, 0 if folds is None else len(folds))
    if options.search:
        _tell_search(pipeline[-1])
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
    recalls = list_recalls(labels, guessed).values()
    return pipeline, fitted, {"score": {"balanced_accuracy": sum(recalls) / len(recalls), "folds": len(folds)}}


def _pipeline(options: Any, count: int) -> Any:
    """Return a scaler, a PCA, and what stands behind it, not fitted, for a number of rows."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    reduction = StandardScaler(), PCA(options.components, random_state=0)
    return make_pipeline(*reduction, *([] if options.classifier == "residual" else [_classifier(options, count)]))


def _fit_classifier(options: FitOptions, features: Any, labels: Any, folds: int) -> tuple[Any, Any]:
    """Return the fitted pipeline, a scaler, a PCA, and a classifier or the search for an SVM; and its head.

    Args:
        options: those of ``fit``.
        features: shape (R, D).
        labels: shape (R,).
        folds: the number of folds of the cross-validation in which a search runs anew; 0: there is none.

    Raises:
        ValueError: it is no classifier, or a class has too few images for a search.
    """
    import numpy as np
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline

    from pytorch_grad_cam_pcasvm.cli.words import fitted_on_words, head_of

    *reduction, classifier = (step for _, step in _pipeline(options, len(labels)).steps)
    if options.search:
        smallest = min(Counter(labels.tolist()).values())
        # Within a fold's training set.
        inner = min(5, smallest - math.ceil(smallest / folds)) if folds else 0
        if inner < 2:
            raise ValueError("--search compares by cross-validation, for which a class has too few images")
        # Behind the reduction, which does not know the labels: it is fitted once, and not for each of the candidates.
        grid = _grid(options, make_pipeline(*reduction).fit_transform(features))
        classifier = GridSearchCV(classifier, grid, scoring="balanced_accuracy", cv=StratifiedKFold(inner))
    with np.errstate(divide="ignore", invalid="ignore"):  # of features that are all alike, which the head refuses
        pipeline = fitted_on_words(make_pipeline(*reduction, classifier), features, labels)
    fitted = head_of(pipeline)
    if fitted.classes_ is None:
        raise ValueError(f"--classifier {options.classifier} has no classes_ once it is fitted: name a classifier")
    return pipeline, fitted


def _classifier(options: Any, count: int) -> Any:
    """Return the classifier that was asked for, not fitted, for a number of images."""
    module, _, name = options.classifier.rpartition(":")
    weight = None if options.class_weight == "none" else options.class_weight
    settings = {"class_weight": weight, "random_state": 0}
    if options.classifier == "forest":
        from sklearn.ensemble import RandomForestClassifier

        return RandomForestClassifier(**settings)
    if options.classifier == "boosting":
        from sklearn.ensemble import HistGradientBoostingClassifier

        # With its own 20, a tree of few images has no branch.
        return HistGradientBoostingClassifier(min_samples_leaf=min(20, max(2, count // 10)), **settings)
    if options.classifier == "neighbours":
        from sklearn.neighbors import NearestNeighbors

        return NearestNeighbors(n_neighbors=1)
    if options.classifier == "svm":
        from sklearn.svm import SVC

        return SVC(
            C=options.C or 1.0, kernel=options.kernel or "rbf", gamma=options.gamma or "scale",
            class_weight=weight,
        )  # fmt: skip
    classifier = call_by_name("--classifier", module, name, _CLASSIFIERS)
    if not all(hasattr(classifier, method) for method in ("fit", "get_params", "set_params")):
        raise TypeError(
            f"--classifier {options.classifier}: {name}() must return a classifier as scikit-learn has them, with fit, "
            f"predict, get_params and set_params, but returned a {type(classifier).__name__}"
        )
    if weight is not None:
        if "class_weight" not in classifier.get_params():
            raise ValueError(f"--class-weight {options.class_weight}, but {options.classifier} has no class_weight")
        classifier.set_params(class_weight=weight)
    return classifier


def _tell_search(search: Any) -> None:
    """Say what was best, and how much better it is than scikit-learn's own choice."""
    best = " ".join(f"--{name} {value:.3g}" for name, value in search.best_params_.items())
    candidates = search.cv_results_["params"]
    usual = search.cv_results_["mean_test_score"][candidates.index(_usual(search.param_grid))]
    print(
        f"search: {best} is the best of {len(candidates)}, with a balanced accuracy of {search.best_score_:.0%}; that "
        f"of C=1 and gamma=scale is {usual:.0%}"
    )


def _check(options: FitOptions) -> None:
    """Refuse classifiers that there are not, or whose library is missing, before anything takes long."""
    if options.components is None:
        options.components = _COMPONENTS.get(options.classifier, 8)
    if options.classifier not in ("svm", "residual"):
        _classifier(options, 0)
    if options.classifier in ("forest", "boosting"):
        from pytorch_grad_cam_pcasvm.head.storage import skops_io

        skops_io()


def _grid(options: Any, components: Any) -> dict[str, list[float]]:
    """Return what ``--search`` compares."""
    grid = {"C": [0.1, 1.0, 10.0, 100.0]}
    if options.kernel != "linear":
        scale = 1 / (options.components * components.var())  # scikit-learn's gamma="scale"
        grid["gamma"] = [factor * scale for factor in (0.1, 1.0, 10.0)]
    return grid


def _usual(grid: dict[str, list[float]]) -> dict[str, float]:
    """Return scikit-learn's own choice, which is among what is compared."""
    return {"C": 1.0} | ({"gamma": grid["gamma"][1]} if "gamma" in grid else {})


def _examples(folder: Any, rows: Mapping[int, int]) -> dict[int, Any]:
    """Return the names and small pictures of the support vectors, by their position in the training set."""
    from pytorch_grad_cam_pcasvm.data.images import Images
    from pytorch_grad_cam_pcasvm.head.storage import Example

    images = Images(folder, thumbnails=_PICTURE)
    return {i: Example(images.id(row), *images.read([row]).thumbnails) for i, row in rows.items()}
