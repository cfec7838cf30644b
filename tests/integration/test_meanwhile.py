"""Somebody else gives Podman a command while a checkpoint is under way: both come to a good end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shimhost
import waiting
from support import (
    DEADLINE,
    Container,
    faults,
    good,
    hangs_in_checkpoint,
    no_faults_after,
    podman,
    run,
    until,
)

COMMANDS = {
    "stop": ("stop", "--time", "0", "w"),
    "kill": ("kill", "w"),
    "restart": ("restart", "--time", "0", "w"),
    "rename": ("rename", "w", "v"),
    "exec": ("exec", "w", "true"),
    "exec in the background": ("exec", "-d", "w", "sleep", "60"),
    "pause": ("pause", "w"),
    "rm": ("rm", "--force", "--time", "0", "w"),
    "update": ("update", "--memory", "1g", "w"),
    "top": ("top", "w"),
    "stats": ("stats", "--no-stream", "w"),
}


@contextmanager
def under_way(container: Container, archive: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A checkpoint in whose middle the driver is."""
    faults("checkpoint hang=600000")
    init = container.pid
    line = ["podman", "--runtime", "gpusnap-runtime", "container", "checkpoint", *options]
    with waiting.Process(
        [*line, "--export", archive, container.name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        until(lambda: hangs_in_checkpoint(init), "the driver's checkpoint")
        # The driver hangs for so long yet: a command of Podman's may have to wait for the checkpoint's end.
        with no_faults_after(1.0):
            yield engine
        waiting.end(engine, 2 * DEADLINE)


@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_podmans(crun: None, tmp_path: Path, command: str, options: tuple[str, ...]) -> None:
    """The checkpoint is whole, or refused; what is left of the container runs, and it restores."""
    shimhost.write_settings('runtime = "crun"\n[memory]\nchunk-size = "1M"\n')
    archive = tmp_path / "w.tar"
    container = Container.start("w", "--mib", "4")
    with under_way(container, archive, *options) as engine:
        run("podman", "--runtime", "gpusnap-runtime", *COMMANDS[command])
    assert engine.stderr is not None
    assert [name for name in os.listdir("/run/gpusnap/journal") if not name.endswith(".lock")] == []
    assert not os.path.ismount("/run/gpusnap/stage")
    left = good(podman("ps", "--format", "{{.Names}} {{.Status}}")).split()
    if left and "Paused" in left:
        good(podman("unpause", left[0]))
    if left and engine.returncode == 0 and command != "restart":
        Container(left[0]).goes_on()
    assert engine.returncode == 0 or left, "the container stopped, and there is no checkpoint of it"
    good(podman("rm", "--force", "--all", "--time", "0"))
    if engine.returncode == 0:
        Container.restore("w", archive).goes_on()


def test_a_gpu_program_by_exec(crun: None, tmp_path: Path) -> None:
    """What `podman exec` starts meanwhile is in no dump: the checkpoint says so, or can be restored."""
    container = Container.start("w", "--mib", "4")
    archive = tmp_path / "w.tar"
    good(podman("exec", "-d", "w", "/gpuwork", "--mib", "4", "--tick", "30", "--rest", "24"))
    until(lambda: len(_working()) == 2, "the second program")
    done = container.checkpoint(archive)
    assert done.code != 0
    assert "is not a descendant of the init" in done.err
    assert "podman exec" in done.err
    container.goes_on()


def test_an_exec_session(crun: None, tmp_path: Path) -> None:
    """Without a GPU it is left out, said to the user, and the rest comes back."""
    container = Container.start("w", "--mib", "4")
    archive = tmp_path / "w.tar"
    good(podman("exec", "-d", "w", "sleep", "600"))
    said = good(run("/usr/local/bin/gpusnap", "doctor", "w"))
    assert "exec started a process in the container: " in said
    done = container.checkpoint(archive)
    assert "processes that exec started in the container are not in its checkpoint: process" in done.err
    good(done)
    container.remove()
    Container.restore("w", archive).goes_on()


def _working() -> list[str]:
    return run("pgrep", "-x", "gpuwork").out.split()
