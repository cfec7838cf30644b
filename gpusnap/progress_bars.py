"""How the line of gpusnap.progress looks."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from gpusnap.runtime_shim.units import human


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


def bars() -> Progress:
    """Bars on stderr, for one task at a time."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        _Bytes(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
