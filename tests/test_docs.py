"""The documents say what the files beside them say."""

import json
from pathlib import Path

import pytest
from experiment import report

ROOT = Path(__file__).parent.parent
RUNS = sorted((ROOT / "docs" / "paper").glob("*/scores.json"))


def test_there_is_a_run_of_every_data_set_of_the_paper():
    assert {file.parent.name for file in RUNS} == set(report.PAPER_F1)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.parent.name)
def test_the_tables_of_the_paper_page_are_those_of_the_scores(file):
    scores = json.loads(file.read_text())
    text = (ROOT / "docs" / "paper.md").read_text()
    ours, theirs = report.f1_rows(scores)
    assert f"| {scores['dataset']} | {' | '.join(ours[2:])} | {' | '.join(theirs[2:])} |" in text
    maps = scores["maps"]
    ratios = " / ".join(f"{ratio:.0f}" for ratio in scores["contribution ratios"][:3])
    close = [" / ".join(f"{row['mean']:.2f}" for row in rows) for rows in maps["closeness of SVM maps"].values()]
    random = [f"{row['mean']:.2f}" for row in maps["correlation with randomised dense layers"].values()]
    assert f"| {scores['dataset']} | {ratios} | {' | '.join(close)} | {random[0]} | {random[-1]} |" in text
    for kind in ("deletion", "insertion"):
        gains = [curve[f"{kind}, better than random"] for curve in maps["curves"].values()]
        cells = [f"{g['mean']:+.2f} ± {g['standard error']:.2f}" for g in gains]
        assert f"| {scores['dataset']}, {kind} | {' | '.join(cells)} |" in text
