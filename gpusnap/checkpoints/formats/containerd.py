"""Checkpoints as containerd keeps them: an image index whose members are no manifests.

What `ctr container checkpoint` makes, of containerd 1.7 and 2 (client/container.go, Checkpoint;
client/container_checkpoint_opts.go; core/images/mediatypes.go):

    index    annotations: org.opencontainers.image.ref.name, the name of the base image;
             io.containerd.checkpoint.runtime and .snapshotter
        application/vnd.containerd.container.criu.checkpoint.criu.tar          with --task: CRIU's images
        application/vnd.containerd.container.checkpoint.config.v1+proto        the container's configuration
        application/vnd.containerd.container.checkpoint.options.v1+proto
        application/vnd.containerd.container.checkpoint.runtime.options+proto
        application/vnd.oci.image.layer.v1.tar+gzip                            with --rw: files that changed
        a manifest or an index                                                 with --image: the base image

`ctr images export` writes it as an image layout in a tar, `ctr images import` takes that. The annotation
io.containerd.image.name on an entry of index.json is the name of an image. Registries refuse such an index.

What is read may come from anybody.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import BlobError, LayoutError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.blobs import CheckedBlob
from gpusnap.oci.layout.digests import digest_of, get_hex
from gpusnap.oci.layout.documents import (
    DOCUMENT_LIMIT,
    INDEX,
    Descriptor,
    Index,
    encode_document,
    parse_document,
)
from gpusnap.oci.layout.graph import INDEXES, children, is_document
from gpusnap.oci.tar.compression import Readable
from gpusnap.runtime_shim.base.errors import ImageError

_TYPES = "application/vnd.containerd.container."
CRIU = f"{_TYPES}criu.checkpoint.criu.tar"
CONFIG = f"{_TYPES}checkpoint.config.v1+proto"
IMAGE_NAME = "io.containerd.image.name"
REF_NAME = "org.opencontainers.image.ref.name"
RUNTIME = "io.containerd.checkpoint.runtime"
SNAPSHOTTER = "io.containerd.checkpoint.snapshotter"
LAYOUT: Mapping[str, object] = {"imageLayoutVersion": "1.0.0"}

# Restrictions of words on ctr's command line, and of names of images.
_NAME = compile_later(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}", re.ASCII)
_MOST_BLOBS = 4096
_DEEPEST = 8


def is_name(text: str) -> bool:
    """Return whether a text can name an image."""
    return bool(_NAME.fullmatch(text))


class Source(Protocol):
    """A source of the blobs of an image of containerd's: an archive, or containerd."""

    word: str
    """The user's word for it."""
    name: str
    """The image's name in containerd; empty if unknown."""
    root: Descriptor
    """Descriptor of the checkpoint's index."""

    def has(self, wanted: Descriptor) -> bool:
        """Return whether the source has that blob."""

    def open(self, wanted: Descriptor) -> AbstractContextManager[Readable]:
        """Open a blob for reading in order; its content is not checked. Raises OciError, GpusnapError."""


@dataclass(frozen=True, slots=True)
class Image:
    """A checkpoint of containerd's, by its index."""

    root: Descriptor
    document: bytes
    """The index."""
    criu: Descriptor
    others: tuple[Descriptor, ...]
    """Every other blob below the index, each once; of the base image, only those that are available."""
    base: Descriptor | None
    """The base image, if it is in the index."""
    notes: Mapping[str, str]
    """Annotations of the index."""

    @property
    def base_name(self) -> str:
        """Return the name by which containerd finds the base image when it restores."""
        return self.notes.get(REF_NAME, "")

    @property
    def config(self) -> Descriptor | None:
        """Return the descriptor of the container's configuration."""
        return next((each for each in self.others if each.media_type == CONFIG), None)


def blob_of(source: Source, wanted: Descriptor, seen: Callable[[int], object] = lambda size: None) -> bytes:
    """Return a small blob, checked. Raises BlobError, also above 4 MiB, and the source's errors."""
    if wanted.size > DOCUMENT_LIMIT:
        raise BlobError(
            f"the blob {wanted.digest} has {wanted.size} bytes, but at most {DOCUMENT_LIMIT} are allowed"
        )
    with source.open(wanted) as file:
        content = CheckedBlob(file, wanted, seen)
        data = b""
        while piece := content.read(wanted.size + 1 - len(data)):
            data += piece
        content.check_end()
    return data


def is_checkpoint(index: Index) -> bool:
    """Return whether an index is a checkpoint of containerd's, with CRIU's images or without."""
    return any(each.media_type.startswith(_TYPES) for each in index.manifests)


def load(
    root: Descriptor, read: Callable[[Descriptor], bytes], has: Callable[[Descriptor], bool], where: str
) -> Image:
    """Load the image of an index. `read`: returns a small blob, its digest checked; `where`: for messages.

    Raises ImageError if it is no checkpoint that can be restored, LayoutError, DigestError, and the errors of
    `read`.
    """
    if root.media_type != INDEX:
        raise ImageError(
            f"{where} is not a containerd checkpoint, but of type {root.media_type}",
            hint="ctr container checkpoint --task makes one",
            code="GPS-605",
        )
    document = read(root)
    index = Index.from_json(parse_document(document, f"the index {root.digest}"))
    if not is_checkpoint(index):
        raise ImageError(
            f"{where} is not a containerd checkpoint, but an ordinary image",
            hint="ctr container checkpoint --task makes one",
            code="GPS-605",
        )
    criu = [each for each in index.manifests if each.media_type == CRIU]
    if len(criu) != 1:
        raise ImageError(
            f"{where} has {len(criu) or 'no'} images of CRIU's, and one is needed",
            hint="ctr container checkpoint writes them with --task, unless containerd has an earlier "
            "checkpoint of the same container: then remove that first, with ctr images rm --sync",
            code="GPS-906",
        )
    get_hex(criu[0].digest)
    walked = _Walk(read, has)
    for each in index.manifests:
        if each.digest != criu[0].digest:
            walked.add(each, optional=False, depth=0)
    walked.found.pop(root.digest, None)
    base = next((each for each in index.manifests if is_document(each)), None)
    image = Image(root, document, criu[0], tuple(walked.found.values()), base, index.annotations)
    if base is not None and not image.base_name:
        raise ImageError(
            f"{where} does not name its base image, so no engine can restore it",
            hint="ctr task checkpoint makes such images; make one with ctr container checkpoint --task",
            code="GPS-605",
        )
    if base is not None and not is_name(image.base_name):
        raise LayoutError(f"the index {root.digest} has a base image without a valid name")
    return image


class _Walk:
    """All blobs that some descriptors name, each once."""

    def __init__(self, read: Callable[[Descriptor], bytes], has: Callable[[Descriptor], bool]) -> None:
        self.found: dict[str, Descriptor] = {}
        self._read, self._has = read, has

    def add(self, one: Descriptor, *, optional: bool, depth: int) -> None:
        get_hex(one.digest)
        first = self.found.get(one.digest)
        if first is not None:
            if first.size != one.size:
                raise LayoutError(
                    f"the blob {one.digest} is listed with two sizes, {first.size} and {one.size} bytes"
                )
            return
        # Of an image for several platforms, containerd has the host's.
        if optional and not self._has(one):
            return
        if len(self.found) >= _MOST_BLOBS or depth > _DEEPEST:
            raise LayoutError(
                f"the checkpoint refers to more than {_MOST_BLOBS} blobs, or nests them too deeply"
            )
        self.found[one.digest] = one
        if is_document(one):
            below = optional or one.media_type in INDEXES
            for child in children(one, self._read(one)):
                self.add(child, optional=below, depth=depth + 1)


def replace_criu_images(image: Image, criu: Descriptor) -> bytes:
    """Return the index with another tar of CRIU's images instead of its own."""
    index = parse_json(image.document)
    for each in index["manifests"]:
        if each["mediaType"] == CRIU:
            each["digest"], each["size"] = criu.digest, criu.size
    return encode_document(index)


def top(image: Image, root: Descriptor, name: str) -> bytes:
    """Return index.json of a layout for `ctr images import`: the checkpoint, and its base image by name.

    Without an entry of its own, the base image would have no name, and a restore would not find it.
    """
    entries = [make_named_entry(image.base, image.base_name)] if image.base is not None else []
    return encode_document(Index((*entries, make_named_entry(root, name))).to_json())


def make_named_entry(one: Descriptor, name: str) -> Descriptor:
    """Return an entry of index.json that makes it an image of that name. Raises LayoutError."""
    if not is_name(name):
        raise LayoutError(f"{name[:120]!r} is not a valid image name in containerd")
    last = name.rpartition("/")[2]
    tag = last.partition(":")[2] or name
    return replace(one, annotations={IMAGE_NAME: name, REF_NAME: tag})


def container_name(config: bytes) -> str:
    """Return the container's name in its configuration, a google.protobuf.Any of an OCI spec; "" without one.

    The name is the last part of its control group's path in the spec (containerd, oci.WithNamespacedCgroup),
    and for Kubernetes an annotation.
    """
    try:
        spec = parse_json(_value(config))
        notes = spec.get("annotations") or {}
        path = str((spec.get("linux") or {}).get("cgroupsPath") or "")
        return str(notes.get("io.kubernetes.cri.container-name") or re.split("[/:]", path)[-1])
    except (ValueError, IndexError, AttributeError, RecursionError):
        return ""


def _value(data: bytes) -> bytes:
    """Return field 2 of a message that has only bytes fields (protobuf.dev, Encoding: wire type 2)."""
    at, found = 0, b""
    while at < len(data):
        key, at = _number(data, at)
        size, at = _number(data, at)
        if key & 7 != 2 or at + size > len(data):
            raise ValueError("it has a field of an unexpected type")
        if key >> 3 == 2:
            found = data[at : at + size]
        at += size
    return found


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint of at most five bytes, and the offset of its end."""
    value = 0
    for shift in range(0, 35, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise ValueError("it has an unterminated number")


def describe_index(document: bytes) -> Descriptor:
    return Descriptor(INDEX, digest_of(document), len(document))
