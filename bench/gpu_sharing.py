"""Whether two processes take turns on one GPU, before and after the driver has restored one of them.

    python3 bench/gpu_sharing.py [--seconds 1.5] [--long 0] [--json FILE]

One process runs a kernel that takes --seconds. Meanwhile the other one runs a tiny kernel every 5 ms: the
table says how long the longest of these took. Between the rows, the driver checkpoints and restores one of
the processes, as gpusnap does. --long makes one more row, with a kernel of so many seconds: after a restore,
a driver may end its process. The table also has what the kernel log says of that (Xid).

Needs an NVIDIA GPU that nobody else uses, and PyTorch. The processes are outside of containers.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402

PATIENCE = 120.0
# torch.cuda._sleep runs a kernel for a number of clock cycles.
PROGRAM = """
import sys, time, torch

def run(cycles):
    begun = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return time.perf_counter() - begun

run(10_000_000)
rate = 200_000_000 / run(200_000_000)
number = torch.zeros(1024, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    what, seconds = line.split()
    seconds = float(seconds)
    if what == "kernel":
        print(f"took {run(int(rate * seconds)):.3f}", flush=True)
    else:
        longest, end = 0.0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            begun = time.perf_counter()
            number.add_(1)
            torch.cuda.synchronize()
            longest = max(longest, time.perf_counter() - begun)
            time.sleep(0.005)
        print(f"longest {longest:.4f}", flush=True)
"""


class Process:
    """A program that uses the GPU when it is told to."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._popen.pid
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout
        for line in self._popen.stdout:
            self._lines.put(line.strip())
        self._lines.put(f"ended with {self._popen.wait()}")

    def tell(self, what: str, seconds: float) -> None:
        assert self._popen.stdin
        print(what, seconds, file=self._popen.stdin, flush=True)

    def answer(self) -> str:
        return self._lines.get(timeout=PATIENCE)

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()


def restore(driver: Nvidia, process: Process) -> None:
    """Checkpoint a process by the driver, and restore it on the same GPUs."""
    driver.lock(process.pid, timeout=10)
    driver.checkpoint(process.pid)
    driver.restore(process.pid, [(uuid, uuid) for uuid in driver.list_visible(process.pid)])
    driver.unlock(process.pid)


def measure(what: str, busy: Process, other: Process, seconds: float) -> dict[str, str]:
    """Return a row of the table."""
    busy.tell("kernel", seconds)
    other.tell("turns", seconds + 0.5)
    return {"what": what, "kernel": busy.answer(), "other": other.answer()}


def read_errors() -> list[str]:
    """Return the driver's errors in the kernel log."""
    log = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
    return [line for line in log.splitlines() if "Xid" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description="Whether two processes take turns on one GPU.")
    parser.add_argument("--seconds", type=float, default=1.5, help="of the kernel (1.5)")
    parser.add_argument("--long", type=float, default=0, help="of a last kernel (none)")
    parser.add_argument("--json", type=Path, help="write the rows into this file, too")
    options = parser.parse_args()
    driver, before, rows = Nvidia(), read_errors(), []
    processes: list[Process] = []
    try:
        driver.open()
        processes += [Process(), Process()]
        busy, other = processes
        for each in processes:
            if (said := each.answer()) != "ready":
                print(f"gpu_sharing: a program that needs PyTorch and a GPU {said}", file=sys.stderr)
                return 1
        rows.append(measure("neither was restored", busy, other, options.seconds))
        restore(driver, other)
        rows.append(measure("the other one was restored", busy, other, options.seconds))
        restore(driver, busy)
        rows.append(measure("both were restored", busy, other, options.seconds))
        if options.long:
            rows.append(measure("a longer kernel", busy, other, options.long))
    except (GpusnapError, queue.Empty) as error:
        print(f"gpu_sharing: {error or 'a program does not answer'}", file=sys.stderr)
        return 1
    finally:
        for each in processes:
            each.end()
    for row in rows:
        print(f"{row['what']:28} kernel: {row['kernel']:16} other: {row['other']}")
    errors = [line for line in read_errors() if line not in before]
    print("\n".join(errors))
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "errors": errors}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
