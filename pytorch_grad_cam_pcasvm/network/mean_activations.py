"""The mean activations of a layer over a data set."""

from collections.abc import Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.network.extraction import check_loader
from pytorch_grad_cam_pcasvm.network.features import checked_images, output_of
from pytorch_grad_cam_pcasvm.network.inputs import image_and_label
from pytorch_grad_cam_pcasvm.network.modules import evaluation_mode, find_device, find_layer_name, find_network
from pytorch_grad_cam_pcasvm.network.net import PCASVMNet
from pytorch_grad_cam_pcasvm.network.runner import ask_anew
from pytorch_grad_cam_pcasvm.network.tiling import Tiled


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: nn.Module | str, *, progress: bool = True
) -> Tensor: ...


@overload
def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: list[nn.Module | str], *, progress: bool = True
) -> list[Tensor]: ...


def mean_activations(
    net: nn.Module, loader: Iterable[Any], layer: Any, *, progress: bool = True
) -> Tensor | list[Tensor]:
    """Return the mean activations of a layer over a data set, for use as a baseline.

    Args:
        net: a :class:`PCASVMNet` or a backbone.
        loader: yields ``(images, ...)`` batches, dicts with ``image`` as in MONAI, or images alone, of shape (N, ...),
            all of the same size.
        layer: the layer, or its dotted name; or a list of these, in which case the loader is read once for each.
        progress: show a progress bar.

    Returns:
        The mean, in the shape of the layer's output for one image: (T, H, W), or (L, D) for tokens; float32 or better,
        on the network's device. For a list of layers, a list of means.

    Raises:
        TypeError: the loader or the layer yields something other than floating-point tensors; or the network is no
            module, or a program made by ``torch.jit`` or ``torch.export``.
        ValueError: the loader is empty, its images differ in size, a dict has no image, the first dimension of the
            layer's output is not the images, or the network has no such layer, or runs it more than once.

    Example:
        >>> mean = mean_activations(net, loader, "layer2", progress=False)
        >>> maps = ContributionCAM(net, ["layer2"], baseline=mean).explain(images)
    """
    if isinstance(layer, list | tuple):
        return [mean_activations(net, loader, one, progress=progress) for one in layer]
    check_loader(loader)
    backbone = find_backbone(net)
    name = find_layer_name(backbone, layer)
    total: Tensor | None = None
    count = 0
    ask_anew(backbone)
    with evaluation_mode(net), torch.no_grad():
        for batch in tqdm(loader, desc="mean activations", unit="batch") if progress else loader:
            images = checked_images(image_and_label(batch)[0], backbone)
            activations = output_of(backbone, name, images.to(find_device(net)))
            if not isinstance(activations, Tensor):
                raise TypeError(
                    f"the layer {name!r} returns a {type(activations).__name__}, not a tensor: name another"
                )
            tiled = isinstance(backbone, Tiled) and name is not None  # whose rows are tiles
            if (
                total is None
                and not tiled
                and not _counts_images(backbone, name, activations, images.to(find_device(net)))
            ):
                raise ValueError(
                    f"the first dimension of the output of {name!r}, {tuple(activations.shape)}, does not count images "
                    "(perhaps tokens): choose a layer where it does, or baseline='zero'"
                )
            if total is not None and total.shape != activations.shape[1:]:
                raise ValueError(
                    f"activations of shapes {tuple(total.shape)} and {tuple(activations.shape[1:])} cannot be "
                    "averaged: resize the images to one size"
                )
            total = activations.sum(0, dtype=torch.float64) + (0 if total is None else total)
            count += len(activations)
    if total is None:
        raise ValueError("the loader yielded no batch: there is nothing to average")
    return (total / count).to(torch.promote_types(activations.dtype, torch.float32))


def _counts_images(backbone: nn.Module, name: str | None, activations: Tensor, images: Tensor) -> bool:
    """Return whether the first dimension of a layer's output counts the images."""
    if activations.dim() > 1 and len(activations) == activations.shape[1] == len(images) > 1:
        return len(output_of(backbone, name, images[:1])) == 1
    return len(activations) == len(images)


def find_backbone(net: nn.Module) -> nn.Module:
    """Return the network up to its features."""
    return net.feature_source()[0] if isinstance(net, PCASVMNet) else find_network(net)
