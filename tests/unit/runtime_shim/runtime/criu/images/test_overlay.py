"""The view of a checkpoint's directory: other images in it, and the directory itself untouched."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.images import overlay as module
from gpusnap.runtime_shim.runtime.criu.images.overlay import view
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch

# Goes where a restored process is when it opens images: into mounts of its own, with another root.
INSIDE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    if result:
        raise OSError(ctypes.get_errno(), "in a mount namespace of its own")
images, root = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY), sys.argv[2].encode()
done(libc.unshare(0x00020000))  # CLONE_NEWNS
done(libc.mount(None, b"/", None, (1 << 14) | (1 << 18), None))  # MS_REC | MS_PRIVATE
done(libc.mount(root, root, None, 1 << 12, None))  # MS_BIND
os.chdir(root)
done(libc.pivot_root(b".", b"old"))
os.chroot(".")
done(libc.umount2(b"/old", 2))  # MNT_DETACH
for name in ("pages-1.img", "parent/pages-1.img"):
    with open(os.open(name, os.O_RDONLY, dir_fd=images)) as file:
        print(file.read())
"""


def unshare_works() -> bool:
    """Whether we may have mounts of our own."""
    return not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A checkpoint's directory, with a page of an earlier dump."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pages-1.img").write_text(name)
    found = tmp_path / "second"
    (found / "tmpfs-dev-57.tar.gz.img").write_text("old")
    (found / "gpusnap").mkdir()
    (found / "parent").symlink_to("../first")
    return found


def listing(folder: Path) -> list[tuple[str, int, int, str]]:
    return sorted(
        (path.name, path.lstat().st_mode, path.lstat().st_mtime_ns, str(path.is_file() and path.read_text()))
        for path in folder.iterdir()
    )


def test_nothing_to_replace(images: Path) -> None:
    """Then it is the directory itself."""
    with view(str(images), {}) as found:
        assert found == str(images)
    assert images.exists()


def test_view(images: Path) -> None:
    """Each image is there; those replaced are as given, for root only; the directory is as it was."""
    before = listing(images)
    with view(str(images), {"tmpfs-dev-57.tar.gz.img": b"new", "more.img": b"more"}) as found:
        seen = Path(found)
        assert stat.S_IMODE(seen.stat().st_mode) == 0o700
        assert {path.name for path in seen.iterdir()} == {path.name for path in images.iterdir()} | {
            "more.img"
        }
        assert (seen / "tmpfs-dev-57.tar.gz.img").read_bytes() == b"new"
        assert not (seen / "tmpfs-dev-57.tar.gz.img").is_symlink()
        assert stat.S_IMODE((seen / "tmpfs-dev-57.tar.gz.img").stat().st_mode) == 0o600
        assert (seen / "more.img").read_bytes() == b"more"
        assert (seen / "pages-1.img").read_text() == "second"
        assert (seen / "parent" / "pages-1.img").read_text() == "first"
        assert (seen / "gpusnap").is_dir()
        (seen / "restore.log").write_text("written by somebody")
    assert not seen.exists()
    assert listing(images) == before


def test_after_an_error(images: Path) -> None:
    """It is gone, too."""
    seen: list[str] = []
    with suppress(KeyError), view(str(images), {"pages-1.img": b"new"}) as found:
        seen.append(found)
        raise KeyError
    assert [os.path.exists(path) for path in seen] == [False]
    assert (images / "pages-1.img").read_text() == "second"


def test_a_link_to_the_directory(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path with a link, or a relative one, is followed first."""
    (tmp_path / "link").symlink_to("second")
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "link"), "link", "second/../link"):
        with view(path, {"more.img": b""}) as found:
            assert (Path(found) / "pages-1.img").read_text() == "second"


@pytest.mark.skipif(not unshare_works(), reason="needs mounts of its own (CAP_SYS_ADMIN)")
def test_seen_from_inside_the_container(images: Path, tmp_path: Path) -> None:
    """A process that has the container's root already reads our images, not the container's of that path."""
    root = tmp_path / "root"
    (root / "old").mkdir(parents=True)
    for name in ("first", "second"):
        fake = root / str(images.parent / name).lstrip("/")
        fake.mkdir(parents=True)
        (fake / "pages-1.img").write_text("the container's")
    with view(str(images), {"more.img": b""}) as found:
        words = [sys.executable, "-c", INSIDE, found, str(root)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["second", "first"], done.stderr


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "/etc/x", "a\0b"])
def test_names(images: Path, name: str) -> None:
    """What is replaced is an image in the directory."""
    with pytest.raises(ImageError, match="is not a valid image name"), view(str(images), {name: b""}):
        pass


def test_too_many(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is none of CRIU's is refused, and nothing is left behind."""
    monkeypatch.setattr(module, "_MOST", 3)
    monkeypatch.setattr(scratch_files, "scratch", lambda: str(images.parent))
    before = sorted(os.listdir(images.parent))
    with (
        pytest.raises(ImageError, match="contains 4 files, more than") as caught,
        view(str(images), {"x": b""}),
    ):
        pass
    assert "" in caught.value.hint
    assert sorted(os.listdir(images.parent)) == before


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """One sentence, with the path."""
    words = r"images in .*/none cannot be prepared .*: it does not exist"
    with pytest.raises(ImageError, match=words), view(str(tmp_path / "none"), {"x": b""}):
        pass


def test_no_room(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full /run is told as such, wherever it is found out, and what was begun is gone."""
    monkeypatch.setattr(scratch_files, "scratch", lambda: str(images.parent))
    before = sorted(os.listdir(images.parent))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for function in ("os.symlink", "tempfile.mkdtemp"):
        with monkeypatch.context() as patch:
            patch.setattr(function, full)
            with pytest.raises(ImageError, match="No space left") as caught, view(str(images), {"x": b""}):
                pass
        assert "has free space" in caught.value.hint
    assert sorted(os.listdir(images.parent)) == before


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In /run, or where temporary files lie if that is not ours."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: True)
    assert scratch() == "/run"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert scratch() == str(tmp_path)


def test_an_image_that_lies_elsewhere(images: Path, tmp_path: Path) -> None:
    """A file of another folder stands in for the image of its name, and for one that is not there."""
    (tmp_path / "third").mkdir()
    for name in ("pages-1.img", "pages-2.img"):
        (tmp_path / "third" / name).write_text("third")
    elsewhere = {name: str(tmp_path / "third" / name) for name in ("pages-1.img", "pages-2.img")}
    with view(str(images), {"tmpfs-dev-57.tar.gz.img": b"new"}, elsewhere) as found:
        seen = Path(found)
        assert [(seen / name).read_text() for name in elsewhere] == ["third", "third"]
        assert all(not os.readlink(path).startswith("/") for path in seen.iterdir() if path.is_symlink())
    assert (images / "pages-1.img").read_text() == "second"
