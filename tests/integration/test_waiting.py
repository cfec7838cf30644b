"""What a test says where a command takes too long: waiting.py and host_state.py."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import host_state
import pytest
import waiting
from storehost import COMMAND
from support import DEADLINE, STATE, Container, faults, good, podman, run, until
from waiting import TookTooLong

LOCKS = Path("/proc/locks")


def test_it_says_what_kept_a_command(crun: None) -> None:
    """Which lock, who has it, who waits for it, and the Python stack of the gpusnap that asked."""
    Container.start("w")
    memory = next((STATE / "mem").iterdir())
    lock = os.open(memory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with subprocess.Popen(
            [COMMAND, "gpus"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as command:
            until(lambda: "-> FLOCK  ADVISORY  WRITE " in LOCKS.read_text(), "the wait of its child")
            with pytest.raises(TookTooLong) as caught:
                waiting.communicate(command, 0.1)
    finally:
        os.close(lock)
    said = str(caught.value)
    assert f"it had not ended within 0.1 s: {COMMAND} gpus" in said
    assert f"{command.pid} gpusnap: S, in " in said
    assert f"{os.getpid()} has {memory} open: " in said
    assert "Fatal Python error: Aborted" in said
    assert "gpusnap: S, in locks_lock_inode_wait" in said
    assert 'question_process.py", line ' in said


def test_a_command_that_leaves_its_output_open(crun: None) -> None:
    """It has ended, and who has its output open is listed."""
    code = "import subprocess; print('begun', flush=True); subprocess.Popen(['sleep', '100'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as command:
        command.wait(DEADLINE)
        with pytest.raises(TookTooLong) as caught:
            waiting.communicate(command, 0.1)
    assert "its output had not ended within 0.1 s" in str(caught.value)
    assert ": sleep 100\n" in str(caught.value)
    assert "--- what it printed\nbegun\n" in str(caught.value)
    run("pkill", "-x", "sleep")


def fail(command: waiting.Process) -> None:
    with command:
        command.send_signal(signal.SIGSTOP)
        raise AssertionError("not so")


def test_a_block_that_fails_ends_its_command() -> None:
    """A command that is stopped, too."""
    command = waiting.Process(["sleep", "100"])
    with pytest.raises(AssertionError, match="not so"):
        fail(command)
    assert command.returncode == -signal.SIGKILL


def test_a_command_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a block that succeeds."""
    monkeypatch.setattr(waiting, "_ENDING", 0.1)
    command = waiting.Process(["sleep", "100"])
    with pytest.raises(TookTooLong, match=r"it had not ended within 0\.1 s: sleep 100"), command:
        pass
    assert command.returncode == -signal.SIGKILL


def test_what_is_frozen(crun: None) -> None:
    """And the faults that softgpu is asked for."""
    container = Container.start("w")
    pid = container.pid
    good(podman("pause", "w"))
    faults("checkpoint hang=1")
    said = host_state.describe()
    frozen = next(
        line for line in said.splitlines() if line.startswith("/sys/fs/cgroup/") and f" {pid}" in line
    )
    assert "frozen 1" in frozen
    assert f"{host_state.FAULTS}: checkpoint hang=1" in said
