"""Compares the files beside a checkpoint's chunks, and those of its rootfs: by name, size and content.

Archives are read as streams, nothing is unpacked. The names are those of Podman's archive.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, TypeAlias

from gpusnap.checkpoints import volumes
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import open_named
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.tar.archive import Content, Entry
from gpusnap.oci.tar.compression import Readable
from gpusnap.operations.open import Checkpoint
from gpusnap.runtime_shim.base.errors import GpusnapError, reason
from gpusnap.runtime_shim.records.manifest import FOLDER

Kind: TypeAlias = Literal["file", "folder", "link", "hard link"]

_PIECE = 1 << 20
_ROOTFS = "rootfs-diff.tar"
_OWN = f"checkpoint/{FOLDER}"
_KINDS: Mapping[bytes, Kind] = {
    tarfile.REGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "link",
    tarfile.LNKTYPE: "hard link",
}


@dataclass(frozen=True, slots=True)
class File:
    """What a name refers to; `size` in bytes."""

    kind: Kind
    size: int
    content: str
    """The digest of a file, the target of a link, empty for a folder."""


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one checkpoint, by name."""

    records: Mapping[str, File]
    rootfs: Mapping[str, File]


@dataclass(frozen=True, slots=True)
class Changed:
    """A name that refers to something else in B than in A."""

    name: str
    a: File
    b: File


@dataclass(frozen=True, slots=True)
class Difference:
    """How B differs from A."""

    same: int
    changed: tuple[Changed, ...]
    only_a: tuple[tuple[str, File], ...]
    only_b: tuple[tuple[str, File], ...]


def read(checkpoint: Checkpoint, seen: Callable[[int], object] = lambda size: None) -> Files:
    """Return all files of a checkpoint. Raises ArchiveError, BlobError, RegistryError, GpusnapError.

    seen: called with the number of bytes of each piece that was read.
    """
    if checkpoint.stored is not None:
        artifact, blobs = checkpoint.stored.artifact, checkpoint.stored.blobs

        def of(layer: Descriptor | None) -> dict[str, File]:
            if layer is None:
                return {}
            with blobs.open_blob(layer.digest, layer.size) as file:
                return _files(entries(file, where=f"{checkpoint.word}: {layer.digest}"), seen)

        return Files(of(artifact.records), of(artifact.rootfs))
    if os.path.isdir(checkpoint.path):
        return _in_folder(checkpoint.path, seen)
    return _read_archive(checkpoint.path, seen)


def compare(a: Mapping[str, File], b: Mapping[str, File]) -> Difference:
    """Compare by name, kind, size and content."""
    both = sorted(a.keys() & b.keys())
    changed = tuple(Changed(name, a[name], b[name]) for name in both if a[name] != b[name])
    return Difference(
        len(both) - len(changed),
        changed,
        tuple((name, a[name]) for name in sorted(a.keys() - b.keys())),
        tuple((name, b[name]) for name in sorted(b.keys() - a.keys())),
    )


def _read_archive(path: str, seen: Callable[[int], object]) -> Files:
    rootfs: dict[str, File] = {}

    def others() -> Iterator[Entry]:
        for entry in entries(path):
            if entry.name == _ROOTFS and entry.content is not None:
                rootfs.update(_files(entries(entry.content, where=f"{path}: {_ROOTFS}"), seen))
            elif not _is_own(entry.name):
                yield entry

    return Files(_files(others(), seen), rootfs)


def _in_folder(path: str, seen: Callable[[int], object]) -> Files:
    """Return the files of a directory of images, or of an unpacked archive."""
    unpacked = os.path.isdir(os.path.join(path, "checkpoint"))
    records: dict[str, File] = {}
    rootfs: dict[str, File] = {}
    try:
        for folder, folders, names in os.walk(path, onerror=_raise):
            inner = os.path.relpath(folder, path)
            for name in (*folders, *names):
                shown = os.path.normpath(os.path.join("" if unpacked else "checkpoint", inner, name))
                if shown == _ROOTFS:
                    rootfs = _files(entries(os.path.join(folder, name)), seen)
                elif not _is_own(shown):
                    records |= _read_disk(os.path.join(folder, name), shown, seen)
    except OSError as error:
        raise GpusnapError(f"{path} cannot be read: {reason(error)}") from error
    return Files(records, rootfs)


def _raise(error: OSError) -> None:
    raise error


def _read_disk(path: str, name: str, seen: Callable[[int], object]) -> dict[str, File]:
    if os.path.islink(path):
        return {name: File("link", 0, os.readlink(path))}
    if os.path.isdir(path):
        return {name: File("folder", 0, "")}
    if not os.path.isfile(path):
        return {}
    with open_named(path) as file:
        digest = _digest(file, seen)
        return {name: File("file", file.tell(), digest)}


def _files(found: Iterable[Entry], seen: Callable[[int], object]) -> dict[str, File]:
    files: dict[str, File] = {}
    for entry in found:
        if (name := volumes.name_in_chunks(entry.name)) and entry.content is not None:
            if told := volumes.summary(entry.content.read(volumes.LARGEST_TABLE)):
                files[volumes.label(name)] = File("file", *told)
        else:
            files[entry.name] = _file(entry.info, entry.content, seen)
    return files


def _file(info: tarfile.TarInfo, content: Content | None, seen: Callable[[int], object]) -> File:
    if content is not None:
        return File("file", info.size, _digest(content, seen))
    kind = _KINDS.get(info.type, "file")
    return File(kind, 0, info.linkname if kind in ("link", "hard link") else "")


def _digest(content: Readable, seen: Callable[[int], object]) -> str:
    hashed = hashlib.sha256()
    while piece := content.read(_PIECE):
        hashed.update(piece)
        seen(len(piece))
    return f"sha256:{hashed.hexdigest()}"


def _is_own(name: str) -> bool:
    """Return whether a name is in gpusnap's own folder, which is not compared file by file."""
    return name == _OWN or name.startswith(_OWN + "/")
