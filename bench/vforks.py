"""How often a container that always starts programs can be dumped: by a runtime alone, and with gpusnap.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B bench/vforks.py [--dumps 12] [--wait 60] [--json F]

A process of the container starts a program every 10 ms. Each time it waits the given number of milliseconds
in vfork(2) until the program begins; CRIU cannot stop it there. Each dump leaves the container running. The
runtime alone dumps the container without a GPU, because it could not dump it with one. gpusnap's container
has a GPU in software (softgpu), and its dumps contain the driver's work. Runs in the test host, because it
installs gpusnap and softgpu.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
for folder in (".", "tests/host", "tests/integration"):
    sys.path.insert(0, str(CHECKOUT / folder))

import gpuhost  # noqa: E402
import shimhost  # noqa: E402
from support import GPUS_CONF, good, manifest, podman  # noqa: E402

NAME = "gpusnap-bench"


def dumps(runtime: str, *, gpu: bool, wait: int, number: int) -> dict[str, Any]:
    """Of so many dumps: how many failed, and the median seconds of these and of the others."""
    shimhost.write_settings(f'runtime = "{runtime}"\n')
    program = str(CHECKOUT / "softgpu/build/bin/gpuwork")
    # Without a GPU it only waits to start CUDA.
    words = [] if gpu else ["--delay", "1000000"]
    device = ["--device", "nvidia.com/gpu=0"] if gpu else []
    name = "gpusnap-runtime" if gpu else runtime
    options = ["--name", NAME, "-v", f"{program}:/gpuwork:ro", *device]
    line = ["/gpuwork", "--mib", "16", "--vforks", str(wait), *words]
    good(podman("run", "-d", *options, "localhost/base", *line, runtime=name))
    times: dict[bool, list[float]] = {True: [], False: []}
    pauses = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            archive = Path(folder, "archive.tar")
            for _ in range(number):
                time.sleep(0.3)
                begun = time.monotonic()
                done = podman("container", "checkpoint", "--leave-running", "-e", archive, NAME, runtime=name)
                times[done.code == 0].append(time.monotonic() - begun)
                if gpu and done.code == 0:
                    pauses += [
                        s["seconds"] for s in manifest(archive)["timing"] if s["step"] == "pause container"
                    ]
    finally:
        podman("rm", "--force", "--time", "0", NAME, runtime=name)
    return {
        "runtime": runtime,
        "by": "gpusnap" if gpu else "the runtime alone",
        "dumps": number,
        "failed": len(times[False]),
        "seconds": _middle(times[True]),
        "seconds_failed": _middle(times[False]),
        "pause_seconds": _middle(pauses),
    }


def _middle(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def main() -> int:
    parser = argparse.ArgumentParser(description="Dumps of a container that starts programs all the time.")
    parser.add_argument("--dumps", type=int, default=12, help="of each container")
    parser.add_argument(
        "--wait", type=int, nargs="*", default=[60, 1, 0], help="ms within vfork each time, 0: no programs"
    )
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    if not os.environ.get("GPUSNAP_TESTHOST"):
        print("vforks: run it in the test host, as its --help says", file=sys.stderr)
        return 1
    shimhost.install(CHECKOUT)
    gpuhost.install(CHECKOUT / "softgpu" / "build", GPUS_CONF)
    found = []
    for wait in options.wait:
        for runtime in ("crun", "runc"):
            for gpu in (False, True):
                each = dumps(runtime, gpu=gpu, wait=wait, number=options.dumps)
                found.append({"wait_ms": wait, **each})
                print(
                    f"{wait:3} ms  {runtime}  {each['by']:17}  {each['failed']:3} of {each['dumps']} failed"
                    f"  median {each['seconds']} s, failed {each['seconds_failed']} s,"
                    f" pause {each['pause_seconds']} s",
                    flush=True,
                )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
