"""Every supported estimator, and heads made of them, against scikit-learn's own decision values."""

import copy
import warnings

import numpy as np
import pytest
import sklearn
import torch
from packaging.version import Version
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import (
    PCA,
    FactorAnalysis,
    FastICA,
    IncrementalPCA,
    KernelPCA,
    MiniBatchSparsePCA,
    SparsePCA,
    TruncatedSVD,
)
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectPercentile, VarianceThreshold
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Perceptron,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    RobustScaler,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR, NuSVC, NuSVR, OneClassSVM

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError, PCATarget, ProbabilityTarget, SVMTarget
from pytorch_grad_cam_pcasvm.net import HeadOutput
from pytorch_grad_cam_pcasvm.targets import feature_gradients

RNG = np.random.default_rng(0)
WIDTH = 10
CENTRES = 2 * RNG.normal(size=(4, WIDTH))


def data(classes):
    labels = np.arange(120) % classes
    return CENTRES[labels] + RNG.normal(size=(120, WIDTH)) + 1, labels


DATA = {classes: data(classes) for classes in (2, 4)}
QUERY = CENTRES[np.arange(8) % 4] + 1.5 * RNG.normal(size=(8, WIDTH)) + 1

SCALERS = [
    StandardScaler(),
    StandardScaler(with_mean=False),
    MinMaxScaler((-1, 2)),
    MinMaxScaler(clip=True),
    MaxAbsScaler(),
    RobustScaler(),
    RobustScaler(with_centering=False, with_scaling=False),
    Normalizer("l1"),
    Normalizer("l2"),
    Normalizer("max"),
    VarianceThreshold(0.1),
    SelectKBest(k=6),
    SelectPercentile(percentile=50),
    SelectFromModel(LinearSVC()),
    RFE(LinearSVC(), n_features_to_select=5),
    FunctionTransformer(),
]
REDUCTIONS = [
    PCA(4),
    PCA(4, whiten=True),
    PCA(4, svd_solver="covariance_eigh"),
    IncrementalPCA(4),
    IncrementalPCA(4, whiten=True),
    SparsePCA(3, alpha=0.1, ridge_alpha=0.3, random_state=0, max_iter=20),
    MiniBatchSparsePCA(3, alpha=0.1, random_state=0, max_iter=20),
    TruncatedSVD(4, random_state=0),
    FastICA(4, random_state=0),
    FastICA(whiten=False, random_state=0),
    FactorAnalysis(3, random_state=0),
    LinearDiscriminantAnalysis(),
    LinearDiscriminantAnalysis(solver="eigen", shrinkage=0.2),
    KernelPCA(4),
    KernelPCA(4, kernel="rbf", gamma=0.1),
    KernelPCA(4, kernel="rbf"),
    KernelPCA(3, kernel="poly", degree=2, gamma=0.2, coef0=0.5),
    KernelPCA(3, kernel="sigmoid", gamma=0.01),
    GaussianRandomProjection(5, random_state=0),
    SparseRandomProjection(5, random_state=0),
]
MAPS = [
    Nystroem(n_components=20, random_state=0),
    Nystroem(kernel="poly", gamma=0.1, degree=2, coef0=1, n_components=15, random_state=0),
    Nystroem(kernel="linear", n_components=5, random_state=0),
    RBFSampler(gamma=0.1, n_components=30, random_state=0),
]
CLASSIFIERS = [
    SVC(),
    SVC(kernel="poly", degree=2, decision_function_shape="ovo"),
    SVC(kernel="sigmoid", gamma=0.02),
    NuSVC(nu=0.3),
    LinearSVC(),
    SGDClassifier(random_state=0),
    Perceptron(random_state=0),
    LogisticRegression(),
    RidgeClassifier(),
    RidgeClassifierCV(),
    LinearDiscriminantAnalysis(),
]
REGRESSORS = [SVR(), SVR(kernel="linear"), NuSVR(kernel="poly"), LinearSVR(), Ridge(), LinearRegression()]


def fitted(parts, classes):
    x, y = DATA[classes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_pipeline(*copy.deepcopy(parts)).fit(x, y)


def values(pipeline, x):
    """Return scikit-learn's own numbers: decision values as columns, else predictions of a regressor."""
    if not hasattr(pipeline, "decision_function"):
        return pipeline.predict(x).reshape(len(x), -1)
    scores = pipeline.decision_function(x)
    if scores.ndim == 2:
        return scores
    return np.stack([-scores, scores], 1) if hasattr(pipeline, "classes_") else scores[:, None]


HEADS = {
    **{f"{scaler}, PCA, SVC": [scaler, PCA(4), SVC()] for scaler in SCALERS},
    **{f"scaler, {reduction}, SVC": [StandardScaler(), reduction, SVC()] for reduction in REDUCTIONS},
    **{f"{reduction}, scaler, LinearSVC": [reduction, StandardScaler(), LinearSVC()] for reduction in REDUCTIONS},
    **{f"{kernel_map}, LinearSVC": [MinMaxScaler(), PCA(6), kernel_map, LinearSVC()] for kernel_map in MAPS},
    **{f"bare {classifier}": [classifier] for classifier in CLASSIFIERS},
    **{f"PCA, {classifier}": [Normalizer(), PCA(5), classifier] for classifier in CLASSIFIERS},
    **{f"PCA, {regressor}": [StandardScaler(), PCA(5), regressor] for regressor in REGRESSORS},
    "OneClassSVM": [StandardScaler(), PCA(4), OneClassSVM(nu=0.2)],
    "OneClassSVM linear": [OneClassSVM(kernel="linear", nu=0.4)],
}


def test_there_are_many_heads():
    assert len(HEADS) >= 60


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", HEADS)
def test_scores_predictions_and_gradients(name, classes):
    pipeline = fitted(HEADS[name], classes)
    head = Head.of(pipeline)
    x = torch.tensor(QUERY).requires_grad_()
    output = HeadOutput.of(head, head(x))
    assert relative(output, values(pipeline, QUERY)) < 1e-9
    assert head.labels(output.levels).tolist() == pytest.approx(pipeline.predict(QUERY).tolist(), rel=1e-9)
    reductions = [i for i, part in enumerate(HEADS[name]) if any(type(part) is type(r) for r in REDUCTIONS)]
    if reductions and (len(HEADS[name]) > 1 and reductions[-1] < len(HEADS[name]) - 1):
        assert relative(output.components, pipeline[: reductions[-1] + 1].transform(QUERY)) < 1e-9
    targets = [SVMTarget()]
    if head.classes_ is not None:
        targets += [SVMTarget(0), SVMTarget(1, versus=0), SVMTarget(versus="runner-up")]
    if output.components is not None:
        targets.append(PCATarget(0))
    expected = torch.stack([torch.autograd.grad(t(output).sum(), x, retain_graph=True)[0] for t in targets], 1)
    detached = HeadOutput.of(head, [value.detach() for value in output.levels])
    grads, log_scale, _ = feature_gradients(detached, targets, torch.float64)
    assert relative(grads * log_scale.exp().unsqueeze(-1), expected) < 1e-9


# Values that are smooth in the features: votes jump, so one-vs-one machines are asked for their pairwise values.
@pytest.mark.parametrize("name", HEADS)
def test_gradients_equal_differences_of_scikit_learns_own_function(name):
    parts = [
        part.set_params(decision_function_shape="ovo") if isinstance(part, SVC | NuSVC) else part
        for part in copy.deepcopy(HEADS[name])
    ]
    pipeline = fitted(parts, 4)
    head = Head.of(pipeline)
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY[:3])))
    columns = output.shape[1]
    targets = [lambda row, c=c: row[c] for c in range(columns)]
    grads, _, _ = feature_gradients(output, targets, torch.float64)
    step = 1e-6
    largest = float(grads.abs().max())
    for d in range(WIDTH):
        ahead, behind = QUERY[:3].copy(), QUERY[:3].copy()
        ahead[:, d] += step
        behind[:, d] -= step
        difference = (values(pipeline, ahead) - values(pipeline, behind)) / (2 * step)
        assert np.abs(grads[:, :, d].numpy() - difference).max() < 1e-5 * max(1.0, largest)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FunctionTransformer(np.log1p), PCA(3)], "only the identity"),
        ([LinearDiscriminantAnalysis(solver="lsqr"), SVC()], "not implemented for 'lsqr'"),
        ([KernelPCA(3, kernel="cosine")], "the kernel 'cosine', whose gradient is not known"),
        ([PCA(3), Nystroem(kernel="laplacian", n_components=9), LinearSVC()], "the kernel 'laplacian'"),
    ],
)
def test_options_without_a_closed_form_are_refused(parts, message):
    x, y = DATA[2]
    with pytest.raises((NoClosedFormError, NotImplementedError), match=message):
        Head.of(make_pipeline(*parts).fit(np.abs(x), y))


def test_several_outputs_are_refused():
    x, _ = DATA[2]
    with pytest.raises(NoClosedFormError, match="Ridge was fitted on 2 outputs"):
        Head.of([PCA(3).fit(x), Ridge().fit(PCA(3).fit_transform(x), x[:, :2])])
    labels = (x[:, :3] > 1).astype(int)
    with pytest.raises(NoClosedFormError, match="several labels per image"):
        Head.of(RidgeClassifier().fit(x, labels))


def test_a_row_of_zeros_stays_and_has_no_gradient_of_its_norm():
    head = Head.of([Normalizer().fit(DATA[2][0]), PCA(3).fit(DATA[2][0])])
    zeros = torch.zeros(1, WIDTH, dtype=torch.float64)
    output = HeadOutput.of(head, head(zeros))
    grads, _, _ = feature_gradients(output, [PCATarget(0)], torch.float64)
    assert relative(grads[0, 0], head.stages[1].components[0]) < 1e-12


def test_components_far_from_every_sample_of_a_kernel_pca():
    x, _ = DATA[2]
    head = Head.of(KernelPCA(3, kernel="rbf", gamma=1.0).fit(x))
    far = torch.tensor(QUERY[:2]) + 200
    with torch.no_grad():
        output = HeadOutput.of(head, head(far))
    grads, log_scale, _ = feature_gradients(output, [PCATarget(0)], torch.float64)
    assert (log_scale < -745).all()
    assert grads.flatten(1).norm(dim=1).gt(1e-6).all()


def test_pls_as_a_transformer():
    """It gives (X, Y) to a pipeline, so people fit it by hand."""
    x, y = DATA[2]
    pls = PLSRegression(3).fit(x, y)
    svm = SVC().fit(pls.transform(x), y)
    head = Head.of([pls, svm])
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY)))
    assert relative(output.components, pls.transform(QUERY)) < 1e-9
    assert relative(output[:, 1], svm.decision_function(pls.transform(QUERY))) < 1e-9


CALIBRATED = {
    "sigmoid": CalibratedClassifierCV(SVC(), ensemble=False),
    "sigmoid ensemble": CalibratedClassifierCV(SVC(), ensemble=True, cv=3),
    "isotonic": CalibratedClassifierCV(LinearSVC(), method="isotonic", ensemble=False),
    "isotonic ensemble": CalibratedClassifierCV(LinearSVC(), method="isotonic", cv=3),
    "of a pipeline": CalibratedClassifierCV(make_pipeline(StandardScaler(), LinearSVC()), ensemble=False),
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_probabilities(name, classes):
    parts = [StandardScaler(), PCA(5), CALIBRATED[name]]
    pipeline = fitted(parts, classes)
    head = Head.of(pipeline)
    x = torch.tensor(QUERY).requires_grad_()
    output = HeadOutput.of(head, head(x))
    assert relative(output, pipeline.predict_proba(QUERY)) < 1e-9
    assert head.labels(output.levels).tolist() == pipeline.predict(QUERY).tolist()
    targets = [ProbabilityTarget(1), ProbabilityTarget(), ProbabilityTarget(0, sign="-"), SVMTarget(1), SVMTarget()]
    assert relative(targets[0](output), pipeline.predict_proba(QUERY)[:, 1]) < 1e-9
    expected = torch.stack([torch.autograd.grad(t(output).sum(), x, retain_graph=True)[0] for t in targets], 1)
    detached = HeadOutput.of(head, [value.detach() for value in output.levels])
    grads, log_scale, _ = feature_gradients(detached, targets, torch.float64)
    assert relative(grads * log_scale.exp().unsqueeze(-1), expected) < 1e-9
    # scikit-learn's own probability, by central differences (where its one-vs-one scores have no votes that jump).
    if classes == 2:
        for d in range(WIDTH):
            ahead, behind = QUERY.copy(), QUERY.copy()
            ahead[:, d] += 1e-6
            behind[:, d] -= 1e-6
            difference = (pipeline.predict_proba(ahead) - pipeline.predict_proba(behind))[:, 1] / 2e-6
            assert np.abs(grads[:, 0, d].numpy() - difference).max() < 1e-5


@pytest.mark.skipif(Version(sklearn.__version__) < Version("1.8"), reason="temperature scaling is new in 1.8")
@pytest.mark.parametrize("ensemble", [True, False])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], ["ant", "bee", "cat", "dog"]], ids=["numbers", "names"])
@pytest.mark.parametrize("classes", [2, 4])
def test_temperature_scaling(classes, labels, ensemble):
    x, y = DATA[classes]
    calibrated = CalibratedClassifierCV(LinearSVC(), method="temperature", ensemble=ensemble)
    pipeline = make_pipeline(PCA(5), calibrated).fit(x, np.array(labels)[y])
    head = Head.of(pipeline)
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY)))
    assert relative(output, pipeline.predict_proba(QUERY)) < 1e-9
    assert head.labels(output.levels).tolist() == pipeline.predict(QUERY).tolist()


def test_a_probability_needs_a_calibrated_head():
    head = Head.of(fitted([PCA(3), SVC()], 2))
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY)))
    with pytest.raises(ValueError, match="put its classifier into a CalibratedClassifierCV"):
        ProbabilityTarget(1)(output)


SEVERAL = {
    "OneVsRest SVC": OneVsRestClassifier(SVC()),
    "OneVsRest LinearSVC": OneVsRestClassifier(LinearSVC()),
    "OneVsRest pipeline": OneVsRestClassifier(make_pipeline(StandardScaler(), PCA(4), SVC(kernel="poly"))),
    "OneVsOne SVC": OneVsOneClassifier(SVC()),
    "OneVsOne Logistic": OneVsOneClassifier(LogisticRegression()),
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", SEVERAL)
def test_machines_side_by_side(name, classes):
    pipeline = fitted([StandardScaler(), PCA(5), SEVERAL[name]], classes)
    head = Head.of(pipeline)
    x = torch.tensor(QUERY).requires_grad_()
    output = HeadOutput.of(head, head(x))
    assert relative(output, values(pipeline, QUERY)) < 1e-9
    assert head.labels(output.levels).tolist() == pipeline.predict(QUERY).tolist()
    targets = [SVMTarget(), SVMTarget(0), SVMTarget(1, versus=0), SVMTarget(versus="runner-up"), PCATarget(2)]
    expected = torch.stack([torch.autograd.grad(t(output).sum(), x, retain_graph=True)[0] for t in targets], 1)
    detached = HeadOutput.of(head, [value.detach() for value in output.levels])
    grads, log_scale, _ = feature_gradients(detached, targets, torch.float64)
    assert relative(grads * log_scale.exp().unsqueeze(-1), expected) < 1e-9


def test_machines_side_by_side_far_from_every_support_vector():
    x, y = DATA[4]
    head = Head.of([PCA(5).fit(x), OneVsRestClassifier(SVC(gamma=1.0)).fit(PCA(5).fit_transform(x), y)])
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY[:2]) + 100))
    grads, log_scale, _ = feature_gradients(output, [SVMTarget(0), SVMTarget(0, versus=1)], torch.float64)
    assert (log_scale < -745).all()
    assert grads.isfinite().all()
    assert grads.norm(dim=2).gt(1e-9).all()


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (OneVsRestClassifier(CalibratedClassifierCV(SVC(), ensemble=False)), "OneVsRestClassifier of CalibratedClass"),
        (OneVsOneClassifier(CalibratedClassifierCV(LinearSVC(), cv=3)), "OneVsOneClassifier of CalibratedClass"),
        (OneVsRestClassifier(Ridge()), "OneVsRestClassifier of Ridge is not known"),
        (OneVsOneClassifier(SVR()), "OneVsOneClassifier of SVR is not known"),
        (OneVsRestClassifier(OneVsOneClassifier(SVC())), "OneVsRestClassifier of OneVsOneClassifier"),
        (RFE(LinearSVC(), n_features_to_select=2), "put that behind it"),
        (make_pipeline(Nystroem(kernel_params={"gamma": 0.1}), LinearSVC()), "pass gamma, degree and coef0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("classes", [2, 4])
def test_members_that_are_no_plain_decision_are_refused(machine, message, classes):
    with pytest.raises(NoClosedFormError, match=message):
        Head.of(fitted([PCA(4), machine], classes))


UNUSUAL = {
    "fractional degree": [MinMaxScaler(clip=True), KernelPCA(2, kernel="poly", degree=2.5), SVC()],
    "arpack": [PCA(2, svd_solver="arpack"), TruncatedSVD(1, algorithm="arpack", random_state=0), SVC()],
    "singular ridge": [SparsePCA(WIDTH + 2, alpha=0.1, ridge_alpha=0, random_state=0, max_iter=5), SVC()],
    "ovo calibrated": [PCA(3), CalibratedClassifierCV(SVC(decision_function_shape="ovo"), ensemble=False)],
    "normalised members": [CalibratedClassifierCV(OneVsRestClassifier(make_pipeline(Normalizer(), SVC())))],
    "selected then decided": [RFE(LinearSVC(), n_features_to_select=4), LinearSVC()],
    "SGDRegressor": [StandardScaler(), PCA(3), SGDRegressor(random_state=0)],
    "unfitted identity": [FunctionTransformer(), PCA(3), SVC()],
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_options(name, classes):
    pipeline = fitted(UNUSUAL[name], classes)
    output = HeadOutput.of(head := Head.of(pipeline), head(torch.tensor(QUERY)))
    calibrated = hasattr(pipeline, "predict_proba")
    assert relative(output, pipeline.predict_proba(QUERY) if calibrated else values(pipeline, QUERY)) < 1e-9
    assert head.labels(output.levels).tolist() == pytest.approx(pipeline.predict(QUERY).tolist(), rel=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_calibration_curve_of_one_point(classes):
    """All scores of the folds are equal where gamma is far too large."""
    rng = np.random.default_rng(0)
    x, y = 100 * rng.normal(size=(120, 5)), np.array([0, 1, 1, 1] if classes == 2 else [0, 1, 2, 2])[np.arange(120) % 4]
    calibrated = CalibratedClassifierCV(SVC(gamma=1.0), method="isotonic", ensemble=False).fit(x, y)
    head = Head.of(calibrated)
    output = HeadOutput.of(head, head(torch.tensor(x[:9] + 50)))
    assert relative(output, calibrated.predict_proba(x[:9] + 50)) < 1e-9
    assert head.labels(output.levels).tolist() == calibrated.predict(x[:9] + 50).tolist()


def test_a_machine_without_support_vectors_is_flat():
    x, y = DATA[2]
    head = Head.of(SVR(epsilon=10).fit(x, y * 1.0))
    with torch.no_grad():
        output = HeadOutput.of(head, head(torch.tensor(QUERY)))
    grads, _, _ = feature_gradients(output, [SVMTarget()], torch.float64)
    assert not grads.any()
