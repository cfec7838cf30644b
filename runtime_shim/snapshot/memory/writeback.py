"""Starts to write blobs to disk while others are still made, so the fsync at the end waits for little.

By itself, the kernel begins to write only when a tenth of the memory is dirty or half a minute has passed
(Documentation/admin-guide/sysctl/vm.rst). So the disk would be idle when its speed decides how long the
checkpoint takes.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from contextlib import suppress

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.layout.layout import Layout

_THREADS = 4
# linux/fs.h, SYNC_FILE_RANGE_WRITE
_WRITE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Flusher:
    """Threads that have the kernel write blobs. What fails here the fsync will tell."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(_THREADS):
            thread = threading.Thread(target=self._work, daemon=True)
            with suppress(RuntimeError):  # none is to be had: the fsync writes what is left
                thread.start()
                self._threads.append(thread)

    def add(self, digest: str) -> None:
        """A blob is whole. From any thread, at once."""
        self._waiting.put(digest)

    def close(self) -> None:
        """Return when all has been handed to the disk. May be called twice."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _work(self) -> None:
        while (digest := self._waiting.get()) is not None:
            try:
                with self._layout.open_blob(digest) as file:
                    _libc.sync_file_range(file.fileno(), 0, 0, _WRITE)
            except (OciError, OSError):
                pass
