"""Progress of a command: the stage, bytes of how many, bytes per second, the remaining time.

On a terminal it is the last line, which changes; elsewhere a line every ten seconds, so that a pipeline's log
shows progress. It goes to stderr: stdout is for results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpusnap.oci.base.files import list_names
from gpusnap.runtime_shim.base.progress import Board, Record
from gpusnap.runtime_shim.base.units import amount

if TYPE_CHECKING:
    from gpusnap.base.progress_bars import Bar
    from gpusnap.oci.registry.copy import TransferProgress

Tick = Callable[[], None]

EVERY = 10.0
"""Seconds between two lines without a terminal."""
# What to show for the steps of gpusnap-runtime; steps that are missing here are short.
_CHECKPOINT = {
    "inspect": "inspecting its processes",
    "hold": "stopping its processes",
    "lock": "waiting for its GPU work",
    "driver checkpoint": "GPU memory to RAM",
    "write": "writing GPU memory",
    "dump": "CRIU dumps the rest",
    "resume": "resuming",
    "sync": "to disk",
    "name": "to disk",
}
_RESTORE = {
    "plan": "choosing GPUs",
    "restore": "CRIU restores its processes",
    "fill": "memory to its processes",
    "driver restore": "memory to the GPU",
}
_UNDO = "undo: "
_WORTH_SHOWING = 1 << 20  # bytes: smaller amounts are directories and records
_LOOK = 4  # calls of a tick between two measurements


class Lines:
    """The display without a terminal: a line every few seconds."""

    def __init__(self, every: float = EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._last = clock()
        self._what = ""
        self._began, self._first = 0.0, 0

    def stage(self, what: str) -> None:
        """Begin another stage, of unknown duration."""
        self._what, self._began, self._first = what, 0.0, 0
        self._show("")

    def at(self, done: int, whole: int | None) -> None:
        """Show that `done` of `whole` bytes are done."""
        now = self._clock()
        if not self._began:
            self._began, self._first = now, done
        passed = now - self._began
        speed = (done - self._first) / passed if passed > 0 else 0.0
        self._show(amount(done, whole, speed))

    def say(self, text: str) -> None:
        """Print a permanent line."""
        print(f"gpusnap: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the display."""

    def _show(self, how_far: str) -> None:
        now = self._clock()
        if now - self._last >= self._every:
            self._last = now
            self.say(": ".join(filter(None, [self._what, how_far])))


class SilentLine(Lines):
    """The display with --quiet: only what is said, such as what is being undone."""

    def _show(self, how_far: str) -> None:
        """Show nothing."""


class Progress:
    """Shows progress while the `with` block runs."""

    quiet = False
    """Show nothing, for all instances (--quiet)."""

    def __init__(self, *, shown: bool | None = None) -> None:
        """`shown`: use a line that changes; by default only on a terminal."""
        # A terminal that cannot erase a line would keep an empty one (terminfo(5), dumb).
        terminal = (
            sys.stderr is not None
            and sys.stderr.isatty()
            and os.environ.get("TERM") not in ("dumb", "unknown")
        )
        self.shown = (terminal if shown is None else shown) and not self.quiet
        self.mark = ("", 0)
        """The present stage, and how many bytes of it are done: a change means progress."""
        self.watched = False
        """Whether somebody reads the mark, even if nothing is shown."""
        self._line: Lines | Bar = SilentLine() if self.quiet or sys.stderr is None else Lines()
        if self.shown:
            # Imported here: it takes 50 ms, and most commands have no terminal.
            from gpusnap.base.progress_bars import Bar

            self._line = Bar()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def stage(self, what: str) -> None:
        """Begin another stage, of unknown duration."""
        self.mark = (what, 0)
        self._line.stage(what)

    def at(self, done: int, whole: int | None = None) -> None:
        """Show that `done` of `whole` bytes are done."""
        self.mark = (self.mark[0], done)
        self._line.at(done, whole)

    def say(self, text: str) -> None:
        """Print a permanent line."""
        self._line.say(text)

    def show_transfer(self, now: TransferProgress) -> None:
        """Show the progress of gpusnap.oci.registry.copy."""
        self.at(now.moved.bytes + now.moved.skipped_bytes, now.all_bytes)

    def follow(self, board: Board | None, what: str, measure: Callable[[], int]) -> Tick:
        """Return a function to call four times a second; it shows what gpusnap-runtime writes on a board.

        `what`: "checkpoint of NAME" or the like. While the board has no bytes, it sometimes shows the result
        of `measure`, a number of bytes.
        """
        calls = 0
        every = _LOOK if self.shown else _LOOK * 10
        last = Record()
        looked_at = self.watched or not self.quiet

        def tick() -> None:
            nonlocal calls, last
            calls += 1
            now = (board.read() if board is not None else None) or last
            if (now.step, now.resumed) != (last.step, last.resumed):
                self.stage(in_words(what, now))
            last = now
            if now.whole:
                self.at(now.done, now.whole)
            elif calls % every == 0 and looked_at and (size := measure()) >= _WORTH_SHOWING:
                self.at(size)

        self.stage(what)
        return tick


@contextmanager
def board() -> Iterator[Board | None]:
    """Return a board for the runtime; None if this host has no memory for one."""
    try:
        made = Board()
    except OSError:
        yield None
        return
    with made:
        yield made


def in_words(what: str, now: Record) -> str:
    """Return a step of gpusnap-runtime as text."""
    if now.step.startswith(_UNDO):
        return f"{what}: being undone"
    words = {**_RESTORE, **_CHECKPOINT}.get(now.step, "")
    if now.resumed:
        return "; ".join(filter(None, [f"the container runs again after {now.resumed:.1f} s", words]))
    return ": ".join(filter(None, [what, words]))


def watch_growth(folder: str) -> Callable[[], int]:
    """Return a function that returns the bytes of files in folders that are made in `folder` from now on."""
    before = set(list_names(folder))

    def measure() -> int:
        size = 0
        for name in list_names(folder):
            if name not in before:
                size += _size(os.path.join(folder, name))
        return size

    return measure


def _size(path: str) -> int:
    size = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it was just removed
                continue
    return size
