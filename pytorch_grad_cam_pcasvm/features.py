"""Features: the output of a layer of the backbone, flattened, for one batch or for a whole data loader."""

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm


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


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside what ``torch.compile(module)`` gives, or a module as it is."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def layer_name(backbone: nn.Module, layer: str | nn.Module | None) -> str | None:
    """Return the dotted name of a layer of the backbone.

    Args:
        backbone: the network.
        layer: a dotted name, a module of the backbone, or None.

    Returns:
        The name, or None for the backbone's own output.

    Raises:
        ValueError: the backbone has no such layer.
    """
    modules = dict(backbone.named_modules())
    name = layer
    if isinstance(layer, nn.Module):
        name = next((name for name, module in modules.items() if module is layer), None)
        if name is None:
            raise ValueError(
                f"this {type(layer).__name__} object is not in this {type(backbone).__name__}: take it from the "
                "network itself, not from a copy, or give its name"
            )
    if name is None or name == "":
        return None
    if name not in modules:
        last = ", ".join(list(modules)[-8:])
        raise ValueError(f"{type(backbone).__name__} has no layer {name!r}; its last layers are: {last}")
    return str(name)


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


def device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or buffer (the CPU if it has none)."""
    todo = [module]
    while todo:
        found = todo.pop()
        for tensor in (*found._parameters.values(), *found._buffers.values()):
            if tensor is not None:
                return tensor.device
        todo += [child for child in reversed(found._modules.values()) if child is not None]
    return torch.device("cpu")


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return a model and all modules in it, each once: several times as fast as ``model.modules()``."""
    found, seen = [model], {model}
    for module in found:
        children = [child for child in module._modules.values() if child is not None and child not in seen]
        found += children
        seen.update(children)
    return found


_evaluating: "WeakKeyDictionary[nn.Module, tuple[int, bool]]" = WeakKeyDictionary()
_evaluating_lock = threading.Lock()


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module] | None = None) -> Iterator[None]:
    """Put a model in evaluation mode, and each of its modules back as it was when the last of its users leaves.

    Args:
        model: the model.
        modules: itself and all modules in it, where they are known.

    Yields:
        Nothing.
    """
    modules = modules_of(model) if modules is None else modules
    with _evaluating_lock:
        # Nothing is to be put back where nothing was changed: most models are in evaluation mode already.
        flags = {m: m.training for m in modules if m.training or (_evaluating and m in _evaluating)}
        for module, flag in flags.items():
            users, training = _evaluating.get(module, (0, flag))
            _evaluating[module] = users + 1, training
            module.training = False
    try:
        yield
    finally:
        with _evaluating_lock:
            for module in flags:
                users, training = _evaluating.pop(module)
                if users > 1:
                    _evaluating[module] = users - 1, training
                else:
                    module.training = training
