"""The notebooks run from top to bottom, add up to what scikit-learn computes, and are kept with what they show."""

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from reference import missing, relative

FILES = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def code_cells(file: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], list[Figure]]:
    """Run the cells of a notebook anew; return its variables and the figures that it shows."""
    (file,) = (file for file in FILES if file.stem == name)
    shown: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    variables: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        with mpl.rc_context({"backend": "agg"}), torch.random.fork_rng(devices=[]):
            for cell in code_cells(file):
                lines = ast.parse("".join(cell["source"])).body
                last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
                exec(compile(ast.Module(lines, []), name, "exec"), variables)
                if last is not None:
                    shown.append(eval(compile(ast.Expression(last.value), name, "eval"), variables))
    finally:
        plt.close("all")
        torch.set_num_threads(threads)
    return variables, [figure for figure in shown if isinstance(figure, Figure)]


def kept_pictures(name: str) -> int:
    """Return how many pictures are in the file."""
    (file,) = (file for file in FILES if file.stem == name)
    outputs = [output for cell in code_cells(file) for output in cell["outputs"]]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def margins_by_scikit_learn(pipeline: Any, features: np.ndarray) -> np.ndarray:
    """Return for every class the sum of its pairwise decisions, shape (N, C)."""
    machine = pipeline[-1].set_params(decision_function_shape="ovo")
    pairs = machine.decision_function(pipeline[:-1].transform(features))
    machine.set_params(decision_function_shape="ovr")
    first, second = np.triu_indices(len(machine.classes_), 1)
    margins = np.zeros((len(features), len(machine.classes_)))
    for pair, (one, other) in enumerate(zip(first, second, strict=True)):
        margins[:, one] += pairs[:, pair]
        margins[:, other] -= pairs[:, pair]
    return margins


@pytest.mark.slow
def test_from_features_to_maps(monkeypatch, capsys):
    found, figures = run("from-features-to-maps", monkeypatch)
    assert len(figures) == kept_pictures("from-features-to-maps") == 4
    assert "same labels as scikit-learn: True" in capsys.readouterr().out
    assert found["accuracy"] > 0.9

    rows = found["rows"]
    margins = margins_by_scikit_learn(found["pipeline"], found["test_features"][rows])
    p = found["pipeline"][:-1].transform(found["test_features"][rows])
    expected = np.column_stack([p, margins[range(len(rows)), found["predicted"][rows]]])
    contributions, sums = found["contributions"], found["sums"]
    size = contributions.maps.abs().sum((2, 3)) + contributions.baseline_values.abs()
    assert ((sums - torch.tensor(expected)).abs() < 1e-5 * size).all()
    assert contributions.maps.shape == found["gradient_maps"].maps.shape == (3, 5, 10, 10)
    assert found["true"] != found["wrong"]


@pytest.mark.slow
def test_what_a_component_means(monkeypatch):
    found, figures = run("what-does-a-component-mean", monkeypatch)
    assert len(figures) == kept_pictures("what-does-a-component-mean") == 5
    assert found["accuracy"] > 0.9

    pooled = found["pool"](found["features"](found["seen"])).numpy(force=True)
    p = found["pipeline"][:-1].transform(pooled)[:, 0]
    assert relative(found["first"], p) < 1e-5
    parts = torch.stack([found["raises"][:, 0], found["lowers"][:, 0]], -1)
    assert missing(parts, torch.tensor(p[found["rows"]])) < 1e-5
    # The mean is the origin: a map has the sign of its component, but for one that is less than its rounding.
    assert missing(found["explained"].maps.flatten(2), found["explained"].values) < 1e-5
    assert found["contradictions"]["mean"].max() <= 1 / len(p)

    # What the last figure is said to show: mirroring moves digits that are open on one side more than symmetric ones.
    moved = np.abs(np.subtract(*found["means"]))
    assert moved[[3, 4, 6, 7]].min() > moved[[0, 1, 8]].max()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_notebooks_are_kept_as_they_ran(file):
    assert file.stat().st_size < 500_000
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
