"""userfaultfd(2): memory of another process that its threads wait for, until gpusnap releases it.

A range is registered for two kinds of faults: a page that its file does not have yet (missing), and a page
that the file has but the process has not mapped (minor). So a thread that touches the range waits, however
much of the file is written by then, and no thread sees a page that is being written. When a range is complete
and checked, it is taken out of the registration, which wakes the threads that wait in it. From then on the
kernel handles its faults itself, with huge pages. UFFDIO_COPY and UFFDIO_CONTINUE would do so page by page, 4
KiB at a time.

What the kernel does in other cases (fs/userfaultfd.c):

- A waiting thread can be killed, stopped and traced: a fault of the program itself is an interruptible wait.
- When the last descriptor is closed, all ranges lose their registration and all waiting threads continue,
  with whatever the file contains: data that is half written, and zeros. No page is made inaccessible. So the
  process must be killed before, or together with gpusnap (PTRACE_O_EXITKILL).
- A child by fork has the mapping without the registration; with MADV_DONTFORK it has neither.
- A fault of the kernel itself, in a system call of the process, waits as well, unless the descriptor was made
  with UFFD_USER_MODE_ONLY. A descriptor without that needs CAP_SYS_PTRACE, which a container lacks, or
  /dev/userfaultfd (Linux 6.1), which gpusnap opens for it.
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
"""The flags of a new descriptor."""
# linux/userfaultfd.h
NEW = 0xAA00
"""ioctl of the device, USERFAULTFD_IOC_NEW: makes a descriptor for the calling process."""
_API, _REGISTER, _UNREGISTER, _WAKE = 0xC018AA3F, 0xC020AA00, 0x8010AA01, 0x8010AA02
_VERSION, _EVENT_PAGEFAULT = 0xAA, 0x12
_MISSING_SHMEM, _MINOR_SHMEM = 1 << 5, 1 << 10
_MODE_MISSING, _MODE_MINOR = 1 << 0, 1 << 2
_MESSAGE = struct.Struct("=B7xQQI4x")  # struct uffd_msg of a page fault: event, flags, address, thread
_MESSAGES = 64  # read at a time


class Userfault:
    """A userfaultfd. It belongs to the process that made it, whoever holds it. Methods raise OSError."""

    def __init__(self, descriptor: int) -> None:
        """This object owns the descriptor from now on, even if this raises an exception."""
        self._descriptor = descriptor
        try:
            wanted = struct.pack("=QQQ", _VERSION, _MISSING_SHMEM | _MINOR_SHMEM, 0)
            fcntl.ioctl(descriptor, _API, wanted)  # EINVAL if the kernel cannot do both, before 5.14
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """For poll(2): readable when a thread waits."""
        return self._descriptor

    def register(self, address: int, size: int) -> None:
        """Make threads that touch this range wait; for file mappings of a tmpfs, and whole pages."""
        wanted = struct.pack("=QQQQ", address, size, _MODE_MISSING | _MODE_MINOR, 0)
        fcntl.ioctl(self._descriptor, _REGISTER, wanted)

    def release(self, address: int, size: int) -> None:
        """Make a range readable, and wake its waiting threads. Parts that are not registered are skipped.

        Raises ProcessLookupError if the process has ended; EINVAL or ENOMEM if it has unmapped the range, and
        ENOMEM also if the kernel lacks memory; EBADF if another thread has closed this.
        """
        if self._descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        span = struct.pack("=QQ", address, size)
        fcntl.ioctl(self._descriptor, _UNREGISTER, span)
        # The kernel wakes waiting threads, and only then takes the range out (fs/userfaultfd.c,
        # userfaultfd_unregister). A thread whose fault holds only the lock of the mapping (since Linux 6.9)
        # may begin to wait in between, and would wait forever. After that, no thread begins to wait.
        fcntl.ioctl(self._descriptor, _WAKE, span)

    def faults(self) -> Iterator[int]:
        """Yield the addresses that threads wait for, each once; none if no thread waits. Never waits."""
        while True:
            try:
                data = os.read(self._descriptor, _MESSAGES * _MESSAGE.size)
            except BlockingIOError:
                return
            for event, _, address, _ in _MESSAGE.iter_unpack(data):
                if event == _EVENT_PAGEFAULT:
                    yield address

    def close(self) -> None:
        """Close it; the module says what happens to waiting threads. May be called twice."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with suppress(OSError):  # it is closed in any case
                os.close(descriptor)


def explain_missing() -> str:
    """Say why processes of containers have no usable userfaultfd here; empty if they have one."""
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
    """Make one of this process's own, in the same way as a container's."""
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return int(fcntl.ioctl(device, NEW, FLAGS))
    finally:
        os.close(device)
