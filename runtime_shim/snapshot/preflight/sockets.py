"""The sockets of a container's processes: their protocols, and TCP's connections.

CRIU refuses some of them, but only long after the container has been paused. So gpusnap checks them before.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterable, Iterator

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.criu.version import criu_version, refuses

DUMPED = frozenset(
    {
        *("UNIX", "UNIX-STREAM", "UNIX-DGRAM", "UNIX-SEQPACKET", "NETLINK", "PACKET"),
        *("TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "RAW", "RAWv6"),
    }
)
"""The protocols that CRIU dumps, by their names in the kernel, which system.sockprotoname returns (struct
proto's name): Unix, netlink and packet sockets, and these of the internet's (criu/sockets.c, dump_socket;
criu/sk-inet.c, can_dump_ipproto)."""
LOCAL = ("UNIX", "NETLINK")
"""How the names of those begin that CRIU before 4.2 can dump on Linux 6.16 and later."""

# include/net/tcp_states.h. CRIU calls all others connected (criu/sk-inet.c, can_dump_inet_sk).
_LISTEN, _CLOSE, _TIME_WAIT = 0x0A, 0x07, 0x06
_SOCKET = compile_later(r"socket:\[(\d+)\]")
# asm-generic/socket.h; Python's socket module has a name for it only in newer releases.
_SO_PASSCRED = 16

# Sockets for a test of CRIU. On such a kernel, an old CRIU dumps all but the local ones, or none of them.
_MPTCP = 262  # include/uapi/linux/in.h, IPPROTO_MPTCP
_TCP = (socket.AF_INET, socket.SOCK_STREAM, 0)
_TRIED = {
    "MPTCP": (socket.AF_INET, socket.SOCK_STREAM, _MPTCP),
    "MPTCPv6": (socket.AF_INET6, socket.SOCK_STREAM, _MPTCP),
}
_CURES = dict.fromkeys(_TRIED, "start the program without MPTCP (Go: GODEBUG=multipathtcp=0)")


@dataclass(frozen=True, slots=True)
class OpenSocket:
    """A socket that a process has open."""

    process: proc.Process
    number: int
    inode: str
    protocol: str
    """Its name in the kernel; empty if the kernel does not report it."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection, by the inode of its socket."""

    inode: str
    peer: str
    """Address and port: 192.0.2.7:443, [2001:db8::7]:443."""
    port: int
    """The port of the peer."""


def inode(target: str) -> str:
    """Return the inode of a socket from the link of its descriptor; empty for other files."""
    match = _SOCKET.fullmatch(target)
    return match[1] if match else ""


def protocol(link: str) -> str:
    """Return the protocol of a socket, by a link to it in /proc/PID/fd; "" if the kernel does not say it.

    Source: net/socket.c, sockfs_xattr_handlers; lsof uses this, too.
    """
    try:
        return os.getxattr(link, "system.sockprotoname").rstrip(b"\0").decode("ascii", "replace")
    except OSError:
        return ""


def iterate_open(processes: Iterable[proc.Process]) -> Iterator[OpenSocket]:
    """Yield every socket of the processes; those that are closed meanwhile are omitted."""
    for process in processes:
        for link, target in proc.open_files(process.pid):
            if found := inode(target):
                yield OpenSocket(process, int(os.path.basename(link)), found, protocol(link))


def connections(pid: int, root: str = "/") -> Iterator[Connection]:
    """Yield the TCP connections in a process's network namespace (proc_pid_net(5)), of all processes in it.

    Netlink (sock_diag(7)) has the same, and pyroute2's DiagSocket decodes it. But 8000 connections then take
    0.5 s of computing, and the import 0.15 s (pyroute2 0.9.7, bench/socket_listing.py); this takes 0.06 s.
    Netlink answers for the namespace of the caller, which would have to join the other one.
    """
    for name in ("tcp", "tcp6"):
        try:
            with open(os.path.join(root, f"proc/{pid}/net/{name}"), encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except (OSError, ValueError):
            continue
        for line in lines:
            words = line.split()
            if len(words) > 9 and int(words[3], 16) not in (_LISTEN, _CLOSE, _TIME_WAIT):
                address, _, port = words[2].partition(":")
                yield Connection(words[9], f"{_address(address)}:{int(port, 16)}", int(port, 16))


def _address(text: str) -> str:
    """Parse an address as the kernel prints it: 32-bit words in the machine's order, here little-endian."""
    data = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    if len(data) == 4:
        return socket.inet_ntop(socket.AF_INET, data)
    if data.startswith(bytes(10) + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, data[12:])
    return f"[{socket.inet_ntop(socket.AF_INET6, data)}]"


def is_restricted_by_kernel() -> bool:
    """Whether the kernel supports SO_PASSCRED only for Unix and netlink sockets, as Linux 6.16 and later do.

    CRIU before 4.2 reads it from every socket, and dumps none for which that fails (criu/sockets.c,
    dump_socket_opts; fixed by its commit 4b7398595).
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.getsockopt(socket.SOL_SOCKET, _SO_PASSCRED)
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP
    return False


def can_be_dumped(name: str) -> bool:
    """Whether this host's CRIU dumps sockets of a protocol on this kernel; True if that is not known."""
    if name.startswith(LOCAL):
        return True
    if name in DUMPED:
        return not (is_restricted_by_kernel() and _is_old(criu_version()) and refuses(*_TCP))
    return name not in _TRIED or not refuses(*_TRIED[name])


NEWER_CRIU = "install CRIU 4.2 or later: Debian sid has it, and https://criu.org/Packages lists others"


def cure(name: str) -> str:
    """The hint for a protocol that CRIU cannot dump."""
    if name in DUMPED:
        return NEWER_CRIU
    return _CURES.get(name, "stop the program that uses it, or start that program without it")


def _is_old(version: str) -> bool:
    """Whether a version is before 4.2; an unknown version counts as old, because it is then tested."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return match is None or (int(match[1]), int(match[2])) < (4, 2)
