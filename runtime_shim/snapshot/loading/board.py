"""Shared memory in which a load process reports its progress, and a runtime says what it waits for.

A file without a name (memfd_create(2)) that both have mapped:

    0        the state of the loading (`State`), written by the load process
    1        1 when the container's processes are there, written by the runtime
    8        n, the number of chunks: 8 bytes, little-endian
    64       one byte for each chunk: 1 when it is loaded and its digest was right
    64 + n   one byte for each chunk: 1 when a thread waits for it, written by the runtime
    64 + 2n  JSON: `Facts`

Every value that changes is a single byte, so a reader never gets half of a number.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

from gpusnap.oci.base.dataclass import asdict, dataclass
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks.table import Table
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord

VARIABLE = "GPUSNAP_LOADING"
"""The variable that gives a restore's runtime the path of a `Board`."""
NAME = "gpusnap-loading"
"""The name of the file, as /proc/PID/fd shows it after "memfd:"."""
_STATE, _RESTORED, _HEAD = 0, 1, 64
_COUNT = struct.Struct("<8xQ")
_LARGEST = 1 << 20  # bytes of JSON
_SET = b"\1"


class State(enum.IntEnum):
    """The state of a load process."""

    AT_WORK = 0
    DONE = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class Facts:
    """The part that does not change during the loading."""

    owner: tuple[int, int]
    """The PID of the load process, and its start time."""
    identity: str
    """`digest_contents` of the files and regions that it loads."""
    has_files: bool
    """Whether it loads CRIU's images."""
    has_regions: bool
    """Whether it loads the GPUs' memory."""
    descriptors: tuple[int, ...]
    """The load process's descriptors: first of the files, then of the regions."""


def digest_contents(files: Sequence[FileRecord], regions: Sequence[tuple[int, RegionRecord]]) -> str:
    """A digest of the files and regions (with their processes' PIDs), and of their chunks."""
    found = hashlib.sha256()

    def add(name: str, table: Table) -> None:
        # The bytes may be checked against any of these digests.
        chunks = "".join(f"{c.offset}:{c.size}:{c.plain}:{c.blake3};" for c in table.chunks)
        found.update(f"{name}\0{table.size}\0{chunks}\n".encode())

    for file in files:
        add(f"file {file.name}", file.table)
    for pid, region in regions:
        add(f"region {pid} {region.start:x}", region.table)
    return found.hexdigest()


def list_regions(record: Manifest) -> tuple[tuple[int, RegionRecord], ...]:
    """Return the regions of a checkpoint's GPU memory, with the PIDs of their processes in the container."""
    return tuple((each.pid, region) for each in record.processes for region in each.regions)


def number_chunks(tables: Sequence[Table]) -> dict[tuple[int, int], int]:
    """Number each chunk on a board, by the index of its table and its offset there."""
    places = ((at, chunk.offset) for at, table in enumerate(tables) for chunk in table.chunks)
    return {place: number for number, place in enumerate(places)}


class Board:
    """The shared memory, mapped. Close it."""

    def __init__(self, descriptor: int) -> None:
        """The board owns `descriptor` from now on, even if this fails. Raises OSError, ValueError."""
        self.descriptor = descriptor
        try:
            size = os.fstat(descriptor).st_size
            head = os.pread(descriptor, _HEAD, 0)
            self.chunks = int(_COUNT.unpack_from(head)[0]) if len(head) == _HEAD else size
            if not _HEAD + 2 * self.chunks < size <= _HEAD + 2 * self.chunks + _LARGEST:
                raise ValueError(f"{size} bytes cannot describe {self.chunks} chunks")
            self._memory = mmap.mmap(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def create(cls, chunks: int, facts: Facts) -> Board:
        """Create a board. Raises OSError."""
        text = json.dumps(asdict(facts)).encode("ascii")
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC)
        try:
            os.pwrite(descriptor, _COUNT.pack(chunks), 0)
            os.pwrite(descriptor, text, _HEAD + 2 * chunks)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def open(cls, path: str) -> Board:
        """Open the board of another process. Raises OSError, ValueError."""
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            raise ValueError(f"{path} is not a board")
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))

    @property
    def path(self) -> str:
        """The path with which others open it."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def read_facts(self) -> Facts:
        """Raises ValueError, KeyError, TypeError."""
        found = parse_json(self._memory[_HEAD + 2 * self.chunks :])
        pid, start = found["owner"]
        return Facts(
            (int(pid), int(start)),
            str(found["identity"]),
            bool(found["has_files"]),
            bool(found["has_regions"]),
            tuple(int(each) for each in found["descriptors"]),
        )

    def read_state(self) -> State:
        """Return the state of the load process. Raises ValueError."""
        return State(self._memory[_STATE])

    def write_state(self, state: State) -> None:
        """Set the state; called by the load process."""
        self._memory[_STATE] = state

    def are_processes_restored(self) -> bool:
        """Whether the runtime has restored the container's processes, and needs no more cores for that."""
        return bool(self._memory[_RESTORED])

    def note_restored_processes(self) -> None:
        """Set that the processes are restored; called by the runtime."""
        self._memory[_RESTORED] = 1

    def note_loaded(self, number: int) -> None:
        """Set that a chunk is complete and right; called by the load process."""
        self._memory[_HEAD + number] = 1

    def read_loaded(self) -> bytes:
        """Return a byte for each chunk: 1 if it is loaded."""
        return self._memory[_HEAD : _HEAD + self.chunks]

    def ask_for(self, number: int) -> None:
        """Ask for a chunk that a thread waits for; called by the runtime."""
        self._memory[_HEAD + self.chunks + number] = 1

    def take_wanted(self) -> Iterator[int]:
        """Yield the chunks that were asked for since the last call."""
        begin, end = _HEAD + self.chunks, _HEAD + 2 * self.chunks
        at = begin
        while (at := self._memory.find(_SET, at, end)) >= 0:
            self._memory[at] = 0
            yield at - begin
            at += 1

    def close(self) -> None:
        """Unmap the board. Others that have it open can still read it. May be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            self._memory.close()
            with contextlib.suppress(OSError):
                os.close(descriptor)
