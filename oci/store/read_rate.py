"""The read rate of a store's disk, as measured by restores, in a small file in the store's directory.

    <store>/read-rate.json      {"bytes-per-second": [number, …]}, the newest last

It only determines which encoding is best for new chunks (gpusnap.oci.chunks.encoding): if it is missing or
broken, or contains impossible values, nothing is known. If two restores end at the same moment, one value may
be lost. There is no lock for it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.files import read_below, replace_below
from gpusnap.oci.base.json_text import parse_json

_NAME = "read-rate.json"
_KEY = "bytes-per-second"
_LIMIT = 4096
# The median of several: a disk that was busy with something else once is not slow.
_KEPT = 5
# Bytes per second: less than any disk has, more than any has.
_SLOWEST, _FASTEST = 1 << 20, 1 << 40


def recall(store: str | os.PathLike[str]) -> float | None:
    """Return the read rate of a store's disk, in bytes per second; None if not known."""
    rates = _read(store)
    return sorted(rates)[len(rates) // 2] if rates else None


def remember(store: str | os.PathLike[str], rate: float) -> None:
    """Record a measurement, in bytes per second. If it cannot be written, there is no error."""
    if _is_possible(rate):
        rates = [*_read(store)[1 - _KEPT :], round(rate)]
        with suppress(OSError):
            replace_below(os.fspath(store), _NAME, json.dumps({_KEY: rates}).encode("ascii"), sync=False)


def _read(store: str | os.PathLike[str]) -> list[float]:
    try:
        found = parse_json(read_below(os.fspath(store), _NAME, limit=_LIMIT))
    except (OSError, ValueError):
        return []
    rates = found.get(_KEY) if isinstance(found, dict) else None
    if not isinstance(rates, list) or not all(_is_possible(rate) for rate in rates):
        return []
    return rates[-_KEPT:]


def _is_possible(rate: Any) -> bool:
    return isinstance(rate, int | float) and _SLOWEST <= rate <= _FASTEST  # NaN is not
