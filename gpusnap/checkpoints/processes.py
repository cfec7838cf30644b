"""The processes of a checkpoint, from CRIU's images: their tree, files, sockets and memory.

Images may come from anybody: their names and numbers are used only as text and integers, within bounds.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu.images import inet_sockets, pagemap
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, Source, decode_messages

KINDS = ("pstree", "core", "ids", "mm", "pagemap", "fdinfo", "files")
"""The images that are needed; `kind_of` returns an image's kind."""

# compel/include/uapi/task-state.h and criu/include/pstree.h
_STATES = {1: "alive", 2: "dead", 3: "stopped", 6: "zombie"}
# images/fdinfo.proto, fd_types
_TYPES = {
    1: "file",
    2: "pipe",
    3: "fifo",
    4: "socket",
    5: "eventfd",
    6: "epoll",
    7: "inotify",
    8: "signalfd",
    9: "socket",
    10: "tty",
    11: "fanotify",
    13: "socket",
    14: "namespace",
    15: "tun",
    16: "external",
    17: "timerfd",
    18: "memfd",
    19: "bpf map",
    20: "pidfd",
}
# include/linux/net.h
_UNIX = {1: "unix stream", 2: "unix dgram", 5: "unix seqpacket"}
_UNIX_STATES = {1: "established", 7: "unconnected", 10: "listening"}
_PAGE = 4096
# Bytes of a command line; less than that is shown.
_LONGEST = 4096
# Entries of an image, and open files and threads of all processes: each takes some hundred bytes of memory.
_MOST = 1 << 18


@dataclass(frozen=True, slots=True)
class File:
    """An open file other than a socket."""

    descriptor: int
    kind: str
    path: str
    """Empty if it has none."""


@dataclass(frozen=True, slots=True)
class Socket:
    """An open socket; `local` and `remote` are address:port, or the name of a Unix socket."""

    descriptor: int
    protocol: str
    local: str
    remote: str
    state: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a process in bytes."""

    mapped: int
    """Size of all mappings."""
    stored: int
    """Bytes in the pages of this checkpoint."""
    earlier: int
    """Bytes in the pages of an earlier dump."""


@dataclass(frozen=True, slots=True)
class Place:
    """A position in an image of pages."""

    image: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the container."""

    pid: int
    """In the container's PID namespace, like the other IDs."""
    parent: int
    name: str
    state: str
    command: tuple[str, ...]
    """Empty if the images do not have it, as with memory in chunks."""
    threads: tuple[int, ...]
    files: tuple[File, ...]
    sockets: tuple[Socket, ...]
    memory: Memory | None
    """None if an image of it is missing or too large."""


def read(images: Mapping[str, bytes], where: str) -> tuple[Process, ...]:
    """Return the processes, each after its parent. `images`: those of `KINDS` by name; `where`: for messages.

    Raises ImageError, and Refused without pycriu.
    """
    name = ""
    try:
        open_files = {}
        for name in ("files.img",):
            if name in images:
                open_files = {entry.id: entry for entry in _decode_image(images, name, "files")}
        name = "pstree.img"
        found: dict[int, Any] = {}
        threads = 0
        for entry in _decode_image(images, name, "pstree"):
            if entry.pid in found:
                raise Damage(f"lists process {entry.pid} twice")
            threads += len(entry.threads)
            if threads > _MOST:
                raise Damage(f"has more than {_MOST} threads")
            found[entry.pid] = entry
        processes = []
        left = _MOST
        for pid, entry in found.items():
            name = f"core-{pid}.img"
            process = _process(images, entry)
            name = f"ids-{pid}.img"
            number = _files_number(images, pid)
            name = f"fdinfo-{number}.img"
            descriptors = _decode_image(images, name, "fdinfo") if name in images else ()
            files, sockets = _list_open_files(descriptors, open_files, left)
            left -= len(files) + len(sockets)
            name = f"pagemap-{pid}.img"
            pages = _parse_pagemap(images[name]) if name in images else None
            # A zombie has no memory.
            memory = _memory(images, pid, pages) if pages is not None else None
            processes.append(replace(process, files=files, sockets=sockets, memory=memory))
    except KeyError:
        raise ImageError(f"CRIU's image {name} in {where} is missing", hint=_HINT) from None
    except Damage as damage:
        raise ImageError(f"CRIU's image {name} in {where} {damage}", hint=_HINT) from None
    return tuple(_in_order(processes))


_HINT = "use another copy of the checkpoint"


def arguments(images: Mapping[str, bytes]) -> dict[int, Place]:
    """Return the positions of command lines by PID, if the images have them. Raises like `read`."""
    found = {}
    for name in images:
        if not name.startswith("mm-"):
            continue
        pid = name.removeprefix("mm-").removesuffix(".img")
        try:
            [mm] = _decode_image(images, name, "mm")
            source = Source(io.BytesIO(images[f"pagemap-{pid}.img"]), len(images[f"pagemap-{pid}.img"]))
            source.begin("pagemap")
            place = pagemap.locate(source, mm.mm_arg_start)
        except (KeyError, ValueError, Damage):
            continue  # read() reports it
        if place is not None and pid.isdecimal() and mm.mm_arg_end > mm.mm_arg_start:
            number, offset, left = place
            size = min(mm.mm_arg_end - mm.mm_arg_start, left, _LONGEST)
            found[int(pid)] = Place(f"pages-{number}.img", offset, size)
    return found


def _decode_image(images: Mapping[str, bytes], name: str, kind: str) -> Iterator[Any]:
    data = images[name]
    for count, entry in enumerate(decode_messages(io.BytesIO(data), len(data), kind)):
        if count >= _MOST:
            raise Damage(f"has more than {_MOST} entries")
        yield entry


def _process(images: Mapping[str, bytes], entry: Any) -> Process:
    [core, *_] = [*_decode_image(images, f"core-{entry.pid}.img", "core")] or [None]
    name = _text(core.tc.comm) if core is not None else ""
    state = _STATES.get(core.tc.task_state, "") if core is not None else ""
    # CRIU records a thread for a zombie too, and leaves its number unset.
    threads = tuple(entry.threads) if entry.pid in entry.threads else ()
    return Process(entry.pid, entry.ppid, name, state, (), threads, (), (), None)


def _files_number(images: Mapping[str, bytes], pid: int) -> int:
    """Return the number of the image of a process's descriptors."""
    if f"ids-{pid}.img" in images:
        for ids in _decode_image(images, f"ids-{pid}.img", "ids"):
            return int(ids.files_id)
    for core in _decode_image(images, f"core-{pid}.img", "core"):
        return int(core.ids.files_id)
    return 0


def _list_open_files(
    descriptors: Any, files: Mapping[int, Any], most: int
) -> tuple[tuple[File, ...], tuple[Socket, ...]]:
    """Several processes may name the same image of descriptors; so the limit counts all together."""
    found: list[File] = []
    sockets: list[Socket] = []
    for each in descriptors:
        if len(found) + len(sockets) >= most:
            raise Damage(f"has descriptors beyond the limit of {_MOST} for all processes together")
        file = files.get(each.id)
        socket = _socket(each.fd, file) if file is not None else None
        if socket is not None:
            sockets.append(socket)
        else:
            path = _path(file, files) if file is not None else ""
            found.append(File(each.fd, _TYPES.get(each.type, f"type {each.type}"), path))
    return tuple(found), tuple(sockets)


def _path(file: Any, files: Mapping[int, Any]) -> str:
    if file.HasField("reg"):
        return _text(file.reg.name)
    for kind in ("tty", "fifo"):
        if file.HasField(kind):
            beside = files.get(getattr(file, kind).regf_id)
            return _text(beside.reg.name) if beside is not None and beside.HasField("reg") else ""
    if file.HasField("pipe"):
        return f"pipe:[{file.pipe.pipe_id}]"
    return ""


def _socket(descriptor: int, file: Any) -> Socket | None:
    if file.HasField("isk"):
        inet = inet_sockets.parse(file.isk)
        local, remote = _format_end(inet.local, inet.local_port), _format_end(inet.remote, inet.remote_port)
        return Socket(descriptor, inet.protocol, local, remote if inet.remote_port else "", inet.state)
    if file.HasField("usk"):
        name = _text(file.usk.name)
        # An abstract name begins with a zero (unix(7)), and is shown with @, as ss(8) does.
        local = "@" + name[1:] if name.startswith("\0") else name.rstrip("\0")
        remote = f"unix:[{file.usk.peer}]" if file.usk.peer else ""
        state = _UNIX_STATES.get(file.usk.state, "")
        return Socket(descriptor, _UNIX.get(file.usk.type, "unix"), local, remote, state)
    for kind, protocol in (("nlsk", "netlink"), ("psk", "packet")):
        if file.HasField(kind):
            return Socket(descriptor, protocol, str(getattr(file, kind).protocol), "", "")
    return None


def _format_end(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _parse_pagemap(data: bytes) -> pagemap.Pagemap:
    source = Source(io.BytesIO(data), len(data))
    source.begin("pagemap")
    return pagemap.read(source)


def _memory(images: Mapping[str, bytes], pid: int, pages: pagemap.Pagemap) -> Memory | None:
    """Return None if the image of the mappings is missing, damaged, or too large to read."""
    try:
        [mm] = _decode_image(images, f"mm-{pid}.img", "mm")
    except (KeyError, ValueError, Damage):
        return None
    mapped = sum(max(0, vma.end - vma.start) for vma in mm.vmas)
    return Memory(mapped, pages.present * _PAGE, pages.in_parent * _PAGE)


def _in_order(processes: list[Process]) -> Iterator[Process]:
    """Yield each process after its parent, by PID; one whose parents form a circle comes last."""
    children: dict[int, list[Process]] = {}
    pids = {each.pid for each in processes}
    for each in sorted(processes, key=lambda process: -process.pid):
        children.setdefault(each.parent if each.parent in pids else 0, []).append(each)
    seen: set[int] = set()
    waiting = [*children.get(0, ())]
    while waiting:
        process = waiting.pop()
        if process.pid in seen:
            continue
        seen.add(process.pid)
        yield process
        waiting += children.get(process.pid, ())
    yield from (each for each in processes if each.pid not in seen)


def _text(value: str | bytes) -> str:
    """Return a string; protobuf in C returns bytes for text that is not UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
