"""Kernels: values against scikit-learn, gradients against autograd, and far away against mpmath."""

import mpmath
import numpy as np
import pytest
import torch
from reference import relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import Head
from pytorch_grad_cam_pcasvm.head.kernels import RBF, At, Linear, Polynomial, Sigmoid, squared_distances

KERNELS = {
    "linear": (Linear(), {}),
    "rbf": (RBF(0.3), {"gamma": 0.3}),
    "poly": (Polynomial(0.4, 3, 0.7), {"gamma": 0.4, "degree": 3, "coef0": 0.7}),
    "sigmoid": (Sigmoid(0.2, -0.1), {"gamma": 0.2, "coef0": -0.1}),
}


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((5, 4), (7, 4), (5, 3, 7))]


def test_squared_distances_do_not_cancel():
    points = torch.tensor([[1e8 + 1.0, 0.0], [1e8, 3.0]], dtype=torch.float64)
    x = torch.tensor([[1e8, 0.0]], dtype=torch.float64)
    assert squared_distances(x, points).tolist() == [[1.0, 9.0]]


def pulled_back(kernel, x, points, coefficients):
    x, points, coefficients = (torch.as_tensor(a) for a in (x, points, coefficients))
    return kernel.pullback(At(x, kernel.argument(x, points)), points, coefficients)


def exact_direction(x, points, coefficients, slope):
    """Return the unit vector along sum_i c_i slope_i (...) with 60 digits."""
    with mpmath.workdps(60):
        total = [mpmath.mpf(0)] * len(x)
        for c, point in zip(coefficients, points, strict=True):
            factor, vector = slope([mpmath.mpf(v) for v in x], [mpmath.mpf(v) for v in point])
            total = [t + mpmath.mpf(c) * factor * v for t, v in zip(total, vector, strict=True)]
        norm = mpmath.sqrt(sum(t * t for t in total))
        return np.array([float(t / norm) for t in total]), float(mpmath.log(norm))


@pytest.mark.parametrize("gamma_d2", [1e1, 1e2, 2e2, 1e3, 1e6])
def test_rbf_gradient_far_from_every_support_vector(gamma_d2):
    gamma = 0.5
    rng = np.random.default_rng(0)
    points, coefficients = rng.normal(size=(6, 3)), rng.normal(size=6)
    x = rng.normal(size=3)
    x *= np.sqrt(gamma_d2 / gamma) / np.linalg.norm(x)

    def slope(x, point):
        towards = [p - v for p, v in zip(point, x, strict=True)]
        return 2 * gamma * mpmath.exp(-gamma * sum(t * t for t in towards)), towards

    expected, log_norm = exact_direction(x, points, coefficients, slope)
    grad, log_scale = pulled_back(RBF(gamma), x[None], points, coefficients[None, None])
    grad, log_scale = grad[0, 0].numpy(), float(log_scale)
    norm = np.linalg.norm(grad)
    assert norm > 1e-30
    assert np.abs(grad / norm - expected).max() < 1e-9
    assert abs(np.log(norm) + log_scale - log_norm) < 1e-9 * max(1.0, abs(log_norm))
    leaf = torch.tensor(x, dtype=torch.float32).requires_grad_()
    blank = torch.exp(-gamma * (leaf - torch.tensor(points, dtype=torch.float32)).square().sum(-1))
    (autograd,) = torch.autograd.grad(blank.sum(), leaf)
    assert bool(autograd.any()) is (gamma_d2 < 150), "float32 autograd underflows, which this kernel must not"


def test_rbf_factor_is_that_of_the_targets_own_support_vectors():
    # The nearest vector has coefficient 0 in this target: factoring its value out would underflow all the others.
    points = torch.tensor([[0.0, 0.0], [60.0, 0.0], [0.0, 61.0]], dtype=torch.float64)
    coefficients = torch.tensor([[[0.0, 1.0, -2.0]]], dtype=torch.float64)
    grad, log_scale = pulled_back(RBF(1.0), np.zeros((1, 2)), points, coefficients)
    assert float(log_scale) == pytest.approx(-3600.0, abs=2)  # up to the size of the coefficients
    assert grad[0, 0, 0] * torch.exp(log_scale + 3600.0) == pytest.approx(120.0)


def test_what_takes_no_part_sets_no_scale():
    kernel, points = RBF(1.0), torch.tensor([[0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 1.0], [9.0, 1.0], [30.0, 1.0]], dtype=torch.float64)
    coefficients = torch.tensor([[[0.0, 0.0], [-1.0, -3.0], [1.0, 3.0]]], dtype=torch.float64)
    grad, log_scale = pulled_back(kernel, x, points, coefficients)
    assert not grad[:, 0].any()
    assert not log_scale[:, 0].any()
    # A negative coefficient is as large as a positive one.
    assert torch.equal(grad[:, 1], -grad[:, 2])
    assert grad[:, 1].abs().amax(-1).gt(0.1).all()
    assert log_scale[:, 1].tolist() == pytest.approx([0, -82 + np.log(6), -901 + np.log(6)])  # 2 gamma c
    grad, log_scale = pulled_back(kernel, x, points[:0], coefficients[:, :2, :0])
    assert torch.equal(grad, torch.zeros(3, 2, 2).double())
    assert torch.equal(log_scale, torch.zeros(3, 2).double())


def test_a_tiny_coefficient_is_factored_out_too():
    # A saturated probability's gradient: nothing of it would be left in float32.
    points, x = np.array([[0.0, 0.0], [1.0, 0.0]]), np.array([[0.5, 0.2]])
    coefficients = np.array([[[1.0, -2.0]]])
    expected, _ = pulled_back(RBF(1.0), x, points, coefficients)
    grad, log_scale = pulled_back(RBF(1.0), x, points, 1e-60 * coefficients)
    assert grad.float().abs().max() > 1e-3
    assert relative(grad * torch.exp(log_scale + 60 * np.log(10)), expected) < 1e-12


@pytest.mark.parametrize("z", [1.0, 30.0, 500.0, -500.0])
def test_sigmoid_gradient_where_tanh_saturates(z):
    points, coefficients = np.array([[1.0, 0.5], [0.9, -0.4]]), np.array([1.0, -1.3])
    x = np.array([z, 0.3])

    def slope(x, point):
        return 1 / mpmath.cosh(sum(a * b for a, b in zip(x, point, strict=True))) ** 2, point

    expected, log_norm = exact_direction(x, points, coefficients, slope)
    grad, log_scale = pulled_back(Sigmoid(1.0, 0.0), x[None], points, coefficients[None, None])
    grad, log_scale = grad[0, 0].numpy(), float(log_scale)
    assert np.abs(grad / np.linalg.norm(grad) - expected).max() < 1e-9
    assert abs(np.log(np.linalg.norm(grad)) + log_scale - log_norm) < 1e-9 * max(1.0, abs(log_norm))


@pytest.mark.parametrize(
    "kernel",
    [
        *(kernel for kernel, _ in KERNELS.values()),
        Polynomial(0.4, 2, -0.2),
        Polynomial(-0.4, 3, 0.2),
        Sigmoid(-0.2, 0.1),
    ],
    ids=str,
)
def test_effect_is_the_norm_of_the_gradient(kernel, problem):
    x, points, _ = problem
    gradients = torch.func.vmap(torch.func.jacrev(lambda row: kernel.value(kernel.argument(row[None], points))[0]))(x)
    assert relative(kernel.effect(x, points), gradients.norm(dim=-1)) < 1e-12


@pytest.mark.parametrize("gamma", [0.05, 1.0, 7.0])
def test_theorems_on_the_effect_of_a_support_vector(gamma):
    distance = torch.cat([torch.zeros(1), torch.logspace(-3, 2, 4001)]).double() / np.sqrt(gamma)
    point = torch.zeros(1, 1).double()
    effect = RBF(gamma).effect(distance.unsqueeze(1), point)[:, 0]
    assert effect[0] == 0
    assert effect[-1] == 0
    assert float(distance[effect.argmax()]) == pytest.approx(1 / np.sqrt(2 * gamma), rel=2e-3)
    at_best = RBF(gamma).effect(point + 1 / np.sqrt(2 * gamma), point)
    assert float(at_best) == pytest.approx(np.sqrt(2 * gamma) * np.exp(-0.5), rel=1e-12)
    assert effect.max() <= at_best * (1 + 1e-12)


@pytest.mark.parametrize("constant", [0.0, 1e5])
@pytest.mark.parametrize("noise", [0.0, 1e-15, 1e-7])
def test_on_a_point_of_a_narrow_rbf_the_gradient_is_nothing_but_rounding(noise, constant):
    generator = torch.Generator().manual_seed(0)
    points = 3 * torch.randn(7, 4, dtype=torch.float64, generator=generator)
    points[:, 3] = constant  # which says nothing of how exactly the others are known
    x = points[2:3] * (1 + noise * torch.randn(1, 4, dtype=torch.float64, generator=generator))
    kernel, coefficients = RBF(50.0), torch.ones(1, 1, 7, dtype=torch.float64)
    assert not kernel.pullback(At(x, kernel.argument(x, points)), points, coefficients)[0].any()
    assert kernel.coincides(x, points)[0].tolist() == [place == 2 for place in range(7)]
    # Next to it is a direction, as there is on the point itself if the kernel reaches others.
    near, wide = x + torch.tensor([1e-4, 1e-4, 1e-4, 0.0]), RBF(0.05)
    for each, of in ((kernel, near), (wide, x)):
        leaf = of.clone().requires_grad_()
        (expected,) = torch.autograd.grad(each.value(each.argument(leaf, points)).sum(), leaf)
        found, _ = each.pullback(At(of, each.argument(of, points)), points, coefficients)
        assert relative(found[0], expected) < 1e-9
        assert not each.coincides(near, points).any()
        assert not each.coincides(2 * x - near, points).any()


def test_every_row_coincides_with_its_own_points_but_for_its_own_rounding():
    x = torch.tensor([[1e-3, 2e-3], [1e6, -1e6]], dtype=torch.float64)
    points = torch.stack([x[1], x[0] + 1e-7, x[0]])
    assert RBF(1.0).coincides(x, points).tolist() == [[False, False, True], [True, False, False]]


@pytest.mark.parametrize(
    "front", [[PCA(4)], [StandardScaler(), PCA(6, whiten=True)], [MinMaxScaler(), PCA(3)]], ids=str
)
@pytest.mark.parametrize("inside", [False, True])
def test_rounding_of_features_is_followed_to_the_machine(front, inside):
    rng = np.random.default_rng(0)
    x, y = 5 + rng.normal(size=(40, 30)), np.arange(40) % 2  # components are small differences of large numbers
    svm = SVC(gamma=1e5)
    if inside:
        head = Head.of(CalibratedClassifierCV(make_pipeline(*front, svm), ensemble=False).fit(x, y))
    else:
        head = Head.of(make_pipeline(*front, svm).fit(x, y))
    for size, blank in ((2.0**-24, True), (1e-4, False)):
        near = torch.tensor(x[:5] * (1 + size * rng.choice([-1.0, 1.0], size=(5, 30))))
        with torch.no_grad():
            trace = head(near)
            trace.eps = torch.finfo(torch.float32).eps
            grad, _ = head.pullback(
                trace, {len(head.stages): head.voting.seed(torch.ones(5).long(), None).unsqueeze(1)}
            )
        assert grad.any(-1).any() != blank
