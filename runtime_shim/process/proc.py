"""Processes in /proc: proc(5) and its pages proc_pid_stat(5), proc_pid_status(5), cgroups(7).

A process may end at any moment. Every function here then returns None or an empty value, and raises no error.
If the kernel cannot answer, that does not mean that the process has ended: GpusnapError.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from signal import SIGKILL, SIGSTOP
from typing import TypeVar

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError, reason

_T = TypeVar("_T")

PROC = "/proc"
PASSING = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.EIO))
"""Errors of the kernel that are temporary, and do not concern the process."""
# Seconds to ask again, and between two tries.
_PATIENCE, _PAUSE = 2.0, 0.01
# include/linux/sched.h, PF_EXITING and PF_KTHREAD; field 9 of proc_pid_stat(5)
_EXITING, _KERNEL_THREAD = 0x4, 0x200000
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was seen; `start` distinguishes it from a later one with the same PID."""

    pid: int
    """In the PID namespace of gpusnap."""
    ns_pids: tuple[int, ...]
    """In each PID namespace from gpusnap's down to its own (NSpid of proc_pid_status(5))."""
    comm: str
    command: tuple[str, ...]
    start: int
    """Clock ticks after boot (proc_pid_stat(5), field 22)."""


def _read(path: str) -> str | None:
    """Read a file of /proc; None if there is none, or access is denied. Raises GpusnapError."""
    return _answer(path, _content)


def _read_memory(path: str) -> str | None:
    """Like `_read`, for a file that needs the process's memory: the kernel may wait there."""
    from gpusnap.runtime_shim.base import deadlines  # starts threads, which not every caller needs

    try:
        return _answer(path, lambda path: deadlines.ask(lambda: _content(path), path))
    except TimeoutError as error:
        raise GpusnapError(
            f"{path} cannot be read: {error.strerror}",
            hint="the process is blocked on a file system that does not respond: end the process, or "
            "fix that file system",
            code="GPS-225",
        ) from error


def _names(path: str) -> list[str]:
    """Return the names in a directory of /proc; none if it is gone. Raises GpusnapError."""
    return _answer(path, os.listdir) or []


def _content(path: str) -> str:
    # A buffered file would take three times as long, and one inspection of a container reads hundreds.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, _PIECE):
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def _answer(path: str, ask: Callable[[str], _T]) -> _T | None:
    """Return the kernel's answer for a path; None if the file is gone, or access is denied.

    Nothing else counts as gone: a kernel that lacks memory or descriptors for a moment is asked again. Raises
    GpusnapError if it still fails.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return ask(path)
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            if error.errno not in PASSING:
                return None
            if time.monotonic() > deadline:
                raise GpusnapError(
                    f"{path} cannot be read: {reason(error)}",
                    hint="free memory or close files, then try again",
                    code="GPS-004",
                ) from error
        time.sleep(_PAUSE)


def _lines(text: str) -> list[str]:
    """Split a file of /proc into lines. The kernel escapes a newline in a name, but no other line separator.

    str.splitlines would also split at form feeds and line separators (U+2028), which any name may contain.
    """
    return text.removesuffix("\n").split("\n") if text else []


def lines(path: str) -> list[str]:
    """Return the lines of a file of /proc, given by its path; none if it is gone, or access is denied."""
    return _lines(_read(path) or "")


def pids() -> Iterator[int]:
    """Yield every PID that gpusnap's PID namespace sees."""
    yield from (int(name) for name in _names(PROC) if name.isdigit())


def _stat(pid: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the third on: a name may contain blanks and brackets."""
    text = _read(f"{PROC}/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def is_alive(pid: int) -> bool:
    """Whether the process exists, is no zombie and is not exiting."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZXx" and not int(stat[6]) & _EXITING


def is_dying(pid: int) -> bool:
    """Whether the process cannot continue: SIGKILL is pending, or it exits, which may take seconds."""
    stat = _stat(pid)
    if stat is None or stat[0] in "ZX" or int(stat[6]) & _EXITING:
        return True
    return _is_pending(pid, SIGKILL)


def _is_pending(pid: int, number: int) -> bool:
    """Whether a signal is pending for the main thread, or for the process."""
    masks = (line.split()[1] for line in lines(f"{PROC}/{pid}/status") if line[:7] in ("SigPnd:", "ShdPnd:"))
    return any(int(mask, 16) & 1 << (number - 1) for mask in masks)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer stopped the process, or its cgroup is frozen: it cannot answer."""
    stat = _stat(pid)
    if stat is not None and stat[0] in "Tt":
        return True
    wchan = _read(f"{PROC}/{pid}/wchan") or ""
    return wchan in ("do_freezer_trap", "__refrigerator")


def is_halted(pid: int) -> bool:
    """Whether a signal has stopped the process, or will as soon as its cgroup is thawed."""
    return any(state == "T" for state in states(pid)) or stop_pending(pid)


def is_still(pid: int) -> bool:
    """Whether no thread of the process can run: each is stopped, or has ended."""
    return all(state in "TtZX" for state in states(pid))


def states(pid: int) -> Iterator[str]:
    """Yield the state of each of its threads (R, S, D, T, …; X: ended); none if the process is gone."""
    for task in threads(pid):
        yield (_stat(f"{pid}/task/{task}") or "X")[0]


def threads(pid: int) -> list[int]:
    """Return the TIDs of a process; none if it is gone."""
    return [int(name) for name in _names(f"{PROC}/{pid}/task")]


def is_thread_stopped(pid: int, tid: int) -> bool:
    """Whether a thread is stopped by a signal, and nobody traces it."""
    stat = _stat(f"{pid}/task/{tid}")
    return stat is not None and stat[0] == "T"


def stop_pending(pid: int) -> bool:
    """Whether a SIGSTOP is pending for the process."""
    return _is_pending(pid, SIGSTOP)


def has_gone_on(pid: int) -> bool:
    """Whether a process that was stopped runs, according to its main thread; this check is cheap.

    False if that thread is traced: then its tracer lets only that one run.
    """
    stat = _stat(pid)
    if stat is None or stat[0] not in "RSD":
        return False
    return "\nTracerPid:\t0\n" in (_read(f"{PROC}/{pid}/status") or "")


def progress(pid: int, tid: int) -> int:
    """Return the milliseconds that a thread has run (proc_pid_schedstat(5)); 0 if it is gone."""
    text = _read(f"{PROC}/{pid}/task/{tid}/schedstat")
    return int(text.split()[0]) // 1_000_000 if text else 0


def thread_by_inner_number(pid: int, number: int) -> int:
    """Return the TID here of the thread that has this number in its own PID namespace; 0 if there is none."""
    if number <= 0:
        return 0
    for tid in threads(pid):
        for line in _lines(_read(f"{PROC}/{pid}/task/{tid}/status") or ""):
            if line.startswith("NSpid:") and int(line.split()[-1]) == number:
                return tid
    return 0


def activity(pid: int, tid: int) -> tuple[str, int]:
    """Return a thread's state (R, S, D, T, …) and its running time in clock ticks; "X", 0 if it is gone."""
    stat = _stat(f"{pid}/task/{tid}")
    return (stat[0], int(stat[11]) + int(stat[12])) if stat else ("X", 0)


def comm(pid: int) -> str:
    """Return the name of the process's main thread; empty if it is gone."""
    return (_read(f"{PROC}/{pid}/comm") or "").rstrip("\n")


def thread_name(pid: int, tid: int) -> str:
    """Return the name of a thread (proc_pid_comm(5)); empty if it is gone."""
    return (_read(f"{PROC}/{pid}/task/{tid}/comm") or "").rstrip("\n")


def command(pid: int) -> tuple[str, ...]:
    """Return its argument list; empty for a zombie or if it is gone."""
    text = _read_memory(f"{PROC}/{pid}/cmdline") or ""
    return tuple(text.removesuffix("\0").split("\0")) if text else ()


def environment(pid: int) -> dict[str, str]:
    """Return the environment that it was started with."""
    text = _read_memory(f"{PROC}/{pid}/environ") or ""
    pairs = (item.partition("=") for item in text.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def process(pid: int) -> Process | None:
    """Return the process; None if it is gone or a zombie."""
    stat, status = _stat(pid), _read(f"{PROC}/{pid}/status")
    if stat is None or status is None or stat[0] in "ZX":
        return None
    spaces = next((line.split()[1:] for line in _lines(status) if line.startswith("NSpid:")), [str(pid)])
    return Process(pid, tuple(map(int, spaces)), comm(pid), command(pid), int(stat[19]))


def is_same(pid: int, start: int) -> bool:
    """Whether the process that began at `start` still has this PID, and is no zombie."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX" and int(stat[19]) == start


def is_still_running(pid: int, start: int) -> bool:
    """Whether the process that began at `start` still has this PID, and is not about to end."""
    return is_same(pid, start) and not is_dying(pid)


def exists(pid: int, start: int) -> bool:
    """Whether the process that began at `start` still has this PID, even as a zombie."""
    stat = _stat(pid)
    return stat is not None and int(stat[19]) == start


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it is gone, or has none in gpusnap's PID namespace."""
    stat = _stat(pid)
    return int(stat[1]) if stat is not None else 0


def list_ancestors(pid: int) -> list[int]:
    """Return the parent of a process, its parent and so on, as far as gpusnap's PID namespace has them."""
    found: list[int] = []
    while (pid := parent(pid)) and pid not in found:
        found.append(pid)
    return found


def start_time(pid: int) -> int:
    """Return when a process began, in clock ticks after the boot; 0 if it is gone."""
    stat = _stat(pid)
    return int(stat[19]) if stat is not None else 0


def parents() -> dict[int, int]:
    """Return the parent of every process, by PID, except the kernel's own, which are in no container."""
    return {pid: parent for (pid, _), parent in parents_by_start().items()}


def parents_by_start() -> dict[tuple[int, int], int]:
    """Return the same by PID and start, as Process has it."""
    found = {}
    for pid in pids():
        stat = _stat(pid)
        if stat is not None and not int(stat[6]) & _KERNEL_THREAD:
            found[pid, int(stat[19])] = int(stat[1])
    return found


def list_own_children() -> frozenset[int] | None:
    """Return the children of this process by its threads (proc_pid_tid_children(5)).

    That takes no look at every process of the host. None if the kernel has no such list
    (CONFIG_PROC_CHILDREN). It may omit one if another ends at the same moment, so it is read twice.
    """
    found: set[int] = set()
    try:
        os.stat(f"{PROC}/thread-self/children")
        for thread in 2 * os.listdir(f"{PROC}/self/task"):
            gone = suppress(FileNotFoundError, ProcessLookupError)  # the thread has ended
            with gone, open(f"{PROC}/self/task/{thread}/children", "rb") as file:
                found.update(map(int, file.read().split()))
    except OSError:
        return None
    return frozenset(found)


def add_descendants(
    some: Iterable[int], parents: Mapping[int, int], belongs: Callable[[int], bool] = lambda _: True
) -> set[int]:
    """Return these processes and those of their descendants that belong; `parents` as above."""
    found = set(some)
    fresh = found
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in found and pid not in found}
        fresh = {pid for pid in fresh if belongs(pid)}
        found = found | fresh
    return found


def cgroups(pid: int | str) -> dict[str, str]:
    """Return path by hierarchy, seen from gpusnap's cgroup namespace; version 2 has the key "" (cgroups(7)).

    `pid` may be "self".
    """
    text = _read(f"{PROC}/{pid}/cgroup") or ""
    lines = (line.split(":", 2) for line in _lines(text))
    return {line[1]: line[2] for line in lines if len(line) == 3}


def namespace(pid: int, kind: str) -> str:
    """Return the identity of a namespace, e.g. pid:[4026531836]; empty if the process is gone.

    Raises GpusnapError if the kernel repeatedly fails, like all functions here that read a file of /proc.
    """
    return _answer(f"{PROC}/{pid}/ns/{kind}", os.readlink) or ""


def own_pid_namespace() -> int:
    """Return the number of gpusnap's PID namespace. Raises OSError if the kernel does not say it."""
    return os.stat(f"{PROC}/self/ns/pid").st_ino


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """Yield a process's open files: the descriptor's link in /proc and its target, for example socket:[1].

    Files that are closed meanwhile are omitted (proc_pid_fd(5)).
    """
    folder = f"{PROC}/{pid}/fd"
    for name in _names(folder):
        link = f"{folder}/{name}"
        if (target := _answer(link, os.readlink)) is not None:
            yield link, target


def memory(pid: int) -> int:
    """Return the most bytes that a dump of the process writes: its resident anonymous and shared memory."""
    status = _read(f"{PROC}/{pid}/status") or ""
    wanted = ("RssAnon:", "RssShmem:", "VmSwap:")
    return sum(int(line.split()[1]) << 10 for line in _lines(status) if line.startswith(wanted))


def peak_memory() -> int:
    """Return the most RAM that this process used, in bytes (proc_pid_status(5), VmHWM), with shared memory.

    0 if it cannot be read, because it is only for information.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:")), 0)
    except OSError:
        return 0


def available_memory() -> int:
    """Return MemAvailable of proc_meminfo(5) in bytes; 0 if it is not reported."""
    return _read_meminfo("MemAvailable:") or 0


def unused_memory() -> int | None:
    """Return MemFree of proc_meminfo(5) in bytes, without the page cache; None if it is not reported."""
    return _read_meminfo("MemFree:")


def _read_meminfo(name: str) -> int | None:
    for line in (_read(f"{PROC}/meminfo") or "").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return None


def maps(pid: int) -> str:
    """Return the process's mappings as text, one per line (proc_pid_maps(5)); empty if it is gone."""
    return _read_memory(f"{PROC}/{pid}/maps") or ""


def named_mappings(pid: int) -> Iterator[tuple[str, ...]]:
    """Yield the six fields of each of its mappings that has a name (proc_pid_maps(5)), the name last."""
    for line in _lines(maps(pid)):
        fields = line.split(None, 5)
        if len(fields) > 5:
            yield tuple(fields)


def unix_sockets(pid: int) -> tuple[str, ...]:
    """Return the names of the process's open Unix sockets, if they have one (proc_net_unix(5)).

    An abstract name begins with "@". The null bytes that fill up its name, which the kernel also shows as
    "@", are omitted.
    """
    held: set[str] = set()
    for number in _names(f"{PROC}/{pid}/fd"):
        target = _answer(f"{PROC}/{pid}/fd/{number}", os.readlink) or ""
        if target.startswith("socket:["):
            held.add(target[8:-1])
    lines = (line.split() for line in _lines(_read(f"{PROC}/{pid}/net/unix") or "")[1:])
    named = (fields for fields in lines if len(fields) > 7 and fields[6] in held)
    return tuple(fields[7][0] + fields[7][1:].rstrip("@") for fields in named)


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of /proc/PID/mountinfo (proc_pid_mountinfo(5))."""

    device: str
    """major:minor of the file system."""
    root: str
    """The path within that file system which is mounted."""
    destination: str
    """The path in the process's root."""
    options: tuple[str, ...]
    tags: tuple[str, ...]
    """Optional fields: shared:N, master:N."""
    kind: str
    """The file system's type."""
    upper: str = ""
    """The upper directory of an overlay, as given to mount."""
    source: str = ""
    """The device, or what the file system's type uses instead, such as server:/path."""


def mounts(pid: int | str) -> tuple[Mount, ...]:
    """Return the mounts that a process sees, in the order in which they were made; `pid` may be "self"."""
    text = _read(f"{PROC}/{pid}/mountinfo") or ""
    found = []
    for line in _lines(text):
        left, _, right = line.partition(" - ")
        words, rest = left.split(" "), right.split(" ")
        if len(words) < 6 or not rest[0]:
            continue
        root, destination = _unescape(words[3]), _unescape(words[4])
        options = rest[2].split(",") if rest[0] == "overlay" and len(rest) > 2 else ()
        upper = next((each.partition("=")[2] for each in options if each.startswith("upperdir=")), "")
        source = _unescape(rest[1]) if len(rest) > 1 else ""
        options_of_mount, tags = tuple(words[5].split(",")), tuple(words[6:])
        found.append(Mount(words[2], root, destination, options_of_mount, tags, rest[0], upper, source))
    return tuple(found)


def find_mount(path: str) -> Mount | None:
    """Return the mount that has a path, which need not exist; None if /proc does not show it.

    `path`: absolute and without symbolic links.
    """
    found = None
    for mount in mounts("self"):  # of several at one place, the last one counts
        holds = (path + "/").startswith(mount.destination.rstrip("/") + "/")
        if holds and (found is None or len(mount.destination) >= len(found.destination)):
            found = mount
    return found


def host_path(mount: Mount) -> str | None:
    """Return the path on this host of a bind mount's source; None if no mount of gpusnap's reaches it."""
    for ours in mounts("self"):
        inside = mount.root == ours.root or mount.root.startswith(ours.root.rstrip("/") + "/")
        if ours.device == mount.device and inside:
            path = ours.destination.rstrip("/") + "/" + mount.root[len(ours.root) :].lstrip("/")
            if os.path.exists(path):
                return path.rstrip("/") or "/"
    return None


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline and backslash (seq_path)."""
    if "\\" not in text:  # a host may have thousands of mounts
        return text
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, plain)
    return text
