"""Every message that names a way out: it is refused here, and whoever follows the advice gets a map, or what it names.

A message without a row fails: ``test_every_message_has_a_row`` reads the package's source for them.
"""

import ast
import atexit
import copy
import dataclasses
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
import sklearn
import torch
from atlases import Pictures
from atlases import layer as atlas_layer
from atlases import problem as atlas_problem
from packaging.version import Version
from PIL import Image
from problems import Step, closed_form, explained
from pyarrow import parquet
from sklearn import cluster, covariance, ensemble, gaussian_process, impute, naive_bayes, neighbors, preprocessing
from sklearn.base import BaseEstimator
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import FeatureAgglomeration
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import NMF, PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import RFE
from sklearn.gaussian_process import kernels
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import GammaRegressor, LogisticRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler
from sklearn.semi_supervised import LabelPropagation
from sklearn.svm import SVC, SVR, LinearSVC, OneClassSVM
from sklearn.tree import DecisionTreeClassifier
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.utils.data import TensorDataset
from torchvision.models import VisionTransformer
from torchvision.transforms import ToTensor
from towers import Attention, Tower

import pytorch_grad_cam_pcasvm
from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ClosedFormLayerCAM,
    ClosedFormShapleyCAM,
    ClosedFormXGradCAM,
    ContributionCAM,
    DensityTarget,
    Head,
    HotellingTarget,
    LogRatioTarget,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    RelevanceCAM,
    ResidualTarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    TiledNet,
    atlas,
    evaluation,
    export,
    extract_features,
    figures,
    mean_activations,
    recombined,
    register_jacobian,
    stage_for,
)
from pytorch_grad_cam_pcasvm.head.elementwise import Elementwise
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.studio.data.files import list_files
from pytorch_grad_cam_pcasvm.studio.data.masks import MaskFolder
from pytorch_grad_cam_pcasvm.studio.export import files, graph
from pytorch_grad_cam_pcasvm.studio.model.backbones import _read_state, _refuse_size
from pytorch_grad_cam_pcasvm.studio.pictures.read import read_picture

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("rules")]
PACKAGE = Path(pytorch_grad_cam_pcasvm.__file__).parent


@dataclass(frozen=True)
class Row:
    """A message and its ways out.

    Attributes:
        place: a file of the package and a part of the source of the call there that refuses.
        refused: what is refused.
        message: a part of the message.
        ways: for a part of each way out, a function that follows it and returns maps, or what it names; or a reason why
            it cannot be followed here.
        by_values: for an estimator without a gradient, what follows the advice to use its values.
    """

    place: str
    refused: Callable[[], Any]
    message: str
    ways: dict[str, Callable[[], Any] | str] = field(default_factory=dict)
    by_values: Callable[[], Any] | str = "as for other estimators"


BY_VALUES = "use ContributionCAM, which needs values alone"


# --- the messages in the source ---------------------------------------------------------------------------------------

# What raises an error with ways out; _refuse_member is called with the advice.
REFUSING = ("refuse", "_refused", "NoClosedFormError", "NoProgramError", "_refuse_member")
# Messages that have no row, and why.
WITHOUT = {
    "network/site.py: is a layer of Keras in a module of torch": "tests/network/test_keras.py follows it",
    "studio/model/fitting.py: explain has no layer by default": "tests/network/test_auto_layers.py follows it",
    "methods/gaps.py: they are lost in the rounding": "tests/methods/test_gaps.py follows it",
    "methods/gaps.py: rounding decides the head's value": "tests/methods/test_gaps.py has it, which no head here does",
    "methods/gaps.py: the network computes where it cannot be seen": "tests/methods/test_gaps.py has it",
    "studio/model/backbones.py: cannot be downloaded": "tests/cli/test_commands.py follows it",
    "studio/model/file.py: are neither beside": "tests/model/test_model.py follows it",
    "studio/model/writing.py: which no file can hold": "tests/model/test_model.py follows it",
    "studio/model/file.py: there is no model": "tests/model/test_model.py follows it",
    "studio/model/file.py: that was passed as a module": "tests/model/test_model.py follows it",
    "studio/model/file.py: runs code of yours": "tests/model/test_model.py follows it",
    "studio/model/teaching.py: has no means of the training images": "tests/model/test_teaching.py follows it",
    "head/storage.py: which kept one mean a channel": "tests/model/test_training_means.py loads such a file",
    "studio/export/outputs.py: do not add up to their values": "a guard: explain refuses what is known to end there",
    "tape/recorder.py: a function scripted by torch.jit": "tests/tape/test_scripted.py follows it",
    "targets/poles.py: rounding decides what": "tests/methods/test_poles.py follows it",
    "methods/training_mean.py: cannot be made of it": "tests/model/test_training_means.py follows it",
    "studio/model/model.py: becomes an image is not known": "tests/model/test_model.py follows it",
    "studio/model/model.py: take the batches": "tests/model/test_model.py follows it",
    "studio/model/model.py: leave out labels": "tests/model/test_model.py follows it",
    "maps/recombination.py: has no gradient, and the reduction": "tests/methods/test_enumerated.py follows it",
    "studio/cli/refusals.py: --at names a position": "tests/cli/test_dense_commands.py follows it",
    "studio/cli/models.py: start near the mean of the training images": "tests/cli/test_preparation.py follows it",
    "studio/export/outputs.py: whitening divides component": "tests/head/test_alike.py follows it",
    "studio/atlas/explorer/machine.py: take this head's decision apart": "tests/atlas/test_explorer.py follows it",
    "studio/atlas/explorer/machine.py: needs Python": "tests/methods/test_enumerated.py follows it",
    "head/enumerated.py: self.reason, *self.ways_out": "passes on why there is no closed form, which has a row",
    "head/registry.py: and asked for its values, it fails": "tests/head/test_true_causes.py follows it",
    "head/registry.py: and takes no features": "tests/head/test_true_causes.py shows it",
    "head/predictor.py: makes NaN or infinity of a row": "tests/head/test_true_causes.py follows it",
    "head/fit_checks.py: a list is taken for the steps": "tests/head/test_true_causes.py follows it",
    "network/loaded.py: makes NaN or infinity of": "tests/network/test_loaded.py shows it",
    "network/loaded.py: has NaN or infinite values, and so": "tests/network/test_loaded.py follows it",
    "head/registry.py: own interface, which knows no classes": "tests/head/test_boosters.py follows it",
    "head/storage.py: has other values than when it was written": "needs two versions of a library",
    "calculus/backward.py: {error.reason}": "passes the message of a rule on, each of which has a row",
    "calculus/backward.py: (advice if self.start is None": "passes a refusal on, with the way out of every path",
    "path/record.py: error.reason, *(other": "passes a refusal on, with the way out of every path",
    "tape/python_calls.py: was optimised for inference": "is for single precision, and here all is in double",
    "calculus/backward.py: there is no gradient of": "as that of autograd.py",
    "path/autograd.py: autograd has no gradient of": "is for single precision, and here all is in double",
    "network/features.py: flex_attention compiles itself": "scaled_dot_product_attention is in many tests",
    "tape/tape.py: half precision is too coarse": "no step is known here that fails in single precision",
    "head/stack.py: the pullback of": "says that a pullback is wrong, and names no way out",
    "head/estimators/ensembles.py: {type(estimator).__name__} of {type(member).__name__}": "has a row for each call",
    "studio/export/files.py: {runtime} has no {name}": "needs npm and a connection",
    "methods/boundary_path.py: there are no activations of": "as targets/boundary_head.py, which has a row",
    "studio/evaluation/subject.py: the network must be a PCASVMNet": "as atlas/build.py, which has a row",
    "studio/export/explainer.py: was written by a later version": "nobody has written that version yet",
    "studio/export/explainer.py: is a model, but not an explanation": "as the rows of export.onnx, which it names",
    "studio/export/files.py: does not fit into one ONNX file": "needs a network of 2 GB",
}


# Other errors and warnings need a row where they advise a name of the package's interface.
INTERFACE = [
    *sorted(pytorch_grad_cam_pcasvm.__all__, key=len, reverse=True), "explain", "mean_activations", "pool",
    "reshape_transform", "baseline", "jacobian", r"figures\.\w+", r"atlas\.\w+", r"export\.\w+",
]  # fmt: skip
ADVICE = re.compile(
    r"\b(use|pass|call|fit|put|make|give|take|choose|start at|leave|name|write)\b[^:]*\b("
    + "|".join(INTERFACE)
    + r")\b"
)


@dataclass(frozen=True)
class Call:
    file: str
    line: int
    source: str
    needs_row: bool

    def is_at(self, place: str) -> bool:
        file, _, part = place.partition(": ")
        return self.file == file and part in self.source


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Return all nodes of the package's syntax trees, with their files."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def calls() -> list[Call]:
    """Return every call in the package that makes an error or a warning, with its source on one line."""
    collected = []
    for path, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute) and path.name != "errors.py":
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            refuses, other = name in REFUSING, name == "warn" or name.endswith(("Error", "Warning"))
            if refuses or other:
                source = ast.unparse(node)
                needed = refuses or ADVICE.search(source.partition("(")[2]) is not None
                collected.append(Call(path.relative_to(PACKAGE).as_posix(), node.lineno, source, needed))
    return collected


def test_every_message_has_a_row() -> None:
    places = [*(row.place for row in ROWS), *WITHOUT]
    needed = [call for call in calls() if call.needs_row and not any(map(call.is_at, places))]
    missing = [f"{call.file}:{call.line}: {call.source}" for call in needed]
    assert not missing, "add a Row that follows the advice of:\n" + "\n".join(missing)


def test_every_row_is_of_a_message() -> None:
    assert [
        place for place in [*(row.place for row in ROWS), *WITHOUT] if not any(c.is_at(place) for c in calls())
    ] == []


def test_messages_that_troubleshooting_quotes_are_those_of_the_package() -> None:
    """Of a message in quotation marks, dots are in the place of names, and so is what an f-string fills in."""
    page = (PACKAGE.parent / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    text = re.sub(r"```.*?```|`[^`\n]+`", "", page, flags=re.DOTALL)
    texts = [ast.unparse(node) for _, node in nodes() if isinstance(node, ast.JoinedStr)]
    texts += [node.value for _, node in nodes() if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    said = [re.sub(r"{[^}]*}", "…", text).lower() for text in texts]
    parts = [part.strip(" ',") for quoted in re.findall(r'"([^"]+)"', text) for part in quoted.lower().split("…")]
    quoted = {" ".join(part.split()) for part in parts} - {""}
    assert len(quoted) > 12
    assert {part for part in quoted if not any(part in message for message in said)} == set()


# --- networks and heads -----------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Stepped(nn.Module):
    """A step behind ``stem``, (N, 4, 6, 6), and ``later`` behind it, if it leaves that shape."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.stem, self.step, self.later = nn.Conv2d(3, 4, 3, padding=1), step, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.step(self.stem(x).tanh())
        return self.later(y).tanh().flatten(1) if y.shape[1:] == (4, 6, 6) else y.flatten(1)


IMAGES = random(40, 3, 6, 6) + (torch.arange(40) % 2).reshape(-1, 1, 1, 1)


def head_for(backbone: nn.Module, images: Any = IMAGES, **options: Any) -> Any:
    labels = torch.arange(len(images)) % 2
    features, y = extract_features(backbone, [(images, labels)], progress=False, **options)
    return make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, y)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def stepped(
    step: Callable[[Tensor], Tensor] | nn.Module,
    method: Any = ClosedFormGradCAM,
    layer: Any = "stem",
    targets: Any = None,
    calling: dict[str, Any] | None = None,
    images: torch.Tensor | None = None,
    **options: Any,
) -> SignedMaps:
    """Return the maps of a network with such a step, behind which the head was fitted."""
    backbone = seeded(lambda: Stepped(step if isinstance(step, nn.Module) else Step(step)))
    net = PCASVMNet(backbone, head_for(backbone)).eval()
    return method(net, layer if isinstance(layer, list) else [layer], **options).explain(
        IMAGES[:3] if images is None else images, targets, **(calling or {})
    )


class Checked(ClosedFormGradCAM):
    """A method that compares itself with autograd first."""

    def explain(self, images: Any, *args: Any, **options: Any) -> SignedMaps:
        self.check(images)
        return super().explain(images, *args, **options)


def mixing(x: torch.Tensor) -> torch.Tensor:
    """Take half of the mean image from each."""
    return x - x.mean(0) / 2


def path(place: str, message: str, step: Any, ways: dict[str, Any] | None = None) -> Row:
    """Return the row of a step that Grad-CAM refuses: jacobian="auto" is a way out of all of them."""
    by_autograd = {"pass jacobian='auto'": partial(stepped, step, jacobian="auto")}
    return Row(place, partial(stepped, step), message, by_autograd | (ways or {}))


def secant(place: str, message: str, step: Any, ways: dict[str, Any]) -> Row:
    """Return the row of a step that contributions refuse."""
    return Row(place, contributions(step), message, ways)


def contributions(step: Any) -> Callable[[], SignedMaps]:
    return partial(stepped, step, ContributionCAM, baseline="zero")


BACKBONE = seeded(
    lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
)
PICTURES = random(120, 3, 6, 6) + torch.eye(3).repeat(40, 1)[..., None, None]
with torch.no_grad():
    FEATURES = StandardScaler().fit_transform(BACKBONE(PICTURES).numpy())
FEATURES = FEATURES + 0.3 * np.random.default_rng(0).normal(size=FEATURES.shape)
THREE = np.arange(120) % 3
TWO = (THREE == 0).astype(int)
NUMBERS = 1 + FEATURES[:, 0] ** 2
COLUMNS = np.eye(3, dtype=int)[THREE]  # one for each class


def head_of(estimator: Any, y: Any = THREE) -> Head:
    return closed_form(estimator.fit(FEATURES, y))


def maps_of(estimator: Any, y: Any = THREE, targets: Any = None, method: Any = ClosedFormGradCAM) -> SignedMaps:
    """Return the maps of a head that is fitted here, or of a list of fitted estimators."""
    fitted = estimator if isinstance(estimator, list | Head) else estimator.fit(FEATURES, y)
    net = PCASVMNet(BACKBONE, fitted).eval()
    usual = PCATarget(0) if net.head.decision_position is None else None
    usual = SVMTarget(0) if y is COLUMNS else usual
    return method(net, ["0"]).explain(PICTURES[:4], targets or usual)


def head(place: str, message: str, estimator: Any, ways: dict[str, Any], y: Any = THREE, targets: Any = None) -> Row:
    """Return the row of an estimator that is refused; for each way out, another one, or a function, or a reason."""
    follow = {
        way: other if callable(other) or isinstance(other, str) else partial(maps_of, other, y, targets)
        for way, other in ways.items()
    }
    by_values = partial(maps_of, estimator, y, method=ContributionCAM)
    return Row(place, partial(head_of, estimator, y), message, follow, by_values)


def shows(result: Any) -> bool:
    """Return whether something came of it: maps that are not blank, or numbers, or an object."""
    if isinstance(result, SignedMaps):
        return bool(result.maps.isfinite().all()) and bool((result.maps != 0).any())
    if isinstance(result, Tensor | np.ndarray):
        return bool(torch.as_tensor(result).detach().isfinite().all())
    return result is not None


class Labelling:
    """A classifier that no library knows, on two numbers."""

    n_features_in_ = 2

    def __init__(self, classes: Any) -> None:
        if classes is not None:
            self.classes_ = classes

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.digitize(X[:, 0] + X[:, 1], [-0.5, 0.5])


def forest() -> Any:
    return make_pipeline(PCA(2), ensemble.RandomForestClassifier(3, random_state=0))


def program_of(estimator: Any) -> Any:
    net = PCASVMNet(copy.deepcopy(BACKBONE).float(), estimator.fit(FEATURES, THREE)).eval()
    return export.program(ContributionCAM(net, ["0"]), PICTURES[:2].float())


def maps_of_labelling(target: Any = None) -> SignedMaps:
    return maps_of([PCA(2).fit(FEATURES), Labelling(np.arange(3))], targets=target, method=ContributionCAM)


class Unnamed(Labelling):
    """A classifier that does not name its classes, and whose probabilities decide nothing."""

    def __init__(self) -> None:
        super().__init__(None)

    def predict_proba(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.full((len(X), 3), 1 / 3)


class Probabilities:
    """What has a predict_proba alone, with so many columns."""

    n_features_in_ = 2

    def __init__(self, count: int) -> None:
        self.count = count

    def predict_proba(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.full((len(X), self.count), 1 / self.count)


class Wavering(Labelling):
    """A classifier that predicts at random."""

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return np.random.default_rng().integers(0, 3, len(X))


def several_labels(kind: Any) -> list[Any]:
    """Return a PCA, and a classifier of two labels at a time."""
    pca = PCA(2).fit(FEATURES)
    p = pca.transform(FEATURES)
    return [pca, kind(DecisionTreeClassifier(max_depth=2)).fit(p, (p > 0).astype(int))]


def loaded_again(estimator: Any, **options: Any) -> Head:
    """Return the head of a file."""
    path = folder() / "estimators.safetensors"
    Head.of([PCA(2).fit(FEATURES), estimator]).save(path)
    return Head.load(path, **options)


# --- crops and signals ------------------------------------------------------------------------------------------------


class Crops(nn.Module):
    """Four crops of each image in one batch: features (N, 4, 5), or with ``rows``, (4 N, 5)."""

    def __init__(self, *, rows: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.rows = rows
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x.flatten(0, 1))
        return features if self.rows else features.unflatten(0, (len(x), -1))


class MeanOfCrops(Crops):
    """The mean of the crops' features, (N, 5)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


CROPS = random(40, 4, 3, 6, 6) + (torch.arange(40) % 2).reshape(-1, 1, 1, 1, 1)


def beside(t: Tensor) -> Tensor:
    return t.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2, 3)


def crops(how: str, method: Any = ClosedFormGradCAM, transform: Any = beside) -> SignedMaps:
    """Return maps of four crops of each image, whose mean is taken by a pool or in the network."""
    backbone = MeanOfCrops() if how == "in the network" else Crops(rows=how == "rows")
    pool = {"rows": lambda t: t.unflatten(0, (-1, 4)).mean(1), "pooled": lambda t: t.mean(1), "in the network": None}[
        how
    ]
    net = PCASVMNet(backbone, head_for(backbone, CROPS, pool=pool), pool=pool).eval()
    return method(net, ["body.1"], transform).explain(CROPS[:3])


# --- heads ------------------------------------------------------------------------------------------------------------

BUILD, ENSEMBLES = "head/registry.py: ", "head/estimators/ensembles.py: "
PREDICTORS, TRANSFORMERS = "head/estimators/predictors.py: ", "head/estimators/transformers.py: "
UNSUPPORTED = "head/registry.py: reason, usual, *own"


class Patched(SVC):
    """A function that is not scikit-learn's, from a library that should compute the same."""

    __module__ = "sklearnex.svm"

    def decision_function(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return super().decision_function(X) * 1.01


class Own(SVC):
    """A subclass with a function of its own."""

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return 1 - super().predict(X)


class OwnPipeline(Pipeline):
    """A pipeline with a function of its own."""

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return super().predict(X)


class OwnSearch(GridSearchCV):
    """A search with a function of its own."""

    def predict(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return super().predict(X)


class Doubled(BaseEstimator):
    """A transformer that nothing is registered for."""

    def fit(self, X: Any, y: Any = None) -> "Doubled":  # noqa: N803 - scikit-learn's name
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: Any) -> Any:  # noqa: N803 - scikit-learn's name
        return 2 * X


class Square(Stage):
    """A stage without a secant."""

    def evaluate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x**2, x

    def pullback(self, saved: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return 2 * grad * saved.unsqueeze(1), None


class SquareWithSecant(Square):
    """The same with a secant."""

    def secant(self, saved: Tensor, saved0: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (saved + saved0).unsqueeze(1), None


class Halved(Stage):
    """An affine stage that says so."""

    linear = True

    def evaluate(self, x: Tensor) -> tuple[Tensor, None]:
        return x / 2, None

    def pullback(self, saved: None, grad: Tensor) -> tuple[Tensor, None]:
        return grad / 2, None


def registered(estimator: Any, stage: Callable[[], Stage], y: Any = THREE) -> SignedMaps:
    """Return the maps of an estimator whose class is registered, before an SVC."""
    registered_class = type("Registered", (type(estimator),), {})
    fitted = registered_class(**estimator.get_params()).fit(FEATURES, y)
    stage_for.register(registered_class)(lambda estimator: stage())
    return maps_of([fitted, SVC().fit(FEATURES, y)], y)


def registered_machine(estimator: Any, y: Any = THREE) -> SignedMaps:
    """Return the maps of a classifier whose class is registered, as an SVM."""
    registered_class = type("Registered", (type(estimator),), {})
    stage_for.register(registered_class)(lambda estimator: stage_for(SVC().fit(FEATURES, y)))
    return maps_of(registered_class(**estimator.get_params(deep=False)), y)


def features_of_masks(pool: str, masks: bool, **options: Any) -> np.ndarray:
    """Return features of pictures with masks, or with labels."""
    labels = torch.zeros(8, 8, 8) if masks else torch.zeros(8)
    return extract_features(BACKBONE, [(PICTURES[:8], labels)], "0", pool=pool, progress=False, **options)[0]


def net_at(pool: str) -> PCASVMNet:
    rows, _ = extract_features(BACKBONE, [PICTURES[:20]], "0", pool=pool, progress=False)
    return PCASVMNet(
        BACKBONE, make_pipeline(PCA(2), SVC()).fit(rows, rows[:, 0] > np.median(rows[:, 0])), "0", pool=pool
    )


def neighbours_of(pool: str) -> PCASVMNet:
    rows, _ = extract_features(BACKBONE, [PICTURES], "0", pool=pool, progress=False)
    return PCASVMNet(BACKBONE, neighbors.NearestNeighbors().fit(rows), "0", pool=pool).eval()


def at_a_place(pool: str) -> SignedMaps:
    return ContributionCAM(net_at(pool).eval(), ["0"], baseline="zero").explain(PICTURES[:2], SVMTarget(at=(1, 1)))


def recombined_at(place: Any) -> SignedMaps:
    net = net_at("dense").eval()
    targets = [PCATarget(b, at=place) for b in range(2)]
    components = ContributionCAM(net, ["0"], baseline="zero").explain(PICTURES[:2], targets)
    return recombined(components, net.head, SVMTarget())


def behind(stage: Stage) -> Head:
    """Return a head that begins with a stage."""
    return Head([stage, *head_of(LinearSVC()).stages])


def outliers(targets: Any) -> Callable[[], SignedMaps]:
    return partial(maps_of, make_pipeline(StandardScaler(), PCA(3)), targets=targets)


def stacked(member: Any, **options: Any) -> Any:
    return ensemble.StackingClassifier([("member", member)], cv=3, **options)


def bagged(member: Any, **options: Any) -> Any:
    return ensemble.BaggingClassifier(member, 4, random_state=0, **options)


def voted(member: Any, **options: Any) -> Any:
    return ensemble.VotingClassifier([("member", member)], **({"voting": "soft"} | options))


class FewClasses(LogisticRegression):
    """As a fold without one of the classes fits it."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803 - scikit-learn's name
        return super().fit(X[y < 2], y[y < 2])


def calibrated_on_some() -> Any:
    fitted = CalibratedClassifierCV(LinearSVC(), cv=3).fit(FEATURES, THREE)
    fitted.calibrated_classifiers_[0].estimator = LinearSVC().fit(FEATURES[THREE < 2], THREE[THREE < 2])
    return closed_form(fitted)


def calibrated_by_temperature() -> Head:
    if Version(sklearn.__version__) < Version("1.8"):
        pytest.skip("this scikit-learn has no temperature scaling")
    return head_of(CalibratedClassifierCV(bagged(LogisticRegression()), method="temperature", cv=2))


def bagged_on_some() -> Any:
    fitted = bagged(LogisticRegression()).fit(FEATURES, THREE)
    fitted.estimators_[0] = LogisticRegression().fit(FEATURES[THREE < 2], THREE[THREE < 2])
    return closed_form(fitted)


def final_that_decides_nothing() -> Head:
    registered_class = type("Registered", (LogisticRegression,), {})
    stage_for.register(registered_class)(lambda estimator: Elementwise("tanh"))
    return head_of(stacked(LinearSVC(), final_estimator=registered_class()))


def lacking(attribute: str, version: str | None) -> Head:
    """Return the head of an SVM as an earlier version would have left it."""
    machine = SVC().fit(FEATURES, THREE)
    delattr(machine, attribute)
    if version:
        machine._sklearn_version = version
    return Head.of(machine)


def hooked(*, remove: bool) -> SignedMaps:
    """Return the maps of a head with a hook that changes something, or after removing it."""
    net = PCASVMNet(BACKBONE, make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)).eval()
    handle = net.head.stages[0].register_forward_hook(lambda module, args, output: 2 * output)
    if remove:
        handle.remove()
    return ClosedFormGradCAM(net, ["0"]).explain(PICTURES[:3])


def doubled_backbone() -> SignedMaps:
    backbone = nn.Sequential(*BACKBONE, Step(lambda x: 2 * x)).eval()
    net = PCASVMNet(backbone, make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)).eval()
    return ClosedFormGradCAM(net, ["0"]).explain(PICTURES[:3])


def many_classes(estimator: Any, y: Any = COLUMNS) -> Callable[[], SignedMaps]:
    return partial(maps_of, estimator, y)


PIECEWISE = "its output is piecewise constant, its gradient 0"
REFUSED_MEMBER = "is not supported: fit it with "
HEADS = [
    # What _INSTEAD and _usual say.
    head(UNSUPPORTED, PIECEWISE + ": fit SVC", ensemble.RandomForestClassifier(3), {"fit SVC": SVC()}),
    head(UNSUPPORTED, PIECEWISE + ": fit SVR", ensemble.RandomForestRegressor(3), {"fit SVR": SVR()}, NUMBERS),
    head(
        UNSUPPORTED,
        "RadiusNeighborsClassifier has no closed-form Jacobian",
        neighbors.RadiusNeighborsClassifier(3, outlier_label="most_frequent"),
        {"fit KNeighborsClassifier": neighbors.KNeighborsClassifier()},
    ),
    *(
        Row(
            UNSUPPORTED,
            partial(head_of, estimator),
            "fit OneClassSVM or EllipticEnvelope, or fit PCA and explain ResidualTarget() or HotellingTarget()",
            {
                "fit OneClassSVM": partial(maps_of, OneClassSVM(), targets=SVMTarget()),
                "EllipticEnvelope": partial(maps_of, covariance.EllipticEnvelope(), targets=SVMTarget()),
                "ResidualTarget()": outliers(ResidualTarget()),
                "HotellingTarget()": outliers(HotellingTarget()),
            },
        )
        for estimator in (ensemble.IsolationForest(n_estimators=3),)
    ),
    head(
        UNSUPPORTED,
        "since it searches for training images, and decides nothing: fit KNeighborsClassifier",
        neighbors.KNeighborsTransformer(),
        {"fit KNeighborsClassifier": neighbors.KNeighborsClassifier()},
    ),
    head(
        UNSUPPORTED,
        "Birch has no closed-form Jacobian here",
        cluster.Birch(n_clusters=3),
        {
            "fit GaussianMixture, whose components are clusters": GaussianMixture(3, random_state=0),
            "to reduce features PCA": make_pipeline(PCA(2), SVC()),
            "add yours with stage_for.register(Birch)": partial(
                registered, cluster.Birch(n_clusters=6), partial(Elementwise, "tanh")
            ),
        },
    ),
    head(
        UNSUPPORTED,
        "since it groups its training images, and no others",
        cluster.DBSCAN(),
        {"fit GaussianMixture": GaussianMixture(3, random_state=0)},
    ),
    head(
        UNSUPPORTED,
        "stops at a tolerance: fit PCA",
        make_pipeline(preprocessing.MinMaxScaler(), NMF(2)),
        {"fit PCA": make_pipeline(preprocessing.MinMaxScaler(), PCA(2))},
    ),
    head(
        UNSUPPORTED,
        PIECEWISE,
        make_pipeline(preprocessing.Binarizer(), SVC()),
        {"fit StandardScaler": make_pipeline(StandardScaler(), SVC())},
    ),
    head(
        UNSUPPORTED,
        "estimates a covariance, and decides nothing",
        covariance.LedoitWolf(),
        {"fit EllipticEnvelope": covariance.EllipticEnvelope()},
        targets=SVMTarget(),
    ),
    head(
        "head/estimators/likeness.py: as a step before others has no closed form",
        "KMeans as a step before others has no closed form: fit PCA",
        make_pipeline(cluster.KMeans(3), SVC()),
        {"fit PCA": make_pipeline(PCA(3), SVC())},
    ),
    head(
        "head/estimators/likeness.py: was fitted to find outliers in its training set",
        "and knows nothing of other images: fit it with novelty=True",
        neighbors.LocalOutlierFactor(),
        {"fit it with novelty=True": neighbors.LocalOutlierFactor(novelty=True)},
        targets=SVMTarget(),
    ),
    head(
        "head/estimators/likeness.py: has the metric",
        "LocalOutlierFactor has the metric 'cosine': fit it with 'euclidean', or also put a Normalizer before it",
        neighbors.LocalOutlierFactor(novelty=True, metric="cosine"),
        {
            "fit it with 'euclidean'": neighbors.LocalOutlierFactor(novelty=True),
            "also put a Normalizer before it, for angles": make_pipeline(
                Normalizer(), neighbors.LocalOutlierFactor(novelty=True)
            ),
        },
        targets=SVMTarget(),
    ),
    Row(
        "targets/scores.py: needs the log-density of a mixture",
        lambda: maps_of(PCA(2), targets=DensityTarget()),
        "fit GaussianMixture, or explain the value of another density or distance with SVMTarget()",
        {
            "fit GaussianMixture": partial(maps_of, GaussianMixture(2, random_state=0), targets=DensityTarget()),
            "SVMTarget()": partial(maps_of, neighbors.KernelDensity(), targets=SVMTarget()),
        },
    ),
    head(
        "head/estimators/likeness.py: neighbours among",
        "NearestNeighbors has 121 neighbours among 120 training rows",
        neighbors.NearestNeighbors(n_neighbors=121),
        {"fit it with a smaller n_neighbors": neighbors.NearestNeighbors(n_neighbors=120)},
    ),
    head(
        "head/estimators/likeness.py: KernelDensity has the",
        "KernelDensity has the kernel 'tophat': fit it with 'gaussian'",
        neighbors.KernelDensity(kernel="tophat"),
        {"fit it with 'gaussian'": neighbors.KernelDensity()},
        targets=SVMTarget(),
    ),
    Row(
        "network/extraction.py: are for rows of positions",
        partial(features_of_masks, pool="mean", masks=False, sample=3),
        "are for rows of positions: use pool='dense'",
        {"use pool='dense'": partial(features_of_masks, pool="dense", masks=False, sample=3)},
    ),
    Row(
        "network/extraction.py: the labels are masks",
        partial(features_of_masks, pool="mean", masks=True),
        "the labels are masks, (8, 8, 8), but there is one row of features for each image",
        {
            "use pool='dense'": partial(features_of_masks, pool="dense", masks=True),
            "give one label per image": partial(features_of_masks, pool="mean", masks=False),
        },
    ),
    Row(
        "studio/model/model.py: takes a head that decides once for each image",
        lambda: figures.plot_jacobian(net_at("dense").eval(), None, PICTURES[:1]),
        "plot_jacobian takes a head that decides once for each image",
        {
            "explain it with cam.explain": partial(at_a_place, pool="dense"),
            "draw it with figures.plot_positions": lambda: figures.plot_positions(
                torch.zeros(2, 8, 8), net_at("dense").eval()(PICTURES[:2])[:, 0]
            ),
        },
    ),
    Row(
        "head/anomalies.py: is of distances to training patches",
        lambda: neighbours_of("mean").anomaly_score(PICTURES[:2], neighbours=3),
        "neighbours= is of distances to training patches",
        {
            "fit NearestNeighbors on features of positions, pool='dense'": lambda: neighbours_of("dense").anomaly_score(
                PICTURES[:2], neighbours=3
            )
        },
    ),
    Row(
        "targets/places.py: at= names a place",
        partial(at_a_place, pool="mean"),
        "at= names a place, but there is one row of features for each image",
        {"fit the head on features of positions, pool='dense'": partial(at_a_place, pool="dense")},
    ),
    Row(
        "maps/recombination.py: of one position alone",
        partial(recombined_at, "max"),
        "maps of decisions are sums of component maps of one position alone",
        {
            "make them with PCATarget(b, at=(row, column)) for every b": partial(recombined_at, (1, 1)),
            "explain the decisions, cam.explain(x, [SVMTarget(at=...)])": partial(at_a_place, pool="dense"),
        },
    ),
    Row(
        UNSUPPORTED,
        lambda: closed_form(naive_bayes.CategoricalNB().fit(abs(FEATURES).astype(int), THREE)),
        "takes categories, not numbers",
        {"fit GaussianNB": partial(maps_of, naive_bayes.GaussianNB())},
    ),
    head(
        UNSUPPORTED,
        "features have none: leave it out",
        make_pipeline(impute.SimpleImputer(), SVC()),
        {"leave it out": SVC()},
    ),
    head(
        UNSUPPORTED,
        "PolynomialFeatures has no closed-form Jacobian here",
        make_pipeline(preprocessing.PolynomialFeatures(), LinearSVC()),
        {
            "fit Nystroem": make_pipeline(Nystroem(kernel="poly", n_components=20, random_state=0), LinearSVC()),
            "add yours with stage_for.register(PolynomialFeatures)": partial(
                registered, preprocessing.PolynomialFeatures(), partial(Elementwise, "tanh")
            ),
        },
    ),
    head(
        UNSUPPORTED,
        "QuantileTransformer has no",
        make_pipeline(preprocessing.QuantileTransformer(n_quantiles=9), SVC()),
        {
            "fit PowerTransformer": make_pipeline(preprocessing.PowerTransformer(), SVC()),
            "add yours with stage_for.register(QuantileTransformer)": partial(
                registered, preprocessing.QuantileTransformer(n_quantiles=9), partial(Elementwise, "tanh")
            ),
        },
    ),
    # What is refused for other reasons.
    head(
        "head/elsewhere.py: computes other values than scikit-learn's",
        "Patched of sklearnex computes other values",
        Patched(),
        {"fit scikit-learn's own": SVC()},
    ),
    head(
        BUILD + "of its own, which would not be explained",
        "Own is a SVC with a predict of its own",
        Own(),
        {"add it with stage_for.register(Own)": partial(registered_machine, Own(), TWO)},
        TWO,
    ),
    head(
        BUILD + "of its own, which would not be explained",
        "OwnPipeline is a Pipeline with a predict",
        OwnPipeline([("scaler", StandardScaler()), ("machine", SVC())]),
        {
            "add it with stage_for.register(OwnPipeline)": partial(
                registered_machine, OwnPipeline([("scaler", StandardScaler()), ("machine", SVC())])
            ),
            "pass its fitted steps as a list": lambda: maps_of([
                step for _, step in OwnPipeline([("s", StandardScaler()), ("m", SVC())]).fit(FEATURES, THREE).steps
            ]),
        },
    ),
    head(
        BUILD + "of its own, which would not be explained",
        "OwnSearch is a GridSearchCV with a predict",
        OwnSearch(SVC(), {"C": [1.0]}),
        {
            "add it with stage_for.register(OwnSearch)": partial(registered_machine, OwnSearch(SVC(), {"C": [1.0]})),
            "pass its best_estimator_": lambda: maps_of([
                OwnSearch(SVC(), {"C": [1.0]}).fit(FEATURES, THREE).best_estimator_
            ]),
        },
    ),
    *(
        Row(
            BUILD + "which it has in scikit-learn",
            partial(lacking, attribute, version),
            message,
            {"fit it again": partial(maps_of, SVC()), "install that version": "one version is installed here"},
        )
        for attribute, version, message in (
            ("_gamma", "1.2.2", f"in scikit-learn {sklearn.__version__}; it was fitted with scikit-learn 1.2.2: fit"),
            ("support_vectors_", None, "which the InconsistentVersionWarning names when it is unpickled"),
        )
    ),
    head(
        "head/estimators/likeness.py: {type(estimator).__name__} has the kernel",
        "KernelRidge has the kernel 'laplacian'",
        KernelRidge(kernel="laplacian"),
        {f"'{name}'": KernelRidge(kernel=name) for name in ("linear", "rbf", "poly", "sigmoid")},
        NUMBERS,
        SVMTarget(),
    ),
    head(
        "head/estimators/likeness.py: is constant",
        "is constant, so there is nothing to explain",
        gaussian_process.GaussianProcessRegressor(kernels.ConstantKernel(), optimizer=None),
        {"such as RBF()": gaussian_process.GaussianProcessRegressor(kernels.RBF())},
        NUMBERS,
        SVMTarget(),
    ),
    head(
        "head/estimators/likeness.py: a Gaussian process has the kernel",
        "a Gaussian process has the kernel Matern",
        gaussian_process.GaussianProcessRegressor(kernels.Matern(), optimizer=None),
        {
            "sums and multiples of RBF, DotProduct and WhiteKernel": gaussian_process.GaussianProcessRegressor(
                2.0 * kernels.RBF() + kernels.DotProduct() + kernels.WhiteKernel(), optimizer=None
            )
        },
        NUMBERS,
        SVMTarget(),
    ),
    Row(
        ENSEMBLES + "a fold of CalibratedClassifierCV saw only",
        calibrated_on_some,
        "a fold of CalibratedClassifierCV saw only some classes",
        {"fit it with fewer folds": partial(maps_of, CalibratedClassifierCV(LinearSVC(), cv=2))},
    ),
    Row(
        ENSEMBLES + "a member of {type(estimator).__name__} saw only",
        bagged_on_some,
        "a member of BaggingClassifier saw only some classes",
        {
            "more images of the rare classes": partial(maps_of, bagged(LogisticRegression())),
            "with a larger max_samples": partial(maps_of, bagged(LogisticRegression(), max_samples=1.0)),
        },
    ),
    head(
        ENSEMBLES + "a classifier that has one decision value",
        "OneVsRestClassifier of KNeighborsClassifier " + REFUSED_MEMBER,
        OneVsRestClassifier(neighbors.KNeighborsClassifier()),
        {"e.g. SVC": OneVsRestClassifier(SVC())},
    ),
    head(
        ENSEMBLES + "voting='hard'",
        "counts votes, a step",
        voted(LogisticRegression(), voting="hard"),
        {"use voting='soft'": voted(LogisticRegression())},
    ),
    head(
        ENSEMBLES + "or it counts votes",
        "BaggingClassifier of SVC " + REFUSED_MEMBER,
        bagged(SVC()),
        {"a classifier that has probabilities": bagged(LogisticRegression())},
    ),
    head(
        ENSEMBLES + "members whose probabilities are known",
        "VotingClassifier of KNeighborsClassifier " + REFUSED_MEMBER,
        voted(neighbors.KNeighborsClassifier()),
        {"e.g. CalibratedClassifierCV(SVC())": voted(CalibratedClassifierCV(SVC()))},
    ),
    head(
        ENSEMBLES + "regressors that predict their decision value",
        "VotingRegressor of GammaRegressor " + REFUSED_MEMBER,
        ensemble.VotingRegressor([("member", GammaRegressor())]),
        {"e.g. SVR": ensemble.VotingRegressor([("member", SVR())])},
        NUMBERS,
    ),
    Row(
        ENSEMBLES + "MultiOutputClassifier has an output of the classes",
        partial(head_of, MultiOutputClassifier(SVC()), np.stack([THREE, TWO], 1)),
        "MultiOutputClassifier has an output of the classes [0, 1, 2]",
        {"fit a head for each output": partial(maps_of, SVC(), THREE)},
    ),
    # Stacks.
    head(
        ENSEMBLES + "_stackable(",
        "StackingClassifier of SVC " + REFUSED_MEMBER,
        stacked(SVC()),
        {
            "LinearSVC()": stacked(LinearSVC()),
            "OneVsRestClassifier(SVC())": stacked(OneVsRestClassifier(SVC())),
            "SVC(decision_function_shape='ovo')": stacked(SVC(decision_function_shape="ovo")),
        },
    ),
    head(
        ENSEMBLES + "_stackable(",
        "StackingClassifier of OneVsOneClassifier " + REFUSED_MEMBER,
        stacked(OneVsOneClassifier(SVC())),
        {"OneVsRestClassifier(SVC())": stacked(OneVsRestClassifier(SVC()))},
    ),
    head(
        ENSEMBLES + "_stackable(",
        "StackingClassifier of LogisticRegression " + REFUSED_MEMBER,
        stacked(LogisticRegression()),
        {
            "stack_method='decision_function' (now 'predict_proba')": stacked(
                LogisticRegression(), stack_method="decision_function"
            )
        },
    ),
    head(
        ENSEMBLES + "_stackable(",
        "StackingClassifier of KNeighborsClassifier " + REFUSED_MEMBER,
        stacked(neighbors.KNeighborsClassifier()),
        {
            "as LinearSVC(), and stack_method='decision_function'": stacked(
                LinearSVC(), stack_method="decision_function"
            )
        },
    ),
    head(
        ENSEMBLES + "_stackable(",
        "StackingRegressor of GammaRegressor " + REFUSED_MEMBER,
        ensemble.StackingRegressor([("member", GammaRegressor())]),
        {"e.g. SVR": ensemble.StackingRegressor([("member", SVR())])},
        NUMBERS,
    ),
    Row(
        ENSEMBLES + "a final estimator that decides",
        final_that_decides_nothing,
        "fit it with a final estimator that decides",
        {"e.g. LogisticRegression": partial(maps_of, stacked(LinearSVC(), final_estimator=LogisticRegression()))},
    ),
    Row(
        ENSEMBLES + "temperature scaling of these probabilities",
        calibrated_by_temperature,
        "temperature scaling of these probabilities is not supported",
        {
            "fit it with method='sigmoid'": partial(
                maps_of, CalibratedClassifierCV(bagged(LogisticRegression()), method="sigmoid", cv=2)
            )
        },
    ),
    head(
        ENSEMBLES + "a threshold within (0, 1)",
        "FixedThresholdClassifier of SVC " + REFUSED_MEMBER,
        FixedThresholdClassifier(SVC(probability=True), threshold=0.3, response_method="predict_proba"),
        {
            "within (0, 1) of a sigmoid probability": FixedThresholdClassifier(LogisticRegression(), threshold=0.3),
            "one of decision values": FixedThresholdClassifier(
                SVC(), threshold=0.3, response_method="decision_function"
            ),
        },
        TWO,
    ),
    head(
        ENSEMBLES + "the inverse function exp or expm1",
        "TransformedTargetRegressor of FunctionTransformer " + REFUSED_MEMBER,
        TransformedTargetRegressor(Ridge(), func=np.sqrt, inverse_func=np.square),
        {
            "exp or expm1": TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1),
            "a scaler": TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
        },
        NUMBERS,
    ),
    head(
        ENSEMBLES + "a scaler of the target",
        "TransformedTargetRegressor of PowerTransformer " + REFUSED_MEMBER,
        TransformedTargetRegressor(Ridge(), transformer=preprocessing.PowerTransformer()),
        {
            "StandardScaler": TransformedTargetRegressor(Ridge(), transformer=StandardScaler()),
            "the function exp or expm1": TransformedTargetRegressor(Ridge(), func=np.log, inverse_func=np.exp),
        },
        NUMBERS,
    ),
    head(
        PREDICTORS + "NearestCentroid has the metric",
        "NearestCentroid has the metric 'manhattan'",
        neighbors.NearestCentroid(metric="manhattan"),
        {"fit it with 'euclidean'": neighbors.NearestCentroid()},
    ),
    head(
        PREDICTORS + "BernoulliNB cuts its features",
        "BernoulliNB cuts its features",
        naive_bayes.BernoulliNB(),
        {
            "fit GaussianNB": naive_bayes.GaussianNB(),
            "fit it with binarize=None": lambda: maps_of([
                naive_bayes.BernoulliNB(binarize=None).fit((FEATURES > 0).astype(int), THREE)
            ]),
        },
    ),
    *(
        head(PREDICTORS + place, message, neighbors.KNeighborsClassifier(**options), ways)
        for place, message, options, ways in (
            (
                "{name} has the metric",
                "has the metric 'manhattan'",
                {"metric": "manhattan"},
                {
                    "'euclidean'": neighbors.KNeighborsClassifier(metric="euclidean"),
                    "'cosine'": neighbors.KNeighborsClassifier(metric="cosine"),
                },
            ),
            (
                "{name} weighs votes",
                "weighs votes by 'distance'",
                {"weights": "distance"},
                {"weights='uniform'": neighbors.KNeighborsClassifier(weights="uniform")},
            ),
            (
                "which often tie",
                "lets 4 neighbours vote",
                {"n_neighbors": 4},
                {"an odd n_neighbors": neighbors.KNeighborsClassifier(3)},
            ),
            (
                "too few for most of",
                "too few for most of 99 votes",
                {"n_neighbors": 99},
                {"a smaller n_neighbors": neighbors.KNeighborsClassifier(3)},
            ),
        )
    ),
    Row(
        PREDICTORS + "{name} was fitted on several outputs",
        partial(head_of, neighbors.KNeighborsClassifier(), COLUMNS),
        "was fitted on several outputs",
        {"fit a head for each output": partial(maps_of, neighbors.KNeighborsClassifier(), TWO)},
    ),
    head(
        PREDICTORS + "GaussianProcessClassifier decides between",
        "GaussianProcessClassifier decides between 3 classes by integrals",
        gaussian_process.GaussianProcessClassifier(),
        {
            "fit SVC": SVC(),
            "MultiOutputClassifier(GaussianProcessClassifier()) on one column of 0 and 1 for each class": partial(
                maps_of, MultiOutputClassifier(gaussian_process.GaussianProcessClassifier()), COLUMNS
            ),
        },
    ),
    head(
        PREDICTORS + "{type(estimator).__name__} has the kernel",
        "LabelPropagation has the kernel 'knn'",
        LabelPropagation(kernel="knn"),
        {"fit it with 'rbf'": LabelPropagation(kernel="rbf", gamma=0.1)},
    ),
    head(
        TRANSFORMERS + "at the end predicts",
        "RFE at the end predicts with an estimator of its own",
        RFE(LinearSVC(), n_features_to_select=3),
        {
            "[..., rfe, rfe.estimator_]": lambda: maps_of(
                (lambda rfe: [rfe, rfe.estimator_])(RFE(LinearSVC(), n_features_to_select=3).fit(FEATURES, THREE))
            )
        },
    ),
    head(
        TRANSFORMERS + "FunctionTransformer(",
        "has no closed-form Jacobian: only numpy's",
        make_pipeline(FunctionTransformer(np.cbrt), SVC()),
        {
            "move the function into the backbone": doubled_backbone,
            "register a transformer of your own": partial(registered, Doubled(), partial(Elementwise, "tanh")),
        },
    ),
    head(
        TRANSFORMERS + "FeatureAgglomeration(",
        "FeatureAgglomeration(pooling_func=...) is not supported",
        make_pipeline(FeatureAgglomeration(3, pooling_func=np.max), SVC()),
        {"fit it with numpy.mean": make_pipeline(FeatureAgglomeration(3, pooling_func=np.mean), SVC())},
    ),
    Row(
        TRANSFORMERS + "solver='lsqr'",
        lambda: Head.of([LinearDiscriminantAnalysis(solver="lsqr").fit(FEATURES, THREE), SVC()]),
        "solver='lsqr') transforms nothing",
        {
            f"'{solver}'": partial(maps_of, make_pipeline(LinearDiscriminantAnalysis(solver=solver), SVC()))
            for solver in ("svd", "eigen")
        },
    ),
    head(
        TRANSFORMERS + "Nystroem(",
        "Nystroem(kernel_params=...) is not supported",
        make_pipeline(Nystroem(kernel="rbf", kernel_params={"gamma": 0.1}, n_components=9), SVC()),
        {"pass gamma, degree and coef0 directly": make_pipeline(Nystroem(gamma=0.1, n_components=9), SVC())},
    ),
    Row(
        "head/stage.py: a hook on",
        partial(hooked, remove=False),
        "a hook on Projection, a part of the head, changes",
        {
            "remove it": partial(hooked, remove=True),
            "move what it does into the backbone": doubled_backbone,
            "register a stage that does it": partial(registered, Doubled(), partial(Elementwise, "tanh")),
        },
    ),
    Row(
        "head/stage.py: has no secant",
        lambda: maps_of(behind(Square()), method=partial(ContributionCAM, baseline="zero")),
        "Square has no secant",
        {
            "define secant(saved, saved0, grad)": lambda: maps_of(
                behind(SquareWithSecant()), method=partial(ContributionCAM, baseline="zero")
            ),
            "set linear = True": lambda: maps_of(behind(Halved()), method=partial(ContributionCAM, baseline="zero")),
            "use a method that needs only the gradient": lambda: maps_of(behind(Square())),
        },
    ),
    Row(
        "head/stack.py: the head was fitted on",
        lambda: PCASVMNet(Crops(), SVC().fit(FEATURES[:, :5], THREE)).eval()(CROPS[:3]),
        "the head was fitted on 5 features, but the backbone gives 20",
        {
            "name the layer that the features came from": partial(crops, "rows"),
            "if it gives 4 crops or patches of each image, (N, 4, 5), pass pool=lambda t: t.mean(1)": partial(
                crops, "pooled"
            ),
        },
    ),
]

# --- the path from the target layer to the features -------------------------------------------------------------------

BACKWARD, FOREIGN, PATH, RECORDER, VALUES = (
    f"{name}.py: "
    for name in ("calculus/backward", "calculus/foreign", "path/record", "tape/recorder", "tape/alias_tracker")
)
RULES, CONTEXT, PROGRAM = "rules/", "methods/run.py: ", "studio/export/graph.py: "


def bessel(*, secant: Any = "elementwise", rule: Any = None) -> None:
    """Register a rule of torch.special.i0, which has none in the package."""

    def slope(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
        return grad * torch.special.i1(input)

    register_jacobian(torch.special.i0, secant=secant)(rule or slope)


def with_facts(function: Any = torch.special.i0, step: Any = None, **facts: Any) -> Callable[[], SignedMaps]:
    """Return a function for maps behind such a step, whose rule is right, and says this of itself."""

    def follow() -> SignedMaps:
        def flipped(input: Tensor, dims: Any, *, y: Tensor, grad: Tensor) -> Tensor:
            return grad.flip([dim + 1 for dim in dims])

        def slope(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
            return grad * torch.special.i1(input)

        register_jacobian(function, **facts)(slope if function is torch.special.i0 else flipped)
        return stepped(step or function)

    return follow


def with_bessel(
    method: Any = ClosedFormGradCAM, layer: str = "stem", jacobian: str = "closed_form", **rule: Any
) -> Any:
    bessel(**rule)
    options = {"baseline": "zero"} if method is ContributionCAM else {}
    return stepped(torch.special.i0, method, layer, jacobian=jacobian, **options)


def not_understood(input: Tensor, *, y: Tensor, grad: Tensor) -> Tensor:
    raise TypeError("it is of no use")


class Inner(nn.Module):
    """A layer in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def inside_a_layer(*layers: str) -> SignedMaps:
    @register_jacobian(Inner, secant="linear")
    def rule(module: Any, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
        return 2 * torch.einsum("kndhw,dc->knchw", grad, module.inner.weight[:, :, 0, 0])

    return stepped(Inner(), ContributionCAM, [*layers], baseline="zero")


class Moded(nn.Module):
    """A mode that ends behind the target layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.later = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.device("cpu"):
            y = self.stem(x).tanh()
        return self.later(y).tanh().flatten(1)


def moded(**options: Any) -> SignedMaps:
    backbone = seeded(Moded)
    net = PCASVMNet(backbone, head_for(backbone)).eval()
    return ClosedFormGradCAM(net, ["stem"], **options).explain(IMAGES[:3])


def moded_outside() -> SignedMaps:
    with torch.device("cpu"):
        return stepped(torch.tanh)


def written_over(x: Tensor) -> Tensor:
    y = 2 * x
    y.data.mul_(3)
    return y


def hooked() -> nn.Module:
    layer = nn.Tanh()
    layer.register_full_backward_hook(lambda *given: None)
    return layer


class Doubling(torch.autograd.Function):
    """A function with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def doubling() -> SignedMaps:
    register_jacobian(Doubling)(lambda x, *, y, grad: 2 * grad)
    return stepped(lambda x: Doubling.apply(x))


class DoublingForward(Doubling):
    """With a forward derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def jvp(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


def registered_doubling(
    method: Any, function: Any = Doubling, rule: Any = lambda x, *, y, grad: 2 * grad
) -> SignedMaps:
    register_jacobian(function, secant="linear")(rule)
    return stepped(lambda x: function.apply(x), method)


class Aside(Stepped):
    """A step that the features do not look at."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x).tanh()
        self.step(y)
        return self.later(y).tanh().flatten(1)


def aside(layer: str) -> SignedMaps:
    backbone = seeded(lambda: Aside(nn.Tanh()))
    return ClosedFormGradCAM(PCASVMNet(backbone, head_for(backbone)).eval(), [layer]).explain(IMAGES[:3])


def nested(x: Tensor) -> Tensor:
    return torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([*x]), 0.0)


def several_written(x: Tensor) -> Tensor:
    y = 2 * x
    torch._foreach_mul_([y, x.exp()], 3.0)
    return y


def other_memory(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    y.set_(2 * x)
    return y


class Exchanged(nn.Module):
    """A layer with other weights for the time of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.conv.weight.data
        self.conv.weight.data = 2 * weight
        y = self.conv(x)
        self.conv.weight.data = weight
        return y


class Doubled(Exchanged):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, 2 * self.conv.weight, self.conv.bias)


def in_complex(x: Tensor) -> Tensor:
    z = torch.complex(x, x)
    torch.view_as_real(z)[..., 1].mul_(2)
    return z.real + z.imag


def in_a_thread(function: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def drawn_anew(x: Tensor) -> Tensor:
    return torch.rand(4, 6, 6, generator=torch.Generator(x.device).manual_seed(0), dtype=x.dtype)


def overlapping(x: Tensor, write: Callable[[Tensor, float], Tensor]) -> Tensor:
    y = 1.5 * x
    write(y.unfold(2, 3, 1), 2.0)
    return y


def asking_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = torch.ones((), dtype=x.dtype, requires_grad=True)
        return x * torch.autograd.grad(weight**3, weight)[0]


class Folded(Attention):
    """Attention whose heads are in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        return self.proj(F.scaled_dot_product_attention(q, k, v).unflatten(0, (len(x), -1)).transpose(1, 2).flatten(2))


def tokens(
    layer: str,
    pool: str = "cls",
    *,
    heads: bool = False,
    folded: bool = False,
    transform: Any = "tokens",
    method: Any = ClosedFormGradCAM,
    **options: Any,
) -> SignedMaps:
    """Return the maps of a small transformer."""
    backbone = seeded(lambda: Tower(**options))
    if folded:
        backbone.blocks[1].attn.__class__ = Folded
    images = random(20, 3, 12, 16) + (torch.arange(20) % 2).reshape(-1, 1, 1, 1)
    net = PCASVMNet(backbone, head_for(backbone, images, pool=pool), pool=pool).eval()
    return method(net, [layer], transform).explain(images[:2], heads=heads)


def without_class_token(t: Tensor) -> Tensor:
    return t.transpose(0, 1)[:, 1:].mT.unflatten(2, (3, 4))


def another_baseline(step: Any) -> Callable[[], SignedMaps]:
    """Return a function for the maps from the mean of the activations."""

    def follow() -> SignedMaps:
        mean = seeded(lambda: Stepped(Step(step))).stem(IMAGES).mean(0).detach()
        return stepped(step, ContributionCAM, baseline="mean", mean=mean)

    return follow


def fails_at_zero(x: Tensor) -> Tensor:
    if not x.any():
        raise RuntimeError("nothing to see")
    return 2 * x


def infinite_at_zero(x: Tensor) -> Tensor:
    return x.abs().log()


def other_at_zero(x: Tensor) -> Tensor:
    return x.exp() if x.any() else 2 * x.exp()


def mirrored(x: Tensor) -> Tensor:
    return torch.flip(x, [2, 3])


def tanh(x: Tensor) -> Tensor:
    return x.tanh()


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
    scripted_tanh, ScriptedTanh = torch.jit.script(tanh), torch.jit.script(nn.Tanh())


def under_autocast(*, inside: bool) -> SignedMaps:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        return stepped(torch.tanh, ClosedFormShapleyCAM)


class ChannelsLast(nn.Module):
    """Activations (N, H, W, C) behind ``stem``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 9, 3, 2, padding=1), Step(lambda x: x.permute(0, 2, 3, 1).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stem(x)).mean((1, 2))


def channels_last(transform: Any) -> SignedMaps:
    backbone = seeded(ChannelsLast)
    net = PCASVMNet(backbone, head_for(backbone)).eval()
    return ClosedFormGradCAM(net, ["last"], transform).explain(IMAGES[:3])


class CropByCrop(Crops):
    """The mean over crops, one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.body(crop) for crop in x.unbind(1)]).mean(0)


def crop_by_crop() -> SignedMaps:
    backbone = CropByCrop()
    net = PCASVMNet(backbone, head_for(backbone, CROPS)).eval()
    return ClosedFormGradCAM(net, ["body.1#2"]).explain(CROPS[:3])


def several_calls(layer: str) -> SignedMaps:
    backbone = CropByCrop()
    source = {"layer": layer, "pool": lambda t: t.mean((2, 3))}
    net = PCASVMNet(backbone, head_for(backbone, CROPS, **source), **source).eval()
    return ClosedFormGradCAM(net, [layer.replace("body.1", "body.0")]).explain(CROPS[:3])


def foreign(make: Callable[[], Any], part: Callable[[Any], Any] = lambda given: given, **options: Any) -> SignedMaps:
    """Return maps of what somebody made of a network, a program or a wrapper, whose head was fitted behind itself."""
    backbone = seeded(lambda: Stepped(Step(torch.tanh)))
    given = part(make())
    if type(given) is dict:  # weights taken from it
        backbone.load_state_dict(given)
        given = backbone
    net = PCASVMNet(given, head_for(backbone)).eval()
    return ClosedFormGradCAM(net, ["stem"], **options).explain(IMAGES[:3])


def scripted() -> Any:
    return torch.jit.trace(seeded(lambda: Stepped(Step(torch.tanh))), IMAGES)


def exported() -> Any:
    images = {0: torch.export.Dim("images", min=2)}
    return torch.export.export(seeded(lambda: Stepped(Step(torch.tanh))), (IMAGES,), dynamic_shapes=(images,))


class NeuralNet:
    """As skorch's, and as wrappers of others are."""

    __module__ = "skorch.net"

    def __init__(self) -> None:
        self.module_ = seeded(lambda: Stepped(Step(torch.tanh)))


class Learner:
    """As fastai's."""

    def __init__(self) -> None:
        self.model = NeuralNet().module_


WRONG = Step(torch.special.i0)  # which has no rule until one is registered
LATER, BY_GRADIENT = "choose a later target layer", "use a gradient method such as ClosedFormGradCAM"
KEPT = random(4, 6, 6)
BY_AUTOGRAD = "use autograd on the path, as ClosedFormGradCAM(net, [layer], jacobian='autograd')"
PATHS = [
    Row(
        BACKWARD + "heads can be separated",
        partial(tokens, "blocks.1.norm1", heads=True),
        "and there is none after the target layer",
        {
            "attn_implementation='sdpa'": partial(tokens, "blocks.1.norm1", heads=True, fused=True),
            "leave heads=False": partial(tokens, "blocks.1.norm1"),
        },
    ),
    Row(
        BACKWARD + "heads can be separated",
        partial(tokens, "blocks.1.norm2", "mean", heads=True, fused=True),
        "and there is none after the target layer",
        {
            "choose the norm before an attention": partial(tokens, "blocks.1.norm1", "mean", heads=True, fused=True),
            "leave heads=False": partial(tokens, "blocks.1.norm2", "mean", fused=True),
        },
    ),
    Row(
        BACKWARD + "not everything after the target layer goes through one attention",
        partial(tokens, "blocks.0", "mean", heads=True, fused=True),
        "not everything after the target layer goes through one attention",
        {
            "the norm before the attention of the last block": partial(
                tokens, "blocks.1.norm1", "mean", heads=True, fused=True
            )
        },
    ),
    Row(
        BACKWARD + "heads and images cannot be told apart",
        partial(tokens, "blocks.1.norm1", heads=True, folded=True, fused=True),
        "heads and images cannot be told apart",
        {"leave heads=False": partial(tokens, "blocks.1.norm1", folded=True, fused=True)},
    ),
    *(
        Row(
            BACKWARD + place,
            partial(with_bessel, rule=rule),
            message,
            {BY_AUTOGRAD: partial(with_bessel, rule=rule, jacobian="autograd")},
        )
        for place, message, rule in (
            ("misfit(", "the rule of special_i0 raises TypeError('it is of no use')", not_understood),
            (
                "the rule of {step.name} returns",
                "the rule of special_i0 returns",
                lambda input, *, y, grad: grad.sum(1),
            ),
        )
    ),
    Row(
        "methods/gaps.py: the network mixes the images of a batch",
        partial(stepped, mixing, ContributionCAM, baseline="zero"),
        "do not add up: the network mixes the images of a batch",
        {
            "explain one image at a time": partial(
                stepped, mixing, ContributionCAM, baseline="zero", images=IMAGES[:1]
            ),
            "see cam.check(images)": partial(stepped, mixing, Checked),
            BY_GRADIENT: partial(stepped, mixing),
        },
    ),
    Row(
        BACKWARD + "depends on the target layer, and its rule has no gradient",
        partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0])),
        "prelu depends on the target layer, and its rule has no gradient",
        {
            LATER: partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0]), layer="later"),
            BY_AUTOGRAD: partial(stepped, lambda x: F.prelu(x, x[0, :, 0, 0]), jacobian="autograd"),
        },
    ),
    *(
        Row(FOREIGN + place, wrong, place, {way: right, BY_AUTOGRAD: partial(stepped, step, jacobian="autograd")})
        for place, way, wrong, right, step in (
            (
                "is not autograd's Jacobian of it",
                "correct it in @register_jacobian",
                partial(with_bessel, rule=lambda input, *, y, grad: 2 * grad),
                with_bessel,
                torch.special.i0,
            ),
            (
                "returns NaN (does it read a tensor that needs= leaves out?)",
                "correct it in @register_jacobian",
                with_facts(needs="y"),
                with_facts(needs="inputs"),
                torch.special.i0,
            ),
            (
                "says that sums over positions stay the same, and they do not",
                "correct keeps_sums= in @register_jacobian",
                with_facts(keeps_sums=lambda *given, **named: True),
                with_facts(),
                torch.special.i0,
            ),
            (
                "mixes tokens, or moves them elsewhere than its tokens= says",
                "correct it in @register_jacobian",
                with_facts(torch.flip, mirrored, tokens=lambda dim, *given, **named: dim),
                with_facts(torch.flip, mirrored),
                mirrored,
            ),
        )
    ),
    Row(
        FOREIGN + "contributions do not add up",
        partial(with_bessel, ContributionCAM, secant="linear"),
        "the secant of special_i0 is wrong",
        {"correct secant=": partial(with_bessel, ContributionCAM), BY_GRADIENT: partial(with_bessel, secant="linear")},
    ),
    path(
        BACKWARD + "closed-form rule",
        "which has no closed-form rule",
        torch.special.i0,
        {LATER: partial(stepped, torch.special.i0, layer="later"), "register its Jacobian": with_bessel},
    ),
    path(
        "tape/alias_tracker.py: which may change gradients unseen",
        "Tanh has a backward hook on the path",
        hooked(),
        {"remove the hook": partial(stepped, nn.Tanh())},
    ),
    Row(
        PATH + "does not lead to",
        partial(aside, "step"),
        "the target layer 'step' does not lead to the features",
        {"choose a layer before them": partial(aside, "stem")},
    ),
    Row(
        PATH + "no gradient leads from the target layer",
        partial(stepped, torch.Tensor.detach, layer="stem"),
        "aten.detach of 'step' passes none on",
        {"choose a layer behind that": partial(stepped, torch.Tensor.detach, layer="later")},
    ),
    Row(
        PATH + "the network cannot be run from the baseline",
        contributions(fails_at_zero),
        "cannot be run from the baseline of 'stem' (nothing to see)",
        {"choose another baseline": another_baseline(fails_at_zero)},
    ),
    *(
        Row(
            PATH + "is another function at the baseline",
            contributions(step),
            message,
            {
                "choose another baseline": another_baseline(step),
                LATER: partial(stepped, step, ContributionCAM, "later", baseline="zero"),
                BY_GRADIENT: partial(stepped, step),
            },
        )
        for step, message in (
            (other_at_zero, "is another function at the baseline"),
            (lambda x: x.exp() if x.any() else x.log(), "does not return finite numbers at the baseline of 'stem'"),
        )
    ),
    secant(
        "path/record.py: does not return finite numbers",
        "does not return finite numbers at the baseline of 'stem'",
        infinite_at_zero,
        {
            "choose another baseline": another_baseline(infinite_at_zero),
            LATER: partial(stepped, infinite_at_zero, ContributionCAM, "later", baseline="zero"),
            BY_GRADIENT: partial(stepped, infinite_at_zero),
        },
    ),
    Row(
        "path/autograd.py: an autograd path has no",
        partial(stepped, torch.tanh, ContributionCAM, jacobian="autograd", baseline="zero"),
        "an autograd path has no secants",
        {
            "pass jacobian='closed_form'": contributions(torch.tanh),
            BY_GRADIENT: partial(stepped, torch.tanh, jacobian="autograd"),
        },
    ),
    Row(
        "calculus/relevance.py: has no rule of relevance",
        partial(stepped, lambda x: x / (1 + x.abs()), RelevanceCAM),
        "has no rule of relevance",
        {
            "use ContributionCAM": contributions(lambda x: x / (1 + x.abs())),
            "LIFTCAM": partial(stepped, lambda x: x / (1 + x.abs()), LIFTCAM),
            LATER: partial(stepped, lambda x: x / (1 + x.abs()), RelevanceCAM, "later"),
        },
    ),
    Row(
        RECORDER + "is inside a layer with a registered rule",
        partial(inside_a_layer, "stem", "step.inner"),
        "the target layer 'step.inner' is inside a layer with a registered rule",
        {
            "choose that layer itself": partial(inside_a_layer, "step"),
            "use a gradient method, as ClosedFormGradCAM(net, [layer], jacobian='auto')": partial(
                stepped, Inner(), layer="step.inner", jacobian="auto"
            ),
        },
    ),
    Row(
        PATH + "leaves a TorchFunctionMode",
        moded,
        "the network leaves a TorchFunctionMode",
        {
            "enter it before the network runs, as in with mode: cam.explain(images)": moded_outside,
            "pass jacobian='auto'": partial(moded, jacobian="auto"),
        },
    ),
    Row(
        VALUES + "works in place on a tensor",
        partial(stepped, written_over),
        "aten::mul_, through .data or a detached alias, works in place on a tensor that the path uses again",
        {"use the out-of-place version": partial(stepped, lambda x: 6 * x)},
    ),
    path(
        RECORDER + "writes into tensors, and is not known",
        "_foreach_mul_ writes into tensors",
        several_written,
        {"write y = ..., without out= or an underscore": partial(stepped, lambda x: 2 * x * 3.0)},
    ),
    Row(
        RECORDER + "writes into tensors, and is not known",
        partial(stepped, lambda x: torch.max(x, 1, out=(torch.empty_like(x[:, 0]), torch.empty(0).long()))[0]),
        "max writes into tensors",  # and autograd knows no out=, either
        {"write y = ..., without out= or an underscore": partial(stepped, lambda x: torch.max(x, 1)[0])},
    ),
    Row(
        RECORDER + "gives a tensor other memory",
        partial(stepped, other_memory),
        "set_ gives a tensor other memory",
        {"write y = x": partial(stepped, lambda x: 2 * x)},
    ),
    path(
        VALUES + "the path goes through a nested tensor",
        "the path goes through a nested tensor",
        nested,
        {"pad its parts to one shape": partial(stepped, lambda x: torch.stack([*x]))},
    ),
    path(
        RECORDER + "is an autograd.Function",
        "Doubling is an autograd.Function",
        lambda x: Doubling.apply(x),
        {"@register_jacobian(Doubling)": doubling, LATER: partial(stepped, lambda x: Doubling.apply(x), layer="later")},
    ),
    *(
        Row(
            "tape/stem.py: the network draws random numbers",
            partial(stepped, drawing),
            "the network draws random numbers",
            {
                "as with dropout(x, training=self.training)": partial(stepped, switched_off),
                "draw the numbers once, in __init__": partial(stepped, lambda x: x * KEPT),
                "draw from a generator that forward itself makes": partial(stepped, lambda x: x * drawn_anew(x)),
            },
        )
        for drawing, switched_off in (
            (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5, training=False)),
            (lambda x: F.rrelu(x, training=True), nn.RReLU()),
            (
                lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
                lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.0),
            ),
        )
    ),
    Row(
        "tape/tape.py: was changed after the path had used it",
        partial(stepped, Exchanged()),
        "was changed after the path had used it",
        {"compute with a new tensor instead, as in F.linear(x, 2 * weight)": partial(stepped, Doubled())},
    ),
    path(
        "tape/alias_tracker.py: another thread computes on the path",
        "another thread computes on the path (TanhBackward0)",
        lambda x: in_a_thread(x.tanh) + x,
        {
            "compute it in the thread that calls the network": partial(stepped, lambda x: x.tanh() + x),
            LATER: partial(stepped, lambda x: in_a_thread(x.tanh) + x, layer="later"),
        },
    ),
    path(
        PATH + "the network linearises a function",
        "the network linearises a function of its own",
        lambda x: torch.func.linearize(torch.sin, x)[0],
        {"use torch.func.jvp": partial(stepped, torch.sin)},
    ),
    path(
        "tape/overlapping.py: share one place in memory",
        "mul writes into a tensor of which several numbers share one place",
        lambda x: overlapping(x, torch.Tensor.mul_),
        {"write into a copy, x.clone()": partial(stepped, lambda x: x * 1.5)},
    ),
    Row(
        "tape/step.py: from outside of the tensor",
        partial(stepped, lambda x: (1 * x)[:, 1:].as_strided((len(x), 6, 6), (144, 6, 1), 0)),
        "as_strided takes numbers from outside of the tensor",
        {"call it on the whole tensor": partial(stepped, lambda x: (1 * x).as_strided((len(x), 6, 6), (144, 6, 1), 0))},
    ),
    path(
        "tape/aliases.py: of a tensor is written into",
        "view_as_real of a tensor is written into",
        in_complex,
        {"write the real and imaginary parts apart": partial(stepped, lambda x: x + 2 * x)},
    ),
    path(
        "tape/python_calls.py: the network calls autograd itself",
        "the network calls autograd itself",
        asking_autograd,
        {"compute it before the network runs": partial(stepped, lambda x: 3 * x)},
    ),
    path(
        VALUES + "makes another tensor of one on the path",
        "makes another tensor of one on the path where that cannot be seen",
        lambda x: x * nn.Parameter(x),
        {"use plain tensors there": partial(stepped, lambda x: x * x.detach())},
    ),
    Row(
        "tape/tape.py: sizes after the target layer depend on the activations",
        contributions(lambda x: x + x[x > 0].mean()),
        "sizes after the target layer depend on the activations",
        {
            LATER: partial(stepped, lambda x: x + x[x > 0].mean(), ContributionCAM, "later", baseline="zero"),
            BY_GRADIENT: partial(stepped, lambda x: x + x[x > 0].mean()),
        },
    ),
    Row(
        "methods/gradient.py: second derivatives need the jvp",
        partial(registered_doubling, ClosedFormShapleyCAM),
        "second derivatives need the jvp of each autograd.Function",
        {
            "define it, as in @staticmethod def jvp(ctx, x)": partial(
                registered_doubling, ClosedFormShapleyCAM, DoublingForward
            ),
            "use a method of first derivatives, as ClosedFormGradCAM": partial(registered_doubling, ClosedFormGradCAM),
        },
    ),
    Row(
        RULES + "registry.py: is a function of your own",
        lambda: register_jacobian(doubling)(lambda x, *, y, grad: grad),
        "doubling is a function of your own, whose calls cannot be seen",
        {
            "call it in an nn.Module, and register that, as in @register_jacobian(Swish)": partial(
                inside_a_layer, "step"
            )
        },
    ),
    # Rules.
    secant(
        RULES + "arithmetic.py: a division that rounds",
        "a division that rounds is a step function",
        lambda x: torch.div(x, 0.3, rounding_mode="floor") + x,
        {"divide without rounding_mode": contributions(lambda x: torch.div(x, 0.3) + x)},
    ),
    secant(
        RULES + "linear.py: an einsum of more than two",
        "an einsum of more than two values that change has no secant",
        lambda x: torch.einsum("nchw,nchw,nchw->nc", x, x.tanh(), x.sigmoid()),
        {
            "multiply two at a time": contributions(
                lambda x: torch.einsum("nchw,nchw->nc", torch.einsum("nchw,nchw->nchw", x, x.tanh()), x.sigmoid())
            )
        },
    ),
    secant(
        RULES + "elementwise.py: a power with both",
        "a power with both the base and the exponent computed has no secant",
        lambda x: (1 + x * x) ** x,
        {
            "write it as torch.exp(": contributions(lambda x: torch.exp(x * torch.log(1 + x * x))),
            BY_GRADIENT: partial(stepped, lambda x: (1 + x * x) ** x),
        },
    ),
    Row(
        "calculus/secants.py: has no secant, without which",
        partial(with_bessel, ContributionCAM, secant=None),
        "special_i0 has no secant, without which maps do not add up",
        {
            LATER: partial(with_bessel, ContributionCAM, "later", secant=None),
            "register one": partial(with_bessel, ContributionCAM),
            BY_GRADIENT: partial(with_bessel, secant=None),
        },
    ),
    *(
        secant(
            "calculus/secants.py: " + message,
            message,
            step,
            {
                LATER: partial(stepped, step, ContributionCAM, "later", baseline="zero"),
                BY_GRADIENT: partial(stepped, step),
            },
        )
        for message, step in (
            ("depends on the target layer through a comparison or an index", lambda x: x.gather(1, x.argsort(1)) + 1),
            ("jumps between the baseline", lambda x: torch.where(x > 0, 1.0, 0.0 * x.clamp(max=0)) * (x + 1)),
        )
    ),
    # Activations.
    Row(
        CONTEXT + "but a map needs (N, T, H, W)",
        partial(tokens, "norm", "mean", transform=None),
        "but a map needs (N, T, H, W), (N, T, D, H, W), or of signals (N, T, L)",
        {
            "choose an earlier layer": partial(tokens, "patches", "mean", transform=None),
            "pass reshape_transform='tokens' (for transformers) or a function": partial(tokens, "norm", "mean"),
        },
    ),
    Row(
        CONTEXT + "or both of a pair, in one batch?",
        partial(crops, "rows", transform=None),
        "'body.1' has activations of 12 rows for 3 images",
        {
            "as lambda t: t.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2, 3) for 4 crops": partial(crops, "rows"),
            "let the layer run once for each": crop_by_crop,
        },
    ),
    Row(
        CONTEXT + "does not count images, so what reshape_transform leaves out",
        partial(
            tokens,
            "norm",
            "mean",
            first=True,
            transform=without_class_token,
            method=partial(ContributionCAM, baseline="zero"),
        ),
        "does not count images, so what reshape_transform leaves out is unknown",
        {
            "pass reshape_transform='tokens'": partial(
                tokens, "norm", "mean", first=True, method=partial(ContributionCAM, baseline="zero")
            ),
            "pass one that leaves nothing out, as crops side by side": partial(crops, "rows", ContributionCAM),
            BY_GRADIENT: partial(tokens, "norm", "mean", first=True, transform=without_class_token),
        },
    ),
    Row(
        "methods/gradient.py: second derivatives cannot be computed under torch.autocast",
        partial(under_autocast, inside=True),
        "second derivatives cannot be computed under torch.autocast",
        {"call the method outside it": partial(under_autocast, inside=False)},
    ),
    Row(
        "network/site.py: seem to have their channels last",
        partial(channels_last, None),
        "seem to have their channels last",
        {
            "pass reshape_transform='tokens'": partial(channels_last, "tokens"),
            "lambda t: t if they come first": partial(channels_last, lambda t: t),
        },
    ),
    *(
        Row(
            "network/inputs.py: the features have",
            refused,
            f"rows for {count} images (4 crops or patches of each?)",
            {
                "average them in the network, features.unflatten(0, (-1, 4)).mean(1)": partial(crops, "in the network"),
                "pass pool=lambda t: t.unflatten(0, (-1, 4)).mean(1)": partial(crops, "rows"),
            },
        )
        for count, refused in (
            (40, lambda: head_for(Crops(rows=True), CROPS)),
            (2, lambda: PCASVMNet(Crops(rows=True), head_for(MeanOfCrops(), CROPS)).eval()(CROPS[:2])),
        )
    ),
    Row(
        "network/modules.py: whose layers are not run as modules",
        partial(foreign, scripted),
        "the network is a program, made by torch.jit, whose layers are not run as modules",
        {
            "build the module itself and load its weights, load_state_dict(...)": partial(
                foreign, scripted, lambda given: dict(given.state_dict())
            )
        },
    ),
    Row(
        "network/modules.py: whose layers are not run as modules",
        partial(foreign, exported, lambda given: given.module()),
        "the network is a program, made by torch.export, whose layers are not run as modules",
        {
            "build the module itself and load its weights, load_state_dict(...)": partial(
                foreign, exported, lambda given: dict(given.module().state_dict())
            ),
            "export it with a dynamic batch size and use torch.export.unflatten(program), whose layers are modules, "
            "with jacobian='auto'": partial(foreign, exported, torch.export.unflatten, jacobian="auto"),
        },
    ),
    *(
        Row(
            "network/modules.py: the network must be a torch.nn.Module",
            partial(foreign, make),
            f"the network must be a torch.nn.Module, got {what}",
            {way: follow if isinstance(follow, str) else partial(foreign, make, follow)},
        )
        for make, what, way, follow in (
            (lambda: Learner, "the class Learner", "make one, as in Learner(...)", lambda given: given().model),
            (lambda: "resnet18", "str", "torchvision.models.resnet18(weights='DEFAULT')", "downloads weights"),
            (
                lambda: NeuralNet().module_.forward,
                "method",
                "pass the module whose method this is",
                lambda given: given.__self__,
            ),
            (
                lambda: NeuralNet().module_.state_dict(),
                "OrderedDict",
                "build the module, and load these weights with load_state_dict",
                dict,
            ),
            (
                NeuralNet,
                "NeuralNet",
                "pass its .module_, which it has after fit or initialize",
                lambda given: given.module_,
            ),
            (Learner, "Learner", "pass its .model", lambda given: given.model),
            (
                lambda: torch.tanh,
                "builtin_function_or_method",
                "put what it does in the forward of a module",
                lambda given: Stepped(Step(given)).double().eval(),
            ),
        )
    ),
    Row(
        "network/features.py: name the call whose output is meant",
        partial(several_calls, "body.1"),
        "the layer 'body.1' runs 4 times in a forward pass",
        {f"'body.1#{call}'": partial(several_calls, f"body.1#{call}") for call in range(1, 5)},
    ),
]

# --- programs, files and atlases --------------------------------------------------------------------------------------


def explainer(
    step: Any, method: Any = ClosedFormGradCAM, layer: str = "stem", before: Any = None, **options: Any
) -> tuple[Any, Tensor]:
    """Return a method and images in single precision, which programs are made of; ``before`` is a step of images."""
    torch.manual_seed(0)
    backbone = Stepped(step if isinstance(step, nn.Module) else Step(step)).eval()
    if before is not None:
        backbone.stem = nn.Sequential(Step(before), backbone.stem)
    net = PCASVMNet(backbone, head_for(backbone, IMAGES.float())).eval()
    return method(net, [layer], **options), IMAGES[:3].float()


def program(step: Any, *args: Any, targets: Any = None, **options: Any) -> Any:
    cam, x = explainer(step, *args, **options)
    return export.program(cam, x, targets)


def onnx(step: Any, path: Path, **options: Any) -> Any:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    cam, x = explainer(step)
    return export.onnx(cam, x, path / "explainer.onnx", **options)


def in_single_and_double() -> SignedMaps:
    cam, x = explainer(torch.tanh)
    return ClosedFormGradCAM(cam.model.double(), ["stem"]).explain(x.double())


def with_wrong_numbers(export_with: Callable[[], Any]) -> Any:
    """Export with an operator that computes something else."""
    table = files.decompositions()
    with pytest.MonkeyPatch.context() as patch:
        wrong = {torch.ops.aten.tanh.default: lambda x: 1 + x}
        patch.setattr(files, "decompositions", lambda: table | wrong)
        patch.setattr(graph, "plain_zeros", twisted)
        return export_with()


def twisted(traced: Any) -> None:
    for node in traced.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
        node.target = torch.ops.aten.sin.default


def closed_form_of_bessel() -> str:
    with pytest.raises(NoClosedFormError, match=r"aten\.i0") as caught:
        program(torch.special.i0)
    return caught.value.reason


def branching(x: Tensor) -> Tensor:
    return x if x.mean() > 1e6 else 2 * x


def with_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy())


class OwnTarget:
    """A function of the output that is no target of the package."""

    def __call__(self, output: Tensor) -> Tensor:
        return output[..., 0].square()


@cache
def folder() -> Path:
    """Return a folder that is deleted at the end."""
    temporary = tempfile.TemporaryDirectory()
    atexit.register(temporary.cleanup)
    return Path(temporary.name)


def listed(name: str | None = None, *, as_masks: bool = True, prefix: str = "") -> Any:
    """Return the photos of a folder, beside which another has masks of the same names, or photos."""
    root = fresh("listed")
    for folder_name in ["images", *[name] * (name is not None)]:
        (root / folder_name).mkdir(parents=True)
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 30), np.uint8)
            marked = as_masks and folder_name != "images"
            file = f"{prefix if folder_name != 'images' else ''}{number}.png"
            Image.fromarray(np.kron(pixels[:2, :3] > 90, np.ones((10, 10), bool)) if marked else pixels).save(
                root / folder_name / file
            )
    return list_files(root).photos or None


def masked(*names: str, mask: str) -> Any:
    """Return the pixels of the mask of the last of some photos."""
    root = fresh("masked")
    for name in (*(f"photos/{one}" for one in names), f"masks/{mask}"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.eye(8, dtype=np.uint8) * 255).save(root / name)
    return MaskFolder(root / "masks", names, [root / "photos" / one for one in names]).of(len(names) - 1, (8, 8), None)


def named_alike(name: str) -> Any:
    place = fresh("alike")
    place.mkdir()
    for file, inside, outside in (("a.bmp", 0, 200), (name, 255, 0)):
        picture = Image.new("L", (40, 30), outside)
        picture.paste(inside, (5, 5, 15, 15))
        picture.save(place / file)
    return np.array([len(list_files(place).photos)])


def paged(page: int | None = None) -> Any:
    path = fresh("paged").with_suffix(".tif")
    one, other = (Image.new("L", (4, 4), grey) for grey in (10, 20))
    one.save(path, save_all=True, append_images=[other])
    return np.asarray(read_picture(path, page=page))


def coloured() -> Any:
    path = fresh("coloured").with_suffix(".tif")
    Image.new("RGB", (4, 4)).save(path)
    return np.asarray(read_picture(path))


def fresh(name: str) -> Path:
    """Return an empty place of its own for an atlas."""
    return folder() / f"{name}{next(_NUMBERS)}"


_NUMBERS = count()


def build(out: Path, data: Any = None, net: Any = None, **options: Any) -> Any:
    own, rows = atlas_problem()
    rows = TensorDataset(*(tensor[:40] for tensor in rows.tensors)) if data is None else data
    options = {"shard_size": 32, "progress": False} | options
    return atlas.build(net or own, rows, [atlas_layer(net or own)], out, **options)


def built(name: str, **options: Any) -> Path:
    out = fresh(name)
    build(out, **options)
    return out


def changed_rows() -> TensorDataset:
    """Return the data set with another image at the beginning of the second shard."""
    x, y = (tensor[:40].clone() for tensor in atlas_problem()[1].tensors)
    x[32] += 1
    return TensorDataset(x, y)


def without_the_other_shard(out: Path) -> Any:
    (out / "part-00001.parquet").unlink()
    return build(out, changed_rows())


def of_version_0_2_0() -> Path:
    """Return an atlas whose shards have no digests."""
    out = built("old")
    for number, shard in enumerate(sorted(out.glob("*.parquet"))):
        table = parquet.read_table(shard)
        first = [32 * number, table["digest"][0].as_py(), table["label"][0].as_py()]
        metadata = table.schema.metadata | {b"first": json.dumps(first).encode()}
        parquet.write_table(table.drop(["digest"]).replace_schema_metadata(metadata), shard)
    return out


def in_the_way() -> Path:
    out = fresh("other")
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    return out


def missing_row(**options: Any) -> Any:
    _, rows = atlas_problem()
    return build(fresh("bad"), Pictures(TensorDataset(*(tensor[:40] for tensor in rows.tensors)), (3,)), **options)


def rebuilt(out: Path, **options: Any) -> Any:
    shutil.rmtree(out)
    return build(out, **options)


def hooked_net() -> PCASVMNet:
    """Return the same network with a hook that changes its numbers."""
    net = copy.deepcopy(atlas_problem()[0])
    atlas_layer(net).register_forward_hook(lambda module, args, output: 2 * output)
    return net


ANOTHER = {"give another folder as out=": lambda: build(fresh("another"))}
BUILT = "atlas/"
FILES = [
    Row(
        PROGRAM + "runs each image on its own",
        partial(program, torch.tanh, ShapCAM, baseline="zero"),
        "ShapCAM runs each image on its own",
        {
            "export ContributionCAM": partial(program, torch.tanh, ContributionCAM, baseline="zero"),
            "or a gradient method": partial(program, torch.tanh),
        },
    ),
    Row(
        PROGRAM + "a program has no autograd",
        partial(program, torch.special.i0, jacobian="auto"),
        "a program has no autograd",
        {
            LATER: partial(program, torch.special.i0, layer="later", jacobian="auto"),
            "use jacobian='closed_form', which names the step": closed_form_of_bessel,
        },
    ),
    Row(
        PROGRAM + "is a function of your own",
        partial(program, torch.tanh, targets=[OwnTarget()]),
        "is a function of your own",
        {
            "SVMTarget": partial(program, torch.tanh, targets=[SVMTarget()]),
            "PCATarget": partial(program, torch.tanh, targets=[PCATarget(0)]),
        },
    ),
    Row(
        PROGRAM + "decides by the value of a number",
        partial(program, branching),
        "decides by the value of a number",
        {
            "take the decision out of the network": partial(program, lambda x: 2 * x),
            "cam.explain(images)": lambda: (lambda cam, x: cam.explain(x))(*explainer(branching)),
        },
    ),
    Row(
        PROGRAM + "cannot be traced through",
        partial(program, torch.tanh, before=with_numpy),
        "ClosedFormGradCAM cannot be traced through PCASVMNet",
        {
            "if the network does that, write it with torch's functions": partial(program, torch.tanh),
            "if its derivative does, choose a later target layer": "has a row of its own",
            "export a gradient method such as ClosedFormGradCAM": "has a row of its own",
        },
    ),
    Row(
        PROGRAM + "cannot be traced through",
        partial(program, nn.GroupNorm(2, 4), ClosedFormShapleyCAM),
        "ClosedFormShapleyCAM cannot be traced through PCASVMNet",
        {
            "if the network does that, write it with torch's functions": "has a row of its own",
            "if its derivative does, choose a later target layer": partial(
                program, nn.GroupNorm(2, 4), ClosedFormShapleyCAM, "later"
            ),
            "export a gradient method such as ClosedFormGradCAM": partial(program, nn.GroupNorm(2, 4)),
        },
    ),
    Row(
        PROGRAM + "images only",
        partial(program, lambda x: x / len(x)),
        "is traced for 61 images only",
        {
            "use x.shape[0]": partial(program, lambda x: x / x.shape[0]),
            "where it is a second derivative": "has a row of its own",
        },
    ),
    Row(
        PROGRAM + "images only",
        partial(program, nn.MaxPool2d(3, 1, 1), ClosedFormShapleyCAM),
        "a second derivative of ClosedFormShapleyCAM",
        {
            "use x.shape[0]": "has a row of its own",
            "export ContributionCAM": partial(program, nn.MaxPool2d(3, 1, 1), ContributionCAM, baseline="zero"),
            "or ClosedFormGradCAM": partial(program, nn.MaxPool2d(3, 1, 1)),
        },
    ),
    Row(
        "studio/export/outputs.py: differ from explain",
        lambda: with_wrong_numbers(partial(program, torch.tanh)),
        "the program gives",
        {"report this network": "is for us to mend"},
    ),
    Row(
        "studio/export/outputs.py: differ from explain",
        lambda: with_wrong_numbers(partial(onnx, torch.tanh, folder())),
        "onnxruntime gives",
        {
            "use export.program": partial(program, torch.tanh),
            "see whether explain changes as much with net.double()": in_single_and_double,
            "report this network": "is for us to mend",
        },
    ),
    Row(
        "studio/export/files.py: torch cannot bring this network to ONNX",
        lambda: (bessel(), onnx(torch.special.i0, folder())),
        "torch cannot bring this network to ONNX",
        {
            "use export.program, which needs no ONNX": lambda: (bessel(), program(torch.special.i0))[1],
            "pass another opset": "is for an operator that only later ones have",
        },
    ),
    Row(
        BUILT + "run.py: is not empty and not an atlas",
        lambda: build(in_the_way()),
        "is not empty and not an atlas",
        ANOTHER,
    ),
    Row(
        BUILT + "run.py: was made from other images or labels",
        lambda: build(built("images"), changed_rows()),
        "was made from other images or labels",
        ANOTHER
        | {
            "delete part-00001.parquet, and run the same build again": lambda: without_the_other_shard(built("images")),
            "compare every image before that, with verify=True": lambda: build(built("verified"), verify=True),
        },
    ),
    Row(
        BUILT + "run.py: cannot be verified",
        lambda: build(of_version_0_2_0(), verify=True),
        "cannot be verified, as version 0.2.0 made it",
        ANOTHER | {"leave out verify=True": lambda: build(of_version_0_2_0())},
    ),
    Row(
        BUILT + "run.py: cannot be read",
        missing_row,
        "image 3 (3) cannot be read",
        {
            "mend the image and run the same again": lambda: build(fresh("mended")),
            "pass skip_bad_images=True": partial(missing_row, skip_bad_images=True),
        },
    ),
    Row(
        BUILT + "disk.py: there is no atlas in",
        lambda: atlas.load(fresh("nothing")),
        "there is no atlas in",
        {"make one with atlas.build(": lambda: atlas.load(built("made"))},
    ),
    Row(
        BUILT + "disk.py: has {noun} of something else ({differences})",
        lambda: build(built("head"), net=atlas_problem("linear")[0]),
        "has an atlas of something else",
        ANOTHER | {"delete it": lambda: rebuilt(built("head"), net=atlas_problem("linear")[0])},
    ),
    Row(
        BUILT + "disk.py: have hooks, attributes or functions",
        lambda: build(built("hooks"), net=hooked_net()),
        "have hooks, attributes or functions of the network changed?",
        ANOTHER | {"delete it": lambda: rebuilt(built("hooks"), net=hooked_net())},
    ),
]

# --- errors and warnings of other kinds, where they advise the package's own interface --------------------------------


def as_error(function: Callable[[], Any]) -> Any:
    """Raise the package's own warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return function()


def net_of(estimator: Any, y: Any = THREE) -> PCASVMNet:
    return PCASVMNet(BACKBONE, estimator.fit(FEATURES, y)).eval()


def called(targets: Any, estimator: Any = None) -> np.ndarray:
    """Return maps from a call as in pytorch-grad-cam."""
    net = net_of(make_pipeline(PCA(2), SVC()) if estimator is None else estimator)
    return ClosedFormGradCAM(net, ["0"])(PICTURES[:3], targets)


def of_components(method: Any = ContributionCAM, targets: Any = None) -> SignedMaps:
    net = net_of(make_pipeline(StandardScaler(), PCA(3), LinearSVC()))
    return method(net, ["0"]).explain(PICTURES[:3], targets)


def apart(use: Callable[..., SignedMaps]) -> SignedMaps:
    """Return what becomes of component maps that start at different activations."""
    torch.manual_seed(2)
    body = nn.Conv2d(2, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.GELU(), nn.Flatten()
    backbone = nn.Sequential(*body, nn.Linear(200, 12), nn.ReLU(), nn.Linear(12, 8)).double()
    labels = np.arange(60) % 2
    x = torch.randn(60, 2, 12, 12).double() + torch.randn(2, 2, 1, 1).double()[labels]
    with torch.no_grad():
        features = backbone(x).numpy()
    head = make_pipeline(StandardScaler(), PCA(5), SVC()).fit(features, labels)
    mean = mean_activations(backbone, [x], "3", progress=False)
    net = PCASVMNet(backbone, head).eval()

    def explain(baseline: str, targets: Any = None) -> SignedMaps:
        return ContributionCAM(net, ["3"], mean=mean, baseline=baseline).explain(x[:2], targets)

    return use(explain("neutral"), explain, head)


def untold(use: Callable[..., SignedMaps]) -> SignedMaps:
    """Return what becomes of maps of as many components as there are features, of which they do not tell."""
    pipeline = make_pipeline(StandardScaler(), PCA(), LinearSVC())
    explain = partial(ContributionCAM(net_of(pipeline), ["0"]).explain, PICTURES[:3])
    maps = explain()
    return use(replace(maps, output=maps.output.as_subclass(torch.Tensor)), explain, pipeline)


def machine_behind(components: SignedMaps, *, whole: bool = True, target: Any = None) -> SignedMaps:
    pipeline = make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE)
    return recombined(components, pipeline if whole else pipeline[:-1], target or SVMTarget(0))


def several(method: Any, *, one: bool = False, call: str = "explain") -> Any:
    backbone = seeded(lambda: Stepped(nn.Tanh()))
    cam = method(PCASVMNet(backbone, head_for(backbone)).eval(), ["step"] if one else ["stem", "step"])
    return getattr(cam, call)(IMAGES[:3])


class Pair(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.one(x).tanh().mean((2, 3)), self.other(y).tanh().mean((2, 3))], 1)


def pair(*layers: str, call: bool = False, size: int = 6) -> Any:
    backbone, inputs = seeded(Pair), (IMAGES, IMAGES.flip(0)[..., :size, :size])
    features, y = extract_features(backbone, [(inputs, torch.arange(40) % 2)], progress=False)
    net = PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(2), SVC()).fit(features, y)).eval()
    cam, rows = ContributionCAM(net, [*layers], baseline="zero"), tuple(x[:3] for x in inputs)
    if call:
        return cam(rows, [SVMTarget(0)] * 3)
    maps = cam.explain(rows)
    return maps[0] if isinstance(maps, list) else maps


def two_sizes(one, other, **how):
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Flatten()).eval()
    return extract_features(net, [torch.randn(2, 3, side, side) for side in (one, other)], progress=False, **how)[0]


def far_from_its_boundary(baseline: str) -> SignedMaps:
    machine = SVC().fit(FEATURES, TWO)
    machine.intercept_, machine._intercept_ = machine.intercept_ + 1e3, machine._intercept_ - 1e3
    return maps_of(
        [PCA(6).fit(FEATURES), machine],
        TWO,
        SVMTarget(1),
        partial(ContributionCAM, baseline=baseline, mean=MEAN_ACTIVATIONS),
    )


class ForOneSide(SVC):
    """An SVM whose support vectors all speak for one class."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:  # noqa: N803 - scikit-learn's name
        super().fit(X, y)
        self.dual_coef_, self._intercept_ = abs(self.dual_coef_), abs(self.intercept_)
        self.intercept_ = self._intercept_
        return self


def log_ratio(estimator: Any, target: Any, y: Any = TWO) -> SignedMaps:
    return maps_of(estimator, y, target)


def refitted(*, another: bool) -> Any:
    """Use a network whose head has been fitted again since, or another one."""
    pipeline = make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE)
    net = PCASVMNet(BACKBONE, pipeline).eval()
    pipeline.fit(FEATURES[:60], THREE[:60])
    return as_error(lambda: (PCASVMNet(BACKBONE, pipeline).eval() if another else net)(PICTURES[:3]))


def pickled() -> Path:
    path = folder() / f"head{next(_NUMBERS)}.joblib"
    joblib.dump(make_pipeline(PCA(2), SVC()).fit(FEATURES, THREE), path)
    return path


def from_pickle(*, saved: bool) -> Any:
    fitted = joblib.load(pickled())
    if saved:
        Head.of(fitted).save(folder() / "head.safetensors")
        fitted = Head.load(folder() / "head.safetensors")
    return maps_of([fitted] if not saved else fitted)


def of_volumes() -> tuple[Tensor, SignedMaps]:
    problem = explained("pooled", size="volume")
    return problem.x.sigmoid(), ClosedFormGradCAM(problem.net, [problem.layer]).explain(problem.x)


def of_signals() -> tuple[Tensor, SignedMaps]:
    backbone = seeded(lambda: nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.AdaptiveAvgPool1d(1), nn.Flatten()))
    x = random(9, 2, 16)
    return x, ClosedFormGradCAM(PCASVMNet(backbone, head_for(backbone, x)).eval(), ["1"]).explain(x)


def signal_tokens(**options: Any) -> SignedMaps:
    backbone = seeded(lambda: SignalTower())
    x = random(20, 2, 48)
    net = PCASVMNet(backbone, head_for(backbone, x)).eval()
    return ClosedFormGradCAM(net, ["block"], **options).explain(x[:2])


def signals_without_channels(given: bool = False) -> SignedMaps:
    """Explain signals (N, L) of a network that adds the channel itself; ``given``: as the message says."""
    backbone, x, layer = seeded(Wave), random(20, 40), "conv"
    if given:
        backbone, x, layer = nn.Sequential(nn.Flatten(), backbone), x.unsqueeze(1), "1.conv"
    net = PCASVMNet(backbone, head_for(backbone, x)).eval()
    return ClosedFormGradCAM(net, [layer]).explain(x[:2])


class Wave(nn.Module):
    """Takes signals (N, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 8, 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1)).tanh().mean(2)


class SignalTower(nn.Module):
    """Patches of a signal as tokens, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv1d(2, 8, 4, 4)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.embed(x).mT)).mean(1)


@cache
def stored_features() -> Any:
    return atlas.extract(BACKBONE, list(PICTURES), "0", out=folder() / "stored", progress=False)


def read_features(layer: str = "0") -> np.ndarray:
    return extract_features(BACKBONE, stored_features(), layer, progress=False)[0]


def extracted_anew() -> Any:
    return atlas.extract(BACKBONE, list(PICTURES), "1", out=folder() / "anew", progress=False)


def one_slice() -> Any:
    x, maps = of_volumes()
    return figures.plot_maps(x[:, 0, 0], dataclasses.replace(maps, maps=maps.maps[:, :, 0]))


class Fields(nn.Module):
    """A network with a field for its output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = BACKBONE

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(pooler_output=self.body(x))


def squeezed(count: int, **options: Any) -> Any:
    net = nn.Sequential(BACKBONE, Step(lambda features: features.squeeze())).eval()
    return extract_features(net, [PICTURES[:count]], progress=False, **options)[0]


def with_fields(**options: Any) -> Any:
    return extract_features(Fields(), [PICTURES[:4]], progress=False, **options)[0]


def weights(name: str, content: Any, save: Any = torch.save) -> Path:
    path = folder() / name
    save(content, path)
    return path


def state_of_script() -> Any:
    path = weights("script.pt", ScriptedTanh, lambda module, path: module.save(path))
    torch.save(torch.jit.load(path).state_dict(), folder() / "weights.pth")
    return _read_state(folder() / "weights.pth")


def state_of_network() -> Any:
    net = torch.load(weights("network.pth", nn.Linear(2, 2)), weights_only=False)
    return _read_state(weights("state.pth", net.state_dict()))


def compiled() -> Any:
    backbone = seeded(lambda: Stepped(nn.Tanh()))
    return torch.compile(PCASVMNet(backbone, head_for(backbone)).eval(), backend="eager")(IMAGES[:3])


class Unused(Stepped):
    """A network with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh())
        self.unused = nn.Linear(2, 2)


WINDOW = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh()))
FIXED = seeded(lambda: VisionTransformer(32, 16, 1, 2, 8, 8))


def on_tiles(pool: Any = "mean") -> TiledNet:
    return TiledNet(WINDOW, "1", pool, tiles=(2, 1), size=6).eval()


def maps_of_tiles(method: Any) -> SignedMaps:
    backbone = on_tiles()
    x = random(120, 3, *backbone.canvas) + torch.eye(3).repeat(40, 1)[..., None, None]
    with torch.no_grad():
        head = make_pipeline(PCA(2), SVC()).fit(backbone(x).numpy(), THREE)
    return method(PCASVMNet(backbone, head).eval(), ["net.1"]).explain(x[:2], SVMTarget(0))


def maps_of_larger(method: Any) -> SignedMaps:
    rows = extract_features(WINDOW, [PICTURES], "1", pool="mean", progress=False)[0]
    net = PCASVMNet(WINDOW, SVC().fit(rows, THREE), "1", pool="mean").eval()
    return method(net, ["1"]).explain(random(2, 3, 6, 11), SVMTarget(0))


MEAN = {"baseline": "mean"}
MEAN_ACTIVATIONS = BACKBONE[0](PICTURES).mean(0).detach()
UNIT = PICTURES[:3].sigmoid()  # as people see them
HALF = make_pipeline(StandardScaler(), PCA(3))
OTHERS = [
    Row(
        "studio/atlas/build.py: an atlas is made of a PCASVMNet",
        lambda: atlas.build(BACKBONE, TensorDataset(PICTURES), ["0"], fresh("net")),
        "an atlas is made of a PCASVMNet",
        {"use PCASVMNet(backbone, head)": lambda: build(fresh("net"))},
    ),
    Row(
        "studio/atlas/build.py: but the head has several outputs",
        lambda: build(
            fresh("several"),
            TensorDataset(PICTURES[:40], torch.tensor(THREE[:40])),
            net_of(make_pipeline(PCA(2), MultiOutputClassifier(SVC())), COLUMNS),
        ),
        "an atlas keeps one prediction for each image",
        {
            "fit a head for each of them": lambda: build(
                fresh("one"),
                TensorDataset(PICTURES[:40], torch.tensor(TWO[:40])),
                net_of(make_pipeline(PCA(2), SVC()), TWO),
            ),
            "explain images with cam.explain": partial(maps_of, MultiOutputClassifier(SVC()), COLUMNS),
        },
    ),
    Row(
        "methods/method.py: is not a method itself",
        partial(maps_of, SVC(), method=ClosedFormCAM),
        "is not a method itself: use ClosedFormGradCAM",
        {"use ClosedFormGradCAM": partial(maps_of, SVC())},
    ),
    Row(
        "methods/method.py: autograd cannot freeze attention",
        partial(stepped, nn.Tanh(), attention="frozen", jacobian="auto"),
        "autograd cannot freeze attention",
        {"use jacobian='closed_form'": partial(stepped, nn.Tanh(), attention="frozen", jacobian="closed_form")},
    ),
    Row(
        "methods/method.py: do not add up: use",
        partial(tokens, "blocks.1.norm1", heads=True, fused=True, method=ClosedFormLayerCAM),
        "heads of ClosedFormLayerCAM do not add up",
        {
            method.__name__: partial(tokens, "blocks.1.norm1", heads=True, fused=True, method=method)
            for method in (ClosedFormGradCAM, ClosedFormHiResCAM)
        },
    ),
    Row(
        "methods/grad_cam_protocol.py: but these may be of different inputs",
        partial(pair, "one", "other", call=True),
        "these may be of different inputs",
        {
            "use explain, which returns maps of each": partial(pair, "one", "other"),
            "or name one": partial(pair, "one", call=True),
        },
    ),
    Row(
        "methods/grad_cam_protocol.py: but the inputs are images of different sizes",
        partial(pair, "one", call=True, size=4),
        "the inputs are images of different sizes",
        {"use explain, whose maps have the layer's own grid": partial(pair, "one", size=4)},
    ),
    Row(
        "methods/grad_cam_protocol.py: targets=None needs a head with an SVM",
        partial(called, None, HALF),
        "targets=None needs a head with an SVM",
        {"use PCATarget": partial(called, [PCATarget(0)] * 3, HALF)},
    ),
    Row(
        "methods/grad_cam_protocol.py: give one per image",
        partial(called, [SVMTarget(0)] * 2),
        "2 targets for 3 images",
        {
            "targets=[target] * 3": partial(called, [SVMTarget(0)] * 3),
            "or explain(x, targets)": partial(maps_of, SVC(), targets=[SVMTarget(0), SVMTarget(1)]),
        },
    ),
    Row(
        "methods/method.py: takes one target layer in explain and jacobians",
        partial(several, ClosedFormGradCAM),
        "ClosedFormGradCAM takes one target layer in explain and jacobians",
        {
            "make one ClosedFormGradCAM for each layer": partial(several, ClosedFormGradCAM, one=True),
            "use ContributionCAM, whose maps of several layers are one": partial(
                stepped, nn.Tanh(), ContributionCAM, ["stem"], baseline="zero"
            ),
        },
    ),
    Row(
        "methods/contributions.py: takes several target layers in explain only",
        partial(several, partial(ContributionCAM, baseline="zero"), call="jacobians"),
        "ContributionCAM takes several target layers in explain only",
        {
            "make one ContributionCAM for each layer": partial(
                several, partial(ContributionCAM, baseline="zero"), one=True, call="jacobians"
            )
        },
    ),
    Row(
        "methods/starts.py: which the head knows only if",
        partial(stepped, nn.Tanh(), ContributionCAM, **MEAN),
        "baseline='mean' needs the training set's mean at the target layer",
        {"pass mean=mean_activations(": another_baseline(torch.tanh)},
    ),
    Row(
        "network/extraction.py: features, and those of shape",
        partial(two_sizes, 12, 16),
        "images of shape (3, 12, 12) have 288 features, and those of shape (3, 16, 16) 512",
        {
            "give images of one size": partial(two_sizes, 12, 12),
            "pool='mean' with layer=": partial(two_sizes, 12, 16, layer="0", pool="mean"),
        },
    ),
    Row(
        "network/extraction.py: choose a layer where it does, or baseline",
        lambda: mean_activations(Tower(first=True).eval(), [torch.randn(4, 3, 12, 16)], "norm", progress=False),
        "does not count images (perhaps tokens)",
        {
            "choose a layer where it does": lambda: mean_activations(
                Tower(first=True).eval(), [torch.randn(4, 3, 12, 16)], "patches", progress=False
            ),
            "or baseline='zero'": partial(
                tokens, "norm", "mean", first=True, method=partial(ContributionCAM, baseline="zero")
            ),
        },
    ),
    Row(
        "targets/boundary_head.py: no decision boundary is within reach",
        partial(far_from_its_boundary, "neutral"),
        "start at the mean instead, baseline='mean'",
        {"baseline='mean'": partial(far_from_its_boundary, "mean")},
    ),
    Row(
        "targets/target.py: is not linear in the network's scores",
        partial(stepped, nn.Tanh(), ContributionCAM, targets=[OwnTarget()], baseline="zero"),
        "is not linear in the network's scores",
        {
            "use SVMTarget": partial(stepped, nn.Tanh(), ContributionCAM, targets=[SVMTarget()], baseline="zero"),
            "PCATarget": partial(stepped, nn.Tanh(), ContributionCAM, targets=[PCATarget(0)], baseline="zero"),
            "or a gradient method such as ClosedFormGradCAM": partial(stepped, nn.Tanh(), targets=[OwnTarget()]),
        },
    ),
    Row(
        "maps/recombination.py: the maps are not those of components",
        lambda: machine_behind(of_components(targets=[SVMTarget(0)])),
        "the maps are not those of components 0, 1, ...",
        {"make them with cam.explain(x)": lambda: machine_behind(of_components())},
    ),
    Row(
        "maps/recombination.py: numbers, features or components",
        lambda: untold(lambda maps, _, pipeline: recombined(maps, pipeline, SVMTarget(0))),
        "numbers, features or components, of which there are as many",
        {
            "pipeline[2:]": lambda: untold(lambda maps, _, pipeline: recombined(maps, pipeline[2:], SVMTarget(0))),
            "explain the images again": lambda: untold(
                lambda _, explain, pipeline: recombined(explain(), pipeline, SVMTarget(0))
            ),
        },
    ),
    Row(
        "maps/recombination.py: maps of this method are not sums",
        lambda: machine_behind(of_components(ClosedFormLayerCAM)),
        "maps of this method are not sums of component maps",
        {
            method.__name__: lambda method=method: machine_behind(of_components(method))
            for method in (ClosedFormGradCAM, ClosedFormHiResCAM, ClosedFormXGradCAM, ContributionCAM)
        },
    ),
    Row(
        "maps/recombination.py: maps of these decisions are not sums",
        lambda: apart(lambda components, _, head: recombined(components, head, SVMTarget(1))),
        "not sums of component maps, which start at different activations",
        {
            "explain the decisions": lambda: apart(lambda _, explain, head: explain("neutral", [SVMTarget(1)])),
            "baseline='mean'": lambda: apart(lambda _, explain, head: recombined(explain("mean"), head, SVMTarget(1))),
        },
    ),
    Row(
        "maps/recombination.py: needs a head with an SVM",
        lambda: machine_behind(of_components(), whole=False),
        "needs a head with an SVM, but this one has none",
        {"use PCATarget": lambda: machine_behind(of_components(), whole=False, target=PCATarget(0))},
    ),
    Row(
        "network/site.py: reshape_transform takes",
        lambda: as_error(partial(tokens, "blocks.1.norm1", transform=lambda t: t[:, :12].mT.unflatten(2, (3, 4)))),
        "if that is not intended, use reshape_transform='tokens'",
        {"use reshape_transform='tokens'": partial(tokens, "blocks.1.norm1")},
    ),
    Row(
        "studio/data/images.py: but the network takes tensors: pass transform=",
        lambda: build(fresh("pictures"), [(Image.new("RGB", (12, 12), (9 * n, 0, 0)), n % 2) for n in range(9)]),
        "the image is a Image, but the network takes tensors",
        {
            "pass transform=": lambda: build(
                fresh("pictures"),
                [(Image.new("RGB", (12, 12), (9 * n, 0, 0)), n % 2) for n in range(9)],
                transform=ToTensor(),
            )
        },
    ),
    Row(
        "studio/evaluation/subject.py: pass target=PCATarget(0)",
        lambda: evaluation.faithfulness(net_of(HALF), PICTURES[:6], ["0"], progress=False),
        "the head has no SVM, so there is no decision to explain",
        {
            "pass target=PCATarget(0)": lambda: evaluation.faithfulness(
                net_of(HALF), PICTURES[:6], ["0"], target=PCATarget(0), progress=False
            )
        },
    ),
    Row(
        "studio/figures/grid.py: are of volumes",
        lambda: figures.plot_maps(*of_volumes()),
        "are of volumes",
        {
            "use figures.plot_volume": lambda: figures.plot_volume(*of_volumes()),
            "dataclasses.replace(maps, maps=maps.maps[:, :, d])": one_slice,
        },
    ),
    Row(
        "network/site.py: are tokens of the signals",
        signal_tokens,
        "are tokens of the signals, whose channels come last",
        {"pass reshape_transform='tokens'": partial(signal_tokens, reshape_transform="tokens")},
    ),
    Row(
        "network/inputs.py: have no channel axis",
        signals_without_channels,
        "signals of shape (2, 40) have no channel axis",
        {"pass x.unsqueeze(1), and if the network adds the channel itself": partial(signals_without_channels, True)},
    ),
    Row(
        "studio/figures/grid.py: are of signals",
        lambda: figures.plot_maps(*of_signals()),
        "are of signals",
        {"use figures.plot_signal": lambda: figures.plot_signal(*of_signals())},
    ),
    Row(
        "studio/data/mask_search.py: by name, but",
        partial(listed, "masks", as_masks=False),
        "0.png has as many colours as a photo",
        {
            "rename the folder": partial(listed, "dents", as_masks=False),
            "save them as PNG, in few colours, with the names and sizes of their photos": partial(listed, "masks"),
            "or move them out of": listed,
        },
    ),
    Row(
        "studio/data/mask_search.py: are photos by name",
        partial(listed, "dents"),
        "are photos by name, but have few colours, and the names and sizes of others",
        {
            "rename the folder to": partial(listed, "masks"),
            "name the files otherwise, as in new_0.png": partial(listed, "dents", prefix="new_"),
        },
    ),
    Row(
        "studio/data/masks.py: would have the same mask",
        partial(masked, "good/0.png", "dent/0.png", mask="0.png"),
        "good/0.png and dent/0.png would have the same mask",
        {
            "put masks into folders as the pictures are": partial(
                masked, "good/0.png", "dent/0.png", mask="dent/0.png"
            ),
            "name pictures differently": partial(masked, "good/1.png", "dent/0.png", mask="0.png"),
        },
    ),
    Row(
        "studio/data/mask_search.py: have one name, and few colours both",
        partial(named_alike, "a.png"),
        "have one name, and few colours both",
        {
            "end its name in _mask, as in a_mask.png": partial(named_alike, "a_mask.png"),
            "name them differently": partial(named_alike, "b.png"),
        },
    ),
    Row(
        "studio/pictures/read.py: and nobody knows which",
        paged,
        "it has 2 pages, and nobody knows which is the picture",
        {"name it, --page 1 (in Python page=1)": partial(paged, 1), "save them as one picture in RGB": coloured},
    ),
    Row(
        "studio/atlas/features.py: has features of something else",
        partial(read_features, "1"),
        "has features of something else",
        {
            "pass the same network, layer and pool": read_features,
            "extract them anew, atlas.extract(..., out=) with another folder": extracted_anew,
        },
    ),
    Row(
        "studio/atlas/disk.py: there are no features in",
        lambda: atlas.Features(folder()),
        "there are no features in",
        {"extract them, atlas.extract(..., out=": extracted_anew},
    ),
    Row(
        "studio/atlas/disk.py: has {('features' if file_format",
        lambda: atlas.load(stored_features().folder),
        "has features, and not an atlas",
        {"give another folder as out=": extracted_anew},
    ),
    Row(
        "studio/figures/grid.py: and cannot be compared",
        lambda: figures.plot_maps(
            UNIT, {"one": of_components(), "other": of_components(targets=[SVMTarget(0)])}, compare=True
        ),
        "have different targets",
        {
            "give every explain the same targets": lambda: figures.plot_maps(
                UNIT, {"one": of_components(), "other": of_components(ClosedFormGradCAM)}
            )
        },
    ),
    Row(
        "studio/figures/decision.py: gradient maps do not add up to the decision",
        lambda: figures.plot_decision(
            UNIT,
            of_components(ClosedFormGradCAM),
            make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE),
        ),
        "gradient maps do not add up to the decision",
        {
            "give those of ContributionCAM(...).explain(x)": lambda: figures.plot_decision(
                UNIT, of_components(), make_pipeline(StandardScaler(), PCA(3), LinearSVC()).fit(FEATURES, THREE)
            )
        },
    ),
    Row(
        "head/stack.py: the head has no SVM",
        lambda: net_of(HALF).head.voting,
        "the head has no SVM: use PCATarget, or add a fitted SVC",
        {
            "use PCATarget": partial(maps_of, HALF, targets=PCATarget(0)),
            "add a fitted SVC after the PCA": lambda: net_of(make_pipeline(PCA(2), SVC())).head.voting,
        },
    ),
    Row(
        "head/head.py: was fitted again, or replaced",
        partial(refitted, another=False),
        "was fitted again, or replaced, after this network was made",
        {"make another one, PCASVMNet(backbone, head, ...)": partial(refitted, another=True)},
    ),
    Row(
        "head/head.py: the head has no classes",
        partial(maps_of, SVR(), NUMBERS, SVMTarget("cat")),
        "the head has no classes, so 'cat' is not one",
        {
            "use SVMTarget()": partial(maps_of, SVR(), NUMBERS, SVMTarget()),
            "SVMTarget(sign='-')": partial(maps_of, SVR(), NUMBERS, SVMTarget(sign="-")),
        },
    ),
    *(
        Row(
            "head/log_ratio.py: " + part,
            partial(log_ratio, estimator, LogRatioTarget(*category), y),
            part,
            {"use SVMTarget": partial(log_ratio, estimator, SVMTarget(*category), y)},
        )
        for part, estimator, category, y in (
            ("LogRatioTarget is for classifiers", SVR(), (), NUMBERS),
            ("LogRatioTarget needs a kernel that is positive everywhere", SVC(kernel="linear"), (1,), TWO),
            ("LogRatioTarget needs terms for and against", ForOneSide(), (1,), TWO),
            ("LogRatioTarget needs an SVM with an RBF kernel", LinearSVC(), (1,), TWO),
        )
    ),
    Row(
        "head/fit_checks.py: was fitted on one class only",
        partial(head_of, naive_bayes.GaussianNB(), np.zeros(len(THREE))),
        "was fitted on one class only, 0.0, and has nothing to decide",
        {
            "fit it on two classes or more": partial(maps_of, naive_bayes.GaussianNB(), TWO),
            "make_pipeline(StandardScaler(), PCA(3))": partial(maps_of, make_pipeline(StandardScaler(), PCA(3))),
            "fit a OneClassSVM": partial(maps_of, OneClassSVM()),
        },
    ),
    Row(
        "head/fit_checks.py: all training features are alike",
        lambda: Head.of(make_pipeline(StandardScaler(), LinearSVC()).fit(np.ones_like(FEATURES), TWO)),
        "all training features are alike",
        {
            "check that the images differ": "is about the user's images",
            "the layer of the features": partial(maps_of, make_pipeline(StandardScaler(), LinearSVC()), TWO),
        },
    ),
    Row(
        "head/vote.py: outputs: name one of net.head.classes_",
        lambda: net_of(MultiOutputClassifier(SVC()), COLUMNS)(PICTURES[:3]).head.voting.predicted(torch.ones(1, 3)),
        "the head has 3 outputs",
        {"as in SVMTarget(0)": partial(maps_of, MultiOutputClassifier(SVC()), COLUMNS, SVMTarget(0))},
    ),
    Row(
        "head/storage.py: is a pickle, as joblib writes it",
        lambda: Head.load(pickled()),
        "is a pickle, as joblib writes it",
        {
            "pass it to PCASVMNet(backbone, fitted)": partial(from_pickle, saved=False),
            "Head.of(fitted).save('head.safetensors')": partial(from_pickle, saved=True),
        },
    ),
    Row(
        "head/enumerated.py: runs outside of PyTorch",
        partial(program_of, forest()),
        "RandomForestClassifier runs outside of PyTorch",
        {"make one without it": partial(program_of, PCA(2))},
    ),
    Row(
        "head/predictor.py: has no classes_",
        lambda: Head.of([PCA(2).fit(FEATURES), Labelling(classes=None)]),
        "Labelling predicts labels, but has no classes_",
        {"give it the attribute classes_": maps_of_labelling},
    ),
    Row(
        "head/predictor.py: gives other values for the same rows",
        lambda: Head.of([PCA(2).fit(FEATURES), Wavering(np.arange(3))]),
        "Wavering gives other values for the same rows",
        {"fix its random_state": maps_of_labelling},
    ),
    Row(
        "head/predictor.py: predicts classes that are not in its classes_",
        lambda: Head.of([PCA(2).fit(FEATURES), Labelling(np.array(["a", "b", "c"]))]),
        "Labelling predicts classes that are not in its classes_",
        {"let predict return members of classes_": maps_of_labelling},
    ),
    Row(
        "head/predictor.py: has no classes_, and predicts another class",
        lambda: Head.of([PCA(2).fit(FEATURES), Unnamed()]),
        "Unnamed has no classes_, and predicts another class than the one of its largest value",
        {"give it the attribute classes_": maps_of_labelling},
    ),
    Row(
        "head/predictor.py: gives one number for a row",
        lambda: Head.of([PCA(2).fit(FEATURES), Probabilities(1)]),
        "predict_proba of Probabilities gives one number for a row",
        {
            "let it return a column for each class": lambda: maps_of(
                [PCA(2).fit(FEATURES), Probabilities(2)], method=ContributionCAM
            )
        },
    ),
    Row(
        "targets/decisions.py: hard votes do not tell which class came second",
        partial(maps_of_labelling, SVMTarget(versus="runner-up")),
        "hard votes do not tell which class came second",
        {
            "name it": partial(maps_of_labelling, SVMTarget(0, versus=1)),
            "or use 'others'": partial(maps_of_labelling, SVMTarget(versus="others")),
        },
    ),
    Row(
        "head/predictor.py: predicts several labels at a time",
        lambda: Head.of(several_labels(OneVsRestClassifier)),
        "OneVsRestClassifier predicts several labels at a time",
        {
            "fit one for each label, MultiOutputClassifier": lambda: maps_of(
                several_labels(MultiOutputClassifier), y=COLUMNS, method=ContributionCAM
            )
        },
    ),
    Row(
        "head/storage.py: which are not read from files",
        lambda: loaded_again(Labelling(np.arange(3))),
        "Labelling, which are not read from files",
        {
            "if you trust them and the file, load it with trusted": lambda: maps_of(
                loaded_again(Labelling(np.arange(3)), trusted=[f"{__name__}.Labelling"]), method=ContributionCAM
            )
        },
    ),
    Row(
        "maps/signed_maps.py: there are no maps to join",
        lambda: SignedMaps.cat([]),
        "there are no maps to join",
        {"give at least one SignedMaps": lambda: SignedMaps.cat([of_components()])},
    ),
    Row(
        "maps/signed_maps.py: maps of different targets cannot be joined",
        lambda: SignedMaps.cat([of_components(), of_components(targets=[SVMTarget(0)])]),
        "maps of different targets cannot be joined",
        {"the same list of targets": lambda: SignedMaps.cat([of_components(), of_components()])},
    ),
    Row(
        "maps/signed_maps.py: figures.plot_volume draws those of volumes",
        lambda: (lambda x, maps: maps.overlay(x[:, 0, 0].numpy()))(*of_volumes()),
        "figures.plot_volume draws those of volumes",
        {
            "give one of each image": lambda: of_components().overlay(np.ones((3, 6, 6))),
            "figures.plot_volume": lambda: figures.plot_volume(*of_volumes()),
        },
    ),
    Row(
        "network/features.py: does not run in a forward pass",
        lambda: extract_features(seeded(Unused), [IMAGES], "unused", progress=False),
        "the layer 'unused' does not run in a forward pass",
        {
            "pass the original network": lambda: extract_features(seeded(Unused), [IMAGES], "step", progress=False)[0],
            "compile the PCASVMNet, torch.compile(net)": compiled,
        },
    ),
    Row(
        "network/fields.py: features must be one tensor",
        with_fields,
        "features must be one tensor, but the network, or the layer, returns a SimpleNamespace with output.pooler_out",
        {
            "name a layer that returns the tensor": partial(with_fields, layer="body"),
            "layer='last_hidden_state'": "is for models of transformers, as in tests/documents/test_transformers.py",
            "pool=lambda output: output.pooler_output": partial(with_fields, pool=lambda output: output.pooler_output),
        },
    ),
    Row(
        "network/features.py: features must be rows (N, ...)",
        partial(squeezed, 1),
        "features must be rows (N, ...), but the output has shape (6,): of one image",
        {
            "write .flatten(1) in its place": lambda: extract_features(BACKBONE, [PICTURES[:1]], progress=False)[0],
            "pool=lambda t: t.reshape(-1, 6)": partial(squeezed, 1, pool=lambda t: t.reshape(-1, 6)),
            "take the features from the layer before it": partial(squeezed, 1, layer="0"),
        },
    ),
    Row(
        "targets/questions.py: jacobians needs a network",
        lambda: ClosedFormGradCAM(nn.Sequential(*BACKBONE[:2]).eval(), ["0"]).jacobians(PICTURES[:3]),
        "jacobians needs a network that returns scores (N, C), or a PCASVMNet",
        {
            "use explain": lambda: ClosedFormGradCAM(nn.Sequential(*BACKBONE[:2]).eval(), ["0"]).explain(
                PICTURES[:3], [lambda output: output.sum()]
            )
        },
    ),
    Row(
        "targets/decisions.py: needs a head with an SVM",
        partial(maps_of, HALF, targets=SVMTarget(0)),
        "needs a head with an SVM, but this one has none",
        {"use PCATarget": partial(maps_of, HALF, targets=PCATarget(0))},
    ),
    Row(
        "methods/perturbation.py: changes one image at a time",
        partial(maps_of_tiles, ClosedFormAblationCAM),
        "ClosedFormAblationCAM changes one image at a time, which does not work on tiles",
        {
            "use LIFTCAM": partial(maps_of_tiles, LIFTCAM),
            "or ContributionCAM": partial(maps_of_tiles, ContributionCAM),
            "explain the network without tiles": partial(maps_of_larger, ClosedFormAblationCAM),
        },
    ),
    Row(
        "network/tiles.py: are no canvas for tiles",
        lambda: on_tiles()(random(2, 3, 5, 9)),
        "images of 9x5 pixels are no canvas for tiles of 6x6",
        {
            "resize them to .canvas": lambda: on_tiles()(F.interpolate(random(2, 3, 5, 9), on_tiles().canvas)),
            "or each photo to .canvas_for(width, height)": lambda: on_tiles()(
                F.interpolate(random(2, 3, 5, 9), on_tiles().canvas_for(9, 5))
            ),
        },
    ),
    Row(
        "network/tiles.py: the pool of the TiledNet is a function",
        lambda: on_tiles(lambda t: t.mean((2, 3))).describe(),
        "the pool of the TiledNet is a function, which no file can hold",
        {
            "move it into the network, whose output then is the features, or use pool='mean'": lambda: (
                on_tiles().describe()
            )
        },
    ),
    Row(
        "studio/model/backbones.py: as its positions are those of one size",
        lambda: _refuse_size(FIXED, "vit", (48, 64)),
        "vit does not take images of 64x48 pixels",
        {
            "cut pictures into tiles of its own size": lambda: TiledNet(FIXED, "encoder", "cls", tiles=(2, 1))(
                random(1, 3, 32, 48)
            ),
            "take a convolutional network": lambda: _refuse_size(WINDOW, "cnn", (48, 64)) or WINDOW,
        },
    ),
    Row(
        "studio/model/backbones.py: is a TorchScript archive",
        lambda: _read_state(weights("script.pt", ScriptedTanh, lambda module, path: module.save(path))),
        "is a TorchScript archive",
        {"torch.jit.load(": state_of_script},
    ),
    Row(
        "studio/model/backbones.py: has no state dict",
        lambda: _read_state(weights("network.pth", nn.Linear(2, 2))),
        "has no state dict",
        {"write it with torch.save(net.state_dict(), 'network.pth')": state_of_network},
    ),
]
ROWS = [*HEADS, *PATHS, *FILES, *OTHERS]


def marks(row: Row) -> list[pytest.MarkDecorator]:
    """Programs, figures and what is compiled take seconds, and ONNX files a library that is no dependency."""
    if row.place.startswith("export/"):
        return [pytest.mark.slow, pytest.mark.optional]
    slow = "figures/", "network/features.py: does not run", "maps/recombination.py: maps of", "maps/signed_maps.py"
    return [pytest.mark.slow] if row.place.startswith(slow) else []


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{number} {row.place}", marks=marks(row)) for number, row in enumerate(ROWS)]
)
def test_the_message_names_ways_that_work(row: Row) -> None:
    with pytest.raises(Exception, match=re.escape(row.message)) as caught:
        row.refused()
    named = getattr(caught.value, "ways_out", (str(caught.value),))
    ways = row.ways | ({BY_VALUES: row.by_values} if BY_VALUES in named else {})
    for way in named:
        assert any(part in way for part in ways), f"nothing follows: {way}"
    for part, follow in ways.items():
        assert any(part in way for way in named), f"the message does not say: {part}"
        assert isinstance(follow, str) or shows(follow()), f"nothing comes of: {part}"
