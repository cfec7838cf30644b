"""Sizes for people."""

from __future__ import annotations


def human(size: int) -> str:
    """Return bytes in binary units, with one decimal from KiB on."""
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def amount(done: int, whole: int | None, speed: float) -> str:
    """Return bytes of how many, the speed (bytes per second), and the remaining time."""
    if not done:
        return ""
    text = human(done)
    if whole:
        text += f" of {human(whole)}"
    if speed >= 1:
        text += f", {human(int(speed))}/s"
        if whole and whole > done:
            text += f", {_duration((whole - done) / speed)} left"
    return text


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{max(1, whole)} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_shortage(free: int, needed: int) -> str:
    """Format two sizes (bytes) in one unit, rounded away from each other: they never look the same."""
    bits, unit = (30, "GiB") if needed >= 1 << 30 else (20, "MiB")
    tenths, more = free * 10 >> bits, -(-needed * 10 >> bits)
    return f"{tenths / 10:.1f} {unit} free, {more / 10:.1f} {unit} needed"
