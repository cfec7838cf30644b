"""Containers that are suspended: their GPU state is in RAM or in a store, and their GPUs are free.

    /run/gpusnap/suspended/<key>.suspended    JSON; gone with the next boot, as the processes are

The file says what the container had, and how far a suspend or resume has come:

    suspending ──→ suspended ──→ resuming ──→ resumed ──→ (no file)
        └──→ undone ──→ (no file)

- suspending: nobody has been told of success, and the engine lets nothing go on. `gpusnap recover` undoes it.
- undone: it has failed, and the engine lets the container go on. The file stays where GPU state could not be
  given back; then `gpusnap recover` is to undo it.
- suspended: it stands. Its journal entry (<key>.json) says where its bytes are, and nobody recovers it.
- resuming: some of its processes may have their GPU state again. `gpusnap recover` goes on.
- resumed: all have; only the engine has to let the container go on.

A second file beside it, <key>.paused, says which processes stand in the frozen cgroup (paused_container.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import asdict, field

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal

_VERSION = 1


class Stage(enum.StrEnum):
    """How far a suspend or resume has come."""

    SUSPENDING = "suspending"
    UNDONE = "undone"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    RESUMED = "resumed"


THERE = (Stage.SUSPENDING, Stage.UNDONE)
"""The stages of a suspend that has not succeeded."""


@dataclass(frozen=True, slots=True)
class SuspendedProcess:
    """A process whose GPU state was taken."""

    pid: int
    start: int
    """As proc.Process.start."""
    inner_pid: int
    """Its PID as the container's init sees it."""
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """A container that is suspended, or on its way there or back."""

    key: str
    name: str
    """As its engine calls it."""
    engine: str
    """podman, or containerd."""
    namespace: str
    """That of containerd; empty for Podman."""
    stage: Stage
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote this."""
    init: tuple[int, int]
    """PID and start time of the container's first process."""
    since: str
    """When it was suspended: UTC, as ISO 8601 has it."""
    runtime: str
    """The kind of the real runtime."""
    driver_version: str = ""
    gpus: tuple[GpuRecord, ...] = ()
    """Those that the container could see, with the bytes that it used."""
    processes: tuple[SuspendedProcess, ...] = ()
    pairs: tuple[tuple[str, str], ...] = field(default=())
    """(old UUID, new UUID) of a resume that is under way."""

    @property
    def container(self) -> str:
        """Its ID."""
        return container_key.id_of(self.key)

    @property
    def gpu_memory(self) -> int:
        """Bytes that it used, over all GPUs."""
        return sum(gpu.memory_used for gpu in self.gpus)

    @property
    def is_alive(self) -> bool:
        """Whether its first process is still there."""
        return proc.is_same(*self.init) and not proc.is_dying(self.init[0])

    def make_ended_error(self, done: str) -> ContainerError:
        """What to say where its first process is gone, after all. `done`: what was done to it."""
        return ContainerError(
            f"container {self.name} exited while it was {done}",
            hint="its own log may say why",
            code="GPS-316",
        )

    @property
    def at_work(self) -> bool:
        """Whether the gpusnap that wrote this is still there."""
        return proc.is_same(*self.owner)


def write(found: Suspension) -> None:
    """Write the file of a container in place of an earlier one. Raises GpusnapError."""
    journal.write_document(found.key, journal.SUSPENDED, {"version": _VERSION, **asdict(found)})


def drop(key: str) -> None:
    """The container is suspended no more."""
    journal.drop(key, journal.SUSPENDED)


def read(key: str) -> Suspension | None:
    """What is on file of a container; None where it is not suspended. Raises GpusnapError."""
    document = journal.load(key, journal.SUSPENDED)
    if document is None:
        return None
    try:
        return Suspension(
            key=key,
            name=str(document["name"]),
            engine=str(document["engine"]),
            namespace=str(document["namespace"]),
            stage=Stage(document["stage"]),
            owner=journal.identity(document["owner"]),
            init=journal.identity(document["init"]),
            since=str(document["since"]),
            runtime=str(document["runtime"]),
            driver_version=str(document["driver_version"]),
            gpus=tuple(GpuRecord(**each) for each in document["gpus"]),
            processes=tuple(
                SuspendedProcess(
                    int(each["pid"]),
                    int(each["start"]),
                    int(each["inner_pid"]),
                    tuple((str(uuid), int(used)) for uuid, used in each["gpus"]),
                )
                for each in document["processes"]
            ),
            pairs=tuple((str(old), str(new)) for old, new in document["pairs"]),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise GpusnapError(
            f"the record of the suspended container {container_key.id_of(key)} was not written by this "
            f"version of gpusnap: {error!r}",
            hint="another version wrote it",
            code="GPS-023",
        ) from error


def find() -> Iterator[Suspension]:
    """All of them, by container. Raises GpusnapError for one that cannot be read."""
    for key in journal.list_noted(journal.SUSPENDED):
        found = read(key)
        if found is not None:
            yield found


def find_by_container(container: str) -> Suspension | None:
    """The one of a container by its ID, whatever runs it. Raises GpusnapError."""
    keys = (key for key in journal.list_noted(journal.SUSPENDED) if container_key.id_of(key) == container)
    return next((found for key in keys if (found := read(key)) is not None), None)


def make_unfinished_error(found: Suspension) -> GpusnapError:
    """What to say of one on its way there or back, of which the lock says that nobody is at work on it."""
    what = "suspend" if found.stage in THERE else "resume"
    return GpusnapError(
        f"a {what} of container {found.container} was interrupted",
        hint=f"gpusnap recover {found.container}",
        code="GPS-021",
    )
