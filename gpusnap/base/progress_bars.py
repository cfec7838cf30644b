"""The display of gpusnap.base.progress on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from gpusnap.runtime_shim.base.units import amount


class _Bytes(TextColumn):
    """Bytes of how many, how fast, and the remaining time."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(amount(int(task.completed), int(task.total or 0) or None, task.speed or 0.0))


class Bar:
    """The display on a terminal, in place of gpusnap.base.progress.Lines: a line for one stage at a time."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            _Bytes(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bars.add_task("", total=None, visible=False)
        self._bars.start()

    def stage(self, what: str) -> None:
        # A new one: `reset` would keep the total of the stage before.
        self._bars.remove_task(self._task)
        self._task = self._bars.add_task(what, total=None)

    def at(self, done: int, whole: int | None) -> None:
        self._bars.update(self._task, completed=done, total=whole)

    def say(self, text: str) -> None:
        self._bars.console.print(f"gpusnap: {text}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()
