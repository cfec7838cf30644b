"""The shortest possible time of a restore and of a checkpoint, and the real time, in one run.

    python3 bench/restore_floor.py [--gib 12] [--data random,bf16] [--rounds 3] [--procs 1] [--gpuwork]
        [--settings 'memory.level = 0'] [--folder /var/tmp] [--json restore_floor.json]

For each kind of data, it makes checkpoints into a store in --folder. Then in each round, with a warm page
cache and with an empty one, it measures:

    blobs       reading the blobs of the checkpoint alone, with one thread for each core
    driver      the driver's restore alone: its step in a restore that first loads all memory
    in turn     `gpusnap restore` with memory.demand-paging = false
    at once     `gpusnap restore` with the default settings

`floor` is the slower of blobs and driver, `ratio` is at once / floor, `beyond` is at once - floor. Medians,
in seconds. `faults` is how often the driver touched memory that was not loaded yet. The checkpoint is made
once for each round, every time into an empty store, and the last one is restored. The table of checkpoints
has

    driver      the driver's checkpoint alone: its step
    blobs       writing the checkpoint's blobs alone, each with fsync, with one thread for each core
    checkpoint  `gpusnap checkpoint`

With --gpuwork, the program is tests/workload/gpuwork.c. It starts quickly even if the disk is slow, which
PyTorch does not, and it checks less of its memory.

Needs root, Podman, CRIU and a GPU; or the test host, where it runs on softgpu. Installs gpusnap while it
runs, and removes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from checkpoint import KINDS, obstacle  # noqa: E402
from disk_reads import reader  # noqa: E402
from figures import Case  # noqa: E402
from hosts import NAME, BenchError, Place, Work, command, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from rows import check_settings  # noqa: E402
from support import podman  # noqa: E402

from gpusnap.oci.base.threads import run_for_each  # noqa: E402
from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402
from gpusnap.runtime_shim.snapshot.restore import TIMING  # noqa: E402

GIB = 1 << 30
COMMAND = "/usr/local/bin/gpusnap"
COLUMNS = ("blobs", "driver", "in turn", "at once", "floor", "ratio", "beyond")


@dataclass(slots=True)
class RestoreFigures:
    """The restores of one kind of data with one state of the page cache, in seconds, one per round."""

    data: str
    cache: str
    stored: int
    """Bytes of the blobs."""
    blobs: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    in_turn: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    """The steps of the restores at once."""

    def row(self) -> dict[str, float]:
        """Return the medians, and the figures computed from them."""
        blobs, driver, turn, once = (
            statistics.median(each) for each in (self.blobs, self.driver, self.in_turn, self.at_once)
        )
        least = max(blobs, driver)
        return dict(zip(COLUMNS, (blobs, driver, turn, once, least, once / least, once - least), strict=True))


@dataclass(slots=True)
class CheckpointFigures:
    """The checkpoints of one kind of data, in seconds, one per round."""

    data: str
    stored: int = 0
    """Bytes of the blobs."""
    seconds: list[float] = field(default_factory=list)
    blobs: list[float] = field(default_factory=list)
    """The time to write only its blobs."""
    peaks: list[int] = field(default_factory=list)
    """The most RAM that gpusnap-runtime used, in bytes."""
    steps: list[dict[str, float]] = field(default_factory=list)

    def line(self) -> str:
        """Return the medians, as a row of docs/benchmarks.md."""
        driver = statistics.median(each["driver checkpoint"] for each in self.steps)
        blobs, seconds = statistics.median(self.blobs), statistics.median(self.seconds)
        each = (self.stored / GIB, driver, blobs, seconds, seconds - max(driver, blobs))
        figures = " | ".join(f"{value:.2f}" for value in each)
        return f"| {self.data} | {figures} | {max(self.peaks) / GIB:.1f} |"


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    here: Place
    store: Path
    settings: tuple[str, ...]

    def write_settings(self, *lines: str) -> None:
        """Write the settings file. Raises SettingsError."""
        text = ['runtime = "crun"', f'store.path = "{self.store}"', *lines, *self.settings]
        check_settings(text)
        shimhost.write_settings("\n".join(text) + "\n")

    def blobs(self) -> list[Path]:
        """Return the blobs of the store, in the order of their names."""
        return sorted((self.store / "blobs/sha256").iterdir())

    def read_alone(self) -> float:
        """Read all blobs, with as many threads as a restore; return the seconds."""

        begun = time.monotonic()
        run_for_each(self.blobs(), reader("cache"), threads=len(os.sched_getaffinity(0)))
        return time.monotonic() - begun

    def checkpoint(self, case: Case, rounds: int) -> tuple[Work, CheckpointFigures]:
        """Make checkpoints, and write the blobs of each again beside the store. Raises BenchError.

        Returns the last container too, which has ended, and which the store has.
        """
        figures = CheckpointFigures(case.data)
        for number in range(rounds):
            if self.store.exists():
                shutil.rmtree(self.store)
            work = self.here.start(self.here.block(case), runtime="gpusnap-runtime", workers=case.procs)
            os.sync()
            seconds, _ = command(COMMAND, "checkpoint", NAME)
            report = json.loads(command(COMMAND, "inspect", "--json", NAME)[1])
            figures.stored = sum(path.stat().st_size for path in self.blobs())
            figures.seconds.append(seconds)
            figures.blobs.append(self.write_alone())
            figures.peaks.append(report["peakMemory"])
            figures.steps.append({each["step"]: each["seconds"] for each in report["timing"]})
            work.remove()
            print(f"{case}, checkpoint {number + 1}: {figures.line()}", file=sys.stderr, flush=True)
        return work, figures

    def write_alone(self) -> float:
        """Copy all blobs with fsync, as a store does, after reading them; return the seconds."""
        self.read_alone()
        os.sync()
        with tempfile.TemporaryDirectory(dir=self.store.parent) as folder:

            def write(path: Path) -> None:
                with Path(folder, path.name).open("xb") as file:
                    file.write(path.read_bytes())
                    file.flush()
                    os.fsync(file.fileno())

            begun = time.monotonic()
            run_for_each(self.blobs(), write, threads=len(os.sched_getaffinity(0)))
            return time.monotonic() - begun

    def restore(self, work: Work) -> tuple[float, dict[str, Any]]:
        """Return the seconds of `gpusnap restore`, and the runtime's report. The program checks memory."""
        begun = time.time()
        seconds, _ = command(COMMAND, "restore", NAME)
        report: dict[str, Any] = json.loads((work.static / TIMING).read_text())
        again = Work(NAME, type(work.log_file)(_log(work)), work.workers)
        again.log_file.wait(again.workers, since=begun)
        return seconds, report


def _log(work: Work) -> Path:
    return Path(work.inspect()["HostConfig"]["LogConfig"]["Path"])


def drop_caches() -> None:
    """Empty the page cache, so that the disk is read again."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def measure(bench: Bench, case: Case, rounds: int) -> tuple[CheckpointFigures, list[RestoreFigures]]:
    """Make checkpoints of the case, and restore the last one in each round."""
    bench.write_settings()
    work, made = bench.checkpoint(case, rounds)
    every = [RestoreFigures(case.data, cache, made.stored) for cache in ("warm", "cold")]
    for _ in range(rounds):
        for figures in every:

            def prepare_cache(figures: RestoreFigures = figures) -> None:
                if figures.cache == "cold":
                    drop_caches()

            prepare_cache()
            figures.blobs.append(bench.read_alone())
            for demand in (False, True):
                bench.write_settings(f"memory.demand-paging = {'true' if demand else 'false'}")
                prepare_cache()
                seconds, report = bench.restore(work)
                steps = {each["step"]: each["seconds"] for each in report["timing"]}
                if demand:
                    figures.at_once.append(seconds)
                    figures.steps.append(steps)
                    figures.faults.append(report["memory"]["faults"])
                else:
                    figures.in_turn.append(seconds)
                    figures.driver.append(steps["driver restore"])
                work.remove()
            print(f"{case}, {figures.cache}: {figures.row()}", file=sys.stderr, flush=True)
    return made, every


def table(every: list[RestoreFigures]) -> str:
    """For docs/benchmarks.md."""
    lines = [f"| | GiB stored | {' | '.join(COLUMNS)} | faults |", "|---" * (len(COLUMNS) + 3) + "|"]
    for figures in every:
        medians = " | ".join(f"{value:.2f}" for value in figures.row().values())
        faults = statistics.median(figures.faults)
        lines.append(
            f"| {figures.data}, {figures.cache} | {figures.stored / GIB:.2f} | {medians} | {faults:.0f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="A restore beside its blobs alone and the driver alone.")
    parser.add_argument("--gib", type=float, default=12.0, help="on the GPU (12)")
    parser.add_argument("--data", default="random,bf16", help=f"of {','.join(KINDS)} (random,bf16)")
    parser.add_argument("--procs", type=int, default=1, help="processes (1)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gpuwork", action="store_true", help="in place of PyTorch")
    parser.add_argument("--settings", action="append", default=[], help="a line of gpusnap.toml")
    parser.add_argument("--folder", default="/var/tmp", help="where the store goes: on the disk in question")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    if reason := obstacle(software=software):
        print(f"restore_floor: {reason}", file=sys.stderr)
        return 1
    every: list[RestoreFigures] = []
    checkpoints: list[CheckpointFigures] = []
    with ExitStack() as stack:
        here = stack.enter_context(place(None if software else Nvidia().host().gpus[0].minor))
        here = here.with_gpuwork() if options.gpuwork else here
        about = {**circumstances(Nvidia().host(), "crun"), "software": software, "settings": options.settings}
        podman("rm", "--force", "--ignore", "--time", "0", NAME)
        stack.callback(podman, "rm", "--force", "--ignore", "--time", "0", NAME)
        for data in options.data.split(","):
            with tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-floor-") as folder:
                bench = Bench(here, Path(folder, "store"), tuple(options.settings))
                try:
                    made, figures = measure(bench, Case(options.gib, data, options.procs), options.rounds)
                except (BenchError, GpusnapError) as error:
                    print(f"restore_floor: {data}: {error}", file=sys.stderr)
                    return 1
            checkpoints.append(made)
            every += figures
    if options.json:
        runs = [{**asdict(figures), "row": figures.row()} for figures in every]
        document = {**about, "runs": runs, "checkpoints": [asdict(made) for made in checkpoints]}
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    head = "| | GiB stored | driver | blobs | checkpoint | beyond | peak RAM, GiB |"
    print(head, "|---" * 7 + "|", sep="\n")
    print("\n".join(made.line() for made in checkpoints), end="\n\n")
    print(table(every))
    return 0


if __name__ == "__main__":
    sys.exit(main())
