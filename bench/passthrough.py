"""The cost of gpusnap-runtime for commands that it passes through: state, kill, delete and
`checkpoint --help`, compared with the bare runtime.

    python3 bench/passthrough.py --runtime crun --shim gpusnap-runtime -n 200 --json passthrough.json

Each pair runs the same command once directly and once through the shim, in alternating order, so that changes
in the machine's speed affect both. Ratio and difference are medians over the pairs. `state` and `kill`
(SIGCONT, which changes nothing) go to one running container; each `delete --force` goes to a container that
is made for it, outside the measured time. The containers have a runtime root and a bundle of their own, which
are removed at the end. Needs root, a static busybox, and a host where the runtime can make containers;
elsewhere --missing measures `state` of a container that does not exist. The goal is a ratio of at most 1.10
and at most 6 ms more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

GOAL_RATIO = 1.10
GOAL_MILLISECONDS = 6.0

Pair = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """One command's figures, in milliseconds."""

    command: str
    pairs: int
    bare: float
    shim: float
    ratio: float
    difference: float

    @property
    def good(self) -> bool:
        return self.ratio <= GOAL_RATIO and self.difference <= GOAL_MILLISECONDS


@dataclass(frozen=True)
class Programs:
    """The two programs, and the options for both, which go before the command."""

    bare: str
    shim: str
    options: tuple[str, ...]

    def control(self, *words: str) -> None:
        """Run the bare runtime without timing. Raises SystemExit with its output if it fails."""
        line = [self.bare, *self.options, *words]
        # Not pipes: a container's process would hold them open.
        with tempfile.TemporaryFile("w+") as said:
            code = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=False
            ).returncode
            said.seek(0)
            if code:
                raise SystemExit(f"{' '.join(line)} failed with exit code {code}: {said.read().strip()}")

    def timed(self, program: str, words: Sequence[str]) -> tuple[float, int]:
        """Run a program; return milliseconds from spawn to exit, and the exit code."""
        line = [program, *self.options, *words]
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        start = time.perf_counter()
        pid = os.posix_spawn(program, line, os.environ, file_actions=actions)
        _, status = os.waitpid(pid, 0)
        return (time.perf_counter() - start) * 1e3, os.waitstatus_to_exitcode(status)

    def pair(self, number: int, words: Sequence[str] | Callable[[], Sequence[str]], *, code: int = 0) -> Pair:
        """Time bare runtime and shim, in alternating order. A function `words` is called before each run."""
        order = (self.bare, self.shim) if number % 2 == 0 else (self.shim, self.bare)
        took = {}
        for program in order:
            line = words() if callable(words) else words
            took[program], got = self.timed(program, line)
            if got != code:
                raise SystemExit(f"{program} {' '.join(line)} ended with exit code {got}, not {code}")
        return took[self.bare], took[self.shim]


def _config() -> dict[str, Any]:
    """Return a minimal configuration for crun and runc: no network namespace, no limits."""
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": ["/busybox", "sleep", "86400"],
            "env": ["PATH=/"],
            "cwd": "/",
        },
        "root": {"path": "rootfs", "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "mount", "ipc", "uts")]},
    }


@contextlib.contextmanager
def _bundle(busybox: str) -> Iterator[tuple[str, str]]:
    """Make a bundle and a runtime root, which are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="gpusnap-bench-") as directory:
        rootfs = Path(directory, "bundle", "rootfs")
        for name in ("proc", "dev"):
            (rootfs / name).mkdir(parents=True)
        shutil.copy(busybox, rootfs / "busybox")
        (rootfs.parent / "config.json").write_text(json.dumps(_config()))
        yield str(rootfs.parent), str(Path(directory, "root"))


class Containers:
    """Makes containers, and removes those that are left."""

    def __init__(self, programs: Programs, bundle: str) -> None:
        self.programs = programs
        self.bundle = bundle
        self.left: list[str] = []
        self._numbers = itertools.count()

    def make(self) -> str:
        name = f"gpusnap-bench-{os.getpid()}-{next(self._numbers)}"
        self.left.append(name)
        self.programs.control("create", "--bundle", self.bundle, name)
        return name

    def remove(self) -> None:
        for name in self.left:
            self.programs.timed(self.programs.bare, ["delete", "--force", name])


def _result(command: str, pairs: list[Pair]) -> Result:
    return Result(
        command,
        len(pairs),
        statistics.median(bare for bare, _ in pairs),
        statistics.median(shim for _, shim in pairs),
        statistics.median(shim / bare for bare, shim in pairs),
        statistics.median(shim - bare for bare, shim in pairs),
    )


def measure(programs: Programs, bundle: str, pairs: int, deletes: int) -> list[Result]:
    """Measure state, kill, `checkpoint --help` and delete with real containers."""
    containers = Containers(programs, bundle)
    try:
        name = containers.make()
        programs.control("start", name)
        results = []
        for command, words in (("state", ["state", name]), ("kill", ["kill", name, "CONT"])):
            _warm(programs, words)
            results.append(_result(command, [programs.pair(i, words) for i in range(pairs)]))
        results.append(measure_probe(programs, pairs))
        made = [programs.pair(i, lambda: ["delete", "--force", containers.make()]) for i in range(deletes)]
        return [*results, _result("delete", made)]
    finally:
        containers.remove()


def measure_probe(programs: Programs, pairs: int) -> Result:
    """Measure `checkpoint --help`, which Podman runs to find out whether a runtime can checkpoint."""
    words = ["checkpoint", "--help"]
    _warm(programs, words)
    return _result("checkpoint -h", [programs.pair(i, words) for i in range(pairs)])


def measure_missing(programs: Programs, pairs: int) -> list[Result]:
    """Measure `state` of a container that does not exist: the work before a container is read."""
    words = ["state", f"gpusnap-bench-nosuch-{os.getpid()}"]
    _warm(programs, words)
    return [_result("state (missing)", [programs.pair(i, words, code=1) for i in range(pairs)])]


def _warm(programs: Programs, words: Sequence[str]) -> None:
    for _ in range(10):
        for program in (programs.bare, programs.shim):
            programs.timed(program, words)


def _table(results: list[Result]) -> str:
    lines = [f"{'command':16}{'pairs':>6}{'bare ms':>10}{'shim ms':>10}{'ratio':>8}{'more ms':>9}  goal"]
    for r in results:
        goal = "met" if r.good else "missed"
        lines.append(
            f"{r.command:16}{r.pairs:6}{r.bare:10.3f}{r.shim:10.3f}{r.ratio:8.3f}{r.difference:9.3f}  {goal}"
        )
    return "\n".join(lines)


def _program(name: str) -> str:
    path = shutil.which(name)
    if not path:
        raise SystemExit(f"{name} is not on PATH; install it, or give its path")
    return path


def _first_line(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [""])[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="gpusnap-runtime beside the bare runtime")
    parser.add_argument("--runtime", default="crun", help="the bare runtime: name or path")
    parser.add_argument("--shim", default="gpusnap-runtime", help="gpusnap-runtime: name or path")
    parser.add_argument("-n", "--pairs", type=int, default=200, help="pairs for state and kill")
    parser.add_argument("--deletes", type=int, default=50, help="pairs for delete")
    parser.add_argument("--option", action="append", default=[], help="a global option: --option=--debug")
    parser.add_argument("--missing", action="store_true", help="only `state` of a container not there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where the goal is missed")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    return parser.parse_args()


def main() -> int:
    args = _arguments()
    bare, shim = _program(args.runtime), _program(args.shim)
    version = _first_line(bare)
    if _first_line(shim) != version:
        raise SystemExit(
            f"{shim} stands before another runtime than {bare} ({version}); set runtime in its settings"
        )
    options = tuple(args.option)
    if args.missing:
        results = measure_missing(Programs(bare, shim, options), args.pairs)
    else:
        with _bundle(_program("busybox")) as (bundle, root):
            results = measure(
                Programs(bare, shim, ("--root", root, *options)), bundle, args.pairs, args.deletes
            )
    print(f"{version}, {platform.machine()}, Linux {platform.release()}")
    print(_table(results))
    if args.json:
        document = {
            "runtime": version,
            "kernel": platform.release(),
            "machine": platform.machine(),
            "goal": {"ratio": GOAL_RATIO, "difference_ms": GOAL_MILLISECONDS},
            "results": [asdict(result) | {"good": result.good} for result in results],
        }
        Path(args.json).write_text(json.dumps(document, indent=2) + "\n")
    return 1 if args.check and not all(result.good for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
