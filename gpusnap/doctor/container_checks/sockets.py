"""Sockets: connections that a restore closes by default, and protocols that CRIU does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpusnap.doctor.base.check import Check, failure, ok, plural, warning
from gpusnap.doctor.container_checks.files import OpenFile
from gpusnap.runtime_shim.snapshot.preflight import sockets

Ask = Callable[[str], str]
Judge = Callable[[str], bool]


def check_protocols(
    files: Sequence[OpenFile],
    *,
    ask: Ask = sockets.protocol,
    can_be_dumped: Judge = sockets.can_be_dumped,
) -> Iterator[Check]:
    """Check for sockets of a protocol that CRIU cannot dump."""
    found: dict[str, OpenFile] = {}
    for each in files:
        if sockets.inode(each.target):
            name = ask(f"/proc/{each.process.pid}/fd/{each.number}")
            if name:
                found.setdefault(name, each)
    # For a protocol that CRIU does not support, there may be no trial: see sockets.can_be_dumped.
    found = {
        name: each for name, each in found.items() if name not in sockets.DUMPED or not can_be_dumped(name)
    }
    for name, first in found.items():
        known = name in sockets.DUMPED
        old = ", which this CRIU cannot dump on this kernel" if known else ", which CRIU cannot dump"
        yield failure(
            "sockets",
            f"{first.holder} has a socket of the protocol {name}{old}",
            sockets.cure(name),
            protocol=name,
            pid=first.process.pid,
            descriptor=first.number,
        )
    if not found:
        yield ok("sockets", "no socket with a protocol that CRIU cannot dump")


def check_connections(files: Sequence[OpenFile], root: str = "/", *, closed: bool = True) -> Iterator[Check]:
    """Report TCP connections of the container's processes; `closed`: the setting criu.tcp-close."""
    owners = {sockets.inode(each.target): each for each in files}
    found: dict[str, tuple[OpenFile, int]] = {}
    for pid in dict.fromkeys(each.process.pid for each in files):
        for each in sockets.connections(pid, root):
            if each.inode in owners:
                found[each.inode] = owners[each.inode], each.port
    if not found:
        yield ok("TCP connections", "none is open", count=0)
        return
    first, port = next(iter(found.values()))
    fate = "a restore closes them" if closed else "a checkpoint is refused"
    yield warning(
        "TCP connections",
        f"{plural(len(found), 'TCP connection')} {'is' if len(found) == 1 else 'are'} open, such as one "
        f"of {first.holder} to port {port} of its peer; without --tcp-established {fate}",
        "to keep them, checkpoint and restore with --tcp-established; the restore needs the same IP address",
        count=len(found),
        pids=sorted({each.process.pid for each, _ in found.values()}),
    )
