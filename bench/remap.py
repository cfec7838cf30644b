"""The time of a restore onto another GPU, compared with the same GPU: Podman, PyTorch, one archive.

    python3 bench/remap.py --json remap.json [--runtime crun] [--mib 1024] [--rounds 2]

A container that trains on the first GPU is exported once. The archive is then imported in turn onto the same
GPU and onto the second one. Each import must continue from the checkpoint with every byte right. The times
are those of the whole commands, and of gpusnap-runtime in them as Podman reports it. Needs root, Podman, CRIU
and two GPUs of the same model; installs gpusnap while it runs, and removes what it made.
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
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu")]

import shimhost  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from realhost import Program, Workload, machine, missing  # noqa: E402
from support import good, podman, run  # noqa: E402

from gpusnap.runtime_shim.gpu.api.driver import Gpu  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

NAME = "gpusnap-bench"


def import_archive(archive: Path, old: Gpu, new: Gpu) -> tuple[float, float]:
    """Seconds of the import, and of the runtime in it; the container is removed again."""
    env = {"PATH": os.environ["PATH"], "HOME": "/root", "GPUSNAP_GPU_MAP": f"{old.uuid}={new.uuid}"}
    words = ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--print-stats"]
    begun = time.monotonic()
    said = good(run(*words, "--import", archive, env=env))
    whole = time.monotonic() - begun
    Program(NAME).goes_on(more=3)
    podman("rm", "--force", "--time", "0", NAME)
    return whole, json.loads(said)["container_statistics"][0]["runtime_restore_duration"] / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Restores onto the same GPU and onto another, timed.")
    parser.add_argument("--runtime", default="crun", choices=["crun", "runc"])
    parser.add_argument("--mib", type=int, default=1024, help="of the block that the program checks")
    parser.add_argument("--rounds", type=int, default=2, help="imports onto each of the two GPUs")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    driver = Nvidia()
    driver.open()
    gpus = driver.host().gpus
    reason = missing() or (
        "" if len(gpus) > 1 and gpus[0].model == gpus[1].model else "no two GPUs of a kind"
    )
    if reason:
        print(f"remap: {reason}", file=sys.stderr)
        return 1
    times: dict[str, list[tuple[float, float]]] = {"same": [], "other": []}
    with tempfile.TemporaryDirectory() as folder, machine(gpus[0].minor) as host:
        shimhost.write_settings(f'runtime = "{options.runtime}"\n')
        archive = Path(folder, "archive.tar")
        load = Workload.python("torch_train.py", "torch", options.mib)
        try:
            program = Program.begin(NAME, load, host.options(minors=[gpus[0].minor]))
            good(program.checkpoint(archive, "--compress", "none"))
            program.remove()
            for _ in range(options.rounds):
                times["same"].append(import_archive(archive, gpus[0], gpus[0]))
                times["other"].append(import_archive(archive, gpus[0], gpus[1]))
        finally:
            podman("rm", "--force", "--time", "0", NAME)
        size = archive.stat().st_size
    report: dict[str, Any] = {
        **circumstances(driver.host(), options.runtime),
        "archive": size,
        "seconds": times,
    }
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({**report, "seconds": None}, indent=1))
    print(f"archive {size / 2**30:.2f} GiB\n")
    print("| onto | podman restore | of which gpusnap-runtime |\n|---|---:|---:|")
    for name, found in times.items():
        whole, runtime = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"| the {name} GPU | {whole:.2f} s | {runtime:.2f} s |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
