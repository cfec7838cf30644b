"""Three servers in turn on one GPU that has room for one: nothing is lost, and no resource grows.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B /src/bench/swaps.py [--rounds 200] [--mib 64] [--runtimes crun,runc]

A round is a `gpusnap swap` of the running container with the one that was suspended first. After it, every
byte of the GPU memory of the resumed one must be right, the GPU must hold only its memory, and all resources
are counted that could grow. Before each fifth round, the container to resume is spilled to the store. After
the first six rounds, every resource has been used once; any growth in a later round is a failure: open files,
mappings and threads of the containers' processes and of conmon, processes, mounts, files in /run and in
gpusnap's directories. Bytes may differ by some MiB: resident memory, and the RAM of the tmpfs of /run and of
the stage.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from faulthost import (
    CHECKOUT,
    COMMAND,
    STORE,
    Bad,
    Report,
    goes_on,
    parser,
    prepare,
    processes,
    remove_all,
    run_limited,
    settings,
    wait_for,
)
from gpuhost import install
from support import GPUS_CONF, Container, good

from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia

NAMES = ("alpha", "beta", "gamma")
MIB = 1 << 20
_FIRST = 6  # rounds until all that stays is there
_SPILLED = 5  # each so many rounds the one that comes in is in the store
_SLACK = 24 * MIB  # of figures in bytes: the kernel's and the allocator's own
_BYTES = "bytes"
_FOLDERS = ("/run/gpusnap", "/var/lib/gpusnap", "/run/containers", str(STORE), "/dev/shm", "/tmp", "/var/tmp")


def readings() -> dict[str, int]:
    """How much there is of all that could grow."""
    found = dict.fromkeys(
        ("open files", "mappings", "threads", "resident bytes", "conmon: open files", "conmon: bytes"), 0
    )
    for pid, name in processes().items():
        if name not in ("gpuwork", "conmon"):
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            files, resident = len(os.listdir(f"/proc/{pid}/fd")), _resident(pid)
            if name == "conmon":
                found["conmon: open files"] += files
                found["conmon: bytes"] += resident
                continue
            found["open files"] += files
            found["resident bytes"] += resident
            found["mappings"] += len(Path(f"/proc/{pid}/maps").read_text().splitlines())
            found["threads"] += len(os.listdir(f"/proc/{pid}/task"))
    found["processes"] = len(processes())
    found["mounts"] = len(Path("/proc/self/mountinfo").read_text().splitlines())
    found["control groups"] = sum(1 for _ in Path("/sys/fs/cgroup").rglob("cgroup.procs"))
    for folder in _FOLDERS:
        found[f"files in {folder}"] = sum(1 for path in Path(folder).rglob("*") if not path.is_dir())
    for place in ("/run", "/run/gpusnap/stage"):
        with suppress(FileNotFoundError):
            about = os.statvfs(place)
            found[f"{_BYTES} in {place}"] = (about.f_blocks - about.f_bfree) * about.f_frsize
    return found


def _resident(pid: int) -> int:
    """Bytes of a process' own memory that are in RAM (proc_pid_status(5), RssAnon)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


def grown(first: dict[str, int], now: dict[str, int]) -> list[str]:
    """What is more than it was at most in the first rounds."""
    return [
        f"{what}: {first.get(what, 0)} became {number}"
        for what, number in now.items()
        if number > first.get(what, 0) + (_SLACK if _BYTES in what else 0)
    ]


def _steady(most: dict[str, int]) -> bool:
    return not grown(most, readings())


def swap(out: Container, into: Container, mib: int) -> float:
    """One swap; its seconds. Raises Bad, AssertionError."""
    begun = time.monotonic()
    good(run_limited([COMMAND, "swap", out.name, into.name]))
    took = time.monotonic() - begun
    goes_on(into.id)
    (gpu,) = Nvidia().host().gpus
    if not mib * MIB <= gpu.memory_used < 2 * mib * MIB:
        raise Bad(f"{gpu.memory_used} bytes of the GPU are in use, and one container has {mib} MiB")
    listed = json.loads(good(run_limited([COMMAND, "ps", "--json"])))["containers"]
    states = {each["name"]: each["state"] for each in listed}
    if states != {name: "running" if name == into.name else "suspended" for name in NAMES}:
        raise Bad(f"after the swap of {out.name} and {into.name}: {states}")
    return took


def swaps(report: Report, runtime: str, number: int, mib: int, end: float) -> None:
    """All rounds under one runtime."""
    settings(runtime)
    shutil.rmtree(STORE, ignore_errors=True)
    STORE.mkdir()
    line: list[Container] = []
    for name in NAMES:
        if line:
            good(run_limited([COMMAND, "suspend", line[-1].name]))
        line.append(Container.start(name, "--mib", str(mib), gpus=("0",)))
    most: dict[str, int] = {}
    last: dict[str, int] = {}
    took = []
    for at in range(number):
        if report.over(end):
            break
        report.counts["swaps"] += 1
        into, out = line[0], line[-1]
        if at % _SPILLED == _SPILLED - 1:
            good(run_limited([COMMAND, "suspend", "--spill", "--wait", into.name]))
            report.counts["of them from the store"] += 1
        took.append(swap(out, into, mib))
        line = [*line[1:], into]
        last = readings()
        report.note(f"{runtime}, swap {at}: {took[-1]:.2f} s, {last}")
        if at < _FIRST:
            most = {what: max(number, most.get(what, 0)) for what, number in last.items()}
        elif not wait_for(partial(_steady, most)):  # a worker may be ending just now
            found, names = grown(most, readings()), sorted(processes().values())
            raise Bad(f"{runtime}: grown since swap {_FIRST}: {found}; {names}")
        report.counts["good"] += 1
    print(f"{runtime}: {len(took)} swaps, {min(took):.2f} to {max(took):.2f} s")
    print(f"    {'most in the first 6':>20}{'after the last':>16}")
    for what, most_of in most.items():
        print(f"    {most_of:>20}{last.get(what, 0):>16}  {what}")
    line[-1].remove()
    for each in line[:-1]:
        good(run_limited([COMMAND, "resume", each.name]))
        goes_on(each.id)
        each.remove()


def main() -> int:
    """Run the rounds, under each runtime in turn."""
    given = parser(__doc__ or "", 200)
    given.add_argument("--runtimes", default="crun")
    given.add_argument("--mib", type=int, default=64, help="GPU memory of each container [default: 64]")
    options = given.parse_args()
    report = prepare("swaps", options)
    small = "\n".join(GPUS_CONF.splitlines()[:3]).replace("memory=2GiB", f"memory={options.mib * 3 // 2}MiB")
    install(CHECKOUT / "softgpu/build", small + "\n")
    runtimes = options.runtimes.split(",")
    for at, runtime in enumerate(runtimes):
        end = options.seconds * (at + 1) / len(runtimes)
        try:
            swaps(report, runtime, options.rounds // len(runtimes), options.mib, end)
        except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
            report.failed(runtime, error, Path("/run/gpusnap/journal"))
        remove_all()
    shutil.rmtree(STORE, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
