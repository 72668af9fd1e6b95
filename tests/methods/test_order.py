"""A used cam answers as a fresh one, whatever it was asked before: 100 random pairs of questions for each method."""

import numpy as np
import pytest
import torch
from cams import BASIC, METHODS
from torch import nn
from torch.nn import functional as F  # noqa: N812

from pytorch_grad_cam_pcasvm.targets import ScoreTarget


class WrongReLU(torch.autograd.Function):
    """A ReLU whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x):
        return F.relu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class WrongReLUToo(torch.autograd.Function):
    """The same, but nothing tells it from a function of its own."""

    @staticmethod
    def forward(x):
        return F.relu(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.relu()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


class ByModule(nn.Module):
    def forward(self, x):
        return WrongReLU.apply(x)


ACTS = {
    "layer": nn.ReLU(),
    "module": ByModule(),
    "function": WrongReLU.apply,
    "setup": WrongReLUToo.apply,
    "torch": F.relu,
    "scaled": lambda x: Scaled.apply(x, 0.5),
}


class Net(nn.Module):
    """A network with a branch, an activation and a part that is a constant for autograd, all of which may change."""

    def __init__(self):
        super().__init__()
        self.target, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)
        self.shifts = nn.Parameter(torch.tensor([[0.5], [2.0]]))
        self.branch, self.act = "none", nn.ReLU()

    def forward(self, x):
        y = self.target(x)
        match self.branch:
            case "number":
                y = y + (2.0 if y.mean() > 0 else 0.3)
            case "item":
                y = y * 2.0 + float(y.amax().item() > 1)
            case "weight":
                y = y + self.shifts[int(y.mean() > 0)]
            case "detached":
                y = y + (y.detach().mean() > 0)
            case "no_grad":
                with torch.no_grad():
                    shift = self.shifts[(y.mean() > 0).long()]
                y = y + shift
            case "list":
                y = y + (1.0 if any(value > 1 for value in y.amax((1, 2, 3)).tolist()) else 0.2)
            case "row":
                y = torch.stack([row + (1.5 if row.mean() > 0 else 0.5) for row in y.unbind()])
            case "seen":
                y = torch.where(y.mean((1, 2, 3), keepdim=True) > 0, y + 2.0, y + 0.3)
        return self.last(self.act(y).mean((2, 3)))


BRANCHES = ("none", "number", "item", "weight", "detached", "no_grad", "list", "row", "seen")


def ask(cam, net, question):
    branch, act, images, baseline = question
    net.branch = branch
    del net.act  # a module or a function
    net.act = ACTS[act]
    if baseline is not None and hasattr(cam, "baseline"):
        cam.baseline = baseline
    try:
        maps = cam.explain(images, [ScoreTarget(0), ScoreTarget(1)])
    except ValueError as error:
        return str(error)
    return [part for part in (maps.maps, maps.values, maps.baseline_values) if part is not None]


def same(one, two):
    if isinstance(one, str) or isinstance(two, str):
        return one == two
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", [*BASIC, "ClosedFormAblationCAM", "ShapCAM"])
@pytest.mark.parametrize("pairs", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_used_cam_answers_as_a_fresh_one(name, pairs):
    method = METHODS[name]
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    net = Net().double().eval()
    answered = refused = 0

    def question():
        branch = rng.choice(BRANCHES)
        act = rng.choice(["layer", "torch"]) if rng.random() < 0.7 else rng.choice(list(ACTS))
        count = int(rng.integers(1, 4))
        images = torch.from_numpy(rng.normal(rng.choice([-2.0, 0.0, 2.0]), 1.0, (count, 2, 6, 6)))
        baseline = [None, "zero", torch.from_numpy(rng.normal(0, 2, 3)), torch.from_numpy(rng.normal(0, 2, (2, 6, 6)))]
        return branch, act, images, baseline[rng.integers(4)]

    for _ in range(pairs):
        first, second = question(), question()
        if rng.random() < 0.5:  # the same question but for the images, or for the activation
            second = (first[0], second[1] if rng.random() < 0.5 else first[1], second[2], first[3])
        used = method(net, ["target"])
        ask(used, net, first)
        baseline = getattr(used, "baseline", None) if second[3] is None else second[3]
        expected = ask(method(net, ["target"]), net, (*second[:3], baseline))
        found = ask(used, net, second)
        assert same(found, expected), (first[:2], second[:2], found, expected)
        answered += not isinstance(expected, str)
        refused += isinstance(expected, str)
    assert answered >= pairs / 5
    assert refused >= pairs / 10
