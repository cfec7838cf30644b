"""Every file that a user names, or in a folder that others can fill, is opened by gpusnap.oci.base.files.

Image directories, the engines' directories that they unpack archives into, layouts, and archives.
"""

from __future__ import annotations

import ast
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.oci.base.errors import reason
from gpusnap.oci.base.files import open_below, open_named, read_below, replace_below

ROOT = Path(__file__).parents[4]
# The modules that touch such directories and files.
TOUCHING = (
    "runtime_shim/runtime/bundle.py",
    "runtime_shim/snapshot/checkpoint.py",
    "runtime_shim/snapshot/memory/destination.py",
    "runtime_shim/records/manifest_file.py",
    "runtime_shim/snapshot/loading/source.py",
    "runtime_shim/snapshot/loading/prefetch.py",
    "runtime_shim/records/cri_layout.py",
    "runtime_shim/snapshot/restoring/foreground.py",
    "runtime_shim/runtime/criu/images/directory.py",
    "runtime_shim/base/log.py",
    "runtime_shim/records/manifest_json.py",
    "runtime_shim/snapshot/devices/remap.py",
    "runtime_shim/snapshot/restore.py",
    "runtime_shim/snapshot/memory/transfer.py",
    "runtime_shim/runtime/criu/images/dev.py",
    "runtime_shim/runtime/criu/images/check.py",
    "runtime_shim/runtime/criu/images/inventory.py",
    "runtime_shim/runtime/criu/run.py",
    "runtime_shim/runtime/criu/images/masked_paths.py",
    "runtime_shim/runtime/criu/images/dev_tar.py",
    "runtime_shim/runtime/criu/images/overlay.py",
    "oci/chunks/artifact.py",
    "oci/layout/layout.py",
    "oci/chunks/reader.py",
    "oci/chunks/verify.py",
    "gpusnap/checkpoints/damage.py",
    "gpusnap/checkpoints/formats/criu_images.py",
    "gpusnap/checkpoints/formats/podman.py",
    "gpusnap/checkpoints/locator.py",
    "gpusnap/operations/diff.py",
    "gpusnap/operations/open.py",
    "gpusnap/operations/verify_files.py",
    "oci/layout/archive.py",
    "oci/layout/single_layer_image.py",
    "oci/registry/credentials.py",
    "oci/registry/registries_conf.py",
    "oci/tar/archive.py",
)
# What opens otherwise there, and why it may.
OTHERS = {
    ("runtime_shim/runtime/bundle.py", "write"): "config.json, which the engine writes after it has unpacked",
    ("runtime_shim/runtime/bundle.py", "_replace"): "a new file of tempfile.mkstemp",
    (
        "runtime_shim/snapshot/loading/source.py",
        "_make_target",
    ): "a new file (O_EXCL) in a directory of tempfile.mkdtemp",
    ("runtime_shim/records/cri_layout.py", "unfold"): "the image directory itself",
    ("runtime_shim/records/cri_layout.py", "_move"): "directories, without following a link",
    (
        "runtime_shim/base/log.py",
        "report",
    ): "the caller's log; follows no link and waits for no FIFO",
    ("runtime_shim/records/manifest_json.py", "_validator"): "the schema, in this package",
    ("gpusnap/operations/verify_files.py", "_explain_cut_off"): "a tar in an archive that is open",
    ("oci/layout/archive.py", "_new_file"): "memory, which is nobody else's",
    ("oci/registry/credentials.py", "_open_memory"): "memory, which is nobody else's",
    (
        "runtime_shim/runtime/criu/images/overlay.py",
        "_fill",
    ): "a new file (O_EXCL) in a directory of tempfile.mkdtemp",
}
_OPENING = {"open", "fdopen", "FileIO", "read_text", "read_bytes", "write_text", "write_bytes", "copyfile"}


def opens(path: Path) -> Iterator[str]:
    """The functions of a module that open a file themselves."""
    for function in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name) and called.id in _OPENING:
                yield function.name
            # Of the GPU's driver, and of chunks that are kept, `open` opens no file.
            others = ("driver.open", "job.driver.open", "ChunkCache.open")
            other = ast.unparse(called) in others
            if isinstance(called, ast.Attribute) and called.attr in _OPENING and not other:
                yield function.name


def test_no_other_way_of_opening() -> None:
    """A module that touches such a directory opens nothing by itself, but for what stands above."""
    found = {(name, function) for name in TOUCHING for function in opens(ROOT / name)}
    assert found == {*OTHERS}


def test_the_walk_finds_them() -> None:
    """The walk sees what it is there for."""
    assert set(opens(ROOT / "oci/base/files.py")) >= {"open_folder", "open_regular", "new_file"}


SPECIAL: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["file", "folder/file"])
def test_no_link_is_followed_no_special_file_opened(tmp_path: Path, kind: str, name: str) -> None:
    """Neither is waited for."""
    (tmp_path / "folder").mkdir()
    SPECIAL[kind](tmp_path / name)
    for read in (lambda: open_below(str(tmp_path), name), lambda: read_below(str(tmp_path), name, limit=9)):
        with pytest.raises((OSError, ValueError)):
            read()


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def a_fifo_behind_a_link(path: Path) -> None:
    os.mkfifo(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is a FIFO, not a file"),
        (a_fifo_behind_a_link, "it is a FIFO, not a file"),
        (a_socket, "it is a socket, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (Path.mkdir, "Is a directory"),
    ],
)
def test_what_a_user_names_is_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], said: str
) -> None:
    """What is none is not waited for, nor is a FIFO that comes between the look and the open."""
    make(tmp_path / "x")
    with pytest.raises(OSError, match=said) as caught:
        open_named(str(tmp_path / "x"))
    assert reason(caught.value) == said
    (tmp_path / "y").touch()
    before = os.stat(tmp_path / "y")
    monkeypatch.setattr("os.stat", lambda path: before)
    if said.startswith("it is a FIFO"):
        with pytest.raises(OSError, match="FIFO"):
            open_named(str(tmp_path / "x"))


def test_a_file_behind_a_link_and_the_null_device(tmp_path: Path) -> None:
    """They are read: whoever names them means them."""
    (tmp_path / "x").write_text("content")
    (tmp_path / "link").symlink_to("x")
    with open_named(str(tmp_path / "link")) as file, open_named("/dev/null") as null:
        assert (file.read(), null.read()) == (b"content", b"")


def test_no_folder_that_is_a_link(tmp_path: Path) -> None:
    """Nor on the way to a file."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real/file").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert read_below(str(tmp_path), "real/file", limit=9) == b"x"
    assert read_below(str(tmp_path / "link"), "file", limit=9) == b"x"  # the caller's own name
    with pytest.raises(OSError, match="link"):
        read_below(str(tmp_path), "link/file", limit=9)


@pytest.mark.parametrize("sync", [True, False])
def test_files_0600(tmp_path: Path, sync: bool) -> None:
    """What is written takes the place of a link, or of a file, whose target and mode do not matter."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (tmp_path / "file").symlink_to(precious)
    for content in (b"one", b"two"):
        replace_below(str(tmp_path), "file", content, sync=sync)
        found = (tmp_path / "file").lstat()
        assert (stat.S_ISREG(found.st_mode), found.st_mode & 0o777) == (True, 0o600)
        assert (tmp_path / "file").read_bytes() == content
        os.chmod(tmp_path / "file", 0o644)
    assert precious.read_text() == "as it was"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "precious"]
