"""Dual numbers: torch's forward derivatives, without what takes torch long about them."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

_lock = threading.RLock()  # there is one dual level in all threads
_ARITHMETIC = frozenset(getattr(of, name) for of in (torch, Tensor) for name in ("add", "sub", "mul", "div"))
_WEIGHTED = frozenset((F.linear, torch.conv1d, torch.conv2d, torch.conv3d))


@contextmanager
def dual_numbers() -> Iterator[None]:
    """Let tensors carry derivatives (``forward_ad.make_dual``), in one thread at a time."""
    kernel = sdpa_kernel(SDPBackend.MATH)  # of attention only this one has a forward derivative
    with _lock, warnings.catch_warnings(), kernel, forward_ad.dual_level(), _Constants():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of the decompositions that it loads for this
        yield


class _Constants(TorchFunctionMode):
    """Gives constants a derivative of zeros in arithmetic, where torch takes 50 times as long without one.

    Products with a constant weight are made for values and derivatives apart: torch would write out zeros as large as
    the weight.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ARITHMETIC and (like := next(filter(_is_dual, args), None)) is not None:
            args = [x if _is_dual(x) else _constant(x, like) for x in args]
        elif function in _WEIGHTED and len(args) > 1:
            of_input, *of_others = map(_is_dual, (*args, *kwargs.values()))
            if of_input and not any(of_others):
                x, change = forward_ad.unpack_dual(args[0])
                unbiased = {name: item for name, item in kwargs.items() if name != "bias"}
                changed = function(change, args[1], None, *args[3:], **unbiased)
                return forward_ad.make_dual(function(x, *args[1:], **kwargs), changed)
        return function(*args, **kwargs)


def _is_dual(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def _constant(x: Any, like: Tensor) -> Any:
    """Return a number or tensor as a dual number whose derivative is 0."""
    x = x if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)
    x = x.contiguous() if 0 in x.stride() else x  # an expanded tensor takes no derivative
    return forward_ad.make_dual(x, torch.zeros_like(x)) if x.is_floating_point() else x
