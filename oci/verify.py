"""Whether all that a manifest or an index names is there, whole, and what its digests say."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from oci.errors import BlobError, DigestError, LayoutError, reason
from oci.graph import children, is_document
from oci.layout import Layout
from oci.manifest import DOCUMENT_LIMIT, Descriptor
from oci.workers import for_each

__all__ = ["Checked", "Fault", "verify"]

_PIECE = 1 << 20
# As oci.graph.walk has it.
_DEEPEST = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """A blob, and what is wrong with it, in a few words."""

    descriptor: Descriptor
    what: str

    def __str__(self) -> str:
        return f"{self.descriptor.digest}, a {self.descriptor.media_type}: {self.what}"


@dataclass(frozen=True, slots=True)
class Checked:
    """How far a check is: blobs, and bytes that they should have."""

    blobs: int
    size: int
    total_blobs: int
    total_size: int


def verify(
    layout: Layout,
    root: Descriptor,
    *,
    threads: int,
    progress: Callable[[Checked], None] | None = None,
) -> tuple[Fault, ...]:
    """Read everything from `root` on, and compare it with its size and digest; () where all is right.

    Each fault is "missing", "cut short: has n of m bytes", "has n bytes instead of m", "holds something
    else", or says why it cannot be read, or is no manifest: what that names is not known then. progress:
    called after each blob that is no manifest, one call at a time. Raises LayoutError where `layout` is none.
    """
    layout.check()
    faults: list[Fault] = []
    blobs = _documents(layout, root, faults)
    lock, done = threading.Lock(), Checked(0, 0, len(blobs), sum(each.size for each in blobs))

    def check(blob: Descriptor) -> None:
        nonlocal done
        what = _fault(layout, blob)
        with lock:
            if what:
                faults.append(Fault(blob, what))
            done = Checked(done.blobs + 1, done.size + blob.size, done.total_blobs, done.total_size)
            if progress is not None:
                progress(done)

    for_each(blobs, check, threads=max(1, min(threads, len(blobs))))
    return tuple(sorted(faults, key=lambda fault: (fault.descriptor.digest, fault.descriptor.size)))


def _documents(layout: Layout, root: Descriptor, faults: list[Fault]) -> list[Descriptor]:
    """Check the manifests and indexes from `root` on; what they name that is none, each once."""
    met: set[tuple[str, int, bool]] = set()
    blobs: list[Descriptor] = []
    level = [root]
    for depth in range(_DEEPEST + 2):
        below: list[Descriptor] = []
        for at in level:
            mark = at.digest, at.size, is_document(at)
            if mark in met:
                continue
            met.add(mark)
            if not is_document(at):
                if (at.digest, at.size, True) not in met:
                    blobs.append(at)
                continue
            if depth > _DEEPEST:
                faults.append(Fault(at, f"lies below more than {_DEEPEST} indexes"))
                continue
            try:
                what = _fault(layout, at, limit=DOCUMENT_LIMIT)
                if not what:
                    below += children(at, layout.read_blob(at))
            except (LayoutError, DigestError, OSError) as error:
                what = f"is no manifest that can be read: {error}"
            if what:
                faults.append(Fault(at, what))
        level = below
    return blobs


def _fault(layout: Layout, blob: Descriptor, *, limit: int | None = None) -> str:
    """What is wrong with a blob; "" where nothing is."""
    try:
        with layout.open_blob(blob.digest) as file:
            size = os.fstat(file.fileno()).st_size
            if size < blob.size:
                return f"cut short: has {size} of {blob.size} bytes"
            if size > blob.size:
                return f"has {size} bytes instead of {blob.size}"
            if limit is not None and size > limit:
                return f"has {size} bytes, and {limit} are allowed for a manifest"
            hashed = hashlib.sha256()
            while piece := file.read(_PIECE):
                hashed.update(piece)
    except DigestError:
        return "has a digest of another kind than sha256, which is not checked here"
    except BlobError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        return "missing" if missing else f"cannot be read: {error}"
    except OSError as error:
        return f"cannot be read: {reason(error)}"
    return "" if f"sha256:{hashed.hexdigest()}" == blob.digest else "holds something else"
