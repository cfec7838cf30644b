"""What a manifest refers to: the blobs that are copied with it, and that stay as long as it does.

OCI's manifests and indexes (image-spec v1.1), and Docker's, which other tools put into the same layouts
(distribution, docs/spec/manifest-v2-2.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gpusnap.oci.base.errors import LayoutError
from gpusnap.oci.layout.digests import check_digest
from gpusnap.oci.layout.documents import INDEX, MANIFEST, Descriptor, parse_document

MANIFESTS = (MANIFEST, "application/vnd.docker.distribution.manifest.v2+json")
INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
# An index may name indexes. No tool nests them deeper, and a malicious one must end somewhere.
_DEEPEST = 8


def is_document(descriptor: Descriptor) -> bool:
    """Whether it is a manifest or an index, which have children."""
    return descriptor.media_type in (*MANIFESTS, *INDEXES)


def children(descriptor: Descriptor, content: bytes) -> tuple[Descriptor, ...]:
    """Return what a manifest or an index of that media type names: config and layers, or manifests.

    Its `subject` is not included. Raises LayoutError.
    """
    what = f"the manifest {descriptor.digest}"
    value = parse_document(content, what)
    if not isinstance(value, dict):
        raise LayoutError(f"{what} is not a JSON object")
    if descriptor.media_type in INDEXES:
        return _parse_all(value.get("manifests"), f"the manifests of {what}")
    found = _parse_all(value.get("layers"), f"the layers of {what}")
    return (Descriptor.from_json(value.get("config"), f"the config of {what}"), *found)


def check_known(descriptor: Descriptor, content: bytes) -> None:
    """Raise LayoutError for an index that names other types than manifests: their content is not known."""
    if descriptor.media_type in INDEXES:
        for child in children(descriptor, content):
            if not is_document(child):
                raise LayoutError(
                    f"gpusnap does not know what {child.digest}, a {child.media_type}, refers to"
                )


def walk(root: Descriptor, read: Callable[[Descriptor], bytes]) -> Iterator[tuple[Descriptor, bytes | None]]:
    """Yield every descriptor below `root`, each digest once, children before their parents.

    If one is named with several media types, for example as a manifest and as a layer, it is yielded once for
    each. With its content for manifests and indexes, None for other blobs. `read` returns the content of a
    manifest or an index, with its digest checked. Raises LayoutError, and whatever `read` raises.
    """
    yield from _walk(root, read, set(), 0)


def _walk(
    at: Descriptor, read: Callable[[Descriptor], bytes], seen: set[tuple[str, str]], depth: int
) -> Iterator[tuple[Descriptor, bytes | None]]:
    check_digest(at.digest)
    # What is below it depends on the type with which it is named.
    mark = at.digest, at.media_type if is_document(at) else ""
    if mark in seen:
        return
    seen.add(mark)
    if not is_document(at):
        yield at, None
        return
    if depth > _DEEPEST:
        raise LayoutError(f"the manifest {at.digest} is nested below more than {_DEEPEST} indexes")
    content = read(at)
    for child in children(at, content):
        yield from _walk(child, read, seen, depth + 1)
    yield at, content


def _parse_all(value: object, what: str) -> tuple[Descriptor, ...]:
    if not isinstance(value, list):
        raise LayoutError(f"{what} are not a list")
    return tuple(Descriptor.from_json(each, f"{what}, {at},") for at, each in enumerate(value))
