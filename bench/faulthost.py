"""Shared code of programs that inject faults: the host, commands with a deadline, checks for leftovers.

fuzz.py, kills.py, injected.py and soak.py run in the test host; kills.py and suspended_kills.py also on a
machine with a GPU. Each ends with one line of JSON, the counts, and exit status 1 if anything was lost, left
behind or hung.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

CHECKOUT = Path(__file__).resolve().parents[1]
for folder in (".", "tests/host", "tests/integration", "tests/gpu"):
    sys.path.insert(0, str(CHECKOUT / folder))

import gpuhost  # noqa: E402
import realhost  # noqa: E402
import shimhost  # noqa: E402
from support import (  # noqa: E402
    GPUS_CONF,
    GPUWORK,
    STATE,
    STORAGE,
    Container,
    Done,
    containers_left,
    good,
    podman,
    remove_left_groups,
    run,
)

from gpusnap.runtime_shim.process import proc  # noqa: E402
from gpusnap.runtime_shim.runtime.child_process import Child  # noqa: E402

__all__ = [
    "COMMAND",
    "GUARDIAN",
    "Bad",
    "Done",
    "Hung",
    "Report",
    "State",
    "checked_message",
    "descendants",
    "goes_on",
    "parser",
    "prepare",
    "program",
    "run_limited",
    "start",
    "wait_for",
]

COMMAND = "/usr/local/bin/gpusnap"
STORE = Path("/var/lib/gpusnap-faults")
LIMIT = 90.0
"""Seconds for a command; Podman's own limits are below that."""
SETTLING = 20.0
"""Seconds until Podman has done its work after a container's end."""
_LARGEST_MESSAGE = 64 << 10  # bytes on stderr
# What appears in /run/gpusnap and stays: locks, and an unnamed file that the next writer replaces.
_STAYS = ("lock", ".new")
_LEFT = ("/run/gpusnap", "/run/gpusnap-*", "/var/tmp/gpusnap-*", "/tmp/gpusnap-*", "/dev/shm/gpusnap*")
# PyTorch, which checks its memory and computes the same at each tick, and runs programs meanwhile.
_ON_HARDWARE = realhost.Workload.python("torch_train.py", "torch", 256, "--programs")
_SUM = re.compile(rb" tick=(\d+) ok sum=(\S+) ")
_KERNEL_THREAD = 0x200000  # of the flags in /proc/PID/stat (linux, include/linux/sched.h, PF_KTHREAD)
# Helpers of Podman's that run on for good.
_OTHERS = ("catatonit", "aardvark-dns")


class Bad(Exception):
    """Something was lost, or left behind."""


class Hung(Bad):
    """A command did not end in time."""


def descendants(root: int) -> dict[int, str]:
    """Return processes below `root` and itself, by PID, with their programs, without those that end."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parent = int((each / "stat").read_text().rpartition(") ")[2].split()[1])
                children.setdefault(parent, []).append(int(each.name))
    found: dict[int, str] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found[pid] = program(pid)
        waiting += children.get(pid, [])
    return {pid: name for pid, name in found.items() if name}


GUARDIAN = "gpusnap-guardian"
"""What gpusnap/operations/checkpointing/guardian.py calls its shell."""


def program(pid: int) -> str:
    """Return a process's program: gpusnap, gpusnap-runtime, or its name; "" if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
    for word in words[:4]:
        if word in (COMMAND, str(shimhost.ENTRY), str(shimhost.LAUNCHER), GUARDIAN):
            return Path(word).name
    return name


def run_limited(
    argv: Sequence[str | os.PathLike[str]],
    *,
    limit: float = LIMIT,
    env: dict[str, str] | None = None,
    during: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Done:
    """Run a command to its end; `during` is called while it runs. Raises Hung where it does not end in time.

    Its output goes to files: a restored container may keep a pipe open.
    """
    passed_on = {name: os.environ[name] for name in ("PATH", "CONTAINERD_ADDRESS") if name in os.environ}
    environment = {**passed_on, "HOME": "/root", **(env or {})}
    folder = Path("/var/tmp/faults-output")
    folder.mkdir(exist_ok=True)
    with (folder / "out").open("wb+") as out, (folder / "err").open("wb+") as err:
        process = Child(
            [os.fspath(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env=environment,
            start_new_session=True,
        )
        try:
            during(process)
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            stands = _stands(process.pid)
            _end(process.pid)
            process.wait()
            raise Hung(f"not within {limit:g} s: {_line(argv)}\n{stands}") from None
        except BaseException:
            _end(process.pid)
            process.wait()
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read(1 << 20).decode(errors="replace"))
    return Done(code, *texts)


def _line(argv: Sequence[str | os.PathLike[str]]) -> str:
    return " ".join(os.fspath(word) for word in argv)


def _end(root: int) -> None:
    for pid in descendants(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stands(root: int) -> str:
    """Return where the threads below `root`, and of the workload, wait."""
    lines = []
    pids = {*descendants(root), *(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit())}
    for pid in sorted(pids):
        for task in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(OSError):
                state = Path(task, "stat").read_text().rpartition(") ")[2][0]
                call = Path(task, "syscall").read_text().strip()
                lines.append(f"{pid}/{task.name} {program(pid)} {state} {call}")
    return "\n".join(lines)


def wait_for(condition: Callable[[], Any], *, seconds: float = SETTLING) -> Any:
    """Return the condition's value once it is true, or at the deadline."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def goes_on(identity: str, more: int = 3) -> None:
    """Wait for more ticks of a container, by its full ID, each with every byte right. Raises Bad.

    Its log is read where conmon writes it: Podman would take longer to show it.
    """
    log = STORAGE / identity / "userdata/ctr.log"
    begun = log.stat().st_size if log.exists() else 0

    def ticks() -> list[bytes]:
        with log.open("rb") as file:
            file.seek(begun)
            lines = file.read().split(b"\n")[:-1]
        return [line for line in lines if b" tick=" in line]

    wait_for(lambda: log.exists() and (len(ticks()) > more or any(b" BAD" in line for line in ticks())))
    found = ticks() if log.exists() else []
    if wrong := [line.decode(errors="replace") for line in found if b" BAD" in line]:
        raise Bad(f"wrong bytes: {wrong[0]}")
    if _Hardware.machine:
        _Hardware.compare(found)
    if len(found) <= more:
        raise Bad(f"the container does not go on: {len(found)} ticks in {SETTLING:g} s")


def checked_message(done: Done) -> str:
    """Return the last line on stderr of a failed command; raises Bad if it is not meant for people."""
    if "Traceback (most recent call last)" in done.err:
        raise Bad(f"a traceback:\n{done.err[-4000:]}")
    if len(done.err) + len(done.out) > _LARGEST_MESSAGE:
        raise Bad(f"{len(done.err)} bytes on stderr, {len(done.out)} on stdout")
    lines = [line for line in done.err.splitlines() if line.strip()]
    if not lines:
        raise Bad(f"exit code {done.code} without a word")
    if done.code < 0:
        raise Bad(f"ended by signal {-done.code}: {lines[-1]}")
    found = [line for line in lines if re.search(r"gpusnap: |^Error: ", line)]
    return (found or lines)[-1]


@dataclass(frozen=True)
class State:
    """What there is on the host that a command might leave: taken before, compared afterwards.

    PIDs and IDs do not count, as a restored container has others: how many there are of each does.
    """

    there: Counter[str]

    @classmethod
    def now(cls) -> State:
        return cls(Counter(_things()))

    def left(self, *, seconds: float = SETTLING) -> list[str]:
        """Return what has been left since, except what disappears within `seconds`."""
        new: list[str] = []

        def gone() -> bool:
            new[:] = sorted((Counter(_things()) - self.there).elements())
            return not new

        wait_for(gone, seconds=seconds)
        return new


def _things() -> list[str]:
    found = [f"process {name}" for name in processes().values()]
    found += [f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for pattern in _LEFT:
        for top in Path("/").glob(pattern[1:]):
            if top.name.startswith(realhost.VIEW):  # of this machine's own file system
                continue
            below = [top, *top.rglob("*")] if top.is_dir() else [top]
            found += [
                f"file {path}" for path in below if not path.name.endswith(_STAYS) and not _is_kept(path)
            ]
    for pattern in ("run/crun/*", "run/runc/*", "run/containerd/runc/*/*"):
        found += [str(path) for path in Path("/").glob(pattern)]
    found += [f"softgpu {path.name}" for path in STATE.glob("*") if path.name.isdigit()]
    kept = (each for each in found if not re.fullmatch(r"file /run/gpusnap(/\w+)?", each))
    return [re.sub(r"[0-9a-f]{64}|\b[A-Z0-9]{26}\b|\d+", "N", each) for each in kept]


def _is_kept(path: Path) -> bool:
    """Return whether gpusnap stores it for a container while that runs, or to name an export that is left."""
    if path.parent.name == "orders":
        with suppress(OSError, ValueError, KeyError, TypeError):
            return os.path.exists(json.loads(path.read_text())["archive"])
    if path.suffix == ".thawed":  # until the next resume
        with suppress(OSError, ValueError, KeyError, TypeError):
            return os.path.exists(json.loads(path.read_text())["group"])
    if path.suffix != ".restored":
        return False
    with suppress(OSError, ValueError, KeyError, TypeError):
        pid, start = json.loads(path.read_text())["init"]
        return proc.is_same(pid, start)
    return False


def processes() -> dict[int, str]:
    """Return all processes except this program, kernel threads and zombies."""
    found = {}
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        with suppress(OSError):
            fields = (each / "stat").read_text().rpartition(") ")[2].split()
            if fields[0] == "Z" or int(fields[6]) & _KERNEL_THREAD:
                continue
            name = program(int(each.name))
            if name and name not in _OTHERS:
                found[int(each.name)] = name
    return found


@dataclass
class Report:
    """The results of the rounds. A failure stores what is needed to repeat it in a folder of its own."""

    program: str
    seed: int
    keep: Path
    counts: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    begun: float = field(default_factory=time.monotonic)

    def failed(self, name: str, error: BaseException, *files: Path) -> None:
        """Print what happened, and store it with the files that reproduce it."""
        self.failures += 1
        self.counts["hung" if isinstance(error, Hung) else "bad"] += 1
        folder = self.keep / f"{self.program}-{self.seed}-{self.failures}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unforeseen = not isinstance(error, Bad | AssertionError)
        text = "".join(traceback.format_exception(error)) if unforeseen else str(error)
        (folder / "what").write_text(f"{name}\n{text}\n")
        for path in files:
            with suppress(OSError):
                if path.is_dir():
                    shutil.copytree(path, folder / path.name, symlinks=True)
                elif path.exists():
                    shutil.copy(path, folder)
        print(f"BAD {name}: {text[:3000]}\n    kept in {folder}", flush=True)

    def note(self, line: str) -> None:
        """Add a line to the list of rounds."""
        self.keep.mkdir(parents=True, exist_ok=True)
        with (self.keep / f"{self.program}-{self.seed}.log").open("a") as file:
            file.write(f"{time.monotonic() - self.begun:7.1f} {line}\n")

    def over(self, seconds: float) -> bool:
        """Return whether no further round is to begin."""
        return time.monotonic() - self.begun > seconds

    def end(self) -> int:
        """Print the counts as the last line; return the exit status."""
        for said, number in self.said.most_common(40):
            print(f"{number:5} {said}")
        found = {
            "program": self.program,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.begun),
            "failures": self.failures,
            **dict(sorted(self.counts.items())),
        }
        print(json.dumps(found), flush=True)
        return 1 if self.failures else 0


def plain(message: str) -> str:
    """Return a message without the parts that differ from round to round, to count similar ones."""
    message = re.sub(r"^.*?gpusnap: ", "", message)
    message = re.sub(r"\b[0-9a-f]{12,64}\b", "ID", message)
    return re.sub(r"\d+", "N", message)[:160]


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Return the options that all of these programs have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, default=1, help="makes a run repeatable [default: 1]")
    made.add_argument("--rounds", type=int, default=rounds, help=f"how many [default: {rounds}]")
    made.add_argument(
        "--seconds", type=float, default=1e9, help="begin no round after so many seconds [default: no limit]"
    )
    made.add_argument(
        "--keep",
        type=Path,
        default=Path("/var/tmp/faults"),
        help="where failures are kept [default: %(default)s]",
    )
    return made


class _Hardware:
    """This machine's own GPU, where --gpu asks for it."""

    machine: realhost.Machine | None = None
    sums: ClassVar[dict[bytes, bytes]] = {}
    """What the workload has computed at each tick: the same in each container, whatever happened to it."""

    @classmethod
    def take(cls) -> None:
        """Install gpusnap until this program ends. Raises SystemExit, with the reason."""
        reason = realhost.missing()
        if not reason and [*containers_left()]:
            reason = "this machine has containers, which would be removed"
        if reason:
            raise SystemExit(reason)
        stack = ExitStack()
        atexit.register(stack.close)
        cls.machine = stack.enter_context(realhost.machine(0))

    @classmethod
    def compare(cls, ticks: Sequence[bytes]) -> None:
        """Raises Bad if a tick computed something else than the same tick did before."""
        for tick, computed in (match.groups() for line in ticks if (match := _SUM.search(line))):
            if (before := cls.sums.setdefault(tick, computed)) != computed:
                raise Bad(f"tick {tick.decode()} computed {computed!r}, and before that {before!r}")


def prepare(program: str, given: argparse.Namespace) -> Report:
    """Install gpusnap and softgpu; return a report, and random numbers by the seed."""
    random.seed(given.seed)
    if vars(given).get("gpu"):
        _Hardware.take()
        return Report(program, given.seed, given.keep)
    if os.environ.get("GPUSNAP_TESTHOST") != "1":
        print(f"{program}: it changes this machine: run it in the test host, as --help says", file=sys.stderr)
        raise SystemExit(2)
    shimhost.install(CHECKOUT)
    gpuhost.install(str(CHECKOUT / "softgpu/build"), GPUS_CONF)
    shutil.copy(CHECKOUT / "softgpu/build/bin/gpuwork", GPUWORK)
    good(podman("ps"))
    return Report(program, given.seed, given.keep)


def settings(runtime: str, *, pages: str = "chunks", chunk_size: str = "1M", more: str = "") -> None:
    """Write the settings file. `more`: further lines of it, with tables of their own."""
    shimhost.write_settings(
        f'runtime = "{runtime}"\n[memory]\npages = "{pages}"\nchunk-size = "{chunk_size}"\n'
        f'[store]\npath = "{STORE}"\n{more}'
    )


def start(name: str, *words: str, options: Sequence[str] = ()) -> Container:
    """Start a container of the workload on GPU 0, which checks its GPU memory at each tick."""
    if _Hardware.machine:
        return realhost.Program.begin(name, _ON_HARDWARE, [*_Hardware.machine.options(), *options])
    return Container.start(name, "--mib", "6", *words, options=options, gpus=("0",))


def remove_all() -> None:
    """Remove all containers in any state."""
    for name in run("podman", "ps", "--all", "--quiet", "--no-trunc").out.split():
        podman("rm", "--force", "--time", "0", name)
    for runtime in ("crun", "runc"):
        for name in run(runtime, "list", "-q").out.split():
            run(runtime, "delete", "--force", name)
    remove_groups()


def remove_groups() -> None:
    """Remove control groups that restores have left; not on a machine where others may have some."""
    if not _Hardware.machine:
        remove_left_groups()
