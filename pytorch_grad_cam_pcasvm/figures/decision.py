"""The figure of a decision: every component's part in it, as maps and as steps from the baseline to its value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pytorch_grad_cam_pcasvm.cams.recombine import recombined
from pytorch_grad_cam_pcasvm.figures.blocks import heading, subject
from pytorch_grad_cam_pcasvm.figures.grid import check_classes, check_maps
from pytorch_grad_cam_pcasvm.figures.style import BLUE, RED, bare, draw_bar, draw_signed, laid_out, number
from pytorch_grad_cam_pcasvm.maps import SignedMaps, upsampled
from pytorch_grad_cam_pcasvm.pictures import as_pictures
from pytorch_grad_cam_pcasvm.targets import PCATarget, SVMTarget, Target

GREY = "0.35"
_PICTURE, _BARS = 1.6, 2.7  # in inches: a picture, the height of the steps
_NOTE = (
    "Red raises the value, blue lowers it; all maps share one scale. The steps lead from the value at the baseline, "
    "with this layer's activations replaced, to the value that decides. Each is the sum of the map above it"
)
_TOKENS = " and of the class and register tokens, which appear on no map: both parts are printed below it"


@dataclass(frozen=True)
class Step:
    """A part of the decision: the sum of its map (H, W), drawn above it, and of tokens that are not on a map."""

    name: str
    formula: str
    map: Tensor
    rise: float
    tokens: float


def plot_decision(
    images: Any,
    components: SignedMaps,
    head: Any,
    target: Target | None = None,
    *,
    row: int = 0,
    count: int = 4,
    classes: Sequence[Any] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw how a decision is composed: the map of each component times its weight g_b, and their sums as steps.

    Red raises the decision, blue lowers it; all maps share one scale. The steps ``g_b (p_b - p0_b)``, g_b the secant of
    the decision from the baseline's components p0 to p, lead from the baseline's value to that of the image. They
    include the part of class and register tokens, which are not on a map; it is written below them. The network is not
    needed, so any head that was fitted on the same components will do.

    Args:
        images: the explained images, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in [0, 1].
        components: contributions of every component, from ``ContributionCAM.explain(x)``.
        head: ``net.head``, or a fitted estimator, pipeline or :class:`Head` with the same components.
        target: the decision to draw; None: the margin of the predicted class.
        row: which of the N images.
        count: number of components to draw, those with the largest steps; the others are summed.
        classes: names of the classes, in the order of ``classes_``; None: the labels.
        size: width and height of the figure in inches, with smaller letters if need be; None: as large as needed.

    Returns:
        The figure.

    Raises:
        TypeError: the maps are not a SignedMaps.
        ValueError: the maps are not contributions of all components, images or head do not fit, there is no such row,
            or the target is not linear in the head's values.

    Example:
        >>> components = ContributionCAM(net, ["layer2"]).explain(images)
        >>> figure = plot_decision(images, components, net.head, SVMTarget("cat"))
    """
    pictures = as_pictures(images)
    target = SVMTarget() if target is None else target
    if not isinstance(components, SignedMaps):
        raise TypeError(f"expected the SignedMaps of all components, got {type(components).__name__}")
    check_maps("", components, len(pictures))
    if not 0 <= row < len(components) or count < 1:
        raise ValueError(f"row {row}, count {count}: there are {len(components)} images, counted from 0")
    whole = recombined(components[row], head, target)
    if whole.baseline_values is None:
        raise ValueError("gradient maps do not add up to the decision: give those of ContributionCAM(...).explain(x)")
    value, start = float(whole.values), float(whole.baseline_values)
    steps = _steps(components[row], head, target, whole, count)
    check_classes(classes, {"": whole})
    last = Step(heading(target, whole.output), "", whole.maps[0, 0], value - start, sum(step.tokens for step in steps))
    words = subject(whole, 0, 0, classes)
    return _drawn(pictures[row], [*steps, last], start, words, float(whole.log_scale), size)


def weights_of(components: SignedMaps, head: Any, target: Any, chosen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return g_b of some components divided by ``exp(log_scale)``, shape (N, len(chosen)), and log_scale, (N,)."""
    # What recombined does to maps it does to rows of the identity, too.
    count = components.values.shape[1]
    rows = torch.eye(count, dtype=components.values.dtype, device=components.maps.device)[:, list(chosen)]
    maps = rows.reshape(1, count, 1, -1).expand(len(components), -1, -1, -1)
    made = recombined(replace(components, maps=maps), head, target)
    return made.maps[:, 0, 0], made.log_scale[:, 0]


def _steps(components: SignedMaps, head: Any, target: Any, whole: SignedMaps, count: int) -> list[Step]:
    """Return the strongest components of one image, and the others as one step."""
    known = takewhile(lambda pair: pair[1] == PCATarget(pair[0]), enumerate(components.targets))
    of_components = components[:, [b for b, _ in known]]
    g, _ = weights_of(of_components, head, target, range(len(of_components.targets)))
    maps = g[0].reshape(-1, 1, 1) * of_components.maps[0].to(g.dtype)
    factor, remainder = whole.log_scale[0, 0].exp(), of_components.remainder
    tokens = (torch.zeros_like(g[0]) if remainder is None else g[0] * remainder[0].to(g.dtype)) * factor
    rises = maps.sum((1, 2)) * factor + tokens
    order = rises.abs().argsort(descending=True).tolist()
    shown = order if len(order) == count + 1 else order[:count]  # nothing is gained by calling a single one "others"
    formula = "$g_{{{0}}}\\,(p_{{{0}}} - p_{{{0}}}^0)$"
    steps = [
        Step(f"component {b + 1}", formula.format(b + 1), maps[b], float(rises[b]), float(tokens[b])) for b in shown
    ]
    rest = order[len(shown) :]
    if rest:
        name = f"{len(rest)} others"
        steps.append(Step(name, name, maps[rest].sum(0), float(rises[rest].sum()), float(tokens[rest].sum())))
    return steps


def _drawn(
    picture: np.ndarray,
    steps: Sequence[Step],
    start: float,
    subject: str,
    log_scale: float,
    size: tuple[float, float] | None,
) -> Figure:
    """Return the figure of the steps, of which the last is the decision itself."""
    maps = upsampled(torch.stack([step.map for step in steps]).unsqueeze(0), picture.shape[:2])[0].cpu().numpy()
    top = float(np.abs(maps).max())
    # As many places for all numbers as show three digits of the largest: written, they add up, too.
    largest = max(abs(start), abs(start + steps[-1].rise), *(abs(step.rise) for step in steps))
    places = max(0, 2 - math.floor(math.log10(largest or 1.0)))
    has_tokens = any(round(step.tokens, places) for step in steps)
    high = _PICTURE * picture.shape[0] / picture.shape[1]
    note = f"{_NOTE}{_TOKENS if has_tokens else ''}."
    needed = (1.6 + 1.92 * (len(steps) + 1), high + _BARS + 2.2 + 0.55 * has_tokens)
    with laid_out(needed, size, note, layout="compressed", w_pad=0.15) as figure:
        grid = figure.add_gridspec(2, len(steps) + 1, height_ratios=(high, _BARS))
        above = [figure.add_subplot(grid[0, column]) for column in range(len(steps) + 1)]
        bare(above[0]).imshow(picture)
        above[0].set_title("input", fontsize="medium")
        for axis, step, values in zip(above[1:], steps, maps, strict=True):
            draw_signed(axis, picture, values / (top or 1.0))
            axis.set_title(step.name, fontsize="medium")
        for axis in above[2:]:
            style: dict[str, Any] = {"transform": axis.transAxes, "ha": "center", "va": "center", "in_layout": False}
            axis.text(-0.1, 0.5, "=" if axis is above[-1] else "+", weight="bold", **style)
        draw_bar(above[-1].inset_axes((1.06, 0, 0.09, 1)), number(top, log_scale), signed=True)
        bars = figure.add_subplot(grid[1, :])
        begin, rise, end = _draw_steps(bars, steps, start, places)
        if has_tokens:
            style = {"xytext": (0, -36), "textcoords": "offset points", "fontsize": "small", "color": "0.3"}
            for column, step in enumerate(steps, 1):
                both = (("map", step.rise - step.tokens), ("tokens", step.tokens))
                text = "\n".join(f"{name} {_written(part, places, sign=True)}" for name, part in both)
                bars.annotate(text, (column, 0), xycoords=bars.get_xaxis_transform(), ha="center", va="top", **style)
        title = f"{steps[-1].name}{', ' if subject else ''}{subject}"
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
        bars.set_title(f"{end} = {begin} at the baseline {rise} from the components", loc="left", fontsize="medium")
    first, second = (axis.get_position(original=True) for axis in above[:2])
    half = first.width / (second.x0 - first.x0) / 2
    bars.set_xlim(-half, len(steps) + half)  # each bar below its picture
    return figure


def _draw_steps(axis: Axes, steps: Sequence[Step], start: float, places: int) -> tuple[str, str, str]:
    """Draw a bar of each step, from where the last one ended, and return start, rise and end of all, as text."""
    *parts, last = steps
    levels = np.cumsum([start, *(step.rise for step in parts)])
    bottoms = [0.0, *levels[:-1], 0.0]
    heights = [start, *(step.rise for step in parts), start + last.rise]
    colours = [GREY, *(RED if step.rise > 0 else BLUE for step in parts), GREY]
    axis.bar(range(len(heights)), heights, 0.6, bottoms, color=colours, zorder=2)
    for column, level in enumerate(levels):
        axis.plot([column - 0.3, column + 1.3], [level, level], color="0.5", linewidth=1, zorder=3)
    low, high = min(0.0, *levels), max(0.0, *levels)
    room = 0.14 * (high - low or 1.0)
    for column, (bottom, height) in enumerate(zip(bottoms, heights, strict=True)):
        up, is_step = height >= 0, 0 < column < len(heights) - 1
        y = bottom + height + (0.15 if up else -0.15) * room
        style: dict[str, Any] = {"ha": "center", "va": "bottom" if up else "top", "color": colours[column]}
        axis.text(column, y, _written(height, places, is_step), weight="bold", **style)
    axis.axhline(0, color="0.6", linewidth=1, zorder=1)
    axis.set(ylim=(low - (room if low < 0 else 0), high + room))
    axis.set_xticks(range(len(heights)), labels=["baseline", *(step.formula for step in parts), last.name])
    axis.yaxis.set_major_locator(MaxNLocator(4))
    axis.tick_params(axis="x", length=0)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    return _written(start, places), _written(last.rise, places, sign=True, gap=" "), _written(heights[-1], places)


def _written(value: float, places: int, sign: bool = False, gap: str = "") -> str:
    """Return a number with so many places, a sign if asked for and where it is negative."""
    value = round(value, places)
    mark = "\N{MINUS SIGN}" if value < 0 else "+" if sign else ""
    return f"{mark}{gap if mark else ''}{abs(value):.{places}f}"
