"""CRIU waits at the end of its dump until the GPU memory is written, and ends no process if it is not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fakes import DEADLINE, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import find
from gpusnap.runtime_shim.runtime.criu import gate as gates
from gpusnap.runtime_shim.runtime.criu import held_dump, scratch_files
from gpusnap.runtime_shim.runtime.criu.held_dump import DumpEnded, HeldDump

# As the launcher does: it says the stage, and reads the answer.
PROGRAM = """#!/usr/bin/env python3
import os, socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(os.environ["GPUSNAP_GATE"])
    asking.send((os.environ["CRTOOLS_SCRIPT_ACTION"] + " 7\\n").encode())
    answer = b"."
    while answer == b".":
        answer = asking.recv(1)
    sys.exit(answer != b"y")
"""


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldDump]:
    """One with a directory of its own, whose path is short enough for a socket."""
    launcher = tmp_path / "launcher"
    launcher.write_text(PROGRAM)
    launcher.chmod(0o755)
    monkeypatch.setattr(gates, "criu_version", lambda: "4.1.1")
    monkeypatch.setattr(held_dump, "_REPORT", 0.05)
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setattr(held_dump, "scratch", lambda: place)
        with closing(HeldDump(str(launcher))) as found:
            yield found
        assert os.listdir(place) == []


class Dump:
    """A dump that CRIU has done but for its end: it asks, and returns the exit code of its program."""

    def __init__(self, held: HeldDump) -> None:
        self._held = held
        self.asked = threading.Event()
        self.program: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        environment = {**os.environ, **self._held.environment, "CRTOOLS_SCRIPT_ACTION": "post-dump"}
        with subprocess.Popen([self._held.script], env=environment) as self.program:
            self.asked.set()
            try:
                return self.program.wait(DEADLINE)
            finally:
                self.program.kill()


def nothing() -> None:
    pass


def until_it_ends(held: HeldDump) -> None:
    """Write until the check says that the dump has ended, or was refused."""

    def check() -> bool:
        held.check()
        return False

    wait_for(check, "the end of the dump")


def test_both_at_once(held: HeldDump) -> None:
    """CRIU has asked before the memory is written, and goes on only after that."""
    assert held.works
    events: list[str] = []
    dump, images = Dump(held), threading.Event()

    def work() -> None:
        assert images.wait(DEADLINE)
        assert dump.program is not None
        assert dump.program.poll() is None
        held.check()
        events.append("written")

    def at_end() -> None:
        held.check()
        events.append("images")
        images.set()

    assert held.run(dump, work, at_end) == (0, None)
    assert events == ["images", "written"]
    assert held.error is None


def test_the_images_are_waited_for(held: HeldDump) -> None:
    written, going = threading.Event(), threading.Event()

    def at_end() -> None:
        assert going.wait(DEADLINE)
        written.set()

    def work() -> None:
        threading.Timer(0.2, going.set).start()
        held.wait_until_written()
        assert written.is_set()

    assert held.run(Dump(held), work, at_end) == (0, None)


class Failure(BaseException):
    """As a signal raises it."""


def test_the_writing_fails(held: HeldDump) -> None:
    """CRIU is told so, and its dump fails; the images are not written any further."""
    dump, seen = Dump(held), threading.Event()
    cut: list[bool] = []

    def at_end() -> None:
        seen.set()
        try:
            until_it_ends(held)
        except DumpEnded:
            cut.append(True)
            raise

    def work() -> None:
        assert seen.wait(DEADLINE)
        raise Failure

    code, error = held.run(dump, work, at_end)
    assert code == 1
    assert isinstance(error, Failure)
    assert cut == [True]
    assert held.error is None  # the caller has a better one


@pytest.mark.parametrize("when", ["before it asks", "while it waits"])
def test_the_dump_fails(held: HeldDump, when: str) -> None:
    """The writing ends at its next check, and what waits for the images as well."""
    dump = Dump(held)

    def fail() -> int:
        return dump() if when == "while it waits" else 3

    def kill() -> None:
        assert dump.program is not None
        dump.program.kill()

    def wait() -> None:
        held.wait_until_written()
        pytest.fail("there are no images")

    at_end = kill if when == "while it waits" else nothing
    expected = -signal.SIGKILL if when == "while it waits" else 3
    assert held.run(fail, lambda: until_it_ends(held), at_end) == (expected, None)
    if when == "before it asks":
        assert held.run(fail, wait, at_end) == (expected, None)


def test_nothing_writes_when_it_returns(held: HeldDump) -> None:
    """The caller removes what was written."""
    dump, begun, done = Dump(held), threading.Event(), threading.Event()

    def at_end() -> None:
        begun.set()
        threading.Event().wait(0.3)  # between two checks
        done.set()

    def work() -> None:
        assert begun.wait(DEADLINE)
        raise Failure

    held.run(dump, work, at_end)
    assert done.is_set()


def test_a_dump_that_does_not_ask(held: HeldDump) -> None:
    """CRIU has ended the processes: what is left to write is written afterwards."""
    assert held.run(lambda: 0, lambda: wait_for(lambda: held.check(), "the end of the dump"), nothing) == (
        0,
        None,
    )
    assert held.run(lambda: 0, nothing, nothing) == (0, None)


def test_a_criu_that_asks_too_late(held: HeldDump) -> None:
    """It has outlived its runtime: whoever has let the processes go on does not lose them."""
    called: list[bool] = []
    assert held.run(lambda: 0, nothing, lambda: called.append(True)) == (0, None)
    assert Dump(held)() == 1
    assert called == []


def test_an_error_of_the_images(held: HeldDump) -> None:
    """An unforeseen one: CRIU is told no, and the reason is known."""

    def at_end() -> None:
        raise ZeroDivisionError

    code, error = held.run(Dump(held), held.wait_until_written, at_end)
    assert (code, error) == (1, None)
    assert "ZeroDivisionError" in str(held.error)


def test_twice(held: HeldDump) -> None:
    """The second attempt knows nothing of the first."""

    def fail() -> None:
        raise ZeroDivisionError

    assert held.run(Dump(held), held.wait_until_written, fail)[0] == 1
    assert held.run(Dump(held), held.wait_until_written, nothing) == (0, None)
    assert held.error is None


def test_it_is_closed_while_criu_waits(held: HeldDump) -> None:
    """By a gpusnap that fails otherwise."""
    codes: list[int] = []
    dump = Dump(held)
    thread = threading.Thread(target=lambda: codes.append(dump()))
    with held._lock:  # it has asked, and is not answered yet
        thread.start()
        assert dump.asked.wait(DEADLINE)
    held.close()
    thread.join(DEADLINE)
    assert codes == [1]


def test_a_criu_that_outlives_a_dump_that_was_given_up(held: HeldDump) -> None:
    """Its runtime was killed, and nobody waits any longer: the caller undoes the checkpoint."""
    asked = threading.Event()
    criu: list[subprocess.Popen[bytes]] = []

    def dump() -> None:
        environment = {**os.environ, **held.environment, "CRTOOLS_SCRIPT_ACTION": "post-dump"}
        criu.append(subprocess.Popen([held.script], env=environment))
        assert asked.wait(DEADLINE)
        raise GpusnapError("a program is still running", code="GPS-020")

    def work() -> None:
        held.wait_until_written()
        assert held.waits
        asked.set()
        wait_for(lambda: held._running.done(), "the end of the dump")  # the chunks are synced: no check

    with pytest.raises(GpusnapError):
        held.run(dump, work, nothing)
    assert criu[0].wait(DEADLINE) == 1
    assert held.is_refused
    assert not held.waits


def test_what_criu_was_told(held: HeldDump) -> None:
    def fail() -> None:
        held.wait_until_written()
        raise Failure

    held.run(lambda: 0, nothing, nothing)
    assert not held.is_refused
    held.run(Dump(held), held.wait_until_written, nothing)
    assert not held.is_refused
    held.run(Dump(held), fail, nothing)
    assert held.is_refused


@pytest.mark.parametrize("which", ["dump", "images"])
def test_no_thread(held: HeldDump, monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    """What has no thread is not run later, when the caller has given up."""
    assert held.works
    ran, start, begun = threading.Event(), threading.Thread.start, list[bool]()

    def fail(thread: threading.Thread) -> None:
        if thread.name == "gpusnap-dump" and (which == "dump" or begun):
            raise RuntimeError("can't start new thread")
        begun.append(True)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        if which == "dump":
            with pytest.raises(GpusnapError):
                held.run(ran.set, nothing, nothing)
        else:
            assert held.run(Dump(held), held.wait_until_written, ran.set) == (1, None)
    assert not ran.wait(0.3)


def test_a_refusal_does_not_wait_for_the_images(held: HeldDump) -> None:
    """CRIU is told at once; only the caller waits until nothing is written any more."""
    begun, told = threading.Event(), threading.Event()
    dump = Dump(held)

    def at_end() -> None:
        begun.set()
        assert told.wait(DEADLINE)

    def ask() -> int:
        code = dump()
        told.set()
        return code

    def work() -> None:
        assert begun.wait(DEADLINE)
        raise Failure

    assert held.run(ask, work, at_end)[0] == 1


def test_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "launcher", lambda: "")
    assert held_dump.hold() is None


@pytest.mark.parametrize("what", ["folder", "socket", "thread"])
def test_what_it_needs_is_missing(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory, no socket, no thread: the memory is written before the dump, and nothing is left."""

    def fail(*_: object, **__: object) -> None:
        raise (
            RuntimeError("can't start new thread")
            if what == "thread"
            else OSError(28, "No space left on device")
        )

    faults: dict[str, Callable[[], None]] = {
        "folder": lambda: monkeypatch.setattr(tempfile, "mkdtemp", fail),
        "socket": lambda: monkeypatch.setattr(socket, "socket", fail),
        "thread": lambda: monkeypatch.setattr(threading.Thread, "start", fail),
    }
    monkeypatch.setattr(find, "launcher", lambda: "/launcher")
    monkeypatch.setattr(held_dump, "scratch", lambda: str(tmp_path))
    faults[what]()
    assert held_dump.hold() is None
    assert list(tmp_path.glob(scratch_files.prefix("gate") + "*")) == []
