"""What rules say besides gradients: which numbers they read, where tokens lie, how relevance is shared out."""

import gc

import pytest
import torch
from cams import METHODS
from ops import Start
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from reference import relative
from test_rules import Blend, Blended
from torch import nn

from pytorch_grad_cam_pcasvm import (
    AutogradFallbackWarning,
    ClosedFormGradCAM,
    ContributionCAM,
    NoClosedFormError,
    RelevanceCAM,
    register_jacobian,
)
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import registry
from pytorch_grad_cam_pcasvm.rules.rule import Call
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder
from pytorch_grad_cam_pcasvm.tape.step import Ref, list_tensors, values_in
from pytorch_grad_cam_pcasvm.tape.tape import Tape


class Block(nn.Module):
    """Tokens (N, L, D) through a layer, attention and a norm, to features of one token or of all."""

    def __init__(self, layer, fused=True):
        super().__init__()
        self.start, self.layer, self.fused = nn.Identity(), layer, fused
        self.qkv, self.norm = nn.Linear(8, 24), nn.LayerNorm(8)

    def forward(self, x):
        x = self.layer(self.start(1 * x))
        q, k, v = self.qkv(x).chunk(3, -1)
        attention = nn.functional.scaled_dot_product_attention if self.fused else written_out
        return self.norm(x + attention(q, k, v))[:, 0]


def written_out(q, k, v):
    return (q @ k.mT / 8**0.5).softmax(-1) @ v


def bytes_of(tape):
    """Return how many bytes the values of a tape hold."""
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in tape.values}
    return sum(storages.values())


@pytest.mark.parametrize(("fused", "share"), [(True, 0.75), (False, 0.9)])
def test_a_path_of_gradients_keeps_less_and_gives_the_same(fused, share):
    net, x = Block(nn.GELU(), fused).double().eval(), torch.randn(2, 30, 8, dtype=torch.float64)
    with torch.no_grad():
        whole, few = (Path(net, None, ["start"], needs=needs).record(x) for needs in ("replay", "gradient"))
        seeds = [torch.randn(3, 2, 8, dtype=torch.float64)]
        assert relative(few.pullback(seeds, 0).dense(), whole.pullback(seeds, 0).dense()) == 0
        assert relative(few.pullback(seeds, 0).token_sums(1, 0, 30), whole.pullback(seeds, 0).token_sums(1, 0, 30)) == 0
    assert bytes_of(few.tape) < share * bytes_of(whole.tape)
    with pytest.raises(RuntimeError, match="recorded for gradients alone"):
        few.run_from({0: 0 * x})


def test_what_the_network_drops_is_not_held():
    class Wide(nn.Module):
        def forward(self, x):
            wide = x.repeat(1, 1, 100) + 1
            self.freed = torch.utils.weak.WeakTensorKeyDictionary({wide: True})
            wide = wide.reshape(len(x), -1, 100, 8) * 2
            return wide.mean((1, 2))

    net = nn.Sequential(nn.Identity(), Wide())
    with torch.no_grad():
        passed = Path(net, None, ["0"], needs="gradient").record(torch.randn(2, 3, 8))
        assert not len(net[1].freed)
        assert passed.pullback([torch.ones(1, 2, 8)], 0).dense().isfinite().all()


class Swish(nn.Module):
    def forward(self, x):
        return x * x.sigmoid()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("kind", [Swish, Scaled])
def test_a_users_layer_takes_part_in_sums_and_contributions_of_tokens(rules, kind, monkeypatch):
    if kind is Swish:
        register_jacobian(Swish, secant="elementwise")(
            lambda layer, x, y, grad: grad * (x.sigmoid() + y * (1 - x.sigmoid()))
        )
    else:
        register_jacobian(Scaled, secant="linear", needs="others", tokens=lambda dim, layer, x, y: [None, dim])(
            lambda layer, x, y, grad: grad * layer.factor
        )
    net = Block(kind()).double().eval()
    x, x0 = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    calls = []
    layer_rule = registry.find_rule(kind)
    with torch.no_grad():
        passed = Path(net, None, ["start"]).record(x)
        at, seeds = passed.run_from({0: x0}), [torch.randn(2, 2, 8, dtype=torch.float64)]
        passed.pullback(seeds, 0, at).contributions(x - x0, (0, 1))  # is compared with the whole pullback
        whole, of_gradients = passed.pullback(seeds, 0, at).dense(), passed.pullback(seeds, 0).dense()
        pulled = type(layer_rule).pulled
        monkeypatch.setattr(
            type(layer_rule),
            "pulled",
            lambda rule, *args: calls.append(args[3].shape) if rule is layer_rule else pulled(rule, *args),
        )
        parts = passed.pullback(seeds, 0, at).contributions(x - x0, (0, 1))
        assert not calls, "contributions of tokens are the same before and after the layer"
        monkeypatch.undo()
        sums = passed.pullback(seeds, 0).token_sums(1, 2, 5)
    assert relative(parts, (whole * (x - x0)).sum(-1)) < 1e-12
    assert relative(sums[:, :, 0], of_gradients[:, :, 2:7].sum(2)) < 1e-12


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (nn.Linear(4, 5).double(), [0, 1, None]),
        (lambda x: x @ torch.ones(2, 4, 5, dtype=x.dtype), [None, 1, None]),
        (nn.LayerNorm(4).double(), [0, 1, None]),
        (lambda x: x.softmax(1), [0, None, 2]),
        (lambda x: x.flatten(0, 1), [None, 2]),
        (lambda x: x + torch.ones(3, 1, dtype=x.dtype), [0, 1, 2]),
        (lambda x: x.transpose(-1, -2), [0, 2, 1]),
        (lambda x: x.unbind(-2)[0], [0, 2]),
    ],
    ids=["linear", "matmul", "norm", "softmax", "flatten", "add", "transpose", "unbind"],
)
def test_where_tokens_are(function, expected):
    with torch.no_grad():
        tape = Path(Start(function), None, ["start"]).record(torch.randn(2, 3, 4, dtype=torch.float64)).tape
    call = tape.recorded(tape.steps[-1])
    found = [tape.steps[-1].rule.find_tokens(dim, call) for dim in range(call.y.dim())]
    assert [dims and dims[0] for dims in found] == expected


@pytest.mark.parametrize(
    ("expected", "shape", "mask", "options"),
    [
        ([1, None, None], (2, 3, 4), None, {}),
        ([1, None, None, 0], (2, 3, 4), (3, 3), {}),
        ([1, None, None, 1], (2, 3, 4), (2, 3, 3), {}),
        ([1, None, None, None], (2, 3, 4), (1, 3), {}),
        ([1, None, None, None], (2, 3, 4), (3,), {}),
        (None, (2, 3, 4), None, {"is_causal": True}),
        (None, (2, 3, 4), None, {"enable_gqa": True}),
        (None, (3, 4), None, {}),
    ],
)
def test_tokens_of_attention_are_its_queries(expected, shape, mask, options):
    y = torch.randn(2, 3, 4)
    arguments = (torch.randn(shape), y, y, *([] if mask is None else [torch.randn(mask)]))
    rule = registry.find_rule(torch.ops.aten.scaled_dot_product_attention)
    assert [rule.find_tokens(dim, Call(arguments, options, y)) for dim in range(3)] == [None, expected, None]
    assert rule.find_tokens(1, Call((y, y, y, None, 0.0, True), {}, y)) is None


def test_a_token_may_have_no_gradient_in_one_of_two_arguments(rules):
    register_jacobian(torch.copysign, secant="elementwise")(
        lambda input, other, *, y, grad: (grad * input.sign() * other.sign(), None)
    )
    x, seed = torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(3, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        path = Path(Start(lambda x: torch.copysign(x, x.roll(1, 1))[:, 3]), None, ["start"])
        found = path.record(x).pullback([seed], 0).dense()
    assert relative(found[:, :, 3], seed * (x.sign() * x.roll(1, 1).sign())[:, 3]) < 1e-12
    assert torch.count_nonzero(found) == torch.count_nonzero(found[:, :, 3])


@pytest.mark.parametrize(
    "limits", [nn.Identity(), lambda x: torch.zeros(2, 9, 8, dtype=x.dtype)], ids=["value", "constant"]
)
def test_a_named_argument_has_tokens_too(limits, rules):
    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.limits, self.start = limits, nn.Identity()

        def forward(self, x):
            return torch.clamp(self.start(1 * x), max=self.limits(x.roll(1, 1)))[:, 3]

    register_jacobian(torch.clamp, secant="elementwise")(
        lambda input, min=None, max=None, *, y, grad: grad * (input < max)
    )
    net, x, seed = Clamped(), torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(3, 2, 8, dtype=torch.float64)
    names = ["limits", "start"] if isinstance(limits, nn.Module) else ["start"]
    with torch.no_grad():
        passed = Path(net, None, names).record(x)
        found = passed.pullback([seed], len(names) - 1).dense()
        expected = torch.zeros(3, *x.shape, dtype=x.dtype)
        expected[:, :, 3] = seed * (x < limits(x.roll(1, 1)))[:, 3]
    assert relative(found, expected) < 1e-12


def test_a_users_layer_has_its_relevance(rules):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), Swish(), nn.Conv2d(4, 5, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    register_jacobian(Swish, secant="elementwise")(
        lambda layer, x, y, grad: grad * (x.sigmoid() + y * (1 - x.sigmoid()))
    )
    maps = RelevanceCAM(net, ["0"]).explain(x)
    silu = nn.Sequential(net[0], nn.SiLU(), *net[2:])
    assert relative(maps.maps, RelevanceCAM(silu, ["0"]).explain(x).maps) < 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs": "x"}, "needs must be 'all', 'inputs', 'y', 'others', 'nothing' or None, got 'x'"),
        ({"relevance": "lost"}, "relevance must be 'kept', 'moved'"),
    ],
)
def test_unknown_facts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        register_jacobian(Swish, **options)


@pytest.mark.parametrize("first", ["token_sums", "contributions", "sums", "times"])
def test_questions_may_come_in_any_order(first):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.block = nn.Identity(), Block(nn.Linear(8, 8))

        def forward(self, x):
            x = self.start(1 * x)
            return self.block(x.clone()) + (x.cumsum(1) ** 2).sum(1)

    net = Around().double().eval()
    x, x0 = torch.randn(2, 2, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(net, None, ["start"]).record(x)
        at, seeds = passed.run_from({0: x0}), [torch.randn(3, 2, 8, dtype=torch.float64)]
        whole = passed.pullback(seeds, 0, at).dense()
        expected = {
            "token_sums": whole[:, :, 2:7].sum(2, keepdim=True),
            "contributions": (whole * (x - x0)).sum(-1),
            "sums": whole.sum(-1),
            "times": (whole * x).sum(2),
        }
        ask = {
            "token_sums": lambda pullback: pullback.token_sums(1, 2, 5),
            "contributions": lambda pullback: pullback.contributions(x - x0, (0, 1)),
            "sums": lambda pullback: pullback.sums(),
            "times": lambda pullback: pullback.times(x, [1]),
        }
        for second in ask:
            pullback = passed.pullback(seeds, 0, at)
            for each in (first, second):
                assert relative(ask[each](pullback), expected[each]) < 1e-11, (first, second)
            assert relative(pullback.dense(), whole) < 1e-11


def test_outputs_that_do_not_depend_on_the_layer_are_passed_over():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Identity()

        def forward(self, x):
            return {"tokens": self.start(1 * x).tanh(), "before": x.mean(1)}

    x, x0, seed = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    seeds = [seed.unsqueeze(0), torch.ones(1, 2, 8, dtype=torch.float64)]
    with torch.no_grad():
        passed = Path(Two(), None, ["start"]).record(x)
        at = passed.run_from({0: x0})
        sums = passed.pullback(seeds, 0).token_sums(1, 2, 5)
        parts = passed.pullback(seeds, 0, at).contributions(x - x0, (0, 1))
    assert relative(sums[0], (seed * (1 - x.tanh() ** 2))[:, 2:7].sum(1, keepdim=True)) < 1e-12
    assert relative(parts[0], (seed * (x.tanh() - x0.tanh())).sum(-1)) < 1e-12


def test_complex_numbers_are_refused():
    class Spectrum(nn.Module):
        def forward(self, x):
            return torch.fft.fft2(x).abs()

    net = nn.Sequential(nn.Conv2d(3, 4, 3), Spectrum(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with pytest.raises(NoClosedFormError, match=r"goes through aten\._fft_c2c"):
        ClosedFormGradCAM(net, ["0"]).explain(x)
    with pytest.warns(AutogradFallbackWarning):
        maps = ClosedFormGradCAM(net, ["0"], jacobian="auto").explain(x).maps
    assert relative(maps, ClosedFormGradCAM(net, ["0"], jacobian="autograd").explain(x).maps) < 1e-12


# --- What a reviewer found ------------------------------------------------------------------------------------------


class Selected(nn.Module):
    """A network that goes on with a part of its target layer."""

    def __init__(self, select):
        super().__init__()
        self.start, self.select = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Sigmoid()), select

    def forward(self, x):
        return self.select(self.start(x)).flatten(1)[:, :5]


@pytest.mark.parametrize("method", [method.kind for method in METHODS.values() if not method.has_start])
@pytest.mark.parametrize("select", [lambda a: a[:, :4], lambda a: a[:, :, 0], lambda a: a.narrow(2, 1, 3).exp()])
def test_a_part_of_the_target_layer_is_explained(select, method):
    net, x = Selected(select).double().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    target = ClassifierOutputTarget(1)
    by_autograd = method(net, ["start"], jacobian="autograd") if "ShapleyCAM" not in method.__name__ else None
    maps = method(net, ["start"]).explain(x, [target])
    assert maps.maps.isfinite().all()
    if by_autograd is not None:
        assert relative(maps.maps, by_autograd.explain(x, [target]).maps) < 1e-10


@pytest.mark.parametrize("kind", [ClosedFormGradCAM, ContributionCAM])
def test_a_call_leaves_nothing_to_the_garbage_collector(kind):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    cam, x = kind(net, ["0"]), torch.randn(2, 3, 8, 8)
    cam.explain(x)
    gc.collect()
    gc.disable()
    try:
        cam.explain(x)
        left = [each for each in gc.get_objects() if type(each) in (Tape, Recorder)]
        before = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        cam.explain(x)
        assert not left
        assert sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()) == before
    finally:
        gc.enable()


def test_tensors_of_arguments_are_listed_in_order():
    a, b, c, d = torch.zeros(4, 2)
    listed = list_tensors(([a, (b, 1)], {"alpha": 2, "out": [c, d]}))
    assert list(map(id, listed)) == list(map(id, (a, b, c, d)))


def test_values_among_arguments_come_with_what_stands_in_their_places():
    one, two, three = map(Ref, range(3))
    arguments = (one, 2.0, [two, "a"], {"weight": three, "dim": 1})
    numbers = (10, 20, [30, 40], {"weight": 50, "dim": 60})
    found = values_in(arguments, numbers, ("a", "b", None, {"weight": "c", "dim": "d"}))
    assert list(found) == [(one, 10, "a"), (two, 30, None), (three, 50, "c")]
    assert list(values_in([one, two], None)) == [(one, None), (two, None)]


@pytest.mark.parametrize(
    "take",
    [
        lambda x: x[:, -1],
        lambda x: x[:, -4:-1],
        lambda x: (x * torch.arange(9, dtype=x.dtype).unsqueeze(1))[:, -1],
    ],
    ids=["the last", "some before the last", "the last times a constant"],
)
def test_tokens_from_behind_are_reached(take):
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    with torch.no_grad():
        passed = Path(Start(take), None, ["start"]).record(x)
    seeds = [torch.randn(3, *passed.output.shape, dtype=torch.float64)]
    whole = passed.pullback(seeds, 0).dense()
    for start, length in ((0, 4), (3, 4), (5, 4), (8, 1)):
        found = passed.pullback(seeds, 0).token_sums(1, start, length)
        assert relative(found + 1, whole.narrow(2, start, length).sum(2, keepdim=True) + 1) < 1e-12


def test_an_elementwise_layer_of_two_tensors_has_no_tokens_of_its_own(rules):
    class Third(Blended):
        def forward(self, x):
            return super().forward(x)[:, 3]

    register_jacobian(Blend, secant="elementwise")(lambda layer, x, y, grad: (0.7 * grad, 0.3 * grad))
    x, seed = torch.randn(2, 9, 8, dtype=torch.float64), torch.randn(3, 2, 8, dtype=torch.float64)
    with torch.no_grad():
        net = Third(lambda x: x, lambda x: 2 * x)
        found = Path(net, None, ["start"]).record(x).pullback([seed], 0).dense()
    assert relative(found[:, :, 3], 1.3 * seed) < 1e-12
    assert torch.count_nonzero(found) == torch.count_nonzero(found[:, :, 3])
