"""Checks of sockets."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from doctor_trees import a_process, only, tree

from gpusnap.doctor.container_checks import files, sockets
from gpusnap.doctor.container_checks.files import OpenFile
from gpusnap.runtime_shim.process import proc

SOCKET = OpenFile(a_process(), 3, "socket:[77]", None)


@pytest.mark.parametrize(
    ("name", "refused", "verdict", "todo"),
    [
        ("TCPv6", False, "ok", ""),
        ("UNIX-STREAM", False, "ok", ""),
        ("", False, "ok", ""),
        ("MPTCP", False, "failure", "GODEBUG"),
        ("AF_VSOCK", False, "failure", "stop the program that uses it"),
        ("TCP", True, "failure", "CRIU 4.2"),
        ("PACKET", True, "failure", "CRIU 4.2"),
    ],
)
def test_protocols(name: str, refused: bool, verdict: str, todo: str) -> None:
    """By the kernel's name of the protocol; `refused`: by this CRIU, on this kernel."""
    found = only(
        sockets.check_protocols([SOCKET], ask=lambda link: name, can_be_dumped=lambda _: not refused)
    )
    assert found[0] == verdict
    assert todo in found[1].todo


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: 0100007F:1F90 0100007F:{port:04X} {state:02X} 0:0 00:0 0 0 0 {inode} 1\n"


@pytest.mark.parametrize(
    ("state", "inode", "verdict"),
    [(1, 77, "warning"), (0x0A, 77, "ok"), (6, 77, "ok"), (8, 77, "warning"), (1, 78, "ok")],
    ids=["established", "listening", "time-wait", "close-wait", "another's"],
)
def test_connections(tmp_path: Path, state: int, inode: int, verdict: str) -> None:
    """Connections of the container's own processes."""
    line = LINE.format(port=443, state=state, inode=inode)
    root = tree(tmp_path, {"/proc/7/net/tcp": HEAD + line, "/proc/7/net/tcp6": HEAD})
    found = only(sockets.check_connections([SOCKET], root))
    assert found[0] == verdict
    if verdict == "warning":
        assert "port 443" in found[1].says
        assert "--tcp-established" in found[1].todo


def test_a_real_connection() -> None:
    """Both ends of one in this process."""
    ours = proc.process(os.getpid())
    assert ours is not None
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        numbers = (one.fileno(), other.fileno(), server.fileno())
        opened = [each for each in files.list_open_files([ours]) if each.number in numbers]
        assert only(sockets.check_connections(opened))[1].facts["count"] == 2
