"""The chunks of a checkpoint that are in a store, or in a registry to which it was pushed.

gpusnap first links everything that the store has into a staging directory, so that nothing can remove it
while the restore runs. If the caller names the artifact of the checkpoint in the store, as `gpusnap restore`
does, gpusnap holds the artifact instead: to make some thousand links takes 0.1 s, and to remove them as long.
For the rest, it asks a registry whether it has them before anything is started. Then each thread that needs a
chunk fetches it, while CRIU restores the container.

Only this host (the settings, or the caller's environment) chooses the store and the registry, never the
checkpoint. So an archive from elsewhere cannot make gpusnap contact a host or send it credentials.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from gpusnap.oci.base.errors import BlobError, DiskError, LayoutError, OciError
from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks.buffers import File, Target
from gpusnap.oci.chunks.read_meter import ReadMeter
from gpusnap.oci.chunks.reader import Reader
from gpusnap.oci.chunks.table import descriptors
from gpusnap.oci.layout.blobs import Blobs, FirstOf
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store import read_rate
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, reason
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.tmpfs import Area, Stage
from gpusnap.runtime_shim.records.artifact import write_artifact
from gpusnap.runtime_shim.records.manifest import FOLDER, FileRecord, Manifest
from gpusnap.runtime_shim.snapshot.loading.descriptors import OF_A_FILE, may_open
from gpusnap.runtime_shim.snapshot.memory import handover, transfer
from gpusnap.runtime_shim.snapshot.preflight import space

if TYPE_CHECKING:
    from gpusnap.oci.registry.repository import Repository

STORE, PULL_FROM = "GPUSNAP_STORE", "GPUSNAP_PULL_FROM"
"""Variables of the caller's environment, which reaches a restore. They override store.path and
store.pull-from; several repositories are separated by spaces."""
ARTIFACT = "GPUSNAP_ARTIFACT"
"""Another variable: the digest of the manifest of the checkpoint as an artifact, in that store."""
# Connections that ask and fetch at once: the network limits them, not the cores of this host.
_CONNECTIONS = 16


class BlobSource:
    """`gpusnap.oci.layout.blobs.Blobs` for one restore. A context manager; `finish` commits new blobs."""

    def __init__(
        self, record: Manifest, images: str, store: str, pull_from: Sequence[str], artifact: str = ""
    ) -> None:
        """Link the chunks that the store has, and find out where the others are.

        `images`: the image directory; `gpusnap pull -o` may have put the chunks there.
        `artifact`: the digest of the checkpoint in that store; "" if it is not known.
        Raises Refused, which names a chunk that cannot be found, and ImageError.
        """
        self._record = record
        self._image_layout = Layout(os.path.join(images, FOLDER))
        self._store = Store(os.path.realpath(store))
        self._staging: Staging | None = None
        self._held = contextlib.ExitStack()
        self._remote: dict[str, Repository] = {}
        self._connected = contextlib.ExitStack()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()
        self.fetched = 0
        """Bytes that were fetched from a registry."""
        self.meter = ReadMeter(drop=space.would_evict(record.tables))
        """The meter of the store's disk, for those that read the blobs."""
        every = descriptors(record.tables)
        with transfer.as_image_error(self._image_layout.path):
            wanted = self._image_layout.list_missing(every)
        self._in_image = {each.digest for each in every} - {each.digest for each in wanted}
        try:
            missing = self._link_available(wanted) if wanted and not self._hold(artifact, wanted) else []
            if missing:
                self._find_in_registries(missing, pull_from)
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_settings(
        cls,
        record: Manifest,
        images: str,
        settings: settings_file.Store,
        environ: Mapping[str, str] = os.environ,
    ) -> BlobSource:
        """Make one from the caller's environment, or else from the settings."""
        pull_from = environ.get(PULL_FROM, "").split() or settings.pull_from
        artifact = environ.get(ARTIFACT, "") if environ.get(STORE) else ""
        return cls(record, images, environ.get(STORE) or settings.path, pull_from, artifact)

    def __enter__(self) -> BlobSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def folders(self) -> tuple[str, ...]:
        """The layouts that the chunks are read from."""
        beside = (self._image_layout.path,) if self._in_image else ()
        staged = () if self._staging is None else (self._staging.layout.path,)
        return (*beside, *staged, self._store.layout.path)

    @property
    def scratch(self) -> str | None:
        """A directory for files, on the store's disk; None if the store cannot be written to."""
        return None if self._staging is None else self._staging.path

    def open_blob(self, digest: str, size: int | None = None) -> io.FileIO:
        """Open a chunk's blob; fetch it first if necessary. Raises BlobError, RegistryError, DiskError."""
        if digest in self._in_image:
            return self._image_layout.open_blob(digest, size)
        if self._staging is None:
            return self._meter_reads(self._store.layout.open_blob(digest, size), size)
        repository = self._remote.get(digest)
        if repository is not None and size is not None:
            with self._guard:
                lock = self._locks[digest]
            with lock:
                if not self._staging.layout.has_blob(digest, size):
                    self._fetch(repository, self._staging.layout, digest, size)
        return self._meter_reads(self._staging.layout.open_blob(digest, size), size)

    def check_blob(self, wanted: Descriptor) -> None:
        """As Layout.check_blob. Raises BlobError."""
        FirstOf([Layout(path) for path in self.folders]).check_blob(wanted)

    def finish(self) -> None:
        """Make the store keep what was fetched, like a checkpoint of this host, if it is complete then.

        Also record the speed of the store's disk. Raises ImageError; the container runs in either case.
        """
        if (rate := self.meter.rate) is not None:
            read_rate.remember(self._store.path, rate)
        if self._staging is not None and self.fetched and not self._in_image:
            with transfer.as_image_error(self._store.path):
                self._staging.commit(
                    write_artifact(self._staging.layout, self._record), foreign=self._record.tables
                )
        self.close()

    def close(self) -> None:
        """Close the staging directory and the registries. May be called twice."""
        self._connected.close()
        self._held.close()
        if self._staging is not None:
            staging, self._staging = self._staging, None
            with contextlib.suppress(OciError, OSError):  # gc removes a leftover
                staging.close()

    def _meter_reads(self, file: io.FileIO, size: int | None) -> io.FileIO:
        self.meter.note_opened(file, size or 0)
        return file

    def _hold(self, artifact: str, wanted: Sequence[Descriptor]) -> bool:
        """Hold an artifact of the store against gc; return whether it has all wanted chunks.

        If it is the artifact of another checkpoint, gc may remove a chunk meanwhile, and the restore fails.
        """
        if artifact:
            with contextlib.suppress(OciError):
                self._held.enter_context(self._store.hold(artifact))
                if not self._store.layout.list_missing(wanted):
                    return True
        self._held.close()
        return False

    def _link_available(self, wanted: Sequence[Descriptor]) -> list[Descriptor]:
        """Link what the store has, and return the rest."""
        try:
            staging = self._staging = self._store.create().stage()
        except DiskError:  # a store that is mounted read-only can still be read
            with transfer.as_image_error(self._store.path):
                missing = self._store.layout.list_missing(wanted)
            if missing:
                raise self._make_missing_error(missing, ["the store cannot be written to"]) from None
            return []
        except OciError as error:
            raise ImageError(str(error), code=error.code) from error
        with transfer.as_image_error(self._store.path):
            missing = staging.take_all(wanted)
            if missing:
                # The command that was to commit them may have been killed.
                with contextlib.suppress(OciError, GpusnapError):
                    for _ in handover.commit_left(self._store):
                        pass
                missing = staging.take_all(missing)
            missing = [each for each in missing if not self._link_from_staging(each, staging)]
            # Their staging directory may have been committed, and removed, since the store was asked.
            return staging.take_all(missing)

    def _link_from_staging(self, wanted: Descriptor, staging: Staging) -> bool:
        """Link a blob from a staging directory whose owner died before its commit, for example in a crash."""
        folder = os.path.dirname(staging.path)
        for name in os.listdir(folder):
            layout = Layout(os.path.join(folder, name))
            with contextlib.suppress(BlobError, LayoutError):
                if layout.has_blob(wanted.digest, wanted.size):
                    layout.check_blob(wanted)  # it may not be on disk completely
                    staging.layout.link_blob(wanted.digest, wanted.size, layout)
                    return True
        return False

    def _find_in_registries(self, missing: Sequence[Descriptor], pull_from: Sequence[str]) -> None:
        """Ask the registries for the chunks that the store lacks. Raises Refused."""
        said = []
        for text in pull_from:
            if not missing:
                return
            try:
                missing = self._ask_registry(text, missing)
            except OciError as error:
                said.append(str(error))
        if missing:
            them = "it" if len(missing) == 1 else "them"
            raise self._make_missing_error(
                missing, said or [f"{name} does not have {them} either" for name in pull_from]
            )

    def _ask_registry(self, text: str, missing: Sequence[Descriptor]) -> list[Descriptor]:
        """Ask one registry; return what it does not have either. Raises RegistryError."""
        repository = _open_repository(text)
        self._connected.callback(repository.close)
        lacking: list[Descriptor] = []

        def ask(each: Descriptor) -> None:
            if repository.has_blob(each.digest, each.size):
                self._remote[each.digest] = repository
            else:
                lacking.append(each)

        threads = min(_CONNECTIONS, len(missing))
        run_for_each(missing, ask, threads=threads, ending=repository.interrupt)
        return lacking

    def _fetch(self, repository: Repository, layout: Layout, digest: str, size: int) -> None:
        repository.fetch_blob(Descriptor("application/octet-stream", digest, size), layout)
        # Sync it now, so that the end of the restore need not wait for all of them.
        with layout.open_blob(digest, size) as file:
            os.fsync(file.fileno())
        with self._guard:
            self.fetched += size

    def _make_missing_error(self, missing: Sequence[Descriptor], said: Sequence[str]) -> Refused:
        first, size = missing[0].digest, human(sum(each.size for each in missing))
        if len(missing) == 1:
            what = f"the chunk {first} of the checkpoint is"
        else:
            what = f"{len(missing)} chunks ({size}) of the checkpoint, such as {first}, are"
        why = f": {'; '.join(said)}" if said else ""
        return Refused(
            f"{what} not in the store {self._store.path}{why}",
            hint="pull the checkpoint there with gpusnap pull, add its repository to store.pull-from, "
            f"or set {STORE} to the store that it was made in",
            code="GPS-609",
        )


def _open_repository(text: str) -> Repository:
    """Return the repository of a line of store.pull-from. Raises RegistryError."""
    from gpusnap.oci.layout.reference import parse_plain
    from gpusnap.oci.registry import find as registries

    reference, plain_http = parse_plain(text)
    limits = settings_file.load().registry.limits
    # Without mirrors: a tag says which mirror has a checkpoint, and there is no tag here.
    return registries.repository(reference, plain_http=plain_http, mirrors=False, limits=limits)


class ImageRebuild:
    """Builds CRIU's images from chunks; starts when it is created. Close it."""

    def __init__(
        self,
        files: Sequence[FileRecord],
        blobs: Blobs,
        folder: str,
        *,
        threads: int,
        ceiling: int,
        stage: Stage | None = None,
    ) -> None:
        """`folder`: for the files. `stage`: for the files in RAM, if there is room.

        A file on a disk is written by one thread at a time (its inode is locked), memory by all threads, and
        the images need not stay. If others take the RAM meanwhile, `wait` begins anew on the disk. Raises
        ImageError.
        """
        self._folder, self._files, self._blobs = folder, files, blobs
        self._threads, self._ceiling = threads or copies.cores(), ceiling
        self._stage = stage
        self._in_ram = may_open(OF_A_FILE * len(files))
        """Whether to try RAM first."""
        self._areas: dict[int, Area] = {}
        self._opened = contextlib.ExitStack()
        self.paths: dict[str, str] = {}
        """The path of each file, by its name."""
        try:
            with self._as_image_error():
                self._reading = self._begin()
        except BaseException:
            self._drop()
            raise

    @property
    def has_started_all(self) -> bool:
        """As gpusnap.oci.chunks.reader.Reader.has_started_all."""
        return self._reading.has_started_all

    def _begin(self) -> Reader:
        return Reader(
            [each.table for each in self._files],
            self._blobs,
            threads=self._threads,
            ceiling=self._ceiling,
            targets=[self._make_target(at, each) for at, each in enumerate(self._files)],
            prepare=partial(transfer.populate, self._areas),
        )

    def _make_target(self, at: int, record: FileRecord) -> Target:
        """Make a file in RAM, or in the directory. Raises OSError."""
        if self._stage is not None and self._in_ram:
            try:
                area = self._areas[at] = self._stage.area(f"images-{record.name}", 0, record.table.size)
                self.paths[record.name] = area.path
                return area
            except OSError:
                pass
        path = self.paths[record.name] = os.path.join(self._folder, record.name)
        file = self._opened.enter_context(open(path, "xb", buffering=0))
        os.ftruncate(file.fileno(), record.table.size)
        return File(file.fileno(), record.table.size)

    def wait(self) -> None:
        """Return when the images are complete and checked. Raises ImageError."""
        with self._as_image_error():
            try:
                self._reading.wait()
            except OSError as error:
                if not transfer.is_full(error):
                    raise
                self._restart_on_disk()
                self._reading.wait()

    def _restart_on_disk(self) -> None:
        """Begin anew in the directory, so that the GPUs' memory can have the RAM."""
        self._reading.close()
        self._opened.close()
        for name in os.listdir(self._folder):
            os.unlink(os.path.join(self._folder, name))
        for area in self._areas.values():
            area.discard()
        self._areas.clear()
        self._in_ram = False
        self._reading = self._begin()

    def close(self) -> None:
        """Stop at any point, and free the RAM. May be called twice."""
        self._reading.close()
        self._drop()

    def _drop(self) -> None:
        self._opened.close()
        for area in self._areas.values():
            area.close()
        if self._stage is not None:
            transfer.free(self._stage)

    @contextlib.contextmanager
    def _as_image_error(self) -> Iterator[None]:
        try:
            yield
        except OciError as error:
            raise ImageError(f"CRIU's images cannot be assembled: {error}", code=error.code) from error
        except OSError as error:
            raise ImageError(
                f"CRIU's images cannot be assembled in {self._folder}: {reason(error)}",
                hint="free some space there",
                code="GPS-007",
            ) from error


def rebuild(files: Sequence[FileRecord], blobs: Blobs, folder: str, *, threads: int, ceiling: int) -> None:
    """Write CRIU's images from chunks into a directory, and check them. Raises ImageError."""
    with contextlib.closing(
        ImageRebuild(files, blobs, folder, threads=threads, ceiling=ceiling)
    ) as rebuilding:
        rebuilding.wait()
