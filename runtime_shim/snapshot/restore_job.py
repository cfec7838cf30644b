"""The state of one restore that its steps share (restore.py has their order)."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from dataclasses import field, replace
from typing import Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot import restore_record
from gpusnap.runtime_shim.snapshot.devices.remap import Remap
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch
from gpusnap.runtime_shim.snapshot.loading.source import BlobSource
from gpusnap.runtime_shim.snapshot.memory.bulk_copy import BulkCopy
from gpusnap.runtime_shim.transaction import Transaction


@dataclass(slots=True)
class Job:
    """One restore under way."""

    call: RestoreCall
    real: RealRuntime
    settings: Settings
    record: manifest.Manifest
    driver: Driver | None
    """None where no process has GPU state."""
    present: Driver | None
    """This host's first driver, whatever the checkpoint says of GPUs."""
    transaction: Transaction
    images: str
    """The image directory as the runtime is to read it."""
    held: ExitStack
    """Keeps every other gpusnap from the container until it runs."""
    room: ExitStack
    """Holds the GPUs' memory for us against other restores, until the driver has it."""
    cleanup: ExitStack
    remap: Remap | None = None
    prefetch: Prefetch | None = None
    """Memory that is not in CRIU's images, on its way."""
    compared: Comparison | None = None
    """CRIU's images, read by us while CRIU works."""
    fetching: BlobSource | None = None
    """Where its chunks come from, if not from the image directory."""
    ahead: bool = False
    """CRIU's images that are in chunks came from the `gpusnap restore` that this is of."""
    joined_regions: bool = False
    """The GPUs' memory comes from a load process, which has claimed RAM for it."""
    bulk: BulkCopy | None = None
    """Memory of the processes that CRIU leaves to us."""
    entry: restore_record.Restore | None = None
    """What the journal says of this restore."""
    removed: bool = False
    """What was restored has been taken away again."""
    noting: threading.Lock = field(default_factory=threading.Lock)
    """For `save_progress` by several threads."""

    @property
    def key(self) -> str:
        """Of the container."""
        return container_key.key(
            container_key.root(self.call.globals.root, self.real.kind), self.call.container_id
        )

    @property
    def plugin(self) -> Plugin | None:
        """CRIU's plugin that brings the processes back, where that is not up to us."""
        return self.driver.plugin if self.driver is not None and self.record.processes else None

    @property
    def work_path(self) -> str:
        """Where CRIU and the runtime write; an engine unpacks archives there."""
        return str(self.call.work() or self.call.images(self.real.kind))

    @property
    def criu_log(self) -> str:
        """CRIU's, there."""
        return os.path.join(self.work_path, "restore.log")

    def save_progress(self, **changed: Any) -> None:
        """Write down how far it has come. For any thread."""
        with self.noting:
            assert self.entry is not None
            entry = replace(self.entry, **changed)
            if entry != self.entry:
                restore_record.write(entry)
                self.entry = entry
