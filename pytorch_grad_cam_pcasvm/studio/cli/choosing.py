"""The choices of ``fit``: the classifier by its name, settings, their score, and advice where that is poor."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.neighbors import NearestNeighbors
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm.studio.cli.arguments import FitOptions
from pytorch_grad_cam_pcasvm.studio.cli.folders import accuracy, name_first
from pytorch_grad_cam_pcasvm.studio.model.backbones import call_by_name
from pytorch_grad_cam_pcasvm.studio.model.choices import COMPONENTS, FEW, can_choose, choose_head, split_folds
from pytorch_grad_cam_pcasvm.studio.model.encoding import fit_with_labels_encoded, name_head
from pytorch_grad_cam_pcasvm.studio.model.resampling import COUNT, attach_resamples, measure_size

_COSTS = {"linear": (0.001, 0.01, 0.1, 1.0)}  # its kernel is not scaled by the number of components
_USUAL_COSTS = 1.0, 10.0  # more is the same wherever the classes can be separated
_SMALL = 8, 16, 32  # components of trees, whose coalitions are to be few
_UNEQUAL = 1.2  # classes differ by more than that factor
_HARDLY = 1 / 3  # of the photos of a class that is hardly found
_BETTER = 0.02  # balanced accuracy, less than which is no advice

Make = Callable[[FitOptions], Any]  # makes the classifier of options, not fitted


def choose(options: FitOptions, features: Any, labels: Any, groups: Any, make: Make) -> Any:
    """Return the choice of settings that are not typed, and set them in ``options``; None: no cross-validation.

    Args:
        options: those of ``fit``.
        features: a row for each photo, shape (N, D).
        labels: its class, shape (N,).
        groups: the number of its object, shape (N,); None: all are different.
        make: makes the classifier.
    """
    components: Sequence[int] = [options.components or 1]
    settings: list[dict[str, Any]] = [{}]
    wanted = _list_chosen(options, labels)
    if wanted and not can_choose(labels, groups):
        objects = "" if groups is None else " in 3 folders of --groups" if options.groups else ", of 3 different photos"
        print(
            f"nothing is chosen, for which each class needs 10 photos{objects}: {describe_head(options)} (choose "
            f"yourself: {', '.join(wanted)})"
        )
        wanted = []
    if "--components" in wanted:
        components = _SMALL if options.classifier in ("forest", "boosting") else COMPONENTS
    if "--C" in wanted or "--class-weight" in wanted:
        settings = list_settings(options, wanted)
    try:
        folds = split_folds(labels, groups)
    except ValueError:
        apart = " and object" if options.groups else " that are no copies" if groups is not None else ""
        print(f"no cross-validation: it needs two images of each class{apart}")
        return None
    if len(components) == 1 and min(len(fit) for fit, _ in folds) < components[0]:
        print(f"no cross-validation: it trains on fewer than {components[0]} images; lower --components")
        return None
    choice = choose_head(features, labels, make(options), settings, components, groups=groups)
    if wanted:
        options.components = choice.chosen.components
        options.C = choice.chosen.settings.get("C", options.C)
        options.class_weight = choice.chosen.settings.get("class_weight", options.class_weight)
        _tell_choice(options, choice, wanted, len(labels), groups)
    return choice


def _list_chosen(options: FitOptions, labels: Any) -> list[str]:
    """Return the options that are to be chosen."""
    wanted = ["--components"] * options.chooses_components
    if options.classifier == "svm":
        counts = Counter(labels.tolist()).values()
        wanted += ["--C"] * (options.C is None)
        wanted += ["--class-weight"] * (options.class_weight is None and max(counts) > _UNEQUAL * min(counts))
    return wanted


def list_settings(options: FitOptions, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings of an SVM that are compared, the simplest first."""
    costs = _COSTS.get(options.kernel or "", _USUAL_COSTS) if "--C" in wanted else (options.C,)
    if "--class-weight" not in wanted:
        return [{"C": cost} for cost in costs]
    return [{"C": cost, "class_weight": weight} for cost in costs for weight in (None, "balanced")]


def describe_head(options: FitOptions, candidate: Any = None) -> str:
    """Return a choice in words."""
    settings = {"C": options.C or 1.0, "class_weight": options.class_weight} | (candidate.settings if candidate else {})
    count = candidate.components if candidate else options.components
    words = f"{count} component{'s' * (count != 1)}"
    if options.classifier == "svm":
        words += f", C {settings['C']:g}"
    return words + (", balanced classes" if settings["class_weight"] == "balanced" else "")


def _tell_choice(options: FitOptions, choice: Any, wanted: Sequence[str], count: int, groups: Any) -> None:
    """Say which candidate was chosen, from which, and how to choose another."""
    photos = f"{len(choice.rows)} photos" if len(choice.rows) == count else f"{len(choice.rows)} of {count} photos"
    if options.groups:
        photos += f" in {len(set(groups.tolist()))} objects"
    other_counts = [one for one in choice.candidates if one.components != choice.chosen.components]
    other = max((one for one in other_counts if one.components == 16), key=lambda one: one.score, default=None)
    other = other or max(other_counts, key=lambda one: one.score, default=None)
    beside = f" ({describe_head(options, other)}: {other.score:.3f})" if other else ""
    print(
        f"chose {describe_head(options, choice.chosen)}, by cross-validation of {photos}: AUROC "
        f"{choice.chosen.score:.3f} \N{PLUS-MINUS SIGN} {choice.chosen.error:.3f}{beside}; choose yourself: "
        f"{', '.join(wanted)}"
    )


def describe_choice(choice: Any) -> dict[str, Any]:
    """Return the chosen settings and their candidates, as a model's file holds them; empty: no choice was made."""
    if choice is None or len(choice.candidates) == 1:
        return {}
    return {"chosen": describe_candidates(choice.chosen, choice.candidates)}


def describe_candidates(chosen: Any, candidates: Sequence[Any]) -> dict[str, Any]:
    """Return the chosen settings among the candidates, as a model's file holds them."""
    table = [
        {"components": one.components, **one.settings, "auroc": one.score, "error": one.error} for one in candidates
    ]
    return {"components": chosen.components, **chosen.settings, "compared": table}


def tell_score(options: FitOptions, choice: Any, labels: Any) -> dict[str, Any]:
    """Say how well photos are classified that a head was not fitted on; return it as a model's file holds it."""
    own = labels[choice.rows]
    print(f"{len(choice.folds)}-fold cross-validation: {accuracy(own.tolist(), own == choice.predicted)}")
    anew = ", each with a choice of its own" if len(choice.candidates) > 1 else ""
    if choice.score == choice.score:
        count, rarest = min((int((own == name).sum()), str(name)) for name in set(own.tolist()))
        doubt = f", which rests on {count} photos of {rarest}" if count < FEW else ""
        print(f"AUROC of these folds{anew}: {choice.score:.3f} \N{PLUS-MINUS SIGN} {choice.error:.3f}{doubt}")
    score = {"auroc": choice.score, "error": choice.error, "balanced_accuracy": balance(own, choice.predicted)}
    return {"score": score | {"folds": len(choice.folds), "photos": len(own), "groups": options.groups}}


def list_recalls(labels: Any, guessed: Any) -> dict[str, float]:
    """Return the share of each class that is found."""
    return {str(name): float((guessed[labels == name] == name).mean()) for name in sorted(set(labels.tolist()))}


def balance(labels: Any, guessed: Any) -> float:
    """Return the balanced accuracy of predictions."""
    recalls = list_recalls(labels, guessed).values()
    return sum(recalls) / len(recalls)


def explain_poor(labels: Any, guessed: Any) -> str | None:
    """Return in words why predictions are poor; None: they are not."""
    recalls = list_recalls(labels, guessed)
    chance = 1 / len(recalls)
    missed = [name for name, recall in recalls.items() if recall < min(_HARDLY, chance)]
    if missed:
        return f"{' and '.join(missed)} {'hardly' if any(map(recalls.get, missed)) else 'not'} found"
    if balance(labels, guessed) < (1 + chance) / 2:
        return f"a balanced accuracy below {(1 + chance) / 2:.0%} is poor"
    return None


def tell_next_step(
    typed: FitOptions, choice: Any, features: Any, labels: Any, groups: Any, make: Make, resize: str | None
) -> None:
    """Name the most promising next step after a poor score, having tried several on the same features.

    Args:
        typed: the options of ``fit``, without what was chosen.
        choice: what was.
        features: as for :func:`choose`.
        labels: as for :func:`choose`.
        groups: as for :func:`choose`.
        make: as for :func:`choose`.
        resize: how photos become images.
    """
    own, part = labels[choice.rows], None if groups is None else groups[choice.rows]
    why = explain_poor(own, choice.predicted)
    if why is None:
        return
    if not can_choose(own, part):
        print(f"hint: {why}. More photos are most likely to help: each class needs 10 to choose, or to try, anything")
        return
    accuracy_so_far, tried = balance(own, choice.predicted), dict[str, float]()
    for words, (classifier, settings) in _list_tries(typed, own, make).items():
        other = choose_head(features[choice.rows], own, classifier, settings, [choice.chosen.components], groups=part)
        tried[words] = balance(own, other.predicted)
    best = max(tried, key=lambda words: tried[words], default="")
    if best and tried[best] > accuracy_so_far + _BETTER:
        flags = {
            "--classifier forest": ("C", "gamma", "kernel", "class_weight"),
            "--kernel linear": ("C", "class_weight"),
        }
        typed_flags = [
            f"--{name.replace('_', '-')}" for name in flags.get(best, ()) if getattr(typed, name) is not None
        ]
        way = f"type it in place of {' and '.join(typed_flags)}" if typed_flags else "add it"
        print(
            f"hint: {why}. Tried on the same features: {best} has a balanced accuracy of {tried[best]:.0%}, and this "
            f"one {accuracy_so_far:.0%}; {way}"
        )
        return
    vain = (
        f"On the same features, {', '.join(f'{words} ({share:.0%})' for words, share in tried.items())} is no better. "
    )
    way = (
        "--resize stretch, which sees the rim, too"
        if resize == "crop"
        else "--pool max, or --features of an earlier layer"
    )
    print(f"hint: {why}. {vain if tried else ''}Try {way}")


def _list_tries(options: FitOptions, labels: Any, make: Make) -> Mapping[str, tuple[Any, Sequence[Mapping[str, Any]]]]:
    """Return alternatives to the typed options, each with its classifier and the settings to choose from."""
    tries: dict[str, tuple[Any, Sequence[Mapping[str, Any]]]] = {}
    counts = Counter(labels.tolist()).values()
    classifier = make(options)
    if max(counts) > _UNEQUAL * min(counts) and classifier.get_params().get("class_weight", "") is None:
        tries["--class-weight balanced"] = classifier, [{"class_weight": "balanced"}]
    if options.classifier != "svm":
        other = replace(options, classifier="svm", class_weight=None)
        tries["--classifier svm"] = make(other), [{"C": cost} for cost in _USUAL_COSTS]
        return tries
    if options.kernel in (None, "rbf"):
        other = replace(options, kernel="linear", class_weight=None)
        tries["--kernel linear"] = make(other), [{"C": cost} for cost in _COSTS["linear"]]
    if find_spec("skops"):
        tries["--classifier forest"] = make(replace(options, classifier="forest", class_weight=None)), [{}]
    return tries


_CLASSIFIERS = (
    "a classifier is svm, forest, boosting, pca, neighbours, residual, or module:Class such as "
    "sklearn.ensemble:ExtraTreesClassifier"
)


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
        return NearestNeighbors(n_neighbors=1)
    if options.classifier == "svm":
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
        pipeline = fit_with_labels_encoded(make_pipeline(*reduction, classifier), features, labels)
    fitted = name_head(pipeline)
    if fitted.classes_ is None:
        raise ValueError(f"--classifier {options.classifier} has no classes_ once it is fitted: name a classifier")
    return pipeline, fitted


def add_resamples(options: FitOptions, fitted: Any, pipeline: Any, rows: Any, labels: Any, groups: Any) -> None:
    """Give a head refits on bootstrap samples of its rows, having said what they cost, or why there are none.

    Args:
        options: those of ``fit``.
        fitted: the head.
        pipeline: its estimators.
        rows: of features, (R, D).
        labels: of the rows; None: there are none.
        groups: of the rows, which are drawn together; None: each is one of its own.

    Raises:
        ValueError: they are asked for, and cannot be made.
    """
    began = time.monotonic()
    reason = attach_resamples(
        fitted, pipeline, rows, labels, options.resample, groups=groups, seed=0, ask=f"--resample {COUNT}"
    )
    if reason is not None:
        print(f"maps do not say how sure they are: {reason}")
    if fitted.resamples is not None:
        heads, seconds = fitted.resamples.heads, time.monotonic() - began
        print(
            f"maps say how sure they are, by {len(heads)} refits on other samples of the same photos: {seconds:.1f} s, "
            f"{measure_size(heads) / 1e6:.1f} MB of the file (--resample 0: none)"
        )
        unstable = [str(b + 1) for b in fitted.resamples.unstable]
        if unstable:
            listed = name_first(unstable, len(unstable) if len(unstable) < 10 else 8)
            print(
                f"not stable: {len(unstable)} of {len(fitted.resamples.stability)} components, numbers {listed}: other "
                "photos would make others of them, so their maps are those of chance; those of decisions have errors "
                "of their own"
            )


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
