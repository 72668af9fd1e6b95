"""Where everything stands in a figure of maps: lines of blocks, headings, captions, all in inches.

matplotlib's own layouts fill a figure of a given size; here the size follows from the maps, as many to a line as fit.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pytorch_grad_cam_pcasvm.studio.figures.blocks import GAP, Block, Column, draw_remarks
from pytorch_grad_cam_pcasvm.studio.figures.style import FONT, Fix, captioned, draw_panel, fitted, new_figure, wrap_text
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel

_WIDEST, _PICTURE, _EDGE = 22, 1.5, 0.1  # in inches: the widest figure, a picture, what is around all
_HEADING = 0.7  # for "input"
_NAME = 0.45  # for a name that is written upwards
_LINE = {"medium": 0.3, "small": 0.23}


@dataclass(frozen=True)
class FigureLayout:
    """Where everything is, in inches.

    Attributes:
        lines: blocks side by side, line by line.
        picture: width and height of a picture.
        titles: titles of the images, or none.
        notes: notes below the figure.
        images: number of images.
        size: size of the figure, or None: as large as needed.
        compared: whether every group has lines of its own, with the same blocks below each other.
        shrink: size of the titles, as a share of the usual one.
    """

    lines: Sequence[Sequence[Block]]
    picture: tuple[float, float]
    titles: Sequence[str]
    notes: Sequence[str]
    images: int
    size: tuple[float, float] | None
    compared: bool = False
    shrink: float = 1.0

    @staticmethod
    def fitting(
        blocks: Sequence[Block],
        shape: Sequence[int],
        titles: Sequence[str],
        notes: Sequence[str],
        size: tuple[float, float] | None,
        compared: bool = False,
    ) -> "FigureLayout":
        """Return the layout with pictures of the usual size, or else the largest ones that fit."""
        for width in [_PICTURE] if size is None else np.arange(5, 0.3, -0.1):
            picture = (float(width), float(width * shape[1] / shape[2]))
            wrapped, shrink = fitted(titles, picture[1], "medium")
            room = (_WIDEST if size is None else size[0]) - _left(wrapped) - width - GAP - _EDGE - _NAME * compared
            groups = _runs(blocks) if compared else [blocks]
            lines = [line for group in groups for line in _lines(group, width, room)]
            layout = FigureLayout(lines, picture, wrapped, notes, shape[0], size, compared, shrink)
            if size is None or (layout.needed[0] <= size[0] and layout.needed[1] <= size[1]):
                return layout
        raise ValueError(
            f"{shape[0]} images with {len(blocks)} maps each do not fit into size={size} inches: give a larger size "
            "(None: as large as needed), fewer images or fewer components"
        )

    @property
    def needed(self) -> tuple[float, float]:
        """Width and height that everything needs."""
        width = self._start + _EDGE
        width += max(sum(block.width(self.picture[0]) for block in line) for line in self.lines)
        rows = range(self.images)
        heads = sum(self._head(line) for row in rows for line in self.lines if self._is_headed(row, line))
        pictures = self.images * sum(self._caption(line) + self.picture[1] + GAP for line in self.lines)
        between = (self.images - 1) * _LINE["medium"] if self.wrapped else 0
        return width, heads + pictures + between + _height([self._footer(width)], "small") + 0.15

    @property
    def wrapped(self) -> bool:
        """Whether an image has several lines."""
        return len(self.lines) > 1

    @property
    def _start(self) -> float:
        """Where the first block begins."""
        return _left(self.titles) + self.picture[0] + GAP + _NAME * self.compared

    def _is_headed(self, row: int, line: Sequence[Block]) -> bool:
        """Return whether there are headings above a line: once, unless another line has others."""
        groups = {block.title for blocks in self.lines for block in blocks}
        if self.compared and len(self.lines) == len(groups):
            return row == 0 and line is self.lines[0]
        return row == 0 or self.wrapped

    def draw(self, pictures: np.ndarray, way: Fix) -> Figure:
        """Return the figure, with maps drawn in one way."""
        width, height = self.size or self.needed
        figure = new_figure((width, height), "none")
        top, left = height, _left(self.titles)
        font = FONT * min(1, self.picture[0] / _PICTURE)
        for row, picture in enumerate(pictures):
            for line in self.lines:
                is_first = line is self.lines[0]
                if self._is_headed(row, line):
                    top -= self._head(line)
                    self._draw_head(figure, line, top, "input" if is_first else "")
                bottom = top - self._caption(line) - self.picture[1]
                if is_first:
                    axis = self._axis(figure, left, bottom)
                    draw_panel(axis, Panel(picture))
                    if self.titles:
                        axis.set_ylabel(self.titles[row], fontsize=FONT * self.shrink)
                if self.compared:
                    name = wrap_text(line[0].title, self.picture[1] + 0.2, "medium", break_long_words=False)
                    style: dict[str, Any] = {"rotation": 90, "ha": "right", "va": "center", "weight": "bold"}
                    self._text(figure, self._start - 0.08, bottom + self.picture[1] / 2, name, **style)
                for x, block, column in self._placed(line):
                    axis = self._axis(figure, x, bottom)
                    words = self._captioned(block, row) if column is block.columns[0] else ""  # above the first column
                    panel = replace(block.panel(column, row, picture), heading=words)
                    bar = (1 + 0.09 / self.picture[0], 0.15 / self.picture[0]) if column is block.columns[-1] else None
                    style = {"fontsize": "small", "loc": "left", "pad": 4}
                    draw_panel(axis, panel, way, signed=column.signed, bar=bar, **style)
                    draw_remarks(axis, block, column, row, font)
                top = bottom - GAP
            if self.wrapped and row < len(pictures) - 1:
                self._rule(figure, _EDGE, width - _EDGE, top - _LINE["medium"] / 2)
                top -= _LINE["medium"]
        self._text(figure, _EDGE, top - 0.05, self._footer(width), va="top", fontsize="small", color="0.3")
        return figure

    def _draw_head(self, figure: Figure, line: Sequence[Block], bottom: float, first: str) -> None:
        """Write the headings of a line above ``bottom``, and the titles of its groups above them."""
        font = FONT * min(1, (self.picture[0] + GAP) / _HEADING)
        self._text(figure, _left(self.titles), bottom, first, fontsize=font)
        for x, block, column in self._placed(line):
            self._text(figure, x, bottom, self._heading(block, column), fontsize=font)
        x = self._start
        for run in _runs(line):
            start, x = x, x + sum(block.width(self.picture[0]) for block in run)
            if run[0].title and not self.compared:
                y = bottom + self._head(line) - self._group_head(line) + 0.04
                self._rule(figure, start, x - 0.2, y)
                self._text(figure, start, y + 0.04, self._group_title(run), weight="bold")

    def _placed(self, line: Sequence[Block]) -> Iterator[tuple[float, Block, Column]]:
        """Return the columns of a line, and where each begins."""
        x = self._start
        for block in line:
            for number, column in enumerate(block.columns):
                yield x + number * (self.picture[0] + GAP), block, column
            x += block.width(self.picture[0])

    def _head(self, line: Sequence[Block]) -> float:
        """Return the height of the headings of a line with the titles of its groups."""
        headings = [self._heading(block, column) for block in line for column in block.columns]
        return _height(headings, "medium") + self._group_head(line)

    def _group_head(self, line: Sequence[Block]) -> float:
        titles = [self._group_title(run) for run in _runs(line) if run[0].title and not self.compared]
        return _height(titles, "medium") + 0.12 if titles else 0.0

    def _caption(self, line: Sequence[Block]) -> float:
        """Return the height of the captions of a line."""
        return _height([self._captioned(block, row) for block in line for row in range(self.images)], "small") + 0.1

    def _group_title(self, run: Sequence[Block]) -> str:
        width = sum(block.width(self.picture[0]) for block in run) - 0.2
        return wrap_text(run[0].title, width, "bold", break_long_words=False, break_on_hyphens=False)

    def _heading(self, block: Block, column: Column) -> str:
        alone = len(block.columns) == 1
        return captioned(column.heading, block.width(self.picture[0]) if alone else self.picture[0] + GAP, "medium")

    def _captioned(self, block: Block, row: int) -> str:
        return captioned(block.captions[row], block.width(self.picture[0]), "small")

    def _footer(self, width: float) -> str:
        return wrap_text("\n".join(self.notes), width, "small")

    def _axis(self, figure: Figure, x: float, y: float) -> Axes:
        width, height = figure.get_size_inches()
        return figure.add_axes((x / width, y / height, self.picture[0] / width, self.picture[1] / height))

    @staticmethod
    def _text(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
        width, height = figure.get_size_inches()
        figure.text(x / width, y / height, text, **{"va": "bottom", "linespacing": 1.1, **style})

    @staticmethod
    def _rule(figure: Figure, start: float, end: float, y: float) -> None:
        width, height = figure.get_size_inches()
        figure.add_artist(Line2D([start / width, end / width], [y / height] * 2, color="0.6", linewidth=1))


def _lines(blocks: Sequence[Block], picture: float, room: float) -> list[list[Block]]:
    """Return blocks line by line, as few lines as there can be, of about the same width."""

    def lines(room: float) -> list[list[Block]]:
        result: list[list[Block]] = [[]]
        for block in blocks:
            if result[-1] and sum(b.width(picture) for b in (*result[-1], block)) > room:
                result.append([])
            result[-1].append(block)
        return result

    widest = lines(room)
    narrower = (lines(width) for width in np.arange(room, 0, -0.5))
    return [widest, *itertools.takewhile(lambda result: len(result) == len(widest), narrower)][-1]


def _runs(line: Sequence[Block]) -> list[list[Block]]:
    """Return the blocks of a line by the group that they belong to."""
    return [list(run) for _, run in itertools.groupby(line, key=lambda block: block.title)]


def _left(titles: Sequence[str]) -> float:
    """Return the width left of the pictures, where the titles of the images stand."""
    return 0.45 + 0.25 * max(title.count("\n") for title in titles) if titles else _EDGE


def _height(texts: Sequence[str], size: str) -> float:
    return _LINE[size] * max(text.count("\n") + 1 for text in texts)
