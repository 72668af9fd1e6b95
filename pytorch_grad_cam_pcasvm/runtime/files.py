"""Files: written atomically, whenever an interrupt comes, and named where they cannot be written."""

import errno
import os
import platform
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from pytorch_grad_cam_pcasvm.runtime.errors import compose_message

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def atomically(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of ``path`` when the ``with`` ends; after an error nothing has changed.

    It is written beside ``path`` and then renamed. Several threads, processes and machines may write the same one: the
    last to end wins.

    Yields:
        The file, open for bytes.

    Raises:
        OSError: it cannot be written; the message names ``path``.
    """
    temporary = name_temporary(path)
    try:
        with name_path(path, temporary):
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def name_path(path: Path, *paths: Path) -> Iterator[None]:
    """Name a file in the errors of writing it; errors of a full disk name none.

    Args:
        path: the file.
        paths: files that it is written by way of.

    Raises:
        OSError: the file cannot be written; its ``reason`` is the message without the number.
    """
    try:
        yield
    except OSError as error:
        of_it = error.errno in _FULL if error.filename is None else Path(str(error.filename)) in (path, *paths)
        if hasattr(error, "reason") or not of_it:
            raise
        refused = unwritable(path, error)
        raise refused from error


def unwritable(path: Path, error: OSError, folder: Path | None = None) -> OSError:
    """Return an error of writing that names the file and the reason; the folder is the file's, or one above it."""
    said, folder = error.strerror or str(error), folder or path.parent
    why = said
    if error.errno in _FULL:
        why = "no file may be as large here" if error.errno == errno.EFBIG else "the disk is full"
        why += f" ({said})"
    elif error.errno in _CLOSED:
        why = f"you may not write in the folder {folder} ({said})"
    elif error.errno == errno.ENOENT and not folder.is_dir():
        why = f"there is no folder {folder}"
    return with_reason(error.errno, f"{path} cannot be written: {why}")


def with_reason(number: int | None, reason: str, *ways_out: str) -> OSError:
    """Return an error of the system that has its message and a way out as attributes."""
    message = compose_message(reason, ways_out)
    error: Any = OSError(message) if number is None else OSError(number, message)
    error.reason, error.ways_out = reason, ways_out
    return error


def check_writable(path: Path, *, folder: bool) -> None:
    """Refuse a place that cannot be written, before the work for it begins.

    Args:
        path: the file, or the folder, which need not be there.
        folder: whether it is a folder, which is made with those around it.

    Raises:
        FileExistsError: a file has the name of the folder, or of one around it.
        FileNotFoundError: there is no folder for the file.
        IsADirectoryError: a folder has the name of the file.
        OSError: nothing can be written there; the message says why.
    """
    if folder:
        place = path
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise FileExistsError(f"{place} is a file: give a folder")
    else:
        place = path.resolve().parent  # what a link points to, not the link
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give a file, such as {path / 'name'}")
        if not place.is_dir():
            raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} in: make it first")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        refused = unwritable(path, error, place)
        raise refused from error


def name_temporary(path: Path) -> Path:
    """Return the name of a file until it is complete, another one for each thread."""
    return path.with_name(f".{path.name}.{platform.node()}.{threading.get_ident()}.{os.getpid()}.tmp")


def remove_leftovers(folder: Path) -> None:
    """Remove leftovers of interrupted calls and of killed processes of this machine from a folder held alone."""
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
    """Refuse to write into a folder that is neither new nor empty, unless it is marked as an earlier result.

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
    is_filled = folder.is_dir() and any(path.name not in (".DS_Store", "Thumbs.db") for path in folder.iterdir())
    if is_filled and not has_mark(folder / marked, mark):
        raise FileExistsError(f"{folder} is not empty and holds no earlier {contents}: give a new or empty folder")


def has_mark(path: Path, mark: str) -> bool:
    """Return whether a file begins with a mark, within 4 KiB."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return mark.encode() in file.read(4096)
