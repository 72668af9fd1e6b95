"""The commands ``export`` and ``explain``, as they are typed."""

import csv
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from atlases import folder
from PIL import Image
from small import SIDE, of_fit
from torchvision.models import get_model_weights, list_models
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import ContributionCAM, Head, PCASVMNet, PCATarget, SVMTarget
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.model.preparation import read_steps

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


@pytest.fixture(scope="module")
def made(weights, tmp_path_factory):
    """Photos, a network as it is typed, and an exported file."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    root = tmp_path_factory.mktemp("made")
    photos, head, model = folder(root / "photos", 6), root / "head.safetensors", root / "explainer.onnx"
    network = ["--backbone", "squeezenet1_1", "--weights", str(weights), "--layer", "features"]
    assert main(["fit", str(photos), *of_fit(network), "--components", "3", "--out", str(head)]) == 0
    with redirect_stdout(StringIO()) as printed:
        assert main(["export", *network, "--model", str(head), "--components", "1", "--out", str(model)]) == 0
    return SimpleNamespace(photos=photos, head=head, network=network, model=model, printed=printed.getvalue())


@pytest.mark.optional
def test_it_is_said_what_takes_long_and_what_was_written(made):
    starts = "tracing the maps of", "traced ", "comparing the file", "wrote ", "differs from PyTorch by at most "
    assert [line.startswith(start) for line, start in zip(made.printed.splitlines(), starts, strict=True)] == [True] * 5


@pytest.mark.optional
def test_from_a_head_to_maps_without_torch(made, weights, tmp_path):
    code = "import sys; from pytorch_grad_cam_pcasvm.studio.cli import main"
    code += "\ncode = main(sys.argv[1:])\nassert not {'torch', 'sklearn'} & set(sys.modules)\nsys.exit(code)"
    options = ["--model", made.model, made.photos, "--out", tmp_path / "maps"]
    run = subprocess.run([sys.executable, "-c", code, "explain", *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "wrote maps of 6 images" in run.stdout
    backbone = torchvision.models.squeezenet1_1(weights=None).eval()
    backbone.load_state_dict(torch.load(weights, weights_only=True))
    net = PCASVMNet(backbone, Head.load(made.head), "features", pool="mean")
    with (tmp_path / "maps" / "values.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == [
        "image",
        "predicted",
        "labelled",
        "margin of predicted",
        *(f"component {b}" for b in (1, 2, 3)),
        "note",
    ]
    pictures = [Image.open(made.photos / row[0]).resize((SIDE, SIDE), Image.Resampling.BILINEAR) for row in rows]
    x = torch.stack([normalize(to_tensor(picture), *IMAGENET) for picture in pictures])
    with ContributionCAM(net, ["features"]) as cam:
        values = cam.explain(x, [SVMTarget(), *map(PCATarget, range(3))]).values.double().numpy()
    assert np.abs(np.array([row[3:-1] for row in rows], float) - values).max() <= 1e-4 * np.abs(values).max()
    assert [row[1] for row in rows] == net.predict(x).tolist()
    for row in rows:
        with Image.open((tmp_path / "maps" / row[0]).with_suffix(".png")) as sheet:
            assert sheet.width == 2 * 468 + 10


@pytest.mark.optional
def test_what_cannot_be_explained_or_written(made, tmp_path, capsys):
    options = ["explain", "--model", str(made.model)]
    (tmp_path / "empty").mkdir()
    assert main([*options, str(tmp_path / "empty"), "--out", str(tmp_path / "maps")]) == 2
    assert "has no images (.jpg, .png" in capsys.readouterr().err
    assert main([*options, str(made.photos), "--out", str(made.photos / "maps")]) == 2
    assert f"is inside {made.photos}" in capsys.readouterr().err
    photos = tmp_path / "photos"
    photos.mkdir()
    Image.new("RGB", (30, 20)).save(photos / "good.png")
    (photos / "bad.png").write_bytes(b"no picture")
    Image.new("1", (20000, 10000)).save(photos / "large.png")
    assert main([*options, str(photos), "--out", str(tmp_path / "maps")]) == 2
    assert "2 photos cannot be read: bad.png (" in capsys.readouterr().err
    assert main([*options, str(photos), "--out", str(tmp_path / "maps"), "--skip-bad-images"]) == 0
    assert "skipped 2 images that cannot be read: bad.png, large.png" in capsys.readouterr().out
    written = ["export", *made.network, "--model", str(made.head), "--out", str(tmp_path / "a.onnx")]
    assert main([*written, "--page", str(tmp_path / "page"), "--runtime", str(tmp_path)]) == 2
    assert "npm install onnxruntime-web" in capsys.readouterr().err
    assert not (tmp_path / "a.onnx").exists()
    inner = [*made.network[:-1], "features.3", "--features", "features", "--model", str(made.head)]
    assert main(["export", *inner, "--out", str(tmp_path / "b.onnx")]) == 2
    error = capsys.readouterr().err
    assert "contributions at 'features.3' start near the mean of the training images there, which" in error
    assert "does not hold (it has those at 'features" in error
    assert "name the folder it was fitted on, --train FOLDER, or start elsewhere, --baseline zero" in error


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "swin_t", "efficientnet_v2_s"])
def test_the_steps_of_torchvisions_transforms(name):
    assert name in list_models()
    transform = get_model_weights(name).DEFAULT.transforms()
    steps = read_steps(transform)
    assert (steps["resize"], steps["interpolation"]) == (transform.resize_size[0], transform.interpolation.value)
    assert (steps["mean"], steps["std"]) == ([*transform.mean], [*transform.std])


@pytest.mark.optional
@pytest.mark.parametrize("name", ["vit_small_patch16_224", "convnext_tiny", "mobilenetv3_small_050"])
def test_the_steps_of_timms_transforms(name):
    timm = pytest.importorskip("timm")
    config = timm.data.resolve_model_data_config(timm.create_model(name, pretrained=False))
    steps = read_steps(timm.data.create_transform(**config))
    assert steps["resize"] == int(config["input_size"][-1] / config["crop_pct"])
    assert steps["interpolation"] == config["interpolation"]
    assert np.allclose(steps["mean"], config["mean"])
    assert np.allclose(steps["std"], config["std"])
