"""Sizes for people."""

from __future__ import annotations

import pytest

from gpusnap.runtime_shim.units import human


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
