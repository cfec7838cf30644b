"""GPU memory between processes, files of memory.stage and the layout of a checkpoint."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DiskFull, OciError
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.errors import MAKE_ROOM, GpusnapError, ImageError, reason
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps as regions
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.process.memory.maps import Region
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Remote, enter_thread
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.records import journal

OWN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # asm-generic/mman-common.h, MAP_FIXED
"""Memory of a process' own, in the place of what is there."""
EMPTY = OWN | 0x4000  # ibid., MAP_NORESERVE
"""The same where nothing is to be, but the addresses are to stay taken."""
_PIECE = 64 << 20  # bytes that are held at once of a process' own memory
# How often the removal of what is staged is tried, and seconds between two tries: this host may lack memory
# or descriptors for a moment.
_TRIES, _PAUSE = 3, 0.05
_SHARE = 4  # of the memory that is available, when the settings say nothing


@dataclass(frozen=True, slots=True)
class ProcessRegion:
    """A region of a process, to read from and to fill: gpusnap.oci.chunks.buffers' Source and Target."""

    pid: int
    start: int
    size: int

    def view(self, offset: int, size: int) -> None:
        """It is no memory of ours: as a Target it is written to."""

    def read(self, offset: int, into: memoryview) -> None:
        """In the calling thread alone: the crew of gpusnap.oci.chunks.writer has one for each core."""
        copies.read(self.pid, self.start + offset, into, threads=1)

    def write(self, offset: int, data: memoryview) -> None:
        """Likewise."""
        copies.write(self.pid, self.start + offset, data, threads=1)


def fill(layout: Layout, wanted: Mapping[int, Iterable[tuple[Region, Table]]], settings: Memory) -> None:
    """Fill regions of processes that have been freed; those that ended are left out. Raises ImageError."""
    pairs = [(pid, region, table) for pid, found in wanted.items() for region, table in found]
    pairs = [each for each in pairs if proc.is_running(each[0])]
    if not pairs:
        return
    from gpusnap.oci.chunks import reader  # with zstandard, which what stayed in RAM does not need

    with as_image_error(layout.path):
        reader.read(
            [table for _, _, table in pairs],
            layout,
            [ProcessRegion(pid, region.start, region.size) for pid, region, _ in pairs],
            threads=settings.threads or copies.cores(),
            ceiling=ceiling(settings),
        )


def map_areas(
    key: str,
    wanted: Mapping[int, Sequence[Area]],
    *,
    hint: str = "",
    mapped: Callable[[int, Remote], None] | None = None,
    before_copy: Callable[[], None] | None = None,
) -> dict[int, GpusnapError]:
    """Map staged regions into their processes; those that ended are left out. What kept some from it, by PID.

    What a process writes there does not get into the file. Where it cannot have the file (SELinux; a limit on
    its descriptors), the bytes are copied, once `before_copy` has returned. `mapped`: called for each process
    that has the files, which it cannot touch yet, with what makes system calls inside it. `key`: the
    container's; `hint`: what to do where that fails, if the bytes do not stay in the stage.
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
            if proc.is_running(pid):
                raise GpusnapError(
                    f"the GPU memory of process {pid} ({proc.comm(pid)}) cannot be returned to it: "
                    f"{reason(error)}",
                    hint=hint
                    or f"its bytes are in {os.path.dirname(wanted[pid][0].path)}; run gpusnap recover",
                    code="GPS-027",
                ) from error

    return run_at_once(one, [pid for pid in wanted if proc.is_running(pid)]).errors


def populate(areas: Mapping[int, Area], at: int, chunk: Chunk) -> None:
    """Have pages behind a chunk of an area, before that is written; `areas` may lack some. Raises OSError.

    The kernel would end us by SIGBUS where we write to a page that it has no memory for.
    """
    if at in areas:
        areas[at].populate(chunk.offset, chunk.size, threads=1)


def copy(pid: int, areas: Sequence[Area]) -> None:
    """Copy staged regions to where the process has memory of its own for them. Raises OSError."""
    for area in areas:
        if area.size > proc.available_memory():
            raise OSError(errno.ENOMEM, "there is not enough memory to copy the saved GPU memory", area.path)
        copies.write(pid, area.address, area.view(0, area.size))


def release_memory(key: str, pid: int, regions_of: Iterable[tuple[int, int]]) -> None:
    """Leave nothing of regions (address, bytes) in a process that stands but their addresses.

    Their bytes are elsewhere, and the journal says where. Raises GpusnapError.
    """
    try:
        with enter_thread(pid) as remote, journal.keep_thread(key, pid, remote.saved):
            for start, size in regions_of:
                remote.mmap(start, size, mmap.PROT_READ | mmap.PROT_WRITE, EMPTY)
    except OSError as error:
        if proc.is_running(pid):
            raise GpusnapError(
                f"the memory of process {pid} ({proc.comm(pid)}) that contained its GPU state cannot be "
                f"freed: {reason(error)}",
                hint="it uses RAM until the container is resumed",
                code="GPS-027",
            ) from error


def replace_staged_memory(key: str, pid: int) -> None:
    """Let a process that stands have memory of its own where it still has a staged file.

    After the driver's restore, that has taken what it needed of the regions and unmapped them: what is left
    was the process' own memory (its heap grows while the driver works), and must be such again, of which it
    may give pages back and find zeros. Raises GpusnapError.
    """
    try:
        # By the device as well: a file of the container's own may have such a name.
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
        if proc.is_running(pid):
            raise GpusnapError(
                f"memory of process {pid} ({proc.comm(pid)}) is still mapped from a gpusnap file: "
                f"{reason(error)}",
                hint="free some memory, and run gpusnap recover",
                code="GPS-027",
            ) from error


def count_reading_threads(settings: Memory) -> int:
    """How many threads of a restore read and decode the GPUs' memory.

    In the runtime and in a load process; the encodings of chunks are chosen for as many. Some cores are left
    to the runtime and to CRIU, which nobody would wait for any shorter else.
    """
    return settings.threads or max(1, copies.cores() * 3 // 4)


def ceiling(settings: Memory) -> int:
    """Bytes that gpusnap may hold for chunks under way."""
    return settings.ceiling or max(proc.available_memory() // _SHARE, 256 << 20)


@contextlib.contextmanager
def as_image_error(folder: str) -> Iterator[None]:
    """What goes wrong with the layout in a folder, as an ImageError."""
    try:
        yield
    except DiskFull as error:
        raise ImageError(f"{error}", hint=MAKE_ROOM, code=error.code) from error
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
    """Whether it says that there is no room for a staged file, that is, no RAM."""
    in_stage = str(error.filename or "").startswith(stage.FOLDER + "/")
    return in_stage and error.errno in (errno.ENOSPC, errno.ENOMEM)


def free(staged: Stage) -> None:
    """Remove what is staged, which takes RAM. Where that fails it is said, and `gpusnap recover` frees it."""
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
