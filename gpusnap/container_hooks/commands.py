"""Commands within a container, before a checkpoint and after a restore, that its annotations or labels name.

    io.gpusnap.pre-checkpoint   before a checkpoint: an engine drops its cache, or finishes its requests
    io.gpusnap.post-restore     after a restore; also where the checkpoint failed, or left it running
    io.gpusnap.pre-suspend      the same two for `gpusnap suspend` and `gpusnap resume`
    io.gpusnap.post-resume
    io.gpusnap.hook-timeout     seconds for each, 30 by default

The value is a line for the container's shell (sh -c), or a JSON list of words for a container without one.
`podman exec` runs it before Podman makes the checkpoint: nothing of it is in the image. Processes that it
leaves are killed. As the value comes with the container, it gets no more rights than this has: its user, its
files, its network.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

from gpusnap.base.progress import Progress
from gpusnap.container_hooks import pairs
from gpusnap.container_hooks.pairs import CHECKPOINT, PAIRS, SUSPEND, Pair
from gpusnap.engines import podman
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim import settings
from gpusnap.runtime_shim.base.errors import (
    ContainerError,
    GpusnapError,
    Interrupted,
    SettingsError,
    printable,
)
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension

_PODMAN = "podman"
_TIMEOUT = 30.0
# In the environment of the command and of all that it starts.
_MARK = "GPUSNAP_HOOK"
_LONGEST = 300

_EVENTS = tuple(event for pair in PAIRS for event in (pair.before, pair.after))


def run_before(found: podman.Container, pair: Pair, progress: Progress) -> bool:
    """Run the command before, if defined; return whether it is. If it fails, the one after undoes it.

    Raises SettingsError, before anything is run; ContainerError, Interrupted.
    """
    words = _words(found, pair.before)
    _words(found, pair.after)
    _timeout(found)
    if not words:
        return False
    try:
        _run(found, pair, pair.before, progress)
    except (GpusnapError, KeyboardInterrupt) as error:
        undo(found, pair, progress)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"{pair.before} of {found.name} was interrupted") from error
        raise
    return True


def run_after(found: podman.Container, pair: Pair, progress: Progress, *, done: str = "") -> None:
    """Run the command after, if defined, in a running container; it is due no more. Raises like `run_before`.

    `done`: what has been done even if the command fails, for the error. If the command cannot be run, or is
    interrupted, it is still due.
    """
    try:
        if _words(found, pair.after):
            _run(found, pair, pair.after, progress)
    except ContainerError as error:
        pairs.close(found.id, pair)
        if not done:
            raise
        raise ContainerError(f"{done}, but {error}", hint=error.hint, code=error.code) from error
    pairs.close(found.id, pair)


def run_after_restore(found: podman.Container, progress: Progress) -> None:
    """Run the command after in a container that is restored. Raises like `run_around_checkpoint`."""
    _run_after_alone(found, CHECKPOINT, progress, done="the container is restored")


def _run_after_alone(found: podman.Container, pair: Pair, progress: Progress, *, done: str) -> None:
    """Run the command after, and keep others from beginning a checkpoint or a suspend meanwhile."""
    with ExitStack() as alone:
        try:
            alone.enter_context(_keep_alone(found))
        except GpusnapError as error:
            told = ContainerError(f"{done}, but {error}", hint=error.hint, code=error.code)
            if _words(found, pair.after):
                told.add_hint(f"gpusnap recover runs the command {pair.after} then")
            raise told from error
        run_after(found, pair, progress, done=done)


def run_due(found: podman.Container, pair: Pair) -> None:
    """Run the command after, which a killed gpusnap has not; if it fails, it is still due.

    Raises like `run_before`.
    """
    _run(found, pair, pair.after, Progress(shown=False))
    pairs.close(found.id, pair)


def defines(found: podman.Container, event: str) -> bool:
    """Return whether a container has a command for an event. Raises SettingsError."""
    return bool(_words(found, event))


def undo(found: podman.Container, pair: Pair, progress: Progress) -> None:
    """Run the command after, in a container that still runs; an error is only a note."""
    with suppress(KeyboardInterrupt):
        try:
            now = podman.inspect_container(found.id)
            if now.status == "running":
                run_after(now, pair, progress)
        except GpusnapError as error:
            note(str(error), code=error.code)


def run_after_bring_back(found: podman.Container) -> None:
    """Run the command after a restore in a container whose checkpoint failed; an error is only a note.

    If there is a command before the checkpoint, `run_around_checkpoint` does that.
    """
    if not _words(found, CHECKPOINT.before):
        undo(found, CHECKPOINT, Progress(shown=False))


@contextmanager
def _run_before_and_undo(found: podman.Container, pair: Pair, progress: Progress) -> Iterator[bool]:
    """Run the command before, and the one after if the block fails; yield whether there is one before."""
    ran = run_before(found, pair, progress)
    try:
        yield ran
    except BaseException:
        if ran:
            undo(found, pair, progress)
        raise


def _keep_alone(found: podman.Container) -> AbstractContextManager[None]:
    """Keep others from beginning a checkpoint or a suspend of a container that has any command."""
    has_commands = any(f"{settings.ANNOTATION_PREFIX}{event}" in found.labels for event in _EVENTS)
    return overrides.keep_commands_alone(found.id) if has_commands else nullcontext()


@contextmanager
def run_around_checkpoint(
    found: podman.Container, progress: Progress, *, leave_running: bool
) -> Iterator[None]:
    """Run both around a checkpoint: the one after only if the container still runs then.

    Raises like `run_before`, and ContainerError if the one after fails in a container that was left running,
    or if another command of gpusnap is at this.
    """
    with _keep_alone(found):
        with _run_before_and_undo(found, CHECKPOINT, progress) as ran:
            yield
        if ran and leave_running:
            run_after(found, CHECKPOINT, progress, done="the checkpoint is complete")
        elif ran:
            pairs.close(found.id, CHECKPOINT)  # a restore runs it


@contextmanager
def run_around_suspend(engine: str, asked: podman.Inspection) -> Iterator[None]:
    """Run the command before a suspend, and the one after a resume only if the block fails and it runs.

    `asked`: Podman's description of a container of its own. Raises like `run_around_checkpoint`.
    """
    if engine != _PODMAN:
        yield
        return
    found = asked.container()
    with _keep_alone(found):
        with _run_before_and_undo(found, SUSPEND, Progress(shown=False)) as ran:
            yield
        if ran:
            pairs.close(found.id, SUSPEND)  # a resume runs it


@contextmanager
def run_after_resume(suspended: Suspension, asked: podman.Inspection | None = None) -> Iterator[None]:
    """Run the command after a resume, in the container that the block resumes, unless the block fails.

    `asked`: Podman's description, if it was requested by a name or an ID of this container. A container keeps
    its labels. Raises SettingsError, ContainerError.
    """
    if suspended.engine != _PODMAN:
        yield
        return
    # Whether there is such a command is not known yet, and the container should not wait for Podman's answer.
    noted = pairs.note_ahead(suspended.container, SUSPEND, init=suspended.init[0])
    try:
        yield
    except BaseException as error:
        if noted and not _may_be_resumed(suspended, error):
            pairs.close(suspended.container, SUSPEND)
        raise
    found = _get_container(suspended.container, asked)
    _run_after_alone(found, SUSPEND, Progress(shown=False), done=f"{found.name} is resumed")


def _may_be_resumed(suspended: Suspension, error: BaseException) -> bool:
    """Return whether a resume that has failed may be complete, or may be completed by `gpusnap recover`."""
    with suppress(GpusnapError):
        now = suspensions.read(suspended.key)
        if now is None:  # it is resumed; unless we were interrupted, by another command
            return isinstance(error, KeyboardInterrupt | Interrupted)
        return now.stage is not suspensions.Stage.SUSPENDED
    return True


def _get_container(container_id: str, asked: podman.Inspection | None) -> podman.Container:
    if asked is not None:
        with suppress(GpusnapError):
            found = asked.container()
            if found.id == container_id and found.init:
                return found
    return podman.inspect_container(container_id)


def _run(found: podman.Container, pair: Pair, event: str, progress: Progress) -> None:
    """Run a command of a pair until its end or its deadline. Raises ContainerError, GpusnapError."""
    words, seconds, mark = _words(found, event), _timeout(found), secrets.token_hex(16)
    _note(found, pair, event, mark)
    progress.stage(f"{event} of {found.name}")
    environment = {_MARK: mark, "GPUSNAP_EVENT": event}
    try:
        code, said = podman.execute(found.id, words, environment, seconds=seconds)
    finally:
        _kill_rest(found, mark)
    if code == 0:
        return
    last = printable(said.strip().rpartition("\n")[2])[-_LONGEST:]
    how = f"did not end within {seconds:g} s" if code is None else f"ended with exit code {code}"
    more = f"; the annotation {settings.ANNOTATION_PREFIX}hook-timeout gives it more time"
    raise ContainerError(
        f"the command {event} of the container {found.name} {how}{f': {last}' if last else ''}",
        hint=f"try it: podman exec {found.name} {shlex.join(words)}{more if code is None else ''}",
        code="GPS-240",
    )


def _note(found: podman.Container, pair: Pair, event: str, mark: str) -> None:
    """Note that a command is about to be run, and kill the one that a killed gpusnap was running.

    Raises GpusnapError before the first of the pair; the one after is run in any case.
    """
    earlier = pairs.find(found.id, pair)
    if earlier is not None and earlier.mark and not earlier.at_work:
        _kill_rest(found, earlier.mark)
    with suppress(GpusnapError) if event == pair.after else nullcontext():
        if _words(found, pair.after):
            pairs.note(found.id, pair, init=found.init, mark=mark)


def _kill_rest(found: podman.Container, mark: str) -> None:
    with suppress(GpusnapError):
        for each in containers.processes(found.init, found.id):
            if proc.environment(each.pid).get(_MARK) == mark and proc.is_same(each.pid, each.start):
                pidfd.send(each.pid, signal.SIGKILL)


def _words(found: podman.Container, event: str) -> list[str]:
    """Return the command for an event; empty if there is none. Raises SettingsError."""
    name = f"{settings.ANNOTATION_PREFIX}{event}"
    text = found.labels.get(name, "").strip()
    if not text.startswith("["):
        return ["sh", "-c", text] if text else []
    try:
        words = parse_json(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not words or not all(map(_is_argument, words)):
        raise SettingsError(
            f"{name} of the container {found.name} is {text[:80]!r}; it must be a shell command line, or "
            "a JSON list of strings",
            hint='write it as curl -X POST localhost:8000/sleep, or as ["/app/sleep", "now"]',
        )
    return words


def _is_argument(word: object) -> bool:
    """Return whether execve(2) takes it: JSON also has strings with NUL, and with half a character."""
    try:
        return isinstance(word, str) and b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def _timeout(found: podman.Container) -> float:
    """Return the seconds for each command. Raises SettingsError."""
    name = f"{settings.ANNOTATION_PREFIX}hook-timeout"
    text = found.labels.get(name, "")
    if not text:
        return _TIMEOUT
    with suppress(ValueError):
        if 0.1 <= (seconds := float(text)) <= 3600:
            return seconds
    raise SettingsError(
        f"{name} of the container {found.name} is {text[:40]!r}; it must be a number of seconds from 0.1 "
        "to 3600",
        hint="create the container again with another value",
    )
