"""The methods: against the host, against their papers' formulas, and what all of them have in common."""

import copy
import gc
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import pytorch_grad_cam
import torch
from packaging.version import Version
from problems import T, explained
from pytorch_grad_cam.utils.image import scale_cam_image
from pytorch_grad_cam.utils.model_targets import (
    ClassifierOutputReST,
    ClassifierOutputSoftmaxTarget,
    ClassifierOutputTarget,
)
from pytorch_grad_cam.utils.svd_on_activations import get_2d_projection
from reference import activations_of, gradient_and_hessian_product, map_of_paper, relative, stretched, values_of_rows
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from test_grad_cam_protocol import assert_same_as_host
from test_grad_cam_protocol import problem as host_problem
from torch import nn

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ClosedFormGradCAMPlusPlus,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ShapCAM,
    SignedMaps,
    SVMTarget,
    recombined,
    smoothed,
)

GRADIENT = ("GradCAM", "HiResCAM", "XGradCAM", "GradCAMPlusPlus", "LayerCAM", "GradCAMElementWise", "ShapleyCAM")
OF_THE_HOST = (*GRADIENT, "AblationCAM", "ScoreCAM")
EVERY = (*(f"ClosedForm{name}" for name in OF_THE_HOST), "ContributionCAM", "LIFTCAM", "RelevanceCAM", "ShapCAM")
POSITIONS = {"plane": 12, "volume": 12}
LINEAR = ("ClosedFormGradCAM", "ClosedFormHiResCAM", "ClosedFormXGradCAM", "ContributionCAM")


def ours(name: str, *args: Any, **options: Any) -> Any:
    return getattr(package, name)(*args, **options)


# --- the host ---------------------------------------------------------------------------------------------------------


def scaled_up(output: Any) -> torch.Tensor:
    """Of a gradient that is large next to the 1e-6 in the host's Grad-CAM++."""
    return 1e4 * output[1]


def host_maps(name: str, net: Any, layers: Any, x: Any, targets: Any, reshape: Any = None, **smoothing: bool) -> Any:
    cam = getattr(pytorch_grad_cam, name)(net, layers, reshape)
    try:
        return cam(x, targets, **smoothing)
    finally:
        # ShapleyCAM's gradients are views, at which the host's release() fails and leaves its hooks behind.
        cam.activations_and_grads.gradients, cam.activations_and_grads.activations = [], []
        cam.activations_and_grads.release()


def our_maps(name: str, net: Any, layers: Any, x: Any, targets: Any, reshape: Any = None, **smoothing: bool) -> Any:
    options = {"softmax": True} if name == "ScoreCAM" else {}
    return ours(f"ClosedForm{name}", net, layers, reshape, **options)(x, targets, **smoothing)


def host_targets(name: str) -> list[Any]:
    if name == "GradCAMPlusPlus":
        return [scaled_up, scaled_up]
    # The host's Ablation-CAM divides by the score: that of the labels here is positive.
    return [SVMTarget("cat"), SVMTarget("dog")] if name == "AblationCAM" else [SVMTarget("dog"), SVMTarget("dog")]


@pytest.mark.parametrize("smoothing", [{}, {"eigen_smooth": True}], ids=["plain", "eigen"])
@pytest.mark.parametrize(
    ("name", "kind"),
    # The host's Ablation-CAM and Score-CAM have two dimensions only.
    [*((name, "rgb") for name in OF_THE_HOST), *((name, "volume") for name in GRADIENT)],
)
def test_the_host_on_an_svm(name: str, kind: str, smoothing: dict[str, bool]) -> None:
    if kind == "volume" and name in ("XGradCAM", "GradCAMPlusPlus") and Version(version("grad-cam")) < Version("1.5.6"):
        pytest.skip("this grad-cam's own raises on volumes")
    p = host_problem(kind)
    x, layers, targets = p.x[:2], p.layers("features.4"), host_targets(name)
    if name == "AblationCAM":
        assert min(target(row).item() for target, row in zip(targets, p.net(x), strict=True)) > 0.1
    expected = host_maps(name, p.net, layers, x, targets, **smoothing)
    assert_same_as_host(our_maps(name, p.net, layers, x, targets, **smoothing), expected)


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_the_host_on_an_ordinary_network(name: str) -> None:
    p = host_problem()
    x = p.x[:2]
    scores = p.backbone(x)
    chosen = [int(row.argmax()) for row in scores]
    assert scores.amax(1).min() > 0  # the host's Ablation-CAM divides by it
    targets = [scaled_up] * 2 if name == "GradCAMPlusPlus" else [ClassifierOutputTarget(c) for c in chosen]
    expected = host_maps(name, p.backbone, p.layers("features.4"), x, targets)
    assert_same_as_host(our_maps(name, p.backbone, p.layers("features.4"), x, targets), expected)


@pytest.mark.parametrize("name", [name for name in GRADIENT if name != "ShapleyCAM"])  # whose graph is gone by then
def test_the_host_on_several_layers_some_of_them_negative(name: str) -> None:
    p = host_problem()
    x, layers, targets = p.x[:2], p.layers("features.3", "features.2"), host_targets(name)
    assert_same_as_host(our_maps(name, p.net, layers, x, targets), host_maps(name, p.net, layers, x, targets))


# --- the papers' formulas ---------------------------------------------------------------------------------------------

FORMULAS = {
    "negative activations": ("sigmoid", "rbf", 3, "plane", False),
    "blank regions": ("relu", "rbf", 2, "plane", True),
    "a linear SVM": ("gelu", "linear", 3, "plane", True),
    "three dimensions": ("sigmoid", "poly", 3, "volume", False),
    "three dimensions, pooled": ("pooled", "rbf", 2, "volume", True),
    "squeeze-excite": ("squeeze-excite", "rbf", 3, "plane", False),
    "layer norm": ("layer norm", "sigmoid", 3, "plane", True),
    "kernel pca": ("pooled", "kernel pca", 3, "plane", False),
}


def formula_problem(case: str) -> Any:
    path, head, classes, size, rectified = FORMULAS[case]
    return explained(path, head, classes, size=size, rectified=rectified, n=2)


def maps_of_paper(name: str, net: Any, layer: Any, x: Any, targets: Any, sign: float = 1.0) -> torch.Tensor:
    columns = []
    for target in targets:
        f, d, hf = (part.numpy() for part in gradient_and_hessian_product(net, layer, x, target))
        columns.append([map_of_paper(name, *image) for image in zip(f, sign * d, sign * hf, strict=True)])
    return torch.tensor(np.array(columns)).transpose(0, 1)


@pytest.mark.parametrize("case", FORMULAS)
@pytest.mark.parametrize("name", GRADIENT)
def test_the_paper(name: str, case: str) -> None:
    p = formula_problem(case)
    assert bool((activations_of(p.net, p.layer, p.x).flatten(2) == 0).all(-1).any()) is p.rectified
    targets = [PCATarget(0), PCATarget(1, "-"), SVMTarget("bee"), SVMTarget(), SVMTarget(versus="runner-up")]
    maps = ours(f"ClosedForm{name}", p.net, [p.layer]).explain(p.x, targets)
    size = maps.log_scale.exp()[(..., *[None] * (maps.maps.dim() - 2))]
    assert relative(maps.maps * size, maps_of_paper(name, p.net, p.layer, p.x, targets)) < 1e-10
    opposite = -maps.maps if maps.opposite is None else maps.opposite
    assert relative(opposite * size, maps_of_paper(name, p.net, p.layer, p.x, targets, -1.0)) < 1e-10


CALLABLES = {
    "score": ClassifierOutputTarget(1),
    "softmax": ClassifierOutputSoftmaxTarget(1),
    "rest": ClassifierOutputReST(1),
    "product": lambda output: output[0] * output[1],
}


@pytest.mark.parametrize("kind", ["svm", "ordinary"])
@pytest.mark.parametrize("target", CALLABLES)
@pytest.mark.parametrize("name", GRADIENT)
def test_the_paper_of_a_target_that_is_not_linear(name: str, target: str, kind: str) -> None:
    p = explained("sigmoid", "rbf", n=2)
    net = p.net if kind == "svm" else ordinary(p)
    maps = ours(f"ClosedForm{name}", net, [p.layer]).explain(p.x, [CALLABLES[target]])
    assert relative(maps.maps, maps_of_paper(name, net, p.layer, p.x, [CALLABLES[target]])) < 1e-10


@pytest.mark.parametrize("where", ["outside", "in forward"])
def test_shapley_cam_in_inference_mode(where: str) -> None:
    p = explained("gelu", "rbf")
    cam = ClosedFormShapleyCAM(p.net, [p.layer])
    expected = cam.explain(p.x, p.targets)
    if where == "outside":
        with torch.inference_mode():
            actual = cam.explain(p.x, p.targets)
    else:
        net = copy.deepcopy(p.net)
        net.backbone.forward = torch.inference_mode()(net.backbone.forward)
        actual = ClosedFormShapleyCAM(net, ["features"]).explain(p.x, p.targets)
    assert relative(actual.maps, expected.maps) < 1e-12
    assert relative(actual.maps, ours("ClosedFormGradCAM", p.net, [p.layer]).explain(p.x, p.targets).maps) > 1e-3


def ordinary(p: Any) -> nn.Module:
    last = nn.Linear(9, 3).double().requires_grad_(requires_grad=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        nn.init.normal_(last.weight)
    last.bias -= last(p.backbone(p.images(60, seed=4))).mean(0)  # so that each class wins some images
    return nn.Sequential(p.backbone, last).eval()


def fit_far_head(p: Any) -> Any:
    """Return a head of two classes, with each support vector far from every image."""
    head = make_pipeline(StandardScaler(), PCA(4), SVC(C=2.0)).fit(
        p.backbone(p.images(60, seed=4)).numpy(), np.array(p.labels)[np.arange(60) % 2]
    )
    head[-1].support_vectors_[:, 0] += 100.0
    return head


def test_grad_cam_plus_plus_knows_the_size_that_was_taken_out() -> None:
    # The same machine, its value times exp(-800): where alpha is 1/2 the map is Grad-CAM's of the rising positions.
    p = explained("pooled", "rbf", 2, n=2)
    head = fit_far_head(p)
    net = PCASVMNet(p.backbone, head)
    plus, layer = (kind(net, [p.layer]).explain(p.x, [SVMTarget("bee")]) for kind in
                   (ClosedFormGradCAMPlusPlus, ClosedFormLayerCAM))  # fmt: skip
    assert (plus.log_scale < -745).all()
    assert relative(plus.maps, layer.maps * POSITIONS["plane"] / 2) < 1e-12
    assert relative(plus.opposite, layer.opposite * POSITIONS["plane"] / 2) < 1e-12


FAR = ("HiResCAM", "XGradCAM", "LayerCAM", "GradCAMElementWise", "ShapleyCAM")


@pytest.mark.parametrize("name", [*(f"ClosedForm{name}" for name in FAR), "ContributionCAM", "LIFTCAM", "RelevanceCAM"])
def test_far_away_a_map_is_that_of_near_by_times_what_was_taken_out(name: str) -> None:
    # Nothing lies along the last component: with its support vectors moved along it, the machine is exp(-900) times it.
    p = explained("relu", "rbf", 2, n=2, rectified=True)
    head = make_pipeline(StandardScaler(), PCA(4), SVC(C=2.0, gamma=1.0)).fit(
        p.backbone(p.images(60, seed=4)).numpy(), np.array(p.labels)[np.arange(60) % 2]
    )
    head[1].components_[3], head[-1].support_vectors_[:, 3] = 0.0, 0.0
    near = ours(name, PCASVMNet(p.backbone, head), [p.layer]).explain(p.x, [SVMTarget("bee")])
    head[-1].support_vectors_[:, 3] = 30.0
    far = ours(name, PCASVMNet(p.backbone, head), [p.layer]).explain(p.x, [SVMTarget("bee")])
    assert (far.log_scale < -745).all()
    factor = (far.log_scale + 900 - near.log_scale).exp()
    assert relative(far.maps * factor[..., None, None], near.maps) < 1e-9
    assert relative(far.weights * factor[..., None], near.weights) < 1e-9
    if near.opposite is not None:
        assert relative(far.opposite * factor[..., None, None], near.opposite) < 1e-9


@pytest.mark.parametrize("case", ["gelu", "pooled"])
def test_weights_of_positions_are_told_as_their_sums(case: str) -> None:
    p, targets = explained(case, "rbf", size="small"), [PCATarget(0), SVMTarget("bee")]
    for name, part in (("LayerCAM", torch.relu), ("GradCAMElementWise", torch.as_tensor)):
        weights = ours(f"ClosedForm{name}", p.net, [p.layer]).explain(p.x, targets).weights
        for k, target in enumerate(targets):
            _, d, _ = gradient_and_hessian_product(p.net, p.layer, p.x, target)
            assert relative(weights[:, k], part(d).flatten(2).sum(-1)) < 1e-10


# --- Score-CAM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["plane", "volume"])
@pytest.mark.parametrize("rectified", [False, True])
def test_score_cam_masks_one_channel_at_a_time(size: str, rectified: bool) -> None:
    p = explained("gelu", "rbf", size=size, rectified=rectified, n=2)
    targets = [PCATarget(0), SVMTarget("bee"), SVMTarget(versus="runner-up", sign="-"), CALLABLES["softmax"]]
    named = [PCATarget(0), SVMTarget("bee"), None, CALLABLES["softmax"]]  # of masked images another may win
    f, output = activations_of(p.net, p.layer, p.x), p.net(p.x)
    expected = torch.zeros(2, 4, T, dtype=torch.float64)
    blank = p.net(torch.zeros_like(p.x[:1]))
    for n in range(2):
        ranking = output.head.voting.ranking(output.decision)[n].argsort(descending=True).tolist()
        named[2] = SVMTarget(p.labels[ranking[0]], versus=p.labels[ranking[1]], sign="-")
        for t in range(T):
            masked = p.net(p.x[n : n + 1] * torch.tensor(stretched(f[n, t].numpy(), p.x.shape[2:])))
            for k, target in enumerate(named):
                expected[n, k, t] = float(target(masked[0])) - float(target(blank[0]))
    for options in ({}, {"batch_size": 2}):
        maps = ClosedFormScoreCAM(p.net, [p.layer], **options).explain(p.x, targets)
        assert relative(maps.weights, expected) < 1e-10
        assert relative(maps.maps, torch.einsum("nkt,nt...->nk...", expected, f)) < 1e-10
    assert relative(maps.values, torch.stack([values_of_rows(target, output) for target in targets], 1)) < 1e-12
    softmax = ClosedFormScoreCAM(p.net, [p.layer], softmax=True).explain(p.x, targets)
    assert relative(softmax.weights, expected.softmax(-1)) < 1e-10
    few = ClosedFormScoreCAM(p.net, [p.layer], channels=2).explain(p.x, targets)
    for n in range(2):
        chosen = f[n].flatten(1).var(1).argsort(descending=True)[:2]
        kept = torch.zeros_like(expected[n]).index_copy(1, chosen, expected[n][:, chosen])
        assert relative(few.weights[n], kept) < 1e-10


def test_score_cam_runs_its_stems_once_for_all_targets_and_signs() -> None:
    p = explained("gelu", "rbf")
    seen: list[int] = []
    cam = ClosedFormScoreCAM(p.net, [p.layer])
    cam.explain(p.x)
    handle = p.layer[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
    for targets in ([SVMTarget()], p.targets):
        seen.clear()
        maps = cam.explain(p.x, targets)
        assert sum(seen) == len(p.x) * (1 + T) + 1
    handle.remove()
    same = cam.explain(p.x, [SVMTarget("ant"), SVMTarget("ant", sign="-")])
    assert relative(same.maps[:, 0], -same.maps[:, 1]) < 1e-12
    assert maps.opposite is None


# --- signs, and what SignedMaps keep ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_the_opposite_is_the_map_of_the_negated_target(name: str) -> None:
    p = explained("gelu", "rbf", size="small", rectified=name == "RelevanceCAM")
    cam = ours(name, p.net, [p.layer])
    pairs = [(PCATarget(1), PCATarget(1, "-")), (SVMTarget("bee"), SVMTarget("bee", sign="-"))]
    maps, negated = (cam.explain(p.x, [pair[i] for pair in pairs]) for i in range(2))
    assert relative(-maps.maps if maps.opposite is None else maps.opposite, negated.maps) < 1e-12
    assert relative(maps.nu, negated.nu) < 1e-12
    for scale in ("map", "target", "none"):
        assert relative(maps.negative(scale=scale), negated.positive(scale=scale)) < 1e-12
    both = torch.maximum(maps.positive(), maps.negative())
    assert (both.amax((2, 3)) == 1).all()
    assert relative(maps.values, -negated.values) < 1e-12


OPTIONAL = {
    "ClosedFormLayerCAM": {"opposite"},
    "ClosedFormGradCAM": set(),
    "ContributionCAM": {"baseline_values"},
    "ShapCAM": {"baseline_values", "standard_errors"},
}


def parts(maps: SignedMaps) -> dict[str, torch.Tensor]:
    names = ("maps", "weights", "values", "nu", "log_scale", "opposite", "baseline_values", "standard_errors")
    return {name: getattr(maps, name) for name in names if getattr(maps, name) is not None}


@pytest.mark.parametrize("name", OPTIONAL)
def test_signed_maps_keep_what_some_methods_have(name: str, tmp_path: Any) -> None:
    p = explained("gelu", "rbf", size="small")
    maps = ours(name, p.net, [p.layer]).explain(p.x, p.targets)
    whole = parts(maps)
    assert whole.keys() - {"maps", "weights", "values", "nu", "log_scale"} == OPTIONAL[name]
    assert maps.linear is (name in LINEAR)
    chosen = maps[[2, 0], [1, 4]]
    for key, tensor in parts(chosen).items():
        assert torch.equal(tensor, whole[key][[2, 0]][:, [1, 4]])
    joined = SignedMaps.cat([maps[:1], maps[1:]])
    maps.save(tmp_path / "maps.safetensors")
    loaded = SignedMaps.load(tmp_path / "maps.safetensors")
    for other in (joined, loaded, maps.to("cpu"), maps.cpu()):
        assert parts(other).keys() == whole.keys()
        assert all(torch.equal(tensor, whole[key]) for key, tensor in parts(other).items())
        assert (other.linear, list(other.targets)) == (maps.linear, list(maps.targets))
    single = maps.to(torch.float32)
    for key, tensor in parts(single).items():
        exact = key in ("values", "baseline_values", "log_scale")
        assert tensor.dtype == (torch.float64 if exact else torch.float32)
        assert torch.equal(tensor, whole[key].to(tensor.dtype))
    assert single.linear is chosen.linear is maps.linear


def test_files_from_before_there_were_methods_load(tmp_path: Any) -> None:
    p = explained("gelu", "rbf")
    maps = ClosedFormGradCAM(p.net, [p.layer]).explain(p.x)
    maps.save(tmp_path / "new.safetensors")
    with safe_open(tmp_path / "new.safetensors", "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key not in ("linear", "sha256")}
        metadata["format"] = "pytorch_grad_cam_pcasvm maps 1"
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "old.safetensors", metadata)
    with pytest.warns(UserWarning, match="of version 0.2 and has no checksum"):
        old = SignedMaps.load(tmp_path / "old.safetensors")
    assert parts(old).keys() == parts(maps).keys()
    assert torch.equal(old.maps, maps.maps)
    assert old.linear is False


def test_maps_of_different_methods_are_not_joined() -> None:
    p = explained("gelu", "rbf", size="small")
    made = {name: ours(name, p.net, [p.layer]).explain(p.x) for name in ("ClosedFormGradCAM", *OPTIONAL)}
    made["shapley"] = ClosedFormShapleyCAM(p.net, [p.layer]).explain(p.x)
    for other in ("ClosedFormLayerCAM", "ContributionCAM", "ShapCAM", "shapley"):
        for order in ((made["ClosedFormGradCAM"], made[other]), (made[other], made["ClosedFormGradCAM"])):
            with pytest.raises(ValueError, match="different methods"):
                SignedMaps.cat(order)


# --- recombined -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *((name, head) for name in LINEAR for head in ("rbf", "kernel pca")),
        *(("ClosedFormGradCAM", head) for head in ("linear", "whitened", "regressor")),
        *(("ContributionCAM", head) for head in ("poly", "calibrated", "one vs rest", "one class")),
    ],
)
def test_recombined_equals_explain(name: str, head: str) -> None:
    p = explained("gelu", head)
    cam = ours(name, p.net, [p.layer])
    expected = cam.explain(p.x, p.targets)
    actual = recombined(cam.explain(p.x), p.fitted, p.targets)
    for key, tensor in parts(expected).items():
        if key != "log_scale":
            assert relative(getattr(actual, key), tensor) < 1e-10
    assert parts(actual).keys() == parts(expected).keys()
    assert list(actual.targets) == list(p.targets)
    predicted = recombined(cam.explain(p.x), p.fitted)
    assert relative(predicted.maps, cam.explain(p.x, [SVMTarget()]).maps) < 1e-10


LATER = {
    "rbf": lambda: make_pipeline(StandardScaler(), SVC()),
    "linear": lambda: LinearSVC(),
    "of their own components": lambda: make_pipeline(PCA(4), SVC()),
    "of fewer components": lambda: make_pipeline(PCA(2), SVC()),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("name", LINEAR)
def test_recombined_with_a_head_fitted_later_on_the_components(name: str, later: str) -> None:
    p = explained("sigmoid", "rbf")
    # Of other images than the components', so that a second reduction turns them.
    components = p.net(p.images(50, seed=8)).components.numpy() + np.array([0.0, 3, 0, 1])
    head = LATER[later]().fit(components * [1, 3, 1, 1], np.array(["x", "y", "z", "x", "z"])[np.arange(50) % 5])
    net = PCASVMNet(p.backbone, [p.fitted[0], p.fitted[1], head])
    targets = [SVMTarget("y"), SVMTarget("x", versus="z"), SVMTarget(versus="runner-up"), SVMTarget()]
    expected = ours(name, net, [p.layer]).explain(p.x, targets)
    actual = recombined(ours(name, p.net, [p.layer]).explain(p.x), head, targets)
    assert relative(actual.maps, expected.maps) < 1e-10
    assert relative(actual.values, expected.values) < 1e-10
    assert list(actual.output.labels()) == list(expected.output.labels())


@pytest.mark.parametrize("name", LINEAR)
def test_recombined_far_from_every_support_vector(name: str) -> None:
    p = explained("pooled", "rbf", 2)
    head = fit_far_head(p)
    cam = ours(name, PCASVMNet(p.backbone, head), [p.layer])
    cam.baseline = "zero"  # on the boundary the kernel is not as far away
    expected, actual = cam.explain(p.x, [SVMTarget("bee")]), recombined(cam.explain(p.x), head, [SVMTarget("bee")])
    assert (expected.log_scale < -745).all()
    factor = (actual.log_scale - expected.log_scale).exp()[..., None, None]
    assert relative(actual.maps * factor, expected.maps) < 1e-9


@pytest.mark.parametrize("name", [name for name in EVERY if name not in LINEAR])
def test_maps_that_are_no_sums_of_component_maps_are_not_recombined(name: str) -> None:
    p = explained("relu", "rbf", size="small", rectified=True)
    with pytest.raises(ValueError, match="not sums of component maps"):
        recombined(ours(name, p.net, [p.layer]).explain(p.x), p.fitted)


def test_smoothed_maps_are_recombined_right_or_not_at_all() -> None:
    # Every noisy copy has its own derivative of the decision: the mean of their maps is no sum of mean component maps.
    p = explained("sigmoid", "rbf")
    maps = smoothed(ClosedFormGradCAM(p.net, [p.layer]), p.x, samples=4, noise=0.5)
    with pytest.raises(ValueError, match="not sums of component maps"):
        recombined(maps, p.fitted, [SVMTarget("bee")])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m, p: (m.maps, p.fitted), TypeError, "SignedMaps of all components, got Tensor"),
        (lambda m, p: (m[:, [4]], p.fitted), ValueError, r"not those of components 0, 1"),
        (lambda m, p: (m[:, :3], p.fitted), ValueError, "takes 4 components, but there are maps of 3"),
        (lambda m, p: (m, p.fitted, []), ValueError, "targets is empty"),
        (lambda m, p: (m, p.fitted, [SVMTarget("cow")]), ValueError, "'cow' is not a class"),
        (lambda m, p: (m, p.fitted, [PCATarget(4)]), ValueError, "there are 4 components"),
        (lambda m, p: (m, p.fitted[:2], [SVMTarget("bee")]), ValueError, "needs a head with an SVM"),
        (lambda m, p: (m, p.fitted[:2]), ValueError, "needs a head with an SVM"),
    ],
)
def test_bad_input_for_recombined(change: Any, error: type[Exception], message: str) -> None:
    p = explained("sigmoid", "rbf")
    maps = ClosedFormGradCAM(p.net, [p.layer]).explain(p.x)
    with pytest.raises(error, match=message):
        recombined(*change(maps, p))


# --- smoothing --------------------------------------------------------------------------------------------------------


def watched(cam: Any) -> list[tuple[torch.Tensor, SignedMaps]]:
    """Keep every batch that a cam explains, with its maps."""
    seen: list[tuple[torch.Tensor, SignedMaps]] = []
    explain = cam.explain

    def kept(x: torch.Tensor, targets: Any = None) -> SignedMaps:
        seen.append((x, explain(x, targets)))
        return seen[-1][1]

    cam.explain = kept
    return seen


@pytest.mark.parametrize(
    ("name", "count"),
    [("ClosedFormGradCAMPlusPlus", 12), ("ShapCAM", 6)],
)
def test_smoothed_maps_are_means_over_noisy_copies(name: str, count: int) -> None:
    p = explained("gelu", "rbf", 2, size="small")
    cam = ours(name, p.net, [p.layer])
    seen = watched(cam)
    targets = [PCATarget(1), SVMTarget("bee")]
    maps = smoothed(cam, p.x, targets, samples=count, noise=0.2, seed=5)
    copies = [batch for batch, _ in seen if len(batch) == count]
    assert len(copies) == len(p.x)
    plain = ours(name, p.net, [p.layer])
    for n, batch in enumerate(copies):
        noise = (batch - p.x[n]) / (p.x[n].max() - p.x[n].min())
        assert abs(float(noise.std()) - 0.2) < 4 * 0.2 / (2 * noise.numel()) ** 0.5
        assert abs(float(noise.mean())) < 4 * 0.2 / noise.numel() ** 0.5
        each = torch.stack([plain.explain(row.unsqueeze(0), targets).maps[0] for row in batch])
        mean = each.mean(0)
        error = ((each - mean).square().sum(0) / (count - 1)).sqrt() / count**0.5
        assert relative(maps.maps[n], mean) < 1e-10
        assert relative(maps.standard_errors[n], error) < 1e-10
    clean = plain.explain(p.x, targets)
    assert relative(maps.values, clean.values) < 1e-12
    assert relative(maps.output.components, clean.output.components) < 1e-12
    assert (torch.maximum(maps.positive(), maps.negative()).amax((2, 3)) == 1).all()
    same, other = (smoothed(plain, p.x, targets, samples=count, noise=0.2, seed=seed) for seed in (5, 6))
    assert torch.equal(same.maps, maps.maps)
    assert relative(other.maps, maps.maps) > 1e-3


def test_smoothed_maps_of_images_that_differ_in_their_factors() -> None:
    p = explained("pooled", "rbf", 2)
    head = fit_far_head(p)
    cam = ClosedFormGradCAM(PCASVMNet(p.backbone, head), [p.layer])
    seen = watched(cam)
    maps = smoothed(cam, p.x[:1], [SVMTarget("bee")], samples=6)
    noisy = seen[-1][1]
    assert noisy.log_scale.std() > 1
    each = noisy.maps * (noisy.log_scale - maps.log_scale).exp()[..., None, None]
    assert relative(maps.maps[0], each.mean(0)) < 1e-12
    assert relative(maps.standard_errors[0], each.std(0) / 6**0.5) < 1e-12


PREDICTED: dict[str, Any] = {
    "predicted": ("rbf", [SVMTarget()]),
    "runner-up": ("rbf", [SVMTarget(versus="runner-up")]),
    "none": ("rbf", None),
    "probability": ("calibrated", [ProbabilityTarget()]),
}


@pytest.mark.parametrize("case", PREDICTED)
def test_smoothed_maps_are_of_the_class_of_the_clean_image(case: str) -> None:
    head, targets = PREDICTED[case]
    p = explained("gelu", head)
    cam = ClosedFormGradCAM(p.net, [p.layer])
    seen = watched(cam)
    smoothed(cam, p.x, targets, samples=30, noise=0.6)
    changed = 0
    for (image, clean), (_, noisy) in zip(seen[::2], seen[1::2], strict=True):
        label = clean.output.labels()[0]
        changed += len({*noisy.output.labels().tolist()} - {label})
        named: Any = ProbabilityTarget(label) if case == "probability" else SVMTarget(label)
        if case == "runner-up":
            ranking = clean.output.head.voting.ranking(clean.output.decision)[0].argsort(descending=True)
            named = SVMTarget(label, versus=p.labels[int(ranking[1])])
        assert len(image) == 1
        assert torch.allclose(noisy.values[:, -1], values_of_rows(named, noisy.output), rtol=1e-12, atol=0)
    assert changed, "no copy is of another class: nothing is tested"


# --- what is refused --------------------------------------------------------------------------------------------------

NAN = torch.full((T,), torch.nan)
WITH_BASELINE = ("ContributionCAM", "LIFTCAM", "ShapCAM", "ClosedFormAblationCAM", "RelevanceCAM")
OPTIONS: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    *(("ClosedFormScoreCAM", {"channels": bad}, ValueError, "channels must be") for bad in (0, -1, 2.5, "all")),
    *(("ClosedFormScoreCAM", {"batch_size": bad}, ValueError, "batch_size must be") for bad in (0, -1, 2.5, None)),
    *(("ShapCAM", {"samples": bad}, ValueError, "samples must be") for bad in (0, 2, 5, 8.0, None)),
    *((name, {"baseline": bad}, error, message) for name in WITH_BASELINE
      for bad, error, message in (("black", ValueError, "baseline must be 'neutral', 'zero', 'mean'"),
                                  (None, TypeError, "'mean' or a tensor, got NoneType"),
                                  ([0.0], TypeError, "got list"), (NAN, ValueError, "NaN or infinite"))),
    *((name, {"max_bytes": 0}, ValueError, "max_bytes must be") for name in EVERY),
    *((name, {"jacobian": "numeric"}, ValueError, "jacobian must be") for name in EVERY),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "message"), OPTIONS)
def test_bad_options(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    p = explained("relu", "rbf")
    with pytest.raises(error, match=message):
        ours(name, p.net, [p.layer], **options)


@pytest.mark.parametrize("shape", [(T + 1,), (T, 3), (T, 4, 3), (2, T, 3, 4), (3, 5, 8), (7, 3, 6, 8)])
@pytest.mark.parametrize("name", WITH_BASELINE)
def test_baselines_of_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    p = explained("relu", "rbf")
    cam = ours(name, p.net, [p.layer], baseline=torch.zeros(shape, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"the baseline has shape .* expected activations"):
        cam.explain(p.x)


def test_a_mean_that_the_head_does_not_know() -> None:
    p = explained("relu", "rbf")
    with pytest.raises(ValueError, match="mean=mean_activations"):
        ContributionCAM(p.net, [p.layer], baseline="mean").explain(p.x)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"samples": 1}, ValueError, "samples must be 2 or more, got 1"),
        ({"samples": 2.5}, ValueError, "samples must be"),
        ({"noise": 0.0}, ValueError, "noise must be positive"),
        ({"noise": -0.1}, ValueError, "noise must be positive"),
        ({"noise": float("nan")}, ValueError, "noise must be positive"),
        ({"noise": float("inf")}, ValueError, "noise must be|infinite"),
        ({"targets": []}, ValueError, "targets is empty"),
        ({"x": torch.zeros(3, 6, 8)}, ValueError, "must be a batch"),
        ({"cam": pytorch_grad_cam.GradCAM}, TypeError, "takes a method of this package"),
    ],
)
def test_bad_input_for_smoothed(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    p = explained("relu", "rbf")
    with pytest.raises(error, match=message):
        smoothed(**{"cam": ClosedFormGradCAM(p.net, [p.layer]), "x": p.x} | arguments)


@pytest.mark.parametrize("name", [*WITH_BASELINE, "ClosedFormShapleyCAM"])
def test_what_autograd_cannot_do_is_said(name: str) -> None:
    p = explained("relu", "rbf")
    with pytest.raises(package.NoClosedFormError, match="needs the closed form"):
        ours(name, p.net, [p.layer], jacobian="autograd").explain(p.x)


def test_eigen_smoothing_of_contributions() -> None:
    p = explained("pooled", "rbf")
    f, size = activations_of(p.net, p.layer, p.x), p.x.shape[:1:-1]
    start = torch.rand(f.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cam = ContributionCAM(p.net, [p.layer], baseline=start)
    secant = cam.explain(p.x, [SVMTarget("bee")]).weights[:, 0] / f[0, 0].numel()  # the same at all positions
    terms = (secant[..., None, None] * (f - start)).numpy()
    expected = scale_cam_image(np.maximum(get_2d_projection(terms), 0), size)
    found = cam(p.x, [SVMTarget("bee")] * len(p.x), eigen_smooth=True)
    assert np.abs(found - scale_cam_image(expected)).max() < 1e-5


def test_eigen_smoothing_of_positions_is_refused() -> None:
    p = explained("relu", "rbf")
    with pytest.raises(ValueError, match="players of ShapCAM are positions"):
        ShapCAM(p.net, [p.layer])(p.x, [SVMTarget()] * 3, eigen_smooth=True)


def test_the_class_between_is_no_method() -> None:
    p = explained("relu", "rbf")
    with pytest.raises(NotImplementedError, match="ClosedFormCAM is not a method itself"):
        package.ClosedFormCAM(p.net, [p.layer]).explain(p.x)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_a_call_gives_the_maps_of_explain(name: str) -> None:
    p = explained("gelu", "rbf", size="small", rectified=True)
    cam = ours(name, p.net, [p.layer])
    targets = [PCATarget(0), SVMTarget("bee"), SVMTarget(versus="runner-up")]
    mixed = cam(p.x, targets)
    assert mixed.dtype == np.float32
    for n, target in enumerate(targets):
        maps = cam.explain(p.x[n : n + 1], [target])
        shown = maps.positive(tuple(p.x.shape[2:]))[0, 0].numpy()
        if n:  # no component: scaled as the host does
            shown = scale_cam_image(scale_cam_image(maps.maps.relu()[0].numpy(), tuple(p.x.shape[:1:-1])))[0]
        np.testing.assert_allclose(mixed[n], shown, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
def test_chunks_are_the_whole(name: str) -> None:
    p = explained("gelu", "rbf", size="small", rectified=True)
    few = 1 << 12 if name == "ShapCAM" else 1
    whole, chunked = (ours(name, p.net, [p.layer], max_bytes=b).explain(p.x, p.targets) for b in (None, few))
    assert parts(whole).keys() == parts(chunked).keys()
    for key, tensor in parts(whole).items():
        if tensor.numel() and tensor.any():
            assert relative(parts(chunked)[key], tensor) < 1e-12


@pytest.mark.parametrize("name", EVERY)
def test_names_and_hosts(name: str) -> None:
    host = name.removeprefix("ClosedForm")
    kind = getattr(package, name)
    assert issubclass(kind, pytorch_grad_cam.base_cam.BaseCAM)
    if host != name:
        assert issubclass(kind, getattr(pytorch_grad_cam, host))


def tensors() -> int:
    gc.collect()
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


@pytest.mark.slow
def test_a_thousand_calls_leak_nothing() -> None:
    p = explained("pooled", "rbf", 2, rectified=True, n=1)
    cams = [ours(name, p.net, [p.layer]) for name in EVERY]
    targets = [SVMTarget()]
    for cam in 3 * cams:
        cam.explain(p.x, targets)
    before = tensors()
    for cam in 77 * cams:
        cam.explain(p.x, targets)
    assert tensors() <= before
    assert not any(module._forward_hooks for module in p.net.modules())
