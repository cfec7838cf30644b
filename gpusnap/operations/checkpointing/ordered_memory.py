"""The memory of a checkpoint that `gpusnap checkpoint` has ordered, from the runtime that hands it over.

runtime_shim/snapshot/memory/handover.py explains how. A runtime hands nothing over for a container without
GPU memory, and if it leaves all memory in CRIU's images.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.files import exists
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.memory import handover
from gpusnap.runtime_shim.snapshot.memory.handover import HandedOverMemory


class OrderedMemory:
    """What is handed over to this process.

    At the end of a `with`, memory that is neither committed nor removed stays in its staging directory.
    """

    def __init__(self, store: Store) -> None:
        self.name = secrets.token_hex(16)
        """The name of its staging directory, for the order."""
        self._store = store
        self._path = store.locate_staging(self.name)
        self._taken: HandedOverMemory | None = None

    def __enter__(self) -> OrderedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Leave it in its staging directory, for the recovery of a container that was left stopped."""
        if self._taken is not None:
            taken, self._taken = self._taken, None
            taken.leave()

    def take(self) -> Staging | None:
        """Take it over once the runtime has ended; None if it has handed nothing over. Raises OciError."""
        self._taken = handover.take_over(self._store, self.name)
        return self._taken.staging if self._taken is not None else None

    def finish(self) -> None:
        """Remove the staging directory after its commit."""
        if self._taken is not None:
            taken, self._taken = self._taken, None
            with suppress(OciError):  # `gpusnap recover` removes it
                taken.remove()

    def take_left(self) -> None:
        """Take what is handed over: call this after an error, before asking whether the container runs.

        If memory was handed over, the runtime has finished with the container. Memory that the journal names
        is left for `gpusnap recover`.
        """
        with suppress(OciError, GpusnapError, ImportError, OSError):
            if self._taken is None:
                self._taken = handover.take_unneeded(self._store, self.name)

    def settle(self, runs: bool) -> None:
        """After `take_left`: remove it if the container runs as before, else keep it in the store.

        If that fails, `gpusnap recover` or a restore of what Podman has keeps it. What was handed over since
        `take_left` is never removed: the container may have ended since.
        """
        if not runs:
            self.take_left()
        with suppress(OciError, GpusnapError, ImportError, OSError):
            if self._taken is not None:
                if not runs:
                    self._taken.commit()
                self.finish()

    def is_left(self) -> bool:
        """Return whether its staging directory is there, or may be: a runtime may still hand it over."""
        with suppress(OSError):
            return exists(self._path, follow=False)
        return True
