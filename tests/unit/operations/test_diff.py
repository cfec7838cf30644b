"""The files of a checkpoint beside its chunks: the same ones, wherever it is kept."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import keep, noise, tar_of

from gpusnap.oci.store.store import Store
from gpusnap.operations.diff import Changed, File, compare, read
from gpusnap.operations.open import open_checkpoint

RECORDS: dict[str, bytes | str | None] = {
    "checkpoint": None,
    "checkpoint/inventory.img": b"inventory",
    "checkpoint/empty.img": b"",
    "config.dump": b"{}",
    "artifacts/link": "../config.dump",
}
ROOTFS: dict[str, bytes | str | None] = {"etc": None, "etc/motd": b"hello", "etc/mtab": "/proc/mounts"}


def facts(files: dict[str, bytes | str | None]) -> dict[str, File]:
    """What `read` says of such files."""
    found = {}
    for name, content in files.items():
        if content is None:
            found[name] = File("folder", 0, "")
        elif isinstance(content, str):
            found[name] = File("link", 0, content)
        else:
            found[name] = File("file", len(content), f"sha256:{hashlib.sha256(content).hexdigest()}")
    return found


def unpacked(folder: Path, files: dict[str, bytes | str | None]) -> Path:
    """Those files in a folder."""
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    return folder


def test_read_wherever_it_is(tmp_path: Path) -> None:
    """In a store, an archive, and a folder that one was unpacked to: gpusnap's own folder is left out."""
    keep(Store(tmp_path / "store"), noise(1, 1), names=("w",), records=RECORDS, rootfs=ROOTFS)
    rootfs = tar_of(ROOTFS)
    whole = {**RECORDS, "checkpoint/gpusnap": None, "checkpoint/gpusnap/x": b"own", "rootfs-diff.tar": rootfs}
    (tmp_path / "w.tar").write_bytes(tar_of(whole))
    folder = unpacked(tmp_path / "unpacked", {k: v for k, v in whole.items() if "gpusnap" not in k})
    for word in (f"oci:{tmp_path}/store:w", f"{tmp_path}/w.tar", str(folder)):
        with open_checkpoint(word) as checkpoint:
            found = read(checkpoint)
        # A folder has its own folders, which a tar need not have.
        records = {name: file for name, file in found.records.items() if name != "artifacts"}
        assert records == facts(RECORDS), word
        assert found.rootfs == facts(ROOTFS), word


def test_read_images(tmp_path: Path) -> None:
    """A directory of CRIU images has the names that these have in an archive."""
    folder = unpacked(tmp_path / "images", {"inventory.img": b"inventory"})
    with open_checkpoint(str(folder)) as checkpoint:
        assert {*read(checkpoint).records} == {"checkpoint/inventory.img"}


def test_progress(tmp_path: Path) -> None:
    """Every byte of content is counted."""
    keep(Store(tmp_path / "store"), names=("w",), records={"a": bytes(3 << 20), "b": b"1"}, gpu=False)
    seen: list[int] = []
    with open_checkpoint(f"oci:{tmp_path}/store:w") as checkpoint:
        read(checkpoint, seen.append)
    assert sum(seen) == (3 << 20) + 1
    assert max(seen) <= 1 << 20


@pytest.mark.parametrize(
    "changed", [File("file", 1, "sha256:x"), File("file", 2, "sha256:y"), File("link", 1, "sha256:x")]
)
def test_compare(changed: File) -> None:
    """By size, content and kind; and what only one of them has."""
    base = File("file", 1, "sha256:x")
    found = compare({"a": base, "b": base, "c": base}, {"b": changed, "c": base, "d": base})
    assert (found.only_a, found.only_b) == ((("a", base),), (("d", base),))
    if changed == base:
        assert (found.same, found.changed) == (2, ())
    else:
        assert (found.same, found.changed) == (1, (Changed("b", base, replace(changed)),))
