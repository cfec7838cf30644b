"""The image directory of a checkpoint: what of it an earlier dump left, and what is not ours."""

from __future__ import annotations

import os
from pathlib import Path

from runtime_shim import image


def write(path: Path, *, at: int) -> None:
    path.write_bytes(b"x")
    os.utime(path, ns=(at, at))


def test_drop_earlier(tmp_path: Path) -> None:
    """CRIU's images that are older than the dump are removed; other files, links and directories stay."""
    gone = ["mm-7.img", "pages-3.img", "pagemap-7.img", "core-7.img"]
    new = ["mm-8.img", "pages-4.img", "inventory.img"]
    others = ["disk.img", "pages-old.img", "dump.log", "stats-dump"]
    for name in (*gone, *others):
        write(tmp_path / name, at=5)
    for name in new:
        write(tmp_path / name, at=10)
    (tmp_path / "parent").symlink_to("../first")
    (tmp_path / "gpusnap").mkdir()
    image.drop_earlier(str(tmp_path), before=10)
    assert sorted(os.listdir(tmp_path)) == sorted([*new, *others, "parent", "gpusnap"])
