"""The image directory of a checkpoint: brought to disk, and rid of what an earlier dump left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from synced import Synced

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu.images import directory as image


@pytest.mark.parametrize("call", ["fsync", "open_below"])
def test_only_what_was_lost_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An fsync that failed may have lost pages for good; where no file could be opened, nothing is lost."""
    (tmp_path / "pages-1.img").write_bytes(b"x")
    noted: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else image, call, fail)
        with pytest.raises(ImageError, match="cannot be flushed to disk: Too many open files"):
            image.sync(str(tmp_path), failed=noted.append)
    assert noted == (["Too many open files"] if call == "fsync" else [])
    image.sync(str(tmp_path), failed=noted.append)


def test_a_new_directory_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own name, not only with those of the images in it."""
    disk = Synced(tmp_path, monkeypatch)
    path = tmp_path / "checkpoint"
    image.make(str(path))
    (path / "pages-1.img").write_bytes(b"x")
    image.sync(str(path), failed=lambda _: None)
    assert disk.has(path / "pages-1.img")


def write(path: Path, *, at: int) -> None:
    path.write_bytes(b"x")
    os.utime(path, ns=(at, at))


@pytest.mark.parametrize("clock", [10, 1], ids=["to continue", "was put back"])
def test_drop_earlier(tmp_path: Path, clock: int) -> None:
    """CRIU's images that a dump did not write are removed; other files, links and directories stay."""
    gone = ["mm-7.img", "pages-3.img", "pagemap-7.img", "core-7.img"]
    new = ["mm-8.img", "pages-4.img", "inventory.img"]
    others = ["disk.img", "pages-old.img", "dump.log", "stats-dump"]
    for name in (*gone, *others, "mm-8.img"):
        write(tmp_path / name, at=5)
    (tmp_path / "parent").symlink_to("../first")
    (tmp_path / "gpusnap").mkdir()
    there = image.note_earlier(str(tmp_path))
    (tmp_path / gone.pop()).unlink()
    for name in new:
        write(tmp_path / name, at=clock)
    image.drop_earlier(str(tmp_path), there)
    assert sorted(os.listdir(tmp_path)) == sorted([*new, *others, "parent", "gpusnap"])


@pytest.mark.parametrize("clock", [10, 1], ids=["to continue", "was put back"])
def test_clean(tmp_path: Path, clock: int) -> None:
    """What a failed dump wrote is removed, whatever the clock says; what was there stays, and so do logs."""
    earlier = ["disk.img", "mm-7.img"]
    for name in (*earlier, "descriptors.json", "inventory.img"):
        write(tmp_path / name, at=5)
    there = image.EarlierImages.from_json(json.loads(json.dumps(asdict(image.note_earlier(str(tmp_path))))))
    for name in ("descriptors.json", "inventory.img", "mm-8.img", "dump.log"):
        (tmp_path / name).unlink(missing_ok=True)
        write(tmp_path / name, at=clock)
    assert image.clean(str(tmp_path), there)
    assert sorted(os.listdir(tmp_path)) == sorted([*earlier, "dump.log"])


def test_a_copy_is_not_cleaned(tmp_path: Path) -> None:
    """Nobody can tell which of its images were there before."""
    (tmp_path / "first").mkdir()
    write(tmp_path / "first/mm-7.img", at=5)
    there = image.note_earlier(str(tmp_path / "first"))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    assert not image.clean(str(tmp_path / "second"), there)
    assert os.listdir(tmp_path / "second") == ["mm-7.img"]


def test_a_file_system_that_was_mounted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Btrfs, NFS and others then have another device number."""
    there = image.note_earlier(str(tmp_path))
    write(tmp_path / "mm-8.img", at=5)
    stat = os.stat

    def with_another_number(path: Any, **more: Any) -> os.stat_result:
        found = stat(path, **more)
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

    monkeypatch.setattr(os, "stat", with_another_number)
    assert image.clean(str(tmp_path), there)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "document", [None, {}, {"folder": [1], "versions": {}}, {"folder": [1, 2], "versions": 3}]
)
def test_no_list_of_images(document: Any) -> None:
    with pytest.raises(ValueError, match=r"images|unpack"):
        image.EarlierImages.from_json(document)
