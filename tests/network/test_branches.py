"""Target layers in several branches: maps of each from one run, contributions of all that add up, and twins."""

import copy

import numpy as np
import pytest
import torch
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    BaselineWarning,
    ClosedFormAblationCAM,
    ClosedFormGradCAM,
    ClosedFormHiResCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    ShapCAM,
    SVMTarget,
    extract_features,
    mean_activations,
)

N = 24
GENERATOR = torch.Generator().manual_seed(0)
LEFT = torch.randn(N, 3, 14, 10, dtype=torch.float64, generator=GENERATOR)
RIGHT = torch.randn(N, 3, 12, 12, dtype=torch.float64, generator=GENERATOR)
Y = np.array(["ripe", "raw", "rotten"])[np.arange(N) % 3]
TARGETS = [PCATarget(1), PCATarget(2), SVMTarget("ripe"), SVMTarget("raw", versus="rotten")]


def branch(width=5):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.SiLU())


class Late(nn.Module):
    """Fused late: what follows the branches is linear, up to the head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = branch(), branch()

    def forward(self, left, right):
        return torch.cat([self.left(left).mean((2, 3)), self.right(right).mean((2, 3))], 1)


class Mixed(Late):
    """Fused in the middle: positions are multiplied, divided and compared with one another."""

    def __init__(self):
        super().__init__()
        self.last = nn.Sequential(nn.Conv2d(10, 7, 3), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())

    def forward(self, left, right):
        a, b = self.left(left), F.interpolate(self.right(right), (10, 6), mode="bilinear")
        return self.last(torch.cat([a * b, torch.maximum(a, b) / (1 + b.square())], 1))


class Tokens(nn.Module):
    """Sequences of patches that are added, and mixed by attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.Sequential(nn.Conv2d(3, 8, 3, 3), nn.Flatten(2)) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.qkv, self.last = nn.Linear(8, 24), nn.Linear(8, 6)

    def forward(self, left, right):
        a, b = self.norms[0](self.left(left).mT), self.norms[1](self.right(right).mT)
        x = F.gelu(a + b)
        q, k, v = self.qkv(self.norms[2](x)).unflatten(-1, (3, 8)).unbind(2)
        return self.last(x + F.scaled_dot_product_attention(q, k, v)).mean(1)


class Twins(nn.Module):
    """One encoder for both images."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = branch()

    def forward(self, left, right):
        a, b = self.encoder(left).mean((2, 3)), self.encoder(right).mean((2, 3))
        return torch.cat([(a - b).abs(), a * b, a], 1)


def with_head(backbone, inputs=(LEFT, RIGHT)):
    backbone = backbone.double().eval()
    features = backbone(*inputs).detach().numpy()
    return PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(4), SVC()).fit(features, Y)).eval()


def by_autograd(net, inputs, layer, call=1):
    """Return the activations of a layer's call, and the gradient of every component with respect to them."""
    kept = []

    def keep(module, args, output):
        kept.append(output.detach().clone().requires_grad_())
        return kept[-1].clone() if len(kept) == call else None

    handle = net.backbone.get_submodule(layer).register_forward_hook(keep)
    with torch.enable_grad():
        values = net(*inputs) if not hasattr(net, "of_features") else net.of_features(net.backbone(*inputs)).components
    handle.remove()
    leaf = kept[call - 1]
    grads = [torch.autograd.grad(values[:, k].sum(), leaf, retain_graph=True)[0] for k in range(values.shape[1])]
    return leaf.detach(), torch.stack(grads, 1)


@pytest.fixture(scope="module", params=[Late, Mixed, Twins])
def problem(request):
    net = with_head(request.param())
    layers = ["encoder.2#1", "encoder.2#2"] if request.param is Twins else ["left.2", "right.2"]
    return net, layers, (LEFT[:3], RIGHT[:3])


def total(maps):
    return (maps.maps.sum((2, 3)) + maps.remainder) * maps.log_scale.exp() + maps.baseline_values


@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
def test_one_run_makes_maps_of_every_branch(problem, jacobian):
    net, layers, inputs = problem
    made = ClosedFormGradCAM(net, layers, jacobian=jacobian).explain(inputs)
    assert [maps.layers for maps in made] == [(layer,) for layer in layers]
    for call, (maps, name) in enumerate(zip(made, layers, strict=True), 1):
        path, _, marked = name.partition("#")
        activations, grads = by_autograd(net, inputs, path, call if marked else 1)
        weights = grads.sum((3, 4))
        assert relative(maps.weights[:, :4], weights) < 1e-10
        assert relative(maps.maps[:, :4], torch.einsum("nkt,nthw->nkhw", weights, activations)) < 1e-10
        alone = ClosedFormGradCAM(net, [name], jacobian=jacobian).explain(inputs)
        assert relative(maps.maps, alone.maps) < 1e-12
        assert relative(maps.nu, alone.nu) < 1e-12


@pytest.mark.parametrize("baseline", ["zero", "mean", "neutral"])
def test_contributions_of_all_branches_add_up(problem, baseline):
    net, layers, inputs = problem
    mean = mean_activations(net, [((LEFT, RIGHT), Y)], layers, progress=False)
    made = ContributionCAM(net, layers, baseline=baseline, mean=mean).explain(inputs, TARGETS)
    changes = sum(maps.maps.sum((2, 3)) * maps.log_scale.exp() for maps in made)
    for maps in made:
        assert relative(changes + maps.baseline_values, maps.values) < 1e-10
        assert relative(total(maps), maps.values) < 1e-10
        assert torch.equal(maps.nu, made[0].nu)  # one scale for what adds up
    starts = [torch.zeros_like(each) for each in mean] if baseline == "zero" else mean
    number = [0]

    def at_baseline(module, args, output):
        number[0] += 1
        return starts[number[0] - 1].expand_as(output)

    modules = dict.fromkeys(net.backbone.get_submodule(name.partition("#")[0]) for name in layers)
    handles = [module.register_forward_hook(at_baseline) for module in modules]
    expected = net(inputs)
    for handle in handles:
        handle.remove()
    assert relative(made[0].baseline_values[:, :2], expected.components[:, 1:3]) < 1e-10
    classes = list(net.head.classes_)
    assert relative(made[0].baseline_values[:, 2], expected.margins[:, classes.index("ripe")]) < 1e-10


@pytest.mark.parametrize("method", [ClosedFormHiResCAM, LIFTCAM])
def test_other_methods_are_those_of_each_branch_alone(problem, method):
    net, layers, inputs = problem
    for maps, layer in zip(method(net, layers).explain(inputs, TARGETS), layers, strict=True):
        assert relative(maps.maps, method(net, [layer]).explain(inputs, TARGETS).maps) < 1e-12


def test_a_product_is_shared_by_secants_by_hand():
    """Each branch has its own change times the mean of the other before and after."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

        def forward(self, left, right):
            return (self.left(left) * self.right(right)).mean((2, 3))

    inputs = LEFT, LEFT.flip(0)
    net = with_head(Product(), inputs)
    a, b = (branch(x).detach() for branch, x in zip(net.backbone.children(), inputs, strict=True))
    a0, b0 = a.mean(0, keepdim=True), b.mean(0, keepdim=True)
    scaler, pca = net.head.stages[0], net.head.stages[1]
    weights = torch.eye(4).double()
    weights = (pca(scaler(weights)) - pca(scaler(torch.zeros_like(weights)))).T[:2] / a[0, 0].numel()  # (B, T)
    left, right = ContributionCAM(net, ["left", "right"], baseline="mean", mean=[a0[0], b0[0]]).explain(
        inputs, [PCATarget(0), PCATarget(1)]
    )
    assert relative(left.maps, torch.einsum("kt,nthw->nkhw", weights, (a - a0) * (b + b0) / 2)) < 1e-10
    assert relative(right.maps, torch.einsum("kt,nthw->nkhw", weights, (b - b0) * (a + a0) / 2)) < 1e-10


@pytest.mark.optional
@pytest.mark.filterwarnings("ignore:Multiple layers provided")
def test_contributions_of_both_branches_are_captums_integrated_gradients():
    captum = pytest.importorskip("captum.attr")
    net = with_head(Late())
    inputs, start = (LEFT[:3], RIGHT[:3]), (LEFT[7:8], RIGHT[9:10])
    with torch.no_grad():
        mean = [net.backbone.left(start[0])[0], net.backbone.right(start[1])[0]]
    made = ContributionCAM(net, ["left", "right"], baseline="mean", mean=mean).explain(inputs, TARGETS[:3])
    classes = list(net.head.classes_)

    def function(left, right):
        found = net.of_features(net.backbone(left, right))
        return torch.cat([found.components[:, 1:3], found.margins[:, [classes.index("ripe")]]], 1)

    captums = captum.LayerIntegratedGradients(function, [net.backbone.left, net.backbone.right])
    for k in range(3):
        found = captums.attribute(inputs, start, target=k, n_steps=100, method="gausslegendre")
        for maps, expected in zip(made, found, strict=True):
            assert relative(maps.maps[:, k] * maps.log_scale[:, k, None, None].exp(), expected.sum(1)) < 1e-6


@pytest.mark.optional
def test_maps_of_twins_are_captums_of_two_copies():
    captum = pytest.importorskip("captum.attr")
    net = with_head(Twins())

    class Copies(Late):
        def __init__(self):
            super().__init__()
            self.left, self.right = copy.deepcopy(net.backbone.encoder), copy.deepcopy(net.backbone.encoder)

        def forward(self, left, right):
            a, b = self.left(left).mean((2, 3)), self.right(right).mean((2, 3))
            return net.of_features(torch.cat([(a - b).abs(), a * b, a], 1)).components

    copies, inputs = Copies().double().eval(), (LEFT[:3], RIGHT[:3])
    made = ClosedFormGradCAM(net, ["encoder.2#1", "encoder.2#2"]).explain(inputs)
    for maps, layer in zip(made, [copies.left[2], copies.right[2]], strict=True):
        for k in range(4):
            expected = captum.LayerGradCam(copies, layer).attribute(inputs, target=k)[:, 0] * maps.maps[0, 0].numel()
            assert relative(maps.maps[:, k], expected) < 1e-6


@pytest.mark.parametrize("baseline", ["zero", "mean"])
def test_tokens_of_both_branches_add_up(baseline):
    """Steps that treat every token separately are not passed over where the other branch comes in."""
    net, layers, inputs = with_head(Tokens(), (LEFT, LEFT)), ["norms.0", "norms.1"], (LEFT[:3], LEFT[3:6])
    mean = mean_activations(net, [((LEFT, LEFT), Y)], layers, progress=False)

    def grid(tokens):
        return tokens.unflatten(-2, (4, 3)).movedim(-1, -3)

    for transform in (grid, "tokens"):
        made = ContributionCAM(net, layers, transform, baseline=baseline, mean=mean).explain(inputs, TARGETS)
        for maps in made:
            assert relative(total(maps), maps.values) < 1e-10
        if transform is grid:
            expected = made
    for maps, other in zip(made, expected, strict=True):
        assert relative(maps.maps, other.maps) < 1e-10


def test_twins_are_named():
    net, inputs = with_head(Twins()), (LEFT[:2], RIGHT[:2])
    with pytest.raises(ValueError, match=r"'encoder.2' runs 2 times: name one of its calls, 'encoder.2#1' or"):
        ClosedFormGradCAM(net, ["encoder.2"]).explain(inputs)
    for layer, words in (
        ("encoder.2#0", "names no call"),
        ("encoder#second", "names no call"),
        ("coder#1", "no layer"),
    ):
        with pytest.raises(ValueError, match=words):
            ClosedFormGradCAM(net, [layer])
    with pytest.raises(ValueError, match=r"'encoder\.2#3' does not run"):
        ClosedFormGradCAM(net, ["encoder.2#3"]).explain(inputs)
    features, _ = extract_features(net.backbone, [(inputs, Y[:2])], "encoder#2", pool=lambda t: t.mean((2, 3)))
    assert relative(torch.as_tensor(features), net.backbone.encoder(inputs[1]).mean((2, 3)).detach()) < 1e-12
    ClosedFormGradCAM(net, ["encoder.2#2"])((LEFT[:2], LEFT[2:4]), PCATarget(0))


def test_a_layer_that_runs_twice_in_depth_is_named_too():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.block = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.SiLU())

        def forward(self, x):
            return self.block(self.block(x)).mean((2, 3))

    backbone = Twice().double().eval()
    head = make_pipeline(StandardScaler(), PCA(2), SVC()).fit(backbone(LEFT).detach().numpy(), Y)
    net = PCASVMNet(backbone, head).eval()
    for call in (1, 2):
        activations, grads = by_autograd(net, (LEFT[:2],), "block", call)
        maps = ClosedFormHiResCAM(net, [f"block#{call}"]).explain(LEFT[:2])
        assert relative(maps.maps[:, :2], torch.einsum("nkthw,nthw->nkhw", grads, activations)) < 1e-10
    mean = mean_activations(net, [(LEFT, Y)], "block#1", progress=False)
    maps = ContributionCAM(net, ["block#1"], baseline="mean", mean=mean).explain(LEFT[:2])
    assert relative(total(maps), maps.values) < 1e-10


def test_what_is_not_in_different_branches_is_refused(problem):
    net, layers, inputs = problem
    with pytest.raises(ValueError, match="a call makes one map of all target layers"):
        ClosedFormGradCAM(net, layers)(inputs, PCATarget(0))
    if "left.2" in layers:
        with pytest.raises(ValueError, match=r"'left.2' is behind 'left.0': name one target layer in each branch"):
            ContributionCAM(net, ["left.2", "left.0"], baseline="zero").explain(inputs)
    with pytest.raises(ValueError, match="takes several target layers in explain only, and without heads"):
        ContributionCAM(net, layers, baseline="zero").explain(inputs, heads=True)


def test_an_unknown_mean_is_told(problem):
    net, layers, inputs = problem
    with pytest.warns(BaselineWarning, match=r"is unknown, so maps start at zero activations.*loader, \["):
        made = ContributionCAM(net, layers).explain(inputs, TARGETS[:1])
    assert relative(total(made[0]), made[0].values) < 1e-10


def test_one_call_by_two_names_is_refused():
    net = with_head(Twins())
    net.backbone.other = net.backbone.encoder
    for layers in (["encoder.2#1", "other.2#1"], ["encoder.2#2", "encoder.2#2"]):
        with pytest.raises(ValueError, match="are not all different: name each once"):
            ContributionCAM(net, layers, baseline="zero").explain((LEFT[:2], RIGHT[:2]))


@pytest.mark.parametrize("count", [1, 3])
def test_an_encoder_that_sees_both_at_once_is_refused(count):
    class Together(Twins):
        def forward(self, left, right):
            a, b = self.encoder(torch.cat([left, right])).mean((2, 3)).chunk(2)
            return torch.cat([a, a * b], 1)

    net = with_head(Together(), (LEFT, LEFT))
    with pytest.raises(ValueError, match=rf"activations of {2 * count} rows for {count} images"):
        ClosedFormGradCAM(net, ["encoder.2"]).explain((LEFT[:count], LEFT[:count]))


def test_names_of_a_dict_that_the_network_lacks_are_told():
    class Named(Late):
        def forward(self, **views):
            return super().forward(views["left"], views["right"])

    backbone = Named().double().eval()
    head = make_pipeline(PCA(2), SVC()).fit(backbone(left=LEFT, right=RIGHT).detach().numpy(), Y)
    maps = ClosedFormGradCAM(PCASVMNet(backbone, head), ["left"]).explain({"left": LEFT[:2], "right": RIGHT[:2]})
    assert maps.maps.shape == (2, 3, 10, 6)

    class Taken(Late):
        def forward(self, given):
            return super().forward(given["left"], given["right"])

    net = PCASVMNet(Taken().double().eval(), head)
    with pytest.raises(TypeError, match="has no arguments named left, wrong"):
        net({"left": LEFT[:2], "wrong": RIGHT[:2]})


class Joined(nn.Module):
    """A branch for each of two leads, whose means are joined as one list."""

    def __init__(self, join):
        super().__init__()
        torch.manual_seed(0)
        self.leads = nn.ModuleList(nn.Sequential(nn.Conv1d(1, 8, 5, 2), nn.ReLU()) for _ in range(2))
        self.join = join

    def forward(self, x):
        return self.join([lead(x[:, row : row + 1]).mean(2) for row, lead in enumerate(self.leads)])


JOINS = {
    "cat": lambda parts: torch.cat(parts, 1),
    "hstack": torch.hstack,
    "stack": lambda parts: torch.stack(parts, 1).flatten(1),
    "mean of a stack": lambda parts: torch.stack(parts, 1).mean(1),
    "column_stack": torch.column_stack,
}


@pytest.mark.parametrize("method", [ContributionCAM, ClosedFormAblationCAM, ShapCAM])
@pytest.mark.parametrize("join", JOINS)
def test_one_branch_of_several_that_are_joined_as_a_list(join, method):
    x, backbone = torch.randn(40, 2, 64, dtype=torch.float64), Joined(JOINS[join]).double().eval()
    features, _ = extract_features(backbone, [x], progress=False)
    head = make_pipeline(PCA(3), SVC()).fit(features, np.arange(40) % 2)
    maps = method(PCASVMNet(backbone, head).eval(), ["leads.0.1"]).explain(x[:5], [SVMTarget(1)])
    assert np.abs(maps.values[:, 0].numpy() - head.decision_function(features[:5])).max() < 1e-12
    if method is ContributionCAM:
        sums = (maps.maps * maps.log_scale.exp()[..., None]).sum(2) + maps.baseline_values
        terms = (maps.maps * maps.log_scale.exp()[..., None]).abs().sum(2) + maps.baseline_values.abs()
        assert ((sums - maps.values).abs() < 1e-12 * terms).all()
