"""The interface between the driver, which takes GPU memory out of a process, and CRIU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from gpusnap.runtime_shim.errors import GpusnapError
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
    """What the manifest calls it."""

    def __init__(self, image_path: str = "", container: str = "", threads: int = 0) -> None:
        """`container`: its key. `threads` that populate a large mapping, all cores' for 0."""
        self.place = image_path
        """The folder that it goes to in the end."""
        self.written = ChunkTotals()
        """What was written beside CRIU's images."""
        self._container, self._threads = container, threads

    def prepare(self) -> None:
        """A checkpoint begins, and nothing has been changed yet. Raises Refused."""

    def thread(self, pid: int, tid: int) -> AbstractContextManager[PopulateResult]:
        """Let the driver's thread run while the block has the driver checkpoint the process, which stands."""
        return run_populating(pid, tid, threads=self._threads)

    def take(self, pids: Sequence[int]) -> None:
        """Carry the suspended processes' GPU memory away, before CRIU dumps them."""

    def ready(self) -> None:
        """A dump comes next that leaves nothing of the processes: write what a restore needs."""

    def give_back(self, pids: Sequence[int]) -> Mapping[int, GpusnapError]:
        """Put it back before the driver restores them, after a dump or a failure; what kept some from it."""
        return {}

    def note(self, pids: Sequence[int]) -> None:
        """Have it in the journal where their memory is; of those that were not taken yet, that they are.

        Without any they all run again, and nobody may touch their memory; where it was never taken out of
        them, what is on file stays, by which a whole dump is completed if they end.
        """
        if pids:
            journal.write(self._container, self.place, dict.fromkeys(pids, ()))

    @property
    def is_loading(self) -> bool:
        """Whether memory still comes while the driver restores: a process ends with gpusnap then."""
        return False

    def is_waiting(self, pid: int) -> bool:
        """Whether a thread of the process waits for memory that still comes, and will."""
        return False

    def look(self) -> None:
        """Called again and again while the driver restores: end that if somebody has asked us to stop."""

    def records(self) -> Mapping[int, tuple[RegionRecord, ...]] | None:
        """By PID, the memory that is not in CRIU's images, for the manifest; None before it is known."""
        return {}

    def commit(self, *, kept: bool) -> tuple[FileRecord, ...]:
        """After the dump: write what is not, and make it durable; CRIU's images that are in chunks, too.

        `kept`: the container runs on, and is likely to be checkpointed again. Raises ImageError.
        """
        return ()

    def finish(self, record: Manifest, write: Callable[[], bool]) -> None:
        """Name what is durable by now, and `write` the manifest: False where an earlier draft is on disk.

        Raises ImageError.
        """
        write()

    def close(self) -> None:
        """The checkpoint is over, and whole."""

    def discard(self, *, layout: bool) -> None:
        """Remove what was staged and, of the image, the `layout`, but not what a process needs."""
