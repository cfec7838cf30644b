"""The pause of `gpusnap migrate`, beside that of a checkpoint through a registry: in one run, on softgpu.

    tests/host/host enter --env GPUSNAP_TESTHOST=1 -- \\
        /opt/gpusnap/bin/python /src/bench/migrate.py [--mib 256] [--rounds 3] [--json FILE]

A container of --mib moves to a second host within the test host (tests/integration/otherhost.py), in turn
with

ahead      gpusnap migrate, which sends its memory once while it runs
at once    gpusnap migrate --precopy 0
registry   gpusnap checkpoint --to REF, then gpusnap restore REF on the other host; docker-registry on this
machine

The pause is the time in which the container does not run: the one that `gpusnap migrate --json` reports, or
the time of the two commands. Each round begins with empty stores and an empty registry. Compare only within a
run: both hosts share cores and disk, and the network is a pipe. Runs only in the test host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests" / "host"), str(CHECKOUT / "tests" / "integration")]

import gpuhost  # noqa: E402
import shimhost  # noqa: E402
from otherhost import SSH, OtherHost, other_host  # noqa: E402
from registryhost import running  # noqa: E402
from storehost import COMMAND, PLAIN, empty_store, gpusnap  # noqa: E402
from support import GPUS_CONF, GPUWORK, Container, good, podman  # noqa: E402


def run_migrate(*words: str) -> float:
    """Seconds of the pause of a migration."""
    done = gpusnap("migrate", "w", "ssh://other", "--ssh", str(SSH), "--quiet", "--json", *words)
    return float(json.loads(good(done))["pause"])


def through_a_registry(other: OtherHost) -> float:
    """Seconds from the begin of the checkpoint until the container runs over there."""
    with running() as registry:
        reference = f"http://{registry.host}/team/w:moved"
        began = time.monotonic()
        good(gpusnap("checkpoint", "w", "--quiet", "--to", reference))
        good(other.run(COMMAND, "restore", "--quiet", reference))
        return time.monotonic() - began


def measure_way(way: Callable[[OtherHost], float], mib: int) -> float:
    """One move, from empty stores; nothing is left of it."""
    with empty_store(PLAIN), other_host() as other:
        Container.start("w", "--mib", str(mib), "--slices", "32", "--touch", "1", gpus=["0"])
        try:
            seconds = way(other)
            assert other.containers() == ["w running"]
        finally:
            podman("rm", "--force", "--time", "0", "w")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    if os.environ.get("GPUSNAP_TESTHOST") != "1":
        parser.error("this runs in the test host: tests/host/host enter --env GPUSNAP_TESTHOST=1 -- …")
    shimhost.install(CHECKOUT)
    gpuhost.install(CHECKOUT / "softgpu" / "build", GPUS_CONF)
    shutil.copy(CHECKOUT / "softgpu" / "build" / "bin" / "gpuwork", GPUWORK)
    ways: dict[str, Callable[[OtherHost], float]] = {
        "ahead": lambda _: run_migrate(),
        "at once": lambda _: run_migrate("--precopy", "0"),
        "registry": through_a_registry,
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(words.rounds):
        for name, way in ways.items():
            found[name].append(measure_way(way, words.mib))
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, seconds in medians.items():
        print(f"{name:<9} {seconds:6.2f} s   {seconds / medians['registry']:.2f} of registry   {found[name]}")
    if words.json is not None:
        words.json.write_text(json.dumps({"mib": words.mib, "pauses": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
