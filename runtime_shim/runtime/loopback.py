"""The loopback device of a restored container, if runc makes it a new network namespace.

runc makes CRIU leave network devices alone, at the dump and at the restore (runc's checkpoint.go: it "doesn't
manage network devices"). In a namespace that runc makes, as for `--network none`, lo is then down, although
runc brings it up for a new container: programs no longer reach 127.0.0.1, and CRIU cannot restore a
connection over it ("Network is unreachable"). At a restore, runc runs createRuntime hooks directly after CRIU
has made the namespaces (libcontainer/criu_linux.go, "setup-namespaces"): one of them brings lo up. crun makes
CRIU restore the devices.

The hook is only for the restore: other hosts may not have gpusnap at the same path.

    python -m gpusnap.runtime_shim.runtime.loopback     the hook: a container's state on stdin
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import Any

from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.process import network_namespace, proc

_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # linux/sockios.h, SIOCGIFFLAGS and SIOCSIFFLAGS
_UP = 1  # net/if.h, IFF_UP
_REQUEST = struct.Struct("=16sH22x")  # struct ifreq, netdevice(7)
_STATE_LIMIT = 1 << 20
# Seconds, in the runtime specification's unit: it takes a tenth of one.
_DEADLINE = 30
_OPTIONS = ("-B", "-P", "-m")
_MODULE = "gpusnap.runtime_shim.runtime.loopback"  # __name__ differs in the hook itself


def hook(kind: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the createRuntime hook that a restore by this kind of runtime needs; None if it needs none.

    `config`: the container's config.json.
    """
    if kind != "runc" or not is_made(config):
        return None
    return {
        "path": sys.executable,
        "args": [sys.executable, *_OPTIONS, _MODULE],
        # runc gives a hook no other environment. Its modules are where this process's were found.
        "env": [f"PYTHONPATH={os.pathsep.join(path for path in sys.path if path)}"],
        "timeout": _DEADLINE,
    }


def network(config: Mapping[str, Any]) -> str | None:
    """Return the path of the container's network namespace, from its config.json.

    Empty if the runtime makes one; None if the container has the runtime's own.
    """
    linux = config.get("linux")
    namespaces = (linux.get("namespaces") if isinstance(linux, dict) else None) or ()
    return next((each.get("path") or "" for each in namespaces if each.get("type") == "network"), None)


def is_made(config: Mapping[str, Any]) -> bool:
    """Whether the runtime makes a network namespace for the container; or an engine does, or none exists."""
    return network(config) == ""


def is_hook(entry: object) -> bool:
    """Whether an entry under `hooks` is this hook."""
    args = entry.get("args") if isinstance(entry, dict) else None
    return isinstance(args, list) and args[1:] == [*_OPTIONS, _MODULE]


def bring_up(namespace: str) -> None:
    """Bring lo up in the network namespace with this path. Raises OSError and GpusnapError."""
    network_namespace.run_joined(namespace, _bring_up)


def _bring_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        found = fcntl.ioctl(any_socket, _GET_FLAGS, _REQUEST.pack(b"lo", 0))
        name, flags = _REQUEST.unpack(found)
        fcntl.ioctl(any_socket, _SET_FLAGS, _REQUEST.pack(name, flags | _UP))


def main() -> int:
    """Run the hook. It never fails the restore: whatever needs the device will report that."""
    try:
        state = parse_json(sys.stdin.buffer.read(_STATE_LIMIT))
        bring_up(f"{proc.PROC}/{int(state['pid'])}/ns/net")
    except Exception as error:
        print(f"gpusnap: lo cannot be brought up in the container's network: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
