"""The JSON documents of an image layout: descriptors, the image manifest, the image index.

From image-spec v1.1: descriptor.md, manifest.md, image-index.md. Content from elsewhere is checked. Other
fields are ignored, and unknown media types are no error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.digests import check_digest, digest_of

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
OCTETS = "application/octet-stream"  # bytes of an unknown type (RFC 2046)
# manifest.md, "Guidance for an Empty Descriptor"; its blob is these two bytes.
EMPTY = "application/vnd.oci.empty.v1+json"
EMPTY_BLOB = b"{}"
# distribution-spec: registries should take manifests of 4 MiB, and may refuse larger ones.
DOCUMENT_LIMIT = 4 << 20

# RFC 6838, 4.2.
_MEDIA_TYPE = compile_later(r"[A-Za-z0-9][\w!#$&^.+-]{0,126}/[A-Za-z0-9][\w!#$&^.+-]{0,126}", re.ASCII)
_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Where content is and what it is; `size` in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)
    artifact_type: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the descriptor in the spec's format."""
        value: dict[str, object] = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return value | _encode_optional(self.artifact_type, self.annotations)

    @classmethod
    def from_json(cls, value: object, what: str = "the descriptor") -> Descriptor:
        """Parse and check a descriptor. Raises LayoutError, in which `what` is its name."""
        fields = _object(value, what)
        size = fields.get("size")
        if type(size) is not int or not 0 <= size <= _LARGEST:
            raise LayoutError(f"the size of {what} is invalid: {str(size)[:40]}")
        try:
            digest = check_digest(fields.get("digest"))
        except DigestError as error:
            raise LayoutError(f"the digest of {what} is invalid: {error}") from error
        media_type = _media_type(fields.get("mediaType"), what)
        return cls(media_type, digest, size, _annotations(fields, what), _artifact_type(fields, what))


@dataclass(frozen=True, slots=True)
class Manifest:
    """An image manifest: one configuration, layers in order, and its subject."""

    config: Descriptor
    layers: tuple[Descriptor, ...]
    artifact_type: str = ""
    subject: Descriptor | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the manifest in the spec's format."""
        value: dict[str, object] = {"schemaVersion": 2, "mediaType": MANIFEST}
        value |= _encode_optional(self.artifact_type, self.annotations)
        value |= {"config": self.config.to_json(), "layers": [each.to_json() for each in self.layers]}
        return value if self.subject is None else value | {"subject": self.subject.to_json()}

    @classmethod
    def from_json(cls, value: object) -> Manifest:
        """Parse and check a manifest. Raises LayoutError."""
        what = "the manifest"
        fields = _head(value, what, MANIFEST)
        subject = fields.get("subject")
        return cls(
            Descriptor.from_json(fields.get("config"), "the manifest's config"),
            _descriptors(fields, "layers", "layer"),
            _artifact_type(fields, what),
            None if subject is None else Descriptor.from_json(subject, "the manifest's subject"),
            _annotations(fields, what),
        )


@dataclass(frozen=True, slots=True)
class Index:
    """An image index: the manifests that a layout offers."""

    manifests: tuple[Descriptor, ...] = ()
    artifact_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, object]:
        """Return the index in the spec's format."""
        value: dict[str, object] = {"schemaVersion": 2, "mediaType": INDEX}
        value |= {"manifests": [each.to_json() for each in self.manifests]}
        return value | _encode_optional(self.artifact_type, self.annotations)

    @classmethod
    def from_json(cls, value: object) -> Index:
        """Parse and check an index. Raises LayoutError."""
        what = "the index"
        fields = _head(value, what, INDEX)
        found = _descriptors(fields, "manifests", "manifest")
        return cls(found, _artifact_type(fields, what), _annotations(fields, what))


def encode_document(value: Mapping[str, object]) -> bytes:
    """Encode a document; the same content results in the same bytes."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def parse_document(data: bytes, what: str) -> object:
    """Parse JSON from any source. Raises LayoutError."""
    try:
        value: object = parse_json(data)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"{what} is not JSON: {error}") from error
    return value


def empty_descriptor() -> Descriptor:
    """Return the descriptor of the blob that means no configuration."""
    return Descriptor(EMPTY, digest_of(EMPTY_BLOB), len(EMPTY_BLOB))


def _head(value: object, what: str, media_type: str) -> Mapping[str, object]:
    fields = _object(value, what)
    if fields.get("schemaVersion") != 2:
        raise LayoutError(f"{what} has a schemaVersion other than 2")
    if fields.get("mediaType", media_type) != media_type:
        raise LayoutError(f"{what} is of the media type {str(fields['mediaType'])[:80]!r}, not {media_type}")
    return fields


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise LayoutError(f"{what} is not a JSON object")
    return value


def _descriptors(fields: Mapping[str, object], name: str, one: str) -> tuple[Descriptor, ...]:
    found = fields.get(name)
    if not isinstance(found, list):
        raise LayoutError(f"{name} is not a list")
    return tuple(Descriptor.from_json(each, f"{one} {at}") for at, each in enumerate(found))


def _media_type(value: object, what: str) -> str:
    if not isinstance(value, str) or not _MEDIA_TYPE.fullmatch(value):
        raise LayoutError(f"{what} has an invalid media type: {str(value)[:80]!r}")
    return value


def _artifact_type(fields: Mapping[str, object], what: str) -> str:
    value = fields.get("artifactType")
    return "" if value is None else _media_type(value, what)


def _annotations(fields: Mapping[str, object], what: str) -> Mapping[str, str]:
    found = fields.get("annotations")
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(each, str) for each in found.values()):
        raise LayoutError(f"the annotations of {what} are not strings")
    return found


def _encode_optional(artifact_type: str, annotations: Mapping[str, str]) -> dict[str, object]:
    value: dict[str, object] = {"artifactType": artifact_type} if artifact_type else {}
    return value | ({"annotations": dict(annotations)} if annotations else {})
