"""The OCI layout that contains a checkpoint's GPU memory as chunks: check, sync, remove."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence

from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.blobs import Blobs
from gpusnap.oci.layout.documents import Index
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.records.manifest import FOLDER
from gpusnap.runtime_shim.snapshot.memory.transfer import as_image_error


def check(blobs: Blobs, tables: Sequence[Table], *, where: str) -> None:
    """Read every blob and compare it with its digest. `commit` then syncs the blobs of a layout.

    `where`: for the message. Raises ImageError.
    """
    with as_image_error(where):
        run_for_each(descriptors(tables), blobs.check_blob, threads=copies.cores())


def write_again(layout: Layout, tables: Sequence[Table], *, where: str) -> None:
    """Like `check`, for the blobs of a process that has ended; write each blob anew, for `commit`.

    An fsync of the old files proves nothing: an earlier one may have failed, and the next one would not
    report that (gpusnap.oci.layout.unsynced).
    """
    with as_image_error(where):
        run_for_each(descriptors(tables), layout.write_again, threads=copies.cores())


def commit(layout: Layout, tables: Sequence[Table], *, sync: bool = True) -> None:
    """Sync a layout, if `sync` is set, and make it readable for everybody. Raises ImageError."""
    with as_image_error(layout.path):
        # The manifest beside the layout says what each chunk contains.
        chunks = artifact.chunk_layers(("", table) for table in tables)
        root = artifact.write(layout.create(), artifact.Artifact(chunks=chunks))
        if sync:
            layout.commit(Index((root,)))
        else:
            layout.write_index(Index((root,)))
        # Podman packs the whole directory, and an earlier checkpoint may have been in the same place.
        layout.prune({found.digest for found, _ in walk(root, layout.read_blob)})


def remove(image_path: str) -> None:
    """Remove the layout of a failed checkpoint. Raises ImageError."""
    folder = os.path.join(image_path, FOLDER)
    try:
        shutil.rmtree(os.path.join(folder, "blobs"))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ImageError(f"the layout in {folder} cannot be removed: {reason(error)}") from error
    for name in ("index.json", "oci-layout"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
