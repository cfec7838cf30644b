"""What /proc says of processes: proc(5) and its pages proc_pid_stat(5), proc_pid_status(5), cgroups(7).

A process may vanish at any moment; every function here then answers None or an empty value, never an error.
A kernel that cannot answer is no process that is gone: GpusnapError.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from signal import SIGKILL, SIGSTOP
from typing import TypeVar

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import GpusnapError, reason

_T = TypeVar("_T")

PROC = "/proc"
PASSING = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN, errno.EIO))
"""What the kernel says for a moment, and not of the process."""
# Seconds to ask again, and between two times.
_PATIENCE, _PAUSE = 2.0, 0.01
# include/linux/sched.h, PF_EXITING and PF_KTHREAD; field 9 of proc_pid_stat(5)
_EXITING, _KERNEL_THREAD = 0x4, 0x200000
_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Process:
    """A process as it was seen once; `start` tells it from a later one with the same PID."""

    pid: int
    """In our PID namespace."""
    ns_pids: tuple[int, ...]
    """In each PID namespace from ours down to its own (NSpid of proc_pid_status(5))."""
    comm: str
    command: tuple[str, ...]
    start: int
    """Clock ticks after boot (proc_pid_stat(5), field 22)."""


def _read(path: str) -> str | None:
    """The text of a file of /proc; None where there is none, or it is not for us. Raises GpusnapError."""
    return _answer(path, _content)


def _read_memory(path: str) -> str | None:
    """As `_read`, of a file for which the kernel looks at the process' memory: it may have us wait there."""
    from gpusnap.runtime_shim import deadlines  # threads, which not everybody needs

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
    """The names in a folder of /proc; none where that is gone. Raises GpusnapError."""
    return _answer(path, os.listdir) or []


def _content(path: str) -> str:
    # A buffered file would take three times as long, and one look at a container reads hundreds.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        pieces = []
        while piece := os.read(descriptor, _PIECE):
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def _answer(path: str, ask: Callable[[str], _T]) -> _T | None:
    """What the kernel answers of a path; None where there is none, or it is not for us.

    Nothing else counts as gone: a kernel that is short of memory or descriptors for a moment is asked again.
    Raises GpusnapError where it still says no.
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
    """The lines of a file of /proc. The kernel escapes a newline within names, but not what else ends lines.

    str.splitlines knows form feeds and line separators (U+2028), too, which may be in any name.
    """
    return text.removesuffix("\n").split("\n") if text else []


def lines(path: str) -> list[str]:
    """The lines of a file of /proc, given by its path; none where it is not there, or not for us."""
    return _lines(_read(path) or "")


def pids() -> Iterator[int]:
    """Every process that our PID namespace sees."""
    yield from (int(name) for name in _names(PROC) if name.isdigit())


def _stat(pid: int | str) -> list[str] | None:
    """The fields of /proc/PID/stat from the third on: a name may hold blanks and brackets."""
    text = _read(f"{PROC}/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def is_alive(pid: int) -> bool:
    """Whether the process is there, is no zombie and not on its way out."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZXx" and not int(stat[6]) & _EXITING


def is_dying(pid: int) -> bool:
    """Whether the process cannot go on: it has SIGKILL pending, or exits, which takes a large one seconds."""
    stat = _stat(pid)
    if stat is None or stat[0] in "ZX" or int(stat[6]) & _EXITING:
        return True
    return any(mask & 1 << (SIGKILL - 1) for mask in _iterate_pending(pid))


def _iterate_pending(pid: int) -> Iterator[int]:
    """The signals that the main thread, and that the process, has pending, each as a mask."""
    text = _read(f"{PROC}/{pid}/status") or ""
    for line in _lines(text):
        if line.startswith(("SigPnd:", "ShdPnd:")):
            yield int(line.split()[1], 16)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a tracer stopped the process, or its cgroup is frozen: it answers nobody."""
    stat = _stat(pid)
    if stat is not None and stat[0] in "Tt":
        return True
    wchan = _read(f"{PROC}/{pid}/wchan") or ""
    return wchan in ("do_freezer_trap", "__refrigerator")


def is_halted(pid: int) -> bool:
    """Whether a signal has stopped the process, or will as soon as its cgroup is thawed."""
    return any(state == "T" for state in states(pid)) or any(
        mask & 1 << (SIGSTOP - 1) for mask in _iterate_pending(pid)
    )


def is_still(pid: int) -> bool:
    """Whether no thread of the process can run: each is stopped, or has ended."""
    return all(state in "TtZX" for state in states(pid))


def states(pid: int) -> Iterator[str]:
    """The state of each of its threads (R, S, D, T, …), X of one that is gone; none where the process is."""
    for task in threads(pid):
        yield (_stat(f"{pid}/task/{task}") or "X")[0]


def threads(pid: int) -> list[int]:
    """The TIDs of a process; none where it is gone."""
    return [int(name) for name in _names(f"{PROC}/{pid}/task")]


def is_thread_stopped(pid: int, tid: int) -> bool:
    """Whether a thread is stopped by a signal, and nobody traces it."""
    stat = _stat(f"{pid}/task/{tid}")
    return stat is not None and stat[0] == "T"


def stop_pending(pid: int) -> bool:
    """Whether a SIGSTOP waits for the process to go on."""
    return any(mask & 1 << (SIGSTOP - 1) for mask in _iterate_pending(pid))


def has_gone_on(pid: int) -> bool:
    """Whether a process that was stopped runs; told by its main thread, and as cheaply as can be.

    Not where that is traced: its tracer lets it run, and no other.
    """
    stat = _stat(pid)
    if stat is None or stat[0] not in "RSD":
        return False
    return "\nTracerPid:\t0\n" in (_read(f"{PROC}/{pid}/status") or "")


def progress(pid: int, tid: int) -> int:
    """Milliseconds that a thread has run (proc_pid_schedstat(5)); 0 where it is gone."""
    text = _read(f"{PROC}/{pid}/task/{tid}/schedstat")
    return int(text.split()[0]) // 1_000_000 if text else 0


def thread_by_inner_number(pid: int, number: int) -> int:
    """The TID here of the thread that its own PID namespace knows by this number; 0 where there is none."""
    if number <= 0:
        return 0
    for tid in threads(pid):
        for line in _lines(_read(f"{PROC}/{pid}/task/{tid}/status") or ""):
            if line.startswith("NSpid:") and int(line.split()[-1]) == number:
                return tid
    return 0


def activity(pid: int, tid: int) -> tuple[str, int]:
    """A thread's state (R, S, D, T, …) and the clock ticks that it has run; "X" and 0 when it is gone."""
    stat = _stat(f"{pid}/task/{tid}")
    return (stat[0], int(stat[11]) + int(stat[12])) if stat else ("X", 0)


def comm(pid: int) -> str:
    """The name of the process' main thread; empty when it is gone."""
    return (_read(f"{PROC}/{pid}/comm") or "").rstrip("\n")


def thread_name(pid: int, tid: int) -> str:
    """The name of a thread (proc_pid_comm(5)); empty when it is gone."""
    return (_read(f"{PROC}/{pid}/task/{tid}/comm") or "").rstrip("\n")


def command(pid: int) -> tuple[str, ...]:
    """Its argument list; empty for a zombie or when it is gone."""
    text = _read_memory(f"{PROC}/{pid}/cmdline") or ""
    return tuple(text.removesuffix("\0").split("\0")) if text else ()


def environment(pid: int) -> dict[str, str]:
    """The environment it was started with."""
    text = _read_memory(f"{PROC}/{pid}/environ") or ""
    pairs = (item.partition("=") for item in text.split("\0") if "=" in item)
    return {name: value for name, _, value in pairs}


def process(pid: int) -> Process | None:
    """The process, or None where it is gone or a zombie."""
    stat, status = _stat(pid), _read(f"{PROC}/{pid}/status")
    if stat is None or status is None or stat[0] in "ZX":
        return None
    spaces = next((line.split()[1:] for line in _lines(status) if line.startswith("NSpid:")), [str(pid)])
    return Process(pid, tuple(map(int, spaces)), comm(pid), command(pid), int(stat[19]))


def is_same(pid: int, start: int) -> bool:
    """Whether the process that began at `start` still has this PID, and is no zombie."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX" and int(stat[19]) == start


def exists(pid: int, start: int) -> bool:
    """Whether the process that began at `start` still has this PID, be it as a zombie."""
    stat = _stat(pid)
    return stat is not None and int(stat[19]) == start


def parent(pid: int) -> int:
    """The parent of a process; 0 where it is gone, or has none in our PID namespace."""
    stat = _stat(pid)
    return int(stat[1]) if stat is not None else 0


def parents() -> dict[int, int]:
    """Parent by PID, of every process but the kernel's own, which are in no container."""
    found = {}
    for pid in pids():
        stat = _stat(pid)
        if stat is not None and not int(stat[6]) & _KERNEL_THREAD:
            found[pid] = int(stat[1])
    return found


def cgroups(pid: int | str) -> dict[str, str]:
    """Path by hierarchy, as seen from our cgroup namespace; the key of version 2 is empty (cgroups(7)).

    `pid` may be "self".
    """
    text = _read(f"{PROC}/{pid}/cgroup") or ""
    lines = (line.split(":", 2) for line in _lines(text))
    return {line[1]: line[2] for line in lines if len(line) == 3}


def namespace(pid: int, kind: str) -> str:
    """The identity of a namespace, e.g. pid:[4026531836]; empty when the process is gone.

    Raises GpusnapError, as all here do that read a file of /proc, where the kernel goes on to say no.
    """
    return _answer(f"{PROC}/{pid}/ns/{kind}", os.readlink) or ""


def own_pid_namespace() -> int:
    """The number of our PID namespace. Raises OSError where the kernel does not say."""
    return os.stat(f"{PROC}/self/ns/pid").st_ino


def open_files(pid: int) -> Iterator[tuple[str, str]]:
    """What a process has open: the descriptor's link in /proc and where it leads, socket:[1] for one.

    What is closed meanwhile is left out (proc_pid_fd(5)).
    """
    folder = f"{PROC}/{pid}/fd"
    for name in _names(folder):
        link = f"{folder}/{name}"
        if (target := _answer(link, os.readlink)) is not None:
            yield link, target


def memory(pid: int) -> int:
    """Bytes that a dump of the process has to write at most: its resident anonymous and shared memory."""
    status = _read(f"{PROC}/{pid}/status") or ""
    wanted = ("RssAnon:", "RssShmem:", "VmSwap:")
    return sum(int(line.split()[1]) << 10 for line in _lines(status) if line.startswith(wanted))


def peak_memory() -> int:
    """Bytes of RAM that we ourselves had at most (proc_pid_status(5), VmHWM), shared memory included.

    0 where it cannot be read: it is told for information only.
    """
    try:
        with open("/proc/self/status", "rb") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:")), 0)
    except OSError:
        return 0


def available_memory() -> int:
    """MemAvailable of proc_meminfo(5) in bytes; 0 where it is not told."""
    return _read_meminfo("MemAvailable:") or 0


def unused_memory() -> int | None:
    """MemFree of proc_meminfo(5) in bytes, which no page cache has either; None where it is not told."""
    return _read_meminfo("MemFree:")


def _read_meminfo(name: str) -> int | None:
    for line in (_read(f"{PROC}/meminfo") or "").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return None


def maps(pid: int) -> str:
    """The process' mappings as text, one a line (proc_pid_maps(5)); empty when it is gone."""
    return _read_memory(f"{PROC}/{pid}/maps") or ""


def named_mappings(pid: int) -> Iterator[tuple[str, ...]]:
    """The six fields of each of its mappings that has a name (proc_pid_maps(5)), the name last."""
    for line in _lines(maps(pid)):
        fields = line.split(None, 5)
        if len(fields) > 5:
            yield tuple(fields)


def unix_sockets(pid: int) -> tuple[str, ...]:
    """The names of the Unix sockets that the process has open and that have one (proc_net_unix(5)).

    An abstract one begins with "@"; the null bytes that fill up its name, which the kernel shows as "@", are
    left out.
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
    """Where, in the process' root."""
    options: tuple[str, ...]
    tags: tuple[str, ...]
    """Optional fields: shared:N, master:N."""
    kind: str
    """The file system's type."""
    upper: str = ""
    """The upper directory of an overlay, as it was mounted."""


def mounts(pid: int | str) -> tuple[Mount, ...]:
    """The mounts that a process sees, in the order in which they were made; `pid` may be "self"."""
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
        found.append(
            Mount(words[2], root, destination, tuple(words[5].split(",")), tuple(words[6:]), rest[0], upper)
        )
    return tuple(found)


def host_path(mount: Mount) -> str | None:
    """The path on this host of what a bind mount shows; None where no mount of ours reaches it."""
    for ours in mounts("self"):
        inside = mount.root == ours.root or mount.root.startswith(ours.root.rstrip("/") + "/")
        if ours.device == mount.device and inside:
            path = ours.destination.rstrip("/") + "/" + mount.root[len(ours.root) :].lstrip("/")
            if os.path.exists(path):
                return path.rstrip("/") or "/"
    return None


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline and backslash (seq_path)."""
    for octal, plain in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(octal, plain)
    return text
