"""Printed text as it should be, in tests/golden: tests compare with it, and ``pytest --update`` writes it anew.

Look at ``git diff tests/golden`` after that: what is there is what people read.
"""

import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
# What differs between machines, and between versions of Python, Pillow and argparse.
_MASKS = {
    r"(/[^\s/:'\"]+)*/pytest-of-[^/]+/pytest-\d+(/popen-gw\d+)?/[\w-]+": "<folder>",  # what tests make
    r"\d+\.\d+(e[-+]?\d+)?": "#.#",
    r"\d+%": "#%",
    r"\d+(?= support vectors)": "#",
    r"(?<=cannot identify image file )[^);]*": "...",
    r"(?<=\(choose from )[^)]*": "...",
    r" [A-Z]+(?=, --)": "",  # of an option with two names
    r"(?<=\S)( {2,}|\n {20,})(?=\S)": "  ",  # columns
}


def mask(text: str) -> str:
    """Replace numbers that are measured, names of folders that a test makes, and words of other libraries."""
    text = text.replace(str(Path.cwd()), "<folder>")
    for pattern, shown in _MASKS.items():
        text = re.sub(pattern, shown, text)
    return text


def transcript(told: Iterable[tuple[str, str]]) -> str:
    """Return lines as they are typed, and what was printed below each."""
    return "\n".join(f"$ pcasvm-cam {line}\n{printed}" for line, printed in told)


def compare(name: str, text: str, *, update: bool) -> None:
    """Compare a text with that of a file, or write it."""
    file = FOLDER / f"{name}.txt"
    if update:
        file.write_text(text, encoding="utf-8", newline="\n")
    assert file.exists(), f"there is no {file}: look at what it would be, and write it with pytest --update"
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines(), "if that is meant: pytest --update"
