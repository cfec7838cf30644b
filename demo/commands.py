"""Commands of the story: printed as they are run, ended in order when the user wants to stop.

A signal raises nothing where it arrives. A command that is under way is let finish, since a Podman that is
killed half-way leaves half a container; then `Stopped` is raised. A second signal kills the command.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from report import DemoError, say

DEADLINE_S = 180.0
_POLL_S = 0.02
_WIDTH = 92
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")


class Stopped(Exception):
    """The user wants to stop."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    out: str
    err: str
    seconds: float


class Commands:
    """Runs commands; holds the signals while it lives."""

    def __init__(self) -> None:
        self._asked = 0
        self.tidying = False
        """From here on a signal stops nothing but the command that hangs."""
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._asked += 1

    def run(self, *argv: str, show: bool = True) -> Done:
        """Run a command, shown as a user would type it. Raises DemoError with its reason if it fails."""
        code, done = self.attempt(*argv, show=show)
        if code:
            raise DemoError(f"{_named(argv)} failed ({code}): {_reason(done.err)}")
        return done

    def attempt(self, *argv: str, show: bool = False) -> tuple[int, Done]:
        """Run a command; its exit code, negative for a signal, is returned."""
        self.stop_if_asked()
        if show:
            say(typed(argv))
        begin, asked, killed = time.monotonic(), self._asked, False
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            # In a group of its own, so that the terminal's Ctrl-C reaches this process alone.
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0)
            while child.poll() is None:
                late = time.monotonic() - begin > DEADLINE_S
                if not killed and (late or self._asked > asked + 1):
                    os.killpg(child.pid, signal.SIGKILL)
                    killed = True
                time.sleep(_POLL_S)
            out.seek(0)
            err.seek(0)
            done = Done(out.read(), err.read(), time.monotonic() - begin)
        self.stop_if_asked()
        if killed:
            raise DemoError(f"{_named(argv)} did not end within {DEADLINE_S:.0f} s and was killed")
        return child.returncode, done

    def until(self, condition: Callable[[], T], what: str, *, deadline: float = 60.0) -> T:
        """Wait until the condition gives something, and return it. Raises DemoError at the deadline."""
        end = time.monotonic() + deadline
        while not (found := condition()):
            self.stop_if_asked()
            if time.monotonic() > end:
                raise DemoError(f"{what} did not come within {deadline:.0f} s")
            time.sleep(0.1)
        return found

    def stop_if_asked(self) -> None:
        """Raise Stopped if a signal has come."""
        if self._asked and not self.tidying:
            raise Stopped


def typed(argv: tuple[str, ...]) -> str:
    """A command as a shell takes it, broken into lines that fit a screen."""
    lines, line = [], "$"
    units: list[str] = []
    for word in map(shlex.quote, argv):
        if units and units[-1].startswith("--") and " " not in units[-1] and not word.startswith("-"):
            units[-1] += f" {word}"  # an option and its value stay together
        else:
            units.append(word)
    for word in units:
        if len(line) + len(word) > _WIDTH - 3:
            lines.append(line + " \\")
            line = "     "
        line += " " + word
    return "\n".join([*lines, line])


def _named(argv: tuple[str, ...]) -> str:
    """A Podman command without its options and arguments."""
    words = argv[3:] if argv[1] == "--runtime" else argv[1:]
    return f"`{' '.join([argv[0], *itertools.takewhile(str.isalpha, words)])}`"


def _reason(err: str) -> str:
    """gpusnap's own sentence, where there is one; else the command's last words, and all of them before."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    own = [line[line.index("gpusnap: ") :] for line in lines if "gpusnap: " in line]
    if not own:
        say(err.rstrip(), file=sys.stderr)
    return (own or lines[-1:] or ["it said nothing"])[0]
