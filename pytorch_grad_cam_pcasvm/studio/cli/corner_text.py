"""Text that is burnt into a corner of grey pictures, as of scans, by which classes might be told apart."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

CORNERS = "top left", "top right", "bottom left", "bottom right"
_SIDE, _HEIGHT, _WIDTH = 256, 48, 80  # pixels of a picture that is looked at, and of its corners
_EDGE, _EDGES = 40, 0.012  # of 255, by which neighbours differ at an edge; share of edges, from which there is text
_FLAT, _GROUND = 16, 0.6  # of 255, within which pixels are like the middle one; share of the ground behind text
_GIVES_AWAY = 0.8  # by which the share of pictures of a class with text differs from that of the others


def find_text(picture: Any) -> tuple[bool, ...] | None:
    """Return which corners of a grey picture have strokes on a flat ground, as text has; None: it is in colour."""
    colours = np.asarray(picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BOX), np.int16)
    if np.ptp(colours, axis=2).max() > 1:
        return None
    grey, found = colours[..., 0], []
    for rows in (slice(None, _HEIGHT), slice(-_HEIGHT, None)):
        for columns in (slice(None, _WIDTH), slice(-_WIDTH, None)):
            corner = grey[rows, columns]
            edges = (np.abs(np.diff(corner, axis=0))[:, :-1] > _EDGE) | (np.abs(np.diff(corner, axis=1))[:-1] > _EDGE)
            ground = np.abs(corner - np.median(corner)) < _FLAT
            found.append(bool(edges.mean() > _EDGES and ground.mean() > _GROUND))
    return tuple(found)


def tell_text(looked: Mapping[Path, dict[str, Any]], root: Path) -> list[str]:
    """Return which corners have text in one class alone, of grey pictures in folders of classes.

    Args:
        looked: what is known of each picture, of which ``text`` is that of :func:`find_text`.
        root: the folder of those of classes.
    """
    known = {path: one["text"] for path, one in looked.items() if one.get("text") is not None and path.parent != root}
    totals, lines = Counter(path.relative_to(root).parts[0] for path in known), []
    for place, corner in enumerate(CORNERS):
        counts = Counter(path.relative_to(root).parts[0] for path, text in known.items() if text[place])
        for label, count in counts.items():
            rest = totals.total() - totals[label]
            if rest and count / totals[label] - (counts.total() - count) / rest >= _GIVES_AWAY:
                lines.append(
                    f"hint: the {corner} corner looks like text in {count} of {totals[label]} pictures of {label}, and "
                    f"in {counts.total() - count} of {rest} others: a classifier may learn that; cover it"
                )
    return lines
