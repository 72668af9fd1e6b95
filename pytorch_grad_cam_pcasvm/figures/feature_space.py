"""Figures of the head: contribution ratios, the space of the components, support vectors and their effect."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pytorch_grad_cam_pcasvm.export.explainer import Panel
from pytorch_grad_cam_pcasvm.figures.style import (
    BLUE,
    MARKERS,
    RED,
    axis_or_new,
    class_name,
    draw_panel,
    find_figure,
    literal,
    new_figure,
    number,
)
from pytorch_grad_cam_pcasvm.head import SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS, as_array, as_pictures


def plot_contribution_ratios(pca: Any, *, highlight: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the contribution ratios ``lambda'_b = 100 lambda_b / sum_b lambda_b`` of all components.

    Args:
        pca: a fitted ``PCA`` (or a pipeline with one), or the eigenvalues themselves, shape (B,).
        highlight: number of components to draw in full colour, with their sum; None: all.
        ax: where to draw; None: a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: there is no PCA with ``explained_variance_ratio_``.

    Example:
        >>> figure = plot_contribution_ratios(pipeline)
    """
    ratios = 100 * _ratios(pca)
    shown = len(ratios) if highlight is None else highlight
    axis = axis_or_new(ax, (min(8.0, max(3.2, 1.8 + 0.32 * len(ratios))), 3.0))
    colours = [BLUE if b < shown else "0.75" for b in range(len(ratios))]
    bars = axis.bar(np.arange(1, len(ratios) + 1), ratios, color=colours)
    room = len(ratios) <= 20  # for a number above each bar
    labels = [f"{ratio:.1f}" if room and b < shown else "" for b, ratio in enumerate(ratios)]
    axis.bar_label(bars, labels=labels, fontsize="small", padding=2)
    axis.set(xlabel="component $b$", ylabel="$\\lambda'_b$ in %", ylim=(0, 1.15 * ratios.max()))
    axis.set_xticks(np.arange(1, len(ratios) + 1, 1 if len(ratios) < 12 else 5))
    axis.set_title(f"first {shown}: {ratios[:shown].sum():.1f} %", fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
    return find_figure(axis)


def _ratios(pca: Any) -> np.ndarray:
    pca = getattr(pca, "best_estimator_", pca)
    steps = [step for _, step in pca.steps] if hasattr(pca, "steps") else pca if isinstance(pca, list) else [pca]
    for step in steps:
        if hasattr(step, "explained_variance_ratio_"):
            return np.asarray(torch.as_tensor(step.explained_variance_ratio_).cpu(), dtype=float)
    try:
        eigenvalues = np.asarray(pca, dtype=float)
    except (TypeError, ValueError):
        eigenvalues = np.empty(0)
    if eigenvalues.ndim != 1 or not len(eigenvalues):
        raise ValueError(f"expected a fitted PCA or eigenvalues of shape (B,), got {pca!r:.80}")
    return eigenvalues / eigenvalues.sum()


def plot_feature_space(
    components: Any,
    labels: Any,
    *,
    test: tuple[Any, Any] | None = None,
    dims: Sequence[int] | None = None,
    classes: Mapping[Any, str] | Sequence[str] | None = None,
    ax: Axes | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw samples in the space of two or three components, with a colour and a marker for each class.

    Args:
        components: p of the training set, shape (R, B).
        labels: the samples' classes, shape (R,).
        test: components and labels of the test set, drawn beside it on the same scale.
        dims: numbers of two or three components, from 0; None: the first three, or both if there are two.
        classes: names of the labels, by label or as a list indexed by number; None: the labels themselves.
        ax: where to draw the training set alone (for three components an axis with ``projection="3d"``).
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: components, labels or dimensions do not match, or ``test`` and ``ax`` are both given.

    Example:
        >>> figure = plot_feature_space(pipeline[:-1].transform(features), labels)
    """
    sets = {"training": (components, labels), **({"test": test} if test is not None else {})}
    arrays = {name: (as_array(p), as_array(y)) for name, (p, y) in sets.items()}
    dims = range(min(3, arrays["training"][0].shape[-1])) if dims is None else dims
    if len(dims) not in (2, 3):
        raise ValueError(f"dims must name two or three components, got {tuple(dims)}")
    for name, (p, y) in arrays.items():
        if p.ndim != 2 or len(p) != len(y) or not all(0 <= d < p.shape[1] for d in dims):
            raise ValueError(
                f"the {name} set has components of shape {p.shape} and {len(y)} labels: expected (R, B) and R of them, "
                f"with B > {max(dims)} for dims={tuple(dims)}"
            )
    if ax is not None and test is not None:
        raise ValueError("one ax can hold only one set: leave out test or ax")
    projection = {"projection": "3d"} if len(dims) == 3 else {}
    axes = [ax] if ax is not None else []
    if ax is None:
        figure = new_figure(size or (4.2 * len(arrays) + 1.5, 4.2), w_pad=0.2)
        axes += figure.subplots(1, len(arrays), squeeze=False, subplot_kw=projection).flat
    values = np.unique(np.concatenate([y for _, y in arrays.values()]))
    limits = np.concatenate([p[:, list(dims)] for p, _ in arrays.values()])
    for axis, (name, (p, y)) in zip(axes, arrays.items(), strict=True):
        for index, value in enumerate(values.tolist()):
            chosen = p[y == value][:, list(dims)]
            # From the eleventh class on colours come again, with other markers.
            marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": marker}
            style |= {"s": 14 if len(p) < 2000 else 6, "alpha": 0.75, "linewidths": 0}
            axis.scatter(*chosen.T, label=class_name(value, index, classes), **style)
        for letter, d, low, high in zip("xyz", dims, limits.min(0), limits.max(0), strict=False):
            margin = 0.04 * (high - low) or 1.0
            axis.set(**{f"{letter}label": f"$p_{{{d + 1}}}$", f"{letter}lim": (low - margin, high + margin)})
        if len(arrays) > 1:
            axis.set_title(f"{name}, {len(p)} samples", fontsize="medium")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.12, 0.5), fontsize="small", markerscale=2, frameon=False)
    return find_figure(axes[0])


def plot_support_vector_effect(
    gammas: Sequence[float] = (0.5, 1.0, 2.0), *, largest: float | None = None, ax: Axes | None = None
) -> Figure:
    """Plot the effect of a support vector on the maps of an RBF SVM against its distance.

    ``E(d) = 2 gamma d exp(-gamma d^2)`` is 0 at distance 0 and at infinity; circles mark its maximum,
    ``sqrt(2 gamma) exp(-1/2)`` at ``d = 1 / sqrt(2 gamma)``.

    Args:
        gammas: gamma of each curve.
        largest: largest distance; None: three times the farthest maximum.
        ax: where to draw; None: a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: a gamma is not positive.

    Example:
        >>> figure = plot_support_vector_effect([0.5, 1.0])
    """
    if not len(gammas) or min(gammas) <= 0:
        raise ValueError(f"gammas must be positive numbers, got {gammas!r}")
    axis = axis_or_new(ax, (5.0, 3.2))
    distance = torch.linspace(0, largest or 3 / math.sqrt(2 * min(gammas)), 401, dtype=torch.float64)
    for index, gamma in enumerate(gammas):
        effect = RBF(gamma).effect(distance.new_zeros(1, 1), distance.unsqueeze(1))[0]
        style = ("-", "--", "-.", ":")[index % 4]
        axis.plot(distance, effect, style, color=COLOURS[index % len(COLOURS)], label=f"$\\gamma$ = {gamma:g}")
        best = 1 / math.sqrt(2 * gamma)
        axis.plot(best, math.sqrt(2 * gamma) * math.exp(-0.5), "o", mfc="white", color=COLOURS[index % len(COLOURS)])
    axis.set(xlabel="distance $d$ of the support vector", ylabel="effect $E(d)$", xlim=(0, float(distance[-1])))
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, title="circle: $d = 1/\\sqrt{2\\gamma}$")
    axis.spines[["top", "right"]].set_visible(False)
    return find_figure(axis)


def plot_support_vectors(
    effect: SupportVectorEffect,
    training_images: Any,
    *,
    row: int = 0,
    decision: int = 0,
    count: int = 4,
    image: Any = None,
    names: Sequence[str] | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw the training images that drive a decision for one image, with their signed effect on its map.

    Above, in red, are training images that are evidence for the class of the effect; below, in blue, evidence against
    it. For an effect on decision values, :class:`SupportVectorEffect` says which side is plus.

    Args:
        effect: from ``net.head.support_vector_effect(components, category)``.
        training_images: an array (R, ...), a list or a dict of the training images, which for each i in
            ``effect.indices`` gives training image i, shape (H, W, 3), (3, H, W) or (H, W), in [0, 1].
        row: which of the N explained images.
        decision: which of its P decision values; for a category, there is only one, 0.
        count: how many training images of each sign.
        image: the explained image, drawn first.
        names: a title for every training image, such as its class.
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: the row or the decision does not exist, or a training image is missing.

    Example:
        >>> effect = net.head.support_vector_effect(net(images).components, "cat")
        >>> figure = plot_support_vectors(effect, training_images, image=images[0])
    """
    if not (0 <= row < effect.signed.shape[0] and 0 <= decision < effect.signed.shape[1]):
        raise ValueError(
            f"row {row} and decision {decision}: there are {effect.signed.shape[0]} images and "
            f"{effect.signed.shape[1]} decisions, counted from 0"
        )
    signed = as_array(effect.signed[row, decision])
    indices = as_array(effect.indices)
    order = np.argsort(-signed)
    sides = [[i for i in order[:count] if signed[i] > 0], [i for i in order[::-1][:count] if signed[i] < 0]]
    first = 0 if image is None else 1
    figure = new_figure(size or (1.7 * (count + first) + 0.3, 4.3), w_pad=0.1, h_pad=0.1)
    grid = figure.subplots(2, count + first, squeeze=False)
    for axis in grid.flat:
        axis.set_axis_off()
    if image is not None:
        explained = Panel(as_pictures(np.asarray(as_array(image))[None])[0], heading="explained")
        draw_panel(grid[0, 0], explained, fontsize="small")
    for axes, chosen, colour in zip(grid, sides, (RED, BLUE), strict=True):
        for axis, i in zip(axes[first:], chosen, strict=False):
            index = int(indices[i])
            try:
                picture = training_images[index]
            except (IndexError, KeyError) as error:
                raise ValueError(
                    f"training_images has no image {index}: give the images that the head was fitted on, in their order"
                ) from error
            name = f"no. {index}" if names is None else literal(names[index])
            text = f"{'+' if signed[i] > 0 else ''}{number(signed[i])}"
            panel = Panel(as_pictures(as_array(picture)[None])[0], heading=f"{name}\n{text}")
            draw_panel(axis, panel, fontsize="small", color=colour)
            for spine in axis.spines.values():
                spine.set(visible=True, color=colour, linewidth=3)
    return figure
