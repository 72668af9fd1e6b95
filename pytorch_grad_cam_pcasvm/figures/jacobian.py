"""The figure of a Jacobian: paths from the pixels of a feature map through dense units to components."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from pytorch_grad_cam_pcasvm.figures.style import BLUE, RED, bare, new_figure
from pytorch_grad_cam_pcasvm.model.model import refuse_dense
from pytorch_grad_cam_pcasvm.network.inputs import checked_images
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.runtime.pictures import as_array


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
