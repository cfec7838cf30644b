"""CRIU dumps a container while its GPU memory is written, and then waits: whatever happens meanwhile.

The memory is written slowly, by one thread with zstd's highest level: so CRIU waits by the time of the fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import shimhost
from storehost import COMMAND, STORE, empty_store, gpusnap
from support import DEADLINE, Container, good, run, until
from test_recover import nothing_left

SLOW = f"""\
[memory]
level = 19
threads = 1
chunk-size = "256K"
[store]
path = "{STORE}"
"""
WORK = ("--tick", "30", "--mib", "12")


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


def test_the_container_is_killed(real: str, archive: Path) -> None:
    """While CRIU waits: its memory is still there, and the checkpoint is complete."""
    container = Container.start("w", *WORK)
    checkpoint = begun(container, archive)
    waiting("program")
    os.kill(container.pid, signal.SIGKILL)
    assert ended(checkpoint)[0] == 0
    container.remove()
    back = Container.restore("w", archive)
    back.goes_on()
    back.remove()
    nothing_left()


def fill(folder: Path) -> None:
    """Leave no room there."""
    assert "No space" in run("dd", "if=/dev/zero", f"of={folder}/ballast", "bs=1M").err


@pytest.mark.parametrize("killed", [False, True])
def test_the_disk_fills_up(real: str, killed: bool) -> None:
    """While CRIU waits: the container runs on; if somebody has killed it, nothing is promised."""
    STORE.mkdir()
    good(run("mount", "-t", "tmpfs", "-o", "size=150m,mode=700", "none", STORE))
    try:
        container = Container.start("w", *WORK)
        checkpoint = subprocess.Popen(
            [COMMAND, "checkpoint", "w", "--name", "one"], stderr=subprocess.PIPE, text=True
        )
        waiting("program")
        if killed:
            os.kill(container.pid, signal.SIGKILL)
        fill(STORE)
        code, said = ended(checkpoint)
        assert code != 0
        assert "is full" in said
        if killed:
            assert "complete" not in said
        else:
            container.unharmed()
        (STORE / "ballast").unlink()
        good(gpusnap("recover"))
        container.remove()
        nothing_left()
    finally:
        good(run("umount", "--lazy", STORE))


def test_a_script_of_the_user(real: str, archive: Path, tmp_path: Path) -> None:
    """CRIU runs it as well: if it refuses, the container runs on."""
    script, code = tmp_path / "script", tmp_path / "code"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0\nexit $(cat {code})\n')
    script.chmod(0o755)
    shimhost.write_settings(f'runtime = "{real}"\n{SLOW}[criu]\naction-script = "{script}"\n')
    container = Container.start("w", *WORK)
    code.write_text("3")
    assert container.checkpoint(archive).code != 0
    container.unharmed()
    nothing_left()
    code.write_text("0")
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()


def test_images_of_an_earlier_dump(real: str) -> None:
    """Those of a process that has ended since are no part of the checkpoint."""
    container = Container.start("w", *WORK)
    container.image_path.mkdir()
    (container.image_path / "pages-77.img").write_bytes(os.urandom(3 << 20))
    good(gpusnap("checkpoint", "w", "--name", "one"))
    assert "pages-77.img" not in good(gpusnap("inspect", "one", "--json"))


# Its version, and that it reads no action-script from a configuration file when a runtime calls it.
OLD = """#!/bin/sh
[ "$1" = --version ] && { echo "Version: 3.17.1"; exit 0; }
[ -n "$CRIU_CONFIG_FILE" ] && sed -i /action-script/d "$CRIU_CONFIG_FILE"
exec criu "$@"
"""


def test_a_criu_that_would_not_wait(tmp_path: Path) -> None:
    """runc before 1.2 uses the one that its caller names: the memory is written before the dump then."""
    with empty_store(f'runtime = "runc"\n{SLOW}'):
        old = tmp_path / "criu"
        old.write_text(OLD)
        old.chmod(0o755)
        container = Container.start("w", *WORK)
        line = container.line(tmp_path)
        good(run(line[0], f"--criu={old}", *line[1:]))
        record = json.loads((tmp_path / "image/gpusnap/manifest.json").read_text())
        steps = [step["step"] for step in record["timing"]]
        assert steps.index("write") < steps.index("write manifest")
        container.remove()
