"""guard: a container that was left stopped runs on if the command is killed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.operations.checkpointing import guardian
from gpusnap.runtime_shim.process import proc

ID = "c" * 64
# A `gpusnap` that writes down its arguments, and a command that is guarded.
PROGRAM = """#!/bin/sh
echo "$@" >{said}.new; mv {said}.new {said}
"""
COMMAND = """
import sys
from gpusnap.operations.checkpointing.guardian import guard
sys.argv[0] = sys.argv[1]
with guard(sys.argv[2]) as dismiss:
    print("guarded", flush=True)
    how = sys.stdin.readline().strip()
    if how == "dismiss":
        dismiss()
        print("dismissed", flush=True)
        sys.stdin.readline()
    if how == "error":
        raise SystemExit(3)
"""


@pytest.fixture
def said(tmp_path: Path) -> Path:
    """Where the program writes its arguments."""
    return tmp_path / "said"


@pytest.fixture
def command(tmp_path: Path, said: Path) -> list[str]:
    """A command within the block, until it reads a line."""
    program = tmp_path / "gpusnap"
    program.write_text(PROGRAM.format(said=said))
    program.chmod(0o755)
    return [sys.executable, "-c", COMMAND, str(program), ID]


def shells(parent: int) -> list[int]:
    """The children of a process, which are guardians."""
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def guardians() -> list[int]:
    """Those of this process, which has other children, too."""
    return [pid for pid in shells(os.getpid()) if "gpusnap-guardian" in proc.command(pid)]


def test_the_command_is_killed(command: list[str], said: Path) -> None:
    """The container of that ID, and nothing else, is to run on."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "guarded\n"
        [shell] = shells(child.pid)
        assert os.getsid(shell) == shell, "Ctrl-C is not for it"
        watched = os.pidfd_open(shell)
        child.kill()
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        assert poll.poll(60_000), "the guardian ends"
    finally:
        os.close(watched)
    assert said.read_text() == f"recover --left-stopped {ID}\n"


@pytest.mark.parametrize("how", ["done", "error"])
def test_the_command_ends(command: list[str], said: Path, how: str) -> None:
    """With or without an error, it has seen to the container itself; the guardian has ended before it."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        [shell] = shells(child.pid)
        child.stdin.write(f"{how}\n")
        child.stdin.flush()
        assert child.wait() == (3 if how == "error" else 0)
        assert not Path(f"/proc/{shell}").exists()
    assert not said.exists()


def test_it_is_dismissed(command: list[str], said: Path) -> None:
    """Before the container is removed: it must not run on in the middle of that."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        child.stdin.write("dismiss\n")
        child.stdin.flush()
        assert child.stdout.readline() == "dismissed\n"
        assert shells(child.pid) == []
        child.kill()
    assert not said.exists()


def test_it_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has stopped it: the command does not wait for ever."""
    monkeypatch.setattr(guardian, "_ENDING", 0.1)
    with guardian.guard(ID):
        # The kernel shows its arguments only some time after the exec that the command has waited for.
        wait_for(guardians, "the guardian's arguments")
        [shell] = guardians()
        os.kill(shell, signal.SIGSTOP)
    assert not Path(f"/proc/{shell}").exists()


def test_the_guardian_is_killed(command: list[str], said: Path) -> None:
    """The command is not harmed."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        [shell] = shells(child.pid)
        os.kill(shell, signal.SIGKILL)
        child.stdin.write("done\n")
        child.stdin.flush()
        assert child.wait() == 0
    assert not said.exists()


def test_no_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint goes on, and a note says what that means."""

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    descriptors = os.listdir("/proc/self/fd")
    with guardian.guard(ID):
        pass
    assert os.listdir("/proc/self/fd") == descriptors
    assert "gpusnap recover must be run" in capsys.readouterr().err
