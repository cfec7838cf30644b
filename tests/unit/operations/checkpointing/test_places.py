"""What gpusnap remembers on disk of checkpoints in progress, and what recover does with it after a reboot."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusnap.operations.checkpointing import left_exports, places
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.file_system import FileSystem
from gpusnap.runtime_shim.shim import overrides


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "state" / "in-progress"))
    monkeypatch.setattr(places, "is_in_ram", lambda _: False)  # whatever tests' files are in
    (tmp_path / "state").mkdir()
    return tmp_path / "state" / "in-progress"


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave such a file, as a command does that ended with its host."""

    def left(path: Path, archive: Path | str = "", target: Path | str = "", source: str = "") -> None:
        with monkeypatch.context() as before:
            before.setattr(state_files, "boot", lambda: "earlier")
            if source:
                mounted = proc.Mount("0:1", "/", str(path), (), (), "nfs4", "", source)
                before.setattr(proc, "find_mount", lambda _: mounted)
            names = {"archive": str(archive), "target": str(target), "container": "w" if archive else ""}
            with places.remember(str(path), **names, is_needed=lambda: True):
                pass

    return left


def test_while_it_lasts(folder: Path) -> None:
    """For root's eyes; nobody takes a place for that of a command that lives."""
    with places.remember("/somewhere"):
        (found,) = folder.iterdir()
        assert stat.S_IMODE(found.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert places.list_ended() == ()
        places.sweep(())
        assert found.exists()
    assert list(folder.iterdir()) == []


def test_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this boot or before: what it says is the same."""
    with places.remember("/somewhere", archive="/a/.w.tar.1", target="/a/w.tar", is_needed=lambda: True):
        pass
    for module, name, value in ((proc, "is_same", False), (state_files, "boot", "later")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, value=value: value)
            (found,) = places.list_ended()
            assert (found.path, found.archive, found.target) == ("/somewhere", "/a/.w.tar.1", "/a/w.tar")
    monkeypatch.setattr(state_files, "boot", lambda: "later")
    places.sweep({"/somewhere"})
    assert len(places.list_ended()) == 1
    places.sweep(())
    assert list(folder.iterdir()) == []


def test_in_ram(folder: Path, leave: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A reboot has emptied it: nothing is left there, and the next recover forgets it."""
    leave(Path("/somewhere"))
    monkeypatch.setattr(places, "is_in_ram", lambda _: True)
    assert places.list_ended() == ()
    assert len(list(folder.iterdir())) == 1, "a list changes nothing"
    places.sweep({"/somewhere"})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"owner": [1, "x"], "boot": ""}'])
def test_a_broken_file(folder: Path, leave: Callable[..., None], content: str) -> None:
    """It hides no other one."""
    leave(Path("/somewhere"))
    (folder / "0.json").write_text(content)
    assert [each.path for each in places.list_ended()] == ["/somewhere"]


def test_no_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is made; a note says what is not remembered."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state_files, "write_durably", full)
    with places.remember("/somewhere"):
        pass
    said = capsys.readouterr().err
    assert f"{places.FOLDER} cannot be written: No space left on device; if this host loses power" in said
    assert "will not look for what is left in /somewhere" in said


def test_an_archive_after_a_reboot(folder: Path, leave: Callable[..., None], tmp_path: Path) -> None:
    """It is named until it has its name; an empty one is removed. Then nothing is remembered."""
    archives = [tmp_path / ".w.tar.1", tmp_path / ".x.tar.2"]
    archives[0].write_text("content")
    archives[1].touch()
    for archive in archives:
        leave(tmp_path, archive, tmp_path / "w.tar")
    assert left_exports.list_missing() == ()
    left_exports.remove_empty()
    (left,) = left_exports.list_left_beside()
    assert left.said.startswith(
        f"{archives[0]} is Podman's export of w, for a killed gpusnap checkpoint --to "
    )
    assert left.said.endswith(f"mv {archives[0]} {tmp_path}/w.tar gives it its name; if not, remove it")
    left_exports.forget([left])
    assert len(list(folder.iterdir())) == 1
    archives[0].rename(tmp_path / "w.tar")
    assert left_exports.list_left_beside() == ()
    left_exports.forget(())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("by_uuid", "problem"), [("ext4 a /", ""), ("", "its file system is not mounted")])
def test_after_a_kernel_update(
    leave: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_uuid: str, problem: str
) -> None:
    """The new kernel has another number for the file system, whose UUID is the same."""
    for number in (1, 2):
        found = FileSystem(str(tmp_path), f"ext4 {number} /", by_uuid)
        monkeypatch.setattr(places, "find_file_system", lambda _, found=found: found)
        if number == 1:
            leave(tmp_path)
    assert [each.find_problem() for each in places.list_ended()] == [problem]


def test_not_mounted(folder: Path, leave: Callable[..., None], tmp_path: Path) -> None:
    """It is said, nobody looks there, and it is not forgotten."""
    leave(tmp_path / "store", source="server:/x")
    leave(tmp_path, tmp_path / ".w.tar.1", source="server:/x")
    (tmp_path / ".w.tar.1").touch()
    missing = left_exports.list_missing()
    for each, path in zip(missing, (tmp_path, tmp_path / "store"), strict=True):
        why = f"a killed gpusnap checkpoint wrote to {path}, which cannot be examined: its file system is not"
        assert each.said.startswith(why)
        assert each.said.endswith(f"rm {each.archive} makes gpusnap forget it")
    assert left_exports.list_stores("/own", missing) == ["/own"]
    left_exports.remove_empty(missing)
    assert (tmp_path / ".w.tar.1").exists()
    assert left_exports.list_left_beside(missing) == ()
    left_exports.forget(missing)
    assert len(list(folder.iterdir())) == 2


def test_another_file_system_with_a_store(folder: Path, leave: Callable[..., None], tmp_path: Path) -> None:
    """That one is looked at all the same; only its own file is forgotten."""
    leave(tmp_path, source="server:/x")
    leave(tmp_path)
    missing = left_exports.list_missing()
    assert len(missing) == 1
    assert {*left_exports.list_stores("/own", missing)} == {"/own", str(tmp_path)}
    left_exports.forget(missing)
    assert [str(path) for path in folder.iterdir()] == [missing[0].archive]


@pytest.mark.parametrize("error", [TimeoutError(), OSError(errno.ESTALE, os.strerror(errno.ESTALE))])
def test_a_server_that_is_gone(
    leave: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """recover says so, and does not wait for it."""
    leave(tmp_path)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(deadlines, "ask", fail)
    (missing,) = left_exports.list_missing()
    said = "does not respond" if isinstance(error, TimeoutError) else "cannot be read: Stale file handle"
    assert said in missing.said
    assert left_exports.list_stores("/own", [missing]) == ["/own"]


def test_what_is_in_the_file(folder: Path, tmp_path: Path) -> None:
    """The file system as well, since the directory may be a mount point."""
    with places.remember(str(tmp_path)):
        (found,) = folder.iterdir()
        document = json.loads(found.read_text())
        assert document["boot"] == state_files.boot()
        assert str(tmp_path).startswith(document["mount"])
        assert document["file-system"]
