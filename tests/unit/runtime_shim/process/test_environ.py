"""The environment that a process has now, read from outside."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpusnap.runtime_shim.process import environ as live_environ
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.environ import live_environment

CHANGE = """
import os, sys
os.environ["ADDED"] = "new=er"
os.environ["CHANGED"] = "x" * 9000
del os.environ["GONE"]
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def program(*argv: str, **environment: str) -> Iterator[int]:
    """A program that is ready once it has written a line; it ends with its stdin."""
    running = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    with running:
        assert running.stdout
        assert running.stdin
        running.stdout.readline()
        yield running.pid
        running.stdin.close()


@pytest.mark.parametrize("python", sorted({os.path.realpath(sys.executable), "/usr/bin/python3"}))
def test_what_a_program_changed(python: str) -> None:
    """As the program has it, whether the one that counts is libc's or the program's own (Debian's Python)."""
    if not os.path.exists(python):
        pytest.skip(f"there is no {python}")
    with program(python, "-c", CHANGE, CHANGED="before", GONE="1", KEPT="ä") as pid:
        found = live_environment(pid)
    assert found is not None
    assert (found["ADDED"], found["CHANGED"], found["KEPT"]) == ("new=er", "x" * 9000, "ä")
    assert "GONE" not in found


def test_a_libc_of_an_older_name(tmp_path: Path) -> None:
    """glibc's file was called libc-2.31.so and the like until 2.34; libc.so.6 was a link to it."""
    own = next((each[5] for each in proc.named_mappings(os.getpid()) if each[5].endswith("/libc.so.6")), None)
    if own is None:
        pytest.skip("Python here has no glibc from 2.34 on")
    shutil.copy(own, tmp_path / "libc-2.31.so")
    (tmp_path / "libc.so.6").symlink_to("libc-2.31.so")
    where = str(tmp_path)
    with program(os.path.realpath(sys.executable), "-c", CHANGE, LD_LIBRARY_PATH=where, GONE="1") as pid:
        assert f"{where}/libc-2.31.so" in proc.maps(pid)
        found = live_environment(pid)
    assert found is not None
    assert (found["ADDED"], "GONE" in found) == ("new=er", False)


MAPS = """
import mmap, sys
held = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
print(flush=True)
sys.stdin.read()
"""


def test_names_that_end_lines(tmp_path: Path) -> None:
    """A container may have mapped files of any name: what Python takes for the end of a line is none."""
    paths = [tmp_path / name for name in ("a\x0cb", "a\u2028b", "a\x1cb\x85", "a\rb", "a\nb")]
    for path in paths:
        path.write_text("x")
    with program(sys.executable, "-c", MAPS, *map(str, paths), KEPT="1") as pid:
        found = live_environment(pid)
    assert found is not None
    assert found["KEPT"] == "1"


def elf(*sections: tuple[int, int, int, int], size: int = 64) -> bytes:
    """The headers of a library with sections of (type, offset, size, link), and what follows of them."""
    head = struct.pack(
        "<16sHHIQQQIHHHHHH", b"\x7fELF\2\1", 3, 62, 1, 0, 0, 64, 0, 64, 0, 0, 64, len(sections), 0
    )
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, offset, length, link, 0, 8, 24)
        for kind, offset, length, link in sections
    )
    return (head + table).ljust(size, b"\0")


STRINGS, SYMBOLS = 3, 11


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF\1" + bytes(100),
        elf((SYMBOLS, 0, 24, 7)),
        elf((SYMBOLS, 0, 1 << 40, 1), (STRINGS, 0, 8, 0)),
        elf((SYMBOLS, 0, 24, 1), (STRINGS, 0, 1 << 40, 0)),
        elf((SYMBOLS, 1 << 63, 24, 1), (STRINGS, 1 << 63, 8, 0)),
        elf((SYMBOLS, 1 << 20, 24, 1), (STRINGS, 0, 8, 0)),
        elf((STRINGS, 0, 8, 0))[:70],
    ],
)
def test_a_libc_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Cut off, of other bits, or with numbers that lead out of it: nothing is said, and nothing breaks."""
    path = tmp_path / "libc.so.6"
    path.write_bytes(data)
    real = os.open

    def instead(name: str, flags: int) -> int:
        return real(path if "/map_files/" in name else name, flags)

    with program("/bin/sh", "-c", "echo; read line") as pid:
        monkeypatch.setattr(os, "open", instead)
        assert live_environment(pid) is None


def test_an_endless_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than anybody has is not gathered."""
    monkeypatch.setattr(live_environ, "_ALL", 100)
    with program("/bin/sh", "-c", "echo; read line", LARGE="x" * 100) as pid:
        assert live_environment(pid) is None


def test_an_empty_environment() -> None:
    """None at all is told from one that cannot be read."""
    with program("/bin/sh", "-c", "unset PWD OLDPWD SHLVL _; echo; read line") as pid:
        assert live_environment(pid) is not None


def test_processes_without_one() -> None:
    """A PID that is nobody's, and a kernel thread."""
    assert live_environment(1 << 22) is None
    assert live_environment(2) is None
