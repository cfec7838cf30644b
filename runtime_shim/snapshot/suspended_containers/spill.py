"""Moves a suspended container's memory from RAM into the store; a resume reads it back, and checks it.

    files in RAM ─→ chunks in a staging directory of the store, synced ─→ journal ─→ the files are removed

Chunks that an earlier checkpoint has are linked, and then read: nobody has looked at them since.

Until the journal names the chunks, the memory is in RAM as before, and a kill changes nothing. The
container's lock is held only for the last two steps. So a resume meanwhile does not wait; the chunks are then
removed. gc does not remove the staging directory, which names its owner, the journal's entry. It is removed
with that entry, or after a reboot, when no such entry exists any more.

The store may not respond: its NFS server went away, or its disk hangs. Everything that waits for the store is
done in threads that can be left behind, as a resume does that reads from it (oci/base/threads.py). If nothing
moves for some time, or a signal arrives, the spill fails, and the memory is in RAM as before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from gpusnap.oci.base.errors import Cancelled, Stalled
from gpusnap.oci.base.files import exists
from gpusnap.oci.base.threads import Crew, run_for_each
from gpusnap.oci.chunks.table import Table, descriptors
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, no_thread, reason
from gpusnap.runtime_shim.base.transaction import Transaction, hold_signals, make_interruptible
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import RegionRecord
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.memory import transfer
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.ram import SuspendedChunks
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers.spilled import make_mark

_SYNCING = 300.0
"""Seconds for the disk to sync one file: it may first write what other programs have given it."""


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
    work = _StoreWork(found, entry, settings)
    transaction = Transaction()
    try:
        with transaction.step("write"):
            work.run(work.write)
        with transaction.step("check"):
            work.run(work.check)
        with journal.hold(key), hold_signals(), transaction.step("switch"):
            if _find_suspended(key)[0] != found:
                raise Refused(f"container {found.name} was resumed in the meantime", code="GPS-206")
            journal.write(key, "", work.records, layout=work.layout.path)
            work.pages.leave()
            transaction.commit()
            _free(found)
    except BaseException as error:
        try:
            work.give_up()
        except (GpusnapError, OSError):
            if isinstance(error, GpusnapError):
                error.add_hint("gpusnap gc removes what was written")
        raise
    work.layout.close()
    return staged


class _StoreWork:
    """What a spill does in the store. Each step is done by another thread, while `run` waits for it."""

    def __init__(self, found: Suspension, entry: journal.Entry, settings: Settings) -> None:
        self._found, self._entry, self._settings = found, entry, settings
        self._why = _make_mark(found.key)
        self._crew = Crew(patience=transfer.STALL)
        self._destination: StoreDestination | None = None
        self._tables: Sequence[Table] = ()
        self.pages: SuspendedChunks
        self.records: Mapping[int, tuple[RegionRecord, ...]] = {}
        """The regions in the store, by PID; after `write`."""

    @property
    def layout(self) -> Layout:
        """The layout in the store; after `write`."""
        assert self._destination is not None
        return self._destination.layout

    def run(self, step: Callable[[], None]) -> None:
        """Do a step. Raises its error, ImageError if the store does not respond, Interrupted."""
        self._crew = Crew(patience=transfer.STALL)
        try:
            self._crew.start(1, step)
        except RuntimeError as error:
            raise no_thread(error) from error
        try:
            self._crew.join()
        except Stalled as error:
            name, path = self._found.name, self._settings.store.path
            raise ImageError(
                f"the GPU memory of {name} cannot be moved to the store {path}: its file system did not "
                "respond in time",
                hint=f"check that it does, for example its NFS server, and try again; {name} is suspended as "
                "before, with its memory in RAM; gpusnap recover removes what was written",
                code="GPS-512",
            ) from error

    def write(self) -> None:
        """Write the memory, and sync it. Raises GpusnapError."""
        found, memory, store = self._found, self._settings.memory, self._settings.store
        slowly = partial(self._move, more=_SYNCING - transfer.STALL)
        destination = StoreDestination(
            store.path, store.path, found.container, memory, why=self._why, read_rate=store.read_rate
        )
        self.pages = SuspendedChunks("", found.key, memory, destination=destination)
        with suppress(OSError):
            exists(store.path)  # a file system that does not respond at all fails here, sooner
        slowly()  # the next steps make a directory, mark it and sync it, behind what others write
        self.pages.prepare()
        self._destination = destination
        destination.layout.moved = self._move  # a chunk may be large, and the store slow
        slowly()
        staged = sum(each.size for process in self._entry.processes for each in process.staged)
        space.check_disk(destination.place, staged, ())
        destination.mark_needed()
        self._move()
        self.pages.adopt(self._entry)
        self.pages.write(self._move)
        records = self.pages.records()
        assert records is not None
        self.records = records
        self._tables = [region.table for regions in records.values() for region in regions]
        slowly()
        with transfer.as_image_error(destination.layout.path):
            destination.layout.sync_blobs(progress=slowly)
        destination.commit(self._tables, kept=False)

    def check(self) -> None:
        """Read what the memory depends on and nobody has looked at. Raises ImageError."""
        _check_linked(self.layout, self._tables, self._settings.memory.threads, progress=self._move)

    def give_up(self) -> None:
        """Remove what was written, unless it is needed, or a thread is still at work.

        `gpusnap recover` removes what is left, or `gpusnap gc` if the removal had begun. Raises GpusnapError,
        OSError.
        """
        if self._crew.is_left_behind or self._destination is None:
            return
        if _may_be_needed(self._found.key, self.layout.path):
            self.pages.close()
        else:
            remove = partial(self.pages.discard, layout=True)
            # 0.2 s for each GB; it responded until now.
            deadlines.ask(remove, self._destination.place, within=_SYNCING)

    def _move(self, *, more: float = 0.0) -> None:
        """Note that something was done; end a thread whose caller does not wait any more."""
        if self._crew.is_over:
            raise Cancelled("the memory is not needed in the store any more")
        self._crew.note_progress(more=more)


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


def _check_linked(
    layout: Layout, tables: Sequence[Table], threads: int, *, progress: Callable[[], object] = lambda: None
) -> None:
    """Read the chunks that were linked from earlier checkpoints: the memory will be nowhere else.

    `progress`: called by the threads before each chunk; what it raises ends them. Raises ImageError if a
    chunk is damaged; the memory stays in RAM then.
    """

    def check(chunk: Descriptor) -> None:
        progress()
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
