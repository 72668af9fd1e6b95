"""The figure of a decision: every component's part in it, as maps and as steps from the baseline to its value."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure, FigureBase
from matplotlib.gridspec import GridSpec
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.recombination import decision_steps, recombined
from pytorch_grad_cam_pcasvm.maps.results import shift_baseline
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.runtime.pictures import as_pictures
from pytorch_grad_cam_pcasvm.studio.figures.blocks import heading, subject, write_title
from pytorch_grad_cam_pcasvm.studio.figures.grid import check_classes, check_maps
from pytorch_grad_cam_pcasvm.studio.figures.style import (
    BLUE,
    LINES,
    RED,
    choose_unit,
    draw_bar,
    draw_panel,
    laid_out,
    number,
    wrap_text,
)
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel
from pytorch_grad_cam_pcasvm.targets import PCATarget, Target, default_decision

GREY = "0.35"
PICTURE, COLUMN = 1.6, 1.92  # in inches: a picture, and with what is around it
_BARS, _WORDS = 2.7, 1.9  # heights in inches: of the bars, of the words around them
_HALO = [withStroke(linewidth=3, foreground="white")]


def choose_decision(target: Any, head: Head, normal: Any = None) -> Any:
    """Return the decision to draw: the one given, or :func:`.default_decision`.

    Raises:
        ValueError: no target is given, and the head has several outputs.
    """
    if target is None and head.decision_position is not None and head.voting.about == "outputs":
        names = [] if head.classes_ is None else head.classes_.tolist()
        raise ValueError(f"the head has {len(names)} outputs: say which to draw, as in target=SVMTarget({names[0]!r})")
    return default_decision(head, normal) if target is None else target


@dataclass(frozen=True)
class DecisionPart:
    """A part of the decision: the sum of its map (H, W), drawn above it, and of tokens that are not on a map.

    Attributes:
        name: what it is the part of.
        label: the same, below its bar.
        components: their numbers.
        map: its map, divided by ``exp(log_scale)`` of the decision.
        rise: how much it raises the decision.
        tokens: how much of that comes from tokens that are not on the map.
    """

    name: str
    label: str
    components: Sequence[int]
    map: Tensor
    rise: float
    tokens: float


@dataclass(frozen=True)
class Steps:
    """The decision for one image as steps from its value at the baseline.

    Attributes:
        parts: the strongest components, and the others as one step.
        whole: the decision itself.
        start: its value at the baseline.
        log_scale: see :class:`SignedMaps`.
        title: what it decides.
    """

    parts: Sequence[DecisionPart]
    whole: DecisionPart
    start: float
    log_scale: float
    title: str

    @classmethod
    def of(
        cls, components: SignedMaps, head: Any, target: Any, count: int, classes: Sequence[Any] | None = None
    ) -> "Steps":
        """Return the steps of a decision for one image, of as many components as given, by their size.

        Raises:
            ValueError: the maps are not contributions of all components, or head, target or classes do not fit.
        """
        whole = recombined(components, head, target)
        if whole.baseline_values is None:
            raise ValueError(
                "gradient maps do not add up to the decision: give those of ContributionCAM(...).explain(x)"
            )
        check_classes(classes, {"": whole})
        value, start = float(whole.values), float(whole.baseline_values)
        parts = _list_parts(components, head, target, whole, count)
        title, words = write_title(target, whole.output, classes), subject(target, whole.output, 0, classes)
        title += f", {words}" if getattr(target, "category", words) is None and words else ""
        label = wrap_text(title, COLUMN, "medium", break_long_words=False)
        numbers, tokens = [b for part in parts for b in part.components], sum(part.tokens for part in parts)
        name = heading(target, whole.output)
        last = DecisionPart(
            "decision" if name == "margin" else name, label, numbers, whole.maps[0, 0], value - start, tokens
        )
        return cls(parts, last, start, float(whole.log_scale), title)

    @property
    def value(self) -> float:
        """The value that decides."""
        return self.start + self.whole.rise

    @property
    def columns(self) -> int:
        """Number of columns: the image, the parts and the decision."""
        return len(self.parts) + 2

    @property
    def places(self) -> int:
        """As many places for all numbers as show three digits of the largest: written, they add up, too."""
        return max(0, 2 - math.floor(math.log10(self._largest / self._unit[0]))) if self._largest else 2

    @property
    def has_tokens(self) -> bool:
        """Whether tokens that are not on a map have parts that can be seen in the numbers."""
        unit, _ = self._unit
        return any(round(step.tokens / unit, self.places) for step in (*self.parts, self.whole))

    @property
    def _unit(self) -> tuple[float, str]:
        return choose_unit(self._largest)

    @property
    def _largest(self) -> float:
        return max(abs(self.start), abs(self.value), *(abs(step.rise) for step in self.parts))

    def heights(self, picture: np.ndarray) -> tuple[float, float]:
        """Return the heights of the maps and of the bars in inches, without the words around them."""
        return PICTURE * picture.shape[0] / picture.shape[1], _BARS

    def needed(self, picture: np.ndarray) -> tuple[float, float]:
        """Return width and height of both rows in inches."""
        lines = self.whole.label.count("\n") + 2 * self.has_tokens
        return 1.6 + COLUMN * self.columns, sum(self.heights(picture)) + _WORDS + 0.25 * lines

    def draw(
        self, figure: FigureBase, grid: GridSpec, picture: np.ndarray, outline: bool = False
    ) -> tuple[list[Axes], Axes]:
        """Draw the maps into the first row of a grid and the bars into the second; see :func:`stand_below`."""
        above = [figure.add_subplot(grid[0, column]) for column in range(self.columns)]
        bars = figure.add_subplot(grid[1, : self.columns])
        self._draw_maps(above, picture, outline)
        self._draw_bars(bars)
        return above, bars

    def _draw_maps(self, axes: Sequence[Axes], picture: np.ndarray, outline: bool) -> None:
        steps = [*self.parts, self.whole]
        raw = torch.stack([step.map for step in steps]).unsqueeze(0)
        maps = upsample_maps(raw, picture.shape[:2])[0].cpu().numpy()
        top = float(np.abs(maps).max())
        panels = [Panel(picture, heading="input")]
        panels += [Panel(picture, values / (top or 1.0), step.name) for step, values in zip(steps, maps, strict=True)]
        for axis, panel in zip(axes, panels, strict=True):
            draw_panel(axis, panel, "outline" if outline else "overlay", fontsize="medium")
        for axis in axes[2:]:
            style: dict[str, Any] = {"transform": axis.transAxes, "ha": "center", "va": "center", "in_layout": False}
            axis.text(-0.1, 0.5, "=" if axis is axes[-1] else "+", weight="bold", **style)
        draw_bar(axes[-1].inset_axes((1.06, 0, 0.09, 1)), number(top, self.log_scale), signed=True)

    def _draw_bars(self, axis: Axes) -> None:
        """Draw a bar of each step, from where the last one ended."""
        unit, power = self._unit
        start, end = self.start / unit, self.value / unit
        rises = [step.rise / unit for step in self.parts]
        totals = np.cumsum([start, *rises])
        bottoms, heights = [0.0, *totals[:-1], 0.0], [start, *rises, end]
        colours = [GREY, *(RED if rise > 0 else BLUE for rise in rises), GREY]
        axis.bar(range(len(heights)), heights, 0.6, bottoms, color=colours, zorder=2)
        axis.axhline(0, color="0.6", linewidth=1, zorder=1)
        for column, level in enumerate(totals):
            axis.plot([column - 0.3, column + 1.3], [level, level], color="0.5", linewidth=1, zorder=3)
        for column, (bottom, height) in enumerate(zip(bottoms, heights, strict=True)):
            up, is_step = height >= 0, 0 < column < len(heights) - 1
            style: dict[str, Any] = {"ha": "center", "va": "bottom" if up else "top", "color": colours[column]}
            style |= {"xytext": (0, 3 if up else -3), "textcoords": "offset points", "path_effects": _HALO, "zorder": 4}
            axis.annotate(self._written(height, is_step), (column, bottom + height), weight="bold", **style)
        low, high = min(0.0, *totals), max(0.0, *totals)
        room = 0.18 * (high - low or 1.0)
        axis.set(ylim=(low - (room if low < 0 else 0), high + room))
        labels = ["start", *(self._label(step) for step in (*self.parts, self.whole))]
        axis.set_xticks(range(len(heights)), labels=labels, linespacing=1.1)
        axis.yaxis.set_major_locator(MaxNLocator(4))
        axis.tick_params(axis="x", length=0)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        rise = round(end, self.places) - round(start, self.places)  # of what is written
        begin, change, last = self._written(start), self._written(rise, True, " "), self._written(end)
        sentence = f"{last} = {begin} at the start {change} from the components"
        axis.set_title(sentence + (f", all {power}" if power else ""), loc="left", fontsize="medium")

    def _label(self, step: DecisionPart) -> str:
        """Return the text below the bar of a step."""
        if not self.has_tokens:
            return step.label
        unit, _ = self._unit
        both = (("map", step.rise - step.tokens), ("tokens", step.tokens))
        return "\n".join([step.label, *(f"{name} {self._written(part / unit, True)}" for name, part in both)])

    def _written(self, value: float, sign: bool = False, gap: str = "") -> str:
        """Return a number with as many places as all, a sign if asked for and where it is negative."""
        value = round(value, self.places)
        mark = "\N{MINUS SIGN}" if value < 0 else "+" if sign else ""
        return f"{mark}{gap if mark else ''}{abs(value):.{self.places}f}"


def stand_below(above: Sequence[Axes], bars: Axes) -> None:
    """Put each bar below its picture, once the places of both are known."""
    first, second = (axis.get_position(original=True) for axis in above[:2])
    last, place = above[-1].get_position(original=True), bars.get_position(original=True)
    bars.set_position((first.x0, place.y0, last.x1 - first.x0, place.height))
    half = first.width / (second.x0 - first.x0) / 2
    bars.set_xlim(-half, len(above) - 1 + half)


def _list_parts(components: SignedMaps, head: Any, target: Any, whole: SignedMaps, count: int) -> list[DecisionPart]:
    """Return the strongest components of one image, and the others as one step."""
    leading = takewhile(lambda pair: pair[1] == PCATarget(pair[0]), enumerate(components.targets))
    of_components = components[:, [b for b, _ in leading]]
    g, p0, log_scale = decision_steps(of_components, head, target)
    g = g * (of_components.log_scale + (log_scale - whole.log_scale[:, 0]).unsqueeze(1)).exp()
    maps = g.unsqueeze(-1).unsqueeze(-1) * of_components.maps.to(g.dtype)
    if components.neutral and of_components.baseline_values is not None:
        maps = shift_baseline(maps, g * (p0 - of_components.baseline_values))
    maps = maps[0]
    factor, remainder = whole.log_scale[0, 0].exp(), of_components.remainder
    tokens = (torch.zeros_like(g[0]) if remainder is None else g[0] * remainder[0].to(g.dtype)) * factor
    rises = maps.sum((1, 2)) * factor + tokens
    order = rises.abs().argsort(descending=True).tolist()
    shown = order if len(order) == count + 1 else order[:count]  # nothing is gained by calling a single one "others"
    names = {b: f"component {b + 1}" for b in shown}
    steps = [DecisionPart(name, name, [b], maps[b], float(rises[b]), float(tokens[b])) for b, name in names.items()]
    rest = order[len(shown) :]
    if rest:
        name = f"{len(rest)} others"
        steps.append(
            DecisionPart(name, name, rest, maps[rest].sum(0), float(rises[rest].sum()), float(tokens[rest].sum()))
        )
    return steps


_NOTE = (
    "Red raises the value, blue lowers it; all maps share one scale. The steps lead from the value at the start, with "
    "this layer's activations replaced, to that of the image. Each is the sum of the map above it"
)
_TOKENS = " plus the remainder (class tokens, other inputs): both parts are printed below it"


def plot_decision(
    images: Any,
    components: SignedMaps,
    head: Any,
    target: Target | None = None,
    *,
    normal: Any = None,
    row: int = 0,
    count: int = 4,
    classes: Sequence[Any] | None = None,
    outline: bool = False,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw how a decision is composed: the map of each component times its weight g_b, and their sums as steps.

    Red raises the decision, blue lowers it; all maps share one scale. The steps ``g_b (p_b - p0_b)``, where g_b is the
    secant of the decision from the baseline's components p0 to p, lead from the value at the baseline to that of the
    image. They include the part of class and register tokens, which is not on a map and is written below the steps. The
    network is not needed, so any head fitted on the same components will do.

    Args:
        images: the explained images, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in [0, 1].
        components: contributions of every component, from ``ContributionCAM.explain(x)``.
        head: ``net.head``, or a fitted estimator, pipeline or :class:`Head` with the same components.
        target: the decision to draw; None: the margin of the predicted class.
        normal: the class that is an absence, such as ``"good"``: if there is no target, the evidence for any other
            class against it is drawn, whatever is predicted. None: the one that the head knows, if any.
        row: which of the N images.
        count: number of components to draw, those with the largest steps; the others are summed.
        classes: names of the classes, in the order of ``classes_``; None: the labels.
        outline: surround the strongest evidence by lines on the image instead of colouring it, see :func:`plot_maps`.
        size: width and height of the figure in inches, with a smaller font if needed; None: as large as needed.

    Returns:
        The figure.

    Raises:
        TypeError: the maps are not a SignedMaps.
        ValueError: the maps are not contributions of all components, the images or the head do not fit, the row does
            not exist, the target is not linear in the head's values, or the target is missing for a head with several
            outputs.

    Example:
        >>> components = ContributionCAM(net, ["layer2"]).explain(images)
        >>> figure = plot_decision(images, components, net.head, SVMTarget("cat"))
    """
    pictures = as_pictures(images)
    if not isinstance(components, SignedMaps):
        raise TypeError(f"expected the SignedMaps of all components, got {type(components).__name__}")
    check_maps("", components, len(pictures))
    if not 0 <= row < len(components) or count < 1:
        raise ValueError(f"row {row}, count {count}: there are {len(components)} images, counted from 0")
    head = Head.of(head)
    steps = Steps.of(components[row], head, choose_decision(target, head, normal), count, classes)
    picture = pictures[row]
    width, height = steps.needed(picture)
    note = f"{LINES}. {how_to_read(steps)}" if outline else how_to_read(steps)
    title = wrap_text(steps.title, width - 0.3, "bold")
    with laid_out(
        (width, height + 0.3 * (title.count("\n") + 1)), size, note, layout="compressed", w_pad=0.15
    ) as figure:
        grid = figure.add_gridspec(2, steps.columns, height_ratios=steps.heights(picture))
        axes = steps.draw(figure, grid, picture, outline)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", fontsize="medium")
    stand_below(*axes)
    return figure


def how_to_read(steps: Steps) -> str:
    """Return how steps are read."""
    return f"{_NOTE}{_TOKENS if steps.has_tokens else ''}."
