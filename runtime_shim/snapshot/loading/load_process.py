"""A process that loads the memory of a checkpoint while Podman, the runtime and CRIU make the container.

`gpusnap restore` knows the manifest a second before gpusnap-runtime does. Meanwhile the load process reads,
decompresses and checks all chunks, CRIU's images first. It has an interpreter of its own, because threads
would slow down the command or the runtime.

    gpusnap restore      `LoadProcess` (start.py) ──> load process: files without a name on the tmpfs of
                           │                          process/memory/tmpfs.py, and a Board (board.py)
                           │  GPUSNAP_LOADING=/proc/PID/fd/N, which Podman and conmon pass on
    gpusnap-runtime      `join.py`: opens the files, and gives them names in the container's directory

The files have no names until the runtime takes them. So a killed load process leaves nothing, nor does one
whose runtime never starts. Nothing depends on the load process: if it has ended, has failed or is stuck, the
runtime kills it, loads the rest itself, and reports what is wrong with a chunk. It ends with the command.

Until everything is loaded, it claims the RAM for that (records/reservations.py), as checkpoints and other
restores do; it stops claiming what is loaded. If too little RAM is free beside their claims, it loads
nothing. A claim ends with its process.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Sequence
from functools import partial

from gpusnap.oci.chunks.read_meter import ReadMeter
from gpusnap.oci.chunks.reader import Reader
from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store import read_rate
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Unnamed
from gpusnap.runtime_shim.records.manifest import FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading.board import (
    Board,
    Facts,
    State,
    digest_contents,
    list_regions,
    number_chunks,
)
from gpusnap.runtime_shim.snapshot.loading.descriptors import OF_A_FILE, may_open
from gpusnap.runtime_shim.snapshot.loading.prefetch import can_be_staged
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, STEP, GpuClaim, claim

# Seconds between two checks of what the runtime waits for.
_LOOK = 0.002
# Blobs that are read at once until the processes are restored. CRIU opens hundreds of files. If these come
# from the same disk, each open waits behind the reads of the blobs: 45 ms with 12 blobs of 4 MiB.
_READS = 2
# Workers until then: the other half of the cores is for Podman, the runtime and CRIU.
_PART_AT_FIRST = 2
# Seconds to wait for others that claim memory: the runtime does not wait long for the load process.
_PATIENCE = 2.0


class _MeteredBlobs:
    """Blobs with a meter for their reading."""

    def __init__(self, blobs: Blobs, meter: ReadMeter) -> None:
        self._blobs, self._meter = blobs, meter

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """As Blobs.open_blob."""
        file = self._blobs.open_blob(digest, size)
        self._meter.note_opened(file, size or 0)
        return file

    def check_blob(self, wanted: Descriptor) -> None:
        """As Blobs.check_blob."""
        self._blobs.check_blob(wanted)


class Loader:
    """Loads files and regions into files without a name, in threads of this process. Close it."""

    def __init__(
        self,
        files: Sequence[FileRecord],
        regions: Sequence[tuple[int, RegionRecord]],
        blobs: Blobs,
        settings: Memory,
        store: str = "",
        claimed: contextlib.ExitStack | None = None,
        shrink: Callable[[int], object] = id,
    ) -> None:
        """`store`: where to record the speed of its disk. `claimed`: the claim of RAM, until all is loaded.

        `shrink` is told how many bytes are loaded, from time to time: they are no free RAM any more.

        Raises OSError, GpusnapError, OciError, and RuntimeError if no thread can be started.
        """
        self._store = store
        tables = [*(file.table for file in files), *(region.table for _, region in regions)]
        self._meter = ReadMeter(drop=space.would_evict(tables))
        self._claimed = claimed or contextlib.ExitStack()
        self._shrink, self._loaded, self._told = shrink, 0, 0
        self._counting = threading.Lock()
        self._stage = Unnamed()
        self._areas: list[Area] = []
        self._board: Board | None = None
        self._readings: list[Reader] = []
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            for file in files:
                self._areas.append(self._stage.area(file.name, 0, file.table.size))
            for pid, region in regions:
                name = f"{pid}-{region.start:x}"
                self._areas.append(self._stage.area(name, region.start, region.table.size))
            self._begin(files, regions, tables, _MeteredBlobs(blobs, self._meter), settings)
        except BaseException:
            self.close()
            raise

    def _begin(
        self,
        files: Sequence[FileRecord],
        regions: Sequence[tuple[int, RegionRecord]],
        tables: Sequence[Table],
        blobs: Blobs,
        settings: Memory,
    ) -> None:
        """`tables`: first of the files, then of the regions."""
        self._numbers = number_chunks(tables)
        identity = digest_contents(files, regions)
        descriptors = tuple(each.descriptor for each in self._areas)
        facts = Facts(state_files.owner(), identity, bool(files), bool(regions), descriptors)
        board = self._board = Board.create(len(self._numbers), facts)
        workers = transfer.count_reading_threads(settings)
        self._workers = workers
        self._reads = threading.Semaphore(_READS)
        self._turns = threading.Semaphore(max(1, workers // _PART_AT_FIRST))
        ceiling = transfer.ceiling(settings)

        def placed(first: int, at: int, chunk: Chunk) -> None:
            board.note_loaded(self._numbers[first + at, chunk.offset])
            with self._counting:
                self._loaded += chunk.size

        pids = [pid for pid, _ in regions]
        for first, count, groups in ((0, len(files), ()), (len(files), len(regions), pids)):
            areas = self._areas[first : first + count]
            self._readings.append(
                Reader(
                    tables[first : first + count],
                    blobs,
                    threads=workers,
                    ceiling=ceiling,
                    targets=areas,
                    groups=groups,
                    prepare=partial(transfer.populate, dict(enumerate(areas))),
                    on_placed=partial(placed, first),
                    reads=self._meter.around(self._reads),
                    turns=self._turns,
                    after=self._readings[0] if self._readings else None,
                )
            )
        self._first_region = len(files)
        self._places = {number: place for place, number in self._numbers.items()}
        thread = threading.Thread(target=self._watch, name="gpusnap-loading", daemon=True)
        thread.start()
        self._thread = thread
        self.path = board.path
        """The path with which the runtime opens the board."""

    def close(self) -> None:
        """Stop the loading at any point, and close the files."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for each in self._readings:
            each.close()
        self._claimed.close()
        if self._board is not None:
            self._board.close()
        for area in self._areas:
            area.close()
        with contextlib.suppress(OSError):
            self._stage.remove()

    def _watch(self) -> None:
        """Read the chunks that the runtime asks for, and report the end."""
        board = self._board
        assert board is not None
        restored = False
        try:
            while not self._over.wait(_LOOK):
                for number in board.take_wanted():
                    at, offset = self._places[number]
                    if at >= self._first_region:
                        self._readings[1].hurry(at - self._first_region, offset)
                if not restored and board.are_processes_restored():
                    restored = True
                    for each in (self._reads, self._turns):
                        each.release(self._workers)
                for one in self._readings:
                    one.check()
                if (loaded := self._loaded) - self._told >= STEP:
                    self._told = loaded
                    self._shrink(loaded)
                if all(one.is_complete for one in self._readings):
                    self._claimed.close()  # the RAM is in use now, and no longer counts as free
                    board.write_state(State.DONE)
                    if self._store and (rate := self._meter.rate) is not None:
                        read_rate.remember(self._store, rate)
                    return
        except Exception:  # the runtime gets the same error, and reports it
            for one in self._readings:
                one.close()
            self._claimed.close()
            board.write_state(State.FAILED)


_loaders: list[Loader] = []
"""The loaders that this process has started; they work until the process ends."""


def load(record: Manifest, path: str, settings: Memory) -> str:
    """Start to load the memory of a checkpoint from the layout at `path`; return the path of the board.

    "" if there is nothing to load, or no RAM for it. Raises as `Loader`.
    """
    with contextlib.ExitStack() as claimed:
        room = claimed.enter_context(claim(patience=_PATIENCE))
        files, regions = choose_contents(record, settings, reserved=room.reserved.get(RAM, 0))
        if not files and not regions:
            return ""
        # CRIU needs the same amount again for the memory of the processes.
        size = 2 * sum(each.table.size for each in files) + sum(each.table.size for _, each in regions)
        room.record({RAM: size})
        shrink = partial(_shrink, room, size)
        loading = Loader(files, regions, Layout(path), settings, path, claimed.pop_all(), shrink)
    _loaders.append(loading)
    return loading.path


def _shrink(room: GpuClaim, size: int, loaded: int) -> None:
    room.change({RAM: size - loaded})


def choose_contents(
    record: Manifest, settings: Memory, *, reserved: int = 0
) -> tuple[tuple[FileRecord, ...], tuple[tuple[int, RegionRecord], ...]]:
    """Choose what to load into RAM: CRIU's images, and the GPUs' memory with the PIDs of its processes.

    `reserved`: bytes that others have claimed.
    """
    if settings.ceiling:  # the ceiling is for the runtime
        return (), ()
    fits = space.has_memory_for_images(record, settings, reserved=reserved)
    files = record.files if fits and may_open(OF_A_FILE * len(record.files)) else ()
    regions = list_regions(record)
    try:
        if regions:
            space.check_memory_to_restore(record, settings, reserved=reserved)
    except Refused:  # the runtime reports it
        return (), ()
    return files, regions if can_be_staged(regions, settings, more=len(files)) else ()
