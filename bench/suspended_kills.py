"""SIGKILL at random moments of suspend, resume, swap, a spill, and a checkpoint of a suspended container.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/suspended_kills.py [--rounds 200] [--seed 1]
        [--runtimes crun,runc] [--ways suspend,resume,spill,swap,checkpoint]
        [--victims gpusnap,gpusnap-runtime,runtime,podman] [--signals INT,TERM,HUP]
    python3 bench/suspended_kills.py --gpu [...]                     on a machine with a GPU and no containers

Like kills.py, also with --signals: a round kills some of the processes that a command has started, at a
moment within its usual duration or soon after one of them has started. Then `gpusnap recover` must succeed.
Each container then runs with every byte right, or it is suspended, for Podman too, and runs so after it is
resumed. Then nothing of it is left in RAM, in the store or in /run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from faulthost import (
    COMMAND,
    STORE,
    Bad,
    State,
    goes_on,
    prepare,
    processes,
    remove_all,
    run_limited,
    settings,
    start,
)
from kills import NAME, Bench, count_rounds, parse_options
from support import Container, good, podman

OTHER = "other"
VICTIMS = ("gpusnap", "gpusnap-runtime", "runtime", "podman")
_NOT_THERE = 3  # gpusnap.cli.exit_codes
_WORDS = {"suspended": "paused", "running": "running"}


@dataclass
class Pair(Bench):
    """Two containers, of which one is suspended where a round needs that."""

    def begin(self, *options: str) -> None:
        """The first runs, and nothing is suspended."""
        for left in (STORE / "staging").glob("*"):
            shutil.rmtree(left, ignore_errors=True)
        super().begin(*options)

    def suspended(self) -> str:
        """Suspend the first, in every second round into the store; how, in words."""
        spilled = random.random() < 0.5
        good(run_limited([COMMAND, "suspend", *(["--spill", "--wait"] if spilled else []), NAME]))
        return "in the store" if spilled else "in RAM"

    def states(self) -> dict[str, str]:
        """Return each container's state in gpusnap and Podman. Raises Bad if they differ."""
        listed = json.loads(good(run_limited([COMMAND, "ps", "--json"])))["containers"]
        found = {each["name"]: each["state"] for each in listed}
        for name, state in found.items():
            word = podman("inspect", "--format", "{{.State.Status}}", name).out.strip()
            if _WORDS.get(state) != word:
                raise Bad(f"{name} is {state}, and Podman has it as {word}")
        return found

    def right(self, container: Container) -> str:
        """See that it runs with every byte right, now or when it is resumed; how it was."""
        state = self.states().get(container.name, "gone")
        if state == "suspended":
            good(run_limited([COMMAND, "resume", container.name]))
        goes_on(container.id)
        return state


def suspend(bench: Pair) -> str:
    """It runs on, or is suspended."""
    spill = random.random() < 0.3
    line = [COMMAND, "suspend", *(["--spill", "--wait"] if spill else []), NAME]
    _, killer = bench.run("suspend", line)
    said = bench.recover()
    what = f"{line[1:]}, {killer.killed} killed after {killer.after:.2f} s"
    return f"{what}: {said}: {bench.right(bench.container)}"


def resume(bench: Pair) -> str:
    """It runs, or is suspended."""
    where = bench.suspended()
    _, killer = bench.run("resume", [COMMAND, "resume", NAME])
    said = bench.recover()
    what = f"resume of what is {where}, {killer.killed} killed after {killer.after:.2f} s"
    return f"{what}: {said}: {bench.right(bench.container)}"


def spill(bench: Pair) -> str:
    """It is suspended, in RAM or in the store as a whole."""
    good(run_limited([COMMAND, "suspend", NAME]))
    _, killer = bench.run("spill", [COMMAND, "suspend", "--spill", "--wait", NAME], victims=("gpusnap",))
    said = bench.recover()
    if bench.states()[NAME] != "suspended":
        raise Bad(f"a spill was killed, and the container is {bench.states()[NAME]}")
    return f"spill, killed after {killer.after:.2f} s: {said}: {bench.right(bench.container)}"


def swap(bench: Pair) -> str:
    """Each of the two runs, or is suspended."""
    where = bench.suspended()
    other = start(OTHER)
    try:
        _, killer = bench.run("swap", [COMMAND, "swap", OTHER, NAME])
        said = bench.recover()
        states = [bench.right(other), bench.right(bench.container)]
    finally:
        podman("rm", "--force", "--time", "0", OTHER)
    what = f"swap with what is {where}, {killer.killed} killed after {killer.after:.2f} s"
    return f"{what}: {said}: {states}"


def checkpoint(bench: Pair) -> str:
    """It is suspended as before; a checkpoint that was said to be made is whole."""
    where = bench.suspended()
    bench.number += 1
    name = f"oci:{STORE}:n{bench.number}"
    done, killer = bench.run("checkpoint", [COMMAND, "checkpoint", NAME, "--to", name])
    said = bench.recover()
    if done.code == 0:
        good(run_limited([COMMAND, "verify", name]))
    what = f"checkpoint of what is {where}, {killer.killed} killed after {killer.after:.2f} s"
    state = bench.right(bench.container)
    if state != "suspended":
        raise Bad(f"{what}: {said}: it is {state}")
    removed = run_limited([COMMAND, "rm", name])
    if removed.code not in (0, _NOT_THERE) or (done.code == 0 and removed.code):
        raise Bad(f"{what}: {said}: rm: {removed.err}")
    return f"{what}: {said}"


ROUNDS: dict[str, Callable[[Pair], str]] = {
    "suspend": suspend,
    "resume": resume,
    "spill": spill,
    "swap": swap,
    "checkpoint": checkpoint,
}


def ready(bench: Pair) -> None:
    """How long each command takes."""
    bench.begin()
    bench.measure("suspend", [COMMAND, "suspend", NAME])
    bench.measure("checkpoint", [COMMAND, "checkpoint", NAME, "--to", f"oci:{STORE}:first"])
    bench.measure("spill", [COMMAND, "suspend", "--spill", "--wait", NAME])
    bench.measure("resume", [COMMAND, "resume", NAME])
    good(run_limited([COMMAND, "suspend", NAME]))
    other = start(OTHER)
    bench.measure("swap", [COMMAND, "swap", OTHER, NAME])
    other.remove()
    good(run_limited([COMMAND, "rm", f"oci:{STORE}:first"]))
    good(run_limited([COMMAND, "gc", f"oci:{STORE}"]))
    bench.before = State.now()


def one_round(bench: Pair, way: str, name: str) -> None:
    """One command that is killed; after a failure everything begins anew."""
    bench.report.counts[f"{way}s"] += 1
    try:
        said = ROUNDS[way](bench)
        if left := bench.before.left():
            raise Bad(f"left behind by {said}: {left[:10]}")
        good(run_limited([COMMAND, "gc", f"oci:{STORE}"]))
        if staged := [str(path) for path in (STORE / "staging").glob("*")]:
            raise Bad(f"left in the store by {said}: {staged[:10]}")
        bench.report.note(f"{name}: {said}")
        bench.report.counts["good"] += 1
    except (Bad, AssertionError, OSError, subprocess.SubprocessError, KeyError) as error:
        bench.report.note(f"{name}: BAD {error}")
        folders = [Path("/run/gpusnap") / each for each in ("journal", "suspended")]
        bench.report.failed(name, error, *folders)
        for pid, what in processes().items():
            if what in ("gpuwork", "crun", "runc"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        podman("rm", "--force", "--all", "--time", "0")
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        bench.begin()


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    options = parse_options(__doc__ or "", 200, victims=VICTIMS, ways=tuple(ROUNDS), gpu=True)
    report = prepare("suspended_kills", options)
    for at, runtime in enumerate(options.runtimes):
        settings(runtime)
        bench = Pair(report, runtime, options.victims, "", options.signals)
        ready(bench)
        for number in count_rounds(report, options, at):
            way = options.ways[number % len(options.ways)]
            one_round(bench, way, f"{runtime}, round {number}, {way}")
        remove_all()
        shutil.rmtree(STORE, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
