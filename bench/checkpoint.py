"""Checkpoint and restore of GPU memory, from the driver's bare calls to whole Podman commands, timed.

    python3 bench/checkpoint.py --json checkpoint.json [--sizes 1,12,48] [--data random,zero] [--procs 1,4]

Each case is a block of device memory of a size, a kind of data and a number of processes. For each case, the
bench measures what the machine can do with as many bytes, the driver's suspend and resume, export and import
through Podman with gpusnap-runtime, the pause of a checkpoint that leaves the container running, a second and
a third such checkpoint, and the stock tools, if they are installed. It measures the steady state once. Each
is measured once, except the driver's calls: these are medians of three, in turn. Use an idle machine.
docs/benchmarks.md explains the rows.

Needs root, Podman, CRIU and a GPU; or the test host, where it runs on softgpu. Installs gpusnap while it
runs, and removes what it made. The exit code is 1 if a row failed; the other rows are still measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import floor  # noqa: E402
from figures import Case, Run, Steady, ratios, table  # noqa: E402
from hosts import NAME, BenchError, Place, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from realhost import missing  # noqa: E402
from rows import ROWS, Bench, LeftOut, Plan, check_settings, steady  # noqa: E402
from support import podman  # noqa: E402

from gpusnap.runtime_shim.base.errors import GpusnapError, SettingsError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

KINDS = ["random", "zero", "bf16"]
NAMES = ["floor", *ROWS, "steady"]
# With --quick. GiB; seconds of each half of a steady-state pair; small chunks, so that there are many.
QUICK_SIZE, QUICK_SECONDS, SECONDS = 0.05, 1.0, 4.0
QUICK_SETTINGS = ['memory.chunk-size = "1M"']


class Report:
    """All results, written to --json after each row."""

    def __init__(self, about: dict[str, Any], path: str | None) -> None:
        self.about, self.path = about, path
        self.runs: list[Run] = []
        self.steady: Steady | None = None
        self.floors: dict[int, floor.Floor] = {}

    def save(self) -> None:
        for run in self.runs:
            ratios(run)
        if self.path:
            document = {
                **self.about,
                "runs": [run.record() for run in self.runs],
                "steady": self.steady and self.steady.record(),
            }
            Path(self.path).write_text(json.dumps(document, indent=1) + "\n")

    @property
    def failed(self) -> bool:
        return any(run.failed for run in self.runs)


def attempt(run: Run, name: str, action: Callable[[], None]) -> None:
    """Run a row; note a failure, and continue with the next row."""
    print(f"{run.case}: {name}", file=sys.stderr, flush=True)
    try:
        action()
    except LeftOut as error:
        run.left_out[name] = str(error)
    except GpusnapError as error:
        run.failed[name] = error.sentence()
    except (BenchError, AssertionError, OSError) as error:
        run.failed[name] = str(error)
    except Exception as error:
        run.failed[name] = f"{type(error).__name__}: {error}"
        traceback.print_exc()


def measure(options: argparse.Namespace, here: Place, plan: Plan, report: Report) -> None:
    """Run every row of every case."""
    driver = Nvidia()
    wanted = [name for name in NAMES if name in (options.only or NAMES)]
    cases = [Case(*each) for each in product(options.sizes, options.data, options.procs)]
    for case in cases:
        run = Run(case)
        report.runs.append(run)
        bench = Bench(here, plan, driver, run)

        try:
            for name in wanted:
                if name != "steady" or case is cases[0]:  # that does not depend on the case
                    attempt(run, name, partial(row, name, bench, report))
                if name in run.failed:
                    bench.drop()  # the next row gets a fresh one
                report.save()
        finally:
            bench.drop()


def row(name: str, bench: Bench, report: Report) -> None:
    """Run one row of a case; the floor is measured once for a size."""
    if name == "steady":
        report.steady = steady(bench)
    elif name == "floor":
        size = bench.case.size
        if size not in report.floors:
            with tempfile.TemporaryDirectory(dir=bench.plan.folder) as empty:
                report.floors[size] = floor.measure(Path(empty), size, software=bench.place.software)
        bench.run.floor = report.floors[size]
    else:
        bench.run.lines += ROWS[name](bench)


def _numbers(low: float, high: float, kind: type[int] | type[float]) -> Callable[[str], list[float]]:
    def parse(text: str) -> list[float]:
        try:
            found: list[float] = [kind(word) for word in text.split(",")]
        except ValueError:
            found = []
        if not found or not all(low <= number <= high for number in found):
            raise argparse.ArgumentTypeError(
                f"{text!r}: numbers from {low:g} to {high:g}, with commas between"
            )
        return found

    return parse


def _names(choices: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in choices]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(choices)}")
        return found

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Checkpoint and restore of GPU memory, timed, row by row.")
    parser.add_argument("--sizes", type=_numbers(0.01, 1024, float), help="GiB on the GPU: 1,12,48 (12)")
    parser.add_argument("--data", type=_names(KINDS), default=["random"], help="random,zero,bf16 (random)")
    parser.add_argument("--procs", type=_numbers(1, 64, int), default=[1], help="processes: 1,4 (1)")
    parser.add_argument("--only", type=_names(NAMES), help="these rows alone, with commas; --list names them")
    parser.add_argument("--runtime", default="crun", choices=["crun", "runc"])
    parser.add_argument(
        "--settings",
        action="append",
        default=[],
        help="a line of gpusnap.toml for every row, as 'memory.level = 0'",
    )
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the exports go")
    parser.add_argument("--json", help="write the figures there too")
    parser.add_argument(
        "--quick", action="store_true", help="0.05 GiB and short: whether it works, no figures"
    )
    parser.add_argument("--list", action="store_true", help="name the rows")
    options = parser.parse_args()
    if options.quick:
        options.settings += QUICK_SETTINGS
    options.sizes = options.sizes or [QUICK_SIZE if options.quick else 12.0]
    try:
        check_settings(options.settings)
    except SettingsError as error:
        parser.error(f"--settings: {error.sentence()}")
    if not os.path.isdir(options.folder):
        parser.error(f"--folder: {options.folder} is no folder; make it, or name another")
    return options


def obstacle(*, software: bool) -> str:
    """Say why nothing can be measured here; empty if it can."""
    if os.geteuid() != 0:
        return "checkpoints of containers need root"
    if software:
        built = (CHECKOUT / "softgpu/build/bin/gpuwork").exists()
        return "" if built else "softgpu is not built; run `make native`"
    return missing()


def main() -> int:
    options = arguments()
    if options.list:
        words = {name: (row.__doc__ or "").splitlines()[0] for name, row in ROWS.items()}
        words |= {"floor": "What the machine can do with so many bytes.", "steady": steady.__doc__ or ""}
        print("\n".join(f"{name:14}{words[name]}" for name in NAMES))
        return 0
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    if reason := obstacle(software=software):
        print(f"checkpoint: {reason}", file=sys.stderr)
        return 1
    return benchmark(options, software=software)


def benchmark(options: argparse.Namespace, *, software: bool) -> int:
    """Run everything; return the exit code."""
    with contextlib.ExitStack() as stack:
        try:
            minor = None if software else Nvidia().host().gpus[0].minor
            here = stack.enter_context(place(minor))
            about = {**circumstances(Nvidia().host(), options.runtime), "software": software}
        except GpusnapError as error:
            print(f"checkpoint: {error.sentence()}", file=sys.stderr)
            return 1
        podman("rm", "--force", "--ignore", "--time", "0", NAME)  # of a run that was killed
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-")))
        plan = Plan(
            options.runtime, tuple(options.settings), folder, QUICK_SECONDS if options.quick else SECONDS
        )
        report = Report({**about, "settings": options.settings}, options.json)
        measure(options, here, plan, report)
    print(json.dumps(report.about, indent=1))
    print(table(report.runs, report.steady))
    return 1 if report.failed else 0


def _interrupted(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough: what follows is clearing up
    raise KeyboardInterrupt


if __name__ == "__main__":
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, _interrupted)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("checkpoint: interrupted; what it had made is removed", file=sys.stderr)
        sys.exit(130)
