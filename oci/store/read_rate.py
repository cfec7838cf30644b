"""What the disk of a store delivers, as restores have measured it, in a small file of the store's folder.

    <store>/read-rate.json      {"bytes-per-second": [number, …]}, the newest last

It only says which encoding is best for new chunks (gpusnap.oci.chunks.encoding): where it is missing or
broken, or says what no disk can be, nothing is known. Of two restores that end at the same moment one may be
lost. Nobody has a lock for it.
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
# The median of some: a disk that was busy with something else once is not slow.
_KEPT = 5
# Bytes per second: less than any disk delivers, more than any does.
_SLOWEST, _FASTEST = 1 << 20, 1 << 40


def recall(store: str | os.PathLike[str]) -> float | None:
    """What the disk of the store in a folder delivers, in bytes per second; None where nobody knows."""
    rates = _read(store)
    return sorted(rates)[len(rates) // 2] if rates else None


def remember(store: str | os.PathLike[str], rate: float) -> None:
    """Take note of a measurement, in bytes per second. Where it cannot be written nothing is said of it."""
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
