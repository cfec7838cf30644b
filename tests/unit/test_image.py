"""The image directory of a checkpoint: what of it an earlier dump left, and what is not ours."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime_shim import image


def write(path: Path, *, at: int) -> None:
    path.write_bytes(b"x")
    os.utime(path, ns=(at, at))


@pytest.mark.parametrize("clock", [10, 1], ids=["goes on", "was put back"])
def test_drop_earlier(tmp_path: Path, clock: int) -> None:
    """CRIU's images that a dump did not write are removed; other files, links and directories stay."""
    gone = ["mm-7.img", "pages-3.img", "pagemap-7.img", "core-7.img"]
    new = ["mm-8.img", "pages-4.img", "inventory.img"]
    others = ["disk.img", "pages-old.img", "dump.log", "stats-dump"]
    for name in (*gone, *others, "mm-8.img"):
        write(tmp_path / name, at=5)
    (tmp_path / "parent").symlink_to("../first")
    (tmp_path / "gpusnap").mkdir()
    there = image.earlier(str(tmp_path))
    (tmp_path / gone.pop()).unlink()
    for name in new:
        write(tmp_path / name, at=clock)
    image.drop_earlier(str(tmp_path), there)
    assert sorted(os.listdir(tmp_path)) == sorted([*new, *others, "parent", "gpusnap"])
