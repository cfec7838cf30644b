"""The runtime's side of a load process: opens its files, waits for missing chunks, and handles its end.

See load_process.py. The runtime opens all files before it depends on them, and gives them names among those
of its container. A chunk counts as loaded when the load process has set its byte on the board, which it does
after it found the digest right. When the load process ends, the runtime loads the missing chunks itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

from gpusnap.oci.base.errors import Cancelled
from gpusnap.oci.chunks.reader import Reader
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.deadlines import wait_for_end
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading.board import (
    VARIABLE,
    Board,
    State,
    digest_contents,
    list_regions,
    number_chunks,
)
from gpusnap.runtime_shim.snapshot.loading.descriptors import OF_A_FILE, may_open
from gpusnap.runtime_shim.snapshot.loading.source import ImageRebuild
from gpusnap.runtime_shim.snapshot.memory import transfer

# Seconds without a chunk until the runtime loads the rest itself, and bytes per second that are added for the
# next chunk.
_STUCK, _SLOWEST = 10.0, 4 << 20
# Seconds for a killed load process to end.
_ENDING = 10.0
# Seconds between two checks: while CRIU works, and when a process waits.
_LOOK, _LOOK_CLOSELY = 0.01, 0.001
# Errors that mean that a load process's files cannot be used.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, GpusnapError)
_LOADED, _NOT_LOADED = b"\1", b"\0"


class JoinedProcess:
    """A load process, and its files under names of the container. Close it."""

    def __init__(
        self,
        board: Board,
        owner: tuple[int, int],
        files: Sequence[FileRecord],
        regions: Sequence[tuple[int, RegionRecord]],
        stage: Stage,
    ) -> None:
        """`stage`: for the names of the container."""
        self.board, self._owner, self._stage = board, owner, stage
        self.files, self.regions = tuple(files), tuple(regions)
        self.paths: dict[str, str] = {}
        """The path of each file, by its name."""
        self.areas: list[Area] = []
        """The files of the regions; whoever takes them closes them."""
        tables = [*(file.table for file in files), *(region.table for _, region in regions)]
        self.of_files = sum(len(file.table.chunks) for file in files)
        """The number of chunks of files, which come first."""
        largest = max((chunk.stored for table in tables for chunk in table.chunks), default=0)
        self._patience = _STUCK + largest / _SLOWEST
        self._seen, self._since = b"", time.monotonic()
        self._lock = threading.Lock()

    def take_files(self, descriptors: Sequence[int]) -> None:
        """Open the files of the load process, and give them names. Raises OSError, ValueError."""
        wanted = [(f"images-{file.name}", 0, file.table.size) for file in self.files]
        wanted += [
            (f"{pid}-{region.start:x}", region.start, region.table.size) for pid, region in self.regions
        ]
        if len(descriptors) != len(wanted):
            raise ValueError("it has not a descriptor for each file")
        pid, start = self._owner
        device = os.stat(tmpfs.FOLDER).st_dev
        names: list[str] = []
        for number, (name, address, size) in zip(descriptors, wanted, strict=True):
            found = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(found)
                shape = (stat.S_IFMT(status.st_mode), status.st_dev, status.st_size)
                if shape != (stat.S_IFREG, device, address % copies.HUGE + size):
                    raise ValueError(f"descriptor {number} is of another file")
                names.append(self._stage.name_unnamed(found, name))
            finally:
                os.close(found)
        if not proc.is_same(pid, start):  # another process may have had that PID
            raise ValueError("it has ended")
        self.paths = {file.name: path for file, path in zip(self.files, names, strict=False)}
        for (_, region), path in zip(self.regions, names[len(self.files) :], strict=True):
            self.areas.append(Area(path, region.start, region.table.size))

    def drop_areas(self) -> None:
        """Close the regions if nobody has taken them."""
        for area in self.areas:
            area.close()

    def remove_files(self) -> None:
        """Remove CRIU's images, which nobody uses, because they take RAM."""
        for path in self.paths.values():
            with contextlib.suppress(OSError):
                os.unlink(path)

    def has_files(self) -> bool:
        """Whether CRIU's images are loaded."""
        return self.board.read_loaded().find(_NOT_LOADED, 0, self.of_files) < 0

    def is_at_work(self) -> bool:
        """Whether the load process may still load something."""
        with self._lock:
            loaded = self.board.read_loaded()
            if loaded != self._seen:
                self._seen, self._since = loaded, time.monotonic()
            if time.monotonic() - self._since > self._patience:
                return False
        try:
            return self.board.read_state() is State.AT_WORK and proc.is_same(*self._owner)
        except ValueError:
            return False

    def kill(self) -> None:
        """Kill the load process, unless it is done. After that nothing writes to the files.

        Raises GpusnapError if it does not end.
        """
        with contextlib.suppress(ValueError):
            if self.board.read_state() is State.DONE:
                return
        kill_process(*self._owner)

    def close(self) -> None:
        """Close the board, and remove the names."""
        self.board.close()
        transfer.free(self._stage)


def kill_process(pid: int, start: int) -> None:
    """Kill the process that began at `start`, and wait until it has ended. Raises GpusnapError."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError as error:
        raise GpusnapError(f"the load process {pid} cannot be ended: {error.strerror}") from error
    try:
        # After pidfd_open, so the descriptor is that of this process. Its first thread may be a zombie while
        # others are still in the kernel.
        if not proc.exists(pid, start):
            return
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        if not wait_for_end(descriptor, _ENDING):
            raise GpusnapError(
                f"the load process {pid} was killed, and has not ended within {_ENDING:g} s",
                hint="see whether the disk with the checkpoint answers, and restore again",
                code="GPS-512",
            )
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


def join(
    record: Manifest, key: str, settings: Memory, environ: Mapping[str, str] = os.environ
) -> JoinedProcess | None:
    """Join the load process of this restore, for the container with this key; None if there is none.

    If its files cannot be used, the load process is killed.
    """
    path = environ.get(VARIABLE)
    if not path or settings.ceiling:
        return None
    try:
        board = Board.open(path)
    except (OSError, ValueError):
        return None
    stage, owner = Stage(key), None
    try:
        facts = board.read_facts()
        files = record.files if facts.has_files else ()
        regions = list_regions(record) if facts.has_regions else ()
        if facts.identity != digest_contents(files, regions):
            raise ValueError("it loads another checkpoint")
        owner = facts.owner
        if not may_open(OF_A_FILE * len(regions)):  # the limit is that of this process
            raise ValueError("its files are more than this process may open")
        joined = JoinedProcess(board, owner, files, regions, stage)
        try:
            joined.take_files(facts.descriptors)
        except BaseException:
            joined.drop_areas()
            raise
        return joined
    except BaseException as error:
        board.close()
        transfer.free(stage)
        if isinstance(error, Interrupted) or not isinstance(error, _UNUSABLE):
            raise
    if owner is not None:
        try:
            kill_process(*owner)
        except Interrupted:
            raise
        except GpusnapError:
            pass  # its files only use RAM
    return None


class JoinedImages:
    """CRIU's images from a load process; has the interface of `ImageRebuild`. Close it."""

    def __init__(self, joined: JoinedProcess, rebuild: Callable[[], ImageRebuild]) -> None:
        """`rebuild`: builds the images here, if the load process fails."""
        self._joined, self._rebuild = joined, rebuild
        self._own: ImageRebuild | None = None
        self.paths: Mapping[str, str] = {}
        """As ImageRebuild.paths."""

    @property
    def are_from_load_process(self) -> bool:
        """after `wait`: whether the images are those of the load process."""
        return self._own is None

    @property
    def has_started_all(self) -> bool:
        """As ImageRebuild.has_started_all, for the reading after this one; from any thread."""
        if self._own is not None:
            return self._own.has_started_all
        return self._joined.has_files() or not self._joined.is_at_work()

    def wait(self) -> None:
        """Return when the images are complete and checked. Raises ImageError, GpusnapError."""
        joined = self._joined
        while not joined.has_files() and joined.is_at_work():
            time.sleep(_LOOK_CLOSELY)
        if not joined.has_files():
            joined.kill()
        if joined.has_files():
            self.paths = joined.paths
            return
        joined.remove_files()
        self._own = self._rebuild()
        self._own.wait()
        self.paths = self._own.paths

    def close(self) -> None:
        """As ImageRebuild.close."""
        if self._own is not None:
            self._own.close()


class JoinedMemory:
    """The GPUs' memory from a load process: a `Reader` whose workers are elsewhere at first. Close it.

    `wait`, `check`, `hurry` and `close` are as in gpusnap.oci.chunks.reader.Reader.
    """

    def __init__(
        self,
        joined: JoinedProcess,
        on_placed: Callable[[int, Chunk], None],
        progress: Callable[[int, int], None],
        read: Callable[[Sequence[Table], Callable[[int, Chunk], None]], Reader],
    ) -> None:
        """`on_placed`, `progress`: as for Reader. `read`: reads chunks into the same regions in this process.

        Raises GpusnapError if no thread can be started.
        """
        self._joined, self._placed, self._progress, self._read = joined, on_placed, progress, read
        self._tables = [region.table for _, region in joined.regions]
        self._chunks = [(at, chunk) for at, table in enumerate(self._tables) for chunk in table.chunks]
        self._numbers = number_chunks(self._tables)
        self._whole = sum(chunk.size for _, chunk in self._chunks)
        self._bytes = 0
        self._missing = set(range(len(self._chunks)))
        self._next = 0
        """All chunks before this number are loaded."""
        self._wanted: list[tuple[int, int]] = []
        """Chunks that a thread waited for: each is asked for once, and the load process may end before it."""
        self._own: Reader | None = None
        self._error: BaseException | None = None
        self._closing, self._ended = threading.Event(), threading.Event()
        self._look = _LOOK
        self._thread = threading.Thread(target=self._follow, name="gpusnap-loaded")
        self._take_loaded()
        threads.start(self._thread)

    def look_closely(self) -> None:
        """Check more often: the processes are restored, and wait."""
        self._joined.board.note_restored_processes()
        self._look = _LOOK_CLOSELY

    def hurry(self, at: int, offset: int) -> None:
        """As Reader.hurry."""
        self._wanted.append((at, offset))
        if self._own is not None:
            self._own.hurry(at, offset)
            return
        chunks = self._tables[at].chunks
        index = bisect_right(chunks, offset, key=lambda chunk: chunk.offset) - 1
        if index >= 0:
            number = self._numbers[at, chunks[index].offset]
            self._joined.board.ask_for(self._joined.of_files + number)

    def check(self) -> None:
        """As Reader.check."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """As Reader.wait. The loading has its own deadlines."""
        self._ended.wait()
        self.check()

    def close(self) -> None:
        """As Reader.close."""
        self._closing.set()
        if self._own is not None:
            self._own.close()
        self._thread.join()
        if self._own is not None:
            self._own.close()

    def _follow(self) -> None:
        """Report loaded chunks; runs in a thread."""
        try:
            while self._missing and not self._closing.wait(self._look):
                if not self._joined.is_at_work():
                    self._joined.kill()
                    self._take_loaded()
                    if self._missing:
                        self._load_here()
                    break
                self._take_loaded()
            if self._missing and self._error is None:
                raise Cancelled("the loading was ended before all chunks were there")
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def _take_loaded(self) -> None:
        """Report the chunks that were loaded since the last call."""
        loaded = self._joined.board.read_loaded()[self._joined.of_files :]
        at = loaded.find(_LOADED, self._next)
        while at >= 0:
            if at in self._missing:
                self._note(at)
            at = loaded.find(_LOADED, at + 1)
        first = loaded.find(_NOT_LOADED, self._next)
        self._next = first if first >= 0 else len(loaded)

    def _note(self, number: int) -> None:
        at, chunk = self._chunks[number]
        self._missing.discard(number)
        self._bytes += chunk.size
        self._placed(at, chunk)
        self._progress(self._bytes, self._whole)

    def _load_here(self) -> None:
        """Read the missing chunks in this process, after the load process has ended."""
        rest: list[list[Chunk]] = [[] for _ in self._tables]
        for number in sorted(self._missing):
            at, chunk = self._chunks[number]
            rest[at].append(chunk)
        tables = [Table(table.size, tuple(chunks)) for table, chunks in zip(self._tables, rest, strict=True)]
        lock = threading.Lock()

        def placed(at: int, chunk: Chunk) -> None:
            with lock:
                self._note(self._numbers[at, chunk.offset])

        own = self._own = self._read(tables, placed)
        if self._closing.is_set():
            own.close()
        for at, offset in list(self._wanted):
            own.hurry(at, offset)
        own.wait()
