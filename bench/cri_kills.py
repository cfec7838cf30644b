"""SIGKILL at random moments of containerd's CRI checkpoints and restores, and clients that do not wait.

    make native; tests/host/host --suite sid enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/cri_kills.py [--rounds 100] [--seed 1] [--runtimes runc,crun]
        [--ways checkpoint,restore,hang-up,both,stop] [--signals INT,TERM,HUP]
        [--victims gpusnap-runtime,runtime,criu,containerd-shim,containerd]

Like ctr_kills.py, for kubelet's way (docs/kubernetes.md): a pod with one container is made for each round,
and removed at its end. It needs containerd 2.1 to 2.3. The ways:

    checkpoint  some of the processes that work for CheckpointContainer are killed
    restore     the same for CreateContainer from an archive, or StartContainer after it
    hang-up     the client of CheckpointContainer gives up, by its deadline
    both        two CheckpointContainer at once, whose archives may be damaged (docs/kubernetes.md)
    stop        StopContainer and RemoveContainer during a CheckpointContainer

Then `gpusnap recover` must succeed, twice, and find nothing the second time. The container runs with every
byte right, after what docs/kubernetes.md says of a container that containerd has left paused, or it has ended
because its shim was killed. An archive of a CheckpointContainer that succeeded is whole; what another has
left is refused by `gpusnap verify` or whole. The next checkpoint succeeds, and so do StopContainer,
RemoveContainer, StopPodSandbox and RemovePodSandbox, each in time. Nothing is left then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from faulthost import (
    COMMAND,
    Bad,
    Done,
    Report,
    State,
    checked_message,
    prepare,
    processes,
    run_limited,
    settings,
    wait_for,
)

# isort: split
from containerdhost import end, end_shims, spare_old_groups
from cri import RUNNING, Cri, CriError, Pod, PodContainer, connected
from crihost import HANDLER, configure, images, pull_base
from ctr_kills import Engine, run_all, serving
from host_state import describe
from kills import Killer, Line, count_rounds, parse_options
from support import RUNTIME, good, until

FOLDER = Path("/var/tmp/cri-kills")
WHOLE = FOLDER / "whole.tar"
"""A checkpoint that was not killed."""
VICTIMS = ("gpusnap-runtime", "runtime", "criu", "containerd-shim", "containerd")
WORK = ("/gpuwork", "--tick", "30", "--rest", "24", "--mib", "6")
_CALL = "--call"
_NAMESPACE = "k8s.io"
_ROOT = Path("/run/containerd/runc") / _NAMESPACE
_RESUME = re.compile(r"unless one is in progress: (.+)")
_STEPS = re.compile(r"tasks resume|pause|resume")
_IN_TIME = 60.0
"""Seconds for a call that nothing disturbs."""


@dataclass
class Pods(Engine):
    """A pod with one container, and what is done to it."""

    cri: Cri = field(kw_only=True)
    image: str = field(kw_only=True)
    shim_killed: bool = False
    pod: Pod = field(init=False)
    work: PodContainer = field(init=False)

    def one(self, way: str) -> str:
        bare = State.now()
        self.strict = False  # of the last round
        self.make_pod()
        said = ROUNDS[way](self)
        self.finish(said)
        self.end_unlisted()
        if left := bare.left():
            raise Bad(f"left behind by {said}: {left[:10]}\n{describe()}")
        return said

    def make_pod(self) -> None:
        """Make a pod, and a container that works."""
        self.number += 1
        self.pod = Pod.run(self.cri, f"pod-{self.number}", FOLDER / f"logs-{self.number}", handler=HANDLER)
        self.work = self.pod.create("work", self.image, *WORK, gpus="0")
        self.work.start()
        self.work.goes_on()

    def finish(self, what: str) -> None:
        """Remove the container and the pod, each step in time. Raises Bad."""
        of_work: dict[str, Any] = {"container_id": self.work.id}
        of_pod: dict[str, Any] = {"pod_sandbox_id": self.pod.id}
        for method, fields in (
            ("StopContainer", of_work),
            ("RemoveContainer", of_work),
            ("StopPodSandbox", of_pod),
            ("RemovePodSandbox", of_pod),
        ):
            try:
                self.cri(method, deadline=_IN_TIME, **fields)
            except CriError as error:
                raise Bad(f"{what}: {error}\n{describe()}") from error
        shutil.rmtree(self.pod.logs)

    def end_unlisted(self) -> None:
        """End what containerd has forgotten with a pod's shim, as docs/kubernetes.md says."""
        for left in _ROOT.glob("[!.]*") if self.shim_killed else ():
            good(run_limited([RUNTIME, "--root", str(_ROOT), "delete", "--force", left.name]))
            self.report.counts["ran on without its shim"] += 1
        self.shim_killed = False
        if self.runtime == "crun":  # a task that it could not restore keeps the shim (docs/containerd.md)
            time.sleep(1)  # for those that end by themselves
            shims = [pid for pid, name in processes().items() if name == "containerd-shim"]
            self.report.counts["crun: a shim stayed after a failed restore"] += bool(shims)
            end_shims(self.server.address)

    def run(self, way: str, line: Line, *, victims: tuple[str, ...] | None = None) -> tuple[Done, Killer]:
        done, killer = super().run(way, line, victims=victims)
        self.shim_killed = "containerd-shim" in killer.killed
        return done, killer

    def call(self, method: str, *, deadline: float = _IN_TIME, **fields: Any) -> Line:
        """Return the command line of a client that makes the call."""
        words = [str(self.server.address), f"{deadline:g}", method, json.dumps(fields)]
        return [sys.executable, "-B", __file__, _CALL, *words]

    def checkpointing(self, archive: Path, **more: float) -> Line:
        return self.call("CheckpointContainer", container_id=self.work.id, location=str(archive), **more)

    def start_again(self) -> None:
        super().start_again()
        until(self.ready, "containerd's CRI")

    def ready(self) -> bool:
        with suppress(CriError):
            self.cri("Version", deadline=5)
            return True
        return False

    @property
    def status(self) -> str:
        """RUNNING, PAUSED, STOPPED; empty where there is no such task."""
        return self.server.tasks(_NAMESPACE).get(self.work.id, (0, ""))[1]

    def goes_on(self, what: str, recovered: str) -> str:
        """See that the container runs with every byte right; how it was. Raises Bad.

        `recovered`: what `gpusnap recover` said, which has the command for one that is paused.
        """
        status = self.status
        try:
            resume = _RESUME.search(recovered)
            assert resume or status != "PAUSED", "gpusnap recover did not say how it is resumed"
            if resume:
                for line in resume[1].split(" && "):
                    good(run_limited(line.split()))
                self.report.counts[f"left by containerd: {' '.join(_STEPS.findall(resume[1]))}"] += 1
            self.work.goes_on()
            if self.child is not None and self.work.status().state != RUNNING:
                self.report.counts["unknown to a containerd that found it paused"] += 1
                end(self.child)
                self.start_again()
        except AssertionError as error:
            raise Bad(f"{what}: it was {status!r}: {error}") from error
        return f"was {status}, and was resumed" if resume else "ran on"

    def see(self, done: Done, archive: Path, what: str, *, alone: bool = True) -> str:
        """See what there is of an archive. Raises Bad; for a damaged one after a success with `alone`."""
        if not archive.exists():
            if done.code == 0:
                raise Bad(f"{what}: no archive")
            return "no archive"
        verified = run_limited([COMMAND, "verify", str(archive)])
        archive.unlink()
        if verified.code == 0:
            return "whole"
        self.report.counts["archive in part"] += 1
        said = checked_message(verified)
        if done.code == 0 and alone:
            raise Bad(f"{what}: {said}")
        self.report.counts["two at once, an archive damaged after a success"] += done.code == 0
        return f"in part ({said})"

    def after(self, what: str, done: Done, archive: Path, *, alone: bool = True) -> str:
        """See that a checkpoint did no harm, and make the next one. Raises Bad."""
        said = self.recover()
        what = f"{what}; exit code {done.code}: {done.err.strip()[-1500:]!r}; recover: {said!r}"
        what += f"; {self.see(done, archive, what, alone=alone)}"
        if self.shim_killed:
            until(lambda: self.status in ("", "STOPPED"), "the end of a container whose shim was killed")
            if not [*_ROOT.glob("[!.]*")]:  # else containerd has forgotten it, running or paused
                self.nothing_to_recover(what)
            return f"{what}; ended"
        what += f"; {self.goes_on(what, said)}"
        self.nothing_to_recover(what)
        following = FOLDER / "next.tar"
        try:
            self.cri(
                "CheckpointContainer", deadline=_IN_TIME, container_id=self.work.id, location=str(following)
            )
        except CriError as error:
            raise Bad(f"{what}: the next checkpoint: {error}\n{describe()}") from error
        good(run_limited([COMMAND, "verify", str(following)]))
        following.unlink()
        self.work.goes_on()
        return what


# A round of each way


def checkpoint(bench: Pods) -> str:
    """Kill a checkpoint: the container runs on, and an archive that is reported is whole."""
    archive = FOLDER / "made.tar"
    done, killer = bench.run("checkpoint", bench.checkpointing(archive))
    return bench.after(_describe("checkpoint", killer), done, archive)


def restore(bench: Pods) -> str:
    """Kill a restore: the container runs, or it can be removed and restored again."""
    bench.work.remove()
    shutil.rmtree(bench.pod.logs)
    bench.pod.logs.mkdir()
    fields = bench.pod.request("work", str(WHOLE), gpus="0", attempt=1)
    if create := random.random() < 0.25:
        done, killer = bench.run("create", bench.call("CreateContainer", **fields))
        what = _describe("create", killer)
        bench.recover()
        if done.code == 0:
            bench.work = bench.pod.made(fields, done.out.strip())
            if not bench.shim_killed:
                bench.work.start()
    else:
        bench.work = bench.pod.made(fields, bench.cri("CreateContainer", **fields).container_id)
        done, killer = bench.run("restore", bench.call("StartContainer", container_id=bench.work.id))
        what = _describe("restore", killer)
    said = bench.recover()
    what = f"{what}; exit code {done.code}: {done.err.strip()[-1500:]!r}; recover: {said!r}"
    bench.nothing_to_recover(what)
    if bench.shim_killed:
        return what
    if bench.status == "RUNNING" and wait_for(bench.work.ticks, seconds=10):
        bench.work.goes_on()
        return f"{what}: ran"
    if done.code == 0:
        raise Bad(f"{what}: it does not run: {bench.status!r}\n{describe()}")
    if not create:
        try:
            bench.work.remove()
        except CriError as error:
            raise Bad(f"{what}: {error}\n{describe()}") from error
    bench.work = bench.pod.create("work", str(WHOLE), gpus="0", attempt=2)
    try:
        bench.work.start()
    except CriError as error:
        raise Bad(f"{what}: it cannot be restored again: {error}\n{describe()}") from error
    bench.work.goes_on()
    return f"{what}: restored again"


def hang_up(bench: Pods) -> str:
    """Give up a checkpoint, as kubelet does after its runtimeRequestTimeout."""
    archive = FOLDER / "made.tar"
    after = random.uniform(0.05, 1.1 * bench.usual["call"][0])
    before = bench.list_spared()
    done = run_limited(bench.checkpointing(archive, deadline=after))
    bench.settle("hang-up", before, ())
    return bench.after(f"gave up after {after:.2f} s", done, archive)


def both(bench: Pods) -> str:
    """Make two checkpoints at once: the container runs on. containerd has one directory for both."""
    one, two = FOLDER / "made.tar", FOLDER / "second.tar"
    wait = random.choice([0, random.uniform(0, bench.usual["checkpoint"][0])])
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_later, wait, lambda: bench.work.checkpoint(two))
        done = run_limited(bench.checkpointing(one))
        second = other.result()
    what = f"two, {wait:.2f} s apart; the second: {second.err.strip()[-1500:]!r}"
    bench.report.counts["two at once, both failed"] += bool(done.code and second.code)
    for each in (done, second):
        if each.code:
            bench.report.said[checked_message(each)[:160]] += 1
    what += f", {bench.see(second, two, what, alone=False)}"
    return bench.after(what, done, one, alone=False)


def stop(bench: Pods) -> str:
    """Stop the container, and remove it, during a checkpoint: both succeed in time."""
    archive = FOLDER / "made.tar"
    wait = random.uniform(0, bench.usual["checkpoint"][0])
    seconds = random.choice([0, 1])

    def remove() -> None:
        if random.random() < 0.7:
            bench.cri("StopContainer", deadline=_IN_TIME, container_id=bench.work.id, timeout=seconds)
        bench.cri("RemoveContainer", deadline=_IN_TIME, container_id=bench.work.id)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(_later, wait, remove)
        done = run_limited(bench.checkpointing(archive))
        removed = other.result()
    if removed.code:
        raise Bad(f"after {wait:.2f} s: {removed.err}\n{describe()}")
    said = bench.recover()
    what = f"stopped after {wait:.2f} s; exit code {done.code}: {done.err.strip()[-1500:]!r}"
    what += f"; recover: {said!r}"
    bench.nothing_to_recover(what)
    if done.code:
        bench.report.said[checked_message(done)[:160]] += 1
    return f"{what}; {bench.see(done, archive, what)}"


def _later(seconds: float, what: Callable[[], None]) -> Done:
    """Do something after so many seconds; how it ended."""
    time.sleep(seconds)
    try:
        what()
    except CriError as error:
        return Done(1, "", str(error))
    return Done(0, "", "")


ROUNDS: dict[str, Callable[[Pods], str]] = {
    "checkpoint": checkpoint,
    "restore": restore,
    "hang-up": hang_up,
    "both": both,
    "stop": stop,
}
WAYS = ("checkpoint", "restore", "checkpoint", "restore", "hang-up", "stop", "both")


def _describe(way: str, killer: Killer) -> str:
    sent = killer.number.name if killer.killed else "nothing"
    return f"{way}, {sent} for {killer.killed} after {killer.after:.2f} s"


def ready(bench: Pods) -> None:
    """Make a checkpoint that is never killed, and measure how long each command takes."""
    bench.make_pod()
    bench.measure("checkpoint", bench.checkpointing(WHOLE))
    begun = time.monotonic()
    bench.work.checkpoint(FOLDER / "again.tar")
    bench.usual["call"].append(time.monotonic() - begun)
    (FOLDER / "again.tar").unlink()
    bench.work.remove()
    fields = bench.pod.request("work", str(WHOLE), gpus="0", attempt=1)
    begun = time.monotonic()
    done = run_limited(bench.call("CreateContainer", **fields))
    bench.usual["create"].append(time.monotonic() - begun)
    bench.work = bench.pod.made(fields, good(done).strip())
    bench.measure("restore", bench.call("StartContainer", container_id=bench.work.id))
    bench.work.goes_on()
    bench.finish("the first pod")


@contextmanager
def at_work(report: Report, runtime: str, options: argparse.Namespace) -> Iterator[Pods]:
    """A new containerd with CRI."""
    with ExitStack() as stack:
        registry = stack.enter_context(images())
        FOLDER.mkdir(parents=True, exist_ok=True)
        config = configure(FOLDER, registry)
        server = stack.enter_context(serving(FOLDER / "engine", config))
        os.environ["CONTAINERD_ADDRESS"] = str(server.address)  # for gpusnap recover
        # crun cannot restore a container under another name without its groups (docs/settings.md).
        lines = "" if runtime == "crun" else stack.enter_context(spare_old_groups(runtime))
        settings(runtime, more=lines)
        cri = stack.enter_context(connected(server.address))
        given = (report, runtime, options.victims, "", options.signals)
        bench = Pods(*given, server=server, lines=lines, cri=cri, image=pull_base(cri, registry))
        try:
            ready(bench)
            yield bench
        finally:
            end_shims(server.address)
            if bench.child is not None:
                end(bench.child)


def call(address: str, seconds: str, method: str, fields: str) -> int:
    """Make one call, as a process that can be waited for; print the ID of a container that it made."""
    with connected(Path(address)) as cri:
        try:
            made = cri(method, deadline=float(seconds), wait=False, **json.loads(fields))
        except CriError as error:
            print(error, file=sys.stderr)
            return 1
    if method == "CreateContainer":
        print(made.container_id)
    return 0


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    if sys.argv[1:2] == [_CALL]:
        return call(*sys.argv[2:])
    options = parse_options(__doc__ or "", 100, victims=VICTIMS, ways=WAYS)
    report = prepare("cri_kills", options)
    for at, runtime in enumerate(options.runtimes):
        numbers = count_rounds(report, options, at)
        for number in numbers:
            with at_work(report, runtime, options) as bench:
                run_all(bench, options.ways, chain([number], numbers))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
