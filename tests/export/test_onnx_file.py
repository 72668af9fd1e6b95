"""ONNX files: onnxruntime gives what ``explain`` gives, in a process without torch, and a file says what it is of."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import convolutions
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from test_program import made
from torch import nn
from torchvision import transforms

from pytorch_grad_cam_pcasvm import (
    ClosedFormGradCAM,
    ContributionCAM,
    HotellingTarget,
    LogRatioTarget,
    NoProgramError,
    PCASVMNet,
    PCATarget,
    ProbabilityTarget,
    ResidualTarget,
    SVMTarget,
    export,
    extract_features,
    mean_activations,
)
from pytorch_grad_cam_pcasvm.studio.export import files, outputs
from pytorch_grad_cam_pcasvm.studio.export.explainer import KEY
from pytorch_grad_cam_pcasvm.studio.export.outputs import compared, name_outputs

pytestmark = pytest.mark.optional
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
onnx = pytest.importorskip("onnx")

# One of each kind; tests/matrix.py runs all, in other processes.
CASES = [
    ("pooled", "rbf", "ContributionCAM", "classes"),
    ("tokens", "rbf", "ContributionCAM", "default"),
    ("several layers", "rbf", "ContributionCAM", "components"),
    ("pooled", "two classes", "ContributionCAM", "log-ratios"),
    ("dense", "one class", "ContributionCAM", "default"),
    ("dense", "Nystroem(n_components=20, random_state=0), LinearSVC", "ClosedFormGradCAM", "default"),
    ("dense", "rbf", "ClosedFormShapleyCAM", "components"),
    ("tokens", "rbf", "ClosedFormShapleyCAM", "components"),
]


SLOW_CASES = [pytest.param(case, marks=pytest.mark.slow) for case in CASES[2:]]


@pytest.mark.parametrize("case", CASES[:2] + SLOW_CASES, ids=", ".join)
def test_onnxruntime_gives_what_explain_gives_for_any_number_of_images(case, written):
    file = written(*case, progress=case == CASES[0])
    assert max(file.told["differences"].values()) < 1e-5
    session = onnxruntime.InferenceSession(file.path, providers=["CPUExecutionProvider"])
    for count in (1, 3, 7):
        images = torch.randn(count, 3, 8, 8)
        expected = name_outputs(file.cam.explain(images, file.targets))
        found = dict(zip(expected, session.run([*expected], {"images": images.numpy()}), strict=True))
        assert max(compared(found, expected).values()) < 1e-5


def test_what_is_being_done_is_said_if_it_is_wanted(written):
    lines = [
        r"tracing the maps of ContributionCAM",
        r"traced \d+ operations; converting them to ONNX",
        r"comparing the file with explain",
    ]
    assert re.fullmatch("\n".join([*lines, ""]), written(*CASES[0], progress=True).printed)
    assert written().printed == ""


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_log_ratio_far_from_all_support_vectors_is_that_of_explain(classes, tmp_path):
    """There onnxruntime's own ReduceLogSumExp gives minus infinity."""
    torch.manual_seed(0)
    net = nn.Sequential(*convolutions(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.randn(60, 3, 8, 8)
    rows = extract_features(net, [x], progress=False)[0]
    head = make_pipeline(PCA(4, whiten=True), SVC(gamma=30.0)).fit(
        rows, rows.sum(1).argsort().argsort() * classes // 60
    )
    cam = ClosedFormGradCAM(PCASVMNet(net, head), ["4"])
    export.onnx(cam, x[:4], tmp_path / "explainer.onnx", [LogRatioTarget(1), LogRatioTarget()])
    reader = export.Explainer(tmp_path / "explainer.onnx")
    for contrast in (1, 2, 5, 20):
        images = contrast * torch.randn(5, 3, 8, 8)
        expected, found = (
            name_outputs(cam.explain(images, [LogRatioTarget(1), LogRatioTarget()])),
            reader(images.numpy()),
        )
        assert np.isfinite(found["values"]).all()
        assert compared(found, expected)["values"] < 1e-5
    nodes = onnx.load(tmp_path / "explainer.onnx").graph.node
    assert not [node for node in nodes if node.op_type == "ReduceLogSumExp"]


class Clamped(nn.Module):
    def forward(self, x):
        return x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)


def test_a_limit_on_the_path_is_no_decision_by_a_number(tmp_path):
    torch.manual_seed(0)
    net, x = nn.Sequential(*convolutions(), Clamped()).eval(), torch.randn(40, 3, 8, 8)
    rows = extract_features(net, [x], progress=False)[0]
    net = PCASVMNet(net, make_pipeline(StandardScaler(), PCA(3), SVC()).fit(rows, torch.arange(40) % 2))
    cam = ContributionCAM(net, ["4"], mean=mean_activations(net, [x], "4", progress=False))
    targets = [PCATarget(0)]
    export.onnx(cam, x[:4], tmp_path / "explainer.onnx", targets)
    images = torch.randn(5, 3, 8, 8)
    found = export.Explainer(tmp_path / "explainer.onnx")(images.numpy())
    assert max(compared(found, name_outputs(cam.explain(images, targets))).values()) < 1e-5


def test_a_file_says_what_it_is_of_and_a_changed_network_has_another_digest(tmp_path):
    cam, x, _ = made("pooled", "rbf", "ContributionCAM", "default")
    told = export.onnx(cam, x, tmp_path / "a.onnx", size=(8, 8), mean=[0.5, 0.5, 0.5])
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map[KEY])
    assert about == told
    assert (about["method"], about["options"]["baseline"], about["classes"]) == (
        "ContributionCAM",
        "neutral",
        [0, 1, 2],
    )
    assert about["targets"] == [*(f"PCATarget({b})" for b in range(4)), "SVMTarget()"]
    pictures = {"mean": [0.5, 0.5, 0.5], "std": None, "resize": None, "interpolation": "bilinear"}
    pictures |= {"white_level": None, "float_white": None}
    assert about["input"] == {"shape": [3, 8, 8]} | pictures
    assert session.get_inputs()[0].shape == ["N", 3, 8, 8]
    assert [output.name for output in session.get_outputs()][:3] == ["scores", "label", "components"]
    with torch.no_grad():
        cam.model.backbone[0].bias.add_(1)
    other = export.onnx(ClosedFormGradCAM(cam.model, ["4"]), x, tmp_path / "b.onnx")
    assert other["digest"]["network"] != about["digest"]["network"]
    assert other["digest"]["head"] == about["digest"]["head"]


def test_a_file_that_gives_other_numbers_is_not_written(tmp_path, monkeypatch):
    cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    table = files.decompositions()
    monkeypatch.setattr(files, "decompositions", lambda: table | {torch.ops.aten.exp.default: lambda x: 1 + x})
    with pytest.raises(NoProgramError, match="differ from explain"):
        export.onnx(cam, x, tmp_path / "explainer.onnx")
    nothing = {torch.ops.aten.exp.default: lambda x: x / 0 * 0}
    monkeypatch.setattr(files, "decompositions", lambda: table | nothing)
    with pytest.raises(NoProgramError, match="differ from explain by nan"):
        export.onnx(cam, x, tmp_path / "explainer.onnx")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="no folder"):
        export.onnx(cam, x, tmp_path / "none" / "explainer.onnx")


def test_the_reader_is_copied_and_draws_what_the_figures_draw(written, tmp_path):
    cam = written().cam
    shutil.copy(written().path, tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    assert export.write_reader(tmp_path / "copied.py") == tmp_path / "copied.py"
    script = (
        "import sys, copied\n"
        "sys.argv[1:] = ['explainer.onnx', 'photo.png', '--out', 'maps.png']\n"
        "copied.main()\n"
        "assert not {'torch', 'sklearn', 'pytorch_grad_cam_pcasvm'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "component 1:" in run.stdout
    with Image.open(tmp_path / "maps.png") as sheet:
        assert sheet.width == 2 * 468 + 10

    reader, picture = export.Explainer(tmp_path / "explainer.onnx"), Image.fromarray(pixels)
    x = reader.prepared(picture)[None]
    found, here = reader(x), cam.explain(torch.from_numpy(x))
    assert [*reader.about["titles"], reader.titles(found)[-1]] == [
        *(f"component {b}" for b in (1, 2, 3, 4)),
        "predicted class",
        f"{cam.model.predict(torch.from_numpy(x))[0]} (predicted)",
    ]
    for k, drawn in enumerate(here.overlay(pixels[None])[0]):
        given = np.asarray(reader.overlay(picture, found["maps"][0, k] / found["nu"][0, k]))
        assert np.abs(given.astype(int) - drawn).max() <= 1


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_reader_prepares_pictures_as_torchvision_does(tmp_path, interpolation):
    cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    norm = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    export.onnx(cam, x, tmp_path / "cut.onnx", resize=11, interpolation=interpolation, **norm)
    export.onnx(cam, x, tmp_path / "whole.onnx", interpolation=interpolation, **norm)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (57, 34, 3), np.uint8))
    how = transforms.InterpolationMode(interpolation)
    for name, sides in (("cut", 11), ("whole", (8, 8))):
        steps = [transforms.Resize(sides, how), transforms.CenterCrop(8), transforms.ToTensor()]
        expected = transforms.Compose([*steps, transforms.Normalize(**norm)])(picture)
        assert np.abs(export.Explainer(tmp_path / f"{name}.onnx").prepared(picture) - expected.numpy()).max() < 1e-6
    for wrong in ({"interpolation": "nearest"}, {"resize": 7}, {"mean": [0.5]}, {"std": [0.5]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            export.onnx(cam, x, tmp_path / "none.onnx", **wrong)


def test_the_reader_refuses_what_is_no_explanation_and_other_images(written, tmp_path):
    cam, x, whole = written().cam, written().x, written().path.read_bytes()
    (tmp_path / "short.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        export.Explainer(tmp_path / "short.onnx")
    torch.onnx.export(cam.model.backbone, (x,), tmp_path / "plain.onnx", dynamo=True, verbose=False)
    with pytest.raises(ValueError, match="not an explanation"):
        export.Explainer(tmp_path / "plain.onnx")
    reader = export.Explainer(written().path)
    right = np.zeros((1, 3, 8, 8), np.float32)
    for other in (np.zeros((1, 3, 9, 9), np.float32), np.zeros((1, 3, 8, 8)), right[:0], [right], torch.tensor(right)):
        with pytest.raises(ValueError, match="images must be a numpy array, float32 of shape"):
            reader(other)
    with pytest.raises(ValueError, match="images must be finite"):
        reader(right * np.nan)


def test_titles_say_what_a_map_is_of():
    named = {
        SVMTarget(): "predicted class",
        SVMTarget("cat", versus="dog", sign="-"): "against cat / dog",
        SVMTarget("cat", versus=["dog", "elk"]): "cat / dog, elk",
        LogRatioTarget(): "log-ratio of predicted class",
        ProbabilityTarget("cat"): "probability of cat",
        PCATarget(1, sign="-"): "against component 2",
        HotellingTarget(): "T\N{SUPERSCRIPT TWO}",
        ResidualTarget(): "Q",
    }
    assert {target: outputs._title(target, ["cat", "dog", "elk"]) for target in named} == named
    assert outputs._title(SVMTarget(), None) == "value"
    assert outputs._title(SVMTarget(sign="-"), None, anomalies=True) == "anomaly"
    assert outputs._title(SVMTarget(), None, anomalies=True) == "normality"


def test_checking_a_file_raises_no_doubts_about_noise(tmp_path):
    cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    before = cam._warnings
    export.onnx(cam, x, tmp_path / "explainer.onnx")
    assert cam._warnings is before
    assert {len(distances) for distances in before._distances.values()} == {len(x)}


def test_without_onnxruntime_what_to_install_is_said(tmp_path, monkeypatch):
    cam, x, _ = made("pooled", "rbf", "ClosedFormGradCAM", "default")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'pytorch_grad_cam_pcasvm\[export\]'"):
        export.onnx(cam, x, tmp_path / "explainer.onnx")
    with pytest.raises(ImportError, match="pip install onnxruntime"):
        export.Explainer(tmp_path / "explainer.onnx")
