"""What a process has open: its working directory, its descriptors and its mapped files.

Each has a link in /proc that leads to the right file. Paths of a container are only names: there may now be a
symbolic link, which from here would lead to a file of this host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.process import proc


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file or directory that a process has open."""

    pid: int
    link: str
    """The path in /proc with which it can be opened."""
    path: str
    """Its path for the process."""
    number: int = -1
    """The descriptor; -1 without one."""
    is_mapped_writable: bool = False
    """Whether what the process writes to a mapping reaches the file."""

    def is_writable(self) -> bool:
        """Whether the process can write to it (proc_pid_fdinfo(5)). Raises OSError if it was closed."""
        if self.number < 0:
            return self.is_mapped_writable
        with open(f"/proc/{self.pid}/fdinfo/{self.number}", encoding="ascii") as file:
            flags = next(line.split()[1] for line in file if line.startswith("flags:"))
        return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


def list_open(pid: int) -> Iterator[OpenFile]:
    """Yield what a process has open, and each of its mapped files once; nothing if it has ended."""
    base = f"/proc/{pid}"
    links = [("cwd", -1)]
    with suppress(OSError):
        links += [(f"fd/{number}", int(number)) for number in os.listdir(f"{base}/fd")]
    for name, number in links:
        with suppress(OSError):
            if (target := os.readlink(f"{base}/{name}")).startswith("/"):
                yield OpenFile(pid, f"{base}/{name}", target, number)
    mapped: dict[tuple[str, ...], tuple[str, bool]] = {}  # a library has several mappings
    for addresses, rights, _, *file in proc.named_mappings(pid):
        if file[-1].startswith("/"):
            writable = rights[1] == "w" and rights[3] == "s"
            if writable or tuple(file) not in mapped:
                mapped[tuple(file)] = addresses, writable
    for (*_, path), (addresses, writable) in mapped.items():
        start, _, end = addresses.partition("-")
        link = f"{base}/map_files/{int(start, 16):x}-{int(end, 16):x}"
        yield OpenFile(pid, link, path.replace("\\012", "\n"), is_mapped_writable=writable)
