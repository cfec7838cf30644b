"""Replaces device nodes that are mounts of their own, in the mounts of a restored container.

If a container has a user namespace, or a node was given as a volume, its /dev/nvidia0 is this host's node,
mounted on an empty file. CRIU restores such a mount from the old path, and no image can change that. So a
thread of gpusnap replaces the node afterwards, while the GPU processes are stopped. The thread joins the
container's mount namespace; the other threads stay where they are.

The container's files may be malicious. So gpusnap follows no link, opens each directory from the one above
it, and makes or removes nothing outside the container's /dev. The nodes come from this host's /dev, with the
numbers that the caller knows.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import ContainerError, reason
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.runtime.container_files import directory

_T = TypeVar("_T")

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def mounted_nodes(init: int) -> tuple[tuple[str, int, int], ...]:
    """Return (path, major, minor) of the character devices below a container's /dev that are mounts.

    All of them, of a GPU or not; empty if the process is gone. Raises Unanswered.
    """
    return question_process.ask(init, "the mounts in its /dev", _mounted_nodes, init)


def _mounted_nodes(init: int) -> tuple[tuple[str, int, int], ...]:
    found: dict[str, tuple[str, int, int]] = {}
    for mount in proc.mounts(init):
        parts = mount.destination.split("/")[1:]
        if len(parts) < 2 or parts[0] != "dev" or ".." in parts:
            continue
        with suppress(OSError), directory(init, os.path.dirname(mount.destination)) as above:
            info = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
            if stat.S_ISCHR(info.st_mode):
                numbers = os.major(info.st_rdev), os.minor(info.st_rdev)
                found[mount.destination] = (mount.destination, *numbers)
    return tuple(sorted(found.values()))


def device_nodes(init: int) -> tuple[tuple[str, int, int, str], ...]:
    """Return ("c" or "b", major, minor, path) of each device in a container's /dev itself, by path.

    Empty if /dev is this host's own, or the process is gone; mounts in it are not included. No link is
    followed. Raises ContainerError if this host lacks memory or descriptors to read it, Unanswered.
    """
    found, error = question_process.ask(init, "its /dev", _device_nodes, init)
    if error is not None and error.errno in proc.PASSING:
        raise ContainerError(
            f"/dev of the container of process {init} cannot be read: {reason(error)}",
            hint="free memory or close files, then try again",
            code="GPS-004",
        ) from error
    return tuple(sorted(found, key=lambda each: each[3]))


def _device_nodes(init: int) -> tuple[list[tuple[str, int, int, str]], OSError | None]:
    """Return them in any order, and the error that prevented more."""
    found: list[tuple[str, int, int, str]] = []
    try:
        _add_device_nodes(init, found)
    except OSError as error:
        return found, error
    return found, None


def _add_device_nodes(init: int, found: list[tuple[str, int, int, str]]) -> None:
    """Add them in any order. Raises OSError."""

    def fail(error: OSError) -> None:
        raise error

    with ExitStack() as stack:
        root = _open(stack, f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        top = _open(stack, "dev", _FOLDER, root)
        own = os.fstat(top).st_dev
        if own == os.stat("/dev").st_dev:
            return
        walk = os.fwalk("dev", onerror=fail, dir_fd=root, follow_symlinks=False)
        for folder, folders, names, descriptor in walk:
            inner = (os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_dev for name in folders)
            folders[:] = [
                name for name, device in zip(list(folders), list(inner), strict=True) if device == own
            ]
            for name in names:
                info = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                kind = {stat.S_IFCHR: "c", stat.S_IFBLK: "b"}.get(stat.S_IFMT(info.st_mode))
                if kind is not None and info.st_dev == own:
                    numbers = os.major(info.st_rdev), os.minor(info.st_rdev)
                    found.append((kind, *numbers, f"/{folder}/{name}"))


def replace_nodes(init: int, changes: Sequence[Change]) -> None:
    """Unmount each change's old node, a mount of its own, in a container, and mount its new ones there.

    All at once, so two may be swapped. `init`: a process of the container, in which nothing may use the GPU.
    A container whose /dev is this host's is not changed. Raises ContainerError; the container may then lack
    nodes. There is no deadline: CRIU restores no file system in user space, so the mounts here were just made
    by the runtime, from mounts that the caller chose.
    """
    if not changes:
        return
    try:
        with ExitStack() as stack:
            trees = {node: _clone(stack, node) for change in changes for node in change.new}
            root = _open(stack, f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            mounts = f"/proc/{init}/ns/mnt"
            space = _open(stack, mounts, os.O_RDONLY | os.O_CLOEXEC)
            dev = _open(stack, "dev", _FOLDER, root)
            if os.fstat(dev).st_dev == os.stat("/dev").st_dev:
                return
            mount_namespace.run_joined(space, mounts, lambda: _replace(dev, changes, trees))
    except OSError as error:
        what = f": {error.strerror}" if error.filename is None else f" ({error.filename}): {reason(error)}"
        hint = "gpusnap needs Linux 5.2 or later for this" if error.errno == errno.ENOSYS else ""
        raise ContainerError(
            f"the GPU's device nodes in the restored container cannot be replaced{what}", hint=hint
        ) from error


def _replace(dev: int, changes: Sequence[Change], trees: Mapping[Node, int]) -> None:
    """Replace them in the container's mounts. First everything is checked, and only then changed."""
    with ExitStack() as stack:
        folders: dict[str, int] = {}

        def place(path: str) -> tuple[int, str]:
            folder, _, name = _make_path_below_dev(path).rpartition("/")
            if folder not in folders:
                folders[folder] = _folder(stack, dev, folder)
            return folders[folder], name

        old = {change.old.path: place(change.old.path) for change in changes}
        new = {node.path: (node, *place(node.path)) for change in changes for node in change.new}
        for path, (folder, name) in old.items():
            _check_mounted(folder, name, path)
        for path, (_, folder, name) in new.items():
            if path not in old:
                _make(folder, name, path)
        for path, (folder, name) in old.items():
            mount_namespace.detach(folder, name, path)
        for path, (node, folder, name) in new.items():
            _mount(trees[node], folder, name, path)
        for path, (folder, name) in old.items():
            if path not in new:
                with _open_empty(folder, name, path):
                    os.unlink(name, dir_fd=folder)


def _folder(stack: ExitStack, dev: int, path: str) -> int:
    """Open a directory below /dev, on the same file system: a mount there is not only the container's."""
    inner = dev
    for part in path.split("/") if path else ():
        inner = _open(stack, part, _FOLDER, inner)
        if os.fstat(inner).st_dev != os.fstat(dev).st_dev:
            raise _make_strange_error(f"/dev/{path}", "is another file system")
    return inner


def _check_mounted(folder: int, name: str, path: str) -> None:
    """Check that a mount of a device is there."""
    info = _look("stat", path, lambda: os.stat(name, dir_fd=folder, follow_symlinks=False))
    if not stat.S_ISCHR(info.st_mode) or info.st_dev == os.fstat(folder).st_dev:
        raise _make_strange_error(path, "is not a device mounted there")


def _make(folder: int, name: str, path: str) -> None:
    """Make an empty file to mount on, owned by the directory's owner.

    Made as that user: root of this host may have no access to the container's file system
    (user_namespaces(7)).
    """
    owner = os.fstat(folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with mount_namespace.in_the_name_of(owner.st_uid, owner.st_gid):
        os.close(_look("open", path, lambda: os.open(name, flags, 0o600, dir_fd=folder)))


@contextmanager
def _open_empty(folder: int, name: str, path: str) -> Iterator[int]:
    """Open the empty file under a mount; anything else there does not belong to gpusnap."""
    file = _look("open", path, lambda: os.open(name, _LOOK, dir_fd=folder))
    try:
        info = os.fstat(file)
        own = info.st_dev == os.fstat(folder).st_dev
        if not stat.S_ISREG(info.st_mode) or info.st_size or not own:
            raise _make_strange_error(path, "is mounted on something other than an empty file")
        yield file
    finally:
        os.close(file)


def _mount(tree: int, folder: int, name: str, path: str) -> None:
    with _open_empty(folder, name, path) as file:
        mount_namespace.move_mount(tree, path, onto=file)
    # CRIU would see the host's peer group in it, and refuse the next dump.
    mount_namespace.make_private(folder, name, path)


def _clone(stack: ExitStack, node: Node) -> int:
    """Return a mount of this host's node that is not mounted anywhere yet."""
    tree = mount_namespace.open_tree(node.path)
    stack.callback(os.close, tree)
    info = os.fstat(tree)
    if not stat.S_ISCHR(info.st_mode) or info.st_rdev != os.makedev(node.major, node.minor):
        raise _make_strange_error(node.path, f"is not the device {node.major}:{node.minor} on this host")
    return tree


def _open(stack: ExitStack, path: str, flags: int, above: int | None = None) -> int:
    descriptor = _look("open", path, lambda: os.open(path, flags, dir_fd=above))
    stack.callback(os.close, descriptor)
    return descriptor


def _look(call: str, path: str, work: Callable[[], _T]) -> _T:
    """Return the result of a call on a name in a directory; its error names the whole path."""
    try:
        return work()
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{call} {path}") from error


def _make_path_below_dev(path: str) -> str:
    name = path.removeprefix("/dev/")
    if name == path or any(part in ("", ".", "..") for part in name.split("/")):
        raise _make_strange_error(path, "is not a valid location for a device")
    return name


def _make_strange_error(path: str, why: str) -> OSError:
    return OSError(errno.EINVAL, f"{path} {why}")
