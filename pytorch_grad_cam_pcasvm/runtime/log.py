"""What is told while something runs: a log, and a bar of progress.

One logger tells at debug the steps of an explanation, with the seconds of the host. Where it is off no message is
formatted and no time is taken. Messages have what the host knows: no number of a device.
"""

import logging
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm.auto import tqdm

LOGGER = logging.getLogger("pytorch_grad_cam_pcasvm")


def start_clock() -> float:
    """Return the time in seconds; 0 where nothing is logged."""
    return time.perf_counter() if LOGGER.isEnabledFor(logging.DEBUG) else 0.0


def log_since(start: float, message: str, *args: Any) -> None:
    """Log a message with the seconds since a start; nothing where the start is 0.

    Args:
        start: of :func:`start_clock`.
        message: with a ``%`` for each argument.
        args: what is formatted where somebody reads it.
    """
    if start:
        LOGGER.debug(message + " (%.4f s)", *args, time.perf_counter() - start, stacklevel=2)


class _Hidden:
    def update(self, steps: int = 1) -> None:
        """Count nothing."""

    def write(self, text: str) -> None:
        """Say nothing."""


def progress_bar(shown: bool | None, **options: Any) -> AbstractContextManager[Any]:
    """Return a context with ``update(steps)`` and ``write(text)``: tqdm's bar with these options, or nothing.

    If ``shown`` is None, it is shown on a terminal only.

    Not ``tqdm(disable=True)``: that, too, takes a lock which all threads and forked processes share, and Ctrl-C at the
    wrong moment leaves it taken for good.
    """
    if shown is None:
        shown = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(**options) if shown else nullcontext(_Hidden())
