"""Disks that cannot be written, or are full: said before the work where it can be known, and with the file's name."""

import errno
import os
import re
import shutil
import sys
import tempfile

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet
from small import of_fit

from pytorch_grad_cam_pcasvm.studio import cli
from pytorch_grad_cam_pcasvm.studio.cli import main, training

BACKBONE = """
import torch
from torch import nn


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU()).eval()
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with photos, a backbone and a head."""
    root = tmp_path_factory.mktemp("disks")
    random = np.random.default_rng(0)
    for name in ("good", "bad parts"):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(6):
            pixels = random.integers(90, 160, (64, 64, 3)).astype(np.uint8)
            pixels[20:30, 20:40] = 255 if name != "good" else pixels[20:30, 20:40]
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    (root / "disks_backbone.py").write_text(BACKBONE)
    return root


@pytest.fixture
def network(here, monkeypatch):
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("PYTHONPATH", str(here))
    return [str(here / "photos"), "--backbone", "disks_backbone:small", "--layer", "2"]


@pytest.fixture
def head(here, network, capsys):
    if not (here / "head.safetensors").exists():
        assert main(["fit", *of_fit(network), "--components", "3", "--out", str(here / "head.safetensors")]) == 0
        capsys.readouterr()
    return str(here / "head.safetensors")


def error_of(capsys, status):
    assert status == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


class WithoutPyarrow:
    """An importer of a machine without pyarrow."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] == "pyarrow":
            raise ModuleNotFoundError(f"No module named {name!r}")


def test_an_atlas_alone_needs_pyarrow(here, tmp_path, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutPyarrow(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "pytorch_grad_cam_pcasvm.studio.atlas.parquet", raising=False)
    monkeypatch.syspath_prepend(here)
    photos, model = str(here / "photos"), str(tmp_path / "model.safetensors")
    backbone = ["--backbone", "disks_backbone:small", "--layer", "2"]
    assert main(["fit", photos, *backbone, "--components", "3", "--no-cache", "--out", model]) == 0
    network = [photos, "--model", model, *backbone]
    assert main(["explain", *network, "--out", str(tmp_path / "maps")]) == 0
    for line in (["atlas", *network], ["explore", str(tmp_path)]):
        message = error_of(capsys, main([*line, "--out", str(tmp_path / "atlas")]))
        assert message == "error: an atlas is kept in Parquet files: pip install 'pytorch_grad_cam_pcasvm[atlas]'"
    assert not (tmp_path / "atlas").exists()


@pytest.mark.parametrize("command", ["fit", "explain", "evaluate", "atlas", "export", "explore"])
def test_where_nothing_can_be_written_is_said_before_the_work(command, network, head, tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    options = [str(tmp_path)] if command == "explore" else [*network, *(["--model", head] if command != "fit" else [])]
    monkeypatch.setattr(cli, "refuse_missing", lambda options: options.__dict__.update(run=lambda: 1 / 0))
    monkeypatch.setattr(cli, "refuse_photos", lambda options: None)

    def said(out):
        return error_of(capsys, main([command, *options, "--out", str(tmp_path / out)]))

    if command in ("fit", "export"):
        assert "folder is a folder: give a file" in said("folder")
        assert re.search(r"there is no folder .*none to write head\.onnx in: make it first", said("none/head.onnx"))
    else:
        assert "file is a file: give a folder" in said("file")
        assert "file is a file: give a folder" in said("file/maps")
    new = "folder/new.safetensors" if command == "fit" else "folder/new"
    assert said(new).startswith("error: division by zero")  # there it can be

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied", "folder/tmp123")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # whoever runs tests may be allowed everything
    expected = f"error: {tmp_path}/{new} cannot be written: you may not write in the folder {tmp_path}/folder"
    assert said(new) == f"{expected} (Permission denied)"
    monkeypatch.undo()
    assert not list((tmp_path / "folder").iterdir())


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_picture(network, head, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Image.Image, "save", full)
    line = error_of(capsys, main(["explain", *network, "--model", head, "--out", str(tmp_path / "maps")]))
    picture = f"{tmp_path}/maps/bad parts/0.png"
    assert line == f"error: {picture} cannot be written: the disk is full (No space left on device)"


@pytest.mark.usefixtures("head")  # features are there already
def test_a_full_disk_names_the_head(network, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    file = tmp_path / "other.safetensors"
    line = error_of(capsys, main(["fit", *of_fit(network), "--components", "3", "--out", str(file)]))
    assert line == f"error: {file} cannot be written: the disk is full (No space left on device)"
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def test_what_goes_away_is_not_said_to_be_kept(here, network, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(np, "savez", full)
    out = ["--out", str(tmp_path / "head.safetensors"), "--components", "3"]
    line = error_of(capsys, main(["fit", *of_fit(network), "--no-cache", *out]))
    assert re.fullmatch(
        r"error: the shard .*part-00000\.npz cannot be written: the disk is full \(No space left on device\): make "
        r"room, or name a folder for temporary files in TMPDIR \(it is .* now\)",
        line,
    )
    monkeypatch.setattr(training, "cache_folder", lambda: tmp_path / "cache")
    assert main(["fit", *of_fit(network), *out]) == 2  # there is no room for either
    told = capsys.readouterr().err
    assert "features are not kept for the next command: the shard" in told
    assert "shards are kept" not in told
    monkeypatch.undo()
    photos = tmp_path / "photos"
    shutil.copytree(here / "photos", photos)
    (photos / "good" / "3.png").write_bytes(b"no picture")
    monkeypatch.syspath_prepend(here)
    network = [str(photos), *network[1:]]
    line = error_of(capsys, main(["fit", *of_fit(network), "--no-cache", *out]))
    assert line.endswith(": mend or delete it, or add --skip-bad-images")
    assert "kept" not in line


def test_in_an_atlas_what_is_finished_is_kept(network, head, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parquet, "write_table", full)
    line = error_of(capsys, main(["atlas", *network, "--model", head, "--out", str(tmp_path / "atlas")]))
    assert line.endswith(
        "cannot be written: the disk is full (No space left on device); all finished shards are kept: make room and "
        "run the same build again"
    )


@pytest.mark.parametrize(
    ("command", "kept"),
    [("fit", True), ("fit --no-cache", False), ("atlas", True), ("explain", False), ("evaluate", False)],
)
def test_only_what_can_be_resumed_is_said_to_be(command, kept, network, head, tmp_path, capsys, monkeypatch):
    def interrupt(options):
        def run():
            raise KeyboardInterrupt

        options.run = run

    monkeypatch.setattr(cli, "refuse_missing", interrupt)
    monkeypatch.setattr(cli, "refuse_photos", lambda options: None)
    name, *more = command.split()
    heads = [] if name == "fit" else ["--model", head]
    out = tmp_path / ("out.safetensors" if name == "fit" else "out")
    assert main([name, *more, *network, *heads, "--out", str(out)]) == 130
    said = "stopped: finished work is kept; run the same command again to resume" if kept else "stopped"
    assert capsys.readouterr().err == f"{said}\n"
