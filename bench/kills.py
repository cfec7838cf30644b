"""Signals at random moments: SIGKILL for gpusnap, its runtime, crun, runc, CRIU and Podman; or Ctrl-C.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/kills.py [--rounds 300] [--seed 1] [--runtimes crun,runc]
        [--ways checkpoint,checkpoint-rm,restore,push,pull,gc]
        [--victims gpusnap,gpusnap-runtime,runtime,criu,podman,gpusnap-guardian] [--signals INT,TERM,HUP]
    python3 bench/kills.py --gpu --ways checkpoint,restore [...]    on a machine with a GPU and no containers

A round kills some of the processes that a command has started, at a moment within its usual duration or soon
after one of them has started. Then `gpusnap recover` must succeed, and the work must not be lost: the
container runs with every byte right, or its checkpoint can be restored so. If a container runs without
Podman's knowledge, `recover` names it, and ends it by its ID. The next checkpoint succeeds, nothing of the
killed command is left, and the store is complete. A command that was not killed itself ends in time, with an
error message if it failed.

With --signals, the command gets one of these instead, or its whole process group does, as from a terminal;
sometimes it gets a second one. Then it must clean up itself: it exits with 0, or with 128 plus the signal's
number and a sentence, nothing is printed that is not meant for people, and `gpusnap recover` has nothing to
recover unless the sentence names it. For Podman's own commands, which are ended by such a signal at once, the
rules of SIGKILL hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from faulthost import (
    COMMAND,
    GUARDIAN,
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
    processes,
    program,
    remove_all,
    remove_groups,
    run_limited,
    settings,
    start,
    wait_for,
)
from host_state import describe
from registryhost import running
from support import Container, faults, good, podman

NAME = "killed"
FOLDER = Path("/var/tmp/kills")
WAYS = ("checkpoint", "checkpoint-rm", "restore", "push", "pull", "gc")
VICTIMS = ("gpusnap", "gpusnap-runtime", "runtime", "criu", "podman", GUARDIAN)
_RUNTIMES = ("crun", "runc")
# Seconds after the start of a victim: most of the time that it works.
_SOON = {
    "gpusnap": 1.0,
    "gpusnap-runtime": 0.8,
    "runtime": 0.15,
    "criu": 0.08,
    "podman": 1.5,
    GUARDIAN: 1.0,
    "ctr": 1.5,
    "containerd": 1.5,
    "containerd-shim": 1.5,
}
_ENDING = 60.0  # seconds for processes that continue after their command was killed
_STUCK = 15.0
"""Seconds that a command may wait for a killed gpusnap-runtime before `gpusnap recover` is run."""
_DELETE = re.compile(r"if its engine does not know it .*?: (\S+ .*delete --force [0-9a-f]{64})")
# What Python says if it is interrupted while it starts.
_STARTING = "Fatal Python error: init_import_site"
_UNKNOWN = re.compile(r"to end it: gpusnap recover ([0-9a-f]{64})")
Line = list[str]


@dataclass
class Killer:
    """Kills some of the processes that a command has started, once."""

    wanted: tuple[str, ...]
    """The kinds of processes to kill."""
    after: float
    """Seconds after the start of the command: then some of the victims that run are killed. If negative, the
    time after the start of the first victim: then all victims that run are killed."""
    before: frozenset[int] = frozenset()
    killed: list[str] = field(default_factory=list)
    root: bool = False
    """Whether the command itself was killed."""
    stuck: Callable[[], object] = lambda: None
    """Called if the command still waits after gpusnap-runtime was killed."""
    signals: tuple[signal.Signals, ...] = ()
    """What the command gets, one after the other, instead of SIGKILL for the victims."""
    number: signal.Signals = signal.SIGKILL
    """What the victims get."""

    def __call__(self, process: subprocess.Popen[bytes]) -> None:
        if self.signals:
            self._interrupt(process)
            return
        self._kill(process)
        if "gpusnap-runtime" in self.killed and not self.root:
            try:
                process.wait(_STUCK)
            except subprocess.TimeoutExpired:
                self.stuck()

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        begun = time.monotonic()
        while process.poll() is None:
            victims = [*self._victims().items()]
            awaited = any(_kind(name) == self.wanted[0] and _at_work(pid, name) for pid, name in victims)
            due = self.after >= 0 and victims and time.monotonic() - begun >= self.after
            if due or (self.after < 0 and awaited):
                if self.after < 0:
                    time.sleep(-self.after)
                    victims = [*self._victims().items()]
                else:
                    victims = random.sample(victims, random.randint(1, len(victims)))
                for pid, name in victims:
                    with suppress(ProcessLookupError):
                        os.kill(pid, self.number)
                        self.killed.append(name)
                        self.root |= pid == process.pid
                return
            time.sleep(0.001)

    def _interrupt(self, process: subprocess.Popen[bytes]) -> None:
        send = random.choice([os.kill, os.killpg])
        wait = self.after
        for number in self.signals:
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait)
            if process.poll() is None:
                send(process.pid, number)
                self.killed.append(f"{send.__name__} {number.name} after {wait:.2f} s")
            wait = random.uniform(0, 1.5)

    def _victims(self) -> dict[int, str]:
        found = {}
        for each in os.listdir("/proc"):
            if each.isdigit() and (pid := int(each)) not in self.before and pid != os.getpid():
                name = program(pid)
                if _kind(name) in self.wanted:
                    found[pid] = name
        return found


def _users_of_run() -> list[str]:
    """Return which threads have files of gpusnap open, for example locks, and what each waits for.

    A process whose first thread has ended is shown as a zombie, but other threads may still be in the kernel.
    """
    found = []
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        with suppress(OSError):
            files = {os.readlink(each) for each in (task / "fd").iterdir()}
            mine = [each for each in files if each.startswith("/run/gpusnap/")]
            if mine and task.parts[2] != str(os.getpid()):
                stat, stack = ((task / name).read_text().split("\n") for name in ("stat", "stack"))
                found.append(f"{stat[0][:60]} has {mine}, in {stack[:3]}")
    return found


def _check_end(done: Done, killer: Killer) -> None:
    """Check how a command of gpusnap's ended that may have got signals. Raises Bad."""
    sent = {int(number) for number in killer.signals[: len(killer.killed)]}
    if _is_early(done) or (-done.code in sent and not done.err):
        return  # it had not begun
    if "Traceback" in done.err or "Exception ignored" in done.err:
        raise Bad(f"{killer.killed}: not meant for people:\n{done.err[-4000:]}")
    if done.code and done.code - 128 not in sent:
        raise Bad(f"{killer.killed}: exit code {done.code}: {done.err[-2000:]}")


def _is_early(done: Done) -> bool:
    """Whether Python itself was interrupted while it started."""
    return _STARTING in done.err


def _kind(name: str) -> str:
    return "runtime" if name in _RUNTIMES else name


def _at_work(pid: int, name: str) -> bool:
    """Whether a process does real work: a runtime called only for information does not."""
    if name not in _RUNTIMES:
        return True
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return not {b"checkpoint", b"restore", b"pause", b"resume"}.isdisjoint(words)
    return False


@dataclass
class Bench:
    """The container, the usual duration of commands, and the state of the host before them."""

    report: Report
    runtime: str
    victims: tuple[str, ...]
    registry: str
    signals: tuple[signal.Signals, ...] = ()
    """What commands get instead of SIGKILL."""
    container: Container = field(init=False)
    before: State = field(init=False)
    usual: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    number: int = 0
    strict: bool = False
    """Whether the last command must have left nothing to recover."""

    def begin(self, *options: str) -> None:
        """Start with a new container on a clean host. `options`: of podman run."""
        remove_all()
        good(run_limited([COMMAND, "recover"]))
        self.container = start(NAME, options=options)
        self.before = State.now()

    def run(self, way: str, line: Line, *, victims: tuple[str, ...] | None = None) -> tuple[Done, Killer]:
        """Run a command and kill some of its processes; wait until the others have ended."""
        usual = statistics.median(self.usual[way]) if self.usual[way] else 1.0
        among = victims or self.victims
        if random.random() < 0.5:
            wanted, after = among, random.uniform(0, usual)
        else:  # soon after one of them has started, with others or alone
            first = random.choice(among)
            wanted = (first, *random.sample(among, random.choice([0, 0, 0, *range(len(among))])))
            after = -random.uniform(0, _SOON[first])
        killer = Killer(wanted, after, self.list_spared(), stuck=lambda: self._free(way))
        if self.signals:
            self.arm(killer, usual)
        done = run_limited(line, during=killer)
        if self.signals and line[0] == COMMAND:
            _check_end(done, killer)
        self.strict = bool(self.signals) and line[0] == COMMAND and "gpusnap recover" not in done.err
        self.settle(way, killer.before, killer.killed)
        self.report.counts["killed"] += bool(killer.killed)
        self.report.counts[f"{way}: {'+'.join(sorted(set(killer.killed))) or 'none'} killed"] += 1
        if done.code > 0 and not killer.root and (self.strict or not self.signals) and not _is_early(done):
            self.report.said[plain(checked_message(done))] += 1
        return done, killer

    def settle(self, way: str, before: frozenset[int], killed: Sequence[str]) -> None:
        """Wait until the other processes of a command that was killed have ended. Raises Bad."""
        if not wait_for(lambda: not self._behind(before), seconds=_ENDING / 2):
            self._free(way)
            wait_for(lambda: not self._behind(before), seconds=_ENDING / 2)
        if going_on := self._behind(before):
            raise Bad(f"{killed} killed, and {going_on} still run after {_ENDING:g} s\n{describe()}")

    def list_spared(self) -> frozenset[int]:
        """Return the processes that are not killed, whatever they are."""
        return frozenset(processes())

    def arm(self, killer: Killer, usual: float) -> None:
        """Have the killer send signals. `usual`: how long the command takes, in seconds."""
        killer.after = random.uniform(0, 1.1 * usual)
        killer.signals = tuple(random.choices(self.signals, k=random.choice([1, 1, 2])))

    def _behind(self, before: frozenset[int]) -> list[str]:
        """Return the processes of a killed command that still run."""
        names = (*VICTIMS, *_RUNTIMES, "ctr")
        return [name for pid, name in processes().items() if pid not in before and name in names]

    def measure(self, way: str, line: Line) -> None:
        """Run a command to its end, and record its duration."""
        begun = time.monotonic()
        good(run_limited(line))
        self.usual[way].append(time.monotonic() - begun)

    def recover(self) -> str:
        """Run `gpusnap recover`, again if it must wait; return its output. Raises Bad."""
        done = run_again(lambda: run_limited([COMMAND, "recover"]))
        if done.code:
            raise Bad(f"recover: {checked_message(done)}; open below /run/gpusnap: {_users_of_run()}")
        if self.strict and done.out.strip():
            raise Bad(f"an interrupted command has left something to recover: {done.out.strip()}")
        return done.out.strip()

    def _free(self, way: str) -> None:
        """Follow docs/troubleshooting.md if Podman waits for a container whose processes were killed."""
        self.report.counts[f"{way}: waited, until recover"] += 1
        self.end_unknown(self.recover())

    def end_unknown(self, said: str) -> None:
        """End the containers that, according to `recover`, run without Podman's knowledge. Raises Bad.

        Afterwards, `recover` must not report them any more.
        """
        for container in _UNKNOWN.findall(said):
            ended = good(run_limited([COMMAND, "recover", container]))
            self.report.counts["ran without Podman's knowledge"] += 1
            self.report.note(f"    {said}\n    {ended}")
            if found := _UNKNOWN.findall(self.recover()):
                raise Bad(f"{ended!r}, and yet: {found}")

    def nothing_left(self, what: str) -> None:
        """Check that only the container is left, and no unneeded data in the store. Raises Bad."""
        if left := self.before.left():
            raise Bad(f"left behind by {what}: {left[:10]}")
        if STORE.exists() and (what.startswith("gpusnap, ") or random.random() < 0.2):
            good(run_limited([COMMAND, "gc", f"oci:{STORE}"]))
            if staged := [str(path) for path in (STORE / "staging").glob("*")]:
                raise Bad(f"left in the store by {what}: {staged[:10]}")
            good(run_limited([COMMAND, "verify", "--all"]))


def run_again(recover: Callable[[], Done]) -> Done:
    """Run `gpusnap recover`, again while another gpusnap works on a container."""
    end = time.monotonic() + _ENDING
    while (done := recover()).code and "working on" in done.err and time.monotonic() < end:
        time.sleep(0.5)
    return done


def signals_of(words: str) -> tuple[signal.Signals, ...]:
    """Return signals by their names without SIG, which commas separate."""
    return tuple(signal.Signals[f"SIG{word}"] for word in words.split(","))


def restore_from(locator: str) -> Line:
    return [COMMAND, "restore", locator]


# A round of each way


def checkpoint(bench: Bench) -> str:
    """Kill a checkpoint: the container must run on, or be restored from its checkpoint."""
    bench.number += 1
    name, leave = f"n{bench.number}", random.random() < 0.5
    archive = FOLDER / f"{name}.tar"
    lines: dict[str, Line] = {
        "gpusnap": [COMMAND, "checkpoint", NAME, "--to", f"oci:{STORE}:{name}"],
        "gpusnap to a file": [COMMAND, "checkpoint", NAME, "--to", str(archive)],
        "podman": [*_PODMAN, "checkpoint", "--compress", "none", "--export", str(archive), NAME],
        "podman in place": [*_PODMAN, "checkpoint", NAME],
    }
    kind = random.choice(list(lines))
    line = lines[kind] + ["--leave-running"] * leave
    init = bench.container.pid
    by_podman = tuple(each for each in bench.victims if each != "gpusnap") if line[0] == "podman" else None
    done, killer = bench.run("checkpoint", line, victims=by_podman)
    what = f"{kind}{' --leave-running' if leave else ''}, {killer.killed} killed after {killer.after:.2f} s"
    said = bench.recover()
    if _UNKNOWN.search(said):
        raise Bad(f"{what}: nothing was restored, and recover: {said}")
    if Path(f"/proc/{init}").exists():
        goes_on(bench.container.id)
        outcome = "ran on"
    else:
        outcome = _brought_back(bench, kind, name, archive, done, what)
        said += bench.recover()  # the order stays while a stopped container may need the store
    archive.unlink(missing_ok=True)
    bench.nothing_left(f"{what}; recover: {said}")
    if random.random() < 0.3:
        good(podman("container", "checkpoint", "--leave-running", NAME))
        goes_on(bench.container.id)
    return f"{what}: {outcome}"


_PODMAN = ["podman", "--runtime", "gpusnap-runtime", "container"]


def checkpoint_with_rm(bench: Bench) -> str:
    """Kill a checkpoint of a container with --rm: it must run on, or be restored from its checkpoint."""
    bench.begin("--rm")
    bench.number += 1
    archive = FOLDER / f"n{bench.number}.tar"
    to = random.choice([f"oci:{STORE}:n{bench.number}", str(archive)])
    init = bench.container.pid
    done, killer = bench.run("checkpoint", [COMMAND, "checkpoint", NAME, "--to", to])
    what = f"checkpoint with --rm to {to}, {killer.killed} killed after {killer.after:.2f} s"
    said = bench.recover()
    if Path(f"/proc/{init}").exists():
        try:
            goes_on(bench.container.id)
        except Bad as error:
            raise Bad(f"{what}: recover: {said!r}; {done.err[-600:]}; {error}\n{describe()}") from error
        outcome = "ran on"
    else:
        if not wait_for(lambda: podman("container", "exists", NAME).code == 1, seconds=5):
            podman("rm", "--force", "--time", "0", NAME)  # Podman was killed while it removed the container
        again = run_limited(restore_from(to))
        if advice := _DELETE.search(again.err):  # its runtime was killed, too, and Podman knows nothing of it
            good(run_limited(advice[1].split()))
            again = run_limited(restore_from(to))
        said += bench.recover()
        if again.code:
            raise Bad(f"{what}: recover: {said!r}; it has ended, and cannot be restored: {again.err[-1500:]}")
        goes_on(bench.container.id)
        outcome = "restored"
    archive.unlink(missing_ok=True)
    bench.nothing_left(f"{what}; recover: {said}")
    bench.begin()
    return f"{what}: {outcome}, exit code {done.code}"


def _brought_back(bench: Bench, kind: str, name: str, archive: Path, done: Done, what: str) -> str:
    """Restore an ended container: from the checkpoint that the command reported, or in place."""
    from_elsewhere = {
        "gpusnap": f"oci:{STORE}:{name}",
        "gpusnap to a file": str(archive),
        "podman": str(archive),
    }
    wait_for(
        lambda: podman("inspect", "--format", "{{.State.Status}}", NAME).out.strip() in ("exited", "stopped")
    )
    if done.code == 0 and kind in from_elsewhere:
        podman("rm", "--force", "--time", "0", NAME)
        again = run_limited(restore_from(from_elsewhere[kind]))
        outcome = "restored from what was made"
    else:
        if podman("inspect", "--format", "{{.State.Status}}", NAME).out.strip() == "stopped":
            # The process that should clean up was killed; see docs/troubleshooting.md.
            good(podman("container", "cleanup", NAME))
        again = run_limited([*_PODMAN, "restore", NAME])
        outcome = "restored in place"
    if again.code:
        raise Bad(f"{what}: the container has ended, and cannot be restored: {again.err[-1500:]}")
    goes_on(bench.container.id)
    return outcome


def restore(bench: Bench) -> str:
    """Kill a restore: the container must run, or be restored again."""
    whole = f"oci:{STORE}:whole"
    bench.container.remove()
    bare = State.now()
    done, killer = bench.run("restore", restore_from(whole))
    what = f"restore, {killer.killed} killed after {killer.after:.2f} s"
    said = bench.recover()
    status = podman("inspect", "--format", "{{.State.Status}}", NAME).out.strip()
    if done.code == 0 or (status == "running" and _ticks_on(bench)):
        if _UNKNOWN.search(said):
            raise Bad(f"{what}: Podman knows it, and recover: {said}")
        goes_on(bench.container.id)
        outcome = "ran"
    else:
        bench.end_unknown(said)
        podman("rm", "--force", "--time", "0", NAME)
        if left := bare.left():
            raise Bad(f"left behind by {what}; recover: {said!r}; podman said {status!r}: {left[:10]}")
        good(run_limited(restore_from(whole)))
        goes_on(bench.container.id)
        outcome = "restored again"
    bench.nothing_left(f"{what}; recover: {said}")
    return f"{what}: {outcome}"


def _ticks_on(bench: Bench) -> bool:
    with suppress(Bad):
        goes_on(bench.container.id)
        return True
    return False


def push(bench: Bench) -> str:
    """Kill a push: the next one must succeed, and the content of the registry must be complete."""
    bench.number += 1
    reference = f"{bench.registry}/team/w{bench.number}:v1"
    line = [COMMAND, "push", f"oci:{STORE}:whole", reference, "--plain-http"]
    _, killer = bench.run("push", line, victims=("gpusnap",))
    good(run_limited(line))
    good(run_limited([COMMAND, "verify", "--deep", "--plain-http", reference]))
    bench.nothing_left("push")
    return f"push, {killer.killed} killed after {killer.after:.2f} s"


def pull(bench: Bench) -> str:
    """Kill a pull: no incomplete checkpoint may be left, and the next pull must succeed."""
    folder = FOLDER / "pulled"
    folder.mkdir()
    to_file = random.random() < 0.5
    place = ["-o", str(folder / "w.tar")] if to_file else ["--to", f"oci:{folder}/store:w"]
    line = [COMMAND, "pull", f"{bench.registry}/team/w:v1", "--plain-http", *place]
    _, killer = bench.run("pull", line, victims=("gpusnap",))
    found = str(folder / "w.tar") if to_file else f"oci:{folder}/store:w"
    if to_file and (folder / "w.tar").exists():
        good(run_limited([COMMAND, "verify", found]))
    else:
        good(run_limited(line))
        good(run_limited([COMMAND, "verify", found]))
    if not to_file:
        good(run_limited([COMMAND, "gc", f"oci:{folder}/store"]))
    staging = folder / "store/staging"
    left = [str(path) for path in (staging if not to_file else folder).glob("*") if path.name != "w.tar"]
    if left:
        raise Bad(f"left behind by a pull killed after {killer.after:.2f} s: {left}")
    shutil.rmtree(folder)
    bench.nothing_left("pull")
    return f"pull, {killer.killed} killed after {killer.after:.2f} s"


def gc(bench: Bench) -> str:
    """Kill a gc: named checkpoints must be complete, and the next gc must remove the rest."""
    folder = FOLDER / "collected"
    shutil.copytree(STORE, folder, symlinks=True)
    index = json.loads((folder / "index.json").read_text())
    for each in index["manifests"]:
        # The pages of a failed checkpoint have no name.
        name = each.get("annotations", {}).get("org.opencontainers.image.ref.name", "whole")
        if name != "whole":
            good(run_limited([COMMAND, "rm", f"oci:{folder}:{name}"]))
    for number in range(300):
        data = random.randbytes(64)
        import hashlib

        (folder / "blobs/sha256" / hashlib.sha256(data).hexdigest()).write_bytes(data + b"%d" % number)
    _, killer = bench.run("gc", [COMMAND, "gc", f"oci:{folder}"], victims=("gpusnap",))
    good(run_limited([COMMAND, "verify", f"oci:{folder}:whole"]))
    good(run_limited([COMMAND, "gc", f"oci:{folder}"]))
    good(run_limited([COMMAND, "verify", "--all", f"oci:{folder}"]))
    found = json.loads(good(run_limited([COMMAND, "gc", "--dry-run", "--json", f"oci:{folder}"])))
    if found["blobs"] or found["stagings"] or [*(folder / "staging").iterdir()]:
        raise Bad(f"left behind by a gc killed after {killer.after:.2f} s: {found}")
    shutil.rmtree(folder)
    bench.nothing_left("gc")
    return f"gc, {killer.killed} killed after {killer.after:.2f} s"


ROUNDS: dict[str, Callable[[Bench], str]] = {
    "checkpoint": checkpoint,
    "checkpoint-rm": checkpoint_with_rm,
    "restore": restore,
    "push": push,
    "pull": pull,
    "gc": gc,
}


def ready(bench: Bench, ways: tuple[str, ...]) -> None:
    """Make a checkpoint that is never killed, and measure how long each command takes."""
    bench.begin()
    line = [COMMAND, "checkpoint", NAME, "--to", f"oci:{STORE}:whole", "--leave-running"]
    bench.measure("checkpoint", line)
    if "restore" in ways:
        bench.container.remove()
        bench.measure("restore", restore_from(f"oci:{STORE}:whole"))
        bench.before = State.now()
    if {"push", "pull"} & {*ways}:
        reference = f"{bench.registry}/team/w:v1"
        bench.measure("push", [COMMAND, "push", f"oci:{STORE}:whole", reference, "--plain-http"])
        bench.measure("pull", [COMMAND, "pull", reference, "--plain-http", "--to", f"oci:{FOLDER}/first:w"])
        shutil.rmtree(FOLDER / "first")
    bench.measure("gc", [COMMAND, "gc", f"oci:{STORE}"])


def parse_options(
    doc: str, rounds: int, *, victims: tuple[str, ...], ways: tuple[str, ...] = (), gpu: bool = False
) -> argparse.Namespace:
    """Return the options of a storm: `rounds`, `victims` and `ways` are those without options."""

    def words(text: str) -> tuple[str, ...]:
        return tuple(text.split(","))

    given = parser(doc, rounds)
    given.add_argument("--runtimes", type=words, default=_RUNTIMES)
    if ways:
        given.add_argument("--ways", type=words, default=ways)
    given.add_argument("--victims", type=words, default=victims)
    given.add_argument("--signals", type=signals_of, default=())
    if gpu:
        given.add_argument("--gpu", action="store_true", help="PyTorch on this machine's own GPU")
    return given.parse_args()


def count_rounds(report: Report, options: argparse.Namespace, at: int) -> Iterator[int]:
    """Yield the numbers of the rounds under the runtime at `at`, none after its part of the time."""
    parts = len(options.runtimes)
    for number in range(options.rounds // parts):
        if report.over(options.seconds * (at + 1) / parts):
            return
        yield number


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    options = parse_options(__doc__ or "", 300, victims=VICTIMS, ways=WAYS, gpu=True)
    report = prepare("kills", options)
    with ExitStack() as stack:
        pushes = {"push", "pull"} & {*options.ways}
        registry = stack.enter_context(running()).host if pushes else ""
        for at, runtime in enumerate(options.runtimes):
            settings(runtime)
            faults("")
            shutil.rmtree(FOLDER, ignore_errors=True)
            shutil.rmtree(STORE, ignore_errors=True)
            FOLDER.mkdir(parents=True)
            bench = Bench(report, runtime, options.victims, registry, options.signals)
            ready(bench, options.ways)
            for number in count_rounds(report, options, at):
                way = options.ways[number % len(options.ways)]
                one_round(bench, way, f"{runtime}, round {number}, {way}")
            remove_all()
    return report.end()


def one_round(bench: Bench, way: str, name: str) -> None:
    """Run one round; after a failure, start again with a clean host and a new container."""
    bench.report.counts[f"{way}s"] += 1
    remove_groups()
    try:
        said = ROUNDS[way](bench)
        bench.report.note(f"{name}: {said}")
        bench.report.counts["good"] += 1
    except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
        bench.report.note(f"{name}: BAD {error}")
        logs = Path("/var/lib/containers/storage/overlay-containers").glob("*/userdata/*.log")
        bench.report.failed(name, error, Path("/run/gpusnap/journal"), *logs)
        for left in FOLDER.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        for pid, what in processes().items():
            if what == "gpuwork" or what in ("criu", *_RUNTIMES):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        podman("rm", "--force", "--all", "--time", "0")
        shutil.rmtree("/run/gpusnap/journal", ignore_errors=True)
        bench.begin()


if __name__ == "__main__":
    sys.exit(main())
