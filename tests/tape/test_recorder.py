"""Recording: what a tape sees of a network that runs, what it refuses, and that it explains what runs now."""

import threading
import warnings

import pytest
import torch
from problems import Step
from reference import path_by_autograd, relative
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812
from torchvision import models

from pytorch_grad_cam_pcasvm import NoClosedFormError
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import cotangents
from pytorch_grad_cam_pcasvm.rules.cotangents import by_weight, through_sums


def small(*tail):
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *tail, nn.Flatten(), nn.Linear(64, 6), nn.ReLU()).double().eval()
    )


X = torch.randn(3, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def check(net, targets=("0",), x=X, layer=None, path=None, tolerance=1e-12):
    """Compare a path's activations, pullback and weights with autograd's."""
    with torch.no_grad():
        passed = (path or Path(net, layer, targets)).run(x)
    output = passed.output
    seeds = torch.randn(2, *output.shape, dtype=torch.float64)
    for position, name in enumerate(targets):
        activations, expected = path_by_autograd(net, layer, name, x, seeds.flatten(2))
        assert relative(passed.activations[position], activations) == 0
        assert relative(passed.pullback([seeds], position).dense(), expected) < tolerance
        sums = expected.flatten(3)
        error = (passed.pullback([seeds], position).sums() - sums.sum(-1)).abs().max()
        assert error < tolerance * sums.abs().sum(-1).max()
    return passed


@pytest.mark.parametrize("targets", [["0", "1"], ["1", "0"], ["1"], ["2", "0"], ["0", "0"]])
def test_several_target_layers_in_any_order(targets):
    check(small(nn.MaxPool2d(2, 1, padding=1), nn.AvgPool2d(2, 1)), targets)


def test_feature_layer_in_the_middle_is_not_passed():
    net = small()
    last = nn.Linear(6, 2).double()
    net.append(last)
    path = Path(net, "4", ["0"])
    check(net, layer="4")
    last.forward = lambda x: pytest.fail("what follows the feature layer was run")
    with torch.no_grad():
        path.run(X)


def test_target_layer_may_be_the_feature_layer():
    check(small(), layer="1", targets=["1"])


@pytest.mark.parametrize(
    ("tail", "target", "moved"),
    [
        ([], "1", True),
        ([nn.Dropout(), nn.MaxPool2d(1)], "1", True),
        ([nn.Flatten(), nn.Unflatten(1, (64,))], "1", True),
        ([], "0", False),
        ([nn.Flatten(0), nn.Unflatten(0, (-1, 4, 4, 4))], "1", False),
    ],
)
def test_sums_move_into_the_first_dense_weight(tail, target, moved, monkeypatch):
    calls = []
    monkeypatch.setattr(cotangents, "through_sums", lambda *args: calls.append(args) or through_sums(*args))
    check(small(*tail), [target])
    assert bool(calls) is moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("active", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("channels", [4, 64])
@pytest.mark.parametrize(("targets", "images"), [(1, 1), (2, 3), (1, 2), (2, 1)])
@pytest.mark.parametrize("rows", [4, 64, 300])
def test_sums_through_a_dense_weight(rows, targets, images, channels, active, dtype):
    """Small and large weights, of another precision, alone and together, with rows that do not count."""
    for positions in (1, 9, 70):
        generator = torch.Generator().manual_seed(rows)
        weight = torch.randn(rows, channels * positions, generator=generator, dtype=torch.float64).to(dtype)
        grad = torch.randn(targets, images, rows, generator=generator, dtype=torch.float64)
        grad[..., torch.arange(rows) % 10 >= 10 * active] = 0
        expected = torch.einsum("knd,dtp->knt", grad, weight.double().reshape(rows, channels, positions))
        assert (through_sums(grad, weight, channels) - expected).abs().max() <= 1e-11 * expected.abs().max()
        with torch.no_grad(), forward_ad.dual_level():
            found = forward_ad.unpack_dual(through_sums(forward_ad.make_dual(grad, grad + 1), weight, channels))
        moved = torch.einsum("knd,dtp->knt", grad + 1, weight.double().reshape(rows, channels, positions))
        assert (found.primal - expected).abs().max() <= 1e-11 * moved.abs().max()
        assert (found.tangent - moved).abs().max() <= 1e-11 * moved.abs().max()


@pytest.mark.parametrize("active", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("shape", [(2, 3), (40, 8), (40, 1, 4)], ids=str)
@pytest.mark.parametrize("rows", [4, 1200])
def test_gradients_through_a_weight(rows, shape, active):
    """Small and large weights, few and many gradients in any order, rows that do not count, dual numbers."""
    generator = torch.Generator().manual_seed(rows)
    weight, grad, change = (
        torch.randn(*size, rows, generator=generator, dtype=torch.float64) for size in ((1000,), shape, shape)
    )
    weight = weight.T
    grad[..., torch.arange(rows) % 10 >= 10 * active] = 0
    change[1:] = 0  # one target only has a derivative of its gradient
    for given in (grad, grad.transpose(0, 1).contiguous().transpose(0, 1)):
        expected = torch.einsum("...d,de->...e", grad, weight)
        assert (by_weight(given, weight) - expected).abs().max() <= 1e-11 * max(1, expected.abs().max())
        with torch.no_grad(), forward_ad.dual_level():
            found, moved = forward_ad.unpack_dual(by_weight(forward_ad.make_dual(given, change), weight))
            _, by_both = forward_ad.unpack_dual(
                by_weight(forward_ad.make_dual(given, change), forward_ad.make_dual(weight, weight))
            )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(moved, torch.einsum("...d,de->...e", change, weight))
        torch.testing.assert_close(by_both, torch.einsum("...d,de->...e", change + grad, weight))


def test_an_output_that_does_not_depend_on_the_layer():
    net = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    net.forward = lambda x: {"other": x.exp(), "asked": net[1](net[0](x))}
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(net, None, ["0"]).run(x)
    assert not passed.pullback([torch.ones(2, 2, 3, 4, dtype=x.dtype), None], 0).dense().any()
    assert not passed.pullback([None, torch.zeros(2, 2, 3, 4, dtype=x.dtype)], 0).dense().any()
    assert passed.pullback([None, torch.ones(2, 2, 3, 4, dtype=x.dtype)], 0).dense().all()


class Net(nn.Module):
    """A forward of some layers, and of others given by their names."""

    def __init__(self, forward, **others):
        super().__init__()
        self.function = forward
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            self.first, self.second, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(64, 6)
            self.fc, self.act = nn.Linear(4, 5), nn.Tanh()
        for name, other in others.items():
            setattr(self, name, other)
        self.double().eval()

    def forward(self, x):
        return self.function(self, x)


def skip(net, x):
    x = net.first(x)
    return net.out((x + net.second(x)).relu().flatten(1))


def sharing(net, x):
    """A parameter, and a number made of it, on both sides of the target layer."""
    gate = torch.sigmoid(net.gain)
    x = net.second(net.first(x) * net.gain * gate)
    return net.out((x * net.gain * gate).relu().flatten(1))


def pairs(net, x):
    if len(x) < 2:
        raise ValueError("two at least")
    return net.out(net.first(x).relu().flatten(1))


def pooled(x):
    return x.mean((2, 3))


def gated_in_inference_mode(net, x):
    x = net.second(net.first(x))
    with torch.inference_mode():
        gate = torch.sigmoid(x)
    return net.fc(pooled(x * gate.clone()))


def asked_by_shape(net, x):
    x = net.second(net.first(x))
    gate = torch.sigmoid(pooled(x))[:, :, None, None].expand_as(x)
    flat = torch.ones(len(x) * 4, dtype=x.dtype).view_as(pooled(x)) * pooled(x).type_as(x)
    return net.fc(pooled(x * gate) + flat.to(x))


def handing_back(net, x):
    x = net.first(x)
    return net.fc(pooled(net.same(x)) * pooled(x))


NETS = {
    "around the target layer": (Net(skip), ["second"]),
    "around one of two": (Net(skip), ["first", "second"]),
    "shared, behind": (Net(sharing, gain=nn.Parameter(torch.tensor(1.5))), ["second"]),
    "shared, before": (Net(sharing, gain=nn.Parameter(torch.tensor(1.5))), ["first"]),
    "a stem in place": (Net(lambda net, x: pairs(net, (y := 2 * x) + torch.relu_(y))), ["first"]),
    "no single image": (Net(lambda net, x: net.fc(net.first(x).mean((2, 3), keepdim=True).squeeze())), ["first"]),
    "two images at least": (Net(pairs), ["first"]),
    "a gate in inference mode": (Net(gated_in_inference_mode), ["second"]),
    "others' shapes": (Net(asked_by_shape), ["second"]),
    "a layer that gives its input back": (Net(handing_back, same=nn.Identity()), ["same"]),
}


@pytest.mark.parametrize("case", NETS)
def test_a_network_is_explained(case):
    check(*NETS[case])


def test_what_depends_on_another_target_layer_is_a_constant():
    """A convolution whose weight depends on one target layer, and its input on another."""
    net = Net(lambda net, x: F.conv2d(net.b(2 * x), net.a(1 * x)[:, :, :2, :2]), a=nn.Identity(), b=nn.Identity())
    with torch.no_grad():
        passed = Path(net, None, ["a", "b"]).record(X)
    seeds = torch.randn(2, *passed.output.shape, dtype=torch.float64)
    for position, name in enumerate("ab"):
        _, expected = path_by_autograd(net, None, name, X, seeds.flatten(2))
        assert relative(passed.pullback([seeds], position).dense(), expected) < 1e-12


def test_an_argument_without_a_gradient_is_refused():
    net = Net(lambda net, x: F.prelu(x, net.slopes(1 * x)[0, :, 0, 0]), slopes=nn.Identity())
    with torch.no_grad():
        passed = Path(net, None, ["slopes"]).record(X)
    with pytest.raises(NoClosedFormError, match=r"an argument of aten\.prelu depends on the target layer"):
        passed.pullback([torch.ones(1, *passed.output.shape, dtype=torch.float64)], 0).dense()


def test_a_network_that_is_random_is_refused():
    """It keeps random pixels, in evaluation mode, too."""
    net = Net(lambda net, x: pairs(net, x * (torch.rand_like(x) > 0.5)))
    with pytest.raises(ValueError, match=r"draws random numbers \(aten::rand_like in a Net\)"):
        Path(net, None, ["first"]).run(X)
    net = small()
    net[1].forward = lambda x: x * torch.ones_like(x).bernoulli_(torch.full_like(x, 0.5))  # no number
    with pytest.raises(ValueError, match=r"draws random numbers \(aten::bernoulli"):
        Path(net, None, ["0"]).run(X)


QUIET = {
    "rrelu": F.rrelu,
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout": lambda x: F.dropout(x, training=False) + F.alpha_dropout(x),
    "dropout of nothing": lambda x: F.dropout(x, 0, training=True) + F.dropout(x, 0.0, training=True),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_draws_nothing_is_no_reason_for_autograd_to_refuse(case):
    net = small()
    net[1].forward = QUIET[case]
    seeds = torch.randn(2, 3, 6, dtype=torch.float64)
    expected = Path(net, None, ["0"]).run(X).pullback([seeds], 0).dense()
    assert relative(AutogradPath(net, None, ["0"]).run(X).pullback([seeds], 0).dense(), expected) < 1e-12


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


TWICE = Net(lambda net, x: net.out(net.act(net.act(net.first(x))).flatten(1)))
PAIR = Net(lambda net, x: (net.first(x), x))
BESIDE = Net(lambda net, x: (net.beside(x), pairs(net, x))[1], beside=nn.Conv2d(3, 4, 3))
REFUSALS = {
    "after the features": (small(), "1", "4", ValueError, "'4' does not run before the features"),
    "twice": (TWICE, None, "act", ValueError, "'act' runs 2 times"),
    "tuple": (Net(lambda net, x: net.pair(x)[0], pair=PAIR), None, "pair", TypeError, "'pair' returns a tuple"),
    "leads nowhere": (BESIDE, None, "beside", ValueError, "'beside' does not lead to the network's output"),
    "function without rule": (
        small(Step(torch.special.bessel_j0)),
        None,
        "1",
        NoClosedFormError,
        r"goes through aten.special_bessel_j0 of '2'.*register its Jacobian with @register_jacobian.*jacobian='auto'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_explained_is_refused_by_name(case):
    net, layer, target, error, message = REFUSALS[case]
    with torch.no_grad(), pytest.raises(error, match=message):
        Path(net.double().eval(), layer, [target]).run(X)


def test_a_traced_stem_and_control_flow_on_data():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = torch.jit.trace(nn.Conv2d(3, 4, 3).double(), X)
            self.start, self.out = nn.Identity(), nn.Linear(64, 6)

        def forward(self, x):
            x = self.start(self.stem(x))
            for _ in range(2 if x.sum() > 0 else 1):
                x = x.sin() if len(x) > 9 else x.tanh()
            return self.out(x.flatten(1))

    torch.manual_seed(0)
    net = Branching().double()
    path = Path(net, None, ["start"])
    for x in (X, -X, X[:1]):
        check(net, ["start"], x=x, path=path)


def test_arguments_with_defaults_and_sizes_of_the_input():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 4, 3), nn.Linear(64, 6)

        def forward(self, pixel_values=None, *more, scale=None):
            n = pixel_values.shape[0]
            x = self.conv(pixel_values)
            return self.out((x if scale is None else x * scale).relu().view(n, -1))

    check(Sized().double(), ["conv"])


class Inplace(nn.Sequential):
    """Statements that write over what a map or a rule needs."""

    def __init__(self, statements):
        super().__init__(*small())
        self.statements = statements

    def forward(self, x):
        return self[4](self[3](self.statements(self[0](x)).flatten(1)))


def scripted_write(x):
    y = x.tanh()
    z = y * y
    doubled_in_place(y)
    return z + y


@torch.jit.script
def doubled_in_place(x):
    return x.mul_(2)


def written_when_saved(x):
    y = x * 2
    z = F.gelu(y)
    y.add_(1)
    return z


def written_by_a_detached_alias(x):
    y = x * 2
    z = y * y
    y.detach().mul_(3)
    return z


@pytest.mark.parametrize(
    ("statements", "twin"),
    [
        (scripted_write, lambda x: x.tanh() ** 2 + 2 * x.tanh()),
        (written_when_saved, lambda x: F.gelu(x * 2)),
        (written_by_a_detached_alias, lambda x: 4 * x * x),
    ],
)
def test_what_is_written_over_after_its_use_has_a_gradient_even_where_autograd_has_none(statements, twin):
    seeds = torch.randn(2, 3, 6, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(Inplace(statements), None, ["0"]).run(X)
    _, expected = path_by_autograd(Inplace(twin), None, "0", X, seeds)
    assert relative(passed.pullback([seeds], 0).dense(), expected) < 1e-12


class Switched(nn.Module):
    """Gradients are switched off in a part of the forward."""

    def __init__(self, context, part):
        super().__init__()
        self.inner, self.context, self.part = small(), context, part

    def forward(self, x):
        if self.part == "all":
            with self.context():
                return self.inner(x)
        with self.context():
            x = self.inner[0](x)
        return self.inner[1:](x.clone() if self.part == "clone" else x)


@pytest.mark.parametrize("part", ["stem", "clone", "all"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_networks_that_switch_gradients_off(context, part):
    net = Switched(context, part)
    with torch.no_grad():
        passed = Path(net, None, ["inner.0"]).run(X)
    seeds = torch.randn(2, *passed.output.shape, dtype=torch.float64)
    _, expected = path_by_autograd(net.inner, None, "0", X, seeds)
    assert relative(passed.pullback([seeds], 0).dense(), expected) < 1e-12
    assert relative(AutogradPath(net, None, ["inner.0"]).run(X).pullback([seeds], 0).dense(), expected) < 1e-12


def test_a_network_built_in_inference_mode():
    with torch.inference_mode():
        net = small()
    expected = check(small()).output
    with torch.no_grad():
        passed = Path(net, None, ["0"]).run(X)
    assert relative(passed.output, expected) == 0
    seeds = torch.randn(2, *passed.output.shape, dtype=torch.float64)
    _, pulled = path_by_autograd(small(), None, "0", X, seeds)
    assert relative(passed.pullback([seeds], 0).dense(), pulled) < 1e-12


@pytest.mark.parametrize("change", ["add_", "optimizer", "fused", "data", "columns", "numpy", "load", "replace"])
@pytest.mark.parametrize("width", [6, 20_000], ids=["small", "large"])
def test_a_changed_weight_changes_the_weights(change, width):
    net = small()
    net[3] = dense = nn.Linear(64, width).double()
    path = Path(net, None, ["0"])
    check(net, path=path)
    match change:
        case "add_":
            with torch.no_grad():
                dense.weight.add_(torch.randn_like(dense.weight))
        case "optimizer" | "fused":
            optimizer = torch.optim.SGD(net.parameters(), lr=0.003, fused=change == "fused")
            net(X).square().sum().backward()
            optimizer.step()
        case "data":
            dense.weight.data.mul_(-0.7)
        case "columns":
            dense.weight.data[:, 8] = 5
        case "numpy":
            dense.weight.detach().numpy()[:, 3] = 4
        case "load":
            dense.load_state_dict({"weight": torch.randn_like(dense.weight), "bias": dense.bias})
        case "replace":
            dense.weight = nn.Parameter(torch.randn_like(dense.weight))
    check(net, path=path)


def test_hooks_are_part_of_what_runs():
    net = nn.Sequential(small(), nn.Identity())
    path = Path(net, None, ["0.0"])
    check(net, ["0.0"], path=path)
    net[0][4].register_forward_hook(lambda module, args, output: output.flip(1))
    check(net, ["0.0"], path=path)
    net[0][3].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(1, keepdim=True),))
    check(net, ["0.0"], path=path)
    net[0].register_forward_hook(lambda module, args, output: output * 2)
    check(net, ["0.0"], path=path)
    net[0][0].register_forward_hook(lambda module, args, output: output.tanh())
    check(net, ["0.0"], path=path)


@pytest.mark.slow
def test_sums_that_are_identically_zero_are_compared_with_their_terms():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.norm(self.conv(x).permute(0, 2, 3, 1)).mean((1, 2)))

    net = Tokens()
    with torch.no_grad():
        Path(net, None, ["norm"]).run(torch.randn(2, 3, 8, 8))
        Path(net, None, ["conv"]).run(torch.randn(2, 3, 8, 8))
    for size in (96, 224):
        with torch.no_grad():
            Path(models.swin_t(weights=None).eval(), "flatten", ["norm"]).run(torch.randn(1, 3, size, size))


def test_every_call_runs_the_network_once():
    net, rows = small(), []
    net[0].register_forward_hook(lambda module, args, output: rows.append(len(output)))
    path = Path(net, None, ["0"])
    with torch.no_grad():
        path.run(X)
        path.run(X)
        net[1] = nn.Sigmoid()
        path.run(X[:2])
    assert rows == [3, 3, 2]


def test_networks_run_beside_recordings():
    nets, errors = [small() for _ in range(3)], []
    expected = [net(X) for net in nets]

    def record(net):
        path = Path(net, None, ["0"])
        for _ in range(30):
            with torch.no_grad():
                if len(path.run(X).tape.steps) != 4:
                    errors.append("steps of another thread")

    def run():
        for _ in range(200):
            if relative(nets[0](X), expected[0]) > 1e-12:
                errors.append("another number")

    threads = [threading.Thread(target=record, args=(net,)) for net in [*nets, nets[0]]]
    threads.append(threading.Thread(target=run))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_half_precision_autograd_keeps_small_gradients():
    net, half = small(), small().half()
    seeds = [torch.randn(1, 3, 6)]
    with torch.no_grad():
        exact = Path(net, None, ["0"]).run(X).pullback([seeds[0].double()], 0).sums()
    weights = AutogradPath(half, None, ["0"]).run(X.half()).pullback([1e-12 * seeds[0]], 0).sums()
    assert relative(weights, 1e-12 * exact) < 0.05


class Leaving(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Leaving, lambda: torch.device("cpu")])
def test_a_mode_of_the_users_that_ends_on_the_path_is_refused_and_taken_off(mode):
    class Moded(nn.Module):
        """A mode around a part of the network, which ends before the features or lasts until them."""

        def __init__(self, start, end):
            super().__init__()
            self.inner, self.start, self.end = small(), start, end

        def forward(self, x):
            x = self.inner[: self.start](x)
            with mode():
                x = self.inner[self.start : self.end](x)
            return self.inner[self.end :](x)

    with torch.no_grad(), pytest.raises(NoClosedFormError, match="leaves a TorchFunctionMode"):
        Path(Moded(0, 2), None, ["inner.0"]).run(X)
    assert torch._C._len_torch_function_stack() == 0
    check(Moded(1, 4), ["inner.0"])
    check(Moded(2, 5), ["inner.0"])


def test_global_backward_hooks_that_come_later():
    net = Net(lambda net, x: net.fc(net.act(pooled(net.second(net.first(x))))))
    net.beside = scripted(nn.Tanh())  # takes no hooks
    path = Path(net, None, ["second"])
    check(net, ["second"], path=path)
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, grads, outputs: (3 * grads[0],) if module is net.act else None
    )
    try:
        with torch.no_grad(), pytest.raises(NoClosedFormError, match="has a backward hook on the path"):
            path.run(X)
    finally:
        handle.remove()


def test_backward_hooks_that_come_later():
    net = Net(lambda net, x: net.fc(net.act(pooled(net.second(net.first(x))))))
    path = Path(net, None, ["second"])
    check(net, ["second"], path=path)
    for given in (lambda grad: (3 * grad,), lambda grad: None):
        handle = net.act.register_full_backward_hook(lambda module, grads, outputs, given=given: given(grads[0]))
        with torch.no_grad(), pytest.raises(NoClosedFormError, match="Tanh has a backward hook on the path"):
            path.run(X)
        handle.remove()
        check(net, ["second"], path=path)
