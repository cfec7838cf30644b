"""What the machine can do with as many bytes: the link to the GPU, the disk, sha256.

A checkpoint moves the bytes over the link and to the disk, and a restore moves them back. It cannot take less
time than these two, unless they overlap or it omits bytes.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chunks import in_threads, seconds

from gpusnap.oci.chunks.buffers import Memory
from gpusnap.oci.layout.digests import digest_of

__all__ = ["Floor", "measure"]

MIB, GIB = 1 << 20, 1 << 30
FILES = 8  # at once
_SAMPLE = 256 * MIB  # for what does not depend on the size
_PIECE = 8 * MIB  # of one write or read
_ROOM = 512 * MIB  # of the disk that stays free


@dataclass(frozen=True, slots=True)
class Floor:
    """GiB/s; None if it could not be measured, and `notes` say why."""

    size: int
    """Bytes written and read."""
    to_host: float | None
    to_device: float | None
    sha256: float
    """With one core."""
    write: float | None = None
    """Through the page cache, until fsync has returned."""
    read: float | None = None
    """Of what was just written: from the page cache."""
    direct_write: float | None = None
    direct_read: float | None = None
    notes: tuple[str, ...] = ()

    def checkpoint(self, size: int) -> float | None:
        """Return seconds for so many bytes over the link and durably to the disk, the faster way."""
        written = max((rate for rate in (self.write, self.direct_write) if rate), default=None)
        return _seconds(size, self.to_host, written)

    def restore(self, size: int) -> float | None:
        """Return seconds for so many bytes from the page cache, and over the link."""
        return _seconds(size, self.read, self.to_device)


def _seconds(size: int, *rates: float | None) -> float | None:
    known = [rate for rate in rates if rate]
    return sum(size / GIB / rate for rate in known) if len(known) == len(rates) else None


def measure(folder: Path, size: int, *, software: bool) -> Floor:
    """Measure everything, in an empty folder on the disk in question; `software`: there is no link."""
    sample = Memory(_SAMPLE)
    for at in range(0, _SAMPLE, _PIECE):
        sample.view[at : at + _PIECE] = os.urandom(_PIECE)
    hashed = _SAMPLE / GIB / seconds(lambda: digest_of(sample.view))
    notes: list[str] = []
    link = _memcpy(sample) if software else _link(notes)
    ways = link.get("to_host"), link.get("to_device")
    return Floor(size, *ways, hashed, *_disk(folder, sample.view[:_PIECE], size, notes), tuple(notes))


def _memcpy(sample: Memory) -> dict[str, float]:
    """One thread's, where the GPU is one in software and its memory this machine's."""
    back = Memory(_SAMPLE)
    here, there = (ctypes.addressof(ctypes.c_char.from_buffer(each.view)) for each in (sample, back))
    times = [seconds(lambda: ctypes.memmove(there, here, _SAMPLE)) for _ in range(2)]
    rate = _SAMPLE / GIB / times[-1]  # the first one faults the pages in
    return {"to_host": rate, "to_device": rate}


def _link(notes: list[str]) -> dict[str, float]:
    line = [sys.executable, str(Path(__file__).with_name("link.py"))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        notes.append(f"the link could not be measured: {done.stderr.strip().splitlines()[-1:]}")
        return {}
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _disk(
    folder: Path, piece: memoryview, size: int, notes: list[str]
) -> tuple[float | None, float | None, float | None, float | None]:
    """Write and read through the page cache, then directly."""
    found: list[float | None] = []
    for flag in (0, os.O_DIRECT):
        room = os.statvfs(folder)
        try:
            if room.f_bavail * room.f_frsize < size + _ROOM:
                raise OSError(f"less than {(size + _ROOM) / GIB:.1f} GiB are free")
            found += _written_and_read(folder, piece, size, flag)
        except OSError as error:
            what = "directly" if flag else "through the page cache"
            notes.append(f"{folder.parent} could not be written {what}: {error}")
            found += [None, None]
        finally:
            for path in folder.iterdir():
                path.unlink()
    cached_write, cached_read, write, read = found
    return cached_write, cached_read, write, read


def _written_and_read(folder: Path, piece: memoryview, size: int, flag: int) -> list[float]:
    """GiB/s of files written at once and read back; `piece` is page-aligned, as O_DIRECT wants it."""
    share = max(size // FILES // len(piece), 1) * len(piece)
    failed: list[OSError] = []

    def put(descriptor: int, length: int) -> None:
        for _ in range(0, length, len(piece)):
            if os.write(descriptor, piece) != len(piece):
                raise OSError(f"{folder} is full")
        os.fsync(descriptor)

    def get(descriptor: int, length: int) -> None:
        back = Memory(len(piece))
        for offset in range(0, length, len(piece)):
            os.preadv(descriptor, [back.view], offset)

    def rate(action: Callable[[int, int], None], mode: int) -> float:
        def one(at: int, length: int) -> None:
            try:
                descriptor = os.open(folder / str(at), mode | flag, 0o600)
                try:
                    action(descriptor, length)
                finally:
                    os.close(descriptor)
            except OSError as error:  # a thread's own would be lost
                failed.append(error)

        took = in_threads(FILES, share * FILES, share, one)
        if failed:
            raise failed[0]
        return share * FILES / GIB / took

    return [rate(put, os.O_WRONLY | os.O_CREAT), rate(get, os.O_RDONLY)]
