"""written_files.py: what a container's processes have written is on disk before its checkpoint is."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from socket import AF_UNIX, socket

import pytest
from fakes import wait_for
from synced import Synced

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted
from gpusnap.runtime_shim.base.question_process import Unanswered
from gpusnap.runtime_shim.process import open_files, proc
from gpusnap.runtime_shim.runtime import container_files
from gpusnap.runtime_shim.snapshot.records import written_files


@contextmanager
def holding(*descriptors: int, cwd: Path = Path("/")) -> Iterator[proc.Process]:
    """A process that has these open, and works in that directory."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=descriptors, cwd=cwd) as child:
        found = proc.process(child.pid)
        assert found is not None
        yield found


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions are asked in this process, whose calls are watched."""

    def ask(pid: int, what: str, function: object, *arguments: object, within: float) -> object:
        assert callable(function)
        return function(*arguments)

    monkeypatch.setattr(question_process, "ask", ask)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mode", ["w", "a", "r+", "r"])
def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Also one that is only read by now: it may have been written a moment ago, and its size is compared."""
    path = tmp_path / "log"
    path.write_text("one\n")
    (tmp_path / "other").touch()
    disk = Synced(tmp_path, monkeypatch)
    path.rename(tmp_path / "new")
    with open(tmp_path / "new", mode) as file, holding(file.fileno()) as process:
        assert not disk.has_file(tmp_path / "new")
        written_files.sync(process.pid, lambda: [process], stopped=True)
        assert disk.has_file(tmp_path / "new")
    assert not disk.has_file(tmp_path / "other")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["working directory", "directory", "fifo", "socket"])
def test_what_has_only_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """CRIU opens it by that, so the directories above it have to be there, new ones too."""
    disk = Synced(tmp_path, monkeypatch)
    path = tmp_path / "new" / "folder"
    path.mkdir(parents=True)
    with ExitStack() as opened:
        number = 0
        if kind == "fifo":
            path = path / "fifo"
            os.mkfifo(path)
            number = os.open(path, os.O_RDWR)
            opened.callback(os.close, number)
        elif kind == "directory":
            number = os.open(path, os.O_RDONLY)
            opened.callback(os.close, number)
        elif kind == "socket":
            bound = opened.enter_context(socket(AF_UNIX))
            bound.bind(str(path / "s"))
            number = bound.fileno()
        cwd = path if kind == "working directory" else Path("/")
        with holding(*([number] if number else []), cwd=cwd) as process:
            written_files.sync(process.pid, lambda: [process], stopped=True)
    assert disk.has(path)


@pytest.mark.usefixtures("here")
def test_a_mapped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor may be closed."""
    path = tmp_path / "mapped"
    path.write_bytes(bytes(mmap.PAGESIZE))
    disk = Synced(tmp_path, monkeypatch)
    with open(path, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    found = proc.process(os.getpid())
    assert found is not None
    with mapped:
        written_files.sync(found.pid, lambda: [found], stopped=True)
    assert disk.has_file(path)


@pytest.mark.usefixtures("here")
def test_what_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was written long ago and is only read, one without a name, and what is no file."""
    old, gone = tmp_path / "old", tmp_path / "gone"
    old.touch()
    monkeypatch.setattr(written_files, "_RECENT", -1.0)
    os.mkfifo(tmp_path / "fifo")
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    with open(old) as read, open(gone, "w") as deleted, open(os.devnull, "w") as device:
        gone.unlink()
        with holding(fifo, read.fileno(), deleted.fileno(), device.fileno()) as process:
            written_files.sync(process.pid, lambda: [process], stopped=True)
    os.close(fifo)
    assert not any(each.startswith(str(tmp_path)) for each in synced)


@pytest.mark.usefixtures("here")
def test_what_was_synced_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not synced again while the container is stopped, unless it was changed or may be written."""
    monkeypatch.setattr(written_files, "_SKEW", 0.0)
    for name in ("read", "changed", "written"):
        (tmp_path / name).write_text("one")
        os.utime(tmp_path / name, (0, 0))
    synced = list[str]()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    with ExitStack() as opened:
        files = [opened.enter_context(open(tmp_path / name)) for name in ("read", "changed")]
        files.append(opened.enter_context(open(tmp_path / "written", "a")))
        process = opened.enter_context(holding(*(file.fileno() for file in files)))
        # A file's times are those of the kernel's last tick.
        wait_for(lambda: os.stat(tmp_path / "read").st_ctime < time.time() - 0.1, "a later time")
        since = written_files.sync_ahead(process.pid, lambda: [process])
        everything = {str(tmp_path / name) for name in ("read", "changed", "written")}
        assert everything <= set(synced)
        synced.clear()
        wait_for(lambda: time.time() > since + 0.1, "a later time")
        os.utime(tmp_path / "changed", (0, 0))
        written_files.sync(process.pid, lambda: [process], since, stopped=True)
    assert everything.intersection(synced) == everything - {str(tmp_path / "read")}


@pytest.mark.usefixtures("here")
def test_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has several mappings, and is opened once; a directory is entered once for all of its files."""
    paths = [tmp_path / name for name in ("one", "two")]
    entered = list[str]()
    real = container_files.directory

    def enter(pid: int, path: str) -> AbstractContextManager[int]:
        entered.append(path)
        return real(pid, path)

    monkeypatch.setattr(written_files, "directory", enter)
    with ExitStack() as opened:
        for path in paths:
            path.write_bytes(bytes(3 * mmap.PAGESIZE))
            with open(path, "r+b") as file:
                for access in (mmap.ACCESS_READ, mmap.ACCESS_WRITE, mmap.ACCESS_COPY):
                    opened.enter_context(mmap.mmap(file.fileno(), 0, access=access))
        listed = list(open_files.list_open(os.getpid()))  # mmap.mmap duplicates the descriptors
        found = [each for each in listed if "map_files" in each.link and str(tmp_path) in each.path]
        assert sorted((each.path, each.is_writable()) for each in found) == [
            (str(path), True) for path in paths
        ]
        process = proc.process(os.getpid())
        assert process is not None
        written_files.sync(process.pid, lambda: [process], stopped=True)
    assert entered.count(str(tmp_path)) == 1


@pytest.mark.usefixtures("here")
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint goes on, with a note; a file system that has nothing to sync is no error."""
    number = errno.EIO

    def fail(_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with open(tmp_path / "log", "w") as file, holding(file.fileno()) as process:
        written_files.sync_ahead(process.pid, lambda: [process])
        assert capsys.readouterr().err == ""
        written_files.sync(process.pid, lambda: [process], stopped=True)
        said = capsys.readouterr().err
        # The directories above it are new, too.
        assert re.search(r"note: .*/log \(and \d more\) cannot be flushed to disk: Input/output error;", said)
        number = errno.EINVAL
        written_files.sync(process.pid, lambda: [process], stopped=True)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stopped", [True, False])
def test_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stopped: bool
) -> None:
    """It is waited for longer while the container runs; then there is a note."""
    waited = list[float]()

    def ask(*_: object, within: float) -> None:
        waited.append(within)
        raise Unanswered("process 1 (x) cannot be inspected")

    monkeypatch.setattr(question_process, "ask", ask)
    written_files.sync_ahead(1, tuple)
    written_files.sync(1, tuple, stopped=stopped)
    assert waited == [30.0, 10.0 if stopped else 120.0]
    assert capsys.readouterr().err.count("cannot be flushed to disk: process 1 (x) cannot") == 1


def test_a_module_that_is_gone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the middle of an upgrade: the checkpoint is complete, so that is a note."""

    def ask(*_: object, within: float) -> None:
        raise ModuleNotFoundError("No module named 'x'")

    monkeypatch.setattr(question_process, "ask", ask)
    written_files.prepare(1)
    assert capsys.readouterr().err == ""
    written_files.sync(1, tuple, stopped=False)
    assert "cannot be flushed to disk: No module named 'x'" in capsys.readouterr().err


def test_the_container_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """After it was let run on; its checkpoint is complete."""

    def fail() -> list[proc.Process]:
        raise GpusnapError("its processes cannot be listed")

    written_files.sync(1, fail, stopped=False)
    assert "cannot be flushed to disk: its processes cannot be listed" in capsys.readouterr().err


@pytest.mark.parametrize("ahead", [True, False])
def test_a_signal(ahead: bool) -> None:
    """It ends the checkpoint, here too."""

    def interrupt() -> list[proc.Process]:
        raise Interrupted("stopped by SIGTERM")

    with pytest.raises(Interrupted):
        written_files.sync_ahead(1, interrupt) if ahead else written_files.sync(1, interrupt, stopped=True)
