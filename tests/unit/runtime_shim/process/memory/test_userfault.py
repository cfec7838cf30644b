"""Memory that is released while a thread of another process comes upon it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from gpusnap.runtime_shim.process.memory import userfault
from gpusnap.runtime_shim.process.memory.userfault import Userfault

PIECE, PIECES, ROUNDS = 4 * mmap.PAGESIZE, 4096, 12
SIZE = PIECE * PIECES
GETFD = 438  # asm-generic/unistd.h, pidfd_getfd

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(userfault.explain_missing()),
    reason="no userfaultfd as it is needed, or not root",
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]


def read_all(file: int, told: Connection) -> None:
    """In the other process: read each byte, in order."""
    mapped = mmap.mmap(file, SIZE, flags=mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    device = os.open(userfault.DEVICE, os.O_RDWR)
    told.send((fcntl.ioctl(device, userfault.NEW, userfault.FLAGS), address))
    told.recv()
    _libc.memchr(address, 7, SIZE)
    told.send("done")


@pytest.fixture
def file() -> Iterator[int]:
    """Of ones."""
    descriptor = os.memfd_create("memory")
    os.truncate(descriptor, SIZE)
    with mmap.mmap(descriptor, SIZE) as mapped:
        mapped[:] = b"\1" * SIZE
    yield descriptor
    os.close(descriptor)


def test_who_comes_while_it_is_released_goes_on(file: int) -> None:
    """The kernel wakes those that wait before it ends their waiting: half of these rounds hung (6.18)."""
    for _ in range(ROUNDS):
        ours, theirs = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            try:
                read_all(file, theirs)
            finally:
                os._exit(0)
        with ExitStack() as stack:
            stack.callback(os.waitpid, child, 0)
            stack.callback(os.kill, child, signal.SIGKILL)
            assert ours.poll(30), "the other process has ended"
            number, address = ours.recv()
            pidfd = os.pidfd_open(child)
            stack.callback(os.close, pidfd)
            found = Userfault(_libc.syscall(GETFD, pidfd, number, 0))
            stack.callback(found.close)
            found.register(address, SIZE)
            ours.send("go")
            for at in range(0, SIZE, PIECE):
                found.release(address + at, PIECE)
            assert ours.poll(30), "a thread still waits for memory that is released"
            ours.close()
            theirs.close()
