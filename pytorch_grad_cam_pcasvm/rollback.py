"""Rollback: what a call changes for as long as it runs is put back, whenever an interrupt comes."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Rollback:
    """Undoes at the end of a ``with`` what was changed inside; at the latest when the next one begins.

    How a change is undone is noted before the change is made, and undoing twice is undoing once: so it does not matter
    where Ctrl-C or a signal strikes. If that is while things are being put back, the next call finishes it.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._thread = threading.get_ident()
        self._frame: FrameType | None = None

    def __enter__(self) -> "Rollback":
        """Begin, after finishing what an interrupted call left."""
        if _open:
            _recover()
        self._frame = sys._getframe(1)
        while self._frame.f_back is not None and _is_suspended(self._frame):
            self._frame = self._frame.f_back
        _open.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        """Undo everything, last changes first."""
        try:
            self._close()
        except BaseException:
            self._close()  # a signal between two steps: those that are left
            raise

    def note(self, undo: Callable[..., Any], *args: Any) -> None:
        """Note how a change will be undone, before making it."""
        self._undo.append(partial(undo, *args))

    def note_torch(self) -> None:
        """Note what torch keeps for this thread: gradients on or off, autocast, torch function modes."""
        casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
        grad, cached = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
        self.note(_put_back_torch, self._thread, grad, cached, casts)
        self.note_modes()

    def note_modes(self) -> None:
        """Note the torch function modes of this thread: those that are entered inside will be left."""
        # Where torch sets a mode aside for a call of its own, an interrupt can bring it back after everything.
        while (count := torch._C._len_torch_function_stack()) and _is_left(torch._C._get_function_stack_at(count - 1)):
            torch._C._pop_torch_function_stack()
        self.note(_leave_modes, self._thread, torch._C._len_torch_function_stack())

    def _close(self) -> None:
        for inner in reversed(_open[_open.index(self) + 1 :] if self in _open else []):
            if inner._thread == self._thread:
                inner._close()  # its own end was interrupted before it began
        failed: BaseException | None = None
        while self._undo:
            for _ in range(2):  # twice if a signal interrupts it
                try:
                    self._undo[-1]()
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


_open: list[Rollback] = []  # of all threads


def without_inference() -> AbstractContextManager[Any]:
    """Return a context outside inference mode; where it is off nothing changes.

    torch's own guard sets gradients to what they were whenever it is freed, which after an interrupt may be any time.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class Mode(TorchFunctionMode):
    """A torch function mode that serves one call."""

    def __enter__(self) -> "Mode":
        """Begin, inside a :class:`Rollback`."""
        self._within = next(each for each in reversed(_open) if each._thread == threading.get_ident())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End, unless an interrupt came where torch has set the mode aside."""
        if torch.overrides._get_current_function_mode() is self:
            super().__exit__(*error)


def _is_left(mode: Any) -> bool:
    return isinstance(mode, Mode) and mode._within not in _open


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame may be off the stack while a context that it entered is still open."""
    code = frame.f_code
    between = code.co_name == "__enter__" or code.co_filename == contextlib.__file__
    return between or bool(code.co_flags & inspect.CO_GENERATOR)


def _recover() -> None:
    """Undo what is left of calls that are not running any more."""
    running: set[FrameType | None] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    threads = sys._current_frames()
    for rollback in reversed(_open.copy()):
        mine = rollback._thread == threading.get_ident()
        if (mine and rollback._frame not in running) or rollback._thread not in threads:
            rollback._close()


def _put_back_torch(thread: int, grad: bool, cached: bool, casts: list[tuple[str, bool, torch.dtype]]) -> None:
    if threading.get_ident() != thread:
        return
    if torch.is_grad_enabled() != grad:
        torch._C._set_grad_enabled(grad)
    if torch.is_autocast_cache_enabled() != cached:
        torch.set_autocast_cache_enabled(cached)
    for kind, enabled, dtype in casts:
        if torch.is_autocast_enabled(kind) != enabled or torch.get_autocast_dtype(kind) != dtype:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


def _leave_modes(thread: int, count: int) -> None:
    while threading.get_ident() == thread and torch._C._len_torch_function_stack() > count:
        torch._C._pop_torch_function_stack()
