"""Means and their standard errors as dots, in place of tables of numbers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.evaluation import Estimate

COLOURS, MARKERS = ("#b2182b", "#2166ac", "0.25"), "oDs"


class Row(NamedTuple):
    """A row of panels: what its axis shows, a value to compare with, and estimates by column and series."""

    axis: str
    reference: float
    columns: Mapping[str, Mapping[str, Sequence[Estimate]]]


def panels(labels: Sequence[str], rows: Sequence[Row]) -> Figure:
    """Draw a panel for each row and column, with a line for each label; rows have the same columns.

    Args:
        labels: names of what is compared, from top to bottom.
        rows: the panels, from top to bottom.

    Returns:
        The figure.
    """
    titles = list(rows[0].columns)
    figure = Figure(figsize=(11.5, len(rows) * (1.05 + 0.19 * len(labels))), layout="constrained")
    grid = figure.subplots(len(rows), len(titles), sharex="row", sharey=True, squeeze=False)
    places = np.arange(len(labels))
    for axes, row in zip(grid, rows, strict=True):
        for axis, (title, series) in zip(axes, row.columns.items(), strict=True):
            for number, (name, estimates) in enumerate(series.items()):
                axis.errorbar(
                    [each.mean for each in estimates], places + 0.34 * (number - (len(series) - 1) / 2) / len(series),
                    xerr=[each.standard_error for each in estimates], fmt=MARKERS[number],
                    color=COLOURS[number] if len(series) > 1 else COLOURS[-1], markersize=3.5, linewidth=1, label=name,
                )  # fmt: skip
            axis.axvline(row.reference, color="0.5", linewidth=0.8)
            axis.set_title(title if row is rows[0] else "", fontsize="medium")
            axis.set_yticks(places, labels, fontsize="small")
            axis.grid(axis="y", color="0.92")
            axis.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
        axes[len(titles) // 2].set_xlabel(row.axis)
    grid[0, 0].invert_yaxis()
    return figure
