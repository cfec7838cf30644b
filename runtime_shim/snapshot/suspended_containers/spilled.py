"""The chunks of suspended containers in the store, and their removal: see spill.py."""

from __future__ import annotations

import os
from contextlib import suppress

from gpusnap.oci.base.errors import OciError
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.store.paths import PRECIOUS
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.snapshot.memory import suspended_memory
from gpusnap.runtime_shim.snapshot.records import journal

WHOSE = "GPU memory of the suspended container "
"""How a staging directory names its owner; the container's key follows."""
_LOADED = compile_later(r"\d+-[0-9a-f]+\.load\.(\d+)\.(\d+)")
"""Files of load.py, with the PID and start time of the process that reads into them."""


def sweep(path: str) -> None:
    """Remove chunks from a store that no suspended container uses any more, for example after a reboot."""
    folder = os.path.join(os.path.realpath(path), "staging")
    with suppress(OSError):
        for name in os.listdir(folder):
            with suppress(OSError, GpusnapError, OciError):
                with open(os.path.join(folder, name, PRECIOUS), encoding="utf-8") as file:
                    whose = file.read(4096)
                if not whose.startswith(WHOSE):
                    continue
                entry = journal.read(whose.removeprefix(WHOSE))
                layout = os.path.join(folder, name)
                if entry is None or entry.layout != layout:
                    suspended_memory.discard(layout)  # not while it is written: it has an owner then


def sweep_loaded(key: str) -> None:
    """Remove files that a killed gpusnap read memory into. Raises OSError."""
    for path in tmpfs.sizes(key):
        found = _LOADED.fullmatch(os.path.basename(path))
        if found is not None and not proc.is_same(int(found[1]), int(found[2])):
            with suppress(FileNotFoundError):
                os.unlink(path)
