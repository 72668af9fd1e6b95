"""Writes into tensors of which several numbers share one place in memory: exact, or refused where order matters."""

import warnings

import pytest
import torch
from against_autograd import Path, Refused, random
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore")
X = random(1, 3, 7, 7, seed=1)  # of one image, as what they share mixes images
FIRST, PAIR = torch.tensor([0]), torch.tensor([0, 1])
MASK = torch.arange(5) > 2


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.function = nn.Conv2d(3, 6, 3).double(), function

    def forward(self, x):
        parts = [part.reshape(-1) for part in self.function(self.stem(x))]
        return torch.stack([(part * random(len(part), seed=seed)).sum() for seed, part in enumerate(parts)])[None]


def both(h):
    return torch.stack([h.sin(), h.cos()])


# From h (1, 6, 5, 5): a tensor, and an overlapping view of it, (2, 1, 6, 5, 5).
VIEWS = {
    "expanded constants": lambda h: (g := torch.ones(1, 6, 5, 5).double(), g.expand(2, 1, 6, 5, 5)),
    "strided ones": lambda h: (g := torch.ones(1, 6, 5, 5).double(), g.as_strided((2, *g.shape), (0, *g.stride()))),
    "unfolded constants": lambda h: (g := torch.ones(1, 6, 5, 6).double(), g.unfold(3, 5, 1).permute(3, 0, 1, 2, 4)),
    "unfolded": lambda h: (g := torch.cat([h, h[..., :1]], 3) * 1.1, g.unfold(3, 5, 1).permute(3, 0, 1, 2, 4)),
    "unfolded twice": lambda h: (
        g := torch.cat([h, h[..., :2]], 3), g.unfold(3, 6, 1).unfold(4, 5, 1)[:, :, :, :, 0].permute(3, 0, 1, 2, 4)
    ),
    "strided": lambda h: (g := torch.cat([h, h[:, :1]], 1) * 1.1, g.as_strided((2, 1, 6, 5, 5), (25, 150, 25, 5, 1))),
}  # fmt: skip
EXACT = {
    "zero": lambda v, h: v.zero_(),
    "fill": lambda v, h: v.fill_(0.3),
    "fill with one on the path": lambda v, h: v.fill_(h.mean()),
    "relu": lambda v, h: v.relu_(),
    "clamp": lambda v, h: v.clamp_(-0.5, 0.5),
    "hardtanh": lambda v, h: nn.functional.hardtanh(v, -0.3, 0.4, inplace=True),
    "abs": lambda v, h: v.abs_(),
    "round": lambda v, h: v.round_(),
    "add": lambda v, h: v.add_(h.sin()),
    "add a number": lambda v, h: v.add_(0.7),
    "sub a number": lambda v, h: v.sub_(0.3, alpha=2),
    "sub": lambda v, h: v.sub_(h.sin(), alpha=2),
    "masked": lambda v, h: v.masked_fill_(MASK, 0.4),
    "masked on the path": lambda v, h: v.masked_fill_(v > 0, 0.4),
    "masked with one on the path": lambda v, h: v.masked_fill_(MASK, h.mean()),
    "indexed": lambda v, h: v.__setitem__(0, h.sin()),
    "indexed, all of one": lambda v, h: v.__setitem__(torch.tensor([True, False]), h.sin()),
    "accumulated": lambda v, h: v.index_put_((PAIR,), both(h), accumulate=True),
    "copied to an index": lambda v, h: v.index_copy_(0, FIRST, h.sin()[None]),
    "added at an index": lambda v, h: v.index_add_(0, PAIR, both(h), alpha=0.5),
    "filled at indices": lambda v, h: v.index_fill_(0, PAIR, 0.2),
    "scattered": lambda v, h: v.scatter_(0, torch.zeros(1, 1, 6, 5, 5, dtype=torch.long), h.sin()[None]),
    "scattered and added": lambda v, h: v.scatter_add_(0, torch.zeros(1, 1, 6, 5, 5, dtype=torch.long), h.sin()[None]),
    "scattered, some": lambda v, h: v.scatter_(-5, torch.zeros(1, 1, 6, 5, 3, dtype=torch.long), h.sin()[None]),
    "scattered, some, and added": lambda v, h: v.scatter_add_(2, torch.ones(1, 1, 4, 5, 3, dtype=torch.long), both(h)),
    "scattered, a number": lambda v, h: v.scatter_(0, torch.zeros(1, 1, 6, 5, 3, dtype=torch.long), 0.2),
    "one of them": lambda v, h: v[1].mul_(h.sin()),
}
CHANCE = {
    "mul": lambda v, h: v.mul_(2 + h.mean()),
    "leaky relu": lambda v, h: nn.functional.leaky_relu(v, 0.1, inplace=True),
    "copy": lambda v, h: v.copy_(both(h)),
    "both indices": lambda v, h: v.index_put_((PAIR,), both(h)),
    "clamp by another": lambda v, h: v.clamp_(max=h),
    "masked scatter": lambda v, h: v.masked_scatter_(torch.ones(2, 1, 1, 1, 1, dtype=torch.bool), both(h)),
}
CONSTANT = "unfolded constants", "leaky relu"


def behind(view, write):
    def function(h):
        whole, part = view(h)
        write(part, h)
        return whole, part, h.sin()

    return Net(function)


def torch_refuses(view, write):
    try:
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            behind(view, write)(X)
    except RuntimeError:
        return True
    return False


CASES = [(view, write) for view in VIEWS for write in EXACT if not torch_refuses(VIEWS[view], EXACT[write])]


def test_most_writes_are_possible():
    assert len(CASES) > 70


@pytest.mark.parametrize(("view", "write"), CASES)
def test_a_write_is_exact(view, write):
    net = behind(VIEWS[view], EXACT[write])
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
        h, seed, step = passed.activations[0], random(1, 1, 3, seed=5), 1e-6 * random(1, 6, 5, 5, seed=6)

        def at(activations):
            handle = net.stem.register_forward_hook(lambda *_: activations.clone())
            try:
                return net(X)
            finally:
                handle.remove()

        # Not autograd, which counts a number that is written to several places at one as often.
        slope = (seed * (at(h + step) - at(h - step)) / 2).sum()
        gradient = passed.pullback([seed], 0).dense()[0]
        terms = (gradient * step).abs().sum() + 1e-6 * (seed * at(h)).abs().sum()
        assert (gradient * step).sum().sub(slope).abs() < 1e-6 * terms
        if write == "round":  # a jump, which has no secant
            return
        start = 0.5 * random(1, 6, 5, 5, seed=7)
        pulled = passed.pullback([seed], 0, passed.run_from({0: start})).dense()[0]
        change, terms = (seed * (at(h) - at(start))).sum(), (pulled * (h - start)).abs().sum()
        assert (pulled * (h - start)).sum().sub(change).abs() < 1e-12 * (terms + (seed * at(h)).abs().sum())


@pytest.mark.parametrize(
    ("view", "write"),
    # A function of constants alone is a constant, whatever torch does.
    [(view, write) for view in ("unfolded constants", "unfolded") for write in CHANCE if (view, write) != CONSTANT],
)
def test_where_the_order_of_writing_matters_it_is_refused(view, write):
    with torch.no_grad(), pytest.raises(Refused, match="depends on the order of writing"):
        Path(behind(VIEWS[view], CHANCE[write]), None, ["stem"]).run(X)


STRIDED = {
    "transposed": lambda: torch.arange(150.0).double().reshape(1, 6, 5, 5).mT,
    "with an offset": lambda: torch.arange(200.0).double()[50:].reshape(1, 6, 5, 5),
    "every other": lambda: torch.arange(300.0).double().reshape(1, 6, 5, 10)[..., ::2],
}


@pytest.mark.parametrize("case", STRIDED)
def test_a_write_through_strides_of_constants_lands_where_it_is(case):
    def function(h):
        base = STRIDED[case]()
        view = base.as_strided(
            (1, 6, 5, 2), (*base.stride()[:3], 2 * base.stride(3)), base.storage_offset() + base.stride(3)
        )
        view.copy_(h[..., :2].sin())
        return base, view, h

    net = Net(function)
    with torch.no_grad():
        passed = Path(net, None, ["stem"]).run(X)
    leaf = passed.activations[0].clone().requires_grad_()
    handle = net.stem.register_forward_hook(lambda *_: leaf * 1)
    (expected,) = torch.autograd.grad(net(X).sum(), leaf)
    handle.remove()
    assert (
        passed.pullback([torch.ones(1, 1, 3).double()], 0).dense()[0] - expected
    ).abs().max() < 1e-12 * expected.abs().max()


def test_strides_beyond_a_tensor_are_refused():
    with torch.no_grad(), pytest.raises(ValueError, match="from outside of the tensor that it is called on"):
        Path(Net(lambda h: [(h * 1)[:, 1:].as_strided((1, 6, 5), (150, 25, 1), 0)]), None, ["stem"]).run(X)
