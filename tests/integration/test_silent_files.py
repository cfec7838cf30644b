"""A container with a file of a file system in user space whose server takes requests and answers none."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import waiting
from storehost import COMMAND, PLAIN, empty_store, gpusnap
from support import Container, good, podman, run, sentence, until
from suspendhost import nothing_left, resumed, suspended, usage

SERVER = Path(__file__).with_name("silent_fuse.py")
# The deadline of question_process.py, and what Podman, the runtime and a busy machine take besides.
WITHIN = 10 + 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """The mountpoint and the server of a file system whose file is a copy of sleep(1)."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("there is no /dev/fuse")
    place = tmp_path / "fuse"
    place.mkdir()
    program = shutil.which("sleep")
    assert program is not None
    argv = [sys.executable, "-B", str(SERVER), str(place), program]
    with waiting.Process(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        if running.stdout.readline() != "mounted\n":
            assert running.stderr is not None
            said = running.stderr.read()
            pytest.skip(f"no file system in user space can be mounted here: {said[-200:]}")
        try:
            yield place, running
        finally:
            running.kill()
            subprocess.run(["umount", "--lazy", place], check=True)


def gpusnaps() -> dict[int, str]:
    """State by PID of what runs gpusnap-runtime, zombies included."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue
        ours = b"gpusnap-runtime" in command or "(gpusnap-runtime)" in stat
        if ours and "(conmon)" not in stat:  # which has it among its arguments
            found[int(folder.name)] = stat.rpartition(")")[2].split()[0]
    return found


def waits_for_server(pid: int) -> bool:
    """Whether a thread of a process waits for such a server (linux, fs/fuse/dev.c)."""
    for where in Path(f"/proc/{pid}/task").glob("*/wchan"):
        with suppress(OSError):
            if where.read_text() == "request_wait_answer":
                return True
    return False


def test_a_mapping_that_is_not_answered_for(
    real: str, tmp_path: Path, server: tuple[Path, subprocess.Popen[str]]
) -> None:
    """It is refused in time and by the process' name, Podman is free, and the container runs on."""
    place, running = server
    script = "/fuse/x 3000 & exec /gpuwork --tick 30 --mib 4"
    container = Container.start("w", options=["-v", f"{place}:/fuse"], script=script)
    until(lambda: "/fuse/x" in podman("top", "w", "args").out, "the program of the file system")
    running.send_signal(signal.SIGUSR1)
    assert running.stdout is not None
    assert running.stdout.readline() == "silent\n"
    for _ in range(2):
        begun = time.monotonic()
        text = sentence(container.checkpoint(tmp_path / "checkpoint.tar.zst"))
        assert time.monotonic() - begun < WITHIN
        assert "the kernel did not respond within 10 s" in text
        assert "(x)" in text
        assert "[GPS-225]" in text
        begun = time.monotonic()
        assert "w" in good(podman("ps", "--format", "{{.Names}}"))
        assert time.monotonic() - begun < WITHIN
        container.unharmed()
        # What is left of gpusnap is the child that waits, which is nobody's but init's.
        left = gpusnaps()
        assert set(left.values()) <= {"D"}, left
    running.kill()
    until(lambda: not gpusnaps(), "the end of what waited for the server")
    container.remove()


def test_a_store_that_is_not_answered_for(
    crun: None, tmp_path: Path, server: tuple[Path, subprocess.Popen[str]]
) -> None:
    """A spill that waits for it ends at a signal, with its memory in RAM; the next one succeeds.

    Its deadline ends it in the same way: tests/unit/runtime_shim/snapshot/suspended_containers/test_spill.py.
    """
    place, running = server
    with empty_store(PLAIN) as store, ExitStack() as stack:
        container = Container.start("w", "--mib", "8")
        suspended(container)
        staging = Path(store.create().path) / "staging"
        staging.mkdir(exist_ok=True)
        subprocess.run(["mount", "--bind", place, staging], check=True)
        stack.callback(run, "umount", "--lazy", staging)
        running.send_signal(signal.SIGUSR1)
        assert running.stdout is not None
        assert running.stdout.readline() == "silent\n"
        argv = [COMMAND, "suspend", "--spill", "--wait", "w"]
        said = tmp_path / "said"
        with said.open("w") as file, waiting.Process(argv, stderr=file) as spilling:
            try:
                until(lambda: waits_for_server(spilling.pid), "a thread that waits for the store")
                spilling.send_signal(signal.SIGTERM)
                # Not to the end: the kernel lets no process end that waits for such a server.
                text = until(lambda: said.read_text().strip(), "what it says of the signal")
                assert usage("w")["ram"]
            finally:
                running.kill()
            assert spilling.wait(60)
        assert "SIGTERM" in text
        stack.close()
        good(gpusnap("suspend", "--spill", "--wait", "w"))
        assert not usage("w")["ram"]
        resumed(container)
        nothing_left()
        container.remove()
