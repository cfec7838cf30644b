"""All codes of errors, which docs/errors.md and `gpusnap explain` show.

An error gets its code alone where it is raised (`code="GPS-312"`), or has that of its class: nothing of this
package is imported for it. A code never gets another meaning, and its number is not used again.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpusnap.error_codes import (
    command_line,
    container,
    criu,
    engines,
    files,
    gpu,
    host,
    other_hosts,
    stores,
)
from gpusnap.error_codes.entry import ErrorCode

GROUPS: Mapping[str, str] = {
    "0": "gpusnap itself, and this host",
    "1": "Command lines, settings, and the real runtime",
    "2": "The container, before a checkpoint",
    "3": "The GPU's driver",
    "4": "The GPUs of a restore",
    "5": "CRIU and the runtime",
    "6": "The files of a checkpoint",
    "7": "Stores",
    "8": "Registries and other hosts",
    "9": "Podman, containerd, CRI-O and the hooks",
}
"""The subject of the codes with that first digit."""

CODES: Mapping[str, ErrorCode] = {
    each.code: each
    for part in (host, command_line, container, gpu, criu, files, stores, other_hosts, engines)
    for each in sorted(part.CODES, key=lambda each: each.code)
}
"""By code, in the order of the codes."""


def find(text: str) -> ErrorCode | None:
    """Find a code by GPS-312, gps312, [GPS-312], 312 or lock-timeout."""
    wanted = text.strip().strip("[]").lower()
    digits = wanted.removeprefix("gps").removeprefix("-")
    if digits.isascii() and digits.isdigit():
        return CODES.get(f"GPS-{digits:>03}")
    return next((each for each in CODES.values() if each.name == wanted), None)
