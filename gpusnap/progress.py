"""What goes on, on a terminal's last line: the stage, bytes, GiB/s and time. Elsewhere nothing is shown.

It goes to stderr: stdout is for results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from gpusnap.oci.chunks.table import Progress as ChunkProgress
from gpusnap.oci.registry.copy import Underway
from gpusnap.runtime_shim.units import human

__all__ = ["Progress", "Tick", "grown"]

Tick = Callable[[], None]


class _Bytes(TextColumn):
    """So many of so many bytes, and how fast."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        if not task.completed:
            return Text("")
        whole = f" of {human(int(task.total))}" if task.total else ""
        speed = f", {human(int(task.speed))}/s" if task.speed else ""
        return Text(f"{human(int(task.completed))}{whole}{speed}")


class Progress:
    """One line that changes, while the `with` block runs."""

    def __init__(self, *, shown: bool | None = None) -> None:
        """`shown`: whether it is; by default on a terminal only."""
        console = Console(stderr=True)
        self.shown = console.is_terminal if shown is None else shown
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _Bytes(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not self.shown,
        )
        self._task = self._bars.add_task("", total=None, visible=False)

    def __enter__(self) -> Progress:
        if self.shown:  # rich before 13.4 writes an empty line for bars that are not
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown:
            self._bars.stop()

    def stage(self, what: str) -> None:
        """Something else begins; how long it will take is not known yet."""
        # A new one: `reset` would keep the total of the stage before.
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=None)

    def at(self, done: int, whole: int | None = None) -> None:
        """So many bytes are done, of `whole`."""
        if self.shown:
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
