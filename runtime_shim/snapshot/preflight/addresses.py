"""Checks the local addresses of saved TCP connections before a restore changes anything.

CRIU makes each connection again by binding a socket to the old address (criu/sk-inet.c, inet_bind). By then
the processes exist, and a failure kills them all.

The kernel is asked by a bind(2) of our own: a list of addresses, be it from /proc or by netlink, has neither
those that a route makes local, nor net.ipv4.ip_nonlocal_bind. pyroute2 would list them, and takes 0.23 s of
computing to import (0.9.7 in Python 3.13; python3 -X importtime -c 'import pyroute2').
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from gpusnap.runtime_shim.errors import Refused
from gpusnap.runtime_shim.log import note
from gpusnap.runtime_shim.process import network_namespace
from gpusnap.runtime_shim.runtime import loopback
from gpusnap.runtime_shim.runtime.criu.images.inet_sockets import InetSocket, list_established

_HINT = (
    "add that address to the network first, or restore with --tcp-close, which closes the connections; "
    "Podman gives a container on a bridge its old address, but not under another name"
)


def check(images: str, config: Mapping[str, Any]) -> None:
    """Refuse where the network that the container gets does not have an address of a saved connection.

    `config` is its config.json. A new namespace is CRIU's to fill, and is not looked at. An address of IPv6
    that cannot be bound may be one that the kernel still checks (RFC 4862, 5.4), and is only said. Raises
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
    """Those of the connections whose local address cannot be bound; one of each address.

    `network` is the path of a namespace, empty for ours. None where it cannot be asked: the runtime will say
    why.
    """
    # lo may come up when the container does; an address of one link alone does not tell which.
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
    """An address of IPv4 that a socket of IPv6 has, as such (ipv6(7))."""
    return address.removeprefix("::ffff:") if "." in address else address


def _can_be_bound(address: str) -> bool:
    """False where the kernel says that the address is not local; true where it says anything else."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind((address, 0))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True
