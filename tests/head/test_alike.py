"""Heads with nothing to tell apart: one class, features that are all alike, components that do not vary."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, IncrementalPCA, KernelPCA, TruncatedSVD
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import BaggingClassifier, VotingClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier, RidgeClassifierCV
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsRestClassifier, OutputCodeClassifier
from sklearn.naive_bayes import ComplementNB, GaussianNB, MultinomialNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from sklearn.semi_supervised import LabelPropagation, LabelSpreading
from sklearn.svm import SVC, SVR, OneClassSVM
from sklearn.utils import all_estimators
from torch import nn

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ConstantComponentWarning,
    Head,
    HotellingTarget,
    NoProgramError,
    PCASVMNet,
    export,
)

FEATURES = abs(np.random.default_rng(0).normal(size=(30, 5)))
ONE = np.array(["cat"] * 30)
LABELS = np.arange(30) % 2


# --- one class --------------------------------------------------------------------------------------------------------

LENIENT = {
    "neighbours": KNeighborsClassifier(3),
    "naive Bayes": GaussianNB(),
    "counts": MultinomialNB(),
    "complements": ComplementNB(),
    "discriminants": LinearDiscriminantAnalysis(),
    "ridge": RidgeClassifier(),
    "ridge with a search": RidgeClassifierCV(),
    "perceptron": MLPClassifier((3,), max_iter=2),
    "propagation": LabelPropagation(),
    "spreading": LabelSpreading(),
    "one against the rest": OneVsRestClassifier(SVC()),
    "codes": OutputCodeClassifier(SVC()),
    "bag": BaggingClassifier(GaussianNB(), 2),
    "vote": VotingClassifier([("a", GaussianNB()), ("b", LinearDiscriminantAnalysis())], voting="soft"),
    "pipeline": make_pipeline(PCA(2), GaussianNB()),
    "search": GridSearchCV(make_pipeline(PCA(2), KNeighborsClassifier()), {"pca__n_components": [1, 2]}, cv=2),
}


@pytest.mark.filterwarnings("ignore")  # scikit-learn's own, of some of them
@pytest.mark.parametrize("name", LENIENT)
def test_classifiers_of_one_class_are_refused(name):
    with pytest.raises(
        ValueError, match=r"fitted on one class only, 'cat', and .* two classes or more, or leave it out"
    ):
        Head.of(LENIENT[name].fit(FEATURES, ONE))


@pytest.mark.filterwarnings("ignore")
def test_no_classifier_of_scikit_learn_is_taken_with_one_class():
    taken, fitted = [], []
    for name, kind in all_estimators(type_filter="classifier"):
        try:
            estimator = kind().fit(FEATURES, ONE)
        except (TypeError, ValueError):  # it takes others, or needs several classes
            continue
        fitted.append(name)
        try:
            Head.of(estimator)
        except ValueError:
            continue
        taken.append(name)
    assert taken == []
    assert {"GaussianNB", "KNeighborsClassifier", "RidgeClassifier", "MLPClassifier"} <= {*fitted}


def test_a_file_with_one_class_is_refused(tmp_path):
    head = Head.of(LogisticRegression().fit(FEATURES, LABELS))
    head.stages[-1].classes = np.array([7])
    head.save(tmp_path / "head.safetensors")
    with pytest.raises(ValueError, match="one class only, 7, "):
        Head.load(tmp_path / "head.safetensors")


def test_regressors_and_those_of_inliers_have_no_classes():
    for estimator in (OneClassSVM(), SVR(), make_pipeline(PCA(2), SVR())):
        assert Head.of(estimator.fit(FEATURES, LABELS)).classes_ is None
    assert len(Head.of(GaussianMixture(2).fit(FEATURES)).classes_) == 2
    with pytest.raises(ValueError, match="one class only, 0, "):  # nothing but NaN
        Head.of(GaussianMixture(1).fit(FEATURES))
    assert Head.of(LogisticRegression().fit(FEATURES, LABELS)).voting.kind == "Binary"


# --- features that are all alike --------------------------------------------------------------------------------------

SAME = {
    "scaler": (StandardScaler(), SVC()),
    "scaler and PCA": (StandardScaler(), PCA(2), SVC()),
    "range": (MinMaxScaler(), SVC()),
    "largest": (MaxAbsScaler(), SVC()),
    "PCA": (PCA(2), SVC()),
    "PCA of products": (PCA(2, svd_solver="covariance_eigh"), SVC()),
    "whitened": (PCA(2, whiten=True), SVC()),
    "in parts": (IncrementalPCA(2), SVC()),
    "kernel": (KernelPCA(2, kernel="rbf"), SVC()),
    "not centred": (TruncatedSVD(2), SVC()),
    "machine": (SVC(),),
    "neighbours": (KNeighborsClassifier(3),),
    "components alone": (PCA(2),),
}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")  # scikit-learn's own
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", [0, 1e-7])
@pytest.mark.parametrize("name", SAME)
def test_features_that_are_all_alike_are_refused(name, rounding, dtype):
    rng = np.random.default_rng(1)
    rows = FEATURES[:1] * (1 + rounding * rng.normal(size=(30, 1)))
    head = make_pipeline(*SAME[name]).fit(rows.astype(dtype), LABELS)
    with pytest.raises(ValueError, match=r"all training features are alike: .* check that the images differ"):
        Head.of(head)


@pytest.mark.parametrize("name", SAME)
def test_features_that_vary_by_a_thousandth_are_not_alike(name):
    rng = np.random.default_rng(1)
    rows = (FEATURES[:1] + 1e-3 * rng.normal(size=(30, 5))).astype(np.float32)
    Head.of(make_pipeline(*SAME[name]).fit(rows, LABELS))


def test_some_features_may_be_constant():
    rows = FEATURES.copy()
    rows[:, :3] = 0
    for stages in ((StandardScaler(), SVC()), (PCA(2), SVC()), (SVC(),)):
        Head.of(make_pipeline(*stages).fit(rows, LABELS))


# --- components that do not vary --------------------------------------------------------------------------------------


def of_constant(stages, rows):
    """Return the message about constant components of a head."""
    with pytest.warns(ConstantComponentWarning) as told:
        Head.of(make_pipeline(*stages).fit(rows, np.arange(len(rows)) % 2))
    (message,) = [str(each.message) for each in told]
    return message


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", ["full", "randomized", "arpack"])
@pytest.mark.parametrize("front", [(), (StandardScaler(),)], ids=["plain", "scaled"])
def test_as_many_components_as_images(front, solver, dtype):
    rows = (10 + np.random.default_rng(2).normal(size=(6, 40))).astype(dtype)
    count = 5 if solver == "arpack" else 6  # of which arpack needs fewer than of images
    stages = (*front, PCA(count, svd_solver=solver), SVC())
    if solver == "arpack":
        rows = np.concatenate([rows[:5], rows[:1]])
    assert of_constant(stages, rows) == (
        f"component {count - 1} of PCA varies over the training images only by rounding: its map is noise. "
        f"Fit fewer components, PCA({count - 1}), or on more images"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_whitening_is_told_as_well(solver, dtype):
    rng = np.random.default_rng(3)
    rows = (5 + rng.normal(size=(50, 2)) @ rng.normal(size=(2, 8))).astype(dtype)
    message = of_constant((PCA(4, whiten=True, svd_solver=solver), SVC()), rows)
    assert message.startswith("components 2 and 3 of PCA vary over the training images only by rounding")
    assert ", which whitening makes as large as the others: their maps are noise. " in message
    assert "Fit fewer components, PCA(2)," in message


def test_kernels_and_parts_of_the_data():
    rng = np.random.default_rng(3)
    rows = 5 + rng.normal(size=(50, 2)) @ rng.normal(size=(2, 8))
    assert "component 2 of IncrementalPCA varies" in of_constant((IncrementalPCA(3), SVC()), rows)
    assert "component 2 of KernelPCA varies" in of_constant((KernelPCA(3), SVC()), rows)
    assert "components 2, 3 and 4 of" in of_constant((PCA(5), SVC()), rows)


def of_rank(rank, dtype, offset=0.0):
    """Return what a layer of 16 channels makes of so many numbers, with the rounding of a network."""
    random = np.random.default_rng(0)
    weight, rows = random.normal(size=(rank, 16)), random.normal(size=(60, rank))
    return rows.astype(dtype) @ weight.astype(dtype) + dtype(offset)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("offset", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("front", [None, StandardScaler(), RobustScaler(), MinMaxScaler()], ids=str)
@pytest.mark.parametrize("whiten", [False, True])
def test_more_components_than_the_features_have_rank(front, offset, dtype, whiten):
    stages = (*([] if front is None else [front]), PCA(8, whiten=whiten), SVC())
    message = of_constant(stages, of_rank(4, dtype, offset))
    assert message.startswith("components 4, 5, 6 and 7 of PCA vary over the training images only by rounding")
    assert "Fit fewer components, PCA(4)," in message


def test_of_a_network_in_single_precision_scaled_in_double():
    message = of_constant((StandardScaler(), PCA(8), SVC()), of_rank(4, np.float32, 100).astype(float))
    assert message.startswith("components 4, 5, 6 and 7 of PCA")


def test_t2_of_scaled_features_takes_what_varies():
    rows, query = of_rank(4, np.float32, 100.0), of_rank(5, np.float32, 100.0)[:9]
    scaler = StandardScaler().fit(rows)
    with pytest.warns(ConstantComponentWarning):
        head = Head.of([scaler, PCA(8).fit(scaler.transform(rows))])
    output = PCASVMNet(nn.Identity(), head).eval()(torch.from_numpy(query))
    four = PCA(4, whiten=True, svd_solver="full").fit(scaler.transform(rows).astype(float))
    expected = (four.transform(scaler.transform(query.astype(float))) ** 2).sum(1)
    np.testing.assert_allclose(HotellingTarget()(output).detach(), expected, rtol=1e-4)


def test_a_reduction_of_components_that_vary_is_not_taken_for_the_one_before():
    with pytest.warns(ConstantComponentWarning, match="components 4, 5, 6 and 7 of PCA"):
        head = Head.of(make_pipeline(PCA(8), PCA(3)).fit(of_rank(4, np.float64)))
    assert [stage.facts.varying for stage in head.stages] == [4, None]


@pytest.mark.parametrize(
    "head",
    [
        make_pipeline(make_union(PCA(8), KernelPCA(2, kernel="rbf")), SVC()),
        CalibratedClassifierCV(make_pipeline(StandardScaler(), PCA(8, whiten=True), SVC()), ensemble=False),
        BaggingClassifier(make_pipeline(PCA(8), SVC()), 3, random_state=0),
    ],
    ids=["union", "calibrated", "ensemble"],
)
def test_reductions_inside_of_others_are_told(head):
    rows = of_rank(4, np.float64)
    with pytest.warns(ConstantComponentWarning, match="components 4, 5, 6 and 7 of PCA") as told:
        Head.of(head.fit(rows, np.arange(60) % 2))
    assert len(told) == 1


@pytest.mark.parametrize("offset", [0.0, 3.0, 100.0])
@pytest.mark.parametrize("front", [(), (StandardScaler(),)], ids=["plain", "scaled"])
def test_small_components_of_features_are_no_rounding(front, offset):
    # Of a variance a millionth of the largest, in single precision.
    random = np.random.default_rng(4)
    basis = np.linalg.qr(random.normal(size=(6, 6)))[0]
    rows = random.normal(size=(200, 6)) * 10.0 ** -np.linspace(0, 3 if offset < 9 else 1.5, 6) @ basis + offset
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstantComponentWarning)
        Head.of(make_pipeline(*front, PCA(6, svd_solver="full")).fit(rows.astype(np.float32)))


@pytest.mark.parametrize(("solver", "dtype"), [("full", np.float32), ("covariance_eigh", np.float64)])
def test_small_components_are_components(solver, dtype):
    rows = np.random.default_rng(4).normal(size=(200, 5)) * 10.0 ** -np.arange(5) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstantComponentWarning)
        Head.of(PCA(5, svd_solver=solver).fit(rows.astype(dtype)))


@pytest.mark.optional
def test_no_program_blames_onnxruntime_for_rounding_that_whitening_magnifies(tmp_path):
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU())
    backbone = nn.Sequential(stem, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.rand(6, 3, 12, 12)
    features = backbone(x).detach().numpy()
    with pytest.warns(ConstantComponentWarning):
        net = PCASVMNet(backbone, make_pipeline(PCA(6, whiten=True), SVC()).fit(features, LABELS[:6])).eval()
    pytest.importorskip("onnxscript")
    with pytest.raises(NoProgramError, match=r"whitening divides component 5 by so little .* fit fewer components"):
        export.onnx(ClosedFormGradCAM(net, ["0"]), x, tmp_path / "file.onnx")
    for reduction in (PCA(3, whiten=True), PCA(5)):  # the ways out
        net = PCASVMNet(backbone, make_pipeline(reduction, SVC()).fit(features, LABELS[:6])).eval()
        export.onnx(ClosedFormGradCAM(net, ["0"]), x, tmp_path / "file.onnx")
