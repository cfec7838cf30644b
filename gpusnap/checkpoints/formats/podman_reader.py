"""Reads the parts of an artifact from an archive; see podman.py."""

from __future__ import annotations

import io
import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from gpusnap.checkpoints import volumes
from gpusnap.checkpoints.formats.annotations import VOLUMES, annotations_of, bounded
from gpusnap.checkpoints.formats.criu_images import Links
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.formats.names import (
    BLOBS,
    CONFIG,
    FIRST,
    FOLDERS,
    LARGEST_DUMP,
    LAYOUT,
    OURS,
    PIECE,
    ROOTFS,
    SMALL,
)
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.errors import BlobError, DigestError, DiskError, reason
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.digests import PREFIX, check_digest, digest_of, get_hex
from gpusnap.oci.layout.documents import EMPTY, EMPTY_BLOB, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Content, Entry
from gpusnap.oci.tar.compression import Observed, Readable, as_file, compress
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.artifact import label_tables
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination

# More threads write blobs no faster; each may have a blob in memory.
_MOST_THREADS = 16
# For CRIU's images and rootfs files: they are read as often as written, and disks are fast.
_LEVEL = 1


@dataclass(frozen=True, slots=True)
class ArchiveContents:
    """The contents of an archive: blobs of the layout, except chunks that are in a store."""

    config: Descriptor
    records: Descriptor
    rootfs: Descriptor | None
    chunks: tuple[Descriptor, ...]
    tables: tuple[tuple[str, Table], ...]
    """Each with the name of its source: a PID and an address, or the name of an image."""
    annotations: Mapping[str, str]
    volumes: tuple[volumes.Volume, ...] = ()
    """Their chunks are among the others."""


class Crew:
    """Some threads; at most one piece of work for each has its data in memory."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._most = min(threads, _MOST_THREADS)
        self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="gpusnap-convert")
        self._given: deque[Future[None]] = deque()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Return when no work is running. May be called twice."""
        self._pool.shutdown(cancel_futures=True)

    def give(self, work: Callable[[], None]) -> None:
        """Start some work; wait first while too much is running. Raises errors of earlier work."""
        while len(self._given) > self._most:
            self._given.popleft().result()
        self._given.append(self._pool.submit(work))

    def join(self) -> None:
        while self._given:
            self._given.popleft().result()


class ArchiveReader:
    """Converts an archive into a layout; a `with` block closes it."""

    def __init__(
        self,
        path: str,
        layout: Layout,
        crew: Crew,
        known: Callable[[str, int], bool] | None,
        report: Callable[[], None],
        written: Known | None = None,
    ) -> None:
        """`written`: chunks of volumes that a store has; they are linked, not compressed again."""
        self._path, self._layout, self._crew, self._known, self._report = path, layout, crew, known, report
        self._written = written
        # A separate layout of the same folder: blobs that are dropped at the end need no sync in the first
        # one.
        self._inner = Layout(layout.path)
        self._contained: set[str] = set()
        """Digests of chunks that the archive contains."""
        self._added: set[str] = set()
        self._seen: set[str] = set()
        self._dumps: dict[str, tuple[bytes, tarfile.TarInfo]] = {}
        self._volumes: list[volumes.Volume] = []
        self._record: manifest.Manifest | None = None
        self._wanted: frozenset[tuple[str, int]] | None = None
        self._config: Descriptor | None = None
        self._rootfs: Descriptor | None = None
        self._ours = False
        self._links = Links(path)

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.stop()
        self._inner.close()

    def pack(self, pieces: Iterable[bytes]) -> IO[bytes]:
        return as_file(compress(pieces, level=_LEVEL, threads=self._crew.threads))

    def records(self, file: Readable) -> Iterator[bytes]:
        """Yield the tar of the records; other entries are put into their places meanwhile."""
        return self.place_entries(entries(file, where=self._path))

    def place_entries(self, found: Iterable[Entry]) -> Iterator[bytes]:
        """Do the same with the entries of an archive."""
        for entry in found:
            for piece in self._place_entry(entry):
                yield piece
                self._report()
            self._report()
        yield tar.END
        self._report()

    def finish(self, records: Descriptor) -> ArchiveContents:
        """Return all contents of the archive; removes blobs that nobody names."""
        if FIRST[0] not in self._dumps:
            raise ImageError(
                f"{self._path} is not a checkpoint of a container: it has no {FIRST[0]}", code="GPS-605"
            )
        config, info = self._dumps[FIRST[0]]
        spec = self._dumps[FIRST[1]][0] if FIRST[1] in self._dumps else b""
        return self.finish_images(
            records, lambda record: annotations_of(config, spec, record, written=info.mtime)
        )

    def finish_images(
        self, records: Descriptor, notes: Callable[[manifest.Manifest | None], Mapping[str, str]]
    ) -> ArchiveContents:
        """Do the same for images without an engine's configurations; `notes` returns the annotations."""
        if self._ours and self._record is None:
            raise ImageError(
                f"{self._path} is incomplete: it has {OURS}, but no {CONFIG}",
                hint="it was truncated while it was being written; use another copy of it",
                code="GPS-602",
            )
        if self._config is None:
            self._config = self._layout.add_blob(EMPTY_BLOB, media_type=EMPTY)
        tables = tuple(label_tables(self._record)) if self._record is not None else ()
        chunks = artifact.chunk_layers(tables)
        self._settle(chunks)
        if self._volumes:
            chunks = artifact.chunk_layers((*tables, *((each.label, each.table) for each in self._volumes)))
        own = (self._config, records, self._rootfs)
        self._drop(self._added - {each.digest for each in (*chunks, *own) if each is not None})
        annotations = {**notes(self._record)}
        if self._volumes:
            named = ", ".join(each.name for each in self._volumes)
            annotations |= bounded({VOLUMES: named})
        own_volumes = tuple(self._volumes)
        return ArchiveContents(self._config, records, self._rootfs, chunks, tables, annotations, own_volumes)

    def _place_entry(self, entry: Entry) -> Iterable[bytes]:
        """Put an entry into its place; yield its part for the records."""
        name = entry.name
        self._ours = self._ours or name == OURS or name.startswith(f"{OURS}/")
        if name in FOLDERS and not entry.info.isdir():
            raise ImageError(
                f"{name} in {self._path} is not a directory", hint="do not restore from it", code="GPS-604"
            )
        if name in (CONFIG, ROOTFS, *FIRST):
            self._refuse_repeated(name)
            content = self._file(entry)
            if name == ROOTFS:
                self._rootfs = self._layout.add_blob(
                    self.pack(self._read(content)), media_type=artifact.ROOTFS
                )
                return ()
            data = self._read_small(name, content)
            if name != CONFIG:
                self._dumps[name] = data, entry.info
                return tar.pieces(entry.info, io.BytesIO(data))
            self._record = manifest_json.decode(data, f"{self._path}: {name}")
            self._config = self._layout.add_blob(data, media_type=artifact.CONFIG)
            named = descriptors(self._record.tables)
            self._wanted = frozenset((each.digest, each.size) for each in named)
        elif name.startswith(f"{BLOBS}/"):
            self._blob(entry)
        elif name not in (OURS, *LAYOUT):
            self._links.check(entry)
            if volumes.name_of(name) and entry.content is not None:
                return self._volume(name, entry.info, entry.content)
            if volumes.name_in_chunks(name):
                raise ImageError(
                    f"{self._path} has {name}, which no engine writes",
                    hint="do not restore from it",
                    code="GPS-604",
                )
            return tar.pieces(entry.info, entry.content)
        return ()

    def _volume(self, name: str, info: tarfile.TarInfo, content: Content) -> Iterable[bytes]:
        """Convert the tar of a volume; yield its entry for the records."""
        self._refuse_repeated(name)
        table, digest = volumes.write(
            Observed(content, lambda piece: self._report()),
            self._layout,
            threads=self._crew.threads,
            known=self._written,
        )
        volume = volumes.Volume(volumes.name_of(name), digest, table)
        self._volumes.append(volume)
        data = volume.encode()
        if len(data) > volumes.LARGEST_TABLE:
            raise ImageError(
                f"{name} in {self._path} is too large",
                hint="make the checkpoint with --ignore-volumes",
                code="GPS-604",
            )
        info.name, info.size = volumes.entry_of(volume.name), len(data)
        return tar.pieces(info, io.BytesIO(data))

    def _refuse_repeated(self, name: str) -> None:
        if name in self._seen:
            raise ImageError(
                f"{self._path} has {name} twice", hint="it is not an engine's archive", code="GPS-604"
            )
        self._seen.add(name)

    def _file(self, entry: Entry) -> Content:
        if entry.content is None:
            raise ImageError(
                f"{entry.name} in {self._path} is not a file", hint="do not restore from it", code="GPS-604"
            )
        return entry.content

    def _read_small(self, name: str, content: Content) -> bytes:
        limit = manifest.LARGEST if name == CONFIG else LARGEST_DUMP
        if content.left > limit:
            raise ImageError(
                f"{name} in {self._path} has {content.left} bytes, but at most {limit} are allowed",
                code="GPS-604",
            )
        return content.read()

    def _read(self, content: Content) -> Iterator[bytes]:
        while piece := content.read(PIECE):
            yield piece
            self._report()

    def _blob(self, entry: Entry) -> None:
        """Add a blob, unless nobody names it or the store has it. Its name must be right."""
        folder, _, name = entry.name.rpartition("/")
        try:
            digest = PREFIX + get_hex(check_digest(PREFIX + name)) if folder == f"{BLOBS}/sha256" else ""
        except DigestError:
            digest = ""
        if entry.info.isdir() or not digest:
            return  # for example one that a killed writer left
        content, size = self._file(entry), entry.info.size
        if self._wanted is not None and (digest, size) not in self._wanted:
            return
        self._contained.add(digest)
        if not self._inner.has_blob(digest, size):
            self._added.add(digest)
        if self._known is not None and self._known(digest, size):
            return
        if size <= SMALL:
            data = content.read()
            self._crew.give(lambda: self._add(data, digest))
            return
        found = self._inner.add_blob(as_file(self._read(content)))
        self._added.add(found.digest)
        if found.digest != digest:
            raise self._make_blob_error(digest)

    def _add(self, data: bytes, digest: str) -> None:
        if digest_of(data) != digest:
            raise self._make_blob_error(digest)
        # Replaces an existing file: a writer that died may have left an incomplete one.
        self._inner.add_blob(data, digest=digest, anew=True)

    def _make_blob_error(self, digest: str) -> BlobError:
        return BlobError(f"the blob {digest} in {self._path} does not match its digest")

    def _settle(self, chunks: Sequence[Descriptor]) -> None:
        """Check that every chunk exists."""
        elsewhere = self._record is not None and self._record.pages == StoreDestination.kind
        missing = {each.digest for each in self._inner.list_missing(chunks)}
        for each in chunks:
            if each.digest not in missing:
                if each.digest in self._contained:  # the layout syncs it
                    self._layout.link_blob(each.digest, each.size, self._inner)
            elif not elsewhere:
                notes = each.annotations
                raise ImageError(
                    f"{self._path} does not contain the blob {each.digest} of {each.size} bytes, the "
                    f"chunk at {notes[artifact.CHUNK_OFFSET]} of {notes[artifact.CHUNK_REGION]}",
                    hint="use another copy of it",
                    code="GPS-601",
                )

    def _drop(self, digests: Iterable[str]) -> None:
        """Remove blobs of the archive that nobody names."""
        for digest in digests:
            try:
                os.unlink(os.path.join(self._layout.path, "blobs", "sha256", get_hex(digest)))
            except FileNotFoundError:
                pass
            except OSError as error:
                raise DiskError(
                    f"{digest} cannot be removed from {self._layout.path}: {reason(error)}"
                ) from error
