"""Messages' classes: those that gpusnap reads, and of each the fields that it reads."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# By message and field: its number in criu/images/*.proto, and its type; "*" is repeated.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "inventory_entry": {"img_version": (1, "uint32"), "tcp_close": (10, "bool")},
    "pstree_entry": {
        "pid": (1, "uint32"),
        "ppid": (2, "uint32"),
        "pgid": (3, "uint32"),
        "sid": (4, "uint32"),
        "threads": (5, "uint32*"),
    },
    "task_core_entry": {
        "task_state": (1, "uint32"),
        "exit_code": (2, "uint32"),
        "comm": (6, "string"),
    },
    "task_kobj_ids_entry": {
        "vm_id": (1, "uint32"),
        "files_id": (2, "uint32"),
        "net_ns_id": (6, "uint32"),
    },
    "thread_core_entry": {"comm": (13, "string")},
    "core_entry": {
        "tc": (3, "task_core_entry"),
        "ids": (4, "task_kobj_ids_entry"),
        "thread_core": (5, "thread_core_entry"),
    },
    "vma_entry": {
        "start": (1, "uint64"),
        "end": (2, "uint64"),
        "shmid": (4, "uint64"),
        "prot": (5, "uint32"),
        "flags": (6, "uint32"),
        "status": (7, "uint32"),
        "madv": (9, "uint64"),
    },
    "mm_entry": {
        "mm_arg_start": (8, "uint64"),
        "mm_arg_end": (9, "uint64"),
        "exe_file_id": (12, "uint32"),
        "vmas": (14, "vma_entry*"),
    },
    "fdinfo_entry": {"id": (1, "uint32"), "flags": (2, "uint32"), "type": (3, "uint32"), "fd": (4, "uint32")},
    "reg_file_entry": {
        "id": (1, "uint32"),
        "flags": (2, "uint32"),
        "pos": (3, "uint64"),
        "name": (6, "string"),
        "size": (8, "uint64"),
    },
    "inet_sk_entry": {
        "id": (1, "uint32"),
        "ino": (2, "uint32"),
        "family": (3, "uint32"),
        "type": (4, "uint32"),
        "proto": (5, "uint32"),
        "state": (6, "uint32"),
        "src_port": (7, "uint32"),
        "dst_port": (8, "uint32"),
        "src_addr": (11, "uint32*"),
        "dst_addr": (12, "uint32*"),
        "ns_id": (18, "uint32"),
    },
    "unix_sk_entry": {
        "id": (1, "uint32"),
        "ino": (2, "uint32"),
        "type": (3, "uint32"),
        "state": (4, "uint32"),
        "peer": (8, "uint32"),
        "name": (11, "bytes"),
    },
    "netlink_sk_entry": {"id": (1, "uint32"), "protocol": (3, "uint32")},
    "packet_sock_entry": {"id": (1, "uint32"), "protocol": (3, "uint32")},
    "pipe_entry": {"id": (1, "uint32"), "pipe_id": (2, "uint32")},
    "fifo_entry": {"id": (1, "uint32"), "pipe_id": (2, "uint32"), "regf_id": (3, "uint32")},
    "tty_file_entry": {"id": (1, "uint32"), "regf_id": (6, "uint32")},
    "memfd_file_entry": {"id": (1, "uint32"), "inode_id": (5, "uint32")},
    "ext_file_entry": {"id": (1, "uint32")},
    "file_entry": {
        "type": (1, "uint32"),
        "id": (2, "uint32"),
        "reg": (3, "reg_file_entry"),
        "isk": (4, "inet_sk_entry"),
        "psk": (6, "packet_sock_entry"),
        "nlsk": (7, "netlink_sk_entry"),
        "ext": (15, "ext_file_entry"),
        "usk": (16, "unix_sk_entry"),
        "fifo": (17, "fifo_entry"),
        "pipe": (18, "pipe_entry"),
        "tty": (19, "tty_file_entry"),
        "memfd": (20, "memfd_file_entry"),
    },
    "pipe_data_entry": {"pipe_id": (1, "uint32"), "bytes": (2, "uint32")},
    "sk_packet_entry": {"id_for": (1, "uint32"), "length": (2, "uint32")},
    "tcp_stream_entry": {"inq_len": (1, "uint32"), "outq_len": (3, "uint32")},
    "bpfmap_data_entry": {
        "map_id": (1, "uint32"),
        "keys_bytes": (2, "uint32"),
        "values_bytes": (3, "uint32"),
    },
    "ipc_msg_entry": {"qbytes": (2, "uint32"), "qnum": (3, "uint32")},
    "ipc_msg": {"mtype": (1, "uint64"), "msize": (2, "uint32")},
    "ipc_sem_entry": {"nsems": (2, "uint32")},
    "ipc_shm_entry": {"size": (2, "uint64"), "in_pagemaps": (3, "bool")},
    "ghost_file_entry": {"mode": (3, "uint32"), "chunks": (9, "bool")},
    "ghost_chunk_entry": {"len": (1, "uint64"), "off": (2, "uint64")},
    "mnt_entry": {
        "mnt_id": (2, "uint32"),
        "root": (6, "string"),
        "mountpoint": (7, "string"),
        "source": (8, "string"),
        "options": (9, "string"),
        "ext_mount": (13, "bool"),
        "ext_key": (18, "string"),
    },
    "cgroup_prop_entry": {"name": (1, "string"), "value": (2, "string")},
    "cgroup_dir_entry": {
        "dir_name": (1, "string"),
        "children": (2, "cgroup_dir_entry*"),
        "properties": (3, "cgroup_prop_entry*"),
    },
    "cg_controller_entry": {"cnames": (1, "string*"), "dirs": (2, "cgroup_dir_entry*")},
    "cgroup_entry": {"controllers": (2, "cg_controller_entry*")},
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="standin.proto", package="criu_standin", syntax="proto2")
    for name, fields in MESSAGES.items():
        made = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            plain = kind.removesuffix("*")
            label = field_type.LABEL_REPEATED if kind != plain else field_type.LABEL_OPTIONAL
            one = made.field.add(name=field, number=number, label=label)
            if plain in MESSAGES:
                one.type, one.type_name = field_type.TYPE_MESSAGE, f".criu_standin.{plain}"
            else:
                one.type = field_type.Type.Value(f"TYPE_{plain.upper()}")
    return file


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def __getattr__(name: str) -> Any:
    if name not in MESSAGES:
        raise AttributeError(name)
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"criu_standin.{name}"))
