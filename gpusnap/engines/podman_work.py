"""Checkpoints and restores with Podman: long commands with progress, which a signal undoes.

A signal is passed on to the runtime that works for Podman, which undoes its work and makes Podman report it;
if no runtime is running yet, to Podman. After a checkpoint has ended the container, while Podman exports it,
signals are ignored: with --rm, nothing is left of the container except the file that Podman then writes.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress

from gpusnap.base.user_errors import Killed
from gpusnap.engines.podman import Container
from gpusnap.engines.podman_command import (
    RUNTIME,
    FinishedPodman,
    find_runtime_error,
    finish,
    sentence,
    start,
)
from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import MAKE_ROOM, GpusnapError, Interrupted, split_code
from gpusnap.runtime_shim.base.log import NOTE, note
from gpusnap.runtime_shim.base.stop_signals import handle_signals, note_signal
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.podman import dev_shm

# In the environment of Podman; the runtime of a restore inherits it from conmon.
_MARK = "GPUSNAP_CALLER"
_EVERY = 0.25
# Podman's messages about a killed runtime: its own child at a checkpoint, a child of conmon at a restore.
_KILLED = compile_later(r"^Error: .*(?:failed: signal: killed|no logs from conmon)", re.MULTILINE)
# Go's texts of ENOSPC and EDQUOT, where Podman itself has written.
_FULL = compile_later(r"no space left on device|disk quota exceeded")
# containers/storage, archive.TarWithOptions: logged only. The tar ends there, and lacks all later files.
_CUT_OFF = compile_later(r"Can't add file (.*?) to tar: archive/tar: missed writing \d+ bytes")
# A file of a container's /dev/shm (libpod, Container.mountSHM).
_IN_SHM = compile_later(r"(/.*-containers/([0-9a-f]{64})/userdata)/shm/.+")
# libpod, CRImportCheckpoint, about a pod into which a container cannot be restored.
_OTHER_POD = compile_later(r"^Podman failed: pod \S+ does not share the \w+ namespace")


def checkpoint(
    of: Container,
    archive: str,
    options: Sequence[str],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Checkpoint a container into an archive with Podman.

    `tick` is called several times a second. `say` gets a sentence about the reaction to a signal. Returns
    whether a signal was ignored, which the caller reports. Raises GpusnapError with the message of the
    failed program; Interrupted if it failed after a signal.
    """
    words = ("container", "checkpoint", "--export", archive, *options, of.id)
    first = proc.process(of.init) if of.init else None

    def is_over() -> bool:
        return first is not None and not proc.is_still_running(first.pid, first.start)

    return _work(words, {}, tick, is_over, say=say)[1]


def restore(
    options: Sequence[str],
    environment: Mapping[str, str],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
    has_begun: Callable[[], bool] = lambda: False,
    restored: Callable[[str], None] = lambda container: None,
) -> str:
    """Restore a container with Podman and run it; return its ID.

    `options`: of podman container restore: --import and an archive, or the ID of a container that a
    checkpoint ended, and others. `has_begun`: whether the runtime has begun. If it has, and has ended, a
    signal comes too late: Podman only records the result. `restored` gets the ID as soon as the container
    runs; no signal raises before that. Other parameters and errors as in `checkpoint`.
    """
    words = ("container", "restore", *options)
    return _work(words, environment, tick, has_begun, say=say, done=restored)[0]


def _work(
    words: Sequence[str],
    environment: Mapping[str, str],
    tick: Callable[[], None],
    is_over: Callable[[], bool] = lambda: False,
    *,
    say: Callable[[str], None],
    done: Callable[[str], None] = lambda out: None,
) -> tuple[str, bool]:
    """Return Podman's output, and whether a signal came.

    `is_over`: once true, signals are ignored while no runtime works.

    `done` gets the output if Podman succeeds, while signals are still passed on.
    """
    mark = secrets.token_hex(8)
    told = False
    with (
        _pass_signals_on(mark, is_over) as relay,
        start(words, {**os.environ, **environment, _MARK: mark}) as (child, out, err),
    ):
        relay.to(child.pid)
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_EVERY)
            with suppress(OSError):  # a full disk behind stderr must not abandon a Podman at work
                tick()
            if relay.came and not told:
                told = True
                say(_decide_signal(words[1], relay))
        ended = finish(child, out, err)
        if not ended.code:
            _check_whole(ended, words[-1])
            done(ended.out.strip())
    if ended.code:
        if ended.code < 0 and not relay.passed:
            raise Killed(
                f"podman {words[0]} {words[1]} was killed by {signal.Signals(-ended.code).name}, and what "
                "it started may still be running",
                hint="run gpusnap recover, which reports the state of the container, then try again",
                code="GPS-902",
            )
        if relay.passed:
            said, code = split_code(find_runtime_error(ended))
            raise Interrupted(said or f"podman {words[0]} {words[1]} was interrupted", code=code)
        if not find_runtime_error(ended) and _KILLED.search(ended.err):
            raise GpusnapError(
                f"{RUNTIME}, which Podman runs for the {words[1]}, was killed or exited without a message",
                hint="run gpusnap recover, then try again",
                code="GPS-902",
            )
        said, code = split_code(sentence(ended))
        if not code and _OTHER_POD.search(said):
            raise GpusnapError(
                said,
                hint="create a pod that shares it (podman pod create --share …), and name it with --pod POD",
                code="GPS-522",
            )
        if not code and _FULL.search(said):
            raise GpusnapError(said, hint=MAKE_ROOM, code=DiskFull.code)
        raise GpusnapError(said, code=code)
    for line in ended.err.splitlines():
        _, ours, text = line.partition(f"gpusnap: {NOTE}")
        if ours:
            note(text)
    return ended.out.strip(), bool(relay.came)


def _check_whole(ended: FinishedPodman, of: str) -> None:
    """Raise GpusnapError if Podman has left out files, though it reports success.

    `of`: the ID of the container that was checkpointed.
    """
    lost = [match[1] for match in _CUT_OFF.finditer(ended.err) if not _is_discarded(match[1], of)]
    if lost:
        raise GpusnapError(
            "Podman's archive lacks files of the container, because one of them became shorter while Podman "
            "read it",
            hint="try again; without --leave-running, no process of the container changes its files",
            code="GPS-907",
        )


def _is_discarded(path: str, of: str) -> bool:
    """Whether Podman writes such a file of /dev/shm to /dev/null, because gpusnap itself keeps it."""
    if path.startswith("/dev/shm/"):
        return True
    own = _IN_SHM.fullmatch(path)
    return own is not None and (own[2] != of or os.path.islink(os.path.join(own[1], dev_shm.LINK[0])))


class _Relay:
    """Passes signals on to the process that works for Podman; those that come before it runs are kept."""

    def __init__(self, mark: str, is_over: Callable[[], bool]) -> None:
        self.came: list[int] = []
        self.passed = False
        self._mark, self._podman, self._is_over = mark, 0, is_over

    def to(self, podman: int) -> None:
        self._podman = podman
        for number in list(self.came):
            self._send(number)

    def pass_on(self, number: int, _frame: object) -> None:
        note_signal(number)
        self.came.append(number)
        if self._podman:
            self._send(number)

    def _send(self, number: int) -> None:
        ended = self._is_over()  # before the runtime is searched for, which may end in between
        worker = _worker(self._podman, self._mark)
        if ended and not worker:
            return
        self.passed = True
        with suppress(ProcessLookupError):
            os.kill(worker or self._podman, number)


def _decide_signal(command: str, relay: _Relay) -> str:
    """Return a sentence about the reaction to a signal."""
    name = signal.Signals(relay.came[0]).name
    if relay.passed:
        return f"{name}: undoing the {command}"
    if command == "restore":
        return f"{name}: the container is restored already; Podman completes its records first"
    return f"{name}: the container has stopped; completing Podman's export first"


@contextmanager
def _pass_signals_on(mark: str, is_over: Callable[[], bool]) -> Iterator[_Relay]:
    relay = _Relay(mark, is_over)
    with handle_signals(relay.pass_on):
        yield relay


def ignore_signals() -> AbstractContextManager[None]:
    """Ignore a second signal during the cleanup after the first one.

    The handlers do nothing: child processes would inherit SIG_IGN (execve(2)).
    """
    return handle_signals(lambda *_: None)


def _worker(podman: int, mark: str) -> int:
    """Return the PID of the runtime that works for Podman at this moment; 0 if there is none."""
    began = proc.start_time(podman)
    for pid in proc.pids():
        # First what is no child of theirs, or older: reading the command line of a process may block.
        parent = proc.parent(pid)
        below = parent == podman
        # At a restore, it is a child of conmon, which is no child of Podman.
        if (not below and proc.comm(parent) != "conmon") or proc.start_time(pid) < began:
            continue
        with suppress(GpusnapError):  # the kernel does not answer about it, which it does about a runtime
            if "--image-path" in proc.command(pid) and (below or _has(pid, mark)):
                return pid
    return 0


def _has(pid: int, mark: str) -> bool:
    return proc.environment(pid).get(_MARK) == mark
