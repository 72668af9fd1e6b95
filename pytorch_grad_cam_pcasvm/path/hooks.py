"""Hooks that serve one thread and are taken off again, and modes likewise."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Hooks:
    """Forward hooks on modules that may be running in other threads, too: leave their passes alone."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before the module runs."""

        def run(*args: Any) -> None:
            if threading.get_ident() == self._thread:
                hook(*args)

        self._handles.append(module.register_forward_pre_hook(run, with_kwargs=True))

    def after(self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False) -> None:
        """Call ``hook(module, args, kwargs, output)`` when the module has run; it may give another output."""

        def run(*args: Any) -> Any:
            return hook(*args) if threading.get_ident() == self._thread else None

        self._handles.append(module.register_forward_hook(run, with_kwargs=True, prepend=prepend))

    def remove(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def hooked() -> Iterator[Hooks]:
    """Give hooks that are taken off at the end.

    Yields:
        The hooks.
    """
    hooks = Hooks()
    try:
        yield hooks
    finally:
        hooks.remove()


@contextmanager
def modes_kept() -> Iterator[None]:
    """Take off, at the end, every torch function mode that was entered inside.

    Yields:
        Nothing.
    """
    outer = torch._C._len_torch_function_stack()
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack() > outer:
            torch._C._pop_torch_function_stack()
