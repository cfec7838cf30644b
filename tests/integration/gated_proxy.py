"""A proxy in front of a registry that holds blobs back until they may come, or that is gone."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection

from faulty_proxy import FaultyProxy

__all__ = ["GatedProxy"]

_DEADLINE = 120.0
# Seconds without a request after which all that may come has come.
_QUIET = 0.5
_BLOB = re.compile(rb"^GET \S+/blobs/(sha256:[0-9a-f]{64}) ")


class GatedProxy(FaultyProxy):
    """The proxy, while the context lasts. All blobs come until `close` names some."""

    def __init__(self, upstream: str) -> None:
        super().__init__(upstream)
        self._closed: set[str] = set()
        self._gone = False
        self._asked = 0.0
        self._changed = threading.Condition()
        self.waiting: set[str] = set()
        """Blobs that somebody asks for and does not get."""

    def __exit__(self, *error: object) -> None:
        self.open()
        super().__exit__(*error)

    def close(self, digests: Collection[str]) -> None:
        """Hold these back."""
        self._closed |= set(digests)

    def open(self) -> None:
        """Let all come."""
        self._change(gone=False)

    def leave(self) -> None:
        """Be a registry that has gone: every connection is closed without an answer."""
        self._change(gone=True)

    def _change(self, *, gone: bool) -> None:
        with self._changed:
            self._closed.clear()
            self._gone = gone
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether somebody waits for what is held back, and nothing has come for a while."""
        return bool(self.waiting) and time.monotonic() - self._asked > _QUIET

    def lets_through(self, head: bytes) -> bool:
        match = _BLOB.match(head)
        digest = match[1].decode() if match else ""
        self._asked = time.monotonic()
        with self._changed:
            if digest in self._closed:
                self.waiting.add(digest)
            self._changed.wait_for(lambda: digest not in self._closed, _DEADLINE)
            return not self._gone
