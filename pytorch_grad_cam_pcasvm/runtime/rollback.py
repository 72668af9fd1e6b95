"""Rollback: changes for the time of a call are undone, whenever an interrupt comes."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _pop_mode


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
        # Those of generators, and of entering them, may be off the stack while a context that they entered is open.
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
        while (count := torch._C._len_torch_function_stack()) and _is_left(torch._C._get_function_stack_at(count - 1)):
            torch._C._pop_torch_function_stack()
        casts = [
            (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
            for device_type in ("cpu", "cuda")
        ]
        flags = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self.note(_put_back_flags, self._owner, *flags, torch._C._len_torch_dispatch_stack())
        self.note(_put_back_casts, casts, torch._C._len_torch_function_stack(), late=False)

    def note_dispatch(self) -> None:
        """Note whether torch dispatches to autograd in this thread, and whether it refuses operations that draw."""
        # torch's own guard puts this back whenever it is freed, which after an interrupt may be any time.
        excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in _AUTOGRAD]
        refused = torch._C._dispatch_tls_is_dispatch_key_included(_NO_DRAWS)
        self.note(_put_back_dispatch, self._owner, excluded, refused)

    def go_below_autograd(self) -> None:
        """Leave autograd out of torch's dispatch, with gradients on all the same: after :meth:`note_torch`."""
        self.note_dispatch()
        for key in _AUTOGRAD:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
        set_gradients(enabled=True)

    @staticmethod
    def go_above_autograd() -> None:
        """Let torch dispatch to autograd again, after :meth:`go_below_autograd`."""
        for key in _AUTOGRAD:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)

    @staticmethod
    def refuse_draws() -> None:
        """Let torch refuse operations that draw from a generator in this thread, as its first vmap did.

        After :meth:`note_dispatch`.
        """
        torch._C._dispatch_tls_set_dispatch_key_included(_NO_DRAWS, True)

    @staticmethod
    def allow_draws() -> None:
        """Let torch draw again, after :meth:`refuse_draws`."""
        torch._C._dispatch_tls_set_dispatch_key_included(_NO_DRAWS, False)

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
_AUTOGRAD = [torch._C._dispatch_key_parse(f"Autograd{name}") for name in ("Functionality", "Other", "NestedTensor")]

_NO_DRAWS = torch._C._dispatch_key_parse("VmapMode")  # without kernels but for operations that draw, which raise


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
        if torch.overrides._get_current_function_mode() is self:
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
    with torch._C.DisableTorchFunction():
        torch._C._set_grad_enabled(enabled)


def _set_variable(thread: threading.Thread, variable: "ContextVar[Any]", value: Any) -> None:
    if threading.current_thread() is thread:
        variable.set(value)


def _put_back_dispatch(thread: threading.Thread, excluded: list[bool], refused: bool) -> None:
    if threading.current_thread() is thread:
        torch._C._dispatch_tls_set_dispatch_key_included(_NO_DRAWS, refused)
        for key, was_excluded in zip(_AUTOGRAD, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was_excluded)


def _put_back_flags(thread: threading.Thread, grad: bool, cached: bool, modes: int) -> None:
    while threading.current_thread() is thread and torch._C._len_torch_dispatch_stack() > modes:
        _pop_mode()
    if threading.current_thread() is thread:
        set_gradients(grad)
        torch.set_autocast_cache_enabled(cached)


def _put_back_casts(casts: list[tuple[str, bool, torch.dtype]], modes: int) -> None:
    while torch._C._len_torch_function_stack() > modes:
        torch._C._pop_torch_function_stack()
    for device_type, enabled, dtype in casts:
        if torch.is_autocast_enabled(device_type) != enabled or torch.get_autocast_dtype(device_type) != dtype:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
