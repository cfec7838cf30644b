"""What the disk of a store delivers, kept in a file that may be broken in any way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpusnap.oci.store.read_rate import recall, remember

NAME = "read-rate.json"
GIB = 1 << 30


def test_it_is_remembered(tmp_path: Path) -> None:
    """By another process, too: it is a file, for its owner alone."""
    assert recall(tmp_path) is None
    remember(tmp_path, 2.5 * GIB)
    assert recall(tmp_path) == 2.5 * GIB
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_the_median_of_the_last(tmp_path: Path) -> None:
    """One that is far off changes nothing, and a disk that was replaced is known after some."""
    for rate in (2.0, 2.2, 90.0, 2.1, 0.1):
        remember(tmp_path, rate * GIB)
    assert recall(tmp_path) == round(2.1 * GIB)
    for _ in range(3):
        remember(tmp_path, 7 * GIB)
    assert recall(tmp_path) == 7 * GIB
    assert len(json.loads((tmp_path / NAME).read_text())["bytes-per-second"]) == 5


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.0, 1e300, float("nan"), float("inf"), float("-inf")])
def test_what_no_disk_delivers(tmp_path: Path, rate: float) -> None:
    """It is not remembered."""
    remember(tmp_path, rate)
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"bytes-per-second": [21474',
        b"\xff\xfe",
        b"[" * 4000,
        b"[2147483648]",
        b"{}",
        b'{"bytes-per-second": 2147483648}',
        b'{"bytes-per-second": []}',
        b'{"bytes-per-second": [NaN]}',
        b'{"bytes-per-second": [Infinity]}',
        b'{"bytes-per-second": [1e999]}',
        b'{"bytes-per-second": [-2147483648]}',
        b'{"bytes-per-second": [0]}',
        b'{"bytes-per-second": [true]}',
        b'{"bytes-per-second": ["2147483648"]}',
        b'{"bytes-per-second": [2147483648, null]}',
        b'{"bytes-per-second": [1' + b"0" * 3000 + b"]}",
        b'{"bytes-per-second": [1' + b"0" * 5000 + b"]}",
        b'{"bytes-per-second": [2147483648]}' + b" " * 5000,
        b'{"bytes-per-second": [2147483648], "bytes-per-second": [2147483648]}',
    ],
)
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    """Nothing is known then, and the next measurement takes its place."""
    (tmp_path / NAME).write_bytes(content)
    assert recall(tmp_path) is None
    remember(tmp_path, GIB)
    assert recall(tmp_path) == GIB


def test_of_many_the_last_count(tmp_path: Path) -> None:
    """Whoever wrote them."""
    (tmp_path / NAME).write_text(json.dumps({"bytes-per-second": [9 * GIB] * 50 + [GIB] * 5}))
    assert recall(tmp_path) == GIB


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    """It is nothing to read, and is replaced."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps({"bytes-per-second": [GIB]}))
    before = elsewhere.read_bytes()
    (tmp_path / NAME).symlink_to(elsewhere)
    assert recall(tmp_path) is None
    remember(tmp_path, 2 * GIB)
    assert recall(tmp_path) == 2 * GIB
    assert elsewhere.read_bytes() == before


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    """Nor is a folder an error."""
    os.mkfifo(tmp_path / NAME)
    assert recall(tmp_path) is None
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    assert recall(tmp_path) is None
    remember(tmp_path, GIB)
    assert recall(tmp_path) is None


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    """Nobody is told: it only saves time."""
    remember(tmp_path / "none", GIB)
    assert recall(tmp_path / "none") is None
