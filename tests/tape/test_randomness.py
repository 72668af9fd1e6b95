"""Networks that seed their generators in every run are explained; numbers that differ from run to run are refused."""

import itertools

import pytest
import torch
from against_autograd import Path, faults, random
from torch import nn
from way import Net, Way, X

from pytorch_grad_cam_pcasvm.path.autograd import AutogradPath

pytestmark = pytest.mark.filterwarnings("ignore")
STARTS = [torch.zeros(1, 6, 7, 7).double(), random(3, 6, 7, 7, seed=3)]
SEEDS = itertools.count()


class Draws(nn.Module):
    """Draws from a generator that it keeps, and may seed anew."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)


def noise(generator):
    return torch.randn(6, 1, 1, generator=generator, dtype=torch.float64)


def seeded_anew(part, h):
    part.generator.manual_seed(1)
    return h.sin() * noise(part.generator) + noise(part.generator)


ALIKE = {
    "made in forward": Way(lambda h: h.sin() * noise(torch.Generator().manual_seed(0))),
    "in place": Way(
        lambda h: h.sin() * torch.empty(6, 1, 1).double().normal_(generator=torch.Generator().manual_seed(0))
    ),
    "seeded anew": Way(seeded_anew, Draws),
}
OTHERS = {
    "never seeded again": Way(lambda part, h: h * noise(part.generator), Draws),
    "seeded otherwise": Way(lambda h: h * noise(torch.Generator().manual_seed(next(SEEDS)))),
    "from the clock": Way(lambda h: h * noise(torch.Generator().manual_seed(torch.Generator().seed()))),
    "torch's own": Way(lambda h: h * torch.randn(6, 1, 1)),
    "for values": Way(lambda h: h * torch.bernoulli(h.sigmoid(), generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_every_run_draws_alike_is_a_constant(case):
    net = Net(ALIKE[case], "flat")
    assert not faults(net, "stem", X, STARTS)
    assert AutogradPath(net, None, ["stem"]).run(X).differentiable


@pytest.mark.parametrize("case", OTHERS)
def test_numbers_that_differ_from_run_to_run_are_refused(case):
    with torch.no_grad(), pytest.raises(ValueError, match=r"random numbers|differently in every run"):
        Path(Net(OTHERS[case], "flat"), None, ["stem"]).run(X)


def test_a_refusal_gives_a_generator_back_as_it_was():
    net = Net(OTHERS["never seeded again"], "flat")
    net.part.generator.manual_seed(3)
    before = net.part.generator.get_state()
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match="random numbers"):
            Path(net, None, ["stem"]).run(X)
        assert torch.equal(net.part.generator.get_state(), before)
