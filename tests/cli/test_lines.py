"""The lines that are typed: what they mean, what is refused before anything heavy is imported, and those of 0.4."""

import re
import shutil
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from atlases import folder
from golden import mask, transcript
from PIL import Image

import pytorch_grad_cam_pcasvm as package
from pytorch_grad_cam_pcasvm import Head, load_model
from pytorch_grad_cam_pcasvm.network.pools import POOLS as KNOWN
from pytorch_grad_cam_pcasvm.studio.cli import main
from pytorch_grad_cam_pcasvm.studio.cli.arguments import COMMANDS, POOLS, FitOptions, make_parser, parse_arguments

BACKBONE = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=4), nn.ReLU(), nn.Conv2d(6, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3)
    )
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with photos, a network of one's own, and a model."""
    root = tmp_path_factory.mktemp("lines")
    folder(root / "photos", 12)
    (root / "lines_backbone.py").write_text(BACKBONE)
    return root


def test_fit_makes_a_model_and_all_else_takes_it(here, capsys):
    trust = ["--trust", "lines_backbone:make"]
    assert main(["fit", "photos", "--backbone", "lines_backbone:make", "--components", "3"]) == 0
    printed = capsys.readouterr().out
    assert "features: 4, the last block (another: --features)\n" in printed
    assert re.search(r"wrote model\.safetensors: 3 components", printed)
    model = load_model("model.safetensors", "lines_backbone:make")
    assert model.classes == ["cat", "dog"]
    assert model.layers == ("4",)
    assert {"0", "1", "2", "3", "4"} >= set(model.means) >= {"4"}
    assert model.explain("photos").maps.shape[:2] == (12, 4)
    assert main(["explain", "photos", *trust]) == 0
    assert (here / "maps" / "index.html").exists()
    assert main(["atlas", "photos", *trust]) == 0
    assert (here / "atlas" / "explorer" / "index.html").exists()
    assert main(["atlas", "photos", *trust]) == 0  # again, where the page is
    capsys.readouterr()
    assert main(["explain", "photos"]) == 2
    error = capsys.readouterr().err
    assert "which is not run because a file says so" in error
    assert "--trust NAME" in error
    assert main(["fit", "photos", "--backbone", "lines_backbone:make", "--components", "2"]) == 0
    assert "wrote model.safetensors, in place of the one that was there: 2 components" in capsys.readouterr().out


def test_layers_of_maps_are_those_of_the_model_or_those_typed(here, capsys):
    network = ["--backbone", "lines_backbone:make", "--components", "3"]
    assert main(["fit", "photos", *network, "--layer", "0", "--layer", "4"]) == 0
    model = load_model("model.safetensors", "lines_backbone:make")
    assert model.layers == ("0", "4")
    assert set(model.means) >= {"0", "4"}
    assert main(["explain", "photos", "--trust", "lines_backbone:make", "--layer", "3", "--out", "finer"]) == 0
    for options, told in (
        (["--layer", "9"], "has no layer '9'"),
        (["--features", "2"], "--features 2, but the model was fitted with 4"),
        (["--pool", "max"], "--pool max, but the model was fitted with mean"),
        (["--resize", "crop"], "--resize crop, but the model was fitted with stretch"),
    ):
        capsys.readouterr()
        assert main(["explain", "photos", "--trust", "lines_backbone:make", *options]) == 2
        assert told in capsys.readouterr().err


def test_a_head_alone_needs_its_backbone(here, capsys):
    assert main(["fit", "photos", "--backbone", "lines_backbone:make", "--components", "3"]) == 0
    head = Head.load("model.safetensors")
    head.save("head.safetensors")
    capsys.readouterr()
    assert main(["explain", "photos", "--model", "head.safetensors"]) == 2
    assert "is a head alone, which does not say what it was fitted behind: add --backbone" in capsys.readouterr().err
    head.training_set.preparation = None
    head.save("silent.safetensors")
    assert main(["explain", "photos", "--model", "silent.safetensors", "--backbone", "lines_backbone:make"]) == 2
    assert "does not say which layer its features come from: add --features NAME" in capsys.readouterr().err
    line = ["explain", "photos", "--model", "head.safetensors", "--backbone", "lines_backbone:make", "--features", "4"]
    assert main(line) == 0


MISTYPED = """
fit photos --maks x
explain photos --modle m
explain photos --device gpu
fit photos --pool means
fit photos --classifier forrest
fit photos --resize padd
fit photos --gamma -1
fit photos --C 0
fit photos --kernel rgb
explain photos --method GradCAM
explain photos --regions voc
explain photos --batch-size none
evaluate photos --count 0
explian photos
explain photos more
explain
"""
LINES = """
fit fotos
fit photos --weights nowhere.pth
explain photos --model m
explain photos --model modl.onnx
evaluate photos --model model.onnx --masks msks
explain photos --model model.onnx --layer 4
explain photos --model model.onnx --out photos/maps
export --model model.onnx --layer auto
fit photos --layer auto
fit photos --out head.pkl
fit photos --out nowhere/m.safetensors
fit photos --masks photos
fit photos --classifier forest --C 2
fit photos --search --gamma 2
"""


def test_what_cannot_work_is_refused_before_anything_heavy_is_imported(place, told_by, tmp_path, golden):
    here = shutil.copytree(place, tmp_path / "here")
    (here / "model.onnx").touch()
    for name, lines in (("mistyped", MISTYPED), ("refused", LINES)):
        told = told_by(lines.strip().splitlines(), here)
        assert {(status, printed, *heavy) for status, printed, _, heavy in told.values()} == {(2, "")}
        assert all(error.startswith("error: ") and error.count("\n") == 1 for _, _, error, _ in told.values())
        golden(name, transcript((line, mask(error)) for line, (_, _, error, _) in told.items()))


def test_a_model_of_another_name_is_told(here, capsys):
    (here / "other.safetensors").touch()
    assert main(["explain", "photos"]) == 2
    assert "there is other.safetensors: name it, --model other.safetensors" in capsys.readouterr().err


def test_options_are_what_the_parser_knows():
    assert {*KNOWN, "none"} == {*POOLS}
    for kind in COMMANDS:
        words = [kind.name, *(["atlas"] if kind.name in ("export", "explore") else ["photos"])]
        model = {"model": Path("m.safetensors")} if kind.name == "add" else {}
        words[1:1] = map(str, model.values())
        options = parse_arguments(words)
        assert type(options) is kind
        usual = kind(**{"atlas" if kind.name == "explore" else "images": Path(words[-1])} | model)
        assert {entry.name: getattr(options, entry.name) for entry in fields(kind)} == vars(usual)
    assert parse_arguments(["fit", "p", "--layer", "a", "--layer", "b"]).layer == ["a", "b"]
    assert parse_arguments(["fit", "p", "--model", "m.safetensors"]) == FitOptions(
        images=Path("p"), out=Path("m.safetensors")
    )
    assert make_parser().prog == "pcasvm-cam"


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    told = capsys.readouterr().out
    assert told.startswith(f"pytorch_grad_cam_pcasvm {package.__version__}, Python 3.")
    assert f"torch {torch.__version__.partition('+')[0]}" in told


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_names_all_that_is_odd_and_writes_nothing(here, capsys, golden):
    photos = here / "photos"
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert main(["check", "photos"]) == 0
    golden("check", capsys.readouterr().out)
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    for name in ("cat/x.png", "dog/y.jpg"):
        (photos / name).write_bytes(b"no photo")
    first = sorted((photos / "cat").glob("*.png"))[0]
    shutil.copy(first, photos / "cat" / "again.png")
    shutil.copy(sorted((photos / "dog").glob("*.png"))[0], photos / "cat" / "wrong.png")
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(photos / "dog" / "deep.png")
    turned = Image.new("RGB", (40, 20))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(photos / "dog" / "turned.jpg", exif=exif)
    (photos / "elk").mkdir()
    (photos / "fox").mkdir()
    turned.save(photos / "fox" / "only.png")
    turned.save(photos / "beside.png")
    assert main(["check", "photos"]) == 0
    golden("check_odd", mask(capsys.readouterr().out))


def test_check_knows_parts_of_a_data_set(here, capsys, golden):
    shutil.copytree(here / "photos", here / "all" / "train")
    shutil.copytree(here / "photos" / "cat", here / "all" / "test" / "cat")
    shutil.copytree(here / "photos" / "cat", here / "all" / "maps" / "cat")
    for name in ("phone.heic", "tiny.png"):
        Image.new("RGB", (4, 90)).save(here / "all" / "test" / "cat" / name, "PNG")
    assert main(["check", "all"]) == 0
    golden("check_parts", mask(capsys.readouterr().out))


@pytest.mark.usefixtures("here")
def test_check_compares_masks(here, capsys):
    (here / "masks").mkdir()
    Image.new("L", (8, 8)).save(here / "masks" / "0.png")
    assert main(["check", "photos", "--masks", "masks"]) == 0
    assert re.search(
        r"masks: (1 of 12 photos have one|.* is the mask of no picture|no file in masks)", capsys.readouterr().out
    )


@pytest.mark.usefixtures("here")
def test_threads_are_those_asked_for():
    before = torch.get_num_threads()
    try:
        main(["check", "photos", "--threads", "2"])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
