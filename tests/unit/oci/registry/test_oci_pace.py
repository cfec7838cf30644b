"""Servers that are silent, or so slow that nobody should wait for them, in each part of an exchange."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from gpusnap.oci.base.errors import Unreachable
from gpusnap.oci.registry import http as wire
from gpusnap.oci.registry import pace
from gpusnap.oci.registry.client import Client, Request
from gpusnap.oci.registry.http import Broken, exchange, make_pool
from gpusnap.oci.registry.pace import Limits

LIMITS = Limits(silence=0.4, speed=1000)
# What would be waited for without limits is endless, or 180 s.
PATIENCE = 20.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"

Serve = Callable[[socket.socket, threading.Event], None]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are made more often than these limits need."""
    monkeypatch.setattr(pace, "_TICK", 0.05)
    monkeypatch.setattr(pace, "_AFTER_UPLOAD", 5.0)


@pytest.fixture
def server() -> Iterator[Callable[[Serve], str]]:
    """Starts a server of one function for each connection; its URL."""
    over = threading.Event()
    threads: list[threading.Thread] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def start(serve: Serve) -> str:
        def one(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                serve(connection, over)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threads.append(threading.Thread(target=one, args=(listening.accept()[0],), daemon=True))
                    threads[-1].start()

        threads.append(threading.Thread(target=accept, daemon=True))
        threads[-1].start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}/v2/"

    yield start
    over.set()
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    for each in threads:
        each.join(PATIENCE)


def fetched(url: str, limits: Limits = LIMITS) -> bytes:
    pool = make_pool(limits=limits)
    try:
        with exchange(pool, "GET", url, {}) as answer:
            return b"".join(answer.pieces())
    finally:
        pool.clear()


def says(head: bytes, rest: bytes, every: float) -> Serve:
    """Reads a request, says `head` at once, and of `rest` a byte now and then."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(head)
        for at in range(len(rest)):
            if over.wait(every):
                return
            connection.sendall(rest[at : at + 1])
        over.wait(PATIENCE)

    return serve


@pytest.mark.parametrize(
    ("head", "rest", "why"),
    [
        (b"", b"", "it did not respond in 0.4 s"),
        (b"", HEAD, "it did not respond in 0.4 s"),
        (HEAD, b"", "nothing was transferred"),
        (HEAD + b"x" * 100, bytes(1000), "only .* B were transferred"),
    ],
    ids=["silent", "a slow head", "a silent body", "a slow body"],
)
def test_too_slow(server: Callable[[Serve], str], head: bytes, rest: bytes, why: str) -> None:
    """It is given up in the time that the limits say, and why."""
    began = time.monotonic()
    with pytest.raises(Broken, match=why):
        fetched(server(says(head, rest, 0.05)))
    assert time.monotonic() - began < PATIENCE / 2


def test_slow_enough(server: Callable[[Serve], str]) -> None:
    """What is slow and above the floor goes on for longer than the silence that is allowed."""
    body = b"0123456789" * 12
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    url = server(says(head, body, 0.02))
    assert fetched(url, Limits(silence=2.0, speed=5)) == body


def test_a_slow_reader(server: Callable[[Serve], str]) -> None:
    """The time that we take between two pieces is not the server's."""
    size = 3 << 20

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        connection.sendall(bytes(size))

    pool = make_pool(limits=Limits(silence=1.0, speed=1 << 20))
    waited = threading.Event()
    with exchange(pool, "GET", server(serve), {}) as answer:
        got = 0
        for piece in answer.pieces():
            got += len(piece)
            waited.wait(1.2)
    pool.clear()
    assert got == size


def test_a_body_that_nobody_takes(server: Callable[[Serve], str]) -> None:
    """An upload to a server that reads nothing ends as well."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        over.wait(PATIENCE)

    size = 64 << 20
    pool = make_pool(limits=LIMITS)
    body = (bytes(1 << 20) for _ in range(size >> 20))
    with pytest.raises(Broken, match=r"(was|were) transferred"):
        exchange(pool, "PUT", server(serve), {"Content-Length": str(size)}, body)
    pool.clear()


def test_the_end_of_an_upload(server: Callable[[Serve], str]) -> None:
    """Its answer may take longer than another, and not for ever."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        if not over.wait(0.7):
            connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    pool = make_pool(limits=LIMITS)
    with exchange(pool, "PUT", server(serve), {"Content-Length": "0"}, [b""]) as answer:
        assert answer.status == 201
    pool.clear()


def test_attempts(server: Callable[[Serve], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that never answered is asked twice, and then it is said what was wrong with it."""
    monkeypatch.setattr(
        "gpusnap.oci.registry.client._MET", set()
    )  # an earlier test's server may have had the same port
    url = server(says(b"", b"", 1))
    host = url.split("/")[2]
    client = Client(host, plain_http=True, limits=LIMITS, wait=lambda seconds: None)
    request = Request("GET", url, "the registry does not respond", ())
    with pytest.raises(Unreachable, match=rf"^{host}: it did not respond in .*\(2 attempts\)$"):
        client.persist(lambda: client.ask(request), request.what)
    client.close()


def test_a_connection_that_serves_again(server: Callable[[Serve], str]) -> None:
    """The limits hold for the second request over it, too."""

    def serve(connection: socket.socket, over: threading.Event) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        connection.recv(1 << 16)
        over.wait(PATIENCE)

    url = server(serve)
    pool = make_pool(limits=LIMITS)
    with exchange(pool, "GET", url, {}) as answer:
        assert answer.body(9) == b"ok"
    with pytest.raises(Broken, match="it did not respond"):
        exchange(pool, "GET", url, {})
    pool.clear()


def test_nothing_is_left(server: Callable[[Serve], str]) -> None:
    """No watch, and no descriptor."""
    url = server(says(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"", 1))
    assert fetched(url) == b"ok"
    assert pace._watchdog._watches == []
    assert getattr(wire._current, "watch", None) is None
