"""What all figures share: colours, figures and axes without a window, words and numbers."""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import cv2
import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pytorch_grad_cam.utils.image import show_cam_on_image

from pytorch_grad_cam_pcasvm.runtime.pictures import DIVERGING, HEAT, OVER_PICTURES, greyed
from pytorch_grad_cam_pcasvm.studio.pictures.panels import FADED, Panel, draw_hatching, fade_unsure, spread_mask

FONT = 15  # still readable where the figure is shown at half its size
SMALLEST = 0.6  # size of a text that is shrunk rather than broken
CHARACTER = {"bold": 0.145, "medium": 0.125, "small": 0.1}  # widths in inches
RED, BLUE = "#b2182b", "#2166ac"  # of the dark ends of the colours of signed maps
LINES = "Lines surround the strongest evidence, where a map exceeds half of its own largest value of that sign"
IMAGE_WEIGHT = 0.45
Fix = Literal["overlay", "map", "outline"]  # in which maps are drawn
FINE = 240  # pixels of the shorter side of a map with lines across what is not sure, at least
FAINT = 0.1  # what is below this share of its scale is too faint to be seen
# A marker for each class: with the colours, either alone tells the classes apart.
MARKERS = "os^vDP*X<>"


class NotebookFigure(Figure):
    """A figure that a notebook shows with any backend."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def new_figure(size: tuple[float, float], layout: Any = "constrained", **pads: float) -> Figure:
    """Return an empty figure of the given size in inches, which lays itself out."""
    figure = NotebookFigure(figsize=size, dpi=100)
    figure.set_layout_engine(layout, **pads)
    return figure


@contextmanager
def laid_out(
    needed: tuple[float, float], size: tuple[float, float] | None, note: str, **layout: Any
) -> Iterator[Figure]:
    """Make a figure in which matplotlib finds a place for everything, with a note below.

    Args:
        needed: width and height that all but the note needs with letters of the usual size, in inches.
        size: width and height, with smaller letters if need be; None: as needed.
        note: how the figure is read.
        **layout: options of matplotlib's constrained layout.

    Yields:
        The figure, empty.
    """
    note = wrap_text(note, needed[0] - 0.3, "small")
    needed = needed[0], needed[1] + 0.23 * (note.count("\n") + 1)
    width, height = size or needed
    shrink = min(1, width / needed[0], height / needed[1])
    with mpl.rc_context({"font.size": FONT * shrink}):
        figure = new_figure((width, height), **layout)
        figure.supxlabel(note, x=0.01, ha="left", fontsize="small", color="0.3", linespacing=1.2)
        yield figure
        engine = figure.get_layout_engine()
        assert engine is not None
        for _ in range(2):  # the room for words depends on where the pictures are
            engine.execute(figure)
        figure.set_layout_engine("none")  # all stays where it is


def axis_or_new(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the given axis, or the only one of a new figure."""
    return new_figure(size).subplots() if ax is None else ax


def find_figure(axis: Axes) -> Figure:
    """Return the figure that an axis is part of."""
    figure = axis.get_figure()
    assert isinstance(figure, Figure)
    return figure


def bare(axis: Axes) -> Axes:
    """Remove ticks and frames, which belong to plots, not to pictures."""
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)
    return axis


def draw_signed(axis: Axes, picture: np.ndarray | None, values: np.ndarray, extent: Any = None) -> None:
    """Draw a signed map (H, W) in [-1, 1], blue to red, bare or over its picture (H, W, 3) in grey."""
    if picture is not None:
        axis.imshow(greyed(picture), cmap="gray", vmin=0, vmax=1, extent=extent)
    colours = DIVERGING if picture is None else OVER_PICTURES
    bare(axis).imshow(values, cmap=colours, vmin=-1, vmax=1, extent=extent)


def draw_outlines(axis: Axes, picture: np.ndarray, values: np.ndarray, sure: np.ndarray | None = None) -> list[float]:
    """Draw a picture (H, W, 3) and surround the strongest evidence of a signed map (H, W) in [-1, 1] by lines.

    What is not sure of it is hatched, and its lines are pale.

    Returns:
        Where the lines are: half of the largest value, and half of the smallest, unless they are too faint.
    """
    bare(axis).imshow(picture)
    ends = ((float(values.max()), RED, "solid"), (float(values.min()), BLUE, "dashed"))
    lines = [(end / 2, colour, style) for end, colour, style in ends if end * (1 if colour == RED else -1) >= FAINT]
    for level, colour, style in lines:
        axis.contour(values, [level], colors="white", linewidths=3.6)  # the lines are seen on dark and on light
        look: dict[str, Any] = {"colors": colour, "linewidths": 2.0, "linestyles": style}
        if sure is None:
            axis.contour(values, [level], **look)
        else:
            axis.contour(np.ma.masked_where(~sure, values), [level], **look)
            axis.contour(np.ma.masked_where(sure, values), [level], **look, alpha=FADED)
            large, is_sure = (_enlarge(array) for array in (values, sure))
            hatched = draw_hatching(large.shape) & ~is_sure & (large / level >= 1)
            colours = np.array(mpl.colors.to_rgba(colour)) * hatched[..., None]
            axis.imshow(colours, extent=_measure_extent(values), zorder=1)
    return [level for level, _, _ in lines]


def draw_panel(
    axis: Axes,
    panel: Panel,
    way: Fix = "overlay",
    *,
    signed: bool = True,
    bar: tuple[float, float] | None = None,
    **style: Any,
) -> None:
    """Draw a panel with Matplotlib: its photo with the map over it, the heading above, the colours of its scale beside.

    Args:
        axis: where it is drawn.
        panel: its photo, shape (H, W, 3), its map, shape (H, W), in [-1, 1], or in [0, 1] if it is not signed, and the
            end of its scale.
        way: in which the map is drawn: over the photo, without it, or as outlines on it.
        signed: whether the map has both signs.
        bar: where the bar of the scale begins and its width, as shares of the picture's width; None: there is none.
        **style: of the heading.
    """
    marks: list[float] = []
    photo, values, extent = panel.photo, panel.map, None
    sure = None if values is None or panel.sure is None else spread_mask(panel.sure, values.shape)
    if values is not None and sure is not None and way != "outline":
        photo, extent = _enlarge(photo), _measure_extent(values)
        values = fade_unsure(_enlarge(values), _enlarge(sure))
    if values is None:
        bare(axis).imshow(photo)
    elif way == "outline":
        marks = draw_outlines(axis, photo, values, sure)
    elif signed:
        draw_signed(axis, photo if way == "overlay" else None, values, extent)
    elif way == "overlay":
        bare(axis).imshow(overlaid(photo, values), extent=extent)
    else:
        bare(axis).imshow(values, cmap=HEAT, vmin=0, vmax=1, extent=extent)
    frame_panel(axis, panel, signed=signed, bar=bar, marks=marks, **style)


def _enlarge(pixels: np.ndarray) -> np.ndarray:
    """Return pixels (H, W, ...) repeated, so many that fine lines can be drawn with them."""
    times = -(-FINE // min(pixels.shape[:2]))
    return pixels.repeat(times, 0).repeat(times, 1)


def _measure_extent(values: np.ndarray) -> tuple[float, float, float, float]:
    """Return where matplotlib draws the pixels of a map (H, W), however often they are repeated."""
    height, width = values.shape
    return -0.5, width - 0.5, height - 0.5, -0.5


def frame_panel(
    axis: Axes,
    panel: Panel,
    *,
    signed: bool = True,
    bar: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
    **style: Any,
) -> None:
    """Draw the heading of a panel, and the bar of its scale with marks, by Matplotlib; see :func:`draw_panel`."""
    if panel.heading:
        axis.set_title(panel.heading, **style)
    if bar is not None:
        draw_bar(axis.inset_axes((bar[0], 0, bar[1], 1)), panel.scale, signed, marks)


def overlaid(picture: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return pytorch-grad-cam's overlay, with colours that mean the same in every picture.

    pytorch-grad-cam divides each overlay by its own largest value; an added white, hot row makes that value the same
    in all of them.
    """
    picture, heat = (np.concatenate([values, np.ones_like(values[:1])]) for values in (picture, heat))
    return show_cam_on_image(picture, heat, True, cv2.COLORMAP_INFERNO, IMAGE_WEIGHT)[:-1]


def draw_bar(bar: Axes, top: str, signed: bool, marks: Sequence[float] = ()) -> None:
    """Draw the colours of a scale from 0 to ``top``, or from minus that if ``signed``, with marks at shares of it."""
    bottom = -1 if signed else 0
    colours = np.linspace(1, bottom, 256)[:, None]
    bar.imshow(colours, cmap=DIVERGING if signed else HEAT, aspect="auto", extent=(0, 1, bottom, 1))
    for mark in marks:
        bar.axhline(mark, color="black", linewidth=2)
    bar.set_xticks([])
    bar.yaxis.tick_right()
    bar.set_yticks([bottom, 1], labels=[f"\N{MINUS SIGN}{top}" if signed else "0", top], fontsize="small")
    lowest, highest = bar.get_yticklabels()
    lowest.set_verticalalignment("bottom")
    highest.set_verticalalignment("top")
    bar.tick_params(length=0, pad=2)


def number(value: float, log_scale: float = 0.0) -> str:
    """Return ``value * exp(log_scale)`` with two digits, even below the smallest float."""
    if log_scale == 0 or value == 0:
        return f"{float(f'{value:.2g}') or 0.0:g}".replace("-", "\N{MINUS SIGN}")
    exponent, fraction = divmod(math.log10(value) + log_scale / math.log(10), 1)
    return f"{10**fraction:.1f}e{exponent:.0f}"


def choose_unit(largest: float) -> tuple[float, str]:
    """Return the power of ten in which numbers up to this size are short, and how it is written; 1 and "" if they are.

    matplotlib's own, "1e-7", stands in the way of titles and labels.
    """
    exponent = math.floor(math.log10(largest)) if largest else 0
    return (1.0, "") if -3 <= exponent <= 4 else (10.0**exponent, f"$\\times\\,10^{{{exponent}}}$")


def literal(text: Any) -> str:
    """Return the user's text so that matplotlib takes no part of it for mathematics."""
    return str(text).replace("$", r"\$")


def wrap_text(text: str, width: float, size: str, **options: Any) -> str:
    """Return text with each line wrapped to lines of the given width in inches."""
    columns = max(5, int(width / CHARACTER[size]))
    return "\n".join(textwrap.fill(line, columns, **options) for line in text.split("\n"))


def fitted(texts: Sequence[str], width: float, size: str) -> tuple[list[str], float]:
    """Return texts wrapped between words to lines of the given width in inches, and a font size for the longest word.

    Letters are shrunk rather than words broken, down to a share of :data:`SMALLEST`.
    """
    longest = max((len(word) for text in texts for word in text.split()), default=1)
    shrink = min(1.0, max(SMALLEST, width / CHARACTER[size] / longest))
    return [wrap_text(text, 1.001 * width / shrink, size) for text in texts], shrink


def captioned(text: str, width: float, size: str) -> str:
    """Return text wrapped as by :func:`wrap_text`, unless it has a formula, whose length nobody knows."""
    return text if is_formula(text) else wrap_text(text, width, size)


def is_formula(text: str) -> bool:
    """Return whether a part of a text is mathematics."""
    return "$" in text.replace(r"\$", "")


def class_name(value: Any, index: int, classes: Mapping[Any, str] | Sequence[str] | None) -> str:
    """Return the name of a label, the index-th one drawn, as matplotlib shall write it."""
    return literal(plain_name(value, index, classes))


def plain_name(value: Any, index: int, classes: Mapping[Any, str] | Sequence[str] | None) -> str:
    """Return the name of a label, the index-th one drawn, as the user wrote it."""
    if classes is None:
        return str(value)
    if isinstance(classes, Mapping):
        return str(classes.get(value, value))
    return str(classes[value if isinstance(value, int) and 0 <= value < len(classes) else index])
