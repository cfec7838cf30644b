"""Moves a suspended container's memory from RAM into the store; a resume reads it back, and checks it.

    files in RAM ─→ chunks in a staging directory of the store, synced ─→ journal ─→ the files are removed

Chunks that an earlier checkpoint has are linked, and then read: nobody has looked at them since.

Until the journal names the chunks, the memory is in RAM as before, and a kill changes nothing. The
container's lock is held only for the last two steps. So a resume meanwhile does not wait; the chunks are then
removed. gc does not remove the staging directory, which names its owner, the journal's entry. It is removed
with that entry, or after a reboot, when no such entry exists any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from gpusnap.oci.base.threads import run_for_each
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.errors import GpusnapError, Refused, reason
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.ram import SuspendedChunks
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers.spilled import make_mark
from gpusnap.runtime_shim.transaction import Transaction, hold_signals, make_interruptible


def spill(key: str, settings: Settings) -> int:
    """Move the GPU memory of a suspended container into the store; return how many bytes of RAM that freed.

    Raises GpusnapError; the memory is then complete in RAM or in the store.
    """
    with make_interruptible():
        return _spill(key, settings)


def _spill(key: str, settings: Settings) -> int:
    found, entry = _find_suspended(key)
    staged = sum(each.size for process in entry.processes for each in process.staged)
    if not staged:
        with journal.hold(key), hold_signals():
            if _find_suspended(key) == (found, entry):
                _free(found)  # left by a spill that was killed between its last two steps
        return 0
    memory = settings.memory
    store, why = settings.store, _make_mark(key)
    destination = StoreDestination(
        store.path, store.path, found.container, memory, why=why, read_rate=store.read_rate
    )
    pages = SuspendedChunks("", key, memory, destination=destination)
    transaction = Transaction()
    pages.prepare()
    try:
        space.check_disk(destination.place, staged, ())
        destination.mark_needed()
        with transaction.step("write"):
            pages.adopt(entry)
            pages.write()
            records = pages.records()
            assert records is not None
            tables = [region.table for regions in records.values() for region in regions]
            destination.commit(tables, kept=False)
        with transaction.step("check"):
            _check_linked(destination.layout, tables, memory.threads)
        with journal.hold(key), hold_signals(), transaction.step("switch"):
            if _find_suspended(key)[0] != found:
                raise Refused(f"container {found.name} was resumed in the meantime", code="GPS-206")
            journal.write(key, "", records, layout=destination.layout.path)
            pages.leave()
            transaction.commit()
            _free(found)
    except BaseException:
        with suppress(GpusnapError):
            if _may_be_needed(key, destination.layout.path):
                pages.close()
            else:
                pages.discard(layout=True)
        raise
    destination.layout.close()
    return staged


def _make_mark(key: str) -> str:
    try:
        return make_mark(key)
    except OSError as error:
        raise GpusnapError(
            "the memory was not moved to the store, because this host's boot ID or /run/gpusnap cannot be "
            f"read: {reason(error)}",
            hint="check both, then run gpusnap suspend --spill again; the container is suspended as before",
            code="GPS-007",
        ) from error


def _check_linked(layout: Layout, tables: Sequence[Table], threads: int) -> None:
    """Read the chunks that were linked from earlier checkpoints: the memory will be nowhere else.

    Raises ImageError if one is damaged; the memory stays in RAM then.
    """

    def check(chunk: Descriptor) -> None:
        with layout.open_blob(chunk.digest, chunk.size) as file:
            is_linked = os.fstat(file.fileno()).st_nlink > 1
        if is_linked:
            layout.check_blob(chunk)

    with transfer.as_image_error(layout.path):
        run_for_each(descriptors(tables), check, threads=threads or copies.cores())


def _free(found: Suspension) -> None:
    """Free the RAM of memory that is in the store. Raises GpusnapError; nothing is lost then."""
    try:
        tmpfs.remove(found.key)
    except OSError as error:
        raise GpusnapError(
            f"the GPU memory of {found.name} is in the store, but its RAM cannot be freed: {reason(error)}",
            hint=f"run gpusnap suspend --spill --wait {found.name} to try again",
            code="GPS-027",
        ) from error


def _may_be_needed(key: str, layout: str) -> bool:
    """Whether the journal names a layout, or cannot be read: then the memory may be nowhere else."""
    try:
        entry = journal.read(key)
    except (GpusnapError, OSError):
        return True
    return entry is not None and entry.layout == layout


def _find_suspended(key: str) -> tuple[Suspension, journal.Entry]:
    found, entry = suspensions.read(key), journal.read(key)
    if found is None or entry is None or not found.is_alive:
        raise Refused(f"container {container_key.id_of(key)} is not suspended", code="GPS-206")
    if found.stage is not Stage.SUSPENDED:
        raise suspensions.make_unfinished_error(found)
    return found, entry
