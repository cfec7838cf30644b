"""The GPUs' memory beside CRIU's images, as chunks of an OCI layout in the image's folder gpusnap/.

    driver checkpoint ─→ regions ─→ chunks in gpusnap/blobs ─→ journal ─→ regions freed ─→ CRIU dumps the rest
    CRIU restores the rest ─→ regions filled from the chunks ─→ driver restore

A region is what the driver's checkpoint mapped into a process. Its bytes are in files before the region is
freed, and the journal says in which: a gpusnap that is killed at any moment loses nothing, `recover` puts the
bytes back. Several processes are written, freed and filled at once, by all cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oci import reading, writing
from oci.chunks import Table, descriptors
from oci.errors import OciError
from oci.layout import Layout
from oci.manifest import Index, empty_descriptor
from oci.manifest import Manifest as Artifact
from runtime_shim import journal, proc
from runtime_shim.errors import GpusnapError, ImageError, reason
from runtime_shim.gpu.together import at_once
from runtime_shim.manifest import FOLDER, Manifest, RegionRecord
from runtime_shim.memory import copies, regions
from runtime_shim.memory.regions import Region
from runtime_shim.memory.remote import inside
from runtime_shim.settings import Memory
from runtime_shim.stillness import populated

__all__ = ["ARTIFACT", "Chunks", "Filling", "Part", "fill", "remove_layout"]

ARTIFACT = "application/vnd.gpusnap.checkpoint.v1+json"
_DONTNEED = 4  # asm-generic/mman-common.h
_SHARE = 4  # of the memory that is available, when the settings say nothing


@dataclass(frozen=True, slots=True)
class Part:
    """A region of a process, to read from and to fill: oci.buffers' Source and Target."""

    pid: int
    start: int
    size: int

    def read(self, offset: int, into: memoryview) -> None:
        """In the calling thread alone: the crew of oci.writing has one for each core."""
        copies.read(self.pid, self.start + offset, into, threads=1)

    def write(self, offset: int, data: memoryview) -> None:
        """Likewise."""
        copies.write(self.pid, self.start + offset, data, threads=1)


class Chunks:
    """`suspension.Pages`: taken out of the processes into chunks, and given back from them."""

    name = "chunks"

    def __init__(self, image_path: str, container: str, settings: Memory) -> None:
        self._image = image_path
        self._layout = Layout(os.path.join(image_path, FOLDER))
        self._container, self._settings = container, settings
        self._before: dict[int, tuple[regions.Mapping, ...]] = {}
        self._tables: dict[int, tuple[tuple[Region, Table], ...]] = {}
        self._freed: set[int] = set()

    def watch(self, pid: int) -> None:
        """Remember what the process has mapped before the driver's checkpoint."""
        self._before[pid] = _mappings(pid)

    @contextlib.contextmanager
    def thread(self, pid: int, tid: int) -> Iterator[None]:
        """Let the driver's thread run for its checkpoint, with its large mapping populated for it."""
        with populated(pid, tid, threads=self._settings.threads):
            yield

    def take(self, pids: Sequence[int]) -> None:
        """Write the regions of those that were not taken yet, note where they are, and free them."""
        fresh = {pid: self._regions(pid) for pid in pids if pid not in self._tables}
        parts = [Part(pid, each.start, each.size) for pid, found in fresh.items() for each in found]
        with _as_image_error(self._layout.path):
            self._layout.create()
            tables = iter(
                writing.write(
                    parts,
                    self._layout,
                    threads=self._settings.threads or copies.cores(),
                    ceiling=_ceiling(self._settings),
                    chunk_size=self._settings.chunk_size,
                    level=self._settings.level,
                )
            )
        for pid, found in fresh.items():
            self._tables[pid] = tuple((each, next(tables)) for each in found)
        journal.write(self._container, self._image, self.records())
        self._freed.update(fresh)
        at_once(self._free, fresh).raise_first()

    def give_back(self, pids: Sequence[int]) -> None:
        """Fill the regions of those that were freed."""
        wanted = {pid: self._tables[pid] for pid in pids if pid in self._freed}
        fill(self._layout, wanted, self._settings)
        self._freed.difference_update(wanted)

    def records(self) -> Mapping[int, tuple[RegionRecord, ...]]:
        """By PID, for manifest and journal."""
        return {
            pid: tuple(RegionRecord(region.start, table) for region, table in found)
            for pid, found in self._tables.items()
        }

    def commit(self) -> None:
        """Make the chunks durable, and the layout one that anybody can read. Raises ImageError."""
        tables = [table for found in self._tables.values() for _, table in found]
        with _as_image_error(self._layout.path):
            artifact = Artifact(config=empty_descriptor(), layers=descriptors(tables), artifact_type=ARTIFACT)
            self._layout.add_blob(b"{}")
            self._layout.commit(Index((self._layout.add_manifest(artifact),)))

    def discard(self) -> None:
        """Remove the layout, unless a process waits for its bytes. Raises ImageError."""
        if any(proc.running(pid) for pid in self._freed):
            return
        remove_layout(self._image)

    def _regions(self, pid: int) -> tuple[Region, ...]:
        return regions.regions(self._before.get(pid, ()), _mappings(pid))

    def _free(self, pid: int) -> None:
        """In a thread of its own for each process, which is the tracer."""
        found = [region for region, _ in self._tables[pid]]
        if not found:
            return
        try:
            with inside(pid) as remote, journal.thread(self._container, pid, remote.saved):
                for region in found:
                    remote.madvise(region.start, region.size, _DONTNEED)
        except OSError as error:
            if proc.running(pid):
                raise GpusnapError(
                    f"the GPU memory of process {pid} ({proc.comm(pid)}) is written, but cannot be freed in "
                    f"it: {reason(error)}",
                    hint="set memory.pages to criu",
                ) from error


class Filling:
    """The chunks of a checkpoint on their way back, begun before the container is there."""

    def __init__(self, image_path: str, record: Manifest, settings: Memory) -> None:
        """Raises ImageError where the manifest's tables or the layout cannot be right."""
        self._path = os.path.join(image_path, FOLDER)
        self._regions = [(p.pid, region) for p in record.processes for region in p.regions]
        with _as_image_error(self._path):
            self._reading = reading.Reading(
                [region.table for _, region in self._regions],
                Layout(self._path),
                threads=settings.threads or copies.cores(),
                ceiling=_ceiling(settings),
            )

    def __enter__(self) -> Filling:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()

    def deliver(self, by_inner: Mapping[int, int]) -> None:
        """Fill every region; `by_inner` has this host's PID by the container's. Raises ImageError."""
        targets = [Part(by_inner[pid], region.start, region.table.size) for pid, region in self._regions]
        with _as_image_error(self._path):
            self._reading.deliver(targets)


def fill(layout: Layout, wanted: Mapping[int, Iterable[tuple[Region, Table]]], settings: Memory) -> None:
    """Fill regions of processes that have been freed; those that ended are left out. Raises ImageError."""
    pairs = [(pid, region, table) for pid, found in wanted.items() for region, table in found]
    pairs = [each for each in pairs if proc.running(each[0])]
    with _as_image_error(layout.path):
        reading.read(
            [table for _, _, table in pairs],
            layout,
            [Part(pid, region.start, region.size) for pid, region, _ in pairs],
            threads=settings.threads or copies.cores(),
            ceiling=_ceiling(settings),
        )


def remove_layout(image_path: str) -> None:
    """Remove the layout of a checkpoint that came to nothing. Raises ImageError."""
    folder = os.path.join(image_path, FOLDER)
    try:
        shutil.rmtree(os.path.join(folder, "blobs"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ImageError(f"the layout in {folder} cannot be removed: {reason(error)}") from error
    for name in ("index.json", "oci-layout"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))


def _ceiling(settings: Memory) -> int:
    """Bytes that gpusnap may hold for chunks under way."""
    return settings.ceiling or max(proc.available_memory() // _SHARE, 256 << 20)


def _mappings(pid: int) -> tuple[regions.Mapping, ...]:
    """None for a process that ended; what else is wrong with it the next step will say."""
    try:
        return regions.mappings(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()


@contextlib.contextmanager
def _as_image_error(folder: str) -> Iterator[None]:
    try:
        yield
    except OciError as error:
        raise ImageError(f"the GPU memory in {folder}: {error}") from error
    except OSError as error:
        raise ImageError(f"the GPU memory in {folder} cannot be carried: {reason(error)}") from error
