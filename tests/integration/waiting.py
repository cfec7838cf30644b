"""Waits for commands with a limit, and says what the machine was doing where one takes longer.

Before a command that took too long is killed, its Python processes are asked for the stacks of their threads:
the commands that the test host has installed print them on stderr at SIGABRT (shimhost.py).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any, AnyStr

import host_state
import shimhost

# Seconds for a process to print its stacks, and for one that was killed to be gone.
_PRINTING, _DYING = 5.0, 5.0
# For a command to end after what a test does with it.
_ENDING = 300.0
_OURS = {str(path) for path in (shimhost.COMMAND, shimhost.ENTRY, shimhost.HOOK)}


class TookTooLong(AssertionError):
    """A command had not ended in time; the message has what the machine was doing then."""


class Process(subprocess.Popen[Any]):
    """In a `with` block: it is killed where the block fails, and has a limit to end after it.

    Popen would wait for ever for a command that is stopped, or that waits for the test.
    """

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raises TookTooLong."""
        if kind is not None:
            self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        end(self, _ENDING)


def end(process: subprocess.Popen[Any], seconds: float) -> int:
    """Wait for a command; its exit code. Raises TookTooLong, and it is killed then."""
    return _wait(process, seconds)[0]


def communicate(process: subprocess.Popen[AnyStr], seconds: float) -> tuple[AnyStr, AnyStr]:
    """Wait for the end of a command and of what it prints, as Popen.communicate. Raises TookTooLong."""
    return _wait(process, seconds, reads=True)[1]


def _wait(
    process: subprocess.Popen[Any], seconds: float, *, reads: bool = False
) -> tuple[int, tuple[Any, Any]]:
    said: tuple[Any, Any] = (None, None)
    try:
        if reads:
            said = process.communicate(timeout=seconds)
        return process.wait(seconds), said
    except subprocess.TimeoutExpired as error:
        state = host_state.describe()
        how = "its output had not" if process.poll() is not None else "it had not"
        _ask_for_stacks(process.pid)
        process.kill()
        try:
            said = process.communicate(timeout=_DYING) if reads else (None, None)
            process.wait(_DYING)
        except subprocess.TimeoutExpired as late:
            said = late.output, late.stderr
        raise TookTooLong(
            f"{how} ended within {seconds:g} s: {_join(process.args)}\n{state}\n"
            + "".join(f"--- what it printed\n{_text(each)}\n" for each in said if each)
        ) from error


def _text(said: str | bytes) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said


def _join(words: Any) -> str:
    return " ".join(map(os.fsdecode, words)) if isinstance(words, list | tuple) else str(words)


def _ask_for_stacks(command: int) -> None:
    """Have the Python processes of a command print their stacks, which ends them."""
    for pid in _list_family(command):
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            continue
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if _OURS.intersection(words[:3]):
                signal.pidfd_send_signal(descriptor, signal.SIGABRT)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(_PRINTING * 1000)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _list_family(root: int) -> list[int]:
    """A process, and what descends from it."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                fields = Path(f"/proc/{name}/stat").read_text(errors="replace").rpartition(")")[2].split()
                parents[int(name)] = int(fields[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found
