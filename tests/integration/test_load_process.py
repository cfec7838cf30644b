"""CRIU's images that `gpusnap restore` begins to put together before gpusnap-runtime is started."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
import waiting
from storehost import COMMAND, done, empty_store, gpusnap
from support import STORAGE, Container, good, until

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.snapshot.loading.board import NAME
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
    with waiting.Process(
        [COMMAND, "restore", checkpoint], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as command:

        def restoring() -> bool:
            words = [proc.command(pid) for pid in proc.pids() if proc.parent(pid) == command.pid]
            return any("--import" in each for each in words)

        until(restoring, "a Podman that restores")
        command.send_signal(signal.SIGKILL)
    Container("w").goes_on()
    until(nothing_staged, "the end of what is staged")


def find_load_process(command: int) -> int:
    """The load process of a command; 0 while there is none."""
    forkers = [pid for pid in proc.pids() if proc.parent(pid) == command]
    for pid in (each for each in proc.pids() if proc.parent(each) in forkers):
        with contextlib.suppress(OSError):
            links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
            if any(NAME in link for link in links):
                return pid
    return 0


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_load_process_ends(store: Store, signal_: signal.Signals) -> None:
    """Wherever it is: the runtime loads the rest, and nothing is left in RAM."""
    container = Container.start("w", "--mib", "256")
    name = str(done("checkpoint", "w")["name"])
    container.remove()
    with waiting.Process(
        [COMMAND, "restore", name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as command:
        os.kill(until(lambda: find_load_process(command.pid), "a load process"), signal_)
        assert waiting.end(command, 120) == 0
    Container("w").goes_on()
    until(nothing_staged, "the end of what is staged")
