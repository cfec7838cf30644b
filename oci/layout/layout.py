"""An OCI image layout on disk: written by gpusnap, read from any source (image-spec v1.1, image-layout.md).

    <path>/
    ├── oci-layout                {"imageLayoutVersion":"1.0.0"}
    ├── index.json                the manifests in it; written last: a layout without one is not finished
    └── blobs/sha256/
        ├── <64 hex digits>       content, named by its digest; never changed once it has that name
        └── .new-<16 hex digits>  content on its way; what a killed writer leaves behind is of no use

The rules:

- A blob is written under its temporary name and renamed when it is complete. One that exists with the right
  size is not written again.
- Any number of threads and processes may add blobs at once; two that add the same one do no harm. `prune` is
  for a layout that nobody else writes to.
- `commit` syncs every blob that this object was asked for, except links of synced ones, then the directories,
  then index.json. After a crash, either the index names blobs that all exist, or there is the old one (or
  none). If the fsync of a blob has failed, it must be written again, or the layout is never synced; see
  unsynced.
- Content may come from anybody: no link is followed from the layout's directory on, only plain files are
  opened, sizes are checked before anything is read, and the size of documents is limited. To use a layout
  through a link, resolve the link first.
- Only their owner can read files and directories, because they contain a process's memory.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from gpusnap.oci.base.errors import BlobError, DiskError, LayoutError, disk_error, reason
from gpusnap.oci.base.files import (
    NOTHING_THERE,
    UNFINISHED,
    make_folders,
    new_file,
    open_folder,
    open_nested_folder,
    open_regular,
    read_regular,
    replace,
    sync_folder,
    write_all,
)
from gpusnap.oci.layout.digests import digest_of, get_hex
from gpusnap.oci.layout.documents import (
    DOCUMENT_LIMIT,
    MANIFEST,
    OCTETS,
    Descriptor,
    Index,
    Manifest,
    encode_document,
    parse_document,
)
from gpusnap.oci.layout.partial_blob import Incoming
from gpusnap.oci.layout.unsynced import Unsynced

VERSION = "1.0.0"
_PIECE = 1 << 20
# What they wait for is a flush of the disk's own cache, which many may share.
_SYNC_THREADS = 32


class Layout:
    """One layout, by the path of its directory; threads may share it.

    Written files stay open until they are synced, `close` is called or the object is deleted. Nothing else
    stays open between calls.
    """

    def __init__(self, path: str | os.PathLike[str], *, lasting: bool = True) -> None:
        """`lasting`: `sync` is likely to be called; otherwise no descriptor is kept open for it."""
        self.path = os.path.abspath(path)
        self.moved: Callable[[], object] | None = None
        """If set, called by who writes a blob from memory or checks one, after each MiB of it; what it raises
        ends that."""
        self._lasting = lasting
        # Blobs to sync: also existing ones, whose writer may have been killed before it synced them.
        self._unsynced = Unsynced()

    def create(self) -> Layout:
        """Make the directories and `oci-layout`; existing ones stay. Raises DiskError, LayoutError."""
        content = encode_document({"imageLayoutVersion": VERSION})
        try:
            for folder in (self.path, self._join_path("blobs"), self._join_path("blobs", "sha256")):
                make_folders(folder, mode=0o700)
            with open_nested_folder(self.path) as root:
                try:
                    os.stat("oci-layout", dir_fd=root, follow_symlinks=False)
                except FileNotFoundError:
                    replace("oci-layout", content, root)
        except OSError as error:
            raise disk_error(error, self.path, "the image layout", len(content)) from error
        self.check()
        return self

    def check(self) -> None:
        """Raise LayoutError if the directory is not marked as a layout of a known version."""
        content = self._document("oci-layout", 1 << 12)
        if not isinstance(content, dict) or content.get("imageLayoutVersion") != VERSION:
            raise LayoutError(f"{self.path} is not an image layout of version {VERSION}")

    # Blobs

    def has_blob(self, digest: str, size: int) -> bool:
        """Whether that blob exists, as a plain file of that size. Raises DigestError."""
        name = get_hex(digest)
        try:
            with self._blobs() as folder:
                return has_file(name, size, folder)
        except (LayoutError, OSError):
            return False

    def list_missing(self, wanted: Iterable[Descriptor]) -> list[Descriptor]:
        """Return those for which `has_blob` is false.

        Raises DigestError, and LayoutError if a directory cannot be opened although it is there.
        """
        names = [(get_hex(each.digest), each) for each in wanted]
        try:
            with self._blobs() as folder:
                return [each for name, each in names if not _is_there(name, each.size, folder)]
        except LayoutError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno not in NOTHING_THERE:
                raise
            return [each for _, each in names]

    def add_blob(
        self,
        data: bytes | bytearray | memoryview | IO[bytes],
        *,
        media_type: str = OCTETS,
        digest: str | None = None,
        anew: bool = False,
    ) -> Descriptor:
        """Write a blob, from memory or from a file, unless it exists.

        `digest`: of data in memory, if the caller has computed it. `anew`: write data in memory even if it
        exists. Raises LayoutError, DiskFull, DiskError; BlobError if the file cannot be read.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            return self._add_file(data, media_type)
        digest = digest or digest_of(data)
        name, size = get_hex(digest), memoryview(data).nbytes
        with self._blobs() as folder, self._explain_write_errors(size):
            if anew or not has_file(name, size, folder):
                with new_file(folder) as (descriptor, unfinished):
                    if self.moved is None:
                        write_all(descriptor, data)
                    else:
                        _write_pieces(descriptor, data, self.moved)
                    self._keep(descriptor, unfinished, name, folder)
            else:
                self._unsynced.note_existing(name)
        return Descriptor(media_type, digest, size)

    def link_blob(self, digest: str, size: int, source: Layout) -> None:
        """Take a blob from another layout: a hard link, or a checked copy if no link can be made.

        Raises BlobError if the source lacks the blob, or has another size (a link) or content (a copy);
        DiskFull, DiskError, LayoutError.
        """
        name = get_hex(digest)
        if source.path == self.path:
            with self._explain_write_errors(size):
                source._unsynced.hand_over(name, self._unsynced)
        with self._blobs() as folder, source._blobs() as origin, self._explain_write_errors(size):
            if not has_file(name, size, folder):
                if not has_file(name, size, origin):
                    raise BlobError(f"{source.path} does not have the blob {digest} of {size} bytes")
                if not _link_blob(name, origin, folder):
                    with source.open_blob(digest, size) as file:
                        self._add_file(file, expected=name)
                    return
        self._unsynced.note_existing(name)

    def link_durable(self, wanted: Iterable[Descriptor], source: Layout) -> list[Descriptor]:
        """Link blobs that are known to be right and synced from another layout, replacing any here.

        They need no fsync in `sync`, only their directory does. Returns those that the source lacks, or that
        cannot be linked. Raises DigestError, DiskFull, DiskError, LayoutError.
        """
        left = []
        with self._blobs() as folder, source._blobs() as origin:
            for each in wanted:
                name = get_hex(each.digest)
                with self._explain_write_errors(each.size), suppress(BlobError):
                    if has_file(name, each.size, origin) and _link_blob(name, origin, folder):
                        continue
                left.append(each)
        return left

    @contextmanager
    def receive(self, wanted: Descriptor) -> Iterator[Incoming]:
        """Receive a blob piece by piece; at the end it is checked, and only then gets its name.

        It replaces an existing one. Raises BlobError unless its size and digest are right, and whatever is
        raised within; nothing is left then. DiskFull, DiskError, LayoutError.
        """
        name = get_hex(wanted.digest)
        with self._blobs() as folder, ExitStack() as stack:
            with self._explain_write_errors(wanted.size):
                descriptor, unfinished = stack.enter_context(new_file(folder))
            incoming = Incoming(wanted, descriptor, self.path)
            yield incoming
            incoming.check()
            with self._explain_write_errors(wanted.size):
                self._keep(descriptor, unfinished, name, folder)

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Open a blob, unbuffered; its content is not checked yet. Raises BlobError for another size."""
        name = get_hex(digest)
        try:
            with self._blobs() as folder:
                file, found = open_regular(name, folder)
        except (OSError, ValueError) as error:
            raise BlobError(f"the blob {digest} cannot be read: {_explain(error)}") from error
        if size is not None and found != size:
            file.close()
            raise BlobError(f"the blob {digest} has {found} bytes instead of {size}")
        return file

    def read_blob(self, wanted: Descriptor, *, limit: int = DOCUMENT_LIMIT) -> bytes:
        """Read a small blob, and check its digest. Raises BlobError, also for one larger than `limit`."""
        if wanted.size > limit:
            raise BlobError(
                f"the blob {wanted.digest} has {wanted.size} bytes, but at most {limit} are allowed"
            )
        try:
            with self.open_blob(wanted.digest, wanted.size) as file:
                data = file.read(wanted.size + 1)
        except OSError as error:
            raise BlobError(f"the blob {wanted.digest} cannot be read: {_explain(error)}") from error
        if digest_of(data) != wanted.digest:
            raise BlobError(f"the blob {wanted.digest} does not match its digest")
        return data

    def check_blob(self, wanted: Descriptor) -> None:
        """Read a blob and compare it with its digest; `sync` then syncs it. Raises BlobError."""
        hashed = hashlib.sha256()
        with self.open_blob(wanted.digest, wanted.size) as file:
            while piece := read_piece(file):
                hashed.update(piece)
                if self.moved is not None:
                    self.moved()
        if f"sha256:{hashed.hexdigest()}" != wanted.digest:
            raise BlobError(f"the blob {wanted.digest} does not match its digest")
        self._unsynced.note_existing(get_hex(wanted.digest))

    def write_again(self, wanted: Descriptor) -> None:
        """Read a blob, compare it with its digest, and replace it by what was read, for `sync`.

        For a blob whose writer has ended: if its fsync failed, another fsync of the same file would not
        report it. If the blob has other names, it was synced before it got them, and is only read. Raises
        BlobError, DiskFull, DiskError.
        """
        with self.open_blob(wanted.digest, wanted.size) as file:
            if os.fstat(file.fileno()).st_nlink > 1:
                self.check_blob(wanted)
                return
            with self.receive(wanted) as incoming:
                while piece := read_piece(file):
                    incoming.write(piece)

    # Documents

    def read_index(self) -> Index:
        """Read the index of the layout. Raises LayoutError, also if it has none: it is not finished."""
        return Index.from_json(self._document("index.json", DOCUMENT_LIMIT))

    def write_index(self, index: Index) -> None:
        """Replace index.json, atomically and synced. Raises DiskFull, DiskError, LayoutError."""
        content = encode_document(index.to_json())
        if len(content) > DOCUMENT_LIMIT:
            raise LayoutError(f"the index of {self.path} would have {len(content)} bytes")
        with self._explain_write_errors(len(content), "the index"), open_nested_folder(self.path) as root:
            replace("index.json", content, root)

    def read_manifest(self, wanted: Descriptor) -> Manifest:
        """Read a manifest that the index names, and check its digest. Raises LayoutError, BlobError."""
        if wanted.media_type != MANIFEST:
            raise LayoutError(f"{wanted.digest} is a {wanted.media_type}, not an image manifest")
        return Manifest.from_json(parse_document(self.read_blob(wanted), f"the manifest {wanted.digest}"))

    def add_manifest(self, manifest: Manifest) -> Descriptor:
        """Write a manifest as a blob; its descriptor is for the index. Raises as add_blob does."""
        content = encode_document(manifest.to_json())
        if len(content) > DOCUMENT_LIMIT:
            raise LayoutError(
                f"the manifest would have {len(content)} bytes, but at most {DOCUMENT_LIMIT} are allowed"
            )
        found = self.add_blob(content, media_type=MANIFEST)
        return Descriptor(MANIFEST, found.digest, found.size, artifact_type=manifest.artifact_type)

    # Durability

    def sync_blobs(
        self,
        names: Mapping[str, os.stat_result] | None = None,
        *,
        threads: int = _SYNC_THREADS,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Sync all blobs that this object wrote, linked or found there; with `names`, only these.

        `names`: each with its status. One that this object has made durable already is left alone.
        `progress`: called by the threads after each blob; what it raises ends them.
        Raises DiskError, also if an earlier fsync of one has failed; BlobError for one that is gone.
        """
        for name, status in (names or {}).items():
            self._unsynced.note_existing(name, status)
        try:
            self._unsynced.sync(self._open_file, threads=threads, names=names, progress=progress)
        except OSError as error:
            size = None
            with suppress(OSError):
                size = os.stat(self._join_path("blobs", "sha256", error.filename)).st_size
            raise disk_error(error, self.path, "a blob", size) from error

    def sync(self, *, threads: int = _SYNC_THREADS) -> None:
        """Do the same, and then sync the directories. Raises as that does."""
        self.sync_blobs(threads=threads)
        parent = os.path.dirname(self.path)
        try:
            for folder in (self._join_path("blobs", "sha256"), self._join_path("blobs"), self.path, parent):
                sync_folder(folder)
        except OSError as error:
            raise DiskError(f"{self.path} cannot be flushed to disk: {reason(error)}") from error

    def list_undurable(self) -> frozenset[str]:
        """Return the names of blobs whose fsync has failed, and that were not written again."""
        return self._unsynced.list_failed()

    def close(self) -> None:
        """Close files that are written but not synced: they will be removed. May be called twice."""
        self._unsynced.close()

    def commit(self, index: Index, *, threads: int = _SYNC_THREADS) -> None:
        """Sync the layout, and only then write that index. Raises as sync and write_index do."""
        self.sync(threads=threads)
        self.write_index(index)

    def prune(self, wanted: Iterable[str]) -> None:
        """Remove all blobs except these digests, and what killed writers left. Raises DiskError."""
        names = {get_hex(digest) for digest in wanted}
        try:
            with self._blobs() as folder:
                for name in os.listdir(folder):
                    if name not in names:
                        os.unlink(name, dir_fd=folder)
        except OSError as error:
            raise DiskError(f"old blobs cannot be removed from {self.path}: {reason(error)}") from error

    # Private

    def _join_path(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    @contextmanager
    def _blobs(self) -> Iterator[int]:
        try:
            folder = open_folder(self.path, "blobs", "sha256")
        except OSError as error:
            where = error.filename or self.path  # an error of fstat(2) or close(2) names no file
            what = "cannot be opened"
            if error.errno in NOTHING_THERE:
                what = "is not a directory of an image layout"
            raise LayoutError(f"{where} {what}: {reason(error)}") from error
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _explain_write_errors(self, size: int, what: str = "a blob") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self.path, what, size) from error

    def _add_file(self, file: IO[bytes], media_type: str = OCTETS, *, expected: str = "") -> Descriptor:
        hashed, size = hashlib.sha256(), 0
        with (
            self._blobs() as folder,
            self._explain_write_errors(0),
            new_file(folder) as (descriptor, unfinished),
        ):
            while piece := read_piece(file):
                hashed.update(piece)
                size += len(piece)
                with self._explain_write_errors(size):
                    write_all(descriptor, piece)
            name = hashed.hexdigest()
            if expected not in ("", name):
                raise BlobError(f"the blob sha256:{expected} does not match its digest")
            if has_file(name, size, folder):
                self._unsynced.note_existing(name)
            else:
                self._keep(descriptor, unfinished, name, folder)
        return Descriptor(media_type, f"sha256:{name}", size)

    def _keep(self, descriptor: int, unfinished: str, name: str, folder: int) -> None:
        failures = self._unsynced.count_failures()
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
        if self._lasting:
            self._unsynced.note_written(name, descriptor, failures=failures)
        else:
            self._unsynced.note_existing(name)

    def _open_file(self, name: str) -> int:
        with self.open_blob(f"sha256:{name}") as file:
            return os.dup(file.fileno())

    def _document(self, name: str, limit: int) -> object:
        try:
            with open_nested_folder(self.path) as root:
                data = read_regular(name, root, limit=limit)
        except (OSError, ValueError) as error:
            raise LayoutError(f"{self._join_path(name)} cannot be read: {_explain(error)}") from error
        return parse_document(data, self._join_path(name))


# No link is possible: another file system, one without links, too many of them, or none permitted for this
# file.
_NO_LINK = {errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS, errno.EACCES}


def _write_pieces(descriptor: int, data: bytes | bytearray | memoryview, wrote: Callable[[], object]) -> None:
    with memoryview(data) as view, view.cast("B") as whole:
        for begin in range(0, len(whole), _PIECE):
            with whole[begin : begin + _PIECE] as piece:
                write_all(descriptor, piece)
            wrote()


def _link_blob(name: str, origin: int, folder: int) -> bool:
    """Hard-link a blob into a directory, replacing an existing one; False if no link is possible."""
    unfinished = UNFINISHED + secrets.token_hex(8)
    try:
        with suppress(FileExistsError):
            os.link(name, name, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
            return True
        os.link(name, unfinished, src_dir_fd=origin, dst_dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError as error:
        raise BlobError(f"the blob sha256:{name} was removed from its layout") from error
    except OSError as error:
        if error.errno in _NO_LINK:
            return False
        raise
    try:
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        # rename(2) keeps both names if somebody linked the same file meanwhile.
        with suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=folder)
    return True


def has_file(name: str, size: int, folder: int) -> bool:
    """Whether a directory has that plain file, of that size. Raises OSError."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size == size


def _is_there(name: str, size: int, folder: int) -> bool:
    with suppress(OSError):
        return has_file(name, size, folder)
    return False


def read_piece(file: IO[bytes]) -> bytes:
    """Read the next bytes of a blob, none at its end. Raises BlobError."""
    try:
        return file.read(_PIECE)
    except OSError as error:
        raise BlobError(f"the content of a blob cannot be read: {reason(error)}") from error


def _explain(error: OSError | ValueError) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)
