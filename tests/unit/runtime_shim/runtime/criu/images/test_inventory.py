"""What CRIU's inventory image says."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu.images.inventory import has_closed_connections

# As CRIU 4.2.1 wrote it: the first by `dump --tcp-close`, without its run ID, the second by one without.
CLOSED = "080210011a18080110011801200128013002380340044806500758086005200128013000500158006200"
OPEN = "080210011a1808011001180120012801300238034004480650075808600520012801300058006200"


def image(folder: Path, message: bytes, *, magic: int = 0x58313116, size: int | None = None) -> str:
    data = struct.pack("<II", magic, len(message) if size is None else size) + message
    (folder / "inventory.img").write_bytes(data)
    return str(folder)


@pytest.mark.parametrize(("message", "closed"), [(CLOSED, True), (OPEN, False), ("5000", False), ("", False)])
def test_closed_connections(tmp_path: Path, message: str, closed: bool) -> None:
    """By the field tcp_close, and not by the same number within another message."""
    assert has_closed_connections(image(tmp_path, bytes.fromhex(message))) is closed


@pytest.mark.parametrize("message", ["50", "ff", "53", "1affffffff7f5001", "0a"])
def test_no_inventory(tmp_path: Path, message: str) -> None:
    """One that cannot be understood says nothing: CRIU will refuse it."""
    assert not has_closed_connections(image(tmp_path, bytes.fromhex(message)))
    assert not has_closed_connections(image(tmp_path, bytes.fromhex("5001"), magic=7))
    assert not has_closed_connections(image(tmp_path, bytes.fromhex(CLOSED), size=3))
    (tmp_path / "inventory.img").write_bytes(b"abc")
    assert not has_closed_connections(str(tmp_path))


def test_there_is_none(tmp_path: Path) -> None:
    """A missing one is CRIU's to say; one that cannot be read is an error."""
    assert not has_closed_connections(str(tmp_path))
    (tmp_path / "inventory.img").mkdir()
    with pytest.raises(ImageError, match="cannot be read"):
        has_closed_connections(str(tmp_path))
