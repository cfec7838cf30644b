"""The state of one restore that its steps share (restore.py has their order)."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.runtime_shim.base.transaction import Transaction
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.records import manifest
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime.command_line import RestoreCall
from gpusnap.runtime_shim.runtime.criu.images.digests import Comparison
from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.snapshot.devices.remap import Remap
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch
from gpusnap.runtime_shim.snapshot.loading.source import BlobSource
from gpusnap.runtime_shim.snapshot.memory.bulk_copy import BulkCopy
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record


@dataclass(slots=True)
class RestoreJob:
    """One restore in progress."""

    call: RestoreCall
    real: RealRuntime
    settings: Settings
    record: manifest.Manifest
    driver: Driver | None
    """None if no process has GPU state."""
    present: Driver | None
    """This host's first driver, whether or not the checkpoint contains GPUs."""
    transaction: Transaction
    images: str
    """The image directory that the runtime is to read."""
    held: ExitStack
    """Keeps every other gpusnap from the container until it runs."""
    room: ExitStack
    """Keeps the GPUs' memory claimed until the driver has it."""
    cleanup: ExitStack
    remap: Remap | None = None
    prefetch: Prefetch | None = None
    """GPU memory that is loaded while CRIU works."""
    compared: Comparison | None = None
    """CRIU's images, compared with their digests while CRIU works."""
    blob_source: BlobSource | None = None
    """The source of its chunks, if they are not in the image directory."""
    ahead: bool = False
    """Whether CRIU's images that are in chunks came from the load process of `gpusnap restore`."""
    joined_regions: bool = False
    """Whether the GPUs' memory comes from a load process, which has claimed RAM for it."""
    written: tuple[WrittenFile, ...] = ()
    """The files that its processes had open for writing."""
    bulk: BulkCopy | None = None
    """The memory of the processes that gpusnap writes instead of CRIU."""
    entry: restore_record.Restore | None = None
    """The journal's record of this restore."""
    removed: bool = False
    """Whether the restored container was removed again."""
    noting: threading.Lock = field(default_factory=threading.Lock)
    """For `save_progress` by several threads."""

    @property
    def key(self) -> str:
        """The key of the container."""
        return container_key.key(
            container_key.root(self.call.globals.root, self.real.kind), self.call.container_id
        )

    @property
    def plugin(self) -> Plugin | None:
        """The plugin of CRIU that restores the GPU state, if there is one."""
        return self.driver.plugin if self.driver is not None and self.record.processes else None

    @property
    def work_path(self) -> str:
        """The directory in which CRIU and the runtime write; an engine unpacks archives there."""
        return str(self.call.work() or self.call.images(self.real.kind))

    @property
    def criu_log(self) -> str:
        """The path of CRIU's log."""
        return os.path.join(self.work_path, "restore.log")

    def save_progress(self, **changed: Any) -> None:
        """Record how far the restore has come. From any thread."""
        with self.noting:
            assert self.entry is not None
            entry = replace(self.entry, **changed)
            if entry != self.entry:
                restore_record.write(entry)
                self.entry = entry
