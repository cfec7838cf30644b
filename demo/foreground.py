"""Children of the starter: they get every signal once, and go when the starter goes."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

from report import DemoError

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_OF_MAKE = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the terminal, to the whole foreground group


class Stopped(Exception):
    """A child was told to stop, and has."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


def run(argv: list[str], *, cwd: Path) -> int:
    """Run a command to its end; its exit code, 128+n for a signal. A signal meanwhile goes on to the command.

    When this process is killed, the command gets SIGTERM.
    """
    code, stopped_by = _run(argv, cwd)
    return 128 + stopped_by if code and stopped_by else code


def make(folder: str, *targets: str, checkout: Path) -> None:
    """Build in a folder of the checkout."""
    code, stopped_by = _run(["make", "-s", "-C", folder, *targets], checkout)
    if stopped_by:
        raise Stopped(stopped_by)
    if code:
        raise DemoError(f"`make -C {folder}` failed; its words above say why")


def _run(argv: list[str], cwd: Path) -> tuple[int, int]:
    """The exit code, and the last signal that came meanwhile (0: none)."""
    # A `make` above would have our own one share its job server, and announce every folder.
    env = {name: value for name, value in os.environ.items() if name not in _OF_MAKE}
    libc = ctypes.CDLL(None)
    parent = os.getpid()
    watched = {signal.SIGCHLD, *_FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if os.getppid() != parent:  # killed before the prctl
            os._exit(1)

    stopped_by = 0
    try:
        child = subprocess.Popen(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, preexec_fn=in_child)  # noqa: PLW1509
        while child.poll() is None:
            info = signal.sigwaitinfo(watched)
            if info.si_signo == signal.SIGCHLD:
                continue
            stopped_by = info.si_signo
            if info.si_code != _SI_KERNEL:  # the terminal has told the child itself
                child.send_signal(info.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return (child.returncode if child.returncode >= 0 else 128 - child.returncode), stopped_by
