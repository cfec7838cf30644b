"""Removes the network lock of a CRIU that was killed while it dumped.

While CRIU dumps a container that has a network namespace of its own, that namespace drops all packets: by a
chain CRIU of iptables and ip6tables, or by a table CRIU-PID of nftables (criu/net.c, network_lock_internal).
A CRIU that is killed leaves it, and the container, which runs on, has no network.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gpusnap.runtime_shim.base.errors import GpusnapError, NotStarted, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import network_namespace, proc
from gpusnap.runtime_shim.runtime.child_process import Finished, run
from gpusnap.runtime_shim.snapshot.records import journal

_PROGRAMS = ("iptables", "ip6tables")
_CHAIN, _TABLE = "CRIU", "CRIU-"
# Seconds that a program may wait for the lock of iptables, and those that it may take.
_PATIENCE, _SECONDS = "5", 10.0
# As often as CRIU may have been killed in a dump.
_MOST = 16


def remove_left_lock(pid: int, key: str) -> None:
    """Remove the lock from the network namespace of a process of a container; note it if that fails.

    Nothing is done in gpusnap's own namespace, which CRIU does not lock, nor while another container in the
    same one is being dumped. `key`: of this container in the journal.
    """
    try:
        network = proc.namespace(pid, "net")
        if network and network != proc.namespace(os.getpid(), "net") and not _is_in_use(network, key):
            network_namespace.run_joined(f"{proc.PROC}/{pid}/ns/net", _unlock)
    except (OSError, GpusnapError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        note(
            f"if a killed CRIU has left its network lock, the container has no network: {why}; nsenter "
            f"--target {pid} --net iptables -S shows it",
            code="GPS-501",
        )


def _is_in_use(network: str, key: str) -> bool:
    others = (entry for entry in journal.entries({}) if entry.key != key and entry.at_work)
    return any(proc.namespace(each.pid, "net") == network for entry in others for each in entry.processes)


def _unlock() -> None:
    """Remove the lock from this thread's namespace. Raises GpusnapError if it stays."""
    for program in _PROGRAMS:
        words = (program, "-w", _PATIENCE)
        if not _succeeds(*words, "-S", _CHAIN):
            continue
        for chain in ("INPUT", "OUTPUT"):
            left = _MOST
            while left and _succeeds(*words, "-D", chain, "-j", _CHAIN):
                left -= 1
        _succeeds(*words, "-F", _CHAIN)
        done = _ask(*words, "-X", _CHAIN)
        if done is not None and done.code:
            raise GpusnapError(f"{program} cannot remove the chain {_CHAIN}: {_format_error(done)}")
    for table in _list_tables():
        done = _ask("nft", "delete", "table", *table)
        if done is not None and done.code:
            raise GpusnapError(f"nft cannot remove the table {' '.join(table)}: {_format_error(done)}")


def _list_tables() -> list[Sequence[str]]:
    """Return family and name of CRIU's tables of nftables."""
    done = _ask("nft", "list", "tables")
    lines = done.out.splitlines() if done is not None and not done.code else []
    return [words[1:] for line in lines if len(words := line.split()) == 3 and words[2].startswith(_TABLE)]


def _succeeds(*words: str) -> bool:
    done = _ask(*words)
    return done is not None and not done.code


def _ask(*words: str) -> Finished | None:
    """Run a program; None if this host does not have it. Raises GpusnapError if it does not end in time."""
    try:
        return run(words, seconds=_SECONDS)
    except NotStarted:
        return None


def _format_error(done: Finished) -> str:
    return done.err.strip() or f"exit code {done.code}"
