"""How often a server under constant traffic can be checkpointed, and what its clients see.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 --
        /opt/gpusnap/bin/python -B bench/traffic.py [--rounds 50] [--rate 100] [--json F]

A GPU process in a container answers TCP connections: the given number of new ones a second, and four that
stay open. On the host's network and on a bridge, with --leave-running and without (then it is restored), with
--tcp-established and without, it makes the given number of checkpoints in a row of one container. After each,
the server must answer new connections again. At the end, every byte of its GPU memory must have been right at
every tick. Runs in the test host, with softgpu as its GPU. It uses runtimes whose CRIU can dump sockets on
this kernel: those of /opt/newer if the host's own cannot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
for folder in (".", "tests/host", "tests/integration"):
    sys.path.insert(0, str(CHECKOUT / folder))

import gpuhost  # noqa: E402
import shimhost  # noqa: E402
from servers import Clients, Server, runtimes  # noqa: E402
from support import GPUS_CONF, GPUWORK, podman  # noqa: E402

NAME = "gpusnap-bench"


def measure(runtime: str, options: argparse.Namespace, way: tuple[str, bool, bool]) -> dict[str, Any]:
    """So many checkpoints of one container; `way`: its network, whether it runs on, --tcp-established."""
    network, running, established = way
    shimhost.write_settings(f'runtime = "{runtime}"\n')
    failed: list[str] = []
    good = 0
    server = Server.start(NAME, network=network)
    try:
        with Clients(server.address, server.port, rate=options.rate) as clients:
            server.wait_for_answers(clients)
            for _ in range(options.rounds):
                try:
                    server.round(leave_running=running, established=established)
                    server.wait_for_answers(clients)
                    good += 1
                except (AssertionError, subprocess.TimeoutExpired) as error:
                    failed.append(str(error).strip())
                    server = server.again()
                    server.wait_for_answers(clients)
            server.container.goes_on()
    finally:
        podman("rm", "--force", "--time", "0", NAME)
    return {
        "runtime": runtime,
        "network": network,
        "leave_running": running,
        "tcp_established": established,
        "rounds": options.rounds,
        "good": good,
        "failed": failed,
        "new": dict(clients.short),
        "held": dict(clients.held),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Checkpoints of a server with clients all the time.")
    parser.add_argument("--rounds", type=int, default=50, help="checkpoints of each container")
    parser.add_argument("--rate", type=int, default=100, help="new connections a second")
    parser.add_argument("--only", default="", help="rows that have these words, such as 'crun bridge'")
    parser.add_argument("--json", help="write the figures there too")
    options = parser.parse_args()
    if not os.environ.get("GPUSNAP_TESTHOST"):
        print("traffic: run it in the test host, as its --help says", file=sys.stderr)
        return 1
    shimhost.install(CHECKOUT)
    gpuhost.install(CHECKOUT / "softgpu" / "build", GPUS_CONF)
    shutil.copy(CHECKOUT / "softgpu/build/bin/gpuwork", GPUWORK)
    found = []
    for runtime, network, running, established in itertools.product(
        runtimes(), ("host", "bridge"), (True, False), (False, True)
    ):
        words = [
            Path(runtime).name,
            network,
            "running" if running else "restored",
            "established" if established else "closed",
        ]
        if set(options.only.split()) <= set(words):
            each = measure(runtime, options, (network, running, established))
            found.append(each)
            print(f"{' '.join(words):34} {each['good']:3} of {each['rounds']}", end="  ")
            print(f"new {each['new']}  held {each['held']}", flush=True)
            for line in each["failed"][:3]:
                print(f"    {line}", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(each["good"] == each["rounds"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
