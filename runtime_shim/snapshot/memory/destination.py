"""Where the chunks of a checkpoint go: beside CRIU's images, or into this host's store.

In a store, the chunks are written to a staging directory, which stays as long as a process may need it. At
the end the store's index names them as an artifact without records: Podman's own records are in its archive.
After the dump, CRIU's images of memory go into chunks of the store as well, so the image's directory stays
small."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks import writer as writing
from gpusnap.oci.chunks.buffers import File
from gpusnap.oci.chunks.encoding import ReadSpeed
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.read_rate import remembered
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.errors import Refused
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records.manifest import FOLDER, FileRecord, Manifest
from gpusnap.runtime_shim.records.manifest_json import encode
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import chunk_layout, transfer
from gpusnap.runtime_shim.snapshot.memory.chunk_cache import ChunkCache

_PAGES = compile_later(r"pages-[0-9]{1,10}\.img", re.ASCII)
# Smaller ones are no worse off in an archive.
_LEAST = 1 << 20
# A process' pages change here and there, and in larger chunks few would be as they were.
_IMAGE_CHUNK = 1 << 20


class Destination(Protocol):
    """The seam between the chunks of a checkpoint and where they are kept."""

    kind: str
    """What the manifest calls it."""
    place: str
    """A folder of the file system that they come to lie on."""
    speed: ReadSpeed | None
    """How fast a restore will read them; None where nobody knows."""

    @property
    def layout(self) -> Layout:
        """To write them to, and to read those of this checkpoint from."""

    def begin(self) -> None:
        """Be ready for them. Raises Refused."""

    def mark_needed(self) -> None:
        """From now on a process may depend on what is here, and the journal says so."""

    def open_known(self) -> AbstractContextManager[Known | None]:
        """The chunks of earlier checkpoints that can be linked, for the while of the block."""

    def write_images(self) -> tuple[FileRecord, ...]:
        """After the dump: CRIU's images of memory, if they go into chunks as well. They stay in place."""

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Make the chunks durable. Raises ImageError. `kept`: another checkpoint is likely to come."""

    def name(self, record: Manifest) -> None:
        """Have it on file which chunks belong together, before the manifest says so. Raises ImageError."""

    def close(self, record: Manifest | None) -> None:
        """The manifest is on disk: what it says to be in chunks need not be anywhere else.

        None where it is another one, which says nothing of images.
        """

    def discard(self, *, earlier: bool) -> None:
        """Remove what was written, for a checkpoint that came to nothing. Raises ImageError.

        `earlier`: there is an earlier checkpoint in the image's directory, which may consist of the same.
        """


class ImageDestination:
    """The folder gpusnap/ of the image's directory."""

    kind = "chunks"
    speed: ReadSpeed | None = None  # most go into an archive, and from there to wherever

    def __init__(self, image_path: str, container: str, settings: Memory, bundle: str = "") -> None:
        self._image = image_path
        self._settings, self._container, self._bundle = settings, container, bundle
        self.place = image_path
        self.layout = Layout(os.path.join(image_path, FOLDER), lasting=settings.sync)

    def begin(self) -> None:
        """The folder is made with the first chunk."""

    def mark_needed(self) -> None:
        """Nobody else removes anything here."""

    @contextlib.contextmanager
    def open_known(self) -> Iterator[Known | None]:
        """Those that were kept of the container's last checkpoint."""
        with self._kept() as kept:
            yield kept.known

    def write_images(self) -> tuple[FileRecord, ...]:
        """They stay images."""
        return ()

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """And make it a layout that anybody can read."""
        chunk_layout.commit(self.layout, tables, sync=self._settings.sync)
        with self._kept() as keeping:
            if kept and self._settings.sync:
                keeping.keep(self.layout, tables)
            else:
                keeping.drop()

    def name(self, record: Manifest) -> None:
        """The layout has its index by now."""

    def close(self, record: Manifest | None) -> None:
        """Nothing is anywhere else."""

    def discard(self, *, earlier: bool) -> None:
        """Remove the layout."""
        self.layout.close()
        if not earlier:
            chunk_layout.remove(self._image)

    def _kept(self) -> ChunkCache:
        return ChunkCache.open(self._settings, self._container, self._bundle)


class StoreDestination:
    """A staging folder of a store."""

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
    ) -> None:
        """`path` is the store's. `why`: for whom nobody may remove it, in place of a checkpoint.

        `read_rate`: as store.read-rate.
        """
        # The layout follows no links, but an operator may have put the store elsewhere.
        self.place = os.path.realpath(path)
        self._store = Store(self.place)
        self._staging: Staging | None = None
        self._needed = False
        self._image, self._container, self._settings = image_path, container, settings
        rate = read_rate or remembered(self.place)
        self.speed = ReadSpeed(rate, transfer.count_reading_threads(settings)) if rate is not None else None
        self._why = why or (
            f"the checkpoint of container {container}; gpusnap recover repairs it; if that does not find "
            "it and the checkpoint is not needed, remove this directory"
        )

    @property
    def layout(self) -> Layout:
        """That of the staging folder; to be asked for after `begin` only."""
        return self._staged().layout

    def begin(self) -> None:
        """A new one. Raises Refused where the store cannot be used."""
        try:
            self._staging = self._store.create().stage()
        except OciError as error:
            raise Refused(
                f"the store {self.place} cannot be used: {error}", hint="check store.path", code="GPS-704"
            ) from error

    @classmethod
    def reopen(
        cls, path: str, image_path: str, container: str, settings: Memory, tables: Sequence[Table]
    ) -> StoreDestination:
        """One that a killed gpusnap left, with these chunks; `path` is its layout's. Raises ImageError."""
        destination = cls(os.path.dirname(os.path.dirname(path)), image_path, container, settings)
        with transfer.as_image_error(path):
            try:
                staging = destination._store.adopt(path)
            except NotThere:  # it had named them, and was killed after that
                staging = destination._store.create().stage()
            destination._staging = staging
            destination.mark_needed()
            for each in descriptors(tables):
                if not staging.layout.has_blob(each.digest, each.size):
                    staging.take(each.digest, each.size)
        return destination

    def mark_needed(self) -> None:
        """No gc may take it, though we should be killed. Raises ImageError."""
        if not self._needed:
            with transfer.as_image_error(self.place):
                self._staged().mark_precious(self._why)
            self._needed = True

    @contextlib.contextmanager
    def open_known(self) -> Iterator[Known | None]:
        """All that the store has."""
        yield self._store.open_known_chunks()

    def write_images(self) -> tuple[FileRecord, ...]:
        """Their chunks; an image that cannot be had in chunks stays one."""
        found = []
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError, ValueError, OciError):
            names, sources = [], []
            for entry in sorted(os.scandir(self._image), key=lambda each: each.name):
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
            )
            self.layout.sync()
            found = [FileRecord(name, table) for name, table in zip(names, tables, strict=True)]
        return tuple(found)

    def commit(self, tables: Sequence[Table], *, kept: bool) -> None:
        """Durable whatever memory.sync says, since later checkpoints build on it, and not named yet."""
        with transfer.as_image_error(self.layout.path):
            self.layout.sync()

    def name(self, record: Manifest) -> None:
        """As an artifact: the manifest is its config."""
        with transfer.as_image_error(self.place):
            self._staged().commit(write_artifact(self.layout, record), tables=record.tables)

    def close(self, record: Manifest | None) -> None:
        """Remove the images that are in chunks, and the layout of an earlier checkpoint in the same place."""
        chunk_layout.remove(self._image)
        for each in record.files if record is not None else ():
            with contextlib.suppress(OSError):  # it only takes room
                os.unlink(os.path.join(self._image, each.name))
        self._end()

    def discard(self, *, earlier: bool) -> None:
        """Remove the staging folder."""
        self._end()

    def _staged(self) -> Staging:
        assert self._staging is not None
        return self._staging

    def _end(self) -> None:
        if self._staging is not None:
            with transfer.as_image_error(self.place):
                self._staging.unmark_precious()
                self._staging.close()
            self._staging = None


def label_tables(record: Manifest) -> list[tuple[str, Table]]:
    """The tables of a manifest, each with what it is of: PID and address, or the name of an image."""
    regions = [(f"{p.pid}:{r.start:x}", r.table) for p in record.processes for r in p.regions]
    return regions + [(each.name, each.table) for each in record.files]


def write_artifact(layout: Layout, record: Manifest) -> Descriptor:
    """Write an artifact of a manifest and its chunks, which are there. Raises as Layout.add_blob does."""
    config = layout.add_blob(encode(record), media_type=artifact.CONFIG)
    chunks = artifact.chunk_layers(label_tables(record))
    return artifact.write(
        layout, artifact.Artifact(config, chunks=chunks, annotations=make_annotations(record))
    )


def make_annotations(record: Manifest) -> dict[str, str]:
    """What an artifact says of its manifest, for those who look at nothing else."""
    models = sorted({gpu.model for gpu in record.gpus})
    found = {
        "org.opencontainers.image.created": record.created,
        "org.criu.checkpoint.criu.version": record.host.criu_version,
        "org.criu.checkpoint.host.arch": record.host.architecture,
        "org.criu.checkpoint.host.kernel": record.host.kernel,
        "org.criu.checkpoint.runtime.name": record.host.runtime_name,
        "org.criu.checkpoint.runtime.version": record.host.runtime_version,
        "io.gpusnap.version": record.gpusnap,
        "io.gpusnap.container.id": record.container,
        "io.gpusnap.driver": f"{record.host.vendor} {record.host.driver_version}",
        "io.gpusnap.gpus": f"{len(record.gpus)} {', '.join(models)}".strip(),
        "io.gpusnap.memory": str(sum(gpu.memory_used for gpu in record.gpus)),
        "io.gpusnap.processes": str(len(record.processes)),
    }
    return {name: "".join(c if c.isprintable() else "?" for c in text)[:256] for name, text in found.items()}


def is_in_image(layout: str, image_path: str) -> bool:
    """Whether a layout is that of the image's directory."""
    return layout == os.path.join(image_path, FOLDER)


def reopen_destination(
    layout: str, image_path: str, container: str, settings: Memory, tables: Sequence[Table] = ()
) -> Destination:
    """Where a checkpoint that was cut off had its chunks, which those of `tables` shall be in again.

    `layout`: as the journal has it. Raises ImageError.
    """
    if is_in_image(layout, image_path):
        return ImageDestination(image_path, container, settings)
    return StoreDestination.reopen(layout, image_path, container, settings, tables)
