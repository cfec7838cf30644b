"""Which file system a path is in: the same after it is mounted again, another one if another is."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusnap.runtime_shim.process import file_system, proc
from gpusnap.runtime_shim.process.file_system import FileSystem, find_file_system


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for mounts, which ends without any."""
    if os.geteuid():
        pytest.skip("a mount needs root")
    path = tmp_path / "place"
    path.mkdir()
    yield path
    while os.path.ismount(path):
        subprocess.run(["umount", path], check=True)


def mount(*words: str | Path) -> None:
    if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
        pytest.skip("needs to mount file systems")


def test_in_ram(place: Path) -> None:
    """A tmpfs in place of another one is not the same, nor is the place without it."""
    here = find_file_system(str(place))
    found = []
    for _ in range(2):
        mount("-t", "tmpfs", "tmpfs", place)
        found.append(find_file_system(str(place / "not" / "there")))
        assert found[-1].mount == str(place)
        assert found[-1].is_same(find_file_system(str(place)))
    assert not found[1].is_same(found[0])
    assert not here.is_same(found[0])


def test_the_same_directory_again(place: Path, tmp_path: Path) -> None:
    """A bind mount of one directory is the same when it is made again; one of another is not."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    found = []
    for name in ("one", "one", "other"):
        mount("--bind", tmp_path / name, place)
        found.append(find_file_system(str(place)))
        subprocess.run(["umount", place], check=True)
    assert found[1].is_same(found[0])
    assert not found[2].is_same(found[0])


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_disk(place: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same on another device; another disk in its place is not."""
    monkeypatch.setattr(file_system, "_BY_UUID", str(tmp_path / "by-uuid"))
    (tmp_path / "by-uuid").mkdir()
    found = []
    for name in ("one", "other", "one"):
        disk = tmp_path / name
        if not disk.exists():
            with open(disk, "wb") as file:
                file.truncate(320 << 20)
            try:
                made = subprocess.run([f"mkfs.{kind}", "-q", disk], capture_output=True, check=False)
            except FileNotFoundError:
                pytest.skip(f"needs mkfs.{kind}")
            assert made.returncode == 0, made.stderr
        mount("-o", "loop", disk, place)
        device = Path(next(each.source for each in proc.mounts("self") if each.destination == str(place)))
        (tmp_path / "by-uuid" / name).symlink_to(device)
        found.append(find_file_system(str(place)))
        subprocess.run(["umount", place], check=True)
        (tmp_path / "by-uuid" / name).unlink()
    assert found[2].is_same(found[0])
    assert not found[1].is_same(found[0])


def test_by_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server is known by its name, and is not asked; an overlay by its upper directory."""

    def find(kind: str, source: str, upper: str = "", device: str = "0:7") -> FileSystem:
        found = proc.Mount(device, "/", "/mnt", (), (), kind, upper, source)
        monkeypatch.setattr(proc, "find_mount", lambda _: found)
        return find_file_system("/mnt/x")

    monkeypatch.setattr(os, "statvfs", lambda _: pytest.fail("it may not answer"))
    assert find("nfs4", "a:/x", device="0:8").is_same(find("nfs4", "a:/x"))
    assert not find("nfs4", "b:/x").is_same(find("nfs4", "a:/x"))
    assert not find("autofs", "a:/x").is_same(find("nfs4", "a:/x"))
    assert find("overlay", "overlay", "/u", device="0:8").is_same(find("overlay", "overlay", "/u"))
    assert not find("overlay", "overlay", "/v").is_same(find("overlay", "overlay", "/u"))


def test_another_number_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UUID on the disk decides, if it is known both times; else the number, as without udev(7)."""

    def find(number: int, uuid: str, root: str = "/") -> FileSystem:
        mount = proc.Mount("8:1", root, "/mnt", (), (), "ext4", "", "/dev/sda1")
        monkeypatch.setattr(proc, "find_mount", lambda _: mount)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_fsid=number))
        monkeypatch.setattr(file_system, "_find_uuid", lambda _: uuid)
        return find_file_system("/mnt/x")

    before = find(1, "a")
    assert find(2, "a").is_same(before)
    assert not find(1, "b").is_same(before)
    assert not find(2, "a", "/other").is_same(before)
    assert find(1, "").is_same(before)
    assert not find(2, "").is_same(before)


def test_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record without an identity names the place alone, and so does a host without /proc."""
    assert FileSystem("/mnt", "ext4 1 /").is_same(FileSystem("/mnt", ""))
    assert not FileSystem("/mnt", "ext4 1 /").is_same(FileSystem("/", ""))
    monkeypatch.setattr(proc, "find_mount", lambda _: None)
    assert find_file_system("/mnt") == FileSystem("/", "")
