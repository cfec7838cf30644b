"""ENOSPC, EIO, ENOMEM and EMFILE at the system calls of suspend, resume, a spill and swap.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/suspended_injected.py [--rounds 200 | --kinds] [--seed 1]
        [--runtimes crun] [--ways suspend,resume,spill,swap] [--errors ENOSPC,EIO,ENOMEM,EMFILE]

Like injected.py, for the calls of `gpusnap` itself, from where it begins to ask Podman. Each round fails one
call once. Then either the command has succeeded, or an error message says why not. A suspended container can
be resumed, and each container continues with every byte right. Nothing is left in RAM, in the store or in
/run. `gpusnap recover` is needed only if the message says so.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from faulthost import (
    COMMAND,
    STORE,
    Bad,
    Done,
    Report,
    State,
    checked_message,
    goes_on,
    parser,
    plain,
    prepare,
    remove_all,
    run_limited,
    settings,
    start,
)
from injected import FOLDER, Choice, points, run_traced
from injecting import FITTING
from support import Container, good, podman

NAME, OTHER = "injected", "other"
WAYS = ("suspend", "resume", "spill", "swap")
_FROM = "/gpusnap/operations/suspending/ahead.py"


def states() -> dict[str, str]:
    """How gpusnap has each container."""
    listed = json.loads(good(run_limited([COMMAND, "ps", "--json"])))["containers"]
    return {each["name"]: each["state"] for each in listed}


@dataclass
class Job:
    """The containers of one way."""

    way: str
    containers: tuple[Container, ...]
    before: State

    @classmethod
    def begin(cls, way: str) -> Job:
        remove_all()
        run_limited([COMMAND, "recover"])
        for left in (STORE / "staging").glob("*"):
            shutil.rmtree(left)
        names = (NAME, OTHER) if way == "swap" else (NAME,)
        return cls(way, tuple(start(name) for name in names), State.now())

    def line(self) -> list[str]:
        """Make ready for the command; its line."""
        if self.way == "suspend":
            return [COMMAND, "suspend", NAME]
        if self.way == "spill":
            good(run_limited([COMMAND, "suspend", NAME]))
            return [COMMAND, "suspend", "--spill", "--wait", NAME]
        good(run_limited([COMMAND, "suspend", *random.choice([[], ["--spill", "--wait"]]), NAME]))
        return [COMMAND, "resume", NAME] if self.way == "resume" else [COMMAND, "swap", OTHER, NAME]

    def check(self, done: Done) -> str:
        """The outcome. Raises Bad."""
        outcome = "refused" if done.code else "worked"
        if done.code:
            checked_message(done)
        if "gpusnap recover" in done.err:
            outcome += ", recovered"
            good(run_limited([COMMAND, "recover"]))
        found = states()
        if unfinished := {
            name: state for name, state in found.items() if state in ("suspending", "resuming", "cut off")
        }:
            raise Bad(f"{unfinished} needs `gpusnap recover`, and nobody says so: {done.err[-1000:]}")
        right = {
            "suspend": {NAME: "running" if done.code else "suspended"},
            "resume": {NAME: "suspended" if done.code else "running"},
            "spill": {NAME: "suspended"},
            "swap": {
                NAME: "suspended" if done.code else "running",
                OTHER: "running" if done.code else "suspended",
            },
        }[self.way]
        if found != right:
            outcome += f", and {' '.join(found.values())}"
        for each in self.containers:
            if found.get(each.name) == "suspended":
                good(run_limited([COMMAND, "resume", each.name]))
            goes_on(each.id)
        if left := self.before.left():
            raise Bad(f"left behind ({outcome}): {left[:10]}; {done.err[-500:]}")
        if list((STORE / "staging").glob("*")):  # it could not be removed; the next command does it
            outcome += ", removed later"
            good(run_limited([COMMAND, "recover"]))
        if staged := [str(path) for path in (STORE / "staging").glob("*")]:
            raise Bad(f"left in the store ({outcome}): {staged[:10]}; {done.err[-500:]}")
        return outcome


def rounds(report: Report, way: str, runtime: str, errors: list[str], choice: Choice, *, end: float) -> None:
    """All rounds of a way."""
    job = Job.begin(way)
    for _ in range(2):  # the first fills caches
        done, calls = run_traced(job.line(), None, _FROM)
        good(done)
        job.check(done)
    chosen = points(calls, errors, choice)
    random.shuffle(chosen)
    for point in chosen:
        if report.over(end):
            return
        name, call = f"{runtime} {way}, call {point.at}, {point.error}", ""
        report.counts[f"{way}s"] += 1
        try:
            done, calls = run_traced(job.line(), point, _FROM)
            call = calls[0] if calls else ""
            report.counts[point.error if call else "not met"] += 1
            outcome = job.check(done)
            report.counts[f"{way}: {outcome}"] += 1
            said = done.err.strip().splitlines()[-1][:300] if done.code else ""
            report.note(f"{name}, {call}: {outcome} | {said}")
            if done.code:
                report.said[plain(said)] += 1
        except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
            report.note(f"{name} {call}: BAD {error}")
            folders = [Path("/run/gpusnap") / each for each in ("journal", "suspended")]
            report.failed(f"{name}: {call}", error, Path("/var/tmp/faults-output"), *folders)
            podman("rm", "--force", "--all", "--time", "0")
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            job = Job.begin(way)


def main() -> int:
    """Run the rounds."""
    given = parser(__doc__ or "", 200)
    given.add_argument("--kinds", action="store_true", help="one call of each kind instead of --rounds")
    given.add_argument("--runtimes", default="crun")
    given.add_argument("--ways", default=",".join(WAYS))
    given.add_argument("--errors", default=",".join(FITTING))
    options = given.parse_args()
    report = prepare("suspended_injected", options)
    for folder in (FOLDER, STORE):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    runs = [(runtime, way) for runtime in options.runtimes.split(",") for way in options.ways.split(",")]
    for at, (runtime, way) in enumerate(runs):
        settings(runtime)
        end = options.seconds * (at + 1) / len(runs)
        choice = Choice(options.rounds // len(runs), 0, options.kinds)
        rounds(report, way, runtime, options.errors.split(","), choice, end=end)
    remove_all()
    shutil.rmtree(STORE, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
