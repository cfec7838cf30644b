"""A file that a container calls libc.so.6: what it claims costs no more than a real one's."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import pytest

from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.ptrace import positions

_NAMES = 4 << 20
_DYNAMIC, _FUNCTIONS, _TEXT = 0x1000, 0x2000, 0x20000


def library(path: Path, names: bytes, starts: list[int], headers: int = 1) -> int:
    """An ELF file whose symbols have their names from `starts` on; a descriptor, as of a process' memory."""
    head = bytearray(64)
    head[:5] = b"\x7fELF\x02"
    struct.pack_into("=Q", head, 32, 64)
    struct.pack_into("=HH", head, 54, 56, headers)
    program = struct.pack("=IIQQQQQQ", 2, 4, 0, _DYNAMIC, 0, 48, 48, 8)
    dynamic = struct.pack("=6Q", 6, _FUNCTIONS, 5, _TEXT, 10, len(names))
    symbols = b"".join(struct.pack("=IBBHQQ", at, 2, 0, 1, 0x100 * n, 16) for n, at in enumerate(starts, 1))
    with path.open("wb") as file:
        file.write(head + program * headers)
        for place, data in ((_DYNAMIC, dynamic), (_FUNCTIONS, symbols), (_TEXT, names)):
            file.seek(place)
            file.write(data)
    return os.open(path, os.O_RDONLY)


@pytest.fixture(autouse=True)
def memory_in_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor stands in for a PID."""
    monkeypatch.setattr(copies, "peek", lambda file, address, size: os.pread(file, size, address))


def test_names_as_long_as_their_table(tmp_path: Path) -> None:
    """Each of 64,000 symbols may claim 16 MiB: a TiB for who keeps them, while the container stands."""
    names = b"\0fork\0" + b"a" * _NAMES + b"\0"
    memory = library(tmp_path / "libc.so.6", names, [1, *range(6, 206)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        assert positions._functions(memory, 0) == {"fork": (0x100, 16)}
    finally:
        os.close(memory)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_headers_without_end(tmp_path: Path) -> None:
    """Each of 65,535 program headers may name a table of 64 KiB."""
    memory = library(tmp_path / "libc.so.6", b"\0fork\0", [1], headers=65535)
    try:
        with pytest.raises(ValueError, match="an ELF file with 65535 program headers"):
            positions._functions(memory, 0)
    finally:
        os.close(memory)
