"""The documents say what the files beside them say."""

import json
from pathlib import Path

import pytest
from experiment import report

DOCS = Path(__file__).parent.parent / "docs"
RUNS = sorted((DOCS / "paper").glob("*/scores.json"))


def test_there_is_a_run_of_every_data_set_of_the_paper():
    assert {file.parent.name for file in RUNS} == set(report.PAPER_F1)


@pytest.mark.parametrize("file", RUNS, ids=lambda file: file.parent.name)
def test_the_tables_of_the_paper_page_are_those_of_the_scores(file):
    text = (DOCS / "paper.md").read_text()
    for row in report.rows(json.loads(file.read_text())):
        assert f"| {' | '.join(row)} |" in text


def test_every_picture_of_the_documents_is_there():
    for page in (DOCS.parent / "README.md", DOCS / "paper.md"):
        pictures = [part.split(")")[0] for part in page.read_text().split("](") if part.split(")")[0].endswith(".png")]
        assert pictures
        for picture in pictures:
            assert (page.parent / picture).is_file(), f"{page.name}: {picture}"
