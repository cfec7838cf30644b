"""Files that get a name which nothing has, on file systems of all kinds."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusnap.oci.base import files
from gpusnap.oci.base.files import name_new


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
