"""Layouts of folders: what check proposes works as it is printed, and is what the other commands do."""

import shlex

import numpy as np
import pytest
from PIL import Image
from test_choosing import NETWORK, SIZE, run, save

from pytorch_grad_cam_pcasvm import load_model
from pytorch_grad_cam_pcasvm.studio.cli.arguments import parse_arguments, write_line

QUICK = ["--components", "4", "--C", "1"]


def follow(capsys, told, *more):
    """Run the last command that a text names."""
    line = told.rpartition("pcasvm-cam ")[2].rstrip().rstrip("?")
    return line, run(capsys, *shlex.split(line), *more)


def add_faults(root, images="images", masks="masks"):
    """Write good photos, and those of two faults with a square, and its mask."""
    random, square = np.random.default_rng(0), np.zeros((SIZE, SIZE), np.uint8)
    square[10:20, 8:18] = 255
    for name, colour in (("good", None), ("crack", (250, 20, 20)), ("hole", (20, 20, 250))):
        for row in range(10):
            path = root / images / name / f"{row:03}.png"
            save(path, random, (0, 0, 0))
            if colour is not None:
                pixels = np.asarray(Image.open(path)).copy()
                pixels[square > 0] = colour
                Image.fromarray(pixels).save(path)
                (root / masks / name).mkdir(parents=True, exist_ok=True)
                Image.fromarray(square).save(root / masks / name / path.name)
    return root


def test_folders_of_faults_beside_their_masks_are_fitted_as_check_proposes(tmp_path, capsys):
    root, model = add_faults(tmp_path / "set"), tmp_path / "m.safetensors"
    checked = run(capsys, "check", root)[1]
    assert "classes: crack 10, good 10, hole 10\n" in checked
    way = f"pcasvm-cam fit {root}/images --pool dense:3 --masks {root}/masks"
    assert checked.endswith(f"next: {way}\n")
    more = [*NETWORK, *QUICK, "--out", model]
    status, _, error = run(capsys, "fit", root, *more)
    assert (status, model.exists()) == (2, False)
    meant = f"did you mean pcasvm-cam fit {root}/images --out {model} --backbone"
    assert f"has its folders of photos in {root}/images: {meant}" in error
    line, (status, told, _) = follow(capsys, error)  # with the masks
    assert (status, line.split()[:2]) == (0, ["fit", f"{root}/images"])
    assert load_model(model, NETWORK[1]).net.head.classes_.tolist() == ["background", "crack", "hole"]
    assert "masks: 20 of 30 photos have one; on 10 without one, of the normal class, there is nothing" in told
    for command in ("evaluate", "explain", "atlas", "fit"):
        masks = ["--masks", root / "masks"] if command == "evaluate" else []
        own = [*more, "--pool", "dense:3", "--masks", root / "masks"] if command == "fit" else []
        own = own or ["--model", model, "--trust", NETWORK[1], "--out", tmp_path / command, *masks]
        status, _, error = run(capsys, command, root, *own)
        assert (status, f"did you mean pcasvm-cam {command} {root}/images" in error) == (2, True)
    for command in ("explain", "evaluate"):
        masks = ["--masks", root / "masks"] if command == "evaluate" else []
        own = ["--model", model, "--trust", NETWORK[1], "--out", tmp_path / command, "--device", "cpu"]
        error = run(capsys, command, root, *own, *masks)[2]
        status, told, _ = run(capsys, *shlex.split(error.rpartition("did you mean pcasvm-cam ")[2].split("?")[0]))
        assert (status, (tmp_path / command / "index.html").exists()) == (0, True)


def test_parts_of_photos_have_the_masks_of_their_parts(tmp_path, capsys):
    for part in ("train", "test"):
        add_faults(tmp_path / "set", f"images/{part}", f"masks/{part}")
    checked = run(capsys, "check", tmp_path / "set")[1]
    assert "train: 30 photos" in checked
    line, (status, told, _) = follow(capsys, checked, *NETWORK, *QUICK, "--out", tmp_path / "m.safetensors")
    assert line == f"fit {tmp_path}/set/images/train --pool dense:3 --masks {tmp_path}/set/masks/train"
    assert (status, "masks: 20 of 30 photos have one" in told) == (0, True)
    told = run(capsys, "check", tmp_path / "set" / "images" / "test")[1]
    assert told.endswith(f"next: pcasvm-cam evaluate {tmp_path}/set/images/test\n")


def test_a_data_set_in_a_folder_of_its_own_is_opened_if_that_is_no_class(tmp_path, capsys):
    """As archives are unpacked; good photos of two objects are one class."""
    add_faults(tmp_path / "a" / "tiles", "", "../../masks")
    told = run(capsys, "check", tmp_path / "a")[1]
    line, (_, told, _) = follow(capsys, told)
    assert line == f"check {tmp_path}/a/tiles"
    assert told.endswith(f"next: pcasvm-cam fit {tmp_path}/a/tiles\n")
    add_faults(tmp_path / "b", "good", "../masks")
    told = run(capsys, "check", tmp_path / "b")[1]
    assert told.endswith(f"next, of good photos alone: pcasvm-cam fit {tmp_path}/b/good\n")


def test_masks_and_pages_that_are_typed_are_proposed(tmp_path, capsys):
    root = add_faults(tmp_path)
    checked = run(capsys, "check", root / "images", "--masks", root / "masks", "--normal", "good")[1]
    line, (status, told, _) = follow(capsys, checked, *NETWORK, *QUICK, "--out", tmp_path / "m.safetensors")
    assert line == f"fit {root}/images --pool dense:3 --normal good --masks {root}/masks"
    assert (status, "masks: 20 of 30" in told) == (0, True)


@pytest.mark.parametrize("words", [
    "fit 'my photos' --out a.safetensors --size 96 --features a --features b --C 2.5 --gamma scale --tiles 3x2",
    "fit p --size 96x64 --white-level 4095 --page 2 --tile 512 --overlap 0.1 --search --normal '-a b'",
    "evaluate p --trust own:Type --backbone own:make --layer a --layer b --method LIFTCAM --rate 0.05 --all-images",
    "explain p --at 3,4 --components 0 --outline --class good --baseline mean",
])  # fmt: skip
def test_a_line_that_is_written_is_the_one_that_was_typed(words):
    options = parse_arguments(shlex.split(words.replace("--normal '", "'--normal=")))
    assert parse_arguments(shlex.split(write_line(options, options.name))[1:]) == options


def test_a_line_of_another_command_has_what_that_one_takes():
    typed = parse_arguments(["fit", "p", "--out", "a.safetensors", "--size", "96", "--threads", "2", "--C", "1"])
    line = write_line(typed, "evaluate", images="q", masks="m")
    assert line == "pcasvm-cam evaluate q --masks m --threads 2 --model a.safetensors"
    drawn = parse_arguments(["explain", "p", "--out", "maps2", "--trust", "a:b", "--page", "2"])
    assert write_line(drawn, "evaluate") == "pcasvm-cam evaluate p --page 2 --trust a:b"
