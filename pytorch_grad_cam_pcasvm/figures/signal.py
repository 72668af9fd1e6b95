"""The figure of signals: lines coloured by the maps of components and decisions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.export.explainer import Panel
from pytorch_grad_cam_pcasvm.figures.blocks import caption, write_title
from pytorch_grad_cam_pcasvm.figures.grid import check_classes, check_components, selected
from pytorch_grad_cam_pcasvm.figures.style import frame_panel, laid_out, literal, number
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.pictures import OVER_PICTURES, as_array

_PANEL, _WIDEST, _CHANNEL = 4.2, 14.0, 0.55  # in inches: least and largest width of a panel, height of a channel
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
    check_classes(classes, {"": maps})
    check_components(components, {"": maps})
    shown, left_out = selected(maps, components)
    if not shown:
        raise ValueError(f"components={components!r} leaves nothing to draw: name at least one component")
    count, width, length = lines.shape
    panel = min(max(_PANEL, length / _DENSITY), _WIDEST)
    columns = min(_ACROSS if panel <= _SIDE_BY_SIDE else 1, len(shown))
    down = count * -(-len(shown) // columns)
    needed = columns * (panel + 0.7) + 0.5 * bool(channels), down * (_CHANNEL * width + 0.75) + 0.3
    note = "Red raises the value above a line, blue lowers it; grey does neither. "
    note += "\n".join(left_out)
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
                panel = Panel(lines[row], colours[row, k] / (nu or 1.0), title, scale=end)
                _draw_lines(axis, times, panel, channels)
                frame_panel(axis, panel, bar=(1.015, 0.02), loc="left", fontsize="small")
            for place in range(len(shown), across):
                axes.flat[row * across + place].set_axis_off()
        for column in axes.T:
            last = [axis for axis in column if axis.axison][-1]
            last.tick_params(labelbottom=True)
            last.set_xlabel(literal(unit), fontsize="small")
    return figure


def _draw_lines(axis: Axes, times: np.ndarray, panel: Panel, channels: Any) -> None:
    """Draw the channels of a panel's signal, (C, L), below each other, in the colours of its map, (L,)."""
    lines, values = panel.photo, panel.map
    assert values is not None
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
