"""Constants on a device: sent there once and kept, since a GPU waits for whatever is sent to it."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.device_sync import is_traced

_COUNT = 64  # constants of each function


def kept_on_devices(make: Callable[..., Any]) -> Callable[..., Tensor]:
    """Wrap a function of hashable arguments, which returns an array, to return a tensor.

    Returns:
        The function, with one argument more, ``like``: a tensor on the device of the constant. It has the dtype of
        floating-point constants, too.
    """
    kept: OrderedDict[Any, Tensor] = OrderedDict()

    @wraps(make)
    def send(*arguments: Any, like: Tensor) -> Tensor:
        key = (*arguments, like.device, like.dtype)
        constant = kept.get(key)
        if constant is None:
            with torch.inference_mode(False):  # or gradients could not pass it later on
                numbers = torch.as_tensor(make(*arguments))
                constant = numbers.to(like.device, like.dtype if numbers.is_floating_point() else None)
            if lasts(constant):
                kept[key] = constant
                if len(kept) > _COUNT:
                    kept.popitem(last=False)
        return constant

    return send


def lasts(constant: Tensor) -> bool:
    """Return whether a constant is a tensor of its own: a trace's tensors mean nothing behind it."""
    return type(constant) is Tensor and not is_traced()
