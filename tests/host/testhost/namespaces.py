"""Run one command below an init of its own, in namespaces of its own.

    caller ── fork ──> init (PID 1 there) ── fork ──> command

The kernel kills the init when the caller dies, and everything in the PID namespace when the init dies; what
lives in the other namespaces (mounts, interfaces, shared memory) goes with the last process. So nothing
here has to be undone, whichever process is killed and however.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from . import kernel
from .report import HostError, say

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SI_KERNEL = 0x80  # <asm-generic/siginfo.h>: sent by the terminal, to the whole foreground group
FOREVER_S = 3600.0  # between two looks at nothing
GRACE_S = 10.0  # a command that was told to stop has this long

# As `env`, `docker run` and the shells have it
EXIT_SETUP_FAILED, EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 125, 126, 127


def run(
    argv: Sequence[str],
    *,
    setup: Callable[[], None],
    env: dict[str, str],
    teardown: Callable[[], None] = lambda: None,
    thaw: Callable[[], None] = lambda: None,
) -> int:
    """Run `argv` in a new PID namespace and return its exit code (128+n for a signal).

    `setup` and `teardown` run in the init, before the command starts and after it ended: the other
    namespaces, the mounts and the root are theirs. `thaw` runs here, after an init that would not stop was
    killed: a frozen process would keep it from being gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # SIGCHLD may be ignored by inheritance, and then no exit code would be kept for us.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched: set[int] = {signal.SIGCHLD, *FORWARDED}
    parent_alive, alive = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    try:
        # Only children enter the new PID namespace, and the first of them is its init. This process can make
        # no more children once that init is gone, so it returns to its own namespace for them.
        with _own_pid_namespace():
            kernel.unshare(kernel.CLONE_NEWPID)
            init = os.fork()
            if init == 0:
                os.close(alive)
                _init(argv, setup, teardown, env, before, parent_alive)
        return _watch(init, watched, thaw)
    finally:
        os.close(alive)
        os.close(parent_alive)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _own_pid_namespace:
    """On leaving, children of this process are born in its own PID namespace again."""

    def __enter__(self) -> None:
        self._fd = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def __exit__(self, *_: object) -> None:
        try:
            kernel.setns(self._fd, kernel.CLONE_NEWPID)
        finally:
            os.close(self._fd)


def _watch(init: int, watched: set[int], thaw: Callable[[], None]) -> int:
    """Wait for the init, pass signals on to it, and lose patience after GRACE_S."""
    deadline = None
    while True:
        patience = FOREVER_S if deadline is None else max(0.0, deadline - time.monotonic())
        info = signal.sigtimedwait(watched, patience)
        if info is None:
            if deadline is None:
                continue
            say(f"the command did not stop within {GRACE_S:.0f} s; killing it")
            os.kill(init, signal.SIGKILL)
            thaw()
            deadline = time.monotonic() + GRACE_S
        elif info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(init, os.WNOHANG)
            if pid:
                return _exit_code(status)
        elif info.si_code != SI_KERNEL:  # the terminal has told the command itself
            os.kill(init, info.si_signo)
            if info.si_signo in (signal.SIGTERM, signal.SIGHUP):
                deadline = deadline or time.monotonic() + GRACE_S


def _exit_code(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _init(
    argv: Sequence[str],
    setup: Callable[[], None],
    teardown: Callable[[], None],
    env: dict[str, str],
    mask: set[int],
    parent_alive: int,
) -> None:
    """PID 1: set up, start the command, reap until it ends, leave with its exit code. Never returns."""
    code = EXIT_SETUP_FAILED
    try:
        kernel.die_with_parent(parent_alive)
        setup()
        command = os.fork()
        if command == 0:
            _exec(argv, env, mask)
        code = _reap(command)
        teardown()
    except (HostError, OSError) as error:
        say(f"failed: {error}")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _exec(argv: Sequence[str], env: dict[str, str], mask: set[int]) -> None:
    """Become the command. Never returns."""
    code = EXIT_NOT_FOUND
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        # Python ignores these two; a command expects the defaults.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(argv[0], list(argv), env)
    except OSError as error:
        say(f"cannot run {argv[0]}: {error.strerror}")
        if not isinstance(error, FileNotFoundError):
            code = EXIT_NOT_EXECUTABLE
    finally:
        sys.stderr.flush()
        os._exit(code)


def _reap(command: int) -> int:
    """Reap whatever dies until the command does; pass signals on to it."""
    watched = {signal.SIGCHLD, *FORWARDED}
    while True:
        info = signal.sigwaitinfo(watched)
        if info.si_signo != signal.SIGCHLD:
            if info.si_code != SI_KERNEL:
                os.kill(command, info.si_signo)
            continue
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == command:
                return _exit_code(status)
            if pid == 0:
                break
