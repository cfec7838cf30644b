"""Podman with gpusnap-runtime, and a workload whose every byte is checked."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import resource
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import host_state
import waiting

RUNTIME = "/usr/local/bin/gpusnap-runtime"
GPUWORK = "/usr/local/bin/gpuwork"
# It rests, so that it leaves the cores to what is tested: each tick checks every byte.
GPUWORK_LINE = ("/gpuwork", "--tick", "30", "--rest", "24", "--mib", "4")
STORAGE = Path("/var/lib/containers/storage/overlay-containers")
RUN = Path("/run/containers/storage/overlay-containers")
# JSON lists of containers with their names; those with --rm have one of their own (containers/storage).
CONTAINERS = (STORAGE / "containers.json", STORAGE / "volatile-containers.json")
STATE = Path("/run/softgpu")
# Seconds. Nobody waits for so long but where something is broken; a busy machine may need a good part of it.
DEADLINE = 90.0

GPUS_CONF = """\
driver 560.35.03
cuda 12.6
gpu uuid=GPU-11111111-2222-3333-4444-000000000000 minor=0 cc=9.0 memory=2GiB name=Soft H100
gpu uuid=GPU-11111111-2222-3333-4444-000000000001 minor=1 cc=9.0 memory=2GiB name=Soft H100
"""

# What Podman makes of a message that holds these words hides the message (libpod, getOCIRuntimeError).
SWALLOWED = re.compile(
    r"permission denied|no such file or directory|executable file not found", re.IGNORECASE
)

_LIBC = ctypes.CDLL(None, use_errno=True)
_TICK = re.compile(r"pid=(\d+) tick=(\d+) (ok|BAD)")


def until(condition: Callable[[], Any], what: str, *, deadline: float = DEADLINE) -> Any:
    """Wait until the condition gives something, and return it."""
    end = time.monotonic() + deadline
    while True:
        begun = time.monotonic()
        found = condition()
        now = time.monotonic()
        if found:
            return found
        if now > end:
            raise AssertionError(f"not within {deadline:g} s: {what}\n{host_state.describe()}")
        # A condition that runs a command must not take a core from what it waits for.
        time.sleep(max(0.02, now - begun))


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str


def _environment() -> dict[str, str]:
    """Nothing but what all users have, and Go's collector (testhost/enter.py)."""
    return {"HOME": "/root", **{name: os.environ[name] for name in ("PATH", "GOGC") if name in os.environ}}


def run(
    *argv: str | os.PathLike[str], env: dict[str, str] | None = None, seconds: float = 2 * DEADLINE
) -> Done:
    """Run a command to its end, whatever its exit code. Raises TookTooLong after so many seconds."""
    with waiting.Process(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment() if env is None else env,
    ) as process:
        try:
            out, err = waiting.communicate(process, seconds)
        except BaseException:
            process.kill()
            raise
    return Done(process.returncode, out, err)


def kill_at(
    step: str, line: Sequence[str | os.PathLike[str]], *, stdout: int | IO[bytes] = subprocess.DEVNULL
) -> None:
    """Kill gpusnap as it begins a step; `line` has --debug.

    The pipe for its steps holds one line (O_DIRECT of pipe(2)), and the line of this step stays in it. So on
    the busiest machine it comes no further than to what it says next.
    """
    reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, resource.getpagesize())
    begins, said, end = f"gpusnap: step {step}\n".encode(), b"", time.monotonic() + 4 * DEADLINE
    with (
        open(reader, "rb", buffering=0) as pipe,
        waiting.Process(line, stdin=subprocess.DEVNULL, stdout=stdout, stderr=writer) as shim,
    ):
        os.close(writer)
        try:
            while True:
                # Not until the end of what is said: a restored container keeps the pipe open.
                over = shim.poll() is not None or time.monotonic() > end
                text = _peek(reader)
                if begins in said + text:
                    break
                if not text and over:
                    raise AssertionError(f"no step {step}: {said.decode(errors='replace')}")
                said += pipe.read(1 << 16) if text else b""
        finally:
            shim.kill()


def _peek(reader: int) -> bytes:
    """What a read of this pipe would return, which stays in it; b"" where nothing comes for a moment."""
    if not select.select([reader], [], [], 0.2)[0]:
        return b""
    copy, into = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
    with open(copy, "rb", buffering=0) as copied, open(into, "wb", buffering=0):
        size = _LIBC.tee(reader, into, resource.getpagesize(), 0)
        if size < 0:
            raise OSError(ctypes.get_errno(), "tee")
        return copied.read(1 << 16) if size else b""


def podman(*argv: str | os.PathLike[str], runtime: str = "gpusnap-runtime") -> Done:
    """Run Podman with gpusnap-runtime as its runtime."""
    return run("podman", "--runtime", runtime, *argv)


def good(done: Done) -> str:
    """The output of a command that must have succeeded."""
    assert done.code == 0, f"exit code {done.code}\n{done.out}{done.err}\n{criu_errors()}"
    return done.out.strip()


def criu_errors() -> str:
    """The errors in CRIU's logs of all containers that are left, for the message of a failed test."""
    lines = []
    for log in STORAGE.glob("*/userdata/*.log"):
        if log.name in ("dump.log", "restore.log"):
            text = log.read_text(errors="replace").splitlines()
            lines += [f"{log.name}: {line}" for line in text if "Error" in line][:8]
    return "\n".join(lines)


def sentence(done: Done) -> str:
    """The one sentence that a refused command gave; checked for what every such sentence must be."""
    assert done.code != 0, f"it succeeded:\n{done.out}{done.err}"
    lines = [line for line in done.err.splitlines() if "gpusnap: " in line]
    texts = {line.partition("gpusnap: ")[2] for line in lines}
    assert len(texts) == 1, f"not one sentence but {len(texts)}:\n{done.err}"
    text = texts.pop()
    assert not SWALLOWED.search(text), text
    assert "Traceback" not in done.err, done.err
    return text


@dataclass(frozen=True)
class Container:
    """A running container of the workload."""

    name: str

    @classmethod
    def start(
        cls,
        name: str,
        *words: str,
        options: Sequence[str] = (),
        gpus: Sequence[str] = ("all",),
        workers: int = 1,
        script: str = "",
    ) -> Container:
        """Start gpuwork with `words`, or a shell script; returns when each worker has ticked twice.

        It has 4 MiB of each GPU where the words say nothing else.
        """
        devices = [word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}")]
        mount = ["-v", f"{GPUWORK}:/gpuwork:ro"]
        command = ["sh", "-c", script] if script else [*GPUWORK_LINE, *words]
        good(podman("run", "-d", "--name", name, *devices, *mount, *options, "localhost/base", *command))
        container = cls(name)

        def ticking() -> bool:
            return len([ticks for ticks in container.ticks().values() if len(ticks) > 1]) >= workers

        if workers:
            until(ticking, f"the first ticks of {name}")
        return container

    def log(self) -> str:
        return podman("logs", self.name).out

    def _read_log(self) -> str:
        """What `podman logs` prints, from the file itself: waiting for a tick reads it many times."""
        try:
            (own,) = ids_of(self.name)
            return log_text((STORAGE / own / "userdata/ctr.log").read_text(errors="replace"))
        except (FileNotFoundError, ValueError):
            return ""  # there is no such container, or it has not begun

    def ticks(self) -> dict[int, list[int]]:
        """The ticks by worker; fails on the first one that found a wrong byte or left one out."""
        found: dict[int, list[int]] = {}
        log = self._read_log()
        for line in log.splitlines():
            match = _TICK.search(line)
            if match:
                assert match[3] == "ok", f"wrong bytes: {line}"
                numbers, tick = found.setdefault(int(match[1]), []), int(match[2])
                # With --leave-running Podman archives the log after the container ran on: it goes back once.
                found[int(match[1])] = [n for n in numbers if n < tick] + [tick]
        for pid, numbers in found.items():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), (
                f"worker {pid}: {numbers}\n{log}"
            )
        return found

    def goes_on(self, *, more: int = 3, without: Sequence[int] = ()) -> None:
        """Wait until every worker has ticked on, with no tick left out and every byte right.

        The log of a container that was restored from an image begins empty.
        """
        until(lambda: set(self.ticks()) - set(without), f"a first tick of {self.name}")
        before = {pid: numbers[-1] for pid, numbers in self.ticks().items() if pid not in without}

        def ticked() -> bool:
            now = self.ticks()
            return all(now[pid][-1] >= last + more for pid, last in before.items())

        until(ticked, f"{more} more ticks of each worker of {self.name}; log:\n{self._read_log()[-2000:]}")

    def inspect(self) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(good(podman("inspect", self.name)))
        return found[0]

    @property
    def id(self) -> str:
        """As Podman's storage has it, in a file: it is asked for often."""
        ids = ids_of(self.name)
        return ids[0] if len(ids) == 1 else str(self.inspect()["Id"])

    @property
    def pid(self) -> int:
        """Of one that has been started, as conmon writes it to a file: it is asked for often."""
        return int((RUN / self.id / "userdata/pidfile").read_text())

    @property
    def image_path(self) -> Path:
        return STORAGE / self.id / "userdata" / "checkpoint"

    def checkpoint(self, archive: Path, *words: str) -> Done:
        return podman("container", "checkpoint", "--export", archive, *words, self.name)

    def line(self, folder: Path, *words: str, debug: bool = False) -> list[str]:
        """The runtime's own command for a checkpoint, to `image` in a folder; `debug`: it says its steps."""
        paths = ["--image-path", str(folder / "image"), "--work-path", str(folder)]
        return [RUNTIME, *["--debug"] * debug, "checkpoint", *paths, *words, self.id]

    def unharmed(self) -> None:
        """What must hold after a failed checkpoint: it runs on, GPU state right, nothing looks whole."""
        assert self.inspect()["State"]["Status"] == "running"
        self.goes_on()
        assert not (self.image_path / "gpusnap" / "manifest.json").exists()
        assert not (self.image_path / "inventory.img").exists()

    def fill_shared_memory(self, mib: int) -> None:
        """Put so many MiB, a multiple of 50, that cannot be compressed into its /dev/shm.

        The same 50 MiB again and again, further apart than gzip and Podman's zstd look back: the kernel takes
        long for random bytes.
        """
        copies = "".join(["cat /dev/shm/x0 >>/dev/shm/x\n"] * (mib // 50 - 1))
        script = f"set -e\ndd if=/dev/urandom of=/dev/shm/x0 bs=1M count=50\n{copies}"
        good(podman("exec", self.name, "sh", "-c", script))

    def remove(self) -> None:
        good(podman("rm", "--force", "--time", "0", self.name))

    @classmethod
    def restore(cls, name: str, archive: Path, *words: str) -> Container:
        good(podman("container", "restore", "--import", archive, *words))
        return cls(name)


def ids_of(name: str) -> list[str]:
    """The IDs of the containers of that name: one or none."""
    found: list[str] = []
    for path in CONTAINERS:
        with suppress(FileNotFoundError):
            listed = json.loads(path.read_text())
            found += [str(each["id"]) for each in listed if name in each.get("names", ())]
    return found


def log_text(file: str) -> str:
    """What a container has written, from a log file of the driver k8s-file (conmon, ctr_logging.c).

    A line of it is "TIME STREAM F|P TEXT": with P the text goes on in the next one. A last line that is not
    whole yet is left out.
    """
    whole, _, _ = file.rpartition("\n")
    parts = [line.split(" ", 3) for line in whole.split("\n") if line.count(" ") >= 3]
    return "".join(text + ("" if kind == "P" else "\n") for _, _, kind, text in parts)


def faults(text: str) -> None:
    """Ask softgpu for faults, see softgpu/README.md; an empty text takes them back."""
    path = STATE / "faults"
    if text:
        path.write_text(text + "\n")
    else:
        path.unlink(missing_ok=True)


def hangs_in_checkpoint(pid: int) -> bool:
    """Whether the driver hangs in a process's checkpoint, by a fault: it sleeps, and the rest is stopped.

    It sleeps for a moment, too, before it answers any question (softgpu/src/target.c).
    """
    tasks = Path(f"/proc/{pid}/task")
    stopped = (tasks / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return stopped and any("nanosleep" in path.read_text() for path in tasks.glob("*/wchan"))


@contextmanager
def no_faults_after(seconds: float) -> Iterator[None]:
    """Take the faults back, and so end what hangs, that long after the beginning of the context."""
    timer = threading.Timer(seconds, faults, [""])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        faults("")


def members(container: Container) -> list[int]:
    """PIDs of all processes of a container, from its cgroup."""
    return members_of(container.pid)


def members_of(init: int) -> list[int]:
    """The same by its init; Podman, which may be at work on the container, is not asked."""
    path = Path(f"/proc/{init}/cgroup").read_text().splitlines()
    own = next(line.split(":", 2)[2] for line in path if line.startswith("0::"))
    return [
        int(pid) for f in Path("/sys/fs/cgroup" + own).rglob("cgroup.procs") for pid in f.read_text().split()
    ]


def manifest(archive: Path) -> dict[str, Any]:
    """The manifest of an archive, as `gpusnap inspect --json` prints it."""
    found: dict[str, Any] = json.loads(good(run("/usr/local/bin/gpusnap", "inspect", "--json", archive)))
    return found


def containers_left() -> Iterator[str]:
    """Names of all containers there are, for a fixture to remove."""
    yield from good(run("podman", "ps", "--all", "--format", "{{.Names}}")).split()


def remove_left_groups() -> None:
    """Remove the groups that restores under crun leave in hierarchies of cgroup v1 that are there beside v2.

    docs/settings.md says why; each would double the next one's. No restore may be in progress.
    """
    for hierarchy in Path("/proc/self/cgroup").read_text().splitlines():
        if not hierarchy.startswith("0::"):
            _remove_groups(hierarchy.split(":")[1])


def _remove_groups(hierarchy: str) -> None:
    """Remove the empty groups of a hierarchy, which is not mounted here."""
    with tempfile.TemporaryDirectory() as place:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"none", place.encode(), b"cgroup", 0, hierarchy.encode()):
            raise OSError(ctypes.get_errno(), f"cannot mount the control groups {hierarchy}")
        for directory, _, _ in os.walk(place, topdown=False):
            if directory != place:
                with suppress(OSError):
                    os.rmdir(directory)
        libc.umount2(place.encode(), 0)
