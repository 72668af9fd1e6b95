"""ONNX files: onnxruntime gives what ``explain`` gives, in a process without torch, and a file says what it is of."""

import json
import subprocess
import sys
from pathlib import Path

import deploy
import numpy as np
import pytest
import torch
from PIL import Image
from test_program import made

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, NoProgramError, export
from pytorch_grad_cam_pcasvm.export import onnx_file
from pytorch_grad_cam_pcasvm.export.onnx_file import KEY, _compared
from pytorch_grad_cam_pcasvm.export.program import outputs_of

pytestmark = pytest.mark.optional
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

# Every path, kernel and kind of target; all methods on one path.
CASES = [
    ("pooled", "RBF", "ContributionCAM", "default"),
    ("pooled", "RBF", "ContributionCAM", "classes"),
    ("behind a layer", "RBF", "ContributionCAM", "default"),
    ("several layers", "RBF", "ContributionCAM", "default"),
    ("tokens", "RBF", "ContributionCAM", "default"),
    ("tokens", "RBF", "ClosedFormGradCAM", "default"),
    ("dense", "gamma=10", "ContributionCAM", "default"),
    ("dense", "two classes", "ContributionCAM", "log-ratios"),
    ("dense", "polynomial", "ContributionCAM", "default"),
    ("dense", "sigmoid", "ContributionCAM", "default"),
    ("dense", "one class", "ContributionCAM", "default"),
    ("dense", "KernelPCA", "ClosedFormGradCAM", "default"),
    ("dense", "Nystroem", "ClosedFormGradCAM", "default"),
    ("dense", "regression", "ClosedFormHiResCAM", "default"),
    ("dense", "linear", "ClosedFormXGradCAM", "components"),
    *(("dense", "RBF", method, "default") for method in (
        "ClosedFormGradCAM", "ClosedFormShapleyCAM", "LIFTCAM", "RelevanceCAM", "ClosedFormLayerCAM",
        "ClosedFormGradCAMPlusPlus", "ClosedFormGradCAMElementWise",
    )),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_onnxruntime_gives_what_explain_gives_for_any_number_of_images(case, tmp_path):
    cam, x, targets = made(*case)
    told = export.onnx(cam, x, tmp_path / "explainer.onnx", targets)
    assert max(told["differences"].values()) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "explainer.onnx", providers=["CPUExecutionProvider"])
    for count in (1, 3, 7):
        images = torch.randn(count, 3, 8, 8)
        expected = outputs_of(cam.explain(images, targets))
        found = dict(zip(expected, session.run([*expected], {"images": images.numpy()}), strict=True))
        assert max(_compared(found, expected).values()) < 1e-5


def test_a_file_says_what_it_is_of_and_a_changed_network_has_another_digest(tmp_path):
    cam, x, _ = made("pooled", "RBF", "ContributionCAM", "default")
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
    assert about["input"] == {"shape": [3, 8, 8], "mean": [0.5, 0.5, 0.5], "std": None}
    assert [output.name for output in session.get_outputs()][:3] == ["scores", "label", "components"]
    with torch.no_grad():
        cam.model.backbone[0].bias.add_(1)
    other = export.onnx(cam, x, tmp_path / "b.onnx")
    assert other["digest"]["network"] != about["digest"]["network"]
    assert other["digest"]["head"] == about["digest"]["head"]


def test_a_file_that_gives_other_numbers_is_not_written(tmp_path, monkeypatch):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    table = onnx_file.decompositions()
    monkeypatch.setattr(onnx_file, "decompositions", lambda: table | {torch.ops.aten.exp.default: lambda x: 1 + x})
    with pytest.raises(NoProgramError, match="differ from explain"):
        export.onnx(cam, x, tmp_path / "explainer.onnx")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="no folder"):
        export.onnx(cam, x, tmp_path / "none" / "explainer.onnx")


def test_the_example_explains_without_torch_and_draws_what_the_figures_draw(tmp_path):
    cam, _, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    x = torch.rand(2, 3, 8, 8)
    export.onnx(cam, x, tmp_path / "explainer.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    script = (
        "import sys, deploy\n"
        "from pathlib import Path\n"
        "deploy.explain(Path('explainer.onnx'), Path('photo.png'), Path('maps.png'))\n"
        "assert not {'torch', 'sklearn', 'pytorch_grad_cam_pcasvm'} & set(sys.modules)\n"
    )
    path = str(Path(deploy.__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "SVMTarget():" in run.stdout
    assert Image.open(tmp_path / "maps.png").size == (210 * 6 - 10, 200)

    explainer = deploy.Explainer(str(tmp_path / "explainer.onnx"))
    found = explainer(explainer.prepared(Image.fromarray(pixels)))
    made_here = cam.explain(torch.from_numpy(explainer.prepared(Image.fromarray(pixels))))
    expected = made_here.overlay(pixels[None])[0]
    for k, drawn in enumerate(expected):
        given = np.asarray(explainer.drawn(Image.fromarray(pixels), found["maps"][0, k] / found["nu"][0, k]))
        assert np.abs(given.astype(int) - drawn).max() <= 1


def test_the_example_refuses_what_is_no_explanation_and_other_images(tmp_path):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    export.onnx(cam, x, tmp_path / "explainer.onnx")
    whole = (tmp_path / "explainer.onnx").read_bytes()
    (tmp_path / "short.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cut short"):
        deploy.Explainer(str(tmp_path / "short.onnx"))
    torch.onnx.export(cam.model.backbone, (x,), tmp_path / "plain.onnx", dynamo=True, verbose=False)
    with pytest.raises(ValueError, match="not an explanation"):
        deploy.Explainer(str(tmp_path / "plain.onnx"))
    explainer = deploy.Explainer(str(tmp_path / "explainer.onnx"))
    for other in (np.zeros((1, 3, 9, 9), np.float32), np.zeros((1, 3, 8, 8))):
        with pytest.raises(ValueError, match="images must be float32 of shape"):
            explainer(other)


def test_without_onnxruntime_the_extra_is_named(tmp_path, monkeypatch):
    cam, x, _ = made("pooled", "RBF", "ClosedFormGradCAM", "default")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'pytorch_grad_cam_pcasvm\[export\]'"):
        export.onnx(ClosedFormGradCAM(cam.model, ["4"]), x, tmp_path / "explainer.onnx")
