"""Dual numbers: torch's forward derivatives, without their slow parts."""

import threading
import warnings
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.backends import cuda
from torch.nn import functional as F  # noqa: N812 - torch's own habit
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytorch_grad_cam_pcasvm.runtime.device import is_traced
from pytorch_grad_cam_pcasvm.runtime.rollback import Mode, Rollback, set_gradients, without_inference
from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    FakeTensor,
    is_in_dual_level,
    leave_dual_level,
    switch_gradients,
)

_lock = threading.RLock()  # there is one dual level in all threads
_ADD, _SUB, _MUL, _DIV = ({getattr(torch, name), getattr(Tensor, name)} for name in ("add", "sub", "mul", "div"))
_WEIGHTED = {F.linear, torch.conv1d, torch.conv2d, torch.conv3d}
_BATCH_NORM = torch.batch_norm
_AFFINE = _ADD | _SUB | _MUL | _DIV | _WEIGHTED | {torch.addcdiv, torch.addmm, _BATCH_NORM}
_aten = torch.ops.aten
# What a replay calls, which are operations, by what they are called in Python.
_FUNCTIONS = {
    _aten.add.Tensor: torch.add, _aten.sub.Tensor: torch.sub, _aten.mul.Tensor: torch.mul, _aten.div.Tensor: torch.div,
    _aten.linear.default: F.linear, _aten.conv1d.default: torch.conv1d, _aten.conv2d.default: torch.conv2d,
    _aten.conv3d.default: torch.conv3d, _aten.addcdiv.default: torch.addcdiv, _aten.addmm.default: torch.addmm,
    _aten.batch_norm.default: _BATCH_NORM, _aten.layer_norm.default: F.layer_norm, _aten.cat.default: torch.cat,
}  # fmt: skip


_KERNELS = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")


class DualNumbers:
    """Lets tensors carry derivatives (``forward_ad.make_dual``), in one thread at a time, also in inference mode."""

    def __enter__(self) -> None:
        """Begin."""
        self._stack = ExitStack()
        rollback = self._stack.enter_context(Rollback())
        rollback.note(_release)
        _lock.acquire()
        rollback.note_torch()
        for name in _KERNELS:
            rollback.note(getattr(cuda, f"enable_{name}"), getattr(cuda, f"{name}_enabled")())
        if not is_in_dual_level():
            rollback.note(_leave_dual_level)
        self._stack.enter_context(warnings.catch_warnings())
        # torch's own, of the decompositions that it loads for this
        warnings.simplefilter("ignore", FutureWarning)
        self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # of attention only this one has a forward derivative
        self._stack.enter_context(without_inference())  # in which derivatives get lost without a word
        set_gradients(False)
        self._stack.enter_context(forward_ad.dual_level())
        self._stack.enter_context(_Constants())

    def __exit__(self, *error: Any) -> None:
        """End."""
        self._stack.__exit__(*error)


def _release() -> None:
    with suppress(RuntimeError):  # an interrupt came before it was acquired
        _lock.release()


def _leave_dual_level() -> None:
    with suppress(RuntimeError):  # it was left already, or in one of two places, as an interrupt may come in between
        leave_dual_level()


class _Constants(Mode):
    """Differentiates functions that are affine in their one dual number by calling them without their constants.

    torch itself computes with the zeros that are a constant's derivative: in arithmetic this takes 50 times as long,
    and for a weight the zeros are as large as it is.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, function = kwargs or {}, _FUNCTIONS.get(function, function)
        if function is switch_gradients:  # no concern of a mode that records around this
            return set_gradients(*args)
        if function is F.layer_norm and is_traced():  # whose derivative in one piece is for a known number of images
            with self:
                return _layer_norm(*args, **kwargs)
        # Their own zeros are of a known size.
        if function in (torch.cat, torch.stack) and args and not torch.is_grad_enabled():
            parts = [forward_ad.unpack_dual(x) for x in args[0]]
            if any(part.tangent is not None for part in parts):
                changes = [torch.zeros_like(x) if change is None else change for x, change in parts]
                values = [x for x, _ in parts]
                return forward_ad.make_dual(
                    function(values, *args[1:], **kwargs), function(changes, *args[1:], **kwargs)
                )
        # Under a graph are targets alone; they are small, and may count what is called, as checkpoints do.
        if function in _AFFINE and not torch.is_grad_enabled():
            place = _place_of_dual(args, kwargs)
            if place is not None:
                x, change = forward_ad.unpack_dual(args[place])
                changed = _linear(function, _with(args, place, change), place, kwargs)
                if changed is not None:
                    y = function(*_with(args, place, x), **kwargs)
                    return forward_ad.make_dual(y, changed.to(y.dtype).expand_as(y))
        return function(*args, **kwargs)


def _place_of_dual(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the position of the one argument that is a dual number; None if there is another number of them."""
    values = [*args, *kwargs.values()]
    if any(isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter, FakeTensor) for x in values):
        return None  # of a class of its own, which may not know how to be asked
    try:
        tangents = [forward_ad.unpack_dual(x).tangent if isinstance(x, Tensor) else None for x in values]
    except RuntimeError:  # in torch.func.vmap no tensor can be asked
        return None
    places = [place for place, tangent in enumerate(tangents) if tangent is not None]
    return places[0] if len(places) == 1 and places[0] < len(args) else None


def _with(args: tuple[Any, ...], place: int, x: Tensor) -> list[Any]:
    return [*args[:place], x, *args[place + 1 :]]


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *rest: Any) -> Tensor:
    dims = [*range(-len(shape), 0)]
    x = x - x.mean(dims, keepdim=True)
    x = x / (x.square().mean(dims, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _normalised(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    *rest: Any,
) -> Tensor | None:
    """Return the change of a batch norm's output for a change of its input, in evaluation mode."""
    if training:  # there may be no moments
        return None
    scale = (var + eps).rsqrt() * (1 if weight is None else weight)
    return x * scale.reshape(-1, *[1] * (x.dim() - 2))


def _linear(function: Any, args: list[Any], place: int, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the change of an output for a change of one argument; None if it may not be affine in that."""
    if function in _WEIGHTED and place == 0 and len(args) > 1:
        args[2:3] = [None]  # a bias changes nothing
        return function(*args, **{name: item for name, item in kwargs.items() if name != "bias"})
    if function is _BATCH_NORM:
        return _normalised(*args, **kwargs) if place == 0 else None
    if kwargs:
        return None
    if function is torch.addcdiv and place == 1:
        return args[1] / args[2]
    if function is torch.addmm and place == 1:
        return args[1] @ args[2]
    if len(args) != 2:
        return None
    if function in _MUL or (function in _DIV and place == 0):
        return function(*args)
    if function in _ADD or function in _SUB:
        return -args[1] if function in _SUB and place == 1 else args[place]
    return None
