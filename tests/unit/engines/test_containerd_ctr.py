"""containerd by its ctr: what it is asked, and what becomes of its failures."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from containerd_layouts import BASE, IMAGE, FakeCtr, Made, a_checkpoint
from fakes import wait_for

from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints.formats.containerd import blob_of
from gpusnap.engines import ctr as ctr_module
from gpusnap.engines.ctr import InContainerd, Target, find_digest, pause, unpack
from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError


@pytest.fixture
def ctr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCtr:
    return FakeCtr(tmp_path / "ctr", monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return a_checkpoint(tmp_path, gpu=False)


def is_silent(ctr: FakeCtr, monkeypatch: pytest.MonkeyPatch, first: str = "") -> None:
    """containerd hangs after that."""
    monkeypatch.setattr("gpusnap.engines.ctr._PATIENCE", 2.0)
    ctr.program.write_text(
        f"#!/bin/sh\ncd {ctr.folder}\n{first}\necho $$ >new\nmv new pid\nexec sleep 1000\n"
    )


def wait_for_silence(ctr: FakeCtr) -> None:
    wait_for(lambda: (ctr.folder / "pid").exists(), "ctr hangs")


def has_ended(ctr: FakeCtr) -> bool:
    return not Path("/proc", (ctr.folder / "pid").read_text().strip()).exists()


def test_blobs(ctr: FakeCtr, made: Made) -> None:
    """By namespace and name, each blob from its own child."""
    ctr.has(made)
    source = InContainerd("team", IMAGE)
    assert (source.root.digest, source.root.size) == (digest_of(made.document), len(made.document))
    for digest, data in made.blobs.items():
        wanted = Descriptor("a/b", digest, len(data))
        assert source.has(wanted)
        assert blob_of(source, wanted) == data
    assert not source.has(Descriptor("a/b", digest_of(b"gone"), 4))
    assert all(call.startswith("--namespace team ") for call in ctr.calls())
    assert f'images ls name=="{IMAGE}"' in ctr.calls()[0]


def test_a_blob_that_is_not_there(ctr: FakeCtr, made: Made) -> None:
    """In containerd's words; one of another size by ours."""
    ctr.has(made)
    source = InContainerd("team", IMAGE)
    gone = digest_of(b"gone")
    words = f"cannot export the blob {gone}: content digest {gone}: not found"
    with pytest.raises(GpusnapError, match=words) as caught:
        blob_of(source, Descriptor("a/b", gone, 4))
    assert "ctr -n team images check" in caught.value.hint
    with pytest.raises(BlobError, match="has more than its 5 bytes"):
        blob_of(source, Descriptor("a/b", source.root.digest, 5))


def test_a_reader_that_stops(ctr: FakeCtr, made: Made) -> None:
    """The child ends with the block, and does no harm."""
    ctr.has(made)
    source = InContainerd("team", IMAGE)
    large = max(made.blobs, key=lambda each: len(made.blobs[each]))
    with source.open(Descriptor("a/b", large, 1)) as file:
        assert file.read(1) == made.blobs[large][:1]


def test_no_image(ctr: FakeCtr, made: Made) -> None:
    """Neither one of that name, nor a checkpoint's."""
    with pytest.raises(NotFound, match=f"no image {IMAGE} in the namespace team"):
        InContainerd("team", IMAGE)
    ctr.lists(IMAGE, digest_of(b"m"), "application/vnd.oci.image.manifest.v1+json")
    source = InContainerd("team", IMAGE)
    assert source.root.media_type.endswith("manifest.v1+json")
    assert find_digest("team", IMAGE) == digest_of(b"m")
    assert find_digest("team", BASE) == ""


def test_no_containerd(ctr: FakeCtr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that does not answer, and a program that is not there."""
    ctr.fails('failed to dial "/run/containerd/containerd.sock"')
    with pytest.raises(GpusnapError, match="ctr images ls failed: failed to dial") as caught:
        InContainerd("team", IMAGE)
    assert "CONTAINERD_ADDRESS" in caught.value.hint
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(GpusnapError, match="ctr cannot be run: it does not exist") as caught:
        InContainerd("team", IMAGE)
    assert "install containerd" in caught.value.hint


@pytest.mark.parametrize("where", ["os.memfd_create", "gpusnap.engines.ctr.Child"])
def test_no_ctr_for_want_of_files(ctr: FakeCtr, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """That says nothing about containerd's being installed."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(where, fail)
    with pytest.raises(GpusnapError, match="ctr cannot be run: Too many open files") as caught:
        InContainerd("team", IMAGE)
    assert caught.value.hint.startswith("raise the limit on open files")
    assert "GPS-901" not in caught.value.sentence()


def test_into_it(ctr: FakeCtr) -> None:
    """All that was given, and nothing is unpacked on the way."""
    with Target("team") as target:
        target.append(b"one")
        target.append(b"two" * 100_000)
    assert ctr.imported.read_bytes() == b"one" + b"two" * 100_000
    assert ctr.calls() == ["--namespace team images import --no-unpack -"]
    unpack("team", "sha256:ab", "overlayfs")
    unpack("team", "sha256:ab", "")
    assert ctr.calls()[1:] == [
        "--namespace team snapshots --snapshotter overlayfs unpack sha256:ab",
        "--namespace team snapshots unpack sha256:ab",
    ]


@pytest.mark.parametrize(
    ("states", "resumed"),
    [
        (["RUNNING"], False),
        (["PAUSED"], True),
        (["PAUSING", "PAUSED"], True),
        (["PAUSING", "RUNNING"], False),
    ],
)
def test_a_pause_under_way(monkeypatch: pytest.MonkeyPatch, states: list[str], resumed: bool) -> None:
    """After a signal during `ctr tasks pause`, the runtime may still be at it: it is waited for."""
    asked: list[tuple[str, ...]] = []

    def ask(namespace: str, *words: str, patience: float | None = None) -> str:
        asked.append(words)
        return f"TASK PID STATUS\nother 1 PAUSED\nwork 42 {states.pop(0)}\n" if words[-1] == "ls" else ""

    monkeypatch.setattr(ctr_module, "_ask", ask)
    ctr_module.go_on("default", "work")
    assert states == []
    assert (("tasks", "resume", "work") in asked) is resumed


def test_list_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing depends on the answer, so it has less time."""
    limits: list[float | None] = []

    def ask(namespace: str, *words: str, patience: float | None = None) -> str:
        assert (namespace, words) == ("k8s.io", ("tasks", "ls"))
        limits.append(patience)
        return "TASK PID STATUS\none 1 PAUSED\ntwo 2 RUNNING\n"

    monkeypatch.setattr(ctr_module, "_ask", ask)
    states = ctr_module.list_states("k8s.io")
    assert (states["one"], states["two"]) == ("PAUSED", "RUNNING")
    assert all(limit and limit < 60 for limit in limits)


def test_an_import_that_fails(ctr: FakeCtr) -> None:
    """In the middle, in containerd's words."""
    ctr.refuses()

    def fill() -> None:
        with Target("team") as target:
            for _ in range(1000):
                target.append(bytes(1 << 16))

    with pytest.raises(GpusnapError, match="rejected the image: no room"):
        fill()


def test_an_import_that_is_given_up(ctr: FakeCtr) -> None:
    """The child is killed before its input ends, which it could take for the end of the archive."""

    def break_off() -> None:
        with Target("team") as target:
            target.append(bytes(1 << 10))
            raise ImageError("broken")

    with pytest.raises(ImageError, match="broken"):
        break_off()
    assert not ctr.imported.exists()


def test_a_containerd_that_does_not_answer(ctr: FakeCtr, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for so long, and its ctr ends."""
    is_silent(ctr, monkeypatch)
    with pytest.raises(GpusnapError, match=r"ctr tasks pause did not finish within 2 s"):
        pause("team", "w")
    assert has_ended(ctr)


@pytest.mark.parametrize(
    ("first", "said"),
    [
        ("printf abc", "has made no progress for 2 s"),
        ("exec >&- 2>&-", "did not finish within 2 s"),
    ],
)
def test_an_export_that_hangs(
    ctr: FakeCtr, made: Made, monkeypatch: pytest.MonkeyPatch, first: str, said: str
) -> None:
    """In the middle of a blob, or after its end: gpusnap does not wait forever, and its ctr ends."""
    ctr.has(made)
    source = InContainerd("team", IMAGE)
    is_silent(ctr, monkeypatch, first)

    def read() -> None:
        with source.open(source.root) as file:
            wait_for_silence(ctr)
            file.read(source.root.size)

    with pytest.raises(GpusnapError, match=rf"^ctr content get {said}$") as caught:
        read()
    assert "check that containerd is running" in caught.value.hint
    assert has_ended(ctr)


@pytest.mark.parametrize(
    ("first", "size", "said"),
    [
        ("", 1 << 20, "has made no progress for 2 s"),
        ("exec <&-", 1 << 20, "did not finish within 2 s"),
        ("", 1, "did not finish within 2 s"),
    ],
)
def test_an_import_that_hangs(
    ctr: FakeCtr, monkeypatch: pytest.MonkeyPatch, first: str, size: int, said: str
) -> None:
    """It reads nothing, has closed its input, or was given all: the same."""
    is_silent(ctr, monkeypatch, first)

    def fill() -> None:
        with Target("team") as target:
            wait_for_silence(ctr)
            target.append(bytes(size))

    with pytest.raises(GpusnapError, match=rf"^ctr images import {said}$"):
        fill()
    assert has_ended(ctr)
