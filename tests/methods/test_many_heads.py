"""Many heads on one pass: each head's maps are those of its own network; and the errors that refits tell."""

import contextlib
import itertools
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from cams import METHODS
from cases import FITTED, NETWORKS, count_classes
from heads import HEADS
from pairs import choose_pairs
from reference import gap, relative
from scipy.stats import t as student
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    NoProgramError,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    UnstableComponentWarning,
    explain_heads,
    recombined,
    resample_heads,
)
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync, traced
from pytorch_grad_cam_pcasvm.runtime.errors import NoBoundaryError
from pytorch_grad_cam_pcasvm.starts import boundary_path
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary

IMAGES = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
FOREST = make_pipeline(StandardScaler(), PCA(4), RandomForestClassifier(8, random_state=0))
KNOWN = {name: HEADS[name].make() for name in FITTED if count_classes(name) == 3} | {"forest": FOREST}


@pytest.fixture(scope="module")
def problems():
    """Return backbones, and the features and labels of images, by the name of a network."""
    made = {}
    for name, network in NETWORKS.items():
        torch.manual_seed(0)
        backbone = network.make().double().eval()
        with torch.no_grad():
            made[name] = backbone, backbone(IMAGES).numpy(), np.arange(60) % 3
    return made


def refit(pipeline, features, labels, count=3):
    """Return refits on other halves of the images."""
    draw = np.random.default_rng(0)
    parts = [draw.choice(60, 45, replace=False) for _ in range(count)]
    return [clone(pipeline).fit(features[part], labels[part]) for part in parts]


def columns_agree(maps, expected):
    """Whether two SignedMaps have the same numbers."""
    assert maps.columns.keys() == expected.columns.keys()
    for name, tensor in expected.columns.items():
        size = torch.cat([
            tensor.flatten(),
            expected.values.flatten() if name == "baseline_values" else tensor.flatten(),
        ])
        size = size.abs().max().clamp(min=1e-12) if len(size) else 1.0
        torch.testing.assert_close(maps.columns[name] / size, tensor / size, rtol=0, atol=1e-8, msg=name)


@pytest.mark.parametrize(("method", "network", "head"), choose_pairs(list(METHODS), list(NETWORKS), list(KNOWN)))
def test_each_head_has_the_maps_of_its_own_network(method, network, head, problems):
    (backbone, features, labels), case = problems[network], NETWORKS[network]
    heads = refit(KNOWN[head], features, labels)

    def make(fitted):
        return METHODS[method](PCASVMNet(backbone, fitted).eval(), case.layers, case.transform)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = [make(fitted).explain(IMAGES[:2]) for fitted in heads]
        except ValueError as refusal:
            with pytest.raises(type(refusal), match=str(refusal)[:20].replace("(", ".").replace(")", ".")):
                explain_heads(make(heads[0]), IMAGES[:2], heads, own_starts=True)
            return
        found = explain_heads(make(heads[0]), IMAGES[:2], heads, own_starts=True)
        shared = explain_heads(make(heads[0]), IMAGES[:2], heads)
    for maps, own in zip(found, expected, strict=True):
        columns_agree(maps, own)
        assert maps.linear == own.linear
        assert maps.neutral == own.neutral
    columns_agree(shared[0], expected[0])
    if not METHODS[method].has_start:
        for maps, own in zip(shared, expected, strict=True):
            columns_agree(maps, own)
    if method == "ContributionCAM":
        assert max(map(gap, shared)) < 1e-8


@pytest.mark.parametrize("layer", ["2", "4"])
def test_heads_start_where_the_first_one_is_undecided(layer, problems):
    backbone, features, labels = problems["pooled"]
    heads = refit(KNOWN["rbf"], features, labels)
    targets = [PCATarget(0), SVMTarget(0, versus=1), SVMTarget(2)]
    net = PCASVMNet(backbone, heads[0]).eval()
    cam = ContributionCAM(net, [layer], mean=package.mean_activations(net, [IMAGES], layer, progress=False))
    first, *others = explain_heads(cam, IMAGES[:3], heads, targets)
    assert float(first.baseline_values.abs().max()) < 1e-6 * float(first.values.abs().max())
    for maps, fitted in zip(others, heads[1:], strict=True):
        assert gap(maps) < 1e-9
        assert not maps.neutral
        # The secants of the head between the same activations: the value at the start is the head's own there.
        own = cam.model.with_head(fitted)
        boundary = next(iter(cam._starts._searches.values())).boundary
        if layer == "4":
            start = boundary.point(SVMTarget(0, versus=1))
            expected = SVMTarget(0, versus=1)(own.of_features(start.unsqueeze(0)))
            torch.testing.assert_close(maps.baseline_values[:, 1], expected.expand(3))


def test_targets_without_a_list_are_those_of_each_head(problems):
    backbone, features, labels = problems["pooled"]
    heads = refit(KNOWN["rbf"], features, labels, 2)
    cam = ClosedFormGradCAM(PCASVMNet(backbone, heads[0]).eval(), ["4"])
    for maps, fitted in zip(explain_heads(cam, IMAGES[:2], heads), heads, strict=True):
        np.testing.assert_array_equal(maps.output.labels(), fitted.predict(features[:2]))
        assert len(maps.targets) == 5


def test_chunks_of_heads_give_the_same_maps(problems):
    backbone, features, labels = problems["pooled"]
    heads = refit(KNOWN["rbf"], features, labels)
    net = PCASVMNet(backbone, heads[0]).eval()
    whole = explain_heads(ContributionCAM(net, ["2"], baseline="zero"), IMAGES[:2], heads)
    parts = explain_heads(ContributionCAM(net, ["2"], baseline="zero", max_bytes=1), IMAGES[:2], heads)
    for one, other in zip(whole, parts, strict=True):
        columns_agree(one, other)


def test_dense_heads_and_several_inputs(problems):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU()).double().eval()
    with torch.no_grad():
        rows = backbone(IMAGES).permute(0, 2, 3, 1).reshape(-1, 8)[:60].numpy()
    heads = refit(KNOWN["rbf"], rows, np.arange(60) % 3)
    nets = [PCASVMNet(backbone, fitted, pool="dense").eval() for fitted in heads]
    targets = [SVMTarget(0, at=(1, 0)), SVMTarget(1), PCATarget(2, at="max")]
    for maps, net in zip(explain_heads(ContributionCAM(nets[0], ["1"], baseline="zero"), IMAGES[:2], heads, targets),
                         nets, strict=True):  # fmt: skip
        columns_agree(maps, ContributionCAM(net, ["1"], baseline="zero").explain(IMAGES[:2], targets))


def test_what_does_not_belong_together_is_refused(problems):
    backbone, features, labels = problems["pooled"]
    heads = refit(KNOWN["rbf"], features, labels, 2)
    cam = ClosedFormGradCAM(PCASVMNet(backbone, heads[0]).eval(), ["4"])
    with pytest.raises(ValueError, match="there are no heads"):
        explain_heads(cam, IMAGES[:2], [])
    two = clone(KNOWN["rbf"]).fit(features, labels % 2)
    with pytest.raises(ValueError, match=r"head 1 knows the classes \[0, 1\], the first one \[0, 1, 2\]"):
        explain_heads(cam, IMAGES[:2], [heads[0], two])
    narrow = clone(KNOWN["rbf"]).fit(features[:, :6], labels)
    with pytest.raises(ValueError, match="6"):
        explain_heads(cam, IMAGES[:2], [heads[0], narrow])
    plain = ClosedFormGradCAM(backbone, ["4"])
    with pytest.raises(TypeError, match="needs a method for a PCASVMNet"):
        explain_heads(plain, IMAGES[:2], heads)


def test_many_heads_are_not_exported(problems):
    backbone, features, labels = problems["pooled"]
    heads = refit(KNOWN["rbf"], features, labels, 2)
    cam = ClosedFormGradCAM(PCASVMNet(backbone, heads[0]).eval(), ["4"])
    with traced(), pytest.raises(NoProgramError, match="export the maps of each head"):
        explain_heads(cam, IMAGES[:2], heads)


@pytest.fixture
def resampled(problems):
    """Return a network with four resampled heads, its pipeline, and these heads."""
    backbone, features, labels = problems["pooled"]
    pipeline = clone(KNOWN["rbf"]).fit(features, labels)
    net = PCASVMNet(backbone, pipeline).eval()
    refits = resample_heads(pipeline, features, labels, n=4)
    net.head.resamples = refits
    return net, refits


def each_alone(net, refits, target, x):
    """Return the maps of a target of every refit, from where it is undecided itself, each by a network of its own."""
    return [ContributionCAM(net.with_head(one), ["4"]).explain(x, [target]) for one in refits]


@pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
def test_errors_are_the_spread_of_the_maps_of_resampled_heads(resampled):
    net, refits = resampled
    targets = [SVMTarget(0, versus=1), SVMTarget(2), SVMTarget()]
    maps = ContributionCAM(net, ["4"]).explain(IMAGES[:3], targets)
    predicted = maps.output.labels()
    for k, target in enumerate(targets[:2]):
        alone = torch.stack([one.maps[:, 0] for one in each_alone(net, refits, target, IMAGES[:3])]).numpy()
        assert relative(maps.error[:, k], alone.std(0, ddof=1)) < 1e-9
        assert relative(maps.resampled[:, k], alone.mean(0)) < 1e-9
    for image, label in enumerate(predicted):  # the class that the head predicts, and not that of each refit
        x = IMAGES[image : image + 1]
        values = [float(one.values[0, 0]) for one in each_alone(net, refits, SVMTarget(int(label)), x)]
        assert abs(float(maps.values_error[image, 2]) - np.std(values, ddof=1)) < 1e-9


@pytest.mark.parametrize("layers", [["2"], ["2", "4"]], ids="-".join)
def test_within_the_network_refits_start_where_the_head_does(resampled, layers):
    net, refits = resampled
    cam = ContributionCAM(net, layers, mean=package.mean_activations(net, [IMAGES], layers, progress=False))
    maps = cam.explain(IMAGES[:3], [SVMTarget(2)])
    alone = torch.stack([explain_heads(cam, IMAGES[:3], [net.head, one], [SVMTarget(2)])[1].maps for one in refits])
    assert relative(maps.error, alone.std(0)) < 1e-9


def test_a_refit_without_a_boundary_starts_where_the_head_does(resampled, monkeypatch):
    net, refits = resampled
    cam, find, without = ContributionCAM(net, ["4"]), Boundary._search, net.head.resamples.heads[1]

    def refuse(self, target):
        if self.head.stages[-1] is without.stages[-1] and target == SVMTarget(2):
            raise NoBoundaryError("there is none")
        return find(self, target)

    labels = [int(label) for label in net.predict(IMAGES)]
    images = IMAGES[[labels.index(2), labels.index(0)]]  # whose start depends on no other image of the batch
    two, zero = each_alone(net, refits, SVMTarget(2), images[:1]), each_alone(net, refits, SVMTarget(0), images[1:])
    two[1] = explain_heads(cam, images[:1], [net.head, refits[1]], [SVMTarget(2)])[1]
    monkeypatch.setattr(Boundary, "_search", refuse)
    for can_look in (True, False):
        with contextlib.nullcontext() if can_look else forbid_sync():
            maps = ContributionCAM(net, ["4"]).explain(images, [SVMTarget()])
        for image, alone in enumerate((two, zero)):
            expected = torch.stack([one.maps for one in alone]).std(0)
            assert relative(maps.error[image : image + 1], expected) < 1e-9


@pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
def test_a_sign_is_sure_where_the_interval_leaves_out_0(resampled):
    net, _ = resampled
    maps = ContributionCAM(net, ["4"]).explain(IMAGES[:3], [SVMTarget(0)])
    for level in (0.5, 0.95):
        half = student.interval(level, 3)[1] * maps.error
        expected = (maps.maps - half > 0) | (maps.maps + half < 0)
        assert torch.equal(maps.sure(level), expected)
    assert 0 < maps.sure(0.5).sum() < maps.maps.numel()
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 95"):
        maps.sure(95)


def test_components_are_matched_by_direction_and_side(problems):
    _, features, labels = problems["pooled"]
    wide = (features - features.mean(0)) @ np.diag([30, 10, 3, 1, 0.3, 0.1, 0.03, 0.01]) + 1.0
    pipeline = make_pipeline(PCA(4), SVC()).fit(wide, labels)
    head = Head.of(pipeline)
    turned = make_pipeline(PCA(4), SVC()).fit(wide, labels)
    turned[0].components_ = turned[0].components_[[1, 0, 3, 2]] * np.array([[-1], [1], [1], [-1]])
    head.resamples = [turned, pipeline]
    assert head.resamples.matches[0] == [(1, 1.0), (0, -1.0), (3, -1.0), (2, 1.0)]
    assert head.resamples.matches[1] == [(b, 1.0) for b in range(4)]
    np.testing.assert_allclose(head.resamples.stability, np.ones(4))


def test_directions_are_those_of_the_reduction_behind_its_scaler(problems):
    _, features, labels = problems["pooled"]
    uneven = features * np.geomspace(0.01, 100, 8) + 1
    pipeline = clone(KNOWN["rbf"]).fit(uneven, labels)
    refits = refit(KNOWN["rbf"], uneven, labels)
    head = Head.of(pipeline)
    head.resamples = refits
    cosines = [np.square(pipeline[1].components_ @ one[1].components_.T) for one in refits]
    matched = [[of_refit[b, match] for b, (match, _) in enumerate(matches)] for of_refit, matches in
               zip(cosines, head.resamples.matches, strict=True)]  # fmt: skip
    np.testing.assert_allclose(head.resamples.stability, np.mean(matched, 0), atol=1e-9)
    best = [max(of_refit[range(4), order].sum() for order in itertools.permutations(range(4))) for of_refit in cosines]
    np.testing.assert_allclose(np.sum(matched, 1), best, atol=1e-9)


def test_components_of_equal_variance_are_said_to_be_unstable_once(problems):
    backbone, features, labels = problems["pooled"]
    pipeline = clone(KNOWN["rbf"]).fit(features, labels)
    net = PCASVMNet(backbone, pipeline).eval()
    net.head.resamples = resample_heads(pipeline, features, labels, n=4)
    cam = ContributionCAM(net, ["4"])
    with pytest.warns(UnstableComponentWarning, match=r"components .*, counted from 1 as in figures, are not stable"):
        maps = cam.explain(IMAGES[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cam.explain(IMAGES[:2])
    assert maps.columns["_stability"].shape == maps.values.shape
    unstable = maps.stability < 0.9
    assert unstable.any()
    assert net.head.resamples.unstable == unstable.nonzero().flatten().tolist()
    for column in (maps.error, maps.values_error, maps.resampled):
        assert column[:, unstable].isnan().all()
        assert column[:, ~unstable].isfinite().all()
    assert not maps.sure()[:, unstable].any()
    assert maps.stability[-1].isnan()  # a decision
    assert maps.error[:, -1].isfinite().all()
    cam.first_with_errors = -1
    last = cam.explain(IMAGES[:2])
    for name in ("error", "values_error", "resampled", "_stability"):
        torch.testing.assert_close(last.columns[name][:, -1], maps.columns[name][:, -1], equal_nan=True)
        assert last.columns[name][:, :-1].isnan().all()


def test_the_error_of_a_stable_component_is_that_of_its_match(problems):
    backbone, features, labels = problems["pooled"]
    features = (features - features.mean(0)) * np.geomspace(50, 0.01, 8)
    pipeline = make_pipeline(PCA(2), SVC()).fit(features, labels)
    refits = resample_heads(pipeline, features, labels, n=5)
    net = PCASVMNet(backbone, pipeline).eval()
    net.head.resamples = refits
    cam = ClosedFormGradCAM(net, ["4"])
    maps = cam.explain(IMAGES[:2], [PCATarget(0), PCATarget(0, sign="-")])
    assert (maps.stability > 0.9).all()
    alone = []
    for one in refits:
        directions = one.stages[0].components, net.head.stages[0].components
        cosines = (directions[0] @ directions[1][0]) / directions[0].norm(dim=1)
        match = int(cosines.abs().argmax())
        sign = float(cosines[match].sign())
        alone.append(sign * ClosedFormGradCAM(net.with_head(one), ["4"]).explain(IMAGES[:2], PCATarget(match)).maps)
    expected = torch.stack(alone).std(0)
    assert relative(maps.error[:, :1], expected) < 1e-9
    assert relative(maps.error[:, 1:], expected) < 1e-9
    assert relative(maps.resampled[:, 1:], -torch.stack(alone).mean(0)) < 1e-9


def test_a_component_that_points_the_other_way_is_turned(problems):
    backbone, features, _ = problems["pooled"]
    pipeline = make_pipeline(StandardScaler(), PCA(2)).fit(features)
    turned = make_pipeline(StandardScaler(), PCA(2)).fit(features)
    turned[1].components_ *= -1
    net = PCASVMNet(backbone, pipeline).eval()
    net.head.resamples = [turned, pipeline]
    maps = ClosedFormGradCAM(net, ["4"]).explain(IMAGES[:2], [PCATarget(1), PCATarget(1, sign="-")])
    torch.testing.assert_close(maps.resampled, maps.maps)
    assert float(maps.error.max()) < 1e-9 * float(maps.maps.abs().max())


def test_errors_have_the_factor_of_maps_that_underflow(problems):
    backbone, features, labels = problems["pooled"]
    pipeline = make_pipeline(StandardScaler(), PCA(4), SVC(gamma=10.0)).fit(features, labels)
    net = PCASVMNet(backbone, pipeline).eval()
    refits = resample_heads(pipeline, features, labels, n=3)
    net.head.resamples = refits
    x, target = 2 * IMAGES[:2], SVMTarget(0, versus=1)
    maps = ClosedFormGradCAM(net, ["4"]).explain(x, target)
    assert float(maps.log_scale.max()) < -5
    logs, alone = [], []
    for one in refits:
        own = ClosedFormGradCAM(net.with_head(one), ["4"]).explain(x, target)
        logs.append(own.log_scale)
        alone.append(own.maps)
    factors = [(log - maps.log_scale).exp().reshape(2, 1, 1, 1) for log in logs]
    expected = torch.stack([one * factor for one, factor in zip(alone, factors, strict=True)]).std(0)
    assert relative(maps.error, expected) < 1e-9


@pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
def test_errors_go_where_maps_go(resampled, tmp_path):
    net, _ = resampled
    cam = ContributionCAM(net, ["4"])
    maps = cam.explain(IMAGES[:3])
    part = maps[1:, 3:]
    torch.testing.assert_close(part.error, maps.error[1:, 3:], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(part.stability.nan_to_num(7), maps.stability[3:].nan_to_num(7))
    assert torch.equal(part.sure(), maps.sure()[1:, 3:])
    maps.save(tmp_path / "maps.safetensors")
    read = SignedMaps.load(tmp_path / "maps.safetensors")
    assert torch.equal(read.sure(0.8), maps.sure(0.8))
    assert torch.equal(read.values_error.nan_to_num(7), maps.values_error.nan_to_num(7))
    joined = SignedMaps.cat([maps[:1], maps[1:]])
    assert torch.equal(joined.sure(0.8), maps.sure(0.8))
    halved = replace(maps, log_scale=maps.log_scale)
    assert torch.equal(halved.error.nan_to_num(7), maps.error.nan_to_num(7))
    # The identity sums component maps, and errors of sums are no sums of errors.
    assert recombined(maps[:, :4], net.head, SVMTarget(0)).error is None


def test_without_resampled_heads_nothing_is_said(resampled):
    net, _ = resampled
    net.head.resamples = None
    maps = ContributionCAM(net, ["4"]).explain(IMAGES[:2])
    assert maps.error is None
    assert maps.stability is None
    with pytest.raises(ValueError, match=r"these maps have no errors: fit the model with resampled heads.*resample=30"):
        maps.sure()


def test_methods_that_run_again_and_again_have_no_errors(resampled):
    net, _ = resampled
    assert ShapCAM(net, ["4"], samples=4).explain(IMAGES[:1]).error is None


def test_of_a_forest_values_tell(problems):
    backbone, features, labels = problems["pooled"]
    pipeline = clone(FOREST).fit(features, labels)
    net = PCASVMNet(backbone, pipeline).eval()
    refits = resample_heads(pipeline, features, labels, n=3)
    net.head.resamples = refits
    maps = ContributionCAM(net, ["4"]).explain(IMAGES[:2], [SVMTarget(1)])
    net.head.resamples = None
    alone = torch.stack([one.maps for one in each_alone(net, refits, SVMTarget(1), IMAGES[:2])])
    assert relative(maps.error, alone.std(0)) < 1e-9


def test_heads_with_and_without_a_gradient_are_explained_apart(problems):
    backbone, features, labels = problems["pooled"]
    heads = [clone(KNOWN[name]).fit(features, labels) for name in ("forest", "rbf")]
    cam = ContributionCAM(PCASVMNet(backbone, heads[0]).eval(), ["4"])
    with pytest.raises(ValueError, match="explain the ones and the others by calls of their own"):
        explain_heads(cam, IMAGES[:2], heads, [SVMTarget(1)])
    apart = [explain_heads(cam, IMAGES[:2], [head], [SVMTarget(1)])[0] for head in heads]
    for maps, alone in zip(explain_heads(cam, IMAGES[:2], heads, [SVMTarget(1)], own_starts=True), apart, strict=True):
        assert torch.equal(maps.maps, alone.maps)


def test_errors_of_a_forest_are_by_the_permutations_of_the_method():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 14, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double().eval()
    features = net(IMAGES).detach().numpy()
    labels = np.arange(len(features)) % 2
    pipeline = make_pipeline(StandardScaler(), RandomForestClassifier(5, random_state=0)).fit(features, labels)
    forest = PCASVMNet(net, pipeline).eval()
    refits = [clone(pipeline).fit(features[n::2], labels[: len(features[n::2])]) for n in range(2)]
    forest.head.resamples = refits
    mean = package.mean_activations(forest, [IMAGES], "1", progress=False)
    options = {"samples": 16, "seed": 3, "baseline": "mean", "mean": mean}
    maps = ContributionCAM(forest, ["1"], **options).explain(IMAGES[:2], [SVMTarget(1)])
    alone = [
        ContributionCAM(PCASVMNet(net, one).eval(), ["1"], **options).explain(IMAGES[:2], [SVMTarget(1)])
        for one in refits
    ]
    assert maps.standard_errors is not None
    assert relative(maps.error, torch.stack([one.maps for one in alone]).std(0)) < 1e-9


def test_the_starts_of_several_heads_are_kept(problems, monkeypatch):
    backbone, features, labels = problems["pooled"]
    net = PCASVMNet(backbone, refit(KNOWN["rbf"], features, labels, 1)[0]).eval()
    heads = [package.Head.of(fitted) for fitted in refit(KNOWN["rbf"], features, labels)]
    cam = ContributionCAM(net, ["2"], mean=package.mean_activations(net, [IMAGES], "2", progress=False))
    targets = [SVMTarget(0, versus=1)]
    before = explain_heads(cam, IMAGES[:2], heads, targets, own_starts=True)
    searches, solve = [], boundary_path._solved
    monkeypatch.setattr(boundary_path, "_solved", lambda *args: searches.append(args) or solve(*args))
    after = explain_heads(cam, IMAGES[:2], heads, targets, own_starts=True)
    assert not searches
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.maps, other.maps)
    cam.mean = package.mean_activations(net, [IMAGES[1:]], "2", progress=False)
    explain_heads(cam, IMAGES[:2], heads, targets, own_starts=True)
    assert searches
