"""The referrers of a manifest within a layout; see gpusnap.oci.registry.referrers for those in a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.chunks.artifact import CHECKPOINT
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor, parse_document
from gpusnap.oci.layout.graph import is_document
from gpusnap.oci.store.index import REF_NAME

DEEPEST = 3
"""How far from a checkpoint a referrer may be: the signature of an SBOM is at 2."""


def subject_of(content: bytes) -> str:
    """Return the digest of the subject of a manifest or an index; "" if it has none."""
    with suppress(LayoutError, DigestError):
        value = parse_document(content, "the manifest")
        if isinstance(value, dict) and value.get("subject") is not None:
            return Descriptor.from_json(value["subject"], "the subject").digest
    return ""


def list_referring(
    entries: Iterable[Descriptor], read: Callable[[Descriptor], bytes], *subjects: str
) -> tuple[Descriptor, ...]:
    """Those among the entries of a layout's index that refer to manifests, and what refers to them.

    `read` gives the content of a manifest; what it cannot give is passed over.
    """
    by_subject: dict[str, list[Descriptor]] = {}
    for each in entries:
        plain = not each.annotations.get(REF_NAME) and each.artifact_type != CHECKPOINT
        if plain and is_document(each) and each.size <= DOCUMENT_LIMIT:
            with suppress(LayoutError, DigestError):
                by_subject.setdefault(subject_of(read(each)), []).append(each)
    found: dict[str, Descriptor] = {}
    waiting = [(subject, 1) for subject in subjects]
    for at, depth in waiting:
        for each in by_subject.get(at, ()):
            if each.digest not in found and depth <= DEEPEST:
                found[each.digest] = each
                waiting.append((each.digest, depth + 1))
    return tuple(found.values())
