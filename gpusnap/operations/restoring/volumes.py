"""Decides what Podman does with the named volumes of a restored container, before it begins.

Podman uses an existing volume as it is, or refuses, for all volumes of a container alike
(`--ignore-volumes`). With that option, it makes missing volumes, empty (libpod, pkg/checkpoint and
Container.restore). gpusnap overwrites no volume, and makes none empty unless that was requested.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field, replace

from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP
from gpusnap.checkpoints.volumes import records
from gpusnap.engines import podman_objects, podman_work
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.tar.archive import Entry
from gpusnap.runtime_shim.errors import GpusnapError, Refused
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.settings import ANNOTATION_PREFIX
from gpusnap.user_errors import Killed

CODE = "GPS-518"


@dataclass(frozen=True, slots=True)
class PodmanObjects:
    """What of Podman's a container has: its volumes, those whose files are in the checkpoint, and its pod."""

    named: tuple[str, ...] = ()
    there: frozenset[str] = frozenset()
    pod: str = ""
    """The ID of the pod that the container was in."""
    name: str = ""
    """The container's, as the checkpoint has it: anything, where that is from elsewhere."""
    annotated: bool = False
    """It may have annotations or labels of ours."""


def list_volumes(config: bytes) -> tuple[str, ...]:
    """The volumes of a container by its config.dump (libpod, ContainerConfig.NamedVolumes)."""
    try:
        found = parse_json(config)["namedVolumes"]
        return tuple(dict.fromkeys(str(each["volumeName"]) for each in found))
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()


def find_objects(found: Iterable[Entry]) -> PodmanObjects:
    """The volumes of a checkpoint, by the entries of its archive or of its records."""
    names: tuple[str, ...] = ()
    pod = name = ""
    there: set[str] = set()
    annotated = False
    for entry in found:
        if entry.name in FIRST and entry.content is not None:
            content = entry.content.read(LARGEST_DUMP)
            annotated = annotated or ANNOTATION_PREFIX.encode() in content
            if entry.name == FIRST[0]:
                names = list_volumes(content)
                pod, name = read_text(content, "pod"), read_text(content, "name")
        elif volume := records.name_of(entry.name) or records.name_in_chunks(entry.name):
            there.add(volume)
    return PodmanObjects(names, frozenset(there), pod, name, annotated)


def read_text(config: bytes, key: str) -> str:
    """A field of a container's config.dump (libpod, ContainerConfig); "" without one."""
    try:
        found = parse_json(config)[key]
        return found if isinstance(found, str) else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def choose_pod(found: PodmanObjects, wanted: str) -> str:
    """The pod to restore into: the wanted one, or the one that the container was in, if Podman still has it.

    Raises Refused where there is none, or one for a container that was in none (libpod, CRImportCheckpoint).
    """
    if found.pod and not wanted:
        if podman_objects.has_pod(found.pod):
            return found.pod
        raise Refused(
            f"the container was in the pod {found.pod[:12]}, which Podman no longer has",
            hint="create a pod that shares the same namespaces (podman pod create), and name it with "
            "--pod POD",
            code="GPS-522",
        )
    if wanted and not found.pod:
        raise Refused(
            f"the container was in no pod, and Podman cannot restore it into the pod {wanted}",
            hint="restore it without --pod",
            code="GPS-522",
        )
    if wanted and not podman_objects.has_pod(wanted):
        raise Refused(f"Podman has no pod {wanted}", hint="podman pod ps lists them", code="GPS-522")
    return wanted


@dataclass(frozen=True, slots=True)
class VolumeChoice:
    """What Podman shall do with the volumes of a checkpoint."""

    of: PodmanObjects
    ignore: bool = False
    """It leaves those that it has as they are, and makes others, empty."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those that it has, and the running containers that have each; none where that was asked for."""


def find_in_artifact(artifact: Artifact, blobs: Blobs) -> PodmanObjects:
    """The volumes of a checkpoint that is an artifact. Raises ArchiveError, BlobError."""
    if artifact.records is None:
        return PodmanObjects()
    with blobs.open_blob(artifact.records.digest, artifact.records.size) as file:
        return find_objects(entries(file, where=f"the records {artifact.records.digest}"))


def choose(found: PodmanObjects, *, ignore: bool) -> VolumeChoice:
    """What Podman shall do; `ignore`: leave all volumes as they are.

    Raises Refused where some of them would have to come out of the checkpoint, and others not.
    """
    if ignore or not found.named:
        return VolumeChoice(found, ignore)
    known = podman_objects.volumes()
    there = [name for name in found.named if name in known]
    gone = [name for name in found.named if name not in known]
    lost = [name for name in gone if name not in found.there]
    if lost:
        raise Refused(
            f"Podman has no {_volumes(lost)}, and the checkpoint was made without the files of volumes",
            hint=f"create it (podman volume create {lost[0]}, podman volume import {lost[0]} FILE), or "
            "give --ignore-volumes to start with an empty one",
            code=CODE,
        )
    if there and gone:
        raise Refused(
            f"Podman already has the {_volumes(there)} of the container, but not the {_volumes(gone)}",
            hint=f"remove {_names(there)} (podman volume rm) to restore all from the checkpoint, or "
            f"give --ignore-volumes to use {_names(there)} as it is, and start with an empty "
            f"{_names(gone)}",
            code=CODE,
        )
    return VolumeChoice(found, bool(there), {name: podman_objects.users_of(name) for name in there})


def keep_volumes(choice: VolumeChoice) -> VolumeChoice:
    """The same for the container that the checkpoint ended: it keeps its volumes, which others may use."""
    return replace(choice, kept={name: users for name, users in choice.kept.items() if users})


@contextmanager
def report_kept_volumes(choice: VolumeChoice) -> Iterator[None]:
    """Say afterwards which volumes are used as they are; where it failed, remove those that Podman made.

    It made none where it found one of them: it looks for all before it makes any (libpod,
    CRImportCheckpoint), so somebody else has made that meanwhile. Podman refuses to remove one that a
    container has, such as that of another restore at the same time.
    """
    named = choice.of.named
    before = podman_objects.volumes() if named else set()
    try:
        yield
    except Killed:
        raise  # what Podman had begun may go on
    except (GpusnapError, KeyboardInterrupt) as error:
        if isinstance(error, GpusnapError) and error.code == CODE:
            raise
        with podman_work.ignore_signals(), suppress(GpusnapError):
            for name in set(named) & (podman_objects.volumes() - before if named else set()):
                podman_objects.remove_volume(name)
        raise
    for name, users in choice.kept.items():
        others = f" (also used by {_names(list(users))})" if users else ""
        note(
            f"the existing volume {name}{others} is used as it is, and may be newer than the memory in "
            "the checkpoint",
            code="GPS-521",
        )


def _volumes(names: list[str]) -> str:
    return f"volume{'s' * (len(names) > 1)} {_names(names)}"


def _names(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"
