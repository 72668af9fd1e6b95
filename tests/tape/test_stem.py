"""The stem runs unseen; what it draws, and a layer in a region of the network's own, are refused or explained."""

import itertools

import pytest
import torch
from against_autograd import Path, faults, random
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from way import X

from pytorch_grad_cam_pcasvm.methods import ClosedFormGradCAM
from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")
STARTS = [torch.zeros(1, 6, 7, 7).double(), random(3, 6, 7, 7, seed=3)]
SEEDS = itertools.count()
KEPT = torch.Generator()


class Stem(nn.Module):
    """A network whose stem is a function of the images, in front of a target layer that a region may be around."""

    def __init__(self, function=None, region=None, *, behind=False):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.region, self.behind = function or (lambda net, x: x.sin()), region, behind
        self.generator = torch.Generator().manual_seed(3)
        self.layer = nn.Conv2d(3, 6, 3).double()
        self.out = nn.Linear(6, 4).double()
        self.eval()

    def forward(self, x):
        if self.behind:
            h = self.layer(x).tanh()
            return self.out(torch.cat([self.function(self, part) for part in h.chunk(2, 1)], 1).mean((2, 3)))
        x = self.function(self, x)
        if self.region is None:
            return self.out(self.layer(x).tanh().mean((2, 3)))
        with self.region():
            h = self.layer(x)
        return self.out(h.clone().tanh().mean((2, 3)))


def noise(generator=None):
    return torch.randn(3, 1, 1, generator=generator, dtype=torch.float64)


def made(seed=0):
    return torch.Generator().manual_seed(seed)


def shielded(net, x):
    with torch.random.fork_rng(devices=[]):
        return x * noise()


ALIKE = {
    "made in forward": lambda net, x: x * noise(made()),
    "seeded anew": lambda net, x: (net.generator.manual_seed(1), x * noise(net.generator) + noise(net.generator))[1],
    "seeded elsewhere": lambda net, x: x * noise(KEPT.manual_seed(1)),
    "in place": lambda net, x: x + torch.empty(3, 1, 1).double().normal_(generator=made()),
    "dropout in evaluation": lambda net, x: F.dropout(x, 0.5, training=False),
}
OTHERS = {
    "never seeded": (lambda net, x: x * noise(net.generator), r"randn.* in a Stem"),
    "kept elsewhere": (lambda net, x: x * noise(KEPT), r"randn.* in a Stem"),
    "seeded otherwise": (lambda net, x: x * noise(made(next(SEEDS))), "differently in every run"),
    "from the clock": (lambda net, x: x * noise(made(torch.Generator().seed())), "differently in every run"),
    "torch's own": (lambda net, x: x * noise(), r"randn.* in a Stem"),
    "put back": (shielded, r"randn.* in a Stem"),
    "dropout": (lambda net, x: F.dropout(x, 0.5), r"random numbers \(aten::\w+ in a Stem"),
    "permuted": (lambda net, x: x[:, torch.randperm(3, generator=net.generator)], r"aten::randperm in a Stem"),
    "binomial": (lambda net, x: x * torch.binomial(torch.ones(1) * 4, torch.ones(1) / 2), "aten::binomial in a Stem"),
    "for values": (lambda net, x: x * torch.bernoulli(x.sigmoid(), generator=made()), ""),
}


@pytest.mark.parametrize("behind", [False, True], ids=["before the layer", "behind it"])
@pytest.mark.parametrize("case", ALIKE)
def test_what_every_run_draws_alike_is_a_constant(case, behind):
    net = Stem(ALIKE[case], behind=behind)
    assert not faults(net, "layer", X, STARTS)
    assert AutogradPath(net, None, ["layer"]).run(X).differentiable


@pytest.mark.parametrize("behind", [False, True], ids=["before the layer", "behind it"])
@pytest.mark.parametrize("case", OTHERS)
def test_numbers_that_differ_from_run_to_run_are_refused_by_name(case, behind):
    function, message = OTHERS[case]
    if case == "for values" and not behind:
        return  # of the stem they are constants
    net = Stem(function, behind=behind)
    before = net.generator.get_state()
    for _ in range(2):
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match="random numbers|differently in every run" if behind else message),
        ):
            Path(net, None, ["layer"]).run(X)
        assert torch.equal(net.generator.get_state(), before)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("region", [torch.inference_mode, Passing, torch.no_grad])
def test_a_target_layer_in_a_region_of_the_networks_own(region):
    seeds = random(2, 3, 4)
    with torch.no_grad():
        passes = [Path(Stem(region=r), None, ["layer"]).run(X) for r in (region, None)]
    actual, expected = (passed.pullback([seeds], 0).dense() for passed in passes)
    assert torch.equal(actual, expected)
    assert passes[0].tape.steps[-1].name == "aten.linear"


def test_a_stem_is_not_dispatched(monkeypatch):
    seen = []
    dispatch = Recorder.__torch_dispatch__

    def noted(self, func, types, args=(), kwargs=None):
        seen.append(str(func.overloadpacket))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", noted)
    with torch.no_grad():
        Path(Stem(), None, ["layer"]).run(X)
    assert "aten.tanh" in seen
    assert not {"aten.sin", "aten.conv2d", "aten.convolution"} & set(seen)
    torch.rand(1)  # is not refused behind it


def test_a_stem_whose_hook_explains_and_draws():
    inner = Stem(ALIKE["made in forward"])
    net = Stem()
    net.function = lambda net, x: (ClosedFormGradCAM(inner, ["layer"]).explain(x.detach()), torch.sin(x))[1]
    assert not faults(net, "layer", X, STARTS)


def test_a_stem_that_raises_another_error_where_it_may_not_draw():
    def catching(net, x):
        try:
            return x * noise(made())
        except Exception as error:
            raise ValueError("no noise") from error

    assert not faults(Stem(catching), "layer", X, STARTS)
