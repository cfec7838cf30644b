"""Files outside a checkpoint that its processes have open: syncs what they have written to disk.

A checkpoint does not contain a directory of the host that is mounted into the container. CRIU opens the files
there by their names, and compares their sizes (criu, files-reg.c, validate_file). What a process has written
may be only in the page cache for half a minute. If the host loses power then, such a file has another size,
or no name, and the checkpoint cannot be restored. So these files are on disk before the checkpoint is.

They are synced in a child process, because a file system may not answer. An error is noted, and the
checkpoint goes on: it is of use as long as the host does not crash.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.deadlines import PATIENCE
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, reason
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.open_files import OpenFile, list_open
from gpusnap.runtime_shim.runtime.container_files import directory

# Seconds for all files while the container runs: it may have filled the page cache for a slow disk. Before it
# is stopped, a checkpoint that ends it may have to be done soon, such as before a preemption.
_PATIENCE, _AHEAD = 120.0, 30.0
# A file that was changed so many seconds ago is on disk, unless it is still open for writing: the kernel
# writes after half a minute (Documentation/admin-guide/sysctl/vm.rst, dirty_expire_centisecs).
_RECENT = 3600.0
# The clocks of file servers may be behind by so much.
_SKEW = 60.0
# fsync(2): the file system has nothing to sync. directory: a name is a link by now.
_NOTHING_TO_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTDIR, errno.ELOOP}
_PATH = os.O_PATH | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def prepare(init: int) -> None:
    """Import what `sync` needs where it is done: after the dump, an upgrade may have replaced the files."""
    _ask(init, tuple, 0.0, within=PATIENCE)


def sync_ahead(init: int, list_processes: Callable[[], Sequence[proc.Process]]) -> float:
    """While the container runs: sync most of it, so that `sync` takes no time while it is stopped.

    Return since when something may have changed, for `sync`.
    """
    begun = time.time()
    return 0.0 if _ask(init, list_processes, 0.0, within=_AHEAD) else begun  # `sync` notes what failed


def sync(
    init: int, list_processes: Callable[[], Sequence[proc.Process]], since: float = 0.0, *, stopped: bool
) -> None:
    """Sync the files that the processes have open or mapped; a note says which are not on disk.

    `init`: the PID of the container's first process. `since`: when `sync_ahead` began. `stopped`: the
    container is stopped, so there is less time for it. No checkpoint fails for it: a container that runs on
    may have ended by now.
    """
    failed = _ask(init, list_processes, since, within=PATIENCE if stopped else _PATIENCE)
    if failed:
        what, why = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        note(
            f"{what}{more} cannot be flushed to disk: {why}; if this host crashes before that is on disk, "
            "the checkpoint may not be restored",
            code="GPS-525",
        )


def _ask(
    init: int, list_processes: Callable[[], Sequence[proc.Process]], since: float, *, within: float
) -> list[tuple[str, str]]:
    """Return what could not be synced, and why."""
    try:
        pids = tuple(process.pid for process in list_processes())
        return question_process.ask(init, "its open files", _sync_all, pids, since, within=within)
    except Interrupted:
        raise
    except (GpusnapError, ImportError, OSError) as error:
        return [("what the container has written to its open files", str(error))]


def _sync_all(pids: Sequence[int], since: float) -> list[tuple[str, str]]:
    """Return the names of files that could not be synced, and why."""
    syncing = _Syncing(max(since - _SKEW, time.time() - _RECENT))
    for pid in pids:
        with suppress(OSError):  # it has ended
            for each in list_open(pid):
                with suppress(FileNotFoundError):  # it was closed
                    syncing.sync(each)
            for name in proc.unix_sockets(pid):  # CRIU binds them anew, in their directory
                syncing.sync_names(pid, name)
    return syncing.failed


class _Syncing:
    """What was synced, each file and directory once.

    `since`: what was changed before, and is not open for writing, is on disk.
    """

    def __init__(self, since: float) -> None:
        self.failed: list[tuple[str, str]] = []
        self._since = since
        self._done: set[tuple[int, int]] = set()
        self._names: set[tuple[int, str]] = set()

    def sync(self, file: OpenFile) -> None:
        """Sync a file, and its name. Raises FileNotFoundError."""
        recent = False
        with self._note_failure(file.path):
            found = os.open(file.link, _PATH)  # a process that runs may open something else under this number
            try:
                info = os.fstat(found)
                # CRIU saves a file without a name itself.
                recent = info.st_nlink > 0 and self._is_recent(info)
                wanted = recent or (info.st_nlink > 0 and file.is_writable())
                if stat.S_ISREG(info.st_mode) and wanted and self._is_new(info):
                    _sync_and_close(os.open(f"/proc/self/fd/{found}", _FILE))
            finally:
                os.close(found)
        if recent:
            self.sync_names(file.pid, file.path)

    def sync_names(self, pid: int, target: str) -> None:
        """Sync the directories above a path of a process, which may be new; if there are none, nothing."""
        path = target
        while (path := os.path.dirname(path)).strip("/") and (pid, path) not in self._names:
            self._names.add((pid, path))
            with self._note_failure(path), suppress(FileNotFoundError), directory(pid, path) as folder:
                info = os.fstat(folder)
                if self._is_recent(info) and self._is_new(info):
                    _sync_and_close(os.open(".", _FOLDER, dir_fd=folder))

    def _is_recent(self, info: os.stat_result) -> bool:
        return max(info.st_mtime, info.st_ctime) > self._since

    def _is_new(self, info: os.stat_result) -> bool:
        key = info.st_dev, info.st_ino
        new = key not in self._done
        self._done.add(key)
        return new

    @contextmanager
    def _note_failure(self, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno not in _NOTHING_TO_SYNC:
                self.failed.append((what, reason(error)))


def _sync_and_close(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
