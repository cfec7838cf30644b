"""Sockets: connections that CRIU takes along only if it is told, and protocols that it does not know."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from gpusnap.doctor.check import Check, failure, ok, plural, warning
from gpusnap.doctor.files import Opened
from gpusnap.doctor.sources import below, text

__all__ = ["connections", "protocol", "protocols"]

# include/net/tcp_states.h. What CRIU calls connected (criu/sk-tcp.c): all but listening and closed.
_LISTEN, _CLOSE, _TIME_WAIT = 0x0A, 0x07, 0x06
# As the kernel names them in system.sockprotoname (struct proto's name). CRIU dumps Unix, netlink, packet
# sockets, and of the internet's these (criu/sockets.c, dump_socket; criu/sk-inet.c, can_dump_ipproto).
_DUMPED = frozenset(
    {
        *("UNIX", "UNIX-STREAM", "UNIX-DGRAM", "UNIX-SEQPACKET", "NETLINK", "PACKET"),
        *("TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "RAW", "RAWv6"),
    }
)
# Those that CRIU before 4.2 can dump on Linux 6.16 and later, which refuses it two options of all others.
_LOCAL = ("UNIX", "NETLINK")
_CURES = {
    "MPTCP": "start the program without MPTCP (Go: GODEBUG=multipathtcp=0)",
    "MPTCPv6": "start the program without MPTCP (Go: GODEBUG=multipathtcp=0)",
}
_SOCKET = re.compile(r"socket:\[(\d+)\]")

Protocol = Callable[[str], str]


def protocol(link: str) -> str:
    """The protocol of a socket, by a link to it in /proc/PID/fd; empty where the kernel does not tell.

    Source: net/socket.c, sockfs_xattr_handlers; lsof asks so, too.
    """
    try:
        return os.getxattr(link, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""


def protocols(
    files: Sequence[Opened], *, local_only: bool = False, root: str = "/", ask: Protocol = protocol
) -> Iterator[Check]:
    """Sockets of a protocol that CRIU cannot dump; `local_only`: see criu.local_sockets_only."""
    found: dict[str, Opened] = {}
    for each in files:
        if _SOCKET.fullmatch(each.target):
            name = ask(below(root, f"/proc/{each.process.pid}/fd/{each.number}"))
            if name and (name not in _DUMPED or (local_only and not name.startswith(_LOCAL))):
                found.setdefault(name, each)
    for name, first in found.items():
        old = (
            ", which this CRIU cannot dump on this kernel" if name in _DUMPED else ", which CRIU cannot dump"
        )
        cure = "install CRIU 4.2 or later" if name in _DUMPED else ""
        yield failure(
            "sockets",
            f"{first.holder} has a socket of the protocol {name}{old}",
            cure or _CURES.get(name, "end what uses it, or start the program without it"),
            protocol=name,
            pid=first.process.pid,
            descriptor=first.number,
        )
    if not found:
        yield ok("sockets", "no socket of a protocol that CRIU cannot dump")


def connections(files: Sequence[Opened], root: str = "/") -> Iterator[Check]:
    """TCP connections of the container's processes (proc_pid_net(5))."""
    owners = {match[1]: each for each in files if (match := _SOCKET.fullmatch(each.target))}
    found: dict[str, tuple[Opened, str]] = {}
    for pid in dict.fromkeys(each.process.pid for each in files):
        for name in ("tcp", "tcp6"):
            for line in (text(root, f"/proc/{pid}/net/{name}") or "").splitlines()[1:]:
                words = line.split()
                if len(words) > 9 and words[9] in owners and _connected(int(words[3], 16)):
                    found[words[9]] = owners[words[9]], str(int(words[2].rpartition(":")[2], 16))
    if not found:
        yield ok("TCP connections", "none is open", count=0)
        return
    first, port = next(iter(found.values()))
    yield warning(
        "TCP connections",
        f"{plural(len(found), 'TCP connection')} {'is' if len(found) == 1 else 'are'} open, such as one of "
        f"{first.holder} with port {port} of its peer, and CRIU dumps those only if it is told",
        "close them, or checkpoint and restore with --tcp-established; a restore needs the same address",
        count=len(found),
        pids=sorted({each.process.pid for each, _ in found.values()}),
    )


def _connected(state: int) -> bool:
    return state not in (_LISTEN, _CLOSE, _TIME_WAIT)
