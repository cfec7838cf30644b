"""What the tests of suspended containers have in common."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from storehost import done, gpusnap
from support import Container, good, until

from gpusnap.runtime_shim.snapshot.records import suspensions

RUN = Path("/run/gpusnap")


def usage(name: str) -> dict[str, Any]:
    """What `gpusnap ps` says of a container; empty where it does not list it."""
    listed: list[dict[str, Any]] = done("ps")["containers"]
    return next((each for each in listed if each["name"] == name), {})


def is_suspended(container: Container) -> bool:
    """What `gpusnap ps` shows as suspended; by what is on file, without a start of gpusnap."""
    found = (each for each in suspensions.find() if each.container == container.id)
    return any(each.stage is suspensions.Stage.SUSPENDED for each in found)


def gpu_memory() -> int:
    """Bytes in use on all GPUs."""
    return sum(gpu["memory_used"] for gpu in done("gpus")["gpus"])


def suspended(container: Container, *words: str) -> None:
    """Suspend it, and see that it stands and holds no GPU memory."""
    good(gpusnap("suspend", *words, container.name))
    assert container.inspect()["State"]["Status"] == "paused"
    assert is_suspended(container)


def resumed(container: Container, *words: str) -> None:
    """Resume it, and see that it goes on with every byte right."""
    good(gpusnap("resume", *words, container.name))
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()


def nothing_left() -> None:
    """No note, no staged byte."""
    left: list[str] = []
    for folder in ("journal", "suspended", "stage"):
        with contextlib.suppress(FileNotFoundError):
            left += [f"{folder}/{name}" for name in os.listdir(RUN / folder)]
    # One that was being written has no name that anybody reads, and the next one takes its place.
    left = [name for name in left if not name.endswith((".lock", ".new"))]
    assert not left, left


def ends_without_a_trace() -> None:
    """As `nothing_left`, in a while: an engine cleans up behind a container that was killed."""

    def gone() -> bool:
        with contextlib.suppress(AssertionError):
            nothing_left()
            return True
        return False

    until(gone, f"the end of what is in {RUN}")
