"""Exactness: weights, maps and Jacobians against autograd and against the paper's closed forms."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
import torchvision
from meta import Traffic, on_meta
from pairs import choose_pairs
from problems import TABLE, Backbone, Problem
from reference import jacobian_by_autograd, jacobians_by_paper, relative
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.svm import SVC, SVR
from torch import nn

from pytorch_grad_cam_pcasvm import (
    AutogradFallbackWarning,
    BlankMapWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    SVMTarget,
)

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
PROBLEMS = [
    Problem(activation, kernel, classes, dtype=dtype)
    for dtype, activation, kernel, classes in choose_pairs(
        (torch.float64, torch.float32), ("relu", "sigmoid"), ("linear", "rbf", "poly", "sigmoid"), (2, 4)
    )
]


def both(output):
    return torch.cat([output.components, output.margins], 1)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_jacobians_equal_autograd(problem):
    expected = jacobian_by_autograd(problem.net, problem.target_layer, problem.x, both).flatten(3).transpose(1, 2)
    jacobians = ClosedFormGradCAM(problem.net, [problem.target_layer]).jacobians(problem.x)
    assert jacobians.components.shape == (problem.n, 5, problem.components, 16)
    assert jacobians.margins.shape == (problem.n, 5, problem.classes, 16)
    assert not jacobians.log_scale.any()
    tolerance = TOLERANCE[problem.dtype]
    assert relative(jacobians.components, expected[:, :, : problem.components]) < tolerance
    assert relative(jacobians.margins, expected[:, :, problem.components :]) < tolerance


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_weights_and_maps_equal_autograd(problem):
    targets = [PCATarget(b) for b in range(problem.components)] + [SVMTarget(label) for label in problem.labels]
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, targets)
    weights = jacobian_by_autograd(problem.net, problem.target_layer, problem.x, both).sum((3, 4))
    with torch.no_grad():
        activations, output = problem.backbone.features(problem.x), problem.net(problem.x)
    tolerance = TOLERANCE[problem.dtype]
    assert relative(maps.weights, weights) < tolerance
    assert relative(maps.maps, torch.einsum("nkt,nthw->nkhw", weights, activations)) < tolerance
    assert relative(maps.values, both(output)) < tolerance
    assert relative(maps.nu, maps.maps.abs().amax((2, 3))) == 0
    assert maps.maps.dtype == problem.dtype


def test_jacobians_of_an_ordinary_network_are_those_of_its_scores():
    torch.manual_seed(0)
    backbone, x = Backbone(classes=3).double().eval(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    jacobians = ClosedFormGradCAM(backbone, ["features.3"]).jacobians(x)
    expected = jacobian_by_autograd(backbone, backbone.features[3], x, lambda scores: scores)
    assert jacobians.components is None
    assert relative(jacobians.margins, expected.flatten(3).transpose(1, 2)) < 1e-10


def test_jacobians_of_heads_without_classes():
    problem = Problem()
    scaler, pca, _ = (step for _, step in problem.head.steps)
    features = problem.backbone.classifier[:5](problem.backbone.features(problem.x).flatten(1)).detach()
    components = pca.transform(scaler.transform(features))
    regressor = SVR().fit(components, components[:, 0])
    for steps, margins in (([scaler, pca], None), ([scaler, pca, regressor], (5, 5, 1, 16))):
        net = PCASVMNet(problem.backbone, steps, "classifier.4")
        jacobians = ClosedFormGradCAM(net, ["features.3"]).jacobians(problem.x)
        expected = jacobian_by_autograd(net, problem.target_layer, problem.x, lambda output: output.components)
        assert relative(jacobians.components, expected.flatten(3).transpose(1, 2)) < 1e-10
        assert (None if jacobians.margins is None else jacobians.margins.shape) == margins


@pytest.mark.parametrize("problem", TABLE, ids=str)
def test_jacobians_equal_the_table_of_the_paper(problem):
    components, decision = jacobians_by_paper(problem.net, problem.head, problem.x)
    jacobians = ClosedFormGradCAM(problem.net, [problem.target_layer]).jacobians(problem.x)
    assert relative(jacobians.components, components.transpose(0, 2, 1, 3)) < 1e-10
    # a > 0 speaks for the second class, so its margin is a and that of the first -a.
    assert relative(jacobians.margins[:, :, 1], decision) < 1e-10
    assert relative(jacobians.margins[:, :, 0], -decision) < 1e-10


@pytest.mark.parametrize("problem", TABLE, ids=str)
def test_maps_equal_algorithm_2(problem):
    components, decision = jacobians_by_paper(problem.net, problem.head, problem.x)
    with torch.no_grad():
        activations = problem.backbone.features(problem.x).numpy()
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(
        problem.x, [*(PCATarget(b) for b in range(problem.components)), SVMTarget(problem.labels[1])]
    )
    e_b = components.sum(-1)
    s = decision.sum(-1)
    assert relative(maps.weights, np.concatenate([e_b, s[:, None]], 1)) < 1e-10
    expected = np.einsum("nkt,nthw->nkhw", np.concatenate([e_b, s[:, None]], 1), activations)
    assert relative(maps.maps, expected) < 1e-10


def test_default_targets_are_all_components_and_the_predicted_class():
    problem = Problem()
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    assert maps.targets == [PCATarget(0), PCATarget(1), PCATarget(2), PCATarget(3), SVMTarget()]
    predicted = np.searchsorted(problem.labels, problem.net.predict(problem.x))
    assert relative(maps.values[:, -1], maps.output.margins[range(5), predicted]) < 1e-12


def test_output_of_explain_is_that_of_the_network():
    problem = Problem()
    output = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x).output
    with torch.no_grad():
        expected = problem.net(problem.x)
    assert relative(output, expected) == 0
    assert relative(output.components, expected.components) == 0
    assert relative(output[2].margins, expected.margins[2]) == 0


def test_all_components_of_a_batch_take_one_forward_pass_and_no_backward_pass():
    problem = Problem(seed=3)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    cam.explain(problem.x)
    calls = []
    handles = [
        module.register_forward_hook(lambda module, args, output: calls.append((module, output.grad_fn)))
        for module in problem.backbone.modules()
        if not list(module.children())
    ]
    cam.explain(problem.x)
    for handle in handles:
        handle.remove()
    names = {module: name for name, module in problem.backbone.named_modules()}
    assert [names[module] for module, _ in calls] == [
        *("features.0", "features.1", "features.2", "features.3", "flatten"),
        *("classifier.0", "classifier.1", "classifier.2", "classifier.3", "classifier.4"),
    ]
    assert not any(isinstance(grad_fn, torch.autograd.graph.Node) for _, grad_fn in calls)


@pytest.mark.parametrize("jacobian", ["closed_form", "auto", "autograd"])
@pytest.mark.parametrize("max_bytes", [None, 1, 30_000])
def test_chunks_and_fallbacks_give_the_same_maps(jacobian, max_bytes):
    problem = Problem(classes=4)
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer], jacobian=jacobian, max_bytes=max_bytes)
    actual, jacobians = cam.explain(problem.x), cam.jacobians(problem.x)
    assert relative(actual.maps, expected.maps) < 1e-12
    assert relative(actual.weights, expected.weights) < 1e-12
    assert relative(jacobians.components.sum(-1).transpose(1, 2), expected.weights[:, :4]) < 1e-12


class Bessel(nn.Module):
    """A layer without a rule."""

    def forward(self, x):
        return torch.special.i0(x)


def test_auto_falls_back_to_autograd_with_one_warning():
    problem = Problem()
    torch.manual_seed(0)
    backbone = Backbone().double()
    backbone.classifier[2] = Bessel()
    net = PCASVMNet(backbone, problem.head, layer="classifier.4").eval()
    target = backbone.features[-1]
    expected = jacobian_by_autograd(net, target, problem.x, lambda out: out.components).sum((3, 4))
    with pytest.raises(NoClosedFormError, match=r"goes through aten.i0 of 'classifier.2'.*jacobian='auto'"):
        ClosedFormGradCAM(net, [target]).explain(problem.x)
    cam = ClosedFormGradCAM(net, [target], jacobian="auto")
    with pytest.warns(AutogradFallbackWarning) as warned:
        first = cam.explain(problem.x)
    assert warned[0].filename == __file__
    assert relative(first.weights[:, :4], expected) < 1e-10
    assert relative(cam.explain(problem.x).weights[:, :4], expected) < 1e-10  # a second warning would be an error
    assert cam.jacobian == "auto"


class Filtered(nn.Module):
    def forward(self, x):
        return torch.fft.ifft2(2 * torch.fft.fft2(x)).real


def test_auto_on_a_path_of_complex_numbers():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2), Filtered(), nn.GELU(), nn.Flatten()).double().eval()
    x = torch.randn(12, 3, 8, 8, dtype=torch.float64)
    net = PCASVMNet(backbone, SVC().fit(backbone(x).detach().numpy(), np.arange(12) % 2))
    cam = ClosedFormGradCAM(net, ["0"], jacobian="auto")
    with pytest.warns(AutogradFallbackWarning, match="fft|real"):
        maps = cam.explain(x[:3], SVMTarget(1))
    expected = jacobian_by_autograd(net, backbone[0], x[:3], lambda out: out.margins[:, 1:]).sum((3, 4))
    assert relative(maps.weights, expected) < 1e-10


def test_no_gradient_at_all_is_said():
    problem = Problem(kernel="rbf")
    dead = Backbone().double()
    dead.load_state_dict(problem.backbone.state_dict())
    with torch.no_grad():
        dead.classifier[0].bias.fill_(-1e6)
    cam = ClosedFormGradCAM(PCASVMNet(dead, problem.head, layer="classifier.4"), [dead.features[-1]])
    with pytest.warns(BlankMapWarning, match=r"image 0, PCATarget\(0\): there is no gradient at all"):
        maps = cam.explain(problem.x)
    assert not maps.maps.any()
    with pytest.warns(BlankMapWarning):
        assert not cam(problem.x, PCATarget(0)).any()
    with pytest.warns(BlankMapWarning):
        assert not maps.positive().any()


NETWORKS = {
    "vgg11": ("classifier.4", "features.20", 4096),
    "resnet18": ("avgpool", "layer4.1", 512),
    "mobilenet_v2": ("classifier.0", "features.18", 1280),
    "convnext_tiny": ("classifier.1", "features.7", 768),
    "densenet121": (None, "features.norm5", 1000),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name != "resnet18" else name for name in NETWORKS],
)
def test_nothing_is_sent_to_the_device_or_asked_of_it(name, unchecked):
    with torch.device("meta"):
        backbone = getattr(torchvision.models, name)()
    cam = on_meta(backbone, *NETWORKS[name])
    x = torch.empty(2, 3, 64, 64, device="meta")
    with Traffic() as traffic:
        maps = cam.explain(x)
        maps.positive(size=(64, 64)), maps.negative(scale="target")
        cam.explain(x, [SVMTarget("bee"), PCATarget(2, "-"), SVMTarget(versus="runner-up"), PCATarget(0)])
        cam.explain(x, [SVMTarget("bee", versus="ant"), PCATarget(1)])
        cam.jacobians(x)
    assert maps.maps.device.type == "meta"
    assert not traffic.seen
    isotonic = CalibratedClassifierCV(SVC(), method="isotonic", ensemble=False)
    cam = on_meta(backbone, *NETWORKS[name], svm=isotonic)
    cam.explain(x)  # its curves are sent to the device once
    with Traffic() as traffic:
        cam.explain(x)
    assert not traffic.seen
    with Traffic() as traffic:
        torch.ones(1).to("meta")
    assert traffic.seen


def test_the_number_of_operations_does_not_grow_with_the_number_of_components(unchecked):
    counts = []
    for components in (2, 9):
        cam = on_meta(Backbone(), "classifier.4", "features.3", 9, components)
        with Traffic() as traffic:
            cam.explain(torch.empty(2, 3, 12, 12, device="meta"))
        counts.append(traffic.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("targets", [None, [PCATarget(0)], [PCATarget(b) for b in range(4)]])
def test_what_is_returned_can_be_written_into(targets):
    # Pooled features behind affine stages: the weights of a component are the same for every image.
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())).double()
    rng = np.random.default_rng(0)
    net = PCASVMNet(backbone, PCA(4).fit(rng.normal(size=(20, 6))))
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    maps = ClosedFormGradCAM(net, [backbone[0]]).explain(x, targets)
    components, weights = maps.output.components.clone(), maps.weights.clone()
    for tensor in (maps.weights, maps.log_scale, maps.values, maps.maps, maps.nu):
        tensor[0] += 1.0
    assert torch.equal(maps.output.components, components)
    assert torch.equal(maps.weights[1:], weights[1:])


def test_target_layers_by_name():
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    cam = ClosedFormGradCAM(problem.net, ["features.3"])
    assert relative(cam.explain(problem.x).maps, expected.maps) == 0
    problem.backbone.features[3] = nn.Conv2d(6, 5, 3).double()
    expected = ClosedFormGradCAM(problem.net, [problem.backbone.features[3]]).explain(problem.x)
    assert relative(cam.explain(problem.x).maps, expected.maps) == 0


def test_a_custom_target_may_read_every_value_of_the_head():
    problem = Problem()

    def scaled(out):
        return out.head_trace.values[1][..., 2] * out.head_trace.values[0][..., 0] + out.features[..., 1]

    expected = jacobian_by_autograd(problem.net, problem.target_layer, problem.x, lambda out: scaled(out).unsqueeze(1))
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x, [scaled])
    assert relative(maps.weights, expected.sum((3, 4))) < 1e-10


@pytest.mark.parametrize("size", [96, pytest.param(224, marks=pytest.mark.slow)])
def test_swin_at_its_last_block_with_a_reshape_transform(size):
    torch.manual_seed(0)
    net = torchvision.models.swin_t(weights=None, num_classes=5).eval()
    cam = ClosedFormGradCAM(net, [net.features[-1]], reshape_transform=lambda t: t.permute(0, 3, 1, 2))
    x = torch.randn(2, 3, size, size)
    maps = cam.explain(x, [lambda row: row[3]])
    expected = jacobian_by_autograd(net, net.features[-1], x, lambda out: out[:, 3:4])
    assert relative(maps.weights, expected.sum((2, 3))) < 1e-4


def test_only_the_size_of_a_tensor_that_was_written_over_is_used():
    class Pooled(nn.Module):
        """As the DenseNet of torchxrayvision ends."""

        def __init__(self):
            super().__init__()
            self.features, self.out = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

        def forward(self, x):
            features = self.features(x)
            out = torch.nn.functional.relu(features, inplace=True)
            out = torch.nn.functional.adaptive_avg_pool2d(out, (1, 1)).view(features.size(0), -1)
            return self.out(out)

    torch.manual_seed(0)
    net, x = Pooled().double(), torch.randn(2, 3, 9, 9, dtype=torch.float64)
    maps = ClosedFormGradCAM(net, [net.features]).explain(x, [lambda row: row[1]])
    expected = jacobian_by_autograd(net, net.features, x, lambda out: out[:, 1:2])
    assert relative(maps.weights, expected.sum((3, 4))) < 1e-12


def test_eigen_smoothing_of_a_single_position_is_refused():
    problem = Problem()
    backbone = nn.Sequential(problem.backbone.features, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    net = PCASVMNet(backbone, PCA(2).fit(np.random.default_rng(0).normal(size=(9, 5))))
    cam = ClosedFormGradCAM(net, [backbone[1]])
    with pytest.raises(
        ValueError,
        match="eigen_smooth takes a principal component over positions, but the maps of '1' have only one position",
    ):
        cam(problem.x, PCATarget(0), eigen_smooth=True)


def test_evidence_against_a_class_is_explained_where_it_is_predicted_too():
    problem = Problem(seed=3)
    label = problem.net.predict(problem.x)[0]
    cam = ContributionCAM(problem.net, [problem.target_layer])
    maps = cam.explain(problem.x, [SVMTarget(versus=label)])
    for image, output in enumerate(problem.net(problem.x)):
        order = output.argsort(descending=True).tolist()
        names = [problem.net.head.classes_[index] for index in order]
        strongest = next(name for name in names if name != label)
        named = cam.explain(problem.x[image : image + 1], [SVMTarget(strongest, versus=label)])
        torch.testing.assert_close(maps.maps[image], named.maps[0], rtol=1e-4, atol=1e-6)
        assert (float(maps.values[image, 0]) < 0) == (problem.net.predict(problem.x)[image] == label)


def test_hooks_on_the_net_itself_are_refused_whenever_they_came():
    problem = Problem()
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    cam.explain(problem.x)
    problem.net.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match="has hooks, which would not be explained"):
        cam.explain(problem.x)


def test_methods_and_networks_keep_their_signatures_and_can_be_copied():
    assert [*inspect.signature(ClosedFormGradCAM).parameters][:2] == ["model", "target_layers"]
    assert [*inspect.signature(PCASVMNet).parameters] == ["backbone", "head", "layer", "pool"]
    problem = Problem()
    again = pickle.loads(pickle.dumps(copy.deepcopy(problem.net)))
    assert torch.equal(again(problem.x), problem.net(problem.x))


@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_several_layers_where_one_is_taken(method):
    problem = Problem()
    cam = method(problem.net, ["features", "features.0"])
    with pytest.raises(
        ValueError, match=f"^{method.__name__} takes .*: make one {method.__name__} for each layer"
    ) as told:
        cam.jacobians(problem.x)
    assert ("or use ContributionCAM" in str(told.value)) == (method is ClosedFormGradCAM)
