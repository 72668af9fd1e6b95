"""Figures of signals, as lines, and of volumes, as slices, with the maps of components and decisions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from torch import Tensor

from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.pictures import OVER_PICTURES, as_array
from pytorch_grad_cam_pcasvm.studio.figures.blocks import GAP, caption, describe_sure, find_sure, write_title
from pytorch_grad_cam_pcasvm.studio.figures.grid import check_selection
from pytorch_grad_cam_pcasvm.studio.figures.style import (
    bare,
    captioned,
    draw_panel,
    frame_panel,
    laid_out,
    literal,
    number,
    wrap_text,
)
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel, fade_unsure, spread_mask

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
    shown, left_out = check_selection(maps[[image]], components, classes)
    if isinstance(axis, bool) or axis not in (0, 1, 2):
        raise ValueError(f"axis must be 0, 1 or 2, for slices along D, H or W, got {axis!r}")
    if len(spacing) != 3 or not all(0 < size < np.inf for size in spacing):
        raise ValueError(f"spacing must be three positive numbers, the size of a voxel along D, H, W, got {spacing!r}")
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
            sure = None if k is None else find_sure(maps[image, k])
            if sure is not None:
                sure = _slices(spread_mask(sure[0, 0], voxels.shape), axis, chosen)
            scale = "" if k is None else number(float(maps.nu[image, k]), float(maps.log_scale[image, k]))
            words = wrap_text(title, _TITLE, "medium") if k is None else _title(maps, k, image, classes)
            row[0].set_ylabel(words, rotation=0, ha="right", va="center", linespacing=1.2)
            for column, picture in enumerate(row):
                if values is None:
                    bare(picture).imshow(pictures[column], cmap="gray", vmin=0, vmax=1)
                    picture.set_title(chosen[column], fontsize="medium")
                else:
                    mask = None if sure is None else sure[column]
                    panel = Panel(pictures[column][..., None], values[column], scale=scale, sure=mask)
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
    return [*notes, *describe_sure([maps]), *left_out]


_PANEL, _WIDEST_SIGNAL, _CHANNEL = 4.2, 14.0, 0.55  # in inches: least and largest width of a panel, height of a channel
_DENSITY = 100  # numbers of a signal to an inch, which can still be told apart
_ACROSS, _SIDE_BY_SIDE = 2, 6.0  # panels; wider ones stand below each other
_GREY = 0.72  # of a line where the map is 0


def plot_signal(
    signals: Any,
    maps: SignedMaps,
    *,
    components: int | Sequence[int] | None = None,
    channels: Sequence[str] | None = None,
    rows: Sequence[Any] | None = None,
    classes: Sequence[Any] | None = None,
    interval: float = 1.0,
    unit: str = "sample",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw signals as lines coloured by their signed maps: red raises the target, blue lowers it, grey does neither.

    There is a panel for each signal and target, with the channels below each other, which all have the colours of one
    map; the bar beside them ends at its nu. The target's value for the signal is written above the panel. Maps are
    upsampled to the signal's length (linear). Panels are as wide as the signal needs, and wide ones stand below each
    other.

    Args:
        signals: the explained signals, in any units, shape (N, C, L).
        maps: their maps, from ``explain``, shape (N, K, L').
        components: the components to draw: their numbers, from 0, or how many of the first; None: the three
            that carry most of the first decision, see :func:`plot_maps`.
        channels: names of the channels, such as ``["I", "II", "V1"]``.
        rows: a title for each signal, such as its true class.
        classes: names of the classes, in the order of ``classes_`` or of a classifier's outputs; None: the labels.
        interval: the time from one number to the next, for the axis.
        unit: the unit of that.
        size: width and height of the figure in inches; None: as needed.

    Returns:
        The figure.

    Raises:
        ValueError: signals, maps, titles, names, classes or components do not match.

    Example:
        >>> maps = ClosedFormGradCAM(net_of_signals, ["0"]).explain(signals)
        >>> figure = plot_signal(signals, maps, components=1, interval=1 / 360, unit="s")
    """
    lines = _lines(signals, maps, channels, rows)
    shown, left_out = check_selection(maps, components, classes)
    count, width, length = lines.shape
    panel = min(max(_PANEL, length / _DENSITY), _WIDEST_SIGNAL)
    columns = min(_ACROSS if panel <= _SIDE_BY_SIDE else 1, len(shown))
    down = count * -(-len(shown) // columns)
    needed = columns * (panel + 0.7) + 0.5 * bool(channels), down * (_CHANNEL * width + 0.75) + 0.3
    note = "Red raises the value above a line, blue lowers it; grey does neither. "
    note += "\n".join([*describe_sure([maps], "pale and dashed"), *left_out])
    sure = find_sure(maps)
    signed = maps.maps if maps.opposite is None else maps.maps.relu() - maps.opposite.relu()
    colours = upsample_maps(signed.double().cpu(), (length,)).numpy()
    times = np.arange(length) * interval
    with laid_out(needed, size, note.strip()) as figure:
        axes = figure.subplots(down, columns, squeeze=False, sharex=True)
        across = -(-len(shown) // columns) * columns
        for row in range(count):
            for place, k in enumerate(shown):
                axis = axes.flat[row * across + place]
                nu = float(maps.nu[row, k])
                words = caption(maps, k, row, classes)
                words = words if ":" in words else f"{write_title(maps.targets[k], maps.output, classes)}: {words}"
                title = words if rows is None else f"{literal(rows[row])}\n{words}"
                end = number(nu, float(maps.log_scale[row, k]))
                values = colours[row, k] / (nu or 1.0)
                if sure is not None:
                    values = fade_unsure(values, spread_mask(sure[row, k], values.shape))
                panel = Panel(lines[row], values, title, scale=end)
                _draw_lines(axis, times, lines[row], values, channels)
                frame_panel(axis, panel, bar=(1.015, 0.02), loc="left", fontsize="small")
            for place in range(len(shown), across):
                axes.flat[row * across + place].set_axis_off()
        for column in axes.T:
            last = [axis for axis in column if axis.axison][-1]
            last.tick_params(labelbottom=True)
            last.set_xlabel(literal(unit), fontsize="small")
    return figure


def _draw_lines(axis: Axes, times: np.ndarray, lines: np.ndarray, values: np.ndarray, channels: Any) -> None:
    """Draw the channels of a signal, (C, L), below each other, in the colours of its map, (L,)."""
    low, high = lines.min(), lines.max()
    step = 1.1 * ((high - low) or 1.0)
    colours = OVER_PICTURES(0.5 + 0.5 * (values[:-1] + values[1:]) / 2)
    colours = colours[:, 3:] * colours[:, :3] + (1 - colours[:, 3:]) * _GREY
    for channel, line in enumerate(lines):
        points = np.stack([times, line - channel * step], 1)
        segments: Any = np.stack([points[:-1], points[1:]], 1)
        axis.add_collection(LineCollection(segments, colors=colours, linewidths=1.8))
    axis.set_xlim(times[0], times[-1])
    axis.set_ylim(low - (len(lines) - 1) * step - 0.05 * step, high + 0.05 * step)
    middle = (low + high) / 2
    axis.set_yticks([middle - channel * step for channel in range(len(lines))] if channels else [])
    if channels:
        axis.set_yticklabels([literal(name) for name in channels], fontsize="small")
    axis.tick_params(length=0, labelsize="small")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _lines(signals: Any, maps: SignedMaps, channels: Any, rows: Any) -> np.ndarray:
    """Return signals, (N, C, L), if maps and names belong to them."""
    lines = as_array(signals).astype(np.float64)
    if maps.maps.dim() != 3 or lines.ndim != 3 or len(lines) != len(maps):
        raise ValueError(
            f"signals of shape {lines.shape} for maps of shape {tuple(maps.maps.shape)}: both must be of signals, "
            "(N, C, L) and (N, K, L')"
        )
    if not np.isfinite(lines).all() or not bool(torch.isfinite(maps.maps).all()):
        raise ValueError("the signals or their maps are not finite")
    if channels is not None and len(channels) != lines.shape[1]:
        raise ValueError(f"{len(channels)} names for {lines.shape[1]} channels: give one for each")
    if rows is not None and len(rows) != len(lines):
        raise ValueError(f"{len(rows)} row titles for {len(lines)} signals: give one for each")
    return lines
