"""What the workload wrote, and what the driver says of its GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from report import DemoError

# podman logs --timestamps, then gpuwork's report().
_LINE = re.compile(r"^(\S+) (pid=\d+ tick=(\d+) (ok|BAD) gpu=(\S+).*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Tick:
    """One line of the workload: it has compared every word."""

    time: datetime
    number: int
    good: bool
    gpus: tuple[str, ...]
    line: str


def parse(*texts: str) -> list[Tick]:
    """The ticks in `podman logs --timestamps`."""
    found = []
    for text in texts:
        for stamp, line, number, verdict, gpus in _LINE.findall(text):
            time = datetime.fromisoformat(stamp)
            shown = f"{time:%H:%M:%S}.{time.microsecond // 1000:03d}  {line}"
            found.append(Tick(time, int(number), verdict == "ok", tuple(gpus.split(",")), shown))
    return found


def check(log: list[Tick]) -> None:
    """Raise DemoError unless each tick from the first on is there, once, and found every word right."""
    for expected, tick in enumerate(log, start=1):
        if not tick.good:
            raise DemoError(f"GPU memory was wrong at the workload's tick {tick.number}; report this")
        if tick.number != expected:
            raise DemoError(f"the workload wrote tick {tick.number} where {expected} was due; report this")


def around(log: list[Tick], moment: datetime, count: int) -> list[str]:
    """The lines around a moment at which there was no container: two before it, `count` after it."""
    at = sum(tick.time < moment for tick in log)
    gap = (log[at].time - log[at - 1].time).total_seconds()
    lines = [tick.line for tick in log]
    return [*lines[max(0, at - 2) : at], f"              … {gap:.1f} s …", *lines[at : at + count]]


def gpu_memory(uuids: tuple[str, ...]) -> int:
    """Bytes in use on those GPUs, by whomever."""
    from gpusnap.runtime_shim.gpu import find_driver

    driver = find_driver()
    if driver is None:
        raise DemoError("gpusnap finds no GPU driver on this machine; see that nvidia-smi works")
    return sum(gpu.memory_used for gpu in driver.host().gpus if gpu.uuid in uuids)


def size(count: int) -> str:
    from gpusnap.runtime_shim.base.units import human

    return human(count)
