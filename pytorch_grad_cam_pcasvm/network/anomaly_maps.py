"""Maps of anomalies: arrays that know on which scale they are drawn."""

from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomaly_scale import anomaly_range
from pytorch_grad_cam_pcasvm.network.cells import Cells


class AnomalyMaps(np.ndarray):
    """An array of anomalies that knows the scale of the training set, as do its parts, but not results of arithmetic.

    Attributes:
        head: the head whose anomalies they are, or None: not known.
        cells: where on the picture the positions lie; None: they share it out evenly.

    Example:
        >>> dense = PCASVMNet(backbone, NearestNeighbors().fit(features), layer="layer2", pool="dense").eval()
        >>> isinstance(dense.anomaly_map(images), AnomalyMaps)
        True
    """

    head: Head | None = None
    cells: Cells | None = None

    @classmethod
    def of(cls, values: np.ndarray, head: Head, cells: Cells | None) -> "AnomalyMaps":
        """Return an array with its head and its cells."""
        maps = values.view(cls)
        maps.head, maps.cells = head, cells
        return maps

    def __array_finalize__(self, source: Any) -> None:
        """Take the head along to a part of an array, and the cells to some of the maps."""
        self.head, cells = getattr(source, "head", None), getattr(source, "cells", None)
        self.cells = cells if cells is not None and self.shape[1:] == source.shape[1:] else None

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return the result of arithmetic, which has another scale, as a plain array."""
        plain = np.asarray(array)
        return plain[()] if plain.ndim == 0 else plain

    @property
    def ends(self) -> tuple[float, float] | None:
        """Where the scale of the training set starts and ends; None: not known."""
        return None if self.head is None else anomaly_range(self.head)
