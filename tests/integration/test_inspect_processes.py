"""What CRIU's real images say of processes, and the addresses that their connections need."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from servers import Server
from support import Container, good, run

ADDRESS = "10.9.8.7"


@pytest.fixture
def address(host: None) -> Iterator[str]:
    """One that this host has for a while."""
    good(run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"))
    yield ADDRESS
    run("ip", "address", "delete", f"{ADDRESS}/32", "dev", "lo")


def test_a_container(crun: None, tmp_path: Path) -> None:
    """The tree of a container that was exported, kept in a store, and dumped into a directory."""
    container = Container.start("w", "--mib", "24")
    archive, store = tmp_path / "w.tar.zst", f"oci:{tmp_path}/store"
    good(run(*container.line(tmp_path, "--leave-running")))
    good(run("gpusnap", "checkpoint", "--leave-running", "--to", store, "w"))
    good(container.checkpoint(archive))
    for what in (str(archive), store, f"{tmp_path}/image"):
        processes = json.loads(good(run("gpusnap", "inspect", "--processes", "--json", what)))
        [first, *_] = processes
        assert first["pid"] == 1
        assert first["parent"] == 0
        assert first["state"] == "stopped"  # for the dump
        assert "gpuwork" in first["command"][0]
        assert "--mib" in first["command"]
        assert first["threads"][0] == 1
        assert first["gpuMemory"] >= 24 << 20
        assert 0 < first["memory"]["stored"] <= first["memory"]["mapped"]
        assert {0, 1, 2} <= {each["descriptor"] for each in first["files"]}
    text = good(run("gpusnap", "inspect", "--processes", str(archive)))
    assert "GPU memory" in text
    assert "gpuwork" in text


def test_an_address_that_is_gone(serving: shimhost.Writer, address: str, tmp_path: Path) -> None:
    """The restore is refused before anything is there, and succeeds once the host has the address again."""
    server = Server.start("w", network="host")
    archive = tmp_path / "w.tar.zst"
    with socket.create_connection((address, server.port)) as client:
        client.sendall(bytes(8))
        assert client.recv(8)
        good(server.container.checkpoint(archive, "--tcp-established"))
        server.container.remove()
        shown = json.loads(good(run("gpusnap", "inspect", "--processes", "--json", str(archive))))
        peer = "{}:{}".format(*client.getsockname())
        found = [each for process in shown for each in process["sockets"] if each["remote"] == peer]
        assert [(each["protocol"], each["local"], each["state"]) for each in found] == [
            ("tcp", f"{address}:{server.port}", "established")
        ]
        good(run("ip", "address", "delete", f"{address}/32", "dev", "lo"))
        line = ("gpusnap", "restore", "--tcp-established", str(archive))
        said = run(*line)
        assert said.code != 0
        assert f"does not have the address {address}" in said.err
        assert "CRIU" not in said.err
        good(run("ip", "address", "add", f"{address}/32", "dev", "lo"))
        good(run(*line))
        Container("w").goes_on()
        client.sendall(bytes(8))
        assert client.recv(8)
