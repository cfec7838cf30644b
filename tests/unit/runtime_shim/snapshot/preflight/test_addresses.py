"""Saved TCP connections need their local addresses: asked of the network that the container will get."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from criu_images import INVENTORY, encode_messages
from fakes import Scene, a_manifest

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.inet_sockets import InetSocket
from gpusnap.runtime_shim.snapshot import restore
from gpusnap.runtime_shim.snapshot.preflight import addresses

ELSEWHERE = "192.0.2.77"  # RFC 5737: of documentation alone
INSIDE = "10.9.8.7"
# A network of its own, in which lo has that address too (netdevice(7), SIOCSIFADDR).
NAMESPACE = f"""
import ctypes, fcntl, socket, struct, sys
assert ctypes.CDLL(None).unshare(0x40000000) == 0
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    address = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton("{INSIDE}"))
    fcntl.ioctl(one, 0x8916, struct.pack("16s16s", b"lo", address))
    fcntl.ioctl(one, 0x8914, struct.pack("16sh14x", b"lo", 1))
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def network() -> Iterator[str]:
    """The path of a network namespace whose one address is INSIDE."""
    if os.geteuid():
        pytest.skip("needs root to make a network namespace")
    made = subprocess.Popen([sys.executable, "-c", NAMESPACE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with made:
        assert made.stdout is not None
        if made.stdout.readline() != b"there\n":
            pytest.skip("no network namespace can be made here")
        yield f"/proc/{made.pid}/ns/net"
        made.communicate(b"")


def connection(local: str, state: str = "established") -> InetSocket:
    return InetSocket("tcp", local, 4000, "203.0.113.9", 443, state)


def dumped(folder: Path, *local: str, state: int = 1) -> str:
    """An image directory with a TCP connection of each address."""
    pb = pycriu_package.load().pb
    files = []
    for at, address in enumerate(local, 1):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        data = socket.inet_pton(family, address)
        numbers = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
        inet = pb.inet_sk_entry(id=at, family=family, proto=6, state=state, src_addr=numbers, src_port=4000)
        inet.dst_addr.extend(numbers)
        files.append(pb.file_entry(type=4, id=at, isk=inet))
    folder.mkdir(exist_ok=True)
    (folder / "files.img").write_bytes(encode_messages(files, "files"))
    return str(folder)


def config(path: str | None) -> dict[str, object]:
    """`path`: None for a namespace of its own."""
    return {
        "linux": {"namespaces": [{"type": "pid"}, {"type": "network"} | ({"path": path} if path else {})]}
    }


def test_in_a_namespace(network: str) -> None:
    """What it has can be bound, what this host has cannot, and nothing of ours moves there."""
    ours = os.readlink("/proc/self/ns/net")
    found = addresses.list_missing(
        [connection(INSIDE), connection(ELSEWHERE), connection(ELSEWHERE)], network
    )
    assert [each.local for each in found] == [ELSEWHERE]
    assert [each.local for each in addresses.list_missing([connection(INSIDE)], "")] == [INSIDE]
    assert os.readlink("/proc/thread-self/ns/net") == ours


@pytest.mark.parametrize("local", ["127.0.0.1", "::1", "fe80::1", "", "::ffff:127.0.0.1"])
def test_not_asked(local: str) -> None:
    """What may come with the container, or is not to be told."""
    assert addresses.list_missing([connection(local)], "") == ()


def test_a_namespace_that_is_not_there() -> None:
    """It is the runtime's to say."""
    assert addresses.list_missing([connection(ELSEWHERE)], "/nowhere/net") == ()


@pytest.mark.parametrize("local", [ELSEWHERE, f"::ffff:{ELSEWHERE}"])
def test_refused(tmp_path: Path, local: str) -> None:
    """On the host's network and in an engine's namespace, with what to do."""
    images = dumped(tmp_path / "i", local)
    with pytest.raises(Refused, match=f"does not have the address .*{ELSEWHERE}") as caught:
        addresses.check(images, {"linux": {"namespaces": [{"type": "pid"}]}})
    assert "--tcp-close" in caught.value.hint
    with pytest.raises(Refused):
        addresses.check(images, config("/proc/self/ns/net"))


def test_of_ipv6(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel may still be looking whether somebody else has it."""
    addresses.check(dumped(tmp_path / "i", "2001:db8::77"), {})
    said = capfd.readouterr().err
    assert "2001:db8::77, at least not yet" in said or said == ""  # a host without IPv6 cannot be asked


def test_accepted(tmp_path: Path, network: str) -> None:
    """A namespace of its own is CRIU's to fill; an address that is there is fine, as is what only listens."""
    addresses.check(dumped(tmp_path / "i", ELSEWHERE), config(None))
    addresses.check(dumped(tmp_path / "i", INSIDE), config(network))
    addresses.check(dumped(tmp_path / "i", ELSEWHERE, state=10), {})


@pytest.mark.parametrize(
    ("options", "closed", "refused"),
    [
        (("--tcp-established",), False, True),
        ((), False, False),
        (("--tcp-established",), True, False),
        (("--tcp-established", "--tcp-close"), False, False),
    ],
)
def test_a_restore(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    closed: bool,
    refused: bool,
) -> None:
    """Refused before the runtime is called; not where the connections are closed anyway."""
    with Scene(tmp_path, monkeypatch, capfd) as scene:
        dumped(scene.image, ELSEWHERE)
        draft, record = Draft(str(scene.image)), replace(a_manifest(), processes=(), gpus=(), nodes=())
        draft.begin()
        draft.prepare(record)
        draft.finish(record)
        pb = pycriu_package.load().pb
        inventory = encode_messages([pb.inventory_entry(img_version=2, tcp_close=closed)], "inventory")
        (scene.image / "inventory.img").write_bytes(inventory if closed else INVENTORY)
        monkeypatch.setattr(restore, "find_driver", lambda: None)
        done = scene.restore("--detach", *options)
        assert (f"does not have the address {ELSEWHERE}" in done.stderr) is refused
        assert bool(scene.runtime.calls("restore")) is not refused
