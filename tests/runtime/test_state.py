"""Clean hands: the user's flags, gradients, hooks and modules are left as they were."""

import gc
import threading
import warnings

import pytest
import torch
from problems import Backbone, Problem
from reference import relative
from torch import nn

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ClosedFormShapleyCAM, ContributionCAM, PCASVMNet, PCATarget
from pytorch_grad_cam_pcasvm.runtime.rollback import hooked


def snapshot(net):
    return {
        "training": [module.training for module in net.modules()],
        "grads": [None if p.grad is None else (id(p.grad), p.grad.clone().tolist()) for p in net.parameters()],
        "requires_grad": [p.requires_grad for p in net.parameters()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in net.modules()],
        "modules": [id(module) for module in net.modules()],
        "attributes": [sorted(vars(module)) for module in net.modules()],
        "state": [tensor.clone().tolist() for tensor in net.state_dict().values()],
    }


@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
@pytest.mark.parametrize("mode", ["train", "eval", "mixed"])
def test_nothing_of_the_users_is_changed(mode, jacobian):
    problem = Problem(seed=2)
    net = PCASVMNet(problem.backbone, problem.head, layer="classifier.4").train(mode != "eval")
    if mode == "mixed":
        problem.backbone.features.eval()
        problem.backbone.features[0].weight.requires_grad_(False)
    loss = problem.backbone(problem.x).square().sum()
    loss.backward()
    before = snapshot(net)
    with ClosedFormGradCAM(net, [problem.target_layer], jacobian=jacobian) as cam:
        cam.explain(problem.x)
        cam(problem.x, [PCATarget(0)] * 5)
        cam(problem.x, None, aug_smooth=True)
        cam.jacobians(problem.x)
        with pytest.raises(ValueError, match="components"):
            cam(problem.x, [PCATarget(9)] * 5)
    net.predict(problem.x)
    assert snapshot(net) == before


STATES = {
    "in training": lambda problem: problem.net.train(),
    "with a dropout put in": lambda problem: problem.backbone.classifier.__setitem__(2, nn.Dropout(0.9).train()),
    "frozen": lambda problem: problem.net.requires_grad_(False),
    "with its channels last": lambda problem: problem.net.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
@pytest.mark.parametrize("state", STATES)
def test_a_network_in_another_state_has_the_same_maps_and_stays_in_it(state, jacobian):
    problem = Problem()
    used = ClosedFormGradCAM(problem.net, [problem.target_layer], jacobian=jacobian)
    expected = used.explain(problem.x).maps
    STATES[state](problem)
    before, x = [module.training for module in problem.net.modules()], problem.x
    x = x.to(memory_format=torch.channels_last) if state == "with its channels last" else x
    for cam in (used, ClosedFormGradCAM(problem.net, [problem.target_layer], jacobian=jacobian)):
        assert relative(cam.explain(x).maps, expected) < 1e-12
    assert [module.training for module in problem.net.modules()] == before


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_gradient_mode_around_the_call(context):
    problem = Problem()
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    for jacobian in ("closed_form", "autograd"):
        with context():
            x = problem.x.clone()
            actual = ClosedFormGradCAM(problem.net, [problem.target_layer], jacobian=jacobian).explain(x)
            assert torch.is_grad_enabled() is (context is torch.enable_grad)
        assert relative(actual.maps, expected.maps) < 1e-12


def test_inputs_that_require_gradients():
    problem = Problem()
    x = problem.x.clone().requires_grad_()
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(x)
    assert not maps.maps.requires_grad
    assert x.grad is None


def test_bfloat16_backbone():
    exact, half = Problem(), Problem()
    half.net.to(torch.bfloat16)
    assert next(half.backbone.parameters()).dtype == torch.bfloat16
    cam = ClosedFormGradCAM(half.net, [half.target_layer])
    x = exact.x.to(torch.bfloat16)
    maps = cam.explain(x)
    expected = ClosedFormGradCAM(exact.net, [exact.target_layer]).explain(exact.x)
    assert maps.maps.dtype == torch.float32
    assert relative(maps.maps[:, :4], expected.maps[:, :4]) < 0.1
    assert cam(x, [PCATarget(0)] * 5).dtype == "float32"


def test_autocast_of_the_user():
    problem, exact = Problem(dtype=torch.float32), Problem()
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    expected = ClosedFormGradCAM(exact.net, [exact.target_layer]).explain(exact.x)
    parameter = problem.backbone.classifier[0].weight
    with torch.autocast("cpu", dtype=torch.bfloat16):
        maps = cam.explain(problem.x)
        # A weight cached in half precision without a graph would cut off the user's own training step.
        problem.backbone(problem.x).float().square().sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.any()
    assert maps.weights.dtype == torch.float32
    assert maps.maps.dtype == torch.float32
    assert maps.output.dtype == torch.float64
    assert relative(maps.maps[:, :4], expected.maps[:, :4]) < 0.1


def test_a_hook_may_explain_another_network():
    problem, other = Problem(), Problem(seed=3)
    x = other.x
    expected = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
    for method in (ClosedFormGradCAM, ContributionCAM, ClosedFormShapleyCAM):
        inner = method(other.net, [other.target_layer])
        handle = problem.backbone.classifier[0].register_forward_hook(lambda *_, cam=inner: cam.explain(x) and None)
        maps = ContributionCAM(problem.net, [problem.target_layer]).explain(problem.x).maps
        assert relative(maps, expected) == 0
        handle.remove()


def test_the_network_may_change_between_calls():
    problem = Problem()
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    cam.explain(problem.x)
    problem.backbone.classifier[1] = nn.Tanh()
    problem.backbone.classifier[0].weight.data *= 1.5
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    assert relative(cam.explain(problem.x).maps, expected.maps) == 0


def live_tensors():
    gc.collect()
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("jacobian", ["closed_form", "autograd"])
@pytest.mark.parametrize("calls", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_calls_leak_nothing(jacobian, calls):
    problem = Problem(n=1)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer], jacobian=jacobian)
    for _ in range(3):
        cam.explain(problem.x)
    before = live_tensors()
    for _ in range(calls):
        cam.explain(problem.x)
    assert live_tensors() <= before


@pytest.mark.slow
def test_two_threads_explain_with_one_network():
    problems = [Problem(seed=seed) for seed in range(2)]
    net = problems[0].net.train()
    cam = ClosedFormGradCAM(net, [problems[0].target_layer])
    other = ClosedFormGradCAM(net, [problems[0].target_layer], jacobian="autograd")
    inputs = [problem.x for problem in problems]
    expected = [cam.explain(x).maps for x in inputs]
    errors = []

    def work(index):
        for _ in range(30):
            for method in (cam, other):
                if relative(method.explain(inputs[index]).maps, expected[index]) > 1e-12:
                    errors.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert net.training


def test_a_block_put_in_between_two_calls_is_explained():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.mean((2, 3))

    torch.manual_seed(0)
    backbone, x = Listed().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    cam = ClosedFormGradCAM(backbone, [backbone.blocks[0]])
    cam.explain(x)
    backbone.blocks[1] = nn.Conv2d(4, 4, 3).double()
    expected = ClosedFormGradCAM(backbone, [backbone.blocks[0]]).explain(x)
    assert relative(cam.explain(x).maps, expected.maps) == 0


def test_a_parametrised_weight_is_left_alone():
    problem = Problem()
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    cam.explain(problem.x)
    nn.utils.parametrizations.spectral_norm(problem.backbone.features[0])
    problem.net.train()
    before = {name: value.clone() for name, value in problem.backbone.state_dict().items()}
    cam.explain(problem.x)
    assert all(torch.equal(value, before[name]) for name, value in problem.backbone.state_dict().items())


class Keeper(Backbone):
    """A forward that writes into its module, its lists and its input."""

    def __init__(self):
        super().__init__()
        self.seen, self.by_size, self.steps = [], {"last": None}, 0
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        x -= x.mean((1, 2, 3), keepdim=True)
        features = self.features(x)
        self.seen.append(features)
        self.by_size[len(x)] = self.by_size["last"] = features
        self.steps += 1
        self.count += 1
        return self.classifier(self.flatten(features))


@pytest.mark.parametrize("jacobian", ["closed_form", "auto", "autograd"])
def test_nothing_of_ours_is_left_in_what_a_forward_writes(jacobian):
    torch.manual_seed(0)
    keeper = Keeper().double().eval()
    if jacobian == "auto":
        keeper.classifier[2] = Normalised()
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    x, seen = images.clone(), keeper.seen
    cam = ClosedFormGradCAM(keeper, [keeper.features[-1]], jacobian=jacobian)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        maps = cam.explain(x)
    state = torch.get_rng_state()
    assert keeper.seen is seen
    assert [len(f) for f in keeper.seen] == [4]
    assert list(keeper.by_size) == ["last", 4]
    assert keeper.steps == 1
    assert keeper.count == 1
    if jacobian == "closed_form":
        assert not keeper.seen[0].requires_grad
    # As after one pass of the network's own: it takes the mean off once.
    assert relative(x, images - images.mean((1, 2, 3), keepdim=True)) < 1e-12
    with torch.no_grad():
        assert relative(maps.output, keeper(images.clone())) < 1e-12
    assert torch.equal(torch.get_rng_state(), state)


class Normalised(nn.Module):
    def forward(self, x):
        return nn.functional.normalize(x)


def test_a_forward_that_counts_its_calls_costs_no_more():
    torch.manual_seed(0)
    keeper, passes = Keeper().double().eval(), []
    keeper.register_forward_hook(lambda module, args, output: passes.append(len(output)))
    cam = ClosedFormGradCAM(keeper, [keeper.features[-1]])
    for _ in range(3):
        cam.explain(torch.randn(2, 3, 12, 12, dtype=torch.float64))
    assert passes == [2, 2, 2]


def test_a_hook_of_one_call_takes_both_forms_of_torch():
    # While another thread registers it, a pass may find it in one of torch's tables and not in the other.
    net, seen = nn.Sequential(nn.Linear(3, 2)), []
    x, outputs = torch.ones(1, 3), []
    with hooked() as hooks:
        hooks.after_call(net, "0", lambda name, output: seen.append((name, output)))
        net[0]._forward_hooks_with_kwargs.clear()
        other = threading.Thread(target=lambda: outputs.append(net(x)))
        other.start()
        other.join()
        assert len(outputs) == 1
        assert not seen
        net(x)
    assert [name for name, _ in seen] == ["0"]
    assert torch.equal(seen[0][1], outputs[0])
