"""Stem and path: the families of torchvision, refusals, and networks that change."""

import copy
import operator
import threading
import warnings

import pytest
import torch
from reference import relative
from torch import nn
from torchvision import models

from pytorch_grad_cam_pcasvm import NoClosedFormError
from pytorch_grad_cam_pcasvm import rules as layers
from pytorch_grad_cam_pcasvm.path import AutogradPath, Path

# Family: builder, output of the last block, layers users take features from (None: the logits).
FAMILIES = {
    "alexnet": (models.alexnet, "features.12", ["avgpool", "classifier.2", "classifier.5", None]),
    "vgg": (models.vgg11, "features.20", ["avgpool", "classifier.1", "classifier.4", None]),
    "vgg_bn": (models.vgg11_bn, "features.28", ["classifier.4"]),
    "resnet": (models.resnet18, "layer4.1", ["avgpool", None]),
    "resnext": (models.resnext50_32x4d, "layer4.2", ["avgpool"]),
    "wide_resnet": (models.wide_resnet50_2, "layer4.2", ["avgpool"]),
    "densenet": (models.densenet121, "features.norm5", ["features", None]),
    "densenet block": (models.densenet121, "features.denseblock4", [None]),
    "mobilenet_v2": (models.mobilenet_v2, "features.18", ["features.18", "classifier.0", None]),
    "mobilenet_v3": (models.mobilenet_v3_small, "features.12", ["avgpool", "classifier.1", None]),
    "efficientnet": (models.efficientnet_b0, "features.8", ["avgpool", None]),
    "efficientnet_v2": (models.efficientnet_v2_s, "features.7", ["avgpool"]),
    "convnext": (models.convnext_tiny, "features.7.2", ["avgpool", "classifier.1", None]),
    "regnet": (models.regnet_y_400mf, "trunk_output", ["avgpool", None]),
    "googlenet": (models.googlenet, "inception5b", ["avgpool", None]),
    "inception_v3": (models.inception_v3, "Mixed_7c", ["avgpool", None]),
    "squeezenet": (models.squeezenet1_1, "features.12", ["classifier.3", None]),
    "shufflenet_v2": (models.shufflenet_v2_x0_5, "conv5", [None]),
    "shufflenet_v2 stage": (models.shufflenet_v2_x0_5, "stage4", ["conv5"]),
    "mnasnet": (models.mnasnet0_5, "layers.16", ["layers", None]),
    "swin": (models.swin_t, "norm", ["avgpool", "flatten", None]),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_cnn_families_of_torchvision_have_a_closed_form(family):
    build, target, layers = FAMILIES[family]
    options = {"init_weights": False} if build in (models.googlenet, models.inception_v3) else {}
    torch.manual_seed(0)
    net = build(weights=None, num_classes=7, **options).double().eval()
    size = 96 if build is models.inception_v3 else 64
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    for layer in layers:
        with torch.no_grad():
            passed = Path(net, layer, [target]).run(x)
        expected = AutogradPath(net, layer, [target]).run(x)
        assert relative(passed.features, expected.features) < 1e-12
        assert relative(passed.activations[0], expected.activations[0]) < 1e-12
        grad = torch.randn(2, 2, passed.features.shape[1], dtype=torch.float64)
        pulled = expected.pullback(grad, 0)
        assert relative(passed.pullback(grad, 0), pulled) < 1e-10
        if family != "swin":  # its activations are channels-last: weights come after a reshape_transform
            assert relative(passed.weights(grad, 0), pulled.flatten(3).sum(-1)) < 1e-10


def small(*tail):
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *tail, nn.Flatten(), nn.Linear(64, 6), nn.ReLU()).double().eval()
    )


X = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRAD = torch.randn(3, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def check(net, targets=("0",), x=X, layer=None, grad=GRAD, path=None):
    """Compare a path's weights with autograd's."""
    with torch.no_grad():
        passed = (path or Path(net, layer, targets)).run(x)
    expected = AutogradPath(net, layer, targets).run(x)
    for position in range(len(targets)):
        assert relative(passed.activations[position], expected.activations[position]) < 1e-12
        pulled = expected.pullback(grad, position)
        assert relative(passed.pullback(grad, position), pulled) < 1e-12
        assert relative(passed.weights(grad, position), pulled.flatten(3).sum(-1)) < 1e-12


@pytest.mark.parametrize("targets", [["0", "1"], ["1", "0"], ["1"], ["2", "0"]])
def test_several_target_layers_in_any_order(targets):
    check(small(nn.MaxPool2d(2, 1, padding=1), nn.AvgPool2d(2, 1)), targets)


def test_feature_layer_in_the_middle_is_not_passed():
    net = small()
    net.append(nn.Linear(6, 2).double())
    net[-1].forward = lambda x: pytest.fail("what follows the feature layer was run")
    check(net, layer="4")


def test_target_layer_may_be_the_feature_layer():
    check(small(), layer="1", targets=["1"], grad=torch.randn(3, 2, 64, dtype=torch.float64))


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(64, 6)

    def forward(self, x):
        x = self.first(x)
        return self.out((x + self.second(x)).relu().flatten(1))


def test_a_way_around_the_target_layer_is_refused_by_name():
    net = Skip().double()
    with pytest.raises(NoClosedFormError, match=r"'second' is not the only way to the features: first goes around it"):
        Path(net, None, ["second"])
    check(net, ["first"])


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.relu, self.out = nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(64, 6)

    def forward(self, x):
        return self.out(self.relu(self.relu(self.conv(x))).flatten(1))


class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.out = Pair(), nn.Linear(64, 6)

    def forward(self, x):
        return self.out(self.pair(x)[0].flatten(1))


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x), x


class Norm(nn.Module):
    def forward(self, x):
        return nn.functional.normalize(x)


@pytest.mark.parametrize(
    ("net", "layer", "target", "error", "message"),
    [
        (small(), "1", "4", ValueError, "'4' does not run before the features"),
        (Twice(), None, "relu", ValueError, "'relu' runs 2 times in a forward pass"),
        (Tuples(), None, "pair", NoClosedFormError, "'pair' gives a tuple"),
        (
            small(nn.Softmax(1)),
            None,
            "0",
            NoClosedFormError,
            r"goes through '2' \(Softmax\).*@register_jacobian\(Softmax\)",
        ),
        (small(Norm()), None, "1", NoClosedFormError, r"'1' to the features goes through normalize"),
    ],
    ids=["after the features", "twice", "tuple", "layer without rule", "function without rule"],
)
def test_what_has_no_closed_form_is_refused_by_name(net, layer, target, error, message):
    with pytest.raises(error, match=message):
        Path(net, layer, [target])


class SideBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.aside, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3), nn.Linear(64, 6)

    def forward(self, x):
        self.aside(x)
        return self.out(self.conv(x).relu().flatten(1))


def test_a_target_that_does_not_lead_to_the_features_is_refused():
    with pytest.raises(ValueError, match="'aside' does not lead to the network's output"):
        Path(SideBranch(), None, ["aside"])


def test_tracing_leaves_nothing_on_the_backbone():
    class WithConstant(nn.Sequential):
        def forward(self, x):
            return self[3]((self[0](x) * torch.tensor([2.0]).double()).relu().flatten(1))

    net = WithConstant(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)).double()
    before = set(vars(net))
    check(net)
    assert set(vars(net)) == before


def test_arguments_with_defaults_and_sizes_of_the_input():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(64, 6)

        def forward(self, x, scale=None):
            n = x.shape[0]
            x = self.conv(x)
            return self.out((x if scale is None else x * scale).relu().view(n, -1))

    check(Sized().double(), ["conv"])


@pytest.mark.parametrize("change", ["add_", "optimizer", "data", "load_state_dict", "replace parameter"])
@pytest.mark.parametrize("size", ["small", "large"])
def test_a_changed_weight_changes_the_weights(change, size):
    width = 6 if size == "small" else 20_000  # large: the presummed weight is kept between calls
    net = small()
    net[3] = nn.Linear(64, width).double()
    path = Path(net, None, ["0"])
    grad = torch.randn(3, 2, width, dtype=torch.float64)
    check(net, grad=grad, path=path)
    dense = net[3]
    match change:
        case "add_":
            with torch.no_grad():
                dense.weight.add_(torch.randn_like(dense.weight))
        case "optimizer":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.003)
            net(X).square().sum().backward()
            optimizer.step()
        case "data":
            dense.weight.data.mul_(-0.7)
        case "load_state_dict":
            dense.load_state_dict({"weight": torch.randn_like(dense.weight), "bias": dense.bias})
        case "replace parameter":
            dense.weight = nn.Parameter(torch.randn_like(dense.weight))
    check(net, grad=grad, path=path)


def test_a_replaced_layer_makes_the_path_stale():
    net = small()
    path = Path(net, None, ["0"])
    assert not path.stale()
    net[3] = nn.Linear(64, 6).double()
    assert path.stale()


def test_a_replaced_buffer_makes_the_path_stale():
    net = models.swin_t(weights=None, num_classes=4)
    path = Path(net.eval(), None, ["norm"])
    assert not path.stale()
    net.double()
    x = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert relative((Path(net, None, ["norm"]) if path.stale() else path).run(x).features, net(x)) < 1e-12


def test_a_hook_that_changes_the_features_is_found_out():
    net = small()
    net[4].register_forward_hook(lambda module, args, output: output * 2)
    path = Path(net, None, ["0"])
    with pytest.raises(NoClosedFormError, match="differs from autograd"), torch.no_grad():
        path.run(X)


def test_a_hook_that_changes_the_output_of_a_block_is_found_out():
    net = nn.Sequential(small(), nn.Identity())
    net[0].register_forward_hook(lambda module, args, output: output * 2)
    path = Path(net, None, ["0.0"])
    with pytest.raises(NoClosedFormError, match="own features"), torch.no_grad():
        path.run(X)


def test_a_rule_of_the_wrong_shape_is_named():
    class Half(nn.Module):
        def forward(self, x):
            return x / 2 if x.sum() < 1e9 else x

    before = dict(layers._rules)
    try:
        layers.register_jacobian(Half)(lambda layer, x, y, grad: grad.sum(1))
        path = Path(small(Half()), None, ["0"])
        with pytest.raises(NoClosedFormError, match="the rule of Half gives the shape"), torch.no_grad():
            path.run(X)
    finally:
        layers._rules.clear()
        layers._rules.update(before)
    for wrong in ((), (nn.ReLU(),), (lambda layer, x, y, grad: grad,)):
        with pytest.raises(TypeError, match="register_jacobian takes layer classes"):
            layers.register_jacobian(*wrong)


def test_a_path_that_is_not_the_networks_own_is_found_out():
    class Factor(nn.Sequential):
        factor = 2

        def forward(self, x):
            return self.factor * super().forward(x)

    net = Factor(*small())
    path = Path(net, None, ["0"])
    net.factor = 3
    with pytest.raises(NoClosedFormError, match="own features"), torch.no_grad():
        path.run(X)


def test_parametrised_layers_are_read_through_their_parametrisation():
    net = small()
    nn.utils.parametrizations.weight_norm(net[3])
    check(net)


def test_channels_last():
    net = small().to(memory_format=torch.channels_last)
    check(net, x=X.to(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_backbones_are_pulled_back_in_float32(dtype):
    net, half = small(), small().to(dtype)
    with torch.no_grad():
        passed, exact = Path(half, None, ["0"]).run(X.to(dtype)), Path(net, None, ["0"]).run(X)
    weights = passed.weights(GRAD.float(), 0)
    assert weights.dtype == torch.float32
    assert relative(weights, exact.weights(GRAD, 0)) < 0.05
    assert passed.activations[0].dtype == dtype


def test_a_scripted_network_cannot_be_traced():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(small())
    with pytest.raises(NoClosedFormError, match="cannot be traced"):
        Path(net, None, ["0"])


def test_a_copy_of_a_network_is_independent():
    net = small()
    other = copy.deepcopy(net)
    path = Path(net, None, ["0"])
    with torch.no_grad():
        other[3].weight.zero_()
    check(net, path=path)


class Shared(nn.Module):
    """A parameter, and a number made of it, on both sides of the target layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3), nn.Linear(64, 6)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        gate = torch.sigmoid(self.gain)
        x = self.second(self.first(x) * self.gain * gate)
        return self.out((x * self.gain * gate).relu().flatten(1))


def test_parameters_on_both_sides_of_the_target_layer():
    net = Shared().double()
    check(net, ["second"])
    check(net, ["first"])


class Unassigned(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        x.clamp_(max=0.1)
        return self[4](self[3](x.flatten(1)))


class Preactivation(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        y = torch.relu_(x)
        return self[4](self[3]((x + 2 * y).flatten(1)))


@pytest.mark.parametrize("kind", [Unassigned, Preactivation])
def test_in_place_statements_that_a_trace_does_not_show_are_refused(kind):
    with pytest.raises(NoClosedFormError, match="works in place on a tensor that is used again"):
        Path(kind(*small()), None, ["0"])


def test_a_stem_may_work_in_place_as_it_likes():
    class Stem(nn.Sequential):
        def forward(self, x):
            y = 2 * x
            z = torch.relu_(y)
            return self[4](self[3](self[0](y + z).relu().flatten(1)))

    check(Stem(*small()))


class Keeper(nn.Sequential):
    def forward(self, x):
        self.last = self[0](x)
        self.register_buffer("scratch", None)
        return self[4](self[3]((self.last * torch.tensor(2.0).double()).relu().flatten(1)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_forward_that_keeps_a_tensor_is_left_without_a_proxy(fails):
    net = nn.Sequential(Keeper(*small()), nn.Softmax(1) if fails else nn.Identity())
    net(X)
    last = net[0].last
    before = [sorted(vars(module)) for module in net.modules()]
    if fails:
        with pytest.raises(NoClosedFormError, match="Softmax"):
            Path(net, None, ["0.0"])
    else:
        Path(net, None, ["0.0"])
    assert net[0].last is last
    assert [sorted(vars(module)) for module in net.modules()] == before


def test_numbers_and_hooks_that_change_make_the_path_stale():
    class Factor(nn.Sequential):
        factor = 2

        def forward(self, x):
            return self.factor * super().forward(x)

    net = Factor(*small())
    net.factor = 2
    path = Path(net, None, ["0"])
    net.eval()
    assert not path.stale()
    net.factor = 3
    assert path.stale()
    path = Path(net, None, ["0"])
    net.register_forward_hook(lambda module, args, output: output + 1)
    assert path.stale()


def test_networks_are_traced_beside_networks_that_run():
    """torch.fx replaces nn.Module.__call__ for the whole process while it traces."""
    nets, errors = [small() for _ in range(3)], []
    expected = [net(X) for net in nets]
    call = nn.Module.__call__

    def trace(net):
        for _ in range(15):
            Path(net, None, ["0"])

    def run():
        try:
            for _ in range(300):
                if relative(nets[2](X), expected[2]) > 1e-12:
                    errors.append("another number")
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=trace, args=(net,)) for net in nets] + [threading.Thread(target=run)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert nn.Module.__call__ is call


def test_a_wrong_claim_of_kept_sums_is_found_out():
    class SumPool(nn.Module):
        def forward(self, x):
            return 4 * nn.functional.avg_pool2d(x, 2)

    def rule(layer, x, y, grad):
        return grad.repeat_interleave(2, -1).repeat_interleave(2, -2)

    before = dict(layers._rules), dict(layers._keeps_sums)
    try:
        layers.register_jacobian(SumPool, keeps_sums=lambda layer, x, y: True)(rule)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), SumPool(), nn.Flatten(), nn.Linear(16, 6)).double()
        path = Path(net, None, ["0"])
        with pytest.raises(NoClosedFormError, match="keeps_sums"), torch.no_grad():
            path.run(X)
    finally:
        for registry, old in zip((layers._rules, layers._keeps_sums), before, strict=True):
            registry.clear()
            registry.update(old)


@pytest.mark.parametrize("edit", ["columns", "numpy"])
def test_edits_that_leave_no_version_change_the_weights(edit):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Flatten(), nn.Linear(256, 4096)).double()
    grad = torch.randn(3, 1, 4096, dtype=torch.float64)
    path = Path(net, None, ["0"])
    check(net, grad=grad, path=path)
    if edit == "columns":
        net[2].weight.data[:, 64:192] = 0
    else:
        net[2].weight.detach().numpy()[:, 10:200] *= 3
    check(net, grad=grad, path=path)


def test_a_squeeze_is_checked_on_two_images():
    class Squeezed(nn.Sequential):
        def forward(self, x):
            return self[4](self[3](self[0](x).mean((2, 3), keepdim=True).squeeze()))

    net = Squeezed(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6), nn.ReLU()).double()
    check(net)


def test_half_precision_autograd_keeps_small_gradients():
    net, half = small(), small().half()
    with torch.no_grad():
        exact = Path(net, None, ["0"]).run(X)
    weights = AutogradPath(half, None, ["0"]).run(X.half()).weights(1e-12 * GRAD.float(), 0)
    assert relative(weights, 1e-12 * exact.weights(GRAD, 0)) < 0.05


def test_sums_in_place_are_seen_and_leave_the_activations_alone():
    torch.manual_seed(0)
    network = models.resnet18(weights=None).double().eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    path = Path(network, "avgpool", ["layer4.0"])  # its output is added in layer4.1
    reference = AutogradPath(network, "avgpool", ["layer4.0"])
    with torch.no_grad():
        actual, expected = path.run(x), reference.run(x)
        seed = torch.randn(2, 3, 512, dtype=torch.float64)
        assert sum(node.target is operator.iadd for node in path._stem) == 7
        assert relative(actual.activations[0], expected.activations[0]) == 0
        assert relative(actual.features, expected.features) == 0
        assert relative(actual.weights(seed, 0), expected.weights(seed, 0)) < 1e-12
