"""Every supported estimator, and heads made of them, against scikit-learn's own decision values."""

import copy
import warnings
from functools import cache

import numpy as np
import pytest
import sklearn
import torch
from packaging.version import Version
from problems import closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.cluster import FeatureAgglomeration
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
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
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.ensemble import BaggingClassifier, BaggingRegressor, StackingClassifier, StackingRegressor, VotingRegressor
from sklearn.feature_selection import RFE, SelectFromModel, SelectKBest, SelectPercentile, VarianceThreshold
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF as ARD
from sklearn.gaussian_process.kernels import DotProduct, WhiteKernel
from sklearn.kernel_approximation import Nystroem, RBFSampler
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    LogisticRegressionCV,
    Perceptron,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.neighbors import NeighborhoodComponentsAnalysis
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline, make_union
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PowerTransformer,
    RobustScaler,
    StandardScaler,
)
from sklearn.random_projection import GaussianRandomProjection, SparseRandomProjection
from sklearn.svm import SVC, SVR, LinearSVC, LinearSVR, NuSVC, NuSVR, OneClassSVM
from test_head import by_autograd, pulled_back, seeds_of, trace_of

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError, ProbabilityTarget
from pytorch_grad_cam_pcasvm.head.elementwise import Isotonic, PerClass
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput

RNG = np.random.default_rng(0)
WIDTH = 10
CENTRES = 2 * RNG.normal(size=(4, WIDTH))


def data(classes):
    labels = np.arange(120) % classes
    return CENTRES[labels] + RNG.normal(size=(120, WIDTH)) + 1, labels


DATA = {classes: data(classes) for classes in (2, 4)}
QUERY = CENTRES[np.arange(8) % 4] + 1.5 * RNG.normal(size=(8, WIDTH)) + 1

NEAR = QUERY / 3  # nearer to where classes meet: probabilities between 0 and 1

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
    FunctionTransformer(np.arcsinh),
    PowerTransformer(),
    PowerTransformer(standardize=False),
    ColumnTransformer([("a", StandardScaler(), [2, 0, 5]), ("b", Normalizer(), [1, 7])], transformer_weights={"b": 2}),
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
    NeighborhoodComponentsAnalysis(4, max_iter=5, random_state=0),
    FeatureAgglomeration(4),
    make_union(PCA(2), KernelPCA(3, kernel="rbf", gamma=0.1)),
]
MAPS = [
    Nystroem(n_components=20, random_state=0),
    Nystroem(kernel="poly", gamma=0.1, degree=2, coef0=1, n_components=15, random_state=0),
    Nystroem(kernel="linear", n_components=5, random_state=0),
    RBFSampler(gamma=0.1, n_components=30, random_state=0),
]
CLASSIFIERS = [
    SVC(),
    SVC(kernel="linear"),
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
    QuadraticDiscriminantAnalysis(reg_param=0.1),
    StackingClassifier([("a", LinearSVC()), ("b", LinearDiscriminantAnalysis())], stack_method="decision_function"),
    StackingClassifier([("a", LinearSVC())], LinearSVC(C=0.1), passthrough=True),
]
REGRESSORS = [
    SVR(),
    SVR(kernel="linear"),
    NuSVR(kernel="poly"),
    LinearSVR(),
    Ridge(),
    LinearRegression(),
    KernelRidge(kernel="rbf", gamma=0.1),
    GaussianProcessRegressor(2 * ARD([1, 2, 3, 4, 5]) + DotProduct() + WhiteKernel(), optimizer=None, normalize_y=True),
    MLPRegressor(hidden_layer_sizes=(7, 5), activation="tanh", random_state=0, max_iter=50),
    VotingRegressor([("a", Ridge()), ("b", SVR())], weights=[1, 3]),
    BaggingRegressor(SVR(), 3, max_features=0.5, random_state=0),
    StackingRegressor([("a", Ridge()), ("b", SVR())], SVR(), passthrough=True),
    TransformedTargetRegressor(SVR(), transformer=StandardScaler()),
]


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
    **{f"{reduction}, scaler": [reduction, StandardScaler(), LinearSVC()] for reduction in (PCA(4), KernelPCA(4))},
    **{f"{kernel_map}, LinearSVC": [MinMaxScaler(), PCA(6), kernel_map, LinearSVC()] for kernel_map in MAPS},
    **{f"bare {classifier}": [classifier] for classifier in CLASSIFIERS},
    **{f"PCA, {regressor}": [StandardScaler(), PCA(5), regressor] for regressor in REGRESSORS},
    "OneClassSVM": [StandardScaler(), PCA(4), OneClassSVM(nu=0.2)],
    "OneClassSVM linear": [OneClassSVM(kernel="linear", nu=0.4)],
}


# Two classes make one decision value: of the other parts, only discriminants depend on their number.
CASES = [
    (name, classes)
    for name in HEADS
    for classes in (2, 4)
    if classes == 4 or name.startswith("bare") or "Discriminant" in name
]


@cache
def fitted_head(name, classes):
    return fitted(HEADS[name], classes)


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_scores_predictions_and_gradients(name, classes):
    pipeline = fitted_head(name, classes)
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    assert relative(head.scores(trace), values(pipeline, QUERY)) < 1e-9
    assert head.labels(trace).tolist() == pytest.approx(pipeline.predict(QUERY).tolist(), rel=1e-9)
    reductions = [i for i, part in enumerate(HEADS[name]) if any(type(part) is type(r) for r in REDUCTIONS)]
    if reductions and reductions[-1] < len(HEADS[name]) - 1:
        components = trace.values[head.component_position]
        assert relative(components, pipeline[: reductions[-1] + 1].transform(QUERY)) < 1e-9
    for seeds in seeds_of(head, trace):
        assert relative(pulled_back(head, trace, seeds), by_autograd(head, QUERY, seeds)) < 1e-9


def differences(function, x, step=1e-6):
    """Return the derivative of a function of rows (N, D) to (N, P) by central differences, shape (N, P, D)."""
    steps = step * np.eye(x.shape[1])
    moved = np.concatenate([(x[:, None] + sign * steps).reshape(-1, x.shape[1]) for sign in (1, -1)])
    ahead, behind = function(moved).reshape(2, len(x), x.shape[1], -1)
    return ((ahead - behind) / (2 * step)).transpose(0, 2, 1)


# Values that are smooth in the features: votes jump, so one-vs-one machines are asked for their pairwise values.
@pytest.mark.parametrize("name", HEADS)
def test_gradients_equal_differences_of_scikit_learns_own_function(name):
    pipeline = copy.deepcopy(fitted_head(name, 4))
    if isinstance(pipeline[-1], SVC | NuSVC):
        pipeline[-1].decision_function_shape = "ovo"
    head = Head.of(pipeline)
    actual = pulled_back(head, trace_of(head, QUERY[:3]), {len(head.stages): None})
    expected = differences(lambda x: values(pipeline, x), QUERY[:3])
    assert np.abs(actual.numpy() - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([FunctionTransformer(np.sinc), PCA(3)], "only numpy's absolute, arcsinh"),
        ([LinearDiscriminantAnalysis(solver="lsqr"), SVC()], "not implemented for 'lsqr'"),
        ([KernelPCA(3, kernel="cosine")], "the kernel 'cosine', whose gradient is unknown"),
        ([PCA(3), Nystroem(kernel="laplacian", n_components=9), LinearSVC()], "the kernel 'laplacian'"),
    ],
)
def test_options_without_a_closed_form_are_refused(parts, message):
    x, y = DATA[2]
    with pytest.raises((NoClosedFormError, NotImplementedError), match=message):
        closed_form(make_pipeline(*parts).fit(np.abs(x), y))


def test_several_outputs():
    x, _ = DATA[2]
    reduced = PCA(3).fit(x)
    for last, y in ((Ridge(), x[:, :2]), (RidgeClassifier(), (x[:, :3] > 1).astype(int))):
        pipeline = [reduced, last.fit(reduced.transform(x), y)]
        head = Head.of(pipeline)
        trace = trace_of(head, QUERY)
        assert head.classes_.tolist() == list(range(y.shape[1]))
        assert relative(head.labels(trace), last.predict(reduced.transform(QUERY))) < 1e-9


@pytest.mark.parametrize(
    "regressor",
    [PoissonRegressor(), TransformedTargetRegressor(Ridge(), func=np.log1p, inverse_func=np.expm1)],
    ids=str,
)
def test_a_function_of_the_value_is_predicted(regressor):
    """The value itself, a linear one, is explained."""
    pipeline = fitted([StandardScaler(), PCA(4), regressor], 4)
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    assert head.stages[-1].linear
    assert relative(head.labels(trace), pipeline.predict(QUERY)) < 1e-9
    inverse = np.exp if isinstance(regressor, PoissonRegressor) else np.expm1
    assert relative(inverse(trace.values[-1][:, 0].numpy()), pipeline.predict(QUERY)) < 1e-9


def test_a_row_of_zeros_stays_and_has_no_gradient_of_its_norm():
    head = Head.of([Normalizer().fit(DATA[2][0]), PCA(3).fit(DATA[2][0])])
    trace = trace_of(head, np.zeros((1, WIDTH)))
    assert relative(pulled_back(head, trace, {2: None})[0], head.stages[1].components) < 1e-12


def test_components_far_from_every_sample_of_a_kernel_pca():
    x, _ = DATA[2]
    head = Head.of(KernelPCA(3, kernel="rbf", gamma=1.0).fit(x))
    grads, log_scale = head.pullback(trace_of(head, QUERY[:2] + 200), {1: None})
    assert (log_scale < -745).all()
    assert grads.flatten(1).norm(dim=1).gt(1e-6).all()


def test_pls_as_a_transformer():
    """It gives (X, Y) to a pipeline, so people fit it by hand."""
    x, y = DATA[2]
    pls = PLSRegression(3).fit(x, y)
    svm = SVC().fit(pls.transform(x), y)
    head = Head.of([pls, svm])
    trace = trace_of(head, QUERY)
    assert relative(trace.values[head.component_position], pls.transform(QUERY)) < 1e-9
    assert relative(head.scores(trace)[:, 1], svm.decision_function(pls.transform(QUERY))) < 1e-9


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("column", [True, False])
def test_pls_at_the_end_predicts(column, scale):
    x, _ = DATA[2]
    y = x @ np.linspace(-1, 2, WIDTH) + np.sin(x[:, 0]) + 5
    pipeline = make_pipeline(MinMaxScaler(), PLSRegression(3, scale=scale)).fit(x, y[:, None] if column else y)
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    assert head.classes_ is None
    assert relative(head.labels(trace), pipeline.predict(QUERY).ravel()) < 1e-12
    expected = differences(lambda rows: pipeline.predict(rows), QUERY)
    assert relative(pulled_back(head, trace, {2: None}), expected) < 1e-6
    two = PLSRegression(2).fit(x, x[:, :2])
    assert relative(Head.of(two).labels(trace_of(Head.of(two), QUERY)), two.predict(QUERY)) < 1e-12


PROBABLE = {
    "LogisticRegression": LogisticRegression(),
    "LogisticRegressionCV": LogisticRegressionCV(Cs=2, cv=2, scoring="accuracy"),
    "discriminants": LinearDiscriminantAnalysis(),
    "SGD": SGDClassifier(loss="log_loss", random_state=0),
    "one vs rest": OneVsRestClassifier(LogisticRegression()),
    "one vs rest of pipelines": OneVsRestClassifier(make_pipeline(PCA(3), LogisticRegression(C=0.1))),
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", PROBABLE)
def test_probabilities_of_classifiers_that_make_them_of_their_scores(name, classes):
    pipeline = fitted([StandardScaler(), PCA(5), PROBABLE[name]], classes)
    head = Head.of(pipeline)
    trace = trace_of(head, NEAR)
    assert relative(head.scores(trace), values(pipeline, NEAR)) < 1e-12
    actual = head.voting.probabilities(trace.values[-1])
    assert np.abs(actual.numpy() - pipeline.predict_proba(NEAR)).max() < 1e-14
    assert actual.topk(2).values[:, 1].max() > 0.05
    assert torch.equal(ProbabilityTarget(1)(HeadOutput.of(head, trace)), actual[:, 1])


@pytest.mark.parametrize(
    "classifier",
    [
        SVC(),
        LinearSVC(),
        SGDClassifier(loss="modified_huber", random_state=0),
        RidgeClassifier(),
        OneVsRestClassifier(SVC()),
        OneVsOneClassifier(LogisticRegression()),
    ],
    ids=str,
)
def test_a_probability_needs_a_head_that_has_one(classifier):
    head = Head.of(fitted([PCA(3), classifier], 4))
    with pytest.raises(ValueError, match="put its classifier into a CalibratedClassifierCV"):
        ProbabilityTarget(1)(HeadOutput.of(head, trace_of(head, QUERY)))


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
    x, y = DATA[classes]
    y = np.where(np.arange(len(y)) % 7 == 0, (y + 1) % classes, y)  # curves of separated classes are steps
    pipeline = make_pipeline(StandardScaler(), PCA(5), copy.deepcopy(CALIBRATED[name])).fit(x, y)
    head = Head.of(pipeline)
    x = torch.tensor(NEAR).requires_grad_()
    output = HeadOutput.of(head, head(x))
    trace = trace_of(head, NEAR)
    assert relative(head.scores(trace), pipeline.predict_proba(NEAR)) < 1e-9
    assert head.labels(trace).tolist() == pipeline.predict(NEAR).tolist()
    targets = [ProbabilityTarget(1), ProbabilityTarget(), ProbabilityTarget(0, sign="-")]
    assert relative(targets[0](output), pipeline.predict_proba(NEAR)[:, 1]) < 1e-9
    # A target's gradient by the decision values, as for any callable; then the closed form.
    by_features, by_decision = (
        torch.stack([torch.autograd.grad(t(output).sum(), leaf, retain_graph=True)[0] for t in targets], 1)
        for leaf in (x, output.decision)
    )
    assert relative(pulled_back(head, trace, {3: by_decision}), by_features) < 1e-9
    for seeds in seeds_of(head, trace):
        assert relative(pulled_back(head, trace, seeds), by_autograd(head, NEAR, seeds)) < 1e-9
    # scikit-learn's own probability, by central differences (where its one-vs-one scores have no votes that jump).
    if classes == 2:
        (slope,) = torch.autograd.grad(output[:, 1].sum(), x)
        assert np.abs(slope.numpy() - differences(pipeline.predict_proba, NEAR)[:, 1]).max() < 1e-5


@pytest.mark.parametrize("classes", [2, 4])
def test_margins_of_an_ensemble_are_the_mean_of_its_members(classes):
    """Members of different size: their seeds, and what explains the head, are those of the mean."""
    x, y = DATA[classes]
    calibrated = CalibratedClassifierCV(SVC(gamma=0.05), cv=3).fit(x, y)
    fits = [calibrated.calibrated_classifiers_[k].estimator for k in range(3)]
    head = Head.of(calibrated)
    trace = trace_of(head, QUERY)
    decision = trace.values[-1]
    members = [Head.of(member) for member in fits]
    alone = [member.voting.margins(trace_of(member, QUERY).values[-1]) for member in members]
    assert relative(alone[0], alone[1]) > 0.01
    margins = head.voting.margins(decision)
    assert relative(margins, sum(alone) / 3) < 1e-12
    for c in range(classes):
        seed = head.voting.seed(torch.tensor([c]), None)
        assert relative((decision * seed).sum(-1), margins[:, c]) < 1e-12
        against = head.voting.seed(torch.tensor([c]), torch.tensor([1 - c])) if c < 2 else None
        if against is not None:
            pair = [m.voting.seed(torch.tensor([c]), torch.tensor([1 - c]))
                    for m in members]  # fmt: skip
            assert relative(against, torch.cat(pair, -1) / 3) < 1e-12


@pytest.mark.skipif(Version(sklearn.__version__) < Version("1.8"), reason="temperature scaling is new in 1.8")
@pytest.mark.parametrize("ensemble", [True, False])
@pytest.mark.parametrize("labels", [[0, 1, 2, 3], ["ant", "bee", "cat", "dog"]], ids=["numbers", "names"])
@pytest.mark.parametrize("classes", [2, 4])
def test_temperature_scaling(classes, labels, ensemble):
    x, y = DATA[classes]
    calibrated = CalibratedClassifierCV(LinearSVC(), method="temperature", ensemble=ensemble)
    pipeline = make_pipeline(PCA(5), calibrated).fit(x, np.array(labels)[y])
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    assert relative(head.scores(trace), pipeline.predict_proba(QUERY)) < 1e-9
    assert head.labels(trace).tolist() == pipeline.predict(QUERY).tolist()


def test_an_isotonic_curve_and_its_slope():
    """Linear between its points, constant outside of them; at a point, the slope of one side."""
    curve = Isotonic([-1.0, 0.0, 2.0, 3.0], [0.1, 0.12, 0.8, 0.9])
    scores = torch.tensor([-5.0, -1.0, -0.5, 0.0, 1.0, 2.5, 3.0, 7.0], dtype=torch.float64).requires_grad_()
    assert curve(scores).tolist() == pytest.approx([0.1, 0.1, 0.11, 0.12, 0.46, 0.85, 0.9, 0.9])
    slopes = torch.autograd.grad(curve(scores).sum(), scores)[0].tolist()
    assert [slopes[n] for n in (0, 2, 4, 5, 7)] == pytest.approx([0, 0.02, 0.34, 0.1, 0])
    assert 0 < slopes[1] < 0.021
    assert 0 < slopes[6] < 0.11


def test_probabilities_where_every_curve_gives_zero():
    step = Isotonic([-9.0, 0.0, 1.0], [0.0, 0.0, 1.0])
    scores = torch.tensor([[-1.0, -2.0, -3.0], [0.5, 0.25, -1.0]], dtype=torch.float64).requires_grad_()
    probabilities = PerClass([step] * 3)(scores)
    assert probabilities.flatten().tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 2 / 3, 1 / 3, 0])
    (slopes,) = torch.autograd.grad(probabilities[:, 0].sum(), scores)
    assert slopes.flatten().tolist() == pytest.approx([0, 0, 0, 0.25 / 0.75**2, -0.5 / 0.75**2, 0])


SEVERAL = {
    "OneVsRest SVC": OneVsRestClassifier(SVC()),
    "OneVsRest LinearSVC": OneVsRestClassifier(LinearSVC()),
    "OneVsRest pipeline": OneVsRestClassifier(make_pipeline(StandardScaler(), PCA(4), SVC(kernel="poly"))),
    "OneVsOne SVC": OneVsOneClassifier(SVC()),
    "OneVsOne Logistic": OneVsOneClassifier(LogisticRegression()),
    "a bag": BaggingClassifier(LogisticRegression(), 3, max_features=0.5, random_state=0),
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", SEVERAL)
def test_machines_side_by_side(name, classes):
    pipeline = fitted([StandardScaler(), PCA(5), SEVERAL[name]], classes)
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    assert relative(head.scores(trace), values(pipeline, QUERY)) < 1e-9
    assert head.labels(trace).tolist() == pipeline.predict(QUERY).tolist()
    for seeds in seeds_of(head, trace):
        assert relative(pulled_back(head, trace, seeds), by_autograd(head, QUERY, seeds)) < 1e-9


def test_machines_side_by_side_far_from_every_support_vector():
    x, y = DATA[4]
    head = Head.of([PCA(5).fit(x), OneVsRestClassifier(SVC(gamma=1.0)).fit(PCA(5).fit_transform(x), y)])
    trace = trace_of(head, QUERY[:2] + 100)
    seeds = torch.tensor([[[1.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, 0.0]]]).double()
    grads, log_scale = head.pullback(trace, {2: seeds})
    assert (log_scale < -745).all()
    assert grads.isfinite().all()
    assert grads.norm(dim=2).gt(1e-9).all()
    # The sum has the size of its larger part, and is what both parts give.
    parts = [head.pullback(trace, {2: seed}) for seed in (seeds[:, :1], seeds[:, 1:] - seeds[:, :1])]
    of_parts = sum(part * (log - log_scale[:, 1:]).exp().unsqueeze(-1) for part, log in parts)
    assert relative(of_parts, grads[:, 1:]) < 1e-12


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (OneVsRestClassifier(CalibratedClassifierCV(SVC(), ensemble=False)), "OneVsRestClassifier of CalibratedClass"),
        (OneVsOneClassifier(CalibratedClassifierCV(LinearSVC(), cv=3)), "OneVsOneClassifier of CalibratedClass"),
        (OneVsRestClassifier(Ridge()), "OneVsRestClassifier of Ridge is not supported"),
        (OneVsOneClassifier(SVR()), "OneVsOneClassifier of SVR is not supported"),
        (OneVsRestClassifier(OneVsOneClassifier(SVC())), "OneVsRestClassifier of OneVsOneClassifier"),
        (RFE(LinearSVC(), n_features_to_select=2), "put that after it"),
        (make_pipeline(Nystroem(kernel_params={"gamma": 0.1}), LinearSVC()), "pass gamma, degree and coef0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("classes", [2, 4])
def test_members_that_are_no_plain_decision_are_refused(machine, message, classes):
    with pytest.raises(NoClosedFormError, match=message):
        closed_form(fitted([PCA(4), machine], classes))


UNUSUAL = {
    "fractional degree": [MinMaxScaler(clip=True), KernelPCA(2, kernel="poly", degree=2.5), SVC()],
    "arpack": [PCA(2, svd_solver="arpack"), TruncatedSVD(1, algorithm="arpack", random_state=0), SVC()],
    "singular ridge": [SparsePCA(WIDTH + 2, alpha=0.1, ridge_alpha=0, random_state=0, max_iter=5), SVC()],
    "ovo calibrated": [PCA(3), CalibratedClassifierCV(SVC(decision_function_shape="ovo"), ensemble=False)],
    "normalised members": [CalibratedClassifierCV(OneVsRestClassifier(make_pipeline(Normalizer(), SVC())))],
    "selected then decided": [RFE(LinearSVC(), n_features_to_select=4), LinearSVC()],
    "SGDRegressor": [StandardScaler(), PCA(3), SGDRegressor(random_state=0)],
    "of positive numbers": [MinMaxScaler((1, 2), clip=True), PowerTransformer("box-cox"), PCA(3), SVC()],
    "unfitted identity": [FunctionTransformer(), PCA(3), SVC()],
}


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_options(name, classes):
    pipeline = fitted(UNUSUAL[name], classes)
    head = Head.of(pipeline)
    trace = trace_of(head, QUERY)
    calibrated = hasattr(pipeline, "predict_proba")
    expected = pipeline.predict_proba(QUERY) if calibrated else values(pipeline, QUERY)
    assert relative(head.scores(trace), expected) < 1e-9
    assert head.labels(trace).tolist() == pytest.approx(pipeline.predict(QUERY).tolist(), rel=1e-9)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_calibration_curve_of_one_point(classes):
    """All scores of the folds are equal where gamma is far too large."""
    rng = np.random.default_rng(0)
    x, y = 100 * rng.normal(size=(120, 5)), np.array([0, 1, 1, 1] if classes == 2 else [0, 1, 2, 2])[np.arange(120) % 4]
    calibrated = CalibratedClassifierCV(SVC(gamma=1.0), method="isotonic", ensemble=False).fit(x, y)
    head = Head.of(calibrated)
    trace = trace_of(head, x[:9] + 50)
    assert relative(head.scores(trace), calibrated.predict_proba(x[:9] + 50)) < 1e-9
    assert head.labels(trace).tolist() == calibrated.predict(x[:9] + 50).tolist()


def test_a_machine_without_support_vectors_is_flat():
    x, y = DATA[2]
    head = Head.of(SVR(epsilon=10).fit(x, y * 1.0))
    assert not pulled_back(head, trace_of(head, QUERY), {1: None}).any()


def test_outputs_have_no_probabilities_and_no_class_is_said_to_have_one():
    outputs = MultiOutputClassifier(LogisticRegression()).fit(QUERY, np.arange(2 * len(QUERY)).reshape(-1, 2) % 3 % 2)
    head = Head.of(outputs)
    with pytest.raises(ValueError, match=r"no probabilities: it has several outputs, use SVMTarget\(0\)") as caught:
        ProbabilityTarget(0)(HeadOutput.of(head, trace_of(head, QUERY)))
    assert "Calibrated" not in str(caught.value)
    head = Head.of(SVR().fit(QUERY, np.arange(len(QUERY))))
    with pytest.raises(ValueError, match=r"no probabilities: it has no classes, use SVMTarget\(\)"):
        ProbabilityTarget()(HeadOutput.of(head, trace_of(head, QUERY)))


@pytest.mark.parametrize("classes", [[0, 1, 2], ["a", "b"]])
def test_outputs_of_other_classes_than_two(classes):
    labels = np.array(classes)[np.stack(2 * [np.arange(len(QUERY)) % len(classes)], 1)]
    labels[:, 1] = np.roll(labels[:, 0], 1)
    with pytest.raises(NoClosedFormError, match="only outputs of two classes, 0 and 1, are taken") as caught:
        closed_form(MultiOutputClassifier(SVC()).fit(QUERY, labels))
    assert f"the classes {classes}" in caught.value.reason
    assert caught.value.ways_out == ("fit a head for each output",)


def test_outputs_with_one_name():
    fitted_outputs = MultiOutputClassifier(SVC()).fit(QUERY, np.arange(2 * len(QUERY)).reshape(-1, 2) % 3 % 2)
    with pytest.raises(ValueError, match="two outputs are named 'dog'"):
        Head.of(fitted_outputs, outputs=["dog", "dog"])
    assert Head.of(fitted_outputs, outputs=["dog", "cat"]).classes_.tolist() == ["dog", "cat"]
