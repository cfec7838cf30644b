"""Open files and mappings that CRIU cannot dump, or only with an option."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from gpusnap.doctor.base.check import Check, failure, ok, plural, warning
from gpusnap.doctor.base.sources import join_root, text
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.process.proc import Process

# The anonymous inodes that CRIU dumps (criu/files.c, dump_one_file; pidfd from 4.1 on, bpf-map with libbpf).
_DUMPED = ("eventfd", "eventpoll", "inotify", "fanotify", "signalfd", "timerfd", "pidfd", "bpf-map")
_WORDS = {
    "io_uring": "io_uring, which CRIU cannot dump",
    "perf_event": "performance counters",
    "userfaultfd": "userfaultfd",
    "bpf-prog": "a BPF program",
}
_CURES = {
    "io_uring": "run the program without io_uring (UV_USE_IO_URING=0 for Node.js; asyncio, epoll or threads "
    "for others)",
    "perf_event": "stop the profiler in it",
}
# Character devices that CRIU dumps (criu/files.c, dump_chrdev; criu/tty.c): memory devices, terminals, and
# of the miscellaneous ones tun and autofs. Numbers: Documentation/admin-guide/devices.txt.
_MEMORY, _MISC = 1, 10
_TERMINALS = frozenset({2, 3, 4, 5, *range(128, 144)})
_MISC_DUMPED = frozenset({200, 235})
_DELETED = " (deleted)"
_LOCK = compile_later(r"\d+: (?:POSIX|FLOCK) +\w+ +\w+ +(\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open file of a process."""

    process: Process
    number: int
    target: str
    """The kernel's name for it: /path, socket:[7], anon_inode:[io_uring], /path (deleted)."""
    info: os.stat_result | None
    """None if it is unknown."""

    @property
    def holder(self) -> str:
        """Return a description of the process for messages."""
        return f"process {self.process.pid} ({self.process.comm})"


def list_open_files(processes: Iterable[Process]) -> tuple[OpenFile, ...]:
    """Return every open file of the processes, by process and number; omits files that are closed meanwhile.

    Raises Unanswered if one is on a file system that does not answer.
    """
    found: list[OpenFile] = []
    for process in processes:
        folder = f"/proc/{process.pid}/fd"
        try:
            names = sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)
        except OSError:
            continue
        targets: dict[str, str] = {}
        for name in names:
            with suppress(OSError):
                targets[f"{folder}/{name}"] = os.readlink(f"{folder}/{name}")
        for link, info in question_process.stat_files(process.pid, targets).items():
            known = None if isinstance(info, OSError) else info
            found.append(OpenFile(process, int(link.rpartition("/")[2]), targets[link], known))
    return tuple(found)


def check_anonymous(files: Sequence[OpenFile]) -> Iterator[Check]:
    """Check for io_uring, perf, BPF, userfaultfd and other kernel files that CRIU does not support."""
    found: dict[str, OpenFile] = {}
    for each in files:
        if each.target.startswith("anon_inode:"):
            kind = each.target.removeprefix("anon_inode:").strip("[]")
            if kind not in _DUMPED:
                found.setdefault(kind, each)
    for kind, first in found.items():
        key = next((word for word in _WORDS if kind.startswith(word)), kind)
        what = _WORDS.get(key, f"a kernel file, {kind}")
        says = f"{first.holder} uses {what}" + ("" if "CRIU" in what else ", which CRIU cannot dump")
        yield failure(
            "io_uring" if key == "io_uring" else "kernel files",
            says,
            _CURES.get(key, "stop the program that uses it, or start that program without it"),
            kind=kind,
            pid=first.process.pid,
            descriptor=first.number,
        )
    if not found:
        yield ok("kernel files", "no io_uring, performance counter or other file that CRIU cannot dump")


def check_character_devices(
    files: Sequence[OpenFile], ours: Callable[[str, int], bool] = lambda path, major: False
) -> Iterator[Check]:
    """Check for open device files that CRIU cannot dump; `ours` (path, major): the GPU's, which we handle."""
    found: dict[str, OpenFile] = {}
    for each in files:
        if each.info is None or not stat.S_ISCHR(each.info.st_mode):
            continue
        major, minor = os.major(each.info.st_rdev), os.minor(each.info.st_rdev)
        known = major == _MEMORY or major in _TERMINALS or (major == _MISC and minor in _MISC_DUMPED)
        if not known and not ours(each.target, major):
            found.setdefault(each.target, each)
    for path, first in found.items():
        yield failure(
            "open devices",
            f"{first.holder} has {path} open, a device that CRIU cannot dump",
            "stop the program that uses it, or start that program without it",
            path=path,
            pid=first.process.pid,
            descriptor=first.number,
        )


def check_deleted(
    processes: Iterable[Process], files: Sequence[OpenFile], limit: int, root: str = "/"
) -> Iterator[Check]:
    """Check deleted files that are open or mapped and larger than criu.ghost-limit, which CRIU refuses."""
    sizes: dict[tuple[int, int], tuple[str, int, Process]] = {}
    for each in files:
        if each.info is not None and _is_ghost(each.target, each.info):
            key = each.info.st_dev, each.info.st_ino
            sizes[key] = each.target.removesuffix(_DELETED), each.info.st_blocks * 512, each.process
    for process in processes:
        paths = dict(_list_deleted_mappings(process, root))
        for link, info in question_process.stat_files(process.pid, paths).items():
            path = paths[link]
            if not isinstance(info, OSError) and _is_ghost(path, info):
                sizes.setdefault(
                    (info.st_dev, info.st_ino), (path.removesuffix(_DELETED), info.st_blocks * 512, process)
                )
    large = sorted((each for each in sizes.values() if each[1] > limit), key=lambda each: -each[1])
    for path, size, process in large:
        yield failure(
            "deleted files",
            f"process {process.pid} ({process.comm}) has the deleted file {path} open, {human(size)}; "
            f"CRIU includes deleted files up to {human(limit)}",
            f"raise criu.ghost-limit above {human(size)}, in the settings or as an annotation",
            path=path,
            size=size,
            limit=limit,
        )
    if not large:
        total = sum(size for _, size, _ in sizes.values())
        count = plural(len(sizes), "deleted file")
        says = f"{count} with {human(total)}, within the limit" if sizes else "none is open or mapped"
        yield ok("deleted files", says, count=len(sizes), size=total, limit=limit)


def _is_ghost(path: str, info: os.stat_result) -> bool:
    """Return whether it is a regular file without a name. A memfd is no ghost to CRIU (criu/memfd.c)."""
    return stat.S_ISREG(info.st_mode) and info.st_nlink == 0 and not path.startswith(("/memfd:", "/SYSV"))


def _list_deleted_mappings(process: Process, root: str) -> Iterator[tuple[str, str]]:
    """Yield (link in map_files, path) of each mapping of a deleted file."""
    seen: set[str] = set()
    for line in (text(root, f"/proc/{process.pid}/maps") or "").split("\n"):
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/") and fields[5].endswith(_DELETED):
            if fields[5] in seen:
                continue
            seen.add(fields[5])
            start, _, end = fields[0].partition("-")
            name = f"{int(start, 16):x}-{int(end, 16):x}"
            yield join_root(root, f"/proc/{process.pid}/map_files/{name}"), fields[5]


def check_watches(files: Sequence[OpenFile], root: str = "/") -> Iterator[Check]:
    """Check inotify watches on files of the container's own overlay: CRIU cannot open those by their handles.

    It searches for them in a few folders (criu/irmap.c, /etc among them) and in those of an option. Only
    inotify is checked; proc_pid_fdinfo(5).
    """
    found: dict[int, tuple[OpenFile, int]] = {}
    tops: dict[int, int] = {}
    for each in files:
        if each.target != "anon_inode:inotify" and each.target != "anon_inode:[inotify]":
            continue
        pid = each.process.pid
        if pid not in tops:
            tops[pid] = _overlay(pid, root)
        said = text(root, f"/proc/{pid}/fdinfo/{each.number}") or ""
        devices = [int(device, 16) for device in re.findall(r"^inotify wd:.* sdev:([0-9a-f]+) ", said, re.M)]
        count = sum(device == tops[pid] for device in devices)
        if count and tops[pid]:
            found[pid] = each, count
    for first, count in found.values():
        yield warning(
            "inotify",
            f"{first.holder} watches {plural(count, 'file')} of the container with inotify; CRIU may not "
            "find them again",
            'tell CRIU the directories, in the settings: criu.options = ["irmap-scan-path /FOLDER"]; or '
            "watch files in a volume",
            pid=first.process.pid,
            watches=count,
        )
    if not found:
        yield ok("inotify", "no inotify watch that CRIU cannot restore")


def _overlay(pid: int, root: str) -> int:
    """Return the device number of a process's root overlay, as in fdinfo; 0 if it is no overlay."""
    for line in (text(root, f"/proc/{pid}/mountinfo") or "").split("\n"):
        words = line.split(" ")
        if len(words) > 5 and words[4] == "/" and " - overlay " in line:
            major, _, minor = words[2].partition(":")
            return int(major) << 20 | int(minor)
    return 0


def check_shared_memory(
    processes: Iterable[Process], namespaces: Mapping[int, str], own: str, root: str = "/"
) -> Iterator[Check]:
    """Check System V shared memory of the host: CRIU dumps it only together with its IPC namespace.

    `namespaces`: by PID, the content of /proc/PID/ns/ipc; `own`: the host's.
    """
    for process in processes:
        maps = text(root, f"/proc/{process.pid}/maps") or ""
        if re.search(r" /SYSV[0-9a-f]{8}", maps) and own and namespaces.get(process.pid) == own:
            yield failure(
                "System V memory",
                f"process {process.pid} ({process.comm}) uses System V shared memory of the host, which "
                "CRIU dumps only together with an IPC namespace",
                "run the container without --ipc=host",
                pid=process.pid,
            )
            return


def check_locks(files: Sequence[OpenFile], root: str = "/", driver: Iterable[str] = ()) -> Iterator[Check]:
    """Check file locks, which CRIU dumps only with an option (proc_locks(5)).

    `driver`: files and folders of the GPU's driver. It releases its own locks on those when it is suspended,
    before CRIU's dump.
    """
    found = {}
    by_inode = {
        (each.process.pid, each.info.st_dev, each.info.st_ino): each
        for each in files
        if each.info is not None and not any(f"{each.target}/".startswith(f"{own}/") for own in driver)
    }
    for line in (text(root, "/proc/locks") or "").splitlines():
        match = _LOCK.match(line)
        if match is None:  # one that waits, or a lease
            continue
        device = os.makedev(int(match[2], 16), int(match[3], 16))
        key = int(match[1]), device, int(match[4])
        if key in by_inode:
            found[key] = by_inode[key]
    held = [{"pid": each.process.pid, "path": each.target} for each in found.values()]
    if not found:
        yield ok("file locks", "none", locks=held)
        return
    first = next(iter(found.values()))
    others = f" ({len(found) - 1} more are held)" if len(found) > 1 else ""
    yield warning(
        "file locks",
        f"{first.holder} holds a lock on {first.target}{others}, which CRIU dumps only with --file-locks",
        "checkpoint with --file-locks",
        locks=held,
    )
