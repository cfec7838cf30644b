"""What memory.parallel-restore gains: CRIU's share of a restore, with the setting on and off.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B /src/bench/parallel_restore.py [--mib 1024] [--rounds 5] [--json F]

One process of the container has the given amount of private memory with random bytes, another one uses the
GPU (softgpu). The container is checkpointed once, and restored in turn with and without the setting. Seconds
of gpusnap-runtime's step `restore`, which is crun with CRIU, and of the copy in it; medians. Runs in the test
host, because it installs gpusnap and softgpu.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
for folder in (".", "tests/host", "tests/integration"):
    sys.path.insert(0, str(CHECKOUT / folder))

import gpuhost  # noqa: E402
import shimhost  # noqa: E402
from support import GPUS_CONF, GPUWORK, STORAGE, Container, good, podman, until  # noqa: E402

NAME = "gpusnap-bench"
# By small pages: what an allocator of a server has.
PROGRAM = """
import mmap, os, time
memory = mmap.mmap(-1, {mib} << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for at in range(0, len(memory), 1 << 20):
    memory[at : at + (1 << 20)] = os.urandom(1 << 20)
print("filled", flush=True)
time.sleep(1000000)
"""


def write_settings(pages: str, *, parallel: bool) -> None:
    """The settings of one restore."""
    word = "true" if parallel else "false"
    shimhost.write_settings(f'runtime = "crun"\n[memory]\npages = "{pages}"\nparallel-restore = {word}\n')


def restore_archive(archive: Path) -> tuple[float, float]:
    """Seconds of the step `restore`, and of the copy in it."""
    good(podman("container", "restore", "--import", archive))
    container = Container(NAME)
    found: dict[str, Any] = json.loads((STORAGE / container.id / "userdata/gpusnap-restore.json").read_text())
    container.remove()
    (step,) = [each["seconds"] for each in found["timing"] if each["step"] == "restore"]
    return step, found.get("copied", {}).get("seconds", 0.0)


def main() -> None:
    """Print the medians, one line for each place of the pages."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shimhost.install(CHECKOUT)
    gpuhost.install(CHECKOUT / "softgpu/build", GPUS_CONF)
    shutil.copy(CHECKOUT / "softgpu/build/bin/gpuwork", GPUWORK)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        program, archive = Path(folder, "memory.py"), Path(folder, "archive.tar")
        program.write_text(PROGRAM.format(mib=options.mib))
        for pages in ("chunks", "store"):
            write_settings(pages, parallel=True)
            script = "python3 -S /memory.py & exec /gpuwork --tick 100 --rest 20 --mib 4"
            mounts = ["-v", "/usr:/usr", "-v", f"{program}:/memory.py:ro"]
            container = Container.start(NAME, options=mounts, script=script)
            until(lambda found=container: "filled" in found.log(), "the memory")  # type: ignore[misc]
            good(container.checkpoint(archive, "--compress", "none"))
            container.remove()
            seconds: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for _ in range(options.rounds):
                for parallel in (False, True):
                    write_settings(pages, parallel=parallel)
                    seconds[parallel].append(restore_archive(archive))
            off, on = (statistics.median(each[0] for each in seconds[which]) for which in (False, True))
            copy = statistics.median(each[1] for each in seconds[True])
            print(f"{pages}: restore {off:.3f} s by CRIU alone, {on:.3f} s with the copy ({copy:.3f} s)")
            figures[pages] = {"off": off, "on": on, "copy": copy, "mib": options.mib}
    shimhost.write_settings("")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
