"""A thread that makes system calls for a gpusnap that is killed: it gets its registers and mask back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

import pytest
from fakes import DEADLINE, wait_for
from holders import be_killed, blocked

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.remote_syscall import enter_thread
from gpusnap.runtime_shim.process.ptrace.tracee import hold
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.recovery import held_threads

KEY = "b" * 64
# It answers a byte with the next one, and ends by SIGTERM.
PROGRAM = """
import os
while byte := os.read(0, 1):
    os.write(1, bytes([byte[0] + 1]))
"""


@contextmanager
def within_a_call(pid: int) -> Iterator[None]:
    """A thread has other registers than its own, as within a system call for us."""
    with (
        signal_masks.keep_masks(journal.masks(KEY)),
        enter_thread(pid) as remote,
        journal.keep_thread(KEY, pid, remote.saved),
    ):
        registers = bytearray(remote.saved.registers)
        registers[:] = bytes(len(registers) - 8 * 11) + registers[-8 * 11 :]  # the general ones
        remote._tracee.set_registers(bytes(registers))
        yield


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the order of registers")
def test_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program goes on as if nothing had been, and hears its signals."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap/journal"))
    Path(journal.FOLDER).mkdir(parents=True)
    words = [sys.executable, "-S", "-c", PROGRAM]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(b"a")
            assert child.stdout.read(1) == b"b"
            mask = blocked(child.pid, child.pid)
            os.kill(child.pid, signal.SIGSTOP)
            wait_for(lambda: proc.is_still(child.pid), "the process to stand")
            with hold(child.pid, child.pid) as tracee:
                registers = tracee.registers()
            be_killed(within_a_call(child.pid))
            with hold(child.pid, child.pid) as tracee:
                assert tracee.registers() != registers
            held_threads.give_all_back(KEY)
            assert blocked(child.pid, child.pid) == mask
            assert [*journal.threads(KEY)] == []
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write(b"k")
            assert select([child.stdout], [], [], DEADLINE)[0], "it does not go on"
            assert child.stdout.read(1) == b"l"
            child.terminate()
            assert child.wait(60) == -signal.SIGTERM
        finally:
            child.kill()


def test_another_process_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has the PID of one that has ended is let alone."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap/journal"))
    Path(journal.FOLDER).mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with enter_thread(child.pid) as remote, journal.keep_thread(KEY, child.pid, remote.saved):
                monkeypatch.setattr(proc, "is_same", lambda pid, start: False)
                held_threads.give_all_back(KEY)
                assert [pid for pid, _, _ in journal.threads(KEY)] == [child.pid]
        finally:
            child.kill()
