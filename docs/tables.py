"""What the site takes from the code: the table of estimators, and the examples with a title each.

``python docs/tables.py`` writes the table into ``docs/heads.md`` anew.
"""

import inspect
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from sklearn.base import BaseEstimator, is_classifier, is_regressor
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC
from sklearn.utils import all_estimators

from pytorch_grad_cam_pcasvm import NoClosedFormError
from pytorch_grad_cam_pcasvm.head import Decision, Stage, stage_for
from pytorch_grad_cam_pcasvm.head.convert import convert
from pytorch_grad_cam_pcasvm.head.table import transformer_for

BEFORE, REDUCTION, APPROXIMATION = "scaler or selector", "reduction", "kernel approximation"
_TWO_SVMS: Any = [("a", LinearSVC()), ("b", LinearSVC(C=0.1))]
_TWO_SVRS: Any = [("a", SVR()), ("b", SVR(C=0.1))]
_PROBABLE: Any = [("a", LogisticRegression()), ("b", CalibratedClassifierCV(SVC()))]
_OPTIONS: dict[str, dict[str, Any]] = {  # of those that are not fitted as they come
    "BaggingClassifier": {"estimator": LogisticRegression()},
    "BaggingRegressor": {"estimator": SVR()},
    "BernoulliNB": {"binarize": None},
    "ColumnTransformer": {"transformers": [("a", StandardScaler(), [0, 1])]},
    "FeatureUnion": {"transformer_list": [("a", PCA(2)), ("b", PCA(1))]},
    "FixedThresholdClassifier": {"estimator": LogisticRegression()},
    "FunctionTransformer": {"func": np.log1p},
    "LocalOutlierFactor": {"novelty": True},
    "MultiOutputRegressor": {"estimator": SVR()},
    "OutputCodeClassifier": {"estimator": LinearSVC(), "code_size": 3, "random_state": 0},
    "RANSACRegressor": {"estimator": None},
    "SelfTrainingClassifier": {"estimator": LogisticRegression()},
    "StackingClassifier": {"estimators": _TWO_SVMS},
    "StackingRegressor": {"estimators": _TWO_SVRS},
    "TunedThresholdClassifierCV": {"estimator": LogisticRegression()},
    "VotingClassifier": {"estimators": _PROBABLE, "voting": "soft"},
    "VotingRegressor": {"estimators": _TWO_SVRS},
}
EXAMPLES = {  # pages of the gallery: script, title and picture; other scripts have a page with their own name
    "photo": ("photo", "One photo, half temple and half flower", "photo.png"),
    "digits": ("digits", "Digits, a CNN and two SVMs", "digits.png"),
    "chest_xrays": ("photos", "Chest X-rays", "gallery/chest-xrays.png"),
    "blood_cells": ("photos", "Blood cells", "gallery/blood-cells.png"),
    "dogs_and_cats": ("photos", "Dogs and cats, at two layers", "gallery/dogs-and-cats.png"),
    "mistake": ("mistake", "Why was this one wrong?", "mistake.png"),
    "atlas": ("atlas", "An atlas of 1,797 digits", "atlas.png"),
    "deploy": ("deploy", "An exported explanation, also on a web page", "export_page.png"),
    "layers": ("layers", "One decision at three layers", "layers.png"),
    "volume": ("volume", "Volumes", "volume.png"),
    "transformer": ("transformer", "A Vision Transformer, pair by pair", "transformers.png"),
    "paper": ("paper", "The paper's experiment", "paper/chest-xray/maps.png"),
    "which_method": ("which_method", "Which method for which head?", "which_method.png"),
    "which_layer": ("which_layer", "Which layer?", "which_layer.png"),
}


def estimators() -> str:
    """Return a Markdown table of every estimator of scikit-learn that a head takes; each is fitted to find out."""
    rows: dict[tuple[str, type[Stage]], list[str]] = {}
    for name, kind in all_estimators():
        for role, stage in _stages(kind):
            rows.setdefault((role, type(stage)), []).append(f"`{name}`")
    order = [BEFORE, APPROXIMATION, REDUCTION, "classifier", "regressor", "outlier detector", "likeness", "mixture"]
    lines = ["| role | estimators | first stage: what it computes |", "|---|---|---|"]
    for (role, stage), names in sorted(rows.items(), key=lambda row: (order.index(row[0][0]), row[0][1].__name__)):
        lines.append(f"| {role} | {', '.join(names)} | `{stage.__name__}`: {_formula(stage)} |")
    taken = {
        role: sum(len(names) for (of, _), names in rows.items() if of == role) for role in ("classifier", "regressor")
    }
    total = {role: len(all_estimators(type_filter=role)) for role in taken}
    counts = " and ".join(f"{taken[role]} of its {total[role]} {role}s" for role in taken)
    return "\n".join([*lines, "", f"Of scikit-learn {sklearn.__version__} these are {counts}."])


def _formula(stage: type[Stage]) -> str:
    """Return what a stage computes: the formula that its docstring begins with, or its first words."""
    text = (inspect.getdoc(stage) or "").replace("\n", " ").replace("|", "\\|")
    return f"`{text.split('``')[1]}`" if text.startswith("``") else re.split(r"[.,;:] ", text)[0].lower()


def _stages(kind: type) -> Iterator[tuple[str, Stage]]:
    """Yield the roles that an estimator can have in a head, with its stage in each."""
    of_any, as_transformer = (table.dispatch(object) for table in (stage_for, transformer_for))
    if stage_for.dispatch(kind) is of_any and transformer_for.dispatch(kind) is as_transformer:
        return
    fitted = _fitted(kind)
    behind = LinearSVC().fit(np.eye(4), [0, 1, 0, 1])
    for parts in ([fitted, behind], [fitted]):
        try:
            stages = convert(parts)
        except (NoClosedFormError, ValueError):
            continue
        stages = stages[:-1] if len(parts) == 2 else stages
        decides = [isinstance(stage, Decision) for stage in stages]
        if sum(decides) == (len(parts) == 1) and decides[-1] is (len(parts) == 1):
            yield _role(fitted, stages), stages[0]


def _role(fitted: Any, stages: list[Stage]) -> str:
    if isinstance(stages[-1], Decision):
        if stages[-1].voting.about == "likeness":
            return "likeness"
        known = {"GaussianMixture": "mixture", "BayesianGaussianMixture": "mixture"}.get(type(fitted).__name__)
        return known or (
            "classifier" if is_classifier(fitted) else "regressor" if is_regressor(fitted) else "outlier detector"
        )
    if any(stage.reduces for stage in stages):
        return REDUCTION
    return APPROXIMATION if "kernel_approx" in type(fitted).__module__ else BEFORE


def _fitted(kind: Any) -> BaseEstimator:
    """Return an estimator that has seen sixty rows of three classes."""
    rows, labels = np.random.default_rng(0).random((60, 6)), np.arange(60) % 3
    rows += 0.3 * labels[:, None]
    parameters, options = inspect.signature(kind).parameters, {}
    if "estimator" in parameters and parameters["estimator"].default is inspect.Parameter.empty:
        options["estimator"] = SVC(kernel="linear")
    if "n_components" in parameters and "Discriminant" not in kind.__name__:
        options["n_components"] = 2
    options |= _OPTIONS.get(kind.__name__, {})
    name = kind.__name__
    if "Threshold" in name or name == "GaussianProcessClassifier":
        labels = labels % 2
    if name in ("GammaRegressor", "PoissonRegressor"):
        labels = labels + 1
    several = name.startswith(("MultiTask", "MultiOutput", "CCA", "PLSC", "PLSSVD"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(**options).fit(rows, np.stack([labels > 0, labels > 1], 1).astype(int) if several else labels)


def examples(source: Path, target: Path) -> None:
    """Copy the examples for the gallery, which wants a title in reStructuredText, and a picture, in each."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "README.txt").write_text(
        "Examples\n========\n\nScripts of the folder ``examples/``, and what they draw.\n"
    )
    shown = {script for script, _, _ in EXAMPLES.values()}
    others = {file.stem: (file.stem, file.stem.replace("_", " ").capitalize(), None) for file in source.glob("*.py")}
    pages = EXAMPLES | {name: page for name, page in others.items() if name not in shown}
    for number, (name, (script, title, picture)) in enumerate(pages.items()):
        text, code = (source / f"{script}.py").read_text(encoding="utf-8").removeprefix('"""').split('"""', 1)
        head = f"{title}\n{'=' * len(title)}\n\n{text.rstrip()}\n"
        if picture:
            head += f"\n.. image:: /{picture}\n    :alt: {title}\n"
            code += f"\n# sphinx_gallery_thumbnail_path = '{picture}'\n"
        (target / f"{number:02}_{name}.py").write_text(f'"""{head}"""{code}', encoding="utf-8")


if __name__ == "__main__":
    page = Path(__file__).parent / "heads.md"
    before, _, rest = page.read_text(encoding="utf-8").partition("<!-- estimators -->\n")
    after = rest.partition("<!-- end -->")[2]
    page.write_text(f"{before}<!-- estimators -->\n{estimators()}\n<!-- end -->{after}", encoding="utf-8")
