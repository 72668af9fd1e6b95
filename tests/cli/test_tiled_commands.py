"""`fit --tiles` and `--tile`: models on tiles, which every other command takes from their file."""

import csv
import json
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from reference import gap
from safetensors import safe_open
from torch import nn
from torchvision.transforms.functional import normalize, to_tensor

from pytorch_grad_cam_pcasvm import SVMTarget, TiledNet, extract_features, load_model
from pytorch_grad_cam_pcasvm.studio.cli import main, training
from pytorch_grad_cam_pcasvm.studio.model.preparation import Scaled, read_preparation

IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
SIZE = 64  # of a tile, so that tests are quick


def save(path, number, size):
    rng = np.random.default_rng(number)
    pixels = rng.integers(0, 256, (*size, 3), np.uint8) // (1 + number % 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for number in range(12):
        save(root / ["good", "hole"][number % 2] / f"{number}.png", number, (100, 150))
    return root


@pytest.fixture(scope="module")
def sized(tmp_path_factory):
    """Photos of different size, one of them a panorama."""
    root = tmp_path_factory.mktemp("sized")
    for number in range(12):
        size = [(100, 150), (130, 120), (90, 320)][number % 3]
        save(root / ["good", "hole"][number % 2] / f"{number}.png", number, size)
    return root


def backbone():
    """A small network whose stride divides a tile; the command line names it."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 12, 5, 4, 2), nn.ReLU(), nn.Conv2d(12, 16, 5, 8, 2), nn.ReLU()
    return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten())


NAME = f"{__name__}:backbone"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a line with a small network; returns its exit status and what was printed."""
    monkeypatch.setattr(training, "cache_folder", lambda: tmp_path / "cache")

    def command(name, folder, *words):
        line = [name, folder, *words]
        line += ["--model" if name != "fit" else "--out", tmp_path / "model.safetensors"]
        if name == "fit":
            line += ["--backbone", NAME, "--features", "0", "--components", 3, "--size", SIZE]
        elif "--backbone" not in words:
            line += ["--trust", NAME]
        return main(list(map(str, line))), capsys.readouterr()

    return command


def test_a_model_on_tiles_is_made_explained_and_evaluated_without_further_options(run, photos, tmp_path):
    code, printed = run("fit", photos, "--tiles", "3x2")
    assert code == 0, printed.err
    assert "tiles: 3x2 of 64x64 pixels" in printed.out
    model = load_model(tmp_path / "model.safetensors", NAME)
    tiled = model.net.backbone
    assert isinstance(tiled, TiledNet)
    assert (tiled.tiles, tiled.size, tiled.overlap) == ((3, 2), (SIZE, SIZE), 0.25)
    height, width = tiled.canvas
    assert model.transform(Image.new("RGB", (300, 200))).shape == (3, height, width)

    # The same features by hand: each tile through the network, and the mean.
    net = backbone().eval()
    paths, bilinear = sorted(photos.rglob("*.png")), Image.Resampling.BILINEAR
    x = torch.stack([
        normalize(to_tensor(Image.open(one).convert("RGB").resize((width, height), bilinear)), *IMAGENET)
        for one in paths
    ])
    tiling = tiled.find_tiling(x)
    tiles = [x[:, :, row : row + SIZE, column : column + SIZE] for row in tiling.rows for column in tiling.columns]
    assert len(tiles) == 6
    features = sum(extract_features(net, [tile], "0", pool="mean", progress=False)[0] for tile in tiles) / 6
    assert np.allclose(model.net.head.feature_mean.numpy(), features.mean(0), rtol=1e-4, atol=1e-5 * features.max())

    maps = model.explain(paths[:2], SVMTarget("hole"))
    assert gap(maps) < 1e-4
    code, printed = run("explain", photos, "--out", tmp_path / "maps", "--layer", "0.1")  # inside
    assert code == 0, printed.err
    assert len(list((tmp_path / "maps").rglob("*.png"))) == 12
    code, printed = run("explain", photos, "--out", tmp_path / "others", "--method", "ClosedFormScoreCAM")
    assert code == 2
    assert "use LIFTCAM or ContributionCAM" in printed.err


@pytest.mark.slow
def test_the_other_commands_take_a_model_on_tiles(run, photos, tmp_path):
    assert run("fit", photos, "--tiles", "2x1")[0] == 0
    code, printed = run("atlas", photos, "--out", tmp_path / "atlas")
    assert code == 0, printed.err
    code, printed = run("evaluate", photos, "--out", tmp_path / "evaluation", "--all-images")
    assert code == 0, printed.err


def test_a_head_alone_that_was_fitted_on_tiles_is_refused(run, photos, tmp_path):
    assert run("fit", photos, "--tiles", "2x1")[0] == 0
    load_model(tmp_path / "model.safetensors", NAME).net.head.save(tmp_path / "head.safetensors")
    shutil.move(tmp_path / "head.safetensors", tmp_path / "model.safetensors")
    words = ["--backbone", NAME, "--features", "0"]
    code, printed = run("explain", photos, "--out", tmp_path / "maps", *words)
    assert code == 2
    assert "is a head alone, which was fitted on tiles: name the model that 'fit' wrote" in printed.err


def test_a_head_at_every_position_of_tiles(run, photos, tmp_path):
    code, printed = run("fit", photos, "--tiles", "3x2", "--pool", "dense")
    assert code == 0, printed.err
    model = load_model(tmp_path / "model.safetensors", NAME)
    assert (model.net.pool, model.net.backbone.source.pool) == ("dense", "dense")
    labels = model.predict(sorted(photos.rglob("*.png"))[:2])
    stride = model.net.backbone.stride
    assert labels.shape == (2, *(side // step for side, step in zip(model.net.backbone.canvas, stride, strict=True)))
    code, printed = run("explain", photos, "--out", tmp_path / "maps")
    assert code == 0, printed.err
    with (tmp_path / "maps" / "values.csv").open(encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 13


def test_photos_of_different_size_have_as_many_tiles_as_they_need(run, sized, tmp_path):
    code, printed = run("fit", sized, "--tile", "50", "--overlap", "0.5")
    assert code == 0, printed.err
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        tiles = json.loads(opened.metadata()["model"])["tiles"]
    assert (tiles["tile"], tiles["overlap"], tiles["tiles"]) == (50, 0.5, None)
    model = load_model(tmp_path / "model.safetensors", NAME)
    assert isinstance(model.transform, Scaled)
    shapes = {model.transform(Image.open(path)).shape for path in sized.rglob("*.png")}
    assert len(shapes) == 3
    code, printed = run("explain", sized, "--out", tmp_path / "maps")
    assert code == 0, printed.err
    assert len(list((tmp_path / "maps").rglob("*.png"))) == 12
    for command, *more in (["atlas"], ["evaluate", "--all-images"]):
        code, printed = run(command, sized, *more, "--out", tmp_path / command)
        assert code == 2
        assert re.search(r"takes images of one size, but \d+\.png \(\d+x\d+\) and .*: fit with --tiles", printed.err)
    code, printed = run("export", sized, "--out", tmp_path / "file.onnx")
    assert code == 2
    assert "fitted with --tile" in printed.err
    code, printed = run("fit", sized, "--tile", "50", "--pool", "dense")
    assert code == 2
    assert "--pool dense takes images of one size" in printed.err


def test_photos_that_are_smaller_than_a_tile_are_named_before_anything_is_extracted(run, sized, tmp_path):
    code, printed = run("fit", sized, "--tile", "95")
    assert code == 2
    assert "4 of 12 photos are smaller than a tile of 95 pixels on a side: 2.png (320x90)" in printed.err
    code, printed = run("fit", sized, "--tile", "95", "--skip-bad-images")
    assert code == 0, printed.err
    assert "skipped 4 images" in printed.out


def test_panoramas_and_broken_photos_are_named(run, sized, tmp_path):
    code, printed = run("fit", sized, "--tiles", "2x2")
    assert code == 0, printed.err
    assert "hint: 4 of 12 photos are of another shape than 96x96, and are stretched" in printed.out
    (sized / "good" / "broken.png").write_bytes(b"no picture")
    try:
        code, printed = run("fit", sized, "--tile", "50")
    finally:
        (sized / "good" / "broken.png").unlink()
    assert code == 2
    assert "good/broken.png" in printed.err


@pytest.mark.parametrize(("words", "message"), [
    (["--tiles", "3"], "COLUMNSxROWS such as 3x2"),
    (["--tiles", "3x2", "--tile", "50"], "name one"),
    (["--overlap", "0.5"], "add --tiles 3x2 or --tile 512"),
    (["--tiles", "2x2", "--overlap", "1"], "below 1"),
    (["--tile", "50", "--resize", "pad"], "leave out --resize"),
])  # fmt: skip
def test_options_that_do_nothing_or_contradict_are_refused(run, photos, words, message):
    try:
        code, printed = run("fit", photos, *words)
        assert message in printed.err
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2


def test_what_is_recorded_of_scaled_photos_makes_the_same_images_again():
    scaled = Scaled(512, (224, 224), (32, 32), "bilinear", *IMAGENET)
    from pytorch_grad_cam_pcasvm.studio.model.preparation import Preparation

    steps = {"interpolation": "bilinear", "mean": IMAGENET[0], "std": IMAGENET[1], "resize": None}
    recorded = json.loads(json.dumps(Preparation(scaled, "scale", steps, exif=True).recorded))
    again = read_preparation(recorded)
    assert again.transform == scaled
    assert again.varies
    assert scaled(Image.new("RGB", (1500, 1000))).shape == (3, 448, 672)
