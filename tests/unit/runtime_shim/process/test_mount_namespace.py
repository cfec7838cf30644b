"""Mount namespaces of a thread: what goes wrong names the call and the path, and stays in the thread.

test_bind_mounted_nodes.py and test_nvidia_hooks.py show what goes right, on a machine that lets us mount.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpusnap.runtime_shim.process import mount_namespace, proc


@pytest.fixture
def null() -> Iterator[int]:
    """An open file that is no namespace, no mount of its own and no folder."""
    descriptor = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    yield descriptor
    os.close(descriptor)


def failed(work: Callable[..., object], *words: object, **options: object) -> OSError:
    with pytest.raises(OSError, match=r"\S") as caught:
        work(*words, **options)
    return caught.value


def test_what_is_no_namespace(null: int) -> None:
    """It is not joined, nothing is done, and this process is where it was."""
    before = proc.namespace(os.getpid(), "mnt"), os.getcwd()
    done: list[str] = []
    error = failed(mount_namespace.run_joined, null, "/dev/null", lambda: done.append("work"))
    assert (error.errno, error.filename) == (errno.EINVAL, "setns /dev/null")
    assert (proc.namespace(os.getpid(), "mnt"), os.getcwd()) == before
    assert done == []


def test_the_call_and_the_path_are_named(null: int) -> None:
    """Each failure says what failed on what; a place that is open goes by the path that was given for it."""
    none = "/dev/gpusnap-none"
    assert failed(mount_namespace.open_tree, none).filename == f"open_tree {none}"
    assert failed(mount_namespace.move_mount, null, none).filename == f"move_mount {none}"
    assert failed(mount_namespace.move_mount, null, none, onto=null).filename == f"move_mount {none}"
    folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        assert failed(mount_namespace.detach, folder, "gpusnap-none", none).filename == f"umount2 {none}"
        assert failed(mount_namespace.make_private, folder, "gpusnap-none", none).filename == f"mount {none}"
    finally:
        os.close(folder)


def test_an_old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without a call is known by its errno."""
    monkeypatch.setattr(mount_namespace, "_OPEN_TREE", 100_000)
    assert failed(mount_namespace.open_tree, "/dev/null").errno == errno.ENOSYS


@pytest.mark.skipif(bool(os.geteuid()), reason="needs root, who may take another user's name")
def test_in_the_name_of_another(tmp_path: Path) -> None:
    """What is made meanwhile is theirs, and what is made after a failure is ours again."""
    tmp_path.chmod(0o777)
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # whose path they may not walk

    def make(name: str) -> None:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=folder))

    try:
        with mount_namespace.in_the_name_of(12345, 54321):
            make("theirs")
        with suppress(FileExistsError), mount_namespace.in_the_name_of(12345, 54321):
            make("theirs")
        make("ours")
    finally:
        os.close(folder)
    found = {path.name: (path.stat().st_uid, path.stat().st_gid) for path in tmp_path.iterdir()}
    assert found == {"theirs": (12345, 54321), "ours": (os.geteuid(), os.getegid())}


@pytest.mark.parametrize(
    ("init", "tags", "lasting"),
    [
        ("ours", ("master:1",), True),
        ("another", ("shared:1",), False),
        ("", (), True),
        ("", ("shared:1",), True),
        ("", ("shared:1", "master:2"), True),
        ("", ("master:2",), False),
    ],
)
def test_a_namespace_of_our_own(
    monkeypatch: pytest.MonkeyPatch, init: str, tags: tuple[str, ...], lasting: bool
) -> None:
    """What is mounted there goes with us: by the namespace of PID 1, or by how mounts spread."""
    monkeypatch.setattr(proc, "namespace", lambda pid, _: init if pid == 1 else "ours")
    monkeypatch.setattr(proc, "mounts", lambda _: (proc.Mount("0:1", "/", "/run", (), tags, "tmpfs"),))
    assert mount_namespace.is_lasting() is lasting
