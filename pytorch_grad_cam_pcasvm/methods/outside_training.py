"""How far images are from a head's training images, by the head's measures."""

from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.head.measures import Measure
from pytorch_grad_cam_pcasvm.network.outputs import OfHead


def measure_images(output: OfHead) -> list[tuple[Measure, np.ndarray]]:
    """Return the measures of a head, each with the distances of N images, (N,)."""
    values: Any = output.head_trace.values
    if values[0] is None or values[0].dim() != 2:
        return []
    measures = output.head.measures
    rows = {place: place.read_rows(values) for place in dict.fromkeys(measure.place for measure in measures)}
    return [(measure, measure.distances(rows[measure.place])) for measure in measures]


def are_unlike_training(output: Any) -> list[bool]:
    """Return for each image whether it is unlike the head's training images, as far as the head can tell.

    Of dense features nothing is said: positions unlike others are what is looked for.

    Args:
        output: what a network returned for N images.

    Example:
        >>> are_unlike_training(net(images))
        [False, False]
    """
    known = measure_images(output) if isinstance(output, OfHead) and output.grid is None else ()
    far = [distances > measure.find_limit(1) for measure, distances in known]
    return np.any(far, 0).tolist() if far else [False] * len(output)
