"""Rules: kinks, what has none, and those of users, against autograd."""

import pytest
import torch
from ops import Start, pulled
from reference import relative
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm import NoClosedFormError, register_jacobian
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import registry


def name(value):
    return str(value) if isinstance(value, nn.Module) else None


def test_an_output_that_is_not_explained_may_lead_to_one_that_is():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    seed = torch.randn(2, *x.shape, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(Start(lambda x: (x.tanh(), (y := x.square()), y * 3)), None, ["start"]).record(x)
    assert relative(passed.pullback([None, None, seed], 0).dense(), seed * 6 * x) < 1e-12
    assert relative(passed.pullback([None, seed, seed], 0).dense(), seed * 8 * x) < 1e-12
    assert relative(passed.pullback([seed, None, None], 0).dense(), seed * (1 - x.tanh() ** 2)) < 1e-12


@pytest.mark.parametrize(
    "layer", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-1, 3), nn.LeakyReLU(0.2), nn.ELU(0.7), nn.Hardsigmoid()], ids=str
)
def test_kinks_are_those_of_autograd(layer):
    """But clamp's and hardswish's, whose slopes differ between versions of torch."""
    x = torch.arange(-4, 8, dtype=torch.float64).reshape(1, 2, 6)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-6


def test_pools_that_keep_the_sum_over_positions():
    x = torch.randn(2, 3, 6, 6)

    def keeps(function, *args, x=x):
        return registry.find_rule(function).keeps_sums(x, *args, y=function(x, *args))

    aten = torch.ops.aten
    assert keeps(aten.avg_pool2d.default, [2, 2])
    assert keeps(aten.avg_pool2d.default, [3, 3], [1, 1], [0, 1], False, False)
    assert not keeps(aten.avg_pool2d.default, [3, 3], [1, 1], [0, 1])
    assert not keeps(aten.avg_pool2d.default, [2, 2], [2, 2], [0, 0], False, True, 3)
    for function in (aten.max_pool2d.default, aten.adaptive_avg_pool2d.default):
        assert keeps(function, [2, 2])
        assert not keeps(function, [2, 2], x=x[0]), "there is no batch"
    assert keeps(aten.mean.dim, [-1, 2])
    assert not keeps(aten.mean.dim, [1])
    assert not keeps(aten.mean.default)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: F.prelu(x, x[0, :, 0, 0]), "prelu depends on the target layer, and its rule has no gradient"),
        (lambda x: x.norm("nuc", dim=(2, 3)), "goes through aten._linalg_svd"),
        (lambda x: torch.cdist(x, 2 * x, p=torch.inf), "goes through aten._cdist_forward"),
    ],
)
def test_what_has_no_closed_form_is_refused_by_name(function, message):
    x = torch.randn(4, 4, 7, 6)
    net = Start(function).eval()

    def pull():
        passed = Path(net, None, ["start"]).record(x)
        return passed.pullback([torch.randn(2, *passed.output.shape)], 0).dense()

    with torch.no_grad(), pytest.raises(NoClosedFormError, match=message):
        pull()


class Swish(nn.Module):
    """The worked example of the README."""

    def forward(self, x):
        return x * torch.special.expit(x)


def swish(layer, x, y, grad):
    s = torch.sigmoid(x)
    return grad * (s + y * (1 - s))


class Renamed(Swish):
    pass


class Doubled(Swish):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("layer", [Swish(), Renamed(), Doubled()], ids=name)
def test_a_registered_layer_is_one_step(rules, layer):
    assert register_jacobian(Swish)(swish) is swish
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-12
    with torch.no_grad():
        steps = Path(Start(layer), None, ["start"]).record(x).tape.steps
    assert [step.function for step in steps] == ([Swish] if not isinstance(layer, Doubled) else steps_of_doubled(steps))


def steps_of_doubled(steps):
    assert Swish not in [step.function for step in steps], "its forward is another one"
    return [step.function for step in steps]


def test_hooks_on_a_registered_layer_are_steps_of_their_own(rules):
    register_jacobian(Swish)(swish)
    layer = Swish()
    layer.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    layer.register_forward_hook(lambda module, args, output: output.flip(1) + args[0])
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(layer, x)
    assert relative(actual, expected) < 1e-12


class Blend(nn.Module):
    def forward(self, a, b):
        return torch.lerp(a, b, 0.3)


class Blended(nn.Module):
    """A layer of two functions of a target layer."""

    def __init__(self, first, second):
        super().__init__()
        self.start, self.blend, self.first, self.second = nn.Identity(), Blend(), first, second

    def forward(self, x):
        x = self.start(1 * x)
        return self.blend(self.first(x), self.second(x))


def test_a_registered_layer_of_two_tensors(rules):
    @register_jacobian(Blend)
    def blend(layer, x, y, grad):
        a, b = x
        assert a.shape == b.shape == y.shape
        return 0.7 * grad, 0.3 * grad

    x, net = torch.randn(2, 3, 4, 4, dtype=torch.float64), Blended(torch.tanh, lambda x: x)
    with torch.no_grad():
        passed = Path(net, None, ["start"]).record(x)
        assert [step.name for step in passed.tape.steps] == ["aten.tanh", "Blend"]
        grad = torch.randn(2, *x.shape, dtype=torch.float64)
        assert relative(passed.pullback([grad], 0).dense(), grad * (0.7 * (1 - x.tanh() ** 2) + 0.3)) < 1e-12
        register_jacobian(Blend)(lambda layer, x, y, grad: (0.1 * grad, 0.9 * grad))
        with pytest.raises(NoClosedFormError, match="the rule of Blend is not autograd's Jacobian of it"):
            Path(net, None, ["start"]).record(x).pullback([grad], 0).dense()


class Cube(Swish):
    def forward(self, x):
        return x**3


class Rolled(Swish):
    def forward(self, x):
        return 2 * x.roll(1, 1)


class Summed(Swish):
    def forward(self, x):
        return x.cumsum(1)


class Pooled(Swish):
    def forward(self, x):
        return 4 * F.avg_pool2d(x, 2)


def cube(layer, x, y, grad):
    return grad * 3 * x**2


def summed(layer, x, y, grad):
    return grad.flip(2).cumsum(2).flip(2)


def spread(layer, x, y, grad):
    return grad.repeat_interleave(2, -1).repeat_interleave(2, -2)


def tokens_apart(dim, layer, x, y):
    return [None, dim]


SHAPE = r"not \([12], 2, 6, 4, 4\)"
NOT_ITS_JACOBIAN = "is not autograd's Jacobian of it"
BESSEL = torch.ops.aten.i0
# What is registered, its claims, the rule, and what is said of it.
WRONG = {
    "too few dimensions": (Swish, {}, lambda layer, x, y, grad: grad.sum(1), rf"Swish returns .*, {SHAPE}"),
    "another shape": (Swish, {}, lambda layer, x, y, grad: grad.flatten(3), rf"Swish returns .*, {SHAPE}"),
    "twice as many": (
        Swish, {}, lambda layer, x, y, grad: torch.cat([swish(layer, x, y, grad)] * 2),
        rf"Swish returns \([24], 2, 6, .*\), {SHAPE}"),
    "a number": (Swish, {}, lambda layer, x, y, grad: 3.0, rf"the rule of Swish returns float, {SHAPE}"),
    "a word": (Swish, {}, lambda layer, x, y, grad: "dx", rf"the rule of Swish returns str, {SHAPE}"),
    "nothing": (Swish, {}, lambda layer, x, y, grad: None, f"the rule of Swish {NOT_ITS_JACOBIAN}"),
    "a factor": (Cube, {"needs": "inputs"}, lambda layer, x, y, grad: 6 * grad * x**2, f"Cube {NOT_ITS_JACOBIAN}"),
    "y alone": (Cube, {"needs": "y"}, cube, "the rule of Cube returns NaN"),
    "no numbers": (Cube, {"needs": "nothing"}, cube, "the rule of Cube returns NaN"),
    "an error": (BESSEL, {}, lambda x, *, y, grad: grad.nothing, r"the rule of aten\.i0 raises AttributeError"),
    "arguments": (Swish, {}, lambda x, y, grad: grad, r"Swish does not take \(layer, x, y, grad\): .*'y'"),
    "arguments of a function": (BESSEL, {}, lambda input, y: y, r"does not take \(\.\.\., \*, y, grad\): .*'grad'"),
    "tokens": (
        Rolled, {"secant": "linear", "tokens": tokens_apart}, lambda layer, x, y, grad: 2 * grad.roll(-1, 2), "Rolled"),
    "elementwise": (Rolled, {"secant": "elementwise"}, lambda layer, x, y, grad: 2 * grad.roll(-1, 2), "Rolled"),
    "causal": (Summed, {"secant": "linear", "tokens": tokens_apart}, summed, "the rule of Summed mixes tokens"),
    "mixed": (Swish, {"secant": "elementwise"}, summed, "Swish is registered as elementwise, but its rule mixes"),
    "sums": (Pooled, {"keeps_sums": lambda layer, x, y: True}, spread, "Pooled says that sums over positions stay"),
    "no secant": (Swish, {}, swish, "Swish has no secant, without which maps do not add up"),
    "no linear secant": (Swish, {"secant": "linear"}, swish, "the secant of Swish is wrong"),
    "a secant": (Swish, {"secant": lambda layer, x, y, grad, base: 1.1 * grad}, swish, "Swish is wrong.*do not add up"),
    "arguments of a secant": (
        Swish, {"secant": lambda layer, x, y, grad: grad}, swish, r"Swish does not take \(layer, x, y, grad, base\)"),
}  # fmt: skip


class Around(nn.Module):
    """A layer, beside which its input goes on, or nobody would miss it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return (y + x if y.shape == x.shape else y)[:, :3]


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_rule_is_refused_by_its_name(case, rules):
    kind, claims, rule, message = WRONG[case]
    register_jacobian(kind, **claims)(rule)
    layer = torch.special.i0 if kind is BESSEL else kind()
    x, x0 = torch.rand(2, 2, 6, 4, 4, dtype=torch.float64)

    def ask():
        passed = Path(Start(Around(layer)), None, ["start"]).run(x)
        seeds = [torch.randn(2, *passed.output.shape, dtype=torch.float64)]
        for at in (None, passed.run_from({0: x0})):
            for how in (lambda walk: walk.dense(), lambda walk: walk.sums(), lambda walk: walk.token_sums(1, 0, 3)):
                how(passed.pullback(seeds, 0, at))

    with torch.no_grad(), pytest.raises(NoClosedFormError, match=message):
        ask()


def test_a_rule_may_keep_what_it_says(rules):
    """Of one that a path goes through several times, all numbers of one step are kept."""
    register_jacobian(Cube, needs="inputs")(cube)
    register_jacobian(Pooled)(spread)
    x = torch.rand(2, 6, 4, 4, dtype=torch.float64)
    actual, _, expected = pulled(nn.Sequential(Cube(), nn.Conv2d(6, 4, 1).double(), Cube(), Pooled()), x)
    assert relative(actual, expected) < 1e-12


class First(nn.Module):
    def forward(self, a, b):
        return 2 * a + 0 * b


def test_a_rule_may_have_no_gradient_for_one_of_several(rules):
    register_jacobian(First)(lambda layer, x, y, grad: (2 * grad, None))
    net, x = Blended(torch.tanh, lambda x: x), torch.randn(2, 3, 4, 4, dtype=torch.float64)
    net.blend = First()
    with torch.no_grad():
        grad = torch.randn(2, *x.shape, dtype=torch.float64)
        actual = Path(net, None, ["start"]).record(x).pullback([grad], 0).dense()
    assert relative(actual, 2 * grad * (1 - x.tanh() ** 2)) < 1e-12


class Failing(nn.Module):
    def forward(self, x):
        return x.reshape(7, 7)


@pytest.mark.parametrize("call", [Failing(), torch.trace], ids=["layer", "function"])
def test_a_registered_call_that_fails_may_be_caught(rules, call):
    class Caught(nn.Module):
        def __init__(self):
            super().__init__()
            self.call = call

        def forward(self, x):
            try:
                return self.call(x)
            except RuntimeError:
                return x.tanh()

    register_jacobian(Failing, torch.trace)(swish)
    actual, _, expected = pulled(Caught(), torch.randn(2, 3, 4, 5, dtype=torch.float64))
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize("wrong", [(), (nn.ReLU(),), (nn.ReLU, "relu"), (int,)], ids=str)
def test_what_is_registered_must_be_a_layer_class_or_a_function(wrong):
    with pytest.raises(TypeError, match="register_jacobian takes layer classes, torch functions and operations"):
        register_jacobian(*wrong)
