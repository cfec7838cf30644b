"""The results of bench/checkpoint.py: records, the ratios between them, and the table that it prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from floor import Floor

__all__ = ["STOCK", "Case", "Line", "Run", "Steady", "middle", "ratios", "scaled_stock", "table"]

GIB = 1 << 30

STOCK = {"checkpoint": (11.6, 6.2), "restore": (8.5, 2.65)}
"""Seconds of crun with CRIU's CUDA plugin for 12.63 GiB on an H100, and of the driver's plain call there."""

PLAIN = "driver-plain"
"""The row of the driver's calls as they come."""
BARE = (PLAIN, "driver-populated", "driver-staged")
"""The rows of the driver's calls, without a runtime and a container."""
DRIVERS = ("lock", "driver checkpoint", "resume")
"""Steps of a checkpoint that leaves the container running which are the driver's own work."""


@dataclass(frozen=True, slots=True)
class Case:
    """The workload's GPU memory."""

    gib: float
    data: str
    procs: int

    @property
    def size(self) -> int:
        """Return bytes, whole MiB."""
        return self.mib << 20

    @property
    def mib(self) -> int:
        """Return at least 4 for each process, the least that its program takes."""
        return max(round(self.gib * 1024), 4 * self.procs)

    def __str__(self) -> str:
        return f"{self.gib:g} GiB {self.data}, {self.procs} process{'es' if self.procs > 1 else ''}"


@dataclass(slots=True)
class Line:
    """One operation of a row. Seconds and bytes; None if unknown or meaningless."""

    row: str
    what: str
    side: Literal["checkpoint", "restore"]
    """Which of the stock tools' and of the floor's figures to compare it with."""
    seconds: float
    """Of the whole command, or of the calls if there is none."""
    gpu_bytes: int
    runtime: float | None = None
    """The runtime's part of that, as Podman reports it."""
    stages: dict[str, float] = field(default_factory=dict)
    written: int | None = None
    """Bytes written of the GPU's memory: files of the checkpoint's gpusnap/, or CRIU's pages."""
    image: int | None = None
    """Bytes of the whole checkpoint: the archive, or the folder if none was made."""
    peak: int | None = None
    """Most RAM that the shim used."""
    pause: float | None = None
    """Measured by the workload with its own clock."""
    scaled: bool = False
    """Not measured, but calculated from a measurement elsewhere."""
    note: str = ""
    rounds: list[float] = field(default_factory=list)
    """Seconds of each, if the line is the median of several."""
    to_stock: float | None = None
    """The stock tools' time divided by this: above 1 is faster than they are. None for the bare driver."""
    to_floor: float | None = None
    """This divided by the floor's time: 1 is all that the machine can do."""
    to_plain: float | None = None
    """Of the bare driver: this divided by its plain call's time."""
    pause_to_driver: float | None = None
    """The row `pause`: the pause divided by the driver's plain checkpoint and restore together."""
    above_driver: float | None = None
    """The row `again`, unchanged: seconds of its checkpoint that are none of the driver's own steps."""

    @property
    def counted(self) -> float:
        """Return the seconds for ratios and GiB/s: the runtime's, if it has a part of its own."""
        return self.seconds if self.runtime is None else self.runtime

    @property
    def rate(self) -> float:
        """Return GiB/s."""
        return self.gpu_bytes / GIB / self.counted if self.counted else 0.0


@dataclass(frozen=True, slots=True)
class Steady:
    """Ticks per second of a workload that nobody checkpoints, in pairs: the plain runtime, and ours."""

    pairs: tuple[tuple[float, float], ...]

    @property
    def ratios(self) -> list[float]:
        """Return ours divided by the plain runtime's, sorted."""
        return sorted(ours / plain for plain, ours in self.pairs)

    @property
    def ratio(self) -> float:
        """Return the median."""
        found = self.ratios
        return found[len(found) // 2]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        found = self.ratios
        return {"pairs": self.pairs, "ratio": self.ratio, "spread": [found[0], found[-1]]}

    def __str__(self) -> str:
        found = self.ratios
        rates = ", ".join(f"{plain:.1f} → {ours:.1f}" for plain, ours in self.pairs)
        return (
            f"steady state, gpusnap-runtime ÷ the plain runtime: {self.ratio:.3f} "
            f"({found[0]:.3f} to {found[-1]:.3f}; ticks per second {rates})"
        )


@dataclass(slots=True)
class Run:
    """All results of one case."""

    case: Case
    floor: Floor | None = None
    lines: list[Line] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """The reason, by row."""
    failed: dict[str, str] = field(default_factory=dict)

    def find(self, row: str, side: str) -> Line | None:
        """Return the first line of a row for a side."""
        return next((line for line in self.lines if (line.row, line.side) == (row, side)), None)

    def record(self) -> dict[str, Any]:
        """For JSON: the fields, and of each line the rate."""
        found = asdict(self)
        for line, written in zip(self.lines, found["lines"], strict=True):
            written["rate"] = line.rate
        return found


def scaled_stock(side: Literal["checkpoint", "restore"], plain: Line) -> Line:
    """Return the stock tools' time, scaled by the driver's plain call here; never a measurement."""
    stock, driver = STOCK[side]
    took = stock * plain.seconds / driver
    note = f"scaled: {stock:g} s × {plain.seconds:.2f} s of the driver's here ÷ {driver:g} s there"
    return Line("stock", side, side, took, plain.gpu_bytes, runtime=took, scaled=True, note=note)


def middle(lines: Sequence[Line]) -> Line:
    """Return the median of several runs of the same operation, with the seconds of all of them."""
    found = sorted(lines, key=lambda line: line.seconds)[len(lines) // 2]
    found.rounds = [line.seconds for line in lines]
    return found


def ratios(run: Run) -> None:
    """Calculate each line's ratios to the stock tools, to the floor and to the driver's calls of its run."""
    both = [run.find(PLAIN, side) for side in STOCK]
    driver = sum(line.counted for line in both if line is not None) if None not in both else None
    for line in run.lines:
        if (stock := run.find("stock", line.side)) and line.row not in BARE:
            line.to_stock = stock.counted / line.counted if line.counted else None
        if run.floor is not None:
            least = getattr(run.floor, line.side)(line.gpu_bytes)
            line.to_floor = line.counted / least if least else None
        if (plain := run.find(PLAIN, line.side)) and line.row in BARE and line.row != PLAIN:
            line.to_plain = line.counted / plain.counted if plain.counted else None
        if line.row == "pause" and line.pause is not None:
            line.pause_to_driver = line.pause / driver if driver else None
        if (line.row, line.what) == ("again", "unchanged"):
            line.above_driver = line.counted - sum(line.stages.get(step, 0.0) for step in DRIVERS)


_HEAD = (
    "row | what | seconds | runtime | GiB/s | written | image | peak | pause | stock ÷ this | this ÷ floor "
    "| this ÷ plain | pause ÷ driver | above driver"
)


def table(runs: Iterable[Run], steady: Steady | None) -> str:
    """Return Markdown."""
    parts = [part for run in runs for part in _of_run(run)]
    return "\n".join([*parts, *([str(steady)] if steady else [])])


def _of_run(run: Run) -> list[str]:
    ruler = "|---|---|" + "---:|" * (_HEAD.count("|") - 1)
    lines = [f"\n## {run.case}\n"]
    if run.floor is not None:
        lines += [*_of_floor(run.floor), ""]
    if run.lines:
        lines += [f"| {_HEAD} |", ruler]
    for line in run.lines:
        cells = [
            line.row,
            f"{line.what} (scaled)" if line.scaled else line.what,
            _seconds(line.seconds),
            _seconds(line.runtime),
            f"{line.rate:.2f}",
            *(_bytes(size) for size in (line.written, line.image, line.peak)),
            _seconds(line.pause),
            *("" if ratio is None else f"{ratio:.2f}" for ratio in _ratios(line)),
            _seconds(line.above_driver),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for line in run.lines:
        stages = [f"{name} {_seconds(took)}" for name, took in line.stages.items()]
        rounds = f"median of {', '.join(map(_seconds, line.rounds))}" if line.rounds else ""
        told = "; ".join(filter(None, [", ".join(stages), rounds, line.note]))
        lines += [f"- {line.row}, {line.what}: {told}"] if told else []
    lines += [f"- {row}: left out: {why}" for row, why in run.left_out.items()]
    lines += [f"- {row}: FAILED: {why}" for row, why in run.failed.items()]
    return lines


def _ratios(line: Line) -> tuple[float | None, ...]:
    return line.to_stock, line.to_floor, line.to_plain, line.pause_to_driver


def _of_floor(floor: Floor) -> list[str]:
    rates = {
        "link to the host": floor.to_host,
        "to the device": floor.to_device,
        "disk, write and fsync": floor.write,
        "read from the page cache": floor.read,
        "direct write": floor.direct_write,
        "direct read": floor.direct_read,
        "sha256 on one core": floor.sha256,
    }
    known = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items() if rate)
    took = [floor.checkpoint(floor.size), floor.restore(floor.size)]
    least = [f"{side} {each:.2f} s" for side, each in zip(STOCK, took, strict=True) if each is not None]
    return [
        f"Floor, GiB/s: {known}; for {floor.size / GIB:.2f} GiB: {', '.join(least)}",
        *(f"- {note}" for note in floor.notes),
    ]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _bytes(value: int | None) -> str:
    if value is None:
        return ""
    return f"{value / GIB:.2f} GiB" if value >= GIB else f"{value / (1 << 20):.1f} MiB"
