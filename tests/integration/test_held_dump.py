"""CRIU dumps a container while its GPU memory is written, and then waits: whatever happens meanwhile.

The memory is written slowly, by one thread with zstd's highest level: so CRIU waits by the time of the fault.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from storehost import STORE, empty_store, gpusnap
from support import DEADLINE, Container, good, manifest, until
from test_recover import nothing_left

SLOW = f"""\
[memory]
level = 19
threads = 1
chunk-size = "256K"
[store]
path = "{STORE}"
"""
WORK = ("--tick", "30", "--mib", "24")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


@pytest.fixture(autouse=True)
def slow(real: str) -> Iterator[None]:
    with empty_store(f'runtime = "{real}"\n{SLOW}'):
        yield


def environment(pid: int) -> dict[str, str]:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def find(what: str) -> int | None:
    """The PID of one of those that take part, once CRIU's program waits at the end of the dump."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    program = next((p for p in pids if environment(p).get("CRTOOLS_SCRIPT_ACTION") == "post-dump"), None)
    if program is None:
        return None
    chain = [program]  # program, CRIU, runtime, gpusnap-runtime, Podman
    while len(chain) < 4:
        chain.append(int(Path(f"/proc/{chain[-1]}/stat").read_text().rpartition(")")[2].split()[1]))
    return dict(zip(("program", "criu", "runtime", "gpusnap"), chain, strict=True))[what]


def waiting(what: str) -> int:
    pid = until(lambda: find(what), "CRIU's program at the end of its dump")
    assert isinstance(pid, int)
    return pid


def begun(container: Container, archive: Path) -> subprocess.Popen[str]:
    """Podman's checkpoint of it."""
    argv = ["podman", "--runtime", "gpusnap-runtime", "container", "checkpoint", "--export", str(archive)]
    return subprocess.Popen([*argv, container.name], stderr=subprocess.PIPE, text=True)


def ended(checkpoint: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = checkpoint.communicate(timeout=4 * DEADLINE)
    return checkpoint.returncode, said


def test_both_at_once(real: str, archive: Path) -> None:
    """The container has not ended while its memory is still being written, and is restored right."""
    container = Container.start("w", *WORK)
    init = container.pid
    checkpoint = begun(container, archive)
    waiting("program")
    assert os.path.exists(f"/proc/{init}")
    assert checkpoint.poll() is None
    assert ended(checkpoint) == (0, "")
    steps = {step["step"]: step for step in manifest(archive)["timing"]}
    assert steps["dump"]["start"] <= steps["write"]["start"]
    assert steps["dump"]["seconds"] >= steps["write"]["seconds"]
    container.remove()
    back = Container.restore("w", archive)
    back.goes_on()
    back.remove()
    nothing_left()


SAID = {"gpusnap": "SIGTERM", "program": "killed by signal 9", "criu": "could not dump"}


@pytest.mark.parametrize("what", SAID)
def test_the_container_runs_on(real: str, archive: Path, what: str) -> None:
    """gpusnap is told to stop; or CRIU's program is killed, or CRIU itself."""
    container = Container.start("w", *WORK)
    checkpoint = begun(container, archive)
    os.kill(waiting(what), signal.SIGTERM if what == "gpusnap" else signal.SIGKILL)
    code, said = ended(checkpoint)
    assert code != 0
    assert SAID[what] in said
    assert "Traceback" not in said
    container.unharmed()
    nothing_left()
    assert not archive.exists()
    good(container.checkpoint(archive))
    container.remove()


def test_gpusnap_is_killed(real: str, archive: Path) -> None:
    """CRIU lets the processes go on, and `gpusnap recover` gives them their memory."""
    container = Container.start("w", *WORK)
    checkpoint = begun(container, archive)
    os.kill(waiting("gpusnap"), signal.SIGKILL)
    assert ended(checkpoint)[0] != 0
    good(gpusnap("recover"))
    container.unharmed()
    nothing_left()
    container.remove()


def test_the_runtime_is_killed(real: str, archive: Path) -> None:
    """Its CRIU still waits for the memory, and then ends the processes: the checkpoint is complete."""
    container = Container.start("w", *WORK)
    checkpoint = begun(container, archive)
    os.kill(waiting("runtime"), signal.SIGKILL)
    code, said = ended(checkpoint)
    assert code == 0, said
    assert "only after the dump; the checkpoint is complete" in said
    container.remove()
    back = Container.restore("w", archive)
    back.goes_on()
    back.remove()
    nothing_left()
