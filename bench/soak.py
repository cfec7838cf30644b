"""Checkpoints and restores of one container, many times: no resource may grow.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/soak.py [--rounds 200] [--runtimes crun,runc]

A cycle checkpoints the container, which ends, and restores it. crun and runc do half of the cycles each; an
archive and a store are used in turn, by `gpusnap` and by Podman. After each cycle, every byte of GPU memory
must be right. The following are counted after the fifth cycle, and may not grow later: processes, mounts,
control groups, gpusnap's files, open files and memory maps of the container's process and of conmon,
semaphores and shared memory, the containers of Podman and of the runtime, and the bytes of the store after
`gpusnap gc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from faulthost import (
    COMMAND,
    STORE,
    Bad,
    Report,
    State,
    goes_on,
    parser,
    prepare,
    processes,
    remove_all,
    run_limited,
    settings,
    start,
)
from support import Container, good, podman, run

NAME = "soaked"
FOLDER = Path("/var/tmp/soak")
_FIRST = 5  # cycles until everything that stays has been created
# The store may grow by this factor: CRIU's images are compressed, and their size differs a little each time.
_SLACK = 1.1


def cycle(container: Container, number: int) -> None:
    """Checkpoint the container, which ends, and restore it. Raises Bad, AssertionError."""
    archive, name = FOLDER / "soak.tar.zst", f"n{number}"
    podman_line = ["podman", "--runtime", "gpusnap-runtime", "container"]
    kept = f"oci:{STORE}:{name}"
    to_store = ([COMMAND, "checkpoint", NAME, "--to", kept], [COMMAND, "restore", kept])
    by_podman = (
        [*podman_line, "checkpoint", "--export", str(archive), NAME],
        [*podman_line, "restore", "--import", str(archive)],
    )
    to_file = ([COMMAND, "checkpoint", NAME, "--to", str(archive)], [COMMAND, "restore", str(archive)])
    checkpoint, restore = (to_store, by_podman, to_store, to_file)[number % 4]
    good(run_limited(checkpoint))
    container.remove()
    good(run_limited(restore))
    archive.unlink(missing_ok=True)
    goes_on(container.id)
    if checkpoint is to_store[0]:
        good(run_limited([COMMAND, "rm", kept]))
        good(run_limited([COMMAND, "gc", f"oci:{STORE}"]))


def counts(container: Container, keep: Path) -> dict[str, int]:
    """Count everything that could grow, except this program's reports in `keep`."""
    found = {"containers of Podman": len(good(podman("ps", "--all", "--quiet")).split())}
    for runtime in ("crun", "runc"):
        found[f"containers of {runtime}"] = len(run(runtime, "list", "-q").out.split())
    for what, thing in (("process", container.pid), ("conmon", _conmon())):
        with suppress(OSError):
            found[f"open files of the {what}"] = len(os.listdir(f"/proc/{thing}/fd"))
            found[f"mappings of the {what}"] = len(Path(f"/proc/{thing}/maps").read_text().splitlines())
    found["control groups"] = sum(1 for _ in Path("/sys/fs/cgroup").rglob("cgroup.procs"))
    for what in ("shm", "sem", "msg"):
        found[f"System V {what}"] = len(Path(f"/proc/sysvipc/{what}").read_text().splitlines())
    found["files in /dev/shm"] = len(os.listdir("/dev/shm"))
    for folder in ("/run/gpusnap", "/var/tmp", "/tmp"):
        found[f"files in {folder}"] = sum(
            1 for path in Path(folder).rglob("*") if keep not in (path, *path.parents)
        )
    found["files in the store"] = sum(1 for path in STORE.rglob("*") if path.is_file())
    found["bytes in the store"] = sum(path.stat().st_size for path in STORE.rglob("*") if path.is_file())
    found["open files of this program"] = len(os.listdir("/proc/self/fd"))
    return found


def _conmon() -> int:
    return next((pid for pid, name in processes().items() if name == "conmon"), 0)


def grown(first: dict[str, int], last: dict[str, int]) -> list[str]:
    """Return a text for each count that has grown."""
    return [
        f"{what}: {first.get(what, 0)} became {number}"
        for what, number in last.items()
        if number > first.get(what, 0) * (_SLACK if what == "bytes in the store" else 1)
    ]


def soak(report: Report, runtime: str, number: int, end: float) -> None:
    """Run all cycles under one runtime."""
    settings(runtime)
    shutil.rmtree(STORE, ignore_errors=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    container = start(NAME)
    first: dict[str, int] = {}
    before: State | None = None
    for at in range(number):
        if report.over(end):
            break
        report.counts["cycles"] += 1
        try:
            cycle(container, at)
            if at < _FIRST:
                before, first = State.now(), counts(container, report.keep)
                continue
            assert before is not None
            if left := before.left():
                raise Bad(f"left behind: {left[:10]}")
            now = counts(container, report.keep)
            report.note(f"{runtime}, cycle {at}: {now}")
            if found := grown(first, now):
                raise Bad(f"grown since cycle {_FIRST}: {found}")
            report.counts["good"] += 1
        except (Bad, AssertionError, OSError, subprocess.SubprocessError) as error:
            report.failed(f"{runtime}, cycle {at}", error, Path("/run/gpusnap/journal"))
            remove_all()
            container = start(NAME)
            before = State.now()
    report.said[f"{runtime}: {counts(container, report.keep)}"] += 1
    remove_all()
    shutil.rmtree(STORE, ignore_errors=True)


def main() -> int:
    """Run the cycles, under each runtime in turn."""
    given = parser(__doc__ or "", 200)
    given.add_argument("--runtimes", default="crun,runc")
    options = given.parse_args()
    report = prepare("soak", options)
    runtimes = options.runtimes.split(",")
    for at, runtime in enumerate(runtimes):
        soak(report, runtime, options.rounds // len(runtimes), options.seconds * (at + 1) / len(runtimes))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
