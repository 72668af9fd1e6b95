"""Every operation of ``tests/ops.py`` against every property: one function a property, one case an operation."""

from functools import cached_property

import pytest
import torch
from ops import FUNCTIONS, OPS, prepared, pulled, random, recorded
from reference import relative
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm import NoClosedFormError
from pytorch_grad_cam_pcasvm.path.dual_numbers import DualNumbers
from pytorch_grad_cam_pcasvm.rules.cotangents import cotangent
from pytorch_grad_cam_pcasvm.tape.step import Ref, TokenRange, list_tensors

if torch.__version__ < "2.9":  # whose InstanceNorm writes into its buffers whenever it runs
    OPS = {
        name: op for name, op in OPS.items() if "InstanceNorm2d" not in name or "track_running_stats=True" not in name
    }
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says of parts that it will drop

# Refused by their names; each may get a rule.
NO_RULE = {
    "masked_scatter", "scatter_reduce mean", "scatter_reduce amax", "diag_embed", "cummax", "cummin", "addbmm", "cross",
    "block_diag", "nansum, nanmean", "logcumsumexp", "cdist, inf", "pdist", "losses", "determinant", "inverse", "solve",
    "max_unpool1d", "max_unpool2d", "max_unpool2d of something else", "max_unpool3d", "roi_pool", "ps_roi_align",
    "torch.i0", "torch.deg2rad", "torch.lgamma", "torch.digamma", "clamp by tensors",
    "form: batch norm, only its weight of x", "form: batch norm, only its bias of x",
}  # fmt: skip
NO_SECANT = {
    **dict.fromkeys(
        ("gather, of the largest", "take_along_dim, of the order", "topk and its indices", "max and its indices"),
        "other numbers are chosen",
    ),
    **dict.fromkeys(("times a mask, cast", "form: rounded"), "numbers jump"),
    "powers": "of a base and an exponent that both change",
}
INFINITE = {"form: masked by -inf", "form: from an infinite constant"}  # at one end or at both


class Case:
    """An operation that is recorded once, for all properties."""

    def __init__(self, name):
        self.op, function = OPS[name], OPS[name].make()
        self.x, self.other = self.op.sample(), self.op.sample(1)
        self.inside, self.function = function, lambda x: function(1 * x)  # which may write into its argument
        self.output = self.function(self.x)  # constants are made before anything is recorded
        self.has_secant = name not in NO_SECANT.keys() | INFINITE
        self.exact, self.form = name in FUNCTIONS, name.startswith("form: ")
        self.layer = isinstance(self.op.module, nn.Module)

    @cached_property
    def passed(self):
        return recorded(self.inside, self.x)

    @cached_property
    def seeds(self):
        return [random(2, *self.passed.output.shape, seed=7)]

    @cached_property
    def starts(self):
        """Rows of other numbers, one row of them, and, of layers, zeros."""
        return [self.other, self.other[:1], *([0 * self.other[:1]] if self.layer else [])]

    @cached_property
    def walks(self):
        """What is pulled back: gradients, and secants from each start, each with the change that they are of."""
        if not self.has_secant:
            return [(None, self.x)]
        return [(None, self.x), *((self.passed.run_from({0: start}), self.x - start) for start in self.starts)]

    def pullback(self, base=None):
        return self.passed.pullback(self.seeds, 0, base)


def pullback(case):
    """The gradient is autograd's."""
    # torch's own backward of hardsigmoid multiplies by 1/6 in float32, also in float64.
    twin = (lambda x: F.relu6(x + 3) / 6) if isinstance(case.op.module, nn.Hardsigmoid) else None
    actual, weights, expected = pulled(case.inside, case.x, twin=twin)
    assert relative(actual, expected) < case.op.tolerance
    sums = expected.reshape(2, *case.x.shape[:2], -1)
    # Those of a softmax or a norm can be 0 where their terms are not.
    assert (weights - sums.sum(-1)).abs().max() < case.op.tolerance * sums.abs().sum(-1).max()


def secant(case):
    """Times the change it adds up to the change of the output; where nothing changes, it is the gradient."""
    for base, change in case.walks[1:]:
        terms = (case.pullback(base).dense() * change).flatten(1)
        expected = (case.seeds[0] * (case.passed.output - base.output)).reshape(2, -1).sum(1)
        scale = max(terms.abs().sum() / 2, (case.seeds[0] * case.passed.output).abs().sum() / 2)
        assert ((terms.sum(1) - expected).abs() < 1e-10 * scale).all()
        if elementwise(case):  # there is but one secant
            quotient = case.seeds[0] * (case.passed.output - base.output) / change
            assert relative(case.pullback(base).dense(), quotient) < 1e-7
    if case.walks[1:]:
        base = case.passed.run_from({0: case.x})
        # Of functions to the last bit; a recurrent layer is replayed in single steps.
        assert relative(case.passed.output, base.output) <= (0 if case.exact else 1e-12)
        assert relative(case.pullback(base).dense(), case.pullback().dense()) < 1e-10


def elementwise(case):
    if case.output.shape != case.x.shape:
        return False
    some = random(*case.x.shape, seed=9) > 0
    return all(
        torch.equal(case.function(torch.where(kept, case.x, case.other))[kept], case.output[kept])
        for kept in (some, ~some)
    )


def sums(case):
    """Over positions they are those of all numbers."""
    for base, _ in case.walks:
        weights, dense = case.pullback(base).sums(), case.pullback(base).dense().reshape(2, *case.x.shape[:2], -1)
        tolerance = 1e-12 if base is None else 1e-10
        assert (weights - dense.sum(-1)).abs().max() < tolerance * max(dense.abs().sum(-1).max(), 1e-300)


def numbers(case):
    """Products with the change, over some dimensions, are those of all numbers; so are contributions."""
    for base, change in case.walks:
        change = change.expand_as(case.x)
        terms = case.pullback(base).dense() * change
        if case.x.dim() > 2:
            for dims in ([1], list(range(2, case.x.dim()))):
                found = case.pullback(base).times(change, dims)
                assert relative(found + 1, terms.sum([dim + 1 for dim in dims]) + 1) < 1e-9
        if base is not None:
            found = case.pullback(base).contributions(change, (0, 1))
            whole = terms.reshape(2, *case.x.shape[:2], -1)
            assert (found - whole.sum(-1)).abs().max() < 1e-9 * whole.abs().sum(-1).max()


def tokens(case):
    """Where a rule says so, the gradient of one of them is that of its own numbers, and 0 for others."""
    tape = case.passed.tape
    path = tape.following(tape.roots["start"])[1]
    for step in [step for step in tape.steps if step.rule is not None and step.single]:
        call = tape.recorded(step)
        for dim in range(0 if list_tensors(step.options) else call.y.dim()):
            dims = step.rule.find_tokens(dim, call)
            if dims is None:
                continue
            seed, last = random(2, *call.y.shape, seed=8), call.y.shape[dim] - 1
            seed.narrow(dim + 1, 0, last).zero_()
            at = step.resolve(tape.values, path, seed.dtype, TokenRange(dims, dim, last, 1))
            whole = several(step.rule.pulled(step.resolve(tape.values, path, seed.dtype), seed))
            parts = several(step.rule.pulled(at, seed.narrow(dim + 1, last, 1)))
            for item, own, one, part in zip(step.arguments, dims, whole, parts, strict=False):
                if isinstance(item, Ref) and item.index in path:
                    expected = cotangent(one).dense()
                    if own is not None:
                        assert not expected.narrow(own + 1, 0, last).any(), (step.name, dim)
                        expected = expected.narrow(own + 1, last, 1)
                    assert relative(cotangent(part).dense() + 1, expected + 1) < 1e-12, (step.name, dim)


def several(pulled):
    return pulled if isinstance(pulled, tuple) else (pulled,)


def images_apart(case):
    """What the affine beginning gives for an image does not depend on others."""
    other = torch.cat([case.x[:1], case.other[1:]])
    first, second = (passed.affine(0).value[0] for passed in (case.passed, recorded(case.inside, other)))
    assert relative(second, first) < 1e-12


def players(case):
    """Without a channel, or a position, the output is that of masked activations."""
    beginning = case.passed.affine(0)
    for over in ("channels", "positions"):
        rows = beginning.isolate_players(case.x, over)
        assert relative(beginning.isolate_players(case.x, over, slice(0, 1)) + 1, rows[:, :1] + 1) < 1e-12
        for player in (0, rows.shape[1] - 1):
            masked = case.x.clone()
            masked.view(*masked.shape[:2], -1).select(1 if over == "channels" else 2, player).zero_()
            found, expected = beginning.run_rows(beginning.value - rows[:, player]), case.function(masked)
            assert relative(found.nan_to_num() + 1, expected.nan_to_num() + 1) < 1e-10


def dual_numbers(case):
    """Values and derivatives are those of torch.func.jvp, which shares nothing with the package."""
    direction = random(*case.x.shape, seed=10)
    try:
        y, derivative = torch.func.jvp(case.function, (case.x,), (direction,))
    except (RuntimeError, NotImplementedError):
        derivative = torch.zeros(1)
    if not derivative.any():
        assert not case.form
        return  # torch has no forward derivative
    with torch.no_grad(), DualNumbers():
        found = forward_ad.unpack_dual(case.function(forward_ad.make_dual(case.x, direction)))
    assert found.primal.dtype == y.dtype
    bound = 1e-13 if case.form else 1e-11
    torch.testing.assert_close(found.primal, y, rtol=bound, atol=bound)
    torch.testing.assert_close(found.tangent, derivative, rtol=bound, atol=bound)


def in_place_and_out(case):
    """Whatever is written in place, a replay gives what the function gives, and changes nothing that it reads."""
    before = case.passed.activations[0].clone()
    assert torch.equal(before, case.x)
    found = case.passed.rerun({0: case.other})
    assert relative(found + 1, case.function(case.other) + 1) < 1e-12
    for (base, _), start in zip(case.walks[1:], case.starts, strict=False):
        expected = case.function(start.expand_as(case.x))
        assert relative(base.output + 1, expected + 1) < 1e-12
    assert torch.equal(case.passed.activations[0], before)


def half_precision(case):
    """A layer in half precision has gradients in single precision, about those of its rounded numbers."""
    for dtype in (torch.bfloat16, torch.float16) if case.layer else ():
        half, x = prepared(case.op.module).to(dtype), case.x.to(dtype)
        try:
            half(x)
        except RuntimeError:
            continue  # torch has none
        passed = recorded(half, x)
        found = passed.pullback([case.seeds[0].float()], 0).dense()
        _, _, expected = pulled(prepared(case.op.module).to(dtype).double(), x.double())
        assert passed.activations[0].dtype == dtype
        assert found.dtype == torch.float32
        assert relative(found, expected) < 0.05


PROPERTIES = (
    pullback, secant, sums, numbers, tokens, images_apart, players, dual_numbers, in_place_and_out, half_precision,
)  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_an_operation_has_every_property(name):
    case = Case(name)
    if name in NO_RULE:
        with pytest.raises(NoClosedFormError):
            case.pullback().dense()
        dual_numbers(case)
        return
    if name in NO_SECANT:
        with pytest.raises(NoClosedFormError):
            case.pullback(case.passed.run_from({0: case.other})).dense()
    for hold in PROPERTIES:
        hold(case)
