"""The time of a checkpoint and a restore of a GPU container with Podman and gpusnap-runtime, step by step.

    python3 bench/podman_gpu.py --json podman_gpu.json [--runtime crun] [--only torch-4] [--list]

Each case starts one of the programs of tests/gpu/programs in a container, exports it, removes it and imports
it. The times are those of whole commands. A case with --leave-running also reports the pause that the program
saw by its own clock: the longest time between two of its ticks, minus the usual one. Each case is measured
once, on an otherwise idle machine. The export goes to --folder. Needs root, Podman, CRIU and a GPU; installs
gpusnap while it runs, and removes what it made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "host"), str(CHECKOUT / "tests" / "gpu")]

import shimhost  # noqa: E402
from realhost import Machine, Program, Workload, machine, missing  # noqa: E402
from support import good, manifest, podman, run, until  # noqa: E402

from gpusnap.runtime_shim.gpu.api.driver import Host  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

NAME = "gpusnap-bench"


@dataclass(frozen=True)
class Case:
    """A program, its size, and how it is exported."""

    load: Workload
    words: tuple[str, ...]
    """Options of `podman container checkpoint`."""
    restored: bool = True
    workers: int = 1


def cases() -> dict[str, Case]:
    """Return the cases by name. The number is the size of the block that the program checks, in GiB."""
    none, zstd = ("--compress", "none"), ("--compress", "zstd")
    torch = {gib: Workload.python("torch_train.py", "torch", gib << 10) for gib in (4, 12)}
    return {
        "torch-4": Case(torch[4], none),
        "torch-4-zstd": Case(torch[4], zstd),
        "torch-4-leave-running": Case(torch[4], (*none, "--leave-running"), restored=False),
        "torch-12": Case(torch[12], none),
        "torch-12-leave-running": Case(torch[12], (*none, "--leave-running"), restored=False),
        "jax-4": Case(Workload.python("jax_train.py", "jax", 4 << 10), none),
        "cupy-4": Case(Workload.python("cupy_words.py", "cupy", 4 << 10), none),
        "gpuwork-3x1": Case(Workload.gpuwork(1 << 10, "--procs", "3"), none, workers=3),
    }


@dataclass
class Figures:
    """The figures of one case, in seconds and bytes."""

    name: str
    command: str
    gpu_bytes: int = 0
    archive_bytes: int = 0
    checkpoint: float = 0.0
    """`podman container checkpoint`, from start to end."""
    runtime_checkpoint: float = 0.0
    """The part of gpusnap-runtime, as Podman reports it."""
    steps: dict[str, float] = field(default_factory=dict)
    """The steps of that part, from the manifest."""
    restore: float = 0.0
    runtime_restore: float = 0.0
    criu_restore: float = 0.0
    back: float = 0.0
    """From the start of `podman container restore` to the program's next tick."""
    pause: float | None = None


def measure(name: str, case: Case, host: Machine, folder: str) -> Figures:
    """Run one case; its container and archive are removed even if it fails."""
    archive = Path(folder, f"{NAME}.tar")
    figures = Figures(name, " ".join(["podman container checkpoint --export F", *case.words]))
    try:
        program = Program.begin(NAME, case.load, host.options(), workers=case.workers, ticks=5)
        _checkpoint(figures, case, program, archive)
        if case.restored:
            program.remove()
            _restore(figures, program, archive)
        program.goes_on(more=5)
        if not case.restored:
            figures.pause = _pause(program)
    finally:
        podman("rm", "--force", "--time", "0", NAME)
        archive.unlink(missing_ok=True)
    return figures


def _checkpoint(figures: Figures, case: Case, program: Program, archive: Path) -> None:
    start = time.monotonic()
    said = good(program.checkpoint(archive, "--print-stats", *case.words))
    figures.checkpoint = time.monotonic() - start
    statistics_of_it = json.loads(said)["container_statistics"][0]
    figures.runtime_checkpoint = statistics_of_it["runtime_checkpoint_duration"] / 1e6
    record = manifest(archive)
    for step in record["timing"]:
        figures.steps[step["step"]] = figures.steps.get(step["step"], 0.0) + step["seconds"]
    figures.gpu_bytes = sum(gpu["memoryUsed"] for gpu in record["gpus"])
    figures.archive_bytes = archive.stat().st_size


def _restore(figures: Figures, program: Program, archive: Path) -> None:
    start, clock = time.monotonic(), time.time()
    said = good(podman("container", "restore", "--print-stats", "--import", archive))
    figures.restore = time.monotonic() - start
    one = json.loads(said)["container_statistics"][0]
    figures.runtime_restore = one["runtime_restore_duration"] / 1e6
    figures.criu_restore = one["criu_statistics"]["restore_time"] / 1e6
    stamps = program.stamps()
    if stamps:  # gpuwork prints no times
        after = until(lambda: [at for _, _, at in program.stamps() if at > clock], "a tick after the restore")
        figures.back = after[0] - clock


def _pause(program: Program) -> float:
    """Return the longest time between two ticks, minus the median."""
    at = sorted({stamp for _, _, stamp in program.stamps()})
    gaps = [late - early for early, late in pairwise(at)]
    return max(gaps) - statistics.median(gaps)


def opening() -> dict[str, float]:
    """Return the seconds of a first use of the driver: import, cuInit, then NVML's inventory."""
    code = (
        "import json, time; t0 = time.monotonic()\n"
        "from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia\n"
        "driver = Nvidia(); t1 = time.monotonic(); driver.open(); t2 = time.monotonic(); driver.host()\n"
        "t3 = time.monotonic(); print(json.dumps({'import': t1 - t0, 'cuInit': t2 - t1, 'NVML': t3 - t2}))\n"
    )
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, "-c", code]
    done = subprocess.run(
        line, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def circumstances(gpus: Host, runtime: str) -> dict[str, Any]:
    """Return the hardware and the versions on which the figures depend."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    versions = {name: good(run(name, "--version")).splitlines()[0] for name in ("podman", runtime, "criu")}
    for package in ("torch", "jax", "cupy-cuda13x", "cupy-cuda12x"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "gpu": gpus.gpus[0].model,
        "driver": gpus.driver_version,
        "cuda": gpus.cuda_version,
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory": memory,
        "python": platform.python_version(),
        "versions": versions,
        "command": " ".join(["python3", *sys.argv]),
    }


def table(found: list[Figures]) -> str:
    """Return the figures as a Markdown table."""
    step_names = list(dict.fromkeys(step for figures in found for step in figures.steps))
    rows: list[tuple[str, list[str]]] = [
        ("GPU memory, GiB", [f"{f.gpu_bytes / 2**30:.2f}" for f in found]),
        ("archive, GiB", [f"{f.archive_bytes / 2**30:.2f}" for f in found]),
        ("podman container checkpoint", [_seconds(f.checkpoint) for f in found]),
        ("… of which gpusnap-runtime", [_seconds(f.runtime_checkpoint) for f in found]),
        *((f"…… {step}", [_seconds(f.steps.get(step)) for f in found]) for step in step_names),
        ("pause of the program", [_seconds(f.pause) for f in found]),
        ("podman container restore", [_seconds(f.restore) for f in found]),
        ("… of which gpusnap-runtime", [_seconds(f.runtime_restore) for f in found]),
        ("…… of which CRIU", [_seconds(f.criu_restore) for f in found]),
        ("until the next tick", [_seconds(f.back) for f in found]),
    ]
    lines = ["| seconds | " + " | ".join(f.name for f in found) + " |", "|---|" + "---:|" * len(found)]
    return "\n".join(lines + [f"| {what} | {' | '.join(values)} |" for what, values in rows])


def _seconds(value: float | None) -> str:
    if not value:
        return ""
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Checkpoint and restore of GPU containers, timed.")
    parser.add_argument("--runtime", default="crun", choices=["crun", "runc"])
    parser.add_argument("--only", action="append", help="this case alone; may be given again")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the exports go")
    parser.add_argument("--json", help="write the figures there too")
    parser.add_argument("--list", action="store_true", help="name the cases")
    options = parser.parse_args()
    every = cases()
    if options.list:
        print("\n".join(every))
        return 0
    unknown = set(options.only or ()) - set(every)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; --list names them")
    reason = missing()
    if reason:
        print(f"podman_gpu: {reason}", file=sys.stderr)
        return 1
    driver = Nvidia()
    driver.open()
    report = {**circumstances(driver.host(), options.runtime), "opening": opening()}
    found: list[Figures] = []
    with machine(driver.host().gpus[0].minor) as host:
        shimhost.write_settings(f'runtime = "{options.runtime}"\n')
        for name in options.only or every:
            found.append(measure(name, every[name], host, options.folder))
            print(
                f"{name}: checkpoint {found[-1].checkpoint:.1f} s, restore {found[-1].restore:.1f} s",
                flush=True,
            )
            if options.json:
                document = {**report, "cases": [asdict(figures) for figures in found]}
                Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
