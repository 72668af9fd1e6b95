"""Heads of every row of the table, by property: values, gradients, secants, files; and odd ones."""

import copy
from pathlib import Path

import numpy as np
import pytest
import sklearn
import torch
from heads import (
    CASES,
    DATA,
    HEADS,
    QUERY,
    REDUCTIONS,
    WIDTH,
    check_gradients,
    differences,
    fitted,
    fitted_row,
    head_of,
    pulled_back,
    query_of,
    trace_of,
    values,
)
from packaging.version import Version
from problems import closed_form
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import TransformedTargetRegressor
from sklearn.cross_decomposition import PLSRegression
from sklearn.decomposition import PCA, KernelPCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.feature_selection import RFE
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge, RidgeClassifier, SGDClassifier
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, NuSVC

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError, ProbabilityTarget
from pytorch_grad_cam_pcasvm.head.elementwise import Isotonic, PerClass
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_values_are_those_of_scikit_learn(name: str, classes: int) -> None:
    row, pipeline, head, query = HEADS[name], fitted_row(name, classes), head_of(name, classes), query_of(name)
    trace = trace_of(head, query)
    if head.labels(trace).dtype.kind != "f":
        assert head.labels(trace).tolist() == pipeline.predict(query).tolist()
    else:
        assert relative(head.labels(trace), pipeline.predict(query)) < 1e-9
    if row.scores and (hasattr(pipeline, "decision_function") or not hasattr(pipeline, "classes_")):
        assert relative(head.scores(trace), values(pipeline, query)) < 1e-9
    if head.voting.calibration is not None:
        probabilities = head.voting.probabilities(trace.values[-1])
        assert relative(probabilities, pipeline.predict_proba(query)) < 1e-9
        output = HeadOutput.of(head, trace)
        assert torch.equal(ProbabilityTarget(head.classes_[1])(output), probabilities[:, 1])
        predicted = head.voting.predicted(trace.values[-1])
        assert torch.equal(ProbabilityTarget()(output), probabilities.gather(1, predicted[:, None])[:, 0])
    reductions = [n for n, part in enumerate(row.parts) if any(type(part) is type(each) for each in REDUCTIONS)]
    if reductions and reductions[-1] < len(row.parts) - 1 and "pipeline" not in name:
        components = trace.values[head.component_position]
        assert relative(components, pipeline[: reductions[-1] + 1].transform(query)) < 1e-9


@pytest.mark.parametrize(("name", "classes"), CASES)
def test_gradients_are_autograds_and_secants_add_up(name: str, classes: int) -> None:
    check_gradients(head_of(name, classes), query_of(name)[:7])


# One-vs-one machines are asked for their pairwise values: votes jump.
@pytest.mark.parametrize("name", [name for name, row in HEADS.items() if row.scores and not row.no_slope])
def test_gradients_equal_differences_of_scikit_learns_own_function(name: str) -> None:
    pipeline, query = copy.deepcopy(fitted_row(name)), query_of(name)[:3]
    if isinstance(pipeline[-1], SVC | NuSVC):
        pipeline[-1].set_params(decision_function_shape="ovo", break_ties=False)
    head = Head.of(pipeline)
    actual = pulled_back(head, trace_of(head, query), {len(head.stages): None})
    expected = differences(lambda x: values(pipeline, x), query)[:, -actual.shape[1] :]
    assert np.abs(actual.numpy() - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", HEADS)
def test_a_loaded_head_gives_bit_identical_values(name: str, tmp_path: Path) -> None:
    head, x = head_of(name), torch.tensor(query_of(name))
    head.save(tmp_path / "head.safetensors")
    loaded = Head.load(tmp_path / "head.safetensors")
    actual, expected = loaded(x), head(x)
    assert all(map(torch.equal, actual.values, expected.values))
    assert torch.equal(loaded.scores(actual), head.scores(expected))
    assert loaded.labels(actual).tolist() == head.labels(expected).tolist()
    if head.voting.calibration is not None:
        assert torch.equal(*(each.voting.probabilities(expected.values[-1]) for each in (loaded, head)))


@pytest.mark.parametrize("name", ["calibrated, sigmoid", "calibrated, isotonic ensemble"])
def test_slopes_of_probabilities_are_those_of_scikit_learn(name: str) -> None:
    """Of two classes, as scikit-learn's one-vs-one scores have votes that jump."""
    pipeline, head, query = fitted_row(name, 2), head_of(name, 2), query_of(name)
    x = torch.tensor(query).requires_grad_()
    output = HeadOutput.of(head, head(x))
    (slope,) = torch.autograd.grad(output[:, 1].sum(), x, retain_graph=True)
    assert np.abs(slope.numpy() - differences(pipeline.predict_proba, query)[:, 1]).max() < 1e-5
    # A target's gradient by the decision values, as for any callable; then the closed form.
    targets = [ProbabilityTarget(1), ProbabilityTarget(), ProbabilityTarget(0, sign="-")]
    by_features, by_decision = (
        torch.stack([torch.autograd.grad(t(output).sum(), leaf, retain_graph=True)[0] for t in targets], 1)
        for leaf in (x, output.decision)
    )
    assert relative(pulled_back(head, trace_of(head, query), {3: by_decision}), by_features) < 1e-9


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
