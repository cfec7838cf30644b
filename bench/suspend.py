"""The time of suspend, resume and swap of a GPU container, and the driver's part of it.

    python3 bench/suspend.py --json suspend.json [--gib 12] [--rounds 5] [--swaps 20] [--runtime crun]
        [--in-use]

One container holds a block of device memory, and is suspended and resumed. Then a second one of the same size
is started in its place, and the two are swapped. Medians of whole commands, in seconds. "driver" is the time
of the driver's checkpoint and restore in it, "beyond" the rest, "ratio" how many times longer the command is
than the driver. With --gib 0.01 on softgpu, nearly all of a command is beyond the driver. After the swaps,
the RAM and the GPU memory in use are the same as before, and the programs themselves have checked every word
of both blocks. Use an idle machine. --in-use: a process keeps the GPU's device open meanwhile, as
nvidia-persistenced or another container on it does; otherwise the driver shuts the GPU down when gpusnap, as
the last, closes it.

Needs root, Podman, CRIU and a GPU; or the test host, where it runs on softgpu. Installs gpusnap while it
runs, and removes what it made. The exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from figures import Case  # noqa: E402
from hosts import BenchError, Log, Place, Work, command, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from realhost import missing  # noqa: E402
from support import Container, podman  # noqa: E402

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402
from gpusnap.runtime_shim.process import proc  # noqa: E402

GPUSNAP = "/usr/local/bin/gpusnap"
FIRST, SECOND = "gpusnap-bench-first", "gpusnap-bench-second"
GIB = 1 << 30


@dataclass
class Row:
    """One command, each time that it was run."""

    name: str
    gpu_bytes: int = 0
    """That were moved, both ways together."""
    seconds: list[float] = field(default_factory=list)
    driver: list[float] = field(default_factory=list)
    timing: list[Any] = field(default_factory=list)
    """The steps of each, as the command says them."""

    def add(self, seconds: float, *moved: dict[str, Any]) -> None:
        """One time; `moved` as the command says it."""
        self.seconds.append(seconds)
        self.driver.append(sum(each["driverSeconds"] for each in moved))
        self.timing.append([each["timing"] for each in moved])
        self.gpu_bytes = sum(each["memory"] for each in moved)

    def line(self) -> str:
        took, driver = statistics.median(self.seconds), statistics.median(self.driver)
        gib = self.gpu_bytes / GIB
        beyond = statistics.median(a - b for a, b in zip(self.seconds, self.driver, strict=True))
        per, ratio = took / gib if gib else 0.0, took / driver if driver else 0.0
        spread = f"{min(self.seconds):.2f}-{max(self.seconds):.2f}"
        return (
            f"{self.name:9}{gib:8.2f}{took:9.2f}{spread:>14}{driver:9.2f}{beyond:8.2f}{ratio:7.2f}{per:11.2f}"
        )


HEADING = (
    f"{'':9}{'GiB':>8}{'seconds':>9}{'from-to':>14}{'driver':>9}{'beyond':>8}{'ratio':>7}{'s per GiB':>11}"
)


def start(here: Place, case: Case, name: str, runtime: str) -> Work:
    """Start a container, and wait until its program has checked all of its memory."""
    begun = time.time()
    words = ["run", "-d", "--name", name, *here.options, here.image, *here.block(case)]
    command("podman", "--runtime", runtime, *words)
    config = Container(name).inspect()["HostConfig"]["LogConfig"]
    work = Work(name, Log(Path(config["Path"])), case.procs)
    work.log_file.wait(case.procs, since=begun, deadline=here.deadline)
    return work


def gpusnap(*words: str) -> tuple[float, Any]:
    """Run a command of gpusnap's; its seconds, and what it did."""
    took, said = command(GPUSNAP, *words, "--json")
    return took, json.loads(said)


def measure(here: Place, options: argparse.Namespace) -> list[Row]:
    """All rows. Raises BenchError."""
    case = Case(options.gib, "random", 1)
    suspend, resume, swap = Row("suspend"), Row("resume"), Row("swap")
    first = start(here, case, FIRST, options.oci)
    for _ in range(options.rounds):
        took, done = gpusnap("suspend", FIRST)
        suspend.add(took, done)
        took, done = gpusnap("resume", FIRST)
        resume.add(took, done)
        first.log_file.wait(case.procs, since=time.time())
    gpusnap("suspend", FIRST)
    second = start(here, case, SECOND, options.oci)
    pair, before = (second, first), 0
    for number in range(options.swaps):
        took, done = gpusnap("swap", pair[0].name, pair[1].name)
        swap.add(took, done["out"], done["in"])
        pair[1].log_file.wait(case.procs, since=time.time())
        pair = (pair[1], pair[0])
        available = proc.available_memory()
        before = before or available
        if before - available > options.gib * GIB / 2 + GIB:
            raise BenchError(f"after {number + 1} swaps {before - available} bytes of RAM have not come back")
    return [suspend, resume, swap]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=float, default=12.0, help="GiB of device memory of each container")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--runtime", default="crun", help="the real runtime")
    parser.add_argument("--in-use", action="store_true", help="keep the GPU's device open meanwhile")
    parser.add_argument("--json", type=Path, help="write the readings to this file")
    found = parser.parse_args(words)
    found.oci = "gpusnap-runtime"
    return found


def main() -> int:
    options = arguments()
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    if reason := ("" if software else missing()):
        print(f"suspend: {reason}", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        try:
            here = stack.enter_context(place(None if software else Nvidia().host().gpus[0].minor))
            shimhost.write_settings(f'runtime = "{options.runtime}"\n')
            names = (FIRST, SECOND)
            stack.callback(podman, "rm", "--force", "--ignore", "--time", "0", *names)
            podman("rm", "--force", "--ignore", "--time", "0", *names)  # of a run that was killed
            about = {**circumstances(Nvidia().host(), options.oci), "software": software}
            if options.in_use:
                node = f"/dev/nvidia{Nvidia().host().gpus[0].minor}"
                stack.callback(os.close, os.open(node, os.O_RDWR | os.O_CLOEXEC))
            rows = measure(here, options)
        except (GpusnapError, BenchError, AssertionError) as error:
            print(f"suspend: {error}", file=sys.stderr)
            return 1
    print("\n".join([HEADING, *(row.line() for row in rows)]))
    if options.json:
        document = {"about": about, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
