"""Converts a checkpoint of containerd's into an artifact.

The records contain, as a layout at `containerd/`, its index and its blobs of up to 1 MiB. Beside it at
`checkpoint/`, they contain CRIU's images, as Podman's archives do; their chunks and manifest are stored like
Podman's. Larger blobs (the files that changed, and the base image's layers) are layers of their own. Each
blob is read once, and none is in memory as a whole.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain

from gpusnap.checkpoints.formats.annotations import CREATED, bounded, time_of
from gpusnap.checkpoints.formats.containerd import (
    LAYOUT,
    RUNTIME,
    Image,
    Source,
    blob_of,
    container_name,
    load,
    make_named_entry,
)
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import IMAGE_BLOBS, IMAGE_FOLDER, PIECE
from gpusnap.checkpoints.formats.podman_reader import ArchiveReader, Crew
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.blobs import CheckedBlob
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor, Index, encode_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Entry
from gpusnap.oci.tar.compression import Readable, kind_of
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records.artifact import make_annotations
from gpusnap.runtime_shim.records.manifest import Manifest

# A registry that has the base image has its layers, which are larger.
_SMALL = 1 << 20
_MOST_SMALL = 64 << 20


def take_in(
    source: Source,
    layout: Layout,
    *,
    threads: int = 0,
    known: Callable[[str, int], bool] | None = None,
    progress: Callable[[int, int], object] = lambda done, whole: None,
) -> Artifact:
    """Convert an image into a layout that nobody else uses meanwhile; parameters as of podman.take_in.

    Chunks that a store has are then not in the layout. Raises ImageError, ManifestError, OciError, and the
    source's errors.
    """
    image = load(source.root, lambda one: blob_of(source, one), source.has, source.word)
    done, whole = 0, sum(each.size for each in (image.criu, *image.others))

    def seen(size: int) -> None:
        nonlocal done
        done += size
        progress(min(done, whole), whole)

    small, large = _sort_blobs(image)
    for each in large:
        if known is None or not known(each.digest, each.size):
            with source.open(each) as file, layout.receive(each) as incoming:
                while piece := file.read(PIECE):
                    incoming.write(piece)
                    seen(len(piece))
    beside = {each.digest: blob_of(source, each, seen) for each in small}
    with (
        Crew(threads or copies.cores()) as crew,
        source.open(image.criu) as file,
        ArchiveReader(source.word, layout, crew, known, lambda: None) as reader,
    ):
        content = CheckedBlob(file, image.criu, seen)
        written: list[float] = []
        images = reader.place_entries(_images(content, source.word, written))
        pieces = chain(_make_records_head(image, source.name, beside), images)
        records = layout.add_blob(reader.pack(pieces), media_type=artifact.IMAGE)
        content.check_end()
        crew.join()
        config = beside.get(image.config.digest, b"") if image.config is not None else b""
        taken = reader.finish_images(records, lambda record: _notes(image, config, record, written))
    carried = tuple(Descriptor(artifact.BLOB, each.digest, each.size) for each in large)
    return Artifact(taken.config, records, None, taken.chunks, taken.annotations, carried=carried)


def _sort_blobs(image: Image) -> tuple[list[Descriptor], list[Descriptor]]:
    """Return the blobs for the records, and those that are layers of their own."""
    small: list[Descriptor] = []
    large: list[Descriptor] = []
    room = _MOST_SMALL
    for each in image.others:
        fits = each.size <= min(_SMALL, room)
        (small if fits else large).append(each)
        room -= each.size if fits else 0
    return small, large


def _make_records_head(image: Image, name: str, beside: Mapping[str, bytes]) -> Iterator[bytes]:
    """Yield the records' tar up to CRIU's images. `name`: the image's; `beside`: blobs by digest."""
    index = Index((make_named_entry(image.root, name) if name else replace(image.root, annotations={}),))
    files = {
        f"{IMAGE_FOLDER}/oci-layout": encode_document(LAYOUT),
        f"{IMAGE_FOLDER}/index.json": encode_document(index.to_json()),
        f"{IMAGE_BLOBS}/{get_hex(image.root.digest)}": image.document,
        **{f"{IMAGE_BLOBS}/{get_hex(digest)}": data for digest, data in beside.items()},
    }
    folders = (IMAGE_FOLDER, IMAGE_BLOBS.rpartition("/")[0], IMAGE_BLOBS)
    for path in folders:
        yield tar.header(tar.folder_entry(path, 0o700))
    for path, data in files.items():
        yield from tar.pieces(tar.file_entry(path, len(data), 0o600), io.BytesIO(data))
    yield tar.header(tar.folder_entry("checkpoint", 0o700))


def _images(content: Readable, where: str, written: list[float]) -> Iterator[Entry]:
    """Yield CRIU's images by their names in Podman's archives; appends the time of the first to `written`."""
    kind, content = kind_of(content)
    if kind != "none":
        raise ImageError(
            f"CRIU's images in {where} are compressed, which containerd's never are",
            hint="do not restore them",
            code="GPS-604",
        )
    for entry in entries(content, where=f"CRIU's images in {where}"):
        info = entry.info
        if not written:
            written.append(info.mtime)
        info.name = f"checkpoint/{entry.name}"
        if info.islnk():
            info.linkname = f"checkpoint/{info.linkname}"
        yield Entry(info.name, info, entry.content)


def _notes(image: Image, config: bytes, record: Manifest | None, written: Iterable[float]) -> dict[str, str]:
    """Return the annotations; keys as in gpusnap.checkpoints.formats.annotations."""
    ours = make_annotations(record) if record is not None else {}
    criu = "org.criu.checkpoint."
    return bounded(
        {
            CREATED: time_of(next(iter(written), 0)),
            **ours,
            f"{criu}engine.name": "containerd",
            f"{criu}container.name": container_name(config),
            f"{criu}rootfsImageName": image.base_name,
            f"{criu}runtime.name": image.notes.get(RUNTIME, ""),
        }
    )
