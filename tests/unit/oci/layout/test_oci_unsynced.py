"""Files on their way to disk, each by the descriptor that wrote it."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusnap.oci.base.errors import Cancelled
from gpusnap.oci.layout import unsynced as unsynced_module
from gpusnap.oci.layout.unsynced import MOST, Unsynced, count_descriptors


def written(folder: Path, name: str) -> int:
    return os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o600)


def open_files(folder: Path) -> list[str]:
    """The names of a folder's files that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return sorted(os.path.basename(path) for path in found if path.startswith(f"{folder}/"))


def add(unsynced: Unsynced, folder: Path, *names: str) -> None:
    for name in names:
        failures = unsynced.count_failures()
        descriptor = written(folder, name)
        unsynced.note_written(name, descriptor, failures=failures)
        os.close(descriptor)


def no_other(name: str) -> int:
    raise AssertionError(f"{name} is opened again")


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names whose fsync was called, in order; those that begin with "bad" fail once."""
    seen: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(name)
        if name.startswith("bad") and seen.count(name) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_bounded_number_stays_open(tmp_path: Path, synced: list[str]) -> None:
    """Who adds one more makes the oldest durable, and in the end all are, each once."""
    unsynced = Unsynced(most=3)
    add(unsynced, tmp_path, "a", "b", "c", "d", "e")
    assert synced == ["a", "b"]
    assert open_files(tmp_path) == ["c", "d", "e"]
    unsynced.sync(no_other, threads=2)
    assert sorted(synced) == ["a", "b", "c", "d", "e"]
    assert open_files(tmp_path) == []
    unsynced.sync(no_other, threads=2)
    assert len(synced) == 5


def test_each_file_is_progress(tmp_path: Path) -> None:
    """Those that were written, and those that were there. An error of who is told ends it."""
    unsynced, seen = Unsynced(), list[int]()
    add(unsynced, tmp_path, "a", "b")
    (tmp_path / "c").write_bytes(b"x")
    unsynced.note_existing("c")

    def opened(name: str) -> int:
        return os.open(tmp_path / name, os.O_RDONLY)

    def stop() -> None:
        raise Cancelled("enough")

    with pytest.raises(Cancelled):
        unsynced.sync(opened, threads=1, progress=stop)
    unsynced.sync(opened, threads=1, progress=lambda: seen.append(1))
    assert len(seen) == 2
    assert open_files(tmp_path) == []


def begins(monkeypatch: pytest.MonkeyPatch, answers: dict[str, int]) -> list[str]:
    """The names of files whose writeback was begun; the kernel's errno for some of them is made up."""
    begun: list[str] = []
    real = unsynced_module._begin_writing()

    def begin(descriptor: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        begun.append(name)
        assert real(descriptor) == 0
        return answers.get(name, 0)

    monkeypatch.setattr(unsynced_module, "_begin_writing", lambda: begin)
    return begun


def test_the_kernel_begins_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With each file that was written, once."""
    begun = begins(monkeypatch, {})
    unsynced = Unsynced()
    (tmp_path / "other").touch()
    unsynced.note_existing("other")
    add(unsynced, tmp_path, "a", "b")
    assert begun == ["a", "b"]


def test_what_is_written_to_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real call, with everything that is dirty."""
    calls: list[tuple[int, ...]] = []

    class Call:
        def __call__(self, *given: int) -> int:
            calls.append(given)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(sync_file_range=Call()))
    unsynced_module._begin_writing.cache_clear()
    try:
        assert unsynced_module._begin_writing()(7) == 0
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace())
        unsynced_module._begin_writing.cache_clear()
        assert unsynced_module._begin_writing()(7) == errno.ENOSYS
    finally:
        unsynced_module._begin_writing.cache_clear()
    assert calls == [(7, 0, 0, 2)]


@pytest.mark.parametrize("number", [errno.EBADMSG, errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_an_error_of_its_beginning_is_one_of_the_fsync(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """For what ext4 has dropped, the fsync succeeds: the file counts as failed until it is written again."""
    answers = {"lost": number}
    begins(monkeypatch, answers)
    unsynced = Unsynced()
    with pytest.raises(OSError, match="lost") as raised:
        add(unsynced, tmp_path, "lost")
    assert (raised.value.errno, raised.value.filename) == (number, "lost")
    assert open_files(tmp_path) == ["lost"]  # the caller's own
    assert unsynced.list_failed() == {"lost"}
    unsynced.note_existing("lost", os.stat(tmp_path / "lost"))
    for _ in range(2):
        with pytest.raises(OSError, match="lost"):
            unsynced.sync(no_other, threads=1)
    assert synced == []
    answers.clear()
    add(unsynced, tmp_path, "lost")
    unsynced.sync(no_other, threads=1)
    assert unsynced.list_failed() == set()
    assert synced == ["lost"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.ENOMEM])
def test_what_was_not_begun_the_fsync_does(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Where there is no such call, or a filter of system calls forbids it, or there was no memory for it."""
    begins(monkeypatch, {"a": number})
    unsynced = Unsynced()
    add(unsynced, tmp_path, "a")
    unsynced.sync(no_other, threads=1)
    assert synced == ["a"]


def test_what_was_made_durable_here_is_not_again(tmp_path: Path, synced: list[str]) -> None:
    """As long as it is the same file, and nobody has written to it."""
    unsynced = Unsynced(most=3)

    def there(name: str) -> os.stat_result:
        return os.stat(tmp_path / name)

    def sync() -> list[str]:
        synced.clear()
        unsynced.sync(lambda name: os.open(tmp_path / name, os.O_RDONLY), threads=1)
        return sorted(synced)

    add(unsynced, tmp_path, "a", "b", "c")
    unsynced.note_existing("other", there("a"))  # another name
    (tmp_path / "other").touch()
    assert sync() == ["a", "b", "c", "other"]
    os.utime(tmp_path / "b", ns=(0, 0))
    os.unlink(tmp_path / "c")
    (tmp_path / "c").touch()
    for name in ("a", "b", "c"):
        unsynced.note_existing(name, there(name))
    assert sync() == ["b", "c"]
    unsynced.note_existing("a")  # by somebody who does not know the file
    assert sync() == ["a"]


def test_what_failed_is_not_taken_for_durable(tmp_path: Path, synced: list[str]) -> None:
    """Neither then, nor once it was written again."""
    unsynced = Unsynced(most=3)
    (tmp_path / "bad").touch()
    unsynced.note_existing("bad")
    with pytest.raises(OSError, match="bad"):
        unsynced.sync(lambda name: os.open(tmp_path / name, os.O_RDONLY), threads=1)
    add(unsynced, tmp_path, "bad")
    unsynced.note_existing("bad", os.stat(tmp_path / "bad"))
    unsynced.sync(no_other, threads=1)
    assert synced == ["bad", "bad"]


@pytest.mark.parametrize(
    ("soft", "most"), [(1024, 256), (1 << 20, MOST), (resource.RLIM_INFINITY, MOST), (2, 1)]
)
def test_as_many_as_the_limit_allows(monkeypatch: pytest.MonkeyPatch, soft: int, most: int) -> None:
    """A part of this process' descriptors."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    assert count_descriptors() == most


def test_an_early_failure_is_not_forgotten(tmp_path: Path, synced: list[str]) -> None:
    """Where it is met by whoever adds another file, and where nobody looks at it: it is never durable."""
    unsynced = Unsynced(most=1)
    with pytest.raises(OSError, match="bad") as raised:
        add(unsynced, tmp_path, "bad", "next")
    assert raised.value.errno == errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="bad"):
            unsynced.sync(no_other, threads=1)
    assert unsynced.list_failed() == {"bad"}
    add(unsynced, tmp_path, "bad")
    unsynced.sync(no_other, threads=1)
    assert unsynced.list_failed() == set()
    assert synced == ["bad", "next", "bad"]


def test_two_threads_write_the_same_file(tmp_path: Path, synced: list[str]) -> None:
    """The one whose file was replaced notes it last: the failure of the other one's file still counts."""
    unsynced = Unsynced(most=1)
    failures = unsynced.count_failures()
    replaced = written(tmp_path, "other name")
    with pytest.raises(OSError, match="bad"):
        add(unsynced, tmp_path, "bad", "next")
    unsynced.note_written("bad", replaced, failures=failures)
    os.close(replaced)
    assert unsynced.list_failed() == {"bad"}
    with pytest.raises(OSError, match="bad"):
        unsynced.sync(no_other, threads=1)
    add(unsynced, tmp_path, "bad")
    assert unsynced.list_failed() == set()


def test_what_others_wait_for(tmp_path: Path, synced: list[str]) -> None:
    """After a failure those that were not come to stay open, for the next time."""
    unsynced = Unsynced()
    add(unsynced, tmp_path, "bad", "a", "b")
    with pytest.raises(OSError, match="bad"):
        unsynced.sync(no_other, threads=1)
    assert open_files(tmp_path) == ["a", "b"]
    unsynced.sync(no_other, threads=1, names=["b"])
    assert synced == ["bad", "b"]
    assert open_files(tmp_path) == ["a"]


def test_no_descriptor_is_left(tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot stay open is made durable at once."""
    unsynced = Unsynced()

    def none_left(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none_left)
    add(unsynced, tmp_path, "a")
    assert synced == ["a"]
    with pytest.raises(OSError, match="bad"):
        add(unsynced, tmp_path, "bad")
    assert unsynced.list_failed() == {"bad"}
    add(unsynced, tmp_path, "bad")  # written again
    assert unsynced.list_failed() == set()


def test_what_was_found(tmp_path: Path, synced: list[str]) -> None:
    """It is opened for its fsync; one that was written in its place is not."""
    unsynced, opened = Unsynced(), []

    def open_it(name: str) -> int:
        opened.append(name)
        return os.open(tmp_path / name, os.O_RDONLY)

    for name in ("found", "both"):
        os.close(written(tmp_path, name))
        unsynced.note_existing(name)
    add(unsynced, tmp_path, "both")
    unsynced.note_existing("both")
    unsynced.sync(open_it, threads=2)
    assert opened == ["found"]
    assert sorted(synced) == ["both", "found"]
    unsynced.sync(open_it, threads=2)
    assert len(synced) == 2


def test_nobody_wants_them(tmp_path: Path, synced: list[str]) -> None:
    """They are let go of, by `close` and with the object."""
    unsynced = Unsynced()
    add(unsynced, tmp_path, "a")
    unsynced.close()
    unsynced.close()
    assert open_files(tmp_path) == []
    add(unsynced, tmp_path, "a")
    del unsynced
    assert open_files(tmp_path) == []
    assert synced == []


def test_another_sees_to_it(tmp_path: Path, synced: list[str]) -> None:
    """What was handed over is the other one's alone."""
    one, other = Unsynced(), Unsynced()
    add(one, tmp_path, "a", "b")
    one.hand_over("a", other)
    one.sync(no_other, threads=1)
    assert synced == ["b"]
    other.sync(no_other, threads=1)
    assert synced == ["b", "a"]
    assert open_files(tmp_path) == []


def test_another_is_told_of_a_failure(tmp_path: Path, synced: list[str]) -> None:
    """Of an earlier fsync, or of one that it has to do itself at once; no descriptor is left."""
    one, other = Unsynced(most=2), Unsynced(most=1)
    with pytest.raises(OSError, match="bad"):
        add(one, tmp_path, "bad", "a", "b")
    with pytest.raises(OSError, match="bad"):
        one.hand_over("bad", other)
    assert other.list_failed() == {"bad"}
    one.close()
    add(one, tmp_path, "bad 2", "bad 2")
    with pytest.raises(OSError, match="bad 2"):
        one.hand_over("bad 2", other)
    assert other.list_failed() == {"bad", "bad 2"}
    other.close()
    one.close()
    assert open_files(tmp_path) == ["b"]  # the caller's own
