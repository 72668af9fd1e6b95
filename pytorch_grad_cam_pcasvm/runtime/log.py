"""The log: one logger, which tells at debug the steps of an explanation, with the seconds of the host.

Where it is off no message is formatted and no time is taken. Messages have what the host knows: no number of a device.
"""

import logging
import time
from typing import Any

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
