"""The processes of a checkpoint, for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpusnap.checkpoints.processes import Process
from gpusnap.cli.store_tables import document
from gpusnap.cli.tables import make_plain, table
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.units import human

if TYPE_CHECKING:
    from rich.console import Console

_DEEPEST = 20
_LONGEST = 200


def print_processes(console: Console, found: Sequence[Process], record: Manifest | None) -> None:
    """The tree with each process' memory, open files, and sockets."""
    gpu, depths = _gpu_memory(record), _depths(found)
    rows = table("processes", "PID", "command", "state", "threads", "mapped", "memory", "GPU memory")
    for each in found:
        indent = "  " * min(depths[each.pid], _DEEPEST)
        memory = (
            (human(each.memory.mapped), human(each.memory.stored)) if each.memory is not None else ("", "")
        )
        command = make_plain(indent + (" ".join(each.command) or each.name)[:_LONGEST])
        used = human(gpu[each.pid]) if each.pid in gpu else ""
        rows.add_row(str(each.pid), command, each.state, str(len(each.threads) or ""), *memory, used)
    console.print(rows, "")
    rows = table("open files", "PID", "descriptor", "kind", "path")
    for each in found:
        for file in each.files:
            rows.add_row(str(each.pid), str(file.descriptor), file.kind, make_plain(file.path))
    if rows.row_count:
        console.print(rows, "")
    rows = table("sockets", "PID", "descriptor", "protocol", "local", "remote", "state")
    for each in found:
        for socket in each.sockets:
            ends = make_plain(socket.local), make_plain(socket.remote)
            rows.add_row(str(each.pid), str(socket.descriptor), socket.protocol, *ends, socket.state)
    if rows.row_count:
        console.print(rows, "")


def documents(found: Sequence[Process], record: Manifest | None) -> list[dict[str, Any]]:
    """The same for JSON: a list in which each process comes behind its parent."""
    gpu = _gpu_memory(record)
    return [{**document(each), "gpuMemory": gpu.get(each.pid, 0)} for each in found]


def _gpu_memory(record: Manifest | None) -> Mapping[int, int]:
    """Bytes by PID, of the processes whose GPU state is in the checkpoint."""
    processes = record.processes if record is not None else ()
    return {each.pid: sum(used for _, used in each.gpus) for each in processes}


def _depths(found: Sequence[Process]) -> dict[int, int]:
    depths: dict[int, int] = {}
    for each in found:  # each comes behind its parent
        depths[each.pid] = depths.get(each.parent, -1) + 1
    return depths
