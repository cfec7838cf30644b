"""Runs Podman as a child process, and finds the message of a failure.

It runs in a process group of its own, so that signals of a terminal reach only gpusnap. Podman's output is
read by gpusnap, which reports the message of a failure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason
from gpusnap.runtime_shim.base.log import NOTE
from gpusnap.runtime_shim.base.stop_signals import put_off_signals
from gpusnap.runtime_shim.runtime.child_process import Child, output

RUNTIME = "gpusnap-runtime"
PODMAN = ("podman",)
PATIENCE = 900.0
"""Seconds for an answer. Podman waits for the lock of each container that it describes; a checkpoint or
restore may hold it for minutes."""
DYING = 5.0
"""Seconds for Podman to end after it was killed."""
_LONGEST = 64 << 10
# How Podman reports its runtime's errors: with the command line, or with lines of the runtime's log.
_OF_THE_RUNTIME = compile_later(r"failed: (?:exit status|signal: )|OCI runtime|conmon|gpusnap: ")
_LOG_LINE = compile_later(r'^time="[^"]*" level=\w+ msg="(.*)"$')


@dataclass(frozen=True, slots=True)
class FinishedPodman:
    """A Podman process that has ended."""

    code: int
    out: str
    err: str


class Question:
    """A Podman process for a query or a short command."""

    def __init__(self, *words: str, command: Sequence[str] = PODMAN) -> None:
        """Raises GpusnapError if Podman cannot be run."""
        self._stack = ExitStack()
        self._child, self._out, self._err = self._stack.enter_context(start(words, os.environ, command))

    def answer(self, seconds: float | None = None) -> FinishedPodman:
        """Wait for the answer, once; PATIENCE by default. Raises GpusnapError if Podman has not ended."""
        seconds = PATIENCE if seconds is None else seconds
        with self._stack:
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                self._kill()
                raise GpusnapError(
                    f"Podman did not respond within {seconds:g} s",
                    hint="another podman command may be working on the container: wait for it",
                ) from None
            return finish(self._child, self._out, self._err)

    def wait_for_end(self) -> None:
        """Wait for some seconds until Podman has ended, whatever signals come."""
        with put_off_signals(), suppress(subprocess.TimeoutExpired):
            self._child.wait(DYING)

    def close(self) -> None:
        """Stop waiting for the answer."""
        with self._stack:
            if self._child.returncode is None:
                self._kill()

    def _kill(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a disk does not end
            self._child.wait(DYING)


def ask(*words: str, command: Sequence[str] = PODMAN, seconds: float | None = None) -> FinishedPodman:
    return Question(*words, command=command).answer(seconds)


def ask_and_finish(*words: str) -> FinishedPodman:
    """Like `ask`, for a command that the caller undoes after a signal's exception: Podman has ended then.

    Killed, it would leave its runtime at work; left alone, it could be overtaken by what undoes it. It is
    left alone if it does not end within DYING seconds: it may wait for a lock.
    """
    question: Question | None = None
    try:
        with put_off_signals():  # one that comes while it starts would have it killed (Child)
            question = Question(*words)
        return question.answer()
    except BaseException:
        if question is not None:
            question.wait_for_end()
        raise


@contextmanager
def start(
    words: Sequence[str], environment: Mapping[str, str], command: Sequence[str] = PODMAN
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    with ExitStack() as files:
        try:
            out, err = files.enter_context(output()), files.enter_context(output())
            child = Child(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environment),
                process_group=0,
            )
        except OSError as error:
            lack = advise(error)
            raise GpusnapError(
                f"podman cannot be run: {reason(error)}",
                hint=lack or "install Podman, and check that it is in PATH",
                code="" if lack else "GPS-901",
            ) from error
        yield child, out, err


def finish(child: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> FinishedPodman:
    return FinishedPodman(child.returncode, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST * 16))
    return file.read().decode(errors="replace")


def sentence(done: FinishedPodman) -> str:
    """Return the message of the first failure: gpusnap's own, or else Podman's."""
    own = find_runtime_error(done)
    if own:
        return own
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error: "):
            return f"Podman failed: {line.removeprefix('Error: ')}"
    last = _LOG_LINE.sub(r"\1", lines[-1]) if lines else f"exit code {done.code}"
    return f"Podman failed: {last}"


def find_runtime_error(done: FinishedPodman) -> str:
    """Return gpusnap-runtime's error; "" if there is none, or if Podman failed after its success."""
    lines = done.err.splitlines()
    ends = [line for line in lines if line.startswith("Error: ")]
    if ends and not _OF_THE_RUNTIME.search(ends[-1]):
        return ""  # then the runtime's message is a note
    for line in lines:
        before, ours, text = line.partition("gpusnap: ")
        if ours and "level=warning" not in before and not text.startswith(NOTE):
            return text.strip().removesuffix('"')
    return ""
