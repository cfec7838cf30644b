"""SIGKILL at random moments of containerd's checkpoints and restores by ctr, or other signals.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/ctr_kills.py [--rounds 200] [--seed 1] [--runtimes crun,runc]
        [--ways task,image,exit,restore] [--signals INT,TERM,HUP]
        [--victims gpusnap-runtime,runtime,criu,ctr,containerd-shim]

Like kills.py, for `ctr task checkpoint`, `ctr container checkpoint`, `ctr task checkpoint --exit` (runc only)
and `ctr container restore`, with the GPU memory in chunks, in CRIU's images or in a store. A round kills some
of the processes that work for the command, also the shim and containerd, which then is started again. Then
`gpusnap recover` must succeed, twice, and find nothing the second time. The task runs with every byte right,
after a `ctr task resume` where ctr was killed before its own; or its checkpoint can be restored. An image
that ctr has made is complete. The next checkpoint succeeds, and nothing of gpusnap is left. A container whose
shim was killed is ended by containerd, and is restored from its last checkpoint.

With --signals, the victims get one of these instead. A gpusnap-runtime that was the only victim must clean up
itself: `gpusnap recover` has nothing to recover, unless the message names it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from faulthost import (
    COMMAND,
    STORE,
    Bad,
    Done,
    Report,
    State,
    prepare,
    processes,
    run_limited,
    settings,
    wait_for,
)

# isort: split
from containerdhost import (
    Containerd,
    Work,
    answers,
    containerd,
    end,
    end_shims,
    launch,
    restored_from,
    spare_old_groups,
)
from host_state import describe
from kills import Bench, Killer, Line, count_rounds, parse_options
from support import GPUS_CONF, good, remove_left_groups, until

from gpusnap.runtime_shim.process import proc

NAME = "killed"
FOLDER = Path("/var/tmp/ctr-kills")
VICTIMS = ("gpusnap-runtime", "runtime", "criu", "ctr", "containerd-shim")
PAGES = ("chunks", "chunks", "criu", "store")
WHOLE = "localhost/checkpoint:whole"
"""The image of a checkpoint that was not killed."""
ARCHIVE = FOLDER / "whole.tar"
"""Has it, too."""
MADE = "localhost/checkpoint:made"
_TASK = "application/vnd.containerd.container.criu.checkpoint.criu.tar"
_ENGINE = ("containerd", "containerd-shim")
_ENDS = re.compile(r"if its engine does not list it as running, this stops it: (.+)")
_MOST_TICKS = 4000
"""Ticks after which the log of the work begins anew: it has room for more than twice as many."""


@dataclass
class Engine(Bench):
    """containerd, and what is killed in it."""

    server: Containerd = field(kw_only=True)
    lines: str = field(kw_only=True)
    """Further lines of the settings."""
    child: subprocess.Popen[bytes] | None = None
    """A containerd that was started in place of one that was killed."""

    def one(self, way: str) -> str:
        """Run a round; return what happened in it. Raises Bad."""
        raise NotImplementedError

    def list_spared(self) -> frozenset[int]:
        """Return all processes but those of the engine."""
        return frozenset(pid for pid, name in processes().items() if name not in _ENGINE)

    def arm(self, killer: Killer, usual: float) -> None:
        """The victims get a signal, and not the command."""
        killer.number = random.choice(self.signals)

    def run(self, way: str, line: Line, *, victims: tuple[str, ...] | None = None) -> tuple[Done, Killer]:
        """Run a command and kill some of its processes; wait until the others have ended."""
        self.strict = False
        # Most of the time the shim stays, else nothing is left to be right; with a signal it may stay anyway.
        if self.signals or random.random() < 0.7:
            victims = tuple(name for name in victims or self.victims if name != "containerd-shim")
        done, killer = super().run(way, line, victims=victims or self.victims)
        if "containerd" in killer.killed:
            self.start_again()
        self.strict = {*killer.killed} == {"gpusnap-runtime"} and bool(self.signals)
        self.strict &= "gpusnap recover" not in done.err
        if "Traceback" in done.err:
            raise Bad(f"{killer.killed}: not meant for people:\n{done.err[-4000:]}")
        return done, killer

    def start_again(self) -> None:
        """Start containerd in place of the killed one, and wait until it answers."""
        if not wait_for(lambda: "containerd" not in processes().values(), seconds=5):
            return  # only a child of it was killed, before that had begun its program
        self.child = child = launch(self.server)
        until(lambda: answers(self.server, child), "containerd")

    def nothing_to_recover(self, what: str) -> None:
        """See that `gpusnap recover` has done everything. Raises Bad."""
        if said := self.recover():
            raise Bad(f"{what}: the second `gpusnap recover`: {said}")
        if listed := json.loads(good(run_limited([COMMAND, "recover", "--list", "--json"]))):
            raise Bad(f"{what}: left after `gpusnap recover`: {listed}")


@dataclass
class Tasks(Engine):
    """A task of containerd's, and what is done to it."""

    work: Work = field(init=False)

    def one(self, way: str) -> str:
        if max(map(max, self.work.ticks().values())) > _MOST_TICKS:
            self.restore()
        said = ROUNDS[way](self)
        if left := self.before.left():
            raise Bad(f"left behind by {said}: {left[:10]}")
        self.next_one(said)
        self.forget_images()
        return said

    def begin(self, *options: str) -> None:
        """Start with a new container on a clean host. `options`: of ctr run."""
        self.server.remove_all()
        good(run_limited([COMMAND, "recover"]))
        out = FOLDER / "out"
        self.work = Work.start(self.server, NAME, out, GPUS_CONF, "--mib", "6", minors=[0], options=options)
        self.before = State.now()

    def line(self, *words: str | Path) -> Line:
        return ["ctr", "--address", str(self.server.address), *map(str, words)]

    def ended_by_shim(self, killer: Killer) -> bool:
        """Whether the shim was killed; if so, wait until containerd has ended its container."""
        if "containerd-shim" not in killer.killed:
            return False
        until(lambda: self.work.status in ("", "STOPPED"), "the end of a task whose shim was killed")
        return True

    def end_stuck_shim(self, killer: Killer) -> bool:
        """End a shim that waits for ever for a killed ctr to read the output; return whether it did."""
        if "ctr" not in killer.killed or self.work.status != "UNKNOWN":
            return False
        end_shims(self.server.address, NAME)
        until(lambda: self.work.status in ("", "STOPPED"), "the end of a task whose shim was ended")
        self.report.counts["shim waited for a killed ctr"] += 1
        return True

    def end_unlisted(self, said: str) -> None:
        """Follow `gpusnap recover` in what it says of containers that containerd does not list as running."""
        for line in _ENDS.findall(said):
            if self.work.status != "RUNNING":
                good(run_limited(shlex.split(line)))
                self.report.counts["ran without containerd's knowledge"] += 1

    def goes_on(self, what: str) -> str:
        """See that the task runs, when it is resumed, with every byte right; how it was. Raises Bad."""
        status = self.work.status
        try:
            if status == "PAUSED":
                self.server.ctr("task", "resume", NAME)
            self.work.goes_on()
        except AssertionError as error:
            raise Bad(f"{what}: it was {status}: {error}\n{describe()}") from error
        return "ran on" if status == "RUNNING" else f"was {status}, and was resumed"

    def restore(self, image: str = WHOLE) -> None:
        """Restore the task from an image, in place of what there is of it."""
        self.work.remove()
        self.work.clear_log()
        with self.imported(image):
            self.server.ctr(*restoring(image))
        self.work.back()

    @contextmanager
    def imported(self, image: str = WHOLE) -> Iterator[None]:
        """The image of the checkpoint that was not killed is in containerd, and no longer than needed."""
        if image == WHOLE:
            self.server.ctr("image", "import", "--no-unpack", ARCHIVE)
        try:
            yield
        finally:
            if image == WHOLE:
                self.server.ctr("image", "rm", "--sync", WHOLE)

    def read_index(self, image: str) -> str:
        """Return the index of an image, as JSON."""
        lines = self.server.ctr("image", "ls", f"name=={image}").stdout.splitlines()
        return self.server.ctr("content", "get", lines[1].split()[2]).stdout

    def forget_images(self) -> None:
        """Remove what a killed ctr has left in containerd's store.

        A blob of an earlier checkpoint with the same configuration has `ctr container checkpoint` leave the
        task out, and exit with 0 (docs/containerd.md).
        """
        for lease in self.server.ctr("leases", "ls", "--quiet").stdout.split():
            self.server.ctr("leases", "rm", "--sync", lease)
        self.server.ctr("image", "rm", "--sync", MADE, check=False)

    def next_one(self, what: str) -> None:
        """Make a checkpoint without a kill, after which nothing is left."""
        place = FOLDER / "next"
        try:
            good(run_limited(self.line("task", "checkpoint", "--image-path", place, NAME)))
        except AssertionError as error:
            raise Bad(f"{what}: the next checkpoint: {error}") from error
        good(run_limited([COMMAND, "verify", str(place)]))
        self.work.goes_on()
        shutil.rmtree(place)
        if left := self.before.left():
            raise Bad(f"left behind by the checkpoint after {what}: {left[:10]}")


def restoring(image: str) -> list[str]:
    return ["container", "restore", "--live", "--rw", NAME, image]


def _describe(bench: Tasks, way: str, done: Done, killer: Killer) -> str:
    sent = killer.number.name if killer.killed else "nothing"
    return f"{way}, {sent} for {killer.killed} after {killer.after:.2f} s, exit code {done.code}"


# A round of each way


def task(bench: Tasks) -> str:
    """Kill a checkpoint to a folder: the task runs on."""
    image = FOLDER / "image"
    line = bench.line("task", "checkpoint", "--image-path", image, NAME)
    done, killer = bench.run("task", line)
    said = bench.recover()
    what = _describe(bench, f"task: recover: {said!r}", done, killer)
    bench.nothing_to_recover(what)
    if (image / "gpusnap/manifest.json").exists():
        good(run_limited([COMMAND, "verify", str(image)]))
    elif done.code == 0:
        raise Bad(f"{what}: no manifest")
    if bench.ended_by_shim(killer):
        bench.restore()
        outcome = "restored from an earlier checkpoint"
    else:
        outcome = bench.goes_on(what)
    shutil.rmtree(image, ignore_errors=True)
    return f"{what}: {outcome}"


def image(bench: Tasks) -> str:
    """Kill a checkpoint to an image: the task runs on, and an image that is there is complete."""
    line = bench.line("container", "checkpoint", "--task", "--rw", "--image", NAME, MADE)
    done, killer = bench.run("image", line)
    said = bench.recover()
    what = _describe(bench, f"image: recover: {said!r}", done, killer)
    bench.nothing_to_recover(what)
    made = MADE in bench.server.ctr("image", "ls", "--quiet").stdout.split()
    if done.code == 0 and not made:
        raise Bad(f"{what}: no image")
    if made and _TASK not in bench.read_index(MADE):
        raise Bad(f"{what}: the image has no task")
    outcome = "ended" if bench.ended_by_shim(killer) else bench.goes_on(what)
    if outcome == "ended" or (made and random.random() < (0.3 if done.code == 0 else 1)):
        try:
            bench.restore(MADE if made else WHOLE)
        except AssertionError as error:
            raise Bad(f"{what}: {outcome}; it cannot be restored: {error}") from error
        outcome += f", restored from {'the image' if made else 'an earlier checkpoint'}"
    return f"{what}: {outcome}"


def exit_(bench: Tasks) -> str:
    """Kill a checkpoint that ends the task: it runs on, or what was made can be restored."""
    image, config = FOLDER / "image", FOLDER / "config.json"
    shutil.copy(bench.server.bundle(NAME) / "config.json", config)
    init = proc.process(bench.work.pid)
    assert init is not None
    line = bench.line("task", "checkpoint", "--exit", "--image-path", image, NAME)
    done, killer = bench.run("exit", line)
    said = bench.recover()
    what = _describe(bench, f"exit: recover: {said!r}", done, killer)
    bench.nothing_to_recover(what)
    by_shim = bench.ended_by_shim(killer)
    whole = (image / "gpusnap/manifest.json").exists()
    if proc.is_same(init.pid, init.start):
        outcome = bench.goes_on(what)
    elif whole:
        good(run_limited([COMMAND, "verify", str(image)]))
        bench.server.ctr("task", "kill", "--signal", "SIGKILL", NAME, check=False)
        bench.server.ctr("task", "rm", "--force", NAME, check=False)
        bench.work.clear_log()
        shutil.rmtree(FOLDER / "again", ignore_errors=True)
        with restored_from(bench.server, image, config, FOLDER / "again", NAME):
            bench.work.back()
        outcome = "restored from the folder"
    elif by_shim:
        outcome = "ended"
    else:
        raise Bad(f"{what}: it has ended, and there is no checkpoint: {done.err[-1500:]}\n{describe()}")
    shutil.rmtree(image, ignore_errors=True)
    if outcome in ("ended", "restored from the folder"):
        bench.restore()
    return f"{what}: {outcome}"


def restore(bench: Tasks) -> str:
    """Kill a restore: the task runs, or it is restored again."""
    bench.work.remove()
    bench.work.clear_log()
    bare = State.now()
    with bench.imported():
        done, killer = bench.run("restore", bench.line(*restoring(WHOLE)))
    said = bench.recover()
    what = _describe(bench, f"restore: recover: {said!r}", done, killer)
    bench.nothing_to_recover(what)
    by_shim = "containerd-shim" in killer.killed or bench.end_stuck_shim(killer)
    if (done.code == 0 and not by_shim) or (bench.work.status == "RUNNING" and _runs(bench)):
        bench.work.back()
        return f"{what}: ran"
    bench.end_unlisted(said)
    status = bench.work.status
    bench.work.remove()
    if left := bare.left():
        raise Bad(f"left behind by {what}; containerd had it as {status!r}: {left[:10]}\n{describe()}")
    bench.restore()
    return f"{what}: was {status!r}, restored again"


def _runs(bench: Tasks) -> bool:
    return bool(wait_for(bench.work.ticks, seconds=10))


ROUNDS: dict[str, Callable[[Tasks], str]] = {"task": task, "image": image, "exit": exit_, "restore": restore}


def ready(bench: Tasks) -> None:
    """Make a checkpoint that is never killed, and measure how long each command takes."""
    bench.begin()
    bench.measure("image", bench.line("container", "checkpoint", "--task", "--rw", "--image", NAME, WHOLE))
    place = FOLDER / "first"
    bench.measure("task", bench.line("task", "checkpoint", "--image-path", place, NAME))
    bench.usual["exit"] = bench.usual["task"]
    shutil.rmtree(place)
    bench.server.ctr("image", "export", "--skip-manifest-json", ARCHIVE, WHOLE)
    bench.work.remove()
    bench.work.clear_log()
    bench.measure("restore", bench.line(*restoring(WHOLE)))
    bench.work.back()
    bench.server.ctr("image", "rm", "--sync", WHOLE)
    bench.before = State.now()


def one_round(bench: Engine, way: str, name: str) -> bool:
    """Run one round; return whether all was right. If not, clean up without containerd."""
    bench.report.counts[f"{way}s"] += 1
    pages = random.choice(PAGES)
    settings(bench.runtime, pages=pages, more=bench.lines)
    try:
        bench.report.note(f"{name}: {pages}, {bench.one(way)}")
        bench.report.counts["good"] += 1
    except (Bad, AssertionError, OSError, subprocess.SubprocessError, KeyError) as error:
        bench.report.note(f"{name}: BAD {pages}, {error}")
        logs = list(bench.server.folder.glob("state/**/*.log"))
        bench.report.failed(name, error, Path("/run/gpusnap/journal"), bench.server.folder / "log", *logs)
        for pid, what in processes().items():
            if what in ("gpuwork", "criu", "crun", "runc", "gpusnap-runtime"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree("/run/gpusnap/journal", ignore_errors=True)
        return False
    finally:
        shutil.rmtree(STORE, ignore_errors=True)
        remove_left_groups()
    return True


def run_all(bench: Engine, ways: Sequence[str], numbers: Iterable[int]) -> None:
    """Run the rounds of these numbers, or until one fails."""
    for number in numbers:
        way = ways[number % len(ways)]
        if not one_round(bench, way, f"{bench.runtime}, round {number}, {way}"):
            return


@contextmanager
def serving(folder: Path, config: str = "") -> Iterator[Containerd]:
    """A new containerd in a new folder there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "server").mkdir(parents=True)
    with containerd(folder / "server", config=config) as server:
        yield server


@contextmanager
def at_work(report: Report, runtime: str, options: argparse.Namespace) -> Iterator[Tasks]:
    """A new containerd with one task."""
    with spare_old_groups(runtime) as lines, serving(FOLDER) as server:
        settings(runtime, more=lines)
        given = (report, runtime, options.victims, "", options.signals)
        bench = Tasks(*given, server=server, lines=lines)
        try:
            ready(bench)
            yield bench
            server.remove_all()
        finally:
            if bench.child is not None:
                end(bench.child)


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    options = parse_options(__doc__ or "", 200, victims=VICTIMS, ways=tuple(ROUNDS))
    report = prepare("ctr_kills", options)
    for at, runtime in enumerate(options.runtimes):
        ways = [way for way in options.ways if way != "exit" or runtime == "runc"]
        numbers = count_rounds(report, options, at)
        for number in numbers:
            with at_work(report, runtime, options) as bench:
                run_all(bench, ways, chain([number], numbers))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
