"""NVIDIA's device files that a process holds, and whether it has the CUDA library: only from /proc.

No driver library is loaded and nothing is opened, so every process of every container can be checked. A node
is NVIDIA's by its path (/dev/nvidia*) or, if it was renamed or is elsewhere, by the major number of its
device. The path is that in the process's own mount namespace, also if the node was deleted; the numbers are
-1 if the kernel does not say what a mapped node is, and no node has its GPU's UUID here. A process that ends
meanwhile holds nothing. If the kernel denies access, PermissionRefused is raised, because "holds nothing"
would be a guess.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from gpusnap.runtime_shim.base import deadlines, question_process
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.gpu.api.driver import HeldFiles, Node
from gpusnap.runtime_shim.gpu.api.errors import GpuError, PermissionRefused
from gpusnap.runtime_shim.process import proc

# "195 char  Nvidia graphics devices" (Documentation/admin-guide/devices.txt): used if the kernel driver is
# not loaded, or not visible in /proc/devices.
NVIDIA_MAJOR = 195

# Of that major, minors 0 to 247 are GPUs, 254 is nvidia-modeset, 255 nvidiactl (nv-chardev-numbers.h of
# NVIDIA's open kernel modules).
LAST_GPU_MINOR = 247

# The names of that major in /proc/devices: "nvidia" and "nvidiactl", "nvidia-frontend" with older drivers.
_FRONTENDS = frozenset({"nvidia", "nvidiactl", "nvidia-frontend"})

_PREFIX = "/dev/nvidia"
DELETED = " (deleted)"
"""What the kernel adds to the path of a file that has no name any more."""


def character_drivers(table: str = "/proc/devices") -> tuple[tuple[str, int], ...]:
    """Return (name, major) of each driver of character devices; none if the table is masked (containers).

    Raises GpusnapError if it cannot be read: a process that uses a GPU would seem not to.
    """
    found = []
    for line in proc.lines(table):
        if line.startswith("Block devices"):
            break
        number, _, name = line.strip().partition(" ")
        if number.isdigit():
            found.append((name, int(number)))
    return tuple(found)


def nvidia_majors(table: str = "/proc/devices") -> tuple[frozenset[int], frozenset[int]]:
    """Return the majors of the GPUs' own nodes, and of all of NVIDIA's (uvm and caps have dynamic ones)."""
    listed = [(name, major) for name, major in character_drivers(table) if name.startswith("nvidia")]
    # If the table is masked, the documented number remains.
    gpus = {major for name, major in listed if name in _FRONTENDS} or {NVIDIA_MAJOR}
    return frozenset(gpus), frozenset(gpus | {major for _, major in listed})


def nodes(pid: int) -> tuple[Node, ...]:
    """Return NVIDIA's device files that the process has open (O_PATH too) or mapped, sorted, each once."""
    majors = nvidia_majors()[1]
    found = {*_open_nodes(pid, majors).values(), *(node for *_, node in _iterate_mapped_nodes(pid, majors))}
    return tuple(sorted(found))


def holds(pid: int) -> bool:
    """Whether there are any. Mappings (PyTorch has thousands) are checked only if none is open."""
    majors = nvidia_majors()[1]
    return bool(_open_nodes(pid, majors)) or any(True for _ in _iterate_mapped_nodes(pid, majors))


def list_held(pid: int) -> HeldFiles:
    """Return the same with every descriptor (by number) and every mapping (by address) of such a file."""
    majors = nvidia_majors()[1]
    opened = sorted(_open_nodes(pid, majors).items())
    mapped = _iterate_mapped_nodes(pid, majors, every=True)
    return HeldFiles(
        tuple((number, node.path) for number, node in opened),
        tuple((start, end, node.path) for start, end, node in mapped),
    )


def gpu_minors(pid: int) -> tuple[int, ...]:
    """Return the minors of the GPUs whose nodes the process holds, sorted; by device, not by name."""
    frontends = nvidia_majors()[0]
    return tuple(sorted({node.minor for node in nodes(pid) if _is_gpu(node, frontends)}))


def dev_minors(pid: int) -> tuple[int, ...]:
    """Return the minors of the GPUs that have a node in the process's own /dev, sorted: those it could open.

    The container decides what is there, so no symbolic link is followed.
    """
    frontends = nvidia_majors()[0]
    return tuple(sorted({node.minor for node in _dev_nodes(pid, frontends) if _is_gpu(node, frontends)}))


def mapped_files(pid: int) -> tuple[str, ...]:
    """Return the paths of the files that the process has mapped, in its own root, each once."""
    return tuple(dict.fromkeys(path for *_, path in mappings(pid)))


def maps_libcuda(pid: int) -> bool:
    """Whether libcuda.so* is mapped, as in a suspended process, which holds no device file."""
    return any(os.path.basename(path).startswith("libcuda.so") for path in mapped_files(pid))


def comm(pid: int) -> str:
    """Return the process's name for a message, from the kernel (15 bytes); "?" if it has ended."""
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            name = file.read().rstrip(b"\n").decode("utf-8", "replace")
    except OSError:
        return "?"
    return "".join(c if c.isprintable() else "?" for c in name)


def has_ended(pid: int, *, within: float) -> bool:
    """Whether the process has ended, or ends within `within` seconds: a killed one needs a moment."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:
        return not proc.is_alive(pid)  # no descriptor can be opened, or a kernel before 5.3
    try:
        return not proc.is_alive(pid) or deadlines.wait_for_end(process, within)
    finally:
        os.close(process)


def iterate_opened(pid: int) -> Iterator[tuple[int, str, os.stat_result | OSError]]:
    """Yield number, path and stat(2) of the files that the process has open, without sockets and the like.

    Raises as `gone_or_raise`; an error of stat(2) is yielded. The path may end with DELETED.
    """
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError as error:
        gone_or_raise(error, pid)
        return
    paths: dict[str, str] = {}
    for name in names:
        link = f"{folder}/{name}"
        try:
            path = os.readlink(link)
        except OSError as error:
            gone_or_raise(error, pid)
            continue
        # socket:[1], pipe:[2], anon_inode:… are never device files.
        if path.startswith("/"):
            paths[link] = path
    for link, found in question_process.stat_files(pid, paths).items():
        yield int(link.rpartition("/")[2]), paths[link], found


def _open_nodes(pid: int, majors: frozenset[int]) -> dict[int, Node]:
    """Return the open nodes, by number of the descriptor."""
    nodes = ((number, _node(path, found, majors)) for number, path, found in iterate_opened(pid))
    return {number: node for number, node in nodes if node}


def _iterate_mapped_nodes(
    pid: int, majors: frozenset[int], *, every: bool = False
) -> Iterator[tuple[int, int, Node]]:
    """Yield mapped nodes with start and end; of several mappings of one path only the first, or `every`."""
    mapped = list(mappings(pid))
    links: dict[str, str] = {}
    for start, end, path in mapped:
        links.setdefault(path, make_link(pid, start, end))
    infos = question_process.stat_files(pid, links.values())
    nodes_by_path = {path: _node(path, infos[link], majors) for path, link in links.items()}
    seen: set[str] = set()
    for start, end, path in mapped:
        node = nodes_by_path[path]
        if node and (every or path not in seen):
            yield start, end, node
        seen.add(path)


def make_link(pid: int, start: int, end: int) -> str:
    """Return the link in /proc to what is mapped there; its path has no meaning in this mount namespace.

    Following it needs CAP_CHECKPOINT_RESTORE; without it, the name must be enough. maps pads the addresses
    with zeros, map_files does not.
    """
    return f"/proc/{pid}/map_files/{start:x}-{end:x}"


def _dev_nodes(pid: int, majors: frozenset[int]) -> Iterator[Node]:
    yield from question_process.ask(pid, "its /dev", _in_dev, pid, majors)


def _in_dev(pid: int, majors: frozenset[int]) -> list[Node]:
    found: list[Node] = []
    try:
        folder = os.open(f"/proc/{pid}/root/dev", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            gone_or_raise(error, pid)
        return found
    try:
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):
                info = os.stat(name, dir_fd=folder, follow_symlinks=False)
                node = _as_node(f"/dev/{name}", info, majors)
                if node:
                    found.append(node)
    except OSError as error:
        gone_or_raise(error, pid)
    finally:
        os.close(folder)
    return found


def mappings(pid: int) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and path of each file mapping in /proc/PID/maps (proc_pid_maps(5)).

    Raises as `gone_or_raise`. The path may end with DELETED.
    """
    try:
        lines = deadlines.read_lines(f"/proc/{pid}/maps")
    except TimeoutError as error:
        raise _make_unanswered_error(error, pid) from error
    except OSError as error:
        gone_or_raise(error, pid)
        return
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            start, _, end = fields[0].partition("-")
            yield int(start, 16), int(end, 16), fields[5]


def _node(path: str, found: os.stat_result | OSError, majors: frozenset[int]) -> Node | None:
    """Return the node behind a magic link of /proc; None if it is no device of NVIDIA."""
    path = path.removesuffix(DELETED)
    if isinstance(found, OSError):
        # Closed or unmapped since, or access is denied.
        refused = found.errno in (errno.EACCES, errno.EPERM)
        return Node(path, -1, -1) if refused and path.startswith(_PREFIX) else None
    return _as_node(path, found, majors)


def _as_node(path: str, found: os.stat_result, majors: frozenset[int]) -> Node | None:
    if not stat.S_ISCHR(found.st_mode):
        return None
    major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
    return Node(path, major, minor) if major in majors or path.startswith(_PREFIX) else None


def _is_gpu(node: Node, frontends: frozenset[int]) -> bool:
    """Whether it is a GPU's own node, by its major or (in a /proc/devices that lacks it) by its name."""
    ours = node.major in frontends or node.path.removeprefix(_PREFIX).isdigit()
    return ours and 0 <= node.minor <= LAST_GPU_MINOR


def _make_unanswered_error(error: TimeoutError, pid: int) -> GpuError:
    """The error if the kernel does not say in time what a process has mapped."""
    return GpuError(
        f"the files that process {pid} ({comm(pid)}) has open could not be listed: {error.filename}: "
        f"{error.strerror}",
        hint="the process is blocked on a file system that does not respond: end the process, or fix "
        "that file system",
        pid=pid,
        code="GPS-225",
    )


def gone_or_raise(error: OSError, pid: int) -> None:
    """Return if the process, or the descriptor, is gone; raise for any other reason."""
    # An ending process has no memory by which the kernel could permit access: EACCES, except for root.
    if error.errno in (errno.ENOENT, errno.ESRCH) or not proc.is_alive(pid):
        return
    message = f"the files that process {pid} ({comm(pid)}) has open could not be listed: {reason(error)}"
    if error.errno in (errno.EACCES, errno.EPERM):
        raise PermissionRefused(
            message, hint="run gpusnap as root or as the container's user", pid=pid
        ) from error
    raise GpuError(message, hint="check that /proc is mounted for this PID namespace", pid=pid) from error
