"""The workload that benchmarks start: memory that stays as it is until it is told to change."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from collections.abc import Callable

import pytest
from softgpu_box import DEADLINE, GPUWORK, Box, build, read_line

STILL = ["--mib", "44", "--tick", "1", "--touch", "2", "--slices", "4", "--clock"]


def ticks(work: subprocess.Popen[str], last: Callable[[str], bool]) -> list[str]:
    """The lines up to one that is the last."""
    seen: list[str] = []
    end = time.monotonic() + DEADLINE
    while line := read_line(work):
        seen.append(line)
        if last(line):
            break
        assert time.monotonic() < end, f"no such line within {DEADLINE} s, but {line}"
    return seen


@pytest.mark.parametrize("kind", ["random", "zero", "bf16"])
def test_memory_changes_when_told(boxes: Callable[..., Box], kind: str) -> None:
    """Every word is right before and after SIGUSR1, and the sums of the slices differ only afterwards."""
    with boxes(1).popen([str(GPUWORK), *STILL, "--data", kind]) as work:
        try:
            seen = ticks(work, lambda line: "tick=9 " in line)
            work.send_signal(signal.SIGUSR1)
            seen += ticks(work, lambda line: "changes=1 " in line)
            after = seen[-1:] + [ticks(work, lambda line: True)[0] for _ in range(3)]
        finally:
            work.terminate()
            assert work.wait(DEADLINE) == 0
    assert [line.split()[2] for line in seen + after] == ["ok"] * len(seen + after)
    assert [line.split()[1] for line in seen] == [f"tick={i + 1}" for i in range(len(seen))]
    # The first slice has the words that a tick changes; the others stay as they are from round to round.
    still = {int(tick) % 4: total for tick, total in map(_sum, seen[:8])}
    later = {int(tick) % 4: total for tick, total in map(_sum, after)}
    assert {part for part in (1, 2, 3) if still[part] != later[part]}
    assert all(still[int(tick) % 4] == total for tick, total in map(_sum, seen[:8]) if int(tick) % 4)


def _sum(line: str) -> tuple[str, str]:
    fields = dict(field.split("=") for field in line.split() if "=" in field)
    assert float(fields["at"]) > 1e9
    return fields["tick"], fields["sum"]


def test_it_rests(boxes: Callable[..., Box]) -> None:
    """Ticks that would follow one another at once leave most of a core to others."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = ["--mib", "32", "--tick", "0", "--ticks", "12", "--rest", "8"]
    with boxes(1).popen([str(GPUWORK), *words]) as work:
        assert len(ticks(work, lambda line: "tick=12 " in line)) == 12
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begun
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < seconds / 2


def test_a_kind_that_is_none() -> None:
    """It says which there are."""
    build()
    line = [str(GPUWORK), "--data", "text"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 1
    assert done.stderr == "gpuwork: --data takes random, zero or bf16, and not `text`\n"
