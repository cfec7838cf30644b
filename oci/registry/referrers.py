"""What refers to a manifest: signatures, SBOMs, attestations (distribution-spec v1.1, Listing Referrers).

A referrer is a manifest, or an index, whose `subject` is the other one. A registry lists those of a manifest;
an older one keeps the list as an index under the tag sha256-<hex>, which its clients write. In a layout they
are entries of index.json without a name. The list may come from anybody, so the subject is checked in the
referrer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    LayoutError,
    NotInRegistry,
    RegistryError,
    Rejected,
    Unauthorized,
)
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.documents import (
    DOCUMENT_LIMIT,
    INDEX,
    Descriptor,
    Index,
    encode_document,
    parse_document,
)
from gpusnap.oci.layout.graph import is_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.registry.copy import TransferTotals
from gpusnap.oci.registry.repository import Repository
from gpusnap.oci.store.referrers import DEEPEST, subject_of

# Of one checkpoint.
_MOST = 256
# Of what a registry lists; it may list anything, and each is asked for.
_MOST_LISTED = 1024


def pull(
    repository: Repository,
    subject: str,
    layout: Layout,
    *,
    have: Callable[[Descriptor], bool] = lambda one: False,
) -> tuple[tuple[Descriptor, ...], TransferTotals]:
    """Bring what refers to a manifest, and what refers to that, into a layout; the manifests, and what came.

    have: as for gpusnap.oci.registry.copy.pull. Raises as that does.
    """
    found: dict[str, Descriptor] = {}
    moved, seen = TransferTotals(), set[tuple[str, str]]()
    waiting = [(subject, 1)]
    for at, depth in waiting:
        for each in _list_referrers(repository, at):
            if each.digest in found or each.digest == subject or (each.digest, at) in seen:
                continue
            if len(found) >= _MOST or len(seen) >= _MOST_LISTED:
                return tuple(found.values()), moved
            seen.add((each.digest, at))
            with suppress(NotInRegistry):  # the list may be older
                if subject_of(repository.read_manifest(each.digest)[1]) != at:
                    continue
                root, came = transfer.pull(repository, each.digest, layout, have=have)
                moved = transfer.add(moved, came)
                found[each.digest] = Descriptor(
                    root.media_type, root.digest, root.size, each.annotations, each.artifact_type
                )
                if depth < DEEPEST:
                    waiting.append((each.digest, depth + 1))
    return tuple(found.values()), moved


def push(referrers: Iterable[Descriptor], layout: Layout, repository: Repository) -> TransferTotals:
    """Bring what refers to manifests that a repository has there, too. Raises as copy.push does."""
    moved = TransferTotals()
    by_subject: dict[str, list[Descriptor]] = {}
    for each in referrers:
        moved = transfer.add(moved, transfer.push(each, layout, repository))
        by_subject.setdefault(subject_of(layout.read_blob(each)), []).append(each)
    for subject, some in by_subject.items():
        if subject and repository.read_referrers(subject, pushing=True) is None:
            _add_to_tag(repository, subject, some)
    return moved


def _list_referrers(repository: Repository, subject: str) -> Iterator[Descriptor]:
    """The manifests that a registry says refer to one."""
    found = repository.read_referrers(subject)
    if found is None:
        found = _read_tag_list(repository, subject, pushing=False)
    yield from (each for each in found if is_document(each) and each.digest.startswith(PREFIX))


def _read_tag_list(repository: Repository, subject: str, *, pushing: bool) -> tuple[Descriptor, ...]:
    """Return the list that clients keep if a registry keeps none."""
    try:
        root, content = repository.read_manifest(_tag(subject), pushing=pushing)
        if root.media_type == INDEX:
            return Index.from_json(parse_document(content, f"the index {root.digest}")).manifests
    except (NotInRegistry, Rejected, Unauthorized):
        pass
    except (LayoutError, DigestError) as error:
        if isinstance(error, BlobError):
            raise
    return ()


def _add_to_tag(repository: Repository, subject: str, more: Iterable[Descriptor]) -> None:
    there = _read_tag_list(repository, subject, pushing=True)
    known = {each.digest for each in there}
    new = tuple(each for each in more if each.digest not in known)
    if new:
        content = encode_document(Index((*there, *new)).to_json())
        if len(content) > DOCUMENT_LIMIT:
            raise RegistryError(
                f"the list of referrers of {subject} would have {len(content)} bytes", code="GPS-812"
            )
        repository.put_manifest(content, INDEX, _tag(subject))


def _tag(subject: str) -> str:
    """distribution-spec v1.1, Referrers Tag Schema."""
    return f"sha256-{get_hex(subject)}"
