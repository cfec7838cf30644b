"""What is put on a host, and taken away again: exactly that, whatever happens in between."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from synced import Synced

from gpusnap.engines.install import files as install_files
from gpusnap.engines.install.installer import Change, Item, install, uninstall
from gpusnap.engines.install.record import RECORD, load
from gpusnap.runtime_shim.base.errors import GpusnapError

CONF = "/etc/engine/conf.d/90-gpusnap.conf"
PROGRAM = "/usr/local/bin/gpusnap-runtime"
LINK = "/usr/local/libexec/gpusnap/gpusnap-runtime"
SETTINGS = "/etc/gpusnap/gpusnap.toml"
ITEMS = (
    Item(LINK, "runtime", target="/opt/venv/bin/gpusnap-runtime"),
    Item(PROGRAM, "runtime", b"\x7fELF", 0o755),
    Item(SETTINGS, "settings", b"# settings\n", yields=True),
    Item(CONF, "podman", b"runtime\n"),
)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A host with a few folders, and a file of somebody's."""
    (tmp_path / "etc/engine").mkdir(parents=True)
    (tmp_path / "etc/engine/main.conf").write_text("his\n")
    (tmp_path / "usr/local").mkdir(parents=True)
    return str(tmp_path)


def listing(root: str) -> dict[str, tuple[str, str]]:
    """Everything below: path to mode and content."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            content = (
                os.readlink(path) if path.is_symlink() else path.read_bytes().hex() if path.is_file() else ""
            )
            found[str(path.relative_to(root))] = (stat.filemode(path.lstat().st_mode), content)
    return found


def said(changes: list[Change]) -> list[str]:
    return [each.what for each in changes]


def test_nothing_is_left(root: str) -> None:
    """Installed: files as they should be; again: no change of any; uninstalled: as before."""
    before = listing(root)
    assert said(install(ITEMS, root=root)) == ["written"] * 4
    assert os.readlink(root + LINK) == "/opt/venv/bin/gpusnap-runtime"
    assert stat.S_IMODE(os.stat(root + PROGRAM).st_mode) == 0o755
    assert stat.S_IMODE(os.stat(root + CONF).st_mode) == 0o644
    times = {path: os.lstat(os.path.join(root, path)).st_mtime_ns for path in listing(root)}
    assert said(install(ITEMS, root=root)) == ["unchanged"] * 4
    assert {path: os.lstat(os.path.join(root, path)).st_mtime_ns for path in listing(root)} == times
    changes = uninstall(root=root)
    assert [each.path for each in changes] == [item.path for item in reversed(ITEMS)]
    assert said(changes) == ["removed"] * 4
    assert listing(root) == before
    assert uninstall(root=root) == []


def test_the_umask_does_not_count(root: str) -> None:
    old = os.umask(0o077)
    try:
        install(ITEMS, root=root)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(root + os.path.dirname(CONF)).st_mode) == 0o755
    assert stat.S_IMODE(os.stat(root + RECORD).st_mode) == 0o644


def test_dry_run(root: str) -> None:
    before = listing(root)
    assert said(install(ITEMS, root=root, dry_run=True)) == ["written"] * 4
    assert listing(root) == before
    install(ITEMS, root=root)
    there = listing(root)
    assert said(uninstall(root=root, dry_run=True)) == ["removed"] * 4
    assert listing(root) == there


def test_somebodys_file_is_in_the_way(root: str) -> None:
    """Nothing is written; with force it is replaced, but what is no file never."""
    os.makedirs(root + os.path.dirname(CONF))
    Path(root + CONF).write_text("his\n")
    before = listing(root)
    with pytest.raises(GpusnapError, match="differs from what gpusnap would write") as caught:
        install(ITEMS, root=root)
    assert "--force" in caught.value.hint
    assert listing(root) == before
    assert said(install(ITEMS, root=root, force=True))[3] == "replaced"
    uninstall(root=root)
    os.makedirs(root + CONF)
    with pytest.raises(GpusnapError) as caught:
        install(ITEMS, root=root, force=True)
    assert caught.value.hint == "inspect it, and move it away"


def test_changed_by_somebody(root: str) -> None:
    """An installed file that somebody changed is not replaced, and stays; force removes it."""
    install(ITEMS, root=root)
    Path(root + CONF).write_text("runtime\nmine = 1\n")
    with pytest.raises(
        GpusnapError, match=r"90-gpusnap\.conf already exists, and differs from what gpusnap would write"
    ):
        install(ITEMS, root=root)
    assert said(uninstall(root=root, dry_run=True)) == ["left", "removed", "removed", "removed"]
    assert said(uninstall(root=root)) == ["left", "removed", "removed", "removed"]
    assert Path(root + CONF).read_text() == "runtime\nmine = 1\n"
    assert not os.path.lexists(root + RECORD)
    install(ITEMS, root=root, force=True)
    Path(root + CONF).write_text("other\n")
    assert said(uninstall(root=root, force=True)) == ["removed"] * 4


def test_a_changed_mode_is_a_change(root: str) -> None:
    install(ITEMS, root=root)
    os.chmod(root + PROGRAM, 0o700)
    assert said(uninstall(root=root)) == ["removed", "removed", "left", "removed"]


def test_settings_stay(root: str) -> None:
    """His from before, and ours that he changed, are kept; ours as it was goes along with a new version."""
    os.makedirs(root + "/etc/gpusnap")
    Path(root + SETTINGS).write_text("runtime = 'crun'\n")
    before = listing(root)
    assert said(install(ITEMS, root=root))[2] == "kept"
    uninstall(root=root)
    after = listing(root)
    assert after == before
    os.unlink(root + SETTINGS)
    install(ITEMS, root=root)
    newer = Item(SETTINGS, "settings", b"# new settings\n", yields=True)
    assert said(install([*ITEMS[:2], newer, ITEMS[3]], root=root))[2] == "replaced"
    Path(root + SETTINGS).write_text("level = 3\n")
    assert said(install(ITEMS, root=root))[2] == "kept"
    assert said(uninstall(root=root))[1] == "left"


def test_what_was_there_alike_is_not_ours(root: str) -> None:
    os.makedirs(root + os.path.dirname(CONF))
    Path(root + CONF).write_bytes(b"runtime\n")
    os.chmod(root + CONF, 0o644)
    before = listing(root)
    assert said(install(ITEMS, root=root))[3] == "unchanged"
    uninstall(root=root)
    assert listing(root) == before


def test_another_version(root: str) -> None:
    """A file whose content is new is replaced; one that a part no longer has is removed; other parts stay."""
    before = listing(root)
    hook = Item("/etc/gpusnap/hooks.d/a.json", "podman", b"{}")
    crio = Item("/etc/crio/crio.conf.d/x.conf", "crio", b"crio")
    install([*ITEMS, hook, crio], root=root)
    changes = install([*ITEMS[:3], Item(CONF, "podman", b"new runtime\n")], root=root)
    assert said(changes) == ["unchanged"] * 3 + ["replaced", "removed"]
    assert Path(root + CONF).read_bytes() == b"new runtime\n"
    assert not os.path.exists(root + hook.path)
    assert os.path.exists(root + crio.path)
    assert len(load(root).entries) == 5
    uninstall(root=root)
    assert listing(root) == before


def test_force_is_not_for_what_is_no_longer_written(root: str) -> None:
    """What somebody made of a file of ours is not removed because it is none any more."""
    own = Item("/etc/engine/config.toml", "podman", b"version = 2\n")
    install([*ITEMS, own], root=root)
    Path(root + own.path).write_text("version = 2\nhis = 1\n")
    assert said(install(ITEMS, root=root, force=True, dry_run=True))[4:] == ["left"]
    assert said(install(ITEMS, root=root, force=True))[4:] == ["left"]
    assert Path(root + own.path).read_text() == "version = 2\nhis = 1\n"
    assert load(root).entry(own.path) is None


def test_parts(root: str) -> None:
    """A part that has no file any more, and is among those installed, goes; without a word it stays."""
    install(ITEMS, root=root)
    assert said(install(ITEMS[2:], root=root)) == ["unchanged"] * 2
    changes = install(ITEMS[2:], parts=("runtime", "settings", "podman"), root=root)
    assert [each.path for each in changes if each.what == "removed"] == [LINK, PROGRAM]
    assert not os.path.lexists(root + PROGRAM)


def test_the_folder_of_the_record(root: str) -> None:
    """It stays where it was there before, empty or not, and keeps its mode."""
    os.mkdir(root + "/etc/gpusnap", 0o750)
    before = listing(root)
    install(ITEMS, root=root)
    install(ITEMS, root=root)
    uninstall(root=root)
    assert listing(root) == before


@pytest.mark.parametrize("leads", ["absolute", "up", "nowhere", "record"])
def test_a_link_out_of_the_tree(root: str, tmp_path_factory: pytest.TempPathFactory, leads: str) -> None:
    """Nothing is written on the machine that makes the image, nor in the tree; force makes no difference."""
    outside = tmp_path_factory.mktemp("outside")
    link = Path(root, "etc/gpusnap" if leads == "record" else "etc/engine/conf.d")
    target = {"up": os.path.relpath(outside, link.parent), "nowhere": f"{outside}/none"}
    link.symlink_to(target.get(leads, str(outside)))
    before = listing(root)
    with pytest.raises(GpusnapError, match=r"is outside the tree .*: a link in its path points to"):
        install(ITEMS, root=root, force=True)
    assert (listing(root), os.listdir(outside)) == (before, [])


def test_a_link_within_the_tree(root: str) -> None:
    Path(root, "etc/elsewhere").mkdir()
    Path(root, "etc/engine/conf.d").symlink_to("../elsewhere")
    install(ITEMS, root=root)
    assert Path(root, "etc/elsewhere/90-gpusnap.conf").exists()
    # One that came since leads root nowhere, either.
    Path(root, "etc/engine/conf.d").unlink()
    Path(root, "etc/engine/conf.d").symlink_to("/etc/elsewhere")
    with pytest.raises(GpusnapError, match="is outside the tree"):
        uninstall(root=root)


def test_a_folder_with_somebodys_file_stays(root: str) -> None:
    install(ITEMS, root=root)
    his = Path(root + os.path.dirname(CONF), "50-his.conf")
    his.write_text("his\n")
    uninstall(root=root)
    assert his.read_text() == "his\n"
    assert sorted(os.listdir(his.parent)) == ["50-his.conf"]
    assert not os.path.exists(root + "/etc/gpusnap")


class Killed(BaseException):
    """As by a signal: nothing catches it."""


def kills(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[bool]:
    """Die at the n-th call that changes the file system; whether it came so far."""
    left = [at]

    def deadly(name: str) -> None:
        real = getattr(os, name)

        def function(*args: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **more)

        monkeypatch.setattr(os, name, function)

    for name in ("mkdir", "replace", "symlink", "unlink", "rmdir", "fsync", "chmod"):
        deadly(name)
    yield left[0] < 0
    monkeypatch.undo()


def cut_off(monkeypatch: pytest.MonkeyPatch, at: int, root: str, *, forwards: bool) -> bool:
    """Install, or uninstall, and die on the way; False where it came to its end before."""
    with monkeypatch.context() as patch:
        for _ in kills(patch, at):
            try:
                if forwards:
                    install(ITEMS, root=root)
                else:
                    uninstall(root=root)
            except Killed:
                return True
            return False
    raise AssertionError


@pytest.mark.parametrize("then", ["install", "uninstall"])
@pytest.mark.parametrize("forwards", [True, False])
def test_cut_off_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forwards: bool, then: str) -> None:
    """Whenever it dies, the next install completes it, and the next uninstall leaves nothing."""
    whole = str(tmp_path / "whole")
    os.makedirs(whole + "/etc")
    empty = listing(whole)
    install(ITEMS, root=whole)
    at = 0
    died = True
    while died:
        root = str(tmp_path / f"{at}")
        os.makedirs(root + "/etc")
        if not forwards:
            install(ITEMS, root=root)
        died = cut_off(monkeypatch, at, root, forwards=forwards)
        if then == "install":
            install(ITEMS, root=root)
            assert listing(root) == listing(whole), at
        uninstall(root=root)
        assert listing(root) == empty, at
        at += 1
    assert at > 10


def test_a_loss_of_power(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's configuration is on disk after the program that it names, and gone from there before it."""
    synced = Synced(Path(root), monkeypatch)
    moments = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def function(*args: str, **more: object) -> None:
            there = [synced.has(root + each) for each in (RECORD, LINK, PROGRAM, CONF)]
            moments.append((name, os.path.basename(args[-1]), there))
            real(*args, **more)

        monkeypatch.setattr(os, name, function)

    watch("replace")
    watch("unlink")
    install(ITEMS, root=root)
    assert ("replace", os.path.basename(CONF), [True, True, True, False]) in moments
    assert all(synced.has_file(root + path) for path in (RECORD, PROGRAM, SETTINGS, CONF))
    assert synced.has(root + LINK)
    moments.clear()
    uninstall(root=root)
    assert ("unlink", os.path.basename(CONF), [True, True, True, True]) in moments
    assert ("unlink", os.path.basename(PROGRAM), [True, True, True, False]) in moments
    assert ("unlink", os.path.basename(RECORD), [True, False, False, False]) in moments


def test_a_disk_that_fails(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence; and the same call goes on."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(install_files, "put_link", full)
        with pytest.raises(GpusnapError, match="gpusnap-runtime cannot be written") as raised:
            install(ITEMS, root=root)
        assert raised.value.hint == "free some space there"
    assert said(install(ITEMS, root=root)) == ["written"] * 4


def test_two_at_once(root: str) -> None:
    install(ITEMS[:1], root=root)
    descriptor = os.open(root + "/etc/gpusnap", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(GpusnapError, match="another gpusnap install or uninstall is running"):
            install(ITEMS, root=root)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2}',
        '{"version": 1, "gpusnap": "0", "folders": [], "entries": [{"path": "x", "part": "", "states": []}]}',
        '{"version": 1, "gpusnap": "0", "folders": ["/etc/../home"], "entries": []}',
        '{"version": 1, "gpusnap": "0", "folders": [], "entries": 1}',
    ],
)
def test_a_damaged_record(root: str, text: str) -> None:
    """By it root removes files, so nothing in it is taken on trust."""
    os.makedirs(root + "/etc/gpusnap")
    Path(root + RECORD).write_text(text)
    with pytest.raises(GpusnapError, match="is damaged"):
        install(ITEMS, root=root)
    with pytest.raises(GpusnapError, match="is damaged"):
        uninstall(root=root)


def test_the_record(root: str) -> None:
    install(ITEMS, root=root)
    document = json.loads(Path(root + RECORD).read_text())
    assert [each["path"] for each in document["entries"]] == [item.path for item in ITEMS]
    assert all(len(each["states"]) == 1 for each in document["entries"])
    assert "/etc" not in document["folders"]
    assert "/etc/engine/conf.d" in document["folders"]
