"""Children by fork that hold the GPU files of their parent, as PyTorch's DataLoader workers do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support import RUNTIME, Container, Done, faults, good, manifest, members, run, sentence

NOTE = "processes have GPU files open that they inherited and never used; replaced by /dev/null:"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


def devices(pid: int) -> list[str]:
    """The GPU files that a process has open."""
    links = (os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())
    return sorted(link for link in links if link.startswith("/dev/nvidia"))


def heirs(container: Container) -> list[int]:
    """The processes of the container but its first."""
    return [pid for pid in members(container) if pid != container.pid]


def start(*words: str) -> Container:
    """A worker, and two children of it that count; all three tick."""
    container = Container.start("w", "--mib", "4", "--counters", "2", *words, workers=3)
    assert len(heirs(container)) == 2
    assert all(devices(pid) == devices(container.pid) != [] for pid in heirs(container))
    return container


def neutralised(archive: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = manifest(archive).get("neutralised", [])
    return found


def test_export_and_import(real: str, archive: Path) -> None:
    """All go on where they were; the manifest says what was replaced, and none of it is left in them."""
    container = start()
    files = devices(container.pid)
    good(container.checkpoint(archive))
    record = manifest(archive)
    assert [process["pid"] for process in record["processes"]] == [1]
    assert [sorted(path for _, path in each["descriptors"]) for each in neutralised(archive)] == [files] * 2
    assert {each["pid"] for each in neutralised(archive)} == set(container.ticks()) - {1}
    container.remove()
    again = Container.restore("w", archive)
    again.goes_on()
    assert len(again.ticks()) == 3
    assert devices(again.pid) == files
    assert [devices(pid) for pid in heirs(again)] == [[], []]


def test_leave_running(real: str, archive: Path) -> None:
    """They run on beside their checkpoint; the next one has nothing to replace, and can be restored too."""
    container = start()
    pids = heirs(container)
    good(container.checkpoint(archive, "--leave-running"))
    assert len(neutralised(archive)) == 2
    container.goes_on()
    assert heirs(container) == pids
    assert [devices(pid) for pid in pids] == [[], []]
    good(container.checkpoint(archive))
    assert neutralised(archive) == []
    container.remove()
    again = Container.restore("w", archive)
    again.goes_on()
    assert len(again.ticks()) == 3


def test_said(crun: None, tmp_path: Path) -> None:
    """One line on stderr, with the PIDs."""
    container = start()
    done = _shim(container, tmp_path / "image")
    good(done)
    pids = sorted(heirs(container))
    assert [line for line in done.err.splitlines() if NOTE in line] == [
        f"gpusnap: note: 2 {NOTE} {pids[0]} {pids[1]} [GPS-213]"
    ]


def test_a_failure_after_it(crun: None, archive: Path) -> None:
    """Replaced once, the files are no obstacle to the next attempt, though the parent has new ones since."""
    container = start()
    faults("checkpoint result=CUDA_ERROR_UNKNOWN count=1")
    sentence_of_the_driver = container.checkpoint(archive)
    assert "CUDA_ERROR_UNKNOWN" in sentence_of_the_driver.err
    container.unharmed()
    good(container.checkpoint(archive))
    container.remove()
    Container.restore("w", archive).goes_on()


def test_a_file_of_its_own(real: str, archive: Path) -> None:
    """A child that opened a node by itself uses the GPU in some way: refused before anything is touched."""
    container = start_watching()
    before = {pid: devices(pid) for pid in members(container)}
    text = sentence(container.checkpoint(archive))
    assert "has /dev/nvidiactl open but no CUDA state of its own, and did not inherit that handle" in text
    container.unharmed()
    assert {pid: devices(pid) for pid in members(container)} == before


def start_watching() -> Container:
    """As `start`, with children that open /dev/nvidiactl as well."""
    return Container.start("w", "--mib", "4", "--counters", "2", "--watch", workers=3)


def _shim(container: Container, image: Path) -> Done:
    """Checkpoint as Podman has it done, with --leave-running, into a folder of the test's own."""
    words = ["checkpoint", "--image-path", str(image), "--work-path", "/tmp", "--leave-running"]
    return run(RUNTIME, *words, container.id, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
