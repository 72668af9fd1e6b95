"""Recombined maps where sizes coincide, factors were taken out, or the reduction is not known."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.base import clone
from sklearn.decomposition import PCA, KernelPCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, PowerTransformer, QuantileTransformer, StandardScaler
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    BaselineWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    Head,
    HotellingTarget,
    PCASVMNet,
    PCATarget,
    SignedMaps,
    SVMTarget,
    recombined,
)
from pytorch_grad_cam_pcasvm.head import storage
from pytorch_grad_cam_pcasvm.maps import decision_steps
from pytorch_grad_cam_pcasvm.maps.recombination import compute_result
from pytorch_grad_cam_pcasvm.maps.signed_maps import FORMATS
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.targets.output_gradients import OutputGradients

IMAGES = torch.randn(9, 2, 7, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = np.arange(9) % 2


def net_of(*stages: Any) -> PCASVMNet:
    """Return six pooled features and a head that was fitted on them."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double().eval()
    features = backbone(IMAGES).detach().numpy()
    return PCASVMNet(backbone, make_pipeline(*stages).fit(features, LABELS))


@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_as_many_components_as_features(method: Any, tmp_path: Path) -> None:
    """The whole pipeline is a pipeline all the same, and not a head that was fitted on the components."""
    net = net_of(StandardScaler(), PCA(6), SVC())
    cam = method(net, ["1"])
    targets = (SVMTarget(), PCATarget(4, sign="-"))
    components, expected = cam.explain(IMAGES), cam.explain(IMAGES, targets)
    components.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    behind = Head(list(net.head.stages)[net.head.component_position :])
    for maps, head in ((components, net.head), (components, behind), (loaded, behind)):
        actual = recombined(maps, head, targets)
        assert relative(actual.maps, expected.maps) < 1e-10
        assert relative(actual.values, expected.values) < 1e-10
    # A file cannot tell whether a head with a PCA was fitted on the features or on the components.
    with pytest.raises(ValueError, match=r"as many.* pass the steps behind the PCA alone, as pipeline\[2:\]"):
        recombined(loaded, net.head, targets)


@pytest.mark.parametrize("source", ["a file", "a file of 0.4", "a store"])
def test_a_head_with_a_pca_of_its_own_was_fitted_on_components_that_are_fewer(source: str, tmp_path: Path) -> None:
    net = net_of(StandardScaler(), PCA(3), SVC())
    path, maps = tmp_path / "maps.safetensors", ContributionCAM(net, ["1"]).explain(IMAGES)
    components = maps.output.components.detach().numpy()
    own = make_pipeline(PCA(3, whiten=True), SVC(gamma=0.7)).fit(components, LABELS)
    expected = recombined(maps, own, [SVMTarget(1)])
    assert relative(expected.values[:, 0], torch.from_numpy(own.decision_function(components))) < 1e-10
    maps.save(path)
    metadata, tensors = storage.read(path, "maps.save(path)", FORMATS)
    if source != "a file":
        metadata = {name: text for name, text in metadata.items() if name not in ("width", "sha256")}
        unknown = {"output.features"} if source == "a store" else set()
        storage.write(path, {name: x for name, x in tensors.items() if name not in unknown}, metadata)
    loaded = SignedMaps.load(path)
    if source == "a store":
        assert loaded.width is None
        with pytest.raises(ValueError, match="as many, or the file of these maps does not tell"):
            recombined(loaded, own, [SVMTarget(1)])
        return
    assert loaded.width == 6
    assert relative(recombined(loaded, own, [SVMTarget(1)]).maps, expected.maps) < 1e-10


def test_maps_that_were_recombined_know_what_their_components_were_made_of(tmp_path: Path) -> None:
    net = net_of(StandardScaler(), PCA(3), SVC())
    maps = ContributionCAM(net, ["1"]).explain(IMAGES)
    own = make_pipeline(PCA(3, whiten=True), SVC(gamma=0.7)).fit(maps.output.components.detach().numpy(), LABELS)
    expected = recombined(maps, own, [SVMTarget(1)])
    once = recombined(maps, own, [*(PCATarget(b) for b in range(3)), SVMTarget(1)])
    once.save(tmp_path / "maps.safetensors")
    for again in (once, SignedMaps.load(tmp_path / "maps.safetensors")):
        assert again.width == 6
        assert relative(recombined(again, own, [SVMTarget(1)]).maps, expected.maps) < 1e-10


def test_factors_of_components_far_from_all_samples() -> None:
    net = net_of(StandardScaler(), KernelPCA(4, kernel="rbf", gamma=1.0), SVC(kernel="linear"))
    cam = ClosedFormGradCAM(net, ["1"])
    factors = torch.tensor([1.0, 60.0, 70.0, 80.0], dtype=torch.float64).reshape(4, 1, 1, 1)
    targets = [SVMTarget(1), PCATarget(2), SVMTarget(0)]
    components = cam.explain(factors * IMAGES[:4])
    assert (components.log_scale < -800).any(), "no factor was taken out"
    expected, actual = cam.explain(factors * IMAGES[:4], targets), recombined(components, net.head, targets)
    # The factor may be split otherwise between a map and its logarithm; the product is underflow.
    assert relative(actual.log_scale + actual.nu.log(), expected.log_scale + expected.nu.log()) < 1e-10
    for one, other in zip(actual.maps.flatten(0, 1), expected.maps.flatten(0, 1), strict=True):
        assert relative(one / one.abs().max(), other / other.abs().max()) < 1e-8


def test_recombined_twice() -> None:
    """Component maps that were recombined know only the part of the head behind the components."""
    net = net_of(StandardScaler(), PCA(3), SVC())
    cam = ContributionCAM(net, ["1"])
    components = recombined(cam.explain(IMAGES), net.head, [PCATarget(b) for b in range(3)])
    later = SVC(gamma=0.5).fit(net(IMAGES).components.detach().numpy(), LABELS)
    expected = recombined(cam.explain(IMAGES), later, [SVMTarget(1)])
    assert relative(recombined(components, later, [SVMTarget(1)]).maps, expected.maps) < 1e-10
    with pytest.raises(ValueError, match="pass the whole pipeline as the head"):
        recombined(components, later, [HotellingTarget()])


@pytest.mark.parametrize("count", [3, 6])
def test_the_features_are_not_known(count: int) -> None:
    """As for maps from a store, which keeps components, but no features."""
    net = net_of(StandardScaler(), PCA(count), SVC())
    cam = ContributionCAM(net, ["1"])
    components = cam.explain(IMAGES, [PCATarget(b) for b in range(count)])
    position = net.head.component_position
    trace = net.head.resume(position, components.output.components)
    known = replace(components, output=HeadOutput.of(net.head, trace))
    assert known.output.features is None
    expected, actual = cam.explain(IMAGES, [SVMTarget()]), recombined(known, net.head)
    assert relative(actual.maps, expected.maps) < 1e-10


def test_some_of_the_components_say_nothing_of_all() -> None:
    net = net_of(StandardScaler(), PCA(3))
    maps = ClosedFormGradCAM(net, ["1"]).explain(IMAGES)
    with pytest.raises(ValueError, match="pass the whole pipeline as the head"):
        recombined(maps[:, :2], net.head, [HotellingTarget()])


@pytest.mark.parametrize(
    "between", [StandardScaler(), QuantileTransformer(n_quantiles=9), Normalizer(), PowerTransformer()]
)
def test_a_classifier_alone_behind_further_steps_is_refused_and_with_them_exact(between: Any, tmp_path: Path) -> None:
    """Which numbers it was fitted on cannot be known; with its steps it gives the values of its own pipeline."""
    net = net_of(StandardScaler(), PCA(3), clone(between), SVC())
    features = net.backbone(IMAGES).detach().numpy()
    before = make_pipeline(StandardScaler(), PCA(3), between).fit(features)
    maps = ContributionCAM(net, ["1"]).explain(IMAGES)
    maps.save(tmp_path / "maps.safetensors")
    for position, rows in ((3, before.transform(features)), (2, before[:2].transform(features))):
        other = SVC(kernel="poly").fit(rows, LABELS)
        for components in (maps, SignedMaps.load(tmp_path / "maps.safetensors")):
            with pytest.raises(ValueError, match="steps between them and its classifier"):
                recombined(components, other, [SVMTarget(1)])
            actual = recombined(components, [before[:position], other], [SVMTarget(1)])
            assert relative(actual.values[:, 0], torch.from_numpy(other.decision_function(rows))) < 1e-10
    assert recombined(maps, net.head, [SVMTarget(1)]).values.shape == (9, 1)


def test_the_layers_of_one_classifier_are_no_steps_between() -> None:
    net = net_of(StandardScaler(), PCA(3), MLPClassifier((3,), max_iter=50, random_state=0))
    maps = ContributionCAM(net, ["1"]).explain(IMAGES)
    rows = maps.output.components.numpy()
    other = SVC().fit(rows, LABELS)
    actual = recombined(maps, other, [SVMTarget(1)])
    assert relative(actual.values[:, 0], torch.from_numpy(other.decision_function(rows))) < 1e-10


@pytest.mark.parametrize("remainder", [True, False], ids=["of components", "of decisions alone"])
def test_sums_of_component_maps_by_hand(remainder: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    components = SimpleNamespace(
        maps=draw(2, 3, 4, 5),
        weights=draw(2, 3, 6),
        log_scale=3 * draw(2, 3),
        remainder=draw(2, 3) if remainder else None,
    )
    grads, excess, left, log_scale = draw(2, 4, 3), draw(2, 4), draw(2, 4), draw(2, 4)
    grads[0, 1] = 0
    seeds = OutputGradients([grads.transpose(0, 1)], log_scale, values=draw(2, 4), excess=excess, remainder=left)
    result = compute_result(components, seeds)
    factors = grads * components.log_scale.exp().unsqueeze(1)
    scale = (result.log_scale - log_scale).exp()
    of_maps = torch.einsum("nkb,nbhw->nkhw", factors, components.maps) - (excess / 20)[..., None, None]
    of_rest = left + (torch.einsum("nkb,nb->nk", factors, components.remainder) if remainder else 0)
    assert relative(result.maps * scale[..., None, None], of_maps) < 1e-12
    assert (
        relative(result.weights * scale[..., None], torch.einsum("nkb,nbt->nkt", factors, components.weights)) < 1e-12
    )
    assert relative(result.remainder * scale, of_rest) < 1e-12
    assert (result.maps.abs() < 1e3 * components.maps.abs().amax()).all()


STEPS = {
    "neutral": ("neutral", [StandardScaler(), PCA(3), SVC(C=3.0)], 1.0),
    "mean": ("mean", [StandardScaler(), PCA(3), SVC(C=3.0)], 1.0),
    "far from all support vectors": (38 * IMAGES[0], [StandardScaler(), PCA(3), SVC(gamma=9.0)], 40.0),
    "a reduction alone": ("neutral", [StandardScaler(), PCA(3)], 1.0),
}


@pytest.mark.parametrize("case", STEPS)
def test_a_decision_is_its_value_at_the_start_and_its_steps(case: str) -> None:
    baseline, stages, factor = STEPS[case]
    net = net_of(*stages)
    components = ContributionCAM(net, ["1"], baseline=baseline).explain(
        factor * IMAGES, [PCATarget(b) for b in range(3)]
    )
    tail = Head(list(net.head.stages)[net.head.component_position :]) if len(stages) > 2 else None
    for target in (PCATarget(1, "-"), HotellingTarget(), *([] if tail is None else [SVMTarget(1), SVMTarget()])):
        g, p0, log_scale = decision_steps(components, net.head, target)
        whole = recombined(components, net.head, [target])
        assert whole.effects is None
        change = log_scale.exp() * (g * (components.values - p0)).sum(1)
        size = log_scale.exp() * (g * (components.values - p0)).abs().sum(1)
        assert ((whole.baseline_values[:, 0] + change - whole.values[:, 0]).abs() <= 1e-9 * size).all()
        if isinstance(target, SVMTarget):
            assert (log_scale < -30).any() == (factor > 1)
            assert (p0.abs().amax() < 1e-9) == (baseline == "mean")
        elif factor == 1:
            assert p0.abs().amax() < 1e-9  # the mean


@pytest.mark.parametrize("known", [True, False], ids=["the whole pipeline", "the classifier alone"])
def test_where_a_forest_is_undecided_the_variances_of_its_components_tell(known: bool, tmp_path: Path) -> None:
    net = net_of(StandardScaler(), PCA(3), RandomForestClassifier(5, random_state=0))
    ContributionCAM(net, ["1"]).explain(IMAGES).save(tmp_path / "maps.safetensors")
    components = SignedMaps.load(tmp_path / "maps.safetensors")
    forest = RandomForestClassifier(5, random_state=0).fit(net(IMAGES).components.detach().numpy(), LABELS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BaselineWarning)
        recombined(components, net.head if known else forest, [SVMTarget()])
        assert [warning.category for warning in told] == ([] if known else [BaselineWarning])
        told.clear()
        # A scaler before the classifier knows them, too.
        scaled = make_pipeline(StandardScaler(), clone(forest)).fit(net(IMAGES).components.detach().numpy(), LABELS)
        recombined(components, scaled, [SVMTarget()])
        assert not told
