"""Digests, by which networks, tensors and options are recognised."""

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def digest_of_module(module: nn.Module) -> str:
    """Return a digest of a network's layers, weights and buffers."""
    return _digest_of_state(module, hashlib.sha256(repr(module).encode()))


def digest_of_weights(module: nn.Module) -> str:
    """Return a digest of a network's weights and buffers alone, the same in every version of PyTorch."""
    return _digest_of_state(module, hashlib.sha256())


def _digest_of_state(module: nn.Module, digest: Any) -> str:
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(digest_of_tensor(tensor).encode())
    return digest.hexdigest()


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a digest of a tensor's numbers."""
    data = tensor.detach().cpu().contiguous()
    if data.dtype.itemsize and data.numel():
        return hashlib.sha256(data.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
    return hashlib.sha256().hexdigest()


def described(option: Any) -> Any:
    """Return an option as JSON: a tensor by its digest, a function by its name."""
    if option is None or isinstance(option, bool | int | float | str):
        return option
    if isinstance(option, Tensor):
        return f"{tuple(option.shape)} {digest_of_tensor(option)[:16]}"
    if isinstance(option, list | tuple):
        return [described(item) for item in option]
    if isinstance(option, partial):
        return ["partial", described(option.func), described(option.args), described(list(option.keywords.items()))]
    name = getattr(option, "__qualname__", None)
    if name is None and " at 0x" in repr(option):
        option, name = type(option), type(option).__qualname__
    return f"{option.__module__}.{name}" if name else repr(option)
