"""Frames: which module, or which ``autograd.Function``, an operation was called in."""

import inspect
from types import FrameType
from typing import Any

from torch import nn
from torch.autograd.function import Function
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils.hooks import BackwardHook

_MODULE_CALL = nn.Module._call_impl.__code__


def module_around(frame: FrameType | None) -> nn.Module | None:
    """Return the module whose call a frame is in."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def function_around(frame: FrameType | None) -> type[Function]:
    """Return the ``autograd.Function`` whose forward a frame is in, or was, or ``Function`` itself."""
    functions: dict[Any, type[Function]] = {BackwardHook._apply_on_tensors.__code__: BackwardHookFunction}
    kinds = [Function]
    for function_class in kinds:  # which grows
        kinds += function_class.__subclasses__()
        functions.setdefault(getattr(inspect.unwrap(function_class.forward), "__code__", None), function_class)
    inner = frame
    while frame is not None and frame.f_code not in functions:
        frame = frame.f_back
    return _named_in(inner) if frame is None else functions[frame.f_code]


def _named_in(frame: FrameType | None) -> type[Function]:
    """Return the first ``autograd.Function`` that code around a frame names: one whose forward has ended already."""
    while frame is not None:
        for name in (*frame.f_code.co_names, *frame.f_code.co_freevars):
            value = frame.f_globals.get(name, frame.f_locals.get(name))
            if isinstance(value, type) and issubclass(value, Function) and value is not Function:
                return value
        frame = frame.f_back
    return Function
