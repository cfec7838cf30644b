"""Checks the local addresses of saved TCP connections before a restore changes anything.

CRIU recreates each connection by binding a socket to the old address (criu/sk-inet.c, inet_bind). By then
the processes exist, and a failure kills them all.

gpusnap asks the kernel with a bind(2): a list of addresses, from /proc or netlink, lacks those that a route
makes local, and net.ipv4.ip_nonlocal_bind. pyroute2 would list them, and takes 0.23 s of computing to import
(0.9.7 in Python 3.13; python3 -X importtime -c 'import pyroute2').
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import network_namespace
from gpusnap.runtime_shim.runtime import loopback
from gpusnap.runtime_shim.runtime.criu.images.inet_sockets import InetSocket, list_established

_HINT = (
    "add that address to the network first, or restore with --tcp-close, which closes the connections; "
    "Podman gives a container on a bridge its old address, but not under another name"
)


def check(images: str, config: Mapping[str, Any]) -> None:
    """Refuse if the container's future network lacks an address of a saved connection.

    `config`: its config.json. If the namespace is new, CRIU fills it, and it is not checked. An IPv6 address
    that cannot be bound may be one that the kernel still checks (RFC 4862, 5.4); it is only reported. Raises
    Refused and ImageError.
    """
    if loopback.is_made(config):
        return
    found = list_missing(list_established(images), loopback.network(config) or "")
    for each in found:
        said = (
            f"the checkpoint has a TCP connection from {each.local} to {each.remote}, but the container's "
            f"network here does not have the address {each.local}"
        )
        if ":" not in _unmap_address(each.local):
            raise Refused(said, hint=_HINT, code="GPS-516")
        note(f"{said}, at least not yet", code="GPS-516")


def list_missing(connections: Sequence[InetSocket], network: str) -> tuple[InetSocket, ...]:
    """Return the connections whose local address cannot be bound, one for each address.

    `network`: the path of a namespace; "" for that of this process. Empty if it cannot be asked: the runtime
    will report why.
    """
    # lo may come up with the container. An address that is valid on one link does not say on which.
    wanted = {
        _unmap_address(each.local): each
        for each in connections
        if each.local and not _unmap_address(each.local).startswith(("127.", "fe80:")) and each.local != "::1"
    }
    found: list[InetSocket] = []

    def ask() -> None:
        found.extend(each for address, each in wanted.items() if not _can_be_bound(address))

    if not wanted:
        return ()
    if not network:
        ask()
        return tuple(found)
    try:
        network_namespace.run_joined(network, ask)
    except OSError:
        return ()
    return tuple(found)


def _unmap_address(address: str) -> str:
    """Return an IPv4 address that an IPv6 socket has, in IPv4's form (ipv6(7))."""
    return address.removeprefix("::ffff:") if "." in address else address


def _can_be_bound(address: str) -> bool:
    """False if the kernel says that the address is not local; True for any other answer."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
