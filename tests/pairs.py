"""Few cases of many: of methods, networks and heads, each two values meet, but not all combinations are tried."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def choose_pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations of one value from each axis in which each two values of different axes meet."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in product(*(range(len(axis)) for axis in axes))}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        row = max(pairs, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[row]
        chosen.append(tuple(axis[n] for axis, n in zip(axes, row, strict=True)))
    return chosen
