"""The chunks of a checkpoint in this host's store, asked of the disk before anybody waits for them.

`gpusnap restore` knows the manifest a second before gpusnap-runtime does, which Podman starts when it has
made a container. The kernel reads the blobs into its page cache meanwhile, in the order in which the runtime
will: CRIU's images, then the GPUs' memory by address (oci/chunks/reader.py). Nobody depends on it.

A piece is asked for when the one before it has come. Podman, the runtime and CRIU read their programs and the
images from the same disk meanwhile, and would wait behind all that the kernel was asked for: with 4 GiB asked
for at once a Python program from a cold disk began after 3.4 s, with pieces of 4 MiB after 1.6 s, and alone
after 1.2 s; the reading took 2.0 and 2.7 s (a virtual disk of 2 GiB/s, mq-deadline).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import ask_for
from gpusnap.oci.chunks.reader import in_order
from gpusnap.oci.chunks.table import Chunk
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest import Manifest

# Of the memory that is available beside what the restore itself takes.
_SHARE = 2
# Bytes that the kernel is asked for at a time.
_PIECE = 4 << 20
# Seconds for the piece that is being read when the block ends. A disk that hangs may never give it.
_ENDING = 10.0


@contextlib.contextmanager
def reading_ahead(layout: Layout, record: Manifest | None) -> Iterator[None]:
    """Have the blobs of a checkpoint read while the block runs."""
    over = threading.Event()
    thread = threading.Thread(
        target=_read, args=(layout, record, over), name="gpusnap-read-ahead", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # no thread is to be had, and it only saves time
        yield
        return
    try:
        yield
    finally:
        over.set()
        thread.join(_ENDING)


def _read(layout: Layout, record: Manifest | None, over: threading.Event) -> None:
    if record is None:
        return
    regions = [(each.pid, region.table) for each in record.processes for region in each.regions]
    room = (proc.available_memory() - sum(table.size for _, table in regions)) // _SHARE
    for chunk in (
        *in_order([each.table for each in record.files], []),
        *in_order([table for _, table in regions], [pid for pid, _ in regions]),
    ):
        room -= chunk.stored
        if room < 0 or over.is_set():
            return
        _read_blob(layout, chunk, over)


def _read_blob(layout: Layout, chunk: Chunk, over: threading.Event) -> None:
    """Have the kernel read a blob, and wait until it has, piece by piece (posix_fadvise(2))."""
    with (
        contextlib.suppress(OSError, OciError),
        layout.open_blob(chunk.blob, chunk.stored) as file,
    ):
        for start in range(0, chunk.stored, _PIECE):
            if over.is_set():
                return
            size = min(_PIECE, chunk.stored - start)
            ask_for(file, start, size)
            os.pread(file.fileno(), 1, start + size - 1)
