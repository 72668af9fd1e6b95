"""Patches of pictures, with their surroundings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.runtime.pictures import as_pictures

_AROUND = 7  # patches across, of what is drawn around one
_LINE = (1.0, 0.9, 0.0)  # around a patch


class Around:
    """Cuts patches out of pictures, with their surroundings.

    Args:
        grid: of the patches.
        size: (H, W) of the pictures.
    """

    def __init__(self, grid: Any, size: Sequence[int]) -> None:
        self._shape, self._size = grid.shape, size
        self._window = [
            min(side, max(2, round(_AROUND * side / number))) for side, number in zip(size, grid.shape, strict=True)
        ]

    def _spans(self, position: int) -> list[tuple[int, int]]:
        """Return where a patch begins and ends."""
        places = np.unravel_index(position, self._shape)
        return [
            (int(place * side // number), max(int((place + 1) * side // number), int(place * side // number) + 1))
            for place, side, number in zip(places, self._size, self._shape, strict=True)
        ]

    def patch(self, position: int) -> np.ndarray:
        """Return which pixels are of a patch, (H, W)."""
        mask = np.zeros(self._size)
        mask[tuple(slice(*span) for span in self._spans(position))] = 1
        return mask

    def cut(self, source: Any, rows: np.ndarray) -> np.ndarray:
        """Return patches with their surroundings, by their numbers in all pictures, outlined: (n, h, w, 3)."""
        positions = int(np.prod(self._shape))
        pictures = []
        for row in rows.tolist():
            picture = as_pictures(source[[row // positions]])[0].copy()
            spans = self._spans(row % positions)
            starts = [
                min(max((first + last - window) // 2, 0), side - window)
                for (first, last), window, side in zip(spans, self._window, self._size, strict=True)
            ]
            (top, bottom), (left, right) = spans
            for line in ((slice(top, bottom), [left, right - 1]), ([top, bottom - 1], slice(left, right))):
                picture[line] = _LINE
            inside = tuple(slice(start, start + window) for start, window in zip(starts, self._window, strict=True))
            pictures.append(picture[inside])
        return np.stack(pictures)
