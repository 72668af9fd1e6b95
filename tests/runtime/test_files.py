"""Files are written atomically."""

import os
import stat
import threading
from pathlib import Path

import pytest

from pytorch_grad_cam_pcasvm.runtime.files import atomically


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
