"""Chunks known from earlier checkpoints: which plain content is in which blob, and in which layout.

One index file for a store or a container, {"version": 3, "layouts": [path, …], "chunks": {plain hex:
[index of the layout in that list, stored, encoding, blob hex, inode, st_mtime_ns], …}}, the newest entries
last. It only saves work: a missing, broken or older one counts as empty, and what is read later is still
checked against its digests. It is this host's own file, never one of an archive.

A blob is linked into a checkpoint without being read. So an entry identifies the file at the time when its
content was known to be right and synced: another inode, size or time of change is a miss. Nobody changes a
blob on purpose; an accidental change also changes its st_mtime (inode(7)). A link changes only the st_ctime,
so that is not compared. A compressed blob is not read either, to check whether it contains what its entry
says. So an entry for one is made only when it is compressed here, never from a checkpoint that came from
elsewhere. Content is known to be right if it was hashed and written from one private copy
(gpusnap.oci.chunks.writer), or if its digest was checked when it arrived (gpusnap.oci.layout.partial_blob).
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Iterable

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, disk_error
from gpusnap.oci.base.files import open_nested_folder, read_regular, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks.table import Encoding, Table
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.layout import Layout

# 1 TiB in chunks of 8 MiB, and a file of about 28 MiB.
MOST_ENTRIES = 1 << 17
_LARGEST_FILE = 64 << 20
# Version 1 had entries from checkpoints of elsewhere, version 2 chunks that were hashed where a process could
# change them before they were written.
_VERSION = 3


@dataclass(frozen=True, slots=True)
class Place:
    """The blob of a known chunk, of `stored` bytes, the path of a layout that has it, and its file there."""

    blob: str
    stored: int
    encoding: Encoding
    layout: str
    inode: int
    modified: int
    """st_mtime_ns"""

    def is_unchanged(self) -> bool:
        """Whether its blob is still the same file."""
        found = _file(self.layout, self.blob)
        return found is not None and (found.st_size, found.st_ino, found.st_mtime_ns) == (
            self.stored,
            self.inode,
            self.modified,
        )


class Known:
    """The index, by the path of its file; threads may share it. Broken entries are ignored."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._lock = threading.Lock()
        self._read: dict[str, Place] | None = None

    @property
    def _places(self) -> dict[str, Place]:
        """The entries; the file is read when they are needed first. The lock is held."""
        if self._read is None:
            self._read = _read(self.path)
        return self._read

    def __len__(self) -> int:
        with self._lock:
            return len(self._places)

    def find(self, plain: str) -> Place | None:
        """Return where the chunk of a plain digest is; None if its blob is wrong now, and forget it."""
        with self._lock:
            place = self._places.get(plain)
        if place is not None and not place.is_unchanged():
            self.forget(plain)
            return None
        return place

    def forget(self, plain: str) -> None:
        """Remove an entry."""
        with self._lock:
            self._places.pop(plain, None)

    def add(self, plain: str, place: Place) -> None:
        """Add an entry as the newest; the oldest is removed if there are too many."""
        with self._lock:
            self._places.pop(plain, None)
            self._places[plain] = place
            while len(self._places) > MOST_ENTRIES:
                del self._places[next(iter(self._places))]

    def prune(self) -> int:
        """Forget the chunks whose blobs no longer exist or are no longer right; return their number."""
        with self._lock:
            gone = [plain for plain, place in self._places.items() if not place.is_unchanged()]
            for plain in gone:
                del self._places[plain]
        return len(gone)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._read = {}

    def learn(self, tables: Iterable[Table], layout: Layout, *, foreign: bool = False) -> None:
        """Add all chunks of a layout that is synced, and whose blobs are known to be right.

        foreign: the tables come from elsewhere, and may be wrong about what a compressed blob contains. Then
        only chunks that are their own blobs are added.
        """
        for table in tables:
            for chunk in table.chunks:
                if foreign and (chunk.encoding != "plain" or chunk.blob != chunk.plain):
                    continue
                found = _file(layout.path, chunk.blob)
                if found is not None and found.st_size == chunk.stored:
                    place = chunk.blob, chunk.stored, chunk.encoding, layout.path
                    self.add(chunk.plain, Place(*place, found.st_ino, found.st_mtime_ns))

    def save(self) -> None:
        """Write the index, atomically. Raises DiskFull, DiskError."""
        with self._lock:
            content = _encode_places(self._places)
        folder, name = os.path.split(self.path)
        try:
            with open_nested_folder(folder) as descriptor:
                replace(name, content, descriptor)
        except OSError as error:
            raise disk_error(error, folder, "the index of known chunks", len(content)) from error


def _file(layout: str, blob: str) -> os.stat_result | None:
    """Return the file of a blob; None if there is none, or something else has its name."""
    try:
        found = os.stat(os.path.join(layout, "blobs", "sha256", get_hex(blob)), follow_symlinks=False)
    except OSError:
        return None
    return found if stat.S_ISREG(found.st_mode) else None


def _encode_places(places: dict[str, Place]) -> bytes:
    layouts: dict[str, int] = {}
    rows = {}
    for plain, place in places.items():
        at = layouts.setdefault(place.layout, len(layouts))
        file = [place.inode, place.modified]
        rows[get_hex(plain)] = [at, place.stored, place.encoding, get_hex(place.blob), *file]
    value = {"version": _VERSION, "layouts": list(layouts), "chunks": rows}
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _read(path: str) -> dict[str, Place]:
    folder, name = os.path.split(path)
    try:
        with open_nested_folder(folder) as descriptor:
            value = parse_json(read_regular(name, descriptor, limit=_LARGEST_FILE))
        return _parse_places(value)
    except (OSError, ValueError, RecursionError, DigestError):
        return {}


def _parse_places(value: object) -> dict[str, Place]:
    """Parse the entries of an index. Raises ValueError, DigestError for a broken one."""
    match value:
        case {"version": 3, "layouts": list(layouts), "chunks": dict(rows)} if len(rows) <= MOST_ENTRIES:
            return {PREFIX + str(plain): _place(row, layouts) for plain, row in rows.items()}
        case _:
            raise ValueError("it is not an index of known chunks")


def _place(row: object, layouts: list[object]) -> Place:
    match row:
        case [
            int(at),
            int(stored),
            ("plain" | "zstd" | "planes") as encoding,
            str(blob),
            int(inode),
            int(modified),
        ] if 0 <= at < len(layouts):
            layout = layouts[at]
            if isinstance(layout, str) and layout.startswith("/") and "\0" not in layout:
                get_hex(PREFIX + blob)
                return Place(PREFIX + blob, stored, encoding, layout, inode, modified)
    raise ValueError("it has a damaged entry")
