"""The device: its precision, constants that are sent to it once, and when numbers on it may be looked at."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from enum import IntEnum
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback


class SyncLevel(IntEnum):
    """What numbers may be looked at for."""

    NOTHING = 0
    ERRORS = 1  # to raise an error, or for a result that is kept; never to choose what a batch needs
    CHOICES = 2


_sync_level = ContextVar("looks", default=SyncLevel.CHOICES)
_traced = ContextVar("traced", default=False)


def can_sync(tensor: Tensor) -> bool:
    """Return whether numbers of a tensor may be looked at: if it is on the CPU, outside of :func:`forbid_sync`."""
    return _sync_level.get() > SyncLevel.NOTHING and tensor.device.type == "cpu"


def may_choose(tensor: Tensor) -> bool:
    """Return whether numbers may decide what is computed: if one may look, outside of :func:`keep_every_choice`."""
    return _sync_level.get() > SyncLevel.ERRORS and tensor.device.type == "cpu"


def is_traced() -> bool:
    """Return whether a program is being made, which takes over earlier results as constants."""
    return _traced.get()


@contextmanager
def forbid_sync() -> Iterator[None]:
    """Look at no number, as on a GPU, whatever the device."""
    with _set(_sync_level, SyncLevel.NOTHING):
        yield


@contextmanager
def keep_every_choice() -> Iterator[None]:
    """Compute all that any image may need, and keep it for a program."""
    with _set(_sync_level, min(_sync_level.get(), SyncLevel.ERRORS)):
        yield


@contextmanager
def traced() -> Iterator[None]:
    """Make a program: look at no number, and take the results that :func:`keep_every_choice` has kept."""
    with forbid_sync(), _set(_traced, True):
        yield


@contextmanager
def _set(variable: "ContextVar[Any]", value: Any) -> Iterator[None]:
    with Rollback() as rollback:
        rollback.set_variable(variable, value)
        yield


_COUNT = 64  # constants of each function


def kept_on_devices(make: Callable[..., Any]) -> Callable[..., Tensor]:
    """Wrap a function of hashable arguments, which returns an array, to return a tensor.

    Returns:
        The function, with one argument more, ``like``: a tensor on the device of the constant. It has the dtype of
        floating-point constants, too.
    """
    copies: OrderedDict[Any, Tensor] = OrderedDict()

    @wraps(make)
    def send(*arguments: Any, like: Tensor) -> Tensor:
        key = (*arguments, like.device, like.dtype)
        constant = copies.get(key)
        if constant is None:
            with torch.inference_mode(False):  # or gradients could not pass it later on
                numbers = torch.as_tensor(make(*arguments))
                constant = numbers.to(like.device, like.dtype if numbers.is_floating_point() else None)
            if lasts(constant):
                copies[key] = constant
                if len(copies) > _COUNT:
                    copies.popitem(last=False)
        return constant

    return send


def lasts(constant: Tensor) -> bool:
    """Return False for a trace's tensor, which is meaningless outside the trace."""
    return type(constant) is Tensor and not is_traced()


def precision(device: torch.device) -> torch.dtype:
    """Return the dtype a head computes in on ``device``: float64, or float32 if the device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context without autocast."""
    device_type = device.type
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
