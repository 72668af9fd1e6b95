"""Golden files: a text that differs is told, and is written only if that is asked for."""

import golden
import pytest


def test_a_text_that_differs_is_told_and_written_when_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    with pytest.raises(AssertionError, match="write it with pytest --update"):
        golden.compare("new", "one\n", update=False)
    golden.compare("new", "one\n", update=True)
    golden.compare("new", "one\n", update=False)
    with pytest.raises(AssertionError, match="if that is meant: pytest --update"):
        golden.compare("new", "two\n", update=False)
    assert (tmp_path / "new.txt").read_text() == "one\n"


@pytest.mark.parametrize(("text", "shown"), [
    ("AUROC 0.913 of 12 photos", "AUROC #.# of 12 photos"),
    ("cat 4 (50%)", "cat 4 (#%)"),
    ("1.5e-07 of 3 components", "#.# of 3 components"),
    ("wrote /tmp/pytest-of-me/pytest-3/popen-gw1/here0/m.safetensors", "wrote <folder>/m.safetensors"),
    ("did you mean dense:3? It takes 2, got 'x'", "did you mean dense:3? It takes 2, got 'x'"),
])  # fmt: skip
def test_only_what_is_measured_is_masked(text, shown):
    assert golden.mask(text) == shown
