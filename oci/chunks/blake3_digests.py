"""BLAKE3 of the plain bytes of chunks, where the package blake3 is installed.

SHA-256 takes more time per byte than everything else in a restore; BLAKE3 takes a fifth of that. The identity
of a chunk is its SHA-256 in any case. The package is not a dependency, because Debian does not have it. It is
imported when the first chunk is hashed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Protocol

from gpusnap.oci.base.patterns import compile_later

_HEX = compile_later(r"[a-f0-9]{64}")


class Hasher(Protocol):
    """Hashes pieces of bytes one after the other."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Add more bytes."""

    def hexdigest(self) -> str:
        """Return 64 hex digits for all bytes."""


def compute_blake3(data: bytes | bytearray | memoryview) -> str:
    """Return 64 hex digits; "" without the package. In this thread only; other threads run meanwhile."""
    hasher = _import()
    return hasher(data, max_threads=1).hexdigest() if hasher is not None else ""


def start_blake3() -> Hasher:
    """Return a hasher for bytes that come in pieces. Without the package its digest is ""."""
    hasher = _import()
    return hasher(b"", max_threads=1) if hasher is not None else _Nothing()


def differ(wanted: str, found: str) -> bool:
    """Whether two digests are known and differ."""
    return bool(wanted and found) and wanted != found


def is_blake3(text: object) -> bool:
    """Whether a table writes a digest like that."""
    return isinstance(text, str) and _HEX.fullmatch(text) is not None


@cache
def _import() -> Callable[..., Hasher] | None:
    """Return the package's class; None if it cannot be imported, which is tried once."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    found: Callable[..., Hasher] = blake3
    return found


class _Nothing:
    def update(self, data: bytes | memoryview, /) -> None:
        return

    def hexdigest(self) -> str:
        return ""
