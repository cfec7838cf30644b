"""The upload of one blob to a registry (distribution-spec v1.1, "Pushing blobs"), from any state.

    POST …/blobs/uploads/[?mount=DIGEST&from=REPOSITORY]    201: mounted; 202: an upload, at Location
    PUT Location?digest=DIGEST                              all of it
    PATCH Location, 32 MiB at a time                        then PUT Location?digest=DIGEST with nothing

All registries accept one PUT. Some have no PATCH, or one for 4 MiB, or report a wrong position. So parts are
only for blobs of more than 32 MiB, after a PUT of one was too large (413) or failed. If a registry refuses a
part, or answers with another Range than was sent, the blob begins anew in one PUT, as do all later ones:
`Ways` records what was learned about a registry.

After a failure, the next attempt continues: a small blob at the POST; a large one with a GET of the upload,
whose Range says what the registry has received, or at the POST if the registry has dropped the upload. The
registry may have received the last request, and only its response may be lost: so before another POST, it is
asked for the blob.

All bytes are hashed as they are read, and the last ones are not sent before the digest of all is known to be
right. So no registry gets a complete blob from gpusnap whose digest is wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar
from urllib.parse import urlencode

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.oci.base.errors import BlobError, NotInRegistry, RegistryError, Rejected, Unauthorized, reason
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.registry import response_checks
from gpusnap.oci.registry.client import Client, Request
from gpusnap.oci.registry.http import PIECE, Broken, Response

T = TypeVar("T")

# The largest blob that is never sent in parts, and the size of the parts of larger ones; bytes.
MONOLITHIC = 32 << 20
_LARGEST_CHUNK = 1 << 30
_RANGE = compile_later(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)
_OCTETS = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True, slots=True)
class Destination:
    """The target of uploads: the repository, its URL with a slash at its end, and its name in messages."""

    repository: str
    url: str
    shown: str

    @property
    def scopes(self) -> tuple[str, ...]:
        """What a token for uploads must permit."""
        return (f"repository:{self.repository}:pull,push",)


@dataclass(slots=True)
class Ways:
    """What uploads to one repository have learned, for later ones; threads may share it."""

    in_parts: bool = False
    """Whether a large blob in one PUT was too large for it."""
    whole: bool = False
    """Whether it does not accept parts."""
    no_mounts: set[str] = field(default_factory=set)
    """Repositories from which it refused to mount a blob."""


class Upload:
    """The upload of one blob; call `advance` until it no longer raises Broken."""

    def __init__(
        self,
        client: Client,
        to: Destination,
        blob: Descriptor,
        source: Blobs,
        *,
        mount_from: Sequence[str] = (),
        ways: Ways | None = None,
        step: Callable[[int], object],
    ) -> None:
        self._client = client
        self._ways = ways or Ways()
        self._to = to
        self._blob = blob
        self._source = source
        self._mounts = [each for each in mount_from if each not in (to.repository, *self._ways.no_mounts)]
        self._step = step
        self._what = f"the blob {blob.digest} of {blob.size} bytes is rejected by {to.shown}"
        self._begun = False
        self._location = ""
        self._chunk = MONOLITHIC
        self._known = True
        # Whether one PUT of it failed.
        self._cut = False
        # Whether it continues from the position that the registry reports, and no part has confirmed that
        # yet.
        self._unsure = False
        self._hashed, self._hashed_to = hashlib.sha256(), 0
        self.position = 0
        """The number of bytes that the registry is known to have."""

    def advance(self) -> bool:
        """Make one attempt to complete it; return whether it was mounted from another repository.

        Raises Broken; BlobError if the digest of the blob here is wrong, and whatever `step` raises;
        Unauthorized, NotInRegistry, Rejected, Unreachable, RegistryError.
        """
        if self._location and not self._known:
            self._ask_how_far()
        if self._begun and not self._location and self._is_there():
            return False
        if not self._location and self._begin():
            return True
        while not (self._in_chunks() if self._is_in_parts() else self._send_at_once()):
            self._begin()
        return False

    def _is_in_parts(self) -> bool:
        wanted = self._cut or self._ways.in_parts
        return self._blob.size > MONOLITHIC and wanted and not self._ways.whole

    def _is_there(self) -> bool:
        request = Request(
            "HEAD", f"{self._to.url}blobs/{self._blob.digest}", self._what, self._to.scopes, (200, 404)
        )
        return self._insist(
            request,
            lambda response: (
                response.status == 200
                and response_checks.confirms_blob(response, self._blob.digest, self._blob.size, self._what)
            ),
        )

    def _insist(self, request: Request, take: Callable[[Response], T]) -> T:
        """Return what `take` gets from the response to a request without a body; it has its own attempts.

        So the attempts of the upload itself are only for its bytes, which are lost when an attempt fails.
        """

        def attempt() -> T:
            with self._client.ask(request) as response:
                return take(response)

        return self._client.persist(attempt, self._what, check=lambda: self._step(self.position))

    def _begin(self) -> bool:
        """Begin an upload; True if a mount made it unnecessary."""
        self._begun = True
        self.position, self._known, self._unsure = 0, True, False
        while self._mounts:
            mounted = self._open(self._mounts[0])
            del self._mounts[0]
            if mounted:
                return True
            if self._location:
                # Not there; the upload that came instead of the mount can be used like any other.
                if not self._mounts:
                    return False
                self._location = ""
        self._open("")
        return False

    def _open(self, mount: str) -> bool:
        scopes, query = self._to.scopes, ""
        if mount:
            scopes += (f"repository:{mount}:pull",)
            query = "?" + urlencode({"mount": self._blob.digest, "from": mount})
        url = f"{self._to.url}blobs/uploads/{query}"
        accepted = (201, 202) if mount else (202,)
        request = Request("POST", url, self._what, scopes, accepted, {"Content-Length": "0"})
        try:
            return self._insist(request, self._use_upload)
        except (Unauthorized, NotInRegistry, Rejected):
            # If the other repository is refused, that is no reason to give up on this one.
            if not mount:
                raise
            self._ways.no_mounts.add(mount)
            return False

    def _use_upload(self, response: Response) -> bool:
        """Use the upload of a response to a POST; True if it is a mount instead."""
        if response.status == 201:
            return True
        self._move(response)
        least = response.header("OCI-Chunk-Min-Length")
        if least.isascii() and least.isdigit() and len(least) < 16:
            self._chunk = max(MONOLITHIC, min(int(least), _LARGEST_CHUNK))
        return False

    def _send_at_once(self) -> bool:
        """Send it in one PUT; False if it must begin anew, in parts."""
        try:
            self._finish(0, self._blob.size)
        except Broken:
            self._cut, self._known = True, False
            if not self._is_in_parts():
                self._location = ""
            raise
        except Rejected as error:
            if error.status == 413 and self._blob.size > MONOLITHIC:
                self._ways.in_parts = True
            if not self._is_in_parts():
                raise
            self._location = ""
            return False
        return True

    def _in_chunks(self) -> bool:
        """Send the missing part in parts; False if it must begin anew, in one PUT."""
        try:
            while self.position < self._blob.size:
                if not self._send_chunk():
                    self._location = ""
                    if self._unsure:  # for example of its first byte: 0-0 means one, or none
                        raise Broken(f"{self._to.shown} reports another upload position")
                    self._ways.whole = True
                    return False
            self._finish(self._blob.size, self._blob.size)
        except Broken:
            self._known = False
            raise
        return True

    def _ask_how_far(self) -> None:
        """Continue from the position that the registry reports; forget the upload if it cannot continue."""
        if not self._is_in_parts():
            self._location = ""
            return
        request = Request("GET", self._location, self._what, self._to.scopes, (204, 202, 200))
        try:
            found = self._insist(request, self._follow_location)
        except (NotInRegistry, Rejected):
            self._location = ""
            return
        if found > self._hashed_to:
            # More than was ever sent: it is another upload.
            self._location = ""
            return
        self.position, self._known, self._unsure = found, True, True
        self._step(found)

    def _send_chunk(self) -> bool:
        """Send a part; False if the registry refuses it, or reports that it has received another one."""
        start = self.position
        end = min(start + self._chunk, self._blob.size)
        headers = {**_OCTETS, "Content-Length": str(end - start), "Content-Range": f"{start}-{end - 1}"}
        request = Request(
            "PATCH",
            self._location,
            self._what,
            self._to.scopes,
            (202, 204, 201),
            headers,
            lambda: self._bytes(start, end),
        )
        try:
            with self._client.ask(request) as response:
                self._move(response, needed=False)
                said = response.header("Range")
                found = self._range(response) if said else end
        except Rejected:
            return False
        except NotInRegistry as error:
            self._location = ""
            raise Broken(f"{self._to.shown} no longer knows the upload") from error
        if found != end:
            return False
        self.position, self._unsure = end, False
        return True

    def _finish(self, start: int, end: int) -> None:
        """End the upload with the bytes from `start` on, and send the digest."""
        if not self._blob.size:
            self._hash(b"", 0)
        url = self._location + ("&" if "?" in self._location else "?")
        headers = {**_OCTETS, "Content-Length": str(end - start)}
        request = Request(
            "PUT",
            url + urlencode({"digest": self._blob.digest}),
            self._what,
            self._to.scopes,
            (201, 204),
            headers,
            lambda: self._bytes(start, end),
        )
        try:
            with self._client.ask(request) as response:
                told = response.header("Docker-Content-Digest")
        except NotInRegistry as error:
            # If the response to an earlier end was lost, the upload is gone because it is complete.
            self._location = ""
            raise Broken(f"{self._to.shown} no longer knows the upload") from error
        if told not in ("", self._blob.digest):
            raise RegistryError(
                f"{self._to.shown} stored the blob {self._blob.digest} as {told[:80]!r}", code="GPS-808"
            )
        self._step(self._blob.size)

    def _move(self, response: Response, *, needed: bool = True) -> None:
        """Use the Location of this response for the upload from now on."""
        location = response.header("Location")
        if location or needed:
            self._location = self._client.resolve_location(response.url, location)

    def _follow_location(self, response: Response) -> int:
        """Follow the upload's Location; return its position."""
        self._move(response, needed=False)
        return self._range(response)

    def _range(self, response: Response) -> int:
        """Return how many bytes the registry has, by the Range of its response: 0-0 means one or none."""
        match = _RANGE.fullmatch(response.header("Range").strip())
        last = int(match[1]) if match else 0
        return last + 1 if last else 0

    def _bytes(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the blob's bytes from `start` to `end`; check the digest before the last ones are sent."""
        with self._source.open_blob(self._blob.digest, self._blob.size) as file:
            at = file.seek(start)
            while at < end:
                self._step(at)
                try:
                    piece = file.read(min(PIECE, end - at))
                except OSError as error:
                    raise BlobError(
                        f"the blob {self._blob.digest} cannot be read: {reason(error)}"
                    ) from error
                if not piece:
                    raise BlobError(f"the blob {self._blob.digest} ends after {at} bytes")
                self._hash(piece, at)
                at += len(piece)
                yield piece

    def _hash(self, piece: bytes, at: int) -> None:
        """Add a piece to the digest, unless it was sent before; raise BlobError if it is wrong at the end."""
        if at + len(piece) > self._hashed_to:
            self._hashed.update(memoryview(piece)[self._hashed_to - at :])
            self._hashed_to = at + len(piece)
        if self._hashed_to == self._blob.size and f"sha256:{self._hashed.hexdigest()}" != self._blob.digest:
            raise BlobError(f"the blob {self._blob.digest} does not match its digest")
