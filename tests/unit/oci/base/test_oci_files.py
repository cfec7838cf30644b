"""Files that get a name which nothing has, on file systems of all kinds."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from synced import Synced

from gpusnap.oci.base import files
from gpusnap.oci.base.files import create_unnamed_file, make_folders, name_new, replace


@pytest.fixture(params=["renameat2", "links", "neither"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """On a file system with RENAME_NOREPLACE, one that has only hard links, and one without both."""

    def refuses(*_: object, **__: object) -> None:
        raise OSError(errno.EINVAL, "")

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "")

    if request.param != "renameat2":
        monkeypatch.setattr(files, "_rename_new", refuses)
    if request.param == "neither":
        monkeypatch.setattr(os, "link", no_links)
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_a_new_name(folder: int, tmp_path: Path) -> None:
    """The file has it, and no other."""
    (tmp_path / "a").write_text("a")
    name_new("a", "b", folder)
    assert os.listdir(tmp_path) == ["b"]
    assert (tmp_path / "b").read_text() == "a"


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_name_that_something_has(folder: int, tmp_path: Path, kind: str) -> None:
    """Whatever that is stays, and so does the file."""
    (tmp_path / "a").write_text("a")
    if kind == "file":
        (tmp_path / "b").write_text("b")
    elif kind == "folder":
        (tmp_path / "b").mkdir()
    else:
        (tmp_path / "b").symlink_to("nowhere")
    before = os.lstat(tmp_path / "b")
    with pytest.raises(FileExistsError):
        name_new("a", "b", folder)
    assert os.path.samestat(before, os.lstat(tmp_path / "b"))
    assert (tmp_path / "a").read_text() == "a"


def test_one_of_many(folder: int, tmp_path: Path) -> None:
    """Of those who want the same name at once one has it, and no content is lost."""
    count = 16
    for at in range(count):
        (tmp_path / f"from-{at}").write_text(str(at))
    begin, lock, lost = threading.Barrier(count), threading.Lock(), []

    def one(at: int) -> None:
        begin.wait(60)
        try:
            name_new(f"from-{at}", "to", folder)
        except FileExistsError:
            with lock:
                lost.append(at)

    threads = [threading.Thread(target=one, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (won,) = set(range(count)) - set(lost)
    assert (tmp_path / "to").read_text() == str(won)
    assert set(os.listdir(tmp_path)) == {"to", *(f"from-{at}" for at in lost)}


def test_no_such_file(folder: int) -> None:
    """Another error is what it is."""
    with pytest.raises(FileNotFoundError):
        name_new("none", "b", folder)


@pytest.fixture(params=["unnamed files", "so hard links", "no /proc", "neither"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The same with and without O_TMPFILE, hard links and /proc."""
    opened = os.open

    def no_unnamed(path: str, flags: int, *words: object, **named: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return opened(path, flags, *words, **named)  # type: ignore[arg-type]

    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.ENOENT if request.param == "no /proc" else errno.EPERM, "")

    if request.param == "neither":
        monkeypatch.setattr(os, "open", no_unnamed)
    if request.param != "unnamed files":
        monkeypatch.setattr(os, "link", no_links)
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def test_an_unnamed_file(place: int, tmp_path: Path) -> None:
    """It has a name when it is given one, and nothing is left of one that was given none."""
    with create_unnamed_file(place) as (descriptor, _):
        os.write(descriptor, b"lost")
    assert os.listdir(tmp_path) == []
    with create_unnamed_file(place) as (descriptor, name):
        os.write(descriptor, b"content")
        name("file")
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"content"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_an_unnamed_file_replaces_none(place: int, tmp_path: Path) -> None:
    """What has the name stays, be it a link that leads nowhere."""
    (tmp_path / "file").symlink_to("nowhere")
    with pytest.raises(FileExistsError), create_unnamed_file(place) as (_, name):
        name("file")
    assert os.listdir(tmp_path) == ["file"]
    assert os.readlink(tmp_path / "file") == "nowhere"


@pytest.mark.parametrize("failing", ["open", "link"])
def test_an_unnamed_file_on_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """That is no file system of another kind: the error is told, and nothing is left."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    try:
        with monkeypatch.context() as patched:
            patched.setattr(os, failing, fails)
            with pytest.raises(OSError, match="Input/output"), create_unnamed_file(folder) as (_, name):
                name("file")
        assert os.listdir(tmp_path) == []
    finally:
        os.close(folder)


def test_no_permission_for_another_mode(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems refuse fchmod(2): it is called only where the mode has to be another one."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchmod", refuse)
    replace("file", b"content", place)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        replace("file", b"other", place, mode=0o644)
    assert (tmp_path / "file").read_bytes() == b"content"


def test_new_folders_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with its name, down from the one that exists; one that is there is left alone."""
    disk = Synced(tmp_path, monkeypatch)
    path = tmp_path / "a" / "b" / "c"
    for _ in range(2):
        make_folders(str(path), mode=0o700)
        assert disk.has(path)
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "file").touch()
    for below in ("file", "file/d"):
        with pytest.raises(OSError, match=r"File exists|Not a directory"):
            make_folders(str(path / below))


def test_new_folders_in_one_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can only be synced by who may read it."""

    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(files, "sync_folder", refuse)
    make_folders(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
