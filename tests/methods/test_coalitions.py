"""Players: Ablation-CAM and Shapley values against brute force on whole networks, memory, sampling, and seeds."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from problems import PATHS, SIZES, Explained, T, explained
from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget, ClassifierOutputTarget
from reference import activations_of, gap, relative, shapley_by_subsets, values_of_rows, with_activations
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from test_contributions import BASELINES
from test_grad_cam_protocol import resnet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm import ClosedFormAblationCAM, PCASVMNet, PCATarget, ShapCAM, SVMTarget
from pytorch_grad_cam_pcasvm.methods import perturbation

PREDICTED = SVMTarget(versus="runner-up")


def chosen(p: Any) -> list[Any]:
    components = [] if p.head == "no reduction" else [PCATarget(0), PCATarget(1, "-")]
    if p.head in ("regressor", "one class"):
        return [*components, SVMTarget()]
    callables = [lambda output: output.margins[0] * output.margins[1]]
    return [*components, SVMTarget("bee"), SVMTarget("ant", versus="bee"), SVMTarget(), PREDICTED, *callables]


def in_place_of(p: Any, n: int, target: Any) -> Any:
    """Return a target in which the predicted class of an image and its runner-up are named."""
    if target not in (SVMTarget(), PREDICTED) or p.head in ("regressor", "one class"):
        return target
    output = p.net(p.x)
    order = output.head.voting.ranking(output.decision)[n].argsort(descending=True).tolist()
    assert output.labels()[n] == p.labels[order[0]]
    return SVMTarget(p.labels[order[0]], versus=p.labels[order[1]] if target == PREDICTED else None)


def values_with(p: Any, named: list[list[Any]], changed: torch.Tensor) -> torch.Tensor:
    """Return each image's targets' values of the whole network with other activations, shape (N, K)."""
    output = with_activations(p.net, p.layer, p.x, changed)
    rows = zip(named, output, strict=True)
    return torch.stack([torch.stack([target(row).detach().reshape(()) for target in each]) for each, row in rows])


# --- Ablation-CAM -----------------------------------------------------------------------------------------------------

ABLATIONS = [
    *((path, "rbf", 3, "plane") for path in PATHS if path != "max pool apart"),
    *(("pooled", head, 3, "plane") for head in ("linear", "normalised", "calibrated", "regressor", "no reduction")),
    ("gelu", "kernel pca", 2, "plane"),
    ("relu", "rbf", 3, "volume"),
    ("pooled", "poly", 2, "volume"),
]


def ablated(p: Any, targets: Any, start: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Return the drops of the targets where one channel at a time is that of a baseline, shape (N, K, T)."""
    named = [[in_place_of(p, n, target) for target in targets] for n in range(len(f))]
    whole = values_with(p, named, f)
    drops = []
    for t in range(T):
        without = f.clone()
        without[:, t] = start[:, t]
        drops.append(whole - values_with(p, named, without))
    return torch.stack(drops, -1)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, torch.float64) for case in ABLATIONS), *((case, torch.float32) for case in ABLATIONS[:2])],
    ids=lambda each: str(each)[6:] if isinstance(each, torch.dtype) else "-".join(map(str, each)),
)
def test_ablation_is_the_network_without_a_channel(case: Any, dtype: torch.dtype) -> None:
    path, head, classes, size = case
    p = explained(path, head, classes, dtype, size)
    targets, f = chosen(p), activations_of(p.net, p.layer, p.x)
    maps = ClosedFormAblationCAM(p.net, [p.layer]).explain(p.x, targets)
    expected = ablated(p, targets, torch.zeros_like(f), f)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    assert relative(maps.weights, expected) < tolerance
    assert relative(maps.maps, torch.einsum("nkt,nt...->nk...", expected, f.double())) < 10 * tolerance


def test_a_callable_may_read_the_features() -> None:
    p = explained("pooled", "rbf")
    f = activations_of(p.net, p.layer, p.x)
    maps = ClosedFormAblationCAM(p.net, [p.layer]).explain(p.x, [lambda output: output.features[..., 2].square()])
    expected = torch.zeros_like(maps.weights[:, 0])
    expected[:, 2] = f.mean((2, 3))[:, 2] ** 2
    assert relative(maps.weights[:, 0], expected) < 1e-9


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("path", ["gelu", "skip"])
def test_ablation_to_any_baseline(path: str, baseline: str) -> None:
    p = explained(path, "rbf")
    targets, f = chosen(p), activations_of(p.net, p.layer, p.x)
    given, start = BASELINES[baseline](f, p.x)
    maps = ClosedFormAblationCAM(p.net, [p.layer], baseline=given).explain(p.x, targets)
    assert relative(maps.weights, ablated(p, targets, start, f)) < 1e-9


def test_ablation_on_an_ordinary_network() -> None:
    model, layer = resnet(), resnet().layer4[-1]
    x = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    f = activations_of(model, layer, x)
    channels = [3, 77, 500]
    targets = [ClassifierOutputTarget(2), ClassifierOutputSoftmaxTarget(1)]
    maps = ClosedFormAblationCAM(model, [layer]).explain(x, targets)
    for k, target in enumerate(targets):
        whole = values_of_rows(target, model(x))
        expected = []
        for t in channels:
            without = f.clone()
            without[:, t] = 0
            expected.append(whole - values_of_rows(target, with_activations(model, layer, x, without)))
        assert (maps.weights[:, k, channels] - torch.stack(expected, 1)).abs().max() < 1e-5
    assert maps.weights.abs().max() > 1e-3


# --- activations in other shapes --------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """(N, T, H, W) to (N, H W, T), as in vision transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


class Last(nn.Module):
    """(N, T, H, W) to (N, H, W, T), as in Swin."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1)


LAYOUTS: dict[str, Any] = {
    "tokens": (Tokens, lambda t: t.transpose(1, 2).unflatten(2, (3, 4))),
    "channels last": (Last, lambda t: t.permute(0, 3, 1, 2)),
}
TAILS: dict[str, Any] = {
    "dense": lambda: [nn.Flatten(), nn.Linear(12 * T, 9), nn.Tanh()],
    "token by token": lambda: [nn.Linear(T, 7), nn.ReLU(), nn.Flatten(), nn.Linear(84, 9)],
}


@pytest.mark.parametrize("kind", [ClosedFormAblationCAM, ShapCAM])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reshape_transform_changes_nothing(layout: str, tail: str, kind: Any) -> None:
    p = explained("relu", "rbf")
    module, reshape = LAYOUTS[layout]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        behind = [layer.double() for layer in TAILS[tail]()]
    before = nn.Sequential(nn.Sequential(p.backbone.features), module(), *behind).eval()
    after = nn.Sequential(nn.Sequential(p.backbone.features, module()), *behind).eval()
    images = p.images(60, seed=4)
    head = make_pipeline(PCA(4), SVC()).fit(before(images).detach().numpy(), np.array(p.labels)[np.arange(60) % 3])
    targets = [PCATarget(0), SVMTarget("bee")]
    expected = kind(PCASVMNet(before, head), [before[0]]).explain(p.x, targets)
    actual = kind(PCASVMNet(after, head), [after[0]], reshape).explain(p.x, targets)
    assert relative(actual.maps, expected.maps) < 1e-9


# --- Shapley values ---------------------------------------------------------------------------------------------------


def all_subsets(p: Any, target: Any, n: int, start: torch.Tensor) -> torch.Tensor:
    """Return the Shapley values of the positions of an image, from the whole network for each of their subsets."""
    f = activations_of(p.net, p.layer, p.x[n : n + 1])[0].flatten(1)
    start = start.expand_as(f)

    def value(coalitions: np.ndarray) -> np.ndarray:
        joined = torch.where(torch.tensor(coalitions).unsqueeze(1), f, start)
        images = p.x[n : n + 1].expand(len(joined), *p.x.shape[1:])
        shape = (len(joined), T, *(size // 2 for size in SIZES[p.size]))
        output = with_activations(p.net, p.layer, images, joined.reshape(shape))
        return values_of_rows(in_place_of(p, n, target), output).numpy()

    return torch.tensor(shapley_by_subsets(value, f.shape[1]))


@pytest.mark.parametrize(
    ("path", "head", "classes", "size"),
    [
        pytest.param("relu", "rbf", 3, "plane", marks=pytest.mark.slow),
        ("pooled", "rbf", 2, "plane"),
        pytest.param("pooled", "whitened", 3, "volume", marks=pytest.mark.slow),
        *((path, "poly", 3, "small") for path in ("skip", "squeeze-excite", "layer norm")),
    ],
)
def test_up_to_twelve_positions_are_exact(path: str, head: str, classes: int, size: str) -> None:
    p = explained(path, head, classes, size=size, n=2)
    targets = [PCATarget(1), SVMTarget("bee"), PREDICTED]
    maps = ShapCAM(p.net, [p.layer], baseline="zero").explain(p.x, targets)
    assert maps.maps[0, 0].numel() == (6 if size == "small" else 12)
    zeros = torch.zeros(1, dtype=torch.float64)
    for k, target in list(enumerate(targets))[1 if size == "small" else 2 :]:
        assert relative(maps.maps[1, k].flatten(), all_subsets(p, target, 1, zeros)) < 1e-10
    assert not maps.standard_errors.any()
    assert gap(maps) < 1e-10


def test_exact_values_to_a_baseline() -> None:
    p = explained("relu", "rbf", 2, size="small", n=2)
    start = torch.linspace(-1, 1, T, dtype=torch.float64)
    maps = ShapCAM(p.net, [p.layer], baseline=start).explain(p.x, [SVMTarget("bee")])
    assert relative(maps.maps[0, 0].flatten(), all_subsets(p, SVMTarget("bee"), 0, start[:, None])) < 1e-10


@pytest.fixture
def few_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample twelve positions, too."""
    monkeypatch.setattr(perturbation, "EXACT", 3)


def sampled(p: Any, targets: Any, **options: Any) -> Any:
    return ShapCAM(p.net, [p.layer], **options).explain(p.x, targets)


@pytest.mark.parametrize(("path", "head"), [("relu", "rbf"), ("pooled", "poly")])
def test_sampled_values_are_within_four_standard_errors(path: str, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    p = explained(path, head, n=3)
    targets = [SVMTarget("bee"), SVMTarget("ant", versus="cat")]
    exact = sampled(p, targets)
    monkeypatch.setattr(perturbation, "EXACT", 3)
    maps = sampled(p, targets, samples=64)
    errors = maps.standard_errors
    assert (errors > 0).all()
    assert ((maps.maps - exact.maps).abs() < 4 * errors).all()
    assert errors.max() < 0.5 * exact.maps.abs().max()
    # They add up all the same.
    assert gap(maps) < 1e-10


@pytest.mark.usefixtures("few_exact")
@pytest.mark.slow
def test_standard_errors_are_those_of_many_seeds() -> None:
    p = explained("pooled", "rbf", n=1)
    runs = [sampled(p, [SVMTarget("bee")], samples=12, seed=seed) for seed in range(30)]
    spread = torch.stack([run.maps for run in runs]).std(0)
    stated = torch.stack([run.standard_errors for run in runs]).square().mean(0).sqrt()
    assert ((spread / stated > 0.6) & (spread / stated < 1.5)).all()
    assert abs(float((spread / stated).mean()) - 1) < 0.15
    # Four times the orders: half the error.
    more = torch.stack([sampled(p, [SVMTarget("bee")], samples=48, seed=s).standard_errors for s in range(10)])
    assert abs(float((more.square().mean(0).sqrt() / stated).mean()) - 0.5) < 0.1


@pytest.mark.usefixtures("few_exact")
def test_half_of_the_samples_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], perturbation._draw_orders
    monkeypatch.setattr(perturbation, "_draw_orders", lambda *args, **to: drawn.append(args) or draw(*args, **to))
    sampled(explained("pooled", "rbf", n=1), [SVMTarget("bee")], samples=12)
    assert [count for _, count, _ in drawn] == [6]


@pytest.mark.usefixtures("few_exact")
def test_an_order_comes_with_its_reverse() -> None:
    # Where players meet in pairs only, an order and its reverse together are exact.
    p = explained("pooled", "quadratic", 2)
    maps = sampled(p, [SVMTarget("bee")], samples=4)
    assert relative(maps.standard_errors + 1, torch.ones_like(maps.maps)) < 1e-10
    several = sampled(p, [SVMTarget("bee")], samples=4, seed=9)
    assert relative(several.maps, maps.maps) < 1e-10


@pytest.mark.usefixtures("few_exact")
@pytest.mark.slow
def test_a_seed_gives_the_same_orders_and_touches_no_others() -> None:
    p = explained("pooled", "rbf")
    state = torch.random.get_rng_state()
    first, again, other = (sampled(p, [SVMTarget("bee")], seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.maps, again.maps)
    assert torch.equal(first.standard_errors, again.standard_errors)
    assert relative(other.maps, first.maps) > 1e-4


def test_more_than_twelve_positions_are_sampled() -> None:
    p = explained("pooled", "rbf", size="square")
    maps = ShapCAM(p.net, [p.layer], samples=40).explain(p.x, [SVMTarget("bee")])
    assert maps.maps.shape == (3, 1, 4, 4)
    assert (maps.standard_errors > 0).all()
    assert gap(maps) < 1e-10


# --- what goes around the target layer --------------------------------------------------------------------------------


class Beside(nn.Module):
    """Activations times a gate and plus a shift that the image gives past the target layer, ``features``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, T, 3, padding=1), nn.MaxPool2d(2))
        self.around = nn.Sequential(nn.Conv2d(3, T, 1), nn.AdaptiveAvgPool2d(1), nn.Sigmoid())
        self.tail = nn.Sequential(nn.Conv2d(T, 7, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = 4 * self.around(x) - 2
        return self.tail(self.features(x) * gate + gate.flip(1))


@dataclass
class Around:
    """A problem around the target layer, as far as the functions above ask for it."""

    net: PCASVMNet
    layer: nn.Module
    x: torch.Tensor
    labels: list[str]
    head: str = "rbf"
    size: str = "small"


@cache
def around(n: int = 3) -> Around:
    p = explained("relu", "rbf", size="small", n=n)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        backbone = Beside().double().eval()
    features = backbone(p.images(60, seed=4)).detach().numpy()
    head = make_pipeline(PCA(4), SVC(C=2.0)).fit(features, np.array(p.labels)[np.arange(60) % 3])
    return Around(PCASVMNet(backbone, head), backbone.features, p.x, p.labels)


@pytest.mark.parametrize("kind", [ClosedFormAblationCAM, ShapCAM])
def test_what_goes_around_is_that_of_each_image(kind: Any) -> None:
    p: Any = around()
    targets, f = chosen(p), activations_of(p.net, p.layer, p.x)
    maps = kind(p.net, [p.layer]).explain(p.x, targets)
    if kind is ClosedFormAblationCAM:
        assert relative(maps.weights, ablated(p, targets, torch.zeros_like(f), f)) < 1e-9
        return
    for n in range(3):
        expected = all_subsets(p, SVMTarget("bee"), n, torch.zeros(1).double())
        assert relative(maps.maps[n, targets.index(SVMTarget("bee"))].flatten(), expected) < 1e-10


# --- memory -----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf._is_view():
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return result


def largest(cam: Any, x: torch.Tensor) -> int:
    """Return the size of the largest tensor that a call makes, which has been made before."""
    cam.explain(x, [SVMTarget("bee")])
    with Largest() as watch:
        cam.explain(x, [SVMTarget("bee")])
    return watch.bytes


@pytest.mark.parametrize(
    ("kind", "bound"), [("pooled", 1 << 16), pytest.param("around", 1 << 14, marks=pytest.mark.slow)]
)
def test_chunks_stay_within_max_bytes(kind: str, bound: int) -> None:
    # All 4096 subsets of twelve positions behind a mean would have 128 KB.
    p: Any = around(8) if kind == "around" else Explained("pooled", "rbf", n=1)
    assert largest(ShapCAM(p.net, [p.layer], max_bytes=1 << 40), p.x) > bound
    assert largest(ShapCAM(p.net, [p.layer], max_bytes=bound), p.x) <= bound


@pytest.mark.parametrize("kind", [ClosedFormAblationCAM, ShapCAM])
def test_chunks_give_the_same_values(kind: Any) -> None:
    p = explained("pooled", "rbf", n=1)
    whole, chunked = (kind(p.net, [p.layer], max_bytes=b).explain(p.x, chosen(p)[:-1]) for b in (None, 1 << 17))
    assert relative(chunked.maps, whole.maps) < 1e-12


def test_the_stem_runs_once() -> None:
    p = explained("pooled", "rbf")
    seen: list[int] = []
    for kind in (ClosedFormAblationCAM, ShapCAM):
        cam = kind(p.net, [p.layer])
        cam.explain(p.x)
        seen.clear()
        handle = p.layer[0].register_forward_hook(lambda module, args, output: seen.append(len(output)))
        cam.explain(p.x, chosen(p)[:-1])
        handle.remove()
        assert seen == [len(p.x)]
