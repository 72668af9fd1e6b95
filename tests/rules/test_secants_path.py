"""Secants of the path: what is pulled back through them adds up exactly, for every rule and for whole paths."""

import copy
import itertools

import pytest
import torch
from ops import FUNCTIONS, Start, prepared, pulled, random, recorded
from reference import missing, relative
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm import NoClosedFormError, register_jacobian
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.path.passes import need_tape
from pytorch_grad_cam_pcasvm.path.record import Path
from pytorch_grad_cam_pcasvm.rules import cotangents, registry
from pytorch_grad_cam_pcasvm.rules.cotangents import player_rows, through_products
from pytorch_grad_cam_pcasvm.rules.rule import Call


def adds_up(passed, x0, targets=2, tolerance=1e-10):
    """Hold sums of pullback, weights and products against the difference of outputs; return the pullback."""
    base = passed.run_from({0: x0})
    x = passed.activations[0]
    seeds = random(targets, *passed.output.shape, seed=7)
    pulled = passed.pullback([seeds], 0, base).dense()
    terms = pulled * (x - x0)
    expected = (seeds * (passed.output - base.output)).reshape(targets, -1).sum(1)
    scale = max(terms.abs().sum() / targets, (seeds * passed.output).abs().sum() / targets)
    assert ((terms.flatten(1).sum(1) - expected).abs() < tolerance * scale).all()
    weights = passed.pullback([seeds], 0, base).sums()
    assert relative(weights + 1, pulled.reshape(*weights.shape, -1).sum(-1) + 1) < 1e-9
    if x.dim() > 2:
        given = (x - x0).expand_as(x)
        for dims in ([1], list(range(2, x.dim()))):
            products = passed.pullback([seeds], 0, base).times(given, dims)
            assert relative(products + 1, terms.sum([dim + 1 for dim in dims]) + 1) < 1e-9
    return pulled


NEAR = ["softmax", "attention", "pow", "clamp", "pools", "gate (squeeze and excite)", "logsumexp", "log_softmax"]
NEAR += ["normalize", "norms of vectors", "distances", "cosine similarity", "std", "var_mean", "norms as functions"]
NEAR += ["amax, amin", "max, min", "maximum", "addcdiv", "exponentials", "logarithms"]


@pytest.mark.parametrize("case", NEAR)
@pytest.mark.parametrize("size", [1e-12, 1e-7, 1e-3, 30.0])
def test_near_the_baseline_nothing_is_lost_in_rounding(case, size):
    x = random(2, 4, 6, 5)
    passed = recorded(FUNCTIONS[case], x)
    x0 = x + size * random(2, 4, 6, 5, seed=1)
    pulled = adds_up(passed, x0)
    assert pulled.isfinite().all()
    if size < 1e-6 and case != "clamp":
        gradient = passed.pullback([random(2, *passed.output.shape, seed=7)], 0).dense()
        assert relative(pulled, gradient) < 1e-4


FROM_ZEROS = ["normalize", "normalize below eps", "cosine similarity", "distances", "norms of vectors", "norm", "std"]
FROM_ZEROS += ["linalg.norm", "var", "var_mean", "norms as functions", "logsumexp", "amax, equal ones", "max, min"]


@pytest.mark.parametrize("case", FROM_ZEROS)
def test_a_baseline_of_zeros_has_no_size_to_divide_by(case):
    x = random(2, 4, 6, 5)
    passed = recorded(FUNCTIONS[case], x)
    pulled = adds_up(passed, torch.zeros_like(x[:1]))
    gradient = passed.pullback([random(2, *passed.output.shape, seed=7)], 0).dense()
    assert pulled.abs().max() < 100 * gradient.abs().max(), "huge terms that cancel"


def test_a_cosine_similarity_of_what_is_smaller_than_eps():
    """Autograd through torch's own takes the slope of the size there, although eps is what it divides by."""

    def written_out(x):
        other = x.flip(2).tanh()
        return (x * other).sum(-1) / (x.norm(dim=-1).clamp(min=2.0) * other.norm(dim=-1).clamp(min=2.0))

    x, x0, seeds = random(2, 4, 6, 5), random(2, 4, 6, 5, seed=1), random(1, 2, 4, 6, seed=7)
    passed = recorded(lambda x: F.cosine_similarity(x, x.flip(2).tanh(), -1, 2.0), x)
    for start in (x0, torch.zeros_like(x0)):
        adds_up(passed, start)
    root = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad((written_out(root) * seeds[0]).sum(), root)
    assert relative(passed.pullback([seeds], 0).dense()[0], expected) < 1e-12


def test_a_softmax_that_is_saturated_or_masked():
    x, x0 = 400 * random(2, 3, 5), 400 * random(2, 3, 5, seed=1)
    mask = torch.tensor([True, False, False, True, False])
    pulled = adds_up(recorded(lambda x: x.masked_fill(mask, -torch.inf).softmax(-1), x), x0)
    assert pulled.isfinite().all()
    assert not pulled[..., mask].any()


def test_zeros_of_a_root_give_no_nan():
    x = random(2, 4, 3, 3).relu()
    passed = recorded(lambda x: x.sqrt().mean((2, 3)), x)
    assert adds_up(passed, torch.zeros_like(x[:1])).isfinite().all()


def test_max_pools_hand_on_a_share():
    x, x0 = random(2, 3, 6, 6), random(2, 3, 6, 6, seed=1)
    passed = recorded(lambda x: F.max_pool2d(x, 2), x)
    ones = torch.ones(1, *passed.output.shape, dtype=torch.float64)
    pulled = passed.pullback([ones], 0, passed.run_from({0: x0})).dense()
    assert ((pulled >= 0) & (pulled <= 1)).all()
    assert ((pulled != 0).reshape(2, 3, 3, 2, 3, 2).sum((3, 5)) <= 1).all()


def test_a_division_by_what_has_the_mean_0_adds_up():
    x = random(2, 4, 6, 5)
    adds_up(recorded(FUNCTIONS["div by what changes its sign"], x), -x)


REFUSED = {
    "a power of two values": (lambda x: (1 + x * x) ** x, "both the base and the exponent computed"),
    "an einsum of three values": (
        lambda x: torch.einsum("nchw,nchw,nchw->n", x, x.tanh(), x.sigmoid()),
        "more than two values that change",
    ),
    "a division that rounds": (lambda x: torch.div(x, 0.3, rounding_mode="floor") + x, "a step function"),
    "a step": (lambda x: torch.where(x > 0, 1.0, 0.0 * x.clamp(max=0)) * x, "mul jumps|where jumps"),
    "an index": (
        lambda x: x[:, x.flatten(2).sum(-1).argmax(1)] * 2,
        "an argument of aten.index depends on the target layer through a comparison or an index",
    ),
    "a choice of other sizes": (lambda x: x[x > 0], "sizes after the target layer depend on the activations"),
    "no secant": (lambda x: torch.special.i0(x), "i0 has no secant.*register one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_secant_is_refused_by_name(case, rules):
    register_jacobian(torch.special.i0)(lambda input, *, y, grad: grad * torch.special.i1(input))
    function, message = REFUSED[case]
    passed = recorded(function, random(2, 4, 6, 5))
    with pytest.raises(NoClosedFormError, match=message) as raised:
        passed.pullback([random(2, *passed.output.shape)], 0, passed.run_from({0: random(2, 4, 6, 5, seed=1)})).dense()
    assert "jacobian='auto'" not in str(raised.value), "autograd has no secants"


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Block(nn.Module):
    """A block of a transformer, and the mean of its tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out, self.dense = nn.LayerNorm(4), nn.Linear(4, 12), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return (x + F.gelu(self.dense(self.norm(x)))).mean(1)


def net(*tail):
    torch.manual_seed(0)
    built = nn.Sequential(nn.Conv2d(3, 4, 3), *tail).double().eval()
    return prepared(built)


X = random(3, 3, 6, 6)
DENSE = (nn.Flatten(), nn.Dropout(), nn.Linear(64, 6))
NETS = {
    "dense, ReLU": net(*DENSE, nn.ReLU(), nn.Linear(6, 5)),
    "dense, sigmoid": net(*DENSE, nn.Sigmoid(), nn.Linear(6, 5)),
    "dense, GELU": net(*DENSE, nn.GELU(), nn.Linear(6, 5)),
    "two dense": net(nn.AdaptiveAvgPool2d(4), *DENSE, nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh()),
    "conv, BN, ReLU, pool": net(
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        *DENSE[:2],
        nn.Linear(16, 5),
    ),
    "max pool": net(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5), nn.ReLU()),
    "squeeze and excite": net(Gate(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)),
    "LayerNorm": net(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 5)),
    "pooled": net(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)),
    "pooled features": net(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "attention": net(Block(), nn.Linear(4, 5)),
    "dense along a row": net(nn.Linear(4, 3), nn.Tanh()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_contributions_in_other_precisions(dtype):
    for case in ("dense, ReLU", "conv, BN, ReLU, pool", "attention", "squeeze and excite"):
        other = copy.deepcopy(NETS[case]).to(dtype)
        with torch.no_grad():
            passed = Path(other, None, ["0"]).run(X.to(dtype))
        x, seeds = passed.activations[0], random(2, *passed.output.shape).float()
        base = passed.run_from({0: torch.zeros_like(x[:1])})
        terms = (passed.pullback([seeds], 0, base).dense() * x).flatten(1)
        expected = (seeds * (passed.output.float() - base.output.float())).flatten(1).sum(1)
        assert missing(terms, expected) < (1e-6 if dtype == torch.float32 else 0.02)


def test_a_jump_that_nobody_sees_is_none():
    x, x0 = random(2, 3, 4, 4), random(2, 3, 4, 4, seed=1)
    seen = (x > 0) == (x0 > 0)
    assert 20 < seen.sum() < 76
    passed = recorded(lambda h: torch.where(h > 0, 1.0, 0.0 * h), x)
    walk = passed.pullback([random(1, *x.shape) * seen], 0, passed.run_from({0: x0}))
    assert not walk.dense().any()  # each number is constant on its side
    passed = recorded(lambda h: torch.where(h > 0, (h - 9).relu(), 0.0), x)  # which is 0 on either side
    assert not passed.pullback([random(1, *x.shape)], 0, passed.run_from({0: x0})).dense().any()


def test_a_mask_of_what_is_in_front_of_the_layer():
    module = nn.Sequential(nn.Tanh(), nn.Softplus())
    module.forward = lambda x: torch.where((first := module[0](x)) > 0, module[1](first), first)
    x, x0 = random(2, 3, 4, 4), random(2, 3, 4, 4, seed=1)
    with torch.no_grad():
        passed = Path(module, None, ["0", "1"]).run(x)
        base, seeds = passed.run_from({1: x0}), random(2, 2, 3, 4, 4)
        pulled = passed.pullback([seeds], 1, base).dense()
    change = (pulled * (passed.activations[1] - x0)).flatten(1).sum(1)
    assert relative(change, (seeds * (passed.output - base.output)).flatten(1).sum(1)) < 1e-12


def test_an_output_of_whole_numbers_is_an_output():
    module = Start(lambda x: {"scores": x.mean((2, 3)), "labels": x.mean((2, 3)).argmax(1)})
    x, x0 = random(2, 3, 4, 4), random(1, 3, 4, 4, seed=5)
    with torch.no_grad():
        passed = Path(module, None, ["start"]).run(x)
    base = passed.run_from({0: x0})
    assert torch.equal(base.output["labels"], x0.mean((2, 3)).argmax(1).expand(2))
    seeds = {"scores": random(2, 2, 3), "labels": None}
    given = [seeds[key] for key in passed.output]
    total = (passed.pullback(given, 0, base).dense() * (x - x0)).flatten(1).sum(1)
    assert (
        relative(total, (seeds["scores"] * (passed.output["scores"] - base.output["scores"])).flatten(1).sum(1)) < 1e-12
    )


def branching(x):
    return x.tanh() if x.sum() > 0 else x.sigmoid()


def indexing(x):
    return x[:, [0, 1 + int(x.sum() > 0)]] * 2


@pytest.mark.parametrize("statements", [branching, indexing])
def test_what_a_tape_cannot_know_is_refused_at_the_baseline(statements):
    x = random(2, 3, 4, 4).abs()
    with torch.no_grad():
        passed = Path(Start(statements), None, ["start"]).run(x)
        with pytest.raises(NoClosedFormError, match="another function at the baseline"):
            passed.run_from({0: -x[:1] - 1})


@pytest.mark.parametrize(("statements", "expected"), [(F.leaky_relu, [2]), (branching, [2, 2])])
def test_only_a_network_that_branches_is_asked_at_the_baseline(statements, expected):
    module, ran = Start(statements), []
    module.register_forward_hook(lambda module, args, output: ran.append(len(output)))
    x = random(2, 3, 4, 4).abs()
    with torch.no_grad():
        Path(module, None, ["start"]).run(x).run_from({0: x[:1] / 2})
    assert ran == expected


def test_a_network_that_branches_may_have_frozen_attention():
    def statements(x):
        return F.scaled_dot_product_attention(x, x, x) if x.sum() > 0 else x

    x = random(2, 3, 4).abs()
    with torch.no_grad():
        passed = Path(Start(statements), None, ["start"], attention="frozen").run(x)
        adds_up(passed, x[:1] / 2)  # which differs from the network there, whose attention is not frozen


def test_a_pass_of_a_network_that_branches_is_not_checked_unless_that_is_asked_for():
    x = random(2, 3, 4, 4).abs()
    with torch.no_grad():
        base = Path(Start(branching), None, ["start"]).record(x).run_from({0: -x[:1] - 1})
    assert relative(base.output[:1], (-x[:1] - 1).tanh()) < 1e-12


def test_a_network_that_takes_no_single_image_is_asked_with_all():
    class Squeezed(Start):
        def forward(self, x):
            return self.start(x).mean((2, 3), keepdim=True).squeeze().tanh()

    x = random(3, 3, 4, 4)
    with torch.no_grad():
        passed = Path(Squeezed(None), None, ["start"]).run(x)
    adds_up(passed, x[:1] - 1)


def test_a_baseline_of_no_finite_output_or_another_shape_is_refused():
    x = random(2, 3, 4, 4).abs()
    with torch.no_grad():
        passed = Path(Start(lambda x: x.log()), None, ["start"]).run(x)
    with pytest.raises(NoClosedFormError, match="does not return finite numbers at the baseline"):
        passed.run_from({0: -x})
    with pytest.raises(ValueError, match=r"activations have the shape \(2, 3, 4, 4\), or one row"):
        passed.run_from({0: x[:, :2]})


def test_autograd_has_no_secants_but_products():
    module, x = NETS["dense, ReLU"], X
    passed, other = AutogradPath(module, None, ["0"]).run(x), None
    with torch.no_grad():
        other = Path(module, None, ["0"]).run(x)
    seeds = random(2, *other.output.shape)
    for dims in ([1], [2, 3]):
        expected = other.pullback([seeds], 0).times(other.activations[0], dims)
        assert relative(passed.pullback([seeds], 0).times(passed.activations[0], dims), expected) < 1e-12
    base = other.run_from({0: 0 * other.activations[0]})
    with pytest.raises(NoClosedFormError, match="an autograd path has no secants: this method needs the closed form"):
        passed.pullback([seeds], 0, base)
    with pytest.raises(NoClosedFormError, match="an autograd path has no players: this method needs the closed form"):
        need_tape(passed, "players")
    assert need_tape(other, "players").whole is other


@pytest.mark.parametrize("active", [1.0, 0.5])
@pytest.mark.parametrize(("targets", "images"), [(1, 1), (2, 3), (20, 2), (20, 1)])
@pytest.mark.parametrize("rows", [4, 300])
@pytest.mark.parametrize("large", [1, 1 << 20])
def test_products_and_players_through_a_dense_weight(large, rows, targets, images, active, monkeypatch):
    monkeypatch.setattr("pytorch_grad_cam_pcasvm.rules.cotangents.LARGE", large)
    weight = random(rows, 4 * 6).float()
    grad, x = random(targets, images, rows), random(images, 4, 2, 3, seed=1)
    grad[..., torch.arange(rows) % 10 >= 10 * active] = 0
    parts = weight.double().reshape(rows, 4, 6)
    pulled = torch.einsum("knd,dti->knti", grad, parts) * x.flatten(2)
    assert relative(through_products(grad, weight, x, "channels"), pulled.sum(2).unflatten(2, (2, 3))) < 1e-12
    assert relative(through_products(grad, weight, x, "positions"), pulled.sum(3)) < 1e-12
    each = torch.einsum("dti,nti->ndti", parts, x.flatten(2))
    for chunk in (slice(None), slice(1, 3)):
        actual = player_rows(weight.double(), x.flatten(2), "channels", chunk)
        assert relative(actual, each.sum(3).mT[:, chunk]) < 1e-12
        actual = player_rows(weight.double(), x.flatten(2), "positions", chunk)
        assert relative(actual, each.sum(2).mT[:, chunk]) < 1e-12


@pytest.mark.parametrize(("case", "moved"), [("dense, ReLU", True), ("two dense", True), ("max pool", False)])
def test_products_of_gradients(case, moved, monkeypatch):
    calls = []
    monkeypatch.setattr(cotangents, "through_products", lambda *args: calls.append(args) or through_products(*args))
    with torch.no_grad():
        passed = Path(NETS[case], None, ["0"]).run(X)
    x, seeds = random(3, 4, 4, 4, seed=4), random(12, *passed.output.shape)
    terms = passed.pullback([seeds], 0).dense() * x
    assert relative(passed.pullback([seeds], 0).times(x, [1]), terms.sum(2)) < 1e-12
    assert relative(passed.pullback([seeds], 0).times(x, [2, 3]), terms.sum((3, 4))) < 1e-12
    assert bool(calls) is moved


def test_products_behind_a_mean_stay_unexpanded(monkeypatch):
    with torch.no_grad():
        passed = Path(Start(lambda x: x.mean((2, 3)).tanh()), None, ["start"]).run(X)
    monkeypatch.setattr(torch, "stack", lambda *args: pytest.fail("position by position"))
    x, seeds = random(3, 3, 6, 6, seed=4), random(2, 3, 3)
    terms = passed.pullback([seeds], 0).dense() * x
    assert relative(passed.pullback([seeds], 0).times(x, [1]), terms.sum(2)) < 1e-12
    assert relative(passed.pullback([seeds], 0).times(x, [2, 3]), terms.sum((3, 4))) < 1e-12


AFFINE = {
    "dense, ReLU": "aten.linear",
    "two dense": "aten.batch_norm",
    "conv, BN, ReLU, pool": "aten.batch_norm",
    "max pool": None,
    "pooled": "aten.linear",
    "pooled features": "aten.flatten",
    "attention": "aten.transpose",
    "dense along a row": "aten.linear",
}


@pytest.mark.parametrize("case", AFFINE)
def test_where_the_affine_beginning_of_a_network_ends(case):
    with torch.no_grad():
        passed = Path(NETS[case], None, ["0"]).run(X)
        beginning = passed.affine(0)
    assert beginning.is_output is (case == "pooled features")
    last = [step.name for step in passed.tape.steps if beginning.end in step.outputs]
    assert last == ([] if AFFINE[case] is None else [AFFINE[case]])
    x = passed.activations[0]
    changed = beginning.value - beginning.isolate_players(x, "channels")[:, 0]
    masked = torch.cat([0 * x[:, :1], x[:, 1:]], 1)
    assert relative(beginning.run_rows(changed[1:2], image=1), NETS[case][1:](masked)[1:2]) < 1e-12


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Linear(64, 6)

    def forward(self, x):
        x = self.first(x)
        return self.out((x + 2 * self.second(x)).relu().flatten(1))


def test_what_goes_around_the_target_layer_belongs_to_its_image():
    skip = Skip().double()
    with torch.no_grad():
        passed = Path(skip, None, ["second"]).run(X)
        beginning = passed.affine(0)
        other = random(5, *beginning.value.shape[1:])
        for image in range(3):
            expected = skip.out((other).relu().flatten(1))
            assert relative(beginning.run_rows(other, image=image), expected) < 1e-12
        before = passed.affine(0)
        before.end = before.root
        expected = skip.out((skip.first(X)[1:2] + 2 * other).relu().flatten(1))
        assert relative(before.run_rows(other, image=1), expected) < 1e-12
        expected = skip.out((skip.first(X) + 2 * other[:3]).relu().flatten(1))
        assert relative(before.run_rows(other[:3]), expected) < 1e-12
        adds_up(passed, torch.zeros_like(passed.activations[0][:1]))


def test_the_other_images_may_have_less_of_what_goes_around_the_target_layer():
    skip = Skip().double()
    for parameter in skip.parameters():
        parameter.data.abs_()
    x = random(1, 3, 6, 6).abs() - torch.arange(3.0).double().reshape(3, 1, 1, 1) / 2  # the first is above the others
    with torch.no_grad():
        beginning = Path(skip, None, ["second"]).run(x).affine(0)
        beginning.end = beginning.root
        other = random(5, *beginning.value.shape[1:])
        expected = skip.out((skip.first(x)[2:] + 2 * other).relu().flatten(1))
        assert relative(beginning.run_rows(other, image=2), expected) < 1e-12


def test_what_mixes_images_has_no_players_behind():
    for function in (
        lambda x: x.flip(0).tanh(),
        lambda x: x.flip(-3).tanh(),
        lambda x: x.roll((1, 1), (1, -3)).tanh(),
        lambda x: x.roll(3).tanh(),
        lambda x: x.flatten(1).tril().tanh(),
        lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)).tanh(),
        lambda x: x.flatten(0).roll(3).unflatten(0, (-1, 3, 4)).tanh(),
        lambda x: x.flatten(1).flip(0).tanh(),
        lambda x: F.conv2d(random(5, 3, 6, 3), x.unsqueeze(-1)).tanh(),
    ):
        path = Path(Start(function), None, ["start"])
        with torch.no_grad():
            passed = path.run(random(2, 3, 4))
            beginning = passed.affine(0)
        # What comes before, as a new shape for each image, mixes nothing.
        assert passed.tape.steps[0].name != "aten.flip" or beginning.end == passed.tape.roots["start"]
        assert not beginning.is_output
        rows = beginning.isolate_players(passed.activations[0], "channels")
        alone = torch.diag_embed(passed.activations[0].mT).movedim(1, -1)
        assert torch.equal(rows.reshape(alone.shape), alone)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean((2, 3)),
        lambda x: x.sum(-1),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.avg_pool2d(x[:, 0], 2),
        lambda x: F.adaptive_avg_pool1d(x[:, 0, 0], 2),
        lambda x: F.pad(x, (1, 2, 0, 3)),
        lambda x: x.flip(-1).flip((1, 2)),
        lambda x: x.roll(1, -1).roll((1, 2), (1, -2)),
        lambda x: x.tril().triu(-1),
    ],
)
def test_what_is_affine_within_an_image_has_players_behind(function):
    assert recorded(function, random(2, 3, 4, 4)).affine(0).is_output


@pytest.mark.parametrize(
    ("function", "last"),
    [
        (lambda x: {"one": (y := x.flatten(1)), "other": y.tanh()}, "aten.flatten"),
        (lambda x: x.flatten(1).long().double(), "aten.flatten"),
        (lambda x: (y := x.flatten(1)) * y, "aten.flatten"),
        (lambda x: 1 / x.flatten(1), "aten.flatten"),
        (lambda x: torch.ones(2, 12, dtype=x.dtype) / x.flatten(1), "aten.flatten"),
        (lambda x: torch.div(x.flatten(1), 0.2, rounding_mode="floor"), "aten.flatten"),
    ],
    ids=[
        "an output that is not the last",
        "whole numbers",
        "a square",
        "an inverse",
        "a quotient",
        "a division that rounds",
    ],
)
def test_where_the_affine_beginning_ends(function, last):
    with torch.no_grad():
        passed = Path(Start(function), None, ["start"]).record(random(2, 3, 4))
        beginning = passed.affine(0)
    assert [step.name for step in passed.tape.steps if beginning.end in step.outputs] == [last]
    assert not beginning.is_output


def test_a_weight_of_another_layer_is_what_it_is_now():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.start, self.other = nn.Identity(), nn.Identity()

        def forward(self, x):
            return F.linear(self.start(1 * x).flatten(1), self.other(2 * x).flatten(1))

    x = random(2, 3, 4)
    with torch.no_grad():
        passed = Path(Weighted(), None, ["start", "other"]).run(x)
        rows = passed.affine(0).isolate_players(x, "channels")
    alone = torch.diag_embed(x.mT).movedim(1, -1)  # (N, J, T, L)
    assert relative(rows, alone.flatten(2) @ (2 * x).flatten(1).mT) < 1e-12


RANKS = {
    "kthvalue": (2, 1),
    "median": (-2,),
    "sort": (1, True),
    "topk": (2, 1, False),
}


def ranked_secant(x, x0, places, places0, seeds):
    """Return the secant of numbers that are chosen in a row by their rank, one after another."""
    found, change = torch.zeros_like(x), x - x0
    for seed, place, before in zip(seeds, places, places0, strict=True):
        dy = x[place] - x0[before]
        at = place if dy >= 0 else before
        if dy == 0:
            found[at] += seed * (change[at] == 0)
        elif change[at] != 0 and change[at].abs() >= dy.abs():
            found[at] += seed * dy / change[at]
        else:
            found += seed * dy * change / change.square().sum()
    return found


@pytest.mark.parametrize("levels", [2, 40], ids=["many equal", "few equal"])
@pytest.mark.parametrize("kind", RANKS)
def test_the_secant_of_a_rank_goes_to_whose_it_is_or_to_all(kind, levels):
    x, x0 = ((levels * random(30, 5, 3, seed=seed)).round() / levels for seed in (0, 1))
    x0[:, :2] = x[:, :2]  # some do not change
    choose = getattr(torch, kind)
    (y, places), (_, places0) = (choose(each, *RANKS[kind]) for each in (x, x0))
    keeps = y.dim() == x.dim()
    seeds = random(2, *y.shape, seed=2)
    rule = registry.find_rule(getattr(torch.ops.aten, kind))
    found = rule.pull(x, *RANKS[kind], y=y, grad=(seeds, None), base=Call((x0,), {}, None))
    if not keeps:
        places, places0, seeds = places.unsqueeze(1), places0.unsqueeze(1), seeds.unsqueeze(2)
    for target, image, column in itertools.product(range(2), range(30), range(3)):
        row = (slice(None), column)
        expected = ranked_secant(*(each[image][row] for each in (x, x0, places, places0)), seeds[target, image][row])
        torch.testing.assert_close(found[target, image][row], expected, rtol=1e-12, atol=1e-12)


def test_the_secant_of_a_median_of_all_is_that_of_one_row():
    x, x0, seeds = random(4, 5), random(4, 5, seed=1), random(2, seed=2)
    (_, place), (_, place0) = (each.flatten().median(0, keepdim=True) for each in (x, x0))
    rule = registry.find_rule(torch.ops.aten.median)
    for base, before in ((Call((x0,), {}, None), x0), (None, None)):
        found = rule.pull(x, y=x.median(), grad=seeds, base=base)
        for target, seed in enumerate(seeds):
            expected = (
                torch.zeros(20).double().scatter(0, place, seed)
                if before is None
                else ranked_secant(x.flatten(), before.flatten(), place, place0, seed[None])
            )
            torch.testing.assert_close(found[target].flatten(), expected, rtol=1e-12, atol=1e-12)


class Softsign(nn.Module):
    def forward(self, x):
        return F.softsign(x)


def softsign(layer, x, y, grad):
    return grad / (1 + x.abs()) ** 2


def custom(layer, x, y, grad, base):
    # y = x / (1 + |x|): a quotient by hand
    assert base.args[0] is layer
    return grad * (y - base.y) / (x - base.args[1])


@pytest.mark.parametrize("secant", ["elementwise", custom], ids=["elementwise", "callable"])
def test_secants_of_a_users_layer(rules, secant):
    register_jacobian(Softsign, secant=secant)(softsign)
    layer, before = Softsign(), []
    layer.register_forward_hook(lambda module, args, output: before.append(1) or output * 2)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten()).double()
    with torch.no_grad():
        passed = Path(module, None, ["0"]).run(X)
        count = len(before)
        adds_up(passed, random(1, 4, 4, 4, seed=2))
    assert len(before) == count, "hooks run in no replay"


class Squash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / (1 + x.abs())

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + ctx.saved_tensors[0].abs()) ** 2


# What is registered, a call of it, its slope, its name.
OWN = {
    "i0": (torch.ops.aten.i0.default, torch.i0, torch.special.i1, "aten.i0"),
    "special.i0": (torch.ops.aten.special_i0.default, torch.special.i0, torch.special.i1, "aten.special_i0"),
    "an overload packet": (torch.ops.aten.special_i0, torch.special.i0, torch.special.i1, "aten.special_i0"),
    "by its parts": (torch.ops.aten.i0, torch.special.i0, torch.special.i1, "aten.i0"),
    "an autograd.Function": (Squash, None, lambda x: (1 + x.abs()) ** -2, "Squash"),
}


@pytest.mark.parametrize("case", OWN)
def test_rules_of_operations_and_of_autograd_functions(case, rules):
    call, function, slope, named = OWN[case]
    x, x0 = random(2, 3, 4, 4), random(2, 3, 4, 4, seed=1)

    def twice(x):
        apply = Squash.apply if call is Squash else function  # as it is now
        return apply(apply(x.tanh()))

    @register_jacobian(call, secant="elementwise", needs="inputs")
    def rule(input, *, y, grad):
        return grad * slope(input)

    actual, _, expected = pulled(twice, x)
    assert relative(actual, expected) < 1e-12
    passed = recorded(twice, x)
    assert [step.name for step in passed.tape.steps] == ["aten.tanh", named, named]
    adds_up(passed, x0)
    adds_up(passed, x0[:1])

    base, seeds = passed.run_from({0: x0}), random(2, 2, 3, 4, 4)
    register_jacobian(call)(rule)
    passed = recorded(twice, x)
    with pytest.raises(NoClosedFormError, match=rf"{named} has no secant"):
        passed.pullback([seeds], 0, base).dense()
    register_jacobian(call, secant=lambda input, *, y, grad, base: 2 * grad)(rule)
    with pytest.raises(NoClosedFormError, match=rf"the secant of {named} is wrong"):
        recorded(twice, x).pullback([seeds], 0, base).dense()
    register_jacobian(call, secant="elementwise")(lambda input, *, y, grad: 2 * grad * slope(input))
    for at in (None, base):
        with pytest.raises(NoClosedFormError, match=rf"the rule of {named} is not autograd's Jacobian of it"):
            recorded(twice, x).pullback([seeds], 0, at).dense()


def test_a_secant_is_one_of_three():
    with pytest.raises(ValueError, match="'linear', 'elementwise', a callable or None, got 'affine'"):
        register_jacobian(Softsign, secant="affine")


def test_every_rule_of_the_package_has_a_secant():
    without = {call for call, rule in registry._rules.items() if rule.secant is None}
    assert not without
    assert not [call for call, rule in registry._rules.items() if rule.foreign]


def test_a_layer_that_works_in_place_is_run_again_on_a_copy(rules):
    class Inplace(nn.Module):
        inplace = True

        def forward(self, x):
            return x.mul_(2)

    register_jacobian(Inplace, secant="linear")(lambda layer, x, y, grad: 2 * grad)
    passed = recorded(Inplace(), X)
    before = passed.activations[0].clone()
    adds_up(passed, before - 1)
    assert torch.equal(passed.activations[0], before)


class Ending(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, end):
        super().__init__()
        self.start, self.end = nn.Identity(), end
        self.register_buffer("shift", torch.randn(2, 4, dtype=torch.float64))
        self.linear = nn.Linear(4, 4).double()
        self.convolution = nn.Conv2d(4, 4, 3).double()

    def forward(self, x):
        return self.end(self, self.start(1 * x))


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda net, x: x.mean((2, 3)), True),
        (lambda net, x: x.flatten(2).mean(-1), True),
        (lambda net, x: F.adaptive_avg_pool2d(x, 1).flatten(1), True),
        (lambda net, x: F.adaptive_avg_pool2d(x, 1).flatten(1).tanh(), False),  # what follows the mean
        (lambda net, x: net.linear(x.mean((2, 3))), False),
        (lambda net, x: net.linear(x.mean((2, 3))).tanh(), False),
        (lambda net, x: torch.add(net.shift, x.mean((2, 3))), False),
        (lambda net, x: 2 * x.mean((2, 3)), False),
        (lambda net, x: x.mean((2, 3)) + x.amax((2, 3)), False),  # what goes around it
        (lambda net, x: torch.cat([x.mean((2, 3)), x.mean((2, 3))], 1), False),
        (lambda net, x: F.adaptive_avg_pool2d(x, 2).flatten(1), False),  # no mean over all positions
        (lambda net, x: x.mean(1).flatten(1), False),
        (lambda net, x: x.sum((2, 3)), False),
        (lambda net, x: x.amax((2, 3)), False),
        (lambda net, x: net.convolution(x).mean((2, 3)), False),
        (lambda net, x: x.flatten(1), False),
        (lambda net, x: x[:, :, 1:].mean((2, 3)), False),
        (lambda net, x: x.reshape(2, 20, 1, 6).mean((2, 3)), False),  # parts of channels
        (lambda net, x: x.mean((2, 3)).reshape(1, 8), False),  # two images in a row
        (lambda net, x: (mean := x.mean((2, 3))) * mean.tanh(), False),
    ],
)
def test_features_are_means_only_if_nothing_else_happens(end, expected):
    """Else the mean that a scaler knows would be taken for that of the layer."""
    passed = Path(Ending(end), None, ["start"]).run(random(2, 4, 5, 6))
    assert passed.averages(0) is expected
    assert passed.averages(0) is expected  # as it is known now


class RepeatedMean(nn.Module):
    """The mean over positions, at each of them."""

    def forward(self, x):
        return x.mean((2, 3), keepdim=True).expand(x.shape).clone()


def test_a_mean_at_every_position_is_not_one_row(rules):
    @register_jacobian(RepeatedMean, secant="linear", needs="nothing", keeps_sums=lambda layer, x, y: True)
    def repeated_mean(layer, x, y, grad):
        return grad.mean((3, 4), keepdim=True).expand(grad.shape)

    passed = Path(nn.Sequential(nn.Identity(), RepeatedMean()), None, ["0"]).run(random(2, 4, 5, 6))
    assert not passed.averages(0)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda x: x.mean((2, 3)).unflatten(0, (2, 3)).mean(1), True),
        (lambda x: x.mean((2, 3)).unflatten(0, (2, 3)).mean(1).tanh(), False),
        (lambda x: x.mean((2, 3)).unflatten(0, (2, 3)).mean(2), False),
        (lambda x: x.mean((2, 3)).unflatten(0, (2, 3)).amax(1), False),
        (lambda x: x.mean((2, 3)).unflatten(0, (3, 2)).mean(1), False),  # of two rows, though an image has three
        (lambda x: x.amax((2, 3)).unflatten(0, (2, 3)).mean(1), False),
    ],
)
def test_features_are_means_of_the_rows_of_each_image(end, expected):
    passed = Path(Ending(lambda net, x: end(x)), None, ["start"]).run(random(6, 4, 5, 6))
    assert passed.averages(0, 3) is expected


class SquashTwice(Squash):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x / (1 + x.abs())


def test_a_subclass_of_a_registered_function_is_another_function(rules):
    register_jacobian(Squash, secant="elementwise", needs="inputs")(lambda x, *, y, grad: grad / (1 + x.abs()) ** 2)
    x = random(2, 3, 4, 4)
    torch.testing.assert_close(SquashTwice.apply(x), 2 * Squash.apply(x))
    with pytest.raises(NoClosedFormError, match=r"SquashTwice is an autograd\.Function"):
        recorded(lambda x: SquashTwice.apply(x.tanh()), x)


@pytest.mark.parametrize(
    ("call", "claims", "match"),
    [
        (Squash.apply, {}, "register Squash itself, not Squash.apply"),
        (random, {}, "random is a function of your own, whose calls cannot be seen"),
        (nn.Module, {}, "register a subclass of Module"),
        (Squash, {"keeps_sums": True}, "keeps_sums must be a function"),
        (Squash, {"tokens": 1}, "tokens must be a function"),
    ],
)
def test_what_cannot_be_registered(call, claims, match):
    with pytest.raises(TypeError, match=match):
        register_jacobian(call, **claims)(lambda x, *, y, grad: grad)


def test_a_secant_that_is_wrong_a_little_everywhere_is_refused(rules):
    """Among as many random terms as here, what is wrong cancels to less than rounding may be of all their sizes."""
    register_jacobian(torch.ops.aten.i0, secant="linear")(lambda x, *, y, grad: grad * torch.special.i1(x))
    x, x0 = (random(4, 32, 24, 24, seed=seed).float() for seed in (0, 1))
    passed = recorded(torch.special.i0, x)
    base = passed.run_from({0: x0})
    with pytest.raises(NoClosedFormError, match=r"the secant of aten\.i0 is wrong"):
        passed.pullback([random(1, *passed.output.shape).float()], 0, base).dense()


def test_a_logarithm_may_start_where_it_is_infinite():
    """What changes there is the product: x log(x) is 0 at both ends of nothing, and finite at the other."""
    x, zeros = random(2, 4, 6, 5), torch.zeros(1, 4, 6, 5, dtype=torch.float64)
    passed = recorded(lambda x: torch.xlogy(x.relu(), x.relu()), x)
    assert passed.pullback([random(2, *passed.output.shape)], 0, passed.run_from({0: zeros})).dense().isfinite().all()
    adds_up(passed, zeros)
    adds_up(passed, torch.ones_like(zeros))  # and of numbers that become 0


def test_both_numbers_of_a_pair_are_treated_alike():
    x, x0 = random(2, 4, 6, 5), random(2, 4, 6, 5, seed=1)
    seeds = random(2, 2, 2, 6, 5, seed=2)
    pulled = []
    for first, second in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2))):
        passed = recorded(lambda x, first=first, second=second: torch.hypot(x[:, first], x[:, second]), x)
        pulled.append(passed.pullback([seeds], 0, passed.run_from({0: x0})).dense())
    assert relative(pulled[0], pulled[1]) < 1e-12


class Bilinear(nn.Module):
    """Linear in each of two arguments, and written in place."""

    def forward(self, a, b):
        return torch.einsum("nchw,nchv->ncwv", a, b)


def bilinear(layer, x, y, grad):
    a, b = x
    return torch.einsum("kncwv,nchv->knchw", grad, b), torch.einsum("kncwv,nchw->knchv", grad, a)


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.start, self.layer = nn.Identity(), Bilinear()

    def forward(self, x):
        x = self.start(1 * x)
        return self.layer(x.tanh(), x)


def test_a_users_layer_of_two_tensors(rules):
    register_jacobian(Bilinear, secant="linear")(bilinear)
    with torch.no_grad():
        passed = Path(OfTwo(), None, ["start"]).run(X)
        adds_up(passed, random(3, 3, 6, 6, seed=2))
