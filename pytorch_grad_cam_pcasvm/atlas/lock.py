"""The lock of an atlas: one build at a time writes into a folder. The system takes it from a process that dies."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pytorch_grad_cam_pcasvm.runtime.errors import warn

NAME = ".lock"

if sys.platform == "win32":
    import msvcrt

    def _taken(file: IO[str]) -> bool:
        with suppress(OSError):
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
            return True
        return False

    def _leave(file: IO[str]) -> None:
        with suppress(OSError):
            msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _taken(file: IO[str]) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems have no locks
            warn(f"{file.name} cannot be locked ({error}): start no other build there until this one ends", UserWarning)
        return True

    def _leave(file: IO[str]) -> None:
        # Closing is not enough: processes that were forked meanwhile, such as those that read images, hold it, too.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there, alone: wait until no other build in any process holds it."""
    path, warned = folder / NAME, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            # Who waited may have locked a file that its last holder deleted, and that nobody else finds.
            held = _taken(file) and _is_there(path, file)
            try:
                if held:
                    yield
                    return
            finally:
                if held:
                    with suppress(PermissionError):  # Windows deletes no open files
                        path.unlink(missing_ok=True)
                _leave(file)
        if not warned:
            warn(f"another build is under way in {folder}: waiting until it ends", UserWarning)
            warned = True
        time.sleep(0.1)


def _is_there(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except OSError:
        return False
