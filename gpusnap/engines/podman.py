"""Podman's information about containers, and its short commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from gpusnap.base.user_errors import NotFound
from gpusnap.engines import podman_options
from gpusnap.engines.podman_command import (
    DYING,
    PATIENCE,
    PODMAN,
    RUNTIME,
    FinishedPodman,
    Question,
    ask,
    ask_and_finish,
    finish,
    sentence,
    start,
)
from gpusnap.engines.podman_options import Option
from gpusnap.oci.base import files
from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.deadlines import wait_for_end
from gpusnap.runtime_shim.base.errors import AlreadyPaused, ContainerError, GpusnapError, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime.podman import conmon

RANDOM_ID = compile_later(r"[0-9a-f]{64}", re.ASCII)
"""An ID as Podman and Kubernetes make them; other users of containerd give names."""
# Seconds for which a list of containers counts as new.
_FRESH = 1.0
# Seconds between checks of a command in a container.
_EVERY = 0.25
# Limit on its output on disk in bytes; above it, only later output is kept.
_MOST = 4 << 20


# Seconds for a Podman to pause a container, whose lock is free: another Podman has just described it.
_PAUSING = 60.0
# Seconds for a Podman to kill and remove a container; no signal ends the wait for it.
_REMOVAL = 120.0
# The container has ended, and Podman has not cleaned up: whoever waits for its end does that, unless killed.
_NOT_CLEANED_UP = "stopped"
_ENDED = ("exited", _NOT_CLEANED_UP)


@dataclass(frozen=True, slots=True)
class Container:
    """Podman's description of a container."""

    id: str
    name: str
    runtime: str
    """Its name in containers.conf, or a path."""
    status: str
    """running, paused, exited, …"""
    checkpoint_path: str = ""
    """The path of its last checkpoint in Podman's storage, if there is one."""
    init: int = 0
    """The PID of its first process; 0 if it does not run."""
    conmon: int = 0
    """The PID of its conmon; 0 if it does not run."""
    auto_remove: bool = False
    """Podman removes it when it ends, as with --rm, together with its checkpoint."""
    upper: str = ""
    """The folder with the files that it has changed (overlay); empty if the storage has no such folder."""
    checkpointed: bool = False
    """A checkpoint ended it, and Podman can restore it from its storage."""
    checkpointed_at: str = ""
    """When that was (RFC 3339)."""
    started_at: str = ""
    """When it was last started or restored (RFC 3339)."""
    restored: bool = False
    """It was restored from a checkpoint, and not started anew since (libpod, ContainerState)."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Its named volumes, with the folder on this host for each."""
    pod: str = ""
    """The ID of its pod."""
    dependencies: tuple[str, ...] = ()
    """The IDs of containers whose namespaces it uses, or that must run before it."""
    unrestored: tuple[Option, ...] = ()
    """Its options that Podman does not restore."""
    image: str = ""
    """The name of its image, by which a restore finds the image."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its labels and annotations; if both have a name, the annotation."""
    created: str = ""
    """When Podman created it, or began to import it (RFC 3339)."""
    restarts: bool = False
    """Podman may start it anew when it cleans up after its end (--restart)."""
    on_failure: str = ""
    """What its health check does if it fails: kill, restart, stop; empty if nothing (--health-on-failure)."""

    @property
    def is_not_cleaned_up(self) -> bool:
        """Return whether it has ended, and Podman has not cleaned up."""
        return self.status == _NOT_CLEANED_UP

    @property
    def is_listed_as_running(self) -> bool:
        """Return whether Podman lists it as running, although neither it nor its conmon does.

        conmon has told Podman of the end, in a file. A Podman that was killed during a checkpoint had removed
        that, and not yet recorded the end (libpod, Container.checkpoint): no other Podman notices it.
        """
        pids = (self.init, self.conmon)
        return self.status == "running" and all(pids) and not any(map(proc.is_running, pids))

    def has_checkpoint(self) -> bool:
        """Return whether it has ended, and Podman has a complete checkpoint of it.

        Podman has recorded none if it was killed, too, and forgets it when the host is restarted (libpod,
        resetContainerState). CRIU writes the inventory last (criu, cr-dump.c).
        """
        if self.status not in _ENDED and not self.is_listed_as_running:
            return False
        if self.checkpointed:
            return True
        with suppress(OSError):
            return files.exists(os.path.join(self.checkpoint_path, "inventory.img"))
        return False


class Inspection:
    """Podman's description of a container: requested at once, and waited for when it is needed.

    with Inspection(wanted) as asked:
        …                               slow work that does not need it
        found = asked.container()
    """

    def __init__(self, wanted: str, *, seconds: float | None = None) -> None:
        """`wanted`: a name, an ID or a prefix of an ID. `seconds`: how long to wait for the answer."""
        self._wanted = wanted
        self._seconds = seconds
        self._found: Container | None = None
        self._failed: GpusnapError | None = None
        self._question: Question | None = None
        try:
            self._question = Question("container", "inspect", "--", wanted)
        except GpusnapError as error:
            self._failed = error

    def __enter__(self) -> Inspection:
        return self

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def container(self) -> Container:
        """Return the answer, the same each time. Raises NotFound, GpusnapError."""
        if self._found is None and self._failed is None:
            assert self._question is not None
            try:
                self._found = _parse_answer(self._wanted, self._question.answer(self._seconds))
            except GpusnapError as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed
        assert self._found is not None
        return self._found


def inspect_container(wanted: str) -> Container:
    """Inspect a container by its name, its ID or a prefix of that. Raises NotFound, GpusnapError."""
    return _parse_answer(wanted, ask("container", "inspect", "--", wanted))


def _parse_answer(wanted: str, done: FinishedPodman) -> Container:
    if done.code:
        if "no such container" in done.err.lower():
            hint = (
                "podman ps --all lists them" if os.geteuid() == 0 else "only root sees the containers of root"
            )
            raise NotFound(f"there is no container {wanted}", hint=hint)
        raise GpusnapError(f"Podman cannot inspect the container {wanted}: {sentence(done)}")
    try:
        (found,) = parse_json(done.out)
        return _container(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GpusnapError(
            f"Podman's output for the container {wanted} cannot be parsed: {error!r}"
        ) from error


def _container(found: Mapping[str, Any]) -> Container:
    """Decode the output of `podman container inspect`. Raises various errors for another form of it."""
    state, driver = found["State"], found.get("GraphDriver") or {}
    own = found.get("StaticDir") or ""
    return Container(
        id=str(found["Id"]),
        name=str(found["Name"]),
        runtime=str(found["OCIRuntime"]),
        status=str(state["Status"]),
        # Podman keeps the path only of a checkpoint that it considers complete (libpod, ContainerState).
        checkpoint_path=str(state.get("CheckpointPath") or (os.path.join(own, "checkpoint") if own else "")),
        init=int(state.get("Pid") or 0),
        conmon=int(state.get("ConmonPid") or 0),
        auto_remove=bool((found.get("HostConfig") or {}).get("AutoRemove")),
        upper=str((driver.get("Data") or {}).get("UpperDir") or ""),
        checkpointed=bool(state.get("Checkpointed")),
        checkpointed_at=str(state.get("CheckpointedAt") or ""),
        started_at=str(state.get("StartedAt") or ""),
        restored=bool(state.get("Restored")),
        volumes={
            str(each["Name"]): str(each.get("Source") or "")
            for each in found.get("Mounts") or ()
            if each.get("Type") == "volume" and each.get("Name")
        },
        pod=str(found.get("Pod") or ""),
        dependencies=tuple(map(str, found.get("Dependencies") or ())),
        unrestored=tuple(podman_options.list_unrestored(found)),
        image=str(found.get("ImageName") or ""),
        labels={**_texts(found, "Labels"), **_texts(found, "Annotations")},
        created=str(found.get("Created") or ""),
        restarts=_get_restart_policy(found) not in ("", "no"),
        on_failure=_get_failure_action(found),
    )


def _get_failure_action(found: Mapping[str, Any]) -> str:
    action = str((found.get("Config") or {}).get("HealthcheckOnFailureAction") or "none")
    return "" if action == "none" else action


def _get_restart_policy(found: Mapping[str, Any]) -> str:
    return str(((found.get("HostConfig") or {}).get("RestartPolicy") or {}).get("Name") or "")


def _texts(found: Mapping[str, Any], key: str) -> dict[str, str]:
    values = (found.get("Config") or {}).get(key) or {}
    return {str(name): str(value) for name, value in values.items()}


class Listing:
    """The IDs of all containers: requested at the start of a `with` block, and waited for when needed.

    They are requested again if that was more than a second ago, or if they have been used: a container that
    is not among them may be regarded as new.
    """

    def __init__(self) -> None:
        self._question: Question | None = None
        self._failed: GpusnapError | None = None
        self._asked = 0.0

    def __enter__(self) -> Listing:
        self._ask()
        return self

    def _ask(self) -> None:
        self._asked, self._failed = time.monotonic(), None
        try:
            self._question = Question("ps", "--all", "--quiet", "--no-trunc")
        except GpusnapError as error:
            self._failed = error

    def __exit__(self, *_: object) -> None:
        if self._question is not None:
            self._question.close()

    def ids(self) -> set[str]:
        """Return the present IDs. Raises GpusnapError, also if Podman cannot be run."""
        if self._question is not None and time.monotonic() - self._asked > _FRESH:
            self._question.close()
            self._question = None
        if self._question is None and self._failed is None:
            self._ask()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        assert self._question is not None
        question, self._question = self._question, None
        done = question.answer()
        if done.code:
            raise GpusnapError(f"Podman cannot list its containers: {sentence(done)}")
        return set(done.out.split())


def names(*, seconds: float, status: str = "") -> dict[str, str]:
    """Return the names of all containers, or of those with that status, by ID.

    Raises GpusnapError, also if Podman has not answered by then.
    """
    states = ("--filter", f"status={status}") if status else ()
    done = ask("ps", "--all", "--no-trunc", *states, "--format", "{{.ID}} {{.Names}}", seconds=seconds)
    if done.code:
        raise GpusnapError(f"Podman cannot list its containers: {sentence(done)}")
    lines = (line.split() for line in done.out.splitlines())
    return {words[0]: words[1] for words in lines if len(words) > 1}


def list_not_cleaned_up(*, seconds: float) -> tuple[str, ...]:
    """Return the IDs of containers that have ended, and after which Podman has not cleaned up.

    Also of those that Podman lists as running, although their first process has ended. Raises GpusnapError,
    also if Podman has not answered by then.
    """
    # Podman's filter takes both states (exited, stopped) for one (libpod, filters/containers.go).
    states = ("--filter", "status=exited", "--filter", "status=running")
    done = ask("ps", "--all", "--no-trunc", *states, "--format", "json", seconds=seconds)
    if done.code:
        raise GpusnapError(f"Podman cannot list its containers: {sentence(done)}")
    try:
        found = parse_json(done.out)
        return tuple(str(each["Id"]) for each in found if _has_ended_unnoticed(each))
    except (ValueError, KeyError, TypeError) as error:
        raise GpusnapError(f"Podman's list of containers cannot be parsed: {error!r}") from error


def _has_ended_unnoticed(listed: Mapping[str, Any]) -> bool:
    if listed["State"] != "running":
        return bool(listed["State"] == _NOT_CLEANED_UP)
    return bool(listed.get("Pid")) and not proc.is_running(int(listed["Pid"]))


def ids() -> set[str]:
    """Return the IDs of all containers. Raises GpusnapError."""
    with Listing() as asked:
        return asked.ids()


def status(container_id: str, *, command: Sequence[str], seconds: float) -> str:
    """Return a container's status in the Podman of `command`, with global options; "" if it has no such ID.

    Podman answers only while nobody restores or checkpoints the container, which holds its lock. Raises
    GpusnapError if it has not answered by then.
    """
    found = _inspect_field(container_id, "{{.State.Status}}", command=command, seconds=seconds)
    if found == "":
        raise GpusnapError(
            f"Podman reports nothing about the container {container_id}", hint="run podman ps --all"
        )
    return found or ""


def full_id(wanted: str, *, seconds: float) -> str:
    """Return the ID of the container with exactly this name; "" if there is none. Raises GpusnapError."""
    told = _inspect_field(wanted, "{{.Id}} {{.Name}}", command=PODMAN, seconds=seconds) or ""
    found, _, name = told.partition(" ")
    return found if name == wanted else ""


def _inspect_field(wanted: str, what: str, *, command: Sequence[str], seconds: float) -> str | None:
    """Return a container's field, by a template; None if there is no such container. Raises GpusnapError."""
    words = ("container", "inspect", "--format", what, "--", wanted)
    done = ask(*words, command=command, seconds=seconds)
    if not done.code:
        return done.out.strip()
    if "no such container" in done.err.lower():
        return None
    raise GpusnapError(f"Podman cannot inspect the container {wanted}: {sentence(done)}")


def run_query(*words: str, wanted: str, seconds: float | None = None) -> str:
    """Return the output of a query of Podman's, or of a short command. Raises GpusnapError.

    `seconds`: how long to wait for the answer, instead of PATIENCE.
    """
    done = ask(*words, seconds=seconds)
    if done.code:
        raise GpusnapError(f"Podman does not report {wanted}: {sentence(done)}")
    return done.out


def execute(
    container_id: str, words: Sequence[str], environment: Mapping[str, str], *, seconds: float
) -> tuple[int | None, str]:
    """Run a command in a running container, see podman-exec(1); return its exit code and the output.

    The code is None if the command has not ended in time: Podman is killed, and processes in the container
    continue. Raises GpusnapError if Podman cannot be run.
    """
    options = [word for name, value in environment.items() for word in ("--env", f"{name}={value}")]
    with start(("exec", *options, container_id, *words), os.environ) as (child, out, err):
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
                    child.wait(DYING)
        done = finish(child, out, err) if child.poll() is not None else FinishedPodman(0, "", "")
    return code, f"{done.out}\n{done.err}".replace("\0", "")


def _shorten(file: IO[bytes]) -> None:
    """Free the disk space of endless output; its writer continues after a hole."""
    if os.fstat(file.fileno()).st_blocks * 512 > _MOST:
        os.ftruncate(file.fileno(), 0)


def exists(kind: str, wanted: str) -> bool:
    """Return whether Podman has a pod, an image etc. of that name or ID: podman-pod-exists(1) and others.

    Raises GpusnapError if Podman does not answer.
    """
    done = ask(kind, "exists", wanted)
    if done.code not in (0, 1):
        raise GpusnapError(
            f"Podman cannot determine whether there is a {kind} {wanted[:80]}: {sentence(done)}"
        )
    return done.code == 0


def remove(container_id: str) -> None:
    """Remove a container that does not run. Raises GpusnapError.

    Without --force: Podman checks whether it runs while it holds the lock; our own check was earlier.
    """
    done = ask("rm", container_id)
    if done.code:
        raise GpusnapError(f"the container {container_id[:12]} cannot be removed: {sentence(done)}")


def remove_running(container_id: str) -> None:
    """Kill a container, and remove it with its anonymous volumes, as --rm does. Raises GpusnapError."""
    words = ("rm", "--force", "--ignore", "--time", "0", "--volumes")
    done = ask(*words, container_id, seconds=_REMOVAL)
    if done.code:
        raise GpusnapError(f"the container {container_id[:12]} cannot be removed: {sentence(done)}")


def kill(container_id: str) -> None:
    """Kill the processes of a container. Raises GpusnapError."""
    run_query("kill", "--signal", "KILL", container_id, wanted=f"the end of {container_id[:12]}")


def pause(container_id: str) -> None:
    """Pause a running container. Raises AlreadyPaused, GpusnapError."""
    done = ask_and_finish("pause", container_id)
    if done.code and "already paused" in done.err:  # libpod, container_api.go
        raise AlreadyPaused(container_id[:12])
    if done.code:
        raise GpusnapError(f"the container {container_id[:12]} cannot be paused: {sentence(done)}")


def go_on(container_id: str) -> None:
    """Unpause a container, if it is paused, or is about to be. Raises GpusnapError."""
    done = ask_and_finish("unpause", container_id)
    if done.code and _is_paused_after_all(container_id):
        done = ask_and_finish("unpause", container_id)
    if done.code and _is_paused(container_id):
        raise GpusnapError(
            f"the container {container_id[:12]} cannot be unpaused: {sentence(done)}",
            hint=f"podman unpause {container_id[:12]}",
        )


def _is_paused(container_id: str) -> bool:
    return _inspect_field(container_id, "{{.State.Status}}", command=PODMAN, seconds=PATIENCE) == "paused"


def _is_paused_after_all(container_id: str) -> bool:
    """Return whether a container is paused, after waiting for every running `pause` of this module.

    A gpusnap that is killed or interrupted leaves its Podman, which may not have begun yet when the next
    gpusnap checks; and once it has paused the container, nobody would unpause it. Raises GpusnapError.
    """
    deadline = time.monotonic() + _PAUSING
    while (pid := _find_pause(container_id)) is not None:
        note(f"waiting for podman pause of the container {container_id[:12]} (process {pid})", code="GPS-020")
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        except OSError as error:
            raise GpusnapError(
                f"process {pid} cannot be waited for: {reason(error)}", hint="try again"
            ) from error
        try:
            if not wait_for_end(descriptor, max(0.0, deadline - time.monotonic())):
                raise GpusnapError(
                    f"podman pause of the container {container_id[:12]} (process {pid}) has not ended within "
                    f"{_PAUSING:g} s",
                    hint="end it, then try again",
                    code="GPS-020",
                )
        finally:
            os.close(descriptor)
    return _is_paused(container_id)


def _find_pause(container_id: str) -> int | None:
    """Return the PID of a gpusnap's podman pause: it has the full ID, which users do not type."""
    for pid in proc.pids():
        # The name first: reading the command line of a process may block.
        if proc.comm(pid) == PODMAN[0] and proc.command(pid)[-2:] == ("pause", container_id):
            return pid
    return None


def is_exporting(archive: str) -> bool:
    """Return whether a Podman is at work that exports a container to this path."""
    return any(path == archive for _, path in list_exporting())


def list_exporting() -> set[tuple[str, str]]:
    """Return the word by which each Podman that exports names its container, and its archive.

    A `gpusnap checkpoint` names it by its full ID. Several may be at work for one container: the later ones
    wait for its lock.
    """
    found = set()
    for pid in proc.pids():
        words = proc.command(pid) if proc.comm(pid) == PODMAN[0] else ()  # as in _find_pause
        if "checkpoint" in words and "--export" in words[:-2]:
            found.add((words[-1], words[words.index("--export") + 1]))
    return found


def to_restore(found: Container, *, store: str = "") -> str:
    """Return the command with which Podman restores an ended container from its storage.

    `store`: the path of the store with its memory, if that is not this host's.
    """
    first = ""
    if found.is_not_cleaned_up:
        first = f"podman update --restart=no {found.name} && " if found.restarts else ""
        first += f"podman container cleanup {found.name} && "
    variable = f"GPUSNAP_STORE={shlex.quote(store)} " if store else ""
    return f"{first}{variable}podman container restore {found.name}"


def clean_up(found: Container) -> None:
    """Do the cleanup that a Podman killed at the container's end has not done. Raises GpusnapError.

    Without it, Podman regards the container as running, and does not restore it (libpod, container_api.go).
    Refuses if the container has a restart policy: the cleanup would start it anew, without its memory
    (libpod, handleRestartPolicy).
    """
    if found.is_not_cleaned_up and found.restarts:
        raise ContainerError(
            f"the container {found.name} has ended, and Podman was killed before it cleaned up. Cleaning up "
            "now would start it again without its memory, because it has a restart policy",
            hint=f"{to_restore(found)} restores it; then set the policy again (podman update --restart=…)",
            code="GPS-909",
        )
    if found.is_not_cleaned_up:
        run_query("container", "cleanup", found.id, wanted=f"the clean-up of {found.name}")
    elif found.is_listed_as_running:
        # It fails for want of an exit code, and records the end (libpod, Container.stop).
        done = ask("stop", "--time", "0", found.id)
        if inspect_container(found.id).status not in _ENDED:
            raise GpusnapError(f"Podman does not notice that {found.name} has ended: {sentence(done)}")


def check(found: Container, *, asleep: bool = False, instead: str = "") -> None:
    """Raise ContainerError if gpusnap cannot checkpoint it in this state. `asleep`: it is suspended.

    `instead`: what to do with a container that uses no GPU, if that is not Podman's checkpoint.
    """
    if found.status == "paused" and not asleep:
        raise ContainerError(
            f"the container {found.name} is paused, and Podman does not checkpoint paused containers",
            hint=f"podman unpause {found.name}",
            code="GPS-203",
        )
    if found.status not in ("running", "paused"):
        raise make_not_running_error(found)
    if not is_ours(found.runtime):
        instead = instead or f"run podman container checkpoint {found.name}"
        raise ContainerError(
            f"the container {found.name} uses the runtime {found.runtime}, which does not support GPUs",
            hint=f"if it uses no GPU, {instead}; otherwise remove it and run it again with podman --runtime "
            f"{RUNTIME} run and the same options",
            code="GPS-202",
        )
    # For a checkpoint, Podman must regard a suspended container as running for a moment, and a check that
    # fails then counts. The runtime can refuse a kill; but Podman notes the beginning of a stop first, and
    # would not checkpoint the container any more.
    if asleep and found.on_failure in ("restart", "stop"):
        raise ContainerError(
            f"the container {found.name} is suspended, so its health check fails during a checkpoint, and "
            f"Podman would end it (--health-on-failure={found.on_failure})",
            hint=f"gpusnap resume {found.name} before the checkpoint",
            code="GPS-206",
        )


def end_health_checks(found: Container) -> None:
    """End Podman's health checks of a paused container that Podman would end if one fails.

    When the container goes on, their time is over, and Podman takes that for a failure. None begins while
    it is paused; after that, Podman's timer begins the next one.
    """
    if not found.on_failure:
        return
    for pid in proc.pids():
        each = proc.process(pid) if proc.comm(pid) == conmon.PODMAN else None
        if each is None or "healthcheck" not in each.command or found.id not in each.command[-1:]:
            continue
        pidfd.remember([(pid, each.start)])
        with suppress(PermissionError):
            pidfd.send(pid, signal.SIGTERM)


def make_not_running_error(found: Container) -> ContainerError:
    """Return the error for a stopped container; after a checkpoint, podman start would lose its memory."""
    if found.checkpointed:
        return ContainerError(
            f"the container {found.name} is not running: a checkpoint stopped it",
            hint=f"{to_restore(found)} restores it; podman start would lose its memory",
            code="GPS-201",
        )
    if found.has_checkpoint():
        return ContainerError(
            f"the container {found.name} is not running: it is {found.status}, and Podman has a checkpoint "
            "of it",
            hint=f"{to_restore(found)} continues it from that; podman start starts it from the beginning",
            code="GPS-201",
        )
    return ContainerError(
        f"the container {found.name} is not running: it is {found.status}",
        hint=f"podman start {found.name}",
        code="GPS-201",
    )


def is_ours(runtime: str) -> bool:
    """Return whether that runtime is gpusnap's, by its own name or by that of a runtime it replaces."""
    if os.path.basename(runtime) == RUNTIME:
        return True
    path = runtime
    if not runtime.startswith("/"):
        done = ask("--runtime", runtime, "info", "--format", "{{.Host.OCIRuntime.Path}}")
        path = done.out.strip() if done.code == 0 else ""
    return os.path.basename(os.path.realpath(path)) == RUNTIME
