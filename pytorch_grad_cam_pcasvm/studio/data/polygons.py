"""Polygons and lines as pixels: the inside of a ring as pycocotools has it, and the pixels that a line passes."""

import numpy as np

_STEPS = 5  # of a pixel, to which pycocotools rounds corners
_MIDDLE = _STEPS // 2
_MOST = 1 << 18  # crossings of edges and columns that are computed at once
_SAMPLES = 4  # of a line, on each pixel


def fill_ring(ring: np.ndarray, width: int, height: int) -> tuple[int, int, np.ndarray]:
    """Return the pixels whose centres are inside of a ring, by even-odd, as pycocotools has them, bit for bit.

    Corners are rounded to fifths of a pixel, and edges go from one of these to the next. Nothing is as large as the
    coordinates are, but only as the picture is.

    Args:
        ring: the corners, (x, y) in pixels, shape (n, 2).
        width: of the picture.
        height: of the picture.

    Returns:
        The first row and column, and what is inside from there on, boolean, shape (rows, columns); either may be 0.
    """
    corners = np.trunc(_STEPS * np.asarray(ring, float) + 0.5).astype(np.int64)
    low, high = corners.min(0), corners.max(0)
    left, right = max(0, _find_first(low[0])), min(width - 1, _find_last(high[0]))
    top, bottom = (int(np.clip((edge + _MIDDLE) // _STEPS, 0, height)) for edge in (low[1], high[1]))
    if right < left:
        return top, left, np.zeros((0, 0), bool)
    crossings = np.zeros((bottom - top + 1, right - left + 1), np.uint8)  # odd or even: it may wrap around
    ends = np.roll(corners, -1, 0)
    rising = corners[:, 0] != ends[:, 0]
    edges = np.concatenate([corners, ends], 1)[rising]
    blocks = 1 + len(edges) * (right - left + 1) // _MOST
    for own in np.array_split(edges, blocks):
        columns, rows = _cross_columns(own, left, right)
        np.add.at(crossings, (np.clip(rows, top, bottom) - top, columns - left), 1)
    inside = np.cumsum(crossings, 0, dtype=np.uint8)[:-1] & 1
    return top, left, inside.astype(bool)


def _find_first(step: int) -> int:
    """Return the first column whose centre is not left of a step."""
    return int(-((_MIDDLE - step) // _STEPS))


def _find_last(step: int) -> int:
    """Return the last column whose centre is left of a step."""
    return int((step - _MIDDLE - 1) // _STEPS)


def _cross_columns(edges: np.ndarray, left: int, right: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the columns whose centres edges cross, and of each crossing the first row below it.

    Args:
        edges: from (x, y) to (x, y), in steps, shape (n, 4); none is upright.
        left: the first column that counts.
        right: the last one.
    """
    x, y, end_x, end_y = edges.T
    across, down = np.abs(end_x - x), np.abs(end_y - y)
    is_flat = across >= down
    backward = np.where(is_flat, x > end_x, y > end_y)
    x, end_x = np.where(backward, (end_x, x), (x, end_x))
    y, end_y = np.where(backward, (end_y, y), (y, end_y))
    first = np.maximum(left, -((_MIDDLE - np.minimum(x, end_x)) // _STEPS))
    last = np.minimum(right, (np.maximum(x, end_x) - _MIDDLE - 1) // _STEPS)
    counts = np.maximum(0, last - first + 1)
    edge = np.repeat(np.arange(len(edges)), counts)
    columns = first[edge] + np.arange(len(edge)) - np.repeat(np.cumsum(counts) - counts, counts)
    slope = np.where(is_flat, end_y - y, end_x - x) / np.where(is_flat, across, down)
    x, y, slope, is_flat, before = x[edge], y[edge], slope[edge], is_flat[edge], _STEPS * columns + _MIDDLE
    steps = before - x
    flat_rows = np.minimum(_round(y + slope * steps), _round(y + slope * (steps + 1)))
    rows = np.where(is_flat, flat_rows, y + _find_step(x, np.where(is_flat, 1.0, slope), before) - 1)
    return columns, (rows + _MIDDLE) // _STEPS


def _find_step(x: np.ndarray, slope: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return after how many steps down a steep edge has left the step before a centre, or come to it."""
    way = (before + 0.5 - x) / slope
    step = np.where(slope > 0, np.ceil(way), np.floor(way) + 1).astype(np.int64)
    for change in (-1, 1):  # by what is computed, which rounds
        reached = _round(x + slope * (step + min(0, change)))
        is_beyond = np.where(slope > 0, reached > before, reached <= before)
        step = np.where(is_beyond if change < 0 else ~is_beyond, step + change, step)
    return step


def _round(values: np.ndarray) -> np.ndarray:
    return np.trunc(values + 0.5).astype(np.int64)


def walk_line(points: np.ndarray, width: int, height: int) -> tuple[int, int, np.ndarray]:
    """Return the pixels that a line passes, or that a point is in.

    Args:
        points: of the line, (x, y) in pixels, shape (n, 2).
        width: of the picture; what lies beyond it is left out.
        height: of the picture.

    Returns:
        The first row and column, and what is passed from there on, boolean, shape (rows, columns).
    """
    points, size = np.asarray(points, float), np.array([width, height])
    low, high = (np.clip(np.floor(edge), 0, size - 1).astype(int) for edge in (points.min(0), points.max(0)))
    passed = np.zeros((high - low + 1)[::-1], bool)
    ends = points[1:] if len(points) > 1 else points
    for start, end in zip(points, ends, strict=False):
        columns, rows = (_walk_segment(start, end, size) - low).T
        passed[rows, columns] = True
    return int(low[1]), int(low[0]), passed


def _walk_segment(start: np.ndarray, end: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the pixels of a part of a line, (x, y), shape (n, 2)."""
    way, low, high = end - start, 0.0, 1.0
    for axis in (0, 1):  # from where to where, in shares of the way, it is in the picture
        if way[axis] == 0:
            if not 0 <= start[axis] <= size[axis]:
                return np.zeros((0, 2), np.int64)
            continue
        shares = sorted(((0 - start[axis]) / way[axis], (size[axis] - start[axis]) / way[axis]))
        low, high = max(low, shares[0]), min(high, shares[1])
    if low > high:
        return np.zeros((0, 2), np.int64)
    count = 1 + int(np.ceil(_SAMPLES * np.abs(way).max() * (high - low)))
    places = start + np.linspace(low, high, count)[:, None] * way
    return np.clip(np.floor(places).astype(np.int64), 0, size - 1)
