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
from pytorch_grad_cam_pcasvm.tape.recorder import Recorder

pytestmark = pytest.mark.filterwarnings("ignore")
STARTS = [torch.zeros(1, 6, 7, 7).double(), random(3, 6, 7, 7, seed=3)]
SEEDS = itertools.count()
KEPT = torch.Generator()


class Stem(nn.Module):
    """A network whose stem is a function of the images, in front of a target layer that a region may be around."""

    def __init__(self, function=None, region=None):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.region = function or (lambda net, x: x.sin()), region
        self.generator = torch.Generator().manual_seed(3)
        self.layer = nn.Conv2d(3, 6, 3).double()
        self.out = nn.Linear(6, 4).double()
        self.eval()

    def forward(self, x):
        x = self.function(self, x)
        if self.region is None:
            return self.out(self.layer(x).tanh().mean((2, 3)))
        with self.region():
            h = self.layer(x)
        return self.out(h.clone().tanh().mean((2, 3)))


def noise(generator=None, shape=(3, 9, 9)):
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def seeded_anew(net, x):
    net.generator.manual_seed(1)
    return x * noise(net.generator)


def seeded_elsewhere(net, x):
    return x * noise(KEPT.manual_seed(1))


def shielded(net, x):
    with torch.random.fork_rng(devices=[]):
        return x * noise()


ALIKE = {
    "made in forward": lambda net, x: x * noise(torch.Generator().manual_seed(0)),
    "seeded anew": seeded_anew,
    "seeded elsewhere": seeded_elsewhere,
    "in place": lambda net, x: x + torch.empty_like(x).uniform_(generator=torch.Generator().manual_seed(0)),
    "dropout in evaluation": lambda net, x: F.dropout(x, 0.5, training=False),
}
OTHERS = {
    "never seeded": (lambda net, x: x * noise(net.generator), r"randn.* in a Stem"),
    "kept elsewhere": (lambda net, x: x * noise(KEPT), r"randn.* in a Stem"),
    "seeded otherwise": (
        lambda net, x: x * noise(torch.Generator().manual_seed(next(SEEDS))),
        "differently in every run",
    ),
    "torch's own": (lambda net, x: x * noise(), r"randn.* in a Stem"),
    "put back": (shielded, r"randn.* in a Stem"),
    "dropout": (lambda net, x: F.dropout(x, 0.5), r"random numbers \(aten::\w+ in a Stem"),
    "permuted": (lambda net, x: x[:, :, torch.randperm(9, generator=net.generator)], r"aten::randperm in a Stem"),
    "binomial": (lambda net, x: x * torch.binomial(torch.ones(9) * 4, torch.ones(9) / 2), "aten::binomial in a Stem"),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_every_run_draws_alike_is_a_constant(case):
    net = Stem(ALIKE[case])
    assert not faults(net, "layer", X, STARTS)


@pytest.mark.parametrize("case", OTHERS)
def test_numbers_that_differ_from_run_to_run_are_refused_by_name(case):
    function, message = OTHERS[case]
    net = Stem(function)
    before = net.generator.get_state()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match=message):
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
            return x * noise(torch.Generator().manual_seed(0))
        except Exception as error:
            raise ValueError("no noise") from error

    assert not faults(Stem(catching), "layer", X, STARTS)
