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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from gpusnap.base.progress import Progress
from gpusnap.engines import podman
from gpusnap.oci.base.dataclass import dataclass
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

_PODMAN = "podman"
_TIMEOUT = 30.0
# In the environment of the command and of all that it starts.
_MARK = "GPUSNAP_HOOK"
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Pair:
    """A command before, and the one that undoes it or follows, by the names of their annotations."""

    before: str
    after: str


CHECKPOINT = Pair("pre-checkpoint", "post-restore")
SUSPEND = Pair("pre-suspend", "post-resume")
_EVENTS = tuple(event for pair in (CHECKPOINT, SUSPEND) for event in (pair.before, pair.after))


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
        _run(found, pair.before, progress)
    except (GpusnapError, KeyboardInterrupt) as error:
        undo(found, pair, progress)
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(f"{pair.before} of {found.name} was interrupted") from error
        raise
    return True


def run_after(found: podman.Container, pair: Pair, progress: Progress, *, done: str = "") -> None:
    """Run the command after, if defined, in a running container. Raises like `run_before`.

    `done`: what has been done even if the command fails, for the error.
    """
    if not _words(found, pair.after):
        return
    try:
        _run(found, pair.after, progress)
    except ContainerError as error:
        if not done:
            raise
        raise ContainerError(f"{done}, but {error}", hint=error.hint, code=error.code) from error


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


@contextmanager
def run_around_suspend(engine: str, asked: podman.Inspection) -> Iterator[None]:
    """Run the command before a suspend, and the one after a resume only if the block fails and it runs.

    `asked`: Podman's description of a container of its own. Raises like `run_around_checkpoint`.
    """
    if engine != _PODMAN:
        yield
        return
    found = asked.container()
    with _keep_alone(found), _run_before_and_undo(found, SUSPEND, Progress(shown=False)):
        yield


def run_after_resume(engine: str, container_id: str, asked: podman.Inspection | None = None) -> None:
    """Run the command after a resume, in the resumed container. Raises SettingsError, ContainerError.

    `asked`: Podman's description, if it was requested by a name or an ID of this container. A container keeps
    its labels.
    """
    if engine == _PODMAN:
        found = _get_container(container_id, asked)
        run_after(found, SUSPEND, Progress(shown=False), done=f"{found.name} is resumed")


def _get_container(container_id: str, asked: podman.Inspection | None) -> podman.Container:
    if asked is not None:
        with suppress(GpusnapError):
            found = asked.container()
            if found.id == container_id and found.init:
                return found
    return podman.inspect_container(container_id)


def _run(found: podman.Container, event: str, progress: Progress) -> None:
    """Run a command until its end or its deadline. Raises ContainerError."""
    words, seconds, mark = _words(found, event), _timeout(found), secrets.token_hex(16)
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
    raise ContainerError(
        f"the command {event} of the container {found.name} {how}{f': {last}' if last else ''}",
        hint=f"try it: podman exec {found.name} {shlex.join(words)}; the annotation "
        f"{settings.ANNOTATION_PREFIX}hook-timeout gives it more time",
        code="GPS-240",
    )


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
