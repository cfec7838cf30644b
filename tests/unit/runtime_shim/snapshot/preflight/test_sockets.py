"""Sockets of processes: their protocols, connections, and what is known of CRIU and the kernel."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from doctor_trees import tree

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.preflight import sockets

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.fixture
def ours() -> proc.Process:
    found = proc.process(os.getpid())
    assert found is not None
    return found


def test_protocol() -> None:
    """The kernel tells it of a real socket; of what is none nothing."""
    with socket.socket(socket.AF_UNIX) as found:
        assert sockets.protocol(f"/proc/self/fd/{found.fileno()}").startswith("UNIX")
    assert sockets.protocol("/dev/null") == ""


def test_opened(ours: proc.Process) -> None:
    """Sockets with protocol and number, and no other file."""
    with socket.socket() as one, socket.socket(socket.AF_UNIX) as other, open("/dev/null") as file:
        found = {each.number: each.protocol for each in sockets.iterate_open([ours])}
        assert found[one.fileno()] == "TCP"
        assert found[other.fileno()].startswith("UNIX")
        assert file.fileno() not in found


@pytest.mark.parametrize(
    ("name", "address", "peer"),
    [
        ("tcp", "0100007F:01BB", "127.0.0.1:443"),
        ("tcp6", "B80D0120000000000000000001000000:0050", "[2001:db8::1]:80"),
        ("tcp6", "0000000000000000FFFF0000070200C0:0050", "192.0.2.7:80"),
    ],
)
def test_the_peer(tmp_path: Path, name: str, address: str, peer: str) -> None:
    """As people write it."""
    line = f"   0: 0100007F:1F90 {address} 01 0:0 00:0 0 0 0 77 1\n"
    (found,) = sockets.connections(7, tree(tmp_path, {f"/proc/7/net/{name}": HEAD + line}))
    assert (found.inode, found.peer) == ("77", peer)


@pytest.mark.parametrize("state", range(1, 12))
def test_states(tmp_path: Path, state: int) -> None:
    """Connected is all but TIME_WAIT (6), CLOSE (7) and LISTEN (10)."""
    line = f"   0: 0100007F:1F90 0100007F:0050 {state:02X} 0:0 00:0 0 0 0 77 1\n"
    found = list(sockets.connections(7, tree(tmp_path, {"/proc/7/net/tcp": HEAD + line})))
    assert len(found) == (state not in (6, 7, 10))


@pytest.fixture(params=[True, False])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A CRIU that refuses all that it is tried with, or nothing."""
    found = bool(request.param)
    monkeypatch.setattr(sockets, "refuses", lambda *_: found)
    return found


@pytest.mark.parametrize(
    ("name", "restricted", "version", "tried"),
    [
        ("TCP", True, "4.1.1", True),
        ("UDPv6", True, "unknown", True),
        ("PACKET", True, "3.19", True),
        ("TCP", False, "4.1.1", False),
        ("TCP", True, "4.2", False),
        ("TCP", True, "4.10.1", False),
        ("UNIX-STREAM", True, "4.1.1", False),
        ("NETLINK", True, "4.1.1", False),
        ("MPTCP", False, "4.2.1", True),
        ("AF_VSOCK", True, "4.1.1", False),
        ("", True, "4.1.1", False),
    ],
)
def test_can_be_dumped(
    refusing: bool,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    restricted: bool,
    version: str,
    tried: bool,
) -> None:
    """Refused is only what CRIU was tried with, and refused itself."""
    monkeypatch.setattr(sockets, "is_restricted_by_kernel", lambda: restricted)
    monkeypatch.setattr(sockets, "criu_version", lambda: version)
    assert sockets.can_be_dumped(name) is not (tried and refusing)
