"""Copies between two processes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_target import MIB, Target, smaps

from gpusnap.oci.chunks.buffers import is_zero
from gpusnap.runtime_shim.process.memory import copy as copies

ROOT = Path(__file__).parents[5]
SIZE = 5 * MIB + 4096


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with Target() as found:
        yield found


@pytest.fixture(scope="module")
def address(target: Target) -> int:
    """Memory of the target, with nothing mapped behind it."""
    found = target.number(f"new({SIZE + 4096})")
    assert target.number(f"libc.munmap(ctypes.c_void_p({found + SIZE}), 4096)") == 0
    return found


@pytest.mark.parametrize("threads", [0, 1, 2, 7])
@pytest.mark.parametrize("piece", [4096, MIB - 1, 1 << 30])
def test_there_and_back(target: Target, address: int, threads: int, piece: int) -> None:
    """Every byte arrives, whatever the number of threads and the size of a piece."""
    data = os.urandom(SIZE)
    copies.write(target.pid, address, data, threads=threads, piece=piece)
    assert target.ask(f"hash(ctypes.string_at({address + 77}, 99)) == hash({data[77:176]!r})") == "True"
    into = bytearray(SIZE)
    copies.read(target.pid, address, into, threads=threads, piece=piece)
    assert into == data


def test_parts_and_kinds_of_buffers(target: Target, address: int) -> None:
    """A part of a buffer, a mapping, something that is read-only; nothing beside it is touched."""
    copies.write(target.pid, address, bytes(3 * 4096))
    copies.write(target.pid, address + 1, memoryview(b"-abc-")[1:4])
    with mmap.mmap(-1, 4096) as into:
        copies.read(target.pid, address, memoryview(into)[8:16])
        assert into[:20] == bytes(9) + b"abc" + bytes(8)
        copies.write(target.pid, address + 4096, into)
    two = bytearray(2)
    copies.read(target.pid, address + 4096 + 9, two)
    assert two == b"ab"
    copies.read(target.pid, 0, bytearray())
    with pytest.raises(BufferError):
        copies.read(target.pid, address, bytes(5))
    with pytest.raises(BufferError):
        copies.write(target.pid, address, memoryview(b"abcdef")[::2])


@pytest.mark.parametrize("threads", [1, 2])
def test_what_cannot_be_copied(target: Target, address: int, threads: int) -> None:
    """The error names the process and the first address that is not there; what is before it was copied."""
    copies.write(target.pid, address + SIZE - 10, b"0123456789")
    into = bytearray(8192)
    with pytest.raises(
        OSError, match=f"process_vm_readv of process {target.pid} at {address + SIZE:#x}"
    ) as caught:
        copies.read(target.pid, address + SIZE - 10, into, threads=threads)
    assert caught.value.errno == errno.EFAULT
    assert into[:10] == b"0123456789"
    with pytest.raises(OSError, match="process_vm_writev"):
        copies.write(target.pid, address + SIZE - 10, into, threads=threads, piece=4096)
    with Target() as gone:
        pass
    with pytest.raises(ProcessLookupError, match=f"process {gone.pid}"):
        copies.read(gone.pid, address, into, threads=threads)


def test_no_thread_is_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that says so, at once; when there are threads again, the work is done."""
    monkeypatch.setattr(copies._Pool, "threads", None)
    started, real = [0], threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started[0] += 1
        if started[0] > 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(copies, "cores", lambda: 3)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(OSError, match="no thread for copies"):
            copies.run_jobs([lambda: None] * 3, 3)
    done: list[int] = []
    copies.run_jobs([lambda: done.append(1)] * 3, 3)
    assert done == [1, 1, 1]


def test_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waiting is not begun, and what is under way has ended when the error comes."""
    begun, failing = threading.Event(), threading.Event()
    done: list[int] = []

    def bad() -> None:
        begun.wait(60)
        failing.set()
        raise OSError("bad")

    def good() -> None:
        begun.set()
        failing.wait(60)
        done.append(1)

    waiting = deque([bad, good])
    begun.set()
    with pytest.raises(OSError, match="bad"):
        copies._drain(waiting)
    assert not waiting
    assert not done
    begun.clear()
    failing.clear()
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(copies, "_pool", lambda: pool)
        with pytest.raises(OSError, match="bad"):
            copies.run_jobs([bad, good], 2)
    assert done == [1]


FORK = """
import ctypes, os, sys, warnings
from gpusnap.runtime_shim.process.memory import copy as copies
warnings.simplefilter("ignore")
copies.cores = lambda: 2
here = ctypes.create_string_buffer(b"here" * 4096)
def look():
    into = bytearray(16384)
    copies.read(os.getpid(), ctypes.addressof(here), into, piece=4096)
    return into == here.raw[:16384]
if not look():
    sys.exit("parent")
child = os.fork()
if not child:
    os._exit(0 if look() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_has_threads_of_its_own() -> None:
    """A child by fork does not wait for its parent's threads."""
    subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, check=True, timeout=20)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("skew", [0, 3])
def test_touch_small_pages(target: Target, threads: int, skew: int) -> None:
    """A page each: all of the memory is there, and all of it is zero."""
    size = 9 * MIB
    found = target.number(f"new({size})")
    assert target.number(f"libc.madvise(ctypes.c_void_p({found}), {size}, 15)") == 0  # no huge pages
    copies.touch(target.pid, found + skew, size - skew, threads=threads, step=4096)
    assert resident(target, found, size) == size
    into = bytearray(size)
    copies.read(target.pid, found, into)
    assert is_zero(memoryview(into))


def test_touch_huge_pages(target: Target) -> None:
    """One byte in each is enough, the ragged ends included."""
    size = 21 * MIB
    found = target.number(f"new({size})")
    if target.number(f"libc.madvise(ctypes.c_void_p({found}), {size}, 14)") != 0:
        pytest.skip("this kernel has no huge pages")
    start = found + 4096
    copies.touch(target.pid, start, size - 4096)
    if int(smaps(target.pid, found + 4 * MIB)["AnonHugePages"][0]) == 0:
        pytest.skip("no huge pages are to be had here")
    assert resident(target, found, size) >= 16 * MIB
    assert resident(target, start, 4096) == 4096


def test_touch_what_is_not_there(target: Target, address: int) -> None:
    """The error names the first address that is not."""
    with pytest.raises(OSError, match=f"{address + SIZE:#x}"):
        copies.touch(target.pid, address + SIZE - 8192, 16384, step=4096)
    with pytest.raises(OSError, match="0x1000"):
        copies.touch(target.pid, 4096, 4096, step=4096)


def resident(target: Target, address: int, size: int) -> int:
    """Bytes of a part of the target's memory that are there (pagemap, bit 63)."""
    pages = -(-size // 4096)
    with open(f"/proc/{target.pid}/pagemap", "rb") as file:
        file.seek(address // 4096 * 8)
        words = memoryview(file.read(8 * pages)).cast("Q")
    return 4096 * sum(word >> 63 for word in words)


def test_the_view_of_a_buffer() -> None:
    """The structure is Python's own: the address is where the bytes are."""
    data = bytearray(b"here")
    with copies._memory(data, 1) as (at, size):
        assert ctypes.string_at(at, size) == b"here"
        with pytest.raises(BufferError):
            data.append(1)
    data.append(1)
