"""Device nodes of GPUs: those of a container, and those of this host that replace them.

A node is recognized by its device number. /proc/devices says which number a driver has: the kernel assigns
all of NVIDIA's majors but one, and AMD's kfd, when modules are loaded, and they differ between hosts. If the
kernel does not list a driver (it is masked in some containers), this host's own node says it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import Refused, advise, reason
from gpusnap.runtime_shim.gpu.api.device_files import LAST_GPU_MINOR, character_drivers
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Node
from gpusnap.runtime_shim.gpu.api.errors import GpuError

_DRM_MAJOR = 226  # Documentation/admin-guide/devices.txt
_FIRST_RENDER = 128  # drivers/gpu/drm/drm_drv.c: 64 minors for each kind of node, render nodes the third

# Path below /dev, the driver's names in /proc/devices (the first listed one counts), and its minor.
_NVIDIA = ("nvidia", "nvidia-frontend", "nvidiactl")
_SHARED: tuple[tuple[str, tuple[str, ...], int], ...] = (
    ("nvidiactl", _NVIDIA, 255),
    ("nvidia-modeset", ("nvidia-modeset", *_NVIDIA), 254),
    ("nvidia-uvm", ("nvidia-uvm",), 0),
    ("nvidia-uvm-tools", ("nvidia-uvm",), 1),
    ("nvidia-nvswitchctl", ("nvidia-nvswitch",), 255),
    ("kfd", ("kfd",), 0),
)
_CAPS = compile_later(r"nvidia-caps/nvidia-cap(\d{1,4})")
_GPU = compile_later(r"nvidia(\d{1,3})")
_DRI = compile_later(r"dri/(?:renderD|card)(\d{1,4})")
_FOLDERS = ("", "dri", "nvidia-caps")
_MOST = 4096
"""Nodes that are read from one directory; a real device directory has fewer."""


@dataclass(frozen=True, slots=True)
class Change:
    """A node of the container, and what replaces it after the restore."""

    old: Node
    new: tuple[Node, ...]
    """One; two if its old name is kept beside the new one; none if it was such a second name."""


def in_container(pid: int, gpus: Sequence[Gpu]) -> tuple[Node, ...]:
    """Return the GPU nodes in the /dev of a process, sorted by path; the process may be suspended.

    `gpus`: this host's. The container decides what is there, so no symbolic link is followed. The node of a
    GPU that the driver does not list is omitted. Raises GpuError if /dev cannot be read.
    """
    majors = _majors("/dev")
    found = []
    for path, device in question_process.ask(pid, "its /dev", _list_devices, f"/proc/{pid}/root/dev"):
        node = _identify(path, os.major(device), os.minor(device), majors, gpus)
        if node is not None:
            found.append(node)
    return tuple(sorted(found))


def on_host(gpus: Sequence[Gpu]) -> tuple[Node, ...]:
    """Return the nodes of this host's GPUs, sorted by path, also those that nobody has made in /dev yet."""
    majors = _majors("/dev")
    found = []
    for path, names, minor in _SHARED:
        major = _find_first(majors, names)
        if major is not None:
            found.append(Node(f"/dev/{path}", major, minor))
    major = _find_first(majors, _NVIDIA)
    if major is not None:
        found += [Node(f"/dev/nvidia{gpu.minor}", major, gpu.minor, gpu.uuid) for gpu in gpus]
    for path, device in _devices("/dev"):
        number = os.major(device), os.minor(device)
        if _DRI.fullmatch(path) or _CAPS.fullmatch(path):
            node = _identify(path, *number, majors, gpus)
            if node is not None:
                found.append(node)
    return tuple(sorted(found))


def plan_changes(
    old: Sequence[Node], here: Sequence[Node], pairs: Iterable[tuple[str, str]], *, keep_names: bool = False
) -> tuple[Change, ...]:
    """Return the changes of a container's nodes if its GPUs are restored as the second ones of `pairs`.

    `old`: the container's, `here`: this host's (`on_host`). By default it gets this host's nodes of those
    GPUs. With `keep_names`, each old name stays, with the new number, and the host's name is made beside it
    unless it conflicts with an old name. A node that stays the same is in no change; nor is one that merely
    swaps places (GPU 0 for 1 and 1 for 0). Raises Refused if this host lacks a counterpart.
    """
    of = dict(pairs)
    wanted = [(node, _counterpart(node, here, of)) for node in old]
    taken = {node.path for node in old}
    if keep_names:
        kept = [Change(node, _keep_names(node, found, taken)) for node, found in wanted]
        return tuple(change for change in kept if change.new != (_strip_names(change.old),))
    after = dict.fromkeys(_strip_names(found) for _, found in wanted)
    before = {_strip_names(node) for node in old}
    coming = [node for node in after if node not in before]
    result = []
    for node in old:
        if _strip_names(node) in after:
            continue
        # A node is replaced by one of its own kind, so that its owner and mode are right.
        choice = next((new for new in coming if _kind(new.path) == _kind(node.path)), None)
        if choice is not None:
            coming.remove(choice)
        result.append(Change(node, () if choice is None else (choice,)))
    return tuple(result)


def _counterpart(node: Node, here: Sequence[Node], of: Mapping[str, str]) -> Node:
    if not node.gpu:
        found = next((n for n in here if n.path == node.path and not n.gpu), None)
    else:
        uuid = of.get(node.gpu, "")
        kind = _kind(node.path)
        found = next((n for n in here if n.gpu == uuid and _kind(n.path) == kind), None)
    if found is None:
        of_gpu = f" for GPU {of.get(node.gpu) or node.gpu}" if node.gpu else ""
        raise Refused(
            f"the container has the device {node.path}, but this host has no such device{of_gpu}",
            hint="load the driver's module for it (nvidia-modprobe -u creates /dev/nvidia-uvm)"
            if node.path.startswith("/dev/nvidia-uvm")
            else "restore on a host that has it",
        )
    return found


def _keep_names(node: Node, found: Node, taken: set[str]) -> tuple[Node, ...]:
    first = Node(node.path, found.major, found.minor)
    if found.path in taken:
        return (first,)
    taken.add(found.path)
    return (first, _strip_names(found))


def _strip_names(node: Node) -> Node:
    return Node(node.path, node.major, node.minor)


def _kind(path: str) -> str:
    return path.rstrip("0123456789")


def _identify(
    path: str, major: int, minor: int, majors: Mapping[str, int], gpus: Sequence[Gpu]
) -> Node | None:
    """Return the node if it belongs to a GPU driver: by number, or by name if that is not listed."""
    where = f"/dev/{path}"
    frontend = _find_first(majors, _NVIDIA)
    if (major == frontend and minor <= LAST_GPU_MINOR) or _GPU.fullmatch(path):
        gpu = next((gpu for gpu in gpus if gpu.minor == minor), None)
        return Node(where, major, minor, gpu.uuid) if gpu is not None else None
    if major == _DRM_MAJOR and _DRI.fullmatch(path):
        gpu = _find_drm_gpu(minor, gpus)
        return Node(where, major, minor, gpu.uuid) if gpu is not None else None
    shared = any(path == name for name, _, _ in _SHARED) or _CAPS.fullmatch(path)
    return Node(where, major, minor) if shared else None


def _find_drm_gpu(minor: int, gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU of a DRM node: by its own number for a render node, else by PCI address."""
    own = next((gpu for gpu in gpus if gpu.minor == minor >= _FIRST_RENDER), None)
    owner = _pci(minor) if own is None else ""
    return own or next((gpu for gpu in gpus if owner and gpu.pci == owner), None)


def _majors(dev: str) -> dict[str, int]:
    """Return major by the driver's name, from /proc/devices; otherwise from the nodes in `dev`."""
    majors: dict[str, int] = {}
    for path, device in _devices(dev):
        names = next((names for name, names, _ in _SHARED if name == path), None)
        if names is None and _GPU.fullmatch(path):
            names = _NVIDIA
        if names is None and _CAPS.fullmatch(path):
            names = ("nvidia-caps",)
        if names is not None:
            majors.setdefault(names[0], os.major(device))
    listed = _read_listed_majors()
    if _find_first(listed, _NVIDIA) is not None:
        majors.pop(_NVIDIA[0], None)
    return majors | listed


def _read_listed_majors(table: str = "/proc/devices") -> dict[str, int]:
    return dict(reversed(character_drivers(table)))  # if one is listed twice, the first counts


def _find_first(majors: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((majors[name] for name in names if name in majors), None)


def _list_devices(dev: str) -> list[tuple[str, int]]:
    return list(_devices(dev))


def _devices(dev: str) -> Iterator[tuple[str, int]]:
    """Yield (path below `dev`, device number) of each character device there, also in dri and nvidia-caps."""
    try:
        top = os.open(dev, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    except OSError as error:
        lack = advise(error)
        raise GpuError(
            f"the devices in {dev} cannot be listed: {reason(error)}",
            hint=lack or "run gpusnap as root",
            code="" if lack else "GPS-005",
        ) from error
    try:
        for folder in _FOLDERS:
            yield from _in_folder(top, folder)
    except OSError as error:
        raise GpuError(f"the devices in {dev} cannot be listed: {reason(error)}", hint="try again") from error
    finally:
        os.close(top)


def _in_folder(top: int, folder: str) -> Iterator[tuple[str, int]]:
    try:
        inner = os.open(
            folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=top
        )
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ELOOP:
            return  # it is a link
        raise
    try:
        for name in sorted(os.listdir(inner))[:_MOST]:
            try:
                found = os.stat(name, dir_fd=inner, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if stat.S_ISCHR(found.st_mode):
                yield os.path.join(folder, name), found.st_rdev
    finally:
        os.close(inner)


def _pci(minor: int) -> str:
    """Return the PCI address of a DRM device (sysfs), as in `Gpu.pci`; empty if it has none."""
    try:
        return os.path.basename(os.readlink(f"/sys/dev/char/{_DRM_MAJOR}:{minor}/device"))
    except OSError:
        return ""
