"""Classifiers: the estimators behind the scaler and the PCA, by the name that is typed."""

import math
from collections import Counter
from typing import Any

from pytorch_grad_cam_pcasvm.cli.arguments import CLASSIFIERS
from pytorch_grad_cam_pcasvm.model.backbones import call_by_name

_CLASSIFIERS = (
    "a classifier is svm, forest, boosting, neighbours, residual, or module:Class such as "
    "sklearn.ensemble:ExtraTreesClassifier"
)
GOOD_PARTS = ("neighbours", "residual")


def learns_from_good_parts(options: Any) -> bool:
    """Return whether the estimator learns from good parts alone, without classes."""
    if options.classifier in CLASSIFIERS:
        return options.classifier in GOOD_PARTS
    from sklearn.base import is_outlier_detector

    estimator = make_classifier(options, 0)
    return is_outlier_detector(estimator) or not hasattr(estimator, "predict")


def make_classifier(options: Any, count: int) -> Any:
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


def assemble_pipeline(options: Any, count: int) -> Any:
    """Return a scaler, a PCA, and a classifier behind it, not fitted, for a number of rows."""
    from sklearn.decomposition import PCA
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    reduction = StandardScaler(), PCA(options.components, random_state=0)
    return make_pipeline(*reduction, *([] if options.classifier == "residual" else [make_classifier(options, count)]))


def fit_classifier(options: Any, features: Any, labels: Any, folds: int) -> tuple[Any, Any]:
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

    from pytorch_grad_cam_pcasvm.cli.words import fitted_on_words, name_head

    *reduction, classifier = (step for _, step in assemble_pipeline(options, len(labels)).steps)
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
    fitted = name_head(pipeline)
    if fitted.classes_ is None:
        raise ValueError(f"--classifier {options.classifier} has no classes_ once it is fitted: name a classifier")
    return pipeline, fitted


def tell_search(search: Any) -> None:
    """Say which settings were best, and how much better they are than scikit-learn's own choice."""
    best = " ".join(f"--{name} {value:.3g}" for name, value in search.best_params_.items())
    candidates = search.cv_results_["params"]
    usual = search.cv_results_["mean_test_score"][candidates.index(_usual(search.param_grid))]
    print(
        f"search: {best} is the best of {len(candidates)}, with a balanced accuracy of {search.best_score_:.0%}; that "
        f"of C=1 and gamma=scale is {usual:.0%}"
    )


def _grid(options: Any, components: Any) -> dict[str, list[float]]:
    """Return the settings that ``--search`` compares."""
    grid = {"C": [0.1, 1.0, 10.0, 100.0]}
    if options.kernel != "linear":
        scale = 1 / (options.components * components.var())  # scikit-learn's gamma="scale"
        grid["gamma"] = [factor * scale for factor in (0.1, 1.0, 10.0)]
    return grid


def _usual(grid: dict[str, list[float]]) -> dict[str, float]:
    """Return scikit-learn's own choice, which is among the compared settings."""
    return {"C": 1.0} | ({"gamma": grid["gamma"][1]} if "gamma" in grid else {})
