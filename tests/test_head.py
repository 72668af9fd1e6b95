"""Heads against scikit-learn: decision values, predictions, and closed-form gradients."""

import copy
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
from packaging.version import Version
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import NMF, PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, PowerTransformer, QuantileTransformer, StandardScaler
from sklearn.svm import SVC, LinearSVC, NuSVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError, PCATarget, SVMTarget, stage_for
from pytorch_grad_cam_pcasvm.head.stages import Scale, Stage
from pytorch_grad_cam_pcasvm.net import HeadOutput
from pytorch_grad_cam_pcasvm.targets import feature_gradients

RNG = np.random.default_rng(0)
WIDTH = 12


def samples(classes):
    labels = np.arange(40 * classes) % classes
    centres = 1.5 * RNG.normal(size=(classes, WIDTH))
    return centres[labels] + RNG.normal(size=(len(labels), WIDTH)) + 3, labels


DATA = {classes: samples(classes) for classes in (2, 3, 5)}
QUERY = RNG.normal(size=(30, WIDTH)) * 2 + 3


def machines():
    for kernel in ("linear", "rbf", "poly", "sigmoid"):
        yield f"SVC {kernel}", SVC(kernel=kernel, coef0=0.3)
        yield f"NuSVC {kernel}", NuSVC(kernel=kernel, nu=0.3, coef0=0.3)
    yield "SVC gamma auto", SVC(gamma="auto", class_weight="balanced")
    yield "SVC ovo", SVC(decision_function_shape="ovo")
    yield "SVC break_ties", SVC(break_ties=True)
    yield "SVC degree 4", SVC(kernel="poly", degree=4, gamma=0.1)
    yield "LinearSVC", LinearSVC()
    yield "LinearSVC without intercept", LinearSVC(fit_intercept=False)


def fronts():
    yield "bare", []
    yield "StandardScaler, PCA", [StandardScaler(), PCA(4)]
    yield "whitened", [PCA(4, whiten=True)]
    yield "MinMaxScaler(clip)", [MinMaxScaler((-1, 2), clip=True), PCA(5)]
    yield "two scalers", [StandardScaler(with_std=False), MinMaxScaler(), PCA(3), StandardScaler(with_mean=False)]


def fitted(front, machine, classes, labels=None):
    x, y = DATA[classes]
    y = y if labels is None else np.asarray(labels)[y]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_pipeline(*copy.deepcopy(front), copy.deepcopy(machine)).fit(x, y)


def expected_scores(pipeline, x):
    scores = pipeline.decision_function(x)
    return np.stack([-scores, scores], 1) if scores.ndim == 1 else scores


def read(head, x):
    with torch.no_grad():
        return HeadOutput.of(head, head(torch.as_tensor(x)))


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(("front_name", "front"), list(fronts()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize(("name", "machine"), list(machines()), ids=lambda v: v if isinstance(v, str) else "")
def test_head_computes_what_scikit_learn_computes(name, machine, front_name, front, classes):
    pipeline = fitted(front, machine, classes)
    head = Head.of(pipeline)
    output = read(head, QUERY)
    assert relative(output, expected_scores(pipeline, QUERY)) < 1e-10
    assert head.labels(output.levels).tolist() == pipeline.predict(QUERY).tolist()
    if front:
        # The components are those of the last reduction, also where a scaler follows it.
        last = max(i for i, step in enumerate(front) if isinstance(step, PCA))
        assert relative(output.components, pipeline[: last + 1].transform(QUERY)) < 1e-10
    else:
        assert output.components is None
    assert output.margins.shape == (30, classes)
    if name != "LinearSVC" and "ovo" not in name and classes > 2 and "without" not in name:
        pairwise = copy.deepcopy(pipeline)
        pairwise[-1].decision_function_shape, pairwise[-1].break_ties = "ovo", False
        decisions = pairwise.decision_function(QUERY)
        pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
        margins = np.zeros((30, classes))
        for (i, j), decision in zip(pairs, decisions.T, strict=True):
            margins[:, i] += decision
            margins[:, j] -= decision
        assert relative(output.margins, margins) < 1e-10


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize(("front_name", "front"), list(fronts()), ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize(("name", "machine"), list(machines()), ids=lambda v: v if isinstance(v, str) else "")
def test_gradients_equal_autograd(name, machine, front_name, front, classes):
    head = Head.of(fitted(front, machine, classes))
    targets = [SVMTarget(label) for label in range(classes)] + [SVMTarget(0, versus=classes - 1), SVMTarget()]
    targets += [SVMTarget(versus="runner-up"), SVMTarget(1, sign="-")] + (
        [PCATarget(2), PCATarget(0, "-")] if front else []
    )
    x = torch.tensor(QUERY).requires_grad_()
    output = HeadOutput.of(head, head(x))
    expected = torch.stack([torch.autograd.grad(t(output).sum(), x, retain_graph=True)[0] for t in targets], 1)
    with torch.no_grad():
        grads, log_scale, values = feature_gradients(read(head, QUERY), targets, torch.float64)
    assert not log_scale.any()
    assert relative(grads, expected) < 1e-10
    assert relative(values, torch.stack([t(output) for t in targets], 1)) < 1e-12


@pytest.mark.parametrize("kernel", ["rbf", "poly", "sigmoid", "linear"])
def test_gradients_equal_differences_of_scikit_learns_own_decision(kernel):
    pipeline = fitted([StandardScaler(), PCA(4, whiten=True)], SVC(kernel=kernel, decision_function_shape="ovo"), 3)
    grads, _, _ = feature_gradients(
        read(Head.of(pipeline), QUERY[:4]), [SVMTarget(0, versus=1), SVMTarget(1, versus=2)], torch.float64
    )
    step = 1e-5
    for d in range(WIDTH):
        ahead, behind = QUERY[:4].copy(), QUERY[:4].copy()
        ahead[:, d] += step
        behind[:, d] -= step
        difference = (pipeline.decision_function(ahead) - pipeline.decision_function(behind)) / (2 * step)
        assert np.abs(grads[:, :, d].numpy() - difference[:, [0, 2]]).max() < 1e-5 * max(1, np.abs(difference).max())


@pytest.mark.parametrize(
    "labels",
    [["a", "b", "c"], [10, 20, 30], [-1.0, 0.0, 2.0], np.array(["x", "y", "z"], dtype=object), [True, False]],
    ids=str,
)
def test_labels_of_any_dtype(labels):
    pipeline = fitted([PCA(3)], SVC(), len(labels), labels)
    head = Head.of(pipeline)
    output = read(head, QUERY)
    predicted = head.labels(output.levels)
    assert predicted.tolist() == pipeline.predict(QUERY).tolist()
    assert predicted.dtype == pipeline.classes_.dtype
    for index, label in enumerate(pipeline.classes_):
        assert head.class_index(label) == index
        assert relative(SVMTarget(label)(output), output.margins[:, index]) < 1e-12


def test_runner_up_is_the_second_best_class():
    pipeline = fitted([PCA(4)], SVC(), 5)
    output = read(Head.of(pipeline), QUERY)
    scores = pipeline.decision_function(QUERY)
    order = np.argsort(scores, 1)
    expected = torch.stack([SVMTarget(int(row[-1]), versus=int(row[-2]))(output[n]) for n, row in enumerate(order)])
    same = torch.tensor(order[:, -1] == pipeline.predict(QUERY))
    assert same.all()
    assert relative(SVMTarget(versus="runner-up")(output), expected) < 1e-12


@pytest.mark.parametrize("machine", [SVC(), LinearSVC()], ids=str)
@pytest.mark.parametrize("classes", [2, 3])
def test_a_class_against_itself_is_nothing(machine, classes):
    output = read(Head.of(fitted([PCA(4)], machine, classes)), QUERY)
    predicted = output.head.rule.predicted(output.decision)
    for label in range(classes):
        values = SVMTarget(versus=label)(output)  # the predicted class against a label that it may be itself
        assert values[predicted == label].eq(0).all()
        assert values[predicted != label].ne(0).all()


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
    assert relative(read(head, QUERY), pipeline.decision_function(QUERY)) < 1e-12


def test_a_search_is_its_best_estimator():
    x, y = DATA[3]
    search = GridSearchCV(make_pipeline(StandardScaler(), PCA(3), SVC()), {"svc__C": [0.1, 10]}).fit(x, y)
    assert relative(read(Head.of(search), QUERY), search.decision_function(QUERY)) < 1e-12


def test_sparse_machines_are_read():
    from scipy.sparse import csr_matrix

    x, y = DATA[3]
    machine = SVC().fit(csr_matrix(x), y)
    assert relative(read(Head.of(machine), QUERY), machine.decision_function(csr_matrix(QUERY))) < 1e-10


def test_a_head_of_float32_estimators_computes_in_float64():
    x, y = DATA[3]
    pipeline = make_pipeline(StandardScaler(), PCA(4, whiten=True), SVC()).fit(x.astype(np.float32), y)
    output = read(Head.of(pipeline), QUERY)
    assert output.dtype == torch.float64
    assert relative(output, pipeline.decision_function(QUERY)) < 1e-10


def test_constant_features_are_whitened_as_scikit_learn_clips_them():
    x = np.zeros((20, WIDTH))
    x[:, 0] = RNG.normal(size=20)
    pca = PCA(3, whiten=True).fit(x)
    assert relative(read(Head.of(pca), x), pca.transform(x)) < 1e-10


def test_state_dict_and_deepcopy_keep_the_numbers():
    pipeline = fitted([StandardScaler(), PCA(3)], SVC(), 3)
    head, twin = Head.of(pipeline), Head.of(fitted([StandardScaler(), PCA(3)], SVC(C=1.0), 3))
    twin.load_state_dict(head.state_dict())
    for other in (twin, copy.deepcopy(head)):
        assert relative(read(other, QUERY), read(head, QUERY)) == 0


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32])
def test_a_head_keeps_its_precision_when_the_network_is_cast(cast):
    pipeline = fitted([StandardScaler(), PCA(3)], SVC(), 3)
    head = Head.of(pipeline).to(cast)
    assert {buffer.dtype for buffer in head.buffers() if buffer.is_floating_point()} == {torch.float64}
    assert relative(read(head, QUERY), pipeline.decision_function(QUERY)) < 1e-12


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (lambda: SVC(), NotFittedError, "not fitted yet"),
        (lambda: make_pipeline(StandardScaler(), PCA(3), SVC()), NotFittedError, "not fitted yet"),
        (
            lambda: RandomForestClassifier(3).fit(*DATA[2]),
            NoClosedFormError,
            "gradient 0. The nearest that has one is SVC",
        ),
        (
            lambda: [PCA(3).fit(DATA[2][0]), KNeighborsClassifier().fit(*DATA[2])],
            NoClosedFormError,
            "KNeighborsClassifier has no closed-form Jacobian",
        ),
        (lambda: SVC(kernel=lambda a, b: a @ b.T).fit(*DATA[2]), NoClosedFormError, "kernel"),
        (
            lambda: SVC(kernel="precomputed").fit(np.eye(len(DATA[2][0])), DATA[2][1]),
            NoClosedFormError,
            "'precomputed', whose gradient",
        ),
        (lambda: [], ValueError, "the head is empty"),
        (lambda: "passthrough", ValueError, "the head is empty"),
        (lambda: StandardScaler().fit(DATA[2][0]), ValueError, "neither a reduction"),
        (lambda: [SVC().fit(*DATA[2]), PCA(3).fit(DATA[2][0])], ValueError, "must end with its only classifier"),
        (
            lambda: [PCA(2).fit(DATA[2][0]), SVC().fit(*DATA[2])],
            ValueError,
            "do not fit: KernelSVM was fitted on 12 values, but what comes before it gives 2",
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
        Head.of(head())


def test_an_estimator_can_be_registered():
    class Halver(StandardScaler):
        def transform(self, X, copy=None):  # noqa: N803 - scikit-learn's name
            return X / 2

    @stage_for.register(Halver)
    def halver(estimator):
        zeros = torch.zeros(estimator.n_features_in_, dtype=torch.float64)
        return Scale(zeros, zeros + 2, zeros)

    pipeline = fitted([Halver(), PCA(3)], SVC(), 3)
    assert relative(read(Head.of(pipeline), QUERY), pipeline.decision_function(QUERY)) < 1e-10


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_a_decision_of_exactly_zero(kernel):
    machine = SVC(kernel=kernel, gamma=1.0).fit([[-1.0], [1.0]], ["a", "b"])
    assert machine.decision_function([[0.0]]) == 0
    head = Head.of(machine)
    for value in (0.0, 1e3, -1e3):
        query = np.array([[value]])
        assert head.labels(head(torch.tensor(query))).tolist() == machine.predict(query).tolist()


def test_estimators_fitted_on_tensors():
    """Their attributes are tensors (array-API dispatch)."""
    scaler, pca, svm = (step for _, step in fitted([StandardScaler(), PCA(4, whiten=True)], SVC(), 3).steps)
    expected = svm.decision_function(pca.transform(scaler.transform(QUERY)))
    scaler.mean_, scaler.scale_ = torch.tensor(scaler.mean_), torch.tensor(scaler.scale_)
    for name in ("components_", "mean_", "explained_variance_"):
        setattr(pca, name, torch.tensor(getattr(pca, name)))
    assert relative(read(Head.of([scaler, pca, svm]), QUERY), expected) < 1e-10


@pytest.mark.skipif(Version(sklearn.__version__) < Version("1.8"), reason="StandardScaler takes tensors since 1.8")
def test_recipe_for_fitting_on_the_device(tmp_path):
    """As in the README. In a process of its own: scipy reads SCIPY_ARRAY_API when it is imported."""
    script = tmp_path / "recipe.py"
    script.write_text(RECIPE)
    run = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "SCIPY_ARRAY_API": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-9


RECIPE = """
import sklearn, torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import NMF, PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from pytorch_grad_cam_pcasvm import PCASVMNet, extract_features

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
svm = SVC().fit(components.cpu().numpy(), labels.cpu().numpy())
net = PCASVMNet(backbone, [reduction, svm])
usual = make_pipeline(StandardScaler(), PCA(3, svd_solver="full"), SVC()).fit(features.cpu().numpy(), y.numpy())
print(abs(net(x.to(device)).detach().cpu().numpy() - usual.decision_function(features.cpu().numpy())).max())
"""


@pytest.mark.parametrize("form", [{}, {"probability": False}, {"probability": True}], ids=str)
@pytest.mark.filterwarnings("ignore:The `probability` parameter:FutureWarning")
def test_every_form_of_probability_gives_the_same_head(form):
    """It is a truth value, and in scikit-learn 1.9 a string that means no; the decision does not depend on it."""
    x, y = DATA[3]
    expected = SVC().fit(x, y)
    head = Head.of(SVC(**form, random_state=0).fit(x, y))
    assert relative(read(head, QUERY), expected.decision_function(QUERY)) < 1e-9
    assert head.labels(head(torch.tensor(QUERY))).tolist() == expected.predict(QUERY).tolist()


def test_names_of_features_are_ignored():
    pipeline = fitted([StandardScaler(), PCA(4)], SVC(), 3)
    expected = pipeline.decision_function(QUERY)
    pipeline[0].feature_names_in_ = np.array([f"feature {d}" for d in range(WIDTH)], dtype=object)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert relative(read(Head.of(pipeline), QUERY), expected) < 1e-9


@pytest.mark.parametrize("machine", [SVC(), NuSVC(nu=0.3), LinearSVC()], ids=str)
def test_heads_from_files_of_skops(machine, tmp_path):
    skops = pytest.importorskip("skops.io")
    pipeline = fitted([StandardScaler(), PCA(4)], machine, 3)
    skops.dump(pipeline, tmp_path / "head.skops")
    loaded = skops.load(tmp_path / "head.skops", trusted=[])
    assert torch.equal(read(Head.of(loaded), QUERY), read(Head.of(pipeline), QUERY))


def test_a_stage_of_ones_own_may_start_with_an_integer_buffer():
    class Pick(Stage):
        reduces = True

        def __init__(self):
            super().__init__()
            self.register_buffer("index", torch.tensor([3, 1]))

        def forward(self, x):
            return x[:, self.index]

    output = read(Head([Pick()]), QUERY)
    assert relative(output, QUERY[:, [3, 1]]) == 0


@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
@pytest.mark.parametrize("classes", [2, 3])
def test_effect_of_support_vectors(kernel, classes):
    pipeline = fitted([PCA(4), StandardScaler()], SVC(kernel=kernel, coef0=0.2), classes)
    head = Head.of(pipeline)
    output = read(head, QUERY)
    effect = head.support_vector_effect(output.components)
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
        head.support_vector_effect(read(head, QUERY))


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
                Head.of(parts)
        else:
            assert relative(read(Head.of(parts), QUERY), expected_scores(make_pipeline(*parts), QUERY)) < 1e-9


@pytest.mark.parametrize("classes", [2, 4])
def test_effect_on_a_class(classes):
    x, y = samples(classes)
    names = np.array(["ant", "bee", "cat", "dog"][:classes])
    pipeline = make_pipeline(PCA(3), SVC()).fit(x, names[y])
    head = Head.of(pipeline)
    p = read(head, QUERY).components
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
    inside = CalibratedClassifierCV(make_pipeline(StandardScaler(), PCA(3), SVC()), ensemble=False).fit(x, y)
    head = Head.of(inside)
    with pytest.raises(ValueError, match="the PCA is inside a meta-estimator"):
        PCATarget(0)(read(head, QUERY))
    with pytest.raises(ValueError, match="they are inside a meta-estimator"):
        head.support_vector_effect(torch.tensor(QUERY))


@pytest.mark.parametrize(
    ("estimator", "nearest"),
    [(QuantileTransformer(n_quantiles=9), "StandardScaler"), (PowerTransformer(), "StandardScaler"), (NMF(2), "PCA")],
)
def test_the_nearest_supported_estimator_is_named(estimator, nearest):
    with pytest.raises(NoClosedFormError, match=f"The nearest that has one is {nearest}"):
        Head.of(estimator.fit(np.abs(DATA[2][0])))
