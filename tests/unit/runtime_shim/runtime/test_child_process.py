"""Child processes: what they said, and what is said of them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import GpusnapError, NotStarted, RuntimeFailed
from gpusnap.runtime_shim.runtime import child_process


def test_output_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has ended when that is said."""
    pids: list[int] = []

    def fail(process: subprocess.Popen[bytes], **_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess.Popen, "communicate", fail)
    with pytest.raises(
        GpusnapError, match=f"the output of {sys.executable} cannot be read: Cannot allocate memory"
    ):
        child_process.run([sys.executable, "-c", ""], started=pids.append)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def children() -> set[int]:
    """Who was started by this thread and has not been waited for."""
    return {
        int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    }


@pytest.mark.parametrize("name", ["read", "close"])
def test_a_failure_after_the_fork(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """subprocess.Popen raises although the child runs: that child is killed, and it is waited for."""
    before = children()
    real = getattr(os, name)

    def fail(descriptor: int, *rest: int) -> object:
        if children() <= before:
            return real(descriptor, *rest)
        monkeypatch.setattr(os, name, real)
        real(descriptor, *rest)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(NotStarted, match=r"^sleep cannot be started: Input/output error$"):
        child_process.run(["sleep", "60"])
    assert getattr(os, name) is real  # it was met
    assert children() == before


def test_no_program() -> None:
    before = children()
    with pytest.raises(NotStarted, match=r"^/nonexistent cannot be started: it does not exist$"):
        child_process.run(["/nonexistent"])
    assert children() == before


@pytest.mark.parametrize("stuck", [False, True])
def test_one_that_takes_too_long(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """It is killed, and left behind if the kernel does not let it end."""
    before = children()
    waits = child_process.Child.wait

    def wait(self: child_process.Child, timeout: float | None = None) -> int:
        if stuck and self.returncode is None:
            assert timeout is not None, "a wait without a deadline"
            raise subprocess.TimeoutExpired("sleep", timeout)
        return waits(self, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(child_process.Child, "wait", wait)
        with pytest.raises(RuntimeFailed, match=r"^sleep did not finish within 0\.2 s"):
            child_process.run(["sleep", "60"], seconds=0.2)
    left = children() - before
    for pid in left:
        os.waitpid(pid, 0)
    assert len(left) == stuck


def test_a_wait_ends_with_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look again and again: subprocess.Popen would be asleep for up to 50 ms when the child ends."""

    def sleep(seconds: float) -> None:
        raise AssertionError(f"it slept for {seconds} s")

    monkeypatch.setattr(time, "sleep", sleep)
    child = child_process.Child([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert child.wait(60) == 3
    assert child.wait(60) == 3


def test_a_wait_with_a_deadline() -> None:
    with child_process.Child(["sleep", "60"]) as child:
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.05)
        assert time.monotonic() - began >= 0.05
        child.kill()
        assert child.wait(60) == -signal.SIGKILL


def test_a_wait_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again and again then, as subprocess.Popen does."""

    def fail(pid: int, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    assert child_process.Child([sys.executable, "-c", "import sys; sys.exit(3)"]).wait(60) == 3
