"""Finds the container and the engine that a NAME means: Podman's, or else containerd's.

A plain name is a Podman container. If Podman knows none, it is the ID of a containerd task, in any namespace;
NAMESPACE/ID selects one.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpusnap.base.user_errors import NotFound
from gpusnap.engines import ctr, podman
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.command_line import Globals, render_globals
from gpusnap.runtime_shim.runtime.identify import RealRuntime, identify
from gpusnap.runtime_shim.snapshot.devices import device_access
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers.engine import Engine

_CONTAINERD = "containerd"
_PODMAN = "podman"
CONTAINERD_ROOT = "/run/containerd/runc"
"""It has a folder for each namespace (containerd, RuncRoot of cmd/containerd-shim-runc-v2)."""


Running = tuple[Engine, containers.Container, RealRuntime]
"""A running container: its engine, its runtime's record of it, and that runtime."""


def find_running(name: str, asked: podman.Inspection) -> Running:
    """Find a running container by its name; `asked`: Podman's answer about that name.

    Raises NotFound, ContainerError, GpusnapError.
    """
    try:
        found = asked.container()
    except GpusnapError as error:
        there = _task(name)
        if there is None:
            namespace, _, task = name.partition("/")
            if namespace and task:  # no name in Podman has a slash
                raise ctr.make_no_task_error(task, namespace) from error
            raise error
        namespace, container_id = there
        root = os.path.join(CONTAINERD_ROOT, namespace)
        return engine(_CONTAINERD, container_id, container_id, namespace), *_find_known(container_id, root)
    if found.status == "paused":
        asleep = suspensions.find_by_container(found.id)
        if asleep is not None and asleep.stage is suspensions.Stage.SUSPENDED:
            raise ContainerError(
                f"the container {found.name} is already suspended",
                hint=f"gpusnap resume {found.name} resumes it",
                code="GPS-206",
            )
        raise ContainerError(
            f"the container {found.name} is paused",
            hint=f"podman unpause {found.name}, then suspend it",
            code="GPS-203",
        )
    podman.check(found, instead=f"run podman pause {found.name}")
    roots = _with_podman(found.id)
    if not roots:
        raise GpusnapError(
            f"neither crun nor runc knows the container {found.name}, which Podman lists as running",
            hint="run podman ps",
        )
    return engine(_PODMAN, found.id, found.name, ""), *_find_known(found.id, roots[0])


def find_suspended(name: str, asked: podman.Inspection) -> Suspension:
    """Find a suspended container by its name or a prefix of its ID; `asked`: Podman's answer about that.

    Raises NotFound, ContainerError if it is not suspended, GpusnapError.
    """
    found = list(suspensions.find())
    exact = _select_called(found, name, asked)
    some = exact or [each for each in found if len(name) > 2 and each.container.startswith(name)]
    if len(some) == 1:
        return some[0]
    if some:
        raise GpusnapError(
            f"several suspended containers are named {name}",
            hint=f"give one of these: {', '.join(map(_choose_word, some))}",
        )
    there = None
    with suppress(GpusnapError):
        there = asked.container()
    if there is not None:
        raise ContainerError(
            f"the container {there.name} is not suspended: it is {there.status}",
            hint="gpusnap ps lists the suspended containers",
            code="GPS-206",
        )
    raise NotFound(f"no container {name} is suspended", hint="gpusnap ps lists the suspended containers")


def is_suspended(name: str, asked: podman.Inspection) -> bool:
    """Return whether a suspended container has exactly that name or ID. Raises GpusnapError."""
    return bool(_select_called(list(suspensions.find()), name, asked))


def _select_called(found: Sequence[Suspension], name: str, asked: podman.Inspection) -> Sequence[Suspension]:
    """Return those with exactly that name or ID; Podman's present names count before recorded ones."""
    of_id = [each for each in found if each.container == name]
    if any(each.engine == _PODMAN for each in of_id):
        return of_id  # nobody gives a container such a name; a containerd task may have any name as its ID
    now = ""
    if any(each.engine == _PODMAN for each in found):
        with suppress(GpusnapError):
            told = asked.container()
            now = told.id if told.name == name else ""
    if now:
        return [*of_id, *(each for each in found if each.container == now)]
    return [each for each in found if name in _words(each)]


def _words(found: Suspension) -> tuple[str, ...]:
    return found.name, found.container, f"{found.namespace}/{found.name}"


def _choose_word(found: Suspension) -> str:
    """Return the word that means this one alone: an ID is unique only in its namespace of containerd."""
    return f"{found.namespace}/{found.name}" if found.engine == _CONTAINERD else found.container


def engine_of(found: Suspension) -> Engine:
    """Return the engine of a suspended container."""
    return engine(found.engine, found.container, found.name, found.namespace)


def engine(kind: str, container_id: str, name: str, namespace: str) -> Engine:
    """Return how an engine pauses and unpauses a container, and allows it its device nodes."""
    if kind == _CONTAINERD:
        return Engine(
            kind,
            name,
            namespace,
            partial(ctr.pause, namespace, container_id),
            partial(ctr.go_on, namespace, container_id),
            partial(_allow, kind, namespace, container_id),
        )
    return Engine(
        kind,
        name,
        "",
        partial(podman.pause, container_id),
        partial(podman.go_on, container_id),
        partial(_allow, kind, "", container_id),
    )


def _allow(kind: str, namespace: str, container_id: str, nodes: Sequence[Node]) -> Sequence[Node]:
    """Let its runtime allow a container its device nodes, in whichever folder the runtime keeps it."""
    of_task = kind == _CONTAINERD
    roots = [os.path.join(CONTAINERD_ROOT, namespace)] if of_task else _with_podman(container_id)
    found: list[Node] = []
    for root in roots:
        container, real = _find_known(container_id, root)
        found += device_access.update(real, container, nodes)
    return found


def _find_known(container_id: str, root: str) -> tuple[containers.Container, RealRuntime]:
    real = locate.start(["checkpoint", container_id], 0, root, lambda path, _: identify(Path(path)))
    command = render_globals(Globals(root=root), real)
    return containers.find(command, container_id, root=root), real


def _with_podman(container_id: str) -> list[str]:
    """Return the folders in which crun or runc keep a container of Podman's."""
    return [root for root, kept in _roots() if _is_file(f"{root}/{container_id}/{kept}")]


def _roots() -> Iterator[tuple[str, str]]:
    """Yield the folders in which crun and runc keep Podman's containers, and the file that each has there."""
    private = os.environ.get("XDG_RUNTIME_DIR", "")
    for name, file in zip(locate.NAMES, locate.STATE_FILES, strict=True):
        for folder in dict.fromkeys((locate.RUN, private, f"{locate.RUN}/user/{os.geteuid()}")):
            if folder.startswith("/"):
                yield f"{folder}/{name}", file


def is_task(name: str) -> bool:
    """Return whether containerd has a task of that ID, also one of NAMESPACE/ID."""
    try:
        return _task(name) is not None
    except GpusnapError:  # in several namespaces
        return True


def _task(name: str) -> tuple[str, str] | None:
    """Return namespace and ID of containerd's task, or None. Raises GpusnapError for several."""
    wanted, slash, rest = name.partition("/")
    try:
        namespaces = [wanted] if slash else sorted(os.listdir(CONTAINERD_ROOT))
    except OSError:
        return None
    container_id = rest if slash else name
    if not container_id or container_id.startswith(".") or "/" in container_id:
        return None
    found = [
        each
        for each in namespaces
        if any(
            _is_file(os.path.join(CONTAINERD_ROOT, each, container_id, file)) for file in locate.STATE_FILES
        )
    ]
    if len(found) > 1:
        raise GpusnapError(
            f"containerd has a task {container_id} in several namespaces: {', '.join(found)}",
            hint=f"give the namespace: {found[0]}/{container_id}",
        )
    return (found[0], container_id) if found else None


def tasks() -> Iterator[tuple[str, str, int]]:
    """Yield namespace, ID and PID of the first process of containerd's running tasks."""
    for state in sorted(glob.glob(f"{CONTAINERD_ROOT}/*/*/")):
        namespace, container_id = state.rstrip("/").split("/")[-2:]
        for file, field in (("status", "pid"), ("state.json", "init_process_pid")):
            with suppress(OSError, ValueError, KeyError, TypeError), open(state + file, "rb") as opened:
                init = int(parse_json(opened.read())[field])
                if proc.is_running(init):
                    yield namespace, container_id, init


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False
