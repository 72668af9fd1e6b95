"""The comparison of methods on a handful of small pictures, and what it measures with."""

import json
from pathlib import Path

import faithfulness
import numpy as np
import pytest
import torch
from experiment import comparison, evaluation
from PIL import Image
from pytorch_grad_cam.metrics.perturbation_confidence import PerturbationConfidenceMetric
from sklearn.svm import SVC

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def data(tmp_path):
    """Bright squares, to the left or to the right."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 10), ("test", 4)):
        for label, name in enumerate(("left", "right")):
            folder = tmp_path / "data" / "folder" / part / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 90, size=(40, 40, 3), dtype=np.uint8)
                pixels[10:30, 4 + 20 * label : 16 + 20 * label] += 150
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


def test_a_run_leaves_tables_numbers_and_a_figure_and_goes_on_from_what_it_kept(
    data, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(faithfulness, "SVMS", {"RBF": SVC})
    out = tmp_path / "out"
    options = [
        *("--sets", "folder", "--root", str(data), "--weights", str(weights), "--backbone", "squeezenet1_1"),
        *("--size", "64", "--images", "2", "--epochs", "1", "--score-images", "2", "--score-channels", "2"),
        *("--out", str(out)),
    ]
    assert faithfulness.main(options) == 0
    results = json.loads((out / "faithfulness.json").read_text())
    kept = {file: file.stat().st_mtime_ns for file in (out / "cache").glob("*.npy")}
    assert kept
    assert faithfulness.main(options) == 0
    assert {file: file.stat().st_mtime_ns for file in (out / "cache").glob("*.npy")} == kept
    assert json.loads((out / "faithfulness.json").read_text()) == results
    text = (out / "faithfulness.md").read_text()
    assert text in capsys.readouterr().out
    for row in comparison.ROWS:
        assert text.count(f"| {row} |") == 3  # all sets, deletion and insertion, side by side
    assert (out / "faithfulness.png").read_bytes().startswith(b"\x89PNG")
    of_set = results["sets"]["folder"]
    for row in of_set["faithfulness"]["RBF"]["methods"].values():
        assert all(len(row[kind]) == 2 for kind in comparison.KINDS)
    blind = of_set["side by side"]["RBF"]["methods"][comparison.BLIND]["share"]
    assert blind == pytest.approx([0.5, 0.5])


def test_a_set_that_is_not_there_is_said_so(weights, tmp_path, capsys):
    options = ["--sets", "chest-xray", "--root", str(tmp_path / "none"), "--weights", str(weights)]
    assert faithfulness.main([*options, "--backbone", "squeezenet1_1", "--out", str(tmp_path / "out")]) == 1
    assert "name the data with --root" in capsys.readouterr().err


@pytest.mark.parametrize("kind", comparison.KINDS)
@pytest.mark.parametrize("fraction", faithfulness.FRACTIONS)
def test_what_is_taken_away_is_what_the_host_takes_away(kind, fraction):
    rng = np.random.default_rng(1)
    x = torch.rand(2, 3, 20, 20)
    order = evaluation.ranks(rng.random((2, 20, 20)))
    ours = evaluation.without(x, evaluation.blurred(x), order, kind, fraction)
    metric = PerturbationConfidenceMetric(evaluation.REMOVALS[kind](fraction))
    _, theirs = metric(
        x, order, [lambda row: row.sum()] * 2, torch.nn.Flatten(), return_visualization=True, return_diff=False
    )
    assert torch.equal(ours, theirs)
    changed = (ours != x).any(1).sum((1, 2)).tolist()
    assert changed == [round(400 * (fraction if kind == "deletion" else 1 - fraction))] * 2


def test_maps_that_say_nothing_are_ordered_at_random_and_others_as_they_are():
    maps = torch.zeros(2, 4, 4)
    maps[1] = torch.arange(16.0).reshape(4, 4)
    first, second = evaluation.upsampled(maps, (4, 4), np.random.default_rng(0))
    assert len(np.unique(first)) == 16
    assert not np.array_equal(evaluation.ranks(first[None]), evaluation.ranks(second[None]))
    np.testing.assert_array_equal(second.ravel().argsort(), np.arange(16))


@pytest.mark.skipif(not (DOCS / "faithfulness").is_dir(), reason="there is no run")
def test_the_tables_of_the_page_are_those_of_the_numbers():
    text = (DOCS / "faithfulness.md").read_text()
    for table in comparison.tables(json.loads((DOCS / "faithfulness" / "faithfulness.json").read_text())).values():
        assert table in text
