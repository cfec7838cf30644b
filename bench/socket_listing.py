"""The cost of listing TCP connections, from /proc and with pyroute2: python3 bench/socket_listing.py

Seconds of processor time, with 8000 connections of this process. gpusnap reads /proc for this
(runtime_shim/snapshot/preflight/sockets.py). The test host has pyroute2:

    tests/host/host enter -- /opt/gpusnap/bin/python /src/bench/socket_listing.py
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpusnap.runtime_shim.snapshot.preflight import sockets

PAIRS = 4000
# include/net/tcp_states.h: all but those of sockets that listen, are closed, or only wait.
_STATES = 0xFFF & ~(1 << 10 | 1 << 7 | 1 << 6)


def main() -> None:
    """Print the figures, one a line."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limit, 4 * PAIRS), limit))
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=PAIRS))
        for _ in range(PAIRS):
            stack.enter_context(socket.create_connection(server.getsockname()))
            stack.enter_context(server.accept()[0])
        begin = time.process_time()
        count = sum(1 for _ in sockets.connections(os.getpid()))
        print(f"{count} connections from /proc: {time.process_time() - begin:.3f} s")
        begin = time.process_time()
        from pyroute2 import DiagSocket

        print(f"importing pyroute2: {time.process_time() - begin:.3f} s")
        begin = time.process_time()
        with DiagSocket() as diag:
            diag.bind()
            families = (socket.AF_INET, socket.AF_INET6)
            count = sum(1 for each in families for _ in diag.get_sock_stats(family=each, states=_STATES))
        print(f"{count} connections by pyroute2's DiagSocket: {time.process_time() - begin:.3f} s")


if __name__ == "__main__":
    main()
