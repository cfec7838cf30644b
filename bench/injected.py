"""ENOSPC, EDQUOT, EIO, ENOMEM and EMFILE at every system call of a checkpoint and of a restore in turn.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/injected.py [--rounds 400 | --stride 1 | --kinds] [--seed 1]
        [--runtimes crun] [--ways checkpoint,restore,command] [--pages chunks]
        [--errors ENOSPC,EDQUOT,EIO,ENOMEM,EMFILE]

Fails calls of gpusnap-runtime itself, not of crun and CRIU, from where it begins to import its own modules
(injecting.py). With the way "command", it fails calls of `gpusnap checkpoint` into a store. Each round fails
one call once. --stride 1 fails each call with each error that its manual page lists. --rounds fails that many
calls, spread evenly. --kinds fails one call of each kind: the same call on the same file (apart from random
parts of the name) with the same error, and each call that starts a thread or a process. Then there are two
correct results: the command succeeded, and the image or the container is right; or it printed an error
message, the workload continues with every byte right (or the image is complete), and nothing is left.
"""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from faulthost import (
    CHECKOUT,
    COMMAND,
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
    wait_for,
)
from injecting import FITTING, kind, of_imports
from support import RUNTIME, STORAGE, Container, good, podman, run, until

NAME = "injected"
FOLDER = Path("/var/tmp/injected")
CALLS = FOLDER / "calls"
_TRACED = [sys.executable, "-B", str(CHECKOUT / "bench/injecting.py"), "--calls", str(CALLS)]
_BEGINNINGS = ("clone", "fork", "vfork")
_FROM = "/runtime_shim/runtime/command_line.py"
_FROM_OF_COMMANDS = "/operations/checkpointing/checkpoint.py"
_RESTORES = re.compile(
    r"gpusnap restore [^;\s]+|(GPUSNAP_STORE=\S+ )?podman container restore (--import )?[^;\s]+"
)


@dataclass(frozen=True, order=True)
class Point:
    """A call that fails: its number among the calls that can fail with the error, of one kind if given."""

    at: int
    error: str
    kind: str = ""

    def words(self) -> list[str]:
        """Return the options for injecting.py."""
        return ["--at", str(self.at), "--error", self.error, *(["--kind", self.kind] if self.kind else [])]


def run_traced(line: list[str], point: Point | None, after: str = _FROM) -> tuple[Done, list[str]]:
    """Run a command, and make a call fail; return its result and the calls listed by injecting.py.

    Calls count from the moment when the command opens the file `after`.
    """
    words = point.words() if point is not None else []
    done = run_limited([*_TRACED, "--after", after, *words, "--", *line])
    return done, CALLS.read_text().splitlines()


@dataclass(frozen=True)
class Choice:
    """Which of the calls fail: `rounds` of them, every `stride`th, or one of each kind."""

    rounds: int
    stride: int = 0
    kinds: bool = False


def points(calls: list[str], errors: list[str], choice: Choice) -> list[Point]:
    """Return the calls to fail, each with an error that it can have, according to `choice`.

    Most calls belong to imports, and these are all alike. So --rounds uses only a tenth of its rounds for
    them.
    """
    if choice.kinds:
        return _one_of_each(calls, errors)
    found: list[Point] = []
    imports: list[Point] = []
    for error in errors:
        fitting = [call for call in calls if error in call.partition(" ")[0].split(",")]
        for at, call in enumerate(fitting):
            (imports if of_imports(call) else found).append(Point(at, error))
    print(
        f"{len(calls)} calls; {len(found)} with each error that fits, {len(imports)} of imports", flush=True
    )
    if choice.stride:
        return sorted(found + imports)[random.randrange(choice.stride) :: choice.stride]
    tenth = choice.rounds // 10
    return [*_spread(found, choice.rounds - tenth), *_spread(imports, tenth)]


def _one_of_each(calls: list[str], errors: list[str]) -> list[Point]:
    """Return a random call of each kind with each error that it can have.

    Of the calls that start a thread or a process, return all: they look alike, but have different purposes.
    """
    found: Counter[tuple[str, str]] = Counter()
    for call in calls:
        fitting, _, described = call.partition(" ")
        found.update((kind(described), error) for error in fitting.split(",") if error in errors)
    print(f"{len(calls)} calls; {len(found)} kinds with each error that fits", flush=True)
    return [
        Point(at, error, each)
        for (each, error), many in sorted(found.items())
        for at in (range(many) if each.startswith(_BEGINNINGS) else [random.randrange(many)])
    ]


def _spread(found: list[Point], rounds: int) -> list[Point]:
    """Return `rounds` of the points, evenly spread."""
    step = max(1.0, len(found) / max(1, rounds))
    shift = random.uniform(0, step)
    return [
        found[int(shift + at * step)]
        for at in range(min(rounds, len(found)))
        if shift + at * step < len(found)
    ]


@dataclass
class Checkpoints:
    """Checkpoints of a container by gpusnap-runtime, to the place from which Podman would restore it."""

    id: str
    pid: int
    before: State
    leave: bool = True

    @classmethod
    def begin(cls) -> Checkpoints:
        remove_all()
        run(COMMAND, "recover")
        container = start(NAME)
        return cls(container.id, container.pid, State.now())

    @property
    def image(self) -> Path:
        return STORAGE / self.id / "userdata/checkpoint"

    def line(self) -> list[str]:
        work = FOLDER / "work"
        work.mkdir(exist_ok=True)
        shutil.rmtree(self.image, ignore_errors=True)
        paths = ["--image-path", str(self.image), "--work-path", str(work)]
        return [RUNTIME, "checkpoint", *paths, *["--leave-running"] * self.leave, self.id]

    def check(self, done: Done) -> str:
        """Check and return the outcome. Raises Bad."""
        outcome = self._check_message(done)
        if Path(f"/proc/{self.pid}").exists() and (done.code or self.leave):
            goes_on(self.id)
            if done.code == 0:
                good(run_limited([COMMAND, "verify", str(self.image)]))
        else:
            self._restore(outcome)
            outcome += ", restored"
        if left := self.before.left():
            raise Bad(f"left behind ({outcome}): {left[:10]}; {done.err[-500:]}")
        return outcome

    def _check_message(self, done: Done) -> str:
        """Check what the command printed, and recover if it asks for that; return the outcome. Raises Bad."""
        outcome = "worked" if done.code == 0 else "refused"
        if done.code:
            checked_message(done)
        if _waits():
            if "gpusnap recover" not in done.err:
                raise Bad(f"it needs `gpusnap recover`, and does not say so: {done.err[-1000:]}")
            outcome = self._recover()
        return outcome

    def _recover(self) -> str:
        """Repair the state with `gpusnap recover`; if an fsync failed, do what its message says."""
        done = run_limited([COMMAND, "recover"])
        if done.code and "were not flushed to disk" in done.err:
            folder = self.image / "gpusnap"
            (folder / "manifest.pending").rename(folder / "manifest.json")
            good(run_limited([COMMAND, "recover"]))
            return "doubtful, renamed by hand"
        good(done)
        return "recovered"

    def _restore(self, outcome: str) -> None:
        container = Container(NAME)
        wait_for(lambda: container.inspect()["State"]["Status"] == "exited")
        again = run_limited(
            ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--keep", NAME]
        )
        if again.code:
            raise Bad(f"{outcome}: it has ended, and cannot be restored: {again.err[-1500:]}")
        self.pid = container.pid
        goes_on(self.id)


@dataclass
class Commands(Checkpoints):
    """Checkpoints by `gpusnap checkpoint` into the store: only calls of the command itself fail."""

    def line(self) -> list[str]:
        return [COMMAND, "checkpoint", NAME, *["--leave-running"] * self.leave]

    def check(self, done: Done) -> str:
        """Check and return the outcome. Raises Bad."""
        outcome = self._check_message(done)
        if Path(f"/proc/{self.pid}").exists():
            if done.code == 0 and not self.leave:
                raise Bad("it runs after its checkpoint")
        else:
            self._bring_back(done)
            outcome += ", restored"
        goes_on(self.id)
        for words in (["gc"], ["verify", "--all"]):
            good(run_limited([COMMAND, *words]))
        if left := self.before.left():
            raise Bad(f"left behind ({outcome}): {left[:10]}; {done.err[-500:]}")
        return outcome

    def _bring_back(self, done: Done) -> None:
        """Restore the container with the command that was printed. Raises Bad."""
        found = _RESTORES.search(done.out + done.err)
        if found is None:
            raise Bad(f"it has ended, and no command that restores it is said: {done.err[-1000:]}")
        container = Container(NAME)
        wait_for(lambda: container.inspect()["State"]["Status"] == "exited")
        again = run_limited(["sh", "-c", found[0]])
        if again.code:
            raise Bad(f"it cannot be restored by {found[0]}: {again.err[-1500:]}; {done.err[-1000:]}")
        self.id, self.pid = container.id, container.pid


def _waits() -> bool:
    """Whether the journal has a record for `gpusnap recover`."""
    return any(path.suffix not in (".lock", ".new") for path in Path("/run/gpusnap/journal").glob("*"))


@dataclass
class Restores:
    """Restores of a checkpoint by gpusnap-runtime itself."""

    id: str
    real: str
    config: bytes
    before: State

    @classmethod
    def begin(cls, real: str) -> Restores:
        remove_all()
        run(COMMAND, "recover")
        container = start(NAME)
        good(podman("container", "checkpoint", "--keep", NAME))
        good(podman("mount", NAME))
        config = (STORAGE / container.id / "userdata/config.json").read_bytes()
        image = container.image_path
        shutil.rmtree(FOLDER / "image", ignore_errors=True)
        shutil.copytree(image, FOLDER / "image", symlinks=True)
        return cls(container.id, real, config, State.now())

    @property
    def bundle(self) -> Path:
        return STORAGE / self.id / "userdata"

    def line(self) -> list[str]:
        work = FOLDER / "work"
        work.mkdir(exist_ok=True)
        paths = ["--bundle", self.bundle, "--image-path", FOLDER / "image", "--work-path", work]
        return [RUNTIME, "restore", "--detach", *map(str, paths), "--pid-file", str(FOLDER / "pid"), self.id]

    def check(self, done: Done) -> str:
        """Check and return the outcome; remove the container and check that nothing is left. Raises Bad."""
        known = self.id in run(self.real, "list", "-q").out.split()
        try:
            if done.code == 0:
                self._ticks()
                return "worked"
            said = checked_message(done)
            if known:
                raise Bad(f"it failed, and {self.real} has the container: {said}")
            if _waits():
                if "gpusnap recover" not in done.err:
                    raise Bad(f"it needs `gpusnap recover`, and does not say so: {said}")
                good(run_limited([COMMAND, "recover"]))
                return "recovered"
            if (self.bundle / "config.json").read_bytes() != self.config:
                raise Bad(f"config.json is not as it was: {said}")
            return "refused"
        finally:
            if known:
                good(run(self.real, "delete", "--force", self.id))
            (self.bundle / "config.json").write_bytes(self.config)
            if (left := self.before.left()) and sys.exc_info()[0] is None:
                raise Bad(f"left behind: {left[:10]}; {done.err[-500:]}")

    def _ticks(self) -> None:
        """Check that the container writes ticks to its stdout, with every byte right. Raises Bad."""

        def ticks() -> list[str]:
            return [
                line
                for line in Path("/var/tmp/faults-output/out").read_text().splitlines()[1:]
                if "tick=" in line
            ]

        until(lambda: len(ticks()) > 3, "ticks of the restored container")
        if wrong := [line for line in ticks()[:-1] if " ok" not in line]:
            raise Bad(f"wrong bytes: {wrong[0]}")


def rounds(report: Report, way: str, runtime: str, given: list[str], choice: Choice, *, end: float) -> None:
    """Run all rounds of one way."""

    def begin() -> Checkpoints | Restores:
        if way == "restore":
            return Restores.begin(runtime)
        return Commands.begin() if way == "command" else Checkpoints.begin()

    after = _FROM_OF_COMMANDS if way == "command" else _FROM

    job = begin()
    for _ in range(2):  # the first run fills caches
        done, calls = run_traced(job.line(), None, after)
        good(done)
        job.check(done)
    chosen = points(calls, given, choice)
    random.shuffle(chosen)  # if time runs out, some of each were done
    for at, point in enumerate(chosen):
        if report.over(end):
            return
        if isinstance(job, Checkpoints):
            job.leave = at % 3 != 0
        name = f"{runtime} {way}, call {point.at}, {point.error}"
        report.counts[f"{way}s"] += 1
        call = ""
        try:
            done, calls = run_traced(job.line(), point, after)
            call = calls[0] if calls else ""
            report.counts[point.error if call else "not met"] += 1
            outcome = job.check(done)
            report.counts[f"{way}: {outcome}"] += 1
            said = done.err.strip().splitlines()[-1][:300] if done.code else ""
            report.note(f"{name}, {call}: {outcome} | {said}")
            if done.code:
                report.said[plain(said)] += 1
        except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
            logs = [Path("/var/tmp/faults-output"), CALLS, FOLDER / "work", Path("/run/gpusnap/journal")]
            report.note(f"{name} {call}: BAD {error}")
            report.failed(f"{name}: {call}", error, *logs)
            run(COMMAND, "recover")
            podman("umount", "--all", "--force")
            with suppress(OSError):
                shutil.rmtree("/run/gpusnap/journal")
            job = begin()


def main() -> int:
    """Run the rounds."""
    given = parser(__doc__ or "", 400)
    given.add_argument("--stride", type=int, default=0, help="every Nth call instead of --rounds")
    given.add_argument("--kinds", action="store_true", help="one call of each kind instead of --rounds")
    given.add_argument("--runtimes", default="crun")
    given.add_argument("--ways", default="checkpoint,restore")
    given.add_argument("--errors", default=",".join(FITTING))
    given.add_argument("--pages", default="chunks", help="memory.pages: chunks, or store [default: chunks]")
    options = given.parse_args()
    report = prepare("injected", options)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    runs = [(runtime, way) for runtime in options.runtimes.split(",") for way in options.ways.split(",")]
    for at, (runtime, way) in enumerate(runs):
        settings(runtime, pages=options.pages)
        end = options.seconds * (at + 1) / len(runs)
        choice = Choice(options.rounds // len(runs), options.stride, options.kinds)
        rounds(report, way, runtime, options.errors.split(","), choice, end=end)
    remove_all()
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
