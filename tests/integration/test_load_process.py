"""CRIU's images that `gpusnap restore` begins to put together before gpusnap-runtime is started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from storehost import COMMAND, done, empty_store, gpusnap
from support import STORAGE, Container, good, until

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.snapshot.restore import TIMING


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    with empty_store() as made:
        yield made


@pytest.fixture
def checkpoint(store: Store) -> str:
    """The name of one whose container is gone."""
    container = Container.start("w", "--mib", "8")
    name = str(done("checkpoint", "w")["name"])
    container.remove()
    return name


def came_ahead() -> bool:
    """Whether the images of the restored container are those that the command began."""
    return bool(json.loads((STORAGE / Container("w").id / "userdata" / TIMING).read_text())["ahead"])


def nothing_staged() -> bool:
    return not os.path.ismount(tmpfs.FOLDER)


def test_the_runtime_has_them(checkpoint: str) -> None:
    good(gpusnap("restore", checkpoint))
    Container("w").goes_on()
    assert came_ahead()
    assert nothing_staged()


def test_the_command_is_killed(checkpoint: str) -> None:
    """When it has started Podman: that restores the container by itself, and nothing is left in RAM."""
    with subprocess.Popen(
        [COMMAND, "restore", checkpoint], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as command:

        def restoring() -> bool:
            words = [proc.command(pid) for pid in proc.pids() if proc.parent(pid) == command.pid]
            return any("--import" in each for each in words)

        until(restoring, "a Podman that restores")
        command.send_signal(signal.SIGKILL)
    Container("w").goes_on()
    until(nothing_staged, "the end of what is staged")
