"""The documents say what the files beside them say."""

import itertools
import json
import re
from pathlib import Path

import layers
import mistake
import numpy as np
import photo
import photos
import pytest
import sure_digits
import torch
import torchvision
from experiment import report
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

DOCS = Path(__file__).parents[2] / "docs"
RUNS = sorted((DOCS / "paper").glob("*/scores.json"))


def test_there_is_a_run_of_every_data_set_of_the_paper():
    assert {file.parent.name for file in RUNS} == set(report.PAPER_F1)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.parent.name)
def test_the_tables_of_the_paper_page_are_those_of_the_scores(file):
    text = (DOCS / "paper.md").read_text()
    for row in report.rows(json.loads(file.read_text())):
        assert f"| {' | '.join(row)} |" in text


def test_every_picture_of_the_documents_is_there():
    pages = (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md")))
    links = [(page, part.split(")")[0]) for page in pages for part in page.read_text().split("](")]
    pictures = [page.parent / link for page, link in links if link.endswith(".png")]
    assert DOCS / "layers.png" in pictures
    assert not [picture for picture in pictures if not picture.is_file()]


def test_every_room_imports_from_those_above_it_in_the_table():
    package = DOCS.parent / "pytorch_grad_cam_pcasvm"
    table = (DOCS / "architecture.md").read_text().split("## Folders")[1]
    rooms = [name for row in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(.*?)`", row)]
    faces = [
        "studio/__init__.py",
        "export/",
        *(path.name for path in package.glob("*.py")),
    ]
    rooms += faces  # which hand on names of all rooms

    def room(path):
        """Return the longest name of a room that a path begins with."""
        return max((name for name in rooms if f"{path}/".startswith(name)), key=len)

    imported = set()
    for file in package.rglob("*.py"):
        place = room(file.relative_to(package))
        imports = r"^from pytorch_grad_cam_pcasvm\.([\w.]+) import \(?\s*(\w+)"
        for name, first in re.findall(imports, file.read_text(), re.MULTILINE):
            path = f"studio/{first}" if name == "studio" else name.replace(".", "/")
            other = room(path if (package / path).is_dir() else f"{path}.py")
            if other not in (place, "version.py") and place not in faces:
                imported.add((place, other))
    assert ("methods/", "path/") in imported
    assert not [(place, other) for place, other in imported if rooms.index(place) < rooms.index(other)]


@pytest.mark.slow
def test_the_example_of_layers_runs(tmp_path, monkeypatch, capsys):
    some = load_digits()
    some.images, some.target = some.images[:120], some.target[:120]
    monkeypatch.setattr(layers, "load_digits", lambda: some)
    monkeypatch.setattr("sys.argv", ["layers.py", "--epochs", "1", "--out", str(tmp_path / "new" / "layers.png")])
    threads = torch.get_num_threads()
    try:
        layers.main()
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "new" / "layers.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("x") >= 3  # 4x4, 8x8, 16x16


@pytest.fixture
def noise(tmp_path):
    """Pictures of two classes that look the same: some will be classified wrongly, and some correctly."""
    rng = np.random.default_rng(0)
    for part, name in itertools.product(("train", "test"), ("cat", "dog")):
        (tmp_path / part / name).mkdir(parents=True)
        for number in range(9):
            Image.fromarray(rng.integers(0, 256, (24, 24, 3), np.uint8)).save(tmp_path / part / name / f"{number}.png")
    return tmp_path


def test_the_example_of_photos_runs(noise, monkeypatch, capsys):
    small = nn.Sequential(nn.Conv2d(3, 20, 16, 16), nn.ReLU())
    monkeypatch.setattr(photos, "convolutions", lambda name, weights: small)
    monkeypatch.setattr("sys.argv", ["photos.py", f"--root={noise}", f"--out={noise / 'new' / 'photos.png'}"])
    photos.main()
    assert (noise / "new" / "photos.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"\d+% of 18 test photos .*\n.*photos.png: (cat|dog)", capsys.readouterr().out)


@pytest.mark.slow
def test_the_example_of_a_mistake_runs(noise, monkeypatch, capsys):
    small = nn.Sequential(nn.Conv2d(3, 4, 16, 16), nn.ReLU())
    monkeypatch.setattr(mistake, "convolutions", lambda name, weights: small)
    given = [
        f"--{name}={noise / value}" for name, value in (("train", "train"), ("test", "test"), ("out", "new/m.png"))
    ]
    monkeypatch.setattr("sys.argv", ["mistake.py", *given, "--components", "3"])
    mistake.main()
    assert (noise / "new" / "m.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"m.png: predicted \"(cat|dog)\", but it is \"(cat|dog)\"", capsys.readouterr().out)


def test_a_wheel_has_every_folder():
    name = "pytorch_grad_cam_pcasvm"
    assert f'[tool.setuptools.packages.find]\ninclude = ["{name}*"]\n' in (DOCS.parent / "pyproject.toml").read_text()
    folders = {file.parent for file in (DOCS.parent / name).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.slow
def test_the_photo_of_the_readme_is_drawn(tmp_path, monkeypatch):
    weights = tmp_path / "weights.pth"
    torch.save(torchvision.models.mobilenet_v2().state_dict(), weights)
    monkeypatch.setattr("sys.argv", ["photo.py", "--weights", str(weights), "--out", str(tmp_path / "photo.png")])
    photo.main()
    assert (tmp_path / "photo.png").stat().st_size > 20_000


@pytest.mark.slow
def test_the_picture_of_what_is_sure_shows_what_is_written_below_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sure_digits.py", "--out", str(tmp_path / "sure.png")])
    sure_digits.main()
    assert (tmp_path / "sure.png").stat().st_size > 20_000
    measured = re.findall(r"(\d+) digits: .* (\d+)% of the evidence sure", capsys.readouterr().out)
    written = re.search(
        r"from (40) digits (\d+) % is sure, from (240)\s+digits (\d+) %", (DOCS / "reading.md").read_text()
    )
    assert [count for count, _ in measured] == [written[1], written[3]]
    assert [float(share) for _, share in measured] == pytest.approx([float(written[2]), float(written[4])], abs=5)
