"""Removes the memory of a suspended container, from RAM and from the store."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from gpusnap.oci.base.files import exists
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, reason
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.snapshot.records import journal


def free(key: str) -> None:
    """Remove the memory of a container, and the journal's record of it. Raises GpusnapError."""
    entry = journal.read(key)
    # Not the masks: who holds the lock removes them, unless a thread does not have its own again.
    journal.drop(key, journal.PAUSED)
    journal.remove(key)
    try:
        tmpfs.remove(key)
    except OSError as error:
        raise GpusnapError(
            f"the suspended GPU memory of container {key.partition('@')[0]} cannot be removed: "
            f"{reason(error)}",
            hint=f"it uses RAM; remove it from {tmpfs.FOLDER}",
            code="GPS-027",
        ) from error
    finally:
        if entry is not None and any(process.regions for process in entry.processes):
            discard(entry.layout)


def discard(layout: str) -> None:
    """Remove the chunks written for a container, by the path of their layout.

    A container that is resumed waits for this. So if the store does not respond in time, the removal goes on
    in a thread of its own, and `gpusnap recover` removes what is left. Raises ImageError.
    """
    from gpusnap.runtime_shim.snapshot.memory import transfer

    try:
        with transfer.as_image_error(layout), suppress(FileNotFoundError):
            deadlines.ask(partial(_discard, layout), layout)
    except ImageError as error:
        if isinstance(error.__cause__, TimeoutError):
            raise ImageError(
                f"{layout} cannot be removed: its file system did not respond in time",
                hint="run gpusnap recover, then gpusnap gc, when it responds; nobody needs this memory",
                code="GPS-512",
            ) from error
        raise


def _discard(layout: str) -> None:
    # Imported here, because every resume imports this module, but few use a store.
    from gpusnap.oci.store.store import Store

    if exists(layout):
        staging = Store(os.path.dirname(os.path.dirname(layout))).adopt(layout)
        staging.unmark_precious()
        staging.close()
