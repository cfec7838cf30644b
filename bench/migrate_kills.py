"""Signals at random moments of `gpusnap migrate`: SIGKILL for processes of both hosts, or Ctrl-C here.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/migrate_kills.py [--rounds 100] [--seed 1]
        [--runtimes crun,runc] [--victims gpusnap,gpusnap-runtime,runtime,criu,podman]
        [--signals INT,TERM,HUP]

A container moves to a second host within the test host (tests/integration/otherhost.py). As in kills.py, a
round kills some of the processes that the command has started, on either host, or sends the command other
signals. Then `gpusnap recover` must succeed on both. The container then runs on one of them, and not on both,
with every byte right, or the command that `gpusnap recover` or `gpusnap migrate` has printed restores it.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

from faulthost import (
    COMMAND,
    STORE,
    Bad,
    Report,
    checked_message,
    goes_on,
    prepare,
    remove_all,
    run_limited,
    settings,
    wait_for,
)
from host_state import describe
from kills import NAME, Bench, count_rounds, parse_options, run_again
from otherhost import SSH, OtherHost, other_host
from support import good, podman

VICTIMS = ("gpusnap", "gpusnap-runtime", "runtime", "criu", "podman")
LINE = [COMMAND, "migrate", NAME, "ssh://gpu2", "--quiet", "--ssh", str(SSH)]
_RESTORE = re.compile(r"gpusnap (restore \S+)|podman (container restore (?!was )\S+)")


def ticks_there(other: OtherHost) -> int:
    """How many ticks the container has printed over there, each with every byte right. Raises Bad."""
    lines = other.podman("logs", NAME).out.splitlines()
    if wrong := [line for line in lines if "BAD" in line]:
        raise Bad(f"wrong bytes: {wrong[0]}")
    return len(lines)


def recover_there(other: OtherHost) -> str:
    """Run `gpusnap recover` there, again while another gpusnap works; return its output. Raises Bad."""
    done = run_again(lambda: other.run(COMMAND, "recover"))
    if done.code:
        raise Bad(f"recover there: {checked_message(done)}")
    return done.out.strip()


def is_there(other: OtherHost) -> bool:
    """Whether the container runs on the other host."""
    return any(line.lower() == f"{NAME} running" for line in other.containers())


def migrate(bench: Bench, other: OtherHost) -> str:
    """Interrupt a migration; return what became of the container. Raises Bad."""
    line = LINE + random.choice([[], ["--precopy", "0"]])
    done, killer = bench.run("migrate", line)
    said = f"{done.err}\n{bench.recover()}\n{recover_there(other)}"
    said += "\n" + run_limited([COMMAND, "recover", "--list"]).err
    what = f"{line[2:]}, {killer.killed} after {killer.after:.2f} s, exit code {done.code}"
    # With another PID, if it was brought back here.
    here = podman("inspect", "--format", "{{.State.Status}}", NAME).out.strip() == "running"
    there = is_there(other)
    if here and there:
        raise Bad(f"{what}: it runs on both hosts\n{said}")
    if done.code == 0 and not there:
        raise Bad(f"{what}: it does not run there: {other.containers()}\n{said}")
    if here:
        goes_on(bench.container.id)
        outcome = "runs here"
    elif there:
        first = ticks_there(other)
        if not wait_for(lambda: ticks_there(other) > first + 2):
            raise Bad(f"{what}: it does not go on there\n{said}\n{describe()}")
        outcome = "runs there"
    else:
        found = _RESTORE.search(said)
        if found is None:
            raise Bad(f"{what}: it runs nowhere, and nothing says how to restore it\n{said}")
        words = [COMMAND, *found[1].split()] if found[1] else ["podman", *found[2].split()]
        again = run_limited([word.rstrip(",;.") for word in words])
        if again.code:
            raise Bad(f"{what}: it runs nowhere, and cannot be restored: {again.err[-1500:]}\n{said}")
        goes_on(bench.container.id)
        outcome = f"restored here by {' '.join(words[1:])}"
    if recovered := recover_there(other):
        raise Bad(f"{what}: something was left there after `gpusnap recover`: {recovered}")
    if listed := json.loads(good(run_limited([COMMAND, "recover", "--list", "--json"]))):
        raise Bad(f"{what}: something was left here after `gpusnap recover`: {listed}")
    return f"{what}: {outcome}"


def one_round(report: Report, bench: Bench, name: str) -> None:
    """One migration to a new host, with a new container."""
    shutil.rmtree(STORE, ignore_errors=True)
    with other_host((STORE,)) as other:
        try:
            bench.begin()
            report.note(f"{name}: {migrate(bench, other)}")
            report.counts["good"] += 1
        except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
            report.note(f"{name}: BAD {error}")
            report.failed(name, error, Path("/run/gpusnap"))
            shutil.rmtree("/run/gpusnap", ignore_errors=True)
        remove_all()


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    options = parse_options(__doc__ or "", 100, victims=VICTIMS)
    report = prepare("migrate_kills", options)
    for at, runtime in enumerate(options.runtimes):
        settings(runtime)
        bench = Bench(report, runtime, options.victims, "", options.signals)
        shutil.rmtree(STORE, ignore_errors=True)
        with other_host((STORE,)):
            bench.begin()
            bench.measure("migrate", LINE)
            remove_all()
        for number in count_rounds(report, options, at):
            one_round(report, bench, f"{runtime}, round {number}")
        remove_all()
        shutil.rmtree(STORE, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
