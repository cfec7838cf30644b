"""Sizes for people."""

from __future__ import annotations

import pytest

from gpusnap.runtime_shim.base.units import amount, human

MIB = 1 << 20


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (80 << 30, "80.0 GiB"),
        (1 << 50, "1.0 PiB"),
        (1 << 60, "1024.0 PiB"),
    ],
)
def test_human(size: int, text: str) -> None:
    """Binary units, up to the largest that a manifest may hold and beyond."""
    assert human(size) == text


def test_the_time_that_is_left() -> None:
    assert amount(0, 5, 1.0) == ""
    assert amount(2 * MIB, None, 0.0) == "2.0 MiB"
    assert amount(2 * MIB, 4 * MIB, 0.0) == "2.0 MiB of 4.0 MiB"
    assert amount(2 * MIB, 4 * MIB, 8 * MIB) == "2.0 MiB of 4.0 MiB, 8.0 MiB/s, 1 s left"
    assert amount(4 * MIB, 4 * MIB, 8 * MIB) == "4.0 MiB of 4.0 MiB, 8.0 MiB/s"
    assert amount(MIB, 7201 * MIB, MIB).endswith("2 h 0 min left")
