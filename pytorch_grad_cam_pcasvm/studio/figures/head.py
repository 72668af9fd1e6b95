"""Figures of the head: contribution ratios, the space of the components, support vectors, paths of its Jacobian."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.network.inputs import checked_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS, as_array, as_pictures
from pytorch_grad_cam_pcasvm.studio.figures.style import (
    BLUE,
    MARKERS,
    RED,
    axis_or_new,
    bare,
    class_name,
    draw_panel,
    find_figure,
    literal,
    new_figure,
    number,
)
from pytorch_grad_cam_pcasvm.studio.model.model import refuse_dense
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel


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


def plot_jacobian(
    net: PCASVMNet,
    target_layer: nn.Module,
    image: Tensor,
    *,
    channel: int | None = None,
    units: int = 40,
    size: tuple[float, float] = (9.0, 6.0),
) -> Figure:
    """Draw the Jacobian of one image as paths: pixels of a feature map, units of every dense layer, components.

    Red paths are positive derivatives, blue paths negative ones; the width is the size of the derivative, relative to
    the largest in its layer. The product of the layers is ``jacobians(x).components`` for that feature map. For a
    volume, the slice with the largest derivatives is shown beside the paths.

    Args:
        net: a backbone with dense layers, and a head with a PCA.
        target_layer: the layer whose feature map is drawn.
        image: one input, shape (1, C, H, W) or (C, H, W); for a network with 3-D convolutions (1, C, D, H, W) or
            (C, D, H, W).
        channel: which feature map t, from 0; None: the one with the largest weights.
        units: maximum number of units to draw per layer: those with the largest derivatives of the components.
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: the head has no components, the feature map does not exist, or there is not exactly one image.

    Example:
        >>> figure = plot_jacobian(net, backbone.layer2, images[0])
    """
    refuse_dense(net, "plot_jacobian")
    of_volumes = any(isinstance(module, nn.Conv3d) for module in net.backbone.modules())
    x = checked_images(image.unsqueeze(0) if image.dim() == (4 if of_volumes else 3) else image).to(find_device(net))
    if len(x) != 1:
        raise ValueError(f"one image is drawn, got {len(x)} in shape {tuple(image.shape)}: give images[:1]")
    stages = _dense_stages(net, target_layer, x)
    of_components = [
        torch.stack(grads).double()  # d components / d stage, for every stage but the last
        for grads in zip(*(_gradients(p, stages[:-1]) for p in stages[-1][0]), strict=True)
    ]
    maps = stages[0][0].detach()
    if maps.dim() not in (3, 4):
        raise ValueError(
            f"the target layer's output has shape {tuple(stages[0].shape)}, but feature maps (1, T, H, W) or "
            "(1, T, D, H, W) are needed: choose a convolutional layer"
        )
    pixels = maps[0].numel()
    weights = of_components[0].unflatten(1, (len(maps), pixels)).sum(-1)
    channel = int(weights.abs().sum(0).argmax()) if channel is None else channel
    if not 0 <= channel < len(maps):
        raise ValueError(f"channel {channel}: the target layer has {len(maps)} feature maps, numbered from 0")
    chosen = [torch.arange(channel * pixels, (channel + 1) * pixels)]
    chosen += [
        step.abs().amax(0).topk(min(units, step.shape[1])).indices.sort().values.cpu() for step in of_components[1:]
    ]
    chosen.append(torch.arange(stages[-1].shape[1]))
    edges = [
        torch.stack([_gradients(after[0, unit], [before])[0].cpu()[inputs] for unit in outputs.tolist()]).double()
        for (before, after), (inputs, outputs) in zip(
            itertools.pairwise(stages), itertools.pairwise(chosen), strict=True
        )
    ]
    return _draw_paths(as_array(maps[channel]), [edge.numpy() for edge in edges], channel, size)


def _dense_stages(net: PCASVMNet, target_layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the activations, the input of every later dense layer, the features and the components, with a graph."""
    name = find_layer_name(net.backbone, target_layer)
    if name is None:
        raise ValueError("the target layer is the network itself: choose one of its layers")
    stages: list[Tensor] = []

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        stages.append(output.detach().clone().requires_grad_())
        return stages[0].clone()

    def unit(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if stages:
            stages.append(args[0])

    with evaluation_mode(net), torch.no_grad():
        net(x)  # a first pass may go on behind the features
    handles = [net.backbone.get_submodule(name).register_forward_hook(start)]
    handles += [m.register_forward_pre_hook(unit) for m in net.backbone.modules() if isinstance(m, nn.Linear)]
    try:
        with evaluation_mode(net), torch.enable_grad():
            output = net(x)
    finally:
        for handle in handles:
            handle.remove()
    if output.components is None:
        raise ValueError("the head has no components: plot_jacobian needs one with a PCA")
    if not stages:
        raise ValueError(f"{name} is not run on the way to the features: choose a layer before {net.layer}")
    if len(stages) > 1:
        del stages[1]  # the input of the first dense layer is the activations themselves
    return [*stages, output.features, output.components]


def _gradients(value: Tensor, stages: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative of one number by each stage of one image, flat."""
    return [grad.flatten() for grad in torch.autograd.grad(value, stages, retain_graph=True)]


def _strongest_slice(inset: Axes, picture: np.ndarray, edge: np.ndarray) -> np.ndarray:
    """Return a feature map (H, W), or of a volume (D, H, W) the slice with the largest derivatives, and say which."""
    if picture.ndim == 2:
        return picture
    strength = np.abs(edge).sum(0).reshape(len(picture), -1).sum(1)
    inset.set_title(f"slice {strength.argmax() + 1} of {len(picture)}", fontsize="small")
    return picture[strength.argmax()]


_MOST_PATHS = 150  # of a layer


def _draw_paths(picture: np.ndarray, edges: Sequence[np.ndarray], channel: int, size: tuple[float, float]) -> Figure:
    figure = new_figure(size)
    axis = figure.subplots()
    counts = [edges[0].shape[1], *(len(edge) for edge in edges)]
    heights = [
        np.linspace(1, 0, n) if n > 5 else np.linspace(0.5 + 0.12 * (n - 1), 0.5 - 0.12 * (n - 1), n) for n in counts
    ]
    for position, edge in enumerate(edges):
        strength = np.abs(edge) / (np.abs(edge).max() or 1.0)
        strongest = np.argsort(strength, axis=None)[-_MOST_PATHS:]  # in this order the strongest lie on top
        for after, before in zip(*np.unravel_index(strongest, edge.shape), strict=True):
            share = strength[after, before]
            ends = heights[position][before], heights[position + 1][after]
            style: dict[str, Any] = {"linewidth": 3 * share, "alpha": 0.1 + 0.8 * share, "zorder": 1}
            axis.plot([position, position + 1], ends, color=RED if edge[after, before] > 0 else BLUE, **style)
    style = {"edgecolors": "0.2", "linewidths": 0.4, "zorder": 2}
    axis.scatter(np.zeros(counts[0]), heights[0], 26, picture.ravel(), cmap="cividis", **style)
    for position, height in enumerate(heights[1:], 1):
        axis.scatter(np.full(len(height), position), height, s=22, color="0.15", zorder=2)
    for b, height in enumerate(heights[-1]):
        axis.text(len(edges) + 0.06, height, f"$p_{{{b + 1}}}$", va="center", fontsize="large")
    titles = [
        f"feature map {channel}\n{counts[0]} {'pixels' if picture.ndim == 2 else 'voxels'}",
        *(f"{n} units" for n in counts[1:-1]),
        "components",
    ]
    for position, title in enumerate(titles):
        axis.text(position, 1.04, title, ha="center", va="bottom", fontsize="medium")
    inset = axis.inset_axes((-0.62, 0.35, 0.45, 0.3), transform=axis.transData)
    bare(inset).imshow(_strongest_slice(inset, picture, edges[0]), cmap="cividis")
    axis.set(xlim=(-0.65, len(edges) + 0.25), ylim=(-0.03, 1.14))
    axis.set_axis_off()
    keys = [Line2D([], [], color=c, linewidth=2, label=label) for c, label in ((RED, "raises"), (BLUE, "lowers"))]
    axis.legend(handles=keys, loc="lower right", frameon=False, ncols=2, bbox_to_anchor=(1.0, -0.06))
    return figure
