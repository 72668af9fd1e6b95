"""Baselines: what a review of the methods found wrong, each as a test."""

import threading

import numpy as np
import pytest
import torch
from reference import gap, relative
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormAblationCAM,
    ClosedFormGradCAMPlusPlus,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ClosedFormXGradCAM,
    ContributionCAM,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    RelevanceCAM,
    ShapCAM,
    SVMTarget,
    mean_activations,
)


class Net(nn.Module):
    """A convolution, a residual block around another, and means over positions."""

    def __init__(self, end: str = "mean", switch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.fc = nn.Linear(6, 5)
        self.end, self.switch = end, switch

    def forward(self, x):
        z = torch.relu(self.a(x))
        z = torch.relu(self.b(z) + z) if self.end == "residual" else torch.relu(self.b(z))
        if self.switch and z.mean() < 0.02:
            z = z * 10
        if self.end == "gate":
            z = z * torch.sigmoid(z.mean((2, 3), keepdim=True))
        if self.end == "max":
            return F.adaptive_max_pool2d(z, 1).flatten(1)
        z = z.mean((2, 3))
        return self.fc(z) if self.end in ("residual", "gate") else z


def fitted(net, *first, n=40, classes=3):
    x = torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        features = net(x).numpy()
    return make_pipeline(*(first or (StandardScaler(), PCA(3))), SVC()).fit(features, np.arange(n) % classes), x


def explained(end="mean", **options):
    net = Net(end, **options).double().eval()
    head, x = fitted(net)
    return PCASVMNet(net, head), x


@pytest.mark.parametrize("method", [ContributionCAM, LIFTCAM, RelevanceCAM])
def test_what_goes_around_the_layer_belongs_to_each_image(method):
    net, x = explained("residual")
    cam = method(net, ["b"])
    maps = cam.explain(x[:4])
    single = [cam.explain(image.unsqueeze(0)) for image in x[:4]]
    assert relative(maps.maps, torch.cat([each.maps for each in single])) < 1e-10
    if method is ContributionCAM:
        assert gap(maps) < 1e-10
        assert maps.baseline_values[:, 0].std() > 0


@pytest.mark.parametrize("method", [ContributionCAM, ShapCAM, ClosedFormAblationCAM])
def test_a_network_that_branches_at_the_baseline_is_refused(method):
    net, x = explained(switch=True)
    with pytest.raises(NoClosedFormError, match="another function at the baseline"):
        method(net, ["b"], baseline=torch.full((6,), 0.01, dtype=torch.float64)).explain(x[:2])


def test_another_baseline_is_looked_at_anew():
    net, x = explained(switch=True)
    cam = ContributionCAM(net, ["b"], baseline=x[:1] + 0)
    cam.explain(x[:2])
    cam.baseline = torch.full((6,), 0.01, dtype=torch.float64)
    with pytest.raises(NoClosedFormError, match="another function at the baseline"):
        cam.explain(x[:2])
    with pytest.raises(ValueError, match="baseline must be 'neutral', 'zero'"):
        cam.baseline = "zeros"


def test_the_mean_is_taken_from_the_head_only_where_features_are_means():
    net, x = explained("max")
    with pytest.raises(ValueError, match="pass mean=mean_activations"):
        ContributionCAM(net, ["b"], baseline="mean").explain(x[:2])
    plain = Net().double().eval()
    with pytest.raises(ValueError, match="pass mean=mean_activations"):  # in front of a ReLU
        ContributionCAM(PCASVMNet(plain, fitted(plain)[0]), ["b"], baseline="mean").explain(x[:2])
    pooled = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double().eval()
    head, x = fitted(pooled)
    maps = ContributionCAM(PCASVMNet(pooled, head), ["1"], baseline="mean").explain(
        x[:2], [PCATarget(b) for b in range(3)]
    )
    assert relative(maps.maps.sum((2, 3)), maps.values) < 1e-10
    weighted = LinearDiscriminantAnalysis(priors=[0.8, 0.1, 0.1])
    with torch.no_grad():
        labels = np.arange(len(x)) % 3
        head = [weighted.fit(pooled(x).numpy(), labels), SVC().fit(weighted.transform(pooled(x).numpy()), labels)]
    with pytest.raises(ValueError, match="pass mean=mean_activations"):
        ContributionCAM(PCASVMNet(pooled, head), ["1"], baseline="mean").explain(x[:2])


def test_relevance_is_kept_where_two_factors_share_it():
    net, x = explained("gate")
    net.backbone.fc = nn.Identity()
    head, x = fitted(net.backbone)
    net = PCASVMNet(net.backbone, head)
    maps = RelevanceCAM(net, ["b"]).explain(x[:3].abs(), [SVMTarget(0)])
    rise = ContributionCAM(net, ["b"]).explain(x[:3].abs(), [SVMTarget(0)])
    assert relative(maps.weights.sum(-1), rise.maps.sum((2, 3))) < 1e-6


@pytest.mark.parametrize("method", [ClosedFormXGradCAM, ClosedFormGradCAMPlusPlus])
def test_sums_of_half_precision_do_not_overflow(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = 60 * torch.rand(2, 3, 60, 60, generator=torch.Generator().manual_seed(0))
    head, _ = fitted(net.double())
    full = method(PCASVMNet(net.float(), head), ["1"]).explain(x, [SVMTarget(0)])
    half = method(PCASVMNet(net.half(), head), ["1"]).explain(x.half(), [SVMTarget(0)])
    assert relative(half.positive(), full.positive()) < 2e-2


def test_softmax_weights_have_an_opposite_of_their_own():
    net, x = explained()
    cam = ClosedFormScoreCAM(net, ["b"], softmax=True)
    maps = cam.explain(x[:2], [SVMTarget(0), SVMTarget(0, sign="-")])
    assert relative(maps.opposite[:, 0], maps.maps[:, 1]) < 1e-10


@pytest.mark.parametrize("method", [ContributionCAM, LIFTCAM, RelevanceCAM])
@pytest.mark.parametrize("target", [lambda row: row[0] ** 2, ProbabilityTarget(0)], ids=["square", "probability"])
def test_targets_that_are_not_linear_are_refused(method, target):
    net, x = explained()
    if isinstance(target, ProbabilityTarget):
        pytest.importorskip("sklearn.calibration")
        from sklearn.calibration import CalibratedClassifierCV

        with torch.no_grad():
            features = net.backbone(x).numpy()
        labels = np.arange(len(x)) % 2
        head = make_pipeline(PCA(3), CalibratedClassifierCV(SVC(), ensemble=False)).fit(features, labels)
        net = PCASVMNet(net.backbone, head)
    with pytest.raises(ValueError, match="not linear in the network's scores"):
        method(net, ["b"]).explain(x[:2], [target])


def test_sampled_positions_do_not_depend_on_the_batch():
    net, x = explained()
    cam = ShapCAM(net, ["b"], samples=4)
    assert relative(cam.explain(x[1:2], [SVMTarget(0)]).maps, cam.explain(x[:2], [SVMTarget(0)]).maps[1:]) < 1e-10


def test_shapley_cam_of_attention_in_threads_and_under_autocast():
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 8, 4, 4),
        nn.Flatten(2),
        Transposed(),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ]
    net = nn.Sequential(*layers, Mean()).double().eval()
    head, x = fitted(net)
    cam = ClosedFormShapleyCAM(PCASVMNet(net, head), ["0"])
    expected, found = cam.explain(x[:2]).maps, {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: cam.explain(x[:2]).maps})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(relative(found[i], expected) < 1e-10 for i in range(4))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(NoClosedFormError, match="cannot be computed under"),
    ):
        cam.explain(x[:2])


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize("method", [ShapCAM, ClosedFormAblationCAM, ClosedFormScoreCAM])
def test_one_number_an_image(method):
    net = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0)).double().eval()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    maps = method(net, ["1"]).explain(x)
    assert relative(maps.values[:, 0], net(x)) < 1e-12


def test_a_reshape_transform_that_changes_numbers_is_refused_by_players():
    net, x = explained()
    with pytest.raises(ValueError, match="may only move"):
        ShapCAM(net, ["b"], reshape_transform=lambda z: 2 * z).explain(x[:2])


def test_mean_activations_of_batches_that_are_dicts():
    net, x = explained()
    expected = mean_activations(net, [x[:3], (x[3:10], 1)], "b", progress=False)
    dicts = [{"image": x[:3], "label": [0, 1, 0]}, {"pixel_values": x[3:10]}]
    assert torch.equal(mean_activations(net, dicts, "b", progress=False), expected)
    with pytest.raises(ValueError, match=r"no image among \['scan'\]"):
        mean_activations(net, [{"scan": x}], "b", progress=False)


class Mixed(nn.Module):
    """Casts a part of itself to half precision."""

    def __init__(self):
        super().__init__()
        self.start, self.mixed = nn.Conv2d(3, 6, 3, 2), True
        self.tail = nn.Sequential(nn.GELU(), nn.Flatten(), nn.Linear(54, 10), nn.Tanh(), nn.Linear(10, 8))

    def forward(self, x):
        x = self.start(x)
        if not self.mixed:
            return self.tail(x).float()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.tail(x).float()


@pytest.mark.parametrize(
    "method", [ContributionCAM, LIFTCAM, ClosedFormShapleyCAM, ClosedFormAblationCAM, RelevanceCAM]
)
def test_autocast_inside_the_network(method):
    torch.manual_seed(0)
    backbone, x = Mixed().eval(), torch.randn(20, 3, 8, 8)
    head = SVC().fit(backbone(x).detach().numpy(), np.arange(20) % 2)
    cam = method(PCASVMNet(backbone, head), ["start"])
    half = cam.explain(x[:3], [SVMTarget(0)])
    backbone.mixed = False
    whole = cam.explain(x[:3], [SVMTarget(0)])
    for one, other in zip(half.maps.flatten(0, 1), whole.maps.flatten(0, 1), strict=True):
        if method is ClosedFormShapleyCAM:
            assert 0 < relative(one, other) < 0.1
        else:  # differences of outputs, of which half precision keeps too little
            assert relative(one, other) < 1e-5


class Casts(nn.Module):
    def forward(self, x):
        return torch.tanh(x.half().to(torch.bfloat16).float().type(torch.bfloat16)).type_as(x)


@pytest.mark.parametrize("where", ["around", "inside", "network", "steps"])
@pytest.mark.parametrize("method", [ContributionCAM, ShapCAM])
def test_maps_add_up_in_half_precision(method, where):
    torch.manual_seed(0)
    backbone, x = Mixed().eval(), torch.randn(20, 3, 8, 8)
    backbone.mixed = where == "inside"
    if where == "steps":
        backbone.tail.insert(2, Casts())
    head = SVC(gamma=0.5).fit(backbone(x).detach().numpy(), np.arange(20) % 2)
    if where == "network":
        backbone, x = backbone.bfloat16(), x.bfloat16()
    cam = method(PCASVMNet(backbone, head), ["start"])
    with torch.autocast("cpu", torch.bfloat16, enabled=where == "around"):
        maps = cam.explain(x, [SVMTarget(0)])
    rise, total = maps.values - maps.baseline_values, maps.maps.sum((2, 3))
    assert ((total - rise).abs() <= 1e-5 * maps.maps.abs().sum((2, 3))).all()
