"""Folders of public data sets, and as labelling tools export them: which line ``check`` proposes, no file moved."""

import numpy as np
import pytest
from PIL import Image
from test_choosing import run

PHOTO = np.random.default_rng(0).integers(60, 200, (48, 48, 3)).astype(np.uint8)
MASK = np.zeros((48, 48), np.uint8)
MASK[10:20, 10:25] = 255
ROBOFLOW = "x{}_jpg.rf.0123456789abcdef0123456789abcdef{}"

# Photos and masks, with {} for numbers; and what is proposed, after the name of the command.
LAYOUTS = {
    "MVTec AD": (
        ["train/good/{}.png", "test/good/{}.png", "test/cut/{}.png"], ["ground_truth/cut/{}_mask.png"],
        ["fit ROOT/train/good\n", "evaluate ROOT/test --masks ROOT/ground_truth"],
    ),
    "MVTec AD 2": (
        ["train/good/{}_regular.png", "validation/good/{}_regular.png", "test_public/good/{}_regular.png",
         "test_public/bad/{}_regular.png", "test_private/{}_regular.png"],
        ["test_public/ground_truth/bad/{}_regular_mask.png"],
        ["fit ROOT/train/good\n", "evaluate ROOT/test_public --masks ROOT/test_public/ground_truth"],
    ),
    "MVTec LOCO": (
        ["train/good/{}.png", "validation/good/{}.png", "test/good/{}.png", "test/logical_anomalies/{}.png"],
        ["ground_truth/logical_anomalies/{}/000.png"],
        ["fit ROOT/train/good\n", "evaluate ROOT/test --masks ROOT/ground_truth"],
    ),
    "VisA": (
        ["Data/Images/Normal/{}.JPG", "Data/Images/Anomaly/{}.JPG"], ["Data/Masks/Anomaly/{}.png"],
        ["fit ROOT/Data/Images --pool dense:3 --masks ROOT/Data/Masks"],
    ),
    "BTAD": (
        ["train/ok/{}.bmp", "test/ok/{}.bmp", "test/ko/{}.bmp"], ["ground_truth/ko/{}.png"],
        ["fit ROOT/train/ok\n", "evaluate ROOT/test --masks ROOT/ground_truth"],
    ),
    "Kolektor": (
        ["kos01/Part{}.jpg", "kos02/Part{}.jpg", "kos03/Part{}.jpg"],
        ["kos01/Part{}_label.bmp", "kos02/Part{}_label.bmp", "kos03/Part{}_label.bmp"],
        ["next: pcasvm-cam fit ROOT --pool dense:3 --masks ROOT\n"],
    ),
    "Kolektor 2": (
        ["train/{}.png", "test/{}.png"], ["train/{}_GT.png", "test/{}_GT.png"],
        ["next: pcasvm-cam fit ROOT/train --pool dense:3 --masks ROOT/train\n"],
    ),
    "DAGM, a class of it": (
        ["Train/{}.PNG", "Test/{}.PNG"], ["Train/Label/{}_label.PNG", "Test/Label/{}_label.PNG"],
        ["next: pcasvm-cam fit ROOT/Train --pool dense:3 --masks ROOT/Train"],
    ),
    "Roboflow, semantic masks": (
        [f"{part}/{ROBOFLOW.format('{}', '.jpg')}" for part in ("train", "valid", "test")],
        [f"{part}/{ROBOFLOW.format('{}', '_mask.png')}" for part in ("train", "valid", "test")],
        ["next: pcasvm-cam fit ROOT/train --pool dense:3 --masks ROOT/train\n"],
    ),
    "Roboflow, folders": (
        [f"{part}/{label}/{ROBOFLOW.format('{}', '.jpg')}" for part in ("train", "valid") for label in ("a", "b")], [],
        ["next: pcasvm-cam fit ROOT/train\n"],
    ),
    "images and masks": (
        ["images/{}.jpg"], ["masks/{}.png"], ["next: pcasvm-cam fit ROOT --pool dense:3 --masks ROOT/masks\n"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_check_proposes_the_line_for_the_folders_of(name, tmp_path, capsys):
    photos, masks, proposed = LAYOUTS[name]
    for patterns, pixels in ((photos, PHOTO), (masks, MASK)):
        for pattern in patterns:
            for number in range(4):
                path = tmp_path / pattern.format(f"{number:03}")
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(path)
    status, told, error = run(capsys, "check", tmp_path)
    assert status == 0, error
    assert f"{4 * len(photos)} photos" in told
    if masks:
        assert f"left out: {4 * len(masks)} pictures are masks" in told
    for line in proposed:
        assert line.replace("ROOT", str(tmp_path)) in told
