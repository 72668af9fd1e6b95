"""The figure of a component: the images at its two ends with their maps, classes along it, its share in decisions."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.head import Head
from pytorch_grad_cam_pcasvm.maps.recombination import decision_steps
from pytorch_grad_cam_pcasvm.maps.signed_maps import SignedMaps
from pytorch_grad_cam_pcasvm.methods import ContributionCAM
from pytorch_grad_cam_pcasvm.methods.grad_cam_protocol import ClosedFormCAM
from pytorch_grad_cam_pcasvm.network.grid import upsample_maps
from pytorch_grad_cam_pcasvm.network.inputs import checked_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_network
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.outputs import HeadOutput
from pytorch_grad_cam_pcasvm.runtime.errors import BlankMapWarning
from pytorch_grad_cam_pcasvm.runtime.pictures import COLOURS, as_array, as_pictures
from pytorch_grad_cam_pcasvm.studio.figures.blocks import heading, list_labels, subject
from pytorch_grad_cam_pcasvm.studio.figures.decision import choose_decision
from pytorch_grad_cam_pcasvm.studio.figures.grid import check_maps
from pytorch_grad_cam_pcasvm.studio.figures.style import (
    BLUE,
    MARKERS,
    RED,
    choose_unit,
    class_name,
    draw_panel,
    fitted,
    laid_out,
    number,
    plain_name,
    wrap_text,
)
from pytorch_grad_cam_pcasvm.studio.model.model import refuse_dense
from pytorch_grad_cam_pcasvm.studio.pictures.panels import Panel
from pytorch_grad_cam_pcasvm.targets import PCATarget, Target

MOST_CLASSES = 12
_PICTURE, _NAME = 1.25, 2.2  # in inches: a picture, the name of a class beside its points


@dataclass(frozen=True)
class Ends:
    """The images at the two ends of a component, from low to high, with their maps on one scale.

    Attributes:
        rows: shape (2 E,).
        pictures: shape (2 E, H, W, 3).
        maps: between -1 and 1, shape (2 E, H, W).
        top: the value that 1 stands for, times ``exp(log_scale)``.
        log_scale: see :class:`SignedMaps`.
    """

    rows: np.ndarray
    pictures: np.ndarray
    maps: np.ndarray
    top: float
    log_scale: float

    def outermost(self, count: int) -> "Ends":
        """Return the given number of images at each end."""
        chosen = [*range(count), *range(len(self.rows) - count, len(self.rows))]
        return replace(self, rows=self.rows[chosen], pictures=self.pictures[chosen], maps=self.maps[chosen])


@dataclass(frozen=True)
class Along:
    """All images along a component.

    Attributes:
        symbol: symbol of the component.
        values: its values, shape (R,).
        classes: the images of each class by its name, masks of shape (R,).
        group: what the classes are.
        parts: the component's parts in the decision, shape (R,), or None.
        decision: what it is a part of.
    """

    symbol: str
    values: np.ndarray
    classes: Mapping[str, np.ndarray]
    group: str
    parts: np.ndarray | None
    decision: str


def plot_component(
    net: PCASVMNet,
    component: int,
    images: Tensor,
    *,
    target_layer: nn.Module | str | None = None,
    cam: ClosedFormCAM | None = None,
    labels: Any = None,
    classes: Mapping[Any, str] | Sequence[str] | None = None,
    pictures: Any = None,
    count: int = 4,
    end: int | None = None,
    target: Target | None = None,
    normal: Any = None,
    batch_size: int = 32,
    size: tuple[float, float] | None = None,
) -> Figure:
    """Draw the meaning of a component: the images at its two ends with their maps, and the classes along it.

    The upper part shows, from the lowest to the highest value, images, their signed maps (red raises the component),
    and the mean of both at each end. All maps of an end share one scale, so that a strong end does not make the other
    pale; the number beside each scale gives its size. The lower part shows every image as a point, class by class, with
    those shown above circled; and with an SVM and maps that add up, the component's part in the decisions: the mean
    over each class of ``g_b (p_b - p0_b)`` (see :func:`~pytorch_grad_cam_pcasvm.figures.plot_decision`) with its
    standard error.

    Args:
        net: a network with components.
        component: the component's number b, from 0.
        images: the network's input, shape (R, C, H, W), R at least 2.
        target_layer: the layer whose contributions are drawn, by :class:`ContributionCAM`.
        cam: a method created for this network, to use instead.
        labels: the class of every image, shape (R,); None: the predicted ones.
        classes: names of the labels, by label or as a list indexed by number; None: the labels themselves.
        pictures: the pictures to draw, shape (R, H, W, 3), (R, 3, H, W), (R, 1, H, W) or (R, H, W), in [0, 1]; None:
            the images, which must then be in [0, 1].
        count: number of images at each end.
        end: number of images in the mean of each end; None: a tenth of all images, at least ``count``.
        target: the decision; None: the margin of the class predicted for each image. Required if the head has several
            outputs.
        normal: the class that is an absence, as for :func:`plot_decision`.
        batch_size: number of images to run at once.
        size: width and height of the figure in inches, with a smaller font if needed; None: as large as needed.

    Returns:
        The figure.

    Raises:
        TypeError: the images are not a floating-point tensor.
        ValueError: the component does not exist; neither or both of ``target_layer`` and ``cam`` are given; ``cam``
            belongs to another network; images, pictures and labels do not match; or the target is missing for a head
            with several outputs.

    Example:
        >>> figure = plot_component(net, 0, images, target_layer="layer2", count=1)
    """
    cam = choose_method(net, target_layer, cam)
    target = choose_decision(target, net.head, normal)
    x = checked_images(images)
    source = as_array(x if pictures is None else pictures)
    p, predicted, output = values_of(net, x, batch_size)
    if not 0 <= component < p.shape[1]:
        raise ValueError(f"component {component}: the head has {p.shape[1]}, numbered from 0")
    if len(x) < 2 or count < 1 or batch_size < 1 or len(source) != len(x):
        raise ValueError(
            f"{len(x)} images, {len(source)} pictures, count {count}: give at least 2 images, and a picture of each"
        )
    image_labels = predicted if labels is None else as_array(labels)
    if image_labels.shape != (len(x),):
        raise ValueError(f"labels of shape {image_labels.shape} for {len(x)} images: give one for each")
    count = min(count, len(x) // 2)
    of_mean = min(max(end or len(x) // 10, count), len(x) // 2)
    values = p[:, component].numpy()
    labelled: dict[str, np.ndarray] = {}
    for index, value in enumerate(np.unique(image_labels).tolist()):
        name = class_name(value, index, classes)
        labelled[name] = labelled.get(name, False) | (image_labels == value)
    order = np.argsort(values, kind="stable")
    rows = np.concatenate([order[:of_mean], order[-of_mean:]])
    drawn = as_pictures(source[rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BlankMapWarning)
        maps = SignedMaps.cat([
            cam.explain(x[some].to(find_device(net)), [PCATarget(component)]).cpu()
            for some in torch.from_numpy(rows).split(batch_size)
        ])
        check_maps("", maps, len(drawn))
        ends = _ends(rows, drawn, maps)
        parts = _list_parts(cam, x[:1], p.to(find_device(net)), component, target)
    group = "class" if labels is not None else "predicted class" if classes_known(net.head) else "set"
    along = Along(f"p_{{{component + 1}}}", values, labelled, group, parts, _name_decision(target, output, classes))
    return _draw_figure(ends, along, count, size)


def choose_method(net: PCASVMNet, layer: Any, cam: ClosedFormCAM | None, at: Any = None) -> ClosedFormCAM:
    """Return the method that was given, or contributions at a layer; ``at``: the position that a figure is about."""
    if at is None:
        refuse_dense(net, "this figure")
    if (layer is None) == (cam is None):
        raise ValueError("say where to look: pass target_layer= for contributions, or cam= for another method")
    if cam is None:
        return ContributionCAM(net, [layer])
    if cam.model is not find_network(net):
        raise ValueError("the cam belongs to another network: make one for this net")
    return cam


def values_of(net: PCASVMNet, x: Tensor, batch_size: int) -> tuple[Tensor, np.ndarray, HeadOutput]:
    """Return the components of all images, (R, B), the predicted classes, (R,), all the same without any; an output.

    Of dense features, (R, B, h, w) and (R, h, w).

    Raises:
        ValueError: the head has no components.
    """
    components, labels = [], []
    with evaluation_mode(net), torch.no_grad():
        for batch in x.split(batch_size):
            output = net(batch.to(find_device(net)))
            if output.components is None:
                raise ValueError("the head has no components: this figure needs one with a PCA")
            components.append(output.components.cpu())
            has_classes = classes_known(output.head)
            labels.append(output.labels() if has_classes else np.full(len(batch), "all images"))
    return torch.cat(components), np.concatenate(labels), output


def classes_known(head: Head) -> bool:
    """Return whether each image is predicted to be of one class."""
    return head.classes_ is not None and head.voting.about == "classes"


def _name_decision(target: Any, output: HeadOutput, classes: Any) -> str:
    """Return the decision that the component is a part of, for images of any class."""
    name, labels = heading(target, output), list_labels(output)
    if labels is None:
        return name
    if getattr(target, "category", None) is None:
        return f"{name} of the predicted class"
    names = [plain_name(label, index, classes) for index, label in enumerate(labels)] if classes else None
    return f"{name}, {subject(target, output, 0, names)}"


def _ends(rows: np.ndarray, pictures: np.ndarray, maps: SignedMaps) -> Ends:
    """Return images and their maps on one scale."""
    signed = upsample_maps(maps.positive(scale="target") - maps.negative(scale="target"), pictures.shape[1:3])
    largest = int((maps.nu.log() + maps.log_scale).argmax())
    return Ends(rows, pictures, signed[:, 0].numpy(), float(maps.nu[largest]), float(maps.log_scale[largest]))


def _list_parts(cam: ClosedFormCAM, first: Tensor, p: Tensor, component: int, target: Any) -> np.ndarray | None:
    """Return g_b (p_b - p0_b) of every image, shape (R,); None without an SVM, or where maps do not add up."""
    if cam.model.head.decision_position is None:
        return None
    targets = [PCATarget(b) for b in range(p.shape[1])]
    start = cam.explain(first.to(p.device), targets)
    if start.baseline_values is None or not start.linear:
        return None
    none = p.new_zeros(len(p), p.shape[1], 0)
    numbers: Any = {"maps": none.unsqueeze(-1), "weights": none, "values": p, "nu": torch.zeros_like(p)}
    at_baseline = start.baseline_values.to(p).expand_as(p)
    shared: Any = {"log_scale": torch.zeros_like(p), "baseline_values": at_baseline, "targets": targets, "output": None}
    without_maps = SignedMaps(**numbers, **shared, linear=True, neutral=start.neutral)
    g, p0, log_scale = decision_steps(without_maps, cam.model.head, target)
    return ((g * (p - p0))[:, component] * log_scale.exp()).cpu().numpy()


def _draw_figure(ends: Ends, along: Along, count: int, size: tuple[float, float] | None) -> Figure:
    """Return the figure, its pictures from the lowest to the highest value."""
    names = _most_telling(along)
    columns = 2 * count + 2
    titles, shrink = _list_titles(ends.outermost(count), along)
    lines = max(title.count("\n") + 1 for title in titles)
    written = [wrap_text(name, _NAME, "medium", break_long_words=False) for name in names]
    line = 0.12 + 0.25 * max(name.count("\n") + 1 for name in written)
    high = 2 * _PICTURE * ends.pictures.shape[1] / ends.pictures.shape[2] + 0.6 + 0.21 * lines
    low = max(1.2, line * len(names)) + 0.8
    width = columns * (_PICTURE + 0.08) + 1.9
    decision = f"part of the {along.decision}"
    decision = wrap_text(decision, 3 / 8 * width - 0.5, "small", break_long_words=False)
    low += 0.2 * decision.count("\n")
    with laid_out((width, high + low + 0.3), size, _describe_scale(along), w_pad=0.06) as figure:
        above, below = figure.subfigures(2, height_ratios=(high, low), squeeze=False).flat
        _draw_ends(above.subplots(2, columns).T, ends, along, count, titles, shrink)
        grid = below.add_gridspec(1, 24)
        strip = below.add_subplot(grid[: 24 if along.parts is None else 14])  # numbers at both ends need room between
        _draw_strip(strip, along, names, ends.outermost(count).rows)
        strip.set_yticks(range(len(names)), labels=written)
        if along.parts is not None:
            _draw_parts(below.add_subplot(grid[15:]), along, along.parts, names, decision)
    return figure


def _list_titles(shown: Ends, along: Along) -> tuple[list[str], float]:
    """Return the class and value of every image shown, and the size of their letters."""
    class_names = {row: name for name, mask in along.classes.items() for row in np.flatnonzero(mask)}
    names, shrink = fitted([class_names[row] for row in shown.rows], _PICTURE, "small")
    values = [number(float(along.values[row])) for row in shown.rows]
    if along.group == "set":  # there are no classes
        return values, 1.0
    return [f"{name}\n{value}" for name, value in zip(names, values, strict=True)], shrink


def _draw_ends(axes: np.ndarray, ends: Ends, along: Along, count: int, titles: Sequence[str], shrink: float) -> None:
    """Draw pictures above their maps, the lowest and their mean, then the mean of the highest and these."""
    shown, half = ends.outermost(count), len(ends.rows) // 2
    panels = [Panel(*column) for column in zip(shown.pictures, shown.maps, titles, strict=True)]
    panels[count:count] = [
        Panel(ends.pictures[side].mean(0), ends.maps[side].mean(0), f"mean of the\n{half} {word}")
        for word, side in (("lowest", slice(None, half)), ("highest", slice(half, None)))
    ]
    font, lines = mpl.rcParams["font.size"], max(panel.heading.count("\n") + 1 for panel in panels)
    for first, word in ((0, "lowest"), (count + 1, "highest")):
        side = slice(first, first + count + 1)
        top = max(float(np.abs(panel.map).max()) for panel in panels[side] if panel.map is not None)
        for (above, below), panel in zip(axes[side], panels[side], strict=True):
            draw_panel(above, replace(panel, map=None), fontsize=0.833 * shrink * font, pad=4)
            above.set(anchor="S")
            values = None if panel.map is None else panel.map / (top or 1.0)
            bar = (1.07, 0.1) if above is axes[side][-1, 0] else None
            draw_panel(below, Panel(panel.photo, values, scale=_describe_end(ends, top)), bar=bar)
            below.set(anchor="N")
        place: dict[str, Any] = {"xytext": (0, (lines + 0.9) * font), "textcoords": "offset points"}
        axes[first, 0].annotate(f"{word} ${along.symbol}$", (0, 1), xycoords="axes fraction", weight="bold", **place)


def _describe_end(ends: Ends, share: float) -> str:
    """Return where a scale ends, as text: at a share of the largest value."""
    return number(share * ends.top, ends.log_scale)


def _describe_scale(along: Along) -> str:
    note = (
        f"Red raises ${along.symbol}$, blue lowers it. Each end has its own scale, which ends at the number beside it. "
    )
    note += f"Points: all images; those shown above are circled, and the mean of each {along.group} is black."
    if along.parts is not None:
        note += f" Bars: $g\\,({along.symbol} - p^0)$, what the component adds to the {along.decision}, averaged "
        note += "over each class, with the standard error."
    if len(along.classes) > MOST_CLASSES:
        note += f" The {MOST_CLASSES} of {len(along.classes)} classes whose means lie farthest out are shown."
    return note


def _most_telling(along: Along) -> list[str]:
    """Return the names of the classes that are drawn: all, or the ones whose means lie farthest out."""
    middle = along.values.mean()
    by_distance = sorted(along.classes, key=lambda name: -abs(along.values[along.classes[name]].mean() - middle))
    drawn = set(by_distance[:MOST_CLASSES])
    return [name for name in along.classes if name in drawn]


def _draw_strip(axis: Axes, along: Along, names: Sequence[str], circled: np.ndarray) -> None:
    """Draw the values of all images, a line for each class, with its mean."""
    spread = np.random.default_rng(0).uniform(-0.28, 0.28, len(along.values))
    for line, name in enumerate(names):
        mask = along.classes[name]
        colour = COLOURS[line % len(COLOURS)]
        style: dict[str, Any] = {"s": 14 if mask.sum() < 500 else 5, "alpha": 0.6, "linewidths": 0, "color": colour}
        axis.scatter(along.values[mask], line + spread[mask], marker=MARKERS[line % len(MARKERS)], **style)
        axis.plot([along.values[mask].mean()] * 2, [line - 0.4, line + 0.4], color="black", linewidth=2)
        rows = circled[mask[circled]]
        axis.scatter(along.values[rows], line + spread[rows], s=55, facecolors="none", edgecolors="black", linewidths=1)
    axis.set(ylim=(len(names) - 0.5, -0.5), xlabel=f"${along.symbol}$")
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_parts(axis: Axes, along: Along, parts: np.ndarray, names: Sequence[str], decision: str) -> None:
    """Draw the mean part of the component in the decision, a bar for each class."""
    unit, power = choose_unit(float(np.abs(parts).max()))
    groups = [parts[along.classes[name]] / unit for name in names]
    means = np.array([group.mean() for group in groups])
    errors = [group.std(ddof=1) / math.sqrt(len(group)) if len(group) > 1 else 0.0 for group in groups]
    axis.barh(range(len(names)), means, 0.7, color=[RED if mean > 0 else BLUE for mean in means], xerr=errors)
    axis.axvline(0, color="0.4", linewidth=1)
    axis.set(ylim=(len(names) - 0.5, -0.5), yticks=[])
    axis.set_xlabel(f"{decision}, {power}" if power else decision, fontsize="small")
    axis.xaxis.set_major_locator(MaxNLocator(3))
    axis.tick_params(axis="x", labelsize="small")
    axis.spines[["top", "right", "left"]].set_visible(False)
