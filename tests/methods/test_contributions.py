"""Contributions: maps that add up, against integrals, captum, mpmath, and the network run at its baseline."""

from typing import Any

import numpy as np
import pytest
import torch
from problems import FITTED, PATHS, explained
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from reference import (
    activations_of,
    gap,
    integrated_gradient,
    margins_by_formula,
    pairwise_by_formula,
    relative,
    values_of_rows,
    with_activations,
)
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ContributionCAM,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SVMTarget,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.methods import grad_cam_protocol

# --- they add up ------------------------------------------------------------------------------------------------------

CASES = [
    *((path, "rbf", 3, "plane") for path in PATHS if path != "max pool apart"),
    *(("gelu", head, 2 + n % 2, "plane") for n, head in enumerate(FITTED) if head != "rbf"),
    ("pooled", "poly", 5, "volume"),
]


# Behind a mean over positions, maps differ by the same at all of them, which a principal component does not see.
@pytest.mark.parametrize("path", ["relu", "gelu"])
def test_what_eigen_smooth_smooths_starts_where_the_map_does(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p, seen = explained(path, "rbf"), []

    def smoothed(terms: torch.Tensor, maps: torch.Tensor, targets: Any) -> torch.Tensor:
        seen.append((terms, maps))
        return maps

    monkeypatch.setattr(grad_cam_protocol, "smoothed_by_svd", smoothed)
    mean = mean_activations(p.net, [p.images(60, seed=4)], p.layer, progress=False)
    ContributionCAM(p.net, [p.layer], mean=mean)(p.x, SVMTarget("bee"), eigen_smooth=True)
    ((terms, maps),) = seen
    assert relative(terms.sum(1), maps[:, 0]) < 1e-10


def named(p: Any, x: torch.Tensor, target: Any) -> list[Any]:
    """Return a target for each image in which classes are named, so that it means the same elsewhere."""
    if not isinstance(target, SVMTarget) or getattr(p.fitted[-1], "classes_", None) is None:
        return [target] * len(x)
    output, found = p.net(x), []
    for row, label in zip(output, output.labels(), strict=True):
        category, versus = label if target.category is None else target.category, target.versus
        if versus == "runner-up":
            order = output.head.voting.ranking(row.head_trace.values[-1]).argsort(descending=True).tolist()
            versus = next(p.labels[i] for i in order if p.labels[i] != category)
        found.append(SVMTarget(category, versus, target.sign))
    return found


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float64) for case in CASES), *((case, torch.float32) for case in CASES[::5])],
    ids=lambda each: str(each)[6:] if isinstance(each, torch.dtype) else "-".join(map(str, each)),
)
def test_maps_add_up(case: Any, dtype: torch.dtype) -> None:
    path, head, classes, size = case
    p = explained(path, head, classes, dtype, size)
    maps = ContributionCAM(p.net, [p.layer], baseline="zero").explain(p.x, p.targets)
    assert gap(maps) < (1e-10 if dtype == torch.float64 else 1e-4)
    # And to what the whole network says, here and where its activations are zeros.
    output, zeros = p.net(p.x), torch.zeros_like(activations_of(p.net, p.layer, p.x))
    at_zeros = with_activations(p.net, p.layer, p.x, zeros)
    for k, target in enumerate(p.targets):
        each = named(p, p.x, target)
        for values, rows in ((maps.values, output), (maps.baseline_values, at_zeros)):
            expected = torch.stack([t(row).detach() for t, row in zip(each, rows, strict=True)])
            assert relative(values[:, k], expected) < (1e-10 if dtype == torch.float64 else 1e-5)


BASELINES = {
    "channels": lambda f, x: (f.mean((0, 2, 3)), f.mean((0, 2, 3))[None, :, None, None].expand_as(f)),
    "one image's activations": lambda f, x: (f[1], f[1:2].expand_as(f)),
    "one row": lambda f, x: (f[1:2], f[1:2].expand_as(f)),
    "activations of each": lambda f, x: (f.flip(0), f.flip(0)),
    "single precision": lambda f, x: (f[1].float(), f[1:2].float().double().expand_as(f)),
    "image": lambda f, x: (x[2], f[2:3].expand_as(f)),
    "an image for each": lambda f, x: (x.roll(1, 0), f.roll(1, 0)),
}


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize(
    ("kind", "path"), [(ContributionCAM, "gelu"), (ContributionCAM, "squeeze-excite"), (ShapCAM, "pooled")]
)
def test_maps_add_up_from_any_baseline(kind: Any, path: str, baseline: str) -> None:
    p = explained(path, "rbf")
    given, start = BASELINES[baseline](activations_of(p.net, p.layer, p.x), p.x)
    targets = [PCATarget(0), SVMTarget("bee"), SVMTarget("ant", versus="cat")]
    maps = kind(p.net, [p.layer], baseline=given).explain(p.x, targets)
    assert gap(maps) < 1e-10
    at = with_activations(p.net, p.layer, p.x, start)
    assert relative(maps.baseline_values, torch.stack([values_of_rows(t, at) for t in targets], 1)) < 1e-10


def test_from_itself_there_is_nothing_to_explain() -> None:
    p = explained("gelu", "rbf")
    maps = ContributionCAM(p.net, [p.layer], baseline=p.x).explain(p.x, [SVMTarget("bee")])
    assert not maps.maps.any()
    assert relative(maps.baseline_values, maps.values) < 1e-12


@pytest.mark.parametrize("head", ["linear", "whitened", "rbf"])
def test_the_mean_of_the_training_set_is_that_of_its_activations(head: str) -> None:
    p = explained("pooled", head)
    images = p.images(60, seed=4)
    loader = [(images[:25], 0), images[25:]]
    mean = mean_activations(p.net, loader, p.layer, progress=False)
    assert relative(mean, activations_of(p.net, p.layer, images).mean(0)) < 1e-12
    maps = ContributionCAM(p.net, [p.layer], baseline="mean").explain(p.x)
    by_hand = ContributionCAM(p.net, [p.layer], baseline=mean.mean((1, 2))).explain(p.x)
    assert relative(maps.maps, by_hand.maps) < 1e-9
    # The mean is the origin of the components.
    assert (maps.baseline_values[:, :4].abs() < 1e-9).all()
    assert relative(maps.maps[:, :4].sum((2, 3)), maps.values[:, :4]) < 1e-9


@pytest.mark.parametrize("classes", [2, 3])
def test_callables_add_up_or_are_refused(classes: int) -> None:
    p = explained("gelu", "rbf", classes)
    cam = ContributionCAM(p.net, [p.layer])
    linear = [lambda output: output.components[0] - 2 * output.components[1], lambda output: 3 * output.margins[1]]
    # The scores of two classes are the margins; those of more have votes in them.
    linear += [ClassifierOutputTarget(1)] if classes == 2 else []
    maps = cam.explain(p.x, linear)
    assert gap(maps) < 1e-10
    for target in [ClassifierOutputSoftmaxTarget(1), *([ClassifierOutputTarget(1)] if classes == 3 else [])]:
        with pytest.raises(ValueError, match=f"^{type(target).__name__} is not linear in the network's scores"):
            cam.explain(p.x, [PCATarget(0), target])
        with pytest.raises(ValueError, match="is not linear in the network's scores"):
            cam(p.x, [target] * 3)


# --- integrals --------------------------------------------------------------------------------------------------------

INTEGRALS = [("rbf", 2), ("poly", 5), ("sigmoid", 3), ("whitened", 3), ("one class", 3)]


@pytest.mark.parametrize("size", ["plane", "volume"])
@pytest.mark.parametrize(("head", "classes"), INTEGRALS)
def test_behind_a_mean_they_are_integrated_gradients(head: str, classes: int, size: str) -> None:
    p = explained("pooled", head, classes, size=size)
    f = activations_of(p.net, p.layer, p.x)
    several = head not in ("regressor", "one class")
    targets = [SVMTarget("bee"), SVMTarget("ant", versus="bee")] if several else [SVMTarget()]
    for start in (torch.zeros_like(f[:1]), f[:1].roll(1, 1)):
        maps = ContributionCAM(p.net, [p.layer], baseline=start).explain(p.x, targets)
        lift = LIFTCAM(p.net, [p.layer], baseline=start).explain(p.x, targets)
        for k in range(len(targets)):

            def value(activations: torch.Tensor, k: int = k) -> torch.Tensor:
                features = activations.flatten(2).mean(-1)
                if k == 0:
                    return margins_by_formula(p.fitted, features)[:, 1 if several else 0]
                pairwise = pairwise_by_formula(p.fitted, features)[:, 0]  # two classes: positive for the second
                return pairwise if classes > 2 else -pairwise

            expected = integrated_gradient(value, start, f)
            assert relative(maps.maps[:, k], expected.sum(1)) < 1e-7
            of_channels = expected.flatten(2).sum(-1)
            assert relative(lift.weights[:, k], of_channels) < 1e-7
            assert relative(lift.maps[:, k], torch.einsum("nt,nt...->n...", of_channels, f)) < 1e-7


class Margins(nn.Module):
    """A backbone with scikit-learn's formulas behind it, for captum."""

    def __init__(self, p: Any) -> None:
        super().__init__()
        self.backbone, self.fitted = p.backbone, p.fitted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return margins_by_formula(self.fitted, self.backbone(x))


@pytest.mark.parametrize("head", ["rbf", "poly", "sigmoid"])
@pytest.mark.optional
def test_captum_integrates_to_the_same(head: str) -> None:
    p = explained("pooled", head, n=2)
    captum = pytest.importorskip("captum.attr")
    black = torch.zeros_like(p.x)
    integrated = captum.LayerIntegratedGradients(Margins(p), p.layer)
    maps = ContributionCAM(p.net, [p.layer], baseline=black[0]).explain(p.x, [SVMTarget("bee")])
    expected = integrated.attribute(p.x, black, target=1, n_steps=1000, method="riemann_middle")
    assert relative(maps.maps[:, 0], expected.sum(1)) < 1e-3


class Linearly(nn.Module):
    """A backbone with a linear SVM behind it, as one layer."""

    def __init__(self, p: Any) -> None:
        super().__init__()
        self.backbone = p.backbone
        width = p.fitted[0].n_features_in_
        offset = margins_by_formula(p.fitted, torch.zeros(1, width).double())
        slope = margins_by_formula(p.fitted, torch.eye(width).double()) - offset
        self.machine = nn.Linear(width, slope.shape[1]).double()
        self.machine.weight.data, self.machine.bias.data = slope.T.contiguous(), offset[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.machine(self.backbone(x))


@pytest.mark.filterwarnings("ignore:Setting (forward|backward)")
@pytest.mark.parametrize("path", ["relu", "max pool apart", "average pool", "sigmoid"])
@pytest.mark.optional
def test_captums_deep_lift_of_a_linear_machine_is_the_same(path: str) -> None:
    p = explained(path, "linear")
    captum = pytest.importorskip("captum.attr")
    black = torch.zeros_like(p.x)
    lift = captum.LayerDeepLift(Linearly(p), p.layer)
    expected = lift.attribute(p.x.clone().requires_grad_(), black, target=1).detach()
    maps = ContributionCAM(p.net, [p.layer], baseline=black).explain(p.x, [SVMTarget("bee")])
    assert relative(maps.maps[:, 0], expected.sum(1)) < 1e-5
    of_channels = LIFTCAM(p.net, [p.layer], baseline=black).explain(p.x, [SVMTarget("bee")])
    assert relative(of_channels.weights[:, 0], expected.sum((2, 3))) < 1e-5
    f = activations_of(p.net, p.layer, p.x)
    assert relative(of_channels.maps[:, 0], torch.einsum("nt,nthw->nhw", expected.sum((2, 3)), f)) < 1e-5


# --- far from every support vector ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ContributionCAM, LIFTCAM])
def test_a_network_that_mixes_images_is_refused(method):
    """What one image brings to the features of another is on no map of the other."""

    class Centred(nn.Module):
        def forward(self, x):
            return (x - x.mean(0) / 2).tanh()

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Centred(), nn.Flatten(), nn.Linear(64, 3)).double().eval()
    x = torch.randn(3, 3, 6, 6, dtype=torch.float64)
    cam = method(net, ["0"], baseline="zero")
    with pytest.raises(NoClosedFormError, match="do not add up: the network mixes the images of a batch"):
        cam.explain(x)
    maps = cam.explain(x[:1])
    if method is ContributionCAM:
        assert relative(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values) < 1e-10


@pytest.mark.parametrize(("name", "least"), [("samples", 16), ("seed", 0)])
def test_too_small_numbers_for_permutations_are_refused(name, least):
    net = nn.Sequential(nn.Conv2d(3, 4, 3))
    ContributionCAM(net, ["0"], **{name: least})
    with pytest.raises(ValueError, match=f"{name} must be an integer from {least}, got {least - 1}"):
        ContributionCAM(net, ["0"], **{name: least - 1})


class Halves(nn.Module):
    """Sees both halves of each picture one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 5, 3), nn.GELU()).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.unflatten(3, (2, -1)).movedim(3, 1).flatten(0, 1)
        return self.body(rows).mean((2, 3)).unflatten(0, (-1, 2)).mean(1)


def test_a_transform_that_puts_crops_side_by_side_leaves_nothing_out() -> None:
    backbone, x = Halves().eval(), torch.randn(40, 3, 8, 12, dtype=torch.float64)
    with torch.no_grad():
        features = backbone(x).numpy()
    net = PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, np.arange(40) % 2)).eval()
    cam = ContributionCAM(net, ["body.1"], lambda t: t.unflatten(0, (-1, 2)).movedim(1, 3).flatten(3), baseline="zero")
    maps = cam.explain(x[:3], [SVMTarget(1), PCATarget(0)])
    assert maps.maps.shape == (3, 2, 6, 8)
    terms = maps.maps.abs().sum((2, 3))
    assert maps.remainder is not None
    assert (maps.remainder.abs() < 1e-12 * terms).all()
    assert ((maps.maps.sum((2, 3)) + maps.baseline_values - maps.values).abs() < 1e-10 * terms).all()
