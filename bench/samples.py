"""Where `gpusnap restore` and `gpusnap checkpoint` spend their time: samples of what their main threads do.

    python3 bench/samples.py [--layers 32] [--mib 200] [--every 3] [--least 20] [--rounds 3]
        [--depth 12] [--settings 'memory.level = 0'] [--folder /var/tmp] [--raw DIRECTORY]

The server is that of bench/server.py. A thread in `gpusnap` and in gpusnap-runtime writes down the main
thread's functions every --every milliseconds, which adds a few percent to each figure. The tables list the
functions of gpusnap that took --least milliseconds or more in a row, indented below their callers, with the
time since the command began. Time in which a program is not yet running Python (the start of Podman, of
Python itself) shows as the difference to the first line. Each command is run --rounds times; the table is
that of the median run. --raw keeps all samples.

Needs root, Podman, CRIU and a GPU; or the test host, where it runs on softgpu. Installs gpusnap while it
runs, and removes what it made.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from checkpoint import obstacle  # noqa: E402
from hosts import NAME, BenchError, command, place  # noqa: E402
from restore_floor import COMMAND  # noqa: E402
from rows import check_settings  # noqa: E402
from server import of_kind, remove  # noqa: E402
from servers import runtimes  # noqa: E402

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

# Put into the scripts that start gpusnap and gpusnap-runtime, behind their first line. A function is written
# as its file below the checkout and its name; one line for each change of the stack, innermost first.
_SAMPLER = """\
def _sample():
    import os, sys, threading, time
    if not {{"checkpoint", "restore"}} & {{*sys.argv}}:
        return
    main, pid = threading.main_thread().ident, os.getpid()
    out = open(f"{folder}/{{os.path.basename(sys.argv[0])}}.{{pid}}", "w")
    def run():
        last = None
        while os.getpid() == pid:
            frame, stack = sys._current_frames().get(main), []
            while frame is not None:
                file = frame.f_code.co_filename
                if file.startswith({checkout!r}):
                    stack.append(f"{{file[len({checkout!r}) + 1:]}}:{{frame.f_code.co_name}}")
                frame = frame.f_back
            if stack != last:
                out.write(f"{{time.monotonic()}} {{' '.join(stack)}}\\n")
                out.flush()
                last = stack
            time.sleep({every})
    threading.Thread(target=run, daemon=True).start()
_sample()
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A function that the main thread was in for a time."""

    program: str
    depth: int
    """How many functions of gpusnap called one another until this one."""
    function: str
    begin: float
    """Seconds since the command began."""
    took: float


@contextmanager
def sampled(folder: Path, every: float) -> Iterator[None]:
    """Have the programs write samples into `folder`, every so many seconds."""
    sampler = _SAMPLER.format(folder=folder, checkout=str(CHECKOUT), every=every)
    before = {script: script.read_text() for script in (shimhost.COMMAND, shimhost.ENTRY)}
    try:
        for script, text in before.items():
            first, _, rest = text.partition("\n")
            script.write_text(f"{first}\n{sampler}{rest}")
        yield
    finally:
        for script, text in before.items():
            script.write_text(text)


def steps(program: str, samples: Sequence[tuple[float, list[str]]], begun: float) -> list[Step]:
    """Return the functions in the order of their begin, callers first.

    `samples`: times by time.monotonic, and the functions then, outermost first. A function that is there in
    several samples in a row, called by the same ones, is one step.
    """
    found: list[Step] = []
    running: list[tuple[str, float]] = []
    for at, stack in [*samples, (samples[-1][0], [])]:
        same = 0
        while same < min(len(running), len(stack)) and running[same][0] == stack[same]:
            same += 1
        for depth in range(same, len(running)):
            function, since = running[depth]
            found.append(Step(program, depth, function, since - begun, at - since))
        running[same:] = [(function, at) for function in stack[same:]]
    return sorted(found, key=lambda step: (step.begin, step.depth))


def read(folder: Path, begun: float) -> list[Step]:
    """Read the samples of every program that ran, in the order of their starts."""
    found: list[list[Step]] = []
    for file in folder.iterdir():
        samples = []
        for line in file.read_text().splitlines():
            at, *stack = line.split()
            samples.append((float(at), stack[::-1]))
        if samples:
            found.append(steps(file.name.partition(".")[0], samples, begun))
    return [step for each in sorted(found, key=lambda each: each[0].begin) for step in each]


def table(what: str, seconds: float, found: Sequence[Step], *, least: float, depth: int) -> str:
    """Return as text the steps that took `least` seconds or more and have fewer than `depth` callers."""
    lines = [f"{what}: {seconds:.2f} s", "    begins   takes"]
    program = ""
    for step in found:
        if step.took < least or step.depth >= depth:
            continue
        if step.program != program:
            program = step.program
            lines.append(f"  {program}")
        lines.append(f"    {step.begin:6.3f}  {step.took:6.3f}  {'  ' * step.depth}{step.function}")
    return "\n".join(lines)


def measure(action: str, folder: Path, every: float) -> tuple[float, list[Step]]:
    """Run `gpusnap` ACTION on the container, with samples; its seconds, and the steps."""
    folder.mkdir(parents=True)
    with sampled(folder, every):
        begun = time.monotonic()
        took, _ = command(COMMAND, action, NAME)
    return took, read(folder, begun)


def main() -> int:
    parser = argparse.ArgumentParser(description="Where a restore and a checkpoint spend their time.")
    parser.add_argument("--layers", type=int, default=32, help="of the model, on a GPU (32: 12.6 GiB)")
    parser.add_argument("--mib", type=int, default=200, help="of device memory, in the test host")
    parser.add_argument("--every", type=float, default=3, help="milliseconds between samples (3)")
    parser.add_argument("--least", type=float, default=20, help="milliseconds that a listed step takes (20)")
    parser.add_argument("--depth", type=int, default=12, help="of functions that call one another (12)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", action="append", default=[], help="a line of gpusnap.toml")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="where the store goes")
    parser.add_argument("--raw", type=Path, help="keep all samples in this new directory")
    options = parser.parse_args()
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    reason = obstacle(software=software)
    runtime = next(iter(runtimes()), "")
    if reason or not runtime:
        print(f"samples: {reason or 'no CRIU here dumps TCP sockets on this kernel'}", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        here = stack.enter_context(place(None if software else Nvidia().host().gpus[0].minor))
        temporary = tempfile.TemporaryDirectory(dir=options.folder, prefix="gpusnap-samples-")
        folder = Path(stack.enter_context(temporary))
        text = [f'runtime = "{runtime}"', f'store.path = "{folder}/store"', *options.settings]
        check_settings(text)
        shimhost.write_settings("\n".join(text) + "\n")
        remove()
        stack.callback(remove)
        runs: dict[str, list[tuple[float, list[Step]]]] = {"checkpoint": [], "restore": []}
        try:
            server = of_kind(here, options)
            server.start()
            for number in range(options.rounds):
                for action, found in runs.items():
                    found.append(measure(action, folder / f"{action}.{number}", options.every / 1000))
                    if action == "checkpoint":
                        remove()
                        continue
                    server.first_answer(time.monotonic())
        except (BenchError, GpusnapError) as error:
            print(f"samples: {error}", file=sys.stderr)
            return 1
        if options.raw:
            keep = shutil.ignore_patterns("store", "weights")
            shutil.copytree(folder, options.raw, ignore=keep)
    for action, found in runs.items():
        took, seen = sorted(found, key=lambda run: run[0])[len(found) // 2]
        print(table(f"gpusnap {action}", took, seen, least=options.least / 1000, depth=options.depth))
    return 0


if __name__ == "__main__":
    sys.exit(main())
