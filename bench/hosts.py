"""The machine that bench/checkpoint.py runs on: one with a GPU, or the test host with softgpu; its workload.

The workload holds a block of device memory that does not change between ticks, prints the time at each tick,
and ends at the first wrong word: tests/gpu/programs/torch_block.py on a real GPU, tests/workload/gpuwork.c on
softgpu.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import gpuhost
import realhost
import shimhost
from figures import Case
from support import GPUWORK, Container, podman, until

__all__ = ["NAME", "BenchError", "Log", "Place", "Stamp", "Work", "command", "place"]

CHECKOUT = Path(__file__).resolve().parents[1]
NAME = "gpusnap-bench"
SLICES = 16  # ticks until a workload has checked all of its memory
_GPUWORK_SLICES = 256  # … of gpuwork on a GPU: it checks on the CPU
_LIMIT = 1200.0  # seconds for one command
_UNDOING = 120.0  # … and for one that was interrupted to undo what it did
_TICK = 0.02  # seconds between ticks: what a pause is known to
_GPUS_CONF = """\
driver 580.159.04
cuda 13.0
gpu minor=0 uuid=GPU-11111111-2222-3333-4444-0000000000b0 cc=9.0 memory=80GiB name=Soft H100
"""


class BenchError(Exception):
    """A row cannot be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """One tick of one worker, by its own clock."""

    tick: int
    at: float
    changes: int


@dataclass(frozen=True, slots=True)
class Log:
    """A file in which workers log their ticks."""

    path: Path

    _LINE = re.compile(rb"pid=(\d+) tick=(\d+) (ok|BAD)[^\n]*?(?: changes=(\d+))? at=([\d.]+)")

    def stamps(self, since: float = 0.0) -> dict[int, list[Stamp]]:
        """Return ticks by worker since a time of day. Raises BenchError if one found a wrong word."""
        found: dict[int, list[Stamp]] = {}
        for match in self._LINE.finditer(self.path.read_bytes()):
            pid, tick, word, changes, at = match.groups()
            if word != b"ok":
                raise BenchError(f"the workload found wrong bytes: {match[0].decode()}")
            if float(at) >= since:
                found.setdefault(int(pid), []).append(Stamp(int(tick), float(at), int(changes or 0)))
        return found

    def wait(
        self, workers: int, *, since: float, ticks: int = SLICES + 1, changes: int = 0, deadline: float = 60
    ) -> None:
        """Wait until each worker has ticked so often since then, and has changed its memory so often."""

        def there() -> bool:
            found = self.stamps(since).values()
            enough = [s for s in found if len(s) >= ticks and s[-1].changes >= changes]
            return len(enough) >= workers

        until(there, f"{ticks} ticks of each worker", deadline=deadline)

    def pause(self, since: float) -> float:
        """Return the longest time between two ticks of a worker since then, less its usual one."""
        gaps = [
            [late.at - early.at for early, late in pairwise(stamps)] for stamps in self.stamps(since).values()
        ]
        return max(max(each) - statistics.median(each) for each in gaps if each)


@dataclass(frozen=True, slots=True)
class Work(Container):
    """The container of a workload."""

    log_file: Log
    workers: int

    @property
    def static(self) -> Path:
        """Return Podman's folder for it, which has the runtime's logs of a restore."""
        return Path(self.inspect()["StaticDir"])

    def remove(self) -> None:
        """Remove it, running or not."""
        podman("rm", "--force", "--time", "0", self.name)


@dataclass(frozen=True, slots=True)
class Place:
    """How workloads are started here."""

    software: bool
    image: str
    options: tuple[str, ...]
    """Options of `podman run`: the GPU, the program, a log in a file."""
    deadline: float
    """Seconds for the first ticks."""
    gpuwork: bool = False
    """Whether that program holds the block, and not PyTorch."""

    def block(self, case: Case, *, inside: bool = True) -> list[str]:
        """Return the command of the program that holds a block, in a container or outside of any."""
        if not self.gpuwork:
            folder = "/programs" if inside else str(CHECKOUT / "tests/gpu/programs")
            words = ["--mib", str(case.mib), "--procs", str(case.procs), "--pause", str(_TICK)]
            return [sys.executable, f"{folder}/torch_block.py", "--data", case.data, *words]
        words = [
            "--mib",
            str(case.mib // case.procs),
            "--tick",
            str(round(_TICK * 1000)),
            "--data",
            case.data,
        ]
        words += ["--procs", str(case.procs)] if case.procs > 1 else []
        slices = SLICES if self.software else _GPUWORK_SLICES
        return ["/gpuwork" if inside else GPUWORK, *words, "--slices", str(slices), "--touch", "2", "--clock"]

    def with_gpuwork(self) -> Place:
        """Return this place with gpuwork instead of PyTorch's program, and fewer checks on the CPU."""
        if self.gpuwork:
            return self
        return replace(self, gpuwork=True, options=(*self.options, *realhost.Workload.gpuwork(0).options()))

    def training(self) -> list[str]:
        """Return the command of a program that computes as fast as it can."""
        if self.software:
            return ["/gpuwork", "--mib", "4", "--tick", "0", "--clock"]
        return [sys.executable, "/programs/torch_train.py", "--mib", "256", "--pause", "0"]

    def start(self, words: Sequence[str], *, runtime: str, workers: int = 1) -> Work:
        """Start a container; returns when each worker has ticked often enough to have checked everything."""
        begun = time.time()
        run = ["run", "-d", "--name", NAME, *self.options, self.image, *words]
        command("podman", "--runtime", runtime, *run)
        config = Container(NAME).inspect()["HostConfig"]["LogConfig"]
        work = Work(NAME, Log(Path(config["Path"])), workers)
        self._first_ticks(work, begun)
        return work

    def _first_ticks(self, work: Work, begun: float) -> None:
        try:
            work.log_file.wait(work.workers, since=begun, deadline=self.deadline)
        except AssertionError as error:
            said = podman("logs", work.name)
            raise BenchError(f"{error}; it said: {(said.out + said.err).strip()[-300:]}") from error

    @contextmanager
    def bare(self, case: Case, folder: Path) -> Iterator[Log]:
        """Run the block's program outside of any container; it is gone when the block of code ends."""
        path = folder / "bare.log"
        with path.open("wb") as out:
            line = self.block(case, inside=False)
            process = subprocess.Popen(
                line, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            log = Log(path)
            try:
                log.wait(case.procs, since=0, deadline=self.deadline)
            except AssertionError as error:
                raise BenchError(f"{error}; it said: {path.read_text()[-300:]}") from error
            yield log
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            path.unlink()


@contextmanager
def place(minor: int | None) -> Iterator[Place]:
    """This machine with gpusnap installed, put back afterwards; `minor` of its GPU, None for softgpu."""
    with ExitStack() as stack:
        if minor is None:
            options = stack.enter_context(_softgpu())
            yield Place(True, "localhost/base", options, 60.0, gpuwork=True)
            return
        machine = stack.enter_context(realhost.machine(minor))
        yield Place(False, realhost.IMAGE, tuple(machine.options()), realhost.START)


@contextmanager
def _softgpu() -> Iterator[tuple[str, ...]]:
    """The test host, with one large GPU in software."""
    state, build = Path(gpuhost.STATE_DIR, "gpus.conf"), CHECKOUT / "softgpu/build"
    before = state.read_text() if state.exists() else ""
    settings = shimhost.SETTINGS.read_text() if shimhost.SETTINGS.exists() else ""
    try:
        shimhost.install(CHECKOUT)
        gpuhost.install(build, _GPUS_CONF)
        shutil.copy(build / "bin" / "gpuwork", GPUWORK)
        mount = ("--volume", f"{GPUWORK}:/gpuwork:ro")
        yield ("--device", "nvidia.com/gpu=0", *mount, "--log-driver", "k8s-file")
    finally:
        shimhost.write_settings(settings)
        if before:
            gpuhost.install(build, before)


def _find_message(err: str) -> str:
    """Return gpusnap's error message, if there is one, else the end of Podman's output."""
    found = [line.partition("gpusnap: ")[2] for line in err.splitlines() if "gpusnap: " in line]
    return found[0] if found else err.strip()[-400:]


def command(*argv: str | os.PathLike[str]) -> tuple[float, str]:
    """Run a command; its seconds and its output. Raises BenchError with what it said where it fails.

    In a session of its own, so that an interrupt comes to it through us: it is asked to end, and waited for
    while it undoes what it began.
    """
    begun = time.monotonic()
    env = {"PATH": os.environ["PATH"], "HOME": "/root"}
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=_LIMIT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_UNDOING)
            process.kill()
            raise
    took = time.monotonic() - begun
    if process.returncode:
        words = " ".join(map(str, argv[:5]))
        raise BenchError(f"`{words} …` ended with {process.returncode}: {_find_message(err) or out[-400:]}")
    return took, out
