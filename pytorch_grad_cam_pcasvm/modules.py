"""Modules: what is asked of a network as such: its device, its names, its evaluation mode."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn


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
