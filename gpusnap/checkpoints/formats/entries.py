"""Archives, with gpusnap's files in them under their ordinary names.

In an archive of containerd's CRI plugin they have others, see runtime_shim/records/cri_layout.py.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.tar import archive
from gpusnap.oci.tar.archive import Entry
from gpusnap.oci.tar.compression import Readable
from gpusnap.runtime_shim.records import cri_layout

_IMAGES = "checkpoint/"


def name_naturally(entry: Entry) -> Entry:
    """Return an entry of an archive, or of a tar of images alone, under its ordinary name."""
    images = _IMAGES if entry.name.startswith(_IMAGES) else ""
    name = images + cri_layout.name_naturally(entry.name.removeprefix(images))
    if name == entry.name:
        return entry
    entry.info.name = name
    return replace(entry, name=name)


def entries(path: str | Readable, *, where: str = "") -> Generator[Entry, None, None]:
    """Do the same as gpusnap.oci.tar.archive.entries. Raises like that."""
    with closing(archive.entries(path, where=where)) as found:
        yield from map(name_naturally, found)


def read_member(path: str, name: str, *, limit: int) -> bytes | None:
    """Return at most `limit` bytes of one file's content; None if the archive has no such file.

    Raises ArchiveError as `entries` does; entries after the file are not read.
    """
    with closing(entries(path)) as found:
        for entry in found:
            if entry.name == name and entry.content is not None:
                return entry.content.read(limit)
    return None
