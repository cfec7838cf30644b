"""What goes on, on a terminal's last line: the stage, bytes, GiB/s and time. Elsewhere nothing is shown.

It goes to stderr: stdout is for results.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from gpusnap.oci.chunks.table import Progress as ChunkProgress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

    from gpusnap.oci.registry.copy import Underway

Tick = Callable[[], None]


class Progress:
    """One line that changes, while the `with` block runs."""

    def __init__(self, *, shown: bool | None = None) -> None:
        """`shown`: whether it is; by default on a terminal only."""
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self.shown = terminal if shown is None else shown
        self._bars: Bars | None = None
        if self.shown:
            # Imported here: it takes 50 ms, and most commands have no terminal.
            from gpusnap.progress_bars import bars

            self._bars = bars()
            self._task = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def stage(self, what: str) -> None:
        """Something else begins; how long it will take is not known yet."""
        if self._bars is not None:
            # A new one: `reset` would keep the total of the stage before.
            self._bars.remove_task(self._task)
            self._task = self._bars.add_task(what, total=None)

    def at(self, done: int, whole: int | None = None) -> None:
        """So many bytes are done, of `whole`."""
        if self._bars is not None:
            self._bars.update(self._task, completed=done, total=whole)

    def moved(self, now: Underway) -> None:
        """For gpusnap.oci.registry.copy."""
        self.at(now.moved.bytes + now.moved.skipped_bytes, now.all_bytes)

    def chunks(self, now: ChunkProgress) -> None:
        """For what counts in chunks, or in bytes of an archive."""
        self.at(now.done, now.total)

    def watching(self, measure: Callable[[], int], *, every: int = 4) -> Tick:
        """Something to call often: each so many times, it shows what `measure` finds, a number of bytes."""
        calls = 0
        lock = threading.Lock()

        def tick() -> None:
            nonlocal calls
            with lock:
                calls += 1
                if self.shown and calls % every == 0:
                    self.at(measure())

        return tick


def grown(folder: str) -> Callable[[], int]:
    """A function that adds up the files in folders that come to be in `folder` from now on, in bytes."""
    before = set(_names(folder))

    def measure() -> int:
        size = 0
        for name in _names(folder):
            if name not in before:
                size += _size(os.path.join(folder, name))
        return size

    return measure


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _size(path: str) -> int:
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it has just gone
                continue
    return size
