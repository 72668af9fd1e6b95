"""The figure of a volume: some of its slices, overlaid with the maps of components and decisions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from pytorch_grad_cam_pcasvm.export.explainer import Panel
from pytorch_grad_cam_pcasvm.figures.blocks import GAP, caption, write_title
from pytorch_grad_cam_pcasvm.figures.grid import check_classes, check_components, selected
from pytorch_grad_cam_pcasvm.figures.style import bare, captioned, draw_panel, laid_out, number, wrap_text
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.pictures import as_array

AXES = ("depth", "height", "width")
COUNT = 5  # slices, where none are chosen
_TITLE = 1.9  # in inches, at the left
_PICTURES, _NARROWEST, _WIDEST = 10.5, 1.0, 2.0  # in inches: all pictures of a row, the longer side of one


def plot_volume(
    volume: Any,
    maps: SignedMaps,
    *,
    image: int = 0,
    axis: int = 0,
    slices: int | Sequence[int] | None = None,
    components: int | Sequence[int] | None = None,
    title: str = "input",
    classes: Sequence[Any] | None = None,
    overlay: bool = True,
    window: tuple[float, float] | None = None,
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
    outline: Any = None,
) -> Figure:
    """Draw slices of one volume, and below each slice the signed map of every component and other target.

    Red raises the target's value, blue lowers it. All slices of a target share one scale, from -nu to nu of its whole
    map, and the bar ends at nu; the target's value is on the left. Maps are upsampled to the volume's size (trilinear,
    which lowers single peaks). Slices are oriented as in the array: the first of the two remaining dimensions runs
    downwards.

    Args:
        volume: the explained volumes, in any units, shape (N, D, H, W) or (N, C, D, H, W); the first channel is drawn
            (``volume[:, [c]]`` for another).
        maps: their maps, from ``explain``, of shape (N, K, D', H', W'); ``maps[:, ks]`` for some targets only.
        image: which of the N volumes, from 0.
        axis: the dimension to slice along: 0 (D), 1 (H) or 2 (W).
        slices: the slices' numbers, from 0, or how many, equally spaced; None: five of those where the drawn maps are
            largest, not too close to each other (for blank maps, five equally spaced ones).
        components: the components to draw: their numbers, from 0, or how many of the first; None: the three
            that carry most of the first decision, see :func:`plot_maps`.
        title: a title for the volume.
        classes: names of the classes, in the order of ``classes_`` or of a classifier's outputs; None: the labels.
        overlay: draw the maps over the slices; otherwise, without them.
        window: the values of the volume that are black and white; None: its 1st and 99th percentiles.
        spacing: the size of a voxel along D, H and W, for example in millimetres; pictures have these proportions.
        outline: what to outline in all slices, such as a segmentation: nonzero inside, shape (N, D, H, W) or
            (N, 1, D, H, W).

    Returns:
        The figure.

    Raises:
        TypeError: the maps are not a SignedMaps.
        ValueError: the maps are of 2-D images or of another number of volumes; the volume has another shape or NaN; the
            image, axis, slice or component does not exist; the number of names differs from the number of classes; the
            outline has another shape; the spacing is not positive; or the window is empty.

    Example:
        >>> maps = ContributionCAM(net_of_volumes, ["0"]).explain(volumes)
        >>> figure = plot_volume(volumes, maps, slices=3)
    """
    voxels = _voxels(volume, maps, image)
    check_classes(classes, {"": maps})
    check_components(components, {"": maps})
    if isinstance(axis, bool) or axis not in (0, 1, 2):
        raise ValueError(f"axis must be 0, 1 or 2, for slices along D, H or W, got {axis!r}")
    if len(spacing) != 3 or not all(0 < size < np.inf for size in spacing):
        raise ValueError(f"spacing must be three positive numbers, the size of a voxel along D, H, W, got {spacing!r}")
    shown, left_out = selected(maps[[image]], components)
    if not shown:
        raise ValueError(f"components={components!r} leaves nothing to draw: name at least one component")

    chosen, how = _chosen(slices, maps[image, shown], axis, voxels.shape[axis])
    pictures = _slices(_grey(voxels, window), axis, chosen)
    outlines = None if outline is None else _slices(_outlined(outline, maps, image, voxels.shape), axis, chosen)
    height, width = _picture_size(pictures.shape[1:], [s for i, s in enumerate(spacing) if i != axis], len(chosen))

    rows, columns = len(shown) + 1, len(chosen)
    needed = (_TITLE + columns * (width + GAP) + 1.1, rows * (height + GAP) + 0.6)
    note = "\n".join(_notes(maps, image, how, left_out))
    with laid_out(needed, None, note, layout="compressed", w_pad=GAP / 2, h_pad=GAP / 2) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for row, k in zip(axes, [None, *shown], strict=True):
            values = None if k is None else _slices(_signed(maps[image, k], voxels.shape), axis, chosen)
            scale = "" if k is None else number(float(maps.nu[image, k]), float(maps.log_scale[image, k]))
            words = wrap_text(title, _TITLE, "medium") if k is None else _title(maps, k, image, classes)
            row[0].set_ylabel(words, rotation=0, ha="right", va="center", linespacing=1.2)
            for column, picture in enumerate(row):
                if values is None:
                    bare(picture).imshow(pictures[column], cmap="gray", vmin=0, vmax=1)
                    picture.set_title(chosen[column], fontsize="medium")
                else:
                    panel = Panel(pictures[column][..., None], values[column], scale=scale)
                    bar = (1 + 0.09 / width, 0.15 / width) if picture is row[-1] else None
                    draw_panel(picture, panel, "overlay" if overlay else "map", bar=bar)
                if outlines is not None and outlines[column].any():
                    picture.contour(outlines[column], [0.5], colors="#ffd92f" if k is None else "black", linewidths=1.2)
                picture.set(aspect="auto", box_aspect=height / width)
        place: dict[str, Any] = {"xytext": (-8, 6), "textcoords": "offset points", "ha": "right"}
        axes[0, 0].annotate(f"slice of {voxels.shape[axis]}", (0, 1), xycoords="axes fraction", **place)
    return figure


def _voxels(volume: Any, maps: Any, image: Any) -> np.ndarray:
    """Return the volume that is drawn, (D, H, W), if volumes and maps belong together."""
    if not isinstance(maps, SignedMaps):
        raise TypeError(f"maps must be one SignedMaps, as returned by explain, got {type(maps).__name__}")
    shape = tuple(maps.maps.shape)
    if len(shape) != 5:
        raise ValueError(
            f"maps of volumes have the shape (N, K, D, H, W), but these have {shape}: plot_maps draws maps of images"
        )
    volume_shape = tuple(np.shape(volume))
    if len(volume_shape) not in (4, 5) or volume_shape[0] != shape[0]:
        raise ValueError(
            f"a volume of shape {volume_shape} for maps of shape {shape}: give the {shape[0]} that were explained, "
            "(N, C, D, H, W) or (N, D, H, W); a single one needs volume[None]"
        )
    if isinstance(image, bool) or not isinstance(image, int | np.integer) or not 0 <= image < shape[0]:
        raise ValueError(f"image must be one of the {shape[0]} volumes, from 0 to {shape[0] - 1}, got {image!r}")
    # One alone: the others may be large, and on another device.
    voxels = as_array(volume[image]).astype(np.float32)
    voxels = voxels[0] if len(volume_shape) == 5 else voxels
    if not np.isfinite(voxels).all():
        raise ValueError("the volume has NaN or infinite values")
    return voxels


def _chosen(slices: Any, maps: SignedMaps, axis: int, length: int) -> tuple[list[int], str]:
    """Return which slices are drawn, and in words how they were chosen."""
    along = f"along the {AXES[axis]}"
    if slices is None:
        count = min(COUNT, length)
        values = _scaled(maps)[0]
        largest = values.abs().movedim(1 + axis, 0).flatten(1).amax(1)
        if bool(largest.any()):
            profile = upsample_maps(largest[None, None], (length,))[0, 0]
            return _apart(profile, count, length // (2 * count)), f"Slices {along} where maps are largest."
        slices = count
    if isinstance(slices, int | np.integer) and not isinstance(slices, bool):
        if not 1 <= slices <= length:
            raise ValueError(f"slices={slices!r}: there are {length} {along}; draw at least one and at most all")
        return [int((i + 0.5) * length / slices) for i in range(slices)], f"Slices {along}, equally spaced."
    numbers = np.asarray(slices)
    if numbers.ndim != 1 or not len(numbers) or numbers.dtype.kind not in "iu":
        raise ValueError(f"slices must be a count or some numbers, as in slices=[3, 8], got {slices!r}")
    if numbers.min() < 0 or numbers.max() >= length:
        raise ValueError(f"slices={slices!r}: those {along} are numbered from 0 to {length - 1}")
    return numbers.tolist(), f"Slices {along}."


def _apart(profile: Tensor, count: int, gap: int) -> list[int]:
    """Return the places of the largest values, in order, none closer than ``gap`` to another."""
    chosen: list[int] = []
    for place in profile.argsort(descending=True, stable=True).tolist():
        if len(chosen) < count and all(abs(place - other) >= gap for other in chosen):
            chosen.append(place)
    return sorted(chosen)


def _scaled(maps: SignedMaps) -> Tensor:
    """Return signed maps from -nu to nu as -1 to 1, shape (N, K, D, H, W)."""
    opposite = -maps.maps if maps.opposite is None else maps.opposite
    nu = torch.where(maps.nu > 0, maps.nu, 1.0)[..., None, None, None]
    return ((maps.maps.relu() - opposite.relu()) / nu).float().cpu()


def _signed(maps: SignedMaps, size: Sequence[int]) -> np.ndarray:
    """Return the map of one target from -1 to 1 in the geometry of the volume, (D, H, W)."""
    return upsample_maps(_scaled(maps), size)[0, 0].numpy()


def _slices(values: np.ndarray, axis: int, chosen: Sequence[int]) -> np.ndarray:
    return np.moveaxis(values, axis, 0)[chosen]


def _grey(voxels: np.ndarray, window: Any) -> np.ndarray:
    low, high = np.percentile(voxels, (1, 99)) if window is None else window
    if not low < high:
        if window is not None:
            raise ValueError(f"window must be the values shown black and white, as in (-160, 240), got {window!r}")
        high = low + 1  # of one value everywhere
    return ((voxels - low) / (high - low)).clip(0, 1)


def _outlined(outline: Any, maps: SignedMaps, image: int, shape: Sequence[int]) -> np.ndarray:
    """Return the outlined region, 0 or 1, (D, H, W)."""
    outline_shape = tuple(np.shape(outline))
    if outline_shape not in ((len(maps), *shape), (len(maps), 1, *shape)):
        raise ValueError(
            f"an outline of shape {outline_shape} for volumes of shape {(len(maps), *shape)}: give one for each"
        )
    return (as_array(outline[image]).reshape(shape) != 0).astype(np.float32)


def _picture_size(shape: Sequence[int], spacing: Sequence[float], count: int) -> tuple[float, float]:
    """Return height and width of a picture, in inches."""
    height, width = (n * size for n, size in zip(shape, spacing, strict=True))
    longest = min(max(_PICTURES / count, _NARROWEST), _WIDEST)
    # A flat one still has room for its number, and a line of its title.
    return max(longest * height / max(height, width), 0.6), max(longest * width / max(height, width), 0.6)


def _title(maps: SignedMaps, k: int, image: int, classes: Sequence[Any] | None) -> str:
    """Return a target in words, and its value."""
    words = [write_title(maps.targets[k], maps.output, classes), caption(maps, k, image, classes)]
    if not maps.nu[image, k]:
        words.append("blank: all zero")
    return "\n".join(captioned(text, _TITLE, "medium") for text in words)


def _notes(maps: SignedMaps, image: int, how: str, left_out: Sequence[str]) -> list[str]:
    """Return notes on how to read the figure, and on targets that it leaves out."""
    notes = [how, "Red raises the value on the left, blue lowers it; each scale ends at the number beside it."]
    if maps.baseline_values is not None:
        tokens = maps.remainder is not None and bool(maps.remainder[image].any())
        more = " + remainder (class tokens, other inputs)" if tokens else ""
        notes.append(f"Value at the start + everything on the map of the whole volume{more} = the value on the left.")
    return [*notes, *left_out]
