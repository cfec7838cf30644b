"""The image layout on disk: what it writes is what the spec says; what others wrote is not trusted."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oci_regions import blobs

from gpusnap.oci.base.errors import BlobError, Cancelled, DigestError, DiskError, DiskFull, LayoutError
from gpusnap.oci.layout import layout as layout_module
from gpusnap.oci.layout.digests import digest_of, get_hex
from gpusnap.oci.layout.documents import (
    EMPTY_BLOB,
    MANIFEST,
    OCTETS,
    Descriptor,
    Index,
    Manifest,
    empty_descriptor,
)
from gpusnap.oci.layout.layout import Layout

DATA = b"the bytes of a blob" * 100
DIGEST = digest_of(DATA)
NAME = DIGEST.removeprefix("sha256:")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def blob_path(layout: Layout, digest: str = DIGEST) -> Path:
    return Path(layout.path, "blobs/sha256", digest.removeprefix("sha256:"))


def test_pieces_of_a_blob(layout: Layout) -> None:
    """Who writes or checks a large blob says that it goes on, and can be ended within it."""
    data, calls = bytes((2 << 20) + 1), list[None]()
    layout.moved = lambda: calls.append(None)
    made = layout.add_blob(data)
    assert len(calls) == 3
    layout.check_blob(made)
    assert len(calls) == 6
    assert blob_path(layout, made.digest).read_bytes() == data

    def end() -> None:
        raise Cancelled

    layout.moved = end
    with pytest.raises(Cancelled):
        layout.check_blob(made)
    with pytest.raises(Cancelled):
        layout.add_blob(DATA)
    assert os.listdir(blob_path(layout).parent) == [get_hex(made.digest)]


def test_the_tree(layout: Layout) -> None:
    """A new layout has its marker and its folders, for their owner alone, and no index before commit."""
    root = Path(layout.path)
    assert json.loads((root / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    assert {str(each.relative_to(root)) for each in root.rglob("*")} == {
        "oci-layout",
        "blobs",
        "blobs/sha256",
    }
    assert all(each.stat().st_mode & 0o077 == 0 for each in [root, *root.rglob("*")])
    with pytest.raises(LayoutError, match=r"index.json cannot be read"):
        layout.read_index()
    layout.commit(Index())
    assert json.loads((root / "index.json").read_bytes())["manifests"] == []


def test_create_twice(layout: Layout) -> None:
    """A layout that is there stays as it is."""
    layout.add_blob(DATA)
    before = blobs(Path(layout.path))
    assert Layout(layout.path).create().has_blob(DIGEST, len(DATA))
    assert blobs(Path(layout.path)) == before


@pytest.mark.parametrize("marker", [b"", b"[]", b'{"imageLayoutVersion":"2.0.0"}', b"x" * 5000])
def test_no_layout(layout: Layout, marker: bytes) -> None:
    """A folder that is not marked as a layout of this version is none."""
    Path(layout.path, "oci-layout").write_bytes(marker)
    with pytest.raises(LayoutError, match=r"oci-layout|not an image layout"):
        Layout(layout.path).create()


@pytest.mark.parametrize("how", ["bytes", "memoryview", "file"])
def test_add_and_open(layout: Layout, how: str) -> None:
    """A blob from memory or a file lies under its digest, whole, and reads back."""
    ways: dict[str, bytes | memoryview | io.BytesIO] = {
        "bytes": DATA,
        "memoryview": memoryview(bytearray(DATA)),
        "file": io.BytesIO(DATA),
    }
    given = ways[how]
    assert layout.add_blob(given, media_type="a/b") == Descriptor("a/b", DIGEST, len(DATA))
    assert blob_path(layout).read_bytes() == DATA
    with layout.open_blob(DIGEST, len(DATA)) as file:
        assert file.read() == DATA
    assert set(blobs(Path(layout.path))) == {NAME}


@pytest.mark.parametrize("how", ["bytes", "file"])
def test_not_written_twice(layout: Layout, how: str) -> None:
    """A blob of the right size is left alone; one of another size is replaced."""
    layout.add_blob(DATA)
    before = blobs(Path(layout.path))
    layout.add_blob(DATA if how == "bytes" else io.BytesIO(DATA))
    assert blobs(Path(layout.path)) == before
    blob_path(layout).write_bytes(b"cut")
    layout.add_blob(DATA if how == "bytes" else io.BytesIO(DATA))
    assert blob_path(layout).read_bytes() == DATA


def test_many_add_the_same(layout: Layout) -> None:
    """Threads that add or link the same blob at once leave one file, and nothing unfinished."""
    other = Layout(layout.path + "2").create()
    other.add_blob(DATA)
    barrier = threading.Barrier(8)

    def add(at: int) -> None:
        barrier.wait(60)
        if at % 2:
            layout.add_blob(DATA)
        else:
            layout.link_blob(DIGEST, len(DATA), other)

    threads = [threading.Thread(target=add, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(blobs(Path(layout.path))) == {NAME}
    assert blob_path(layout).read_bytes() == DATA


def test_link(layout: Layout) -> None:
    """A blob of another layout on this file system becomes a second name of the same file."""
    other = Layout(layout.path + "2").create()
    other.add_blob(DATA)
    layout.link_blob(DIGEST, len(DATA), other)
    assert os.path.samefile(blob_path(layout), blob_path(other))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_copy(layout: Layout, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Where no link can be made the blob is copied; a content that is not the digest's is not taken."""

    def no_link(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", no_link)
    other = Layout(layout.path + "2").create()
    other.add_blob(DATA)
    layout.link_blob(DIGEST, len(DATA), other)
    assert blob_path(layout).read_bytes() == DATA
    assert not os.path.samefile(blob_path(layout), blob_path(other))
    blob_path(layout).unlink()
    blob_path(other).write_bytes(DATA[::-1])
    with pytest.raises(BlobError, match="does not match its digest"):
        layout.link_blob(DIGEST, len(DATA), other)
    assert blobs(Path(layout.path)) == {}


def test_blobs_that_cannot_be_linked(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are told that cannot be linked, or that the other does not have, and nothing is left."""
    other = Layout(layout.path + "2").create()
    wrong = replace(other.add_blob(DATA), size=len(DATA) + 1)
    absent = Descriptor(OCTETS, f"sha256:{'0' * 64}", 3)
    there = other.add_blob(DATA)
    assert layout.link_durable([wrong, absent], other) == [wrong, absent]
    assert blobs(Path(layout.path)) == {}
    assert layout.link_durable([absent, there], other) == [absent]
    assert layout.list_missing([there, wrong, absent]) == [wrong, absent]
    blob_path(layout).unlink()

    def no_link(*_args: object, **_options: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", no_link)
    assert layout.link_durable([there], other) == [there]
    assert blobs(Path(layout.path)) == {}


def test_what_a_layout_lacks_that_is_none(tmp_path: Path) -> None:
    """Without its folder it lacks all."""
    wanted = [Descriptor(OCTETS, DIGEST, len(DATA))]
    assert Layout(tmp_path / "none").list_missing(wanted) == wanted


def test_link_in_place_of_a_broken_blob(layout: Layout) -> None:
    """One of the wrong size is replaced."""
    other = Layout(layout.path + "2").create()
    other.add_blob(DATA)
    blob_path(layout).write_bytes(DATA[1:])
    layout.link_blob(DIGEST, len(DATA), other)
    assert os.path.samefile(blob_path(layout), blob_path(other))
    assert set(blobs(Path(layout.path))) == {NAME}


def test_link_of_nothing(layout: Layout) -> None:
    """A blob that the other layout lacks, or has as a link, or in another size, is not taken."""
    other = Layout(layout.path + "2").create()
    with pytest.raises(BlobError, match="does not have the blob"):
        layout.link_blob(DIGEST, len(DATA), other)
    blob_path(other).write_bytes(b"short")
    with pytest.raises(BlobError, match="does not have the blob"):
        layout.link_blob(DIGEST, len(DATA), other)
    blob_path(other).unlink()
    blob_path(other).symlink_to("/etc/hostname")
    with pytest.raises(BlobError, match="does not have the blob"):
        layout.link_blob(DIGEST, os.stat("/etc/hostname").st_size, other)


@pytest.mark.parametrize("kind", ["nothing", "link", "folder", "fifo", "short"])
def test_bad_blobs(layout: Layout, kind: str) -> None:
    """What is no plain file of the right size is refused by its digest, at once."""
    path = blob_path(layout)
    outside = Path(layout.path + ".out")
    outside.write_bytes(DATA)
    ways: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "link": lambda: path.symlink_to(outside),
        "folder": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "short": lambda: path.write_bytes(DATA[:-1]),
    }
    ways[kind]()
    assert not layout.has_blob(DIGEST, len(DATA))
    with pytest.raises(BlobError, match=NAME):
        layout.open_blob(DIGEST, len(DATA))


@pytest.mark.parametrize("part", ["", "blobs", "blobs/sha256"])
def test_folders_are_not_followed(layout: Layout, part: str) -> None:
    """A link in the place of one of the folders is not followed, to read or to write."""
    layout.add_blob(DATA)
    folder = Path(layout.path, part)
    folder.rename(layout.path + ".away")
    folder.symlink_to(layout.path + ".away")
    assert not layout.has_blob(DIGEST, len(DATA))
    with pytest.raises(LayoutError, match=r"not a directory of an image layout"):
        layout.add_blob(b"other")
    with pytest.raises(LayoutError):
        layout.open_blob(DIGEST)


@pytest.mark.parametrize(
    ("number", "lacks"), [(errno.ENOENT, True), (errno.ENOTDIR, True), (errno.EMFILE, False)]
)
def test_what_is_missing_where_nothing_can_be_opened(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, number: int, lacks: bool
) -> None:
    """A directory that is not there has no blob; of one that cannot be opened, this is not known."""
    there = layout.add_blob(b"content")

    def fail(*_: str) -> int:
        raise OSError(number, os.strerror(number), layout.path)

    monkeypatch.setattr(layout_module, "open_folder", fail)
    if lacks:
        assert layout.list_missing([there]) == [there]
    else:
        with pytest.raises(LayoutError, match="cannot be opened: Too many open files"):
            layout.list_missing([there])


def test_an_error_that_names_no_file(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of close(2): the layout is named."""

    def fail(*_: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(layout_module, "open_folder", fail)
    with pytest.raises(LayoutError, match=f"^{layout.path} cannot be opened: Input/output"):
        layout.open_blob(DIGEST)


@pytest.mark.parametrize("digest", ["sha256:../../../etc/passwd", "sha512:" + "0" * 128, "../x", NAME])
def test_digests_that_are_no_names(layout: Layout, digest: str) -> None:
    """A digest that names no sha256 blob opens nothing."""
    with pytest.raises(DigestError):
        layout.open_blob(digest)


def test_read_blob(layout: Layout) -> None:
    """A small blob is read with its digest checked, and none above the limit."""
    found = layout.add_blob(DATA)
    assert layout.read_blob(found) == DATA
    with pytest.raises(BlobError, match="are allowed"):
        layout.read_blob(found, limit=10)
    blob_path(layout).write_bytes(DATA[::-1])
    with pytest.raises(BlobError, match="does not match its digest"):
        layout.read_blob(found)


def test_manifest_and_index(layout: Layout) -> None:
    """A manifest added and committed is found through the index, as it was."""
    layout.add_blob(EMPTY_BLOB)
    manifest = Manifest(empty_descriptor(), (layout.add_blob(DATA),), "application/x", annotations={"a": "é"})
    described = layout.add_manifest(manifest)
    layout.commit(Index((described,)))
    (found,) = Layout(layout.path).read_index().manifests
    assert (found, Layout(layout.path).read_manifest(found)) == (described, manifest)
    assert (found.media_type, found.artifact_type) == (MANIFEST, "application/x")
    with pytest.raises(LayoutError, match="not an image manifest"):
        layout.read_manifest(Descriptor("a/b", described.digest, described.size))


def test_index_of_too_many_bytes(layout: Layout) -> None:
    """An index larger than any registry takes is not read."""
    with open(Path(layout.path, "index.json"), "wb") as file:
        file.truncate(5 << 20)
    with pytest.raises(LayoutError, match="are allowed"):
        layout.read_index()


def test_index_is_no_link(layout: Layout) -> None:
    """A link in the place of the index is not followed."""
    Path(layout.path, "other.json").write_bytes(b'{"schemaVersion":2,"manifests":[]}')
    Path(layout.path, "index.json").symlink_to("other.json")
    with pytest.raises(LayoutError, match="a symbolic link, which is not followed"):
        layout.read_index()


@given(st.binary(max_size=200))
def test_any_index(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Whatever bytes the index has, it is an Index or a LayoutError."""
    layout = Layout(tmp_path_factory.getbasetemp() / "any").create()
    Path(layout.path, "index.json").write_bytes(data)
    with pytest.raises(LayoutError):
        layout.read_index()


def test_commit_syncs_before_the_index(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every blob that was written, found or linked is fsynced, then the folders, then the index; once."""
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    other = Layout(layout.path + "2").create()
    linked = other.add_blob(b"linked")
    written, found = layout.add_blob(DATA), Layout(layout.path).add_blob(b"found")
    layout.add_blob(b"found")
    layout.link_blob(linked.digest, linked.size, other)
    synced.clear()
    layout.commit(Index())
    folder = f"{layout.path}/blobs/sha256"
    names = {f"{folder}/{each.digest.removeprefix('sha256:')}" for each in (linked, written, found)}
    assert set(synced[:3]) == names
    assert synced[3:7] == [folder, f"{layout.path}/blobs", layout.path, os.path.dirname(layout.path)]
    assert synced[7].startswith(f"{layout.path}/.new-")
    assert synced[8:] == [layout.path]
    synced.clear()
    layout.sync()
    assert not any(each in names for each in synced)


def test_a_link_of_a_durable_blob(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no fsync, its folder does, and replaces one that stood there; a plain link needs it."""
    other = Layout(layout.path + "2").create()
    blob = other.add_blob(DATA)
    second = other.add_blob(b"of another")
    blob_path(layout).write_bytes(DATA[::-1])
    for _ in range(2):
        assert layout.link_durable([blob], other) == []
    assert blob_path(layout).read_bytes() == DATA
    assert set(blobs(Path(layout.path))) == {NAME}
    layout.link_blob(second.digest, second.size, other)
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    layout.sync()
    folder = f"{layout.path}/blobs/sha256"
    assert f"{folder}/{NAME}" not in synced
    assert f"{folder}/{get_hex(second.digest)}" in synced
    assert folder in synced


def test_a_failed_sync_leaves_no_index(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at fsync is an error, and the layout is not finished."""

    def fsync(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    layout.add_blob(DATA)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(DiskError, match=r"a blob of 1\.9 KiB cannot be written in"):
        layout.commit(Index())
    assert not Path(layout.path, "index.json").exists()


def test_a_second_sync_makes_nothing_whole(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reports an error of writeback once, and the next fsync succeeds: writing again helps."""
    failed, real = list[int](), os.fsync

    def fsync(descriptor: int) -> None:
        if not failed:
            failed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    found = layout.add_blob(DATA)
    monkeypatch.setattr(os, "fsync", fsync)
    for _ in range(2):
        with pytest.raises(DiskError, match="Input/output error"):
            layout.commit(Index())
        layout.add_blob(DATA)  # it is there, so that this writes nothing
        assert not Path(layout.path, "index.json").exists()
    layout.write_again(found)
    layout.commit(Index())
    assert layout.read_blob(found) == DATA


def test_who_wrote_a_blob_syncs_it(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the descriptor that wrote: one that is opened later may not hear that the writing failed."""
    flags, real = list[int](), os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            flags.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    layout.add_blob(DATA)
    layout.add_blob(io.BytesIO(DATA + b"2"))
    with layout.receive(Descriptor("a/b", digest_of(DATA + b"3"), len(DATA) + 1)) as incoming:
        incoming.write(DATA + b"3")
    other = Layout(layout.path)
    here = other.add_blob(DATA + b"4")
    layout.link_blob(here.digest, here.size, other)
    layout.sync()
    assert flags == [os.O_WRONLY] * 4


def test_what_is_written_again(layout: Layout) -> None:
    """A file of its own is replaced by what was read and found right; one with other names is only read."""
    found, linked = layout.add_blob(DATA), layout.add_blob(DATA + b"2")
    other = Layout(layout.path + "2").create()
    other.link_blob(linked.digest, linked.size, layout)
    before = {digest: blob_path(layout, digest).stat().st_ino for digest in (found.digest, linked.digest)}
    for each in (found, linked):
        layout.write_again(each)
    assert blob_path(layout, linked.digest).stat().st_ino == before[linked.digest]
    assert blob_path(layout, found.digest).stat().st_ino != before[found.digest]
    assert layout.read_blob(found) == DATA
    blob_path(layout, found.digest).write_bytes(bytes(len(DATA)))
    with pytest.raises(BlobError, match="does not match its digest"):
        layout.write_again(found)
    assert blob_path(layout, found.digest).read_bytes() == bytes(len(DATA))


@pytest.mark.parametrize("how", ["bytes", "file"])
def test_full_disk(small_disk: Path, how: str) -> None:
    """A full disk is named, with what did not fit and what is free; nothing unfinished stays."""
    layout = Layout(small_disk / "layout").create()
    data = bytes(2 << 20)
    with pytest.raises(DiskFull, match=r"layout is full: a blob of \d.\d MiB did not fit, .* are free"):
        layout.add_blob(data if how == "bytes" else io.BytesIO(data))
    assert blobs(small_disk / "layout") == {}
    layout.add_blob(DATA)
    layout.close()


def test_file_too_large(layout: Layout) -> None:
    """So is a limit on the size of files (setrlimit(2), RLIMIT_FSIZE)."""
    program = (
        "import resource, sys; from gpusnap.oci.layout.layout import Layout; layout = Layout(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); layout.add_blob(bytes(4000))"
    )
    root = Path(layout_module.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program, layout.path], cwd=root, capture_output=True, text=True, check=False
    )
    assert "does not allow files of that size: a blob of 3.9 KiB did not fit" in done.stderr
    assert blobs(Path(layout.path)) == {}
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_a_file_that_cannot_be_read(layout: Layout) -> None:
    """What should become a blob and cannot be read is an error of its own, and leaves nothing."""

    class Broken(io.BytesIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.raises(BlobError, match="content of a blob cannot be read"):
        layout.add_blob(Broken())
    assert blobs(Path(layout.path)) == {}


def test_no_folder(tmp_path: Path) -> None:
    """A layout that cannot be made is an error with the folder's name."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="file/layout"):
        Layout(tmp_path / "file/layout").create()


def test_no_descriptor_is_left(layout: Layout) -> None:
    """Whatever was done, and failed, no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    other = Layout(layout.path + "2").create()
    found = other.add_blob(DATA)
    layout.link_blob(found.digest, found.size, other)
    layout.commit(Index((layout.add_manifest(Manifest(empty_descriptor(), (found,))),)))
    layout.read_manifest(layout.read_index().manifests[0])
    other.close()
    for bad in ("sha256:" + "0" * 64, DIGEST):
        with pytest.raises(BlobError):
            layout.open_blob(bad, 1)
    with pytest.raises(LayoutError):
        Layout(layout.path + "3").read_index()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_document_on_a_disk_that_fails(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the blob."""

    class Failing(io.FileIO):
        def read(self, _size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    wanted = layout.add_blob(b"document")
    monkeypatch.setattr(layout, "open_blob", lambda digest, size: Failing("/dev/null"))
    with pytest.raises(BlobError, match=f"the blob {wanted.digest} cannot be read: Input/output error"):
        layout.read_blob(wanted)
