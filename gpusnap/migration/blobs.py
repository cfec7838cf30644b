"""Blobs over a channel: one side requests those that its store lacks, and the other side has all of them.

Several threads send requests at once, which are answered in order, so the round-trip time does not matter.
Each blob is compared with its digest before it gets its name: a wrong one never gets into a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from gpusnap.base.user_errors import failure
from gpusnap.migration.frames import Channel, decode_error
from gpusnap.oci.base.errors import BlobError, OciError
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor
from gpusnap.oci.layout.layout import Layout, read_piece
from gpusnap.runtime_shim.base.errors import GpusnapError


class Remote:
    """The other side's blobs of one manifest, as a source for gpusnap.oci.registry.copy.pull."""

    def __init__(self, channel: Channel, root: Descriptor) -> None:
        self._channel, self._root = channel, root
        self._asking = threading.Lock()
        self._turns = threading.Condition()
        self._asked = self._answered = 0
        self._broken = False

    def resolve(self, wanted: str) -> Descriptor:
        assert wanted == self._root.digest
        return self._root

    def read_manifest(self, wanted: str) -> tuple[Descriptor, bytes]:
        """Return a manifest below it, or itself; the caller compares its digest. Raises GpusnapError."""
        with self._answer(wanted) as (pieces, size):
            if not 0 < size <= DOCUMENT_LIMIT:
                raise BlobError(f"{self._channel.who} has a manifest {wanted} of {size} bytes")
            content = b"".join(pieces)
        return Descriptor(self._root.media_type, wanted, size), content

    def fetch_blob(
        self, wanted: Descriptor, layout: Layout, *, step: Callable[[int], object] = lambda at: None
    ) -> None:
        """Fetch a blob into a layout. Raises OciError, GpusnapError, and the errors of `step`."""
        with self._answer(wanted.digest) as (pieces, size), layout.receive(wanted) as incoming:
            if size != wanted.size:
                raise BlobError(
                    f"{self._channel.who} has {wanted.digest} with {size} bytes, not {wanted.size}"
                )
            for piece in pieces:
                incoming.write(piece)
                step(incoming.size)

    def interrupt(self) -> None:
        """Do nothing: each answer has a deadline of its own."""

    @contextmanager
    def _answer(self, digest: str) -> Iterator[tuple[Iterator[bytes], int]]:
        """Yield the bytes of the answer, and their number; bytes that are not read are skipped."""
        with self._asking:
            self._channel.send({"want": digest})
            turn = self._asked
            self._asked += 1
        with self._turns:
            # Each earlier answer has a deadline of its own.
            self._turns.wait_for(lambda: self._broken or self._answered == turn)
            if self._broken:
                raise BlobError(f"{digest} was not received, because the connection broke")
        broken = True
        try:
            frame = self._channel.receive()
            if "error" in frame:
                broken = False
                raise decode_error(frame, self._channel.who)
            size = int(frame.get("payload", 0))
            pieces = self._channel.payload(size)
            try:
                yield pieces, size
            finally:
                for _ in pieces:
                    pass
                broken = False
        finally:
            with self._turns:
                self._answered += 1
                self._broken = self._broken or broken
                self._turns.notify_all()


def serve(
    channel: Channel, layout: Layout, allowed: Collection[str], sent: Callable[[int], object]
) -> dict[str, Any]:
    """Answer requests for blobs of a layout until the other side sends another frame, which is returned.

    allowed: the digests of the blobs that it may have. sent: called with the number of bytes sent so far.
    Raises LinkLost.
    """
    size = 0

    def pieces(file: Any) -> Iterator[bytes]:
        nonlocal size
        with file:
            while piece := read_piece(file):
                yield piece
                size += len(piece)
                sent(size)

    while True:
        frame = channel.receive()
        if "want" not in frame:
            return frame
        digest = str(frame["want"])
        if digest not in allowed:
            channel.send(
                {"error": f"the blob {digest[:80]} does not belong to the checkpoint that is being sent"}
            )
            continue
        try:
            file = layout.open_blob(digest)
            length = file.seek(0, 2)
            file.seek(0)
        except OciError as error:
            found = failure(error)
            channel.send({"error": str(found), "hint": found.hint, "code": found.code})
            continue
        except OSError as error:
            channel.send({"error": f"the blob {digest[:80]} cannot be read: {error.strerror}"})
            continue
        channel.send({"blob": digest}, pieces(file), length)


def check_answer(frame: dict[str, Any], who: str) -> dict[str, Any]:
    """Return the other side's report of its work. Raises the error that it reports."""
    if "error" in frame:
        raise decode_error(frame, who)
    if not isinstance(frame.get("ok"), dict):
        raise GpusnapError(
            f"{who} sent an unknown response", hint="update gpusnap on both hosts", code="GPS-821"
        )
    found: dict[str, Any] = frame["ok"]
    return found
