"""userfaultfd(2): memory of another process that its threads wait for, until we say that it may be read.

A range is registered for two kinds of faults: a page that its file does not have yet (missing), and one that
the file has and the process has not mapped (minor). So whoever touches it waits, however much of the file is
written by then, and whoever writes the file is seen by nobody. A range that is whole and checked is taken out
of the registration, which wakes those that wait in it: from then on its faults are the kernel's own, huge
pages included. UFFDIO_COPY and UFFDIO_CONTINUE would do so page by page, 4 KiB at a time.

What the kernel does in other cases (fs/userfaultfd.c):

- Who waits can be killed, stopped and traced: a fault of the program itself is an interruptible wait.
- When the last descriptor is closed, all ranges lose their registration and all who wait go on, with whatever
  the file has: bytes that are half written, and zeros. No page is made inaccessible. So the process has to be
  ended before, or with us (PTRACE_O_EXITKILL).
- A child by fork has the mapping without the registration; MADV_DONTFORK keeps it from having either.
- A fault of the kernel itself, in a system call of the process, waits as well, except where the descriptor
  was made with UFFD_USER_MODE_ONLY. One without that takes CAP_SYS_PTRACE, which a container lacks, or
  /dev/userfaultfd (Linux 6.1), which we open for it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import suppress

DEVICE = "/dev/userfaultfd"
FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
"""With which a descriptor is made."""
# linux/userfaultfd.h
NEW = 0xAA00
"""ioctl of the device, USERFAULTFD_IOC_NEW: a descriptor for the process that asks."""
_API, _REGISTER, _UNREGISTER, _WAKE = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0x8010AA02
_VERSION, _EVENT_PAGEFAULT = 0xAA, 0x12
_MISSING_SHMEM, _MINOR_SHMEM = 1 << 5, 1 << 10
_MODE_MISSING, _MODE_MINOR = 1 << 0, 1 << 2
_MESSAGE = struct.Struct("=B7xQQI4x")  # struct uffd_msg of a page fault: event, flags, address, thread
_MESSAGES = 64  # that are read at a time


class Userfault:
    """A userfaultfd: of the process that made it, whoever has the descriptor. Methods raise OSError."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor is this object's from now on, also where this raises."""
        self._descriptor = descriptor
        try:
            wanted = struct.pack("=QQQ", _VERSION, _MISSING_SHMEM | _MINOR_SHMEM, 0)
            fcntl.ioctl(descriptor, _API, wanted)  # EINVAL where the kernel cannot do both, before 5.14
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """For poll(2): readable when somebody waits."""
        return self._descriptor

    def register(self, address: int, size: int) -> None:
        """Have whoever touches this range wait; of file mappings of a tmpfs, and whole pages."""
        wanted = struct.pack("=QQQQ", address, size, _MODE_MISSING | _MODE_MINOR, 0)
        fcntl.ioctl(self._descriptor, _REGISTER, wanted)

    def release(self, address: int, size: int) -> None:
        """Let it be read, and wake who waits in it. A part that is not registered any more is passed over.

        Raises ProcessLookupError where the process has ended; EINVAL or ENOMEM where it has unmapped the
        range, and ENOMEM also where the kernel lacks memory; EBADF where another thread has closed this.
        """
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        span = struct.pack("=QQ", address, size)
        fcntl.ioctl(self._descriptor, _UNREGISTER, span)
        # The kernel wakes those that wait, and only then takes the range out (fs/userfaultfd.c,
        # userfaultfd_unregister). A thread whose fault holds the lock of the mapping alone (since Linux 6.9)
        # may begin to wait in between, and would do so for ever. None begins to after it.
        fcntl.ioctl(self._descriptor, _WAKE, span)

    def faults(self) -> Iterator[int]:
        """The addresses that threads wait for, each told once; none where nobody does. Never waits."""
        while True:
            try:
                data = os.read(self._descriptor, _MESSAGES * _MESSAGE.size)
            except BlockingIOError:
                return
            for event, _, address, _ in _MESSAGE.iter_unpack(data):
                if event == _EVENT_PAGEFAULT:
                    yield address

    def close(self) -> None:
        """See above what becomes of those that wait. May be called twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # it is closed all the same
                os.close(descriptor)


def explain_missing() -> str:
    """Why processes of containers have no userfaultfd that serves here; empty where they have."""
    try:
        Userfault(_open_own()).close()
    except FileNotFoundError:
        return f"there is no {DEVICE}, which the kernel has since Linux 6.1 with CONFIG_USERFAULTFD"
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "the kernel does not support userfaultfd minor faults for tmpfs"
        return f"{DEVICE} gives none: {os.strerror(error.errno or errno.EIO)}"
    return ""


def _open_own() -> int:
    """One of this process' own, made as a container's is."""
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return int(fcntl.ioctl(device, NEW, FLAGS))
    finally:
        os.close(device)
