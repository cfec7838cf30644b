"""The real runtime beside us at a restore: a signal and a log without end take it away, with all below it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, RuntimeFailed
from gpusnap.runtime_shim.base.transaction import Transaction, hold_signals, make_interruptible
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.criu import descendants
from gpusnap.runtime_shim.runtime.criu.run import Invocation
from gpusnap.runtime_shim.snapshot.restoring import foreground
from gpusnap.runtime_shim.snapshot.restoring.foreground import RuntimeThread

# A runtime with a child, and a grandchild in a session of its own.
TREE = 'echo $$ >>"$0"; sh -c "$1" "$0" & wait'
CHILD = 'echo $$ >>"$0"; setsid sleep 600 & echo $! >>"$0"; wait'


def running(file: Path) -> Callable[[Callable[[int], object]], Invocation]:
    def run(started: Callable[[int], object]) -> Invocation:
        with subprocess.Popen(["sh", "-c", TREE, str(file), CHILD]) as process:
            started(process.pid)
            return Invocation(process.wait(), "", "")

    return run


def pids(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()] if file.exists() else []


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A child of ours that has nothing to do with it."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def ended(file: Path, bystander: subprocess.Popen[bytes]) -> None:
    found = pids(file)
    assert len(found) == 3
    assert not any(proc.is_running(pid) for pid in found)
    assert bystander.poll() is None
    assert not descendants.children() & {*found}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_failure_ctrl_c_or_sigterm_runs_them_backwards(
    tmp_path: Path, bystander: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    """Though signals are held back: nothing that the runtime started is left, no other child is touched."""
    file = tmp_path / "pids"

    def send() -> None:
        wait_for(lambda: len(pids(file)) == 3, "the runtime's processes")
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with make_interruptible(), hold_signals(), pytest.raises(Interrupted, match=number.name):
        RuntimeThread(running(file), str(tmp_path / "restore.log")).wait_until_restored(None)
    sender.join()
    ended(file, bystander)


@pytest.mark.parametrize("late", [True, False])
def test_a_pid_that_was_used_again(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A signal that comes when the runtime has ended reaches no process that has its PID by then."""
    real, over = proc.process, threading.Event()

    def run(started: Callable[[int], object]) -> Invocation:
        # What /proc says of the runtime: it began earlier than the bystander, or it is a zombie already.
        with monkeypatch.context() as patched:
            found = real(bystander.pid)
            assert found is not None
            shown = replace(found, start=found.start - 1) if late else None
            patched.setattr(proc, "process", lambda _: shown)
            started(bystander.pid)
        os.kill(os.getpid(), signal.SIGTERM)
        over.wait(60)
        return Invocation(0, "", "")

    file = tmp_path / "pid"
    file.write_text("1")
    thread = RuntimeThread(run, str(tmp_path / "restore.log"))
    with make_interruptible(), Transaction() as transaction, hold_signals():
        assert thread.wait_until_restored(str(file))
        wait_for(lambda: bool(thread._pids), "its start")
        transaction.commit()
        timer = threading.Timer(0.1, over.set)
        timer.start()
        thread.stand_for("crun")
    with pytest.raises(subprocess.TimeoutExpired):
        bystander.wait(0.2)


def test_a_log_without_end(
    tmp_path: Path, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CRIU writes is bounded, and the sentence names the log."""
    monkeypatch.setattr(foreground, "LARGEST_LOG", 1 << 20)
    file, log = tmp_path / "pids", tmp_path / "restore.log"
    log.write_bytes(bytes(1 << 20))

    def grow() -> None:
        wait_for(lambda: len(pids(file)) == 3, "the runtime's processes")
        with log.open("ab") as more:
            more.write(b"x")

    grower = threading.Thread(target=grow)
    grower.start()
    with pytest.raises(RuntimeFailed, match="exceeded 1 MiB") as caught:
        RuntimeThread(running(file), str(log)).wait_until_restored(None)
    grower.join()
    assert "gpusnap verify" in caught.value.hint
    ended(file, bystander)


def test_one_that_ends(tmp_path: Path) -> None:
    """Then it says how."""
    beside = RuntimeThread(lambda started: Invocation(3, "log", ""), str(tmp_path / "restore.log"))
    assert not beside.wait_until_restored(None)
    assert beside.result("crun").code == 3


def test_an_error_of_another_kind(tmp_path: Path) -> None:
    """What nobody foresaw is raised where the runtime is waited for, as a sentence."""

    def fail(started: Callable[[int], object]) -> Invocation:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    beside = RuntimeThread(fail, str(tmp_path / "restore.log"))
    assert not beside.wait_until_restored(None)
    with pytest.raises(GpusnapError, match="Input/output error"):
        beside.result("crun")
