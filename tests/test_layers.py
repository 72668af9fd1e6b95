"""Every layer's rule against its autograd twin."""

import pytest
import torch
from reference import relative
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torchvision.ops import Permute, StochasticDepth

from pytorch_grad_cam_pcasvm import NoClosedFormError, register_jacobian
from pytorch_grad_cam_pcasvm import rules
from pytorch_grad_cam_pcasvm.path import Path

SPATIAL = (3, 4, 7, 6)
LAYERS = [
    *((layer, SPATIAL) for layer in (nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.7), nn.LeakyReLU(0.2), nn.ELU(0.7))),
    *((layer, SPATIAL) for layer in (nn.Sigmoid(), nn.Tanh(), nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh"))),
    *((layer, SPATIAL) for layer in (nn.Hardsigmoid(), nn.Hardswish(), nn.Identity(), nn.Dropout(), nn.Dropout2d())),
    *((layer, SPATIAL) for layer in (nn.AlphaDropout(), StochasticDepth(0.3, "row"), Permute([0, 2, 3, 1]))),
    (nn.Flatten(), SPATIAL),
    (nn.Unflatten(1, (2, 2)), SPATIAL),
    (nn.Linear(6, 5), (3, 6)),
    (nn.Linear(6, 5), SPATIAL),
    (nn.Conv1d(4, 5, 3, padding=1), (3, 4, 7)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), SPATIAL),
    (nn.Conv2d(4, 6, 3, padding="same"), SPATIAL),
    (nn.Conv2d(4, 6, 3, padding="valid"), SPATIAL),
    (nn.Conv3d(4, 2, 2), (3, 4, 3, 5, 4)),
    (nn.BatchNorm1d(6), (3, 6)),
    (nn.BatchNorm2d(4), SPATIAL),
    (nn.BatchNorm2d(4, affine=False), SPATIAL),
    (nn.BatchNorm3d(4), (3, 4, 2, 3, 2)),
    (nn.LayerNorm(6), SPATIAL),
    (nn.LayerNorm([7, 6], elementwise_affine=False), SPATIAL),
    (nn.AdaptiveAvgPool1d(3), (3, 4, 7)),
    (nn.AdaptiveAvgPool2d((1, 1)), SPATIAL),
    (nn.AdaptiveAvgPool2d((3, 4)), SPATIAL),
    (nn.AdaptiveAvgPool2d((9, 6)), SPATIAL),
    (nn.AdaptiveAvgPool2d((None, 2)), SPATIAL),
    (nn.AdaptiveAvgPool3d(2), (3, 4, 3, 5, 4)),
    (nn.AvgPool1d(3, 2, 1), (3, 4, 7)),
    (nn.AvgPool2d(2), SPATIAL),
    (nn.AvgPool2d(3, 2, 1), SPATIAL),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True), SPATIAL),
    (nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), SPATIAL),
    (nn.AvgPool2d((3, 2), (2, 3), (1, 0), divisor_override=5), SPATIAL),
    (nn.AvgPool3d(2, 1, 1), (3, 4, 3, 5, 4)),
    (nn.MaxPool1d(3, 2, 1), (3, 4, 7)),
    (nn.MaxPool2d(2), SPATIAL),
    (nn.MaxPool2d(3, 2, 1, ceil_mode=True), SPATIAL),
    (nn.MaxPool2d(3, 1, 1, dilation=2), SPATIAL),
    (nn.MaxPool3d(2), (3, 4, 4, 5, 4)),
    (nn.AdaptiveMaxPool1d(3), (3, 4, 7)),
    (nn.AdaptiveMaxPool2d(3), SPATIAL),
    (nn.AdaptiveMaxPool3d(2), (3, 4, 3, 5, 4)),
]


def name(value):
    return str(value) if isinstance(value, nn.Module) else None


def prepared(layer):
    layer = layer.double().eval()
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            torch.manual_seed(1)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
        for parameter in module.parameters(recurse=False):
            torch.manual_seed(parameter.numel())
            nn.init.normal_(parameter)
    return layer


def by_autograd(layer, x, grad):
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = layer(x)
    return torch.stack([torch.autograd.grad(y, x, g, retain_graph=True)[0] for g in grad.unbind(1)], 1)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=name)
def test_rule_equals_autograd(layer, shape):
    layer = prepared(layer)
    torch.manual_seed(0)
    x = 2 * torch.randn(shape, dtype=torch.float64)
    y = layer(x).detach()
    grad = torch.randn(shape[0], 2, *y.shape[1:], dtype=torch.float64)
    kind = rules.rule_kind(type(layer))
    actual = rules.rule_of(kind)(layer, x, y, grad)
    # torch's own backward of hardsigmoid multiplies by 1/6 in float32, also in float64.
    twin = (lambda x: F.relu6(x + 3) / 6) if isinstance(layer, nn.Hardsigmoid) else layer
    expected = by_autograd(twin, x, grad)
    assert relative(actual, expected) < 1e-12
    if rules.keeps_sums(kind, layer, x, y):
        sums = grad.reshape(shape[0], 2, shape[1], -1).sum(-1)
        assert relative(sums, expected.reshape(shape[0], 2, shape[1], -1).sum(-1)) < 1e-12


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (nn.AvgPool2d(3, 2, 1), False),
        (nn.AvgPool2d(3, 2, 1, count_include_pad=False), True),
        (nn.AvgPool2d(2, divisor_override=3), False),
        (nn.AvgPool2d(2, ceil_mode=True), True),
        (nn.MaxPool2d(3, 2, 1), True),
        (nn.Flatten(), True),
        (nn.Flatten(2), False),
        (nn.ReLU(), False),
    ],
    ids=name,
)
def test_layers_that_keep_sums_are_known(layer, expected):
    x = torch.randn(SPATIAL)
    assert rules.keeps_sums(type(layer), layer, x, layer(x)) is expected


class Functions(nn.Module):
    """A path of functions and methods, as users write them."""

    def __init__(self, path, width):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.path = path
        self.out = nn.Linear(width, 5)
        self.dense = nn.Parameter(torch.randn(6, 120))
        self.scale = nn.Parameter(torch.randn(4, 1, 1))

    def forward(self, x):
        return self.out(self.path(self, self.conv(x)))


def pooled(net, x):
    return F.adaptive_avg_pool2d(x, 1).flatten(1)


PATHS = {
    "relu, view, size": (lambda net, x: torch.relu(x).view(x.size(0), -1), 120),
    "relu with input=": (lambda net, x: torch.flatten(F.relu(input=x, inplace=True), start_dim=1), 120),
    "x.shape[0]": (lambda net, x: F.silu(x).reshape(x.shape[0], 4, -1).mean(-1), 4),
    "mean with keepdim": (lambda net, x: x.sigmoid().mean([2, 3], keepdim=True).squeeze(-1).squeeze(-1), 4),
    "torch.mean over one dim": (lambda net, x: torch.mean(F.gelu(x, approximate="tanh"), dim=2).flatten(1), 20),
    "permute and mean": (lambda net, x: x.tanh().permute(0, 2, 3, 1).mean((1, 2)), 4),
    "torch.permute": (lambda net, x: pooled(net, torch.permute(x, (0, 1, 3, 2)).relu()), 4),
    "transpose": (lambda net, x: x.flatten(2).transpose(1, 2).tanh().mean(1), 4),
    "cat": (lambda net, x: torch.cat([pooled(net, x.relu()), pooled(net, x.sigmoid())], dim=-1), 8),
    "add": (lambda net, x: pooled(net, torch.add(x.relu(), x.tanh(), alpha=0.5) + 3), 4),
    "subtract": (lambda net, x: pooled(net, x.relu() - 2 * x.tanh()), 4),
    "gate (squeeze and excite)": (lambda net, x: pooled(net, x * F.adaptive_avg_pool2d(x, 1).sigmoid()), 4),
    "parameter": (lambda net, x: pooled(net, F.relu6(3 * x * net.scale)), 4),
    "in place": (lambda net, x: pooled(net, F.relu_((x + 0).mul_(2).add_(0.1))), 4),
    "+=": (lambda net, x: iadd(2 * x, x.tanh()), 4),
    "pools": (lambda net, x: F.max_pool2d(F.avg_pool2d(x, 3, 2, 1), 2).flatten(1), 4),
    "functional linear and norm": (
        lambda net, x: F.layer_norm(F.linear(x.flatten(1), net.dense), (6,)),
        6,
    ),
    "other=, axis=": (lambda net, x: torch.add(torch.mul(x.tanh(), other=2.0), other=x).mean(axis=(2, 3)), 4),
    "swapaxes": (lambda net, x: pooled(net, torch.swapaxes(x, axis0=2, axis1=3).tanh()), 4),
    "torch.max_pool2d": (lambda net, x: pooled(net, torch.max_pool2d(x, 2, 2, 0, 1, True)), 4),
    "dropout": (lambda net, x: F.dropout(pooled(net, x), 0.5, net.training), 4),
    "dtype": (lambda net, x: pooled(net, x.to(torch.float64).contiguous()), 4),
}


def iadd(a, b):
    a += b
    return F.adaptive_max_pool2d(a, 1).flatten(1)


@pytest.mark.parametrize("case", PATHS)
def test_functions_and_methods_are_read_as_layers(case):
    torch.manual_seed(0)
    path, width = PATHS[case]
    net = Functions(path, width).double().eval()
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(net, None, ["conv"]).run(x)
    activations = net.conv(x).detach()
    assert relative(passed.activations[0], activations) == 0, "an in-place layer overwrote the activations"
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    expected = by_autograd(lambda a: net.out(path(net, a.clone())), activations, grad)
    assert relative(passed.pullback(grad, 0), expected) < 1e-12
    assert relative(passed.weights(grad, 0), expected.flatten(3).sum(-1)) < 1e-12


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, (2, 2), padding="same"),
        nn.Flatten(0),
        Permute([1, 0, 2, 3]),
    ],
    ids=name,
)
def test_layers_whose_options_have_no_closed_form_are_refused(layer):
    x = torch.randn(SPATIAL)
    y = layer(x)
    with pytest.raises(NoClosedFormError):
        rules.rule_of(type(layer))(layer, x, y, torch.randn(x.shape[0], 2, *y.shape[1:]))


def test_a_subclass_with_its_own_forward_is_not_taken_for_its_base():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    assert rules.rule_kind(Doubled) is None
    assert rules.rule_kind(Renamed) is nn.Linear
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), Doubled(64, 5)).double()
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(net, None, ["0"]).run(x)
    assert relative(passed.pullback(grad, 0), by_autograd(net[1:], net[0](x).detach(), grad)) < 1e-12


class Swish(nn.Module):
    """The worked example of the README."""

    def forward(self, x):
        return x * torch.sigmoid(x) if x.sum() < 1e9 else x  # cannot be traced into


def swish(layer, x, y, grad):
    s = torch.sigmoid(x)
    return grad * (s + y * (1 - s)).unsqueeze(1)


@pytest.fixture
def registry():
    before = dict(rules._rules)
    yield
    rules._rules.clear()
    rules._rules.update(before)


def test_a_registered_rule_serves_the_path(registry):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Swish(), nn.Flatten(), nn.Linear(64, 5)).double()
    with pytest.raises(NoClosedFormError, match="cannot be traced"):
        Path(net, None, ["0"])
    assert register_jacobian(Swish)(swish) is swish
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    grad = torch.randn(2, 3, 5, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(net, None, ["0"]).run(x)
    assert relative(passed.pullback(grad, 0), by_autograd(net[1:], net[0](x).detach(), grad)) < 1e-12


def test_a_wrong_rule_is_found_out(registry):
    register_jacobian(Swish)(lambda layer, x, y, grad: grad)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Swish(), nn.Flatten(), nn.Linear(64, 5)).double()
    path = Path(net, None, ["0"])
    with pytest.raises(NoClosedFormError, match="differs from autograd"), torch.no_grad():
        path.run(torch.randn(2, 3, 6, 6, dtype=torch.float64))
