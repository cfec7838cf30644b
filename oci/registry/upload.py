"""One blob on its way into a registry (distribution-spec v1.1, "Pushing blobs"), from wherever it stands.

    POST …/blobs/uploads/[?mount=DIGEST&from=REPOSITORY]    201: taken over; 202: an upload, at Location
    PUT Location?digest=DIGEST                              all of it
    PATCH Location, 32 MiB at a time                        then PUT Location?digest=DIGEST with nothing

One PUT is what all registries take: some have no PATCH, or one for 4 MiB, or say nothing true of how far they
are. So parts are for blobs of more than 32 MiB alone, after a PUT of one was too much (413) or broke. Where
a registry refuses a part, or answers with another Range than what it was sent, the blob begins anew in one
PUT, as do all later ones: `Ways` is what was learnt of a registry.

After a break the next attempt begins where the one before it came to: a small blob at the POST; a large one
with a GET of the upload, whose Range says what the registry has got, or at the POST where the registry has
given the upload up. The registry may have got the last request, and only its answer be lost: so before
another POST it is asked for the blob.

All bytes are hashed as they are read, and the last ones are not sent before the digest of all is known to be
right: no registry gets a blob of ours whole that is not what its digest says.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TypeVar
from urllib.parse import urlencode

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import BlobError, NotInRegistry, RegistryError, Rejected, Unauthorized, reason
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.registry import answers
from gpusnap.oci.registry.client import Client, Request
from gpusnap.oci.registry.http import PIECE, Answer, Broken

T = TypeVar("T")

# The largest blob that never goes in parts, and the parts of larger ones; bytes.
MONOLITHIC = 32 << 20
_LARGEST_CHUNK = 1 << 30
_RANGE = compile_later(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)
_OCTETS = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True, slots=True)
class Destination:
    """Where uploads go: the repository, its URL with a slash at its end, and how messages name it."""

    repository: str
    url: str
    shown: str

    @property
    def scopes(self) -> tuple[str, ...]:
        """What a token for uploads must allow."""
        return (f"repository:{self.repository}:pull,push",)


@dataclass(slots=True)
class Ways:
    """What uploads to one repository found out, for those after them; threads may share it."""

    in_parts: bool = False
    """a large blob in one PUT was too much for it"""
    whole: bool = False
    """it does not take parts"""
    no_mounts: set[str] = field(default_factory=set)
    """repositories of which it refused to take over a blob"""


class Upload:
    """The upload of one blob; `advance` until it no longer raises Broken."""

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
        # Whether one PUT of it broke.
        self._cut = False
        # Whether it goes on from what the registry says that it has, and no part has shown that to be right.
        self._unsure = False
        self._hashed, self._hashed_to = hashlib.sha256(), 0
        self.position = 0
        """bytes that the registry is known to have"""

    def advance(self) -> bool:
        """One attempt to bring it to its end; whether it was mounted from another repository.

        Raises Broken; BlobError where the blob here is not what its digest says, and whatever `step` raises;
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
        """Whether it goes in parts."""
        wanted = self._cut or self._ways.in_parts
        return self._blob.size > MONOLITHIC and wanted and not self._ways.whole

    def _is_there(self) -> bool:
        request = Request(
            "HEAD", f"{self._to.url}blobs/{self._blob.digest}", self._what, self._to.scopes, (200, 404)
        )
        return self._insist(
            request,
            lambda answer: (
                answer.status == 200 and answers.has(answer, self._blob.digest, self._blob.size, self._what)
            ),
        )

    def _insist(self, request: Request, take: Callable[[Answer], T]) -> T:
        """What is taken from the answer to a request without a body, which has attempts of its own.

        So the attempts of the upload itself are for what is lost when they break: its bytes.
        """

        def attempt() -> T:
            with self._client.ask(request) as answer:
                return take(answer)

        return self._client.persist(attempt, self._what, check=lambda: self._step(self.position))

    def _begin(self) -> bool:
        """Begin an upload; True where a mount made it needless."""
        self._begun = True
        self.position, self._known, self._unsure = 0, True, False
        while self._mounts:
            mounted = self._open(self._mounts[0])
            del self._mounts[0]
            if mounted:
                return True
            if self._location:
                # Not there; the upload that came in place of the mount serves as well as any.
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
            return self._insist(request, self._take_over)
        except (Unauthorized, NotInRegistry, Rejected):
            # To be refused the other repository is no reason to give up on this one.
            if not mount:
                raise
            self._ways.no_mounts.add(mount)
            return False

    def _take_over(self, answer: Answer) -> bool:
        """Take over the upload of an answer to a POST; True where it is a mount in its place."""
        if answer.status == 201:
            return True
        self._move(answer)
        least = answer.header("OCI-Chunk-Min-Length")
        if least.isascii() and least.isdigit() and len(least) < 16:
            self._chunk = max(MONOLITHIC, min(int(least), _LARGEST_CHUNK))
        return False

    def _send_at_once(self) -> bool:
        """Send it in one PUT; False where it has to begin anew, in parts."""
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
        """Send what is missing in parts; False where it has to begin anew, in one PUT."""
        try:
            while self.position < self._blob.size:
                if not self._send_chunk():
                    self._location = ""
                    if self._unsure:  # such as of its first byte: 0-0 means one, or none
                        raise Broken(f"{self._to.shown} reports another upload position")
                    self._ways.whole = True
                    return False
            self._finish(self._blob.size, self._blob.size)
        except Broken:
            self._known = False
            raise
        return True

    def _ask_how_far(self) -> None:
        """Go on from what the registry says that it has got; forget the upload where it does not go on."""
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
        """Send a part; False where the registry does not take it, or says that it has got another one."""
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
            with self._client.ask(request) as answer:
                self._move(answer, needed=False)
                said = answer.header("Range")
                found = self._range(answer) if said else end
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
        """End the upload with the bytes from `start` on, and tell the digest."""
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
            with self._client.ask(request) as answer:
                told = answer.header("Docker-Content-Digest")
        except NotInRegistry as error:
            # Where the answer to an earlier end was lost, the upload is gone because it is done.
            self._location = ""
            raise Broken(f"{self._to.shown} no longer knows the upload") from error
        if told not in ("", self._blob.digest):
            raise RegistryError(
                f"{self._to.shown} stored the blob {self._blob.digest} as {told[:80]!r}", code="GPS-808"
            )
        self._step(self._blob.size)

    def _move(self, answer: Answer, *, needed: bool = True) -> None:
        """The upload is at the Location of this answer from now on."""
        location = answer.header("Location")
        if location or needed:
            self._location = self._client.resolve_location(answer.url, location)

    def _follow_location(self, answer: Answer) -> int:
        """Follow the upload's Location; how far it is."""
        self._move(answer, needed=False)
        return self._range(answer)

    def _range(self, answer: Answer) -> int:
        """How many bytes the registry has got, by the Range of its answer: 0-0 means one, or none."""
        match = _RANGE.fullmatch(answer.header("Range").strip())
        last = int(match[1]) if match else 0
        return last + 1 if last else 0

    def _bytes(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes of the blob from `start` to `end`, the digest checked before the last ones go."""
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
        """Take a piece into the digest, unless it was sent before; raise BlobError at a wrong end."""
        if at + len(piece) > self._hashed_to:
            self._hashed.update(memoryview(piece)[self._hashed_to - at :])
            self._hashed_to = at + len(piece)
        if self._hashed_to == self._blob.size and f"sha256:{self._hashed.hexdigest()}" != self._blob.digest:
            raise BlobError(f"the blob {self._blob.digest} does not match its digest")
