"""Podman's volumes, pods and running containers, and options that it cannot export or restore."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime

from gpusnap.base.user_errors import NotFound
from gpusnap.engines import podman
from gpusnap.engines.podman import Container
from gpusnap.engines.podman_command import PATIENCE, ask, sentence
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.settings import ANNOTATION_PREFIX

# Bytes per second that Podman writes at least into a volume.
_SLOWEST = 10 << 20
# The label of volumes that are made from a checkpoint.
_MADE = ANNOTATION_PREFIX + "made"


def volumes() -> set[str]:
    """Return the names of all volumes. Raises GpusnapError."""
    return set(podman.run_query("volume", "ls", "--quiet", wanted="its volumes").split())


def users_of(volume: str) -> tuple[str, ...]:
    """Return the running containers that use a volume. Raises GpusnapError."""
    words = ("ps", "--filter", f"volume={volume}", "--format", "{{.Names}}")
    return tuple(podman.run_query(*words, wanted=f"who uses the volume {volume}").split())


def list_created_with(container: Container) -> list[str]:
    """Return the volumes that Podman created because it created this container, which uses them.

    Podman sets a container's time, then looks for its volumes and creates those that are missing, without
    labels (libpod, initContainerVariables and setupContainer). So an older volume, or one with labels, is
    somebody else's, and so is one of which Podman does not say when it was created. One that somebody creates
    in the milliseconds between the two cannot be told apart.
    """
    found = []
    for name in container.volumes:
        with suppress(GpusnapError, ValueError, KeyError, TypeError, AttributeError):
            told = podman.run_query("volume", "inspect", "--", name, wanted=f"the volume {name}")
            (volume,) = parse_json(told)
            created = datetime.fromisoformat(volume["CreatedAt"])
            if created >= datetime.fromisoformat(container.created) and not volume.get("Labels"):
                found.append(name)
    return found


def make_volume(name: str) -> None:
    """Make an empty volume, for `list_made`. Raises GpusnapError, also if there is one of that name."""
    done = ask("volume", "create", "--label", f"{_MADE}=restore", "--", name)
    if done.code:
        raise GpusnapError(f"Podman cannot make the volume {name}: {sentence(done)}")


def list_made() -> dict[str, str]:
    """Return the volumes that `make_volume` has made, each with the directory of its files.

    Raises GpusnapError.
    """
    words = ("volume", "ls", "--filter", f"label={_MADE}", "--format", "{{.Name}}\t{{.Mountpoint}}")
    lines = podman.run_query(*words, wanted="its volumes").splitlines()
    return {name: folder for name, _, folder in (line.partition("\t") for line in lines)}


def fill_volume(name: str, tar: str) -> None:
    """Unpack a tar, which is a file, into a volume. Raises GpusnapError."""
    seconds = PATIENCE + os.stat(tar).st_size / _SLOWEST
    done = ask("volume", "import", "--", name, tar, seconds=seconds)
    if done.code:
        raise GpusnapError(f"Podman cannot unpack files into the volume {name}: {sentence(done)}")


def remove_volume(name: str) -> None:
    """Remove a volume that no container uses. Raises GpusnapError."""
    podman.run_query("volume", "rm", name, wanted=f"the removal of the volume {name}")


def has_pod(pod: str) -> bool:
    """Return whether there is a pod of that ID or name. Raises GpusnapError if Podman does not answer."""
    return podman.exists("pod", pod)


def latest() -> str:
    """Return the name of the container that was created last. Raises NotFound, GpusnapError."""
    found = podman.run_query(
        "ps", "--latest", "--format", "{{.Names}}", wanted="its latest container"
    ).split()
    if not found:
        raise NotFound("Podman has no container", hint="podman ps --all lists them")
    return found[0]


def list_running() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return running containers by name: those of gpusnap's runtime, and others, without infra containers.

    Raises GpusnapError.
    """
    words = ("ps", "--filter", "status=running", "--sort", "created", "--format", "json")
    try:
        found = parse_json(podman.run_query(*words, wanted="its containers") or "[]")
        names = [str(each["Names"][0]) for each in found if not each.get("IsInfra")]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise GpusnapError(f"Podman's list of containers cannot be parsed: {error!r}") from error
    mine = {name for name in names if podman.is_ours(podman.inspect_container(name).runtime)}
    return tuple(each for each in names if each in mine), tuple(each for each in names if each not in mine)


_WITH_PROCESSES = ("running", "paused", "stopping")  # libpod, define.ContainerStatus


@dataclass(frozen=True, slots=True)
class ListedContainer:
    """A container with processes."""

    id: str
    name: str
    pid: int
    """The PID of its first process."""
    paused: bool


def with_processes() -> tuple[ListedContainer, ...]:
    """Return containers that are running, paused or being stopped, of any runtime. Raises GpusnapError.

    Podman has no filter for one that is being stopped, which keeps its GPU memory until its process ends.
    """
    told = podman.run_query("ps", "--all", "--no-trunc", "--format", "json", wanted="its containers")
    try:
        return tuple(
            ListedContainer(
                str(each["Id"]), str(each["Names"][0]), int(each["Pid"]), each["State"] == "paused"
            )
            for each in parse_json(told or "[]")
            if each["State"] in _WITH_PROCESSES
        )
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise GpusnapError(f"Podman's list of containers cannot be parsed: {error!r}") from error


def check_options(found: Container, *, force: bool = False) -> None:
    """Raise ContainerError if Podman would end it, and then could not export or restore it.

    From libpod (exportCheckpoint): it may depend on its pod's infra container, and on no other.
    """
    words = ("pod", "inspect", "--format", "{{.InfraContainerID}}", found.pod)
    ask = found.pod and found.dependencies
    infra = podman.run_query(*words, wanted=f"the pod of {found.name}").strip() if ask else ""
    others = [each for each in found.dependencies if each != infra]
    if others:
        raise ContainerError(
            f"the container {found.name} depends on the container {others[0][:12]}, and Podman cannot "
            "export the checkpoint of such a container",
            hint="run both in a pod (podman pod create) instead of --network, --pid or --ipc "
            "container:NAME and --requires",
            code="GPS-204",
        )
    for each in found.unrestored:
        if each.fatal and not force:
            raise ContainerError(
                f"the container {found.name} has {each.what}, and Podman cannot restore such a container",
                hint=f"{each.todo}; or give --force to make the checkpoint anyway",
                code="GPS-205",
            )
