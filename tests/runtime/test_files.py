"""Files are written atomically."""

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from pytorch_grad_cam_pcasvm.runtime.files import atomically, check_writable, name_path


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_write_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write():
        with atomically(path) as file:
            file.write(b"half of the new")
            file.flush()
            assert path.read_bytes() == b"old"
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), atomically(tmp_path / "file") as file:
        file.write(b"new")
    assert not list(tmp_path.iterdir())


def test_an_abandoned_write_leaves_nothing(tmp_path):
    """As where an interrupt comes between the opening and the block."""
    writing = atomically(tmp_path / "file")
    writing.__enter__().write(b"half")
    del writing
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_before_it_has_its_name(tmp_path, monkeypatch):
    synced, replaced = [], []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_size))
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, to: replaced.append(list(synced)) or replace(self, to))
    with atomically(tmp_path / "file") as file:
        file.write(b"new")
    assert synced == [3]
    assert replaced == [[3]]


def test_a_written_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "other").touch()
    with atomically(tmp_path / "file") as file:
        file.write(b"new")
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1
    with pytest.raises(FileNotFoundError), atomically(tmp_path / "missing" / "file"):
        pass


def test_of_concurrent_writers_the_last_to_end_wins(tmp_path):
    path, count = tmp_path / "file", 8
    begun = threading.Barrier(count)

    def write(number):
        with atomically(path) as file:
            for _ in range(50):
                file.write(bytes([number]) * 1000)
                begun.wait()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    with atomically(path) as file:
        for thread in threads:
            thread.join()
        assert path.read_bytes() in [bytes([number]) * 50_000 for number in range(count)]
        file.write(b"last")
    assert path.read_bytes() == b"last"
    assert list(tmp_path.iterdir()) == [path]


FULL = [
    (errno.ENOSPC, r"the disk is full \(No space left on device\)"),
    (errno.EDQUOT, r"the disk is full \(Disk quota exceeded\)"),
    (errno.EFBIG, r"no file may be as large here \(File too large\)"),
]


@pytest.mark.parametrize(("number", "why"), FULL)
def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path, number, why):
    path = tmp_path / "head.safetensors"
    with pytest.raises(OSError, match=rf"head\.safetensors cannot be written: {why}$") as caught, atomically(path):
        raise OSError(number, os.strerror(number))
    assert caught.value.errno == number
    assert ".tmp" not in str(caught.value)
    with pytest.raises(OSError, match=rf"^\[Errno {number}\] {path} cannot be written: {why}$"), name_path(path):
        raise OSError(number, os.strerror(number))


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of files")
def test_a_file_that_may_not_be_as_large_is_named(tmp_path):
    code = (
        "import resource, signal, sys; from pathlib import Path; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pytorch_grad_cam_pcasvm.runtime.files import atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "with atomically(Path(sys.argv[1])) as file: file.write(bytes(100_000))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "maps.bin"], capture_output=True, text=True)
    assert run.stderr.endswith("maps.bin cannot be written: no file may be as large here (File too large)\n")
    assert not list(tmp_path.iterdir())


def test_errors_of_other_files_stay_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match="other") as caught, atomically(tmp_path / "file"):
        (tmp_path / "other").read_bytes()
    assert not hasattr(caught.value, "reason")
    with pytest.raises(OSError, match=r"^\[Errno 5\] Input/output error$"), name_path(tmp_path / "file"):
        raise OSError(errno.EIO, "Input/output error")
    full = pytest.raises(OSError, match="inner cannot be written: the disk is full")
    with full, name_path(tmp_path / "outer"), name_path(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_missing_folder_is_the_reason(tmp_path):
    missing = pytest.raises(FileNotFoundError, match=r"missing/file cannot be written: there is no folder .*missing$")
    with missing, atomically(tmp_path / "missing" / "file"):
        pass


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    check_writable(tmp_path / "file", folder=False)
    check_writable(tmp_path / "new", folder=False)
    check_writable(tmp_path / "new" / "newer", folder=True)
    check_writable(tmp_path / "folder", folder=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    for path, folder, error, why in (
        ("file", True, FileExistsError, r"file is a file: give a folder"),
        ("file/in", True, FileExistsError, r"file is a file: give a folder"),
        ("folder", False, IsADirectoryError, r"folder is a folder: give a file"),
        ("none/file", False, FileNotFoundError, r"there is no folder .*none to write file in: make it first"),
    ):
        with pytest.raises(error, match=why):
            check_writable(tmp_path / path, folder=folder)

    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "folder" / "tmp123"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # whoever runs tests may be allowed everything
    for path, folder in (("folder/new", False), ("folder/new/newer", True)):
        why = rf"{path} cannot be written: you may not write in the folder .*folder \(Permission denied\)"
        with pytest.raises(PermissionError, match=why):
            check_writable(tmp_path / path, folder=folder)
