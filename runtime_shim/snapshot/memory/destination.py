"""Where the chunks of a checkpoint go: beside CRIU's images, or into this host's store.

In a store, the chunks are written to a staging directory, which stays as long as a process may need it. At
the end it is handed over to the `gpusnap checkpoint` that ordered the checkpoint (handover.py). Without one,
the store's index names the chunks as an artifact without records: Podman's own records are in its archive.
After the dump, CRIU's images of memory go into chunks of the store as well, so the image's directory stays
small."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

from gpusnap.oci.base.errors import DiskFull, NotThere, OciError, ReadOnlyStore
from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.buffers import File
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.read_rate import recall
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import ManifestError, Refused, suggest_room
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records import manifest_file
from gpusnap.runtime_shim.records.artifact import write_artifact
from gpusnap.runtime_shim.records.manifest import FOLDER, NAME, FileRecord, Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import chunk_layout, transfer
from gpusnap.runtime_shim.snapshot.memory.chunk_cache import ChunkCache
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient, hand_over, take_over

_PAGES = compile_later(r"pages-[0-9]{1,10}\.img", re.ASCII)
# The mark of a staging directory; its second sentence is for people.
_MARK = compile_later(r"the checkpoint of container \S+ on (?P<host>\S+); .*", re.DOTALL)
# Smaller ones may as well stay in the archive.
_LEAST = 1 << 20
# A process changes pages in many places; few larger chunks would be unchanged.
_IMAGE_CHUNK = 1 << 20


class Destination:
    """The interface between the chunks of a checkpoint and the place where they are kept.

    A place that needs nothing at some point inherits a method that does nothing.
    """

    kind: str
    """Its name in the manifest."""
    place: str
    """A directory on the file system of the chunks."""
    speed: ReadSpeed | None
    """How fast a restore will read them; None if this is not known."""
    layout: Layout
    """The layout to which they are written, and from which this checkpoint's are read."""

    def begin(self) -> None:
        """Prepare for the chunks. Raises Refused."""

    def mark_needed(self) -> None:
        """From now on, a process may depend on the chunks, and the journal says so."""

    def open_known(self) -> AbstractContextManager[Known | None]:
        """Open the chunks of earlier checkpoints, which can be linked during the block."""
        return contextlib.nullcontext()

    def write_images(
        self, check: Callable[[], None] = lambda: None, *, but: Collection[str] = (), durably: bool = False
    ) -> tuple[FileRecord, ...]:
        """After the dump: write CRIU's images of memory, if they go into chunks. The images stay in place.

        The chunks are synced only with `durably`. `check`: called after each chunk; what it raises ends this.
        `but`: names of images that are no part of this dump.
        """
        return ()

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Sync the chunks. Raises ImageError. `kept`: another checkpoint is likely to follow."""

    def name(self, record: Manifest) -> None:
        """Record which chunks belong together, before the manifest says so. Raises ImageError."""

    def close(self, record: Manifest | None) -> None:
        """The manifest is on disk: remove other copies of what it lists as chunks.

        None if the manifest on disk is another one, which does not list images.
        """

    def discard(self, *, earlier: bool) -> None:
        """Remove what was written for a failed checkpoint. Raises ImageError.

        `earlier`: the image's directory contains an earlier checkpoint, which may use the same files.
        """


def is_of_checkpoint(why: str) -> bool:
    """Return whether a staging directory has the mark of a checkpoint."""
    return _MARK.fullmatch(why) is not None


def is_of_another_host(why: str) -> bool:
    """Return whether a staging directory has the mark of a checkpoint on a host of another name."""
    mark = _MARK.fullmatch(why)
    return mark is not None and mark["host"] != os.uname().nodename


class ImageDestination(Destination):
    """The directory gpusnap/ in the image's directory: it is made with the first chunk."""

    kind = "chunks"
    speed: ReadSpeed | None = None  # most go into an archive, and from there anywhere

    def __init__(self, image_path: str, container: str, settings: Memory, bundle: str = "") -> None:
        self._image = image_path
        self._settings, self._container, self._bundle = settings, container, bundle
        self.place = image_path
        self.layout = Layout(os.path.join(image_path, FOLDER), lasting=settings.sync)

    @contextlib.contextmanager
    def open_known(self) -> Iterator[Known | None]:
        """Open the chunks that were kept of the container's last checkpoint."""
        with self._open_cache() as kept:
            yield kept.known

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Also make it a layout that everybody can read."""
        chunk_layout.commit(self.layout, tables, sync=self._settings.sync)
        with self._open_cache() as keeping:
            if kept and self._settings.sync:
                keeping.keep(self.layout, tables)
            else:
                keeping.drop()

    def discard(self, *, earlier: bool) -> None:
        """Remove the layout."""
        self.layout.close()
        if not earlier:
            chunk_layout.remove(self._image)

    def _open_cache(self) -> ChunkCache:
        return ChunkCache.open(self._settings, self._container, self._bundle)


class StoreDestination(Destination):
    """A staging directory of a store; it has its layout from `begin` on."""

    kind = "store"

    def __init__(
        self,
        path: str,
        image_path: str,
        container: str,
        settings: Memory,
        *,
        why: str = "",
        read_rate: int = 0,
        recipient: Recipient | None = None,
    ) -> None:
        """`path`: of the store. `why`: for whom nobody may remove the directory, if not for a checkpoint.

        `read_rate`: as store.read-rate. `recipient`: the command to which the memory is handed over.
        """
        # The layout follows no symbolic links, but an operator may have moved the store.
        self.place = os.path.realpath(path)
        self._store = Store(self.place)
        self._staging: Staging | None = None
        self._needed = False
        self._recipient, self._handed_over = recipient, False
        self._image, self._container, self._settings = image_path, container, settings
        rate = read_rate or recall(self.place)
        self.speed = ReadSpeed(rate, transfer.count_reading_threads(settings)) if rate is not None else None
        self._why = why or (
            f"the checkpoint of container {container} on {os.uname().nodename}; gpusnap recover on that host "
            "repairs it; if that does not find it and the checkpoint is not needed, remove this directory"
        )

    def begin(self) -> None:
        """Create a staging directory. Raises Refused if the store cannot be used."""
        try:
            name = self._recipient.staging if self._recipient is not None else ""
            self._staging = self._store.create().stage(name)
            self.layout = self._staging.layout
        except DiskFull as error:
            raise Refused(f"{error}", hint=suggest_room(self.place), code=error.code) from error
        except ReadOnlyStore as error:
            hint = "remount it for writing, or set store.path to another directory"
            raise Refused(f"{error}", hint=hint, code=error.code) from error
        except OciError as error:
            raise Refused(
                f"the store {self.place} cannot be used: {error}", hint="check store.path", code="GPS-704"
            ) from error

    @classmethod
    def reopen(
        cls, path: str, image_path: str, container: str, settings: Memory, tables: Sequence[Table]
    ) -> StoreDestination:
        """Open the one of a killed gpusnap, with these chunks. `path`: of its layout. Raises ImageError."""
        destination = cls(os.path.dirname(os.path.dirname(path)), image_path, container, settings)
        with transfer.as_image_error(path):
            try:
                taken = take_over(destination._store, os.path.basename(path))
                if taken is not None:
                    destination._staging = taken.staging
                    if _is_complete(taken.read(), image_path):  # its command could not know that
                        taken.commit()
                    else:  # it is written again, or nobody needs it
                        taken.staging.take_back()
                staging = taken.staging if taken is not None else destination._store.adopt(path)
            except NotThere:  # it had been committed before the kill
                staging = destination._store.create().stage()
            destination._staging, destination.layout = staging, staging.layout
            destination.mark_needed()
            for each in descriptors(tables):
                if not staging.layout.has_blob(each.digest, each.size):
                    staging.take(each.digest, each.size)
        return destination

    def mark_needed(self) -> None:
        """Mark it so that gc does not remove it even if gpusnap is killed. Raises ImageError."""
        if not self._needed:
            with transfer.as_image_error(self.place):
                self._require_staging().mark_precious(self._why)
            self._needed = True

    @contextlib.contextmanager
    def open_known(self) -> Iterator[Known | None]:
        """Open all chunks of the store."""
        yield self._store.open_known_chunks()

    def write_images(
        self, check: Callable[[], None] = lambda: None, *, but: Collection[str] = (), durably: bool = False
    ) -> tuple[FileRecord, ...]:
        """Write their chunks; an image that cannot be cut into chunks stays an image."""
        found = []
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError, ValueError, OciError):
            names, sources = [], []
            for entry in sorted(os.scandir(self._image), key=lambda each: each.name):
                if entry.name in but:
                    continue
                if _PAGES.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    file, size = open_below(self._image, entry.name)
                    opened.enter_context(file)
                    if size >= _LEAST:
                        names.append(entry.name)
                        sources.append(File(file.fileno(), size))
            tables = writing.write(
                sources,
                self.layout,
                threads=self._settings.threads or copies.cores(),
                ceiling=transfer.ceiling(self._settings),
                chunk_size=min(self._settings.chunk_size, _IMAGE_CHUNK),
                level=self._settings.level,
                speed=self.speed,
                known=self._store.open_known_chunks(),
                progress=lambda _: check(),
            )
            if durably:
                self.layout.sync()
            found = [FileRecord(name, table) for name, table in zip(names, tables, strict=True)]
        return tuple(found)

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Sync whatever memory.sync says, because later checkpoints build on it. It is not named yet."""
        with transfer.as_image_error(self.layout.path):
            self.layout.sync()

    def name(self, record: Manifest) -> None:
        """Hand it over, or else name it as an artifact: the manifest is its config."""
        with transfer.as_image_error(self.place):
            if self._recipient is not None and self._recipient.is_alive:
                self.mark_needed()
                hand_over(self._require_staging(), record, self._recipient)
                self._handed_over = True
            else:
                self._require_staging().commit(write_artifact(self.layout, record), tables=record.tables)

    def close(self, record: Manifest | None) -> None:
        """Remove the images that are in chunks, and the layout of an earlier checkpoint in the same place."""
        chunk_layout.remove(self._image)
        for each in record.files if record is not None else ():
            with contextlib.suppress(OSError):  # it only uses space
                os.unlink(os.path.join(self._image, each.name))
        if self._handed_over:
            staging, self._staging = self._require_staging(), None
            staging.close(leave=True)
        else:
            self._end()

    def discard(self, *, earlier: bool) -> None:
        """Remove the staging directory."""
        self._end()

    def _require_staging(self) -> Staging:
        assert self._staging is not None
        return self._staging

    def _end(self) -> None:
        if self._staging is not None:
            with transfer.as_image_error(self.place):
                self._staging.unmark_precious()
                self._staging.close()
            self._staging = None


def _is_complete(record: Manifest, image_path: str) -> bool:
    """Return whether the image has this manifest, or the one from before the dump; see Draft.finish.

    Also if it cannot be read: then the chunks must not be lost. Raises ImageError.
    """
    if not manifest_file.has(image_path, FOLDER, NAME):
        return False
    try:
        there = manifest_file.read(image_path)
    except ManifestError:
        return True
    return (there.container, there.created) == (record.container, record.created)


def is_in_image(layout: str, image_path: str) -> bool:
    """Whether a layout is the one in the image's directory."""
    return layout == os.path.join(image_path, FOLDER)


def reopen_destination(
    layout: str, image_path: str, container: str, settings: Memory, tables: Sequence[Table] = ()
) -> Destination:
    """Reopen the destination of an interrupted checkpoint, which must contain the chunks of `tables`.

    `layout`: from the journal. Raises ImageError.
    """
    if is_in_image(layout, image_path):
        return ImageDestination(image_path, container, settings)
    return StoreDestination.reopen(layout, image_path, container, settings, tables)
