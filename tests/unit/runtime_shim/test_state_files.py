"""Small state files: whole or not there, nobody's but the owner's, and nothing is waited for for ever."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from synced import Synced

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.process import proc


class Busy(Exception):
    pass


class Failed(Exception):
    pass


def lock(path: Path, patience: float = 0) -> AbstractContextManager[None]:
    return state_files.lock(str(path), patience=patience, busy=Busy, failed=lambda error: Failed(error))


def test_written_and_read(tmp_path: Path) -> None:
    """The folders are made, for root alone, and what is read is what was written last."""
    path = tmp_path / "run" / "own" / "x.json"
    state_files.write(str(path), b'{"a": 1}')
    state_files.write(str(path), b'{"a": 2}')
    assert state_files.read(str(path), limit=100) == {"a": 2}
    assert [os.stat(each).st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]
    assert os.listdir(path.parent) == ["x.json"]
    with pytest.raises(ValueError, match="8 bytes, but at most 7 are allowed"):
        state_files.read(str(path), limit=7)


def test_what_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A durable file with its directories; one that was removed does not come back."""
    disk = Synced(tmp_path, monkeypatch)
    path = tmp_path / "lib" / "own" / "x.json"
    with lock(path.with_name("lock")):  # it makes the directories
        state_files.write_durably(str(path), b"1")
    assert disk.has(path)
    assert [os.stat(each).st_mode & 0o777 for each in (path, path.parent)] == [0o600, 0o700]
    state_files.remove(str(path))
    assert disk.has(path)
    state_files.remove_durably(str(path))
    assert not disk.has(path)
    state_files.remove_durably(str(tmp_path / "none" / "x.json"))


def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier file stays, and nothing beside it."""
    path = tmp_path / "x.json"
    state_files.write(str(path), b"1")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        state_files.write(str(path), b"2")
    assert os.listdir(tmp_path) == ["x.json"]
    assert path.read_bytes() == b"1"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/etc/hostname", path)])
def test_what_is_no_file_is_not_read(tmp_path: Path, make: object) -> None:
    """A FIFO is not waited for, and a link not followed."""
    assert callable(make)
    make(tmp_path / "x")
    with pytest.raises((OSError, ValueError)):
        state_files.read(str(tmp_path / "x"), limit=100)


def test_removed_with_what_a_killed_writer_left(tmp_path: Path) -> None:
    """Twice does no harm."""
    for name in ("x", "x.new", "y"):
        (tmp_path / name).touch()
    state_files.remove(str(tmp_path / "x"))
    state_files.remove(str(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["y"]


def test_one_at_a_time(tmp_path: Path) -> None:
    """Others are told so at once, or wait; the file goes with its holder."""
    path = tmp_path / "run" / "own" / "lock"
    let_go = threading.Event()
    had: list[bool] = []

    def wait() -> None:
        let_go.set()
        with lock(path, patience=30):
            had.append(True)

    waiting = threading.Thread(target=wait)
    with lock(path):
        with pytest.raises(Busy), lock(path):
            pass
        waiting.start()
        assert let_go.wait(30)
        assert had == []
    waiting.join(30)
    assert had == [True]
    assert os.listdir(path.parent) == []


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    """It is the caller's to say what that means; what fails within the block is not taken for it."""
    (tmp_path / "file").touch()
    with pytest.raises(Failed), lock(tmp_path / "file" / "lock"):
        pass
    with pytest.raises(OSError, match="within"), lock(tmp_path / "lock"):
        raise OSError("within")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(Failed), lock(tmp_path / "link"):
        pass


def test_owner() -> None:
    """A process by its PID and start time, which no later one of that PID has."""
    assert proc.is_same(*state_files.owner())
    pid, start = state_files.owner(os.getppid())
    assert (pid, proc.is_same(pid, start + 1)) == (os.getppid(), False)


def test_the_lock_cannot_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was done within is done: no error of the closing takes it back, and the next one has the lock."""
    closing = os.close

    def close(descriptor: int) -> None:
        closing(descriptor)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "run" / "own" / "x.lock"
    with monkeypatch.context() as broken, lock(path):
        broken.setattr(os, "close", close)
    with lock(path):
        assert path.exists()
    assert not path.exists()
