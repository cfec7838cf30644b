"""Podman as a child of ours: what it knows of a container, a checkpoint, a restore.

It runs in a process group of its own, so that what a terminal sends comes to us alone. We hand a signal on to
the runtime that works for Podman, which undoes what it did and has Podman say so; where none runs yet, to
Podman. Where a checkpoint has ended the container, and Podman exports it, nobody gets it: with --rm there is
nothing else left of the container than what Podman then writes. What Podman prints is for us: of a failure,
the sentence.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import field
from typing import IO, Any

from gpusnap.engines import podman_options
from gpusnap.engines.podman_options import Option
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.errors import ContainerError, GpusnapError, Interrupted, reason, split_code
from gpusnap.runtime_shim.log import NOTE, note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.child_process import Child
from gpusnap.user_errors import Killed, NotFound

_RUNTIME = "gpusnap-runtime"
_PODMAN = ("podman",)
# In the environment of Podman, which a restore's runtime has from conmon.
_MARK = "GPUSNAP_CALLER"
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EVERY = 0.25
# Seconds for an answer. Podman waits for the lock of each container that it tells of, which a checkpoint or
# restore by somebody else has for minutes.
_PATIENCE = 900.0
# Seconds that Podman may take to go when it was killed.
_DYING = 5.0
_LONGEST = 64 << 10
# Bytes on disk of what a command in a container prints, from which on only what comes next is kept.
_MOST = 4 << 20
# How Podman names what its runtime did: by its command line, or by what it wrote into its log.
_OF_THE_RUNTIME = re.compile(r"failed: (?:exit status|signal: )|OCI runtime|conmon|gpusnap: ")
# How Podman says that the runtime was killed: its own child at a checkpoint, a child of conmon at a restore.
_KILLED = re.compile(r"^Error: .*(?:failed: signal: killed|no logs from conmon)", re.MULTILINE)
# libpod, CRImportCheckpoint, of a pod that a container cannot be restored into.
_OTHER_POD = re.compile(r"^Podman failed: pod \S+ does not share the \w+ namespace")
_LOG_LINE = re.compile(r'^time="[^"]*" level=\w+ msg="(.*)"$')


@dataclass(frozen=True, slots=True)
class Container:
    """What Podman says of a container."""

    id: str
    name: str
    runtime: str
    """Its name in containers.conf, or a path."""
    status: str
    """running, paused, exited, …"""
    checkpoint_path: str = ""
    """Where its last checkpoint is in Podman's storage, if there is one."""
    init: int = 0
    """The PID of its first process; 0 where it does not run."""
    auto_remove: bool = False
    """Podman removes it when it ends, as with --rm, and its checkpoint with it."""
    upper: str = ""
    """The folder of the files that it has changed (overlay); empty where the storage has no such folder."""
    checkpointed: bool = False
    """A checkpoint ended it, and Podman can restore it from there."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Its named volumes, and where on this host each has its files."""
    pod: str = ""
    """The ID of its pod."""
    dependencies: tuple[str, ...] = ()
    """The IDs of containers whose namespaces it uses, or that have to run before it."""
    unrestored: tuple[Option, ...] = ()
    """What it has that Podman does not bring back."""
    image: str = ""
    """The name of its image, by which a restore looks for that."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels and annotations; of two with one name, the annotation."""


class Inspection:
    """What Podman tells of a container: asked when this is made, and waited for when it is needed.

    with Inspection(wanted) as asked:
        …                               what takes time, and does not need it
        found = asked.container()
    """

    def __init__(self, wanted: str, *, seconds: float | None = None) -> None:
        """By name or by ID, or the beginning of one. `seconds`: how long its answer is waited for."""
        self._wanted = wanted
        self._seconds = _PATIENCE if seconds is None else seconds
        self._found: Container | None = None
        self._failed: GpusnapError | None = None
        self._question: _Question | None = None
        try:
            self._question = _Question("container", "inspect", "--", wanted)
        except GpusnapError as error:
            self._failed = error

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def container(self) -> Container:
        """The answer, the same each time. Raises NotFound, GpusnapError."""
        if self._found is None and self._failed is None:
            assert self._question is not None
            try:
                self._found = _told(self._wanted, self._question.answer(self._seconds))
            except GpusnapError as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed
        assert self._found is not None
        return self._found


def container(wanted: str) -> Container:
    """By name or by ID, or the beginning of one. Raises NotFound, GpusnapError."""
    return _told(wanted, _ask("container", "inspect", "--", wanted))


def _told(wanted: str, done: _Done) -> Container:
    if done.code:
        if "no such container" in done.err.lower():
            hint = "podman ps --all lists them" if os.geteuid() == 0 else "root's are only seen by root"
            raise NotFound(f"there is no container {wanted}", hint=hint)
        raise GpusnapError(f"Podman does not tell of the container {wanted}: {_sentence(done)}")
    try:
        (found,) = parse_json(done.out)
        return _container(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GpusnapError(
            f"what Podman says of the container {wanted} is not understood: {error!r}"
        ) from error


def _container(found: Mapping[str, Any]) -> Container:
    """Of what `podman container inspect` prints. Raises what a document of another form does."""
    state, driver = found["State"], found.get("GraphDriver") or {}
    own = found.get("StaticDir") or ""
    return Container(
        id=str(found["Id"]),
        name=str(found["Name"]),
        runtime=str(found["OCIRuntime"]),
        status=str(state["Status"]),
        # Podman keeps the path only of a checkpoint that it called done (libpod, ContainerState).
        checkpoint_path=str(state.get("CheckpointPath") or (os.path.join(own, "checkpoint") if own else "")),
        init=int(state.get("Pid") or 0),
        auto_remove=bool((found.get("HostConfig") or {}).get("AutoRemove")),
        upper=str((driver.get("Data") or {}).get("UpperDir") or ""),
        checkpointed=bool(state.get("Checkpointed")),
        volumes={
            str(each["Name"]): str(each.get("Source") or "")
            for each in found.get("Mounts") or ()
            if each.get("Type") == "volume" and each.get("Name")
        },
        pod=str(found.get("Pod") or ""),
        dependencies=tuple(map(str, found.get("Dependencies") or ())),
        unrestored=tuple(podman_options.unrestored(found)),
        image=str(found.get("ImageName") or ""),
        labels={**_texts(found, "Labels"), **_texts(found, "Annotations")},
    )


def _texts(found: Mapping[str, Any], key: str) -> dict[str, str]:
    values = (found.get("Config") or {}).get(key) or {}
    return {str(name): str(value) for name, value in values.items()}


class Listing:
    """The IDs of all containers: asked for when this is entered, and waited for when they are needed."""

    def __enter__(self) -> Listing:
        """Raises GpusnapError where Podman cannot be run."""
        self._question = _Question("ps", "--all", "--quiet", "--no-trunc")
        return self

    def __exit__(self, *_: object) -> None:
        self._question.close()

    def ids(self) -> set[str]:
        """Once. Raises GpusnapError."""
        done = self._question.answer(_PATIENCE)
        if done.code:
            raise GpusnapError(f"Podman does not list its containers: {_sentence(done)}")
        return set(done.out.split())


def ids() -> set[str]:
    """Of all containers. Raises GpusnapError."""
    with Listing() as asked:
        return asked.ids()


def status(container_id: str, *, command: Sequence[str], seconds: float) -> str:
    """What a Podman, named with its global options, has a container as; "" where it knows none of that ID.

    It answers when nobody restores or checkpoints the container: who does has its lock. Raises GpusnapError
    where it has not answered by then.
    """
    found = _inspected(container_id, "{{.State.Status}}", command=command, seconds=seconds)
    if found == "":
        raise GpusnapError(
            f"Podman says nothing of the container {container_id}", hint="see what podman ps --all says"
        )
    return found or ""


def full_id(wanted: str, *, seconds: float) -> str:
    """The ID of the container that has exactly this name; "" where Podman knows none. Raises GpusnapError."""
    told = _inspected(wanted, "{{.Id}} {{.Name}}", command=_PODMAN, seconds=seconds) or ""
    found, _, name = told.partition(" ")
    return found if name == wanted else ""


def _inspected(wanted: str, what: str, *, command: Sequence[str], seconds: float) -> str | None:
    """What a Podman tells of a container, by a template; None where it knows none. Raises GpusnapError."""
    words = ("container", "inspect", "--format", what, "--", wanted)
    done = _ask(*words, command=command, seconds=seconds)
    if not done.code:
        return done.out.strip()
    if "no such container" in done.err.lower():
        return None
    raise GpusnapError(f"Podman does not tell of the container {wanted}: {_sentence(done)}")


def said(*words: str, wanted: str) -> str:
    """What a command of Podman's prints that only asks, or is done at once. Raises GpusnapError."""
    done = _ask(*words)
    if done.code:
        raise GpusnapError(f"Podman does not tell {wanted}: {_sentence(done)}")
    return done.out


def execute(
    container_id: str, words: Sequence[str], environment: Mapping[str, str], *, seconds: float
) -> tuple[int | None, str]:
    """Run a command in a running container: podman-exec(1). Its exit code, and what it and Podman said.

    None for the code where it has not ended by then: Podman is killed, and what it began in the container
    goes on. Raises GpusnapError where Podman cannot be run.
    """
    options = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    with _started(("exec", *options, container_id, *words), os.environ) as (child, out, err):
        code: int | None = None
        end = time.monotonic() + seconds
        try:
            while code is None and (left := end - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    code = child.wait(min(left, _EVERY))
                for file in (out, err):
                    _shorten(file)
        finally:
            if child.poll() is None:
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_DYING)
        done = _ended(child, out, err) if child.poll() is not None else _Done(0, "", "")
    return code, f"{done.out}\n{done.err}".replace("\0", "")


def _shorten(file: IO[bytes]) -> None:
    """Free the disk of what is printed without end; its writer goes on behind a hole."""
    if os.fstat(file.fileno()).st_blocks * 512 > _MOST:
        os.ftruncate(file.fileno(), 0)


def exists(kind: str, wanted: str) -> bool:
    """Whether Podman has a pod, an image or the like of that name or ID: podman-pod-exists(1) and others.

    Raises GpusnapError where Podman cannot say.
    """
    done = _ask(kind, "exists", wanted)
    if done.code not in (0, 1):
        raise GpusnapError(f"Podman does not tell whether there is a {kind} {wanted[:80]}: {_sentence(done)}")
    return done.code == 0


def remove(container_id: str) -> None:
    """Remove a container that does not run. Raises GpusnapError.

    Without --force: Podman looks whether it runs while it has its lock, and not as we did before.
    """
    done = _ask("rm", container_id)
    if done.code:
        raise GpusnapError(f"the container {container_id[:12]} cannot be removed: {_sentence(done)}")


def pause(container_id: str) -> None:
    """Pause a container that runs. Raises GpusnapError."""
    done = _ask("pause", container_id)
    if done.code:
        raise GpusnapError(f"the container {container_id[:12]} cannot be paused: {_sentence(done)}")


def go_on(container_id: str) -> None:
    """Let a container go on, if it is paused. Raises GpusnapError."""
    done = _ask("unpause", container_id)
    if not done.code:
        return
    if _inspected(container_id, "{{.State.Status}}", command=_PODMAN, seconds=_PATIENCE) == "paused":
        raise GpusnapError(
            f"the container {container_id[:12]} cannot be unpaused: {_sentence(done)}",
            hint=f"podman unpause {container_id[:12]}",
        )


def check(found: Container, *, asleep: bool = False) -> None:
    """Raise ContainerError where gpusnap cannot checkpoint it as it is. `asleep`: it is suspended."""
    if found.status == "paused" and not asleep:
        raise ContainerError(
            f"the container {found.name} is paused, and Podman checkpoints none that is",
            hint=f"podman unpause {found.name}",
            code="GPS-203",
        )
    if found.status not in ("running", "paused"):
        raise not_running(found)
    if not is_ours(found.runtime):
        raise ContainerError(
            f"the container {found.name} runs under {found.runtime}, which knows no GPUs",
            hint=f"create it with podman --runtime {_RUNTIME} run …, or make that the runtime in "
            "containers.conf",
            code="GPS-202",
        )


def not_running(found: Container) -> ContainerError:
    """The error for one that does not run: of one that a checkpoint ended, podman start loses the memory."""
    if found.checkpointed:
        return ContainerError(
            f"the container {found.name} is not running: a checkpoint ended it",
            hint=f"podman container restore {found.name} restores it; podman start would lose its memory",
            code="GPS-201",
        )
    return ContainerError(
        f"the container {found.name} is not running: it is {found.status}",
        hint=f"podman start {found.name}",
        code="GPS-201",
    )


def checkpoint(
    of: Container,
    archive: str,
    options: Sequence[str],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> bool:
    """Have Podman checkpoint a container into an archive.

    `tick` is called several times a second. `say` is given a sentence when a signal came: what is done of it.
    Whether a signal came that nobody heeded: it is the caller's to say. Raises GpusnapError with the sentence
    of who failed; Interrupted where a signal came and it failed.
    """
    words = ("container", "checkpoint", "--export", archive, *options, of.id)
    first = proc.process(of.init) if of.init else None

    def ended() -> bool:
        return first is not None and (not proc.same(first.pid, first.start) or proc.dying(first.pid))

    return _work(words, {}, tick, ended, say=say)[1]


def restore(
    archive: str,
    options: Sequence[str],
    environment: Mapping[str, str],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Have Podman make a container from an archive and run it on; its ID. Parameters as in `checkpoint`.

    Raises as that does.
    """
    words = ("container", "restore", "--import", archive, *options)
    return _work(words, environment, tick, say=say)[0]


def restore_in_place(
    of: Container,
    options: Sequence[str],
    environment: Mapping[str, str],
    *,
    tick: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Have Podman restore a container that a checkpoint ended, from its storage; its ID. Raises likewise."""
    return _work(("container", "restore", *options, of.id), environment, tick, say=say)[0]


@dataclass(frozen=True, slots=True)
class _Done:
    code: int
    out: str
    err: str


class _Question:
    """A Podman that only tells something, or does it at once."""

    def __init__(self, *words: str, command: Sequence[str] = _PODMAN) -> None:
        """Raises GpusnapError where Podman cannot be run."""
        self._stack = ExitStack()
        self._child, self._out, self._err = self._stack.enter_context(_started(words, os.environ, command))

    def answer(self, seconds: float) -> _Done:
        """Wait for it, once. Raises GpusnapError where it has not ended by then."""
        with self._stack:
            try:
                self._child.wait(seconds)
            except subprocess.TimeoutExpired:
                self._kill()
                raise GpusnapError(
                    f"Podman has not answered within {seconds:g} s",
                    hint="another podman command may be at work on the container: wait for it",
                ) from None
            return _ended(self._child, self._out, self._err)

    def close(self) -> None:
        """Nobody waits for the answer any more."""
        with self._stack:
            if self._child.returncode is None:
                self._kill()

    def _kill(self) -> None:
        self._child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits for a disk does not go
            self._child.wait(_DYING)


def _ask(*words: str, command: Sequence[str] = _PODMAN, seconds: float | None = None) -> _Done:
    return _Question(*words, command=command).answer(_PATIENCE if seconds is None else seconds)


def _work(
    words: Sequence[str],
    environment: Mapping[str, str],
    tick: Callable[[], None],
    ended: Callable[[], bool] = lambda: False,
    *,
    say: Callable[[str], None],
) -> tuple[str, bool]:
    """What Podman prints, and whether a signal came. `ended`: from then on Podman is left alone."""
    mark = secrets.token_hex(8)
    told = False
    with (
        _passing_on(mark, ended) as relay,
        _started(words, {**os.environ, **environment, _MARK: mark}) as (child, out, err),
    ):
        relay.to(child.pid)
        while child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_EVERY)
            tick()
            if relay.came and not told:
                told = True
                say(_heeded(words[1], relay))
        done = _ended(child, out, err)
    if done.code:
        if done.code < 0 and not relay.passed:
            raise Killed(
                f"podman {words[0]} {words[1]} was killed by {signal.Signals(-done.code).name}, and what it "
                "had begun may go on",
                hint="run gpusnap recover, which says what has become of it, then try again",
                code="GPS-902",
            )
        if relay.passed:
            said, code = split_code(_own(done))
            raise Interrupted(said or f"podman {words[0]} {words[1]} was interrupted", code=code)
        if not _own(done) and _KILLED.search(done.err):
            raise GpusnapError(
                f"{_RUNTIME}, which Podman runs for the {words[1]}, was killed or ended without a message",
                hint="run gpusnap recover, then try again",
                code="GPS-902",
            )
        said, code = split_code(_sentence(done))
        if not code and _OTHER_POD.search(said):
            raise GpusnapError(
                said,
                hint="make a pod that shares it (podman pod create --share …), and name that with --pod POD",
                code="GPS-522",
            )
        raise GpusnapError(said, code=code)
    for line in done.err.splitlines():
        _, ours, text = line.partition(f"gpusnap: {NOTE}")
        if ours:
            note(text)
    return done.out.strip(), bool(relay.came)


@contextmanager
def _started(
    words: Sequence[str], environment: Mapping[str, str], command: Sequence[str] = _PODMAN
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    # Files: nobody has to read along, and a child of Podman's may keep them open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = Child(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=dict(environment),
                process_group=0,
            )
        except OSError as error:
            raise GpusnapError(
                f"podman cannot be run: {reason(error)}",
                hint="install Podman, and see that PATH has it",
                code="GPS-901",
            ) from error
        yield child, out, err


def _ended(child: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> _Done:
    return _Done(child.returncode, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST * 16))
    return file.read().decode(errors="replace")


class _Relay:
    """Signals on their way to who works for Podman; those that come before it runs are kept for it."""

    def __init__(self, mark: str, ended: Callable[[], bool]) -> None:
        self.came: list[int] = []
        self.passed = False
        self._mark, self._podman, self._ended = mark, 0, ended

    def to(self, podman: int) -> None:
        """It runs, as this PID."""
        self._podman = podman
        for number in list(self.came):
            self._send(number)

    def pass_on(self, number: int, _frame: object) -> None:
        """A handler of signals."""
        self.came.append(number)
        if self._podman:
            self._send(number)

    def _send(self, number: int) -> None:
        ended = self._ended()  # before the runtime is looked for, which may end in between
        worker = _worker(self._podman, self._mark)
        if ended and not worker:
            return
        self.passed = True
        with suppress(ProcessLookupError):
            os.kill(worker or self._podman, number)


def _heeded(command: str, relay: _Relay) -> str:
    """What is done of a signal."""
    name = signal.Signals(relay.came[0]).name
    if relay.passed:
        return f"{name}: what the {command} has done is being undone"
    return f"{name}: the container has ended; what Podman exports of it is written to the end first"


@contextmanager
def _passing_on(mark: str, ended: Callable[[], bool]) -> Iterator[_Relay]:
    """Hand signals on while the block runs."""
    relay = _Relay(mark, ended)
    if threading.current_thread() is not threading.main_thread():
        yield relay  # nobody else gets a signal
        return
    ours = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, relay.pass_on) for number in ours}
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _worker(podman: int, mark: str) -> int:
    """The runtime that works for Podman at this moment; 0 where there is none."""
    for pid in proc.pids():
        # The parent first: who is asked for its command line may keep us waiting.
        parent = proc.parent(pid)
        below = parent == podman
        # At a restore it is a child of conmon, which is nobody's.
        if not below and proc.comm(parent) != "conmon":
            continue
        if "--image-path" in proc.command(pid) and (below or _has(pid, mark)):
            return pid
    return 0


def _has(pid: int, mark: str) -> bool:
    return proc.environment(pid).get(_MARK) == mark


def _sentence(done: _Done) -> str:
    """What went wrong, in the words of who failed first: gpusnap's own, or else Podman's."""
    own = _own(done)
    if own:
        return own
    lines = [line.strip() for line in done.err.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("Error: "):
            return f"Podman failed: {line.removeprefix('Error: ')}"
    last = _LOG_LINE.sub(r"\1", lines[-1]) if lines else f"exit code {done.code}"
    return f"Podman failed: {last}"


def _own(done: _Done) -> str:
    """What gpusnap-runtime said; "" where it said nothing, or Podman failed when it had done its work."""
    lines = done.err.splitlines()
    ends = [line for line in lines if line.startswith("Error: ")]
    if ends and not _OF_THE_RUNTIME.search(ends[-1]):
        return ""  # then what the runtime said is a note
    for line in lines:
        before, ours, text = line.partition("gpusnap: ")
        if ours and "level=warning" not in before and not text.startswith(NOTE):
            return text.strip().removesuffix('"')
    return ""


def is_ours(runtime: str) -> bool:
    """Whether that runtime is gpusnap's, by its own name or another's in whose place it is."""
    if os.path.basename(runtime) == _RUNTIME:
        return True
    path = runtime
    if not runtime.startswith("/"):
        done = _ask("--runtime", runtime, "info", "--format", "{{.Host.OCIRuntime.Path}}")
        path = done.out.strip() if done.code == 0 else ""
    return os.path.basename(os.path.realpath(path)) == _RUNTIME
