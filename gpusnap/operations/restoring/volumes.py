"""Decides what Podman does with the named volumes of a restored container, before the restore begins.

Podman uses an existing volume as it is, or refuses, in the same way for all volumes of a container
(`--ignore-volumes`). With that option, it creates missing volumes, empty (libpod, pkg/checkpoint and
Container.restore). gpusnap overwrites no volume, and lets Podman create empty ones only on request. If only
some of the volumes exist, it makes the others itself from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from gpusnap.base.user_errors import Killed
from gpusnap.checkpoints import volumes as records
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP
from gpusnap.checkpoints.formats.podman_writer import has_notify_socket
from gpusnap.engines import podman_objects, podman_work
from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.tar.archive import Entry
from gpusnap.operations import lost_volumes
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.settings import ANNOTATION_PREFIX

CODE = lost_volumes.CODE


@dataclass(frozen=True, slots=True)
class PodmanObjects:
    """The Podman objects of a container: its volumes, those with files in the checkpoint, and its pod."""

    named: tuple[str, ...] = ()
    there: frozenset[str] = frozenset()
    pod: str = ""
    """The ID of the pod that the container was in."""
    name: str = ""
    """The container's name in the checkpoint: any text, if the checkpoint is from elsewhere."""
    annotated: bool = False
    """It may have annotations or labels of ours."""
    container: str = ""
    """The container's ID in the checkpoint: likewise any text."""
    notifies: bool = False
    """conmon makes a socket for it (--sdnotify=container)."""


def list_volumes(config: bytes) -> tuple[str, ...]:
    """Return the volumes of a container by its config.dump (libpod, ContainerConfig.NamedVolumes)."""
    try:
        found = parse_json(config)["namedVolumes"]
        return tuple(dict.fromkeys(str(each["volumeName"]) for each in found))
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()


def find_objects(found: Iterable[Entry]) -> PodmanObjects:
    """Return the volumes of a checkpoint, by the entries of its archive or of its records."""
    names: tuple[str, ...] = ()
    pod = name = container = ""
    there: set[str] = set()
    annotated = notifies = False
    for entry in found:
        if entry.name in FIRST and entry.content is not None:
            content = entry.content.read(LARGEST_DUMP)
            annotated = annotated or ANNOTATION_PREFIX.encode() in content
            if entry.name == FIRST[0]:
                names = list_volumes(content)
                pod, name = read_text(content, "pod"), read_text(content, "name")
                container = read_text(content, "id")
                notifies = has_notify_socket(content)
        elif volume := records.name_of(entry.name) or records.name_in_chunks(entry.name):
            there.add(volume)
    return PodmanObjects(names, frozenset(there), pod, name, annotated, container, notifies)


def read_text(config: bytes, key: str) -> str:
    """Return a field of a container's config.dump (libpod, ContainerConfig); "" without one."""
    try:
        found = parse_json(config)[key]
        return found if isinstance(found, str) else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def choose_pod(found: PodmanObjects, wanted: str) -> str:
    """Return the pod to restore into: the requested one, or the former one if Podman still has it.

    Raises Refused if there is none, or if one is requested for a container that was in none (libpod,
    CRImportCheckpoint).
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
    """What Podman does with the volumes of a checkpoint."""

    of: PodmanObjects
    ignore: bool = False
    """It leaves existing volumes as they are, and creates the others, empty."""
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Existing volumes, with the running containers that use each; empty if that was requested."""
    missing: tuple[str, ...] = ()
    """Volumes that must be made from the checkpoint before the restore."""


def find_in_artifact(artifact: Artifact, blobs: Blobs) -> PodmanObjects:
    """Return the volumes of a checkpoint that is an artifact. Raises ArchiveError, BlobError."""
    if artifact.records is None:
        return PodmanObjects()
    with blobs.open_blob(artifact.records.digest, artifact.records.size) as file:
        return find_objects(entries(file, where=f"the records {artifact.records.digest}"))


def choose(found: PodmanObjects, *, ignore: bool) -> VolumeChoice:
    """Decide what Podman does; `ignore`: leave all volumes as they are.

    Raises Refused if Podman lacks a volume whose files are not in the checkpoint, or has only some of the
    files of one.
    """
    known = podman_objects.volumes() if found.named else set()
    existing = [name for name in found.named if name in known]
    filled = lost_volumes.find_filled(existing)
    if ignore:
        return VolumeChoice(found, ignore=True)
    there = [name for name in existing if name in filled or name not in found.there]
    gone = [name for name in found.named if name not in there]
    lost = [name for name in gone if name not in found.there]
    if lost:
        raise Refused(
            f"Podman has no {_volumes(lost)}, and the checkpoint was made without the files of volumes",
            hint=f"create it (podman volume create {lost[0]}, podman volume import {lost[0]} FILE), or "
            "give --ignore-volumes to start with an empty one",
            code=CODE,
        )
    kept = {name: podman_objects.users_of(name) for name in there}
    return VolumeChoice(found, bool(existing), kept, tuple(gone) if existing else ())


def keep_volumes(choice: VolumeChoice) -> VolumeChoice:
    """Return the choice for the container that the checkpoint ended: it keeps its volumes."""
    return replace(choice, kept={name: users for name, users in choice.kept.items() if users})


@contextmanager
def report_kept_volumes(choice: VolumeChoice) -> Iterator[None]:
    """Report afterwards which volumes are used as they are; after a failure, which new ones are kept.

    Those that Podman created for the container go with it. A new one that is there afterwards may be somebody
    else's.
    """
    named = choice.of.named
    before = podman_objects.volumes() if named else set()
    try:
        yield
    except Killed:
        raise  # Podman may still be at work
    except GpusnapError as error:
        if named and error.code != CODE:
            with podman_work.ignore_signals(), suppress(GpusnapError):
                there = podman_objects.volumes() - before
                if new := [name for name in named if name in there and not podman_objects.users_of(name)]:
                    error.add_hint(
                        f"somebody else may have created the {_volumes(new)} during the restore; if nobody "
                        f"needs what is in there, podman volume rm {' '.join(new)} removes "
                        f"{'it' if len(new) == 1 else 'them'}"
                    )
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
