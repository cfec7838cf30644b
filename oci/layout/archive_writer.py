"""Writes an image layout as a plain tar, which skopeo calls oci-archive; oci/layout/archive.py reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.documents import Descriptor, Index, encode_document
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import VERSION, Layout, read_piece
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Writer


def write_archive(
    path: str,
    roots: Sequence[Descriptor],
    layout: Layout,
    *,
    progress: Callable[[int, int], object] = lambda done, whole: None,
) -> int:
    """Write manifests, and everything below them, to a new file; return the bytes of the blobs.

    The index has the roots with their annotations. Each blob is compared with its digest while it is copied.
    progress: called with the bytes that were copied, and all. Raises BlobError, LayoutError, DiskFull,
    DiskError; there is no new file then.
    """
    blobs: dict[str, Descriptor] = {}
    for root in roots:
        for each, _ in walk(root, layout.read_blob):
            blobs.setdefault(each.digest, each)
    whole, done = sum(each.size for each in blobs.values()), 0
    index = encode_document(Index(tuple(roots)).to_json())
    with Writer(path) as writer:
        # First, so that a reader recognizes it by the first entry.
        for name, data in (
            ("oci-layout", encode_document({"imageLayoutVersion": VERSION})),
            ("index.json", index),
        ):
            writer.append(tar.header(tar.file_entry(name, len(data), 0o444)) + data + tar.padding(len(data)))
        for each in blobs.values():
            writer.append(
                tar.header(tar.file_entry(f"blobs/sha256/{get_hex(each.digest)}", each.size, 0o444))
            )
            hashed = hashlib.sha256()
            with layout.open_blob(each.digest, each.size) as file:
                while piece := read_piece(file):
                    hashed.update(piece)
                    writer.append(piece)
                    done += len(piece)
                    progress(done, whole)
            if PREFIX + hashed.hexdigest() != each.digest:
                raise BlobError(f"the blob {each.digest} does not match its digest")
            writer.append(tar.padding(each.size))
    return whole
