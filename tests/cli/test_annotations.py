"""Annotations on the command line: they teach and measure what masks of the same shapes do."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from test_dense_commands import NETWORK, images, load_fitted, picture

from pytorch_grad_cam_pcasvm.studio.cli import main

OPTIONS = ["--pool", "dense", "--components", "4", "--C", "1", "--no-cache", "--masks"]


@pytest.fixture(scope="module")
def spotted(tmp_path_factory):
    """Photos in one folder, four good and five with a spot; masks; and the same as one file of COCO's."""
    root, random = tmp_path_factory.mktemp("spotted"), np.random.default_rng(0)
    listed, annotations = [], []
    for folder in ("test/parts", "masks"):
        (root / folder).mkdir(parents=True)
    for number in range(9):
        photo, mask = picture(random, number > 3)
        photo.save(root / "test" / "parts" / f"{number}.png")
        mask.save(root / "masks" / f"{number}.png")
        listed.append({"id": number, "file_name": f"parts\\{number}.png", "width": 100, "height": 80})
        if (inside := np.asarray(mask)).any():
            (top, left), (bottom, right) = (edge(np.nonzero(inside), 1) for edge in (np.min, np.max))
            ring = [left, top, right + 1, top, right + 1, bottom + 1, left, bottom + 1]
            annotations.append({
                "id": number,
                "image_id": number,
                "category_id": 3,
                "segmentation": [list(map(int, ring))],
            })
    Image.new("RGB", (100, 80)).save(root / "test" / "parts" / "9.png")  # of which nobody says anything
    text = {"images": [*listed, {"id": 99, "file_name": "val/1.jpg"}], "annotations": annotations}
    (root / "coco.json").write_text(json.dumps(text | {"categories": [{"id": 3, "name": "spot"}]}))
    return root


def test_a_file_of_annotations_teaches_what_masks_teach(spotted, tmp_path, capsys):
    one = load_fitted(spotted, tmp_path, [*OPTIONS, str(spotted / "coco.json")])
    said = capsys.readouterr().out
    assert (
        "masks: 9 of 10 photos have one (COCO); on 4 of them there is nothing; 1 photo in the annotations is not in "
        "the folder, such as val/1.jpg; 1 without one is left out, for what is on it is unknown, such as parts/9.png: "
        'list those with nothing on them under "images" there, or name the folder of good photos, --normal NAME\n'
    ) in said
    other = load_fitted(spotted, tmp_path, [*OPTIONS, str(spotted / "masks")])
    x, _ = images(spotted, "test/parts")
    assert torch.equal(one.net(x), other.net(x))
    assert (one.about["rows"], one.about["score"]) == (other.about["rows"], other.about["score"])


def test_annotations_that_say_nothing_of_the_photos_are_refused_before_the_network_is_made(spotted, capsys):
    (spotted / "other").mkdir()
    (spotted / "other" / "a.json").write_text(json.dumps({"images": [{"id": 1, "file_name": "x.png"}]}))
    line = ["fit", str(spotted / "test"), *NETWORK[:2], "--pool", "dense", "--masks", str(spotted / "other")]
    assert main(line) == 2
    assert (
        "other has annotations of COCO, but none of a picture here: the first of these is parts/0.png, and it has "
        "x.png; name pictures as the annotations do\n"
    ) in capsys.readouterr().err
