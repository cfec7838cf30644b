"""The socket at which CRIU asks whether it may go on."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.criu import gate as gates
from gpusnap.runtime_shim.runtime.criu.gate import POST_DUMP, POST_RESTORE, PRE_RESTORE, Busy, Gate

# As the launcher does: it says the stage, and reads the answer.
PROGRAM = """#!/usr/bin/env python3
import os, socket, sys
with socket.socket(socket.AF_UNIX) as asking:
    asking.connect(os.environ["GPUSNAP_GATE"])
    asking.send((os.environ["CRTOOLS_SCRIPT_ACTION"] + " 0\\n").encode())
    sys.exit(asking.recv(9) != b"y")
"""


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    path = tmp_path / "launcher"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


@pytest.fixture
def called() -> list[tuple[str, int]]:
    """The stages that were asked for, and the PIDs."""
    return []


@pytest.fixture
def gate(tmp_path: Path, launcher: Path, called: list[tuple[str, int]]) -> Iterator[Gate]:
    def pre(init: int, _: Busy) -> bool:
        called.append((PRE_RESTORE, init))
        return True

    def post(init: int, busy: Busy) -> bool:
        called.append((POST_RESTORE, init))
        busy()
        if init == 13:
            raise GpusnapError("thirteen")
        if init == 14:
            raise ZeroDivisionError
        return init != 15

    with closing(
        Gate(str(tmp_path / "gate"), str(launcher), {PRE_RESTORE: pre, POST_RESTORE: post})
    ) as found:
        yield found


def ask(gate: Gate, line: bytes) -> bytes:
    """All of the answer."""
    answer = b""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(30)
        asking.connect(gate.environment["GPUSNAP_GATE"])
        asking.send(line)
        asking.shutdown(socket.SHUT_WR)
        while piece := asking.recv(99):
            answer += piece
    return answer


def test_both_stages(gate: Gate, called: list[tuple[str, int]]) -> None:
    assert ask(gate, b"pre-restore 0\n") == b"y"
    assert ask(gate, b"post-restore 77\n") == b".y"
    assert called == [(PRE_RESTORE, 0), (POST_RESTORE, 77)]
    assert gate.error is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"post-restore 13\n", "thirteen"),
        (b"post-restore 14\n", "ZeroDivisionError"),
        (b"pre-resume 1\n", "CRIU asks at a stage that is none: 'pre-resume' of process '1'"),
        (b"post-restore \n", "of process ''"),
        (b"x" * 128, "CRIU asks at a stage that is none"),
    ],
    ids=["refused", "unforeseen", "another stage", "no process", "too much"],
)
def test_criu_may_not_go_on(gate: Gate, line: bytes, said: str) -> None:
    """The answer is no, and the restore can say why."""
    assert ask(gate, line).endswith(b"n")
    assert gate.error is not None
    assert said in str(gate.error)


def test_criu_is_told_no_without_an_error(gate: Gate) -> None:
    """By a stage whose caller knows the reason."""
    assert ask(gate, b"post-restore 15\n") == b".n"
    assert gate.error is None


@pytest.mark.parametrize("line", [b"", b"post-rest"])
def test_the_program_is_killed_before_it_asks(gate: Gate, called: list[tuple[str, int]], line: bytes) -> None:
    """As it is when CRIU is killed: it gets no answer, and the reason is not that it asked wrongly."""
    assert ask(gate, line) == b""
    assert (called, gate.error) == ([], None)
    assert ask(gate, b"pre-restore 0\n") == b"y"


def test_who_asks_ends(gate: Gate) -> None:
    """The next one is answered all the same."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(gate.environment["GPUSNAP_GATE"])
    assert ask(gate, b"pre-restore 0\n") == b"y"


def test_no_descriptor_for_who_asks(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a moment: CRIU waits, and is answered then."""
    accept, failed = socket.socket.accept, threading.Event()

    def fail_once(one: socket.socket) -> object:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(one)

    monkeypatch.setattr(socket.socket, "accept", fail_once)
    assert ask(gate, b"pre-restore 0\n") == b"y"
    assert failed.is_set()


def test_who_asks_does_not_read(tmp_path: Path, launcher: Path) -> None:
    """Because it is stopped, say: the work is done all the same, however often it is told."""
    done = threading.Event()

    def work(_: int, busy: Busy) -> bool:
        for _ in range(100_000):
            busy()
        done.set()
        return True

    gate = Gate(str(tmp_path / "gate"), str(launcher), {POST_RESTORE: work})
    with closing(gate), socket.socket(socket.AF_UNIX) as asking:
        asking.connect(gate.environment["GPUSNAP_GATE"])
        asking.send(b"post-restore 7\n")
        assert done.wait(30)
        asking.shutdown(socket.SHUT_RDWR)
    assert gate.error is None


def test_it_works(gate: Gate, called: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is none of the stages."""
    monkeypatch.setattr(gates, "criu_version", lambda: "4.1.1")
    assert gate.works()
    assert called == []


@pytest.mark.parametrize("version", ["unknown", "3.18", "2.99", ""])
def test_a_criu_that_is_too_old(gate: Gate, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "criu_version", lambda: version)
    assert not gate.works()


@pytest.mark.parametrize("version", ["3.18", "4.1"])
def test_the_criu_that_will_run(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """Where the runtime is told of another one than that on PATH."""
    for folder, text in (("path", "4.0" if version == "3.18" else "3.0"), ("named", version)):
        program = tmp_path / folder / "criu"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho Version: {text}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    found = Gate(str(tmp_path / "other"), str(launcher), {}, criu=str(tmp_path / "named" / "criu"))
    with closing(found):
        assert found.works() == (version == "4.1")


def test_an_earlier_launcher_does_not_know_the_stages_of_a_dump(
    launcher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows those of a restore, and passes every other one."""
    monkeypatch.setattr(gates, "criu_version", lambda: "4.1.1")
    script = PROGRAM.replace(
        "with socket", 'if os.environ["CRTOOLS_SCRIPT_ACTION"] != "probe":\n    sys.exit()\nwith socket'
    )
    launcher.write_text(script)
    for stage, works in ((POST_DUMP, False), (POST_RESTORE, True)):
        with closing(Gate(str(tmp_path / stage), str(launcher), {stage: lambda *_: True})) as found:
            assert found.works() == works


BROKEN: dict[str, Callable[[Path], object]] = {
    "not executable": lambda path: path.chmod(0o644),
    "missing": lambda path: path.unlink(),
    "fails": lambda path: path.write_text("#!/bin/sh\nexit 1\n"),
    "asks nobody": lambda path: path.write_text("#!/bin/sh\nexit 0\n"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_launcher_that_cannot(
    gate: Gate, launcher: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier version's, say, or one on a file system that is mounted noexec."""
    monkeypatch.setattr(gates, "criu_version", lambda: "4.1.1")
    BROKEN[how](launcher)
    assert not gate.works()


@contextmanager
def stopped(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that CRIU has run at a stage, and that a signal has stopped."""
    environment = {"PATH": os.environ["PATH"], gates.VARIABLE: path, "CRTOOLS_SCRIPT_ACTION": PRE_RESTORE}
    with subprocess.Popen(["sh", "-c", "kill -STOP $$; exec sleep 600"], env=environment) as child:
        try:
            wait_for(lambda: proc.is_still(child.pid), "the stop")
            yield child
        finally:
            child.kill()


def test_a_program_that_is_stopped(tmp_path: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU would wait for it for good. It is killed, and the restore says why it failed."""
    monkeypatch.setattr(gates, "_STOPPED", 0.3)
    monkeypatch.setattr(gates, "_LOOK", 0.05)
    with closing(Gate(str(tmp_path / "gate"), str(launcher), {})) as gate:
        with stopped(str(tmp_path / "other")) as other, stopped(str(tmp_path / "gate")) as ours:
            assert ours.wait(30) == -signal.SIGKILL
            assert gate.error is not None
            assert f"process {ours.pid}, was stopped by a signal" in str(gate.error)
            assert "SIGSTOP" in gate.error.hint
            assert other.poll() is None
        assert ask(gate, b"probe 0\n") == b"y"


def test_a_program_that_is_stopped_for_a_moment(
    tmp_path: Path, launcher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on, and so may CRIU."""
    monkeypatch.setattr(gates, "_STOPPED", 100.0)
    monkeypatch.setattr(gates, "_LOOK", 0.02)
    with closing(Gate(str(tmp_path / "gate"), str(launcher), {})) as gate, stopped(gate._path) as ours:
        wait_for(lambda: (ours.pid, state_files.owner(ours.pid)[1]) in gate._watched.since, "that it is seen")
        ours.send_signal(signal.SIGCONT)
        wait_for(lambda: not gate._watched.since, "that it is forgotten")
        assert gate.error is None
        assert ours.poll() is None


def test_closed(gate: Gate) -> None:
    """Nobody is answered any more, and no thread stays."""
    gate.close()
    gate.close()
    with pytest.raises(OSError, match="refused"):
        ask(gate, b"pre-restore 0\n")
    assert "gpusnap-gate" not in {thread.name for thread in threading.enumerate()}


def test_no_room_for_a_name(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        Gate(os.path.join(tmp_path, "x" * 200), "/launcher", {})
