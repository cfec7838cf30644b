"""A store: an image layout that many processes share, with what they need to do so safely.

    <store>/                          0700; for example /var/lib/gpusnap; other names in it are ignored
        oci-layout, index.json        a layout, for any tool to read
        blobs/sha256/<64 hex>         the blobs of everything that index.json names, each once
        known.json                    which chunk is in which blob (gpusnap.oci.chunks.index)
        read-rate.json                the read rate of its disk (read_rate.py)
        lock                          flock, exclusive: for a change of these, or a new staging directory
        staging/<name>/               a layout without index: one writer's blobs; the writer locks it (flock)
            lock                      locked, too: other hosts do not see the lock of a directory over NFS
            precious                  why nobody may remove it, even after its owner has died
            complete                  it was handed over: what it contains, for whoever takes it over
        staging/.gone-<16 hex>/       being removed
        holds/<64 hex>                locked (flock), shared, by readers of that manifest and what it names

The rules:

- A writer has a staging directory of its own. It takes a blob that the store already has by a hard link, so
  that gc cannot remove it. Nobody else uses a staging directory that is locked.
- `commit` syncs the writer's files (fsync), takes the lock, links them into blobs/ and syncs that directory,
  then replaces index.json, then known.json. Killed at any point, it leaves the store with everything that was
  committed before, and at most a dead staging directory and blobs that nothing names, which gc removes.
- The lock is held for moments: no content of a blob is read or written under it. A process that waits for it
  longer than `patience` seconds gets StoreBusy.
- Whoever reads something for longer than a moment holds it: it may be removed from index.json meanwhile, and
  its blobs stay. A hold is checked against index.json once it is taken, and gc reads the holds under the
  lock.
- `collect` (gc) keeps what index.json names, what is held, everything below these, and staging directories
  with an owner or a mark that they are precious. If it cannot determine what is below (an unknown media type,
  a missing or broken manifest) or a blob is missing, it removes nothing and reports which.
- What gc removes is moved away first, under the lock, and is deleted after it.
- `tag` loses nothing: a name that moves leaves its old manifest without a name. Only `remove` does.
- index.json is changed by value: members and annotations of other tools stay. These tools do not know the
  lock: one may write to a store while nobody else does.
- Hard links are required: the store is on one file system that supports them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from gpusnap.oci.base.errors import DigestError, DiskError, LayoutError, NotThere, StoreError, reason
from gpusnap.oci.base.files import UNFINISHED, exists, make_folders, open_nested_folder
from gpusnap.oci.base.locks import is_still_there, try_exclusive, unlock, wait_for_lock
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor, Index, parse_document
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.gc import Collected, collect, list_held
from gpusnap.oci.store.index import Catalog
from gpusnap.oci.store.paths import GONE, Tree, link_error
from gpusnap.oci.store.referrers import list_referring
from gpusnap.oci.store.staging import Staging, adopt, list_precious, read_note, stage, take_over
from gpusnap.oci.store.tags import Entry, select_tagged

PATIENCE = 60.0
_HOLD = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
_STAGING = compile_later(r"[A-Za-z0-9][\w.-]{0,199}", re.ASCII)


class Store:
    """One store, by the path of its directory. Nothing stays open between calls; threads may share it."""

    def __init__(self, path: str | os.PathLike[str], *, patience: float = PATIENCE) -> None:
        """`path` may be a symbolic link. `patience`: seconds to wait for the store's lock."""
        self.path = os.path.realpath(path)
        self.layout = Layout(self.path)
        """For reading. Only a staging directory's `commit` writes to it."""
        self._tree = Tree(self.path, patience)

    def create(self) -> Store:
        """Create the missing parts of it; also in a layout that another tool has made.

        Raises StoreError if no hard links can be made, LayoutError, StoreBusy, DiskFull, DiskError.
        """
        tree = self._tree
        with contextlib.suppress(LayoutError, StoreError):
            self.check()
            return self
        with tree.explain_write_errors("the store"):
            for folder in (self.path, tree.staging, tree.holds):
                make_folders(folder, mode=0o700)
        with tree.hold_lock("the creation of a store"), tree.explain_write_errors("the store"):
            self.layout.create()
            if not exists(os.path.join(self.path, "index.json"), follow=False):
                self._try_link()
                self.layout.commit(Index())
        self.check()
        return self

    def check(self) -> None:
        """Raise LayoutError, StoreError if it is no store, or its index cannot be read."""
        self.layout.check()
        for folder in (self._tree.staging, self._tree.holds):
            if not os.path.isdir(folder):
                raise StoreError(
                    f"{self.path} is an image layout, but no store: it has no directory {folder}",
                    code="GPS-704",
                )
        Catalog(self.path)

    # Writers

    def stage(self, name: str = "") -> Staging:
        """Return a new staging directory, of that name or any; or the one that a dead process left.

        Only complete blobs of that one stay: each is read and compared with its digest, except links of the
        store's. Raises StagingBusy if another process has it, StoreBusy, StoreError, DiskFull, DiskError.
        """
        if name and not _STAGING.fullmatch(name):
            raise StoreError(
                f"{name[:80]!r} is not a valid name for a staging: use letters, digits and . _ -",
                code="GPS-001",
            )
        return stage(self._tree, name or secrets.token_hex(16))

    def adopt(self, path: str) -> Staging:
        """Return the staging directory at `path`, whose owner died, unchanged: a `commit` checks its blobs.

        Raises StagingBusy if its owner lives, StoreBusy, NotThere, StoreError, DiskError.
        """
        return adopt(self._tree, path)

    def take_over(self, name: str) -> tuple[Staging, bytes]:
        """Return a staging directory that its writer has handed over, and the note of that.

        Its blobs are synced and right. Raises NotThere, StagingBusy, StoreBusy, StoreError, DiskError.
        """
        return take_over(self._tree, name)

    def locate_staging(self, name: str) -> str:
        """Return the path of the staging directory of that name, whether or not there is one."""
        return os.path.join(self._tree.staging, name)

    def list_precious(self, file: str) -> dict[str, str]:
        """Return why each staging directory with that file is precious, by path, if its owner has died.

        Raises DiskError.
        """
        try:
            return list_precious(self._tree, file)
        except FileNotFoundError:  # it is no store
            return {}
        except OSError as error:
            raise DiskError(f"{self._tree.staging} cannot be read: {reason(error)}") from error

    def list_handed_over(self) -> dict[str, bytes]:
        """Return the note of each staging directory that was handed over, by name. Raises DiskError.

        A note that cannot be read is empty; `take_over` raises the reason.
        """
        found = {}
        try:
            for name in sorted(os.listdir(self._tree.staging)):
                path = os.path.join(self._tree.staging, name)
                if name.startswith(GONE):
                    continue
                try:
                    note = read_note(path)
                except OSError:  # it hides no other one
                    note = b""
                if note is not None:
                    found[name] = note
        except FileNotFoundError:  # it is no store
            return {}
        except OSError as error:
            raise DiskError(f"{self._tree.staging} cannot be read: {reason(error)}") from error
        return found

    # Readers

    def entries(self) -> tuple[Entry, ...]:
        """Return the entries of index.json, in its order. Raises LayoutError."""
        return Catalog(self.path).entries()

    def find(self, wanted: str) -> Entry:
        """Find an entry by a name, a digest, or the start of one: 6 hex digits or more. A name comes first.

        A name without a tag means the newest of that name; see gpusnap.oci.store.tags. Raises NotThere, which
        lists similar names, Ambiguous, LayoutError.
        """
        return Catalog(self.path).find(wanted, self._find_creation_time)

    def find_exactly(self, wanted: str) -> Entry:
        """The same, but a name without a tag only means itself. Raises as `find` does."""
        return Catalog(self.path).find_exactly(wanted)

    def list_tagged(self, name: str) -> tuple[Entry, ...]:
        """Return all NAME:TAG of a name without a tag. Raises LayoutError."""
        return select_tagged(name, self.entries())

    @contextmanager
    def hold(self, digest: str) -> Iterator[Descriptor]:
        """Keep a manifest and everything that it names from gc, until the end of the `with`.

        Raises NotThere if the index does not have it, DigestError, LayoutError, StoreBusy, DiskError.
        """
        path = os.path.join(self._tree.holds, get_hex(digest))
        self._find_named(digest)
        with self._tree.explain_write_errors("a hold"):
            lock = _lock_shared(path, self._tree.patience)
        try:
            # Again: a gc that did not see the hold has ended.
            yield self._find_named(digest)
        finally:
            # The last one removes the file; if that fails, gc does.
            with contextlib.suppress(OSError):
                if try_exclusive(lock) and is_still_there(lock, path):
                    os.unlink(path)
            unlock(lock)

    def open_known_chunks(self) -> Known:
        """Open the chunks of what was committed, by plain digest: for gpusnap.oci.chunks.writer.write."""
        return Known(self._tree.known_chunks)

    def read(self, descriptor: Descriptor) -> bytes:
        """Read a manifest or an index, and check its digest. Raises BlobError."""
        return self.layout.read_blob(descriptor)

    # The index, and gc

    def tag(self, wanted: str, name: str) -> None:
        """Give a name to what `find` finds. Raises as that does, and StoreError, StoreBusy, DiskError."""
        with self._tree.hold_lock(f"the name {name[:80]}"):
            catalog = Catalog(self.path)
            catalog.tag(wanted, name)
            catalog.write()

    def remove(self, wanted: str, checked: Sequence[Entry] | None = None) -> tuple[str, ...]:
        """Remove a name from the index, or, by its digest, something with all its names.

        Returns the removed names. The blobs stay until gc. `checked`: all entries of its digest, if the
        caller has determined that these may go: nothing is removed if they are others now. Raises as `tag`
        does.
        """
        with self._tree.hold_lock(f"the removal of {wanted[:80]}"):
            catalog = Catalog(self.path)
            names = catalog.remove(wanted, checked)
            catalog.write()
        return names

    def remove_referrers(self, *digests: str) -> None:
        """Remove what refers to these manifests, such as signatures, from the index. Raises as `remove`."""
        found = list_referring([entry.descriptor for entry in self.entries()], self.read, *digests)
        if found:
            with self._tree.hold_lock(f"the removal of {len(found)} referrers"):
                catalog = Catalog(self.path)
                catalog.remove_all({each.digest for each in found})
                catalog.write()

    def remove_unused(self, wanted: Mapping[str, Collection[str]]) -> frozenset[str]:
        """Remove these digests with their names from the index, except those that are held or have others.

        Return those that are out of it now, even if they were not in it. Nobody can hold them meanwhile. A
        file is open for each of them. Raises StoreBusy, StoreError, DiskError, LayoutError.
        """
        with (
            self._tree.hold_lock(f"the removal of {len(wanted)} checkpoints"),
            self._tree.explain_write_errors("a hold"),
            ExitStack() as locks,
        ):
            alone = set()
            for digest in wanted:
                path = os.path.join(self._tree.holds, get_hex(digest))
                lock = _lock_alone(path)
                if lock is not None:
                    # A reader that waits for the lock of this file then sees that it is gone, and whether the
                    # digest is.
                    locks.callback(unlock, lock)
                    locks.callback(os.unlink, path)
                    alone.add(digest)
            catalog = Catalog(self.path)
            names: dict[str, set[str]] = {}
            for each in catalog.entries():
                names.setdefault(each.descriptor.digest, set()).add(each.name)
            gone = frozenset(each for each in alone if names.get(each, set()) <= {"", *wanted[each]})
            if not gone.isdisjoint(names):
                catalog.remove_all(gone)
                catalog.write()
        return gone

    def list_held(self) -> frozenset[str]:
        """Return the digests that somebody holds. Raises DiskError."""
        with self._tree.explain_write_errors("a hold"):
            return frozenset(list_held(self._tree.holds, free=False))

    def collect(self, *, dry_run: bool = False) -> Collected:
        """Remove what nothing names and nobody reads; with `dry_run`, only return what that is.

        Raises StoreError, with nothing removed, if it cannot be determined; StoreBusy, LayoutError,
        DiskError.
        """
        return collect(self._tree, dry_run=dry_run)

    def _find_creation_time(self, entry: Entry) -> str:
        """Return when it was made (RFC 3339), perhaps only from the manifest; "" if not known."""
        if entry.created:
            return entry.created
        with contextlib.suppress(LayoutError, DigestError):
            match parse_document(self.read(entry.descriptor), "the manifest"):
                case {"annotations": {"org.opencontainers.image.created": str(created)}}:
                    return created
        return ""

    def _find_named(self, digest: str) -> Descriptor:
        found = [each.descriptor for each in self.entries() if each.descriptor.digest == digest]
        if not found:
            raise NotThere(f"nothing in {self.path} has the digest {digest}")
        return found[0]

    def _try_link(self) -> None:
        name = UNFINISHED + secrets.token_hex(8)
        with open_nested_folder(self.path) as folder:
            try:
                os.link("oci-layout", name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
                os.unlink(name, dir_fd=folder)
            except OSError as error:
                raise link_error(error, self.path) from error


def _lock_alone(path: str) -> int | None:
    """Lock a hold's file against all readers; None if one has it."""
    while True:
        lock = os.open(path, _HOLD, 0o600)
        if not try_exclusive(lock):
            unlock(lock)
            return None
        if is_still_there(lock, path):
            return lock
        unlock(lock)


def _lock_shared(path: str, patience: float) -> int:
    """Lock a hold's file together with other readers. Raises StoreBusy."""
    while True:
        lock = os.open(path, _HOLD, 0o600)
        try:
            # Waits for gc, which tries the lock for a moment, or for another reader that removes the file.
            wait_for_lock(lock, path, fcntl.LOCK_SH, patience=patience, what="a reader")
            if is_still_there(lock, path):
                return lock
        except BaseException:
            unlock(lock)
            raise
        unlock(lock)
