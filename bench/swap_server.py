"""Two model servers that are swapped on one GPU: the time until the resumed one gives its first answer.

    python3 bench/swap_server.py [--layers 32] [--swaps 5] [--json swap_server.json]

The servers are those of bench/server.py, both with memory on the GPU when they start. One is suspended, and
then `gpusnap swap` exchanges them. After each swap, the resumed server is asked for one token, which ends the
measured time; then for 32, which are compared with its answer after it was started. Seconds:

    swap        the command
    answer      from its start to the first answer
    beyond      from the command's end to the first answer

Needs root, Podman and a GPU with torch and transformers; or the test host, where gpuwork replaces the model.
Installs gpusnap while it runs, and removes what it made. The exit code is 1 if something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "bench"), str(CHECKOUT / "tests" / "host")]
sys.path[:0] = [str(CHECKOUT / "tests" / "gpu"), str(CHECKOUT / "tests" / "integration")]

import shimhost  # noqa: E402
from hosts import BenchError, place  # noqa: E402
from podman_gpu import circumstances  # noqa: E402
from realhost import missing  # noqa: E402
from server import Server, of_kind, remove  # noqa: E402
from servers import PORT  # noqa: E402
from suspend import FIRST, GIB, SECOND, gpusnap  # noqa: E402

from gpusnap.runtime_shim.base.errors import GpusnapError  # noqa: E402
from gpusnap.runtime_shim.gpu.nvidia.driver import Nvidia  # noqa: E402


@dataclass
class Found:
    """What was measured; seconds, one for each swap."""

    gib: float = 0.0
    """Moved by one swap, both ways together."""
    fresh: list[float] = field(default_factory=list)
    """Until the first answer of each server after its start."""
    swap: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)

    def line(self) -> str:
        """Medians."""
        swap, answer = statistics.median(self.swap), statistics.median(self.answer)
        beyond = statistics.median(b - a for a, b in zip(self.swap, self.answer, strict=True))
        return (
            f"{self.gib:.1f} GiB moved: swap {swap:.2f} s ({swap / self.gib:.2f} s per GiB), first answer "
            f"{answer:.2f} s, {beyond:.2f} s beyond the swap; fresh {statistics.median(self.fresh):.1f} s"
        )


def measure(first: Server, second: Server, swaps: int) -> Found:
    """Start both, and have them take turns. Raises BenchError, also for another answer than before."""
    found = Found(fresh=[first.start()])
    gpusnap("suspend", first.name)
    found.fresh.append(second.start())
    out, come = second, first
    for _ in range(swaps):
        begun = time.monotonic()
        took, done = gpusnap("swap", out.name, come.name)
        found.swap.append(took)
        found.answer.append(come.first_answer(begun))
        found.gib = (done["out"]["memory"] + done["in"]["memory"]) / GIB
        out, come = come, out
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32, help="of the model (32: 12.6 GiB)")
    parser.add_argument("--mib", type=int, default=200, help="of device memory, in the test host")
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the readings to this file")
    options = parser.parse_args()
    software = os.environ.get("GPUSNAP_TESTHOST") == "1"
    if reason := ("" if software else missing()):
        print(f"swap_server: {reason}", file=sys.stderr)
        return 1
    with ExitStack() as stack:
        try:
            here = stack.enter_context(place(None if software else Nvidia().host().gpus[0].minor))
            shimhost.write_settings('runtime = "crun"\n')
            stack.callback(remove, FIRST, SECOND)
            remove(FIRST, SECOND)  # of a run that was killed
            about = {**circumstances(Nvidia().host(), "gpusnap-runtime"), "software": software}
            servers = (of_kind(here, options, FIRST), of_kind(here, options, SECOND, PORT + 1))
            found = measure(*servers, options.swaps)
        except (GpusnapError, BenchError, AssertionError) as error:
            print(f"swap_server: {error}", file=sys.stderr)
            return 1
    print(found.line())
    if options.json:
        options.json.write_text(json.dumps({**about, **asdict(found)}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
