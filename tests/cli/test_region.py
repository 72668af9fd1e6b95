"""The option ``--region``: the share of the evidence inside of a box or masks, and decisions without it."""

import csv
import math

import numpy as np
import pytest
import torch
from PIL import Image
from test_choosing import NETWORK, make_photos, run

from pytorch_grad_cam_pcasvm import SVMTarget, load_model
from pytorch_grad_cam_pcasvm.studio.cli.region import RegionShares


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    for label, tint in (("a", [60, 0, 0]), ("b", [0, 60, 0])):
        for number in range(14):
            drawn = np.random.default_rng(100 * tint[0] + number).normal(90, 20, (32, 32, 3))
            drawn[:12, :16] += tint
            (root / label).mkdir(exist_ok=True)
            Image.fromarray(drawn.clip(0, 255).astype(np.uint8)).save(root / label / f"{number:02}.png")
    return root


@pytest.fixture(scope="module")
def model(photos, tmp_path_factory):
    from pytorch_grad_cam_pcasvm.studio.cli import main

    file = tmp_path_factory.mktemp("model") / "m.safetensors"
    assert main(["fit", str(photos), *NETWORK, "--components", "4", "--resample", "4", "--out", str(file)]) == 0
    return file


def explain(capsys, photos, model, out, *more):
    trusted = ["--model", model, "--trust", NETWORK[1], "--device", "cpu", "--out", out]
    status, told, error = run(capsys, "explain", photos, *trusted, *more)
    assert status == 0, error
    return told, list(csv.DictReader((out / "values.csv").open())), (out / "index.html").read_text()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_box_has_a_share_of_the_evidence_and_decisions_without_it(photos, model, tmp_path, capsys):
    told, rows, page = explain(capsys, photos, model, tmp_path, "--region", "0,0,0.5,0.375")
    loaded = load_model(model, NETWORK[1])
    images = loaded.read(sorted(photos.rglob("*.png")))
    mask = torch.zeros(32, 32)
    mask[:12, :16] = 1
    found = loaded.explain(images, SVMTarget()).share(mask)
    for row, share, error in zip(rows, found.total[:, 0], found.error[:, 0], strict=True):
        assert float(row["share in the region"]) == pytest.approx(float(share), rel=1e-4)
        assert float(row["error of share in the region"]) == pytest.approx(float(error), rel=1e-3)
    changed = [float(row["decision changes without the region"]) for row in rows]
    mean = np.mean([float(row["share in the region"]) for row in rows])
    assert (
        f"in the region, 19% of the picture, is {mean:.0%} of the evidence, on average of 28 photos; covering it "
        f"changes the decision of {sum(changed):.0f} of 28" in told
    )
    assert f"{float(found.total[0, 0]):.0%} \N{PLUS-MINUS SIGN} " in page
    assert "of the evidence in the region, 19% of the picture; the decision " in page
    predicted = loaded.net.predict(images)
    blank = images.clone()
    blank[:, :, :12, :16] = (images * (1 - mask)).sum((2, 3), keepdim=True) / (1 - mask).sum()
    assert changed == (loaded.net.predict(blank) != predicted).tolist()
    assert sum(changed) >= 5


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_masks_are_regions_and_photos_without_one_are_not_counted(photos, model, tmp_path, capsys):
    for number in range(14):
        drawn = np.zeros((32, 32), np.uint8)
        drawn[16:, :] = 255 * (number > 3)
        (tmp_path / "rim" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(drawn).save(tmp_path / "rim" / "a" / f"{number:02}.png")
    told, rows, _ = explain(capsys, photos, model, tmp_path / "maps", "--region", tmp_path / "rim")
    shares = {row["image"]: row["share in rim"] for row in rows}
    assert [name for name, share in shares.items() if share] == [f"a/{number:02}.png" for number in range(4, 14)]
    assert "in rim, 50% of the picture, is " in told
    assert "of the evidence, on average" in told
    assert "of the evidence, on average of 10 photos; covering it changes the decision of " in told
    assert not math.isnan(float(shares["a/04.png"]))


@pytest.mark.parametrize("text", ["0,0,2,1", "0.5,0,0.6,1", "0,0,0,1", "1,2", "nan,0,1,1"])
def test_a_box_lies_in_the_photo(text, photos, capsys):
    with pytest.raises(SystemExit):
        run(capsys, "explain", photos, "--region", text)
    assert "a box is LEFT,TOP,WIDTH,HEIGHT from 0 to 1 of the photo's sides" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_good_parts_the_share_is_of_the_strongest_patch_and_no_decision_is_asked(tmp_path, capsys):
    root, file = make_photos(tmp_path / "photos", {"good": 6}), tmp_path / "m.safetensors"
    assert run(capsys, "fit", root / "good", *NETWORK, "--pool", "dense", "--out", file)[0] == 0
    told, rows, page = explain(capsys, root / "good", file, tmp_path / "maps", "--region", "0,0,0.25,1")
    assert "in the region, 25% of the picture, is " in told
    assert "of the evidence for the strongest patch, on average of 6 photos\n" in told
    assert not any("decision changes" in name for name in rows[0])
    assert "of the evidence for the strongest patch in the region, 25% of the picture" in page


def test_places_of_a_padded_photo_that_it_has_not_are_neither_inside_nor_beside():
    region = RegionShares("the region", (0.0, 0.0, 0.25, 1.0), None, "pad")
    places = region.draw(0, (64, 32), (32, 32))
    assert (places[:8] == -1).all()
    assert (places[24:] == -1).all()
    assert (places[8:24, :8] == 1).all()
    assert (places[8:24, 8:] == 0).all()
