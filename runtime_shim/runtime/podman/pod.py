"""The namespaces that a container in a pod of Podman's joins: those of the pod's infra container.

config.json names them by the PID that the infra container had when the container was started
(/proc/PID/ns/ipc; libpod, container.go, namespacePath). After `podman pod stop`, and after a reboot, another
process may have this PID, or none. Podman replaces the paths only for --pod (libpod,
container_internal_common.go, restore), so a restore in place would fail in CRIU ("Can't access join-ns
file"), or give the container the namespaces of a stranger.

A process that has run since before the checkpoint had its PID then, too, so such a path is still right. Any
other has to be one of the infra container's, which an annotation names. After an import with --pod, it names
the pod instead (podman, pkg/specgen/generate/container.go, pkg/checkpoint/checkpoint_restore.go). Then the
infra container is the one in the pod's cgroup that has no such annotation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import ContainerError, Refused, raise_as
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.bundle import binds
from gpusnap.runtime_shim.runtime.container import bundle_config, bundle_namespaces
from gpusnap.runtime_shim.runtime.podman.dev_shm import is_of_podman

_SANDBOX = "io.kubernetes.cri-o.SandboxID"
_PATH = compile_later(r"/proc/(\d+)/ns/(\w+)")
# Podman mounts it there from the container's directory in its --runroot, where it has the PID files, too.
_AT = "/run/.containerenv"
_PID_FILE = "pidfile"
_TICKS = os.sysconf("SC_CLK_TCK")
# Seconds by which the clock may have been set since; a process of a later time is looked at more closely.
_SKEW = 60.0
_SHORT = 12  # characters of an ID, as Podman prints it


def find_namespaces(
    config: Mapping[str, Any], bundle: str, container: str, *, checkpointed: float
) -> dict[str, str]:
    """Return the right paths for linux.namespaces of a config.json, by the paths in it that are not right.

    checkpointed: when the container was checkpointed, as time.time(). Raises Refused if the infra container
    does not run, or is not known and may be another one.
    """
    every = (str(each.get("path")) for each in bundle_namespaces(config))
    found = {path: match for path in every if (match := _PATH.fullmatch(path))}
    latest = checkpointed - _SKEW
    paths = {path: match for path, match in found.items() if not _is_older(int(match[1]), latest)}
    sandbox = _find_sandbox(config)
    if not paths or not sandbox or not is_of_podman(config):
        return {}
    infra, run = _find_infra(sandbox, bundle), _find_run_directory(config)
    if not infra or not run:
        if all(_is_in(int(match[1]), sandbox) for match in paths.values()):
            return {}
        raise Refused(
            f"container {container} shares namespaces with its pod, whose infra container is not known",
            hint="restore it from an archive or a store, with --pod",
            code="GPS-531",
        )
    pid = _read_pid(os.path.join(os.path.dirname(os.path.dirname(run)), infra, os.path.basename(run)))
    if not _is_in(pid, infra):
        raise Refused(
            f"container {container} shares namespaces with its pod, whose infra container "
            f"{infra[:_SHORT]} does not run",
            hint=f"podman start {infra[:_SHORT]}, then restore again; podman pod start would start this "
            "container, too, from the beginning",
            code="GPS-531",
        )
    right = {path: f"/proc/{pid}/ns/{match[2]}" for path, match in paths.items()}
    return {path: new for path, new in right.items() if new != path}


def _find_sandbox(config: Mapping[str, Any]) -> str:
    """Return the ID of the infra container, or of the pod; "" if the container is in no pod."""
    annotations = config.get("annotations")
    return str(annotations.get(_SANDBOX) or "") if isinstance(annotations, dict) else ""


def _find_infra(sandbox: str, bundle: str) -> str:
    """Return the ID of the infra container; "" if it is not found. Raises ContainerError.

    Containers of Podman are in directories beside one another: overlay-containers/ID/userdata.
    """
    folder = os.path.dirname(os.path.dirname(os.path.realpath(bundle)))
    with raise_as(ContainerError, f"the containers in {folder} cannot be listed"):
        names = sorted(os.listdir(folder))
    if sandbox in names:
        return sandbox
    for name in names:
        try:
            other = bundle_config(os.path.join(folder, name, os.path.basename(bundle)))
        except ContainerError:
            continue  # it was never started, or is being removed
        linux = other.get("linux")
        group = str(linux.get("cgroupsPath")) if isinstance(linux, dict) else ""
        if sandbox in group and not _find_sandbox(other):
            return name
    return ""


def _find_run_directory(config: Mapping[str, Any]) -> str:
    """Return the container's own directory in Podman's --runroot, …/ID/userdata; "" if it is not known."""
    found = (str(mount.get("source")) for mount in binds(config) if mount.get("destination") == _AT)
    return os.path.dirname(next(found, ""))


def _read_pid(folder: str) -> int:
    """Return the PID that conmon wrote for a container; 0 if it wrote none, or Podman has removed it."""
    try:
        with open(os.path.join(folder, _PID_FILE), encoding="ascii", errors="replace") as file:
            text = file.read().strip()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ContainerError(f"{folder}/{_PID_FILE} cannot be read: {error.strerror}") from error
    return int(text) if text.isdecimal() else 0


def _is_older(pid: int, moment: float) -> bool:
    """Whether a process runs that began before a moment."""
    ticks = proc.start_time(pid)
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return ticks > 0 and proc.is_running(pid) and boot + ticks / _TICKS < moment


def _is_in(pid: int, name: str) -> bool:
    """Whether a process runs, and is in a container or pod: by its cgroup, without one by its conmon."""
    return proc.is_running(pid) and (
        any(name in path for path in proc.cgroups(pid).values()) or name in proc.command(proc.parent(pid))
    )
