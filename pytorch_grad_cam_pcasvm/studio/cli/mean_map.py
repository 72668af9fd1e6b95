"""What all maps of a gallery share: their mean, and a strongest place that stays where it is."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

COLUMNS, LEAST_COLUMNS = 7, 4  # in which the strongest places are counted; of coarser maps they are not
LEAST_MAPS = 10  # of fewer photos, half may share a column by chance
HABIT = (
    "In {count} of {total} photos the strongest place lies in the same one of {columns} columns (framed), so part of "
    "\N{LEFT DOUBLE QUOTATION MARK}where\N{RIGHT DOUBLE QUOTATION MARK} is the network, unless what is looked for "
    "always lies there. Explain the photos mirrored to tell: what stays is the network."
)


def average_maps(maps: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the mean of signed maps in [-1, 1], with 1 or -1 where it is strongest; None: not all have one shape."""
    if len({one.shape for one in maps}) != 1 or maps[0].ndim != 2:
        return None
    mean = np.mean(maps, axis=0)
    return mean / (np.abs(mean).max() or 1.0)


def find_habit(maps: Sequence[np.ndarray]) -> tuple[int, int, int, int] | None:
    """Return the column in which the strongest place of at least half of the maps lies; None: it moves, or too few.

    Columns alone are counted: what stands on the ground, or was photographed by somebody standing, has its rows.

    Args:
        maps: signed maps of one shape, (h, w); blank ones are left out.

    Returns:
        The column, of how many, how many maps have their strongest place there, and of how many maps.
    """
    columns = min(COLUMNS, maps[0].shape[1])
    places = [int(one.argmax()) % one.shape[1] * columns // one.shape[1] for one in maps if (one > 0).any()]
    if columns < LEAST_COLUMNS or len(places) < LEAST_MAPS:
        return None
    (column, count), *_ = Counter(places).most_common(1)
    return (column, columns, count, len(places)) if 2 * count >= len(places) else None
