"""Checks of open files: of real ones in this process, and of recorded ones."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doctor_trees import a_process, only, tree

from gpusnap.doctor.container_checks import files
from gpusnap.doctor.container_checks.files import OpenFile
from gpusnap.runtime_shim.process import proc

KIB = 1 << 10


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def here() -> proc.Process:
    found = proc.process(os.getpid())
    assert found is not None
    return found


def recorded(target: str, number: int = 3) -> OpenFile:
    return OpenFile(a_process(), number, target, None)


def test_opened(stack: ExitStack, tmp_path: Path) -> None:
    """Each descriptor with its target; a process that is gone has none."""
    file = stack.enter_context((tmp_path / "x").open("w"))
    found = {each.number: each for each in files.list_open_files([here(), a_process(1 << 22)])}
    assert found[file.fileno()].target == str(tmp_path / "x")
    assert found[file.fileno()].holder == f"process {os.getpid()} ({here().comm})"


@pytest.mark.parametrize("kind", ["io_uring", "perf_event", "bpf-prog", "userfaultfd", "kvm-vm"])
def test_anonymous(kind: str) -> None:
    """What CRIU does not know, once for each kind."""
    verdict, found = only(
        files.check_anonymous([recorded(f"anon_inode:[{kind}]"), recorded(f"anon_inode:[{kind}]", 4)])
    )
    assert verdict == "failure"
    assert "CRIU cannot dump" in found.says
    assert found.facts["descriptor"] == 3
    assert found.name == ("io_uring" if kind == "io_uring" else "kernel files")


def test_what_criu_knows(stack: ExitStack) -> None:
    """eventfd, epoll, pidfd and the like are dumped."""
    stack.enter_context(select.epoll())
    stack.callback(os.close, os.eventfd(0))
    names = ["anon_inode:inotify", "anon_inode:[signalfd]", "anon_inode:[pidfd]", "pipe:[1]"]
    assert only(files.check_anonymous([*files.list_open_files([here()]), *map(recorded, names)]))[0] == "ok"


def test_character_devices(stack: ExitStack) -> None:
    """/dev/null and terminals are dumped, the GPU's are dealt with, others fail."""
    null = stack.enter_context(open("/dev/null"))
    info = os.stat(null.fileno())
    assert [*files.check_character_devices([OpenFile(a_process(), 3, "/dev/null", info)])] == []
    fuse = os.stat_result((0o20666, *info[1:10]), {"st_rdev": os.makedev(10, 229)})
    strange = [OpenFile(a_process(), 4, "/dev/fuse", fuse)]
    verdict, found = only(files.check_character_devices(strange))
    assert (verdict, found.facts["path"]) == ("failure", "/dev/fuse")
    assert [*files.check_character_devices(strange, lambda path, major: major == 10)] == []


def test_deleted(stack: ExitStack, tmp_path: Path) -> None:
    """Open ones and mapped ones count by their blocks, each file once; memory files do not."""
    large = stack.enter_context((tmp_path / "large").open("wb+"))
    large.write(b"x" * (64 * KIB))
    large.flush()
    stack.callback(mmap.mmap(large.fileno(), 4096).close)
    sparse = stack.enter_context((tmp_path / "sparse").open("wb+"))
    sparse.truncate(64 * KIB)
    memory = os.memfd_create("x")
    stack.callback(os.close, memory)
    os.write(memory, b"x" * (64 * KIB))
    for name in ("large", "sparse"):
        (tmp_path / name).unlink()
    numbers = (large.fileno(), sparse.fileno(), memory)
    ours = [each for each in files.list_open_files([here()]) if each.number in numbers]
    verdict, found = only(files.check_deleted([], ours, 32 * KIB))
    assert verdict == "failure"
    assert f"{tmp_path}/large open, 64.0 KiB" in found.says
    assert "criu.ghost-limit" in found.todo
    verdict, found = only(files.check_deleted([], ours, 128 * KIB))
    assert (verdict, found.facts["count"]) == ("ok", 2)


@pytest.mark.parametrize("name", ["/x", "/x\x0cy", "/x\u2028y"])
def test_deleted_and_mapped(tmp_path: Path, name: str) -> None:
    """A mapping alone, by its link in map_files; it may have any name."""
    ghosts = f"7f0000000000-7f0000001000 r--p 0 08:01 9    {name} (deleted)\n"
    maps = f"{ghosts}400000-401000 r--p 0 08:01 1 /bin/sh\n"
    root = tree(tmp_path, {"/proc/7/maps": maps, "/x": "x" * 64 * KIB})
    (tmp_path / "proc/7/map_files").mkdir()
    ghost = (tmp_path / "x").open()
    (tmp_path / "x").unlink()
    (tmp_path / "proc/7/map_files/7f0000000000-7f0000001000").symlink_to(
        f"/proc/{os.getpid()}/fd/{ghost.fileno()}"
    )
    with ghost:
        assert only(files.check_deleted([a_process()], [], KIB, root))[1].facts["path"] == name


WATCH = "inotify wd:1 ino:1c2 sdev:{device:x} mask:2 ignored_mask:0 fhandle-bytes:24 f_handle:00\n"
ROOT = "227 196 0:99 / / rw - overlay overlay rw\n228 227 0:91 / /v rw - tmpfs tmpfs rw\n"


@pytest.mark.parametrize(("device", "verdict"), [(99, "warning"), (91, "ok")])
def test_watches(tmp_path: Path, device: int, verdict: str) -> None:
    """Files of the overlay are hard to find again, those of volumes are not."""
    root = tree(
        tmp_path, {"/proc/7/fdinfo/3": f"pos:\t0\n{WATCH.format(device=device)}", "/proc/7/mountinfo": ROOT}
    )
    found = only(
        files.check_watches([recorded("anon_inode:inotify"), recorded("anon_inode:[eventfd]", 4)], root)
    )
    assert found[0] == verdict


@pytest.mark.parametrize(
    ("maps", "space", "verdicts"),
    [
        ("7f00-8000 rw-s 0 00:01 3 /SYSV00000000 (deleted)", "ipc:[1]", ["failure"]),
        ("7f00-8000 rw-s 0 00:01 3 /SYSV00000000 (deleted)", "ipc:[2]", []),
        ("7f00-8000 rw-p 0 00:00 0 ", "ipc:[1]", []),
    ],
)
def test_shared_memory(tmp_path: Path, maps: str, space: str, verdicts: list[str]) -> None:
    """System V memory of the host's, not of the container's."""
    root = tree(tmp_path, {"/proc/7/maps": maps})
    found = files.check_shared_memory([a_process()], {7: space}, "ipc:[1]", root)
    assert [each.verdict.value for each in found] == verdicts


def test_locks(stack: ExitStack, tmp_path: Path) -> None:
    """A lock on an open file, with its path; who waits for one holds none."""
    file = stack.enter_context((tmp_path / "x").open("w"))
    ours = [each for each in files.list_open_files([here()]) if each.number == file.fileno()]
    assert only(files.check_locks(ours))[0] == "ok"
    fcntl.flock(file, fcntl.LOCK_EX)
    verdict, found = only(files.check_locks(ours))
    assert verdict == "warning"
    assert found.facts["locks"] == [{"pid": os.getpid(), "path": str(tmp_path / "x")}]
    assert "--file-locks" in found.todo


def test_locks_of_the_driver(stack: ExitStack, tmp_path: Path) -> None:
    """Those on files that came with the GPU are the driver's to give up."""
    file = stack.enter_context((tmp_path / "x").open("w"))
    fcntl.flock(file, fcntl.LOCK_EX)
    ours = [each for each in files.list_open_files([here()]) if each.number == file.fileno()]
    assert only(files.check_locks(ours, driver=[str(tmp_path)]))[0] == "ok"
    assert only(files.check_locks(ours, driver=[str(tmp_path)[:-1]]))[0] == "warning"


def test_recorded_locks(tmp_path: Path) -> None:
    """Leases and waiting ones are passed over."""
    info = os.stat_result((0o100644, 9, os.makedev(8, 1), 1, 0, 0, 0, 0, 0, 0))
    opened = [OpenFile(a_process(), 3, "/x", info)]
    held = "1: POSIX  ADVISORY  WRITE 7 08:01:9 0 EOF\n"
    other = "1: -> FLOCK  ADVISORY  WRITE 7 08:01:9 0 EOF\n2: LEASE  ACTIVE    READ 7 08:01:9 0 EOF\n"
    assert only(files.check_locks(opened, tree(tmp_path / "a", {"/proc/locks": held})))[0] == "warning"
    assert only(files.check_locks(opened, tree(tmp_path / "b", {"/proc/locks": other})))[0] == "ok"
