"""Signs, shared scales and upsampling."""

import cv2
import mpmath
import numpy as np
import pytest
import torch
from problems import Problem
from pytorch_grad_cam import GradCAM
from reference import relative

from pytorch_grad_cam_pcasvm import BlankMapWarning, ClosedFormGradCAM, PCASVMNet, PCATarget, SignedMaps, SVMTarget


@pytest.fixture(scope="module")
def problem():
    return Problem(seed=1, n=6)


@pytest.fixture(scope="module")
def maps(problem):
    targets = [PCATarget(b) for b in range(problem.components)]
    return ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)


def test_both_signs_share_nu(maps):
    positive, negative = maps.positive(), maps.negative()
    assert torch.maximum(positive.amax((2, 3)), negative.amax((2, 3))).eq(1).all()
    assert relative(positive - negative, maps.maps / maps.nu[..., None, None]) < 1e-14
    assert positive.min() == 0
    assert not (positive * negative).any()
    assert (maps.positive().amax((2, 3)) < 1).any(), "no map tests the shared scale"


def test_raw_parts(maps):
    assert relative(maps.positive(scale="none") - maps.negative(scale="none"), maps.maps) == 0
    assert relative(maps.numpy(), maps.maps) == 0


def test_one_scale_per_target_compares_images(maps):
    positive, negative = maps.positive(scale="target"), maps.negative(scale="target")
    expected = maps.maps / maps.nu.amax(0)[None, :, None, None]
    assert relative(positive - negative, expected) < 1e-12
    assert torch.maximum(positive, negative).amax((0, 2, 3)).eq(1).all()


def test_the_sign_of_a_component_is_a_convention(problem, maps):
    flipped = Problem(seed=1, n=6)
    flipped.head[1].components_[2] *= -1
    swapped = ClosedFormGradCAM(flipped.net, [flipped.target_layer]).explain(problem.x, list(maps.targets))
    assert relative(swapped.positive()[:, 2], maps.negative()[:, 2]) == 0
    assert relative(swapped.negative()[:, 2], maps.positive()[:, 2]) == 0
    assert relative(swapped.positive()[:, 1], maps.positive()[:, 1]) == 0


def test_a_negative_target_is_the_negative_map(problem, maps):
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    negative = cam.explain(problem.x, [PCATarget(1, sign="-")])
    assert relative(negative.maps[:, 0], -maps.maps[:, 1]) < 1e-14
    for sign, part in (("+", maps.positive), ("-", maps.negative)):
        shown = cam(problem.x, [PCATarget(1, sign)] * 6)
        assert shown.dtype == np.float32
        assert shown.shape == (6, 12, 12)
        assert relative(shown, part(size=(12, 12))[:, 1]) < 1e-6


@pytest.mark.parametrize("size", [(4, 4), (20, 33), (7, 50)])
def test_upsampling_is_that_of_the_host(maps, size):
    shown = maps.positive(size=size)
    assert shown.shape == (6, 4, *size)
    expected = np.stack([
        [cv2.resize(m.numpy().astype(np.float32), size[::-1]) for m in image] for image in maps.positive()
    ])
    assert relative(shown, expected) < 1e-5
    assert shown.max() <= 1


def test_maps_far_from_every_support_vector_are_not_blank():
    problem = Problem(kernel="rbf", classes=2, dtype=torch.float32)
    problem.head[-1].set_params(gamma=1.0)
    near = ClosedFormGradCAM(problem.net, [problem.target_layer])
    expected = near.explain(problem.x, [SVMTarget("bee")])
    assert not expected.log_scale.any()
    # The same decision, seen from far away: support vectors moved by 40 along one component.
    far = Problem(kernel="rbf", classes=2, dtype=torch.float32)
    far.head[-1].support_vectors_[:, 0] += 400.0
    net = PCASVMNet(far.backbone, far.head, layer="classifier.4").eval()
    output = net(problem.x)
    grad = torch.autograd.grad(output.margins[:, 1].sum(), far.backbone.classifier[0].weight)[0]
    assert not grad.any(), "autograd does not underflow: the test tests nothing"
    maps = ClosedFormGradCAM(net, [far.target_layer]).explain(problem.x, [SVMTarget("bee"), SVMTarget("ant")])
    assert (maps.log_scale < -745).all()
    assert maps.nu.isfinite().all()
    assert (maps.nu > 0).all()
    assert relative(maps.maps[:, 0], -maps.maps[:, 1]) < 1e-6
    assert torch.maximum(maps.positive(), maps.negative()).amax((2, 3)).eq(1).all()
    # Between images the factors count: their scale is in the logarithms.
    by_target = torch.maximum(maps.positive(scale="target"), maps.negative(scale="target")).amax((2, 3))
    largest = (maps.nu.log() + maps.log_scale)[:, 0]
    assert relative(by_target[:, 0], (largest - largest.max()).exp()) < 1e-5


def exact_direction(p, svm):
    """Return the unit vector along da(p)/dp of a two-class RBF machine, with 60 digits."""
    with mpmath.workdps(60):
        total = [mpmath.mpf(0)] * len(p)
        for coefficient, point in zip(svm.dual_coef_[0], svm.support_vectors_, strict=True):
            towards = [mpmath.mpf(b) - mpmath.mpf(a) for a, b in zip(p, point, strict=True)]
            factor = mpmath.mpf(coefficient) * mpmath.exp(-svm._gamma * sum(t * t for t in towards))
            total = [t + factor * v for t, v in zip(total, towards, strict=True)]
        norm = mpmath.sqrt(sum(t * t for t in total))
        return torch.tensor([float(t / norm) for t in total], dtype=torch.float64)


@pytest.mark.parametrize("gamma_d2", [1e2, 1e3, 1e6])
def test_maps_are_exact_at_a_distance_where_those_of_autograd_are_blank(gamma_d2):
    problem = Problem(kernel="rbf", classes=2, n=1)
    svm = problem.head[-1]
    svm._gamma = 0.5
    p = problem.net(problem.x).components[0].detach().numpy()
    # All support vectors move away together, until the nearest is at the distance wanted.
    away = np.array([0.6, 0.0, -0.8, 0.0])
    offsets = svm.support_vectors_ - p
    along = offsets @ away
    rest = (offsets**2).sum(1) - along**2
    svm.support_vectors_ += away * (np.sqrt(gamma_d2 / svm._gamma - rest) - along).max()
    assert svm._gamma * ((svm.support_vectors_ - p) ** 2).sum(1).min() == pytest.approx(gamma_d2)
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4").eval()
    components = [PCATarget(b) for b in range(problem.components)]
    maps = ClosedFormGradCAM(net, [problem.target_layer]).explain(problem.x, [*components, SVMTarget("bee")])
    expected = torch.einsum("b,bhw->hw", exact_direction(p, svm), maps.maps[0, :-1])
    assert relative(maps.maps[0, -1] / maps.maps[0, -1].norm(), expected / expected.norm()) < 1e-9
    assert torch.maximum(maps.positive(), maps.negative())[0, -1].max() == 1
    with GradCAM(net, [problem.target_layer]) as host:
        for label in ("ant", "bee"):
            assert host(problem.x, [SVMTarget(label)]).max() < 1e-20


def blank(values):
    maps = torch.tensor(values).reshape(1, 2, 1, 2)
    ones = torch.ones(1, 2)
    return SignedMaps(maps, ones, ones, maps.abs().amax((2, 3)), 0 * ones, [PCATarget(0), SVMTarget("a")], ones)


def test_a_blank_map_says_why():
    maps = blank([-1.0, -0.5, 0.0, 0.0])
    with pytest.warns(BlankMapWarning) as warned:
        assert not maps.positive().any()
    text = str(warned[0].message)
    assert warned[0].filename == __file__
    assert "image 0, P+ of PCATarget(component=0, sign='+'): all its evidence has the other sign" in text
    assert "SVMTarget(category='a', versus=None, sign='+'): there is no gradient at all" in text
    with pytest.warns(BlankMapWarning, match="SVMTarget"):
        assert relative(maps.negative()[0, 0], torch.tensor([[1.0, 0.5]])) == 0
    with pytest.warns(BlankMapWarning):
        assert maps.positive(scale="target").isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "batch"}, r"scale must be one of \('map', 'target', 'none'\), got 'batch'"),
        ({"size": (4,)}, r"size must have 2 numbers for these maps, got \(4,\)"),
        ({"size": 24}, "size must have 2 numbers for these maps, got 24"),
        ({"size": (4, 4, 4)}, "size must have 2 numbers"),
    ],
)
def test_bad_arguments_are_refused(maps, arguments, message):
    for part in (maps.positive, maps.negative):
        with pytest.raises(ValueError, match=message):
            part(**arguments)


def test_maps_that_are_not_finite_are_not_given_as_arrays():
    with pytest.raises(ValueError, match="not finite"):
        blank([1.0, torch.nan, 1.0, 1.0]).numpy()
