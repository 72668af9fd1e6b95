"""Names of the columns that a head was fitted on: whether their numbers are in the order of their places."""

import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.errors import warn

_MOST_NUMBERS = 3  # in a name, of which any may come first in the order
_SHOWN = 5  # names


def warn_of_order(estimator: Any) -> None:
    """Warn if an estimator was fitted on numbered columns in another order, such as the alphabetical one.

    A network gives features by place alone: f0, f1, f2 and so on. A table that was sorted by f0, f1, f10, f11, f2 has
    others there.
    """
    names = getattr(estimator, "feature_names_in_", None)
    if names is None:
        return
    for group in _alike([str(name) for name in names]):
        if not _rises([numbers for _, numbers in group]):
            shown = [name for name, _ in group]
            first = next((i for i in range(1, len(group)) if group[i][1] < group[i - 1][1]), 1)
            start = max(0, first - _SHOWN + 1)
            listed = ("... " if start else "") + ", ".join(shown[start : start + _SHOWN])
            warn(
                f"{type(estimator).__name__} was fitted on columns whose numbers are not in the order of their places "
                f"({listed} ...), as where names are sorted as text; but a network's features are taken by place, "
                "whatever the names: fit it again on columns in the order of the network's features, such as "
                "table[sorted(table.columns, key=lambda name: [*map(int, re.findall('[0-9]+', name))])], or on an "
                "array, table.to_numpy(), if their places are right",
                UserWarning,
            )
            return


def _alike(names: Sequence[str]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return groups of names that differ in their numbers alone, in order, each name with its numbers."""
    groups: dict[tuple[str, ...], list[tuple[str, tuple[int, ...]]]] = {}
    for name in names:
        parts = re.split(r"([0-9]+)", name)
        groups.setdefault(tuple(parts[::2]), []).append((name, tuple(map(int, parts[1::2]))))
    return [group for group in groups.values() if group[0][1]]


def _rises(rows: Sequence[tuple[int, ...]]) -> bool:
    """Return whether rows of numbers are in order, whichever of their numbers comes first."""
    width = len(rows[0])
    orders = permutations(range(width)) if width <= _MOST_NUMBERS else [range(width)]
    ordered = ([tuple(row[place] for place in order) for row in rows] for order in orders)
    return any(keys == sorted(keys) for keys in ordered)
