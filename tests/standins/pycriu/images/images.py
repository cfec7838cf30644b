"""What decodes each image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pycriu.images import pb

_MESSAGES = {
    "INVENTORY": "inventory_entry",
    "PSTREE": "pstree_entry",
    "CORE": "core_entry",
    "IDS": "task_kobj_ids_entry",
    "MM": "mm_entry",
    "FDINFO": "fdinfo_entry",
    "FILES": "file_entry",
    "MNTS": "mnt_entry",
    "CGROUP": "cgroup_entry",
    "PIPES_DATA": "pipe_data_entry",
    "FIFO_DATA": "pipe_data_entry",
    "SK_QUEUES": "sk_packet_entry",
    "TCP_STREAM": "tcp_stream_entry",
    "IPCNS_SHM": "ipc_shm_entry",
    "IPCNS_SEM": "ipc_sem_entry",
    "IPCNS_MSG": "ipc_msg_entry",
    "BPFMAP_DATA": "bpfmap_data_entry",
}


@dataclass(frozen=True)
class Handler:
    """As pycriu's entry_handler has it."""

    payload: Any


handlers = {name: Handler(getattr(pb, message)) for name, message in _MESSAGES.items()} | {
    "PAGEMAP": object()
}
