"""Sizes for people."""

from __future__ import annotations


def human(size: int) -> str:
    """Bytes in binary units, with one decimal from KiB on."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
