"""The log-ratio of the evidence: against loops, autograd and integrals, far away, and wherever targets are taken."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pairs import choose_pairs
from problems import explained
from reference import activations_of, gap, relative, with_activations
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA, KernelPCA
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, StandardScaler
from sklearn.svm import SVC, SVR, LinearSVC, NuSVC, OneClassSVM

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    LogRatioTarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    recombined,
)
from pytorch_grad_cam_pcasvm.head.decisions import KernelSVM
from pytorch_grad_cam_pcasvm.head.kernels import RBF, Linear, Polynomial, Sigmoid
from pytorch_grad_cam_pcasvm.head.log_ratio import Line, LogRatio
from pytorch_grad_cam_pcasvm.head.stage import USUAL
from pytorch_grad_cam_pcasvm.head.vote import binary, one_class, one_vs_one
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.studio.figures.blocks import caption, heading
from pytorch_grad_cam_pcasvm.targets import fix_target

WIDTH = 4


def svm(gamma, intercept, *, seed=0, count=12, width=WIDTH, classes=2, kernel=None):
    """Return an SVM with random support vectors and coefficients of both signs, as of scikit-learn."""
    rng = np.random.default_rng(seed)
    rows = classes - 1
    size = rng.exponential(1.0, (rows, count)) * rng.choice([1.0, 1e-3], (rows, count))
    of_class = np.arange(count) * classes // count
    # Row r of class c is for its decision against class r or r + 1, positive for the first of the two; for two classes
    # it is positive for the second.
    sign = np.where(np.arange(rows)[:, None] >= of_class, 1.0, -1.0) * (-1 if classes == 2 else 1)
    dual_coef = torch.tensor(sign * size)
    points = torch.tensor(rng.normal(size=(count, width)) + of_class[:, None])
    intercepts = torch.full((classes * rows // 2,), intercept, dtype=torch.float64)
    voting = binary(zero_is_second=True) if classes == 2 else one_vs_one(classes)
    return KernelSVM(kernel or RBF(gamma), points, dual_coef, intercepts, np.bincount(of_class).tolist(),
                     torch.arange(count), voting, ["ant", "bee", "cat", "dog"][:classes])  # fmt: skip


def inputs(count, *, seed=1, spread=2.0, width=WIDTH):
    return torch.tensor(np.random.default_rng(seed).normal(size=(count, width)) * spread)


def output_of(decision, x):
    head = Head([decision])
    return HeadOutput.of(head, head(x))


def loops(decision, x, index=0):
    """Return the log-ratio of a decision value at one x, and its gradient, by sums over all terms, one by one."""
    points, gamma = decision.support_vectors.numpy(), decision.kernel.gamma
    coefficients = decision._coefficients(torch.eye(decision.n_outputs).double().unsqueeze(0))[0, index].numpy()
    value, grad = 0.0, np.zeros(len(x))
    for side in (1, -1):
        terms = []
        for p, c in zip(points, coefficients, strict=True):
            if side * c > 0:
                terms.append((math.log(side * c) - gamma * sum((p - x) ** 2), 2 * gamma * (p - x)))
        if side * float(decision.intercept[index]) > 0:
            terms.append((math.log(side * float(decision.intercept[index])), np.zeros(len(x))))
        top = max(size for size, _ in terms)
        total = sum(math.exp(size - top) for size, _ in terms)
        value += side * (top + math.log(total))
        grad += side * sum(math.exp(size - top) / total * slope for size, slope in terms)
    return value, grad


# --- the value --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [0.0, 0.3, -0.3])
def test_it_has_the_sign_of_the_decision_value(intercept):
    rng = np.random.default_rng(0)
    differ = 0
    for seed in range(100):
        decision = svm(10 ** rng.uniform(-3, 1), intercept * rng.exponential(), seed=seed)
        x = inputs(8, seed=seed)
        value, _ = decision.evaluate(x)
        ratio, _ = LogRatio(decision).evaluate(x)
        assert ratio.isfinite().all()
        # Where terms cancel to rounding, and where all kernels underflow, the decision value has no sign.
        size = decision.effect(x).decision.abs().sum(-1) + abs(decision.intercept)
        known = (value.abs() > 1e-13 * size) & (value != 0)
        assert torch.equal(ratio[known].sign(), value[known].sign())
        differ += int(known.sum())
    assert differ > 735  # of 800


@pytest.mark.parametrize("intercept", [0.0, 0.4, -0.4])
@pytest.mark.parametrize("gamma", [1e-3, 0.3, 10.0])
def test_value_and_gradient_are_those_of_loops_and_autograd(gamma, intercept):
    decision = svm(gamma, intercept)
    x = inputs(7).requires_grad_()
    output = output_of(decision, x)
    for target, factor in ((LogRatioTarget("bee"), 1), (LogRatioTarget("bee", sign="-"), -1),
                           (LogRatioTarget("ant"), -1), (LogRatioTarget("bee", versus="ant"), 1)):  # fmt: skip
        value = target(output)
        (by_autograd,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        ((position, seeds),) = target.seeds(output).items()
        expected = [loops(decision, row) for row in x.detach().numpy()]
        size = 2 * gamma * (decision.support_vectors.abs().max() + x.detach().abs().max())
        assert position == 0
        assert relative(value, factor * torch.tensor([v for v, _ in expected])) < 1e-12
        assert relative(torch.stack([target(row) for row in output]), value.detach()) < 1e-12
        for found in (seeds, by_autograd):
            assert (found - factor * torch.tensor(np.array([g for _, g in expected]))).abs().max() < 1e-12 * size


def test_of_the_predicted_class_it_is_not_negative():
    output = output_of(svm(0.3, 0.0), inputs(50))
    assert {*output.labels()} == {"ant", "bee"}
    assert (LogRatioTarget()(output) >= 0).all()
    assert torch.equal(LogRatioTarget(sign="-")(output), -LogRatioTarget()(output))


@pytest.mark.parametrize("intercept", [0.0, 0.4, -0.4])
def test_far_from_every_support_vector_it_is_finite_and_the_margin_is_not_to_be_told_from_its_intercept(intercept):
    decision = svm(10.0, intercept)
    x = 100 * torch.nn.functional.normalize(inputs(5))  # gamma d^2 is 1e5
    output = output_of(decision, x)
    assert (output.decision == intercept).all()
    value, gradient = LogRatioTarget("bee")(output), LogRatioTarget("bee").seeds(output)[0]
    expected = [loops(decision, row) for row in x.numpy()]
    assert relative(value, torch.tensor([v for v, _ in expected])) < 1e-12
    assert relative(gradient, torch.tensor(np.array([g for _, g in expected]))) < 1e-12
    assert gradient.any(1).all()
    secant = LogRatioTarget("bee").seeds(output, output_of(decision, inputs(1)))[0]
    assert secant.isfinite().all()


# --- the secant -------------------------------------------------------------------------------------------------------


def integral(decision, x, x0, panels):
    """Return the mean of the gradient along the line, (N, P, B), by 16 nodes in each of many panels."""
    nodes, weights = np.polynomial.legendre.leggauss(16)
    total = torch.zeros(len(x), decision.n_outputs, x.shape[1]).double()
    stage, every = LogRatio(decision), torch.eye(decision.n_outputs).double().unsqueeze(0)
    t = ((np.arange(panels)[:, None] + (nodes + 1) / 2) / panels).ravel()
    for part, weight in zip(
        np.array_split(t, 20), np.array_split(np.tile(weights / 2 / panels, panels), 20), strict=True
    ):
        place = torch.tensor(part).reshape(-1, 1, 1)
        points = (x0 + place * (x - x0)).flatten(0, 1)
        grad = stage.pullback((points, USUAL), every)[0].unflatten(0, (len(part), -1))
        total += torch.tensordot(torch.tensor(weight), grad, 1)
    return total


LINES = [
    *choose_pairs((1e-3, 0.1, 1.0, 10.0), (1.0, 10.0), (0.0, 0.4, -1e-3)),
    (10.0, 30.0, 0.0),
    (100.0, 5.0, 0.4),
]


@pytest.mark.parametrize(("gamma", "length", "intercept"), LINES)
def test_the_secant_is_the_mean_of_the_gradient_along_the_line(gamma, length, intercept):
    decision = svm(gamma, intercept, count=30)
    x0 = inputs(2, spread=1.0)
    for start in (x0, x0[:1]):
        x = start + length * torch.nn.functional.normalize(inputs(2, seed=2))
        # Panels within which no share changes by more than a factor of exp(3).
        exponents = 2 * gamma * length * (6 + length)
        secant = LogRatio(decision).secant((x, USUAL), (start, USUAL), torch.ones(1, 1, 1).double())[0][:, 0]
        expected = integral(decision, x, start, max(25, int(exponents / 3)))[:, 0]
        size = 2 * gamma * (decision.support_vectors.norm(dim=1).max() + length)
        assert (secant - expected).abs().max() < 1e-7 * size
        value, value0 = (LogRatio(decision).evaluate(each)[0][:, 0] for each in (x, start))
        rise = (secant * (x - start)).sum(-1)
        assert ((rise - (value - value0)).abs() <= 1e-12 * (value.abs() + value0.abs() + size * length)).all()


@pytest.mark.parametrize("intercept", [0.0, 0.4])
def test_the_secant_of_a_short_line_is_the_gradient_in_its_middle(intercept):
    decision, x, one = svm(0.3, intercept), inputs(5), torch.ones(1, 1, 1).double()
    step = 1e-6 * inputs(5, seed=3)
    secant = LogRatio(decision).secant((x + step, USUAL), (x, USUAL), one)[0]
    middle = LogRatio(decision).pullback((x + step / 2, USUAL), one)[0]
    assert ((secant - middle).abs() < 1e-10 * middle.abs().amax(-1, keepdim=True)).all()


def test_the_secant_adds_up_where_the_line_is_not_integrated_well(monkeypatch):
    for number in ("_INTERVALS", "_HALVED", "_ROUNDS"):
        monkeypatch.setattr(f"pytorch_grad_cam_pcasvm.head.log_ratio.{number}", 1)
    decision, x, x0 = svm(10.0, 0.4), inputs(20), inputs(1, seed=3)
    secant = LogRatio(decision).secant((x, USUAL), (x0, USUAL), torch.ones(1, 1, 1).double())[0][:, 0]
    expected = integral(decision, x, x0, 500)[:, 0]
    assert ((secant - expected).abs() > 1e-4 * expected.abs().max()).any()
    value, value0 = (LogRatio(decision).evaluate(each)[0][:, 0] for each in (x, x0))
    rise = (secant * (x - x0)).sum(-1)
    assert ((rise - (value - value0)).abs() <= 1e-12 * (value.abs() + value0.abs())).all()


def test_many_terms_are_taken_in_blocks(monkeypatch):
    decision, x = svm(0.3, 0.4, classes=3), inputs(4)
    every, starts = torch.eye(3).double().unsqueeze(0), (inputs(1, seed=3), x + 1e-6)
    whole = [LogRatio(decision).secant((x, USUAL), (x0, USUAL), every)[0] for x0 in starts]
    monkeypatch.setattr("pytorch_grad_cam_pcasvm.head.log_ratio._AT_ONCE", 150)  # two nodes, of four rows
    for x0, expected in zip(starts, whole, strict=True):
        assert relative(LogRatio(decision).secant((x, USUAL), (x0, USUAL), every)[0], expected) < 1e-12


def test_the_errors_of_an_integral_are_known():
    start, slope = torch.tensor([[[0.0, -1.0]], [[-torch.inf, 0.5]]]).double(), torch.tensor([[3.0, 8.0]]).double()
    line = Line(start, slope, torch.tensor([[[0.3]], [[1.0]]]).double(), torch.tensor([[2.0]]).double())
    lows, widths = torch.tensor([0.0, 0.25, 0.5]).double().expand(2, 1, 3), torch.tensor([0.25, 0.25, 0.5]).double()
    assert (line._bound_errors(lows, widths) < 1e-9).all()
    steep = Line(start, 1e3 * slope, line.intercept, line.bend)
    assert (steep._bound_errors(lows, widths)[..., 0] > 0.1).all()


# --- classes ----------------------------------------------------------------------------------------------------------


def test_of_one_vs_one_a_class_has_the_sum_of_its_pairs():
    decision, x = svm(0.7, 0.3, classes=4, count=21), inputs(6)
    output = output_of(decision, x)
    pairs = torch.tensor([[loops(decision, row, pair)[0] for pair in range(6)] for row in x.numpy()])
    order = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    labels = decision.classes
    for c, label in enumerate(labels):
        signs = torch.tensor([(a == c) - (b == c) for a, b in order]).double()
        assert relative(LogRatioTarget(label)(output), (pairs * signs).sum(1)) < 1e-12
    for number, (a, b) in enumerate(order):
        assert relative(LogRatioTarget(labels[a], versus=labels[b])(output), pairs[:, number]) < 1e-12
        assert relative(LogRatioTarget(labels[b], versus=labels[a])(output), -pairs[:, number]) < 1e-12
    for target in (LogRatioTarget(), LogRatioTarget(versus="runner-up"), LogRatioTarget("cat", versus="runner-up")):
        named = [fix_target(target, output.rows([n])) for n in range(6)]
        assert all(isinstance(each, LogRatioTarget) and each.category in labels for each in named)
        expected = torch.stack([each(row) for each, row in zip(named, output, strict=True)])
        assert relative(target(output), expected) < 1e-12
        (seeds,) = target.seeds(output).values()
        rows = torch.cat([each.seeds(output.rows([n]))[0] for n, each in enumerate(named)])
        assert relative(seeds, rows) < 1e-12


def evidence(estimator, x, index=0):
    """Return the log-ratio of a fitted SVC of two classes, or OneClassSVM, for its positive side."""
    kernel = -estimator._gamma * ((x[:, None] - estimator.support_vectors_) ** 2).sum(-1)
    terms = np.column_stack([estimator.dual_coef_[0] * np.exp(kernel), np.full(len(x), estimator.intercept_[0])])
    return torch.tensor(np.log(terms.clip(min=0).sum(1)) - np.log((-terms).clip(min=0).sum(1)))


FEATURES = np.random.default_rng(0).normal(size=(60, WIDTH))
LABELS = np.array(["ant", "bee", "cat"])[np.arange(60) % 3]
FEATURES[np.arange(60), np.arange(60) % 3] += 2.0


@pytest.mark.parametrize("estimator", [SVC(gamma=1.0), NuSVC(gamma=0.3), SVC(C=0.1, class_weight={"ant": 5.0})])
def test_of_two_classes(estimator):
    two = LABELS != "cat"
    estimator.fit(FEATURES[two], LABELS[two])
    head, x = Head.of(estimator), inputs(7)
    output = HeadOutput.of(head, head(x))
    expected = evidence(estimator, x.numpy())
    assert relative(LogRatioTarget("bee")(output), expected) < 1e-10
    assert relative(LogRatioTarget()(output), expected.abs()) < 1e-10
    assert np.array_equal(np.where(expected > 0, "bee", "ant"), estimator.predict(x.numpy()))


def test_of_one_class_the_evidence_is_compared_with_rho():
    estimator = OneClassSVM(gamma=0.5, nu=0.2).fit(FEATURES)
    head, x = Head.of(estimator), inputs(7, spread=3.0)
    output = HeadOutput.of(head, head(x))
    expected = evidence(estimator, x.numpy())
    assert relative(LogRatioTarget()(output), expected) < 1e-10
    assert torch.equal(LogRatioTarget(sign="-")(output), -LogRatioTarget()(output))
    for baseline in (None, HeadOutput.of(head, head(inputs(1, seed=4)))):
        (seeds,) = LogRatioTarget().seeds(output, baseline).values()
        assert seeds.isfinite().all()
        assert seeds.any(1).all()


def test_on_a_support_vector_that_is_all_the_evidence_there_is_no_gradient():
    estimator = OneClassSVM(gamma=1e3, nu=0.2).fit(FEATURES)
    head = Head.of(estimator)
    x = torch.tensor(estimator.support_vectors_[[0, 1, 0]] + [[0.0], [0.0], [1.0]])
    output = HeadOutput.of(head, head(x.float()))  # known to single precision
    assert not torch.equal(output.features, x)
    assert LogRatioTarget().seeds(output)[0].any(1).tolist() == [False, False, True]
    assert "it lies on a support vector" in LogRatioTarget().why_blank(output[0])
    near = HeadOutput.of(head, head(x[:1] + 1e-9))  # known to double precision
    assert LogRatioTarget().seeds(near)[0].any()


ENSEMBLES = {
    "one vs rest": OneVsRestClassifier(SVC(gamma=0.5)),
    "one vs one": OneVsOneClassifier(make_pipeline(Normalizer(), SVC(gamma=2.0))),
    "scaled": OneVsRestClassifier(make_pipeline(StandardScaler(), Normalizer(), SVC(gamma=2.0))),
    "calibrated": CalibratedClassifierCV(SVC(gamma=0.5), ensemble=False),
    "folds": CalibratedClassifierCV(SVC(gamma=0.5), cv=2),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_of_ensembles(name):
    estimator = ENSEMBLES[name].fit(FEATURES, LABELS)
    head = Head.of(estimator)
    x, x0 = inputs(5).requires_grad_(), inputs(1, seed=4)
    output, baseline = (HeadOutput.of(head, head(each)) for each in (x, x0))
    for target in (LogRatioTarget("bee"), LogRatioTarget("bee", versus="ant"), LogRatioTarget()):
        value = target(output)
        (by_autograd,) = torch.autograd.grad(value.sum(), x, retain_graph=True)
        assert relative(target.seeds(output)[0].detach(), by_autograd) < 1e-10
        secant = target.seeds(output, baseline)[0].detach()
        rise = value - target(baseline) if target.category else None
        if rise is not None:
            assert relative((secant * (x - x0)).sum(-1).detach(), rise.detach()) < 1e-10
    if name in ("one vs rest", "scaled"):
        z = [each[:-1].transform(x.detach().numpy()) if name == "scaled" else x.detach().numpy()
             for each in estimator.estimators_]  # fmt: skip
        members = [each[-1] if name == "scaled" else each for each in estimator.estimators_]
        each = torch.stack([evidence(member, q) for member, q in zip(members, z, strict=True)], 1)
        assert relative(LogRatioTarget("bee")(output).detach(), each[:, 1]) < 1e-10
        assert relative(LogRatioTarget("bee", versus="ant")(output).detach(), each[:, 1] - each[:, 0]) < 1e-10
    if name == "one vs one":  # of (ant, bee), (ant, cat), (bee, cat), each positive for the second
        ratios = [evidence(each[-1], each[:-1].transform(x.detach().numpy())) for each in estimator.estimators_]
        assert relative(LogRatioTarget("bee")(output).detach(), ratios[0] - ratios[2]) < 1e-10


def test_of_ensembles_whose_gradients_are_too_small_for_a_float():
    # Each pair has a reduction of its own, which is not brought forward.
    estimator = OneVsOneClassifier(make_pipeline(KernelPCA(3, kernel="rbf", gamma=0.5), SVC())).fit(FEATURES, LABELS)
    head, x = Head.of(estimator), (15 * torch.nn.functional.normalize(inputs(4))).requires_grad_()
    output = HeadOutput.of(head, head(x))
    target = LogRatioTarget("bee")
    (expected,) = torch.autograd.grad(target(output).sum(), x)
    seeds = {position: seed.detach().unsqueeze(1) for position, seed in target.seeds(output).items()}
    grad, log_scale = head.pullback(output.head_trace, seeds)
    found = (grad * log_scale.exp().unsqueeze(-1)).squeeze(1).detach()
    assert (expected.abs().amax(1) < 1e-20).all()
    for one, other in zip(found, expected, strict=True):
        assert relative(1e30 * one, 1e30 * other) < 1e-8


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [Linear(), Polynomial(0.5, 2, 1.0), Sigmoid(0.1, 0.0)])
def test_kernels_that_may_be_negative_are_refused(kernel):
    output = output_of(svm(1.0, 0.2, kernel=kernel), inputs(2))
    for call in (lambda: LogRatioTarget()(output), lambda: LogRatioTarget().seeds(output)):
        with pytest.raises(ValueError, match=f"positive everywhere.*is {type(kernel).__name__.lower()}: use SVMTarget"):
            call()


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (LinearSVC(), "decides by a LinearDecision, which does not saturate: use SVMTarget"),
        (OneVsRestClassifier(LogisticRegression()), "decides by a LinearDecision"),
        (OneVsRestClassifier(SVC(kernel="linear")), "is linear: use SVMTarget"),
        (SVR(), "ends with a regressor: use SVMTarget"),
        (PCA(2), "needs a head with an SVM, but this one has none: use PCATarget"),
    ],
)
def test_other_heads_are_refused(estimator, message):
    head = Head.of(estimator.fit(FEATURES, np.arange(60.0) if isinstance(estimator, SVR) else LABELS))
    with pytest.raises(ValueError, match=message):
        LogRatioTarget()(HeadOutput.of(head, head(inputs(2))))


@pytest.mark.parametrize("intercept", [0.0, 0.5])
def test_evidence_of_one_sign_is_refused(intercept):
    decision = svm(1.0, intercept)
    decision = KernelSVM(decision.kernel, decision.support_vectors, decision.dual_coef.abs(), decision.intercept, [12],
                         decision.support, one_class(), None)  # fmt: skip
    with pytest.raises(ValueError, match=r"needs terms for and against, .* speak for one side: use SVMTarget"):
        LogRatioTarget()(output_of(decision, inputs(2)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LogRatioTarget("a", versus="a"), ValueError, "'a' cannot be compared with itself"),
        (lambda: LogRatioTarget("a", sign="x"), ValueError, "sign must be"),
        (lambda: LogRatioTarget(["a"]), TypeError, "a class label must be one value of classes_"),
        (lambda: LogRatioTarget("fox")(output_of(svm(1.0, 0.2), inputs(2))), ValueError, "'fox' is not a class"),
        (lambda: LogRatioTarget()(torch.ones(3)), ValueError, r"LogRatioTarget\(.*\) needs the output of a PCASVMNet"),
    ],
)
def test_bad_targets_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- maps -------------------------------------------------------------------------------------------------------------

TARGETS = [
    LogRatioTarget(), LogRatioTarget("bee"), LogRatioTarget("ant", versus="bee"), LogRatioTarget(sign="-"),
    LogRatioTarget("bee", versus="runner-up"), LogRatioTarget("ant", versus="others"),
]  # fmt: skip
CASES = [("pooled", "rbf", 3), ("gelu", "kernel pca", 2), ("relu", "no reduction", 3), ("relu", "calibrated", 2)]


@pytest.mark.parametrize(("path", "head", "classes"), CASES)
def test_contributions_add_up(path, head, classes):
    p = explained(path, head, classes)
    neutral = ContributionCAM(p.net, [p.layer]).explain(p.x, TARGETS)
    assert gap(neutral) < 1e-8
    if path == "pooled":
        assert relative(neutral.maps.sum((2, 3)), neutral.values) < 1e-8
    maps = ContributionCAM(p.net, [p.layer], baseline="zero").explain(p.x, TARGETS)
    assert gap(maps) < 1e-8
    output = p.net(p.x)
    assert relative(maps.values, torch.stack([target(output).detach() for target in TARGETS], 1)) < 1e-12
    at_zeros = with_activations(p.net, p.layer, p.x, torch.zeros_like(activations_of(p.net, p.layer, p.x)))
    for k, target in enumerate(TARGETS):
        named = [fix_target(target, output.rows([n])) for n in range(len(p.x))]
        expected = torch.stack([each(row).detach() for each, row in zip(named, at_zeros, strict=True)])
        assert relative(maps.baseline_values[:, k], expected) < 1e-8


@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
@pytest.mark.parametrize("head", ["rbf", "whitened", "kernel pca"])
def test_recombined_maps_are_the_same(head, method):
    p = explained("gelu", head)
    cam = method(p.net, [p.layer])
    expected = cam.explain(p.x, TARGETS)
    found = recombined(cam.explain(p.x), p.fitted, TARGETS)
    assert relative(found.maps * found.log_scale.exp()[..., None, None],
                    expected.maps * expected.log_scale.exp()[..., None, None]) < 1e-8  # fmt: skip
    assert relative(found.values, expected.values) < 1e-10


@pytest.mark.parametrize("method", [ShapCAM, ClosedFormAblationCAM])
def test_what_is_left_out_keeps_the_class_that_is_explained(method):
    p = explained("pooled", "rbf")
    cam = method(p.net, [p.layer])
    output = p.net(p.x)
    targets = [LogRatioTarget(), LogRatioTarget(versus="runner-up")]
    found = cam.explain(p.x, targets)
    for n, each in enumerate(output.rows(slice(None))):
        named = [fix_target(target, output.rows([n])) for target in targets]
        assert relative(found[n].maps, cam.explain(p.x[n : n + 1], named).maps) < 1e-10
        assert relative(found.values[n], torch.stack([target(each) for target in named]).detach()) < 1e-10
    if method is ShapCAM:
        assert gap(found) < 1e-10


def test_it_is_saved_and_loaded(tmp_path):
    p = explained("gelu", "rbf")
    targets = [*TARGETS, LogRatioTarget(np.str_("cat"), versus=["ant", "bee"])]
    maps = LIFTCAM(p.net, [p.layer]).explain(p.x, targets)
    maps.save(tmp_path / "maps.safetensors")
    again = SignedMaps.load(tmp_path / "maps.safetensors")
    assert list(again.targets) == targets
    assert hash(again.targets[-1]) == hash(targets[-1])
    assert repr(targets[1]) == "LogRatioTarget('bee')"
    assert replace(targets[0], category="bee") == targets[1] != SVMTarget("bee")


def test_figures_say_what_it_is():
    p = explained("gelu", "rbf")
    maps = ContributionCAM(p.net, [p.layer]).explain(p.x, [LogRatioTarget("bee", versus="ant")])
    assert heading(maps.targets[0], maps.output) == "log-ratio"
    assert caption(maps, 0, 0, None).startswith("bee / ant: ")


def test_against_the_predicted_class_stands_the_strongest_other_one():
    p = explained("gelu", "rbf")
    label = p.net.predict(p.x)[0]
    cam, scores = ContributionCAM(p.net, [p.layer]), p.net(p.x[:1])[0]
    strongest = max((name for name in p.labels if name != label), key=lambda name: scores[p.labels.index(name)])
    one, other = (cam.explain(p.x[:1], [target]) for target in (
        LogRatioTarget(versus=str(label)), LogRatioTarget(strongest, versus=str(label))))  # fmt: skip
    torch.testing.assert_close(one.maps, other.maps)
    assert caption(one, 0, 0, None).startswith(f"{strongest} / {label}: ")


def test_the_secant_of_nothing_is_the_gradient():
    for intercept in (0.0, 0.4):
        decision, x = svm(2.0, intercept), inputs(5)
        gradient = LogRatio(decision).pullback((x, USUAL), torch.ones(1, 1, 1).double())[0]
        for step, tolerance in ((0.0, 1e-13), (1e-12, 1e-9)):
            secant = LogRatio(decision).secant((x, USUAL), (x + step, USUAL), torch.ones(1, 1, 1).double())[0]
            assert relative(secant, gradient) < tolerance
