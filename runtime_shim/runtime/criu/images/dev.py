"""Changes the GPU nodes in CRIU's image of the container's /dev.

A tmpfs is dumped by `tar --create --gzip --no-unquote --no-wildcards --one-file-system --check-links
--preserve-permissions --sparse --numeric-owner --directory … .` into tmpfs-dev-NUMBER.tar.gz.img; NUMBER is
the kernel's own number of the file system's device. A restore gives the file to `tar --extract --gzip
--no-unquote --no-wildcards` (criu/filesystems.c, tmpfs_dump and tmpfs_restore; criu/image-desc.c). So a node
is an entry such as ./nvidia0, of type 3 (tar(5)), with its major and minor number.

The archive may come from anywhere, and GNU tar creates, as root, everything that it names. So an entry that
two programs may read differently is refused (gpusnap.runtime_shim.runtime.criu.images.dev_tar). This module
refuses a device that nobody gave to the container, a second entry of one name, and entries below a link.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from typing import IO

from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.runtime.criu.images import dev_tar

Device = tuple[str, int, int, str]
"""A device that /dev may hold: "c" or "b", major, minor, path."""

DEFAULT: tuple[Device, ...] = (
    ("c", 1, 3, "/dev/null"),
    ("c", 1, 5, "/dev/zero"),
    ("c", 1, 7, "/dev/full"),
    ("c", 1, 8, "/dev/random"),
    ("c", 1, 9, "/dev/urandom"),
    ("c", 5, 0, "/dev/tty"),
    ("c", 5, 2, "/dev/ptmx"),
)
"""The devices of every container (runtime-spec, config-linux.md, Default Devices); the numbers are those of
Documentation/admin-guide/devices.txt. /dev/console is not among them: in a container it is a terminal of its
own, mounted on an empty file, and a node 5:1 would be this host's console."""

LIMIT, ENTRIES = dev_tar.LIMIT, dev_tar.ENTRIES


def image_name(device: int) -> str:
    """Return the image's name of a tmpfs with this st_dev.

    CRIU names it by the kernel's number of a device, 20 bits of which are the minor (linux/kdev_t.h, MKDEV).
    """
    # The C library keeps the bits in another order (sys/sysmacros.h).
    major = device >> 8 & 0xFFF | device >> 32 & ~0xFFF
    minor = device & 0xFF | device >> 12 & ~0xFF
    return f"tmpfs-dev-{major << 20 | minor}.tar.gz.img"


def rewrite(
    image: bytes | IO[bytes], changes: Sequence[Change] = (), allowed: Iterable[Node | Device] = ()
) -> bytes | None:
    """Return the image with each change's old node replaced by its new ones; None if that changes nothing.

    All changes are made at once, so two nodes may be swapped. In a changed node's header, only name, numbers
    and checksum are new; its second name is a copy of that, directly after it. The rest of the tar stays byte
    for byte. An empty file at a changed node's place is the mount point of a bind mount, and stays.

    `allowed`: the devices that /dev may contain beside `DEFAULT` and the changed ones. Raises ImageError,
    with the entry's name, for anything else, and for an archive that is damaged, that is larger than `LIMIT`,
    or that GNU tar could read differently.
    """
    archive = dev_tar.Archive(io.BytesIO(image) if isinstance(image, bytes) else image)
    rules = _Rules(changes, allowed)
    packer = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # gzip, without a time
    packed: list[bytes] = []
    changed = False

    def put(data: bytes) -> None:
        if changes:
            packed.append(packer.compress(data))

    for entry in archive.entries():
        headers = rules.judge(entry)
        changed = changed or headers != [entry.header]
        if headers:
            put(entry.before)
        for header in headers:
            put(header)
        for piece in archive.content(entry):
            put(piece)
    for piece in archive.read_end():
        put(piece)
    return b"".join([*packed, packer.flush()]) if changed else None


class _Rules:
    """What the archive may contain, and what it contained so far."""

    def __init__(self, changes: Sequence[Change], allowed: Iterable[Node | Device]) -> None:
        self._new: dict[bytes, tuple[Node, ...]] = {}
        self._old: dict[bytes, Node] = {}
        self._kinds: dict[bytes, bytes] = {}
        """Kind by name, as in the archive; also directories that are named only in paths below them."""
        self._implied: set[bytes] = set()
        self._after: set[bytes] = set()
        for change in changes:
            name = _make_path_below_dev(change.old.path)
            if name in self._old:
                dev_tar.refuse(name, "would be changed twice")
            self._old[name], self._new[name] = change.old, change.new
        nodes = [("c", n.major, n.minor, n.path) if isinstance(n, Node) else n for n in allowed]
        self._allowed = {
            (
                dev_tar.CHARACTER if kind == "c" else dev_tar.BLOCK_DEVICE,
                (major, minor),
                path.removeprefix("/dev/").encode(),
            )
            for kind, major, minor, path in (*DEFAULT, *nodes)
        }

    def judge(self, entry: dev_tar.Entry) -> list[bytes]:
        """Return the headers for the entry. Raises ImageError if it is not allowed."""
        self._place(entry)
        if entry.kind == dev_tar.HARD:
            self._check_hard_link(entry)
        if entry.name in self._old:
            return self._change(entry)
        if entry.device and (entry.kind, entry.numbers, entry.name) not in self._allowed:
            major, minor = entry.numbers
            dev_tar.refuse(
                entry.name,
                f"is a device ({major}:{minor}) that the container was not given",
                code="GPS-604",
            )
        self._take(entry.name)
        return [entry.header]

    def _change(self, entry: dev_tar.Entry) -> list[bytes]:
        if entry.kind == dev_tar.FILE and not entry.size:
            self._take(entry.name)
            return [entry.header]
        old, new = self._old[entry.name], self._new[entry.name]
        if entry.kind != dev_tar.CHARACTER:
            dev_tar.refuse(entry.name, "has the name of a GPU device, but is not one")
        if entry.numbers != (old.major, old.minor):
            major, minor = entry.numbers
            dev_tar.refuse(
                entry.name, f"is {major}:{minor}, but the GPU's device was {old.major}:{old.minor}"
            )
        for node in new:
            self._take(_make_path_below_dev(node.path))
        return [entry.rename(_make_path_below_dev(node.path), (node.major, node.minor)) for node in new]

    def _place(self, entry: dev_tar.Entry) -> None:
        """Record the place of the entry: not on another one, and not below a link."""
        name = entry.name
        if not name and entry.kind != dev_tar.FOLDER:
            dev_tar.refuse(name, "is not a directory")
        if name in self._kinds and not (name in self._implied and entry.kind == dev_tar.FOLDER):
            dev_tar.refuse(name, "is listed twice")
        self._implied.discard(name)
        self._kinds[name] = entry.kind
        while b"/" in name:
            name = name.rpartition(b"/")[0]
            if name not in self._kinds:
                self._implied.add(name)
            if self._kinds.setdefault(name, dev_tar.FOLDER) != dev_tar.FOLDER:
                dev_tar.refuse(entry.name, "is in something that is not a directory")
            if len(self._kinds) > dev_tar.ENTRIES:
                raise dev_tar.make_damaged_error(f"has more than {dev_tar.ENTRIES} entries")

    def _check_hard_link(self, entry: dev_tar.Entry) -> None:
        if self._kinds.get(entry.target) not in (dev_tar.FILE, dev_tar.SOFT, dev_tar.FIFO):
            dev_tar.refuse(
                entry.name,
                f"is a hard link to {dev_tar.make_printable(entry.link)}, which is not a file in the image",
            )

    def _take(self, name: bytes) -> None:
        """Record a name of the output; each may occur once."""
        if name in self._after:
            dev_tar.refuse(name, "would exist twice")
        self._after.add(name)


def _make_path_below_dev(path: str) -> bytes:
    name = path.encode("utf-8", "surrogateescape")
    parts = name.removeprefix(b"/dev/").split(b"/")
    if not name.startswith(b"/dev/") or any(part in (b"", b".", b"..") for part in parts):
        dev_tar.refuse(name, "is not a valid location for a device")
    return b"/".join(parts)
