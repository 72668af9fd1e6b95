"""Other Python threads: whether any ran while a network was recorded, since their results are on no tape."""

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_grad_cam_pcasvm.runtime.rollback import Rollback


class OtherThreads:
    """Whether threads other than this one started or ran since now, until a rollback ends.

    A number, a mask, or a result without a graph that one of them computes from activations cannot be told from a
    constant.
    """

    def __init__(self, rollback: Rollback) -> None:
        self._before = _activities()
        self._starts = _Starts()
        rollback.note(self._starts.end)
        threading.setprofile(self._starts)

    @property
    def ran(self) -> bool:
        """Whether any did, or may have: where the system does not tell, all that are alive may."""
        activities = _activities()
        return self._starts.noted or activities != self._before or None in activities.values()


class _Starts:
    """A profile function of new threads, which notes that one started and lets the one before have it."""

    def __init__(self) -> None:
        self.noted = self._ended = False
        self._previous: Any = threading.getprofile()

    def __call__(self, *_: Any) -> None:
        self.noted = True
        sys.setprofile(self._previous)

    def end(self) -> None:
        """Restore the state from before; of explanations in several threads, when the last of them ends."""
        self._ended = True
        current: Any = threading.getprofile()
        while isinstance(current, _Starts) and current._ended:
            current = current._previous
        threading.setprofile(current)


def _activities() -> dict[threading.Thread, list[str] | None]:
    """Return for each other thread how often it was switched to; None where the system does not tell."""
    current = threading.current_thread()
    others = (thread for thread in threading.enumerate() if thread is not current and thread.name != _FEEDER)
    return {thread: _activity(thread) for thread in others}


def _activity(thread: threading.Thread) -> list[str] | None:
    with suppress(OSError):
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        lines = [line for line in status if line.startswith("State") or "ctxt_switches" in line]
        return lines if len(lines) == 3 else None
    return None


_FEEDER = "QueueFeederThread"  # sends numbers of images to the workers of a DataLoader
