"""Hooks that serve one thread and are removed again."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback


class Hooks:
    """Forward hooks on modules that may also be running in other threads, whose passes they leave alone."""

    def __init__(self, rollback: Rollback) -> None:
        self._thread = threading.get_ident()
        self._rollback = rollback
        self.runs: Counter[str] = Counter()  # how often the layers of ``after_call`` have run, by their dotted names

    def before(self, module: nn.Module, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args, kwargs)`` before the module runs."""

        def run(*args: Any) -> None:
            if threading.get_ident() == self._thread:
                hook(*args)

        self._rollback.note(_remove, run, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
        module.register_forward_pre_hook(run, with_kwargs=True)

    def after(
        self, module: nn.Module, hook: Callable[..., Any], *, prepend: bool = False, always: bool = False
    ) -> None:
        """Call ``hook(module, args, kwargs, output)`` after the module runs; it may return another output.

        Args:
            module: the module.
            hook: the hook.
            prepend: call it before the module's other hooks.
            always: call it if the module fails, too, with None for its output.
        """

        def run(*args: Any) -> Any:
            return hook(*args) if threading.get_ident() == self._thread else None

        others = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
        self._rollback.note(_remove, run, module._forward_hooks, *others)
        module.register_forward_hook(run, with_kwargs=True, prepend=prepend, always_call=always)

    def after_call(self, backbone: nn.Module, name: str, hook: Callable[[str, Any], Any]) -> None:
        """Call ``hook(name, output)`` after a layer runs, or after one of its calls, as in ``"encoder#2"``.

        Args:
            backbone: the network.
            name: of the layer.
            hook: may return another output.
        """
        path, call = called(name)
        calls = count(1)

        def of(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.runs[path] = number = next(calls)
            return hook(name, output) if call in (None, number) else None

        self.after(backbone.get_submodule(path), of)

    def before_scripted(self, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args)`` before any scripted module runs, as these take no hooks of their own."""

        def run(module: nn.Module, args: Any) -> None:
            if isinstance(module, torch.jit.ScriptModule) and threading.get_ident() == self._thread:
                hook(module, args)

        self._rollback.note(_remove, run, torch_module._global_forward_pre_hooks)
        torch_module.register_module_forward_pre_hook(run)


@contextmanager
def hooked() -> Iterator[Hooks]:
    """Yield hooks that are removed at the end.

    Yields:
        The hooks.
    """
    with Rollback() as rollback:
        yield Hooks(rollback)


def called(name: str) -> tuple[str, int | None]:
    """Return the dotted name of a layer, and which of its calls is meant, as in ``"backbone.layer4#2"``, or None."""
    path, marked, call = name.partition("#")
    if marked and not (call.isdecimal() and int(call)):
        raise ValueError(
            f"{name!r} names no call: write the layer's name, '#' and a number from 1, as in {path + '#2'!r}"
        )
    return path, int(call) if marked else None


def list_calls(path: str, count: int) -> str:
    """Return the names of a layer's calls as in a sentence; of many, the first three and the last."""
    if count == 1:
        return repr(path)
    names = [repr(f"{path}#{call}") for call in range(1, count + 1)]
    return f"{', '.join(names[:-1])} or {names[-1]}" if count < 5 else f"{', '.join(names[:3])}, ... {names[-1]}"


def runs_instead(name: str, count: int) -> str:
    """Return the message for a named call of a layer that does not happen: how often it runs, and a choice."""
    path, _ = called(name)
    return f"{path!r} runs {'once' if count == 1 else f'{count} times'}: choose {list_calls(path, count)}"


def _remove(run: Any, hooks: dict[int, Any], *others: dict[int, Any]) -> None:
    """Remove a hook from where torch keeps it; by itself, as an interrupt may come before its handle does."""
    for number in [number for number, hook in hooks.copy().items() if hook is run]:
        for registry in (*others, hooks):
            registry.pop(number, None)
