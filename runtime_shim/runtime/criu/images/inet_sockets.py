"""Internet sockets in CRIU's images (images/sk-inet.proto; criu/sk-inet.c, do_dump_one_inet_fd)."""

from __future__ import annotations

import io
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import read_below
from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, decode_messages

# include/net/tcp_states.h
_STATES = {
    1: "established",
    2: "syn sent",
    3: "syn received",
    4: "fin wait 1",
    5: "fin wait 2",
    6: "time wait",
    7: "closed",
    8: "close wait",
    9: "last ack",
    10: "listening",
    11: "closing",
}
_UNCONNECTED = ("time wait", "closed", "listening")
"""States that CRIU does not call connected (criu/sk-inet.c, can_dump_inet_sk)."""
_PROTOCOLS = {socket.IPPROTO_TCP: "tcp", socket.IPPROTO_UDP: "udp", socket.IPPROTO_UDPLITE: "udplite"}
_WORDS: dict[int, int] = {socket.AF_INET: 1, socket.AF_INET6: 4}
_FILES = "files.img"
# Bytes; an open file takes some tens of them.
_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class InetSocket:
    """A socket of IPv4 or IPv6."""

    protocol: str
    """tcp, udp, udplite or raw."""
    local: str
    """Its address; empty if it cannot be decoded."""
    local_port: int
    remote: str
    remote_port: int
    state: str
    """As in ss(8), in words; empty for a number that the kernel does not use."""

    @property
    def is_connection(self) -> bool:
        """Whether it is a TCP connection, which a restore must recreate."""
        return self.protocol == "tcp" and bool(self.state) and self.state not in _UNCONNECTED


def parse(message: Any) -> InetSocket:
    """Parse an inet_sk_entry."""
    return InetSocket(
        _PROTOCOLS.get(message.proto, "raw"),
        _address(message.family, message.src_addr),
        message.src_port,
        _address(message.family, message.dst_addr),
        message.dst_port,
        _STATES.get(message.state, ""),
    )


def list_established(images: str) -> tuple[InetSocket, ...]:
    """Return the TCP connections of a checkpoint, in the order of the images.

    Empty if CRIU has written no image of open files, as before version 3.1. Raises ImageError, and Refused
    without pycriu.
    """
    try:
        data = read_below(images, _FILES, limit=_LIMIT)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise ImageError(f"{os.path.join(images, _FILES)} cannot be read: {reason(error)}") from error
    try:
        return tuple(found for found in _sockets(data) if found.is_connection)
    except Damage as damage:
        raise ImageError(
            f"CRIU's image {_FILES} in {images} {damage}", hint="use another copy of the checkpoint"
        ) from None


def _sockets(data: bytes) -> Iterator[InetSocket]:
    for file in decode_messages(io.BytesIO(data), len(data), "files"):
        if file.HasField("isk"):
            yield parse(file.isk)


def _address(family: int, words: Any) -> str:
    """Format an address: 32-bit words in the machine's order, which is little-endian here and on ARM."""
    if _WORDS.get(family) != len(words):
        return ""
    return socket.inet_ntop(family, struct.pack(f"<{len(words)}I", *words))
