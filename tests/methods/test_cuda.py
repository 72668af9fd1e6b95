"""CUDA: the same numbers as on the CPU, and nothing that waits for the device. Skipped without CUDA.

What can be seen without a device (nothing is sent there, nothing asked of it) is tested in test_base.py.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from cams import METHODS
from heads import HEADS
from problems import Problem
from reference import relative
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    PCASVMNet,
    PCATarget,
    SVMTarget,
    TiledNet,
    evaluation,
    extract_features,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def full_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


# Zeros are a start that every layer has.
OPTIONS = {"ContributionCAM": {"baseline": "zero"}}


def pair(dtype=torch.float64, **options):
    return Problem(dtype=dtype, **options), Problem(dtype=dtype, device="cuda", **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly", "sigmoid"])
def test_cuda_equals_the_cpu(kernel, dtype, tolerance):
    cpu, cuda = pair(dtype, kernel=kernel, classes=4)
    cuda.__dict__["head"] = cpu.head  # one fit for both
    on_cpu, on_cuda = (ClosedFormGradCAM(p.net, [p.target_layer]) for p in (cpu, cuda))
    expected, actual = on_cpu.explain(cpu.x), on_cuda.explain(cuda.x)
    assert actual.maps.device.type == "cuda"
    for field in ("maps", "weights", "values", "nu"):
        assert relative(getattr(actual, field), getattr(expected, field)) < tolerance
    assert relative(on_cuda.jacobians(cuda.x).margins, on_cpu.jacobians(cpu.x).margins) < tolerance
    assert relative(on_cuda(cuda.x, PCATarget(0)), on_cpu(cpu.x, PCATarget(0))) < max(tolerance, 1e-6)
    assert cuda.net.predict(cuda.x).tolist() == cpu.net.predict(cpu.x).tolist()


ON_DEVICES = [
    "bare LinearSVC()",
    "bare SVC(decision_function_shape='ovo', degree=2, kernel='poly')",
    "one class",
    "regressor",
    "Nystroem(n_components=20, random_state=0), LinearSVC",
    "one neighbour",
    "bare QuadraticDiscriminantAnalysis(reg_param=0.1)",
    "perceptron",
    "several, OneVsRest SVC",
    "calibrated, isotonic ensemble",
    "forest",
]


@pytest.mark.parametrize("layer", ["features.3", "features.0"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_maps_of_the_cpu(name, layer):
    cpu, cuda = pair(components=3)
    cuda.__dict__["head"] = cpu.head
    expected, actual = (METHODS[name](p.net, [layer]).explain(p.x) for p in (cpu, cuda))
    assert actual.maps.device.type == "cuda"
    for field in ("maps", "values", "nu"):
        assert relative(getattr(actual, field), getattr(expected, field)) < 1e-8, field


@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
@pytest.mark.parametrize("head", ON_DEVICES)
def test_every_head_gives_the_maps_of_the_cpu(head, method):
    cpu, cuda = pair()
    parts = HEADS[head].parts if head in HEADS else [RandomForestClassifier(5, max_depth=3, random_state=0)]
    behind = [clone(part) for part in parts if type(part) not in (PCA, StandardScaler, MinMaxScaler)]
    fitted = make_pipeline(StandardScaler(), PCA(3), *behind)
    features = np.random.default_rng(0).normal(size=(60, 9))
    cpu.__dict__["head"] = cuda.__dict__["head"] = fitted.fit(features, np.arange(60) % 3)
    options = OPTIONS.get(method, {})
    if head in ("one neighbour", "forest") and not options:
        pytest.skip("has no gradient")
    expected, actual = (METHODS[method](p.net, ["features"], **options).explain(p.x) for p in (cpu, cuda))
    assert relative(actual.maps, expected.maps) < 1e-7
    assert relative(actual.values, expected.values) < 1e-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_half_precision(method, dtype):
    problem = Problem(device="cuda", dtype=torch.float32)
    cam = METHODS[method](problem.net, [problem.target_layer], **OPTIONS.get(method, {}))
    expected = cam.explain(problem.x, PCATarget(0))
    problem.backbone.to(dtype)
    actual = cam.explain(problem.x.to(dtype), PCATarget(0))
    assert actual.maps.dtype == torch.float32
    assert relative(actual.maps, expected.maps) < 0.1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("classes", [2, 4])
def test_nothing_waits_for_the_device(classes, method):
    problem = Problem(device="cuda", dtype=torch.float32, classes=classes)
    cam = METHODS[method](problem.net, [problem.target_layer])
    targets = [SVMTarget("bee"), PCATarget(2, "-"), SVMTarget(versus="runner-up"), PCATarget(0)]
    cam.explain(problem.x)  # the first call checks the path, finds starts, and sends constants
    cam.explain(problem.x, targets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        maps = cam.explain(problem.x)
        cam.explain(problem.x, targets)
        maps.positive(size=(12, 12))
        maps.negative(scale="target")
        cam.jacobians(problem.x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_nothing_waits_for_the_device_on_tiles(method):
    problem = Problem(device="cuda", dtype=torch.float32)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 9, 3, 1, 1), torch.nn.ReLU()).eval().cuda()
    net = PCASVMNet(TiledNet(net, "1", "mean", tiles=(3, 2), size=8, block=4), problem.head).eval()
    cam, x = METHODS[method](net, ["net.1"]), torch.randn(2, 3, *net.backbone.canvas, device="cuda")
    cam.explain(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        cam.explain(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_autocast_on_cuda():
    problem = Problem(device="cuda", dtype=torch.float32)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    expected = cam.explain(problem.x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        actual = cam.explain(problem.x)
    assert actual.weights.dtype == torch.float32
    assert relative(actual.maps[:, :4], expected.maps[:, :4]) < 0.1


def test_channels_last():
    cpu, cuda = pair()
    cuda.__dict__["head"] = cpu.head
    cuda.backbone.to(memory_format=torch.channels_last)
    actual = ClosedFormGradCAM(cuda.net, [cuda.target_layer]).explain(cuda.x.to(memory_format=torch.channels_last))
    assert relative(actual.maps, ClosedFormGradCAM(cpu.net, [cpu.target_layer]).explain(cpu.x).maps) < 1e-10


def test_a_bfloat16_backbone():
    problem = Problem(device="cuda", dtype=torch.float32)
    expected = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x)
    problem.backbone.bfloat16()
    actual = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(problem.x.bfloat16())
    assert actual.weights.dtype == torch.float32
    assert relative(actual.maps[:, :4], expected.maps[:, :4]) < 0.1


@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_on_a_stream_of_its_own(method):
    problem = Problem(device="cuda")
    cam = METHODS[method](problem.net, [problem.target_layer], **OPTIONS.get(method, {}))
    expected = cam.explain(problem.x).maps
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        actual = cam.explain(problem.x).maps
    stream.synchronize()
    assert relative(actual, expected) < 1e-12


@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_on_two_streams_at_once(method):
    """Work that is still queued on one stream is not overwritten by that of another."""
    problem = Problem(device="cuda")
    cam = METHODS[method](problem.net, [problem.target_layer], **OPTIONS.get(method, {}))
    inputs = [problem.x, problem.x.flip(0)]
    expected = [cam.explain(x).maps for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    actual = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                actual.append(cam.explain(x).maps)
    torch.cuda.synchronize()
    for number, maps in enumerate(actual):
        assert relative(maps, expected[number % 2]) < 1e-12


def test_in_threads_with_a_stream_each():
    problems = [Problem(device="cuda", seed=seed) for seed in range(3)]
    cams = [ClosedFormGradCAM(problem.net, [problem.target_layer]) for problem in problems]
    expected = [cam.explain(problem.x).maps for cam, problem in zip(cams, problems, strict=True)]
    torch.cuda.synchronize()

    def explain(cam, problem):
        with torch.cuda.stream(torch.cuda.Stream()):
            maps = [cam.explain(problem.x).maps for _ in range(5)][-1]
            torch.cuda.current_stream().synchronize()
        return maps

    with ThreadPoolExecutor(len(cams)) as executor:
        actual = list(executor.map(explain, cams, problems))
    for one, other in zip(actual, expected, strict=True):
        assert relative(one, other) < 1e-12


def test_in_a_captured_graph():
    problem = Problem(device="cuda")
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    held = problem.x.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            cam.explain(held)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        maps = cam.explain(held)
        raises = maps.positive()
    held.copy_(problem.x.flip(0))
    graph.replay()
    expected = cam.explain(problem.x.flip(0))
    assert relative(maps.maps, expected.maps) < 1e-10
    assert relative(raises, expected.positive()) < 1e-10


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
def test_on_a_second_device():
    cpu, cuda = Problem(), Problem(device="cuda:1")
    cuda.__dict__["head"] = cpu.head
    cam = ClosedFormGradCAM(cuda.net, [cuda.target_layer])
    actual = cam.explain(cpu.x)
    assert actual.maps.device == torch.device("cuda", 1)
    assert relative(actual.maps, ClosedFormGradCAM(cpu.net, [cpu.target_layer]).explain(cpu.x).maps) < 1e-10
    assert cam.jacobians(cuda.x).margins.device == torch.device("cuda", 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second CUDA device")
@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_on_two_devices_in_turn(method):
    """One network is moved from device to device; and one for each device, whichever is the current one."""
    cpu, *both = Problem(), Problem(device="cuda:0"), Problem(device="cuda:1")
    make, options = METHODS[method], OPTIONS.get(method, {})
    expected = make(cpu.net, [cpu.target_layer], **options).explain(cpu.x).maps
    for problem in both:
        problem.__dict__["head"] = cpu.head
    cams = [make(problem.net, [problem.target_layer], **options) for problem in both]
    for current in (0, 1):
        with torch.cuda.device(current):
            for number, (cam, problem) in enumerate(zip(cams, both, strict=True)):
                maps = cam.explain(problem.x).maps
                assert maps.device == torch.device("cuda", number)
                assert relative(maps, expected) < 1e-10
    for device in ("cuda:1", "cuda:0", "cpu"):
        cams[0].model.to(device)
        maps = cams[0].explain(cpu.x).maps
        assert maps.device == torch.device(device)
        assert relative(maps, expected) < 1e-10


def test_a_compiled_net():
    problem = Problem(device="cuda")
    torch._dynamo.reset()
    scores = torch.compile(problem.net, backend="aot_eager")(problem.x)
    assert relative(scores, problem.net(problem.x)) < 1e-10


def test_a_network_moved_after_it_was_explained():
    problem = Problem(dtype=torch.float32)
    cam = ClosedFormGradCAM(problem.net, [problem.target_layer])
    expected = cam.explain(problem.x).maps
    problem.net.cuda()
    actual = cam.explain(problem.x)  # the input is moved to the network
    assert actual.maps.device.type == "cuda"
    assert relative(actual.maps, expected) < 1e-4


def test_values_that_are_not_finite_are_found_when_numpy_is_asked_for():
    problem = Problem(device="cuda", dtype=torch.float32)
    x = problem.x.clone()
    x[0, 0, 0, 0] = torch.nan
    maps = ClosedFormGradCAM(problem.net, [problem.target_layer]).explain(x)
    with pytest.raises(ValueError, match="not finite"):
        maps.numpy()


def test_features_stay_on_the_device():
    problem = Problem(device="cuda", dtype=torch.float32)
    features, labels = extract_features(
        problem.backbone, [(problem.x, torch.arange(5))], "classifier.4", as_numpy=False, progress=False
    )
    assert features.device.type == labels.device.type == "cuda"


def test_an_atlas_is_built_on_a_device(tmp_path):
    atlas = pytest.importorskip("pytorch_grad_cam_pcasvm.atlas")
    cpu, cuda = pair(torch.float32, n=40)
    cuda.__dict__["head"] = cpu.head
    stores = [
        atlas.build(p.net, list(cpu.x), [p.target_layer], tmp_path / p.device, progress=False) for p in (cpu, cuda)
    ]
    assert relative(torch.from_numpy(stores[1].components), torch.from_numpy(stores[0].components)) < 1e-4
    assert relative(stores[1].maps(slice(None)).maps, stores[0].maps(slice(None)).maps) < 2e-3
    again = atlas.build(cuda.net, list(cpu.x), [cuda.target_layer], tmp_path / "again", batch_size=7, progress=False)
    assert (again.components == stores[1].components).all()


@pytest.mark.parametrize("check", ["faithfulness", "localisation", "sensitivity", "completeness", "stability"])
def test_evaluations_give_the_numbers_of_the_cpu(check):
    cpu, cuda = pair()
    cuda.__dict__["head"] = cpu.head
    labels = cpu.net.predict(cpu.x).tolist()
    options = {"masks": [[0, 0, 3, 3]] * len(labels)} if check == "localisation" else {}
    one, two = (
        getattr(evaluation, check)(
            p.net,
            [*zip(p.x.cpu(), labels, strict=True)],
            [p.target_layer],
            [ContributionCAM],
            progress=False,
            **options,
        )
        for p in (cpu, cuda)
    )
    for row in one.rows:
        if not row.measure.startswith("layers"):  # whose random weights come from the device's own generator
            found = two[row.method, row.measure, row.against].mean
            # Rounding decides which of two equal pixels comes first where they are ranked.
            ranked = check in ("faithfulness", "stability")
            tolerance = row.estimate.standard_error / 4 if ranked else 1e-6
            assert found == pytest.approx(row.estimate.mean, abs=tolerance, nan_ok=True), row
