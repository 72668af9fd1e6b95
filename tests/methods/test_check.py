"""``cam.check`` holds gradients against autograd and contributions against the network; refusals show the tape."""

from dataclasses import replace

import pytest
import torch
from problems import Problem
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM, NoClosedFormError, register_jacobian
from pytorch_grad_cam_pcasvm.rules import registry

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(*steps):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), *steps, nn.Flatten(), nn.Linear(144, 3)).double().eval()


def test_what_is_right_agrees():
    problem = Problem(seed=2)
    report = ClosedFormGradCAM(problem.net, [problem.target_layer]).check(problem.x)
    assert report.agrees
    assert [row.what for row in report.comparisons] == ["gradient", "sum of contributions"]
    assert all(row.error < 1e-12 for row in report.comparisons)
    assert (
        str(report).splitlines()[0].startswith("features.3  gradient             agrees with autograd, relative error ")
    )


def test_what_is_wrong_differs(rules):
    def wrong(input, *, y, grad):
        return grad * (2 - y * y)

    wrong.__module__ = registry.__name__  # one of the package's own, which no explanation compares
    call = torch.ops.aten.tanh
    registry._rules[call] = replace(registry._rules[call], pull=wrong)
    net = network(nn.Tanh())
    report = ClosedFormGradCAM(net, ["0"]).check(X)
    assert not report.agrees
    assert "DIFFERS FROM autograd" in str(report)


def test_what_cannot_be_compared_is_said(rules):
    class Squared(nn.Module):
        def forward(self, x):
            return x**2

    register_jacobian(Squared)(lambda layer, x, y, grad: grad * 2 * x)
    report = ClosedFormGradCAM(network(Squared()), ["0"]).check(X)
    assert report.agrees
    assert "sum of contributions is not available: " in str(report)
    assert "Squared has no secant" in str(report)

    net = network()
    nn.init.zeros_(net[-1].weight)
    assert "is 0 for all targets, by autograd as well: nothing to compare" in str(
        ClosedFormGradCAM(net, ["0"]).check(X)
    )


class Bessel(nn.Module):
    def forward(self, x):
        return torch.special.i0(x).tanh()


@pytest.mark.parametrize("method", [ClosedFormGradCAM, ContributionCAM])
def test_a_refusal_shows_the_tape(method):
    net = network(nn.ReLU(), Bessel())
    with pytest.raises(NoClosedFormError, match=r"goes through aten\.i0 of '2'") as raised:
        method(net, ["0"]).explain(X)
    lines = [line.split() for line in str(raised.value.tape).splitlines()]
    assert [line[1:3] for line in lines[:3]] == [["aten.relu", "1"], ["aten.i0", "2"], ["aten.tanh", "2"]]
    assert [line[1] for line in lines if "<--" in line] == ["aten.i0"]
