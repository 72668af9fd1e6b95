"""Figures of dense heads: the decisions at every position, over the pictures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from pytorch_grad_cam_pcasvm.network.grid import AnomalyMaps, upsample_maps
from pytorch_grad_cam_pcasvm.runtime.pictures import (
    COLOURS,
    DIVERGING,
    HEAT,
    as_array,
    as_pictures,
    greyed,
    heated,
    overlaid,
)
from pytorch_grad_cam_pcasvm.studio.figures.blocks import OUTLINE
from pytorch_grad_cam_pcasvm.studio.figures.style import bare, class_name, draw_panel, laid_out, literal, number
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel

_SIDE = 1.95  # of a picture, in inches
_ACROSS = 8.0  # inches
_TAILS = 1  # per cent of the numbers that a scale of colours leaves out at either end


def plot_positions(
    pictures: Any,
    values: Any,
    *,
    masks: Any = None,
    anomaly: bool = False,
    scale: Sequence[float] | None = None,
    titles: Sequence[str] | None = None,
    label: str = "",
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw a number at every position over its pictures: decisions, components, or how anomalous each position is.

    All pictures share one scale, whose ends are the largest size of a number: red is positive, blue negative, and 0 is
    transparent. Anomalies are dark where training photos have them, and bright from three times that on: a good photo
    looks the same alone and beside a defect. Where nothing is known of the training set, they go from their smallest
    number, dark, to their largest, bright.

    Args:
        pictures: as people see them, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in [0, 1] or uint8.
        values: shape (N, h, w), such as ``net(images).margins[:, 0]`` or ``net.anomaly_map(images)``; they are
            upsampled to the pictures (bilinear).
        masks: true masks, shape (N, H, W), whose outline is drawn in yellow; None: there are none.
        anomaly: whether larger numbers mean more anomalous positions.
        scale: where the colours of anomalies start and end, as :meth:`.PCASVMNet.anomaly_range` returns it; None: maps
            of ``anomaly_map`` know it.
        titles: of each picture.
        label: of the colour bar.
        size: width and height of the figure in inches; None: as needed.

    Returns:
        The figure.

    Raises:
        ValueError: the pictures, values and masks do not fit each other, or values are not finite; or a scale is no
            pair of numbers that rise, or given for what is no anomaly.

    Example:
        >>> good, _ = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
        >>> parts = PCASVMNet(backbone, NearestNeighbors().fit(good), "layer2", pool="dense").eval()
        >>> figure = plot_positions(images, parts.anomaly_map(images), anomaly=True)
    """
    drawn, numbers = as_pictures(pictures), _as_numbers(values)
    _check(drawn, numbers.shape[:1], masks, titles)
    low, high = float(numbers.min()), float(numbers.max())
    ends = _known_scale(values, scale, anomaly)
    low, high = ends or ((low, high) if anomaly else (-max(abs(low), abs(high)), max(abs(low), abs(high))))
    large = _at_pictures(numbers, drawn, getattr(values, "cells", None))
    if anomaly:
        shares = ((large - low) / ((high - low) or 1)).clip(0, 1)
        painted = [heated(picture, share) for picture, share in zip(drawn, shares, strict=True)]
    else:
        painted = [overlaid(picture, values / (high or 1)) for picture, values in zip(drawn, large, strict=True)]
    bright = "Bright: unlike the training set." if ends else "Bright: the most anomalous positions of these pictures."
    note = bright if anomaly else "Red: positive. Blue: negative."
    with _draw_pairs(drawn, painted, masks, titles, note, size) as (figure, axes):
        colours = ScalarMappable(Normalize(low, high), HEAT if anomaly else DIVERGING)
        beyond = "max" if float(numbers.max()) > high else "neither"
        bar = figure.colorbar(colours, ax=axes, fraction=0.04, pad=0.02, aspect=30, extend=beyond)
        middle = [] if anomaly else [0.0]
        bar.set_ticks([low, *middle, high], labels=[number(low), *map(number, middle), number(high)])
        bar.set_label(literal(label))
        bar.outline.set_visible(False)
    return figure


def plot_labels(
    pictures: Any,
    labels: Any,
    *,
    masks: Any = None,
    classes: Mapping[Any, str] | None = None,
    titles: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw the label of every position over its pictures, each in a colour of its own, with a legend.

    Args:
        pictures: as for :func:`plot_positions`.
        labels: shape (N, h, w), such as ``net.predict(images)``.
        masks: true masks, shape (N, H, W), whose outline is drawn in yellow.
        classes: names of labels.
        titles: of each picture.
        size: width and height of the figure in inches; None: as needed.

    Returns:
        The figure.

    Raises:
        ValueError: the pictures, labels and masks do not fit each other, or there are more labels than colours.

    Example:
        >>> patches, names = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
        >>> dense = PCASVMNet(backbone, make_pipeline(PCA(3), SVC()).fit(patches, names), "layer2", pool="dense").eval()
        >>> figure = plot_labels(images, dense.predict(images))
    """
    drawn, labels = as_pictures(pictures), as_array(labels)
    _check(drawn, labels.shape[:1] if labels.ndim == 3 else (), masks, titles)
    present, index = np.unique(labels, return_inverse=True)
    if len(present) > len(COLOURS):
        raise ValueError(f"there are {len(present)} labels, but {len(COLOURS)} colours: draw fewer classes")
    index = index.reshape(labels.shape)
    height, width = drawn.shape[1:3]
    rows = np.arange(height) * labels.shape[1] // height
    columns = np.arange(width) * labels.shape[2] // width
    palette = np.array([mpl.colors.to_rgb(colour) for colour in COLOURS])
    painted = [
        0.55 * palette[numbers[np.ix_(rows, columns)]] + 0.45 * greyed(picture)[..., None]
        for picture, numbers in zip(drawn, index, strict=True)
    ]
    with _draw_pairs(drawn, painted, masks, titles, "", size) as (figure, _):
        names = [class_name(label, place, classes) for place, label in enumerate(present.tolist())]
        patches = [Patch(color=colour, label=name) for colour, name in zip(COLOURS, names, strict=False)]
        figure.legend(handles=patches, loc="outside right center", frameon=False)
    return figure


def plot_rgb(
    pictures: Any,
    components: Any,
    *,
    masks: Any = None,
    titles: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw three components at every position as red, green and blue, beside the pictures.

    Each component has one scale for all pictures, so that the same colour means the same everywhere.

    Args:
        pictures: as for :func:`plot_positions`.
        components: shape (N, B, h, w) with B of at least 3, such as ``net(images).components``; the first three are
            drawn.
        masks: true masks, shape (N, H, W), whose outline is drawn in yellow.
        titles: of each picture.
        size: width and height of the figure in inches; None: as needed.

    Returns:
        The figure.

    Raises:
        ValueError: the pictures, components and masks do not fit each other, or there are fewer than three components.

    Example:
        >>> patches, _ = extract_features(backbone, loader, "layer2", pool="dense", progress=False)
        >>> dense = PCASVMNet(backbone, PCA(3).fit(patches), "layer2", pool="dense").eval()
        >>> figure = plot_rgb(images, dense(images).components)
    """
    drawn, numbers = as_pictures(pictures), as_array(components)
    if numbers.ndim != 4 or numbers.shape[1] < 3:
        raise ValueError(f"expected three components of every position, (N, 3, h, w), got {numbers.shape}")
    _check(drawn, numbers.shape[:1], masks, titles)
    low, high = np.percentile(numbers[:, :3], [_TAILS, 100 - _TAILS], axis=(0, 2, 3), keepdims=True)
    shares = ((numbers[:, :3] - low) / np.where(high > low, high - low, 1)).clip(0, 1)
    large = np.stack([_at_pictures(shares[:, channel], drawn) for channel in range(3)], -1)
    note = "Components 1, 2 and 3 as red, green and blue, on one scale for all pictures."
    with _draw_pairs(drawn, large, masks, titles, note, size) as (figure, _):
        return figure


def _known_scale(values: Any, scale: Sequence[float] | None, anomaly: bool) -> tuple[float, float] | None:
    """Return where the colours of anomalies start and end, if it is given or the maps know it."""
    if scale is None:
        return values.ends if anomaly and isinstance(values, AnomalyMaps) else None
    if not anomaly:
        raise ValueError("scale= is of anomalies: add anomaly=True")
    low, high = map(float, scale)
    if not low < high:
        raise ValueError(f"scale must be two numbers that rise, as net.anomaly_range() returns them, got {scale!r}")
    return low, high


def _as_numbers(values: Any) -> np.ndarray:
    numbers = as_array(values)
    if numbers.ndim != 3:
        raise ValueError(f"expected one number at every position, (N, h, w), got {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise ValueError("the numbers are not finite")
    return numbers


def _at_pictures(numbers: np.ndarray, drawn: np.ndarray, cells: Any = None) -> np.ndarray:
    """Return numbers (N, h, w) at the pixels of pictures, (N, H, W)."""
    maps, size = torch.from_numpy(np.asarray(numbers, np.float32)).unsqueeze(1), drawn.shape[1:3]
    return (upsample_maps(maps, size) if cells is None else cells.spread(maps, size))[:, 0].numpy()


def _check(drawn: np.ndarray, count: tuple[int, ...], masks: Any, titles: Sequence[str] | None) -> None:
    """Refuse masks or titles that are not one for each picture."""
    if count != drawn.shape[:1]:
        raise ValueError(f"there are {len(drawn)} pictures, but numbers of {count[0] if count else 'no'} pictures")
    if masks is not None and as_array(masks).shape != drawn.shape[:3]:
        raise ValueError(f"masks must be (N, H, W) as the pictures, {drawn.shape[:3]}, got {as_array(masks).shape}")
    if titles is not None and len(titles) != len(drawn):
        raise ValueError(f"there are {len(drawn)} pictures, but {len(titles)} titles")


@contextmanager
def _draw_pairs(
    drawn: np.ndarray,
    painted: Sequence[np.ndarray] | np.ndarray,
    masks: Any,
    titles: Sequence[str] | None,
    note: str,
    size: tuple[float, float] | None,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Draw pairs of panels, a photo and the same with colours, outlines of masks on both; yield the figure."""
    height, width = drawn.shape[1:3]
    side = _SIDE, _SIDE * min(height / width, 2.0)
    columns = max(1, min(len(drawn), int(_ACROSS // (2 * side[0]))))
    rows = math.ceil(len(drawn) / columns)
    needed = 2 * columns * side[0] + 1.8, rows * (side[1] + (0.4 if titles else 0.1)) + 0.1
    note += "" if masks is None else " Yellow: the true outline."
    outlines = None if masks is None else as_array(masks) > 0
    with laid_out(needed, size, note.strip()) as figure:
        axes = figure.subplots(rows, 2 * columns, squeeze=False)
        for axis in axes.flat:
            bare(axis)
        for image, pair in enumerate(axes.reshape(-1, 2)[: len(drawn)]):
            heading = "" if titles is None else literal(titles[image])
            for axis, panel in zip(pair, (Panel(drawn[image], heading=heading), Panel(painted[image])), strict=True):
                draw_panel(axis, panel, loc="left", fontsize="small")
                if outlines is not None and outlines[image].any():
                    axis.contour(outlines[image], [0.5], colors=OUTLINE, linewidths=1.2)
        yield figure, list(axes.flat)
