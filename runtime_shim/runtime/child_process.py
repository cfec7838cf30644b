"""Child processes: one class that starts one, and one function that runs it and returns its output."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.deadlines import wait_for_end
from gpusnap.runtime_shim.base.errors import GpusnapError, NotStarted, RuntimeFailed, raise_as, reason
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.runtime import find as locate


@dataclass(frozen=True, slots=True)
class Finished:
    """A child that has ended; output is text, with undecodable bytes escaped."""

    code: int
    """Its exit code; 128 + the signal's number if a signal ended it."""
    out: str
    err: str


# The longest time for poll(2) in seconds: its argument is an int of milliseconds.
_LONGEST = 86400.0
# Seconds for a killed child to end; one that waits for a disk in the kernel may take longer.
_PATIENCE = 10.0


class Child(subprocess.Popen[bytes]):
    """A child process. If this constructor raises an exception, the child does not run.

    subprocess.Popen also raises after the fork, if it cannot close a descriptor or read what the child
    reports. Nobody would know of that child, so it is killed here. Raises OSError and ValueError as Popen
    does.

    Popen.wait with a timeout polls, in the end every 50 ms (cpython, Lib/subprocess.py). This one returns
    when the child ends: a command that runs three programs takes 50 to 100 ms less.
    """

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        try:
            with put_off_signals():  # one after the fork, before the PID is known, would leave it
                super().__init__(list(argv), **options)
        except BaseException:
            if getattr(self, "pid", None) is not None and self.returncode is None:
                with suppress(OSError, subprocess.TimeoutExpired):
                    self.kill()
                    self.wait(timeout=_PATIENCE)
            raise

    def wait(self, timeout: float | None = None) -> int:
        """Like Popen.wait: return its exit code. Raises TimeoutExpired after `timeout` seconds."""
        if timeout is None or self.returncode is not None:
            return super().wait(timeout)
        deadline = time.monotonic() + timeout
        with suppress(OSError):  # no descriptor can be opened
            descriptor = os.pidfd_open(self.pid)
            try:
                wait_for_end(descriptor, min(max(timeout, 0.0), _LONGEST))
            finally:
                os.close(descriptor)
        return super().wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kill it, and reap it; one that waits in the kernel, for a disk for example, is left behind."""
        self.kill()
        with suppress(subprocess.TimeoutExpired):
            self.wait(_PATIENCE)
        if self.returncode is None:
            self.returncode = -signal.SIGKILL  # otherwise the end of its `with` block would wait


def output() -> IO[bytes]:
    """Return a file without a name, in RAM, for a child's output. Raises OSError.

    It is a file, so that nobody must read it meanwhile, and children of the child may keep it open. It is in
    RAM, so that Podman can be asked while /tmp is full.
    """
    return open(os.memfd_create("gpusnap-output"), "w+b")


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    capture: bool = True,
    own_session: bool = False,
    keep: Sequence[int] = (),
    started: Callable[[int], object] | None = None,
    seconds: float | None = None,
) -> Finished:
    """Run a program to its end.

    With `capture`, it reads /dev/null and its output is collected. Without, descriptors 0 to 2 are passed on
    untouched, because CRIU gives them to the restored container. `own_session` protects it from a terminal's
    Ctrl-C. `keep`: more descriptors that it gets. `started` gets its PID. Raises NotStarted, and
    RuntimeFailed if it is not done within `seconds` and was killed; the caller judges the exit code.
    GpusnapError if its output cannot be read, once it has ended.
    """
    stream = subprocess.PIPE if capture else None
    with raise_as(NotStarted, f"{argv[0]} cannot be started"):
        process = Child(
            argv,
            stdin=subprocess.DEVNULL if capture else None,
            stdout=stream,
            stderr=stream,
            env=dict(locate.environment() if env is None else env),
            # Podman passes descriptors to crun (--preserve-fds); crun and runc close those that they do not
            # pass on.
            close_fds=capture,
            pass_fds=tuple(keep) if capture else (),
            start_new_session=own_session,
        )
    with process:
        if started is not None:
            started(process.pid)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.end()
            raise RuntimeFailed(
                f"{argv[0]} did not finish within {seconds:g} s",
                hint="run it manually, and check what it waits for",
            ) from None
        except OSError as error:  # the end of the block waits for it
            raise GpusnapError(
                f"the output of {argv[0]} cannot be read: {reason(error)}", hint="try again"
            ) from error
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Finished(code, _text(out), _text(err))


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "backslashreplace")
