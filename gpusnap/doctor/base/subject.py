"""The container to check: Podman's by name or ID, or one of containerd's by ID, and its processes."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any

from gpusnap.engines import ctr, podman, podman_objects
from gpusnap.engines.podman_options import Option
from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.proc import Process
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.records import suspensions

CONTAINERD = "/run/containerd"
"""containerd's state (its config.toml, `state`)."""
_TASKS = "io.containerd.runtime.v2.task"
# crictl shows 13 digits of an ID, nerdctl 12.
_SHORT = 12


@dataclass(frozen=True, slots=True)
class Subject:
    """A running or paused container, in its present state."""

    name: str
    engine: str
    """Podman or containerd."""
    container: Container
    processes: tuple[Process, ...]
    config: dict[str, Any]
    """Its config.json."""
    settings: Settings
    """This host's settings, overridden by the container's annotations."""
    objection: GpusnapError | None = None
    """Why gpusnap checkpoint would refuse it."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Podman's named volumes in it, with the folder for each."""
    unrestored: tuple[Option, ...] = ()
    """Its options that Podman does not restore."""


def find(wanted: str, *, namespace: str = "", state: str = CONTAINERD) -> Subject:
    """Find the container of that name: with `namespace`, containerd's; else Podman's, or else containerd's.

    Raises NotFound; ContainerError if it does not run; SettingsError.
    """
    if namespace:
        return _containerds(wanted, state, namespace)
    try:
        return _podmans(wanted)
    except ContainerError:
        raise
    except GpusnapError:  # Podman does not have it, or is not installed
        if in_containerd(wanted, state):
            return _containerds(wanted, state, "")
        raise


def in_containerd(wanted: str, state: str = CONTAINERD, namespace: str = "") -> tuple[str, ...]:
    """Return the bundles of containerd's tasks with that ID or prefix, in one namespace or in all."""
    where = glob.escape(namespace) if namespace else "*"
    path = f"{glob.escape(state)}/{_TASKS}/{where}/{glob.escape(wanted)}"
    found = glob.glob(path)
    if not found and len(wanted) >= _SHORT:
        found = glob.glob(path + "*")
    return tuple(sorted(found))


def _podmans(wanted: str) -> Subject:
    found = podman.inspect_container(wanted)
    if not found.init or found.status not in ("running", "paused"):
        raise podman.make_not_running_error(found)
    objection: GpusnapError | None = None
    try:
        podman.check(found, asleep=suspensions.find_by_container(found.id) is not None)
        podman_objects.check_options(found, force=True)  # the options have a line of their own
    except GpusnapError as error:
        objection = error
    bundle = os.path.dirname(found.checkpoint_path)
    subject = _subject(found.name, "Podman", found.id, found.init, bundle, found.status, objection)
    return replace(subject, volumes=found.volumes, unrestored=found.unrestored)


def _containerds(wanted: str, state: str, namespace: str) -> Subject:
    bundles = in_containerd(wanted, state, namespace)
    if not bundles:
        raise ctr.make_no_task_error(wanted, namespace)
    if len(bundles) > 1:
        tasks = ", ".join("/".join(path.split("/")[-2:]) for path in bundles)
        raise GpusnapError(
            f"containerd has several tasks {wanted}: {tasks}",
            hint="give the whole ID, and --containerd NAMESPACE",
        )
    bundle = bundles[0]
    try:
        with open(f"{bundle}/init.pid", encoding="ascii") as file:
            init = int(file.read())
    except (OSError, ValueError):
        init = 0
    if not init or not proc.is_running(init):
        raise ContainerError(
            f"the task {wanted} is not running", hint="start it with ctr task start", code="GPS-201"
        )
    status = "paused" if proc.is_stopped(init) else "running"
    return _subject(wanted, "containerd", os.path.basename(bundle), init, bundle, status, None)


def _subject(
    name: str,
    engine: str,
    container_id: str,
    init: int,
    bundle: str,
    status: str,
    objection: GpusnapError | None,
) -> Subject:
    config = containers.bundle_config(bundle)
    annotations = containers.bundle_annotations(config)
    return Subject(
        name,
        engine,
        Container(container_id, init, status, bundle, annotations),
        containers.processes(init, container_id),
        config,
        settings_file.apply_annotations(settings_file.load(), annotations),
        objection,
    )
