"""Maps of anomalies: arrays that know on which scale they are drawn."""

from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.head.anomaly_scale import anomaly_range


class AnomalyMaps(np.ndarray):
    """An array of anomalies, whose parts, too, know the scale of the training set; what is computed of it does not.

    Attributes:
        head: the head whose anomalies they are, or None: not known.
    """

    head: Head | None = None

    @classmethod
    def of(cls, values: np.ndarray, head: Head) -> "AnomalyMaps":
        """Return an array with its head."""
        maps = values.view(cls)
        maps.head = head
        return maps

    def __array_finalize__(self, source: Any) -> None:
        """Take the head along to a part of an array."""
        self.head = getattr(source, "head", None)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        """Return what is computed of an array, which has another scale, as a plain one."""
        plain = np.asarray(array)
        return plain[()] if plain.ndim == 0 else plain

    @property
    def ends(self) -> tuple[float, float] | None:
        """Where the scale of the training set starts and ends; None: not known."""
        return None if self.head is None else anomaly_range(self.head)
