"""A private containerd, its ctr, and gpuwork in containers that it runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gpuhost
import host_state
import shimhost
from support import DEADLINE, GPUWORK, GPUWORK_LINE, RUNTIME, good, run, until

__all__ = [
    "BASE",
    "LOG_SIZE",
    "Containerd",
    "Work",
    "answers",
    "containerd",
    "end",
    "end_shims",
    "gpu_options",
    "launch",
    "link_libraries",
    "recorded",
    "restored_from",
    "spare_old_groups",
    "version",
]

BASE = "localhost/base:latest"
_ARCHIVE = "/usr/share/gpusnap/base.oci.tar"
_CRI = "io.containerd.grpc.v1.cri"
LOG_SIZE = 1 << 20
"""Bytes of a Work's log from the first on: a file whose size has changed since a dump is not restored."""
_TICK = re.compile(rb"pid=(\d+) tick=(\d+) (ok|BAD)[^\n\0]*\n")
_CRIU_CONF = Path("/etc/criu/runc.conf")
_DETACH = 2  # sys/mount.h, MNT_DETACH

_CONFIG = """\
version = 2
root = "{folder}/root"
state = "{folder}/state"
{disabled}
{config}
[grpc]
address = "{address}"
"""


@dataclass(frozen=True)
class Containerd:
    """A running containerd: its socket, and the folder that has its root, state and log."""

    address: Path
    folder: Path

    def ctr(
        self, *args: str | os.PathLike[str], check: bool = True, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ctr to its end; with `check` a failure is an AssertionError that has what it said.

        One that does not end is an AssertionError that has what all processes do.
        """
        try:
            done = subprocess.run(
                ["ctr", "--address", self.address, *args],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"ctr {args}: not within {timeout:g} s\n{host_state.describe()}") from error
        if check:
            assert done.returncode == 0, f"ctr {args}: {done.stdout}{done.stderr}\n{self.criu_errors()}"
        return done

    def start(
        self, name: str, *command: str, options: Sequence[str] = (), runtime: str | os.PathLike[str] = RUNTIME
    ) -> None:
        """Start a container of the base image in the background; `runtime` is BinaryName.

        Without a CPU weight: its default would want the cpu controller, which where version 1 of the cgroups
        is beside version 2 belongs to version 1.
        """
        words = ["--detach", "--null-io", "--cpu-shares", "0", "--runc-binary", os.fspath(runtime)]
        self.ctr("run", *words, *options, BASE, name, *command)

    def tasks(self, namespace: str = "default") -> dict[str, tuple[int, str]]:
        """PID of init and status (RUNNING, PAUSED, STOPPED) of every task, by name."""
        listed = self.ctr("--namespace", namespace, "task", "ls").stdout
        lines = [line.split() for line in listed.splitlines()[1:]]
        return {name: (int(pid), status) for name, pid, status in lines}

    def bundle(self, name: str) -> Path:
        """The bundle of a task."""
        return self.folder / "state/io.containerd.runtime.v2.task/default" / name

    def remove(self, name: str) -> None:
        """Kill a container's task, if it has one, and remove both."""
        if self.ctr("task", "kill", "--all", "--signal", "SIGKILL", name, check=False).returncode == 0:
            until(lambda: self.tasks().get(name, (0, "STOPPED"))[1] == "STOPPED", f"the end of task {name}")
        self.ctr("task", "rm", "--force", name, check=False)
        if self.ctr("container", "rm", name, check=False).returncode != 0 and name in self.tasks():
            # What crun could not restore containerd cannot delete, as long as its shim runs.
            end_shims(self.address, name)
            until(lambda: name not in self.tasks(), f"the end of the shim of {name}")
            self.ctr("container", "rm", name)
        self.ctr("snapshot", "rm", name, check=False)

    def remove_all(self) -> None:
        """Remove every container."""
        for name in self.ctr("container", "ls", "--quiet").stdout.split():
            self.remove(name)

    def criu_errors(self) -> str:
        """The errors in CRIU's logs of all tasks, for the message of a failed test."""
        lines = []
        for log in (self.folder / "state").rglob("*.log"):
            if log.name in ("criu-dump.log", "dump.log", "restore.log"):
                text = log.read_text(errors="replace").splitlines()
                lines += [f"{log.name}: {line}" for line in text if "Error" in line][:8]
        return "\n".join(lines)


@contextmanager
def containerd(folder: Path, *, config: str = "") -> Iterator[Containerd]:
    """A containerd with the base image until the context ends; its folder, which must be there, is its own.

    `config` is more of its configuration (version 2): keys first, then tables. CRI is off unless that speaks
    of it.
    """
    address = folder / "containerd.sock"
    disabled = "" if _CRI in config or "disabled_plugins" in config else f'disabled_plugins = ["{_CRI}"]'
    (folder / "config.toml").write_text(
        _CONFIG.format(folder=folder, address=address, disabled=disabled, config=config)
    )
    server = Containerd(address, folder)
    child = launch(server)
    try:
        until(lambda: answers(server, child), "containerd")
        server.ctr("image", "import", _ARCHIVE)
        yield server
    finally:
        if child.poll() is None:
            with contextlib.suppress(AssertionError):
                server.remove_all()
        end(child)
        end_shims(address)
        _unmount(folder)


def launch(server: Containerd) -> subprocess.Popen[bytes]:
    """Start the containerd of this folder, once more if it was killed."""
    with (server.folder / "log").open("ab") as log:
        return subprocess.Popen(
            ["containerd", "--config", server.folder / "config.toml", "--log-level", "info"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def answers(server: Containerd, child: subprocess.Popen[bytes]) -> bool:
    """Whether it answers; an AssertionError if it has ended."""
    assert child.poll() is None, f"containerd ended:\n{(server.folder / 'log').read_text(errors='replace')}"
    return server.ctr("version", check=False).returncode == 0


def end(child: subprocess.Popen[bytes]) -> None:
    """End a containerd; its shims and tasks run on."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(DEADLINE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def end_shims(address: Path, name: str = "") -> None:
    """Shims outlive their containerd; each has its address, and its task's name, among its arguments."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            ours = b"containerd-shim" in words[0] and os.fsencode(address) in words
            if ours and (not name or name.encode() in words):
                os.kill(int(folder.name), signal.SIGKILL)


def _unmount(folder: Path) -> None:
    """What a container that could not be removed has left mounted would keep the folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        if (target := line.split()[1]).startswith(f"{folder}/"):
            libc.umount2(target.encode(), _DETACH)


@contextmanager
def spare_old_groups(real: str) -> Iterator[str]:
    """Keep CRIU from version 1 of the cgroups, should it be there beside version 2, as docs/settings.md says.

    Each restore would make groups there that the next dump takes along. The value is lines of settings.
    """
    if real == "crun":
        yield '[criu]\nmanage-cgroups = "ignore"\n'
        return
    _CRIU_CONF.parent.mkdir(exist_ok=True)
    _CRIU_CONF.write_text("manage-cgroups=ignore\n")
    try:
        yield ""
    finally:
        _CRIU_CONF.unlink()


@contextmanager
def restored_from(server: Containerd, image: Path, config: Path, folder: Path, name: str) -> Iterator[None]:
    """A container from what `ctr task checkpoint --image-path` wrote, restored by the runtime itself.

    ctr has no command for that. `config`: the config.json of the task. `folder`: a new one, for the bundle.
    `name`: of the task, whose snapshot is the root file system. The container is removed at the end.
    """
    bundle = folder / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    shutil.copy(config, bundle / "config.json")
    good(run(*server.ctr("snapshot", "mounts", bundle / "rootfs", name).stdout.split()))
    runtime = (RUNTIME, "--root", str(folder / "root"))
    try:
        words: list[str | Path] = ["--bundle", bundle, "--image-path", image, "--detach"]
        good(run(*runtime, "restore", *words, "again"))
        yield
    finally:
        run(*runtime, "delete", "--force", "again")
        run("umount", bundle / "rootfs")


@contextmanager
def recorded(file: Path) -> Iterator[Callable[[], list[str]]]:
    """A reader of `file`, which gets the words of each start of gpusnap-runtime's Python in the block."""
    entry, beside = shimhost.ENTRY, shimhost.ENTRY.with_suffix(".recorded")
    file.touch()
    entry.rename(beside)
    try:
        entry.write_text(f'#!/bin/sh\nprintf \'%s\\n\' " $* " >>{file}\nexec {beside} "$@"\n')
        entry.chmod(0o755)
        yield lambda: file.read_text().splitlines()
    finally:
        beside.rename(entry)


def version() -> tuple[int, ...]:
    """containerd's version: (1, 7, 24)."""
    said = subprocess.run(["containerd", "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r" v?(\d+)\.(\d+)\.(\d+)", said)
    assert match, said
    return tuple(int(number) for number in match.groups())


def gpu_options(gpus_conf: str, *, minors: Sequence[int] | None = None) -> list[str]:
    """What `ctr run` needs to give a container softgpu's GPUs, all or those; gpuwork is at /gpuwork there.

    As CDI would have it, which the ctr of containerd 1.7 does not know; see `link_libraries`.
    """
    driver = gpuhost.Driver.parse(gpus_conf)
    libraries = [f"{gpuhost.LIBRARY_DIR}/{name}.so.{driver.version}" for name in gpuhost.LIBRARIES]
    words = []
    for path in libraries:
        words += ["--mount", f"type=bind,src={path},dst={path},options=rbind:ro:nosuid:nodev:rprivate"]
    words += ["--mount", f"type=bind,src={GPUWORK},dst=/gpuwork,options=rbind:ro"]
    state = gpuhost.STATE_DIR
    words += ["--mount", f"type=bind,src={state},dst={state},options=rbind:rw:nosuid:nodev:rprivate"]
    chosen = [gpu.minor for gpu in driver.gpus if minors is None or gpu.minor in minors]
    for name in [*(f"nvidia{minor}" for minor in chosen), "nvidiactl", "nvidia-uvm"]:
        words += ["--device", f"/dev/{name}"]
    return words


def link_libraries(gpus_conf: str) -> str:
    """A shell command that does in the container what NVIDIA's CDI hooks do: the libraries' short names."""
    version = gpuhost.Driver.parse(gpus_conf).version
    links = [f"ln -sf {name}.so.{version} {name}.so.1" for name in gpuhost.LIBRARIES]
    return " && ".join([f"cd {gpuhost.LIBRARY_DIR}", *links, "cd /"])


@dataclass(frozen=True)
class Work:
    """A container in which gpuwork runs, and beside it a process without a GPU that counts.

    Both write to files of one folder of the host: gpuwork its ticks, over zeros from the start of `log`, and
    the counter a number of ten digits to `count`. Neither changes a file's size.
    """

    server: Containerd
    name: str
    folder: Path

    @classmethod
    def start(
        cls,
        server: Containerd,
        name: str,
        folder: Path,
        gpus_conf: str,
        *words: str,
        minors: Sequence[int] | None = None,
        options: Sequence[str] = (),
        runtime: str | os.PathLike[str] = RUNTIME,
        workers: int = 1,
    ) -> Work:
        """Start gpuwork with `words`; returns when each worker has ticked twice and the counter counts."""
        work = cls(server, name, folder)
        folder.mkdir(exist_ok=True)
        work.clear_log()
        (folder / "errors").touch()
        work.count_file.write_text("0000000000")
        share = ["--mount", f"type=bind,src={folder},dst=/out,options=rbind:rw"]
        counter = "i=0; while :; do i=$((i+1)); printf %010d $i 1<>/out/count; sleep 0.01; done"
        script = f"{link_libraries(gpus_conf)}; ( {counter} ) & exec {' '.join((*GPUWORK_LINE, *words))}"
        given = [*gpu_options(gpus_conf, minors=minors), *share, *options]
        server.start(name, "sh", "-c", f"{script} 1<>/out/log 2>/out/errors", options=given, runtime=runtime)
        until(
            lambda: work.count > 1 and len([t for t in work.ticks().values() if len(t) > 1]) >= workers,
            f"the first ticks of {name}: {(folder / 'errors').read_text()}",
        )
        return work

    @property
    def log_file(self) -> Path:
        return self.folder / "log"

    @property
    def count_file(self) -> Path:
        return self.folder / "count"

    @property
    def count(self) -> int:
        """What the counter has come to."""
        return int(self.count_file.read_text())

    @property
    def pid(self) -> int:
        """Of init."""
        return self.server.tasks()[self.name][0]

    @property
    def status(self) -> str:
        """RUNNING, PAUSED, STOPPED; empty where there is no such task."""
        return self.server.tasks().get(self.name, (0, ""))[1]

    def clear_log(self) -> None:
        """Forget the ticks, for what comes from an earlier state of the container."""
        self.log_file.touch()
        with self.log_file.open("r+b") as file:
            file.write(bytes(LOG_SIZE))

    def ticks(self) -> dict[int, list[int]]:
        """The ticks by worker; fails on one that found a wrong byte or left one out."""
        found: dict[int, list[int]] = {}
        for match in _TICK.finditer(self.log_file.read_bytes()):
            assert match[3] == b"ok", f"wrong bytes: {match[0]!r}"
            found.setdefault(int(match[1]), []).append(int(match[2]))
        for pid, numbers in found.items():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), f"worker {pid}: {numbers}"
        return found

    def goes_on(self, *, more: int = 3) -> None:
        """Wait until every worker has ticked on with every byte right, and the counter counted."""
        before = {pid: numbers[-1] for pid, numbers in self.ticks().items()}
        count = self.count
        assert before, f"no ticks: {self.log_file.read_bytes().strip(bytes(1))[-500:]!r}"
        until(
            lambda: all(self.ticks()[pid][-1] >= last + more for pid, last in before.items()),
            f"{more} more ticks of each worker of {self.name}",
        )
        until(lambda: self.count > count, f"the counter of {self.name}")

    def back(self, *, workers: int = 1) -> None:
        """After a restore, and a `clear_log` before it: wait until every worker ticks on."""
        until(lambda: len(self.ticks()) >= workers, f"ticks of {self.name} after its restore")
        self.goes_on()

    def stands(self, seconds: float = 0.2) -> bool:
        """Whether neither a tick nor the counter comes for so long."""
        before = self.log_file.read_bytes(), self.count
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (self.log_file.read_bytes(), self.count) != before:
                return False
        return True

    def remove(self) -> None:
        self.server.remove(self.name)
