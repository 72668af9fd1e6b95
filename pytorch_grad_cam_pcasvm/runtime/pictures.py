"""Pictures: images of any layout as people see them, and the colours of signed maps over them."""

from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.colors import Colormap, ListedColormap
from torch import Tensor

DIVERGING = "RdBu_r"
HEAT = "inferno"
# Okabe and Ito's, of classes.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800", "#7F7F7F", "#8C510A")


def _over_pictures() -> ListedColormap:
    """Return the diverging colours for maps over pictures: clear at 0, where the picture shows, and never whitish."""
    values = np.linspace(-1, 1, 255)
    colours = mpl.colormaps[DIVERGING](0.5 + 0.5 * np.sign(values) * (0.4 + 0.6 * np.abs(values)))
    colours[:, 3] = 0.95 * np.abs(values) ** 0.7
    return ListedColormap(colours)


OVER_PICTURES = _over_pictures()


def colour_table() -> list[str]:
    """Return the colours of maps over pictures, from -1 to 1, without their opacity, as ``rrggbb``."""
    return _table(OVER_PICTURES)


def heat_table() -> list[str]:
    """Return the colours of anomalies, from the lowest to the highest, as ``rrggbb``."""
    return _table(mpl.colormaps[HEAT])


def _table(colours: Colormap) -> list[str]:
    rounded = np.rint(255 * colours(np.arange(colours.N))[:, :3]).astype(np.uint8)
    return [colour.tobytes().hex() for colour in rounded]


def greyed(picture: np.ndarray) -> np.ndarray:
    """Return a picture (H, W, 3) in pale grey, (H, W), on which the colours of a map are seen."""
    return 0.35 + 0.65 * picture.mean(-1)


def overlaid(picture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a signed map (H, W) in [-1, 1] over its picture (H, W, 3), as figures draw it: in [0, 1], (H, W, 3)."""
    colours = OVER_PICTURES(0.5 + 0.5 * values)
    opacity = colours[..., 3:]
    return opacity * colours[..., :3] + (1 - opacity) * greyed(picture)[..., None]


def heated(picture: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return anomalies (H, W) in [0, 1] over their picture (H, W, 3): in [0, 1], (H, W, 3)."""
    return 0.6 * mpl.colormaps[HEAT](shares)[..., :3] + 0.4 * greyed(picture)[..., None]


def as_array(values: Any) -> np.ndarray:
    """Return a tensor on any device, or anything numpy accepts, as an array."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # numpy has none
    return np.asarray(values)


def as_pictures(images: Any) -> np.ndarray:
    """Return images as float32 of shape (N, H, W, 3) in [0, 1].

    Args:
        images: shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W).

    Returns:
        The pictures.

    Raises:
        ValueError: another shape, or values outside [0, 1].
    """
    pictures = as_array(images)
    if pictures.dtype == np.uint8:
        pictures = pictures / 255
    if pictures.ndim == 4 and pictures.shape[1] in (1, 3) and pictures.shape[-1] not in (1, 3):
        pictures = pictures.transpose(0, 2, 3, 1)
    if pictures.ndim == 3:
        pictures = pictures[..., None]
    if pictures.ndim != 4 or pictures.shape[-1] not in (1, 3):
        raise ValueError(f"images must have shape (N, H, W, 3) or (N, 3, H, W), or one channel, got {pictures.shape}")
    if not (pictures.min() >= 0 and pictures.max() <= 1):
        raise ValueError(
            f"images must lie in [0, 1] to be drawn, but these go from {pictures.min():.3g} to {pictures.max():.3g}: "
            "undo the normalisation, x * std + mean"
        )
    return np.ascontiguousarray(np.broadcast_to(pictures, (*pictures.shape[:3], 3)), dtype=np.float32)
