"""The comparison of methods on a handful of small pictures."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import which_layer
import which_method
from experiment import comparison
from PIL import Image
from sklearn.svm import SVC

from pytorch_grad_cam_pcasvm import ClosedFormGradCAM, ContributionCAM
from pytorch_grad_cam_pcasvm.evaluation import Estimate

DOCS = Path(__file__).parents[2] / "docs"


pytestmark = pytest.mark.usefixtures("same_threads")


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


@pytest.mark.slow
def test_a_run_leaves_tables_numbers_and_a_figure_and_goes_on_from_what_it_kept(
    data, weights, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(which_method, "HEADS", {"RBF": SVC})
    some = {"Grad-CAM (the paper's)": (ClosedFormGradCAM, {})}
    some |= {f"Contributions, {base}": (ContributionCAM, {"baseline": base}) for base in ("zero", "mean")}
    for module in (which_method, comparison):
        monkeypatch.setattr(module, "METHODS", some)
    out = tmp_path / "out"
    options = [
        *("--sets", "folder", "--root", str(data), "--weights", str(weights), "--backbone", "squeezenet1_1"),
        *("--size", "64", "--images", "6", "--epochs", "1", "--out", str(out)),
    ]
    assert which_method.main(options) == 0
    results = json.loads((out / "which_method.json").read_text())
    kept = {file: file.stat().st_mtime_ns for file in (out / "cache").glob("*.json")}
    assert len(kept) == 3
    assert which_method.main(options) == 0
    assert {file: file.stat().st_mtime_ns for file in (out / "cache").glob("*.json")} == kept
    assert json.loads((out / "which_method.json").read_text()) == results
    text = (out / "which_method.md").read_text()
    assert text in capsys.readouterr().out
    for row in some:
        # In short, all sets, randomised, deletion and insertion, side by side, contradictions (two).
        assert text.count(f"\n| {row} |") == 7
    assert (out / "which_method.png").read_bytes().startswith(b"\x89PNG")
    (beside,) = [row for row in text.splitlines() if row.startswith("| the blind map | 0.5")]
    assert "nan" not in text
    assert beside


def test_the_mean_over_sets_knows_its_error():
    rng = np.random.default_rng(0)
    means = [
        comparison.together([Estimate.of(rng.normal(size=n)) for n in (20, 80)] + [comparison.NOTHING])
        for _ in range(2000)
    ]
    inside = np.mean([abs(each.mean) < 1.96 * each.standard_error for each in means])
    assert 0.92 < inside < 0.97
    assert means[0].n == 100


def test_a_set_that_is_not_there_is_said_so(weights, tmp_path, capsys):
    options = ["--sets", "chest-xray", "--root", str(tmp_path / "none"), "--weights", str(weights)]
    assert which_method.main([*options, "--backbone", "squeezenet1_1", "--out", str(tmp_path / "out")]) == 1
    assert "name the data with --root" in capsys.readouterr().err


def test_the_page_of_measurements_is_that_of_the_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    text = (DOCS / "measurements.md").read_text()
    assert text == importlib.import_module("measurements").page()
    for name in ("which_method", "which_baseline", "which_trees", "which_layer"):
        sets = json.loads((DOCS / f"{name}.json").read_text())
        assert all(f", {each}\n" in text for each in sets.get("sets", sets))


@pytest.mark.slow
def test_imbalanced_training_sets_and_their_tables(data, weights, tmp_path, monkeypatch):
    monkeypatch.setattr(which_method, "HEADS", {"RBF": SVC})
    few = {"Grad-CAM (the paper's)", "Contributions", "Contributions, zero", "Contributions, balanced mean"}
    some = {name: method for name, method in comparison.METHODS.items() if name in few}
    for module in (which_method, comparison):
        monkeypatch.setattr(module, "METHODS", some)
    out = tmp_path / "out"
    options = [
        *("--sets", "folder:2", "--root", str(data), "--weights", str(weights), "--backbone", "squeezenet1_1"),
        *("--size", "64", "--images", "6", "--epochs", "1", "--out", str(out)),
    ]
    assert which_method.main(options) == 0
    results = json.loads((out / "which_method.json").read_text())
    assert results["sets"]["folder:2"]["training images"] == 10 + 5
    for kind in ("dense", "pooled"):
        counted = results["sets"]["folder:2"]["heads"][kind]["RBF"]["contradictory"]
        assert counted.get("Contributions", {"decision": 0})["decision"] == 0
    tables = comparison.tables(results)
    assert "In short" not in tables  # nothing is randomised
    assert "| RBF | Contributions, zero |" in tables["Baselines, folder:2"]


@pytest.mark.slow
def test_which_layer_measures_halves_and_goes_on_where_it_stopped(data, weights, tmp_path, capsys):
    out = tmp_path / "out"
    options = [
        *("--sets", "folder", "--root", str(data), "--weights", str(weights), "--backbone", "squeezenet1_1"),
        *("--size", "64", "--images", "4", "--components", "3", "--out", str(out)),
    ]
    assert which_layer.main(options) == 0
    results = json.loads((out / "which_layer.json").read_text())
    first, second = results["folder"]["halves"]
    assert first["settings"]["images"] == second["settings"]["images"] == 4
    written = (out / "which_layer.json").stat().st_mtime_ns
    capsys.readouterr()
    assert which_layer.main(options) == 0
    assert (out / "which_layer.json").stat().st_mtime_ns == written
    printed = capsys.readouterr().out
    assert "### What one half recommends, on the other half" in printed
    assert "nan" not in printed
