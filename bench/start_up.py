"""Where a checkpoint and a restore spend time that is not for moving memory: a tiny container, on softgpu.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B /src/bench/start_up.py [--rounds 7] [--runtime crun]
        [--workload='--counters 4'] [--memory MIB] [--chunk-size 1M] [--processes N] [--json FILE]

`gpusnap checkpoint` into the store and `gpusnap restore` from it, in turn. Programs in front of Podman,
gpusnap-runtime and the real runtime record when each starts and ends, which adds a few milliseconds to each
figure. Medians, in seconds. With --memory, the container has a second process with that much memory on the
CPU, half of it random bytes. With --processes, so many more processes sleep beside the container.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from faulthost import COMMAND, parser, prepare, remove_all, run_limited, settings, start
from shimhost import LAUNCHER
from support import Container, good, podman

NAME = "startup"
_FOLDER = Path("/var/tmp/start-up")
_NOTES = _FOLDER / "notes"
_IN_FRONT = """#!/bin/bash
echo "$EPOCHREALTIME {name} start $*" >> {notes}
{program} "$@"
code=$?
echo "$EPOCHREALTIME {name} end $*" >> {notes}
exit $code
"""
# Python of this host, whose /usr the container has at /host.
_HOLDING = """\
LD_LIBRARY_PATH=/host/lib/x86_64-linux-gnu PYTHONHOME=/host /host/bin/python3 -c "
import os, time
held = [os.urandom(1 << 19) + bytes(range(256)) * 2048 for _ in range({mib})]
open('/ready', 'w')
time.sleep(1e6)" &
while [ ! -e /ready ]; do sleep 0.1; done
exec /gpuwork --mib 6 {workload}
"""
# The goals of what moves no bytes.
GOALS = {
    "gpusnap --version": 0.15,
    "gpusnap restore, until it starts Podman": 0.25,
    "restore: gpusnap-runtime, until it starts the real runtime": 0.35,
    "restore: the container runs, until gpusnap ends": 0.10,
    "gpusnap checkpoint": 0.70,
    "gpusnap restore": 0.70,
}


def put_in_front(target: Path, name: str, program: str) -> None:
    """Write a program that notes the start and the end of another."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.write_text(_IN_FRONT.format(name=name, notes=_NOTES, program=program))
    target.chmod(0o755)


def install(runtime: str, chunk_size: str) -> dict[str, str]:
    """Put them in front of all three; the environment for gpusnap."""
    shutil.rmtree(_FOLDER, ignore_errors=True)
    aside = _FOLDER / "launcher" / "gpusnap-runtime"
    aside.parent.mkdir(parents=True)
    shutil.move(LAUNCHER, aside)
    put_in_front(LAUNCHER, "shim", str(aside))
    real = shutil.which(runtime)
    assert real is not None
    put_in_front(_FOLDER / "bin" / runtime, "runtime", real)
    engine = shutil.which("podman")
    assert engine is not None
    put_in_front(_FOLDER / "bin" / "podman", "podman", engine)
    settings(f"{_FOLDER}/bin/{runtime}", chunk_size=chunk_size)
    return {"PATH": f"{_FOLDER}/bin:{os.environ['PATH']}"}


class Notes:
    """What was noted while a command ran: which program started and ended when."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end
        lines = [line.split(" ", 3) for line in _NOTES.read_text().splitlines()]
        self._found = [(float(at), f"{name} {what}", words.split()) for at, name, what, words in lines]

    def at(self, what: str, word: str) -> float:
        """When the last program of that name with that word in its line started or ended."""
        return max(at for at, found, words in self._found if found == what and word in words)

    def first(self, what: str) -> float:
        """When the first program of that name did."""
        return min(at for at, found, _ in self._found if found == what)

    def rows(self, command: str) -> dict[str, float]:
        """The parts of the command's time."""
        shim, runtime = self.at("shim start", command), self.at("runtime start", command)
        ended, podmans = self.at("runtime end", command), self.first("podman start")
        through = "the container runs" if command == "restore" else "the dump is there"
        return {
            f"gpusnap {command}, until it starts Podman": podmans - self.begin,
            f"{command}: Podman, until it starts gpusnap-runtime": shim - podmans,
            f"{command}: gpusnap-runtime, until it starts the real runtime": runtime - shim,
            f"{command}: the real runtime": ended - runtime,
            f"{command}: {through}, until gpusnap-runtime ends": self.at("shim end", command) - ended,
            f"{command}: {through}, until gpusnap ends": self.end - ended,
            f"gpusnap {command}": self.end - self.begin,
        }


@contextmanager
def asleep(count: int) -> Iterator[None]:
    """Have so many processes sleep while the block runs."""
    with ExitStack() as stack:
        for _ in range(count):
            process = stack.enter_context(subprocess.Popen(["sleep", "3600"]))
            stack.callback(process.kill)
        yield


def run_timed(line: list[str], environment: dict[str, str]) -> Notes:
    """Run a command until its end. Raises AssertionError if it fails."""
    _NOTES.unlink(missing_ok=True)
    begin = time.time()
    done = run_limited(line, env=environment)
    end = time.time()
    good(done)
    return Notes(begin, end)


def plain(line: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(line, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def measure(rounds: int, runtime: str, workload: str, memory: int, chunk_size: str) -> dict[str, list[float]]:
    """Each row's readings."""
    found: dict[str, list[float]] = {}

    def add(rows: dict[str, float]) -> None:
        for name, value in rows.items():
            found.setdefault(name, []).append(value)

    environment = install(runtime, chunk_size)
    if memory:
        script = _HOLDING.format(mib=memory, workload=workload)
        Container.start(NAME, script=script, gpus=("0",), options=("-v", "/usr:/host:ro"))
    else:
        start(NAME, *workload.split())
    for _ in range(rounds):
        add({"gpusnap --version": plain([COMMAND, "--version"])})
        add(run_timed([COMMAND, "checkpoint", "--name", f"{NAME}:1", NAME], environment).rows("checkpoint"))
        good(podman("rm", NAME))
        add(run_timed([COMMAND, "restore", f"{NAME}:1"], environment).rows("restore"))
    return found


def main() -> int:
    options = parser(__doc__ or "", 7)
    options.add_argument("--runtime", default="crun")
    options.add_argument("--workload", default="", help="more options of gpuwork")
    options.add_argument("--memory", type=int, default=0, help="MiB")
    options.add_argument("--chunk-size", default="1M", help="as memory.chunk-size")
    options.add_argument("--processes", type=int, default=0, help="beside the container")
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    prepare("start_up", chosen)
    try:
        with asleep(chosen.processes):
            found = measure(chosen.rounds, chosen.runtime, chosen.workload, chosen.memory, chosen.chunk_size)
    finally:
        remove_all()
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, median in medians.items():
        low, high = min(found[name]), max(found[name])
        goal = f", goal {GOALS[name]:.2f}" if name in GOALS else ""
        print(f"{median:6.3f}  ({low:.3f} to {high:.3f}{goal})  {name}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"rounds": chosen.rounds, "seconds": medians}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
