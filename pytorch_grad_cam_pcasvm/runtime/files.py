"""Files: written whole or not at all, whenever an interrupt comes."""

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the ``with`` ends; after an error nothing has changed.

    It is written beside ``path`` and then renamed. Several threads, processes and machines may write the same one: the
    last to end wins.

    Yields:
        The file, open for bytes.
    """
    temporary = temporary_of(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_of(path: Path) -> Path:
    """Return the name of a file until it is complete, another one for each thread."""
    return path.with_name(f".{path.name}.{platform.node()}.{threading.get_ident()}.{os.getpid()}.tmp")


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted calls of this process, and killed ones of this machine, left in a folder held alone."""
    for left in folder.glob(f".*.{platform.node()}.*.tmp"):
        number = left.name.split(".")[-2]
        if number.isdecimal() and (int(number) == os.getpid() or not _alive(int(number))):
            left.unlink(missing_ok=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
