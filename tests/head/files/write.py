"""Write heads to files, with the numbers that they must still give: run it in a checkout of the version to be pinned.

``PYTHONPATH=<that checkout> python tests/head/files/write.py tests/head/files/<its version>``. The numbers are those of
that version, and under ``sklearn`` those of the estimators themselves.
"""

import contextlib
import json
import sys
from pathlib import Path

import numpy as np
import sklearn
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, KernelPCA
from sklearn.ensemble import BaggingRegressor, RandomForestClassifier, VotingClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression, PoissonRegressor
from sklearn.mixture import GaussianMixture
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
from sklearn.tree import DecisionTreeClassifier

from pytorch_grad_cam_pcasvm import Head
from pytorch_grad_cam_pcasvm.version import __version__

drawn = np.random.default_rng(7)
ROWS, WIDTH = 21, 4
NUMBERS = np.arange(ROWS) % 3
FEATURES = drawn.normal(size=(ROWS, WIDTH)) + 1.5 * np.eye(3, WIDTH)[NUMBERS] + 2
NAMES = np.array(["ant", "bee", "cat"])[NUMBERS]
TWO = np.array(["bad", "good"])[(FEATURES[:, 0] > 2.5).astype(int)]
BITS = np.stack([FEATURES[:, 0] > 2, FEATURES[:, 1] > 2], 1).astype(int)
COUNTS = drawn.poisson(2, ROWS)
QUERY = drawn.normal(size=(5, WIDTH)) + 2.3

PINNED = {
    "pooled": ([StandardScaler(), PCA(2), SVC()], NAMES),
    "dense": ([StandardScaler(), PCA(2), LogisticRegression()], NAMES),
    "whitened": ([PCA(2, whiten=True), SVC(kernel="poly", degree=2)], TWO),
    "pairs": ([PCA(2), OneVsOneClassifier(LinearSVC())], NAMES),
    "pair": ([PCA(2), OneVsOneClassifier(SVC(kernel="sigmoid"))], TWO),
    "pairwise": ([PCA(2), SVC(kernel="linear", decision_function_shape="ovo")], NAMES),
    "ties": ([PCA(2), SVC(break_ties=True)], NAMES),
    "rest": ([PCA(2), OneVsRestClassifier(LogisticRegression())], NAMES),
    "isotonic": ([PCA(2), CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=2)], NAMES),
    "sigmoid": ([PCA(2), CalibratedClassifierCV(SVC(), cv=2)], TWO),
    "mean": ([VotingClassifier([("a", LogisticRegression()), ("b", GaussianNB())], voting="soft", weights=[1, 2])],
             NAMES),
    "bayes": ([MinMaxScaler(clip=True), GaussianNB()], NAMES),
    "mixture": ([PCA(2), GaussianMixture(2, random_state=0)], None),
    "neighbours": ([PCA(3), KNeighborsClassifier(3)], NAMES),
    "perceptron": ([Normalizer(), MLPClassifier((3,), max_iter=30, random_state=0)], NAMES),
    "regressor": ([KernelPCA(2, kernel="rbf"), SVR()], FEATURES[:, 3]),
    "counts": ([PCA(2), PoissonRegressor()], COUNTS),
    "bag": ([PCA(2), BaggingRegressor(SVR(), n_estimators=2, random_state=0)], FEATURES[:, 3]),
    "outputs": ([PCA(2), LinearRegression()], FEATURES[:, :2]),
    "labels": ([PCA(2), MultiOutputClassifier(SVC())], BITS),
    "one class": ([PCA(2), OneClassSVM()], None),
    "bank": ([PCA(2), NearestNeighbors(n_neighbors=2)], None),
    "forest": ([PCA(2), RandomForestClassifier(1, max_depth=2, random_state=0)], NAMES),
    "tree": ([StandardScaler(), PCA(2), DecisionTreeClassifier(max_depth=2, random_state=0)], TWO),
}  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"version": __version__, "sklearn": sklearn.__version__, "query": QUERY.tolist(), "heads": {}}
    for name, (steps, labels) in PINNED.items():
        fitted = make_pipeline(*steps).fit(FEATURES, labels)
        try:
            head = Head.of(fitted)
        except Exception as error:  # an earlier version may have no such head
            print(f"{name}: {error!s:.80}")
            continue
        has_training_set = hasattr(head, "training_set")
        if has_training_set and name in ("pooled", "dense", "forest"):
            head.examples = {0: (f"{name}/0.jpg", b"RIFF"), 5: ("bee/5.jpg", b"\0\xff")}
            pool = "dense" if name == "dense" else "mean"
            head.training_set.preparation = {"resize": "crop", "white_level": 255, "pool": pool, "normal": "ant"}
            head.training_set.means = {
                "layer3": torch.arange(12.0).reshape(3, 2, 2) / 7, "layer4": torch.full((2, 1, 1), 0.5).double()
            }  # fmt: skip
        head.save(folder / f"{name}.safetensors")
        kept["heads"][name] = numbers(head, fitted)
        if has_training_set:
            kept["heads"][name]["training"] = {
                "examples": {row: [name, list(picture)] for row, (name, picture) in head.examples.items()},
                "preparation": head.training_set.preparation,
                "means": {layer: means.tolist() for layer, means in head.training_set.means.items()},
            }
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in kept.pop("heads").items()]
    begin = json.dumps(kept)[:-1]
    (folder / "numbers.json").write_text(f'{begin}, "heads": {{\n' + ",\n".join(lines) + "\n}}\n")


def numbers(head, fitted) -> dict:
    trace = head(torch.from_numpy(QUERY))
    decision, voting = trace.values[-1], head.voting
    result = {
        "digest": head.digest(),
        "state": bytes(head.get_extra_state().tolist()).decode(),
        "classes": None if head.classes_ is None else head.classes_.tolist(),
        "decision": decision.tolist(),
        "margins": voting.margins(decision).tolist(),
        "scores": head.scores(trace).tolist(),
        "labels": head.labels(trace).tolist(),
        "sklearn": {},
    }
    if head.feature_mean is not None:
        result["feature_mean"] = head.feature_mean.tolist()
    if not hasattr(head.stages[-1], "predictor"):
        gradient, log_scale = head.pullback(trace, {len(head.stages): voting.matrix.unsqueeze(0)})
        result["gradient"] = (gradient * log_scale.exp().unsqueeze(-1)).tolist()
    seen = [dict(getattr(stage, "seen", {})) for stage in head.stages]
    if any(seen):
        result["seen"] = seen
    with contextlib.suppress(ValueError):
        result["probabilities"] = voting.probabilities(decision).tolist()
    if voting.n_classes > 1:
        result["against"] = voting.seed(torch.tensor([1]), torch.tensor([0])).tolist()
    for method in ("decision_function", "predict", "predict_proba"):
        if hasattr(fitted, method):
            values = getattr(fitted, method)(QUERY)
            result["sklearn"][method] = [v.tolist() for v in values] if isinstance(values, list) else values.tolist()
    return result


if __name__ == "__main__":
    main()
