"""Records of suspended containers: their GPU state is in RAM or in a store, and their GPUs are free.

    /run/gpusnap/suspended/<key>.suspended    JSON; gone after a reboot, as are the processes

The file describes the container, and how far a suspend or resume has come:

    suspending ──→ suspended ──→ resuming ──→ resumed ──→ (no file)
        └──→ undone ──→ (no file)

- suspending: no success was reported, and the engine does not resume the container. `gpusnap recover` undoes
  it.
- undone: the suspend failed, and the engine resumes the container. The file stays if GPU state could not be
  restored; then `gpusnap recover` must undo it.
- suspended: the suspend is complete. The journal entry (<key>.json) says where the memory is. `recover` does
  nothing.
- resuming: some of the processes may have their GPU state again. `gpusnap recover` continues the resume.
- resumed: all of them have it; the engine only has to resume the container.

A second file beside it, <key>.paused, says which processes are stopped in the frozen cgroup
(gpu_processes/paused_container.py).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from gpusnap.oci.base.dataclass import asdict, dataclass, field
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
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
    """A process whose GPU state was taken away."""

    pid: int
    start: int
    """As proc.Process.start."""
    inner_pid: int
    """Its PID as the container's init sees it."""
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see."""


@dataclass(frozen=True, slots=True)
class Suspension(journal.Record):
    """A container that is suspended, or in the middle of a suspend or resume."""

    key: str
    name: str
    """Its name in its engine."""
    engine: str
    """podman, or containerd."""
    namespace: str
    """The namespace of containerd; empty for Podman."""
    stage: Stage
    owner: tuple[int, int]
    """PID and start time of the gpusnap that wrote this."""
    init: tuple[int, int]
    """PID and start time of the container's first process."""
    since: str
    """When it was suspended: UTC, in ISO 8601."""
    runtime: str
    """The kind of the real runtime: crun, runc."""
    driver_version: str = ""
    gpus: tuple[GpuRecord, ...] = ()
    """The GPUs that the container could see, with the bytes that it used on each."""
    processes: tuple[SuspendedProcess, ...] = ()
    pairs: tuple[tuple[str, str], ...] = field(default=())
    """(old UUID, new UUID) of a resume in progress."""

    @property
    def gpu_memory(self) -> int:
        """The bytes that the container used, on all GPUs together."""
        return sum(gpu.memory_used for gpu in self.gpus)

    @property
    def is_alive(self) -> bool:
        """Whether its first process still exists."""
        return proc.is_still_running(*self.init)

    def make_ended_error(self, done: str) -> ContainerError:
        """The error if its first process has ended meanwhile. `done`: for example "suspended"."""
        return ContainerError(
            f"container {self.name} exited while it was {done}",
            hint="its own log may say why",
            code="GPS-316",
        )


def write(found: Suspension) -> None:
    """Write the file of a container in place of an earlier one. Raises GpusnapError."""
    journal.write_document(found.key, journal.SUSPENDED, {"version": _VERSION, **asdict(found)})


def drop(key: str) -> None:
    """Remove the record: the container is no longer suspended."""
    journal.drop(key, journal.SUSPENDED)


def read(key: str) -> Suspension | None:
    """Read the record of a container; None if it is not suspended. Raises GpusnapError."""
    document = journal.load(key, journal.SUSPENDED)
    if document is None:
        return None
    try:
        journal.check_version(document, _VERSION)
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


def find(unreadable: dict[str, GpusnapError] | None = None) -> Iterator[Suspension]:
    """Yield all records, by container. `unreadable` and errors: as in `journal.read_each`."""
    yield from journal.read_each(journal.list_noted(journal.SUSPENDED), read, unreadable)


def find_by_container(container: str) -> Suspension | None:
    """Return the record of a container by its ID, in any engine. Raises GpusnapError."""
    keys = (key for key in journal.list_noted(journal.SUSPENDED) if container_key.id_of(key) == container)
    return next((found for key in keys if (found := read(key)) is not None), None)


def make_unfinished_error(found: Suspension) -> GpusnapError:
    """The error for an unfinished suspend or resume that no gpusnap works on, according to the lock."""
    what = "suspend" if found.stage in THERE else "resume"
    return GpusnapError(
        f"a {what} of container {found.container} was interrupted",
        hint=f"gpusnap recover {found.container}",
        code="GPS-021",
    )
