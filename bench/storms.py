"""Checkpoints of programs that hold the C library's locks all the time: how many succeed.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B bench/storms.py [--rounds 30] [--kinds fork,malloc,stdio,dlopen,all]
        [--runtimes crun,runc] [--ways running,paused,ended] [--threads 2] [--signals] [--jobs N] [--json F]
    python3 bench/storms.py --gpu [--kinds fork,malloc,dlopen,torch,jax] [...]         on a machine with a GPU

Threads of the workload fork, and take the locks of malloc, stdio and the loader without a pause (gpuwork
--locks). A round is one checkpoint: of a container that continues to run, of a paused one, or of one that
ends and is restored from the archive. After each, the workload must continue with every word of its memory
right. A command that takes longer than two minutes counts as hung, and ends this kind. With --signals, a
shell in the container stops and continues the workload all the time, as cpulimit does. With --jobs, that many
kinds run at once, each in a container of its own, on one GPU. Runs in the test host, because it installs
gpusnap and softgpu; or, with --gpu, on a machine with a real GPU, where `torch` and `jax` are programs of
these frameworks with threads that fork and load libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
for folder in (".", "tests/host", "tests/integration", "tests/gpu"):
    sys.path.insert(0, str(CHECKOUT / folder))

import gpuhost  # noqa: E402
import realhost  # noqa: E402
import shimhost  # noqa: E402
from support import GPUS_CONF, GPUWORK, Container, Done, good, podman, run  # noqa: E402

NAME = "gpusnap-storm"
run_limited = partial(run, seconds=120.0)
"""Run a command; raises TookTooLong, with what the machine did, if it does not end in time."""


def one_round(container: Container, way: str, folder: Path) -> Done:
    """One checkpoint, and what belongs to it; the container runs afterwards."""
    time.sleep(random.uniform(0, 0.05))
    shutil.rmtree(folder / "image", ignore_errors=True)
    if way == "ended":
        archive = folder / "archive.tar"
        line = ("podman", "--runtime", "gpusnap-runtime", "container")
        done = run_limited(*line, "checkpoint", "--compress", "none", "--export", archive, container.name)
        if done.code == 0:
            good(podman("rm", "--force", "--time", "0", container.name))
            done = run_limited(*line, "restore", "--import", archive)
        return done
    if way == "paused":
        good(podman("pause", container.name))
        done = run_limited(*container.line(folder, "--leave-running"))
        good(podman("unpause", container.name))
        return done
    return run_limited(*container.line(folder, "--leave-running"))


Start = Callable[[str, str, int, bool], Container]
"""Given a container's name, a kind, how many threads, and whether it is disturbed by signals."""


# As cpulimit has it: a process beside the workload stops it and lets it go on, all day.
_DISTURBED = """
{} & work=$!
while kill -0 $work; do
    kill -STOP $work; usleep 3000; kill -CONT $work; usleep 20000
done
"""


def in_software(name: str, kind: str, threads: int, signals: bool) -> Container:
    """The workload on softgpu; with `signals` it is stopped and continued by a shell in the container."""
    words = ["--tick", "30", "--mib", "8", "--locks", kind, "--lock-threads", str(threads)]
    if signals:
        return Container.start(name, script=_DISTURBED.format(" ".join(["/gpuwork", *words])))
    return Container.start(name, *words)


def on_hardware(machine: realhost.Machine) -> Start:
    """The same on this machine's GPU, and programs of PyTorch and JAX."""

    def start(name: str, kind: str, threads: int, signals: bool) -> Container:
        assert not signals, "--signals is for the test host"
        if kind in ("torch", "jax"):
            load = realhost.Workload.python(f"{kind}_train.py", kind, 256, "--forks", str(threads))
        else:
            words = ("--tick", "30", "--locks", kind, "--lock-threads", str(threads))
            load = realhost.Workload.gpuwork(256, *words)
        return realhost.Program.begin(name, load, machine.options())

    return start


def storm(
    kind: str, way: str, rounds: int, threads: int, disturbed: bool, start: Start
) -> tuple[Counter[str], Counter[str], dict[str, float]]:
    """So many rounds of one container: how they ended, what those said that failed, and the longest steps.

    These are medians in seconds, of steps that took a tenth of a second or more.
    """
    steps: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    said: Counter[str] = Counter()
    name = f"{NAME}-{kind}"
    podman("rm", "--force", "--time", "0", name)  # an earlier one that was killed
    container = start(name, kind, threads, disturbed)
    try:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            for _ in range(rounds):
                done = one_round(container, way, Path(folder))
                counts["good" if done.code == 0 else "failed"] += 1
                counts["helped"] += _was_helped(Path(folder, "image"))
                _add_steps(steps, Path(folder, "image"))
                if done.code:
                    said[(done.err.strip().splitlines() or ["nothing"])[-1][:300]] += 1
                container.goes_on(more=2)
    finally:
        podman("rm", "--force", "--time", "0", name)
    found = {name: round(statistics.median(seconds), 2) for name, seconds in steps.items()}
    return counts, said, {name: seconds for name, seconds in found.items() if seconds >= 0.1}


def _was_helped(image: Path) -> bool:
    """Whether threads had to be let run for the driver to get on."""
    with suppress(OSError):
        return "threads were resumed" in (image / "gpusnap/manifest.json").read_text()
    return False


def _add_steps(steps: dict[str, list[float]], image: Path) -> None:
    with suppress(OSError, ValueError):
        for step in json.loads((image / "gpusnap/manifest.json").read_text())["timing"]:
            steps.setdefault(step["step"], []).append(step["seconds"])


def options() -> argparse.Namespace:
    """The command line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--kinds", default="fork,malloc,stdio,dlopen,all")
    parser.add_argument("--runtimes", default="crun,runc")
    parser.add_argument("--ways", default="running,paused,ended")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--signals", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--json")
    given = parser.parse_args()
    if not given.gpu and os.environ.get("GPUSNAP_TESTHOST") != "1":
        parser.error("it changes this machine: run it in the test host, as its --help says")
    return given


def run_all(given: argparse.Namespace, start: Start) -> int:
    """Run the storms, print a line for each; 1 where a round failed or a storm ended early."""
    rows: list[dict[str, Any]] = []
    failed: list[str] = []

    def one(runtime: str, way: str, kind: str) -> None:
        begun = time.monotonic()
        try:
            counts, said, steps = storm(kind, way, given.rounds, given.threads, given.signals, start)
        except AssertionError as error:
            failed.append(f"{runtime} {way} {kind}: ended early")
            print(f"{failed[-1]}: {error}", flush=True)
            return
        seconds = round((time.monotonic() - begun) / given.rounds, 2)
        rows.append(
            {"runtime": runtime, "way": way, "kind": kind, **counts, "seconds": seconds, "steps": steps}
        )
        failed.extend(said.elements())
        print(rows[-1], *said.items(), sep="\n  ", flush=True)
        if given.json:
            Path(given.json).write_text(json.dumps(rows, indent=1))

    for runtime in given.runtimes.split(","):
        shimhost.write_settings(f'runtime = "{runtime}"\n[nvidia]\nlock-timeout = 20.0\n')
        for way in given.ways.split(","):
            with ThreadPoolExecutor(given.jobs) as pool:
                for _ in pool.map(partial(one, runtime, way), given.kinds.split(",")):
                    pass
    print(f"{sum(row.get('good', 0) for row in rows)} good, {len(failed)} failed")
    return 1 if failed else 0


def main() -> int:
    """Put gpusnap in place, and run them."""
    given = options()
    if given.gpu:
        with realhost.machine(0) as machine:
            return run_all(given, on_hardware(machine))
    shimhost.install(CHECKOUT)
    gpuhost.install(str(CHECKOUT / "softgpu/build"), GPUS_CONF)
    shutil.copy(CHECKOUT / "softgpu/build/bin/gpuwork", GPUWORK)
    return run_all(given, in_software)


if __name__ == "__main__":
    sys.exit(main())
