"""The row `driver` of bench/checkpoint.py: the driver's bare calls on processes outside of any container.

It measures three ways: without preparation; with the large mapping populated for the driver; and gpusnap's
default way, with files of memory.stage instead of that mapping, which are unmapped from the process and
mapped back.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from figures import BARE, PLAIN, Line, middle

from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.stopping.stop import go_on, run_only, run_populating, stop

__all__ = ["SIDES", "TURNS", "Bare"]

_, _POPULATED, _STAGED = BARE
TURNS = ((PLAIN, _POPULATED, _STAGED), (_STAGED, _POPULATED, PLAIN), (PLAIN, _STAGED, _POPULATED))
"""The order changes, so that none is always after the same one."""
SIDES: dict[Literal["checkpoint", "restore"], tuple[str, ...]] = {
    "checkpoint": ("lock", "driver checkpoint", "let go"),
    "restore": ("map back", "driver restore", "unlock"),
}
"""The steps of each."""
_TIMEOUT = 30.0  # seconds that a lock may take, and standing still


@dataclass(frozen=True, slots=True, kw_only=True)
class Bare:
    """Processes with GPU state that run, and end with the block that started them."""

    driver: Driver
    pids: Sequence[int]
    gpu_bytes: int
    """Bytes of their GPU memory."""
    name: str
    """Of the stage, and of the journal's entry meanwhile."""
    folder: Path
    memory: Memory

    def rows(self, well: Callable[[], object]) -> list[Line]:
        """Measure all three, in turn, medians of three; `well` waits until memory has been checked."""
        found: dict[tuple[str, str], list[Line]] = {}
        # A process' first checkpoint grows its heap and finds everything cold: it counts for none of them.
        self.round(PLAIN)
        for row in (row for turn in TURNS for row in turn):
            well()
            stages, note = self.round(row)
            for side, names in SIDES.items():
                part = {name: stages[name] for name in names if name in stages}
                line = Line(row, side, side, sum(part.values()), self.gpu_bytes, stages=part, note=note)
                found.setdefault((row, side), []).append(line)
        well()
        return [middle(found[row, side]) for row in BARE for side in SIDES]

    def round(self, row: str) -> tuple[dict[str, float], str]:
        """Suspend and resume once, in a row's way; return seconds of each step, and a remark."""
        if row != _STAGED:
            return self._round(run_only if row == PLAIN else run_populating)
        with self._staging() as chunks:
            return self._round(chunks.run_driver_thread, chunks)

    @contextmanager
    def _staging(self) -> Iterator[Chunks]:
        """Return the default destination of a checkpoint's GPU memory."""
        image = self.folder / "staged"
        image.mkdir()
        # Nothing is kept: no round is to depend on an earlier one.
        chunks = Chunks(str(image), self.name, replace(self.memory, keep=False))
        try:
            yield chunks
        finally:
            # Also after a failure: the processes, whose memory is gone with it, are killed next.
            with suppress(OSError):
                chunks.close()
            journal.remove(self.name)
            shutil.rmtree(image)

    def _round(
        self,
        thread: Callable[[int, int], AbstractContextManager[Any]],
        chunks: Chunks | None = None,
    ) -> tuple[dict[str, float], str]:
        """As checkpoint.py does it, all at once; seconds of each step, and what `run_driver_thread` returned.

        With `chunks` their bytes are put aside between the two, as for a dump, and mapped back.
        """
        driver, pids = self.driver, self.pids
        stages: dict[str, float] = {}
        notes: set[str] = set()

        def time_step(name: str, action: Callable[[], object]) -> None:
            begun = time.monotonic()
            action()
            stages[name] = time.monotonic() - begun

        def step(name: str, action: Callable[[int], object]) -> None:
            time_step(name, lambda: run_at_once(action, pids).raise_first())

        def checkpoint_one(pid: int) -> None:
            with thread(pid, driver.restore_thread(pid)) as done:
                driver.checkpoint(pid)
            notes.add(getattr(done, "why_not", ""))

        def restore_one(pid: int) -> None:
            with run_only(pid, driver.restore_thread(pid)):
                driver.restore(pid)

        step("lock", partial(driver.lock, timeout=_TIMEOUT))
        stop(pids, timeout=_TIMEOUT)
        step("driver checkpoint", checkpoint_one)
        if chunks is not None:
            time_step("let go", partial(chunks.take_out, pids))
            time_step("map back", partial(_map_back, chunks, pids))
        step("driver restore", restore_one)
        go_on(pids)
        step("unlock", driver.unlock)
        return stages, "; ".join(sorted(notes - {""}))


def _map_back(chunks: Chunks, pids: Sequence[int]) -> None:
    for error in chunks.give_back(pids).values():
        raise error
