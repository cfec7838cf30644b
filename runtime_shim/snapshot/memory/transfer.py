"""Moves GPU memory between processes, files of memory.stage and the layout of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DiskFull, OciError, Stalled
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, raise_as, reason, suggest_room
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory.maps import Region
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, enter_thread
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.records import journal

OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # asm-generic/mman-common.h, MAP_FIXED
"""The process' own memory, in place of what is mapped there."""
EMPTY = OWN | 0x4000  # ibid., MAP_NORESERVE
"""The same, but without memory behind it: only the addresses stay reserved."""
_PIECE = 64 << 20  # bytes of a process' memory that are buffered at once
# How often to try to remove the stage, and seconds between two tries: the host may be short of memory or
# descriptors for a moment.
_TRIES, _PAUSE = 3, 0.05
STALL = 60.0
"""Seconds for which the store may deliver no byte of a container's memory. A slow one delivers some."""
_SHARE = 4  # one part in this many of the available memory, by default


@dataclass(frozen=True, slots=True)
class ProcessRegion:
    """A region of a process to read or to fill: a Source and a Target of gpusnap.oci.chunks.buffers."""

    pid: int
    start: int
    size: int

    def view(self, offset: int, size: int) -> None:
        """Return None: it is another process' memory, so `write` must be used."""

    def read(self, offset: int, into: memoryview) -> None:
        """Read in the calling thread only: gpusnap.oci.chunks.writer already uses a thread for each core."""
        copies.read(self.pid, self.start + offset, into, threads=1)

    def write(self, offset: int, data: memoryview) -> None:
        """Write, also in the calling thread only. Does nothing if the process has ended."""
        try:
            copies.write(self.pid, self.start + offset, data, threads=1)
        except OSError:
            if not proc.is_dying(self.pid):
                raise


def fill(
    layout: Layout,
    wanted: Mapping[int, Iterable[tuple[Region, Table]]],
    settings: Memory,
    *,
    interrupt: Callable[[], object] = lambda: None,
) -> None:
    """Fill freed regions of processes from the layout. Skips ended processes.

    `interrupt`: called from time to time while it reads, and may raise an error. Raises ImageError, also if
    nothing can be read for `STALL` seconds.
    """
    pairs = [(pid, region, table) for pid, found in wanted.items() for region, table in found]
    pairs = [each for each in pairs if proc.is_running(each[0])]
    if not pairs:
        return
    from gpusnap.oci.chunks import reader  # imports zstandard, which is not needed if all is in RAM

    with as_image_error(layout.path):
        reader.read(
            [table for _, _, table in pairs],
            layout,
            [ProcessRegion(pid, region.start, region.size) for pid, region, _ in pairs],
            threads=settings.threads or copies.cores(),
            ceiling=ceiling(settings),
            patience=STALL,
            interrupt=interrupt,
        )


def map_areas(
    key: str,
    wanted: Mapping[int, Sequence[Area]],
    *,
    hint: str = "",
    mapped: Callable[[int, Remote], None] | None = None,
    before_copy: Callable[[], None] | None = None,
) -> dict[int, GpusnapError]:
    """Map staged regions into their processes; return the errors by PID. Skips ended processes.

    The mappings are private: what a process writes there does not get into the file. If a process cannot map
    the file (SELinux; a limit on its descriptors), `before_copy` is called and then the bytes are copied.
    `mapped`: called for each process after the files are mapped, while it is still stopped, with its PID and
    a Remote that makes system calls in it. `key`: the container's. `hint`: what to do on failure, if the
    bytes do not stay in the stage.
    """

    def map_files(pid: int) -> bool:
        try:
            with enter_thread(pid) as remote, journal.keep_thread(key, pid, remote.saved):
                for area in wanted[pid]:
                    remote.map_file(area.descriptor, area.address, area.size, area.lead, shared=False)
                if mapped is not None:
                    mapped(pid, remote)
        except ProcessLookupError:
            raise
        except (OSError, GpusnapError):
            return False
        return True

    def one(pid: int) -> None:
        try:
            if not map_files(pid):
                if before_copy is not None:
                    before_copy()
                copy(pid, wanted[pid])
        except OSError as error:
            if not proc.is_dying(pid):
                raise GpusnapError(
                    f"the GPU memory of process {pid} ({proc.comm(pid)}) cannot be returned to it: "
                    f"{reason(error)}",
                    hint=hint
                    or f"its bytes are in {os.path.dirname(wanted[pid][0].path)}; run gpusnap recover",
                    code="GPS-027",
                ) from error

    return run_at_once(one, [pid for pid in wanted if proc.is_running(pid)]).errors


def populate(areas: Mapping[int, Area], at: int, chunk: Chunk) -> None:
    """Allocate the pages of a chunk in an area, before the chunk is written there. Raises OSError.

    If memory ran out during the write, the kernel would kill gpusnap with SIGBUS. Does nothing if `areas` has
    no area at `at`.
    """
    if at in areas:
        areas[at].populate(chunk.offset, chunk.size, threads=1)


def copy(pid: int, areas: Sequence[Area]) -> None:
    """Copy staged regions into the process' own memory at their addresses. Raises OSError."""
    for area in areas:
        if area.size > proc.available_memory():
            raise OSError(errno.ENOMEM, "there is not enough memory to copy the saved GPU memory", area.path)
        copies.write(pid, area.address, area.view(0, area.size))


def release_memory(key: str, pid: int, regions_of: Iterable[tuple[int, int]]) -> None:
    """Free the memory of regions (address, bytes) in a stopped process; their addresses stay reserved.

    The bytes must be elsewhere, and the journal must say where. Raises GpusnapError.
    """
    try:
        with enter_thread(pid) as remote, journal.keep_thread(key, pid, remote.saved):
            for start, size in regions_of:
                remote.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, EMPTY)
    except OSError as error:
        if not proc.is_dying(pid):
            raise GpusnapError(
                f"the memory of process {pid} ({proc.comm(pid)}) that contained its GPU state cannot be "
                f"freed: {reason(error)}",
                hint="it uses RAM until the container is resumed",
                code="GPS-027",
            ) from error


def replace_staged_memory(key: str, pid: int) -> None:
    """Replace staged files that are still mapped in a stopped process by its own memory, with the same bytes.

    The driver's restore has unmapped the regions that it used. The other mappings of staged files were the
    process' own memory before (its heap grows while the driver works). They must be anonymous memory again,
    so that pages that the process frees read as zeros. Raises GpusnapError.
    """
    try:
        # The device is compared too: a file of the container may have such a name.
        ours = stage.device()
        left = [
            m for m in regions.mappings(pid) if m.device == ours and m.name.startswith(stage.FOLDER + "/")
        ]
        if not left:
            return
        with enter_thread(pid) as remote, journal.keep_thread(key, pid, remote.saved):
            held = bytearray(min(_PIECE, max(each.size for each in left)))
            for each in left:
                for start in range(each.start, each.end, _PIECE):
                    with memoryview(held)[: min(_PIECE, each.end - start)] as piece:
                        copies.read(pid, start, piece)
                        remote.mmap(start, piece.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, OWN)
                        copies.write(pid, start, piece)
    except OSError as error:
        if not proc.is_dying(pid):
            raise GpusnapError(
                f"memory of process {pid} ({proc.comm(pid)}) is still mapped from a gpusnap file: "
                f"{reason(error)}",
                hint="free some memory, and run gpusnap recover",
                code="GPS-027",
            ) from error


def count_reading_threads(settings: Memory) -> int:
    """Return how many threads of a restore read and decode GPU memory.

    This holds in the runtime and in a load process, and the encodings of chunks are chosen for this number.
    The other cores are left to the runtime and to CRIU: with more threads, the restore would not be faster.
    """
    return settings.threads or max(1, copies.cores() * 3 // 4)


def ceiling(settings: Memory) -> int:
    """Return how many bytes of memory gpusnap may use for chunks that it is reading or writing."""
    return settings.ceiling or max(proc.available_memory() // _SHARE, 256 << 20)


@contextlib.contextmanager
def as_image_error(folder: str) -> Iterator[None]:
    """Raise errors of the layout in a directory as ImageError."""
    try:
        yield
    except DiskFull as error:
        raise ImageError(f"{error}", hint=suggest_room(error.folder), code=error.code) from error
    except Stalled as error:
        raise ImageError(
            f"the GPU memory in {folder} cannot be transferred: {error}",
            hint="check that this file system responds, for example its NFS server, and try again; the "
            "memory stays there",
            code="GPS-512",
        ) from error
    except OciError as error:
        raise ImageError(f"the GPU memory in {folder}: {error}", code=error.code or "GPS-512") from error
    except OSError as error:
        if is_full(error):
            raise ImageError(
                f"there is no RAM left for the GPU memory, which has to pass through {stage.FOLDER}",
                hint="free some memory and try again",
                code="GPS-216",
            ) from error
        raise ImageError(
            f"the GPU memory in {folder} cannot be transferred: {reason(error)}", code="GPS-512"
        ) from error


def is_full(error: OSError) -> bool:
    """Whether the error means that there is no room for a staged file, that is, no RAM."""
    in_stage = str(error.filename or "").startswith(stage.FOLDER + "/")
    return in_stage and error.errno in (errno.ENOSPC, errno.ENOMEM)


def remove_staged(key: str) -> None:
    """Remove the staged files that a killed gpusnap left of a container, by its key. Raises GpusnapError."""
    container = container_key.id_of(key)
    with raise_as(
        GpusnapError,
        f"temporary files of container {container} cannot be removed",
        hint=f"they use RAM; remove them from {stage.FOLDER}",
        code="GPS-027",
    ):
        stage.remove(key)


def free(staged: Stage) -> None:
    """Remove the stage, which uses RAM. A failure is only reported; `gpusnap recover` can free it later."""
    for attempt in range(_TRIES):
        try:
            staged.remove()
            return
        except OSError as error:
            if attempt == _TRIES - 1:
                note(
                    f"temporary copies of GPU memory still use RAM: {reason(error)}; gpusnap recover "
                    "frees it",
                    code="GPS-027",
                )
        time.sleep(_PAUSE)
