"""How the processes of a container are recognized before its runtime knows it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.restoring import place as restore_place
from gpusnap.runtime_shim.snapshot.restoring.place import Place

ID = "c0ffee"
PLACE = Place("/libpod_parent/libpod-c0ffee", (":/user.slice",), "0:99", "/")


@pytest.mark.parametrize(
    ("path", "group"),
    [
        ("/libpod_parent/libpod-c0ffee", "/libpod_parent/libpod-c0ffee"),
        ("machine.slice:libpod:c0ffee", "libpod-c0ffee.scope"),
        ("system.slice::c0ffee", "c0ffee.scope"),
        ("default/c0ffee", "c0ffee"),
        ("", ID),
        (None, ID),
    ],
)
def test_its_cgroup(path: str | None, group: str) -> None:
    """As linux.cgroupsPath says it, in each of its forms."""
    assert Place.from_config({"linux": {"cgroupsPath": path}}, "/", ID).group == group


def test_its_root(tmp_path: Path) -> None:
    """The file system of its root, and what of it; a container with the host's root has none."""
    (tmp_path / "rootfs").mkdir()
    place = Place.from_config({"root": {"path": "rootfs"}}, str(tmp_path), ID)
    device = os.stat(tmp_path).st_dev
    assert place.device == f"{os.major(device)}:{os.minor(device)}"
    assert place.root.endswith("/rootfs")
    assert Place.from_config({"root": {"path": "/"}}, str(tmp_path), ID).device == ""
    assert Place.from_config({}, str(tmp_path), ID).device == ""


@pytest.mark.parametrize(
    ("upper", "fsid", "same"),
    [("/u", 7, True), ("/v", 7, False), ("/u", 8, False), ("", 7, False), ("/u", 0, True)],
)
def test_a_device_number_that_is_used_again(
    monkeypatch: pytest.MonkeyPatch, upper: str, fsid: int, same: bool
) -> None:
    """The next overlay gets the number of one that was just unmounted; an older journal says no more."""
    root = proc.Mount("0:99", "/", "/", (), (), "overlay", upper)
    monkeypatch.setattr(proc, "mounts", lambda pid: (root,))
    monkeypatch.setattr(proc, "namespace", lambda pid, kind: str(pid == os.getpid()))
    monkeypatch.setattr(restore_place, "_read_fsid", lambda path: fsid)
    monkeypatch.setattr(question_process, "ask", lambda pid, what, function, *words: function(*words))
    assert replace(PLACE, upper="/u", fsid=7).is_root_of(1) is same
    assert PLACE.is_root_of(1)
    older = {"group": "g", "beside": [], "device": "0:99", "root": "/"}
    assert Place.from_json(older) == Place("g", (), "0:99", "/")
    assert Place.from_json({**older, "upper": "/u", "fsid": 7}) == Place("g", (), "0:99", "/", "/u", 7)


def test_what_is_known_of_a_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The upper directory is that of the overlay, and the number is the file system's own."""
    mounts = (proc.Mount("0:99", "/", str(tmp_path), (), (), "overlay", "/u"),)
    monkeypatch.setattr(proc, "mounts", lambda pid: mounts)
    place = Place.from_config({"root": {"path": "."}}, str(tmp_path), ID)
    assert (place.device, place.root, place.upper) == ("0:99", "/", "/u")
    assert place.fsid == os.statvfs(tmp_path).f_fsid
