"""What CRIU's images say of a file that a process had open for writing."""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A regular file; at a restore, CRIU wants it to have the size that it had at the dump.

    It does not check a file that was opened for appending only (criu/files-reg.c, should_check_size).
    """

    path: str
    """In the container."""
    size: int
    """In bytes, at the dump."""
