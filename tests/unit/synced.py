"""What is on disk: the names that a directory had at its last fsync(2), and files since theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Synced:
    """Watches fsync(2) from now on; the names that are there already are on disk."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._top = top
        self._names: dict[Path, set[str]] = {}
        for folder in (top, *(each for each in top.rglob("*") if each.is_dir())):
            self._names[folder] = set(os.listdir(folder))
        self._files: set[int] = set()
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_dir():
                self._names[path] = set(os.listdir(path))
            self._files.add(os.fstat(descriptor).st_ino)

        monkeypatch.setattr(os, "fsync", fsync)

    def has_file(self, path: Path | str) -> bool:
        """Whether it leaves that file with the content that it had at its fsync."""
        return self.has(path) and os.stat(path).st_ino in self._files

    def has(self, path: Path | str) -> bool:
        """Whether a loss of power now leaves that name, and those of all directories above it."""
        below = Path(path)
        while below != self._top:
            if below.name not in self._names.get(below.parent, ()):
                return False
            below = below.parent
        return True
