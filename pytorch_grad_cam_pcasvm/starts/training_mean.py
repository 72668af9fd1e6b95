"""Training means: the mean of a layer's activations over a training set, as a start of one row."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from pytorch_grad_cam_pcasvm.network.layer_means import average_positions
from pytorch_grad_cam_pcasvm.network.tiling import Tiled
from pytorch_grad_cam_pcasvm.path.passes import ClosedFormPass
from pytorch_grad_cam_pcasvm.runtime.device import can_sync, is_traced
from pytorch_grad_cam_pcasvm.runtime.errors import Fix, refuse
from pytorch_grad_cam_pcasvm.starts.run import Run


def find_training_mean(run: Run, layer: int, *, by_numbers: bool) -> Tensor | None:
    """Return the training mean at a target layer, of one row, as the head knows it; None if it does not.

    Args:
        run: the network's run.
        layer: position of the target layer.
        by_numbers: whether features that equal the means of these activations are taken for these means, as where a
            norm in between changes nothing. Comparing numbers could accept one batch and refuse the next.

    Raises:
        ValueError: it is that of another network, or of images of another size; see :func:`fit_mean`.
    """
    head, layout, activations = run.head, run.layouts[layer], run.recorded.activations[layer]
    if head is None:
        return None
    if head.feature_mean is not None and run.output.grid is not None:
        channels = find_channels(run, layer)
        if channels is not None:
            return spread_everywhere(head.feature_mean[channels], run, layer)
    elif (
        head.feature_mean is not None
        and layout.has_channels_first
        and (run.ends_in_mean(layer) or (by_numbers and _are_means(run, layer)))
    ):
        return spread_everywhere(head.feature_mean, run, layer)
    mean = head.training_set.means.get(run.layers[layer])
    if mean is None or not (layout.is_known or mean.shape == activations.shape[1:]):
        return None
    same_channels = mean.dim() == activations.dim() - 1 and (
        mean.shape[layout.channels - 1] == activations.shape[layout.channels]
    )
    if not same_channels and layout.is_known:
        raise ValueError(
            f"the head has a mean of shape {tuple(mean.shape)}, but {run.layers[layer]!r} returns "
            f"{tuple(activations.shape[1:])} for an image: it is another network than the one it was fitted behind"
        )
    return fit_mean(mean, run, layer)


def fit_mean(mean: Tensor, run: Run, layer: int) -> Tensor:
    """Return a layer's training mean as activations of one row, also for images of another size.

    For these its channel means are taken, which are the training mean only where features are pooled over positions.

    Args:
        mean: in the shape of the layer's output for one image, or (T,); with one number a channel in the place of all
            positions, as :class:`.LayerMeans` has it for pictures of several sizes, or with other positions.
        run: the network's run.
        layer: position of the target layer.

    Raises:
        ValueError: it is that of another layer; or it has other positions, and the features keep positions apart.
    """
    layout, shape = run.layouts[layer], run.recorded.activations[layer].shape
    same_layer = layout.is_known and layout.batch == 0 and mean.dim() == len(shape) - 1
    if not same_layer or mean.shape == shape[1:] or mean.shape[layout.channels - 1] != shape[layout.channels]:
        return as_activations(mean, run, layer)
    if not pools_positions(run, layer):
        refuse(
            ValueError,
            f"the training mean of {run.layers[layer]!r} has the shape {tuple(mean.shape)}, and these images have "
            f"{tuple(shape[1:])} there. Their training mean cannot be made of it, as the head's features keep "
            "positions apart",
            "bring all images to one size, those that the head is fitted on, too, and fit it again",
            Fix("pass mean=mean_activations(net, loader, layer) of training images of this size", "mean"),
            Fix("start elsewhere, baseline='zero'", "baseline"),
        )
    channels = torch.cat(list(layout.split_tokens(average_positions(mean, layout).unsqueeze(0))), -1)
    return layout.expand_means(channels.to(run.recorded.activations[layer]))


def pools_positions(run: Run, layer: int) -> bool:
    """Return whether features have lost the positions of a target layer, as behind a mean over them.

    Two images show where: of a larger one, numbers on the path are more, until they become as many as of the smaller
    one. Positions are pooled if a channel has no more than one of these.
    """
    # A program is traced after an explanation, which has looked.
    if run.output.grid is not None or run.ends_in_mean(layer) or is_traced():
        return True
    if not isinstance(run.recorded, ClosedFormPass) or not isinstance(run.images, Tensor):
        return False
    small = torch.zeros_like(run.images[:1])
    large = small.new_zeros(*small.shape[:2], *(2 * side for side in small.shape[2:]))
    try:
        tape, other = (run.record(image).tape for image in (small, large))  # type: ignore[attr-defined]
    except (RuntimeError, ValueError):  # the network takes images of one size
        return False
    if [step.name for step in tape.steps] != [step.name for step in other.steps]:
        return False
    channels = {}  # of the values that have grown; in both tapes values have numbers of their own
    for step, larger in zip(tape.steps, other.steps, strict=True):
        pairs = zip((*step.inputs, *step.outputs), (*larger.inputs, *larger.outputs), strict=False)
        for place, twin in pairs:
            if place is not None and twin is not None:
                sides = list(zip(tape.values[place].shape, other.values[twin].shape, strict=False))
                if any(side != grown for side, grown in sides):
                    channels[place] = math.prod(side for side, grown in sides if side == grown)
    for step in tape.steps:
        most = max((channels[place] for place in step.inputs if place in channels), default=None)
        fixed = [place for place in step.outputs if place is not None and place not in channels]
        if most is not None and any(tape.values[place].numel() > most for place in fixed):
            return False
    return channels.keys().isdisjoint(tape.outputs)


def _are_means(run: Run, layer: int) -> bool:
    """Return whether the features are means of these activations, as where a norm in between changes nothing."""
    features, activations = run.output.features, run.recorded.activations[layer]
    means, crops = activations.flatten(2).to(features.dtype).mean(-1), run.layouts[layer].crops
    means = means if crops is None else crops.sum_tiles(means, 0) / crops.count
    if features.shape != means.shape or not can_sync(features):
        return False
    return torch.allclose(features, means, rtol=1e-3, atol=1e-3 * float(means.abs().max()))


def as_activations(numbers: Tensor, run: Run, layer: int) -> Tensor:
    """Return activations as the network has them, of one row or N."""
    activations = run.recorded.activations[layer]
    shape, image = activations.shape, run.images.shape
    if numbers.dim() == 1 and run.layouts[layer].has_channels_first and len(numbers) == shape[1]:
        numbers = numbers.reshape(-1, *[1] * (activations.dim() - 2)).expand(shape[1:])
    if numbers.shape not in (shape, shape[1:], (1, *shape[1:])):
        raise ValueError(
            f"the baseline has shape {tuple(numbers.shape)}: expected activations, ({shape[1]},), "
            f"{tuple(shape[1:])} or {tuple(shape)}, or an image, {tuple(image[1:])}"
        )
    return numbers.reshape(-1, *shape[1:]).to(activations)


def find_channels(run: Run, layer: int) -> slice | None:
    """Return which of the dense features are the activations of a target layer; None: not known, or none."""
    if run.output.grid is None or not run.layouts[layer].is_known:
        return None
    backbone, source = run.model.feature_source()  # type: ignore[operator]
    names = [part.layer for part in source.parts or (source,)]
    if isinstance(backbone, Tiled):
        names = [f"{backbone.prefix}{part.layer}" for part in backbone.source.parts or (backbone.source,)]
    widths = {
        name: activations.shape[layout.channels]
        for name, activations, layout in zip(run.layers, run.recorded.activations, run.layouts, strict=True)
    }
    if run.layers[layer] not in names:
        return None
    place = names.index(run.layers[layer])
    if all(name in widths for name in names[:place]):
        first = sum(widths[name] for name in names[:place])
    elif all(name in widths for name in names[place:]):
        first = run.output.head_trace.values[0].shape[1] - sum(widths[name] for name in names[place:])
    else:
        return None
    return slice(first, first + widths[names[place]])


def find_pools(run: Run) -> set[Any]:
    """Return the pools of dense features: the network's, and, on tiles, the tile's."""
    backbone, source = run.model.feature_source()  # type: ignore[operator]
    inner = backbone.source if isinstance(backbone, Tiled) else source
    return {run.model.pool, *(part.pool for part in inner.parts or (inner,))}


def spread_everywhere(point: Tensor, run: Run, layer: int, mean: Tensor | None = None) -> Tensor:
    """Return activations of one row whose means over positions are the numbers of channels (T,).

    They vary over positions as the training mean does, where that is known, so that features that are means over them
    stay as they are; other tokens are 0.

    Args:
        point: one number a channel.
        run: the network's run.
        layer: position of the target layer.
        mean: the training mean, as :func:`fit_mean` takes it; None: what the head knows of it.
    """
    like, layout = run.recorded.activations[layer], run.layouts[layer]
    spread = layout.expand_means(F.pad(point.to(like).reshape(1, -1, 1), (layout.before, layout.after)))
    if mean is None and run.head is not None:
        mean = run.head.training_set.means.get(run.layers[layer])
    if mean is None or mean.shape != like.shape[1:] or not layout.is_map_shaped or run.output.grid is not None:
        return spread
    return spread + (mean - average_positions(mean, layout)).to(like)
