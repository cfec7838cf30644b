"""A proxy in front of a registry that drops every Nth connection and answers every Mth request with 500.

Each request has a connection of its own, whatever the client would like. A connection is dropped in one of
three ways, in turn: at once; in the middle of what the client sends; in the middle of the answer. A request
too small to have a middle is passed on, and the answer to it is not: the registry has done what it was asked,
and the client does not know.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

__all__ = ["FaultyProxy"]

_PIECE = 64 << 10
_DEADLINE = 30.0
_MIDDLE = 100_000
_FAILURE = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True)
class _Drop:
    """Where to break a connection: at once, or after so many bytes from the client, or to it."""

    at_once: bool = False
    sent: int = 0
    answered: int = 0


class FaultyProxy:
    """The proxy, while the context lasts. drop: every so many connections; fail: requests; 0: none."""

    def __init__(self, upstream: str, *, drop: int = 0, fail: int = 0) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self._drop, self._fail = drop, fail
        self._lock = threading.Lock()
        self.connections = self.dropped = self.requests = self.failed = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._workers: list[threading.Thread] = []

    @property
    def host(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # A shutdown ends the accept; a close alone would not.
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(_DEADLINE)
        self._server.close()
        for worker in self._workers:
            worker.join(_DEADLINE)

    def lets_through(self, head: bytes) -> bool:
        """Whether a request is passed on, when this returns; else its connection is closed."""
        return True

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            worker = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._workers.append(worker)
            worker.start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(_DEADLINE)
            drop = self._next_drop()
            if drop.at_once:
                _reset(client)
                return
            head, rest = _head(client)
            if not head:
                return
            if not self.lets_through(head):
                return
            if self._next_fails():
                _answer_500(client, head, rest)
                return
            with socket.create_connection(self._upstream, _DEADLINE) as upstream:
                upstream.sendall(_closing(head) + rest)
                if _relay(client, upstream, len(rest), drop):
                    _reset(client)

    def _next_drop(self) -> _Drop:
        with self._lock:
            self.connections += 1
            if not self._drop or self.connections % self._drop:
                return _Drop()
            self.dropped += 1
            return (_Drop(at_once=True), _Drop(sent=_MIDDLE), _Drop(answered=_MIDDLE))[self.dropped % 3]

    def _next_fails(self) -> bool:
        with self._lock:
            self.requests += 1
            fails = bool(self._fail) and self.requests % self._fail == 0
            self.failed += fails
            return fails


def _head(client: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request and what came with it of the body."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(_PIECE)
        if not piece:
            return b"", b""
        data += piece
    head, end, rest = data.partition(b"\r\n\r\n")
    return head + end, rest


def _closing(head: bytes) -> bytes:
    """The head of a request after which the connection is to be closed."""
    lines = [line for line in head.split(b"\r\n")[:-2] if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])


def _answer_500(client: socket.socket, head: bytes, rest: bytes) -> None:
    match = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    left = int(match[1]) - len(rest) if match else 0
    while left > 0 and (piece := client.recv(min(_PIECE, left))):
        left -= len(piece)
    client.sendall(_FAILURE)


def _relay(client: socket.socket, upstream: socket.socket, sent: int, drop: _Drop) -> bool:
    """Pass bytes both ways until the registry has answered; True where the connection is to be broken."""
    kept = b""
    while True:
        ready, _, _ = select.select([client, upstream], [], [], _DEADLINE)
        if not ready:
            return True
        if upstream in ready:
            piece = upstream.recv(_PIECE)
            if drop.answered:
                kept += piece
                if not piece or len(kept) > drop.answered:
                    client.sendall(kept[: len(kept) // 2])
                    return True
            elif not piece:
                return bool(drop.sent)
            elif not drop.sent:
                client.sendall(piece)
        else:
            piece = client.recv(_PIECE)
            if not piece:
                return True
            sent += len(piece)
            upstream.sendall(piece)
            if drop.sent and sent > drop.sent:
                return True


def _reset(client: socket.socket) -> None:
    """Have the connection end with a reset rather than in good order."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
