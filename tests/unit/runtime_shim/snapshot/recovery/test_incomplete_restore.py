"""Processes that a restore left and that no runtime knows: found by what is theirs alone, and ended."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import unshare_works, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import pidfd, proc
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.snapshot.recovery import incomplete_restore
from gpusnap.runtime_shim.snapshot.restoring.place import Place

ID = "c0ffee"
OWNER = (4194000, 77)
MARK = scratch_files.mark_of(OWNER)
PLACE = Place("/libpod_parent/libpod-c0ffee", (":/user.slice",), "0:99", "/")


@pytest.fixture
def start() -> Iterator[Callable[..., int]]:
    """Starts processes that sleep, under a name and with variables; they are gone afterwards."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(name: str = "sleep", *words: str, **variables: str) -> int:
        command = ["bash", "-c", 'exec -a "$0" sleep 600', name]
        if words:
            command = [sys.executable, "-c", "import time; time.sleep(600)", *words]
        child = subprocess.Popen(command, env={**os.environ, **variables})
        running.append(child)
        if not words:
            wait_for(lambda: proc.command(child.pid)[:1] == (name,), "its name")
        return child.pid

    yield begin
    for child in running:
        child.kill()
        child.wait()


def marked(kind: str = "abc.conf") -> dict[str, str]:
    return {scratch_files.CONFIG: f"{scratch()}/gpusnap-criu-{MARK}-{kind}"}


def title(mark: str) -> str:
    return f"criu: restore --rpc -D {scratch()}/gpusnap-images-{mark}-abcdefgh"


class Processes:
    """What /proc says of some that are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, tuple[proc.Process, dict[str, str], proc.Mount, int]] = {}
        monkeypatch.setattr(proc, "pids", lambda: iter(self.found))
        monkeypatch.setattr(proc, "process", lambda pid: self.found[pid][0] if pid in self.found else None)
        monkeypatch.setattr(proc, "cgroups", lambda pid: self.found[pid][1])
        monkeypatch.setattr(proc, "mounts", lambda pid: (self.found[pid][2],))
        monkeypatch.setattr(proc, "parents", lambda: {pid: each[3] for pid, each in self.found.items()})
        monkeypatch.setattr(proc, "namespace", lambda pid, _: "theirs" if pid in self.found else "ours")

    def add(self, pid: int, **changed: Any) -> None:
        process = proc.Process(pid, (pid,), "python3", ("python3",), changed.get("start", 100))
        root = proc.Mount(changed.get("device", "0:99"), changed.get("root", "/"), "/", (), (), "overlay")
        cgroups = {"": changed.get("group", PLACE.group), "pids": "/"}
        self.found[pid] = (process, cgroups, root, changed.get("parent", 1))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def found() -> list[int]:
    return [each.pid for each in incomplete_restore.find(PLACE, 100)]


def test_what_is_found(made_up: Processes) -> None:
    """In its own cgroup or below it, and where CRIU leaves what it restores; with what descends from that."""
    made_up.add(11)
    made_up.add(12, group=PLACE.group + "/container")
    made_up.add(13, group="/user.slice")
    made_up.add(14, device="0:7", parent=11)
    assert found() == [11, 12, 13, 14]


@pytest.mark.parametrize(
    "changed",
    [
        {"start": 99},
        {"group": "/libpod_parent/libpod-c0ffee0"},
        {"group": "/libpod_parent"},
        {"group": "/user.slice/other"},
        {"device": "0:98"},
        {"root": "/other"},
        {"device": "0:7", "parent": 11, "group": "/else"},
    ],
    ids=[
        "older",
        "another's name",
        "in its path points",
        "beside us",
        "another root",
        "within it",
        "a child that left",
    ],
)
def test_what_is_not(made_up: Processes, changed: dict[str, Any]) -> None:
    """Anything that is not all of that is somebody else's."""
    made_up.add(11)
    made_up.add(20, **changed)
    assert found() == [11]


def test_without_a_root(made_up: Processes) -> None:
    """Where nobody knows its root, nothing is found by its cgroup alone."""
    made_up.add(11, device="")
    assert incomplete_restore.find(replace(PLACE, device=""), 100) == ()


def test_what_is_marked_is_ended(start: Callable[..., int]) -> None:
    """CRIU by its title, which it writes over its environment; nobody else's."""
    by_title, by_environment = start(title(MARK)), start("criu", **marked())
    others = [
        start(title(scratch_files.mark_of((4194000, 78)))),
        start("sleep"),
        start(title(MARK).replace("criu: ", "less: ")),
    ]
    # A program that does not know the mark, and names all that it may be.
    others.append(
        start(title(scratch_files.mark_of((4194000, 76))) + title(MARK).removeprefix("criu: restore --rpc"))
    )
    assert set(incomplete_restore.kill_restored(None, OWNER, ID)) == {by_title, by_environment}
    assert not proc.is_running(by_title)
    assert not proc.is_running(by_environment)
    assert all(map(proc.is_running, others))
    assert incomplete_restore.kill_restored(None, OWNER, ID) == ()


def test_the_runtime_is_left_to_end(start: Callable[..., int]) -> None:
    """While it is there so is its CRIU; without it nobody waits for CRIU."""
    runtime, criu = start("crun", "restore", ID, **marked()), start(title(MARK))
    assert incomplete_restore.kill_restored(None, OWNER, ID) == ()
    assert proc.is_running(criu)
    os.kill(runtime, 9)
    wait_for(lambda: not proc.is_running(runtime), "its end")
    incomplete_restore.let_runtime_end(OWNER, ID)
    assert incomplete_restore.kill_restored(None, OWNER, ID) == (criu,)


def test_one_that_does_not_end(start: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end."""
    criu = start(title(MARK))
    monkeypatch.setattr(incomplete_restore, "_PATIENCE", 0.05)
    monkeypatch.setattr(pidfd, "send", lambda pid, number: None)
    with pytest.raises(GpusnapError, match=f"were killed but do not exit: {criu}"):
        incomplete_restore.kill_restored(None, OWNER, ID)


_UNMOUNT = """\
import os, subprocess, sys
from gpusnap.runtime_shim.snapshot.recovery import incomplete_restore
from gpusnap.runtime_shim.process import proc
place, rootfs = sys.argv[1:]
renamed = os.path.join(os.path.dirname(place), ".state")
for folder in (place, place, renamed):
    subprocess.run(["mount", "--rbind", rootfs, folder + "/criu-root"], check=True)
for folder in (place, renamed):
    os.mkdir(folder + "/.criu.cgyard.abc")
    subprocess.run(["mount", "-t", "tmpfs", "none", folder + "/.criu.cgyard.abc"], check=True)
incomplete_restore.unmount_root([place, place + "/none"])
incomplete_restore.unmount_yards(place)
assert not any("criu" in mount.destination for mount in proc.mounts("self"))
assert any(mount.destination == rootfs + "/below" for mount in proc.mounts("self")), "it went as well"
"""


@pytest.mark.skipif(not unshare_works("--mount"), reason="may make no mount namespace")
def test_what_is_left_mounted(tmp_path: Path) -> None:
    """Nothing but that mount goes: runc's `delete` would remove all files that it shows.

    It also goes from a directory that containerd has renamed to remove it, and so does that directory.
    """
    rootfs, state, renamed = tmp_path / "rootfs", tmp_path / "state", tmp_path / ".state"
    for folder in (rootfs / "below", state / "criu-root", renamed / "criu-root"):
        folder.mkdir(parents=True)
    (rootfs / "precious").touch()
    script = 'mount -t tmpfs none "$2/below" && mount --make-rshared / && exec "$0" -c "$3" "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, state, rootfs, _UNMOUNT],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[5])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (rootfs / "precious").exists()
    assert list(state.iterdir()) == []
    assert not renamed.exists()
