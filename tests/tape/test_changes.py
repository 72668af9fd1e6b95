"""A network is changed at random, by every route there is, and the next map is that of what runs now: 500 times."""

import numpy as np
import pytest
import torch
from reference import path_by_autograd, relative
from torch import nn
from torch.nn.utils import parametrize
from torchvision.ops import FrozenBatchNorm2d

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, PCASVMNet

CHANGES = 500
LAYERS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.SiLU, lambda: nn.ReLU(inplace=True), nn.Identity, nn.Dropout)


class Mixed(nn.Module):
    """A forward that looks at everything a module may hold, and writes some of it."""

    def __init__(self, width):
        super().__init__()
        self.stem, self.target = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3)
        self.norm, self.frozen = nn.BatchNorm2d(5), FrozenBatchNorm2d(5)
        self.blocks = nn.ModuleList([nn.Conv2d(5, 5, 1), nn.Sequential(nn.Conv2d(5, 5, 1), nn.ReLU())])
        self.pool = nn.AdaptiveAvgPool2d(3)
        self.dense, self.act, self.last = nn.Linear(45, width), nn.ReLU(), nn.Linear(width, 7)
        self.register_buffer("shift", torch.randn(7))
        self.scaling, self.order, self.gain, self.squared = {"a": 1.0, "b": [0.5]}, [0, 1], 2.0, False
        self.seen, self.steps = [], 0

    def forward(self, x):
        x = self.frozen(self.norm(self.target(self.stem(x))))
        for index in self.order:
            x = x + self.scaling["a"] * self.blocks[index](x)
        self.steps += 1
        self.seen = [*self.seen[-2:], x]
        x = self.act(self.dense(torch.flatten(self.pool(x), 1)))
        x = self.last(x * self.gain) + self.shift * self.scaling["b"][0]
        return x * x if self.squared else x


class Half(nn.Module):
    def forward(self, weight):
        return weight / 2


def hook(rng):
    functions = (
        lambda y: y.flip(1),
        lambda y: y - y.mean(),
        lambda y: y * 1.5,
        lambda y: y.tanh(),
        lambda y: y.clone().mul_(0.7),  # written over itself, autograd would miss what Tanh gave
        lambda y: y + 1,
        lambda y: y.roll(1, 1),
    )
    return functions[rng.integers(len(functions))]


def change(net, rng, handles):
    """Change something; return what it was."""
    weights = [module for module in net.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    chosen = weights[rng.integers(len(weights))]
    value = float(rng.normal())
    route = rng.choice([
        *("data column", "numpy", "no_grad", "copy_", "replace", "load_state_dict", "SGD", "fused Adam", "set_"),
        *("buffer", "frozen", "running", "hook", "pre-hook", "unhook", "flag", "number", "dict", "nested", "order"),
        *("layer", "block", "parametrize", "forward", "train"),
    ])
    weight = chosen.weight
    match route:
        case "data column":
            weight.data[:, rng.integers(weight.shape[1])] = value
        case "numpy":
            weight.detach().numpy()[rng.integers(len(weight))] *= -1
        case "no_grad":
            with torch.no_grad():
                weight.mul_(1 + 0.1 * value)
        case "copy_":
            weight.data.copy_(weight.data.roll(1, 0))
        case "replace" if not parametrize.is_parametrized(chosen):
            chosen.weight = nn.Parameter(weight.detach() + 0.1 * torch.randn_like(weight))
        case "load_state_dict":
            state = {name: tensor * (1 + 0.01 * value) for name, tensor in net.state_dict().items()}
            net.load_state_dict({name: t.abs() if "running_var" in name else t for name, t in state.items()})
        case "SGD" | "fused Adam":
            trained = [p for module in (net.target, net.last) for p in module.parameters()]
            kind = torch.optim.SGD(trained, 1e-4) if route == "SGD" else torch.optim.Adam(trained, 1e-3, fused=True)
            for parameter in trained:
                parameter.grad = torch.randn_like(parameter)
            kind.step()
            net.zero_grad()
        case "set_" if not parametrize.is_parametrized(chosen):
            weight.data = weight.data.clone() * 0.9
        case "buffer":
            net.shift = net.shift * value
        case "frozen":
            net.frozen.load_state_dict({name: t.abs() + 0.1 for name, t in net.frozen.state_dict().items()})
        case "running":
            net.norm.running_var.mul_(0.5 + abs(value))
        case "hook":
            function = hook(rng)
            handles.append(chosen.register_forward_hook(lambda module, args, output: function(output)))
        case "pre-hook":
            function = hook(rng)
            handles.append(net.act.register_forward_pre_hook(lambda module, args: (function(args[0]),)))
        case "unhook":
            for handle in handles:
                handle.remove()
            handles.clear()
        case "flag":
            net.squared = not net.squared
        case "number":
            net.gain = value
        case "dict":
            net.scaling["a"] = value
        case "nested":
            net.scaling["b"][0] = value
        case "order":
            net.order.reverse() if value > 0 else net.order.append(int(rng.integers(2)))
            del net.order[4:]
        case "layer":
            net.act = LAYERS[rng.integers(len(LAYERS))]()
        case "block":
            net.blocks[rng.integers(2)] = nn.Conv2d(5, 5, 1).double()
        case "parametrize" if not parametrize.is_parametrized(chosen):
            parametrize.register_parametrization(chosen, "weight", Half())
        case "forward":
            net.pool.forward = [lambda x: x[..., :3, :3], lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 3, 3)][
                rng.integers(2)
            ]
        case "train":
            net.train(value > 0)
    return route


@pytest.mark.slow
def test_the_next_map_is_that_of_what_runs_now():
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    routes = set()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    for index in range(CHANGES):
        if index % 50 == 0:  # what grew without bounds, or died, begins anew; one net has a weight of a million numbers
            net = Mixed(24_000 if index == 200 else 60).double()
            cam, handles = ClosedFormGradCAM(net, [net.target]), []
        route = change(net, rng, handles)
        routes.add(str(route))
        steps, seeds = net.steps, torch.eye(7, dtype=torch.float64)[:2].unsqueeze(1).expand(2, 2, 7)
        maps = cam.explain(x, [lambda row: row[0], lambda row: row[1]])
        assert net.steps == steps + 1
        assert not net.seen[-1].requires_grad
        training = [module.training for module in net.modules()]
        activations, expected = path_by_autograd(net.eval(), None, "target", x, seeds)
        for module, flag in zip(net.modules(), training, strict=True):
            module.training = flag
        if not expected.any():
            assert not maps.weights.any(), route
            continue
        weights = expected.flatten(3).sum(-1).transpose(0, 1)
        assert relative(maps.weights, weights) < 1e-9, (index, route)
        assert relative(maps.maps, torch.einsum("nkt,nthw->nkhw", weights, activations)) < 1e-9, (index, route)
    assert len(routes) == 25


def test_a_backbone_and_a_layer_replaced_later():
    from problems import Problem

    problem, other = Problem(), Problem(seed=5)
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4").eval()
    cam = ClosedFormGradCAM(net, ["features.3"])
    cam.explain(problem.x)
    net.backbone = other.backbone
    expected = ClosedFormGradCAM(PCASVMNet(other.backbone, problem.head, "classifier.4"), [other.target_layer])
    assert relative(cam.explain(problem.x).maps, expected.explain(problem.x).maps) == 0
    net.layer = "classifier.3"
    expected = ClosedFormGradCAM(PCASVMNet(other.backbone, problem.head, "classifier.3"), [other.target_layer])
    assert relative(cam.explain(problem.x).maps, expected.explain(problem.x).maps) == 0
    net.layer = other.backbone.classifier[4]
    expected = ClosedFormGradCAM(PCASVMNet(other.backbone, problem.head, "classifier.4"), [other.target_layer])
    assert relative(cam.explain(problem.x).maps, expected.explain(problem.x).maps) == 0
