"""Between images and maps nothing asks what a number is: as on a GPU, with real numbers and on fake CUDA tensors."""

import copy
import traceback

import numpy as np
import pytest
import torch
from cams import METHODS
from cases import FITTED, NETWORKS, count_classes
from heads import HEADS
from meta import NoLooks
from problems import Problem
from reference import relative
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pytorch_grad_cam_pcasvm import (
    ContributionCAM,
    LogRatioTarget,
    NoClosedFormError,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    mean_activations,
    resample_heads,
)
from pytorch_grad_cam_pcasvm.runtime import device
from pytorch_grad_cam_pcasvm.runtime.device import forbid_sync
from pytorch_grad_cam_pcasvm.starts import boundary_head
from pytorch_grad_cam_pcasvm.starts.boundary_head import Boundary

# Every method on every path, and every head on the shortest: of methods those that ask different things of it.
LONG = ("ShapCAM", "ClosedFormScoreCAM")
OF_HEADS = ("ClosedFormGradCAM", "ContributionCAM", "ClosedFormShapleyCAM", "ShapCAM")
CASES = [
    pytest.param(
        backbone,
        head,
        method,
        None,
        marks=() if (backbone, head) == ("pooled", "rbf") and method not in LONG else pytest.mark.slow,
    )
    for backbone in NETWORKS
    if backbone != "several layers"
    for head in FITTED
    for method in METHODS
    if (head == "rbf" or (backbone == "pooled" and method in OF_HEADS))
    and not (backbone == "tiles" and METHODS[method].runs_again)
]
OF_CLASSES = [LogRatioTarget(), LogRatioTarget(1), LogRatioTarget(0, versus="runner-up")]
CASES += [("pooled", "two classes", "ClosedFormGradCAM", OF_CLASSES)]
CASES += [pytest.param("pooled", head, method, OF_CLASSES, marks=pytest.mark.slow) for head in ("rbf", "two classes")
          for method in OF_HEADS if (head, method) != ("two classes", "ClosedFormGradCAM")]  # fmt: skip
CASES += [("pooled", "one class", "ContributionCAM", [LogRatioTarget(sign="-")])]


class _Copies(TorchDispatchMode):
    """Lists what is sent from the host to a device, but for what is kept there."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        kinds = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        if kinds == {"cpu", "cuda"} and "copy" in str(func):
            frames = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
            if device.__file__ not in frames:
                self.seen.append(frames[:4])
        return result


def explained(backbone, head, method, targets):
    """Return what a method explains a network with, images, and their maps: a first call, which checks everything."""
    torch.manual_seed(0)
    network = NETWORKS[backbone]
    rng = np.random.default_rng(0)
    fitted = HEADS[head].make().fit(rng.normal(size=(60, 8)), np.arange(60) % count_classes(head))
    net = PCASVMNet(network.make().eval(), fitted)
    cam = METHODS[method](net, network.layers, network.transform)
    x = torch.randn(2, 3, 8, 8)
    try:
        return cam, x, cam.explain(x, targets)
    except NoClosedFormError as error:
        pytest.skip(error.reason)


@pytest.mark.parametrize(("backbone", "head", "method", "targets"), CASES)
def test_maps_without_looks_are_the_same_and_nothing_stays_on_the_cpu_or_waits_for_cuda(
    backbone, head, method, targets, monkeypatch
):
    cam, x, maps = explained(backbone, head, method, targets)
    with forbid_sync():
        cam.explain(x, targets)  # boundaries are looked for once, in the head alone
        with NoLooks():
            found = cam.explain(x, targets)
    # Of a sum, whose terms may cancel.
    size = maps.maps.abs().amax((0, 2, 3), keepdim=True)
    assert ((found.maps - maps.maps).abs() <= 1e-5 * size).all()
    assert relative(found.values, maps.values) < 1e-6

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False  # which loses the derivatives of views
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # A fake head has no numbers to copy, and the search, which is for real, runs outside of the mode.
    numbers, search = copy.deepcopy(cam.model.head), Boundary._search
    apart = Boundary.components_apart.func
    searched = []

    def known_outside(self):
        with unset_fake_temporarily():
            return apart(self)

    def found_outside(self, target):
        with unset_fake_temporarily():
            searched.append(search(self, target))
            return searched[-1]

    try:
        with fake:
            cam.model.to("cuda")
            monkeypatch.setattr(boundary_head, "on_cpu", lambda head, start: (numbers, numbers.feature_mean))
            monkeypatch.setattr(Boundary, "_search", found_outside)
            monkeypatch.setattr(Boundary, "components_apart", property(known_outside))
            images = torch.empty(x.shape, device="cuda")
            found = cam.explain(images, targets)
            with _Copies() as copies:
                cam.explain(images, targets)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    assert not copies.seen, "a GPU would wait for what is sent to it"
    assert all(not isinstance(point, FakeTensor) and bool(point.isfinite().all()) for point in searched)
    if (backbone, head, method, targets) == ("pooled", "rbf", "ContributionCAM", None):
        assert len(searched) == 3  # of each class
    for name in ("maps", "weights", "values", "nu", "log_scale", "baseline_values", "remainder", "opposite"):
        there, here = (getattr(result, name) for result in (found, maps))
        assert (there is None) == (here is None)
        if here is not None:
            assert (there.device.type, there.shape, there.dtype) == ("cuda", here.shape, here.dtype), name


@pytest.mark.filterwarnings("ignore::pytorch_grad_cam_pcasvm.UnstableComponentWarning")
@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_errors_of_maps_do_not_wait_for_a_device_either(method):
    rng = np.random.default_rng(0)
    rows, labels = rng.normal(size=(60, 8)), np.arange(60) % 3
    torch.manual_seed(0)
    fitted = HEADS["rbf"].make().fit(rows, labels)
    net = PCASVMNet(NETWORKS["pooled"].make().eval(), fitted)
    net.head.resamples = resample_heads(fitted, rows, labels, n=3)
    options = {"baseline": "zero"} if method == "ContributionCAM" else {}
    cam, x = METHODS[method](net, ["4"], **options), torch.randn(2, 3, 8, 8)
    maps = cam.explain(x)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    fake.cache_enabled = False
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with fake:
            net.to("cuda")
            images = torch.empty(x.shape, device="cuda")
            found = cam.explain(images)  # refits are sent once
            with _Copies() as copies:
                cam.explain(images)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
    assert not copies.seen, "a GPU would wait for what is sent to it"
    for name in ("error", "values_error", "resampled", "stability"):
        there, here = getattr(found, name), getattr(maps, name)
        assert (there.device.type, there.shape, there.dtype) == ("cuda", here.shape, here.dtype), name


def test_constants_are_kept_on_a_device_with_each_dtype_but_not_those_of_a_trace():
    made = []

    @device.kept_on_devices
    def count(number):
        made.append(number)
        return np.arange(number) / 2 if number < 5 else np.arange(number)

    x = torch.zeros(2, dtype=torch.float32)
    with torch.inference_mode():
        first = count(3, like=x)
    assert not first.is_inference()
    assert first is count(3, like=x)
    assert first.tolist() == [0, 0.5, 1]
    assert (first.dtype, count(3, like=x.double()).dtype, count(5, like=x).dtype) == (
        torch.float32, torch.float64, torch.int64
    )  # fmt: skip
    assert made == [3, 3, 5]
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = torch.zeros(2, device="cuda")
        assert count(4, like=there).device.type == "cuda"
        count(4, like=there)
    assert made == [3, 3, 5, 4, 4]
    for number in range(100, 200):
        count(number, like=x)
    count(3, like=x)
    assert made[-1] == 3


def test_a_look_is_seen():
    with pytest.raises(AssertionError, match="it looks"), NoLooks():
        bool(torch.ones(1).any())


class _Count(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _write(problem, cam):
    with torch.no_grad():
        problem.backbone.classifier[0].weight.mul_(1.1)


def _write_data(problem, cam):
    problem.backbone.classifier[0].weight.data.mul_(1.1)


def _exchange(problem, cam):
    problem.backbone.classifier[1] = nn.Sigmoid()


def _give_means(problem, cam):
    cam.mean = mean_activations(problem.net, [problem.x], "features.3", progress=False)


@pytest.mark.parametrize("change", [None, _write, _exchange, _give_means, _write_data])
def test_starts_that_were_found_are_kept_on_a_device_until_the_network_changes(change):
    """Nothing is looked at, so that a change which cannot be known without gives maps that are refused."""
    problem = Problem(activation="sigmoid", components=3, n=2)  # its own network, which is changed
    mean = mean_activations(problem.net, [problem.x + 0.1], "features.3", progress=False)
    cam = ContributionCAM(problem.net, ["features.3"], mean=mean)
    targets = [PCATarget(0), SVMTarget("bee")]
    with forbid_sync():
        with _Count() as first:
            cam.explain(problem.x, targets)
        if change is not None:
            change(problem, cam)
        with _Count() as second:
            found = cam.explain(problem.x, targets)
    assert (second.count < first.count / 10) == (change in (None, _write_data))
    expected = ContributionCAM(problem.net, ["features.3"], mean=cam.mean).explain(problem.x, targets)
    if change is _write_data:
        with pytest.raises(ValueError, match="overwritten through"):
            found.numpy()
    else:
        # Starts are found again up to the tolerance of the search.
        assert relative(found.maps, expected.maps) < 1e-6
        assert relative(found.values, expected.values) < 1e-10


def test_boundaries_are_looked_for_on_the_cpu_with_the_numbers_of_the_head():
    """A head on a device is copied, without what is no number; the search asks nothing of the device."""
    cam, _, _ = explained("pooled", "rbf", "ContributionCAM", None)
    head = cam.model.head
    head.register_forward_hook(lambda *_: None)
    here, start = boundary_head.on_cpu(head, head.feature_mean)
    assert here is head
    assert start is head.feature_mean
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    there = copy.deepcopy(head)
    with fake:
        for module in there.modules():
            for kept in (module._buffers, vars(module)):
                kept.update({name: value.to("cuda") for name, value in kept.items() if isinstance(value, torch.Tensor)})
        there.stages[-1].voting = there.voting.move_tensors(lambda tensor: tensor.to("cuda"))
        there.name_classes(there.classes_)
        copied, start = boundary_head.on_cpu(there, there.feature_mean)
    assert {tensor.device.type for tensor in there.buffers()} == {"cuda"}
    constants = [value for module in copied.modules() for value in vars(module).values()]
    tensors = [value for value in (start, *copied.buffers(), *constants) if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert (there.vote.matrix.device.type, copied.vote.matrix.device.type) == ("cuda", "cpu")
    assert copied.vote is copied.voting is copied.stages[-1].voting
    assert [t.shape for t in copied.buffers()] == [t.shape for t in there.buffers()]
    assert copied._fit is there._fit
    assert copied.training_set is there.training_set
    assert copied._forward_hooks is there._forward_hooks
