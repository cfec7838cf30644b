"""Volumes that are made from a checkpoint: all of them, or none is left of the attempt."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path

import pytest
from checkpoints import tar_of
from fake_podman import FakePodman
from kept_checkpoints import an_archive

from gpusnap.base.user_errors import Killed
from gpusnap.engines import podman_objects
from gpusnap.operations import lost_volumes
from gpusnap.runtime_shim.base.errors import GpusnapError

FILES = {name: tar_of({name: name.encode() * 5000}) for name in ("cache", "weights")}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "large"))
    (tmp_path / "large").mkdir()
    return FakePodman(tmp_path / "podman", monkeypatch)


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return an_archive(tmp_path, volumes=FILES)


def test_their_files(fake: FakePodman, archive: str, tmp_path: Path) -> None:
    """Nothing else is made, and no copy of the files is left."""
    fake.has_volumes("data")
    with lost_volumes.make(["weights", "cache"], archive):
        assert fake.volumes() == ["data", "cache", "weights"]
    assert {name: fake.filled(name) for name in FILES} == FILES
    assert fake.volumes() == ["data", "cache", "weights"]
    assert os.listdir(tmp_path / "large") == []


def test_nothing_to_make(fake: FakePodman) -> None:
    """Then the archive is not read."""
    with lost_volumes.make([], "/nonexistent"):
        pass
    assert fake.calls() == []


@pytest.mark.parametrize(
    ("error", "left"),
    [(GpusnapError("no device"), []), (KeyboardInterrupt(), []), (Killed("killed"), ["cache"])],
)
def test_the_restore_fails(fake: FakePodman, archive: str, error: BaseException, left: list[str]) -> None:
    """They are removed, unless Podman may still be at work."""
    with pytest.raises(type(error)), lost_volumes.make(["cache"], archive):
        raise error
    assert fake.volumes() == left


def test_an_interruption_while_one_is_made(
    fake: FakePodman, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Podman completes it, and it is empty: it does not stay."""
    make = podman_objects.make_volume

    def make_meanwhile(name: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        make(name)

    monkeypatch.setattr(podman_objects, "make_volume", make_meanwhile)
    with pytest.raises(KeyboardInterrupt), lost_volumes.make(["cache"], archive):
        pytest.fail("restored")
    assert fake.volumes() == []


@pytest.fixture
def mark(fake: FakePodman) -> Path:
    return fake.folder / "files-cache" / ".gpusnap-incomplete"


def test_it_is_marked_while_it_is_filled(
    fake: FakePodman, archive: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks meanwhile finds the mark, locked."""
    fill, found = podman_objects.fill_volume, []

    def fill_meanwhile(name: str, tar: str) -> None:
        with open(mark) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fill(name, tar)
        found.append(mark.exists())

    monkeypatch.setattr(podman_objects, "fill_volume", fill_meanwhile)
    with lost_volumes.make(["cache"], archive):
        assert not mark.exists()
    assert found == [True]


def test_killed_while_it_is_filled(
    fake: FakePodman, archive: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark stays, free for the next one to see that nobody fills it."""

    def fill(name: str, tar: str) -> None:
        raise Killed("killed")

    monkeypatch.setattr(podman_objects, "fill_volume", fill)
    with pytest.raises(Killed), lost_volumes.make(["cache"], archive):
        pytest.fail("restored")
    assert fake.volumes() == ["cache"]
    with open(mark) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_somebody_else_fills_it(fake: FakePodman, archive: str, mark: Path) -> None:
    """It is left to them."""
    fake.has_volumes("cache")
    fake.has_made("cache", mark.name)
    with (
        pytest.raises(GpusnapError, match="the volume cache cannot be made from the checkpoint"),
        lost_volumes.make(["cache"], archive),
    ):
        pytest.fail("restored")
    assert fake.volumes() == ["cache"]


def test_files_that_the_checkpoint_does_not_have(fake: FakePodman, archive: str) -> None:
    """Such as of one that was made with --ignore-volumes."""
    with (
        pytest.raises(
            GpusnapError, match="the checkpoint does not have the files of the volume other"
        ) as raised,
        lost_volumes.make(["cache", "other"], archive),
    ):
        pytest.fail("it goes on")
    assert raised.value.hint == "podman volume create other makes an empty one"
    assert fake.volumes() == []


def test_no_room(fake: FakePodman, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the file, and what to do."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    with (
        pytest.raises(GpusnapError, match="the volume cache cannot be made from the checkpoint") as raised,
        lost_volumes.make(["cache"], archive),
    ):
        pytest.fail("it goes on")
    assert raised.value.code == "GPS-007"
    assert raised.value.hint == "TMPDIR names another directory for large temporary files"
    assert fake.volumes() == []


def test_podman_fails(fake: FakePodman, archive: str) -> None:
    """With Podman's words; the volume that it has made is removed."""
    program = fake.folder / "podman"
    program.write_text(
        program.read_text().replace('"volume import")', '"volume import") echo "Error: bad" >&2; exit 1;')
    )
    with (
        pytest.raises(GpusnapError, match=r"into the volume cache: .*bad"),
        lost_volumes.make(["cache"], archive),
    ):
        pytest.fail("it goes on")
    assert fake.volumes() == []


def test_somebody_removes_it(
    fake: FakePodman, archive: str, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just when it was made."""
    make = podman_objects.make_volume

    def make_in_vain(name: str) -> None:
        make(name)
        podman_objects.remove_volume(name)

    monkeypatch.setattr(podman_objects, "make_volume", make_in_vain)
    with (
        pytest.raises(GpusnapError, match="the volume cache was removed while it was made"),
        lost_volumes.make(["cache"], archive),
    ):
        pytest.fail("restored")
