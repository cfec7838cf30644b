"""Checks a checkpoint in an archive, or in a directory of images, against its digests."""

from __future__ import annotations

import hashlib
import os
import tarfile
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import IO, cast

import zstandard

from gpusnap.checkpoints.damage import Damage, Progress, VerifyResult, describe_damage, map_manifest_chunks
from gpusnap.checkpoints.formats.criu_images import Images
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import FIRST, LARGEST_DUMP, ROOTFS
from gpusnap.checkpoints.locator import default_store, open_store
from gpusnap.checkpoints.statistics import parts
from gpusnap.checkpoints.volumes import name_of
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import ArchiveError, LayoutError, NotAnArchive
from gpusnap.oci.base.files import open_named
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks import planes
from gpusnap.oci.chunks.blake3_digests import Hasher, differ, start_blake3
from gpusnap.oci.chunks.table import LARGEST_CHUNK, Chunk, descriptors
from gpusnap.oci.chunks.verify import Contents, Fault, not_held, other_blake3
from gpusnap.oci.layout.digests import PREFIX
from gpusnap.oci.layout.documents import OCTETS, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Content, Entry
from gpusnap.oci.tar.headers import begins_like_a_tar
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.process.memory.copy import cores
from gpusnap.runtime_shim.records import manifest, manifest_file, manifest_json
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime.criu.images import check as criu_images
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison
from gpusnap.runtime_shim.runtime.podman import dev_shm

_PIECE = 1 << 20
_FOLDER = f"checkpoint/{manifest.FOLDER}/"
_BLOBS = f"{_FOLDER}blobs/sha256/"
_MANIFEST = _FOLDER + manifest.NAME
_INDEX = _FOLDER + manifest.INDEX
_IMAGES = "CRIU's images"
_RECORDS = "Podman's records"
_FILES = "the container's files"
_TARS = (ROOTFS, dev_shm.LINK[0])


def in_folder(path: str, progress: Progress) -> VerifyResult:
    """Check a directory of images: its manifest, and the chunks beside it or in the store."""
    inner = path if manifest_file.is_ours(path) else os.path.join(path, "checkpoint")
    record = manifest_file.read(inner)
    try:
        criu_images.check(inner, record.host.architecture, record.sizes)
        with closing(Comparison(inner, record.images)) as compared:
            compared.result()
    except ImageError as error:
        return _with_part(_chunks_of_folder(path, inner, record, progress), str(error), _IMAGES)
    return _chunks_of_folder(path, inner, record, progress)


def _chunks_of_folder(path: str, inner: str, record: Manifest, progress: Progress) -> VerifyResult:
    if record.pages == "store":
        return _chunks_in_store(path, record, progress)
    return _chunks(path, record, Layout(os.path.join(inner, manifest.FOLDER)), progress)


def _chunks_in_store(path: str, record: Manifest, progress: Progress) -> VerifyResult:
    return _chunks(path, record, open_store(default_store()).layout, progress)


def _chunks(path: str, record: Manifest, layout: Layout, progress: Progress) -> VerifyResult:
    """Check chunks that a manifest names and a layout has."""
    named = descriptors(record.tables)
    if not named:
        return VerifyResult(path, "", 0, 0, True, (), describe_unchecked(record))
    done, whole, lock = 0, sum(each.size for each in named), threading.Lock()
    faults: list[Fault] = []
    contents = Contents(record.tables)

    def check(blob: Descriptor) -> None:
        nonlocal done
        try:
            layout.check_blob(blob)
            fault = contents.fault(layout, blob)
        except LayoutError as error:
            fault = "missing" if isinstance(error.__cause__, FileNotFoundError) else str(error)
        with lock:
            done += blob.size
            if fault:
                faults.append(Fault(blob, fault))
            progress(done, whole)

    run_for_each(named, check, threads=min(cores(), len(named)))
    places = map_manifest_chunks(record)
    faulty = tuple(describe_damage(fault, places) for fault in faults)
    return VerifyResult(path, "", len(named), whole, True, faulty, describe_unchecked(record))


def _with_part(found: VerifyResult, fault: str, part: str) -> VerifyResult:
    """Add to a result a fault of a part that is no chunk."""
    return replace(found, damaged=(*found.damaged, Damage("", "", 0, fault, (part,)))) if fault else found


def describe_unchecked(record: Manifest | None) -> str:
    """Say which parts of such a checkpoint have no digests."""
    images = "" if record is not None and record.images else "CRIU's images and "
    return f"{images}the engine's files have no digests there; only those in a store have"


def in_archive(path: str, progress: Progress) -> VerifyResult:
    """Check an archive in one pass: that it is complete, and the chunks in it. Raises NotAnArchive."""
    found: dict[str, tuple[int, bool]] = {}
    held: dict[str, _Held] = {}
    data = index = None
    ours, broken, cut_off = False, "", ""
    images = Images(path)
    done, whole = 0, os.path.getsize(path)
    try:
        with open_named(path) as file:
            for entry in entries(file, where=path):
                ours = ours or f"{entry.name}/".startswith(_FOLDER)
                images.add(entry)
                if entry.name == _MANIFEST:
                    data = _document(entry, manifest.LARGEST, path)
                elif entry.name == _INDEX:
                    index = _document(entry, manifest.LARGEST_INDEX, path)
                elif entry.name in FIRST:
                    broken = broken or _explain_no_json(entry)
                elif entry.content is not None and (entry.name in _TARS or name_of(entry.name)):
                    cut_off = cut_off or _explain_cut_off(entry.name, entry.content)
                elif entry.name.startswith(_BLOBS) and entry.content is not None:
                    name = entry.name.removeprefix(_BLOBS)
                    digest, held[PREFIX + name] = _digests(entry.content)
                    found[PREFIX + name] = entry.info.size, digest == PREFIX + name
                done += 1
                progress(min(file.tell(), whole), whole)
    except NotAnArchive:
        raise
    except ArchiveError as error:
        # The result names the archive.
        damage = Damage("", "", whole, str(error).removeprefix(f"{path} "), ("the archive itself",))
        return VerifyResult(path, "", len(found), done, True, (damage,))
    if data is None and ours:
        raise manifest_file.make_missing_error(path)
    record = None
    if data is not None:
        record = manifest_json.decode(data, f"{path}: {_MANIFEST}")
        manifest_file.check_digest(data, index, f"{path}: {_MANIFEST}")
    fault = images.fault(record)
    if record is not None and record.pages == "store":
        found_all = _chunks_in_store(path, record, progress)
        return _with_parts(found_all, fault, broken, cut_off)
    named = () if record is None else descriptors(record.tables)
    places = map_manifest_chunks(record)
    lies = {} if record is None else _lies(record, held)
    faults = [
        Fault(each, why)
        for each in named
        if (why := _explain(each, found.pop(each.digest, None)) or lies.get(each.digest, ""))
    ]
    # Blobs that no table names (the layout's own manifest) are checked as well.
    faults += [
        Fault(Descriptor(OCTETS, digest, size), "does not match its digest")
        for digest, (size, right) in found.items()
        if not right
    ]
    size = sum(each.size for each in named)
    faulty = tuple(describe_damage(each, places) for each in faults)
    found_all = VerifyResult(path, "", len(named), size, True, faulty, describe_unchecked(record))
    return _with_parts(found_all, fault, broken, cut_off)


def _with_parts(found: VerifyResult, images: str, records: str, files: str) -> VerifyResult:
    return _with_part(_with_part(_with_part(found, images, _IMAGES), records, _RECORDS), files, _FILES)


def _explain_cut_off(name: str, content: Content) -> str:
    """Say that a tar in an archive of Podman's has no end; empty if it is whole.

    Podman only logs it if a file becomes shorter while it reads it; the tar then ends there, without its
    last blocks of zeros (containers/storage, pkg/archive, Tar).
    """
    size = content.left
    head = content.read(tarfile.BLOCKSIZE)
    if not head or not begins_like_a_tar(head):  # compressed, by an engine that is not known
        return ""
    try:
        with tarfile.open(fileobj=cast("IO[bytes]", _Rest(head, content)), mode="r|", bufsize=_PIECE) as tar:
            for _ in tar:
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
            whole = tar.offset + 2 * tarfile.BLOCKSIZE <= size
    except (tarfile.TarError, ValueError):
        whole = False
    return "" if whole else f"{name} is cut short, so files of the container are missing"


class _Rest:
    """A member of an archive after its first bytes have been read."""

    def __init__(self, head: bytes, content: Content) -> None:
        self._head, self._content = head, content

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end. Raises ArchiveError."""
        head, self._head = self._head, b""
        return head + self._content.read(size - len(head))


def _explain_no_json(entry: Entry) -> str:
    """Say why Podman could not read one of its own records; empty if it is a JSON object."""
    if entry.content is None or entry.info.size > LARGEST_DUMP:
        return f"{entry.name} is not one of Podman's records"
    try:
        if isinstance(parse_json(entry.content.read()), dict):
            return ""
    except ValueError as error:
        return f"{entry.name} is not JSON: {error}"
    return f"{entry.name} is not a JSON object"


def _document(entry: Entry, limit: int, path: str) -> bytes:
    """Read the manifest of an archive, or the index beside it. Raises ManifestError, as a restore does."""
    where = f"{path}: {entry.name}"
    if entry.content is None:
        raise manifest_file.make_unreadable_error(where, ValueError("it is not a regular file"))
    if entry.info.size > limit:
        raise manifest_file.make_unreadable_error(
            where, ValueError(f"it has {entry.info.size} bytes, but at most {limit} are allowed")
        )
    return entry.content.read()


def _explain(wanted: Descriptor, found: tuple[int, bool] | None) -> str:
    if found is None:
        return "missing"
    size, right = found
    if size < wanted.size:
        return f"truncated: has {size} of {wanted.size} bytes"
    if size > wanted.size:
        return f"has {size} bytes instead of {wanted.size}"
    return "" if right else "does not match its digest"


@dataclass(frozen=True, slots=True)
class _Held:
    """The decompressed content of a blob, size 0 if it is not compressed; and the blob's own BLAKE3."""

    size: int
    digest: str
    blake3: str
    blob_blake3: str


def _lies(record: Manifest, held: Mapping[str, _Held]) -> dict[str, str]:
    """Return, by blob, where chunks differ from what a manifest says about them."""
    chunks = (chunk for part in parts(record) for chunk in part.table.chunks)
    return {chunk.blob: why for chunk in chunks if (why := _lie(chunk, held.get(chunk.blob)))}


def _lie(chunk: Chunk, held: _Held | None) -> str:
    compressed = chunk.encoding != "plain"
    if compressed and (held is None or (held.size, held.digest) != (chunk.size, chunk.plain)):
        return not_held(chunk.plain, chunk.size)
    if held is not None and differ(chunk.blake3, held.blake3 if compressed else held.blob_blake3):
        return other_blake3(chunk.plain, chunk.size)
    return ""


class _Hashed:
    """A member of an archive that is hashed while it is read."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self.hash, self.blake3 = hashlib.sha256(), start_blake3()
        self._again = b""
        self.head = self._again = self.read(planes.HEAD)
        """Its first bytes, which are read a second time."""

    def read(self, size: int) -> bytes:
        if self._again:
            again, self._again = self._again[:size], self._again[size:]
            return again
        piece = self._content.read(size)
        self.hash.update(piece)
        self.blake3.update(piece)
        return piece

    def end(self, size: int, plain: Hasher, blake3: Hasher) -> tuple[str, _Held]:
        """Do the same as `_digests`; for compressed content, also its size and two hashes."""
        held = _Held(size, PREFIX + plain.hexdigest(), blake3.hexdigest(), self.blake3.hexdigest())
        return PREFIX + self.hash.hexdigest(), held


def _read_all(source: _Hashed, most: int) -> bytes:
    found, size = [], 0
    while size < most and (piece := source.read(_PIECE)):
        found.append(piece)
        size += len(piece)
    return b"".join(found)


def _digests(content: Content) -> tuple[str, _Held]:
    """Return the digest of a member, and its content's.

    The manifest, which says how each member is stored, comes after them. Decompresses at most one chunk's
    size.
    """
    source, hashed, blake3, size = _Hashed(content), hashlib.sha256(), start_blake3(), 0
    if 0 < (held := planes.size_of(source.head)) <= LARGEST_CHUNK:
        plain = planes.unpack(_read_all(source, LARGEST_CHUNK), held)
        while source.read(_PIECE):
            pass
        if plain is not None:
            size = held
            hashed.update(plain)
            blake3.update(plain)
        return source.end(size, hashed, blake3)
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_CHUNK)
    with suppress(zstandard.ZstdError):
        reader = decompressor.stream_reader(cast("IO[bytes]", source))
        while size <= LARGEST_CHUNK and (piece := reader.read(_PIECE)):
            hashed.update(piece)
            blake3.update(piece)
            size += len(piece)
    while source.read(_PIECE):
        pass
    return source.end(size, hashed, blake3)
