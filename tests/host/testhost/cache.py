"""Where trees live.

    $GPUSNAP_CACHE/testhost/        /var/cache/gpusnap without the variable
        .lock                       held while a tree is built, looked up or removed
        <digest>/                   a complete tree: of one recipe, and one suite
        building-<random>/          one that is being made, or the wreck of one
        mount/                      an empty directory; each run mounts its root there, in its own namespace
        runs/                       see runs.py

A tree is made under another name and renamed when it is complete. A run holds a shared lock on the tree's
directory, so that a build that clears older trees leaves those in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

from .report import say
from .runs import locked

STAGING = "building-"


class Cache:
    """The cache directory; see the module's description."""

    def __init__(self, top: Path) -> None:
        self.top = top / "testhost"
        self.mount_point = self.top / "mount"
        self.runs = self.top / "runs"

    @classmethod
    def default(cls) -> Cache:
        return cls(Path(os.environ.get("GPUSNAP_CACHE") or "/var/cache/gpusnap").absolute())

    def prepare(self) -> None:
        self.mount_point.mkdir(parents=True, exist_ok=True)
        self.runs.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the trees."""
        self.prepare()
        with locked(self.top / ".lock"):
            yield

    def tree(self, digest: str) -> Path:
        return self.top / digest

    def use(self, digest: str) -> int:
        """A descriptor that keeps the tree from being removed as long as it, or a fork's copy, is open.

        Call it with the cache locked.
        """
        fd = os.open(self.tree(digest), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd

    def clear_wrecks(self) -> None:
        """Remove what interrupted builds left. Call it with the cache locked."""
        for wreck in self.top.glob(STAGING + "*"):
            say(f"removing the unfinished tree {wreck}")
            shutil.rmtree(wreck)

    def prune(self, keep: Collection[str] = ()) -> list[Path]:
        """Remove all trees but `keep`, and return those in use. Call it with the cache locked."""
        busy = []
        for tree in self.top.iterdir():
            if tree.name in ("mount", "runs", *keep) or not tree.is_dir():
                continue
            if not _remove_unused(tree):
                busy.append(tree)
        return busy

    def remove(self) -> None:
        """Remove the directory itself. Call it with the cache locked, when nothing is in use."""
        shutil.rmtree(self.top)


def _remove_unused(tree: Path) -> bool:
    fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    say(f"removing the older tree {tree}")
    # Under another name first: half a tree must not look like one.
    wreck = tree.with_name(STAGING + tree.name)
    tree.rename(wreck)
    shutil.rmtree(wreck)
    return True
