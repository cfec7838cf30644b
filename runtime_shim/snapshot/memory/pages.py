"""The interface between the driver, which takes GPU memory out of a process, and CRIU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.records.manifest import ChunkTotals, FileRecord, Manifest, RegionRecord
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping.stop import run_populating

if TYPE_CHECKING:
    from gpusnap.runtime_shim.process.ptrace.populate import PopulateResult


class Pages:
    """Leaves GPU memory in the processes: CRIU dumps and restores it with their other memory.

    So most methods do nothing. capture.Chunks moves the memory into chunks.
    """

    name = "criu"
    """Its name in the manifest."""

    def __init__(self, image_path: str = "", container: str = "", threads: int = 0) -> None:
        """`container`: its key. `threads`: to populate a large mapping; 0 for all cores."""
        self.place = image_path
        """The directory for the memory at the end."""
        self.written = ChunkTotals()
        """The memory that was written beside CRIU's images."""
        self._container, self._threads = container, threads

    def prepare(self) -> None:
        """Begin a checkpoint, before anything is changed. Raises Refused."""

    def run_driver_thread(self, pid: int, tid: int) -> AbstractContextManager[PopulateResult]:
        """Let the driver's thread run while the block makes the driver checkpoint the stopped process."""
        return run_populating(pid, tid, threads=self._threads)

    def measure_populated(self, pid: int) -> int:
        """Return the bytes of files in RAM that the driver fills for a process; it may not have begun to."""
        return 0

    def take_out(self, pids: Sequence[int]) -> None:
        """Take the suspended processes' GPU memory out of them, before CRIU dumps them."""

    def measure_taken(self, pid: int) -> int | None:
        """Return the bytes that `take_out` took out of a process; None if they stay in it."""
        return None

    def write_durably(self, check: Callable[[], None] = lambda: None) -> None:
        """Write what a restore needs, and sync it: the next dump ends the processes.

        `check`: called by the threads that write after each chunk; what it raises ends them.
        """

    def write_images(self, check: Callable[[], None] = lambda: None, *, but: Collection[str] = ()) -> None:
        """CRIU has written its images: write those that go into chunks, if this can be done beside the rest.

        Those that are not written here are written by `commit`. `check`: as for `write_durably`. `but`: names
        of images that are no part of this dump.
        """

    def forget_images(self) -> None:
        """The dump has failed: the next one writes other images."""

    def give_back(self, pids: Sequence[int]) -> Mapping[int, GpusnapError]:
        """Map it back before the driver restores them, after a dump or a failure; errors by PID."""
        return {}

    def record_places(self, pids: Sequence[int]) -> None:
        """Record in the journal where their memory is, or that it was not taken yet.

        Without PIDs, all of them run again, and nobody may touch their memory. If it was never taken out of
        them, the record stays as it is: it can complete a whole dump if they end.
        """
        if pids:
            journal.write(self._container, self.place, dict.fromkeys(pids, ()))

    @property
    def is_loading(self) -> bool:
        """Whether memory is still loading while the driver restores. A process then ends with gpusnap."""
        return False

    def is_waiting(self, pid: int) -> bool:
        """Whether a thread of the process waits for memory that is still loading and will arrive."""
        return False

    def check_signals(self) -> None:
        """End the restore if a signal asks for that; called repeatedly while the driver restores."""

    def records(self) -> Mapping[int, tuple[RegionRecord, ...]] | None:
        """Return the memory outside of CRIU's images, by PID, for the manifest; None before it is known."""
        return {}

    def commit(self, *, kept: bool) -> tuple[FileRecord, ...]:
        """After the dump: write the rest, and sync everything; also CRIU's images that go into chunks.

        `kept`: the container continues to run, and another checkpoint is likely to follow. Raises ImageError.
        """
        return ()

    def finish(self, record: Manifest, write: Callable[[], bool]) -> None:
        """Name the synced files, and `write` the manifest: it returns False if an earlier draft is on disk.

        Raises ImageError.
        """
        write()

    def close(self) -> None:
        """The checkpoint is complete: release everything."""

    def discard(self, *, layout: bool, suspended: bool = False) -> None:
        """Remove what was staged and, of the image, the `layout`, but nothing that a process needs.

        `suspended`: a process may not have continued, and needs what the journal names even if it has it.
        """
