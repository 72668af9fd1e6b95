"""Programs: the same numbers as ``explain`` for other images and any number of them, or a refusal by name."""

import shutil
import threading

import numpy as np
import pytest
import torch
from cams import METHODS
from cases import EXPORTED, NETWORKS, convolutions, count_classes
from heads import HEADS
from reference import relative
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from torch import nn

from pytorch_grad_cam_pcasvm import (
    AutogradFallbackWarning,
    ClosedFormGradCAM,
    HotellingTarget,
    LogRatioTarget,
    NoClosedFormError,
    NoProgramError,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    SVMTarget,
    export,
    extract_features,
    mean_activations,
    methods,
)
from pytorch_grad_cam_pcasvm.studio.export import graph
from pytorch_grad_cam_pcasvm.studio.export.graph import erfcx
from pytorch_grad_cam_pcasvm.studio.export.outputs import compared, name_outputs

TARGETS = {
    "default": None,
    "classes": [SVMTarget(1), SVMTarget(0, versus=2), SVMTarget(versus="runner-up"), SVMTarget(0, versus="others")],
    "log-ratios": [LogRatioTarget(), LogRatioTarget(1, versus=0)],
    "components": [HotellingTarget(), ResidualTarget(), PCATarget(2, sign="-")],
}
# A norm has no rule of relevance; and what it pulls back, times what it was given, sums up to rounding.
BEFORE_A_NORM = ("RelevanceCAM", "ClosedFormHiResCAM", "ClosedFormXGradCAM")
# Every method on every path, every head, every kind of target.
CASES = [
    (backbone, "rbf", method, "default")
    for backbone in NETWORKS
    if NETWORKS[backbone].exported
    for method in METHODS
    if not METHODS[method].runs_again
    if method == "ContributionCAM" or backbone != "several layers"
    if backbone != "tokens" or method not in BEFORE_A_NORM
]
CASES += [
    ("dense", head, method, "default")
    for head in EXPORTED
    if head != "rbf"
    for method in ("ClosedFormGradCAM", "ContributionCAM", "ClosedFormShapleyCAM")
]
CASES += [
    (backbone, "rbf", method, targets)
    for backbone in ("pooled", "dense")
    for targets in TARGETS
    if targets != "default"
    for method in ("ClosedFormGradCAM", "ContributionCAM")
]


def made(backbone, head, method, targets):
    """Return a method, images that the head was not fitted on, and targets."""
    torch.manual_seed(0)
    network, layers = NETWORKS[backbone], NETWORKS[backbone].layers
    net, x = network.make().eval(), torch.randn(60, 3, 8, 8)
    rows = extract_features(net, [x], progress=False)[0]
    rows = rows + np.random.default_rng(0).normal(size=rows.shape) * rows.std()
    labels = rows.sum(1).argsort().argsort() * count_classes(head) // 60
    net = PCASVMNet(net, HEADS[head].make().fit(rows, labels))
    options = {}
    if method in ("ContributionCAM", "ShapCAM") and backbone != "pooled":
        options["mean"] = mean_activations(net, [x], layers if len(layers) > 1 else layers[0], progress=False)
        if head == "one vs rest":  # one of its classes is nowhere undecided behind a ReLU
            options["baseline"] = "mean"
    cam = METHODS[method](net.eval(), layers, network.transform, **options)
    return cam, torch.randn(4, 3, 8, 8), TARGETS[targets]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_a_program_gives_what_explain_gives_for_any_number_of_images(case):
    cam, x, targets = made(*case)
    explained = export.program(cam, x, targets).module()
    for count in (1, 3, 7):
        images = torch.randn(count, 3, 8, 8)
        expected, found = name_outputs(cam.explain(images, targets)), explained(images)
        assert list(found) == list(expected)
        for name, numbers in expected.items():
            beside = expected["values"] if name in ("baseline_values", "remainder") else numbers
            assert (found[name] - numbers).abs().max() <= 1e-5 * beside.abs().max(), name


@pytest.mark.slow
def test_what_a_program_gives_has_names_and_the_size_asked_for():
    cam, x, _ = made("pooled", "rbf", "ContributionCAM", "default")
    program = export.program(cam, x, size=(8, 8))
    expected = cam.explain(x)
    found = program.module()(x)
    assert list(found) == [
        *("scores", "label", "components", "values", "nu", "log_scale", "maps", "baseline_values", "remainder")
    ]
    assert found["maps"].shape == (4, 5, 8, 8)
    assert torch.equal(found["label"], torch.from_numpy(cam.model.predict(x)))
    assert relative(found["scores"], cam.model(x).detach()) < 1e-6
    drawn = nn.functional.interpolate(expected.maps, (8, 8), mode="bilinear", align_corners=False)
    assert relative(found["maps"], drawn) < 1e-6


@pytest.mark.slow
def test_a_program_is_of_the_network_as_it_was_and_leaves_it_alone():
    cam, x, _ = made("dense", "rbf", "ClosedFormGradCAM", "default")
    before = {name: value.clone() for name, value in cam.model.state_dict().items()}
    explained = export.program(cam, x).module()
    assert all(torch.equal(value, before[name]) for name, value in cam.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in cam.model.backbone.parameters())
    expected = explained(x)["maps"]
    with torch.no_grad():
        for parameter in cam.model.parameters():
            parameter.mul_(2)
    assert torch.equal(explained(x)["maps"], expected)
    assert not torch.allclose(cam.explain(x).maps, expected)


@pytest.mark.slow
def test_a_program_can_be_saved_and_compiled(tmp_path):
    cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    program = export.program(cam, x)
    torch.export.save(program, tmp_path / "explainer.pt2")
    loaded = torch.export.load(tmp_path / "explainer.pt2").module()
    assert torch.equal(loaded(x)["maps"], program.module()(x)["maps"])
    compiled = torch.compile(program.module(), backend="aot_eager")
    assert relative(compiled(x)["maps"], cam.explain(x).maps) < 1e-5


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].runs_again])
def test_methods_that_run_each_image_are_refused_by_name(method):
    cam, x, _ = made("pooled", "rbf", method, "default")
    with pytest.raises(NoProgramError, match=rf"{method} runs each image.*export ContributionCAM"):
        export.program(cam, x)


class Attending(nn.Module):
    """Attention with a mask, whose last row may look at nothing, or without one."""

    def __init__(self, masked):
        super().__init__()
        self.values = nn.Conv2d(3, 8, 4, 4)
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[3] = False
        self.mask = mask if masked else None

    def forward(self, x):
        tokens = self.values(x).flatten(2).mT.unsqueeze(1)
        looked = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens, attn_mask=self.mask)
        return looked.squeeze(1).flatten(1)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.slow
def test_the_softmax_of_attention_is_plain_where_there_is_no_mask(masked):
    torch.manual_seed(0)
    net, x = Attending(masked).eval(), torch.randn(30, 3, 8, 8)
    rows = extract_features(net, [x], progress=False)[0]
    net = PCASVMNet(net, make_pipeline(PCA(3), SVC()).fit(rows, rows.sum(1) > rows.sum(1).mean()))
    cam = ClosedFormGradCAM(net, ["values"])
    program = export.program(cam, x[:2])
    softmaxes = {str(node.target) for node in program.graph.nodes if "softmax" in str(node.target)}
    assert ("aten._safe_softmax.default" in softmaxes) is masked
    found, expected = program.module()(x[5:]), cam.explain(x[5:])
    assert bool(found["maps"].isfinite().all())
    assert relative(found["maps"], expected.maps) < 1e-6


@pytest.mark.slow
def test_no_program_repeats_a_number_to_keep_one_of_it():
    cam, x, targets = made("pooled", "rbf", "ContributionCAM", "default")
    traced = export.program(cam, x[:2], targets).graph
    narrowed = [node.args for node in traced.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)]
    repeated = [args for args in narrowed if args[0].target is torch.ops.aten.expand.default]
    assert traced.find_nodes(op="call_function", target=torch.ops.aten.expand.default)
    assert not [args for args in repeated if args[2:] == (0, 1)]


@pytest.mark.slow
def test_a_program_that_gives_other_numbers_is_not_returned(monkeypatch):
    def wrong(traced):
        for node in traced.find_nodes(op="call_function", target=torch.ops.aten.exp.default):
            node.target = torch.ops.aten.sin.default

    monkeypatch.setattr(graph, "plain_zeros", wrong)
    with pytest.raises(NoProgramError, match=r"the program gives \w+ that differ from explain by"):
        export.program(*made("pooled", "rbf", "ContributionCAM", "default"))


class OnDevice(torch.Tensor):
    """A tensor that numpy cannot look at, as those on a GPU."""

    def __array__(self, *args, **kwargs):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_outputs_are_compared_on_any_device_and_with_their_labels():
    cam, x, targets = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    expected = name_outputs(cam.explain(x, targets))
    found = {name: numbers.clone().as_subclass(OnDevice) for name, numbers in expected.items()}
    assert set(compared(found, expected).values()) == {0.0}
    best = expected["scores"].argsort(1)
    found["label"] = best[:, 0]
    assert compared(found, expected)["label"] > 1e-3
    tied = torch.zeros_like(expected["scores"]).scatter(1, best[:, 1:], 1.0)
    equal = expected | {"scores": tied}
    found = equal | {"label": best[:, 1]}
    assert max(compared(found, equal | {"label": best[:, 2]}).values()) == 0.0
    unlabelled = {name: numbers for name, numbers in expected.items() if name != "label"}  # as of a regressor
    moved = unlabelled | {"values": expected["values"] + 0.01 * expected["values"].abs().max()}
    differences = compared(moved, unlabelled)
    assert "label" not in differences
    assert differences["values"] == pytest.approx(0.01, rel=1e-4)


class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()


@pytest.mark.slow
def test_a_network_that_is_not_defined_for_noise_is_a_program():
    torch.manual_seed(0)
    net, x = (
        nn.Sequential(Root(), *convolutions(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval(),
        torch.rand(30, 3, 8, 8),
    )
    rows = extract_features(net, [x], progress=False)[0]
    cam = ClosedFormGradCAM(PCASVMNet(net, make_pipeline(PCA(3), SVC()).fit(rows, torch.arange(30) % 2)), ["5"])
    found, expected = export.program(cam, x[:2]).module()(x[5:]), cam.explain(x[5:])
    assert relative(found["maps"], expected.maps) < 1e-5


class Shifting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[:, :4][:, :, 1:] = x[:, :4][:, :, :-1]
        y[:, 4:] = x[:, 4:]
        y[:, 0][:, ::2].mul_(2)
        return y.mean((2, 3)).tanh()


class Parts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = x.flatten(2).unflatten(1, (2, 4)).unbind(1)
        return (query * key).mean(-1).tanh()


@pytest.mark.parametrize(
    ("end", "method"),
    [
        pytest.param(  # writes through views of views
            *(Shifting, ClosedFormGradCAM),
            marks=pytest.mark.xfail(raises=NoProgramError, strict=False, reason="an assertion of PyTorch 2.14"),
        ),
        (Parts, methods.ClosedFormShapleyCAM),  # second derivatives of what is stacked again
    ],
)
@pytest.mark.slow
def test_writes_through_views_and_parts_of_one_tensor(end, method):
    torch.manual_seed(0)
    net, x = nn.Sequential(*convolutions(), end()).eval(), torch.randn(40, 3, 8, 8)
    rows = extract_features(net, [x], progress=False)[0]
    cam = method(PCASVMNet(net, make_pipeline(PCA(3), SVC()).fit(rows, torch.arange(40) % 2)), ["4"])
    explained = export.program(cam, x[:4]).module()
    assert max(compared(explained(x[4:11]), name_outputs(cam.explain(x[4:11]))).values()) < 1e-5


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.mean() > 1e6 else 2 * x


class Counting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / len(x)


def test_what_a_network_decides_by_a_number_is_refused_with_its_place():
    for part, match in ((Branching(), r"test_program.py:\d+ \(return x if x.mean\(\)"), (Counting(), "61 images only")):
        cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
        cam.model.backbone.insert(0, part)
        cam = ClosedFormGradCAM(cam.model, ["5"])
        with pytest.raises(NoProgramError, match=match):
            export.program(cam, x)


class Bessel(nn.Module):
    """A function that has no rule."""

    def forward(self, x):
        return torch.special.i0(x)


def test_what_has_no_closed_form_is_refused_as_by_explain_and_never_left_to_autograd():
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), Bessel(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.randn(8, 3, 8, 8)
    head = make_pipeline(PCA(2), SVC()).fit(backbone(x).detach().numpy(), [0, 1] * 4)
    net = PCASVMNet(backbone, head, "4").eval()
    with pytest.raises(NoClosedFormError, match=r"aten\.i0"):
        export.program(ClosedFormGradCAM(net, ["1"]), x)
    with pytest.warns(AutogradFallbackWarning), pytest.raises(NoProgramError, match="no autograd"):
        export.program(ClosedFormGradCAM(net, ["1"], jacobian="auto"), x)


def test_what_needs_autograd_or_another_precision_is_refused():
    cam, x, _ = made("pooled", "probable, LogisticRegression", "ClosedFormGradCAM", "default")
    with pytest.raises(NoProgramError, match=r"ProbabilityTarget\(1\) is a function of your own"):
        export.program(cam, x, [ProbabilityTarget(1)])
    with pytest.raises(NoProgramError, match="no autograd"):
        export.program(ClosedFormGradCAM(cam.model, ["4"], jacobian="autograd"), x)
    with pytest.raises(ValueError, match=r"net.float\(\)"):
        export.program(ClosedFormGradCAM(cam.model.double(), ["4"]), x.double())
    with pytest.raises(TypeError, match="a method such as"):
        export.program(cam.model, x)


def test_the_rational_erfcx_is_right_from_0_to_infinity():
    x = torch.cat([torch.zeros(1), torch.logspace(-12, 8, 4001), torch.full((1,), 3.75)]).double()
    assert relative(erfcx(x), torch.special.erfcx(x)) < 1e-14
    assert (erfcx(x) / torch.special.erfcx(x) - 1).abs().max() < 1e-14


def largest(found, expected):
    """Return the largest difference between outputs, as a part of the largest value."""
    tops = {name: expected["values"] if name == "remainder" else numbers for name, numbers in expected.items()}
    return max(float((found[name] - numbers).abs().max() / tops[name].abs().max().clamp_min(1e-30))
               for name, numbers in expected.items() if name != "baseline_values")  # fmt: skip


@pytest.mark.optional
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_program_is_compiled_by_torch_and_ahead_of_time_for_cpp(tmp_path):
    cam, x, targets = made("dense", "rbf", "ClosedFormGradCAM", "default")
    program = export.program(cam, x, targets)
    images = torch.randn(5, 3, 8, 8)
    expected = name_outputs(cam.explain(images, targets))
    with torch.no_grad():
        assert largest(torch.compile(program.module())(images), expected) < 1e-5
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "explainer.pt2"))
    assert largest(torch._inductor.aoti_load_package(package)(images), expected) < 1e-5


@pytest.mark.slow
def test_a_program_is_made_while_another_thread_runs():
    """As of a notebook or a server: its results may not be told from constants, so that explanations check more."""
    cam, x, targets = made("dense", "rbf", "ContributionCAM", "default")
    ends = threading.Event()

    def wait():
        while not ends.wait(1e-4):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        program = export.program(cam, x, targets).module()
    finally:
        ends.set()
        thread.join()
    images = torch.randn(3, 3, 8, 8)
    assert largest(program(images), name_outputs(cam.explain(images, targets))) < 1e-5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("method", ["ClosedFormGradCAM", "ContributionCAM"])
def test_a_program_is_captured_as_a_cuda_graph(method):
    cam, x, targets = made("pooled", "rbf", method, "default")
    cam.model.cuda()
    explained, images = export.program(cam, x.cuda(), targets).module(), x.cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        explained(images)  # what is allocated once
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = explained(images)
    other = torch.randn_like(images)
    images.copy_(other)
    graph.replay()
    assert largest(found, name_outputs(cam.explain(other, targets))) < 1e-5
