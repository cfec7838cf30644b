"""Garbage collection in a store: removes what nothing names and nobody reads; store.py has the rules."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import DigestError, DiskError, LayoutError, OciError, StoreError
from gpusnap.oci.base.files import exists, open_folder, open_nested_folder
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.layout.digests import PREFIX, get_hex
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor, parse_document
from gpusnap.oci.layout.graph import INDEXES, MANIFESTS, check_known, is_document, walk
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.index import Catalog
from gpusnap.oci.store.paths import BLOBS, CUT_OFF, GONE, Tree, discard
from gpusnap.oci.store.staging import read_why_precious
from gpusnap.oci.store.staging_lock import try_to_lock

_NAME = compile_later("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Spared:
    """A precious staging directory without an owner: its path, and the reason."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What gc removed, or would remove, and what it kept."""

    blobs: int
    size: int
    """Bytes of these blobs; less space is freed if other files are links of them."""
    stagings: tuple[str, ...]
    """Names of staging directories whose writers have died."""
    spared: tuple[Spared, ...]
    live_blobs: int
    live_size: int


def collect(tree: Tree, *, dry_run: bool) -> Collected:
    """Remove blobs that nothing names, unfinished files and staging directories without an owner.

    Raises StoreError, with nothing removed, if it cannot determine what is named; StoreBusy, DiskError.
    """
    # Manifests are read before the lock is taken, and those that were added meanwhile under it.
    reached: dict[str, frozenset[str]] = {}
    with contextlib.suppress(OciError, OSError):
        _mark_all_reached(tree, _roots(Catalog(tree.path), ()), reached)
    # The bytes are deleted, which takes time, after the lock was released.
    with (
        ExitStack() as after,
        tree.hold_lock("gc"),
        tree.explain_write_errors("the store without what gc removes"),
    ):
        read = tuple(list_held(tree.holds, free=not dry_run))
        live = _mark_all_reached(tree, _roots(Catalog(tree.path), read), reached)
        with open_nested_folder(tree.path, *BLOBS) as folder:
            names = os.listdir(folder)
            _check_all_there(tree, live, names)
            dead = [name for name in names if _NAME.fullmatch(name) and name not in live]
            cut_off = [name for name in names if CUT_OFF.fullmatch(name)]
            size, live_size = _size(dead, folder), _size(live, folder)
            if not dry_run and (dead or cut_off):
                _set_aside([*dead, *cut_off], folder, after.enter_context(_bin(tree)))
        stagings, spared = _stagings(tree, after, dry_run=dry_run)
        if not dry_run:
            _clear(tree.path)
            _forget(tree)
    return Collected(len(dead), size, stagings, spared, len(live), live_size)


def _roots(catalog: Catalog, held: Iterable[str]) -> dict[str, Descriptor | None]:
    """Return by digest what the index names, and what readers hold, which may no longer be in the index."""
    found: dict[str, Descriptor | None] = {}
    for entry in catalog.entries():
        found.setdefault(entry.descriptor.digest, entry.descriptor)
    for digest in held:
        # A held blob that is missing is not named by anything.
        if exists(os.path.join(catalog.path, *BLOBS, get_hex(digest)), follow=False):
            found.setdefault(digest, None)
    return found


def _mark_all_reached(
    tree: Tree, roots: dict[str, Descriptor | None], reached: dict[str, frozenset[str]]
) -> set[str]:
    """Return the names of all blobs below the roots; add those of each root to `reached` if missing."""
    live: set[str] = set()
    for digest, root in roots.items():
        if digest not in reached:
            try:
                reached[digest] = frozenset(
                    _iterate_reached(tree.layout, root or _descriptor(tree.layout, digest))
                )
            except (LayoutError, DigestError) as error:
                raise _make_refusal(tree, str(error), digest) from error
        live |= reached[digest]
    return live


def _iterate_reached(layout: Layout, root: Descriptor) -> Iterator[str]:
    """Yield the name of every sha256 blob below a root. Raises LayoutError."""
    if not is_document(root):
        raise LayoutError(f"it is unknown what a {root.media_type} refers to")
    for found, content in walk(root, layout.read_blob):
        if content is not None:
            check_known(found, content)
        if found.digest.startswith(PREFIX):
            yield get_hex(found.digest)


def _descriptor(layout: Layout, digest: str) -> Descriptor:
    """Return the descriptor of a manifest that is no longer in the index. Raises LayoutError."""
    with layout.open_blob(digest) as file:
        size = os.fstat(file.fileno()).st_size
    content = layout.read_blob(Descriptor("application/octet-stream", digest, size), limit=DOCUMENT_LIMIT)
    value = parse_document(content, f"the manifest {digest}")
    match value:
        case {"mediaType": str(media_type)}:
            return Descriptor(media_type, digest, size)
        case {"manifests": _}:
            return Descriptor(INDEXES[0], digest, size)
        case _:
            return Descriptor(MANIFESTS[0], digest, size)


def _check_all_there(tree: Tree, live: set[str], names: Iterable[str]) -> None:
    missing = sorted(live.difference(names))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise _make_refusal(tree, f"the blob {PREFIX}{missing[0]}{more} is missing", "")


def _make_refusal(tree: Tree, why: str, digest: str) -> StoreError:
    what = f" below {digest}" if digest else ""
    return StoreError(
        f"gc removed nothing from {tree.path}, because it cannot determine what is still needed{what}: "
        f"{why}; run gpusnap verify, and remove what is damaged",
        code="GPS-705",
    )


def _size(names: Iterable[str], folder: int) -> int:
    return sum(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size for name in names)


def list_held(path: str, *, free: bool) -> Iterator[str]:
    """Yield the digests that somebody reads; with `free`, remove the files of others."""
    for name in sorted(os.listdir(path)):
        if not _NAME.fullmatch(name):
            continue
        file = os.path.join(path, name)
        try:
            lock = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:  # its reader has just ended
            continue
        try:
            if not try_exclusive(lock):
                yield PREFIX + name
            elif free and is_still_there(lock, file):
                os.unlink(file)
        finally:
            unlock(lock)


@contextmanager
def _bin(tree: Tree) -> Iterator[str]:
    """Yield a directory for files to delete; it is removed at the end with its content."""
    path = os.path.join(tree.staging, GONE + secrets.token_hex(8))
    lock = None
    try:
        # On a full disk there may be no directory: `_set_aside` handles that.
        with contextlib.suppress(OSError):
            os.mkdir(path, 0o700)
            lock = open_folder(path)
            try_exclusive(lock)
        yield path
    finally:
        discard(path)
        if lock is not None:
            unlock(lock)


def _set_aside(names: Iterable[str], folder: int, away: str) -> None:
    """Move files out of a directory at once, to be deleted later: deleting a large one takes long."""
    for name in names:
        try:
            os.rename(name, os.path.join(away, name), src_dir_fd=folder)
        except OSError:
            os.unlink(name, dir_fd=folder)


def _stagings(tree: Tree, after: ExitStack, *, dry_run: bool) -> tuple[tuple[str, ...], tuple[Spared, ...]]:
    """Return staging directories without an owner: those deleted at the end of `after`, and precious ones."""
    dead, spared = [], []
    for name in sorted(os.listdir(tree.staging)):
        path = os.path.join(tree.staging, name)
        try:
            lock = try_to_lock(path)
        except OSError:  # removed by its owner, or not a staging directory
            continue
        if lock is None:
            continue
        with ExitStack() as now:
            now.callback(lock.release)
            if not lock.is_of(path):
                continue
            why = None if name.startswith(GONE) else read_why_precious(path)
            if why is not None:
                spared.append(Spared(path, why))
                continue
            if not name.startswith(GONE):
                dead.append(name)
            if not dry_run:
                gone = os.path.join(tree.staging, GONE + secrets.token_hex(8))
                try:
                    os.rename(path, gone)
                except OSError:
                    gone = path
                # The lock is held until all is removed, so that no other gc does the same.
                now.pop_all()
                after.callback(lock.release, gone)
                after.callback(discard, gone)
    return tuple(dead), tuple(spared)


def _forget(tree: Tree) -> None:
    """Remove chunks whose blobs are gone from the index of known ones, which would grow forever."""
    known = Known(tree.known_chunks)
    if known.prune():
        with contextlib.suppress(DiskError):  # the index only saves work
            known.save()


def _clear(path: str) -> None:
    """Remove unfinished files from the store's own directory."""
    with open_nested_folder(path) as folder:
        for name in os.listdir(folder):
            if CUT_OFF.fullmatch(name):
                os.unlink(name, dir_fd=folder)
