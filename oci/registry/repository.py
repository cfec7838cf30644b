"""One repository of a registry: manifests and blobs, by the OCI distribution-spec v1.1.

A blob is never completely in memory, in either direction. An interrupted transfer continues where it stopped;
digests are checked in both directions. Every call is repeated as gpusnap.oci.registry.client describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    LayoutError,
    NotARegistry,
    NotInRegistry,
    RegistryError,
    Rejected,
    Unauthorized,
)
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.digests import digest_of, get_hex
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, INDEX, Descriptor, Index, parse_document
from gpusnap.oci.layout.graph import INDEXES, MANIFESTS
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.partial_blob import Incoming
from gpusnap.oci.layout.reference import Reference, check_tag, is_tag
from gpusnap.oci.registry import response_checks
from gpusnap.oci.registry.client import Client, Request
from gpusnap.oci.registry.http import Broken, Response
from gpusnap.oci.registry.upload import Destination, Upload, Ways

_ACCEPT = ", ".join((*MANIFESTS, *INDEXES))
# Of a list (RFC 8288): the next page; and the largest number of pages.
_NEXT = compile_later(r'<([^<>]{1,4000})>\s*;\s*rel="?next"?', re.ASCII)
_MOST_PAGES = 64
# Of referrers of a manifest: a page of 4 MiB may list tens of thousands.
_MOST_REFERRERS = 4096
# What servers declare for a document without a known type.
_VAGUE = ("", "application/json", "text/plain", "text/html", "application/octet-stream")
_CONTENT_RANGE = compile_later(r"bytes ([0-9]{1,18})-[0-9]{1,18}/(?:[0-9]{1,18}|\*)", re.ASCII)


class Repository:
    """The repository that `reference` names, by a client of its registry; threads may share it.

    All methods raise Unauthorized, NotInRegistry, Rejected, Unreachable or RegistryError.
    """

    def __init__(self, reference: Reference, client: Client) -> None:
        self.reference = reference
        self._client = client
        self._to = Destination(
            reference.repository, f"{self._client.base}{reference.repository}/", reference.name
        )
        self._scopes = (f"repository:{reference.repository}:pull",)
        self._ways = Ways()

    def __enter__(self) -> Repository:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections."""
        self._client.close()

    def interrupt(self) -> None:
        """End what other threads wait for in it; they, and all later callers, get Cancelled."""
        self._client.interrupt()

    # Manifests

    def resolve(self, wanted: str, *, pushing: bool = False) -> Descriptor:
        """Return the descriptor of a tag or a digest, without reading it if the registry can say it.

        pushing: ask with the right to push, which all requests of a push need: some registries give nobody
        the right to pull from a repository that does not exist yet.
        """
        request = self._manifest("HEAD", wanted, pushing=pushing)

        def attempt() -> Descriptor | None:
            with self._client.ask(request) as response:
                return _parse_head(response, wanted)

        try:
            found = self._client.persist(attempt, request.what)
        except Rejected as error:
            if error.status not in (400, 405, 501):
                raise
            found = None
        return found or self.read_manifest(wanted, pushing=pushing)[0]

    def read_manifest(self, wanted: str, *, pushing: bool = False) -> tuple[Descriptor, bytes]:
        """Read a manifest or an index up to 4 MiB, and check its digest. Raises BlobError, LayoutError, too.

        pushing: as for `resolve`.
        """
        request = self._manifest("GET", wanted, pushing=pushing)

        def attempt() -> tuple[str, str, bytes]:
            with self._client.ask(request) as response:
                response_checks.check_no_page(response, request.what)
                told = response_checks.get_digest(response)
                content = response.body(DOCUMENT_LIMIT + 1)
                length = response_checks.get_length(response)
                if length is not None and len(content) < min(length, DOCUMENT_LIMIT + 1):
                    raise Broken(f"the manifest ended after {len(content)} of {length} bytes")
                return response.header("Content-Type"), told, content

        kind, told, content = self._client.persist(attempt, request.what)
        shown = _format_name(self._to.shown, wanted)
        if len(content) > DOCUMENT_LIMIT:
            raise BlobError(f"the manifest {shown} has more than the allowed {DOCUMENT_LIMIT} bytes")
        digest = digest_of(content)
        for expected in (wanted if _is_digest(wanted) else "", told):
            if expected not in ("", digest):
                raise BlobError(f"the manifest {shown} was received as {digest}, not as {expected[:80]}")
        media_type = response_checks.strip_parameters(kind)
        if media_type in _VAGUE:
            value = parse_document(content, f"the manifest {shown}")
            media_type = str(value.get("mediaType")) if isinstance(value, dict) else ""
        head = {"mediaType": media_type, "digest": digest, "size": len(content)}
        return Descriptor.from_json(head, f"the manifest {shown}"), content

    def put_manifest(self, content: bytes, media_type: str, wanted: str = "") -> Descriptor:
        """Put a manifest into the registry under a tag or its digest; all that it names must exist there.

        If the response does not confirm that the registry has it, the registry is asked for it.
        """
        digest = digest_of(content)
        wanted = wanted or digest
        if _is_digest(wanted) and wanted != digest:
            raise BlobError(f"the manifest {wanted} does not match its digest")
        shown = _format_name(self._to.shown, wanted)
        request = Request(
            "PUT",
            f"{self._to.url}manifests/{_check_reference(wanted)}",
            f"the manifest {shown} of {len(content)} bytes was rejected",
            self._to.scopes,
            (201, 200, 202, 204),
            {"Content-Type": media_type, "Content-Length": str(len(content))},
            lambda: [content],
        )

        def attempt() -> tuple[int, str]:
            with self._client.ask(request) as response:
                return response.status, response_checks.get_digest(response)

        status, told = self._client.persist(attempt, request.what)
        if told not in ("", digest):
            raise RegistryError(
                f"{self._to.shown} stored the manifest {digest} as {told[:80]!r}", code="GPS-808"
            )
        if (status, told) != (201, digest):
            self._check_taken(wanted, digest)
        return Descriptor(media_type, digest, len(content))

    def _check_taken(self, wanted: str, digest: str) -> None:
        """Raise NotARegistry if the registry does not have a manifest that it accepted."""
        found = ""
        try:
            found = self.resolve(wanted, pushing=True).digest
        except NotARegistry:
            raise
        except (Unauthorized, Rejected):
            return  # it may be writable, but not readable
        except NotInRegistry:
            pass
        if found != digest:
            shown = _format_name(self._to.shown, wanted)
            has = f"has {found}" if found else "does not have it"
            how = f"it reported that it stored the manifest {digest}, but {has}"
            raise response_checks.make_not_registry(self.reference.registry, how, f"{shown} does not exist")

    def read_referrers(self, digest: str, *, pushing: bool = False) -> tuple[Descriptor, ...] | None:
        """Return the referrers that the registry lists for a manifest; None if it keeps no such lists.

        Only the first pages of an endless list.

        pushing: as for `resolve`. Raises LayoutError, DigestError, too.
        """
        get_hex(digest)
        what = f"{self._to.shown} cannot list the referrers of {digest}"
        scopes = self._to.scopes if pushing else self._scopes
        url = f"{self._to.url}referrers/{digest}"
        found: list[Descriptor] = []
        try:
            for kind, content in self._read_pages(url, what, scopes, {"Accept": INDEX}):
                if response_checks.strip_parameters(kind) != INDEX or len(content) > DOCUMENT_LIMIT:
                    return None
                listed = parse_document(content, f"the list of referrers of {digest}")
                found += Index.from_json(listed).manifests
                if len(found) >= _MOST_REFERRERS:
                    break
        except (NotInRegistry, Rejected, Unauthorized):
            return None
        return tuple(found)

    def read_tags(self) -> tuple[str, ...]:
        """Return all tags, in the registry's order, up to some 10,000 (distribution-spec, Listing Tags).

        Raises LayoutError, too, for a response that is no list of tags.
        """
        what = f"the tags of {self._to.shown} cannot be listed"
        url = f"{self._to.url}tags/list"
        found: list[str] = []
        for _, content in self._read_pages(url, what, self._scopes):
            match parse_document(content, f"the list of tags of {self._to.shown}"):
                case {"tags": list(tags)}:
                    found += [tag for tag in tags if isinstance(tag, str) and is_tag(tag)]
                case {"tags": None}:
                    pass
                case _:
                    raise LayoutError(f"{what}: unexpected response")
        return tuple(dict.fromkeys(found))

    def _read_pages(
        self, url: str, what: str, scopes: tuple[str, ...], headers: dict[str, str] | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield media type and content of each page of a list, up to _MOST_PAGES."""
        for _ in range(_MOST_PAGES):
            page = partial(self._page, Request("GET", url, what, scopes, headers=headers or {}))
            kind, more, content = self._client.persist(page, what)
            yield kind, content
            match = _NEXT.search(more)
            if match is None:
                return
            url = self._client.resolve_location(url, match[1])

    def _page(self, request: Request) -> tuple[str, str, bytes]:
        """Return media type, links and content of one page of a list."""
        with self._client.ask(request) as response:
            response_checks.check_no_page(response, request.what)
            content = response.body(DOCUMENT_LIMIT + 1)
            return response.header("Content-Type"), response.header("Link"), content

    # Blobs

    def has_blob(self, digest: str, size: int | None = None, *, pushing: bool = False) -> bool:
        """Whether the repository has that blob, of that size. pushing: as for `resolve`."""
        request = self._blob("HEAD", digest, (200, 404), pushing=pushing)

        def attempt() -> bool:
            with self._client.ask(request) as response:
                return response.status == 200 and response_checks.confirms_blob(
                    response, digest, size, request.what
                )

        return self._client.persist(attempt, request.what)

    def fetch_blob(
        self, wanted: Descriptor, layout: Layout, *, step: Callable[[int], object] = lambda at: None
    ) -> None:
        """Fetch a blob into a layout; it is checked before it gets its name there.

        step: called before each attempt and at each piece with the number of bytes that have arrived; what it
        raises ends the transfer. Raises BlobError, which names the blob, DiskFull, DiskError, LayoutError,
        too.
        """
        with layout.receive(wanted) as incoming:
            self._client.persist(
                lambda: self._fetch(wanted, incoming, step),
                f"{self._to.shown} cannot return the blob {wanted.digest} of {wanted.size} bytes",
                reached=lambda: incoming.size,
                check=lambda: step(incoming.size),
            )

    def send_blob(
        self,
        wanted: Descriptor,
        source: Blobs,
        *,
        mount_from: Sequence[str] = (),
        step: Callable[[int], object] = lambda at: None,
    ) -> bool:
        """Send a blob of a layout to the registry; True if it was mounted from another repository.

        mount_from: names of repositories of this registry that may have it. step: as for fetch_blob, but it
        goes back if an upload must begin anew. Raises BlobError, which names the blob, before the registry
        has all of one whose digest is wrong.
        """
        get_hex(wanted.digest)
        upload = Upload(
            self._client, self._to, wanted, source, mount_from=mount_from, ways=self._ways, step=step
        )
        return self._client.persist(
            upload.advance,
            f"{self._to.shown} rejected the blob {wanted.digest} of {wanted.size} bytes",
            reached=lambda: upload.position,
            check=lambda: step(upload.position),
        )

    # Private

    def _fetch(self, wanted: Descriptor, incoming: Incoming, step: Callable[[int], object]) -> None:
        """Make one attempt to fetch the missing part of a blob."""
        if incoming.size == wanted.size:
            return
        for piece in self._pieces(wanted, incoming.size):
            incoming.write(piece)
            step(incoming.size)
        if incoming.size < wanted.size:
            raise Broken(f"the connection ended after {incoming.size} of {wanted.size} bytes")

    def _pieces(self, wanted: Descriptor, start: int) -> Iterator[bytes]:
        """Yield the bytes of a blob from `start` on, as far as they arrive."""
        headers = {"Range": f"bytes={start}-"} if start else {}
        request = self._blob("GET", wanted.digest, (200, 206), headers)
        with self._client.ask(request) as response:
            at = 0
            if response.status == 206:
                match = _CONTENT_RANGE.fullmatch(response.header("Content-Range").strip())
                if match is None or int(match[1]) != start:
                    raise RegistryError(
                        f"{self._to.shown} returned another part of {wanted.digest} than requested",
                        code="GPS-808",
                    )
                at = start
            length = response_checks.get_length(response)
            if length is None or at + length != wanted.size:
                response_checks.check_no_page(response, request.what)
            if length is not None and at + length != wanted.size:
                raise BlobError(
                    f"the blob {wanted.digest} has {at + length} bytes in {self._to.shown}, not {wanted.size}"
                )
            for piece in response.pieces():
                # A server without ranges sends all of it again.
                new = piece[max(0, start - at) :] if at < start else piece
                at += len(piece)
                if new:
                    yield new

    def _manifest(self, method: str, wanted: str, *, pushing: bool) -> Request:
        what = f"{_format_name(self._to.shown, wanted)} cannot be read"
        url = f"{self._to.url}manifests/{_check_reference(wanted)}"
        scopes = self._to.scopes if pushing else self._scopes
        return Request(method, url, what, scopes, headers={"Accept": _ACCEPT})

    def _blob(
        self,
        method: str,
        digest: str,
        accepted: tuple[int, ...],
        headers: dict[str, str] | None = None,
        *,
        pushing: bool = False,
    ) -> Request:
        get_hex(digest)
        does_not = "report whether it has" if method == "HEAD" else "return"
        what = f"{self._to.shown} does not {does_not} the blob {digest}"
        scopes = self._to.scopes if pushing else self._scopes
        return Request(method, f"{self._to.url}blobs/{digest}", what, scopes, accepted, headers or {})


def _is_digest(wanted: str) -> bool:
    return ":" in wanted


def _check_reference(wanted: str) -> str:
    """Return a tag, or a sha256 digest. Raises RegistryError, DigestError."""
    if _is_digest(wanted):
        get_hex(wanted)
        return wanted
    return check_tag(wanted)


def _format_name(name: str, wanted: str) -> str:
    return f"{name}{'@' if _is_digest(wanted) else ':'}{wanted[:200]}"


def _parse_head(response: Response, wanted: str) -> Descriptor | None:
    """Return the descriptor in the head of a response; None if it is incomplete."""
    digest, length = response_checks.get_digest(response), response_checks.get_length(response)
    media_type = response_checks.strip_parameters(response.header("Content-Type"))
    if media_type in _VAGUE or length is None or (_is_digest(wanted) and digest != wanted):
        return None
    try:
        get_hex(digest)
        return Descriptor.from_json({"mediaType": media_type, "digest": digest, "size": length})
    except (LayoutError, DigestError):
        return None
