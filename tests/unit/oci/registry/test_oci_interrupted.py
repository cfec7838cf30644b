"""A signal while a registry does not answer: nobody sits out the minutes that it has for that."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import urllib3
from fakes import Signalled, joining, signals_raise, wait_for

from gpusnap.oci.base.errors import Cancelled
from gpusnap.oci.layout.documents import Descriptor, Manifest
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry import client as client_module
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.copy import push
from gpusnap.oci.registry.repository import Repository

THREADS = 4
# A registry has 60 s for an answer and 30 s for a connection, in each attempt.
SOON = 20.0


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def root(layout: Layout) -> Descriptor:
    layers = tuple(layout.add_blob(random.Random(at).randbytes(1000)) for at in range(THREADS))
    return layout.add_manifest(Manifest(layers[0], layers, "a/b"))


@pytest.fixture
def silent() -> Iterator[tuple[str, list[socket.socket]]]:
    """The host and port of a server that takes connections and says nothing; the connections."""
    found: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    found.append(listening.accept()[0])

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", found
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    for each in found:
        each.close()


@contextmanager
def signalled(ready: Callable[[], bool]) -> Iterator[None]:
    """Send this thread a signal as soon as it waits for workers and `ready`; its exception ends the block."""
    main = threading.get_ident()

    def send() -> None:
        wait_for(lambda: ready() and joining(main), "the wait for the registry")
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=send, daemon=True)
    begun = time.monotonic()
    # Where it comes, a collection of garbage may call an object's __del__.
    with signals_raise((signal.SIGUSR1,)):
        try:
            thread.start()
            with pytest.raises(Signalled):
                yield
            assert time.monotonic() - begun < SOON
        finally:
            thread.join(60)


def test_while_an_answer_is_waited_for(
    layout: Layout, root: Descriptor, silent: tuple[str, list[socket.socket]]
) -> None:
    """All workers leave, and nothing more is asked."""
    host, connections = silent
    with Repository(Reference(host, "team/app"), Client(host, plain_http=True)) as repository:
        with signalled(lambda: len(connections) == THREADS):
            push(root, layout, repository, threads=THREADS)
        with pytest.raises(Cancelled):
            repository.resolve("v1")
    assert len(connections) == THREADS


def test_while_a_connection_is_made(
    layout: Layout, root: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ends a question for the address of a host; it is left alone, and what comes of it is closed."""
    over, waiting = threading.Event(), list[int]()
    one, other = socket.socketpair()

    def made(_: object) -> socket.socket:
        waiting.append(1)
        over.wait(2 * SOON)
        return one

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", made)
    with (
        other,
        Repository(Reference("r.example", "team/app"), Client("r.example", plain_http=True)) as repository,
    ):
        with signalled(lambda: len(waiting) == THREADS):
            push(root, layout, repository, threads=THREADS)
        over.set()
        other.settimeout(60)
        assert other.recv(1) == b""


def test_between_two_attempts(layout: Layout, root: Descriptor, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait for a registry that is away is gone through, and no attempt follows."""
    waits: list[float] = []
    pause = threading.Event()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        pause.wait(seconds)

    def refused(_: object) -> socket.socket:
        raise ConnectionRefusedError

    monkeypatch.setattr(urllib3.connection.HTTPConnection, "_new_conn", refused)
    monkeypatch.setattr(client_module, "_FIRST", 30.0)
    reference = Reference("r.example", "team/app")
    with Repository(
        reference, Client(reference.registry, plain_http=True, attempts=99, wait=wait)
    ) as repository:
        monkeypatch.setattr(client_module, "_STRANGE", 99)
        with signalled(lambda: len(waits) >= THREADS):
            push(root, layout, repository, threads=THREADS)
