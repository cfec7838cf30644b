"""Whether a checkpoint in an archive, or in a directory of images, is what its digests say."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable

from gpusnap.contents import parts
from gpusnap.damage import Damage, Progress, Verified, damaged, within_manifest
from gpusnap.where import default_store, open_store
from oci.archive import Content, entries
from oci.chunks import MEDIA_TYPES
from oci.digests import PREFIX
from oci.errors import ArchiveError, LayoutError
from oci.layout import Layout
from oci.manifest import Descriptor
from oci.verify import Fault
from oci.workers import for_each
from runtime_shim import manifest
from runtime_shim.manifest import Manifest
from runtime_shim.memory.copies import cores

__all__ = ["in_archive", "in_folder"]

_PIECE = 1 << 20
_OCTETS = "application/octet-stream"
_FOLDER = f"checkpoint/{manifest.FOLDER}/"
_BLOBS = f"{_FOLDER}blobs/sha256/"
_MANIFEST = _FOLDER + manifest.NAME


def in_folder(path: str, progress: Progress) -> Verified:
    """A directory of images: its manifest, and the chunks beside it or in the store."""
    inner = path if manifest.belongs(path) else os.path.join(path, "checkpoint")
    record = manifest.read(inner)
    if record.pages == "store":
        return _chunks_in_store(path, record, progress)
    return _chunks(path, record, Layout(os.path.join(inner, manifest.FOLDER)), progress)


def _chunks_in_store(path: str, record: Manifest, progress: Progress) -> Verified:
    return _chunks(path, record, open_store(default_store()).layout, progress)


def _chunks(path: str, record: Manifest, layout: Layout, progress: Progress) -> Verified:
    """Chunks that a manifest names and a layout has."""
    named = _named(record)
    if not named:
        return Verified(path, "", 0, 0, True, (), NO_DIGESTS)
    done, whole, lock = 0, sum(each.size for each in named), threading.Lock()
    faults: list[Fault] = []

    def check(blob: Descriptor) -> None:
        nonlocal done
        fault = ""
        try:
            layout.check_blob(blob)
        except LayoutError as error:
            fault = "missing" if isinstance(error.__cause__, FileNotFoundError) else str(error)
        with lock:
            done += blob.size
            if fault:
                faults.append(Fault(blob, fault))
            progress(done, whole)

    for_each(named, check, threads=min(cores(), len(named)))
    places = within_manifest(record)
    faulty = tuple(damaged(fault, places) for fault in faults)
    return Verified(path, "", len(named), whole, True, faulty, NO_DIGESTS)


NO_DIGESTS = "CRIU's images and the engine's files have no digests there; those in a store have"


def in_archive(path: str, progress: Progress) -> Verified:
    """An archive, in one pass: that it is whole, and the chunks in it."""
    found: dict[str, tuple[int, bool]] = {}
    data: bytes | None = None
    done, whole = 0, os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            for entry in entries(file, where=path):
                if entry.name == _MANIFEST and entry.content is not None:
                    data = entry.content.read(manifest.LARGEST + 1)
                elif entry.name.startswith(_BLOBS) and entry.content is not None:
                    name = entry.name.removeprefix(_BLOBS)
                    found[PREFIX + name] = entry.info.size, _digest(entry.content) == name
                done += 1
                progress(min(file.tell(), whole), whole)
    except ArchiveError as error:
        damage = Damage("", "", whole, str(error), ("the archive itself",))
        return Verified(path, "", len(found), done, True, (damage,))
    record = None if data is None else manifest.decode(data, f"{path}: {_MANIFEST}")
    if record is not None and record.pages == "store":
        return _chunks_in_store(path, record, progress)
    named = () if record is None else _named(record)
    places = within_manifest(record)
    faults = [Fault(each, why) for each in named if (why := _why(each, found.pop(each.digest, None)))]
    # What no table names (the layout's own manifest) is checked all the same.
    faults += [
        Fault(Descriptor(_OCTETS, digest, size), "holds something else")
        for digest, (size, right) in found.items()
        if not right
    ]
    size = sum(each.size for each in named)
    faulty = tuple(damaged(fault, places) for fault in faults)
    return Verified(path, "", len(named), size, True, faulty, NO_DIGESTS)


def _named(record: Manifest) -> tuple[Descriptor, ...]:
    """The chunks of a manifest, each once."""
    found: dict[str, Descriptor] = {}
    for chunk in _chunks_of(record):
        found.setdefault(chunk.digest, chunk)
    return tuple(found.values())


def _chunks_of(record: Manifest) -> Iterable[Descriptor]:
    for part in parts(record):
        for chunk in part.table.chunks:
            yield Descriptor(MEDIA_TYPES[chunk.encoding], chunk.blob, chunk.stored)


def _why(wanted: Descriptor, found: tuple[int, bool] | None) -> str:
    if found is None:
        return "missing"
    size, right = found
    if size < wanted.size:
        return f"cut short: has {size} of {wanted.size} bytes"
    if size > wanted.size:
        return f"has {size} bytes instead of {wanted.size}"
    return "" if right else "holds something else"


def _digest(content: Content) -> str:
    hashed = hashlib.sha256()
    while piece := content.read(_PIECE):
        hashed.update(piece)
    return hashed.hexdigest()
