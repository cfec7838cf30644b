"""Writes an archive from the parts of an artifact; see podman.py."""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar

from gpusnap.checkpoints import volumes
from gpusnap.checkpoints.formats.annotations import CREATED
from gpusnap.checkpoints.formats.criu_images import Links
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
from gpusnap.checkpoints.formats.whole_archive import rebuild_image
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.blobs import Blobs, CheckedBlob
from gpusnap.oci.layout.digests import get_hex
from gpusnap.oci.layout.documents import Descriptor, Index
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.oci.tar.archive import Entry, entries, unpack
from gpusnap.oci.tar.compression import Readable, as_file
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.records import manifest, manifest_file
from gpusnap.runtime_shim.runtime.criu import scratch_files

_MOST_THREADS = 16
_NOTIFY = "notify"
"""The directory of the socket to which a container reports its state (libpod, mountNotifySocket)."""

T = TypeVar("T")
U = TypeVar("U")


class Sink(Protocol):
    """Accepts the entries of an archive, such as gpusnap.oci.tar.archive.Writer."""

    def add(self, info: tarfile.TarInfo, content: Readable | None = None) -> None:
        """Write one entry, with `info.size` bytes of content."""


def make_importable(config: bytes) -> bytes:
    """Return a config.dump that Podman imports.

    Podman sets a parent control group for each container that it creates, and refuses to import a container
    of --cgroups=split that has one; Quadlet creates them with split (libpod, Container.validate and
    Runtime.setupContainer).
    """
    try:
        value = parse_json(config)
        if value["cgroupsMode"] != "split" or not value.pop("cgroupParent", ""):
            return config
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return config
    return json.dumps(value).encode()


def can_import(config: bytes) -> bool:
    """Return whether Podman imports its own export of a container, by its config.dump."""
    return make_importable(config) is config and not has_notify_socket(config)


def has_notify_socket(config: bytes) -> bool:
    """Return whether conmon makes a socket for a container, by its config.dump (--sdnotify=container).

    Podman makes its directory, which is mounted in the container, for a new container, but not in an import:
    conmon ends without a message (libpod, mountNotifySocket; conmon, setup_notify_socket).
    """
    try:
        value = parse_json(config)
        return value["sdnotifyMode"] == "container" and bool(value["sdnotifySocket"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


class ArchiveWriter:
    """Writes an artifact into an archive."""

    def __init__(
        self,
        whole: artifact.Artifact,
        blobs: Blobs,
        writer: Sink,
        threads: int,
        report: Callable[[int], None],
        *,
        volumes: bool = True,
    ) -> None:
        """`volumes`: include the content of volumes."""
        self._volumes = volumes
        self._whole, self._blobs, self._writer = whole, blobs, writer
        # Each thread has a blob in memory, and a single thread writes them.
        self._threads, self._report = min(threads, _MOST_THREADS), report
        self._time = max(int(manifest.parse_time(whole.annotations.get(CREATED, ""))), 0)

    def records(self, layer: Descriptor, images: Iterable[manifest.FileRecord] = ()) -> None:
        """Write the engine's own entries, the two configurations first: readers of these can stop there.

        At the end come `images`, CRIU's images that are in chunks, as files.
        """
        self._check(layer)
        dumps: set[str] = set()
        notifies = False
        for entry in self._entries(layer):
            if entry.name in FIRST and entry.name not in dumps:
                dumps.add(entry.name)
                if entry.name == FIRST[0] and entry.content is not None and entry.info.size <= LARGEST_DUMP:
                    config = make_importable(entry.content.read(LARGEST_DUMP))
                    notifies = has_notify_socket(config)
                    entry.info.size = len(config)
                    self._writer.add(entry.info, io.BytesIO(config))
                else:
                    self._writer.add(entry.info, entry.content)
                if len(dumps) == len(FIRST):
                    break
        if notifies:  # Podman unpacks the archive into the container's directory
            self._writer.add(tar.folder_entry(_NOTIFY, 0o755))
            dumps.add(_NOTIFY)
        self.write_others(layer, images, dumps)
        self._report(layer.size)

    def write_others(
        self,
        layer: Descriptor,
        images: Iterable[manifest.FileRecord] = (),
        without: Container[str] = (),
    ) -> None:
        """Write the entries of the records, except those of these names, and images that are in chunks."""
        rebuilt_ones = {f"checkpoint/{each.name}": each for each in images}
        links = Links(f"the records {layer.digest}")
        for entry in self._entries(layer):
            links.check(entry)
            if entry.name in without or entry.name in rebuilt_ones:
                continue
            ours = entry.name in (CONFIG, ROOTFS, *LAYOUT) or entry.name.startswith(f"{BLOBS}/")
            if ours or (entry.name in FOLDERS and not entry.info.isdir()):
                raise ImageError(
                    f"the records {layer.digest} contain {entry.name}, which does not belong there",
                    code="GPS-604",
                )
            if name := volumes.name_in_chunks(entry.name):
                if self._volumes:
                    self._volume(name, entry)
                continue
            self._writer.add(entry.info, entry.content)
        for name, each in rebuilt_ones.items():
            with rebuild_image(each, self._blobs, self._threads) as path, open(path, "rb") as file:
                self._writer.add(self._header(name, each.table.size), file)
            self._report(each.table.size)

    def _volume(self, name: str, entry: Entry) -> None:
        """Write the tar of a volume that is in chunks."""
        where = f"the checkpoint of {self._whole.annotations.get(CREATED, 'an unknown time')}"
        data = entry.content.read(volumes.LARGEST_TABLE) if entry.content is not None else b""
        layers = {each.digest: each.size for each in self._whole.chunks}
        found = volumes.decode(name, data, layers, where)
        entry.info.name, entry.info.size = found.label, found.table.size
        content = volumes.pieces(found.table, self._blobs, threads=self._threads)
        self._writer.add(entry.info, as_file(content))

    def write_rootfs(self, layer: Descriptor) -> None:
        """Write the files that changed: their tar is unchanged."""
        self._check(layer)
        where = f"the blob {layer.digest}"
        with self._blobs.open_blob(layer.digest, layer.size) as file:
            size = sum(len(piece) for piece in unpack(file, where))
        with self._blobs.open_blob(layer.digest, layer.size) as file:
            self._writer.add(self._header(ROOTFS, size), as_file(unpack(file, where)))
        self._report(layer.size)

    def write_folder(self, name: str) -> None:
        info = tar.folder_entry(name, 0o700)
        info.mtime = self._time
        self._writer.add(info)

    def write_file(self, name: str, data: bytes) -> None:
        self._writer.add(self._header(name, len(data)), io.BytesIO(data))

    def write_layout(self, tables: Iterable[tuple[str, Table]], digest: str) -> None:
        """Write the chunks as a layout, in the form of a new checkpoint.

        That is what `commit` in runtime_shim/snapshot/memory/chunk_layout.py writes.
        `digest`: of the manifest that is written beside it.
        """
        chunks = artifact.chunk_layers(tables)
        for name in (BLOBS, f"{BLOBS}/sha256"):
            self.write_folder(name)
        with (
            tempfile.TemporaryDirectory(
                prefix=scratch_files.prefix("layout"), dir=scratch_files.find_large()
            ) as place,
            closing(Layout(place).create()) as made,
        ):
            made.write_index(Index((artifact.write(made, artifact.Artifact(chunks=chunks)),)))
            self.write_file(f"{OURS}/oci-layout", Path(place, "oci-layout").read_bytes())
            index = Path(place, manifest.INDEX).read_bytes()
            self.write_file(f"{OURS}/{manifest.INDEX}", manifest_file.replace_digest(index, digest))
            for path in sorted(Path(place, "blobs", "sha256").iterdir()):
                self.write_file(f"{BLOBS}/sha256/{path.name}", path.read_bytes())
        small = (each for each in chunks if each.size <= SMALL)
        with closing(_work_ahead(small, self._load_chunk, self._threads)) as loaded:
            for each, data in loaded:
                self.write_file(f"{BLOBS}/sha256/{get_hex(each.digest)}", data)
                self._report(each.size)
        for each in chunks:
            if each.size > SMALL:
                with self._blobs.open_blob(each.digest, each.size) as file:
                    content = CheckedBlob(file, each)
                    self._writer.add(
                        self._header(f"{BLOBS}/sha256/{get_hex(each.digest)}", each.size), content
                    )
                    content.check_end()
                self._report(each.size)

    def _entries(self, layer: Descriptor) -> Iterator[Entry]:
        with self._blobs.open_blob(layer.digest, layer.size) as file:
            yield from entries(file, where=f"the blob {layer.digest}")

    def _check(self, layer: Descriptor) -> None:
        """Check the layer before it is used: its parts are read in another order than written."""
        with self._blobs.open_blob(layer.digest, layer.size) as file:
            content = CheckedBlob(file, layer)
            while content.read(PIECE):
                pass
            content.check_end()

    def _load_chunk(self, chunk: Descriptor) -> tuple[Descriptor, bytes]:
        with self._blobs.open_blob(chunk.digest, chunk.size) as file:
            content = CheckedBlob(file, chunk)
            data = b"".join(iter(lambda: content.read(chunk.size + 1), b""))
            content.check_end()
        return chunk, data

    def _header(self, name: str, size: int) -> tarfile.TarInfo:
        info = tar.file_entry(name, size, 0o600)
        info.mtime = self._time
        return info


def _work_ahead(items: Iterable[T], work: Callable[[T], U], threads: int) -> Generator[U, None, None]:
    """Yield the results of `work` for each item, in order; computes one ahead for each thread."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="gpusnap-convert")
    waiting: deque[Future[U]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
