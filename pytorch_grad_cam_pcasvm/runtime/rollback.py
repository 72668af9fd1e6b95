"""Rollback: changes for the time of a call are undone, whenever an interrupt comes."""

import contextlib
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from pytorch_grad_cam_pcasvm.runtime.torch_private import (
    count_dispatch_modes,
    count_function_modes,
    exclude_dispatch_key,
    find_function_mode,
    global_forward_pre_hooks,
    include_dispatch_key,
    is_dispatch_key_excluded,
    is_dispatch_key_included,
    parse_dispatch_key,
    pop_dispatch_mode,
    pop_function_mode,
    read_function_mode,
    switch_gradients,
    without_function_modes,
)


class Rollback:
    """Undoes changes at the end of the ``with`` that made them, at the latest when the next one begins.

    How a change is undone is noted before the change is made, and undoing twice is undoing once: so it does not matter
    where Ctrl-C or a signal strikes. If that is while things are being put back, the next call finishes it, except for
    what the user may have changed since.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[Callable[[], Any], bool]] = []
        self._owner = threading.current_thread()  # not its number, which another thread may get after it
        self._frame: FrameType | None = None

    def __enter__(self) -> "Rollback":
        """Begin, after undoing the changes of an interrupted call."""
        if _open:
            _recover()
        frame = sys._getframe(1)
        # Skip frames of generators and `__enter__`: they return before the context that they opened closes.
        while frame.f_back is not None and (
            frame.f_code.co_flags & _SUSPENDED
            or frame.f_code.co_name == "__enter__"
            or frame.f_code.co_filename == contextlib.__file__
        ):
            frame = frame.f_back
        self._frame = frame
        _open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Undo everything, last changes first."""
        try:
            self._close()
        except BaseException:
            self._close()  # a signal between two steps: those that are left
            raise

    def note(self, undo: Callable[..., Any], *args: Any, late: bool = True) -> None:
        """Note how a change will be undone, before making it; ``late``: even if only the next call comes to do it."""
        self._undo.append((partial(undo, *args), late))

    def set_variable(self, variable: "ContextVar[Any]", value: Any) -> None:
        """Give a context variable another value in this thread."""
        self.note(_set_variable, self._owner, variable, variable.get())
        variable.set(value)

    def note_torch(self) -> None:
        """Note torch's state of this thread: gradients on or off, autocast, modes for functions and for dispatch.

        Modes that are entered inside will be left.
        """
        # Where torch sets a mode aside for a call of its own, an interrupt can bring it back after everything.
        while (count := count_function_modes()) and _is_left(read_function_mode(count - 1)):
            pop_function_mode()
        casts = [
            (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda")
        ]
        flags = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self.note(_put_back_flags, self._owner, *flags, count_dispatch_modes())
        self.note(_put_back_casts, casts, count_function_modes(), late=False)

    def note_dispatch(self) -> None:
        """Note whether torch dispatches to autograd in this thread, and whether it refuses operations that draw."""
        # torch's own guard puts this back whenever it is freed, which after an interrupt may be any time.
        excluded = [is_dispatch_key_excluded(key) for key in _AUTOGRAD]
        refused = is_dispatch_key_included(_NO_DRAWS)
        self.note(_put_back_dispatch, self._owner, excluded, refused)

    def go_below_autograd(self) -> None:
        """Leave autograd out of torch's dispatch, with gradients on all the same: after :meth:`note_torch`."""
        self.note_dispatch()
        for key in _AUTOGRAD:
            exclude_dispatch_key(key, True)
        set_gradients(enabled=True)

    @staticmethod
    def go_above_autograd() -> None:
        """Let torch dispatch to autograd again, after :meth:`go_below_autograd`."""
        for key in _AUTOGRAD:
            exclude_dispatch_key(key, False)

    @staticmethod
    def refuse_draws() -> None:
        """Let torch refuse operations that draw from a generator in this thread, as its first vmap did.

        After :meth:`note_dispatch`.
        """
        include_dispatch_key(_NO_DRAWS, True)

    @staticmethod
    def allow_draws() -> None:
        """Let torch draw again, after :meth:`refuse_draws`."""
        include_dispatch_key(_NO_DRAWS, False)

    def _close(self, late: bool = False) -> None:
        for inner in reversed(_open[_open.index(self) + 1 :] if self in _open else []):
            if inner._owner is self._owner:
                inner._close(late)  # its own end was interrupted before it began
        failed: BaseException | None = None
        while self._undo:
            undo, always = self._undo[-1]
            for _ in range(2 if always or not late else 0):  # again if a signal interrupts it
                try:
                    undo()
                    break
                except BaseException as error:
                    failed = error
            self._undo.pop()
        self._frame = None
        if self in _open:
            _open.remove(self)
        try:
            if failed is not None:
                raise failed
        finally:
            del failed  # whose traceback holds this frame


_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_open: list[Rollback] = []  # of all threads
_AUTOGRAD = [parse_dispatch_key(f"Autograd{name}") for name in ("Functionality", "Other", "NestedTensor")]

_NO_DRAWS = parse_dispatch_key("VmapMode")  # without kernels but for operations that draw, which raise


def without_inference() -> AbstractContextManager[Any]:
    """Return a context outside inference mode; where it is off nothing changes.

    torch's own guard sets gradients to what they were whenever it is freed, which after an interrupt may be any time.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class Mode(TorchFunctionMode):
    """A torch function mode that serves one call."""

    def __enter__(self) -> "Mode":
        """Begin, inside a :class:`Rollback`."""
        self._within = next(
            rollback for rollback in reversed(_open.copy()) if rollback._owner is threading.current_thread()
        )
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End, unless an interrupt came where torch has set the mode aside."""
        if find_function_mode() is self:
            super().__exit__(*error)


def _is_left(mode: Any) -> bool:
    return isinstance(mode, Mode) and mode._within not in _open


def _recover() -> None:
    """Undo the changes of calls that are not running any more."""
    running: set[FrameType | None] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    # Not sys._current_frames(), whose lock other threads may wait for, and it for theirs (gh-106883); nor is_alive(),
    # which takes a thread for ended for good if a signal interrupts it.
    threads = threading.enumerate()
    for rollback in reversed(_open.copy()):
        mine = rollback._owner is threading.current_thread()
        if (mine and rollback._frame not in running) or rollback._owner not in threads:
            with suppress(Exception):  # another call's, which was interrupted anyway
                rollback._close(late=True)


def set_gradients(enabled: bool) -> None:
    """Switch gradients on or off for this thread, unseen by torch function modes, which may be recording around it."""
    with without_function_modes():
        switch_gradients(enabled)


def _set_variable(thread: threading.Thread, variable: "ContextVar[Any]", value: Any) -> None:
    if threading.current_thread() is thread:
        variable.set(value)


def _put_back_dispatch(thread: threading.Thread, excluded: list[bool], refused: bool) -> None:
    if threading.current_thread() is thread:
        include_dispatch_key(_NO_DRAWS, refused)
        for key, was_excluded in zip(_AUTOGRAD, excluded, strict=True):
            exclude_dispatch_key(key, was_excluded)


def _put_back_flags(thread: threading.Thread, grad: bool, cached: bool, modes: int) -> None:
    while threading.current_thread() is thread and count_dispatch_modes() > modes:
        pop_dispatch_mode()
    if threading.current_thread() is thread:
        set_gradients(grad)
        torch.set_autocast_cache_enabled(cached)


def _put_back_casts(casts: list[tuple[str, bool, torch.dtype]], modes: int) -> None:
    while count_function_modes() > modes:
        pop_function_mode()
    for device_type, enabled, dtype in casts:
        if torch.is_autocast_enabled(device_type) != enabled or torch.get_autocast_dtype(device_type) != dtype:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


class Hooks:
    """Forward hooks on modules that may also be running in other threads, whose passes they leave alone.

    While a hook is registered or removed, another thread's pass may find it in one of torch's tables and not yet in the
    one that says that it takes keyword arguments, and call it without them: a hook takes both forms.
    """

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

        self._register(module, run, prepend=prepend, always=always)

    def after_call(self, backbone: nn.Module, name: str, hook: Callable[[str, Any], Any]) -> None:
        """Call ``hook(name, output)`` after a layer runs, or after one of its calls, as in ``"encoder#2"``.

        Args:
            backbone: the network.
            name: of the layer.
            hook: may return another output.
        """
        path, call = called(name)
        calls = count(1)

        def run(*args: Any) -> Any:
            if threading.get_ident() != self._thread:
                return None
            self.runs[path] = number = next(calls)
            return hook(name, args[-1]) if call in (None, number) else None

        self._register(backbone.get_submodule(path), run)

    def _register(
        self, module: nn.Module, run: Callable[..., Any], *, prepend: bool = False, always: bool = False
    ) -> None:
        registries = module._forward_hooks_with_kwargs, module._forward_hooks_always_called
        self._rollback.note(_remove, run, module._forward_hooks, *registries)
        module.register_forward_hook(run, with_kwargs=True, prepend=prepend, always_call=always)

    def before_scripted(self, hook: Callable[..., None]) -> None:
        """Call ``hook(module, args)`` before any scripted module runs, as these take no hooks of their own."""

        def run(module: nn.Module, args: Any) -> None:
            if isinstance(module, torch.jit.ScriptModule) and threading.get_ident() == self._thread:
                hook(module, args)

        self._rollback.note(_remove, run, global_forward_pre_hooks)
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


def _remove(run: Any, hooks: dict[int, Any], *registries: dict[int, Any]) -> None:
    """Remove a hook from where torch keeps it; by itself, as an interrupt may come before its handle does."""
    for number in [number for number, hook in hooks.copy().items() if hook is run]:
        for registry in (*registries, hooks):
            registry.pop(number, None)
