"""Splits Podman's archive into the parts of an artifact, and puts it together again.

In the archive (libpod, exportCheckpoint; containerd's CRI and CRI-O write the same names):

    config.dump, spec.dump          the engine's and the runtime's configuration of the container
    checkpoint/                     CRIU's images
    checkpoint/gpusnap/             manifest.json, and a layout: oci-layout, index.json, blobs/sha256/
    rootfs-diff.tar                 files that changed
    volumes/NAME.tar                what is in a named volume
    …                               more of the engine's records

In the artifact, manifest.json is the config, the blobs that its tables name are the chunks, rootfs-diff.tar
is a layer, volumes are in chunks, and everything else is another layer, the records. Each direction reads the
archive once, with only some blobs in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from gpusnap.checkpoints.formats.names import CONFIG, OURS
from gpusnap.checkpoints.formats.podman_reader import ArchiveContents, ArchiveReader, Crew
from gpusnap.checkpoints.formats.podman_writer import ArchiveWriter
from gpusnap.checkpoints.formats.whole_archive import make_whole as self_contained
from gpusnap.oci.base.errors import reason
from gpusnap.oci.base.files import open_named
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Compression, Writer
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.artifact import label_tables


def take_in(
    archive_path: str,
    staging_layout: Layout,
    *,
    threads: int = 0,
    known: Callable[[str, int], bool] | None = None,
    written: Known | None = None,
    progress: Callable[[int, int], object] = lambda done, whole: None,
) -> ArchiveContents:
    """Convert an archive into a layout that nobody else uses meanwhile; the layout is not made durable.

    threads: for zstd, and for blobs; all cores for 0. known: returns whether a blob (digest, size) was put
    into the layout from elsewhere, such as Staging.take; then the archive's is not read. written: chunks that
    a store has, by content; those of volumes are linked from there. progress: called with the number of bytes
    read of the archive's file, and its size.

    Raises ImageError if a chunk that the manifest names is missing, or the archive is no checkpoint;
    ManifestError; ArchiveError, BlobError, and the errors of Layout.add_blob. The layout may then contain
    useless blobs.
    """
    try:
        size = os.stat(archive_path).st_size
        file = open_named(archive_path)
    except OSError as error:
        raise ImageError(f"{archive_path} cannot be read: {reason(error)}") from error
    with file, Crew(threads or copies.cores()) as crew:

        def report() -> None:
            progress(min(file.tell(), size), size)

        with ArchiveReader(archive_path, staging_layout, crew, known, report, written) as reader:
            tar_of_records = reader.pack(reader.records(file))
            records = staging_layout.add_blob(tar_of_records, media_type=artifact.RECORDS)
            crew.join()
            return reader.finish(records)


def give_out(
    whole: artifact.Artifact,
    blobs: Blobs,
    path: str,
    *,
    config: bytes,
    compress: Compression = "none",
    embed: bool = True,
    volumes: bool = True,
    threads: int = 0,
    progress: Callable[[int, int], object] = lambda done, whole: None,
) -> None:
    """Write an artifact as an archive for Podman, under a new name.

    config: becomes manifest.json; empty for a checkpoint without GPU state. embed: include the chunks that it
    names, and CRIU's images as files, so that nothing else is needed; the manifest then records that.
    volumes: include the content of volumes. threads: for zstd, and for reading chunks; all cores for 0.
    progress: called with the number of bytes of blobs, and all.

    Raises ImageError if the artifact has no records, or records that no archive has; ManifestError; BlobError
    for a blob that is missing or wrong; ArchiveError, DiskFull, DiskError. Then there is no new file.
    """
    if whole.records is None:
        raise ImageError(
            "the checkpoint has no engine records, so no archive can be made of it",
            hint="it is the GPU part of an archive that is stored elsewhere",
            code="GPS-608",
        )
    files: tuple[manifest.FileRecord, ...] = ()
    tables: list[tuple[str, Table]] = []
    if config and embed:
        record = manifest_json.decode(config, CONFIG)
        files = record.files
        config, record = self_contained(config, record)
        tables = label_tables(record)
    sizes = [each.size for each in (whole.records, whole.rootfs) if each is not None]
    sizes += [each.table.size for each in files]
    done, total = 0, sum(sizes) + sum(each.size for each in artifact.chunk_layers(tables))

    def report(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    threads = threads or copies.cores()
    with Writer(path, compress=compress, threads=threads) as writer:
        archive = ArchiveWriter(whole, blobs, writer, threads, report, volumes=volumes)
        archive.records(whole.records, files)
        if config:
            archive.write_folder(OURS)
            archive.write_file(CONFIG, config)
        if whole.rootfs is not None:
            archive.write_rootfs(whole.rootfs)
        if tables:
            archive.write_layout(tables, digest_of(config))
