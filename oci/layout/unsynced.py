"""Keeps track of files that were written but not synced, each with the descriptor that wrote it.

Linux reports a writeback error once to each descriptor that was open when the pages failed (fsync(2);
lib/errseq.c), and considers these pages clean afterwards. So a descriptor that is opened later may get no
error, and a second fsync succeeds without having written anything. Hence the rules:

- The descriptor that wrote a file stays open until its fsync.
- There are never more than `most` of them: adding one more first syncs the oldest. Such an fsync waits for
  the journal of the file system, and so for the writes of other processes: 30 ms for each file on a busy
  disk. At the end, when the kernel has already written the pages, syncing many files at once is quick. So
  `most` is as large as the limit on descriptors allows.
- A file whose fsync has failed does not count as synced until it is written again, even if a later fsync
  succeeds.

The kernel is told to begin to write each file when it is noted. By default it begins only when a tenth of the
memory is dirty or half a minute has passed (Documentation/admin-guide/sysctl/vm.rst). The disk would be idle
until then, although its speed decides how long a checkpoint takes.

An error of that counts as one of the fsync, which may not repeat it: if ext4 finds no blocks for the data, it
drops the pages, and reports that only to the caller that was writing them (fs/ext4/inode.c,
mpage_map_and_submit_extent). The fsync then succeeds on a file of zeros.

syncfs(2) would need only one descriptor, but it waits for the writes of all processes to that file system,
and fails if one of these fails.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import cache

from gpusnap.oci.base.threads import run_for_each

MOST = 4096
# One directory may use one part in this many of the process' descriptors.
_PART = 4
# linux/fs.h, SYNC_FILE_RANGE_WRITE
_WRITE = 2
# No more descriptors can be opened, by this process or on this host.
_NONE_LEFT = {errno.EMFILE, errno.ENFILE}
# The kernel has begun to write the file, or a part of it, or has not begun because there is no such call or
# no memory: the fsync writes the rest.
_NOT_LOST = {
    0,
    errno.ENOSYS,
    errno.EPERM,
    errno.EINVAL,
    errno.ESPIPE,
    errno.EOPNOTSUPP,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EINTR,
}


class Unsynced:
    """The unsynced files of one directory, by name. Threads may share it."""

    def __init__(self, *, most: int = 0) -> None:
        """`most`: the number of descriptors; by default a part of this process' limit."""
        self._most = most or count_descriptors()
        self._lock = threading.Lock()
        # Oldest first. Two descriptors have the same name if a file replaced another one.
        self._open: list[tuple[str, int]] = []
        self._found: set[str] = set()
        self._failed: dict[str, OSError] = {}
        # The number of failures before each of them, and in total.
        self._failed_at: dict[str, int] = {}
        self._failures = 0
        # The file that an fsync made durable, by name: device, inode, time of the last write.
        self._durable: dict[str, tuple[int, int, int]] = {}

    def __del__(self) -> None:
        self.close()

    def count_failures(self) -> int:
        """Return the number of failures so far, for `note_written`; call it before the file gets its name."""
        with self._lock:
            return self._failures

    def note_written(self, name: str, descriptor: int, *, failures: int | None = None) -> None:
        """Record that this descriptor, which the caller owns, wrote the file.

        `failures`: from `count_failures`, before the file got its name. A later failure may be that of a file
        with which another thread has replaced this one, so it still counts. Without `failures`, all count.
        Raises OSError of an fsync, or of the writeback that this starts.
        """
        try:
            own = os.dup(descriptor)
        except OSError as error:
            if error.errno not in _NONE_LEFT:
                raise
            self._forget_failure(name, failures)
            self._sync(name, descriptor)
            return
        try:
            _start_writeback(own)
        except OSError as error:
            os.close(own)
            raise self._note_failure(name, error) from error
        self._forget_failure(name, failures)
        with self._lock:
            self._durable.pop(name, None)
            self._found.discard(name)
            self._open.append((name, own))
            oldest = self._open.pop(0) if len(self._open) > self._most else None
        if oldest is not None:
            self._sync_and_close(oldest)

    def note_existing(self, name: str, status: os.stat_result | None = None) -> None:
        """Record that the file existed already: its writer may have been killed before it synced the file.

        `status`: that of the file, if known. A file that was made durable here is skipped.
        """
        with self._lock:
            if status is None or self._durable.get(name) != _identify(status):
                self._found.add(name)

    def sync(
        self,
        opened: Callable[[str], int],
        *,
        threads: int,
        names: Collection[str] | None = None,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        """Sync the files, or only those in `names`. `opened` returns a new descriptor of an existing file.

        `progress`: called by the threads after each file; what it raises ends them.
        Raises OSError, whose `filename` is the name, and what `opened` raises. Files that were not synced
        stay in this object.
        """
        with self._lock:
            wanted = [each for each in self._open if names is None or each[0] in names]
            self._open = [] if names is None else [each for each in self._open if each[0] not in names]
            written = {name for name, _ in wanted}
            found = [name for name in self._found if (names is None or name in names) and name not in written]
            for name, error in self._failed.items():
                if names is None or name in names:
                    self._open = wanted + self._open
                    raise error
        left = set(wanted)

        def written_one(each: tuple[str, int]) -> None:
            with self._lock:
                left.discard(each)
            self._sync_and_close(each)
            progress()

        def found_one(name: str) -> None:
            descriptor = opened(name)
            self._sync_and_close((name, descriptor))
            with self._lock:
                self._found.discard(name)
            progress()

        try:
            run_for_each(wanted, written_one, threads=min(threads, len(wanted)))
            run_for_each(found, found_one, threads=min(threads, len(found)))
        finally:
            with self._lock:
                self._open = [each for each in wanted if each in left] + self._open
                self._found -= written

    def hand_over(self, name: str, to: Unsynced) -> None:
        """Let another object sync that file. Raises OSError if an fsync fails, or has failed before."""
        with self._lock:
            mine = [descriptor for each, descriptor in self._open if each == name]
            self._open = [each for each in self._open if each[0] != name]
            failed = self._failed.get(name)
        try:
            if failed is not None:
                raise to._note_failure(name, failed)
            for descriptor in mine:
                to.note_written(name, descriptor)
        finally:
            for descriptor in mine:
                with suppress(OSError):
                    os.close(descriptor)

    def list_failed(self) -> frozenset[str]:
        """Return the names of files whose fsync failed, and that were not written again."""
        with self._lock:
            return frozenset(self._failed)

    def close(self) -> None:
        """Close all descriptors without a sync. May be called twice."""
        with self._lock:
            waiting, self._open = self._open, []
            self._found.clear()
        for _, descriptor in waiting:
            with suppress(OSError):
                os.close(descriptor)

    def _sync_and_close(self, each: tuple[str, int]) -> None:
        name, descriptor = each
        try:
            self._sync(name, descriptor)
        finally:
            with suppress(OSError):  # an error of NFS, which fsync has already reported
                os.close(descriptor)

    def _sync(self, name: str, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise self._note_failure(name, error) from error
        with suppress(OSError):  # without a record, the file is only synced once more
            durable = _identify(os.fstat(descriptor))
            with self._lock:
                self._durable[name] = durable

    def _note_failure(self, name: str, error: OSError) -> OSError:
        """Record that the file is not synced until it is written again; return the error to raise."""
        failure = OSError(error.errno, error.strerror, name)
        with self._lock:
            self._failed[name] = failure
            self._failed_at[name] = self._failures
            self._failures += 1
            self._durable.pop(name, None)
        return failure

    def _forget_failure(self, name: str, failures: int | None) -> None:
        """Forget the failure of a file that was written again, if it is one of the first `failures`."""
        with self._lock:
            if failures is not None and self._failed_at.get(name, failures) < failures:
                self._failed.pop(name, None)
                self._failed_at.pop(name, None)


def _start_writeback(descriptor: int) -> None:
    """Tell the kernel to begin to write a file; this only waits for room in the disk's queue.

    Raises OSError if data was lost, but not if the system has no sync_file_range(2).
    """
    number = _begin_writing()(descriptor)
    if number not in _NOT_LOST:
        raise OSError(number, os.strerror(number))


@cache
def _begin_writing() -> Callable[[int], int]:
    """Return a function that calls sync_file_range(2) for a descriptor, and returns its errno or 0."""
    import ctypes  # a command that writes nothing does not need it

    call = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    if call is None:  # a C library without it
        return lambda _: errno.ENOSYS
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def begin(descriptor: int) -> int:
        return ctypes.get_errno() if call(descriptor, 0, 0, _WRITE) else 0

    return begin


def count_descriptors() -> int:
    """Return how many files may wait for their fsync: setrlimit(2), RLIMIT_NOFILE."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft // _PART))


def _identify(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns
