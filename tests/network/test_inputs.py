"""Networks of several inputs: RGB and depth, two views, an image and what is known of it."""

import numpy as np
import pytest
import torch
from reference import keep_leaves, relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from torch import nn
from torch.utils.data import DataLoader

from pytorch_grad_cam_pcasvm import (
    LIFTCAM,
    ClosedFormGradCAM,
    ClosedFormLayerCAM,
    ClosedFormScoreCAM,
    ClosedFormShapleyCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    RelevanceCAM,
    ShapCAM,
    SVMTarget,
    export,
    extract_features,
    mean_activations,
    smoothed,
)
from pytorch_grad_cam_pcasvm.studio.data.images import Images

N = 24
GENERATOR = torch.Generator().manual_seed(0)
RGB = torch.randn(N, 3, 14, 10, dtype=torch.float64, generator=GENERATOR)
DEPTH = torch.randn(N, 1, 8, 14, dtype=torch.float64, generator=GENERATOR)
AGE = torch.randn(N, 2, dtype=torch.float64, generator=GENERATOR)
SITE = torch.arange(N) % 4
Y = np.array(["ripe", "raw", "rotten"])[np.arange(N) % 3]


def branch(channels, width):
    return nn.Sequential(nn.Conv2d(channels, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.SiLU())


class Fusion(nn.Module):
    """Two branches on grids of their own, which are multiplied with each other, and numbers beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rgb, self.depth = branch(3, 5), branch(1, 5)
        self.site, self.last = nn.Embedding(4, 5), nn.Sequential(nn.Linear(12, 9), nn.Tanh())

    def forward(self, rgb, depth, age=None, site=None):
        a, b = self.rgb(rgb).mean((2, 3)), self.depth(depth).amax((2, 3))
        age = torch.zeros(len(a), 2).to(a) if age is None else age
        both = a * b if site is None else a * b + self.site(site)
        return self.last(torch.cat([both, a - b, age], 1))


class FromDict(Fusion):
    def forward(self, batch):
        return super().forward(**batch)


FORMS = {
    "tuple": (Fusion, (RGB, DEPTH)),
    "list": (Fusion, [RGB, DEPTH, AGE]),
    "by name": (Fusion, {"depth": DEPTH, "rgb": RGB, "site": SITE}),
    "as a dict": (FromDict, {"rgb": RGB, "depth": DEPTH, "age": AGE, "site": SITE}),
}


def given_to(backbone, inputs):
    if isinstance(backbone, FromDict):
        return backbone(inputs)
    return backbone(**inputs) if isinstance(inputs, dict) else backbone(*inputs)


def rows(inputs, count):
    if isinstance(inputs, dict):
        return {name: tensor[:count] for name, tensor in inputs.items()}
    return type(inputs)(tensor[:count] for tensor in inputs)


@pytest.fixture(scope="module", params=FORMS)
def problem(request):
    kind, inputs = FORMS[request.param]
    backbone = kind().double().eval()
    features = given_to(backbone, inputs).detach().numpy()
    return PCASVMNet(backbone, make_pipeline(StandardScaler(), PCA(4), SVC()).fit(features, Y)).eval(), inputs


def by_autograd(net, inputs, layer, function):
    """Return the activations of a layer, and the gradient of every column of a function of the output."""
    with keep_leaves(net.backbone.get_submodule(layer)) as kept:
        values = function(net.of_features(given_to(net.backbone, inputs)))
    columns = range(values.shape[1])
    grads = [torch.autograd.grad(values[:, k].sum(), kept[0], retain_graph=True)[0] for k in columns]
    return kept[0].detach(), torch.stack(grads, 1)


@pytest.mark.parametrize("layer", ["rgb.2", "depth.1", "rgb.0"])
@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
def test_maps_of_every_branch_equal_autograds(problem, layer, jacobian):
    net, inputs = problem
    inputs = rows(inputs, 3)
    activations, grads = by_autograd(net, inputs, layer, lambda out: out.components)
    maps = ClosedFormGradCAM(net, [layer], jacobian=jacobian).explain(inputs)
    weights = grads.sum((3, 4))
    assert relative(maps.weights[:, :4], weights) < 1e-10
    assert relative(maps.maps[:, :4], torch.einsum("nkt,nthw->nkhw", weights, activations)) < 1e-10
    assert maps.maps.shape[2:] == activations.shape[2:]
    maps = ClosedFormLayerCAM(net, [layer], jacobian=jacobian).explain(inputs)
    assert relative(maps.maps[:, :4], (grads.relu() * activations.unsqueeze(1)).sum(2)) < 1e-10


@pytest.mark.parametrize("layer", ["rgb.2", "depth.1"])
@pytest.mark.parametrize("baseline", ["zero", "neutral", "mean"])
def test_what_a_branch_contributes_adds_up_while_the_other_stays(problem, layer, baseline):
    net, inputs = problem
    loader = [(rows(inputs, 9), Y[:9]), (rows(inputs, 5), Y[:5])]
    mean = mean_activations(net, loader, layer, progress=False)
    cam = ContributionCAM(net, [layer], baseline=baseline, mean=mean)
    maps = cam.explain(rows(inputs, 3), [PCATarget(1), SVMTarget("ripe"), SVMTarget("raw", versus="rotten")])
    output = net(rows(inputs, 3))
    assert relative(maps.values[:, 0], output.components[:, 1]) < 1e-10
    assert relative(maps.values[:, 1], output.margins[:, list(net.head.classes_).index("ripe")]) < 1e-10
    assert relative(maps.maps.sum((2, 3)) + maps.baseline_values, maps.values) < 1e-9
    if baseline != "zero":  # where a target is undecided depends on the other inputs: maps start at the mean

        def at_mean(module, args, output):
            return mean.expand_as(output)

        handle = net.backbone.get_submodule(layer).register_forward_hook(at_mean)
        start = net(rows(inputs, 3))
        handle.remove()
        assert relative(maps.baseline_values[:, 0], start.components[:, 1]) < 1e-10


@pytest.mark.parametrize("method", [LIFTCAM, ShapCAM, RelevanceCAM, ClosedFormShapleyCAM])
def test_other_methods_are_those_of_the_branch_alone(problem, method):
    """Of a network of one input, which holds the other ones."""
    net, inputs = problem
    inputs = rows(inputs, 3)

    class Alone(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone

        def forward(self, rgb):
            return given_to(self.backbone, {**inputs, "rgb": rgb} if isinstance(inputs, dict) else [rgb, *inputs[1:]])

    alone = PCASVMNet(Alone(net.backbone), net.head).eval()
    options = {} if method is ClosedFormShapleyCAM else {"baseline": "zero"}
    rgb = inputs["rgb"] if isinstance(inputs, dict) else inputs[0]
    if method is ShapCAM:
        options["samples"] = 8
        rgb, inputs = rgb[:1], rows(inputs, 1)
    expected = method(alone, ["backbone.rgb.2"], jacobian="closed_form", **options).explain(rgb, [SVMTarget("ripe")])
    maps = method(net, ["rgb.2"], jacobian="closed_form", **options).explain(inputs, [SVMTarget("ripe")])
    assert relative(maps.maps, expected.maps) < 1e-10


def test_the_hosts_call_scales_maps_to_images_of_one_size(problem):
    net, inputs = problem
    with pytest.raises(ValueError, match="images of different sizes: use explain"):
        ClosedFormGradCAM(net, ["depth.1"])(rows(inputs, 2), [PCATarget(0), SVMTarget("raw")])
    same = {"depth": RGB[:2, :1], "rgb": RGB[:2]} if isinstance(inputs, dict) else [RGB[:2], RGB[:2, :1]]
    if isinstance(net.backbone, FromDict) or not isinstance(inputs, dict):
        maps = ClosedFormGradCAM(net, ["depth.1"])(same, [PCATarget(0), SVMTarget("raw")])
        assert maps.shape == (2, 14, 10)
        assert maps.max() <= 1


def test_scores_features_and_labels(problem):
    net, inputs = problem
    size = 10
    rows_of = [slice(start, start + size) for start in range(0, N, size)]
    tensors = inputs if not isinstance(inputs, dict) else list(inputs.values())
    loader = [([t[r] for t in tensors], Y[r]) for r in rows_of]
    if isinstance(inputs, dict):
        loader = [(dict(zip(inputs, given, strict=True)), labels) for given, labels in loader]
    features, labels = extract_features(net.backbone, loader, progress=False)
    np.testing.assert_allclose(features, given_to(net.backbone, inputs).detach(), rtol=1e-12)
    np.testing.assert_array_equal(labels, Y)
    np.testing.assert_array_equal(net.predict(inputs), net.of_features(torch.from_numpy(features)).labels())


def test_pooled_features_of_both_branches():
    """A default collate gives a list of both, and their features are pooled and concatenated."""
    backbone = Fusion().double().eval()
    loader = DataLoader(Pairs(), batch_size=7)
    features, labels = extract_features(backbone, loader, layer=["rgb.3", "depth.3"], pool="mean", progress=False)
    expected = [backbone.rgb(RGB).mean((2, 3)), backbone.depth(DEPTH).mean((2, 3))]
    np.testing.assert_allclose(features, torch.cat(expected, 1).detach(), rtol=1e-10)
    head = make_pipeline(StandardScaler(), PCA(3), SVC()).fit(features, labels)
    net = PCASVMNet(backbone, head, layer=["rgb.3", "depth.3"], pool="mean")
    maps = ClosedFormGradCAM(net, ["depth.3"]).explain((RGB[:2], DEPTH[:2]))
    assert maps.maps.shape == (2, 4, 4, 10)
    direction = torch.from_numpy(head[1].components_[:, 5:] / head[0].scale_[5:])
    depth = backbone.depth(DEPTH[:2])
    expected = torch.einsum("kt,nthw->nkhw", direction / 40, depth) * 40  # sums over positions of means
    assert relative(maps.maps[:, :3], expected.detach()) < 1e-10


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return N

    def __getitem__(self, index):
        return (RGB[index], DEPTH[index]), index % 3


def test_a_network_of_scores_takes_several_inputs():
    backbone = Fusion().double().eval()
    maps = ClosedFormGradCAM(backbone, ["rgb.2"]).explain((RGB[:2], DEPTH[:2]), [lambda row: row[3]])
    net = PCASVMNet(backbone, make_pipeline(PCA(9)).fit(backbone(RGB, DEPTH).detach().numpy()))
    _, grads = by_autograd(net, (RGB[:2], DEPTH[:2]), "rgb.2", lambda out: out.features[:, 3:4])
    assert relative(maps.weights, grads.sum((3, 4))) < 1e-10


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net, x: ClosedFormScoreCAM(net, ["rgb.2"]).explain(x), "ClosedFormScoreCAM takes networks of one"),
        (lambda net, x: smoothed(ClosedFormGradCAM(net, ["rgb.2"]), x), "smoothed takes networks of one input"),
        (lambda net, x: ClosedFormGradCAM(net, ["rgb.2"])(x, aug_smooth=True), "aug_smooth takes networks of one"),
        (lambda net, x: ClosedFormGradCAM(net, "auto").explain(x), "target_layers='auto' takes networks of one input"),
        (lambda net, x: export.program(ClosedFormGradCAM(net, ["rgb.2"]), x), "a program takes networks of one input"),
    ],
)
def test_what_takes_one_input_says_so(problem, make, words):
    net, inputs = problem
    with pytest.raises(TypeError, match=words):
        make(net, rows(inputs, 2))


def test_a_data_set_of_several_inputs_is_refused_where_images_are_read():
    with pytest.raises(TypeError, match="only explain and extract_features take several inputs for a network"):
        Images(Pairs())._item(0)


def test_what_are_no_inputs_is_refused():
    net = PCASVMNet(backbone := Fusion().double().eval(), PCA(3).fit(backbone(RGB, DEPTH).detach().numpy()))
    cam = ClosedFormGradCAM(net, ["rgb.2"])
    with pytest.raises(ValueError, match=r"one row each for the same images, \(N, ...\), got \(3, 3, 14, 10\), \(2, 1"):
        cam.explain((RGB[:3], DEPTH[:2]))
    with pytest.raises(TypeError, match=r"Fusion has no arguments named image, label, and cannot be run on a dict of"):
        cam.explain({"image": RGB[:2], "label": SITE[:2]})
    with pytest.raises(ValueError, match="NaN or infinite"):
        cam.explain((RGB[:2], DEPTH[:2] / 0))
    with pytest.raises(TypeError, match=r"got list: use torch.stack"):
        cam.explain([RGB[0], RGB[1]])
    with pytest.raises(TypeError, match="floating-point values"):
        cam.explain((SITE, SITE))
    with pytest.raises(ValueError, match="N > 0"):
        cam.explain((RGB[:0], DEPTH[:0]))
