"""Files: written atomically, whenever an interrupt comes."""

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


def check_folder(folder: Path, marked: str, mark: str, contents: str) -> None:
    """Refuse to write into a folder that is neither new nor empty, unless what is there is marked as an earlier one.

    Args:
        folder: where to write.
        marked: the file whose beginning has the mark.
        mark: the mark.
        contents: what is written there.

    Raises:
        FileExistsError: there is something else.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: give a folder")
    # What a file manager left there is nobody's.
    others = folder.is_dir() and any(path.name not in (".DS_Store", "Thumbs.db") for path in folder.iterdir())
    if others and not has_mark(folder / marked, mark):
        raise FileExistsError(f"{folder} is not empty and holds no earlier {contents}: give a new or empty folder")


def has_mark(path: Path, mark: str) -> bool:
    """Return whether a file begins with a mark, within 4 KiB."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return mark.encode() in file.read(4096)
