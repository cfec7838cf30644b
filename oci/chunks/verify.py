"""Checks that everything that a manifest or an index names exists and fits digests and tables."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import zstandard

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import BlobError, DigestError, LayoutError, reason
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks import planes
from gpusnap.oci.chunks.blake3_digests import compute_blake3, differ, start_blake3
from gpusnap.oci.chunks.table import LARGE_CHUNK, Table
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor
from gpusnap.oci.layout.graph import INDEXES, MANIFESTS, children, is_document
from gpusnap.oci.layout.layout import Layout

_PIECE = 1 << 20
# As in gpusnap.oci.layout.graph.walk.
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """A blob, and what is wrong with it, in a few words."""

    descriptor: Descriptor
    what: str

    def __str__(self) -> str:
        return f"{self.descriptor.digest}, a {self.descriptor.media_type}: {self.what}"


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """How far a check is: blobs, and their bytes."""

    blobs: int
    size: int
    total_blobs: int
    total_size: int


class Contents:
    """The content of blobs according to tables of chunks, which a blob's own digest does not show.

    A table may be wrong or malicious. If a blob is the chunk itself, only BLAKE3 is left to compare; that is
    done for each chunk, if this host has it.
    """

    def __init__(self, tables: Iterable[Table] = ()) -> None:
        # By blob: size, digest and BLAKE3 of each chunk that it is used for.
        self._plain: dict[str, set[tuple[int, str, str]]] = defaultdict(set)
        self._told: dict[str, set[tuple[int, str, str]]] = defaultdict(set)
        self._planes: dict[str, set[tuple[int, str, str]]] = defaultdict(set)
        self._alone = threading.Lock()
        for table in tables:
            for chunk in table.chunks:
                told = {"plain": self._plain, "zstd": self._told, "planes": self._planes}[chunk.encoding]
                if chunk.encoding != "plain" or chunk.blake3:
                    told[chunk.blob].add((chunk.size, chunk.plain, chunk.blake3))

    def fault(self, layout: Layout, blob: Descriptor) -> str:
        """Return what a blob, itself right, lacks or has wrong; "" if all tables are right."""
        try:
            return self._fault(layout, blob)
        except zstandard.ZstdError as error:
            return f"is not valid zstd: {error}"
        except (BlobError, OSError) as error:
            return f"cannot be read: {error if isinstance(error, BlobError) else reason(error)}"

    def _fault(self, layout: Layout, blob: Descriptor) -> str:
        """Decompress it piece by piece, up to the largest chunk that a table has in it."""
        for size, digest, blake3 in sorted(self._planes.get(blob.digest, ())):
            if what := self._fault_in_planes(layout, blob, size, digest, blake3):
                return what
        if what := self._fault_in_plain(layout, blob):
            return what
        told = sorted(self._told.get(blob.digest, ()))
        if not told:
            return ""
        largest = max(told[-1][0], 1 << 10)
        # As in gpusnap.oci.chunks.reader: gpusnap never uses a window larger than any chunk.
        decompressor = zstandard.ZstdDecompressor(max_window_size=largest)
        hashed, hashed_fast, at = hashlib.sha256(), start_blake3(), 0
        with (
            self._alone if largest > LARGE_CHUNK else nullcontext(),
            layout.open_blob(blob.digest) as file,
            decompressor.stream_reader(file, closefd=False) as plain,
        ):
            for size, digest, blake3 in told:
                while at < size and (piece := plain.read(min(_PIECE, size - at))):
                    hashed.update(piece)
                    hashed_fast.update(piece)
                    at += len(piece)
                if at < size or f"sha256:{hashed.hexdigest()}" != digest:
                    return not_held(digest, size)
                if differ(blake3, hashed_fast.hexdigest()):
                    return other_blake3(digest, size)
        return ""

    def _fault_in_planes(self, layout: Layout, blob: Descriptor, size: int, digest: str, blake3: str) -> str:
        with (
            self._alone if size > LARGE_CHUNK else nullcontext(),
            layout.open_blob(blob.digest, blob.size) as file,
        ):
            found = planes.unpack(file.read(), size)
            if found is None or digest_of(found) != digest:
                return not_held(digest, size)
            return other_blake3(digest, size) if differ(blake3, compute_blake3(found)) else ""

    def _fault_in_plain(self, layout: Layout, blob: Descriptor) -> str:
        told = self._plain.get(blob.digest)
        if not told:
            return ""
        hashed = start_blake3()
        with layout.open_blob(blob.digest, blob.size) as file:
            while piece := file.read(_PIECE):
                hashed.update(piece)
        found = hashed.hexdigest()
        wrong = (other_blake3(digest, size) for size, digest, blake3 in told if differ(blake3, found))
        return next(wrong, "")


def not_held(plain: str, size: int) -> str:
    """The fault of a blob that does not contain a chunk of a table."""
    return f"does not contain the expected chunk {plain} of {size} bytes"


def other_blake3(plain: str, size: int) -> str:
    """The fault of a table with a chunk whose SHA-256 is right: a restore would refuse it."""
    return f"holds the chunk {plain} of {size} bytes, but its table has another BLAKE3 for that"


def verify(
    layout: Layout,
    root: Descriptor,
    *,
    threads: int,
    tables: Iterable[Table] = (),
    progress: Callable[[CheckProgress], None] | None = None,
) -> tuple[Fault, ...]:
    """Read everything from `root` on, and compare it with its size and digest; () if all is right.

    Each fault is "missing", "cut short: has n of m bytes", "has n bytes instead of m", "holds something
    else", or says why it cannot be read, or is no manifest: what that names is not known then. tables: the
    chunks in compressed blobs, which are checked too. progress: called when the manifests are read, and after
    each other blob, one call at a time. Raises LayoutError if `layout` is none.
    """
    layout.check()
    faults: list[Fault] = []
    documents, blobs = _documents(layout, root, faults)
    contents = Contents(tables)
    read, whole = (sum(each.size for each in part) for part in (documents, (*documents, *blobs)))
    lock, done = threading.Lock(), CheckProgress(len(documents), read, len(documents) + len(blobs), whole)
    if progress is not None:
        progress(done)

    def check(blob: Descriptor) -> None:
        nonlocal done
        what = _fault(layout, blob) or contents.fault(layout, blob)
        with lock:
            if what:
                faults.append(Fault(blob, what))
            done = CheckProgress(done.blobs + 1, done.size + blob.size, done.total_blobs, done.total_size)
            if progress is not None:
                progress(done)

    run_for_each(blobs, check, threads=max(1, min(threads, len(blobs))))
    return tuple(sorted(faults, key=lambda fault: (fault.descriptor.digest, fault.descriptor.size)))


def _documents(
    layout: Layout, root: Descriptor, faults: list[Fault]
) -> tuple[list[Descriptor], list[Descriptor]]:
    """Check the manifests and indexes from `root` on; return them, and the other blobs they name."""
    documents: list[Descriptor] = []
    met: set[tuple[str, int, str]] = set()
    blobs: list[Descriptor] = []
    level = [root]
    for depth in range(_DEEPEST + 2):
        below: list[Descriptor] = []
        for at in level:
            mark = at.digest, at.size, at.media_type if is_document(at) else ""
            if mark in met:
                continue
            met.add(mark)
            if not is_document(at):
                if not any((at.digest, at.size, kind) in met for kind in (*MANIFESTS, *INDEXES)):
                    blobs.append(at)
                continue
            documents.append(at)
            if depth > _DEEPEST:
                faults.append(Fault(at, f"is nested below more than {_DEEPEST} indexes"))
                continue
            try:
                what = _fault(layout, at, limit=DOCUMENT_LIMIT)
                if not what:
                    below += children(at, layout.read_blob(at))
            except (LayoutError, DigestError, OSError) as error:
                what = f"is not a readable manifest: {error}"
            if what:
                faults.append(Fault(at, what))
        level = below
    return documents, blobs


def _fault(layout: Layout, blob: Descriptor, *, limit: int | None = None) -> str:
    """Return what is wrong with a blob; "" if nothing is."""
    try:
        with layout.open_blob(blob.digest) as file:
            size = os.fstat(file.fileno()).st_size
            if size < blob.size:
                return f"truncated: has {size} of {blob.size} bytes"
            if size > blob.size:
                return f"has {size} bytes instead of {blob.size}"
            if limit is not None and size > limit:
                return f"has {size} bytes, but at most {limit} are allowed for a manifest"
            hashed = hashlib.sha256()
            while piece := file.read(_PIECE):
                hashed.update(piece)
    except DigestError:
        return "has a digest other than sha256, which is not checked here"
    except BlobError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return "missing" if missing else f"cannot be read: {error}"
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    return "" if f"sha256:{hashed.hexdigest()}" == blob.digest else "does not match its digest"
