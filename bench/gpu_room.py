"""How much free GPU memory NVIDIA's driver needs to restore a process, and what follows if there is less.

    python3 bench/gpu_room.py [--mib 2048] [--spare 64,16,4] [--json FILE]

For each number of --spare, the driver checkpoints a process with --mib MiB of GPU memory, as gpusnap does.
Another process takes the GPU's memory except for what the first one used and so many MiB more. Then the
driver restores the first one. If that fails, the other process ends, and the driver is asked again.

Needs an NVIDIA GPU that nobody else uses. The processes are outside of containers.
"""

from __future__ import annotations

import argparse
import json
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.api.errors import GpuError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = CHECKOUT / "tests/gpu/program.py"
PATIENCE = 120.0  # seconds
MIB = 1 << 20
NEAR = 1.5  # MiB
CONTEXT = 600  # MiB, about; what it is really is measured


@contextmanager
def using(mib: int) -> Iterator[subprocess.Popen[str]]:
    """A process with so much GPU memory, beside its context."""
    words = [sys.executable, str(PROGRAM), str(mib * MIB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            expect(process, "ready")
            yield process
        finally:
            process.kill()


def expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout
    if not select.select([process.stdout], [], [], PATIENCE)[0]:
        raise GpusnapError("a program does not answer")
    if process.stdout.readline().split()[-1:] != [word]:
        raise GpusnapError("a program failed; is the GPU free?")


def measure_free(driver: Nvidia) -> float:
    """Return the first GPU's free memory in MiB."""
    gpu = driver.host().gpus[0]
    return (gpu.memory_total - gpu.memory_used) / MIB


def ask(driver: Nvidia, pid: int, gpus: list[tuple[str, str]]) -> str:
    """Have the driver restore the process; return its answer."""
    try:
        driver.restore(pid, gpus)
    except GpuError as error:
        return error.code_name or type(error).__name__
    return "restored"


def measure(driver: Nvidia, mib: int, spare: int) -> dict[str, object]:
    """Return a row of the table."""
    with using(mib) as process:
        gpus = [(uuid, uuid) for uuid in driver.list_visible(process.pid)]
        (used,) = driver.memory_used([process.pid])[process.pid].values()
        if used is None:
            raise GpusnapError("NVML does not report what a process uses")
        driver.lock(process.pid, timeout=10)
        driver.checkpoint(process.pid)
        wanted, context = used / MIB + spare, float(CONTEXT)
        for _ in range(5):
            with using(int(measure_free(driver) - wanted - context)):
                free = measure_free(driver)
                if 0 <= free - wanted <= NEAR:
                    answer = ask(driver, process.pid, gpus)
                    break
            context += wanted - free + NEAR / 2
            time.sleep(0.5)
        else:
            raise GpusnapError("the GPU's memory could not be filled as wanted; is the GPU free?")
        row: dict[str, object] = {"used": used / MIB, "spare": free - used / MIB, "answer": answer}
        if answer != "restored":
            time.sleep(0.5)
            row["later"] = ask(driver, process.pid, gpus)
            row["free later"] = measure_free(driver)
        return row


def main() -> int:
    parser = argparse.ArgumentParser(description="How much free GPU memory a restore needs.")
    parser.add_argument("--mib", type=int, default=2048, help="of the process that is restored (2048)")
    parser.add_argument("--spare", default="64,16,4", help="MiB beyond what it used (64,16,4)")
    parser.add_argument("--json", type=Path, help="write the rows into this file, too")
    options = parser.parse_args()
    driver, rows = Nvidia(), []
    try:
        driver.open()
        for spare in map(int, options.spare.split(",")):
            rows.append(row := measure(driver, options.mib, spare))
            print(
                f"used {row['used']:.0f} MiB, {row['spare']:.1f} MiB more were free: {row['answer']}"
                + (f"; with {row['free later']:.0f} MiB free: {row['later']}" if "later" in row else ""),
                flush=True,
            )
    except (GpusnapError, ValueError) as error:
        print(f"gpu_room: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
