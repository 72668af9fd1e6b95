"""Run lengths: a mask as the lengths of its runs of equal pixels, as COCO, CVAT and tables of Kaggle's have them."""

from collections.abc import Sequence

import numpy as np

_FIRST = ord("0")  # of the characters of COCO's compressed form
_DIGITS, _MORE, _NEGATIVE = 0x1F, 0x20, 0x10
_LONGEST = 7  # digits of a number, five bits each
_LARGEST = 1 << 31
_DECIMALS = 18  # of a number that is written as text


def is_count(text: str) -> bool:
    """Return whether a text is a whole number that a run may have."""
    return text.isdecimal() and len(text) <= _DECIMALS


def find_counts(inside: np.ndarray, *, by_column: bool = True) -> list[int]:
    """Return the lengths of the runs of a mask, from its first pixel on: of zeros, then ones, then zeros, and so on.

    Args:
        inside: boolean, shape (H, W).
        by_column: go down each column, as COCO; False: along each row, as CVAT.
    """
    pixels = np.asarray(inside, bool).ravel("F" if by_column else "C")
    changes = np.flatnonzero(np.diff(np.concatenate([[False], pixels]).astype(np.int8)))
    return np.diff(np.concatenate([[0], changes, [pixels.size]])).tolist()


def draw_counts(counts: Sequence[int], width: int, height: int, *, by_column: bool = True) -> np.ndarray:
    """Return the mask of these runs, boolean, shape (height, width); pixels behind the last run are outside.

    Raises:
        ValueError: they are longer than the mask, or one is negative.
    """
    if min(counts, default=0) < 0:
        raise ValueError(f"has a run of {min(counts)} pixels")
    total = sum(counts)  # of Python's numbers, which do not wrap around
    if total > width * height:
        raise ValueError(f"has runs of {total} pixels, but {width} x {height} are {width * height}")
    lengths = np.asarray(counts, np.int64)
    pixels = np.zeros(width * height, bool)
    pixels[:total] = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return pixels.reshape((width, height)).T if by_column else pixels.reshape((height, width))


def compress_counts(counts: Sequence[int]) -> str:
    """Return the lengths of runs as COCO's compressed form: each, from the fourth on less the one two before it."""
    text = []
    for place, count in enumerate(counts):
        number = count - counts[place - 2] if place > 2 else count
        more = True
        while more:
            digits = number & _DIGITS
            number >>= 5
            more = number != (-1 if digits & _NEGATIVE else 0)
            text.append(chr((digits | (_MORE if more else 0)) + _FIRST))
    return "".join(text)


def expand_counts(text: str) -> list[int]:
    """Return the lengths of runs from COCO's compressed form.

    Raises:
        ValueError: it has another character, ends within a number, or a length is negative or has more than 31 bits.
    """
    counts = list[int]()
    number = place = 0
    for character in text:
        code = ord(character) - _FIRST
        if not 0 <= code <= _DIGITS | _MORE or place >= _LONGEST:
            raise ValueError(f"has compressed run lengths with {character!r}, which no such text has there")
        number |= (code & _DIGITS) << 5 * place
        place += 1
        if code & _MORE:
            continue
        if code & _NEGATIVE:
            number -= 1 << 5 * place
        number += counts[-2] if len(counts) > 2 else 0
        if not 0 <= number < _LARGEST:
            raise ValueError(f"has compressed run lengths with a run of {number} pixels")
        counts.append(number)
        number = place = 0
    if place:
        raise ValueError("has compressed run lengths that end within a number: the text is cut off")
    return counts
