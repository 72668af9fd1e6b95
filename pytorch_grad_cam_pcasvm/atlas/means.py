"""Mean maps of components, one for each group of images."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from pytorch_grad_cam_pcasvm.atlas.table import Table


@dataclass(frozen=True)
class MeanMaps:
    """Mean maps of a component, one for each group of images.

    Attributes:
        groups: what the images of a group have in common, length G.
        maps: signed means, shape (G, H, W), divided by ``exp(log_scale)``; for a method with opposite maps, what raises
            the component minus what lowers it.
        standard_errors: standard errors of the means, of the same shape; NaN for a group of one image.
        counts: number of images in each group, shape (G,).
        log_scale: the natural logarithm of the factor taken out of each mean, shape (G,); usually 0.

    Example:
        >>> store.mean_map(0, by="label").groups
        ['cat', 'dog', 'elk']
    """

    groups: list[Any]
    maps: np.ndarray
    standard_errors: np.ndarray
    counts: np.ndarray
    log_scale: np.ndarray


def average_maps(table: Table, values: np.ndarray, chosen: slice) -> list[MeanMaps]:
    """Return the mean maps of some components, grouped by values (R,); reads the files twice, a shard at a time."""
    groups, of_row = np.unique(values, return_inverse=True)
    of_row = of_row.reshape(-1)
    # The largest factor of each group, so that a mean has the units of its maps.
    factors = np.full((len(groups), table.columns["components"][1]), -np.inf)
    for start, block in table.blocks(["log_scale"]):
        np.maximum.at(factors, of_row[start : start + len(block["log_scale"])], block["log_scale"])
    counts = np.bincount(of_row, minlength=len(groups))
    shape = (len(groups), factors[:, chosen].shape[1], *table.columns["maps"][2:])
    totals, squares = np.zeros(shape), np.zeros(shape)
    names = [name for name in ("maps", "opposite", "nu", "scale", "log_scale") if name in table.columns]
    for start, block in table.blocks(names):
        scale = block.get("scale", block["nu"])[:, chosen]
        group = of_row[start : start + len(scale)]
        scale = scale * np.exp(block["log_scale"][:, chosen] - factors[group][:, chosen])
        maps = block["maps"][:, chosen].astype(np.float64)
        if "opposite" in block:
            maps = np.maximum(maps, 0) - np.maximum(block["opposite"][:, chosen].astype(np.float64), 0)
        maps *= scale.reshape(*scale.shape, *[1] * (len(shape) - 2))
        for g in np.unique(group):
            totals[g] += maps[group == g].sum(0)
            squares[g] += (maps[group == g] ** 2).sum(0)
    sizes = counts.reshape(-1, *[1] * (len(shape) - 1))
    means = totals / sizes
    with np.errstate(invalid="ignore", divide="ignore"):
        variance = np.maximum(squares / sizes - means**2, 0) * sizes / (sizes - 1)
        errors = np.where(sizes > 1, np.sqrt(variance / sizes), np.nan)
    return [
        MeanMaps(groups.tolist(), means[:, b], errors[:, b], counts, factors[:, chosen][:, b]) for b in range(shape[1])
    ]
