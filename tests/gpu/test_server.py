"""A model server on a real GPU, whose clients open 100 new connections a second; four stay open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from realhost import Machine, Program, Workload, needs_network_lock
from servers import PORT, Clients, Server
from test_containers import needs

RUNNING, RESTORED = 25, 5
MODEL = Workload.python("torch_server.py", "torch", 1024, "--port", str(PORT))


def begin(machine: Machine) -> Server:
    needs(MODEL)
    return Server(Program.begin("w", MODEL, machine.options()), "127.0.0.1", "host")


@contextmanager
def checkpointed(
    machine: Machine, times: int, *, leave_running: bool, established: bool
) -> Iterator[Clients]:
    """A server that was checkpointed so often, and its clients, which are still at work."""
    if established:
        needs_network_lock()
    server = begin(machine)
    with Clients(server.address, server.port) as clients:
        server.wait_for_answers(clients)
        for _ in range(times):
            server.round(leave_running=leave_running, established=established)
            server.wait_for_answers(clients)
            if not leave_running:
                server.wait_for_held(clients)
        yield clients
    server.container.goes_on()


@pytest.mark.parametrize("established", [False, True], ids=["closed", "established"])
def test_it_runs_on(real: str, machine: Machine, established: bool) -> None:
    """No client loses anything while the server is checkpointed, again and again."""
    with checkpointed(machine, RUNNING, leave_running=True, established=established) as clients:
        assert set(clients.short) == {"ok"}
        assert set(clients.held) == {"answers"}


@pytest.mark.parametrize("established", [False, True], ids=["closed", "established"])
def test_it_comes_back(real: str, machine: Machine, established: bool) -> None:
    """It answers after each restore; connections that stayed open are kept only where it was asked for."""
    with checkpointed(machine, RESTORED, leave_running=False, established=established) as clients:
        if established:
            assert set(clients.held) == {"answers"}
