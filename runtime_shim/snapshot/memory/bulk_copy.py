"""Writes large private memory of restored processes in many threads, while CRIU waits.

CRIU fills the memory of a process in one thread. So gpusnap removes the pages of large private mappings
(runtime/criu/images/vmas.py) from the pagemaps that CRIU reads. CRIU restores these mappings empty, and
gpusnap writes the pages with process_vm_writev(2), from the same pages file:

    plan           for each process with a large pages file, write a second pagemap without those pages, and a
                   second, small pages file with the other pages. Both are in the directory that CRIU reads
                   (`view`); CRIU's own names still lead to the images as they were dumped
    pre-restore    CRIU waits. The second pagemaps replace the first ones; each names its own pages file, so
    no pagemap is read with the pages of another CRIU           restores all processes, and lets none of them
    run post-restore   CRIU waits. Threads write the removed pages, and only then CRIU continues

A CRIU that does not ask at pre-restore restores everything itself, from the images as they were dumped. A
CRIU that has asked there also asks at post-restore, and kills all processes if the answer is no or gpusnap
has ended (runtime/criu/gate.py). So no process ever runs without its memory, whether or not it was stopped at
the checkpoint, and even if somebody sends it SIGCONT.

The pages are charged to the control group of the process that gets them, as if it had touched them itself
(mm/memcontrol.c, get_mem_cgroup_from_mm), within its limit. If that is exceeded, the kernel kills a process
of the container, or the write fails with ENOMEM. The kernel would use the allowed NUMA nodes (cpuset.mems) of
gpusnap's threads, not those of the container. So gpusnap removes nothing if the container has such a limit.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, raise_as
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory import maps
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu.gate import POST_RESTORE, PRE_RESTORE, Busy, Gate
from gpusnap.runtime_shim.runtime.criu.images import messages, pagemap, vmas

SMALLEST = 1 << 20
"""Bytes of a mapping from which pages are removed."""
_SMALLEST_PIECE = 256 << 10
SMALLEST_FILE = 16 << 20
"""Bytes of a pages file for which this is worth the effort."""
# Bytes of all second pages files together, which are in RAM (/run); and at most a quarter of the space there.
_MOST_KEPT, _PART_OF_FREE = 256 << 20, 4
# Bytes of a pagemap: reading one takes 1 s per 10 MiB.
_LARGEST_PAGEMAP = 1 << 20
_LARGEST_MM = 4 << 20
_PIECE = 8 << 20
# Seconds that CRIU waits for a plan, which takes about 10 ms per 100 MiB of the second pages files.
_PATIENCE = 30.0
_PAGE = 4096
_NUMBERS = 1 << 32
_SOCKET, _NEXT = "gate", ".next"
# Options with which CRIU reads or changes images differently.
_OTHER_WAYS = ("lazy-pages", "auto-dedup", "stream")


@dataclass(frozen=True, slots=True)
class ProcessPages:
    """The pages to write into one process."""

    pid: int
    """The PID within the container."""
    path: str
    """The pages file as it was dumped."""
    pieces: Sequence[tuple[int, int, int]]
    """Address, offset in that file, and size of each piece."""


@dataclass(slots=True)
class CopyTotals:
    """Totals for the restore's timing."""

    bytes: int = 0
    processes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Plan:
    taken: list[ProcessPages] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """The pagemaps that have a second one."""


class BulkCopy:
    """The copy of private memory of one restore. Close it before its view of the images is removed."""

    def __init__(self, view: str, launcher: str, *, threads: int, criu: str = "") -> None:
        """`view`: the directory for CRIU, which only root can access. `threads`: 0 for one per core.

        Raises OSError and GpusnapError; CRIU then restores everything.
        """
        self._view, self._launcher = view, launcher
        self._threads = threads
        self.totals = CopyTotals()
        self._switched = self._copied = False
        stages = {PRE_RESTORE: self._switch, POST_RESTORE: self._copy}
        self._gate = Gate(os.path.join(view, _SOCKET), launcher, stages, criu=criu)
        self._pool = ThreadPoolExecutor(2, "gpusnap-bulk")
        try:
            self._works: Future[bool] = self._pool.submit(self._gate.works)
            self._plan: Future[_Plan] = self._pool.submit(make_plan, view)
        except BaseException:
            self.close()
            raise

    def offer(self) -> tuple[str, Mapping[str, str]]:
        """The program that CRIU is to run at its stages, and its environment; "" and {} if there is none."""
        if not self._works.result():
            return "", {}
        return self._launcher, self._gate.environment

    @property
    def error(self) -> GpusnapError | None:
        """The reason if CRIU was not allowed to continue."""
        return self._gate.error

    def check(self) -> None:
        """Check, after CRIU has succeeded, that removed memory has been written. Raises ImageError."""
        if self._switched and not self._copied:
            raise ImageError(
                "CRIU went on before gpusnap had written the memory of the processes",
                hint="set memory.parallel-restore to false, and report this",
                code="GPS-523",
            )

    def close(self) -> None:
        """Stop it. May be called twice."""
        self._pool.shutdown(cancel_futures=True)
        self._gate.close()

    def _switch(self, _: int, _busy: Busy) -> bool:
        """Replace the pagemaps. CRIU reads no pagemap before this, and the second ones after it."""
        try:
            plan = self._plan.result(_PATIENCE)
        except TimeoutError:
            return True  # the disk hangs; CRIU will wait for it, and reads the first pagemaps
        for name in plan.names:
            self._switched = True
            path = os.path.join(self._view, name)
            with raise_as(ImageError, f"{path} cannot be replaced", code="GPS-523"):
                os.replace(path + _NEXT, path)
        return True

    def _copy(self, init: int, busy: Busy) -> bool:
        if not self._switched:
            return True
        begun = time.monotonic()
        taken = self._plan.result().taken
        try:
            write_all(init, taken, busy, threads=self._threads)
        except OSError as error:
            raise _make_write_error(error) from error
        self._copied = True
        size = sum(piece[2] for each in taken for piece in each.pieces)
        self.totals = CopyTotals(size, len(taken), round(time.monotonic() - begun, 6))
        return True


def begin(
    view: str, config: Mapping[str, Any], options: Sequence[str], *, threads: int, criu: str = ""
) -> BulkCopy | None:
    """Plan what CRIU need not restore of the images in a view; None if CRIU is to restore everything.

    `config`: the container's config.json. `options`: CRIU's options in the settings.
    `criu`: the program, if the runtime's caller has named one.
    """
    launcher = locate.launcher()
    if not launcher or os.uname().machine != "x86_64" or _has_numa_limit(config):
        return None
    if any(option.split("#", 1)[0].strip().removeprefix("--") in _OTHER_WAYS for option in options):
        return None
    with contextlib.suppress(OSError, GpusnapError):
        return BulkCopy(view, launcher, threads=threads, criu=criu)
    return None


def _has_numa_limit(config: Mapping[str, Any]) -> bool:
    """Whether the container may only use some NUMA nodes (runtime-spec, config-linux.md, CPU)."""
    found: Any = config
    for name in ("linux", "resources", "cpu", "mems"):
        found = found.get(name) if isinstance(found, dict) else None
    return bool(found)


def make_plan(view: str) -> _Plan:
    """Write second pagemaps and pages files into a view, and return what they lack.

    If an image is damaged or cannot be read here, CRIU reports it: it then reads the first pagemaps.
    """
    plan = _Plan()
    try:
        _make_plan(view, plan)
    except (OSError, GpusnapError, messages.Damage, ValueError):
        return _Plan()
    return plan


def _make_plan(view: str, plan: _Plan) -> None:
    names = set(os.listdir(view))
    sizes = {name: os.stat(os.path.join(view, name)).st_size for name in names if name.startswith("pages-")}
    if "parent" in names or not any(size >= SMALLEST_FILE for size in sizes.values()):
        return
    files = {name: _read_number(view, name) for name in sorted(names) if name.startswith("pagemap-")}
    numbers = list(files.values())
    free = max(*numbers, *(_parse_number(name) for name in sizes)) + 1
    family = _read_relatives(view)
    known: dict[int, Any] = {}
    room = os.statvfs(view)
    left = min(_MOST_KEPT, room.f_bavail * room.f_frsize // _PART_OF_FREE)
    for pid in sorted(family):
        name = f"pagemap-{pid}.img"
        number = files.get(name)
        pages = f"pages-{number}.img"
        if number is None or numbers.count(number) != 1 or sizes.get(pages, 0) < SMALLEST_FILE:
            continue
        own = _read_mm(view, pid, known)
        relatives = [_read_mm(view, each, known) for each in family[pid] if f"mm-{each}.img" in names]
        if own is None or None in relatives or free >= _NUMBERS:
            continue
        spans = vmas.plain(own, relatives, smallest=SMALLEST)
        with _open_image(view, name, "pagemap", _LARGEST_PAGEMAP) as source:
            if source is None or not spans:
                continue
            found = pagemap.split(source, spans, number=free, smallest=_SMALLEST_PIECE)
        if found is None or found.pages * _PAGE != sizes[pages]:
            continue
        kept = sum(size for _, size in found.kept)
        if kept > left or kept > sum(size for _, _, size in found.taken):
            continue
        left -= kept
        _write_second_pages(view, pages, f"pages-{free}.img", found.kept)
        free += 1
        with open(os.path.join(view, name + _NEXT), "xb") as file:
            file.write(found.image)
        plan.names.append(name)
        plan.taken.append(ProcessPages(pid, os.path.realpath(os.path.join(view, pages)), found.taken))


def _parse_number(name: str) -> int:
    digits = name.removeprefix("pages-").removesuffix(".img")
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def _read_number(view: str, name: str) -> int:
    kind = messages.kind_of(name)
    with _open_image(view, name, kind or "pagemap", None) as source:
        assert source is not None
        return pagemap.read_number(source)


def _read_relatives(view: str) -> dict[int, list[int]]:
    """Return the parent and the children of each process in pstree.img, by its PID."""
    parents: dict[int, int] = {}
    with _open_image(view, "pstree.img", "pstree", None) as source:
        while source is not None and source.count_left:
            message = messages.decode(source.message(), "pstree")
            if message is None or message.pid in parents:
                raise messages.Damage("has a process that cannot be read here")
            parents[message.pid] = message.ppid
    found: dict[int, list[int]] = {pid: [] for pid in parents}
    for pid, parent in parents.items():
        if parent in found:
            found[pid].append(parent)
            found[parent].append(pid)
    return found


def _read_mm(view: str, pid: int, known: dict[int, Any]) -> Any:
    """Return the mm_entry of a process; None if it cannot be decoded."""
    if pid not in known:
        with _open_image(view, f"mm-{pid}.img", "mm", _LARGEST_MM) as source:
            known[pid] = messages.decode(source.message(), "mm") if source is not None else None
    return known[pid]


@contextlib.contextmanager
def _open_image(view: str, name: str, kind: str, largest: int | None) -> Iterator[messages.Source | None]:
    """Open an image, and skip its magic numbers; None if it is too large."""
    with open(_open_file(os.path.join(view, name)), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if largest is not None and size > largest:
            yield None
            return
        source = messages.Source(file, size)
        source.begin(kind)
        yield source


def _open_file(path: str) -> int:
    """Open a regular file, through the links of a view. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", path)
    return descriptor


def _write_second_pages(view: str, pages: str, name: str, kept: Sequence[tuple[int, int]]) -> None:
    """Write the second pages file: parts of the first one, one after the other. Raises OSError."""
    with (
        open(_open_file(os.path.join(view, pages)), "rb", buffering=0) as source,
        open(os.path.join(view, name), "xb", buffering=0) as target,
    ):
        for offset, size in kept:
            done = 0
            while done < size:
                sent = os.sendfile(target.fileno(), source.fileno(), offset + done, size - done)
                if sent == 0:
                    raise OSError(errno.EIO, "ends too early", pages)
                done += sent


def write_all(init: int, taken: Sequence[ProcessPages], busy: Busy, *, threads: int) -> None:
    """Write the removed pages into the processes, which CRIU has restored and which do not run yet.

    `init`: this host's PID of the restored init. Raises OSError and ImageError.
    """
    there = find_restored_processes(init)
    with contextlib.ExitStack() as opened:
        jobs: list[Callable[[], None]] = []
        chosen: list[proc.Process] = []
        for each in taken:
            process = there.get(each.pid)
            if process is None:
                raise ImageError(
                    f"process {each.pid} of the container ended before its memory was written",
                    hint="the kernel may have ended it: look at the container's memory limit",
                    code="GPS-523",
                )
            chosen.append(process)
            _check_mapped(process.pid, each)
            view = _map_file(each.path, opened)
            for address, offset, size in each.pieces:
                if offset + size > len(view):
                    raise ImageError(f"{each.path} changed during the restore", code="GPS-523")
                for at in range(0, size, _PIECE):
                    part = view[offset + at : offset + min(at + _PIECE, size)]
                    opened.callback(part.release)
                    jobs.append(partial(_write, process.pid, address + at, part, busy))
        copies.run_jobs(jobs, threads)
        for process in chosen:
            if not proc.is_same(process.pid, process.start):
                raise ProcessLookupError(errno.ESRCH, f"process {process.pid} has ended")


def _write(pid: int, address: int, part: memoryview, busy: Busy) -> None:
    copies.write(pid, address, part, threads=1)
    busy()


def _map_file(path: str, opened: contextlib.ExitStack) -> memoryview:
    descriptor = _open_file(path)
    try:
        mapped = mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    finally:
        os.close(descriptor)
    opened.callback(mapped.close)
    return opened.enter_context(memoryview(mapped))


def find_restored_processes(init: int) -> Mapping[int, proc.Process]:
    """Return the restored init and its descendants, by their PIDs in the container."""
    first = proc.process(init)
    if first is None:
        raise ProcessLookupError(errno.ESRCH, f"process {init} has ended")
    depth = len(first.ns_pids) - 1
    there = map(proc.process, proc.add_descendants([init], proc.parents()))
    return {each.ns_pids[depth]: each for each in there if each is not None and len(each.ns_pids) > depth}


def _check_mapped(pid: int, taken: ProcessPages) -> None:
    """Check that a process has private anonymous memory where pages will be written. Raises ImageError."""
    there = maps.mappings(pid)
    at = 0
    for address, _, size in taken.pieces:
        while at < len(there) and there[at].end <= address:
            at += 1
        if at == len(there) or not (there[at].start <= address and address + size <= there[at].end):
            raise ImageError(f"process {taken.pid} has no memory at {address:#x}", code="GPS-523")
        named = there[at].name in ("", "[heap]") or there[at].name.startswith("[anon:")
        if there[at].permissions != "rw-p" or there[at].inode or not named:
            raise ImageError(f"process {taken.pid} has other memory at {address:#x}", code="GPS-523")


def _make_write_error(error: OSError) -> GpusnapError:
    hints = {
        errno.ENOMEM: "there is not enough memory: look at the container's memory limit, and at the host's",
        errno.ESRCH: "the kernel may have ended it: look at the container's memory limit (dmesg)",
    }
    return GpusnapError(
        f"the memory of the restored processes cannot be written: {error.strerror or error}",
        hint=hints.get(error.errno or 0, "the checkpoint is unharmed; try memory.parallel-restore = false"),
        code="GPS-523",
    )
