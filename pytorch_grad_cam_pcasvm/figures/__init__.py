"""Figures: the paper's own, for any network of this package.

Every function returns a :class:`matplotlib.figure.Figure` that belongs to no window: it is shown by a notebook, and
``figure.savefig("maps.png")`` needs no display. Colours can be told apart by the colour-blind, and in grey print.
"""

import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from pytorch_grad_cam.utils.image import show_cam_on_image
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.features import checked_images
from pytorch_grad_cam_pcasvm.head.decisions import SupportVectorEffect
from pytorch_grad_cam_pcasvm.head.kernels import RBF
from pytorch_grad_cam_pcasvm.maps import SignedMaps, upsampled
from pytorch_grad_cam_pcasvm.modules import device_of, evaluating, layer_name
from pytorch_grad_cam_pcasvm.net import HeadOutput, PCASVMNet
from pytorch_grad_cam_pcasvm.targets import PCATarget, ScoreTarget

HEAT, DIVERGING = "inferno", "RdBu_r"
RED, BLUE = "#b2182b", "#2166ac"
# Okabe and Ito's colours, and a marker for each class: either alone tells the classes apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000", "#B8A800", "#7F7F7F", "#8C510A")
MARKERS = "os^vDP*X<>"
_HALO = [withStroke(linewidth=3, foreground="black")]
_IMAGE_WEIGHT = 0.45
_FAINT = 0.1  # a map whose largest value is below this share of its scale says so


def plot_maps(
    images: Any,
    maps: SignedMaps | Mapping[str, SignedMaps],
    *,
    rows: Sequence[Any] | None = None,
    classes: Sequence[Any] | None = None,
    overlay: bool = True,
    signed: bool = False,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw images and their maps, an image a row: input, P_b^+ and P_b^- of every component, other targets.

    P_b^+ and P_b^- share one scale, whose bar ends at nu_b. Of every other target the positive part is drawn; its bar
    ends at the largest value. Above the maps stands the target's value for that image.

    Args:
        images: what is drawn below the maps, shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W), in [0, 1].
        maps: from ``explain``, or several by title: ``{"Grad-CAM": ..., "PCA": ..., "RBF SVM": ...}``.
        rows: a title for each image, e.g. its true class.
        classes: names of the classes, in the order of ``classes_`` or of a classifier's outputs; None: the labels.
        overlay: over the image (by the host's ``show_cam_on_image``), otherwise bare.
        signed: one picture per target, from -nu (blue: lowers it) through 0 (white) to nu (red: raises it).
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: images, maps and titles do not belong together.
    """
    pictures = _pictures(images)
    groups = maps if isinstance(maps, Mapping) else {"": maps}
    for title, group in groups.items():
        if group.maps.dim() != 4 or len(group.maps) != len(pictures):
            named = f" ({title})" if title else ""
            raise ValueError(
                f"{len(pictures)} images for maps of shape {tuple(group.maps.shape)}{named}: give the images that were "
                "explained, and maps of shape (N, K, H, W)"
            )
    if rows is not None and len(rows) != len(pictures):
        raise ValueError(f"{len(rows)} row titles for {len(pictures)} images: give one for each")
    columns = [
        column
        for title, group in groups.items()
        for k in range(len(group.targets))
        for column in _columns(title, group, k, signed, pictures.shape[1:3])
    ]
    widths = [
        1.0,
        *(width for column in columns for width in ([1.0, 0.65 if signed else 0.5] if column.has_bar else [1.0])),
    ]
    width, height = size or (1.5 * sum(widths) + 0.5, 1.95 * len(pictures) + 0.75)
    titles = [textwrap.fill(str(title), 12) for title in rows or ()]
    margin = 0.45 + 0.25 * max((title.count("\n") for title in titles), default=0)
    edges = {"left": margin / width, "right": 0.998, "bottom": 0.06 / height, "top": 1 - 0.85 / height}
    figure = _figure((width, height))
    with mpl.rc_context({"font.size": 15}):  # still readable where the figure is shown at half its size
        grid = figure.subplots(
            len(pictures),
            len(widths),
            squeeze=False,
            width_ratios=widths,
            gridspec_kw={**edges, "wspace": 0.06, "hspace": 0.24},
        )
        for row, axes in enumerate(grid):
            rest = iter(axes)
            axis = next(rest)
            _bare(axis).imshow(pictures[row])
            if titles:
                axis.set_ylabel(titles[row])
            if row == 0:
                _above(axis, "input")
            for column in columns:
                axis = next(rest)
                _draw_map(axis, pictures[row], column, row, overlay)
                if column.has_caption:
                    axis.set_title(_caption(column, row, classes), fontsize="small", loc="left", pad=4)
                if row == 0:
                    _above(axis, column.title)
                if column.has_bar:
                    next(rest).set_axis_off()
                    _draw_bar(axis.inset_axes((1.06, 0, 0.1, 1)), column, row)
    return figure


@dataclass(frozen=True)
class _Column:
    """One column of pictures.

    Attributes:
        values: what is drawn, shape (N, H, W), from 0 to ``top``, or from ``-top`` if ``signed``.
        top: shape (N,).
    """

    title: str
    group: SignedMaps
    k: int
    values: np.ndarray
    top: np.ndarray
    signed: bool = False
    has_bar: bool = True
    has_caption: bool = True


def _columns(title: str, group: SignedMaps, k: int, signed: bool, size: Sequence[int]) -> Iterator[_Column]:
    target = group.targets[k]
    raw = group.maps[:, k : k + 1]
    maps, positive, negative = (upsampled(m, size)[:, 0].cpu().numpy() for m in (raw, raw.relu(), (-raw).relu()))
    nu = group.nu[:, k].cpu().numpy()
    if isinstance(target, PCATarget):
        name = f"P_{{{target.component + 1}}}" if target.sign == "+" else f"(-P_{{{target.component + 1}}})"
    if signed:
        yield _Column(f"${name}$" if isinstance(target, PCATarget) else title, group, k, maps, nu, signed=True)
    elif isinstance(target, PCATarget):
        yield _Column(f"${name}^+$", group, k, positive, nu, has_bar=False)
        yield _Column(f"${name}^-$", group, k, negative, nu, has_caption=False)
    else:
        yield _Column(title, group, k, positive, positive.max((1, 2)))


def _draw_map(axis: Axes, picture: np.ndarray, column: _Column, row: int, overlay: bool) -> None:
    top = float(column.top[row])
    values = column.values[row] / (top or 1.0)
    if column.signed:
        if overlay:
            axis.imshow(0.35 + 0.65 * picture.mean(-1), cmap="gray", vmin=0, vmax=1)
        axis.imshow(values, cmap=DIVERGING, vmin=-1, vmax=1, alpha=np.abs(values) ** 0.6 * 0.9 if overlay else None)
    elif overlay:
        axis.imshow(_overlay(picture, values))
    else:
        axis.imshow(values, cmap=HEAT, vmin=0, vmax=1)
    _bare(axis)
    largest = np.abs(values).max()
    if largest < _FAINT:
        note = f"at most\n{np.ceil(100 * largest):.0f} % of $\\nu$" if largest else "all evidence\nhas the\nother sign"
        if not bool(column.group.maps[row, column.k].any()):
            note = "no gradient"
        axis.text(0.5, 0.5, note, transform=axis.transAxes, ha="center", va="center", color="white", path_effects=_HALO)


def _overlay(picture: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Return the host's overlay, whose colours mean the same in every picture.

    The host divides each overlay by its own largest value. A row that is white and hot is the largest in all of them.
    """
    picture, heat = (np.concatenate([values, np.ones_like(values[:1])]) for values in (picture, heat))
    return show_cam_on_image(picture, heat, True, cv2.COLORMAP_INFERNO, _IMAGE_WEIGHT)[:-1]


def _draw_bar(bar: Axes, column: _Column, row: int) -> None:
    """Draw the scale of the pictures to the left, from 0 or -top to top."""
    bottom = -1 if column.signed else 0
    bar.imshow(
        np.linspace(1, bottom, 256)[:, None],
        cmap=DIVERGING if column.signed else HEAT,
        aspect="auto",
        extent=(0, 1, bottom, 1),
    )
    bar.set_xticks([])
    bar.yaxis.tick_right()
    top = _number(float(column.top[row]), float(column.group.log_scale[row, column.k]))
    bar.set_yticks([bottom, 1], labels=[f"\N{MINUS SIGN}{top}" if column.signed else "0", top], fontsize="small")
    lowest, highest = bar.get_yticklabels()
    lowest.set_verticalalignment("bottom")
    highest.set_verticalalignment("top")
    bar.tick_params(length=0, pad=2)


def _number(value: float, log_scale: float = 0.0) -> str:
    """Return ``value * exp(log_scale)`` with two digits, also where no float is small enough."""
    if log_scale == 0 or value == 0:
        return f"{float(f'{value:.2g}'):g}".replace("-", "\N{MINUS SIGN}")
    exponent, fraction = divmod(math.log10(value) + log_scale / math.log(10), 1)
    return f"{10**fraction:.1f}e{exponent:.0f}"


def _caption(column: _Column, row: int, classes: Sequence[Any] | None) -> str:
    """Return what the target is for this image, and its value."""
    target, output = column.group.targets[column.k], column.group.output
    value = _number(float(column.group.values[row, column.k]))
    if isinstance(target, PCATarget):
        return f"${'-' if target.sign == '-' else ''}p_{{{target.component + 1}}}$ = {value}"
    if isinstance(output, HeadOutput):
        known = output.head.classes_

        def name(label: Any) -> str:
            return str(label if classes is None else classes[output.head.class_index(label)])

        category, versus = getattr(target, "category", None), getattr(target, "versus", None)
        if known is None or not hasattr(target, "category"):
            words = [getattr(target, "__name__", "")]
        else:
            if category is None:
                category = output.head.labels([level[row : row + 1] for level in output.levels])[0]
            words = [name(category)]
            if versus is not None:
                words.append(f"/ {versus if versus == 'runner-up' and versus not in known else name(versus)}")
        if getattr(target, "sign", "+") == "-":
            words.insert(0, "against" if known is not None else "\N{MINUS SIGN}")
    else:
        index = getattr(target, "category", None)
        index = int(output[row].argmax()) if index is None and isinstance(target, ScoreTarget) else index
        words = ["" if index is None else str(index if classes is None else classes[index])]
    return " ".join(word for word in (*words, value) if word)


def plot_contribution_ratios(pca: Any, *, highlight: int | None = None, ax: Axes | None = None) -> Figure:
    """Draw the contribution ratios ``lambda'_b = 100 lambda_b / sum_b lambda_b`` of all components.

    Args:
        pca: a fitted ``PCA`` (or a pipeline with one), or the eigenvalues themselves, shape (B,).
        highlight: so many components are drawn in full colour, and their sum is written; None: all.
        ax: where to draw; None: a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: no PCA with ``explained_variance_ratio_`` is in it.
    """
    ratios = 100 * _ratios(pca)
    shown = len(ratios) if highlight is None else highlight
    axis = _axis(ax, (min(8.0, max(3.2, 1.8 + 0.32 * len(ratios))), 3.0))
    colours = [BLUE if b < shown else "0.75" for b in range(len(ratios))]
    bars = axis.bar(np.arange(1, len(ratios) + 1), ratios, color=colours)
    labels = [f"{ratio:.1f}" if b < shown else "" for b, ratio in enumerate(ratios)]
    axis.bar_label(bars, labels=labels, fontsize="small", padding=2)
    axis.set(xlabel="component $b$", ylabel="$\\lambda'_b$ in %", ylim=(0, 1.15 * ratios.max()))
    axis.set_xticks(np.arange(1, len(ratios) + 1, 1 if len(ratios) < 12 else 5))
    axis.set_title(f"first {shown}: {ratios[:shown].sum():.1f} %", fontsize="medium")
    axis.spines[["top", "right"]].set_visible(False)
    return _of(axis)


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
        raise ValueError(f"no fitted PCA and no eigenvalues, shape (B,): {pca!r:.80}")
    return eigenvalues / eigenvalues.sum()


def plot_feature_space(
    components: Any,
    labels: Any,
    *,
    test: tuple[Any, Any] | None = None,
    dims: Sequence[int] = (0, 1, 2),
    classes: Mapping[Any, str] | Sequence[str] | None = None,
    ax: Axes | None = None,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw samples in the space of two or three components, a colour and a marker a class.

    Args:
        components: p of the training set, shape (R, B).
        labels: their classes, shape (R,).
        test: components and labels of the test set, drawn beside it on the same scale.
        dims: two or three components, from 0.
        classes: names of the labels: by label, or a list in which numbers are looked up; None: the labels.
        ax: where to draw the training set alone (for three components an axis with ``projection="3d"``).
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: components, labels or dimensions that do not fit, or ``test`` together with ``ax``.
    """
    sets = {"training": (components, labels), **({"test": test} if test is not None else {})}
    arrays = {name: (_array(p), _array(y)) for name, (p, y) in sets.items()}
    if len(dims) not in (2, 3):
        raise ValueError(f"dims must name two or three components, got {tuple(dims)}")
    for name, (p, y) in arrays.items():
        if p.ndim != 2 or len(p) != len(y) or not all(0 <= d < p.shape[1] for d in dims):
            raise ValueError(
                f"the {name} set has components of shape {p.shape} and {len(y)} labels: expected (R, B) and R of them, "
                f"with B > {max(dims)} for dims={tuple(dims)}"
            )
    if ax is not None and test is not None:
        raise ValueError("one ax has room for one set: leave out test or ax")
    kind = {"projection": "3d"} if len(dims) == 3 else {}
    if ax is not None:
        axes = [ax]
    else:
        figure = _figure(size or (4.2 * len(arrays) + 1.5, 4.2))
        axes = list(figure.subplots(1, len(arrays), squeeze=False, subplot_kw=kind)[0])
    values = np.unique(np.concatenate([y for _, y in arrays.values()]))
    limits = np.concatenate([p[:, list(dims)] for p, _ in arrays.values()])
    for axis, (name, (p, y)) in zip(axes, arrays.items(), strict=True):
        for index, value in enumerate(values.tolist()):
            chosen = p[y == value][:, list(dims)]
            # From the eleventh class on colours come again, with other markers.
            marker = MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]
            style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": marker}
            style |= {"s": 14 if len(p) < 2000 else 6, "alpha": 0.75, "linewidths": 0}
            axis.scatter(*chosen.T, label=_name(value, index, classes), **style)
        for letter, d, low, high in zip("xyz", dims, limits.min(0), limits.max(0), strict=False):
            margin = 0.04 * (high - low) or 1.0
            axis.set(**{f"{letter}label": f"$p_{{{d + 1}}}$", f"{letter}lim": (low - margin, high + margin)})
        if len(arrays) > 1:
            axis.set_title(f"{name}, {len(p)} samples", fontsize="medium")
    axes[-1].legend(loc="center left", bbox_to_anchor=(1.12, 0.5), fontsize="small", markerscale=2, frameon=False)
    if ax is None:
        figure.subplots_adjust(
            left=0.07 if len(dims) == 2 else 0.02, right=1 - 1.9 / figure.get_figwidth(), wspace=0.25
        )
    return _of(axes[0])


def plot_support_vector_effect(
    gammas: Sequence[float] = (0.5, 1.0, 2.0), *, largest: float | None = None, ax: Axes | None = None
) -> Figure:
    """Draw the effect of a support vector on the maps of an RBF machine against its distance.

    ``E(d) = 2 gamma d exp(-gamma d^2)`` is 0 at distance 0 and at infinity; circles mark its maximum,
    ``sqrt(2 gamma) exp(-1/2)`` at ``d = 1 / sqrt(2 gamma)``.

    Args:
        gammas: gamma of each curve.
        largest: largest distance; None: three times the farthest maximum.
        ax: where to draw; None: a new figure.

    Returns:
        The figure.

    Raises:
        ValueError: a gamma that is not positive.
    """
    if not len(gammas) or min(gammas) <= 0:
        raise ValueError(f"gammas must be positive numbers, got {gammas!r}")
    axis = _axis(ax, (5.0, 3.2))
    distance = torch.linspace(0, largest or 3 / math.sqrt(2 * min(gammas)), 401, dtype=torch.float64)
    for index, gamma in enumerate(gammas):
        effect = RBF(gamma).effect(distance.square(), distance)
        style = ("-", "--", "-.", ":")[index % 4]
        axis.plot(distance, effect, style, color=COLOURS[index % len(COLOURS)], label=f"$\\gamma$ = {gamma:g}")
        best = 1 / math.sqrt(2 * gamma)
        axis.plot(best, math.sqrt(2 * gamma) * math.exp(-0.5), "o", mfc="white", color=COLOURS[index % len(COLOURS)])
    axis.set(xlabel="distance $d$ of the support vector", ylabel="effect $E(d)$", xlim=(0, float(distance[-1])))
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, title="circle: $d = 1/\\sqrt{2\\gamma}$")
    axis.spines[["top", "right"]].set_visible(False)
    return _of(axis)


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

    Red, above: training images that speak for the class that the effect was asked for; blue, below: against it. For an
    effect on decision values, :class:`SupportVectorEffect` says which side is plus.

    Args:
        effect: from ``net.head.support_vector_effect(components, category)``.
        training_images: gives training image i of shape (H, W, 3), (3, H, W) or (H, W), in [0, 1], for i in
            ``effect.indices``: an array (R, ...), a list or a dict.
        row: which of the N images was explained.
        decision: which of its P decision values; of a category there is one, 0.
        count: how many of each sign.
        image: the explained image, drawn first.
        names: a title for every training image, e.g. its class.
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: no such row or decision.
    """
    if not (0 <= row < effect.signed.shape[0] and 0 <= decision < effect.signed.shape[1]):
        raise ValueError(
            f"row {row} and decision {decision}: there are {effect.signed.shape[0]} images and "
            f"{effect.signed.shape[1]} decisions, counted from 0"
        )
    signed = _array(effect.signed[row, decision])
    indices = _array(effect.indices)
    order = np.argsort(-signed)
    sides = [[i for i in order[:count] if signed[i] > 0], [i for i in order[::-1][:count] if signed[i] < 0]]
    first = 0 if image is None else 1
    figure = _figure(size or (1.7 * (count + first) + 0.3, 4.3))
    grid = figure.subplots(2, count + first, squeeze=False)
    for axis in grid.flat:
        axis.set_axis_off()
    if image is not None:
        _bare(grid[0, 0]).imshow(_pictures(np.asarray(_array(image))[None])[0])
        grid[0, 0].set_title("explained", fontsize="small")
    for axes, chosen, colour in zip(grid, sides, (RED, BLUE), strict=True):
        for axis, i in zip(axes[first:], chosen, strict=False):
            index = int(indices[i])
            _bare(axis).imshow(_pictures(_array(training_images[index])[None])[0])
            for spine in axis.spines.values():
                spine.set(visible=True, color=colour, linewidth=3)
            name = f"{names[index]}\n" if names is not None else f"no. {index}\n"
            axis.set_title(f"{name}{'+' if signed[i] > 0 else ''}{_number(signed[i])}", fontsize="small", color=colour)
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.03, top=0.86, hspace=0.45)
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

    Red paths raise, blue ones lower; the width is the size of the derivative, relative to the largest of its layer. The
    product of the layers is ``jacobians(x).components`` for that feature map.

    Args:
        net: a backbone with dense layers, and a head with a PCA.
        target_layer: the layer whose feature map is drawn.
        image: one input, shape (1, ...) or without the 1.
        channel: which feature map t, from 0; None: the one whose weights are largest.
        units: at most so many units of a layer are drawn, those with the largest derivatives of the components.
        size: width and height of the figure in inches.

    Returns:
        The figure.

    Raises:
        ValueError: the head has no components, or the feature map does not exist.
    """
    x = checked_images(image if image.dim() == 4 else image.unsqueeze(0)).to(device_of(net))
    if len(x) != 1:
        raise ValueError(f"one image is drawn, got {len(x)}")
    levels = _dense_levels(net, target_layer, x)
    of_components = [
        torch.stack(grads).double()  # d components / d level, for every level but the last
        for grads in zip(*(_gradients(p, levels[:-1]) for p in levels[-1][0]), strict=True)
    ]
    maps = levels[0][0].detach()
    pixels = maps[0].numel()
    weights = of_components[0].unflatten(1, (len(maps), pixels)).sum(-1)
    channel = int(weights.abs().sum(0).argmax()) if channel is None else channel
    if not 0 <= channel < len(maps):
        raise ValueError(f"channel {channel}: the target layer has {len(maps)} feature maps, numbered from 0")
    kept = [torch.arange(channel * pixels, (channel + 1) * pixels)]
    kept += [
        step.abs().amax(0).topk(min(units, step.shape[1])).indices.sort().values.cpu() for step in of_components[1:]
    ]
    kept.append(torch.arange(levels[-1].shape[1]))
    edges = [
        torch.stack([_gradients(after[0, unit], [before])[0].cpu()[inputs] for unit in outputs.tolist()]).double()
        for (before, after), (inputs, outputs) in zip(itertools.pairwise(levels), itertools.pairwise(kept), strict=True)
    ]
    return _draw_paths(_array(maps[channel]), [edge.numpy() for edge in edges], channel, size)


def _dense_levels(net: PCASVMNet, target_layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the activations, the input of every later dense layer, the features and the components, with a graph."""
    name = layer_name(net.backbone, target_layer)
    if name is None:
        raise ValueError("the target layer is the network itself: choose one of its layers")
    if net.head.component_level is None:
        raise ValueError("the head has no components: plot_jacobian needs a PCA")
    levels: list[Tensor] = []

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        levels.append(output.detach().clone().requires_grad_())
        return levels[0].clone()

    def unit(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if levels:
            levels.append(args[0])

    handles = [net.backbone.get_submodule(name).register_forward_hook(start)]
    handles += [m.register_forward_pre_hook(unit) for m in net.backbone.modules() if isinstance(m, nn.Linear)]
    try:
        with evaluating(net), torch.enable_grad():
            output = net(x)
    finally:
        for handle in handles:
            handle.remove()
    if len(levels) > 1:
        del levels[1]  # the input of the first dense layer is the activations themselves
    assert output.components is not None
    return [*levels, output.features, output.components]


def _gradients(value: Tensor, levels: Sequence[Tensor]) -> list[Tensor]:
    """Return the derivative of one number by each level of one image, flat."""
    return [grad.flatten() for grad in torch.autograd.grad(value, levels, retain_graph=True)]


_MOST_PATHS = 150  # of a layer


def _draw_paths(picture: np.ndarray, edges: Sequence[np.ndarray], channel: int, size: tuple[float, float]) -> Figure:
    figure = _figure(size)
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
            axis.plot(
                [position, position + 1],
                [heights[position][before], heights[position + 1][after]],
                color=RED if edge[after, before] > 0 else BLUE,
                linewidth=3 * share,
                alpha=0.1 + 0.8 * share,
                zorder=1,
            )
    axis.scatter(
        np.zeros(counts[0]),
        heights[0],
        c=picture.ravel(),
        cmap="cividis",
        s=26,
        zorder=2,
        edgecolors="0.2",
        linewidths=0.4,
    )
    for position, height in enumerate(heights[1:], 1):
        axis.scatter(np.full(len(height), position), height, s=22, color="0.15", zorder=2)
    for b, height in enumerate(heights[-1]):
        axis.text(len(edges) + 0.06, height, f"$p_{{{b + 1}}}$", va="center", fontsize="large")
    titles = [f"feature map {channel}\n{counts[0]} pixels", *(f"{n} units" for n in counts[1:-1]), "components"]
    for position, title in enumerate(titles):
        axis.text(position, 1.04, title, ha="center", va="bottom", fontsize="medium")
    inset = axis.inset_axes((-0.62, 0.35, 0.45, 0.3), transform=axis.transData)
    _bare(inset).imshow(picture, cmap="cividis")
    axis.set(xlim=(-0.65, len(edges) + 0.25), ylim=(-0.03, 1.14))
    axis.set_axis_off()
    keys = [Line2D([], [], color=c, linewidth=2, label=label) for c, label in ((RED, "raises"), (BLUE, "lowers"))]
    axis.legend(
        handles=keys, loc="lower right", frameon=False, ncols=2, bbox_to_anchor=(1.0, -0.06),
    )  # fmt: skip
    figure.subplots_adjust(left=0.02, right=0.98, bottom=0.05, top=0.99)
    return figure


class _NotebookFigure(Figure):
    """A figure that a notebook shows, whatever its backend is."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def _figure(size: tuple[float, float]) -> Figure:
    return _NotebookFigure(figsize=size, dpi=100)


def _axis(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Return the axis given, or the only one of a new figure."""
    if ax is not None:
        return ax
    figure = _figure(size)
    figure.set_layout_engine("tight")
    return figure.subplots()


def _of(axis: Axes) -> Figure:
    figure = axis.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _bare(axis: Axes) -> Axes:
    """Take off what belongs to plots, not to pictures."""
    axis.set_axis_on()
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set_visible(False)
    return axis


def _above(axis: Axes, title: str) -> None:
    """Write the title of a column above the captions of its first row."""
    axis.annotate(
        title, (0.5, 1), (0, 24), xycoords="axes fraction", textcoords="offset points", ha="center", va="bottom"
    )


def _name(value: Any, index: int, classes: Mapping[Any, str] | Sequence[str] | None) -> str:
    if classes is None:
        return str(value)
    if isinstance(classes, Mapping):
        return classes.get(value, str(value))
    return classes[value if isinstance(value, int) and 0 <= value < len(classes) else index]


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values  # numpy has none
    return np.asarray(values)


def _pictures(images: Any) -> np.ndarray:
    """Return images as float32 of shape (N, H, W, 3) in [0, 1].

    Args:
        images: shape (N, H, W, 3), (N, 3, H, W), (N, 1, H, W) or (N, H, W).

    Returns:
        The pictures.

    Raises:
        ValueError: another shape, or values outside [0, 1].
    """
    pictures = _array(images)
    if pictures.dtype == np.uint8:
        pictures = pictures / 255
    if pictures.ndim == 4 and pictures.shape[1] in (1, 3) and pictures.shape[-1] not in (1, 3):
        pictures = pictures.transpose(0, 2, 3, 1)
    if pictures.ndim == 3:
        pictures = pictures[..., None]
    if pictures.ndim != 4 or pictures.shape[-1] not in (1, 3):
        raise ValueError(f"images must have shape (N, H, W, 3) or (N, 3, H, W), or one channel, got {pictures.shape}")
    if not (pictures.min() >= 0 and pictures.max() <= 1):
        raise ValueError(
            f"images must lie in [0, 1] to be drawn, these go from {pictures.min():.3g} to {pictures.max():.3g}: "
            "undo the normalisation, x * std + mean"
        )
    return np.ascontiguousarray(np.broadcast_to(pictures, (*pictures.shape[:3], 3)), dtype=np.float32)
