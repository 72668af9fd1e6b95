"""Hooks that serve one thread and are removed again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Hooks:
    """Forward hooks on modules that may also be running in other threads, whose passes they leave alone."""

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
        """Call ``hook(module, args, kwargs, output)`` after the module runs; it may return another output."""

        def run(*args: Any) -> Any:
            return hook(*args) if threading.get_ident() == self._thread else None

        self._handles.append(module.register_forward_hook(run, with_kwargs=True, prepend=prepend))

    def before_scripted(self, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args)`` before any scripted module runs, as these take no hooks of their own."""

        def run(module: nn.Module, args: Any) -> None:
            if isinstance(module, torch.jit.ScriptModule) and threading.get_ident() == self._thread:
                hook(module, args)

        self._handles.append(register_module_forward_pre_hook(run))

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()


@contextmanager
def hooked() -> Iterator[Hooks]:
    """Yield hooks that are removed at the end.

    Yields:
        The hooks.
    """
    hooks = Hooks()
    try:
        yield hooks
    finally:
        hooks.remove()
