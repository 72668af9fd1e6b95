"""Heads against scikit-learn: decision values, predictions, and closed-form gradients."""

import copy
import inspect
import itertools
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import sklearn
import torch
from heads import by_autograd, pulled_back, seeds_of, trace_of
from packaging.version import Version
from problems import closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import NMF, PCA
from sklearn.ensemble import RandomForestClassifier, StackingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectFromModel
from sklearn.model_selection import GridSearchCV
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, Normalizer, QuantileTransformer, StandardScaler
from sklearn.svm import SVC, LinearSVC, NuSVC, OneClassSVM
from sklearn.tree import DecisionTreeClassifier

from pytorch_grad_cam_pcasvm import ConstantComponentWarning, Head, NoClosedFormError, PCATarget, SVMTarget, stage_for
from pytorch_grad_cam_pcasvm.head import HeadTrace, decisions
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.head.stage import Stage
from pytorch_grad_cam_pcasvm.head.stages import Chain, KernelMap, Projection, Scale
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.device import full_precision

RNG = np.random.default_rng(0)
WIDTH = 12


def samples(classes):
    labels = np.arange(40 * classes) % classes
    centres = 1.5 * RNG.normal(size=(classes, WIDTH))
    return centres[labels] + RNG.normal(size=(len(labels), WIDTH)) + 3, labels


DATA = {classes: samples(classes) for classes in (2, 3, 5)}
QUERY = RNG.normal(size=(30, WIDTH)) * 2 + 3


MACHINES = {
    **{f"SVC {kernel}": SVC(kernel=kernel, coef0=0.3) for kernel in ("linear", "rbf", "poly", "sigmoid")},
    "NuSVC": NuSVC(nu=0.3),
    "SVC gamma auto": SVC(gamma="auto", class_weight="balanced"),
    "SVC ovo": SVC(decision_function_shape="ovo"),
    "SVC break_ties": SVC(break_ties=True),
    "SVC degree 4": SVC(kernel="poly", degree=4, gamma=0.1),
    "LinearSVC": LinearSVC(),
    "LinearSVC without intercept": LinearSVC(fit_intercept=False),
}


def fitted(front, machine, classes, labels=None):
    x, y = DATA[classes]
    y = y if labels is None else np.asarray(labels)[y]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_pipeline(*copy.deepcopy(front), copy.deepcopy(machine)).fit(x, y)


def expected_scores(pipeline, x):
    scores = pipeline.decision_function(x)
    return np.stack([-scores, scores], 1) if scores.ndim == 1 else scores


def scores(head, x):
    return head.scores(trace_of(head, x))


def read(head, x):
    return HeadOutput.of(head, trace_of(head, x))


@pytest.mark.parametrize(
    "machine", [SVC(), NuSVC(nu=0.3), SVC(break_ties=True), SVC(decision_function_shape="ovo")], ids=str
)
@pytest.mark.parametrize("classes", [3, 5])
def test_the_margin_of_a_class_is_the_sum_of_its_pairs(machine, classes):
    pipeline = fitted([PCA(4)], machine, classes)
    head = Head.of(pipeline)
    pipeline[-1].set_params(decision_function_shape="ovo", break_ties=False)
    expected = np.zeros((30, classes))
    for (i, j), decision in zip(
        itertools.combinations(range(classes), 2), pipeline.decision_function(QUERY).T, strict=True
    ):
        expected[:, i] += decision
        expected[:, j] -= decision
    assert relative(head.voting.margins(trace_of(head, QUERY).values[-1]), expected) < 1e-10


@pytest.mark.parametrize("classes", [3, 5])
def test_coefficients_of_many_machines_are_kept_by_class(classes, monkeypatch):
    pipeline = fitted([PCA(4)], SVC(), classes)
    dense = Head.of(pipeline)
    monkeypatch.setattr(decisions, "_DENSE", 0)
    head = Head.of(pipeline)
    assert head.stages[-1]._rows is None
    traces = [trace_of(each, QUERY) for each in (head, dense)]
    assert relative(traces[0].values[-1], traces[1].values[-1]) < 1e-12
    for seeds in seeds_of(head, traces[0]):
        found, expected = (pulled_back(each, trace, seeds) for each, trace in zip((head, dense), traces, strict=True))
        assert relative(found, expected) < 1e-12


@pytest.mark.parametrize("machine", MACHINES)
def test_no_class_wins_against_itself(machine):
    head = Head.of(fitted([PCA(4)], MACHINES[machine], 3))
    assert not head.voting.seed(torch.arange(3), torch.arange(3)).any()


@pytest.mark.parametrize(
    "labels",
    [["a", "b", "c"], [10, 20, 30], [-1.0, 0.0, 2.0], np.array(["x", "y", "z"], dtype=object), [True, False]],
    ids=str,
)
def test_labels_of_any_dtype(labels):
    pipeline = fitted([PCA(3)], SVC(), len(labels), labels)
    head = Head.of(pipeline)
    output = read(head, QUERY)
    predicted = head.labels(trace_of(head, QUERY))
    assert predicted.tolist() == pipeline.predict(QUERY).tolist()
    assert predicted.dtype == pipeline.classes_.dtype
    for index, label in enumerate(pipeline.classes_):
        assert head.class_index(label) == index
        assert relative(SVMTarget(label)(output), output.margins[:, index]) < 1e-12


@pytest.mark.parametrize("label", [np.int64(7), torch.tensor(7)], ids=["numpy", "torch"])
def test_labels_that_are_no_classes_are_named_as_python_writes_them(label):
    head = Head.of(fitted([PCA(3)], SVC(), 2, [3, 5]))
    with pytest.raises(ValueError, match=r"^7 is not a class of this head: choose one of \[3, 5\]"):
        head.class_index(label)


def test_runner_up_is_the_second_best_class():
    pipeline = fitted([PCA(4)], SVC(), 5)
    output = read(Head.of(pipeline), QUERY)
    order = np.argsort(pipeline.decision_function(QUERY), 1)
    expected = torch.stack([SVMTarget(int(row[-1]), versus=int(row[-2]))(output[n]) for n, row in enumerate(order)])
    same = torch.tensor(order[:, -1] == pipeline.predict(QUERY))
    assert same.all()
    assert relative(SVMTarget(versus="runner-up")(output), expected) < 1e-12


@pytest.mark.parametrize("machine", [SVC(), LinearSVC(), SVC(break_ties=True, decision_function_shape="ovr")], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_against_a_class_that_is_predicted_stands_the_strongest_other_one(machine, classes):
    pipeline = fitted([PCA(4)], machine, classes)
    output = read(Head.of(pipeline), QUERY)
    predicted, scores = pipeline.predict(QUERY), pipeline.decision_function(QUERY)
    scores = np.stack([-scores, scores], 1) if classes == 2 else scores
    for label in range(classes):
        others = np.where(np.arange(classes) == label, -np.inf, scores).argmax(1)
        about = np.where(predicted == label, others, predicted)
        named = torch.stack([SVMTarget(int(other), versus=label)(output[n]) for n, other in enumerate(about)])
        values = SVMTarget(versus=label)(output)
        assert relative(values, named) < 1e-12
        assert SVMTarget(versus=label).number_questions(output).tolist() == about.tolist()
        assert classes > 2 or (values[predicted == label] < 0).all()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda scaler, pca, svm: [scaler, pca, svm],
        lambda scaler, pca, svm: Pipeline([
            ("front", Pipeline([("s", scaler), ("p", pca)])),
            ("none", "passthrough"),
            ("svm", svm),
        ]),
        lambda scaler, pca, svm: [Pipeline([("s", scaler), ("none", None)]), [pca], svm],
        lambda scaler, pca, svm: Head.of([scaler, pca, svm]),
        lambda scaler, pca, svm: pickle.loads(pickle.dumps([scaler, pca, svm])),
    ],
    ids=["list", "nested pipeline", "mixed", "head", "pickle"],
)
def test_heads_come_in_many_wrappings(wrap):
    pipeline = fitted([StandardScaler(), PCA(3)], SVC(), 3)
    head = Head.of(wrap(*(step for _, step in pipeline.steps)))
    assert relative(scores(head, QUERY), pipeline.decision_function(QUERY)) < 1e-12


def test_a_search_is_its_best_estimator():
    x, y = DATA[3]
    search = GridSearchCV(make_pipeline(StandardScaler(), PCA(3), SVC()), {"svc__C": [0.1, 10]}).fit(x, y)
    assert relative(scores(Head.of(search), QUERY), search.decision_function(QUERY)) < 1e-12


def test_sparse_machines_are_read():
    from scipy.sparse import csr_matrix

    x, y = DATA[3]
    machine = SVC().fit(csr_matrix(x), y)
    assert relative(scores(Head.of(machine), QUERY), machine.decision_function(csr_matrix(QUERY))) < 1e-10


def test_a_head_of_float32_estimators_computes_in_float64():
    x, y = DATA[3]
    pipeline = make_pipeline(StandardScaler(), PCA(4, whiten=True), SVC()).fit(x.astype(np.float32), y)
    output = scores(Head.of(pipeline), QUERY)
    assert output.dtype == torch.float64
    assert relative(output, pipeline.decision_function(QUERY)) < 1e-10


def test_constant_features_are_whitened_as_scikit_learn_clips_them():
    x = np.zeros((20, WIDTH))
    x[:, 0] = RNG.normal(size=20)
    pca = PCA(3, whiten=True).fit(x)
    with pytest.warns(ConstantComponentWarning, match="components 1 and 2 of PCA vary"):
        head = Head.of(pca)
    assert relative(scores(head, x), pca.transform(x)) < 1e-10


def test_state_dict_and_deepcopy_keep_the_numbers():
    pipeline = fitted([StandardScaler(), PCA(3)], SVC(), 3)
    head, twin = Head.of(pipeline), Head.of(fitted([StandardScaler(), PCA(3)], SVC(C=1.0), 3))
    twin.load_state_dict(head.state_dict())
    for other in (twin, copy.deepcopy(head)):
        assert relative(scores(other, QUERY), scores(head, QUERY)) == 0


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32])
def test_a_head_keeps_its_precision_when_the_network_is_cast(cast):
    pipeline = fitted([StandardScaler(), PCA(3)], SVC(), 3)
    head = Head.of(pipeline).to(cast)
    assert {buffer.dtype for buffer in head.buffers() if buffer.is_floating_point()} == {torch.float64}
    assert not head.stages[2].support.is_floating_point()
    assert relative(scores(head, QUERY), pipeline.decision_function(QUERY)) < 1e-12


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (lambda: SVC(), NotFittedError, "not fitted yet"),
        (lambda: make_pipeline(StandardScaler(), PCA(3), SVC()), NotFittedError, "not fitted yet"),
        (
            lambda: RandomForestClassifier(3).fit(*DATA[2]),
            NoClosedFormError,
            "gradient 0: fit SVC",
        ),
        (
            lambda: make_pipeline(PCA(3), DecisionTreeClassifier()).fit(*DATA[2]),
            NoClosedFormError,
            "DecisionTreeClassifier has no closed-form Jacobian",
        ),
        (lambda: SVC(kernel=lambda a, b: a @ b.T).fit(*DATA[2]), NoClosedFormError, "whose gradient is unknown"),
        (
            lambda: SVC(kernel="precomputed").fit(np.eye(len(DATA[2][0])), DATA[2][1]),
            NoClosedFormError,
            "kernel='precomputed', on a table of similarities",
        ),
        (lambda: [], ValueError, "the head is empty"),
        (lambda: "passthrough", ValueError, "the head is empty"),
        (lambda: StandardScaler().fit(DATA[2][0]), ValueError, "neither a reduction"),
        (lambda: [SVC().fit(*DATA[2]), PCA(3).fit(DATA[2][0])], ValueError, "must end with its only classifier"),
        (
            lambda: [PCA(2).fit(DATA[2][0]), SVC().fit(*DATA[2])],
            ValueError,
            "do not fit: KernelSVM was fitted on 12 values, but what comes before it returns 2",
        ),
        (
            lambda: GridSearchCV(SVC(), {"C": [1, 2]}, refit=False).fit(*DATA[2]),
            ValueError,
            "no best estimator: fit it with refit=True",
        ),
        (lambda: 3, TypeError, "fitted scikit-learn estimators"),
        (lambda: torch.nn.Linear(3, 3), TypeError, "got Linear"),
    ],
)
def test_bad_heads_are_refused(head, error, message):
    with pytest.raises(error, match=message):
        closed_form(head())


def test_an_estimator_can_be_registered():
    class Halver(StandardScaler):
        def transform(self, X, copy=None):  # noqa: N803 - scikit-learn's name
            return X / 2

    @stage_for.register(Halver)
    def halver(estimator):
        zeros = torch.zeros(estimator.n_features_in_, dtype=torch.float64)
        return Scale(zeros, zeros + 2, zeros)

    pipeline = fitted([Halver(), PCA(3)], SVC(), 3)
    assert relative(scores(Head.of(pipeline), QUERY), pipeline.decision_function(QUERY)) < 1e-10


SIDES = np.array([[-1.0], [1.0]])
CORNERS = np.array([[1.0, 1.0], [-1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]])


@pytest.mark.parametrize(
    "machine",
    [SVC(kernel="linear"), SVC(gamma=1.0), LinearSVC(), OneVsOneClassifier(SVC()), OneVsOneClassifier(LinearSVC()),
     OneVsRestClassifier(SVC())],
    ids=str,
)  # fmt: skip
def test_a_decision_of_exactly_zero(machine):
    machine.fit(SIDES, ["a", "b"])
    head = Head.of(machine)
    trace = head(torch.zeros(1, 1))
    assert trace.values[-1] == 0
    for value in (0.0, 1e3, -1e3):
        query = np.array([[value]])
        assert head.labels(head(torch.tensor(query))).tolist() == machine.predict(query).tolist()
        assert scores(head, query)[:, 1].tolist() == pytest.approx(machine.decision_function(query).tolist())


TIED = [
    SVC(kernel="linear"),
    SVC(kernel="linear", break_ties=True),
    SVC(kernel="linear", decision_function_shape="ovo"),
    OneVsOneClassifier(SVC(kernel="linear")),
    OneVsOneClassifier(LinearSVC()),
    OneVsRestClassifier(LinearSVC()),
]


@pytest.mark.parametrize("machine", TIED, ids=str)
def test_ties_between_classes(machine):
    """In the middle of four corners every pair is undecided, and all classes have as many votes or as high a score."""
    if "argmaxima" in inspect.getsource(type(machine).predict):
        pytest.skip("this scikit-learn gives the last of equal classes, newer ones the first")
    machine.fit(CORNERS, ["a", "b", "c", "d"])
    for member in getattr(machine, "estimators_", []):
        if isinstance(member, LinearSVC):  # liblinear ends near the symmetric solution
            member.coef_, member.intercept_ = member.coef_.round(1), np.zeros(1)
    head = Head.of(machine)
    query = np.concatenate([np.zeros((1, 2)), CORNERS / 2, [[0.0, 0.5], [0.5, 0.0], [0.0, -0.5], [-0.5, 0.0]]])
    trace = trace_of(head, query)
    assert not trace.values[-1][0].any()
    assert relative(head.scores(trace), machine.decision_function(query)) < 1e-10
    assert head.labels(trace).tolist() == machine.predict(query).tolist()


def test_a_one_class_value_of_exactly_zero_is_an_outlier():
    machine = OneClassSVM(kernel="linear", nu=0.5).fit(SIDES + 2)
    machine.dual_coef_, machine._dual_coef_ = np.ones((1, 1)), np.ones((1, 1))
    machine.support_vectors_, machine.support_ = np.ones((1, 1)), np.zeros(1, dtype=np.int32)
    machine._n_support = np.array([1, 1], dtype=np.int32)
    machine.offset_, machine.intercept_, machine._intercept_ = 1.0, np.array([-1.0]), np.array([-1.0])
    query = np.array([[0.5], [1.0], [1.5]])
    head = Head.of(machine)
    assert trace_of(head, query).values[-1].flatten().tolist() == [-0.5, 0.0, 0.5]
    assert machine.decision_function(query).tolist() == [-0.5, 0.0, 0.5]
    assert head.labels(trace_of(head, query)).tolist() == machine.predict(query).tolist() == [-1, -1, 1]


OLD = Version(sklearn.__version__) < Version("1.9")


@pytest.mark.skipif(Version(sklearn.__version__) < Version("1.8"), reason="StandardScaler takes tensors since 1.8")
@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "SVC()",
        pytest.param("LogisticRegression(tol=1e-12)", marks=pytest.mark.skipif(OLD, reason="takes tensors since 1.9")),
        pytest.param("RidgeClassifier()", marks=pytest.mark.skipif(OLD, reason="takes tensors since 1.9")),
    ],
)
def test_recipe_for_fitting_on_the_device(tmp_path, end):
    """As in docs/heads.md. In a process of its own: scipy reads SCIPY_ARRAY_API when it is imported."""
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE.replace("END", end))
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "SCIPY_ARRAY_API": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-9


RECIPE = """
import sklearn, torch
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from pytorch_grad_cam_pcasvm import ContributionCAM, PCASVMNet, extract_features

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
backbone = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3), torch.nn.ReLU(), torch.nn.Flatten()).double().to(device)
x, y = torch.randn(60, 1, 5, 5).double(), torch.arange(60) % 3
features, labels = extract_features(backbone, [(x, y)], as_numpy=False, progress=False)
with sklearn.config_context(array_api_dispatch=True):
    reduction = make_pipeline(StandardScaler(), PCA(3, svd_solver="full"))
    components = reduction.fit_transform(features)
assert isinstance(components, torch.Tensor) and components.device == features.device
assert isinstance(reduction[-1].components_, torch.Tensor)
end = END
if isinstance(end, SVC):
    end.fit(components.cpu().numpy(), labels.cpu().numpy())
else:
    with sklearn.config_context(array_api_dispatch=True):
        end.fit(components, labels)
    assert end.coef_.device == features.device
net = PCASVMNet(backbone, [reduction, end])
maps = ContributionCAM(net, ["0"]).explain(x[:2].to(device))
assert (maps.maps.sum((2, 3)) + maps.remainder + maps.baseline_values - maps.values).abs().max() < 1e-9
usual = make_pipeline(StandardScaler(), PCA(3, svd_solver="full"), END)
usual.fit(features.cpu().numpy(), y.numpy())
print(abs(net(x.to(device)).detach().cpu().numpy() - usual.decision_function(features.cpu().numpy())).max())
"""


@pytest.mark.parametrize("form", [{}, {"probability": False}, {"probability": True}], ids=str)
@pytest.mark.filterwarnings("ignore:The `probability` parameter:FutureWarning")
def test_every_form_of_probability_gives_the_same_head(form):
    """It is a truth value, and in scikit-learn 1.9 a string that means no; the decision does not depend on it."""
    x, y = DATA[3]
    expected = SVC().fit(x, y)
    head = Head.of(SVC(**form, random_state=0).fit(x, y))
    assert relative(scores(head, QUERY), expected.decision_function(QUERY)) < 1e-9
    assert head.labels(head(torch.tensor(QUERY))).tolist() == expected.predict(QUERY).tolist()


def test_names_of_features_are_ignored():
    pipeline = fitted([StandardScaler(), PCA(4)], SVC(), 3)
    expected = pipeline.decision_function(QUERY)
    pipeline[0].feature_names_in_ = np.array([f"feature {d}" for d in range(WIDTH)], dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(scores(Head.of(pipeline), QUERY), expected) < 1e-9


@pytest.mark.parametrize("machine", [SVC(), NuSVC(nu=0.3), LinearSVC()], ids=str)
def test_heads_from_files_of_skops(machine, tmp_path):
    skops = pytest.importorskip("skops.io")
    pipeline = fitted([StandardScaler(), PCA(4)], machine, 3)
    skops.dump(pipeline, tmp_path / "head.skops")
    loaded = skops.load(tmp_path / "head.skops", trusted=[])
    assert torch.equal(scores(Head.of(loaded), QUERY), scores(Head.of(pipeline), QUERY))


def test_a_stage_of_ones_own_may_start_with_an_integer_buffer():
    class Pick(Stage):
        reduces = True

        def __init__(self):
            super().__init__()
            self.register_buffer("index", torch.tensor([3, 1]))

        def evaluate(self, x):
            return x[:, self.index], None

    head = Head([Pick()])
    assert relative(scores(head, QUERY), QUERY[:, [3, 1]]) == 0
    with pytest.raises(NotImplementedError, match=r"Pick defines no pullback\(saved, grad\)"):
        head.pullback(trace_of(head, QUERY), {1: None})
    with pytest.raises(NotImplementedError, match=r"Stage defines no evaluate\(x\)"):
        Stage()(torch.tensor(QUERY))


@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 3])
def test_effect_of_support_vectors(kernel, classes):
    pipeline = fitted([PCA(4), StandardScaler()], SVC(kernel=kernel, coef0=0.2), classes)
    head = Head.of(pipeline)
    effect = head.support_vector_effect(trace_of(head, QUERY).values[1])
    svm = pipeline[-1]
    assert effect.indices.tolist() == svm.support_.tolist()
    inputs = pipeline[:-1].transform(DATA[classes][0])
    assert relative(inputs[effect.indices], svm.support_vectors_) < 1e-12
    assert effect.norm.shape == (30, len(svm.support_))
    assert effect.signed.shape == (30, classes * (classes - 1) // 2, len(svm.support_))
    # Each vector alone: its coefficient times the norm of its kernel's gradient.
    first = effect.signed[:, 0] / effect.norm
    owner = np.repeat(np.arange(classes), svm.n_support_)
    expected = np.where(owner < 2, svm.dual_coef_[0], 0.0)
    assert relative(first, np.broadcast_to(expected, first.shape)) < 1e-9


def test_scores_are_not_taken_for_components():
    head = Head.of(fitted([PCA(4)], SVC(), 3))
    with pytest.raises(ValueError, match=r"expected net\(x\).components, of shape \(N, 4\), got \(30, 3\)"):
        head.support_vector_effect(scores(head, QUERY))


def test_a_head_without_support_vectors_says_so():
    head = Head.of(fitted([PCA(4)], LinearSVC(), 3))
    with pytest.raises(ValueError, match="the head has no support vectors"):
        head.support_vector_effect(torch.zeros(1, 4))


@pytest.mark.parametrize(
    ("kind", "method"), [(PCA, "transform"), (StandardScaler, "transform"), (SVC, "decision_function")]
)
def test_a_subclass_with_a_method_of_its_own_is_refused(kind, method):
    plain = type("Plain", (kind,), {})
    other = type("Other", (kind,), {method: lambda self, x: np.log1p(np.abs(x))})
    for made, refused in ((plain, False), (other, True)):
        parts = [made(), *([] if kind is SVC else [SVC()])]
        x, y = DATA[2]
        parts[0].fit(x, y)
        if kind is not SVC:
            parts[1].fit(kind().fit_transform(x), y)
        if refused:
            with pytest.raises(NoClosedFormError, match=f"Other is a {kind.__name__} with a {method} of its own"):
                closed_form(parts)
        else:
            assert relative(scores(closed_form(parts), QUERY), expected_scores(make_pipeline(*parts), QUERY)) < 1e-9


@pytest.mark.parametrize(
    ("kind", "method"), [(Pipeline, "predict"), (Pipeline, "transform"), (GridSearchCV, "decision_function")]
)
def test_a_pipeline_or_search_with_a_method_of_its_own_is_refused(kind, method):
    x, y = DATA[2]
    other = type("Other", (kind,), {method: lambda self, x: 1 - kind.predict(self, x)})
    plain = type("Plain", (kind,), {})
    steps = [("scaler", StandardScaler()), ("svm", SVC())]
    made = [k(steps) if kind is Pipeline else k(Pipeline(steps), {"svm__C": [1.0]}) for k in (plain, other)]
    assert relative(scores(Head.of(made[0].fit(x, y)), QUERY), expected_scores(made[0], QUERY)) < 1e-9
    way_out = "its fitted steps as a list" if kind is Pipeline else "its best_estimator_"
    message = f"Other is a {kind.__name__} with a {method} of its own.*register.Other.*, or pass {way_out}"
    with pytest.raises(NoClosedFormError, match=message):
        Head.of([made[1].fit(x, y)])

    @stage_for.register(other)
    def registered(estimator):
        return Scale(*(torch.ones(WIDTH).double() for _ in range(3)))

    assert relative(trace_of(Head.of([made[1], PCA(2).fit(x)]), QUERY).values[1], QUERY) < 1e-12


@pytest.mark.parametrize("fitted_itself", [False, True])
def test_a_selector_of_a_fitted_model(fitted_itself):
    x, y = DATA[3]
    selector = SelectFromModel(LinearSVC().fit(x, y), prefit=True)
    if fitted_itself:
        selector.fit(x, y)
    machine = SVC().fit(selector.transform(x), y)
    expected = machine.decision_function(selector.transform(QUERY))
    for wrapped in ([selector, machine], Pipeline([("selector", selector), ("machine", machine)])):
        assert relative(scores(Head.of(wrapped), QUERY), expected) < 1e-10
    with pytest.raises(NotFittedError):
        Head.of([SelectFromModel(LinearSVC(), prefit=True), machine])


def test_a_class_whose_samples_have_no_weight_is_refused():
    """scikit-learn keeps the class, but its machine does not know it, and its labels are shifted."""
    x, y = DATA[3]
    machine = SVC().fit(x, y, sample_weight=(y != 1) * 1.0)
    assert 2 not in machine.predict(x)
    with pytest.raises(ValueError, match="SVC knows 3 classes, but was fitted on samples of 2"):
        Head.of(machine)


@pytest.mark.parametrize("shift", [0.0, 100.0])
def test_seeds_at_several_positions_are_joined(shift):
    """The decision's part comes with a factor taken out: only true values can be added to what else is there."""
    x, y = DATA[3]
    pipeline = make_pipeline(StandardScaler(), PCA(4, whiten=True), SVC(gamma=2.0)).fit(x, y)
    head = Head.of(pipeline)
    query = QUERY[:4] + shift
    trace = trace_of(head, query)
    decision = torch.tensor([[[1.0, 2.0, -1.0], [1.0, 0.0, 0.0]]]).double()
    components = torch.tensor([[[0.0, 1.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0]]]).double()
    features = torch.linspace(-1, 1, 2 * WIDTH).reshape(1, 2, WIDTH).double()
    # As large as the decision's own gradient, which is 1e-13 or less here.
    own = pulled_back(head, trace, {3: decision[:, :1]})
    assert (head.pullback(trace, {3: decision})[1] < -30).all() or not shift
    components[:, 0] *= float(own.norm()) or 1.0
    for seeds in ({3: decision, 2: components}, {3: decision, 2: components, 0: features}, {3: None, 0: None}):
        if 0 in seeds and seeds[0] is None:  # three decisions and twelve features have to be as many
            seeds = {3: torch.ones(1, WIDTH, 3).double(), 0: None}
        assert relative(pulled_back(head, trace, seeds), by_autograd(head, query, seeds)) < 1e-9
    # A part that is 0 for a target does not bring what is left to an underflow.
    _, log_scale = head.pullback(trace, {3: decision, 2: components})
    assert (log_scale[:, 0] == 0).all()
    assert torch.equal(log_scale[:, 1], head.pullback(trace, {3: decision})[1][:, 1])


def test_factors_of_stages_one_after_another_are_multiplied():
    """A kernel map of a kernel map: the gradient of each is so small that a factor is taken out of it."""
    points, zeros = torch.linspace(-1, 1, 5 * 3).double().reshape(5, 3), torch.zeros(5).double()
    first = KernelMap(RBF(1.0), points, torch.eye(5).double(), zeros, reduces=True)
    second = KernelMap(RBF(4.0), 4 * torch.eye(5).double(), torch.eye(5).double(), zeros, reduces=True)
    identity = Projection(torch.eye(5).double(), zeros, zeros + 1)
    query = np.array([[4.5, -4.0, 2.0], [5.0, -4.0, 1.0]])
    seeds = torch.tensor([[[1.0, 2.0, 0.0, 0.0, 0.0], [0.0, 1.0, 3.0, 0.0, -1.0]]]).double()
    for stages in ([first, second], [Chain([first, second]), identity]):
        head, position = Head(stages), 2
        trace = trace_of(head, query)
        assert head.pullback(trace, {position: seeds})[1].lt(-64 - 30).all()
        actual = pulled_back(head, trace, {position: seeds}).flatten(0, 1)
        expected = by_autograd(head, query, {position: seeds}).flatten(0, 1)
        for row, of_row in zip(actual, expected, strict=True):
            assert relative(row, of_row) < 1e-9


def test_a_stage_in_full_precision():
    """On a device without float64 a head is in float32, which autocast would halve."""
    a = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with full_precision(a.device):
            assert (a @ a).dtype == torch.float32
    with full_precision(a.device):
        assert (a @ a).dtype == torch.float32


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_rows_of_almost_nothing_are_normalised_as_scikit_learn_does(norm):
    eps = np.finfo(float).eps
    rows = np.zeros((5, WIDTH))
    rows[:, 3] = eps * np.array([-5, 9.9, 10, -10, 20])
    expected = Normalizer(norm).fit(rows).transform(rows)
    assert np.unique(expected.round(5)).tolist() == [-1, 0, 1]
    head = Head.of([Normalizer(norm).fit(rows), PCA(3).fit(DATA[2][0])])
    trace = trace_of(head, rows)
    assert relative(trace.values[1], expected) < 1e-12
    # Below, the row stays as it is; above, what lies along it is lost.
    slopes = head.pullback(trace, {1: None})[0][:, 3, 3]
    assert slopes.tolist() == [1, 1, 0, 0, 0]


def test_the_jacobian_of_whitened_components():
    """It has a way of its own, without a product; a divisor of ones proves nothing."""
    head = Head.of(fitted([PCA(4, whiten=True)], SVC(), 3))
    trace = trace_of(head, QUERY)
    assert head.stages[0].divisor.sub(1).abs().min() > 0.1
    components = torch.eye(4).double()[None]
    by_product, by_jacobian = (pulled_back(head, trace, {1: seed}) for seed in (components, None))
    assert relative(by_jacobian, by_product) < 1e-12
    assert relative(by_product, by_autograd(head, QUERY, {1: None})) < 1e-12


def test_rows_of_a_trace():
    members = CalibratedClassifierCV(make_pipeline(MinMaxScaler(clip=True), SVC()), cv=2)
    head = Head.of(fitted([StandardScaler(), PCA(4)], members, 3))
    trace = trace_of(head, QUERY)
    seed = head.voting.seed(torch.tensor([1]), None).unsqueeze(1)
    expected = pulled_back(head, trace, {3: seed})
    for index in (slice(5, 9), [7, 2], torch.arange(30) % 4 == 1):
        part = trace.rows(index)
        assert [value.shape[0] for value in part.values] == [len(expected[index])] * 4
        assert relative(pulled_back(head, part, {3: seed}), expected[index]) < 1e-12
    assert torch.equal(trace.rows(4).values[2], trace.values[2][4])
    with pytest.raises(ValueError, match="nothing saved for a pullback"):
        head.pullback(HeadTrace(trace.values, []), {3: seed})


@pytest.mark.parametrize("classes", [2, 4])
def test_effect_on_a_class(classes):
    x, y = samples(classes)
    names = np.array(["ant", "bee", "cat", "dog"][:classes])
    pipeline = make_pipeline(PCA(3), SVC()).fit(x, names[y])
    head = Head.of(pipeline)
    p = trace_of(head, QUERY).values[1]
    by_pair = head.support_vector_effect(p)
    total = dict.fromkeys(names, 0)
    if classes == 2:
        total = {"ant": -by_pair.signed[:, 0], "bee": by_pair.signed[:, 0]}
    else:
        pairs = itertools.combinations(names, 2)
        for row, (first, second) in enumerate(pairs):
            total[first] = total[first] + by_pair.signed[:, row]
            total[second] = total[second] - by_pair.signed[:, row]
            assert relative(head.support_vector_effect(p, first, second).signed[:, 0], by_pair.signed[:, row]) < 1e-12
    for name in names:
        assert relative(head.support_vector_effect(p, name).signed[:, 0], total[name]) < 1e-12
    # A plus is a training image of the class itself: its alpha_i c_i is positive there.
    own = names[y][by_pair.indices] == "bee"
    assert (head.support_vector_effect(p, "bee").signed[:, 0, own] >= 0).all()
    with pytest.raises(ValueError, match="versus needs a category"):
        head.support_vector_effect(p, versus="ant")
    with pytest.raises(TypeError, match="expected the tensor net"):
        head.support_vector_effect(p.numpy())


def test_a_pca_inside_a_meta_estimator_is_no_component():
    x, y = DATA[2]
    inside = CalibratedClassifierCV(make_pipeline(StandardScaler(), PCA(3), SVC()), cv=3).fit(x, y)
    head = Head.of(inside)
    with pytest.raises(ValueError, match="the PCA is inside a meta-estimator"):
        PCATarget(0)(read(head, QUERY))
    with pytest.raises(ValueError, match="they are inside a meta-estimator"):
        head.support_vector_effect(torch.tensor(QUERY))
    members = [("a", make_pipeline(PCA(3), LinearSVC())), ("b", LinearSVC())]
    head = Head.of(StackingClassifier(members, LinearSVC(), cv=2).fit(x, y))
    assert head.component_position is None
    assert [(stage.decides, stage.reduces) for stage in head.stages] == [(True, False)] * 2


@pytest.mark.parametrize(
    ("estimator", "nearest"),
    [(QuantileTransformer(n_quantiles=9), "PowerTransformer"), (NMF(2), "PCA")],
)
def test_the_nearest_supported_estimator_is_named(estimator, nearest):
    with pytest.raises(NoClosedFormError, match=f": fit {nearest}"):
        Head.of(estimator.fit(np.abs(DATA[2][0])))


class Arcsinh(Stage):
    """A stage without a secant."""

    def evaluate(self, x):
        return torch.asinh(x), x

    def pullback(self, saved, grad):
        return grad / (1 + saved**2).sqrt().unsqueeze(1), None


class Scaled(Stage):
    """A reduction of a user's own, with a tensor."""

    reduces = True

    def __init__(self, name, scale=2.0):
        super().__init__()
        self.name = name
        self.register_buffer(name, torch.tensor(scale))

    def evaluate(self, x):
        return x * getattr(self, self.name), x

    def pullback(self, saved, grad):
        return grad * getattr(self, self.name), None


def test_heads_that_start_alike_have_the_same_stages_or_the_same_numbers():
    rows = np.random.default_rng(0).normal(size=(9, 4))
    heads = [Head.of(make_pipeline(Normalizer(norm), PCA(2)).fit(rows)) for norm in ("l1", "l1", "l2")]
    first, again, other = heads
    assert first.starts_as(again, 2)
    assert not first.starts_as(other, 1)
    assert not first.starts_as(Head(list(first.stages)[1:]), 2)
    assert not Head(list(first.stages)[1:]).starts_as(first, 2)
    assert Head([Scaled("a")]).starts_as(Head([Scaled("a")]), 1)
    for name, scale in (("a", 3.0), ("b", 2.0)):
        assert not Head([Scaled("a")]).starts_as(Head([Scaled(name, scale)]), 1)
    more = Scaled("a")
    more.register_buffer("b", torch.tensor(2.0))
    assert not Head([more]).starts_as(Head([Scaled("a")]), 1)
    assert not Head([Scaled("a")]).starts_as(Head([more]), 1)


def test_what_a_head_knows_of_photos_is_what_was_stored():
    head = Head.of(LinearSVC().fit(np.eye(4), [0, 1, 0, 1]))
    assert (head.normal, head.exif, head.threshold) == (None, False, None)
    head.training_set.preparation = {"normal": "good", "exif": True, "threshold": {"score": 0.5}}
    assert (head.normal, head.exif, head.threshold) == ("good", True, 0.5)
    head.training_set.preparation = {"size": [8, 8]}
    assert (head.normal, head.exif, head.threshold) == (None, False, None)


def test_a_stage_with_a_pullback_of_its_own_inherits_no_secant():
    class Secant(Arcsinh):
        def secant(self, saved, saved0, grad):
            return grad, None

    class Same(Secant):
        pass

    class Other(Secant):
        def pullback(self, saved, grad):
            return grad, None

    class Both(Secant):
        def pullback(self, saved, grad):
            return grad, None

        def secant(self, saved, saved0, grad):
            return 2 * grad, None

    x = torch.ones(1, 2)
    assert Arcsinh.secant is Other.secant is Stage.secant
    assert Same().secant(x, x, x[:, None])[0].tolist() == [[[1.0, 1.0]]]
    assert Both().secant(x, x, x[:, None])[0].tolist() == [[[2.0, 2.0]]]


def test_a_stage_of_ones_own_is_checked_once():
    from problems import Problem

    from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet

    class Wrong(Arcsinh):
        def pullback(self, saved, grad):
            return -super().pullback(saved, grad)[0], None

    class Bare(Arcsinh):
        def evaluate(self, x):
            return torch.asinh(x)

    problem = Problem()
    stages = list(Head.of(problem.head).stages)
    nets = [
        PCASVMNet(problem.backbone, Head([stages[0], own(), *stages[1:]]), "classifier.4") for own in (Arcsinh, Wrong)
    ]
    assert ClosedFormGradCAM(nets[0], [problem.target_layer]).explain(problem.x).maps.any()
    with pytest.raises(NoClosedFormError, match="the pullback of Wrong differs from autograd's"):
        ClosedFormGradCAM(nets[1], [problem.target_layer]).explain(problem.x)
    net = PCASVMNet(problem.backbone, Head([stages[0], Bare(), *stages[1:]]), "classifier.4")
    with pytest.raises(TypeError, match=r"evaluate of Bare must return \(output, saved\)"):
        net(problem.x)


def test_effect_of_support_vectors_without_a_reduction():
    pipeline = fitted([StandardScaler()], SVC(gamma=0.1), 2)
    effect = Head.of(pipeline).support_vector_effect(torch.tensor(QUERY))
    ways = pipeline[0].transform(QUERY)[:, None] - pipeline[1].support_vectors_
    assert relative(effect.decision[:, 0], pipeline[1].dual_coef_ * np.exp(-0.1 * (ways**2).sum(-1))) < 1e-12


def test_identity_seeds():
    head = Head.of(fitted([StandardScaler(), PCA(4, whiten=True)], SVC(), 3))
    trace = trace_of(head, QUERY)
    for position in range(4):
        assert relative(pulled_back(head, trace, {position: None}), by_autograd(head, QUERY, {position: None})) < 1e-10
    both = {2: None, 3: torch.ones(1, 4, 3).double()}
    assert relative(pulled_back(head, trace, both), by_autograd(head, QUERY, both)) < 1e-10
