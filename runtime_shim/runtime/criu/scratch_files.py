"""What a killed gpusnap leaves: temporary files, and a real runtime that continues.

Both carry the mark of the process that made them, its PID, start time and PID namespace: the files in their
names, and the runtime in the environment, where CRIU_CONFIG_FILE names one of these files. CRIU writes its
title over its environment (criu/setproctitle.c): "criu: restore --rpc -D DIR", where DIR is a directory of
gpusnap with the mark in its name (runtime/criu/images/overlay.py), or "criu: dump --rpc -t PID -D DIR", where
DIR is that of the checkpoint, which has no mark (criu/cr-service.c). The titles of CRIU 4.2 end before " -D";
but CRIU has DIR open. The processes that CRIU makes have this title too, and DIR open, until they have their
own memory back; then they no longer match. Any user can give a process such a title or environment, so it
counts only if the process belongs to gpusnap's own user, or is in a user namespace that this user has made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable

from gpusnap.oci.base.files import exists
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc

# Seconds for the real runtime to finish: CRIU writes or reads the images at the disk's speed.
_PATIENCE = 300.0
# How often a removal is tried, and seconds between two tries.
_TRIES, _PAUSE = 3, 0.05
# The format of `prefix`.
_NAME = compile_later(r"gpusnap-[a-z]+-(\d{1,10})\.(\d{1,20})\.(\d{1,10})-")
_SURE = 40
"""Characters of a path that belong to one container."""
_OWNER = 0xB704  # linux/nsfs.h, NS_GET_OWNER_UID (Linux 4.11)
CONFIG = "CRIU_CONFIG_FILE"
"""criu(8), CONFIGURATION FILES: the environment variable that names one."""


def scratch() -> str:
    """Return the directory for temporary files: /run, which is never full of checkpoints."""
    return "/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()


def find_large() -> str:
    """Return the directory for large temporary files: on a disk."""
    return os.environ.get("TMPDIR") or "/var/tmp"


def prefix(kind: str) -> str:
    """Return the prefix for a file of this process in `scratch()` or `find_large()`; `kind`: its purpose."""
    return f"gpusnap-{kind}-{mark_of(state_files.owner())}-"


def remove_folder(path: str) -> None:
    """Remove a directory with everything in it; try again if the kernel fails for a moment."""
    for _ in range(_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):
            if not exists(path, follow=False):
                return
        time.sleep(_PAUSE)


def children(owner: tuple[int, int], image: str = "") -> tuple[int, ...]:
    """Return the running real runtime that a process of gpusnap called, and its CRIU, by PID.

    `owner`: that process's PID and start time. `image`: the directory of a checkpoint, whose CRIU is returned
    too, whoever called it.
    """
    mark, path = mark_of(owner), os.path.realpath(image) if image else ""
    return tuple(
        pid for pid in proc.pids() if pid != owner[0] and _is_of_our_user(pid) and _has(pid, mark, path)
    )


def _is_of_our_user(pid: int) -> bool:
    """Whether only this user can have made the process. Another user's process could delay gpusnap."""
    us = os.geteuid()
    uids = next(
        (line.split()[1:] for line in proc.lines(f"{proc.PROC}/{pid}/status") if line[:4] == "Uid:"), []
    )
    if all(int(uid) == us for uid in uids):  # the real, the effective, the saved and the file system's
        return bool(uids)
    if proc.namespace(pid, "user") == proc.namespace(os.getpid(), "user"):
        return False
    with contextlib.suppress(OSError):  # it has ended
        space = os.open(f"{proc.PROC}/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = bytearray(4)
            fcntl.ioctl(space, _OWNER, found)
            return bool(struct.unpack("=I", found)[0] == us)
        finally:
            os.close(space)
    return False


def _has(pid: int, mark: str, image: str) -> bool:
    if os.path.basename(proc.environment(pid).get(CONFIG, "")).startswith(f"gpusnap-criu-{mark}-"):
        return True
    title = (proc.command(pid) or ("",))[0]
    if not title.startswith("criu: "):
        return False
    dumps = bool(image) and title.startswith("criu: dump ")
    if dumps:
        # The title is cut off where the environment ended.
        path = title.partition(" -D ")[2]
        if path == image or (len(path) >= _SURE and image.startswith(path)):
            return True
    # The first path only: any process may give itself a title, and one that lists many belongs to nobody.
    folder = f"{scratch()}/gpusnap-images-{mark}-"
    if title.startswith(folder, title.find("/")):
        return True
    return any((dumps and path == image) or path.startswith(folder) for _, path in proc.open_files(pid))


def let_end(
    owner: tuple[int, int], container: str, *, image: str = "", enough: Callable[[], bool] = lambda: False
) -> None:
    """Wait for what a killed process of gpusnap called, or until `enough` returns True.

    `image`: as in `children`. It is not killed: a runtime that is killed in the middle leaves what no command
    removes, and CRIU's processes would be stopped forever. Raises GpusnapError if it takes too long.
    """
    deadline = time.monotonic() + _PATIENCE
    while (left := children(owner, image)) and not enough():
        if time.monotonic() > deadline:
            pids = " ".join(map(str, left))
            raise GpusnapError(
                f"a program that a killed gpusnap started for container {container} is still running: "
                f"process {pids}",
                hint=f"wait for it, or kill {pids}, then run gpusnap recover again",
                code="GPS-020",
            )
        time.sleep(0.02)


def sweep(owner: tuple[int, int]) -> None:
    """Remove the temporary files of an ended process."""
    mark = f"-{mark_of(owner)}-"
    for folder, name in _list_folders():
        if not name.startswith("gpusnap-") or mark not in name:
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):  # another user's, or already gone: both are harmless
            if os.lstat(path).st_uid != os.geteuid():
                continue
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)


def sweep_all() -> None:
    """The same for each ended process that has left no runtime at work that may read them.

    A process that was killed before it recorded its container, or that has nothing to record, as in a
    checkpoint of a suspended container, is known only by these files.
    """
    marks = (found for _, name in _list_folders() if (found := _NAME.match(name)))
    # /run may be shared with another PID namespace, whose processes are not visible.
    space = _read_namespace()
    for owner in {(int(mark[1]), int(mark[2])) for mark in marks if int(mark[3]) == space}:
        with contextlib.suppress(GpusnapError, OSError):  # the next sweep removes them: the caller is done
            if not proc.is_same(*owner) and not children(owner):
                sweep(owner)


def _list_folders() -> list[tuple[str, str]]:
    """Return directories, and the names in each."""
    found: list[tuple[str, str]] = []
    for folder in dict.fromkeys((scratch(), find_large())):
        with contextlib.suppress(OSError):  # the next sweep reads it
            found += [(folder, name) for name in os.listdir(folder)]
    return found


def mark_of(owner: tuple[int, int]) -> str:
    """Return the mark of a process of gpusnap's PID namespace, by its PID and start time."""
    return f"{owner[0]}.{owner[1]}.{_read_namespace()}"


def _read_namespace() -> int:
    """Return gpusnap's PID namespace; 0 if the kernel does not say it."""
    try:
        return proc.own_pid_namespace()
    except OSError:
        return 0
