"""The staging directory of one writer of a store, and its commit to the store. store.py has the rules."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Mapping, Sequence

from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    DiskError,
    LayoutError,
    NotThere,
    StagingBusy,
    StoreError,
    reason,
)
from gpusnap.oci.base.files import (
    NOTHING_THERE,
    UNFINISHED,
    exists,
    open_nested_folder,
    read_regular,
    replace,
)
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import OCTETS, Descriptor
from gpusnap.oci.layout.graph import check_known, is_document, walk
from gpusnap.oci.layout.layout import Layout, has_file
from gpusnap.oci.store.index import Catalog, check_name
from gpusnap.oci.store.paths import (
    BLOBS,
    COMPLETE,
    CUT_OFF,
    GONE,
    PRECIOUS,
    THREADS,
    Tree,
    discard,
    link_error,
)
from gpusnap.oci.store.staging_lock import StagingLock, try_to_lock

_LONGEST_REASON = 4096
# More than a manifest of gpusnap may have.
_LONGEST_NOTE = 65 << 20


class Staging:
    """A directory of the store for one writer, which holds its lock. A `with` statement closes it."""

    def __init__(self, tree: Tree, path: str, lock: StagingLock, *, checked: bool) -> None:
        self.path = path
        self.layout = Layout(path)
        """The layout to which blobs are written."""
        self._tree = tree
        self._lock: StagingLock | None = lock
        self._checked = checked
        # Blobs that another process has synced, and checked while it wrote them.
        self._durable: frozenset[str] = frozenset()

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self, digest: str, size: int) -> bool:
        """Link that blob from the store, without reading it; False if the store does not have it.

        From then on gc cannot remove it. Raises DigestError, LayoutError, DiskFull, DiskError.
        """
        return not self.take_all([Descriptor(OCTETS, digest, size)])

    def take_all(self, wanted: Iterable[Descriptor]) -> list[Descriptor]:
        """Do the same for many blobs; return those that the store does not have."""
        return self.layout.link_durable(wanted, self._tree.layout)

    def mark_precious(self, why: str) -> None:
        """Protect this directory from removal by others, even after its owner has died.

        `why` is a text for users. A `commit` then leaves the blobs in place, so that they can still be found
        here. Raises DiskFull, DiskError.
        """
        content = why.encode()[:_LONGEST_REASON]
        self._write(PRECIOUS, content, "the mark of a staging")

    def unmark_precious(self) -> None:
        """Undo `mark_precious`. Raises DiskError."""
        with self._tree.explain_write_errors("the mark of a staging"), contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, PRECIOUS))

    def hand_over(self, note: bytes) -> None:
        """Make it complete, for the process that calls `take_over` after `close(leave=True)`.

        Its blobs are synced. It must be precious. `note` says what it contains. Raises DiskFull, DiskError.
        """
        self.layout.sync()
        self._write(COMPLETE, note, "the note of a staging")

    def _write(self, name: str, content: bytes, what: str) -> None:
        with self._tree.explain_write_errors(what, len(content)), open_nested_folder(self.path) as folder:
            replace(name, content, folder)

    def take_back(self) -> None:
        """Undo `hand_over`, so that blobs may be changed again; it stays precious. Raises DiskError."""
        with (
            self._tree.explain_write_errors("the note of a staging"),
            open_nested_folder(self.path) as folder,
        ):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(COMPLETE, dir_fd=folder)
            os.fsync(folder)
        self._durable, self._checked = frozenset(), False

    def prune(self, wanted: Iterable[str]) -> None:
        """Remove all blobs except these digests. One that is written again is a new one. Raises DiskError."""
        digests = frozenset(wanted)
        self.layout.prune(digests)
        self._durable &= frozenset(map(get_hex, digests))

    def commit(
        self,
        root: Descriptor,
        *,
        names: Sequence[str] = (),
        also: Sequence[Descriptor] = (),
        tables: Iterable[Table] = (),
        foreign: Iterable[Table] = (),
        completes: str = "",
        threads: int = THREADS,
    ) -> None:
        """Make the manifest or index `root`, and everything below it, part of the store.

        Each of its blobs must be in this staging directory or in the store. Until this call, gc may remove
        blobs that are only in the store. The blobs are synced, and `root` gets these `names`; other manifests
        with these names lose them. `also`: further manifests, without names. `completes`: the digest of a
        manifest without a name, which `root` replaces in the index. The blobs of the staging directory are
        then removed, unless it is precious.

        The chunks of `tables` become known: they were compressed here, so their plain digests are right.
        `foreign`: tables from elsewhere, whose compressed chunks may contain anything. Of these, only chunks
        that are not compressed become known, because the digest of the blob is that of the content.

        Raises BlobError for a missing blob, StoreError, LayoutError, StoreBusy, DiskFull, DiskError: the
        store's index is then unchanged.
        """
        for name in names:
            check_name(name)
        if not is_document(root):
            raise StoreError(
                f"{root.digest} cannot be committed: the parts of a {root.media_type} are unknown",
                code="GPS-603",
            )
        layout = self._tree.layout
        sizes = self._measure_blobs_below(root, layout)
        for each in also:
            sizes |= self._measure_blobs_below(each, layout)
        with (
            self._tree.explain_write_errors("a blob"),
            open_nested_folder(self.path, *BLOBS) as own,
            open_nested_folder(layout.path, *BLOBS) as store,
        ):
            here = self._make_durable(sizes, own, store, threads)
            with self._tree.hold_lock(f"the commit of {root.digest}"):
                for name, size in sizes.items():
                    if name in here:
                        _link(name, own, store, self._tree.path)
                    elif not has_file(name, size, store):
                        raise _make_missing_error(name, size, self._tree.path)
                os.fsync(store)
                catalog = Catalog(layout.path)
                if completes != root.digest:
                    catalog.drop_incomplete(completes)
                catalog.add(root, names)
                for each in also:
                    catalog.add(each, ())
                catalog.write()
                self._learn(tables, foreign)
        if read_why_precious(self.path) is None:
            self._remove_blobs(threads)

    def close(self, *, leave: bool = False) -> None:
        """Release the directory, and remove it unless it is precious. May be called twice.

        With `leave`, it stays until a writer stages its name again, or gc removes it.
        """
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        self.layout.close()
        removed = ""
        try:
            if not leave and read_why_precious(self.path) is None:
                discard(self.path)
                removed = self.path
        finally:
            lock.release(removed)

    def _measure_blobs_below(self, root: Descriptor, store: Layout) -> dict[str, int]:
        """Return name and size of `root` and of all blobs below it."""

        def read(document: Descriptor) -> bytes:
            here = self.layout.has_blob(document.digest, document.size)
            return (self.layout if here else store).read_blob(document)

        sizes: dict[str, int] = {}
        for found, content in walk(root, read):
            if content is not None:
                # Otherwise gc could no longer determine what is needed, in the whole store.
                check_known(found, content)
            if sizes.setdefault(get_hex(found.digest), found.size) != found.size:
                raise LayoutError(f"{root.digest} lists the blob {found.digest} with two sizes")
        return sizes

    def _make_durable(self, sizes: Mapping[str, int], own: int, store: int, threads: int) -> set[str]:
        """Sync the blobs of this directory; return their names. Raises BlobError for a missing one."""
        here, new = set(), dict[str, os.stat_result]()
        for name, size in sizes.items():
            found = _status(name, own)
            if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != size:
                if not has_file(name, size, store):
                    raise _make_missing_error(name, size, self._tree.path)
                continue
            here.add(name)
            if name in self._durable:
                continue
            # If the store has the same file, it was synced before it was linked there.
            there = _status(name, store)
            if there is None or not os.path.samestat(found, there):
                new[name] = found

        def check(name: str) -> None:
            self.layout.check_blob(Descriptor("application/octet-stream", f"sha256:{name}", sizes[name]))

        if not self._checked:
            run_for_each(new, check, threads=min(threads, len(new)))
        try:
            self.layout.sync_blobs(new, threads=threads)
        except DiskError:
            # Otherwise a writer that stages this name again would find complete blobs in the page cache, and
            # its fsync would succeed.
            if read_why_precious(self.path) is None:
                for name in self.layout.list_undurable():
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=own)
            raise
        return here

    def _learn(self, tables: Iterable[Table], foreign: Iterable[Table]) -> None:
        tables, foreign = tuple(tables), tuple(foreign)
        if tables or foreign:
            known = Known(self._tree.known_chunks)
            known.learn(tables, self._tree.layout)
            known.learn(foreign, self._tree.layout, foreign=True)
            # The index only saves work: the commit is complete in any case.
            with contextlib.suppress(DiskError):
                known.save()

    def _remove_blobs(self, threads: int) -> None:
        """Remove the blobs of this directory; `close` and gc remove the rest."""
        with contextlib.suppress(OSError), open_nested_folder(self.path, *BLOBS) as folder:

            def remove(name: str) -> None:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)

            names = os.listdir(folder)
            run_for_each(names, remove, threads=min(threads, len(names)))


def stage(tree: Tree, name: str) -> Staging:
    """Return the staging directory of that name, new or left by a dead writer. Raises as Store.stage."""
    path = os.path.join(tree.staging, name)
    with tree.hold_lock(f"the staging {name}"), tree.explain_write_errors("a staging"):
        lock, new = None, False
        while lock is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                new = True
            with contextlib.suppress(FileNotFoundError):
                lock = _try_lock(path)
    try:
        staging = Staging(tree, path, lock, checked=True)
        staging.layout.create()
        _drop_torn(staging.layout, tree)
    except BaseException:
        if new:  # for example on a full disk: it is empty
            discard(path)
        lock.release(path if new else "")
        raise
    return staging


def adopt(tree: Tree, path: str) -> Staging:
    """Return the staging directory at `path`, whose owner died.

    Raises StagingBusy, StoreBusy, NotThere, StoreError, DiskError.
    """
    folder, name = os.path.split(os.path.realpath(path))
    if folder != tree.staging or name.startswith("."):
        raise StoreError(f"{path} is not a staging of the store {tree.path}", code="GPS-703")
    with tree.hold_lock(f"the staging {name}"):
        try:
            lock = _try_lock(os.path.join(folder, name))
        except OSError as error:
            if error.errno not in NOTHING_THERE:
                raise DiskError(f"the staging {path} cannot be opened: {reason(error)}") from error
            raise NotThere(f"the staging {path} cannot be taken over: {reason(error)}") from error
        if lock is None:
            raise NotThere(
                f"the staging {path} cannot be taken over: its owner has just removed it", code="GPS-703"
            )
    return Staging(tree, os.path.join(folder, name), lock, checked=False)


def take_over(tree: Tree, name: str) -> tuple[Staging, bytes]:
    """Return a staging directory that was handed over, and its note. Raises as `adopt`."""
    path = os.path.join(tree.staging, name)
    staging = adopt(tree, path)
    try:
        note = read_note(path)
        if note is None:
            raise NotThere(f"the staging {path} was not handed over", code="GPS-703")
        with open_nested_folder(path, *BLOBS) as own:
            staging._durable = frozenset(os.listdir(own))
        staging._checked = True
    except OSError as error:
        staging.close(leave=True)
        raise DiskError(f"the staging {path} cannot be taken over: {reason(error)}") from error
    except BaseException:
        staging.close(leave=True)
        raise
    return staging, note


def list_precious(tree: Tree, file: str) -> dict[str, str]:
    """Return why each staging directory with that file is precious, by path, if its owner has died.

    Raises OSError.
    """
    found = {}
    for name in sorted(os.listdir(tree.staging)):
        path = os.path.join(tree.staging, name)
        if name.startswith(GONE) or not exists(os.path.join(path, file), follow=False):
            continue
        try:
            lock = try_to_lock(path)
        except OSError:  # somebody has just removed it
            continue
        if lock is None:
            continue
        try:
            why = read_why_precious(path)
            if why is not None:
                found[path] = why
        finally:
            lock.release()
    return found


def read_note(path: str) -> bytes | None:
    """Return the note of a staging directory that was handed over; None if it was not.

    Its owner may have been killed while it removed the directory: then it is not precious any more.
    Raises OSError.
    """
    try:
        with open_nested_folder(path) as folder:
            os.stat(PRECIOUS, dir_fd=folder, follow_symlinks=False)
            return read_regular(COMPLETE, folder, limit=_LONGEST_NOTE)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), os.path.join(path, COMPLETE)) from error


def read_why_precious(path: str) -> str | None:
    """Return why that staging directory must not be removed; None if it may be removed."""
    try:
        with open_nested_folder(path) as folder:
            return read_regular(PRECIOUS, folder, limit=_LONGEST_REASON).decode(errors="replace")
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return "its mark cannot be read"


def _try_lock(path: str) -> StagingLock | None:
    """Lock a staging directory; return None if its owner has just removed it. Raises StagingBusy, OSError.

    The caller must hold the store's lock, so that no other process checks at the same time whether a staging
    directory has an owner.
    """
    lock = try_to_lock(path, create=True)
    if lock is None:
        raise StagingBusy(f"another process is working on {path}; try again when it has finished")
    if lock.is_of(path):
        return lock
    lock.release()
    return None


def _drop_torn(layout: Layout, tree: Tree) -> None:
    """Remove incomplete blobs of a dead owner: after a crash of the host, parts of a blob may be missing.

    A blob that is the same file in the store is skipped: it was synced before.
    """
    with (
        tree.explain_write_errors("a staging"),
        open_nested_folder(layout.path, *BLOBS) as own,
        open_nested_folder(tree.path, *BLOBS) as store,
    ):

        def check(name: str) -> None:
            if not CUT_OFF.fullmatch(name):
                found, there = os.stat(name, dir_fd=own, follow_symlinks=False), _status(name, store)
                if there is not None and os.path.samestat(found, there):
                    return
                with contextlib.suppress(LayoutError, DigestError):
                    layout.check_blob(Descriptor("application/octet-stream", f"sha256:{name}", found.st_size))
                    return
            os.unlink(name, dir_fd=own)

        names = os.listdir(own)
        run_for_each(names, check, threads=min(THREADS, len(names)))


def _link(name: str, origin: int, folder: int, path: str) -> None:
    """Link a blob into the store. It replaces another file of that name, because it is known to be right."""
    try:
        try:
            os.link(name, name, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
            return
        except FileExistsError:
            there = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(there, os.stat(name, dir_fd=origin, follow_symlinks=False)):
                return
        unfinished = UNFINISHED + secrets.token_hex(8)
        os.link(name, unfinished, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        raise link_error(error, path) from error


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _make_missing_error(name: str, size: int, path: str) -> BlobError:
    return BlobError(f"the blob sha256:{name} of {size} bytes is neither in its staging nor in {path}")
