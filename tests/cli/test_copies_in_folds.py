"""Copies of photos on the command line, photos that were trained on, and what is looked at before any work."""

import json
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from test_choosing import NETWORK, SIZE, make_photos, run, save

from pytorch_grad_cam_pcasvm import evaluation, load_model
from pytorch_grad_cam_pcasvm.studio.cli import drawing, fitting
from pytorch_grad_cam_pcasvm.studio.cli.arguments import parse_arguments
from pytorch_grad_cam_pcasvm.studio.data.copies import parse_hashes

OPTIONS = [*NETWORK, "--components", "4", "--C", "10", "--class-weight", "none"]


def name_trusted():
    return ["--trust", NETWORK[1], "--device", "cpu"]


@pytest.fixture
def photos(tmp_path):
    return make_photos(tmp_path / "photos", {"crack": 12, "good": 12}, apart=30.0)


def add_copies(root, name, labelled):
    """Write three versions of each photo: itself, mirrored, and turned by 7 degrees, whose pictures differ."""
    random = np.random.default_rng(7)
    for number in range(16):
        first = root / labelled(number) / name(number, 0)
        save(first, random, random.normal(0, 20, 3))
        with Image.open(first) as photo:
            for place, copy in enumerate((ImageOps.mirror(photo), photo.rotate(7)), 1):
                (root / labelled(number) / name(number, place)).parent.mkdir(parents=True, exist_ok=True)
                copy.save(root / labelled(number) / name(number, place))
    return root


def label(number):
    return "ab"[np.random.default_rng(number).integers(2)] if number > 3 else "ab"[number % 2]


@pytest.mark.parametrize("form", ["{:02}_jpg.rf.{}a0b1c2d3e4f5.png", "{:02}_aug{}.png", "{:02}_{}.png"])
def test_copies_are_in_one_fold_as_if_their_object_was_named(tmp_path, capsys, monkeypatch, form):
    monkeypatch.setattr(fitting, "tell_next_step", lambda *_: None)  # which fits forests
    alone = add_copies(tmp_path / "alone", form.format, label)
    named = add_copies(tmp_path / "named", "{:02}/{}.png".format, label)
    out = ["--out", tmp_path / "m.safetensors"]
    _, told, _ = run(capsys, "fit", alone, *OPTIONS, *out)
    assert "copies: 48 photos look like copies of 16 (" in told
    assert "those of one are in one fold (--groups decides otherwise)" in told
    _, of_objects, _ = run(capsys, "fit", named, *OPTIONS, "--groups", "2", *out)
    assert "copies:" not in of_objects
    score = re.compile(r"5-fold cross-validation: .*\n.*\n")
    assert score.search(told)[0] == score.search(of_objects)[0]
    _, checked, _ = run(capsys, "check", alone)
    assert "copies: 48 photos look like copies of 16 (" in checked
    assert f"next: pcasvm-cam fit {alone}" in checked


def test_one_photo_with_two_labels_is_told_as_that(photos, tmp_path, capsys):
    with Image.open(photos / "crack" / "03.png") as photo:
        photo.transpose(Image.Transpose.ROTATE_90).save(photos / "good" / "wrong.png")
    for command in (["check", photos], ["fit", photos, *OPTIONS, "--out", tmp_path / "m.safetensors"]):
        _, told, _ = run(capsys, *command)
        assert re.search("one photo, two labels, as far as .*: crack/03.png = good/wrong.png; keep the one", told)
    shutil.copytree(photos, tmp_path / "all" / "train")
    (tmp_path / "all" / "test" / "good").mkdir(parents=True)
    shutil.move(tmp_path / "all" / "train" / "good" / "wrong.png", tmp_path / "all" / "test" / "good")
    _, told, _ = run(capsys, "check", tmp_path / "all")
    pair = "test/good/wrong.png = train/crack/03.png"
    assert f"the same photo in test and train, so that scores are too good: {pair}" in told
    assert f"one photo, two labels, as far as small pictures tell: {pair}" in told


def test_photos_that_were_trained_on_are_not_counted_as_a_test(photos, tmp_path, capsys, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation.Study, "report", stop)  # whose measures are tested elsewhere
    model, out = tmp_path / "m.safetensors", ["--out", tmp_path / "maps"]
    run(capsys, "fit", photos, *OPTIONS, "--normal", "good", "--out", model)
    assert parse_hashes(load_model(model, NETWORK[1]).about["photos"]).shape == (24, 32)
    explain = ["--model", model, *name_trusted(), *out]
    _, told, _ = run(capsys, "explain", photos, *explain)
    assert "all photos were trained on, or are copies of such: so that no count is a test score\n" in told
    new = make_photos(tmp_path / "new", {"crack": 4, "good": 4}, apart=30.0, seed=5)
    with Image.open(photos / "crack" / "03.png") as photo:
        ImageOps.flip(photo).save(new / "crack" / "known.png")
    _, told, _ = run(capsys, "explain", new, *explain)
    assert "1 of 9 photos was trained on, or is a copy of one that was: left out of what is counted\n" in told
    assert re.search(r"\d of 4 photos that are not good are taken for good\n", told)
    assert re.search(r"Of the 8 with a label", (tmp_path / "maps" / "index.html").read_text())
    evaluate = ["--model", model, *name_trusted(), "--all-images", "--count", "9", "--out", tmp_path / "report"]
    _, told, _ = run(capsys, "evaluate", new, *evaluate)
    assert "1 of 9 photos was trained on, or is a copy of one that was: left out of what is counted\n8 images: " in told
    _, told, _ = run(capsys, "evaluate", photos, *evaluate)
    assert re.search(r"all photos were trained on.*\n9 images: .*: training accuracy, not a test score\n", told)
    run(capsys, "fit", photos, *OPTIONS, "--no-pictures", "--out", model)
    assert "photos" not in load_model(model, NETWORK[1]).about


def test_what_cannot_be_used_is_told_before_the_network_is_made(photos, tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was made")

    monkeypatch.setattr(fitting, "make_named", refuse)
    out = ["--out", tmp_path / "m.safetensors"]
    (photos / "good" / "x.jpg").write_bytes(b"no photo")
    status, _, error = run(capsys, "fit", photos, *OPTIONS, *out)
    assert (status, error.startswith("error: good/x.jpg cannot be read (")) == (2, True)
    assert "the network was made" in run(capsys, "fit", photos, *OPTIONS, "--skip-bad-images", *out)[2]
    named = ["--features", "1", *out]
    assert "did you mean 'resnet18'?" in run(capsys, "fit", photos, "--backbone", "resnet19", *named)[2]
    assert "has no function 'bacbone'" in run(capsys, "fit", photos, "--backbone", "test_choosing:bacbone", *named)[2]
    for state, why in (
        ({"features.0.weight": torch.zeros(2, 3)}, "its 'features.0.weight' is of 2x3 numbers, and "),
        ({"conv.weight": torch.zeros(2)}, "it begins with 'conv.weight', and 'features.0.weight' is expected"),
    ):
        torch.save(state, tmp_path / "w.pth")
        error = run(capsys, "fit", photos, "--backbone", "squeezenet1_1", "--weights", tmp_path / "w.pth", *named)[2]
        assert f"w.pth has no weights of squeezenet1_1: {why}" in error
    (photos / "good" / "x.jpg").unlink()
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes" / "all.json").write_text(json.dumps({"images": [], "annotations": [], "categories": []}))
    error = run(capsys, "fit", photos, *NETWORK, "--pool", "dense:3", "--masks", tmp_path / "boxes", *out)[2]
    assert "COCO" in error
    assert "the network was made" not in error


def test_one_class_alone_names_the_way_for_good_photos(photos, tmp_path, capsys):
    shutil.rmtree(photos / "crack")
    good = photos / "good"
    out = ["--out", tmp_path / "m.safetensors"]
    assert run(capsys, "check", photos)[1].endswith(f"next, of good photos alone: pcasvm-cam fit {good}\n")
    for folder in (photos, good):
        line = run(capsys, "fit", folder, *OPTIONS, *out, "--normal", "good", "--C", "1")[2].rpartition("pcasvm-cam ")[
            2
        ]
        asked = parse_arguments(shlex.split(line))
        assert (asked.images, asked.pool, asked.classifier) == (good, "dense:3", "pca")
        assert (asked.backbone, asked.features, asked.out) == (NETWORK[1], [NETWORK[3]], out[1])
        assert run(capsys, *shlex.split(line))[0] == 0
    assert run(capsys, "fit", good, *NETWORK, "--pool", "dense:3", "--classifier", "neighbours", *out)[0] == 0


def test_what_is_drawn_before_an_interrupt_has_a_page(photos, tmp_path, capsys, monkeypatch):
    model, maps = tmp_path / "m.safetensors", tmp_path / "maps"
    run(capsys, "fit", photos, *OPTIONS, "--resample", "0", "--out", model)
    make, made = drawing._make_card, []

    def interrupted(*arguments):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(arguments[0])
        return make(*arguments)

    monkeypatch.setattr(drawing, "_make_card", interrupted)
    status, told, error = run(capsys, "explain", photos, "--model", model, *name_trusted(), "--out", maps)
    assert (status, error) == (130, "stopped\n")
    assert "wrote maps of 3 of 24 images and " in told
    assert f"open {(maps / 'index.html').resolve().as_uri()}" in told
    assert (maps / "index.html").read_text().count("<figure") == 3
    assert [line.split(",")[0] for line in (maps / "values.csv").read_text().splitlines()] == ["image", *made]
    assert sorted(path.relative_to(maps).with_suffix("").as_posix() for path in maps.rglob("*.png")) == [
        name.removesuffix(".png") for name in made
    ]


def test_photos_under_a_fixed_camera_have_folds_and_are_not_trained_on(tmp_path, capsys):
    scene = np.random.default_rng(0).normal(120, 30, (SIZE, SIZE, 1)).repeat(3, 2)

    def make(root, seed):
        random = np.random.default_rng(seed)
        for number in range(24):
            pixels = scene + random.normal(0, 2, scene.shape) + (0, 40 * (number % 2), 0)
            path = root / ("good", "crack")[number % 2] / f"{seed}{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
        return root

    photos, test, model = make(tmp_path / "photos", 1), make(tmp_path / "test", 2), tmp_path / "m.safetensors"
    for command in (["check", photos], ["fit", photos, *OPTIONS, "--out", model]):
        _, told, _ = run(capsys, *command)
        assert "24 of 24 photos look alike, as under a fixed camera: only names and equal files say which" in told
        assert "copies: " not in told
        assert "two labels" not in told
    assert "5-fold cross-validation: " in told
    shutil.copy(photos / "good" / "100.png", test / "good" / "known.png")
    _, told, _ = run(capsys, "explain", test, "--model", model, *name_trusted(), "--out", tmp_path / "maps")
    assert "1 of 25 photos was trained on, or is a copy of one that was: left out of what is counted\n" in told


def test_copies_that_leave_no_folds_are_told_and_may_be_apart(photos, tmp_path, capsys):
    for path in [*(photos / "crack").iterdir()][1:]:
        path.unlink()
    with Image.open(next((photos / "crack").iterdir())) as photo:
        ImageOps.mirror(photo).save(photos / "crack" / "x.png")
    _, told, _ = run(capsys, "fit", photos, *OPTIONS, "--out", tmp_path / "m.safetensors")
    assert "those of one may be in different folds, as there are too few others (--groups" in told
    assert "2-fold cross-validation: " in told


def test_the_report_is_of_the_photos_that_are_counted(photos, tmp_path, capsys):
    """And says which were left out, or that no number is a test score."""
    model, report = tmp_path / "m.safetensors", tmp_path / "report"
    run(capsys, "fit", photos, *OPTIONS, "--resample", "0", "--out", model)
    new = make_photos(tmp_path / "new", {"crack": 2, "good": 2}, apart=30.0, seed=5)
    line = ["--model", model, *name_trusted(), "--all-images", "--method", "ContributionCAM", "--out", report]

    def evaluate():
        told = run(capsys, "evaluate", new, *line)[1]
        written = json.loads((report / "report.json").read_text())
        assert f'<p class="note">{written["note"]}</p>' in (report / "index.html").read_text() or not written["note"]
        assert f"{written['note']}\n" in told
        shown = {name for names in written["results"]["faithfulness"]["names"].values() for name in names}
        return written["results"]["faithfulness"]["settings"]["images"], written["note"], told, shown

    count, note, told, _ = evaluate()
    assert (count, note) == (4, "")
    assert "4 images: " in told
    shutil.copy(photos / "good" / "00.png", new / "good" / "known.png")
    count, note, told, shown = evaluate()
    assert (count, "good/known.png" in shown) == (4, False)
    assert note == "1 of 5 photos was trained on, or is a copy of one that was: left out of what is counted"
    assert "4 images: " in told
    for name in ("crack/00.png", "crack/01.png"):
        shutil.copy(photos / name, new / name)
    count, note, told, shown = evaluate()
    assert (count, "good/known.png" in shown) == (5, True)
    assert note.startswith("3 of 5 photos were trained on, or are copies of such, and the other 2 are too few: all are")
    assert re.search(r"5 images: .*: training accuracy, not a test score\n", told)
