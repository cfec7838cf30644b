"""/proc: what is said of processes, and nothing but empty answers for those that are gone."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import Family, wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc

# A PID that no process has: the largest there can be (include/linux/threads.h, PID_MAX_LIMIT).
NONE = 4194304


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def zombie() -> Iterator[int]:
    child = subprocess.Popen(["true"])
    # Seen as ended, and not yet waited for.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid
    child.wait()


def test_process(family: Family) -> None:
    """Name, arguments and namespaces of a process; its start tells it from a later one."""
    pid = family.spawn()
    wait_for(lambda: proc.comm(pid) == "sleep", "the start of sleep")
    found = proc.process(pid)
    assert found is not None
    assert (found.pid, found.comm, found.command) == (pid, "sleep", ("sleep", "600"))
    assert found.ns_pids[-1:] == (pid,)
    assert found.start > 0
    assert proc.process(pid) == found
    assert proc.parents()[pid] == family.init
    assert pid in set(proc.pids())


def test_a_process_that_is_gone() -> None:
    """Every answer about it is empty, and none is an error."""
    assert proc.process(NONE) is None
    assert not proc.is_running(NONE)
    assert (proc.comm(NONE), proc.command(NONE), proc.environment(NONE)) == ("", (), {})
    assert (proc.cgroups(NONE), proc.namespace(NONE, "pid"), proc.memory(NONE)) == ({}, "", 0)
    assert proc.mounts(NONE) == ()


def test_threads_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no processes that a container could have; a program may have a name like theirs."""
    flags = {1: 0x400100, 2: 0x208040, 17: 0x4208060, 40: 0x400140}
    for pid, each in flags.items():
        (tmp_path / str(pid)).mkdir()
        rest = " ".join("0" * 12)
        (tmp_path / str(pid) / "stat").write_text(
            f"{pid} (kworker/0:1) S {pid // 2} 1 1 0 -1 {each} {rest} {pid * 100} 0\n"
        )
    monkeypatch.setattr(proc, "PROC", str(tmp_path))
    assert proc.parents() == {1: 0, 40: 20}
    assert proc.parents_by_start() == {(1, 100): 0, (40, 4000): 20}


def test_own_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zombie: int) -> None:
    """Those of all threads, with zombies; without a list of the kernel's, None."""
    begun: list[subprocess.Popen[bytes]] = []
    started, end = threading.Event(), threading.Event()

    def start() -> None:
        begun.append(subprocess.Popen(["sleep", "600"]))
        started.set()
        end.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        assert started.wait(60)
        found = proc.list_own_children()
        assert found is not None
        assert set(found) == {pid for pid, parent in proc.parents().items() if parent == os.getpid()}
        assert {zombie, begun[0].pid} <= found
        monkeypatch.setattr(proc, "PROC", str(tmp_path))
        assert proc.list_own_children() is None
    finally:
        end.set()
        thread.join()
        for child in begun:
            child.kill()
            child.wait()


def test_a_zombie(zombie: int) -> None:
    """A zombie has ended: it does not run, and holds nothing that could be saved."""
    assert not proc.is_running(zombie)
    assert proc.process(zombie) is None
    assert proc.command(zombie) == ()
    assert zombie in proc.parents()


def test_a_name_with_brackets(tmp_path: Path) -> None:
    """A name may hold what separates the fields of /proc/PID/stat."""
    link = tmp_path / "a) Z (b"
    link.symlink_to(sys.executable)
    program = f"import os, sys; open('/proc/self/comm', 'w').write({link.name!r}); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            assert proc.comm(child.pid) == "a) Z (b"
            assert proc.is_running(child.pid)
            found = proc.process(child.pid)
            assert found is not None
            assert found.start > 0
            assert proc.parents()[child.pid] == os.getpid()
        finally:
            child.kill()


def test_command_and_environment() -> None:
    """Empty arguments, blanks and bytes that are no text are kept as they are."""
    odd = os.fsdecode(b"\xff")
    with subprocess.Popen(
        ["sleep", "600", "", "a b", odd][:2],
        env={"A": "b=c", "EMPTY": "", odd: odd, "PATH": os.environ["PATH"]},
    ) as child:
        try:
            # The kernel gives it its name before its arguments and its environment.
            wait_for(lambda: odd in proc.environment(child.pid), "the start of sleep")
            environment = proc.environment(child.pid)
            assert (environment["A"], environment["EMPTY"], environment[odd]) == ("b=c", "", odd)
        finally:
            child.kill()
    with subprocess.Popen(["sh", "-c", "read -r line", "", "a b", odd], stdin=subprocess.PIPE) as child:
        try:
            wait_for(lambda: proc.command(child.pid)[:1] == ("sh",), "the start of sh")
            assert proc.command(child.pid) == ("sh", "-c", "read -r line", "", "a b", odd)
        finally:
            child.kill()


def test_memory() -> None:
    """Anonymous memory counts for a dump, and what is only reserved does not."""
    size = 32 << 20
    before = proc.memory(os.getpid())
    with mmap.mmap(-1, size) as reserved:
        assert proc.memory(os.getpid()) < before + size // 2
        reserved.write(b"\1" * size)
        assert proc.memory(os.getpid()) >= before + size // 2


def test_cgroups_and_namespace(family: Family) -> None:
    """A child is in our cgroups and namespaces."""
    assert proc.cgroups(os.getpid())
    assert proc.cgroups(family.init) == proc.cgroups(os.getpid())
    assert proc.namespace(family.init, "pid") == proc.namespace(os.getpid(), "pid")
    assert proc.namespace(family.init, "pid").startswith("pid:[")


def test_cgroups_with_colons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup's path may hold a colon, as systemd's cri-containerd:… has."""
    text = "4:memory:/a:b\n1:name=systemd:/x\n0::/system.slice:cri:id\nbroken\n"
    monkeypatch.setattr(proc, "_read", lambda _: text)
    assert proc.cgroups(1) == {"memory": "/a:b", "name=systemd": "/x", "": "/system.slice:cri:id"}


MOUNTINFO = (
    "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:7 - ext3 /dev/root rw,errors=continue\n"
    "37 35 0:5 / /proc rw - proc proc rw\n"
    "38 35 0:6 /a\\134040 /x\\011y ro - tmpfs tmpfs rw\n"
    "39 35 0:7 / / rw - overlay overlay rw,lowerdir=/l,upperdir=/u/diff,workdir=/w\n"
    "broken\n"
)


def test_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """mountinfo with its optional fields and its escapes."""
    monkeypatch.setattr(proc, "_read", lambda _: MOUNTINFO)
    assert proc.mounts("self") == (
        proc.Mount(
            "98:0", "/mnt1", "/mnt 2", ("rw", "noatime"), ("master:1", "shared:7"), "ext3", "", "/dev/root"
        ),
        proc.Mount("0:5", "/", "/proc", ("rw",), (), "proc", "", "proc"),
        proc.Mount("0:6", "/a\\040", "/x\ty", ("ro",), (), "tmpfs", "", "tmpfs"),
        proc.Mount("0:7", "/", "/", ("rw",), (), "overlay", "/u/diff", "overlay"),
    )


def test_names_that_end_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A form feed and a line separator within a name are part of it, for whatever they are followed."""
    line = "36 35 98:0 / /a\x0c37\u2028b rw - tmpfs tmpfs rw\n"
    monkeypatch.setattr(proc, "_read", lambda _: line)
    assert [mount.destination for mount in proc.mounts(1)] == ["/a\x0c37\u2028b"]
    texts = {"stat": "7 (a) S " + "0 " * 18 + "5 0", "status": "Name:\ta\x0cNSpid:\tx\nNSpid:\t7\t1\n"}
    monkeypatch.setattr(proc, "_read", lambda path: texts.get(path.rpartition("/")[2], ""))
    found = proc.process(7)
    assert found is not None
    assert found.ns_pids == (7, 1)


def test_our_mounts() -> None:
    """The real file is read: something is mounted at the root and at /proc."""
    assert {"/", "/proc"} <= {mount.destination for mount in proc.mounts("self")}


def test_host_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The path of a bind mount's source, through a mount of ours that reaches it."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "x").touch()
    ours = proc.Mount("8:1", "/root/data", str(tmp_path), ("rw",), (), "ext4")
    monkeypatch.setattr(proc, "mounts", lambda _: (ours,))

    def path(device: str, root: str) -> str | None:
        return proc.host_path(proc.Mount(device, root, "/x", (), (), "ext4"))

    assert path("8:1", "/root/data/lib/x") == str(tmp_path / "lib" / "x")
    assert path("8:1", "/root/data") == str(tmp_path)
    assert path("8:1", "/root/data/none") is None
    assert path("8:1", "/root/database") is None
    assert path("8:1", "/root") is None
    assert path("8:2", "/root/data/lib/x") is None


def test_a_process_that_ends_meanwhile(family: Family) -> None:
    """Answers change from full to empty when a process ends, without an error in between."""
    pid = family.spawn()
    assert proc.is_running(pid)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not proc.is_running(pid), "the end of the process")
    assert proc.process(pid) is None


def test_stopped() -> None:
    """A process that SIGSTOP holds answers nobody; one that runs or has ended is not stopped."""
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            assert not proc.is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)
            assert proc.is_stopped(process.pid)
        finally:
            process.kill()
        process.wait()
        assert not proc.is_stopped(process.pid)


def test_dying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process with SIGKILL pending, or that exits, is dying though it is there; others are not."""
    assert not proc.is_dying(os.getpid())
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            os.kill(child.pid, signal.SIGSTOP)
            wait_for(lambda: proc.is_stopped(child.pid), "that it stops")
            assert not proc.is_dying(child.pid), "another signal"
        finally:
            os.kill(child.pid, signal.SIGKILL)
        assert proc.is_dying(child.pid), "at once"
    assert proc.is_dying(child.pid), "it is gone"
    monkeypatch.setattr(proc, "PROC", str(tmp_path))
    (tmp_path / "7").mkdir()
    for flags, pending, expected in ((0, 0, False), (4, 0, True), (0, 0x100, True), (0x400040, 0x200, False)):
        (tmp_path / "7" / "stat").write_text(f"7 (a b) S 1 7 7 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 5\n")
        (tmp_path / "7" / "status").write_text(f"SigPnd:\t{0:016x}\nShdPnd:\t{pending:016x}\n")
        assert proc.is_dying(7) is expected


def test_a_kernel_that_cannot_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose state cannot be read is not gone: it is asked again, and at last that is an error."""
    failures = [errno.ENOMEM, errno.EMFILE]
    real = os.open

    def failing(path: Any, *words: Any, **options: Any) -> Any:
        if str(path).endswith("/stat") and failures:
            raise OSError(failures.pop(), "injected")
        return real(path, *words, **options)

    monkeypatch.setattr(os, "open", failing)
    assert proc.is_running(os.getpid())
    assert not failures
    monkeypatch.setattr(proc, "_PATIENCE", 0.05)
    failures += [errno.ENOMEM] * 1000
    with pytest.raises(GpusnapError, match=r"/stat cannot be read"):
        proc.is_still(os.getpid())


def test_a_kernel_that_cannot_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of lists: of all processes, and of the threads and files of one."""
    failures = [errno.EIO, errno.EMFILE]
    real = os.listdir

    def failing(path: str) -> list[str]:
        if failures:
            raise OSError(failures.pop(), "injected")
        return real(path)

    monkeypatch.setattr(os, "listdir", failing)
    assert os.getpid() in set(proc.pids())
    assert not failures
    monkeypatch.setattr(proc, "_PATIENCE", 0.05)
    failures += [errno.EIO] * 10000
    for ask in (lambda: list(proc.pids()), lambda: proc.threads(1), lambda: proc.unix_sockets(1)):
        with pytest.raises(GpusnapError, match=r"^/proc\S* cannot be read: "):
            ask()
