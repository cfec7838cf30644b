"""Writes an archive for `ctr images import` from an artifact that was a checkpoint of containerd's.

In the archive, CRIU's images are one blob, whose digest and size precede it. So they are read twice, and
nothing of that size is stored in between. All other blobs are unchanged, except the index, which names that
blob. index.json and oci-layout come last, as in containerd's own archives, so a truncated archive is invalid.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Mapping

from gpusnap.checkpoints.artifact import ArtifactParts
from gpusnap.checkpoints.formats.containerd import (
    LAYOUT,
    Image,
    describe_index,
    load,
    replace_criu_images,
    top,
)
from gpusnap.checkpoints.formats.names import CONFIG, IMAGE_BLOBS, IMAGE_FOLDER, OURS, PIECE
from gpusnap.checkpoints.formats.podman_writer import ArchiveWriter
from gpusnap.checkpoints.formats.whole_archive import make_whole
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import ArchiveError, BlobError, LayoutError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.blobs import Blobs, CheckedBlob
from gpusnap.oci.layout.digests import PREFIX, digest_of, get_hex
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor, Index, encode_document, parse_document
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import entries
from gpusnap.oci.tar.compression import Readable
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records.artifact import label_tables

Append = Callable[[bytes], object]

_BLOBS = "blobs/sha256"
_IMAGES = "checkpoint"
# As much as is written, and an index.
_MOST_BESIDE = (64 << 20) + 2 * DOCUMENT_LIMIT


@dataclass(frozen=True, slots=True)
class Origin:
    """The image that an artifact was made of, by its records."""

    image: Image
    beside: Mapping[str, bytes]
    """Its blobs that are in the records, by digest."""


def origin(found: ArtifactParts, blobs: Blobs) -> Origin:
    """Read the beginning of an image's records. Raises OciError, ImageError."""
    layer = found.artifact.records
    assert layer is not None
    index, beside = _read_beside(layer, blobs)
    images = Index.from_json(parse_document(index, f"{IMAGE_FOLDER}/index.json")).manifests
    if len(images) != 1:
        raise LayoutError(f"the records {layer.digest} name {len(images)} containerd images instead of one")
    carried = {each.digest: each.size for each in found.artifact.carried}

    def has(one: Descriptor) -> bool:
        return _is_beside(one, beside) or carried.get(one.digest) == one.size

    def read(one: Descriptor) -> bytes:
        if one.size > DOCUMENT_LIMIT:
            raise BlobError(
                f"the blob {one.digest} has {one.size} bytes, but at most {DOCUMENT_LIMIT} are allowed"
            )
        return b"".join(_content(one, beside, carried, blobs))

    image = load(images[0], read, has, f"the checkpoint {found.root.digest}")
    for each in image.others:
        if not has(each):
            raise _make_missing_error(each)
    return Origin(image, beside)


def _read_beside(layer: Descriptor, blobs: Blobs) -> tuple[bytes, dict[str, bytes]]:
    """Return index.json of the records, and the blobs by digest."""
    what = f"the records {layer.digest}"
    beside: dict[str, bytes] = {}
    index, left = b"", _MOST_BESIDE
    with blobs.open_blob(layer.digest, layer.size) as file:
        for entry in entries(file, where=what):
            if entry.name.partition("/")[0] != IMAGE_FOLDER:
                break
            left -= entry.info.size
            if left < 0:
                raise LayoutError(f"{what} have more than {_MOST_BESIDE} bytes in addition to CRIU's images")
            data = entry.content.read() if entry.content is not None else b""
            if entry.name == f"{IMAGE_FOLDER}/index.json":
                index = data
            elif entry.name.startswith(f"{IMAGE_BLOBS}/"):
                beside[digest_of(data)] = data
    if not index:
        raise LayoutError(f"{what} name no containerd image")
    return index, beside


def _is_beside(one: Descriptor, beside: Mapping[str, bytes]) -> bool:
    return one.digest in beside and len(beside[one.digest]) == one.size


def give_out(
    found: ArtifactParts,
    of: Origin,
    blobs: Blobs,
    append: Append,
    *,
    name: str,
    threads: int = 0,
    progress: Callable[[int, int], object] = lambda done, whole: None,
) -> None:
    """Write the tar of a layout with `append`, except the blocks of zeros at its end.

    name: of the checkpoint in containerd. threads: for reading chunks, all cores for 0. progress: called with
    the number of bytes of blobs that were read, and all. Raises ImageError, OciError, and the errors of
    `append`.
    """
    image, carried = of.image, {each.digest: each.size for each in found.artifact.carried}
    record = found.record
    chunks = artifact.chunk_layers(label_tables(record)) if record is not None else ()
    done, whole = 0, 2 * sum(each.size for each in chunks) + sum(each.size for each in image.others)

    def seen(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, whole), whole)

    images = _Images(found, blobs, threads or copies.cores(), seen)
    criu = images.measure(image.criu.media_type)
    document = replace_criu_images(image, criu)
    root = describe_index(document)
    for path in ("blobs", _BLOBS):
        append(tar.header(tar.folder_entry(path, 0o755)))
    for each in image.others:
        append(tar.header(tar.file_entry(f"{_BLOBS}/{get_hex(each.digest)}", each.size, 0o444)))
        for piece in _content(each, of.beside, carried, blobs):
            append(piece)
            seen(len(piece))
        append(tar.padding(each.size))
    append(tar.header(tar.file_entry(f"{_BLOBS}/{get_hex(criu.digest)}", criu.size, 0o444)))
    images.write(append, criu)
    append(tar.padding(criu.size))
    for path, data in (
        (f"{_BLOBS}/{get_hex(root.digest)}", document),
        ("index.json", top(image, root, name)),
        ("oci-layout", encode_document(LAYOUT)),
    ):
        append(tar.header(tar.file_entry(path, len(data), 0o444)) + data + tar.padding(len(data)))


class _Images:
    """CRIU's images and gpusnap's files beside them, as the tar that containerd needs."""

    def __init__(self, found: ArtifactParts, blobs: Blobs, threads: int, seen: Callable[[int], None]) -> None:
        self._found, self._blobs, self._threads, self._seen = found, blobs, threads, seen

    def measure(self, media_type: str) -> Descriptor:
        """Return size and digest of the tar; reads everything for it, and checks the records."""
        records = self._found.artifact.records
        assert records is not None
        self._blobs.check_blob(records)
        hashed, size = hashlib.sha256(), 0

        def count(piece: bytes) -> None:
            nonlocal size
            size += len(piece)
            hashed.update(piece)

        self._pieces(count)
        return Descriptor(media_type, PREFIX + hashed.hexdigest(), size)

    def write(self, append: Append, wanted: Descriptor) -> None:
        """Write it. Raises BlobError if it has changed since it was measured."""
        hashed = hashlib.sha256()

        def both(piece: bytes) -> None:
            hashed.update(piece)
            append(piece)

        self._pieces(both)
        if PREFIX + hashed.hexdigest() != wanted.digest:
            raise BlobError("the checkpoint changed while it was being read")

    def _pieces(self, append: Append) -> None:
        found = self._found
        assert found.artifact.records is not None
        sink = _Inner(append)
        archive = ArchiveWriter(found.artifact, self._blobs, sink, self._threads, self._seen)
        archive.write_others(found.artifact.records, found.record.files if found.record is not None else ())
        if found.record is not None:
            config, record = make_whole(found.config, found.record)
            archive.write_folder(OURS)
            archive.write_file(CONFIG, config)
            if tables := label_tables(record):
                archive.write_layout(tables, digest_of(config))
        append(tar.END)


class _Inner:
    """Accepts the entries of an archive, and writes CRIU's images by their own names."""

    def __init__(self, append: Append) -> None:
        self._append = append

    def add(self, info: tarfile.TarInfo, content: Readable | None = None) -> None:
        """Write one entry; skips containerd's. Raises ImageError, ArchiveError."""
        first, _, name = info.name.partition("/")
        if first == IMAGE_FOLDER or info.name == _IMAGES:
            return
        if first != _IMAGES:
            raise ImageError(
                f"the records contain {info.name[:200]!r}, which is not one of containerd's files",
                code="GPS-604",
            )
        info.name = name
        if info.islnk():
            first, _, info.linkname = info.linkname.partition("/")
            if first != _IMAGES or not info.linkname:
                raise ImageError(
                    f"the link {name[:200]!r} in the records points outside CRIU's images", code="GPS-604"
                )
        try:
            for piece in tar.pieces(info, content):
                self._append(piece)
        except tar.HeaderFault as fault:
            raise ArchiveError(f"the tar of CRIU's images cannot be written: {fault}") from fault


def _content(
    wanted: Descriptor, beside: Mapping[str, bytes], carried: Mapping[str, int], blobs: Blobs
) -> Iterator[bytes]:
    """Yield a blob of the image in pieces, checked. Raises BlobError."""
    if _is_beside(wanted, beside):
        yield beside[wanted.digest]
        return
    if carried.get(wanted.digest) != wanted.size:
        raise _make_missing_error(wanted)
    with blobs.open_blob(wanted.digest, wanted.size) as file:
        content = CheckedBlob(file, wanted)
        while piece := content.read(PIECE):
            yield piece
        content.check_end()


def _make_missing_error(wanted: Descriptor) -> BlobError:
    return BlobError(
        f"the blob {wanted.digest} ({wanted.size} bytes, {wanted.media_type}) is not in the checkpoint"
    )
