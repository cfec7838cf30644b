"""How long a silent or slow server is waited for: a deadline for each answer, a minimum rate of bytes.

A socket's timeout applies to each call of recv(2), so a server that sends a byte now and then would be waited
for forever. Here one thread checks all exchanges that somebody waits in, and how many bytes the kernel has
received and sent over their connections (TCP_INFO, tcp(7)). Time in which gpusnap does not read does not
count. If an exchange is too slow, its connection is shut down, and the waiting thread gets the reason.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import binary_size

# struct tcp_info (linux/tcp.h): tcpi_bytes_acked and tcpi_bytes_received, since Linux 4.1.
_COUNTERS, _COUNTERS_AT, _INFO_SIZE = struct.Struct("=QQ"), 120, 136
_TICK = 0.5
# Seconds. A registry may take long to answer the end of an upload: it moves the blob, or hashes it again.
_AFTER_UPLOAD = 180.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The requirements for a server."""

    silence: float = 60.0
    """Seconds without enough bytes, and until the head of an answer arrives."""
    speed: int = 1024
    """Bytes per second, on average over that time; 0 requires one byte."""

    def answer(self, method: str) -> float:
        """Return the seconds until the head of the answer to a request of that method must arrive."""
        return self.silence if method in ("GET", "HEAD") else max(self.silence, _AFTER_UPLOAD)


class Watch:
    """One exchange. `why` says what was wrong with it once it was shut down; "" until then."""

    def __init__(self, limits: Limits, method: str) -> None:
        self._limits, self._answer = limits, limits.answer(method)
        self.why = ""
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._waiting = self._head = False
        self._passed = 0.0
        self._bytes = 0

    def attach(self, connection: socket.socket) -> None:
        """Set its connection."""
        with self._lock:
            self._let_go()
            # A descriptor of its own: the other may be closed, and its number reused, at any moment.
            with contextlib.suppress(OSError, ValueError):
                self._socket = socket.socket(fileno=os.dup(connection.fileno()))
            if self.why:
                self._end(self.why)
            self._begin()

    def note_sent(self) -> None:
        """Record that the request was sent; now its answer is waited for."""
        with self._lock:
            self._head = True
            self._begin()

    @contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Record that somebody waits in it while the block runs."""
        with self._lock:
            self._waiting, self._head = True, False
            self._begin()
        _watchdog.add(self)
        try:
            yield
        finally:
            with self._lock:
                self._waiting = False
            _watchdog.remove(self)

    def close(self) -> None:
        """Record that nobody waits in it any more. May be called twice."""
        with self._lock:
            self._let_go()

    def end(self, why: str) -> None:
        """Make the waiting thread stop waiting."""
        with self._lock:
            self._end(why)

    def look(self, seconds: float) -> None:
        """Check it, `seconds` after the last check: shut it down if it is too slow."""
        with self._lock:
            if not self._waiting or self._socket is None or self.why:
                return
            self._passed += seconds
            if self._head:
                if self._passed >= self._answer:
                    self._end(f"it did not respond in {self._answer:g} s")
            elif self._passed >= self._limits.silence:
                come = self._count() - self._bytes
                if come < max(self._limits.speed * self._passed, 1):
                    few = f"only {binary_size(come)} were transferred" if come else "nothing was transferred"
                    self._end(f"{few} in {self._passed:.0f} s")
                self._begin()

    def _begin(self) -> None:
        self._passed, self._bytes = 0.0, self._count()

    def _count(self) -> int:
        """Return the bytes that were received, and that were sent and acknowledged; 0 if not known."""
        if self._socket is None:
            return 0
        with contextlib.suppress(OSError, struct.error):
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_SIZE)
            return sum(_COUNTERS.unpack_from(info, _COUNTERS_AT))
        return 0

    def _end(self, why: str) -> None:
        self.why = why
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _let_go(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Watchdog:
    """The thread that checks; it runs while anybody waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[Watch] = []
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._lock:
            self._watches.append(watch)
            # After a fork there is no such thread in the child.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._look, name="gpusnap-pace", daemon=True)
                self._thread.start()

    def remove(self, watch: Watch) -> None:
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def _look(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_TICK)
            now = time.monotonic()
            # If this process was stopped for longer, the server may not be the cause.
            passed, last = min(now - last, 2 * _TICK), now
            with self._lock:
                watches = list(self._watches)
                if not watches:
                    self._thread = None
                    return
            for each in watches:
                each.look(passed)


_watchdog = _Watchdog()
