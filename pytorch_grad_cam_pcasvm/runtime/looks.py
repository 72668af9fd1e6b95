"""Looks at numbers, taken where they cost next to nothing: a GPU would wait for them, and a program has none to take.

Between images and maps nothing else asks what a number is; what is refused for its numbers is refused afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_allowed = ContextVar("looks", default=True)


def may_look(tensor: Tensor) -> bool:
    """Return whether numbers of a tensor may be looked at: if it is on the CPU, outside of :func:`no_looks`."""
    return _allowed.get() and tensor.device.type == "cpu"


@contextmanager
def no_looks() -> Iterator[None]:
    """Look at no number, as on a GPU, whatever the device."""
    before = _allowed.set(False)
    try:
        yield
    finally:
        _allowed.reset(before)
