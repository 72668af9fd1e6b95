"""Secants of the head: what adds up, against differences, mpmath, and integrals along the line; and forward AD."""

import mpmath
import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwd
from heads import DATA, NEAR, QUERY, WIDTH, added, by_autograd, fitted, head_of, of_seeds, pulled_back, trace_of
from pairs import choose_pairs
from reference import relative
from sklearn.decomposition import PCA, IncrementalPCA, KernelPCA, TruncatedSVD
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, Normalizer, RobustScaler, StandardScaler
from sklearn.svm import SVC, LinearSVC
from test_head import Arcsinh

from pytorch_grad_cam_pcasvm import Head, NoClosedFormError
from pytorch_grad_cam_pcasvm.head import HeadTrace
from pytorch_grad_cam_pcasvm.head.decisions import Ensemble, KernelSVM, LinearDecision
from pytorch_grad_cam_pcasvm.head.distances import Neighbours, Quadratic
from pytorch_grad_cam_pcasvm.head.elementwise import Elementwise, Power
from pytorch_grad_cam_pcasvm.head.kernels import (
    RBF,
    At,
    Linear,
    Polynomial,
    Sigmoid,
    _along_a_line,
    squared_distances,
)
from pytorch_grad_cam_pcasvm.head.stage import pulled_through
from pytorch_grad_cam_pcasvm.head.stages import (
    Affine,
    Chain,
    FourierFeatures,
    KernelMap,
    Normalise,
    Projection,
    Scale,
    Select,
    Union,
)
from pytorch_grad_cam_pcasvm.head.vote import one_vs_rest, regression
from pytorch_grad_cam_pcasvm.rules.rule import quotient


def rand(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


KERNELS = {
    "linear": Linear(),
    "rbf": RBF(0.3),
    "rbf narrow": RBF(20.0),
    "rbf flat": RBF(0.0),
    "poly": Polynomial(0.4, 3, 0.7),
    "poly 1": Polynomial(0.4, 1, 0.7),
    "poly 4": Polynomial(-0.4, 4.0, 0.1),
    "poly 0": Polynomial(0.4, 0, 0.7),
    "poly 2.5": Polynomial(0.1, 2.5, 9.0),
    "sigmoid": Sigmoid(0.2, -0.1),
    "sigmoid steep": Sigmoid(-4.0, 0.5),
}


def machine(kernel, classes=1):
    votes = regression() if classes == 1 else one_vs_rest(classes)
    rows = max(1, classes - 1)
    n_pairs = classes * rows // 2 or 1
    return KernelSVM(kernel, rand(6, 4), rand(rows, 6, seed=1), rand(n_pairs, seed=2), [6 // classes] * classes,
                     torch.arange(6), votes, None)  # fmt: skip


def scale(limits=None):
    return Scale(rand(4, seed=4), rand(4, seed=5).abs() + 0.5, rand(4, seed=6), limits)


def chain():
    return Chain([scale((-1, 1)), Normalise("l2"), machine(RBF(0.5))])


STAGES = {
    **{f"machine, {name}": machine(kernel) for name, kernel in KERNELS.items()},
    **{f"pairs, {name}": machine(KERNELS[name], 3) for name in ("rbf", "linear")},
    **{f"map, {name}": KernelMap(KERNELS[name], rand(6, 4), rand(6, 3, seed=3), rand(3), True) for name in KERNELS},
    "scale": scale(),
    "clip": scale((-0.5, 0.7)),
    **{f"normalise {norm}": Normalise(norm) for norm in ("l1", "l2", "max")},
    "projection": Projection(rand(3, 4), rand(4), rand(3).abs() + 0.5),
    "select": Select(torch.tensor([2, 0]), 4),
    "fourier": FourierFeatures(rand(4, 7), rand(7), 0.3),
    "linear decision": LinearDecision(rand(3, 4), rand(3), one_vs_rest(3), None),
    "chain": chain(),
    **{f"elementwise {f}": Elementwise(f) for f in ("absolute", "arctan", "logistic", "relu", "square", "tanh")},
    "powers": Power(torch.tensor([0.0, 2.0, -0.7, 1.3]).double(), False),
    "quadratic": Quadratic(rand(3, 4), rand(3, 4, 2, seed=1), rand(3, seed=2)),
    "quadratic, diagonal": Quadratic(rand(3, 4), rand(3, 4, seed=1), rand(3, seed=2)),
    "neighbours": Neighbours(rand(9, 4), [5, 4], [2, 2], 3),
    "affine": Affine(rand(3, 4), rand(3)),
    "union": Union([Chain([scale(), Elementwise("tanh")]), Chain([Select(torch.tensor([1, 3]), 4)])]),
    "linear chain": Chain([scale(), Projection(rand(3, 4), rand(4), torch.ones(3).double())]),
    "ensemble": Ensemble([chain(), Chain([machine(Sigmoid(0.2, 0.1))])], -1.0, one_vs_rest(2), None),
}  # fmt: skip
LINEAR = {"machine, linear", "pairs, linear", "map, linear", "scale", "projection", "select", "linear decision",
          "linear chain", "affine"}  # fmt: skip
X = rand(5, 4, seed=8)
BASELINES = {"one row": rand(1, 4, seed=9), "N rows": rand(5, 4, seed=9), "zeros": torch.zeros(1, 4).double()}


def through(stage, x, x0, seeds):
    """Return ``seeds @ J`` and what it has to add up to, ``seeds (y - y0)``."""
    (y, saved), (y0, saved0) = stage.evaluate(x), stage.evaluate(x0)
    grad, log_scale = pulled_through(stage, (seeds, None), saved, saved0)
    grad = grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)
    return grad.expand(len(x), -1, -1), (seeds * (y - y0).unsqueeze(1)).sum(-1)


def seeds_for(stage, rows):
    return rand(rows, 2, stage.evaluate(X)[0].shape[1], seed=7)


@pytest.mark.parametrize(("name", "baseline", "rows"), choose_pairs([*STAGES], [*BASELINES], [1, 5]))
def test_a_secant_adds_up(name, baseline, rows):
    stage, x0 = STAGES[name], BASELINES[baseline]
    seeds = seeds_for(stage, rows)
    grad, expected = through(stage, X, x0, seeds)
    assert bool(expected.any()) is not name.endswith(("poly 0", "rbf flat"))
    # An offset, or a value at each end, rounds differences that are smaller.
    size = (seeds.abs() * (stage.evaluate(X)[0].abs() + stage.evaluate(x0)[0].abs()).unsqueeze(1)).sum(-1)
    error = added(grad, X, x0) - expected
    assert error.abs().max() <= 1e-10 * expected.abs().max() + 1e-15 * size.max()


@pytest.mark.parametrize("name", STAGES)
def test_a_secant_of_nothing_is_the_derivative(name):
    stage = STAGES[name]
    assert stage.linear is (name in LINEAR)
    seeds = seeds_for(stage, 5)
    grad, log_scale = stage.pullback(stage.evaluate(X)[1], seeds)
    expected = grad if log_scale is None else grad * log_scale.exp().unsqueeze(-1)
    for x0, tolerance in ((X, 1e-13), (X + 1e-12, 1e-9)):
        actual = through(stage, X, x0, seeds)[0]
        if expected.any():
            assert relative(actual, expected) < tolerance
        else:
            assert not actual.any()


def test_pooling_of_the_largest_takes_one_place_of_which_the_other_is_not_larger():
    stage = Normalise("max")
    x, x0 = (
        torch.tensor([[1.0, -4.0, 2.0], [1.0, -4.0, 2.0]]).double(),
        torch.tensor([[3.0, 3.0, 0], [-9.0, 3, 3]]).double(),
    )
    (_, (_, _, norm)), (_, (_, _, norm0)) = stage.evaluate(x), stage.evaluate(x0)
    slope = stage._norm_secant(x, x0, norm, norm0)
    assert slope.tolist() == [[0, -1 / 7, 0], [-0.5, 0, 0]]


TINY = 5 * np.finfo(float).eps  # scikit-learn takes such a row for one of zeros


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
@pytest.mark.parametrize(
    ("x", "x0"),
    [
        ([0, 0, 0, 0], [1, -2, 0.5, 0]),
        ([1, -2, 0.5, 0], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([TINY, 0, 0, 0], [1, -2, 0.5, 0]),
        ([1, -2, 0.5, 0], [0, TINY, 0, 0]),
        ([TINY, 0, 0, 0], [0, TINY, 0, 0]),
        ([TINY, 0, 0, 0], [0, 0, 3 * TINY, 0]),
        ([1e-9, 0, 2e-9, 0], [0, TINY, 0, 0]),
        ([1, -2, 0.5, 0], [-1, 2, -0.5, 0]),
        ([1, -2, 0.5, 0], [-2, 1, -0.5, 0]),
        ([1, 1, -1, 1], [1, 1, 1, 1]),
        # At the limit itself a row is divided by its norm.
        ([2 * TINY, 0, 0, 0], [0, 0, 6 * TINY, 0]),
        ([0, 0, 6 * TINY, 0], [2 * TINY, 0, 0, 0]),
    ],
)
def test_normalised_rows_of_zeros_add_up(norm, x, x0):
    x, x0 = (torch.tensor([row], dtype=torch.float64) for row in (x, x0))
    grad, expected = through(Normalise(norm), x, x0, torch.eye(4).double()[None])
    assert (added(grad, x, x0) - expected).abs().max() <= 1e-12 * expected.abs().max()
    if not x0.any() and x.any():  # all of the difference is x's own, in its own places
        assert relative(grad[0], torch.eye(4).double() * (expected.norm() / x.norm())) < 1e-12


def test_powers_at_0_have_the_derivatives_of_both_sides():
    exponents = torch.tensor([0.0, 0.5, 1.0, 1.7, 2.0, 3.0]).double()
    stage, x = Power(exponents, False), torch.zeros(2, 6).double().requires_grad_()
    (first,) = torch.autograd.grad(stage.function(x).sum(), x, create_graph=True)
    assert torch.equal(first, torch.ones(2, 6).double())
    # Of (1 + x)^(e - 1) on the right, and of (1 - x)^(1 - e) on the left.
    for slope in (first, stage.slope(x)):
        (second,) = torch.autograd.grad(slope.sum(), x)
        torch.testing.assert_close(second, (exponents - 1).expand(2, 6), rtol=1e-12, atol=1e-12)


def test_the_quotient_of_two_points_that_meet():
    x = torch.tensor([1.0, 1.0, 1.0, -1.0, 0.0]).double()
    x0 = x + torch.tensor([0.0, 1e-16, 1e-15, 3.0, 0.0]).double()
    exact = quotient(x, x.exp(), x0, x0.exp(), x.exp())
    assert relative(exact, torch.tensor([np.e, np.e, np.e, (np.exp(2) - np.exp(-1)) / 3, 1.0])) < 1e-14


# --- the kernels, by other means ------------------------------------------------------------------------------------


def secant(kernel, x, x0, points, coefficients):
    x, x0, points, coefficients = (torch.as_tensor(np.asarray(a)).double() for a in (x, x0, points, coefficients))
    at, at0 = (At(each, kernel.argument(each, points)) for each in (x, x0))
    return kernel.secant(at, at0, points, coefficients)


FORMULAS = {
    RBF: lambda k, z, x, p: torch.exp(-k.gamma * ((x.unsqueeze(-2) - p) ** 2).sum(-1)),
    Polynomial: lambda k, z, x, p: (k.gamma * z + k.coef0) ** k.degree,
    Sigmoid: lambda k, z, x, p: torch.tanh(k.gamma * z + k.coef0),
    Linear: lambda k, z, x, p: z,
}


@pytest.mark.parametrize("name", [name for name in KERNELS if name not in ("poly 0", "rbf flat")])
@pytest.mark.parametrize(("rows", "size"), [(1, 4), (5, 4), (5, 1)])
def test_a_secant_is_the_gradients_integral_along_the_line(name, rows, size):
    kernel, x = KERNELS[name], X[:, :size]
    points, coefficients, x0 = rand(6, size, seed=1), rand(5, 3, 6, seed=2), rand(rows, size, seed=3)
    nodes, weights = (torch.tensor(each) for each in np.polynomial.legendre.leggauss(400))
    at = (x0 + (1 + nodes).reshape(-1, 1, 1) / 2 * (x - x0)).requires_grad_()
    values = FORMULAS[type(kernel)](kernel, at @ points.T, at, points)
    sums = torch.einsum("n,nri,rki->k", weights / 2, values, coefficients)
    expected = torch.stack([torch.autograd.grad(sums[k], at, retain_graph=True)[0].sum(0) for k in range(3)], 1)
    actual, log_scale = secant(kernel, x, x0, points, coefficients)
    assert relative(actual * log_scale.exp().unsqueeze(-1), expected) < 1e-10


def exact_rbf(gamma, x, x0, points, coefficients):
    """Return the integral of the gradient, from its closed form with 60 digits."""
    m = mpmath.mpf
    d = [m(a) - m(b) for a, b in zip(x, x0, strict=True)]
    c = sum(t * t for t in d)
    total = [m(0)] * len(d)
    for coefficient, point in zip(coefficients, points, strict=True):
        towards = [m(a) - m(b) for a, b in zip(point, x0, strict=True)]
        a, b = sum(t * t for t in towards), sum(s * t for s, t in zip(towards, d, strict=True))
        s = mpmath.sqrt(gamma * c)
        low, high = -s * b / c, s * (1 - b / c)
        if low > 0:
            difference = mpmath.erfc(low) - mpmath.erfc(high)
        elif high < 0:
            difference = mpmath.erfc(-high) - mpmath.erfc(-low)
        else:
            difference = mpmath.erf(high) - mpmath.erf(low)
        i0 = mpmath.exp(-gamma * (a - b * b / c)) * mpmath.sqrt(mpmath.pi) / (2 * s) * difference
        i1 = b / c * i0 + (mpmath.exp(-gamma * a) - mpmath.exp(-gamma * (a - 2 * b + c))) / (2 * gamma * c)
        factor = 2 * gamma * m(coefficient)
        total = [t + factor * (u * i0 - v * i1) for t, u, v in zip(total, towards, d, strict=True)]
    return total


def distance_to_exact(gamma, x, x0, points, coefficients):
    grad, log_scale = secant(RBF(gamma), [x], [x0], points, [[coefficients]])
    assert log_scale.isfinite().all()
    with mpmath.workdps(60):
        expected = exact_rbf(mpmath.mpf(gamma), x, x0, points, coefficients)
        factor = mpmath.exp(mpmath.mpf(float(log_scale)))
        error = [mpmath.mpf(float(g)) * factor - e for g, e in zip(grad[0, 0], expected, strict=True)]
        return float(mpmath.sqrt(sum(e * e for e in error)) / mpmath.sqrt(sum(e * e for e in expected)))


@pytest.mark.parametrize("exponent", [-8, -3, -1, 0, 1, 2, 6])
def test_rbf_against_mpmath(exponent):
    """Points before, beside and beyond the line; the bound is what exp(-z) makes of its argument's rounding."""
    gamma, rng = 0.7, np.random.default_rng(exponent + 8)
    d = rng.normal(size=4)
    d *= np.sqrt(10.0**exponent / gamma) / np.linalg.norm(d)
    x0 = rng.normal(size=4)
    worst = 0.0
    for along in (-1, -0.3, -1e-3, 0, 0.01, 0.3, 0.5, 0.7, 1, 1.2, 2):
        for off in (1e-3, 0.1, 1, 10, 100):
            side = rng.normal(size=4)
            side -= side @ d / (d @ d) * d
            side *= off / np.sqrt(gamma) / np.linalg.norm(side)
            worst = max(worst, distance_to_exact(gamma, x0 + d, x0, [x0 + along * d + side], [1.3]))
    assert worst < (1e-11 if exponent <= 2 else 1e-9)


@pytest.mark.parametrize("along", [-30.0, -1.0, 3.0])
def test_rbf_on_the_line_itself(along):
    """Before and behind it: in between, what is left of both sides' parts is rounding where both ends are far."""
    x0, d = np.array([0.3, -0.2, 1.0]), np.array([1.0, 2.0, -1.0])
    assert distance_to_exact(0.7, x0 + d, x0, [x0 + along * d], [-1.0]) < 1e-11


def test_rounding_lifts_no_kernel_on_a_long_line_above_its_mean_and_moves_no_centre_off_it():
    """In single precision, of points on the line, whose distances at its ends are large, and cancel at its middle."""
    start, step, places = rand(40, 6).float(), 1e5 * rand(40, 6, seed=1).float(), rand(40, 1, seed=2).float()
    points = start + step * places
    squared = [100 * squared_distances(x, points) for x in (start, start + step)]
    along, length = 100 * ((points - start[:, None]) * step[:, None]).sum(-1), 100 * step.square().sum(-1, keepdim=True)
    log_mean, centre = _along_a_line(torch.minimum(*squared), along, length)
    assert (log_mean <= (torch.pi / length).log() / 2 + 1e-5).all()
    assert ((centre >= 0) & (centre <= 1)).all()


def test_rbf_far_from_every_support_vector():
    gamma, rng = 0.5, np.random.default_rng(0)
    points, coefficients = rng.normal(size=(6, 3)), rng.normal(size=6)
    for scale in (100, 140, 1000):  # gamma d^2 from 5e3 to 5e5
        x, x0 = scale * np.array([1.0, 0.5, -0.5]), scale * np.array([0.8, 0.9, -0.4])
        log_scale = secant(RBF(gamma), [x], [x0], points, [[coefficients]])[1]
        assert float(log_scale) < -745
        assert distance_to_exact(gamma, x, x0, points, coefficients) < 1e-9
    # A machine without support vectors.
    grad, log_scale = secant(RBF(gamma), [x], [x0], points[:0], [[coefficients[:0]]])
    assert grad.tolist() == [[[0, 0, 0]]]
    assert log_scale.tolist() == [[0]]


def test_rbf_far_from_the_origin():
    """Products of points that are far from 0 would cancel."""
    coefficients = rand(5, 2, 6)
    # Multiples of 2^-20, so that the shift is exact.
    points, x, x0 = ((2**20 * each).round() / 2**20 for each in (rand(6, 4, seed=1), X, rand(1, 4, seed=3)))
    near, far = (secant(RBF(0.4), x + s, x0 + s, points + s, coefficients)[0] for s in (0.0, 2.0**20))
    assert relative(far, near) < 1e-12


@pytest.mark.parametrize("z", [1e-9, 0.3, 30.0, 500.0, -500.0])
@pytest.mark.parametrize("z0", [0.0, 0.3, 499.0, -700.0])
def test_sigmoid_where_tanh_saturates(z, z0):
    points = np.array([[1.0, 0.5]])
    x, x0 = np.array([[z, 0.0]]), np.array([[z0, 0.0]])
    grad, log_scale = secant(Sigmoid(1.0, 0.0), x, x0, points, [[[1.0]]])
    with mpmath.workdps(1000):
        a, b = mpmath.mpf(z), mpmath.mpf(z0)
        slope = (mpmath.tanh(a) - mpmath.tanh(b)) / (a - b) if a != b else 1 / mpmath.cosh(a) ** 2
        expected = float(mpmath.log(slope))
    assert abs(float(grad[0, 0, 0].log() + log_scale) - expected) < 1e-12 * max(1.0, abs(expected))
    assert float(grad[0, 0, 1] / grad[0, 0, 0]) == pytest.approx(0.5, rel=1e-12)


# --- whole heads ----------------------------------------------------------------------------------------------------

# One for each kind of stage.
CURVED = [
    *(f"SVC {kernel}" for kernel in ("linear", "rbf", "poly", "sigmoid")),
    "kernel pca",
    "fractional degree",
    "Nystroem(n_components=20, random_state=0), LinearSVC",
    "RBFSampler(gamma=0.1, n_components=30, random_state=0), LinearSVC",
    "normalised",
    "Normalizer(norm='max'), PCA, SVC",
    "one class",
    "clipped members",
    "several, OneVsRest pipeline",
    "several, OneVsOne SVC",
    "bare QuadraticDiscriminantAnalysis(reg_param=0.1)",
    "perceptron",
    "stack of components",
]


def test_a_stage_without_a_secant_is_refused():
    class Double(Arcsinh):
        linear = True

        def evaluate(self, x):
            return 2 * x, None

        def pullback(self, saved, grad):
            return 2 * grad, None

    class Asinh(Arcsinh):
        def secant(self, saved, saved0, grad):
            slope = quotient(saved, saved.asinh(), saved0, saved0.asinh(), 1 / (1 + saved**2).sqrt())
            return grad * slope.unsqueeze(1), None

    class OfClipping(Scale):
        def pullback(self, saved, grad):
            return super().pullback(saved, grad)

    scaler, pca = head_of("SVC linear").stages[:2]
    trace, baseline = (trace_of(Head([scaler, Arcsinh(), pca]), x) for x in (QUERY, NEAR))
    with pytest.raises(NoClosedFormError, match=r"Arcsinh has no secant.*define secant.*or set linear = True"):
        Head([scaler, Arcsinh(), pca]).pullback(trace, {3: None}, baseline)
    assert Head([scaler, Arcsinh(), pca]).pullback(trace, {1: None}, baseline)[0].any()
    # One that knows no baseline is not taken for one that does: the class above it may compute something else.
    clipping = Head([OfClipping(*(torch.ones(WIDTH).double(),) * 3, (-0.5, 0.5)), pca])
    trace, baseline = (trace_of(clipping, x) for x in (QUERY, NEAR))
    with pytest.raises(NoClosedFormError, match="OfClipping has no secant"):
        clipping.pullback(trace, {2: None}, baseline)
    for own, until in ((Double(), 3), (Asinh(), 1)):
        head = Head([scaler, own, pca])
        assert head.linear_until == until
        trace, baseline = trace_of(head, QUERY), trace_of(head, NEAR[:1])
        grad = pulled_back(head, trace, {3: None}, baseline)
        expected = trace.values[3] - baseline.values[3]
        assert relative(added(grad, trace.values[0], baseline.values[0]), expected) < 1e-12


@pytest.mark.parametrize("which", ["trace", "baseline"])
def test_a_hook_that_changes_something_has_no_secant(which):
    head = Head.of(fitted([StandardScaler(), PCA(4), OneVsRestClassifier(SVC())], 4))
    traces = {"trace": trace_of(head, QUERY), "baseline": trace_of(head, NEAR)}
    head.stages[2].members[1].stages[0].register_forward_hook(lambda module, args, output: output * 2)
    traces[which] = trace_of(head, QUERY)
    with pytest.raises(NoClosedFormError, match="a hook on KernelSVM"):
        head.pullback(traces["trace"], {3: None}, traces["baseline"])


# --- running a part of the head -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CURVED)
def test_a_head_is_run_from_the_middle(name):
    head = head_of(name)
    trace, baseline = trace_of(head, QUERY), trace_of(head, NEAR[:1])
    for position in range(len(head.stages) + 1):
        rest = head.resume(position, trace.values[position])
        assert rest.values[:position] == rest.saved[:position] == [None] * position
        assert all(map(torch.equal, rest.values[position:], trace.values[position:]))
        assert torch.equal(rest.rows([2, 1]).values[-1], trace.values[-1][[2, 1]])
        # Its pullback ends where it began.
        seeds = {len(head.stages): None}
        grad = pulled_back(head, rest, seeds, head.resume(position, baseline.values[position]))
        expected = trace.values[-1] - baseline.values[-1]
        assert relative(added(grad, trace.values[position], baseline.values[position]), expected) < 1e-9
        if position:
            with pytest.raises(ValueError, match=f"resumed at position {position}"):
                head.pullback(rest, {0: None})
    seen = []
    handle = head.stages[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    head.resume(len(head.stages) - 1, trace.values[-2].float())
    handle.remove()
    assert seen[0].dtype == torch.float64
    for position in (-1, len(head.stages) + 1):
        with pytest.raises(ValueError, match=f"has the positions 0 to {len(head.stages)}, not {position}"):
            head.resume(position, trace.values[0])


@pytest.mark.parametrize(
    ("parts", "until"),
    [
        ([StandardScaler(), PCA(4), SVC()], 2),
        ([StandardScaler(), PCA(4), LinearSVC()], 2),
        ([PCA(4), StandardScaler(), SVC(kernel="linear")], 1),
        ([StandardScaler(), SVC(kernel="linear")], 2),
        ([OneVsRestClassifier(LinearSVC())], 1),
        ([OneVsRestClassifier(SVC())], 0),
        ([MinMaxScaler(), PCA(4)], 2),
        ([MinMaxScaler(clip=True), PCA(4)], 0),
        ([StandardScaler(), Normalizer(), PCA(4), SVC()], 1),
        ([KernelPCA(3)], 1),
        ([StandardScaler(), KernelPCA(3, kernel="rbf"), SVC()], 1),
    ],
)
def test_up_to_where_a_head_is_linear(parts, until):
    head = Head.of(fitted(parts, 4))
    assert head.linear_until == until
    values = trace_of(head, np.concatenate([QUERY[:1], NEAR[:1], 0.3 * QUERY[:1] + 0.7 * NEAR[:1]])).values[until]
    assert relative(values[2], 0.3 * values[0] + 0.7 * values[1]) < 1e-12


MEAN = DATA[4][0].mean(0)


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([StandardScaler(), PCA(4)], MEAN),
        ([StandardScaler(with_std=False), PCA(4)], MEAN),
        ([PCA(4, whiten=True), SVC()], MEAN),
        ([IncrementalPCA(4, batch_size=40)], MEAN),
        ([StandardScaler(with_mean=False), PCA(4)], None),
        ([RobustScaler(), PCA(4)], None),
        ([MinMaxScaler(), PCA(4)], None),
        ([MaxAbsScaler(), PCA(4)], None),
        ([TruncatedSVD(4), SVC()], None),
        ([Normalizer(), StandardScaler(), SVC()], None),
        ([SVC()], None),
    ],
    ids=str,
)
def test_the_mean_of_the_features(parts, mean, tmp_path):
    head = Head.of(fitted(parts, 4))
    head.save(tmp_path / "head")
    for each in (head, Head.load(tmp_path / "head")):
        if mean is None:
            assert each.feature_mean is None
        else:
            assert relative(each.feature_mean, mean) < 1e-12


# --- what support vectors give to the decision ----------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
def test_support_vectors_give_the_decision(kernel, classes):
    head = head_of(f"SVC {kernel}", classes)
    trace = trace_of(head, QUERY)
    p, intercept = trace.values[2], head.stages[2].intercept
    effect = head.support_vector_effect(p)
    assert effect.decision.shape == effect.signed.shape
    assert relative(effect.decision.sum(-1) + intercept, trace.values[3]) < 1e-12
    of_class = head.support_vector_effect(p, 1).decision.sum(-1)[:, 0]
    of_intercept = head.voting.margins(intercept)[1]
    assert relative(of_class + of_intercept, head.voting.margins(trace.values[3])[:, 1]) < 1e-12


def test_the_share_of_the_strongest_support_vectors():
    effect = head_of("SVC rbf").support_vector_effect(trace_of(head_of("SVC rbf"), QUERY).values[2])
    sizes = effect.decision.abs().sort(-1, descending=True).values
    for count in (1, 3, 10_000):
        assert relative(effect.share(count), sizes[..., :count].sum(-1) / sizes.sum(-1)) < 1e-12
    assert relative(effect.share(10_000), torch.ones(8, 6)) < 1e-12
    far = head_of("SVC rbf").support_vector_effect(trace_of(head_of("SVC rbf"), QUERY + 1e4).values[2])
    assert far.share(5).tolist() == [[0.0] * 6] * 8


# --- forward AD: Hessian-vector products over the closed form -------------------------------------------------------


def tangent_of_pullback(head, x, v, seeds, grad_enabled):
    """Return the derivative along v of the gradient, divided by ``exp(log_scale)``, and that ``log_scale``."""
    with torch.set_grad_enabled(grad_enabled), fwd.dual_level():
        trace = head(fwd.make_dual(torch.as_tensor(x), v))
        grad, log_scale = (fwd.unpack_dual(each) for each in head.pullback(trace, seeds))
        values = [fwd.unpack_dual(value).tangent for value in trace.values]
        zero = torch.zeros(())
        of_grad, of_scale = (each.tangent if each.tangent is not None else zero for each in (grad, log_scale))
        tangent = of_grad + grad.primal * of_scale.unsqueeze(-1)
        return tangent.expand(len(x), *grad.primal.shape[1:]).detach(), log_scale.primal, values


@pytest.mark.parametrize("grad_enabled", [True, False])
@pytest.mark.parametrize("name", CURVED)
def test_hessian_vector_products_equal_autograds(name, grad_enabled):
    head, v = head_of(name), rand(*QUERY.shape, seed=3)
    seeds = {len(head.stages): rand(1, 2, head.stages[-1].n_outputs)}
    tangent, log_scale, values = tangent_of_pullback(head, QUERY, v, seeds, grad_enabled)
    leaf = torch.tensor(QUERY).requires_grad_()
    sums = of_seeds(head(leaf), seeds)
    expected = []
    for k in range(2):
        (grad,) = torch.autograd.grad(sums[:, k].sum(), leaf, create_graph=True)
        product = (grad * v).sum()
        expected.append(
            torch.autograd.grad(product, leaf, retain_graph=True)[0] if product.requires_grad else torch.zeros_like(v)
        )
    expected = torch.stack(expected, 1)
    if all(stage.linear for stage in head.stages):
        assert not tangent.any()
        assert not expected.any()
    else:
        assert relative(tangent * log_scale.exp().unsqueeze(-1), expected) < 1e-9
    # The trace's own tangents are derivatives of the values.
    trace = trace_of(head, QUERY)
    slope = (pulled_back(head, trace, {len(head.stages): None}) * v.unsqueeze(1)).sum(-1)
    assert relative(values[-1], slope) < 1e-9


@pytest.mark.parametrize("shift", [0.0, 40.0])
def test_the_hessian_of_an_rbf_machine(shift):
    """sum_i c_i K_i (4 gamma^2 (p_i - p) <p_i - p, v> - 2 gamma v), also where all of it is factored out."""
    gamma, v, head = 0.6, rand(5, 4, seed=2), Head([machine(RBF(0.6))])
    points, coefficients = head.stages[0].support_vectors, head.stages[0].dual_coef[0]
    x = X + shift
    tangent, log_scale, _ = tangent_of_pullback(head, x, v, {1: torch.ones(1, 1, 1).double()}, False)
    assert (log_scale < -745).all() == (shift > 0)
    towards = points - x.unsqueeze(1)
    kernel = coefficients * torch.exp(-gamma * towards.square().sum(-1) - log_scale)
    along = (towards * v.unsqueeze(1)).sum(-1, keepdim=True)
    expected = (kernel.unsqueeze(-1) * (4 * gamma**2 * towards * along - 2 * gamma * v.unsqueeze(1))).sum(1)
    assert relative(tangent[:, 0], expected) < 1e-9


def test_dual_seeds():
    """Of a target that is not linear in the decision, the seeds have tangents too."""
    v = rand(*QUERY.shape, seed=3)
    for name in ("several, OneVsOne SVC", "SVC rbf", "SVC linear", "selected"):
        head = head_of(name)
        last = len(head.stages)
        with torch.no_grad(), fwd.dual_level():
            trace = head(fwd.make_dual(torch.tensor(QUERY), v))
            grad, log_scale = head.pullback(trace, {last: (2 * trace.values[-1]).unsqueeze(1)})
            tangent = fwd.unpack_dual(grad * log_scale.exp().unsqueeze(-1)).tangent
        expected = torch.autograd.functional.hvp(
            lambda x, head=head: head(x).values[-1].square().sum(), torch.tensor(QUERY), v
        )[1]
        assert relative(tangent[:, 0], expected) < 1e-9


def test_squared_distances_know_forward_ad():
    x, points, v = rand(3, 4), rand(5, 4, seed=1), rand(3, 4, seed=2)
    expected = 2 * ((x.unsqueeze(1) - points) * v.unsqueeze(1)).sum(-1)
    for grad_enabled in (True, False):
        with torch.set_grad_enabled(grad_enabled), fwd.dual_level():
            tangent = fwd.unpack_dual(squared_distances(fwd.make_dual(x, v), points)).tangent
            assert relative(tangent, expected) < 1e-13
    assert relative(torch.func.jvp(lambda t: squared_distances(t, points), (x,), (v,))[1], expected) < 1e-13
    with torch.inference_mode():
        assert relative(squared_distances(x, points), (x.unsqueeze(1) - points).square().sum(-1)) < 1e-13


def test_a_trace_of_values_alone_is_no_baseline():
    head = head_of("SVC rbf")
    trace = trace_of(head, QUERY)
    assert relative(pulled_back(head, trace, {3: None}), by_autograd(head, QUERY, {3: None})) < 1e-9
    with pytest.raises(ValueError, match="nothing saved for a pullback"):
        head.pullback(trace, {3: None}, HeadTrace(trace.values, []))
