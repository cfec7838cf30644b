"""A container of real processes, a driver and a real runtime that do as they are told.

`FakeDriver` implements `gpusnap.runtime_shim.gpu.api.driver.Driver` over real child processes; only their GPU
state is made up. `FakeRuntime` is a program that answers as crun 1.21 does. `Scene` puts both under
gpusnap-runtime's command line, so that a test sees what Podman would: exit code, stderr, log, image
directory.
"""

from __future__ import annotations

import ctypes
import io
import json
import mmap
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from gpusnap.oci.base.threads import Crew
from gpusnap.runtime_shim.base.stop_signals import STOPPING, handle_signals
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.gpu.api.criu_plugin import Plugin
from gpusnap.runtime_shim.gpu.api.driver import Gpu, HeldFiles, Host, Node, ProcessState
from gpusnap.runtime_shim.gpu.api.errors import GpuError, IllegalState, ProcessGone
from gpusnap.runtime_shim.gpu.nvidia.driver_files import MappedFile
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory.maps import mappings
from gpusnap.runtime_shim.records.manifest import (
    GpuProcess,
    GpuRecord,
    HostRecord,
    Manifest,
)
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.identify import RealRuntime, identify
from gpusnap.runtime_shim.settings import Memory, Settings
from gpusnap.runtime_shim.shim import dispatch
from gpusnap.runtime_shim.snapshot.devices import remap
from gpusnap.runtime_shim.snapshot.gpu_processes import choose_driver, gpu_state
from gpusnap.runtime_shim.snapshot.records import journal, reservations

__all__ = [
    "DEADLINE",
    "ID",
    "KEY",
    "POISON",
    "Call",
    "FakeDriver",
    "FakeRuntime",
    "Family",
    "Outcome",
    "Scene",
    "a_manifest",
    "gpu",
    "unshare_works",
    "uuid",
    "wait_for",
]

DEADLINE = 90.0
ID = "c0ffee"
KEY = container_key.key(container_key.root(None, "crun"), ID)
"""What gpusnap calls it in its own files, under a crun without --root."""
MIB = 1 << 20
POISON = (
    "permission denied",
    "operation not permitted",
    "no such file or directory",
    "executable file not found",
)
"""Podman replaces a message that holds one of these (libpod/oci_util.go, getOCIRuntimeError)."""

RUNNING, LOCKED, CHECKPOINTED = ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds; fails the test at the deadline."""
    end = time.monotonic() + DEADLINE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about within {DEADLINE:g} s"
        pause.wait(0.005)


def evict(file: io.FileIO) -> None:
    """Have no page of a file in the page cache. A page that is in use stays, so this tries again."""
    size, libc = os.fstat(file.fileno()).st_size, ctypes.CDLL(None, use_errno=True)

    def is_evicted() -> bool:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        resident = (ctypes.c_char * -(-size // mmap.PAGESIZE))()
        with mmap.mmap(
            file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE
        ) as mapping:
            held = (ctypes.c_char * size).from_buffer(mapping)
            address = ctypes.c_void_p(ctypes.addressof(held))
            del held
            assert libc.mincore(address, ctypes.c_size_t(size), resident) == 0
        return not any(page[0] & 1 for page in resident)

    wait_for(is_evicted, "the end of its pages")


def joining(thread: int) -> bool:
    """Whether a thread is within Crew.join."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is Crew.join.__code__:
            return True
        frame = frame.f_back
    return False


class Signalled(Exception):
    """A signal came."""


@contextmanager
def signals_raise(numbers: Sequence[signal.Signals] = STOPPING) -> Iterator[None]:
    """Let these signals raise Signalled, as gpusnap has them raise: not where Python would swallow it."""

    def come(*_: object) -> None:
        raise Signalled

    with handle_signals(come, numbers):
        yield


def signal_main_in(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, thread: str) -> None:
    """Have the main thread get a SIGTERM when a method begins, where it waits for the thread that does.

    `thread`: the beginning of that thread's name, if the method is one of threads.
    """
    real, main = getattr(owner, method), threading.main_thread().ident

    def signalled(self: object) -> None:
        if getattr(self, "name", thread).startswith(thread):
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)
            threading.Event().wait(0.1)
        real(self)

    monkeypatch.setattr(owner, method, signalled)


def uuid(number: int) -> str:
    """The UUID of a GPU."""
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def gpu(number: int = 0, *, total: int = 80 << 30, used: int = 0) -> Gpu:
    """A GPU of this host."""
    return Gpu(uuid(number), number, number, "NVIDIA H100 80GB HBM3", "9.0", total, used, False, "default")


def a_manifest(*, pids: Sequence[int] = (1,), used: int = 3 * MIB) -> Manifest:
    """A manifest of one GPU, and of processes that use it."""
    return Manifest(
        created="2026-01-02T03:04:05Z",
        container=ID,
        host=HostRecord("x86_64", "6.18.0", "nvidia", "580.159.04", "13.0", "4.1.1", "crun", "1.21"),
        gpus=(GpuRecord(uuid(0), 0, 0, "NVIDIA H100 80GB HBM3", "9.0", 80 << 30, used),),
        processes=tuple(GpuProcess(pid, "sleep", ("sleep", "600"), ((uuid(0), used),)) for pid in pids),
        nodes=(Node("/dev/nvidia0", 195, 0, uuid(0)), Node("/dev/nvidiactl", 195, 255, "")),
        libraries=(MappedFile("/usr/lib/libcuda.so.580.159.04", 64 * MIB, "00ff", 0o100755),),
        timing=(Step("inspect", 0.0, 0.25), Step("dump", 0.25, 0.5)),
    )


class Family:
    """A container's processes: an init, and children of it that sleep until the family is closed."""

    _SLEEP = "sleep 600 </dev/null >/dev/null 2>&1 &"
    _INIT = f"while read -r word; do if [ $word = lose ]; then ({_SLEEP}); else {_SLEEP} fi; echo; done"

    def __init__(self, *before: str, cgroup: str = "") -> None:
        """`before`: a command that runs init, such as unshare; `cgroup`: a folder in which init starts."""
        enter = f"echo $$ > {shlex.quote(cgroup)}/cgroup.procs; " if cgroup else ""
        script = f"{enter}echo; {self._INIT}"
        self._first = subprocess.Popen(
            [*before, "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._first.stdout is not None
        self._first.stdout.readline()
        self.init = _children(self._first.pid)[0] if before else self._first.pid
        self.pids: list[int] = []

    def spawn(self) -> int:
        """One more child of init; its PID in our namespace."""
        return self._more("spawn", self.init)

    def lose(self, adopter: int) -> int:
        """One more process, whose parent ends: a child of `adopter`, PID 1 of their namespace."""
        return self._more("lose", adopter)

    def _more(self, word: str, parent: int) -> int:
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        known = {*_children(parent)}
        print(word, file=self._first.stdin, flush=True)
        self._first.stdout.readline()
        wait_for(lambda: {*_children(parent)} - known, f"a child of process {parent}")
        (pid,) = {*_children(parent)} - known
        wait_for(lambda: proc.comm(pid) == "sleep", f"sleep in process {pid}")
        self.pids.append(pid)
        return pid

    def end(self, pid: int) -> None:
        """Kill one of them and wait until it is no more than a zombie."""
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not proc.is_running(pid), f"the end of process {pid}")

    def __enter__(self) -> Family:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in (*self.pids, *({self.init} - {self._first.pid})):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            for stream in (self._first.stdin, self._first.stdout):
                assert stream is not None
                stream.close()
        self._first.kill()
        self._first.wait(DEADLINE)
        for pid in self.pids:
            wait_for(lambda pid=pid: not proc.is_running(pid), f"the end of process {pid}")  # type: ignore[misc]


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    return [int(word) for word in text.split()]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a driver's operation on a process."""

    operation: str
    pid: int
    thread: str


@dataclass
class FakeDriver:
    """A driver whose processes are real and whose GPU states are kept here."""

    gpus: tuple[Gpu, ...] = (gpu(0),)
    vendor: str = "nvidia"
    plugin: Plugin | None = None
    version: str = "580.159.04"
    states: dict[int, ProcessState] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)
    idle: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Device files that a process without GPU state holds."""
    files: tuple[str, ...] = ()
    """Paths that are this vendor's device files, which processes hold in earnest."""
    dev: tuple[Node, ...] = ()
    """The nodes of the container's /dev."""
    pairs: dict[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """By PID, what its restore was asked for."""
    calls: list[Call] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _hooks: list[tuple[str, int | None, Callable[[int], None]]] = field(default_factory=list)
    _faults: list[tuple[str, int | None, GpuError, int]] = field(default_factory=list)

    def use(self, pid: int, *, memory: int = 3 * MIB, state: ProcessState = RUNNING) -> int:
        """Give a process GPU state."""
        self.states[pid], self.used[pid] = state, memory
        return pid

    def fail(self, operation: str, pid: int | None, error: GpuError, *, times: int = 1 << 30) -> None:
        """Have an operation on a process (None: on any) raise, so many times."""
        self._faults.append((operation, pid, error, times))

    def when(self, operation: str, action: Callable[[int], object], pid: int | None = None) -> None:
        """Call `action` with the PID at the operation's next call, before it does anything."""
        self._hooks.append((operation, pid, lambda number: void(action(number))))

    def of(self, operation: str) -> list[int]:
        """The PIDs that an operation was called with, in order."""
        return [call.pid for call in self.calls if call.operation == operation]

    def _called(self, operation: str, pid: int = 0) -> None:
        with self._lock:
            self.calls.append(Call(operation, pid, threading.current_thread().name))
            due = [hook for hook in self._hooks if hook[0] == operation and hook[1] in (None, pid)]
            for hook in due:
                self._hooks.remove(hook)
        for hook in due:
            hook[2](pid)
        with self._lock:
            for at, (name, whom, error, times) in enumerate(self._faults):
                if name == operation and whom in (None, pid) and times:
                    self._faults[at] = (name, whom, error, times - 1)
                    raise error

    def _step(self, operation: str, pid: int, before: ProcessState, after: ProcessState) -> None:
        self._called(operation, pid)
        with self._lock:
            if not proc.is_running(pid):
                raise ProcessGone(f"process {pid} has ended", pid=pid)
            if self.states.get(pid) is not before:
                raise IllegalState(f"process {pid} is not {before.name.lower()}", pid=pid)
            self.states[pid] = after

    def open(self) -> None:
        """As the protocol says."""
        self._called("open")

    def host(self) -> Host:
        """As the protocol says."""
        self._called("host")
        return Host(self.vendor, self.version, "13.0", self.gpus)

    def state(self, pid: int) -> ProcessState | None:
        """As the protocol says."""
        self._called("state", pid)
        return self.states.get(pid) if proc.is_running(pid) else None

    def nodes(self, pid: int | None = None) -> tuple[Node, ...]:
        """Those of this host; every process has the nodes of its `dev`, or else all of them."""
        self._called("nodes", pid or 0)
        own = (Node(f"/dev/nvidia{g.minor}", 195, g.minor, g.uuid) for g in self.gpus)
        every = (*own, Node("/dev/nvidiactl", 195, 255))
        return tuple(sorted(every if pid is None else self.dev or every))

    def restore_thread(self, pid: int) -> int:
        """As the protocol says."""
        return pid

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int]]:
        """As the protocol says."""
        self._called("memory_used")
        return {pid: {self.gpus[0].uuid: self.used[pid]} for pid in pids if pid in self.used}

    def list_handles(self, pid: int) -> tuple[str, ...]:
        """As the protocol says, but for suspended processes, whose libcuda would give them away instead."""
        held = self.list_held(pid)
        found = sorted({path for _, path in held.descriptors} | {path for *_, path in held.mappings})
        return tuple(found) or (("/dev/nvidia0",) if pid in self.states else ())

    def holds(self, pid: int) -> bool:
        """As the protocol says, and as `list_handles`."""
        return bool(self.list_handles(pid))

    def list_held(self, pid: int) -> HeldFiles:
        """As the protocol says; those of `idle` have numbers that no descriptor has."""
        invented = [(1 << 30 | at, path) for at, path in enumerate(self.idle.get(pid, ()))]
        if not self.files or not proc.is_running(pid):
            return HeldFiles(tuple(invented), ())
        links = ((int(name), _link(f"/proc/{pid}/fd/{name}")) for name in os.listdir(f"/proc/{pid}/fd"))
        opened = sorted((number, path) for number, path in links if path in self.files)
        mapped = [(m.start, m.end, m.name) for m in mappings(pid) if m.name in self.files]
        return HeldFiles((*invented, *opened), tuple(mapped))

    def list_visible(self, pid: int) -> tuple[str, ...]:
        """As the protocol says: all GPUs."""
        return tuple(each.uuid for each in self.gpus) if pid in self.states else ()

    def lock(self, pid: int, *, timeout: float) -> None:
        """As the protocol says."""
        assert timeout > 0
        self._step("lock", pid, RUNNING, LOCKED)

    def checkpoint(self, pid: int) -> None:
        """As the protocol says."""
        self._step("checkpoint", pid, LOCKED, CHECKPOINTED)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]] = ()) -> None:
        """As the protocol says."""
        self._step("restore", pid, CHECKPOINTED, LOCKED)
        self.pairs[pid] = tuple(pairs)

    def unlock(self, pid: int) -> None:
        """As the protocol says."""
        self._step("unlock", pid, LOCKED, RUNNING)


def _link(path: str) -> str:
    with suppress(FileNotFoundError):  # closed since
        return os.readlink(path)
    return ""


def void(_: object) -> None:
    """Drop a value."""


_RUNTIME = r"""#!/bin/sh
here=@HERE@
printf '%s\n' "$*" >>"$here/calls"
[ ! -e "$CRIU_CONFIG_FILE" ] || cat "$CRIU_CONFIG_FILE" >"$here/criu.conf"
# An error as crun says it: to its log, or else to stderr.
say() {
    if [ -n "$log" ]; then
        printf '{"msg":"%s","level":"error","time":"2026-01-01T00:00:00Z"}\n' "$1" >>"$log"
    else
        printf '%s\n' "$1" >&2
    fi
}
while [ $# -gt 0 ]; do
    case $1 in
    --version) printf 'crun version 1.21\ncommit: 0\n+SYSTEMD +CRIU\n'; exit 0 ;;
    --log) log=$2; shift ;;
    --image-path) image=$2; shift ;;
    --work-path) work=$2; shift ;;
    --pid-file) pid_file=$2; shift ;;
    --bundle | --root | --log-format | --manage-cgroups-mode) shift ;;
    --leave-running) leave=1 ;;
    -*) ;;
    *) if [ -z "$command" ]; then command=$1; else id=$1; fi ;;
    esac
    shift
done
if [ "$command" = state ]; then
    [ -e "$here/state.json" ] || { say "error opening file status: No such file or directory"; exit 1; }
    cat "$here/state.json"
else
    . "$here/$command.sh"
fi
"""
_SCRIPTS = {
    "checkpoint": """echo pages >"$image/pages-1.img"; echo inventory >"$image/inventory.img"
        [ -n "$leave" ] || { kill -9 $(cat "$here/pids"); rm "$here/state.json"; }""",
    "restore": """cp "$here/restored.json" "$here/state.json"
        [ -z "$pid_file" ] || cat "$here/pid" >"$pid_file" """,
    "delete": """kill -9 $(cat "$here/pids"); rm -f "$here/state.json" """,
}


class FakeRuntime:
    """A program in the place of crun 1.21; what its commands do are shell lines that a test may replace.

    They find the values of the options in $image, $work, $log, $pid_file, $leave and $id.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.path = folder / "crun"
        self.path.write_text(_RUNTIME.replace("@HERE@", shlex.quote(str(folder))), "utf-8")
        self.path.chmod(0o755)
        for command, lines in _SCRIPTS.items():
            self.script(command, lines)

    def script(self, command: str, lines: str, *, default: bool = False) -> None:
        """What a command does from now on; `default`: followed by what it does by default."""
        text = f"{lines}\n{_SCRIPTS[command]}" if default else lines
        (self.folder / f"{command}.sh").write_text(text, "utf-8")

    def real(self) -> RealRuntime:
        """What gpusnap finds out about it."""
        return identify(self.path)

    def knows(self, state: Mapping[str, object], pids: Iterable[int], *, restored: bool = False) -> None:
        """Have it know a container; `restored`: only once that is restored."""
        (self.folder / ("restored.json" if restored else "state.json")).write_text(json.dumps(state), "utf-8")
        (self.folder / "pids").write_text(" ".join(map(str, pids)), "ascii")
        (self.folder / "pid").write_text(str(state["pid"]), "ascii")

    def calls(self, command: str = "") -> list[str]:
        """The lines that it was called with, or those of one command."""
        path = self.folder / "calls"
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        return [line for line in lines if not command or command in line.split()]

    def criu_config(self) -> str:
        """CRIU's configuration of its last call that had one."""
        return (self.folder / "criu.conf").read_text("utf-8")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What gpusnap-runtime's caller sees."""

    code: int
    stderr: str
    log: tuple[dict[str, Any], ...]

    def sentence(self) -> str:
        """The one sentence of a failure: on stderr and in the log, and nothing beside it."""
        assert self.code != 0
        lines = self.stderr.splitlines()
        assert len(lines) == 1, self.stderr
        assert len(self.log) == 1, self.log
        assert self.log[0]["level"] == "error"
        assert self.log[0]["msg"] == lines[0]
        assert lines[0].startswith("gpusnap: ")
        assert not [words for words in POISON if words in lines[0].lower()]
        return lines[0].removeprefix("gpusnap: ")


class Scene:
    """A container with GPU processes, under gpusnap-runtime in front of a fake runtime and driver."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
        *before: str,
    ) -> None:
        self.folder, self._capfd = folder, capfd
        self.monkeypatch = monkeypatch
        self.driver = FakeDriver()
        self.runtime = FakeRuntime(folder / "runtime")
        self.settings = Settings(runtime=str(self.runtime.path), memory=Memory(pages="criu"))
        self.bundle = folder / "bundle"
        self.image = folder / "image"
        self.log = folder / "log.json"
        self.bundle.mkdir()
        self.write_config({})
        self.family = Family(*before)
        monkeypatch.setattr(dispatch, "find_driver", lambda: self.driver)
        monkeypatch.setattr(dispatch, "find_drivers", lambda: (self.driver,))
        monkeypatch.setattr(choose_driver, "find_drivers", lambda: (self.driver,))
        monkeypatch.setattr(dispatch, "load_usable", lambda: self.settings)
        monkeypatch.setattr(locate, "setting", lambda: self.settings.runtime)
        monkeypatch.setattr(locate, "become", _never_become)
        monkeypatch.setattr(gpu_state, "_PAUSE", 0.0)
        from gpusnap.runtime_shim.snapshot import restore

        monkeypatch.setattr(restore, "find_driver", lambda: self.driver)
        monkeypatch.setattr(remap, "_has_hosts_dev", lambda init: False)  # though these processes share it
        monkeypatch.setattr(journal, "FOLDER", str(folder / "gpusnap" / "journal"))
        monkeypatch.setattr(dispatch, "JOURNAL", journal.FOLDER)
        self.room = str(folder / "gpusnap" / "room")
        monkeypatch.setattr(reservations, "FOLDER", self.room)

    def __enter__(self) -> Scene:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.family.__exit__(kind, error, trace)

    def write_config(self, annotations: Mapping[str, str]) -> None:
        """The bundle's config.json."""
        config = {"ociVersion": "1.0.2", "annotations": dict(annotations), "mounts": []}
        (self.bundle / "config.json").write_text(json.dumps(config), "utf-8")

    def state(self, **changed: object) -> dict[str, object]:
        """The container's state, as a runtime gives it."""
        known: dict[str, object] = {"id": ID, "pid": self.family.init, "status": "running"}
        return known | {"ociVersion": "1.0.2", "bundle": str(self.bundle), "annotations": {}} | changed

    def gpu_processes(self, count: int = 2) -> list[int]:
        """So many processes that use a GPU."""
        return [self.driver.use(self.family.spawn()) for _ in range(count)]

    def checkpoint(self, *options: str, **state: object) -> Outcome:
        """`checkpoint` of the container, which the runtime knows."""
        self.runtime.knows(self.state(**state), [*self.family.pids, self.family.init])
        return self._run("checkpoint", "--image-path", str(self.image), *options, ID)

    def restore(self, *options: str) -> Outcome:
        """`restore` of the container, which the runtime knows from then on."""
        self.runtime.knows(self.state(), [*self.family.pids, self.family.init], restored=True)
        place = ("--image-path", str(self.image), "--bundle", str(self.bundle))
        return self._run("restore", *place, *options, ID)

    def _run(self, *line: str) -> Outcome:
        self.log.unlink(missing_ok=True)
        self._capfd.readouterr()
        code = dispatch.main(["--log", str(self.log), "--log-format", "json", *line])
        text = self.log.read_text("utf-8") if self.log.exists() else ""
        return Outcome(
            code, self._capfd.readouterr().err, tuple(json.loads(line) for line in text.splitlines())
        )

    def all_running(self) -> bool:
        """Whether every process that has GPU state and still is there runs on its GPU."""
        here = {pid: state for pid, state in self.driver.states.items() if proc.is_running(pid)}
        return all(state is RUNNING for state in here.values())

    def content(self) -> dict[str, str]:
        """The files of the image directory with what is in them."""
        if not self.image.exists():
            return {}
        files = [path for path in self.image.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.image)): path.read_text("utf-8") for path in files}

    def set(self, **changed: Any) -> None:
        """Change settings."""
        self.settings = replace(self.settings, **changed)


class HandedOverMemory(BaseException):
    """In place of an exec, after which nothing of ours runs any more: nobody catches it."""


def _never_become(path: str, args: list[str]) -> None:
    raise HandedOverMemory(f"handed over to {path} {args}")


def unshare_works(*options: str) -> bool:
    """Whether this user may make namespaces so."""
    program = shutil.which("unshare")
    if program is None:
        return False
    return subprocess.run([program, *options, "true"], capture_output=True, check=False).returncode == 0


@contextmanager
def exporting(folder: Path, archive: str) -> Iterator[None]:
    """A program that looks as a Podman does which exports a container."""
    podman = folder / "podman"
    if not podman.is_symlink():
        podman.symlink_to("/bin/sh")
    with subprocess.Popen(
        [podman, "-c", "echo; read x", "container", "checkpoint", "--export", archive, "c0ffee"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield
        child.communicate(b"")
