"""Processes in a frozen cgroup of version 2, for tests of what is done with a paused container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.gpu_processes import paused_container as frozen
from gpusnap.runtime_shim.snapshot.records import journal

ID = "c0ffee"
# Counts in a file that it has mapped: so it needs no system call for that, at which it might be stopped.
# A second thread sleeps, as the driver's does in a process.
_COUNTER = """
import mmap, sys, threading, time
threading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()
with open(sys.argv[1], "r+b") as file:
    memory, number = mmap.mmap(file.fileno(), 8), 0
while True:
    number += 1
    memory[:] = number.to_bytes(8, "little")
"""


def cgroup_top() -> Path | None:
    """A folder below our cgroup in which we may make others, of version 2 or of v1's pids."""
    for mount in proc.mounts("self"):
        groups = proc.cgroups(os.getpid())
        path = groups.get("") if mount.kind == "cgroup2" else groups.get("pids")
        if path is None or not (mount.kind == "cgroup2" or mount.destination.endswith("/pids")):
            continue
        folder = Path(mount.destination) / path.removeprefix(mount.root).strip("/")
        if os.access(folder / "cgroup.procs", os.W_OK) and os.access(folder, os.W_OK):
            return folder
    return None


@dataclass
class Cell:
    """A frozen cgroup, with processes that count."""

    group: Path
    pids: list[int]
    files: list[Path]

    def counts(self) -> list[bytes]:
        return [path.read_bytes() for path in self.files]

    def frozen(self) -> bool:
        return "frozen 1" in (self.group / "cgroup.events").read_text().splitlines()

    def freeze(self, value: int) -> None:
        (self.group / "cgroup.freeze").write_text(str(value))
        if value:
            wait_for(self.frozen, "the freeze")

    def run(self, since: list[bytes] | None = None) -> None:
        """Wait until both have counted on, from those counts or from now."""
        before = self.counts() if since is None else since
        wait_for(lambda: all(a != b for a, b in zip(self.counts(), before, strict=True)), "counts")


@contextmanager
def a_cell(folder: Path) -> Iterator[Cell]:
    """Two that count, frozen; skips where no such cgroup can be made."""
    top = next((mount.destination for mount in proc.mounts("self") if mount.kind == "cgroup2"), None)
    own = Path(f"{top}{proc.cgroups('self').get('', '/')}/{ID}")
    try:
        own.mkdir()
        (own / "cgroup.freeze").write_text("0")
    except OSError:
        pytest.skip("no cgroup of version 2 can be made here")
    children, files = [], [folder / f"count{number}" for number in range(2)]
    try:
        for path in files:
            path.write_bytes(bytes(8))
            child = subprocess.Popen([sys.executable, "-c", _COUNTER, path])
            children.append(child)
            (own / "cgroup.procs").write_text(str(child.pid))
            wait_for(lambda path=path: any(path.read_bytes()), "a count")  # type: ignore[misc]
        found = Cell(own, [child.pid for child in children], files)
        found.freeze(1)
        yield found
    finally:
        for child in children:
            child.kill()
        with suppress(OSError):
            (own / "cgroup.freeze").write_text("0")
        for child in children:
            child.wait()
        wait_for(lambda: _removed(own), "the end of the cgroup")


def _removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal's, which is the test's own."""
    path = tmp_path / "gpusnap" / "journal"
    path.parent.mkdir()
    monkeypatch.setattr(journal, "FOLDER", str(path))
    return path


@pytest.fixture
def cell(tmp_path: Path) -> Iterator[Cell]:
    with a_cell(tmp_path) as found:
        yield found


def container(pid: int) -> containers.Container:
    """The one whose init that is."""
    return containers.Container(ID, pid, "paused", "/b", {})


def pause(cell: Cell) -> frozen.PausedContainer:
    """The pause that it is in."""
    found = frozen.find(container(cell.pids[0]))
    assert found is not None
    return found
