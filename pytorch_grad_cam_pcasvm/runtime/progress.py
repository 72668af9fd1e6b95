"""Progress: a bar, or nothing at all."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm.auto import tqdm


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
