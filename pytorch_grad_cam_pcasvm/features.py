"""Features: the output of a layer of the backbone, flattened, for one batch or for a whole data loader."""

import math
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from pytorch_grad_cam_pcasvm.modules import device_of, evaluating, layer_name, uncompiled


def extract_features(
    backbone: nn.Module,
    loader: Iterable[Any],
    layer: str | nn.Module | None = None,
    *,
    as_numpy: bool = True,
    progress: bool = True,
) -> tuple[Any, Any]:
    """Run a backbone over a data loader and collect what a scikit-learn head is fitted on.

    The backbone runs in evaluation mode without gradients on the device of its parameters; its training flags are put
    back afterwards. What follows ``layer`` is not run.

    Args:
        backbone: the network.
        loader: gives ``(images, labels)`` batches, or ``images`` alone; images of shape (N, ...).
        layer: dotted name of a module of the backbone, or the module itself; None: the backbone's own output.
        as_numpy: numpy arrays; otherwise tensors on the backbone's device.
        progress: show a progress bar.

    Returns:
        Features, shape (R, D), float32 (float64 from a float64 backbone), and labels, shape (R,), or None if the loader
        gives none. Labels that are no tensors, as names, are an array in any case.

    Raises:
        TypeError: the loader gives something else than tensors as images.
        ValueError: the loader is empty, its labels are not one per image, or the backbone has no such layer.
    """
    backbone = backbone if layer is None else uncompiled(backbone)
    name = layer_name(backbone, layer)
    device = device_of(backbone)
    features: list[Tensor] = []
    labels: list[Any] = []
    with evaluating(backbone), torch.no_grad():
        for batch in tqdm(loader, desc="features", unit="batch", disable=not progress):
            images, *rest = batch if isinstance(batch, list | tuple) else (batch,)
            if not isinstance(images, Tensor):
                raise TypeError(f"images must be a torch.Tensor, got {type(images).__name__}: use a DataLoader")
            output = features_of(backbone, name, images.to(device))
            output = output.to(torch.promote_types(output.dtype, torch.float32))
            features.append(output.cpu() if as_numpy else output)
            labels.extend(rest[:1])
            if any(len(label) != len(images) for label in rest[:1]) or len(labels) not in (0, len(features)):
                raise ValueError("the loader must give one label for every image, or no labels at all")
    if not features:
        raise ValueError("the loader gave no batch: there is nothing to extract features from")
    stacked = torch.cat(features)
    if as_numpy:
        return stacked.numpy(), np.concatenate([np.asarray(label) for label in labels]) if labels else None
    if not all(isinstance(label, Tensor) for label in labels):
        return stacked, np.concatenate([np.asarray(label) for label in labels])  # names: no tensor can hold them
    return stacked, torch.cat([label.to(device) for label in labels]) if labels else None


def features_of(backbone: nn.Module, layer: str | None, x: Tensor) -> Tensor:
    """Return the output of ``layer`` for a batch, flattened from dim 1; what follows the layer is not run.

    Args:
        backbone: the network.
        layer: dotted name of one of its modules; None: its own output.
        x: input, shape (N, ...).

    Returns:
        Features, shape (N, D).

    Raises:
        ValueError: the layer does not run in a forward pass.
    """
    if layer is None:
        return flatten(backbone(x))
    thread = threading.get_ident()

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        # Another thread may be running the same backbone: leave its pass alone.
        if threading.get_ident() == thread:
            raise _Reached(output)

    handle = backbone.get_submodule(layer).register_forward_hook(stop)
    try:
        backbone(x)
    except _Reached as reached:
        return flatten(reached.output)
    finally:
        handle.remove()
    raise ValueError(
        f"the layer {layer!r} does not run in a forward pass of {type(backbone).__name__}; if that is compiled, its "
        "layers are not seen: pass the network as it was, and compile the PCASVMNet, torch.compile(net)"
    )


class _Reached(Exception):  # noqa: N818 - no error: the way out of a forward pass
    def __init__(self, output: Any) -> None:
        self.output = output


def flatten(output: Any) -> Tensor:
    """Return a layer's output as rows of features, shape (N, D).

    Args:
        output: shape (N, ...).

    Returns:
        The output, flattened from dim 1.

    Raises:
        TypeError: it is not a tensor.
        ValueError: it has no rows.
    """
    if not isinstance(output, Tensor):
        raise TypeError(
            f"features must be one tensor, but the layer gives a {type(output).__name__}: name another layer"
        )
    if output.dim() < 2:
        raise ValueError(f"features must be rows (N, ...), but the layer gives the shape {tuple(output.shape)}")
    return output.flatten(1)


def checked_images(x: Any) -> Tensor:
    """Return a batch of images if it is one.

    Args:
        x: what a user gives.

    Returns:
        The same tensor.

    Raises:
        TypeError: it is no tensor, or not of floating-point values.
        ValueError: it is no batch, an empty one, or has NaN or infinite values.
    """
    if not isinstance(x, Tensor):
        hint = ": use torch.from_numpy(...)" if isinstance(x, np.ndarray) else ""
        raise TypeError(f"input_tensor must be a torch.Tensor, got {type(x).__name__}{hint}")
    if not x.is_floating_point():
        raise TypeError(
            f"input_tensor must have floating-point values, got {x.dtype}: scale and normalise it as in training"
        )
    if x.dim() == 3:
        raise ValueError(f"input_tensor must be a batch (N, C, H, W), got {tuple(x.shape)}: use x.unsqueeze(0)")
    if x.dim() < 2 or len(x) == 0:
        raise ValueError(f"input_tensor must be a batch of images (N, C, H, W) with N > 0, got {tuple(x.shape)}")
    # On an accelerator the check would wait for the device: there the maps are checked when numpy is asked for.
    if x.device.type == "cpu" and not all_finite(x):
        raise ValueError("input_tensor has NaN or infinite values: a map of it would mean nothing")
    return x


def all_finite(x: Tensor) -> bool:
    """Return whether all values are finite; waits for the device."""
    # A sum is one pass, and finite only if all its terms are; a large one may be infinite all the same.
    return math.isfinite(x.sum().item()) or bool(x.isfinite().all())
