"""Servers whose clients open connections all the time, on the host's network and on one of their own.

bench/traffic.py does the same fifty times; docs/reliability.md has its counts.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import shimhost
from servers import Clients, Server
from support import Container, good, manifest, run, sentence, until

from gpusnap.runtime_shim.snapshot.preflight import sockets

ROUNDS = 2
# Python of the host, with its libraries, in a container of busybox.
PYTHON = (
    "PYTHONHOME=/host /host/lib64/ld-linux-x86-64.so.2 --library-path /host/lib/x86_64-linux-gnu "
    "/host/bin/python3"
)


def _lost(clients: Clients) -> dict[str, int]:
    """What became of connections that stayed open, but for their answers."""
    return {what: count for what, count in clients.held.items() if what != "answers"}


@pytest.mark.parametrize("network", ["host", "bridge"])
@pytest.mark.parametrize("established", [False, True], ids=["closed", "established"])
def test_it_runs_on(serving: shimhost.Writer, network: str, established: bool) -> None:
    """No client loses anything while a server is checkpointed that runs on, whatever is in the image."""
    server = Server.start("w", network=network)
    with Clients(server.address, server.port) as clients:
        server.wait_for_answers(clients)
        for _ in range(ROUNDS):
            server.round(leave_running=True, established=established)
            server.wait_for_answers(clients)
            server.wait_for_held(clients)
        assert set(clients.short) == {"ok"}
        assert _lost(clients) == {}
    server.container.goes_on()


@pytest.mark.parametrize("network", ["host", "bridge"])
@pytest.mark.parametrize("established", [False, True], ids=["closed", "established"])
def test_it_comes_back(serving: shimhost.Writer, network: str, established: bool) -> None:
    """A server that was restored answers new connections, and the old ones only where it was asked for."""
    server = Server.start("w", network=network)
    with Clients(server.address, server.port) as clients:
        server.wait_for_answers(clients)
        for _ in range(ROUNDS):
            server.round(leave_running=False, established=established)
            server.wait_for_answers(clients)
            if established:
                server.wait_for_held(clients)
            else:
                until(lambda: not server.dead(), "the server to see that connections are closed")
        if established:
            assert _lost(clients) == {}
    server.container.goes_on()


def waiting(network: str = "host") -> Container:
    """Beside the work a process that listens on port 8078 and accepts nothing."""
    listen = "import socket, time; s = socket.create_server(('', 8078)); time.sleep(600)"
    script = f'{PYTHON} -c "{listen}" & exec /gpuwork --tick 30 --mib 4'
    container = Container.start("w", options=["-v", "/usr:/host:ro", "--network", network], script=script)
    until(lambda: _port_is_open(container), "the port")
    return container


def _port_is_open(container: Container) -> bool:
    lines = Path(f"/proc/{container.pid}/net/tcp").read_text().splitlines()
    return any(line.split()[1].endswith(f":{8078:04X}") for line in lines[1:])


def test_a_connection_that_nobody_has_accepted(serving: shimhost.Writer, tmp_path: Path) -> None:
    """It is left out of the image, and there again where the container runs on; CRIU alone refuses it."""
    container = waiting()
    with socket.create_connection(("127.0.0.1", 8078)) as client:
        serving("[criu]\nskip-in-flight = false\n")
        assert "In-flight connection" in sentence(run(*container.line(tmp_path, "--leave-running")))
        container.unharmed()
        serving("")
        good(run(*container.line(tmp_path, "--leave-running")))
        client.sendall(b"still there")
    container.goes_on()


def steps(line: Sequence[str]) -> list[str]:
    """The steps that a checkpoint begins; `line` has --debug."""
    return [each.split()[-1] for each in run(*line).err.splitlines() if each.startswith("gpusnap: step ")]


def test_connections_are_refused(serving: shimhost.Writer, tmp_path: Path) -> None:
    """Without criu.tcp-close and without the option: before anything is paused, naming the peer."""
    server = Server.start("w", network="bridge")
    serving("[criu]\ntcp-close = false\n")
    good(run(*server.container.line(tmp_path, "--leave-running")))
    with socket.create_connection((server.address, server.port)) as client:
        client.sendall(bytes(8))
        assert client.recv(8)
        said = sentence(run(*server.container.line(tmp_path, "--leave-running")))
        peer = "{}:{}".format(*client.getsockname())
        assert f"has a TCP connection to {peer}, and CRIU dumps it only" in said
        assert "--tcp-established" in said
        assert steps(server.container.line(tmp_path, "--leave-running", debug=True)) == ["inspect"]
        server.container.unharmed()
        good(run(*server.container.line(tmp_path, "--leave-running", "--tcp-established")))
    server.container.goes_on()


def _old_criu() -> bool:
    """Whether the host's own CRIU dumps no TCP socket on this kernel."""
    return not sockets.can_be_dumped("TCP")


def test_sockets_that_this_criu_cannot_dump(real: str, tmp_path: Path) -> None:
    """CRIU 4.1 on Linux 6.16 and later: refused before anything is paused, and only where there are some."""
    if not _old_criu():
        pytest.skip("this host's CRIU dumps sockets on this kernel")
    server = Server.start("w", network="bridge")
    assert "has a socket of the protocol TCP, which CRIU 4.1" in sentence(
        run(*server.container.line(tmp_path))
    )
    assert steps(server.container.line(tmp_path, debug=True)) == ["inspect"]
    server.container.unharmed()
    server.container.remove()
    local = (
        "import socket, time; p = socket.socketpair(); u = socket.socket(socket.AF_UNIX); u.bind('/s'); "
        "u.listen(); n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); n.bind((0, 0)); "
        "open('/ready', 'w').close(); time.sleep(600)"
    )
    script = f'{PYTHON} -c "{local}" & exec /gpuwork --tick 30 --mib 4'
    container = Container.start("v", options=["-v", "/usr:/host:ro"], script=script)
    until(Path(f"/proc/{container.pid}/root/ready").exists, "the sockets")
    good(container.checkpoint(tmp_path / "a.tar"))
    assert manifest(tmp_path / "a.tar")["processes"]
    container.remove()
    Container.restore("v", tmp_path / "a.tar").goes_on()
