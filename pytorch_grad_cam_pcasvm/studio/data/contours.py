"""Outlines of masks: rings along the edges of pixels, which have the same pixels again."""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy import ndimage

_CORNERS = np.ones((3, 3))  # neighbours of a pixel


def split_regions(inside: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the connected regions of a mask, also by corners, from top to bottom.

    Args:
        inside: boolean, shape (H, W).

    Yields:
        The first row and column of each, and its pixels from there on, boolean, shape (rows, columns).
    """
    regions, _ = ndimage.label(inside, _CORNERS)
    for number, (rows, columns) in enumerate(ndimage.find_objects(regions), 1):
        yield rows.start, columns.start, regions[rows, columns] == number


def outline_region(inside: np.ndarray) -> np.ndarray:
    """Return one ring around a connected region, with a way to each hole and back, along edges of pixels.

    By even-odd it has the pixels of the region alone: what is walked twice, there and back, counts for nothing.

    Args:
        inside: boolean, shape (H, W), connected, also by corners.

    Returns:
        The corners, (x, y), int64, shape (n, 2); pixel (row, column) lies between these numbers and the next.
    """
    outer, *holes = trace_rings(inside)
    for hole in sorted(holes, key=lambda ring: int(ring[:, 0].min())):  # what lies left of a hole is joined before it
        outer = _join_hole(outer, hole)
    return outer[(outer != np.roll(outer, 1, 0)).any(1)]


def trace_rings(inside: np.ndarray) -> list[np.ndarray]:
    """Return the rings around the pixels of a mask, and around its holes: the corners, (x, y), shape (n, 2).

    Pixels that touch by a corner are within one ring, and holes that do have one each. Of a connected mask the first
    ring is the outer one.

    Args:
        inside: boolean, shape (H, W).
    """
    padded = np.pad(inside, 1)
    upper_left, upper_right, lower_left, lower_right = (
        padded[rows, columns] for rows in (slice(-1), slice(1, None)) for columns in (slice(-1), slice(1, None))
    )
    crosses = (upper_left == lower_right) & (upper_right == lower_left) & (upper_left != upper_right)
    counts = np.where(crosses, 2, upper_left ^ upper_right ^ lower_left ^ lower_right)
    y, x = (np.repeat(axis, counts[counts > 0]) for axis in np.nonzero(counts))
    # Along each row, corners are the ends of edges in pairs, and so they are along each column. Where two pixels touch
    # there are two: the first has the edge on its left, and the way from there goes around what is outside.
    has_right = np.arange(len(x)) % 2 == 0
    is_lower = ~crosses[y, x] | (has_right != upper_left[y, x])
    order = np.lexsort((is_lower, y, x))
    below = np.empty_like(order)
    below[order] = order[np.arange(len(order)) ^ 1]
    return _follow_edges(np.stack([x, y], 1), below.tolist())


def _follow_edges(corners: np.ndarray, below: Sequence[int]) -> list[np.ndarray]:
    """Return the rings of corners, of which each is joined with the one beside it in its row, and one in its column.

    Args:
        corners: (x, y), row by row; each two are the ends of an edge.
        below: the number of the other end of each corner's edge in its column.
    """
    is_left, rings = [True] * len(below), list[np.ndarray]()
    for first in range(0, len(below), 2):
        ring, place = list[int](), first
        while is_left[place]:
            beside = place ^ 1
            is_left[place] = is_left[beside] = False
            ring += [place, beside]
            place = below[beside]
        if ring:
            rings.append(corners[ring])
    return rings


def _join_hole(outer: np.ndarray, hole: np.ndarray) -> np.ndarray:
    """Return a ring that goes on to a hole from the edge on its left, around it, and back."""
    first = np.lexsort((hole[:, 1], hole[:, 0]))[0]
    x, y = hole[first]
    ends = np.roll(outer, -1, 0)
    low, high = np.minimum(outer[:, 1], ends[:, 1]), np.maximum(outer[:, 1], ends[:, 1])
    reached = np.flatnonzero((outer[:, 0] == ends[:, 0]) & (outer[:, 0] <= x) & (low <= y) & (y <= high))
    edge = reached[outer[reached, 0].argmax()]
    start = np.array([(outer[edge, 0], y)])
    around = np.concatenate([np.roll(hole, -first, 0), hole[first : first + 1]])
    return np.concatenate([outer[: edge + 1], start, around, start, outer[edge + 1 :]])
