"""Tells which gpusnap has left something in a store: of which host, boot, and directory with records.

Several hosts may share a store, and several gpusnaps of one host too, each with its own /run. Only the one
that wrote something knows whether it is still needed. After a reboot its processes and records are gone.
"""

from __future__ import annotations

import os
from contextlib import suppress

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.snapshot.records import journal

_MACHINE = "/etc/machine-id"  # machine-id(5)
# The firmware's: clones of a disk have one machine ID (linux, drivers/firmware/dmi-id.c; only root reads it).
_PRODUCT = "/sys/class/dmi/id/product_uuid"

_SEPARATOR = "+"


@dataclass(frozen=True, slots=True)
class Origin:
    """One boot of one gpusnap's host."""

    host: str
    """The host's name."""
    machine: str
    """Its machine ID, with its firmware's; empty if it has none."""
    boot: str
    records: str
    """The device and the inode of the directory with the journal; empty if there is none."""

    @property
    def is_this_run(self) -> bool:
        """Whether the processes and the records that it names are those of now. Raises OSError."""
        return self.boot == state_files.boot() and self.records == _identify_records()

    @property
    def is_own(self) -> bool:
        """Whether this gpusnap has the records, or had them before a reboot. Raises OSError."""
        if self.boot == state_files.boot():
            return self.is_this_run
        return bool(self.machine) and (self.host, self.machine) == _identify_host()

    @property
    def is_own_renamed(self) -> bool:
        """Whether this is an earlier boot of this host, by its machine ID and its firmware's."""
        both = _SEPARATOR in self.machine
        return both and self.boot != state_files.boot() and self.machine == _identify_host()[1]


def identify() -> Origin:
    """Return that of this gpusnap. Raises OSError."""
    return Origin(*_identify_host(), state_files.boot(), _identify_records())


def _identify_host() -> tuple[str, str]:
    found = []
    for path in (_MACHINE, _PRODUCT):
        with suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            found += file.read(64).split()
    return os.uname().nodename, _SEPARATOR.join(found)


def _identify_records() -> str:
    with suppress(FileNotFoundError):
        found = os.stat(os.path.dirname(journal.FOLDER))
        return f"{found.st_dev}:{found.st_ino}"
    return ""
