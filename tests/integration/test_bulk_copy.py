"""Private memory that gpusnap writes into the processes while CRIU waits; they check it themselves."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import shimhost
import waiting
from support import DEADLINE, RUNTIME, STORAGE, Container, good, podman, run, sentence, until

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.restore import TIMING

# In a container: a parent and its child, with mappings of many kinds; each looks through all at each tick.
PROGRAM = """
import ctypes, hashlib, mmap, os, random, sys, time

MIB = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)
kept = []

def check(done):
    if done != 0:
        raise OSError(ctypes.get_errno(), "call")

class Memory:
    def __init__(self, mib, seed, *, every=1):
        self.map = mmap.mmap(-1, mib * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.size, self.shut = mib * MIB, False
        data = random.Random(seed)
        for at in range(0, self.size, every * MIB):
            self.map[at : at + MIB] = data.randbytes(MIB)
        self.remember()
        kept.append(self)

    def remember(self):
        self.digest = hashlib.sha1(self.map).digest()

    def protect(self, protection):
        check(libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self.size), protection))

    def right(self):
        if self.shut:
            self.protect(1)
        found = hashlib.sha1(self.map).digest() == self.digest
        if self.shut:
            self.protect(0)
        return found

own = int(sys.argv[1])
shared = Memory(12, 3)
Memory(8, 4).protect(1)
closed = Memory(8, 5)
closed.shut = True
closed.protect(0)
locked = Memory(4, 6)
check(libc.mlock(ctypes.c_void_p(locked.address), ctypes.c_size_t(locked.size)))
advised = Memory(8, 7)
check(libc.madvise(ctypes.c_void_p(advised.address), ctypes.c_size_t(advised.size), 14))
child = os.fork()
if child == 0:
    shared.map[0:MIB] = bytes(MIB)
    shared.remember()
    Memory(own + 16, 9)
else:
    Memory(own, 1)
    Memory(own // 2, 2, every=3)
name = "child" if child == 0 else "parent"
tick = 0
while True:
    wrong = [at for at, each in enumerate(kept) if not each.right()]
    print(name, tick, "BAD" if wrong else "ok", *wrong, flush=True)
    tick += 1
    time.sleep(0.2)
"""
SETTINGS = 'runtime = "{real}"\n[memory]\npages = "{pages}"\nparallel-restore = {parallel}\n'
_TICK = re.compile(r"^(parent|child) (\d+) (ok|BAD)", re.MULTILINE)


def begin(folder: Path, mib: int, *options: str) -> Container:
    """A container with the program beside gpuwork; returns when both of its processes have ticked twice."""
    program = folder / "memory.py"
    program.write_text(PROGRAM)
    script = f"python3 -S /memory.py {mib} & exec /gpuwork --tick 30 --rest 24 --mib 4"
    mounts = ["-v", "/usr:/usr", "-v", f"{program}:/memory.py:ro"]
    container = Container.start("w", options=[*mounts, *options], script=script)
    checked(container)
    return container


def checked(container: Container) -> None:
    """Wait until the parent and the child have both found all of their bytes right, twice from now on."""
    before = len(_TICK.findall(container.log()))

    def ticked() -> bool:
        found = _TICK.findall(container.log())
        assert all(each[2] == "ok" for each in found), found
        return all([name for name, _, _ in found[before:]].count(each) >= 2 for each in ("parent", "child"))

    until(ticked, "two ticks of parent and child")


def copied(container: Container) -> dict[str, Any]:
    """What the restore says of the copy."""
    text = (STORAGE / container.id / "userdata" / TIMING).read_text()
    found: dict[str, Any] = json.loads(text).get("copied", {})
    return found


def restored(*words: str) -> Container:
    good(podman("container", "restore", *words, "w"))
    container = Container("w")
    checked(container)
    container.goes_on()
    return container


def nothing_left() -> None:
    assert [name for name in os.listdir("/run") if name.startswith("gpusnap-")] == []


@pytest.mark.parametrize(("pages", "parallel"), [("chunks", "true"), ("store", "true"), ("chunks", "false")])
def test_all_bytes(real: str, tmp_path: Path, pages: str, parallel: str) -> None:
    """The same with gpusnap's copy and without."""
    shimhost.write_settings(SETTINGS.format(real=real, pages=pages, parallel=parallel))
    container = begin(tmp_path, 64)
    good(podman("container", "checkpoint", "w"))
    container = restored()
    told = copied(container)
    if parallel == "true":
        assert told["bytes"] >= (64 + 64 + 16) << 20
        assert told["processes"] == 2
    else:
        assert told == {}
    nothing_left()


def test_an_archive(newer: str, tmp_path: Path) -> None:
    """With the next releases of CRIU and the runtimes, twice from an archive, which stays as it is."""
    path = f"/opt/newer/bin/{newer}"
    shimhost.write_settings(SETTINGS.format(real=path, pages="chunks", parallel="true"))
    archive = tmp_path / "w.tar"
    container = begin(tmp_path, 64)
    good(container.checkpoint(archive, "--compress", "none"))
    for _ in range(2):
        container.remove()
        container = Container.restore("w", archive)
        checked(container)
        assert copied(container)["processes"] == 2


def limited(archive: Path, limit: int) -> Path:
    """A copy of an archive whose container may have so many bytes of memory."""
    copy = archive.with_name("limited.tar")
    with tarfile.open(archive) as source, tarfile.open(copy, "w") as target:
        for member in source:
            file = source.extractfile(member) if member.isreg() else None
            if member.name.removeprefix("./") == "spec.dump" and file is not None:
                spec = json.load(file)
                spec["linux"]["resources"]["memory"] = {"limit": limit, "swap": limit}
                text = json.dumps(spec).encode()
                member.size, file = len(text), io.BytesIO(text)
            target.addfile(member, file)
    return copy


def charged(container: Container) -> int:
    """Bytes of memory that the container's control group has."""
    group = Path(f"/proc/{container.pid}/cgroup").read_text().partition("0::")[2].strip()
    return int(Path(f"/sys/fs/cgroup{group}/memory.current").read_text())


def test_a_memory_limit(crun: None, tmp_path: Path) -> None:
    """The memory counts as the container's; where it is more than the limit the restore fails."""
    if "memory" not in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split():
        pytest.skip("the memory controller is not in cgroup v2 here")
    shimhost.write_settings(SETTINGS.format(real="crun", pages="chunks", parallel="true"))
    archive = tmp_path / "w.tar"
    container = begin(tmp_path, 96)
    good(container.checkpoint(archive, "--compress", "none"))
    container.remove()
    container = Container.restore("w", limited(archive, 2 << 30))
    checked(container)
    told = copied(container)["bytes"]
    assert told >= (96 + 96 + 16) << 20
    assert charged(container) >= told
    container.remove()
    # Enough for what CRIU restores, and not for the rest.
    failed = podman("container", "restore", "--import", limited(archive, 160 << 20))
    assert "GPS-523" in sentence(failed)
    assert running() == []
    podman("rm", "--force", "--all", "--time", "0")
    nothing_left()
    checked(Container.restore("w", archive))


def running() -> list[int]:
    """The processes of the program."""
    return [pid for pid in proc.pids() if "/memory.py" in (proc.command(pid) or ())]


def at_the_gate() -> list[int]:
    """What CRIU has started to wait for gpusnap, when all processes are restored."""
    stages = {pid: proc.environment(pid).get("CRTOOLS_SCRIPT_ACTION") for pid in proc.pids()}
    ours = [pid for pid, stage in stages.items() if stage == "post-restore"]
    return [pid for pid in ours if proc.comm(pid) == "gpusnap-runtime"]


def runtimes() -> list[int]:
    """The processes of gpusnap-runtime that restore."""
    ours = re.compile(r"^/opt/gpusnap/bin/python .*/gpusnap-runtime ")
    return [pid for pid in proc.pids() if ours.match(" ".join(proc.command(pid) or ()))]


WAITS = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = setup-namespaces ] || exit 0
touch {met}
while [ -e {met} ]; do sleep 0.05; done
"""


@dataclass
class Held:
    """A restore that stands before the copy: CRIU waits at post-restore, and gpusnap is stopped."""

    engine: subprocess.Popen[str]
    runtimes: list[int]
    archive: Path

    def fails(self) -> str:
        """It does, and nothing is left of it; what Podman said."""
        said = waiting.communicate(self.engine, DEADLINE)[1]
        assert self.engine.returncode != 0
        until(lambda: not running(), "the end of the processes")
        until(lambda: not named("criu"), "the end of CRIU")
        run("/usr/local/bin/gpusnap", "recover")
        nothing_left()
        return said


@pytest.fixture
def held(real: str, tmp_path: Path) -> Iterator[Held]:
    """Afterwards the checkpoint can still be restored."""
    script, met = tmp_path / "script", tmp_path / "met"
    script.write_text(WAITS.format(met=met))
    script.chmod(0o755)
    words = SETTINGS.format(real=real, pages="chunks", parallel="true")
    shimhost.write_settings(f'{words}[criu]\naction-script = "{script}"\n')
    archive = tmp_path / "w.tar"
    container = begin(tmp_path, 64)
    good(container.checkpoint(archive, "--compress", "none"))
    container.remove()
    line = ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", str(archive)]
    null = subprocess.DEVNULL
    with waiting.Process(line, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True) as engine:
        try:
            until(lambda: met.exists() or engine.poll() is not None, "CRIU's first script")
            # CRIU has asked gpusnap at pre-restore by now, and gpusnap answers no more.
            stopped = runtimes()
            signal_all(stopped, signal.SIGSTOP)
            met.unlink()
            until(at_the_gate, "CRIU at its stage post-restore")
            assert len(running()) == 2
            yield Held(engine, stopped, archive)
        finally:
            signal_all(runtimes(), signal.SIGCONT)
            engine.kill()
    podman("rm", "--force", "--all", "--time", "0")
    shimhost.write_settings(words)
    checked(Container.restore("w", archive))


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_gpusnap_is_killed_before_the_copy(held: Held) -> None:
    """None of the processes has its memory: none of them runs, and CRIU ends them."""
    signal_all(held.runtimes, signal.SIGKILL)
    until(lambda: not running(), "the end of the processes")
    held.fails()


@pytest.mark.parametrize("real", ["crun"], indirect=True)
def test_a_process_is_continued_before_the_copy(held: Held) -> None:
    """SIGCONT has none of them run: they find all of their bytes right when they do."""
    signal_all(running(), signal.SIGCONT)
    signal_all(held.runtimes, signal.SIGCONT)
    assert waiting.end(held.engine, DEADLINE) == 0
    checked(Container("w"))
    assert copied(Container("w"))["processes"] == 2


@pytest.mark.parametrize("real", ["crun"], indirect=True)
def test_a_process_ends_before_the_copy(held: Held) -> None:
    """The restore fails, and says why."""
    os.kill(running()[-1], signal.SIGKILL)
    signal_all(held.runtimes, signal.SIGCONT)
    assert "GPS-523" in held.fails()


@pytest.mark.parametrize("real", ["crun"], indirect=True)
def test_the_program_at_the_gate_is_stopped(held: Held) -> None:
    """CRIU waits for it: gpusnap ends it long before Podman would end the restore, and says why."""
    signal_all(at_the_gate(), signal.SIGSTOP)
    signal_all(held.runtimes, signal.SIGCONT)
    assert "was stopped by a signal" in held.fails()


def named(comm: str) -> list[int]:
    return [pid for pid in proc.pids() if proc.comm(pid) == comm]


def test_an_earlier_launcher(crun: None, tmp_path: Path) -> None:
    """One that does not know what CRIU starts it for: CRIU restores everything itself."""
    shimhost.write_settings(SETTINGS.format(real="crun", pages="chunks", parallel="true"))
    begin(tmp_path, 64)
    good(podman("container", "checkpoint", "w"))
    launcher = Path(RUNTIME).read_bytes()
    earlier = launcher.replace(b"GPUSNAP_GATE=", b"GPUSNAP_NONE=")
    assert earlier != launcher
    replaced(earlier)
    try:
        container = restored()
    finally:
        replaced(launcher)
    assert copied(container)["bytes"] == 0


def replaced(launcher: bytes) -> None:
    """Another launcher in its place; it may run."""
    beside = Path(f"{RUNTIME}.new")
    beside.write_bytes(launcher)
    beside.chmod(0o755)
    beside.rename(RUNTIME)
