"""What a killed process leaves: found by its mark, waited for, and removed; nobody else's is touched."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.config import VARIABLE
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scratch_files, "scratch", lambda: str(tmp_path))
    return tmp_path


def own() -> tuple[int, int]:
    process = proc.process(os.getpid())
    assert process is not None
    return process.pid, process.start


@contextmanager
def called(config: str, user: int | None = None, *before: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that was called with a CRIU configuration, as the real runtime is."""
    environment = {"PATH": os.environ["PATH"], VARIABLE: config}
    with subprocess.Popen([*before, "sleep", "600"], env=environment, user=user) as process:
        try:
            # Until the exec it shows our environment.
            wait_for(lambda: proc.environment(process.pid).get(VARIABLE) == config, "its environment")
            yield process
        finally:
            process.kill()


def test_children() -> None:
    """The runtime that a process called is found by the configuration that it made, and no other is."""
    config = f"{scratch()}/{scratch_files.prefix('criu')}abc.conf"
    with called(config) as ours, called("/run/gpusnap-criu-1.1-abc.conf"):
        assert scratch_files.children(own()) == (ours.pid,)
    assert scratch_files.children(own()) == ()


def test_the_criu_of_a_dump(tmp_path: Path) -> None:
    """Its title is over the mark, and perhaps cut off: it is found by the directory of the checkpoint."""
    image = tmp_path / f"userdata-of-a-container-{'c0ffee' * 8}" / "checkpoint"
    for folder, ours in ((image, True), (str(image)[:-6], True), (image / "x", False), ("/var", False)):
        title = f"criu: dump --rpc -t 5 -D {folder}"
        with subprocess.Popen([title, "600"], executable="/bin/sleep") as criu:
            try:
                wait_for(lambda pid=criu.pid, is_=title: proc.command(pid)[:1] == (is_,), "its title")  # type: ignore[misc]
                assert scratch_files.children(own(), str(image)) == ((criu.pid,) if ours else ()), title
                assert scratch_files.children(own()) == ()
            finally:
                criu.kill()


@pytest.mark.parametrize("command", ["dump --rpc -t 5", "restore --rpc"])
def test_a_title_without_a_directory(folder: Path, tmp_path: Path, command: str) -> None:
    """CRIU 4.2's: it is found by the directory that it has open, and so are the processes that it makes."""
    image = tmp_path / "checkpoint"
    ours = folder / f"{scratch_files.prefix('images')}abc"
    theirs = folder / "gpusnap-images-1.1.1-abc"
    dumps = command.startswith("dump")
    for place, found in ((image, dumps), (ours, True), (theirs, False)):
        place.mkdir()
        title = f"criu: {command}"
        opened = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        with subprocess.Popen([title, "600"], executable="/bin/sleep", pass_fds=(opened,)) as criu:
            os.close(opened)
            try:
                wait_for(lambda pid=criu.pid, is_=title: proc.command(pid)[:1] == (is_,), "its title")  # type: ignore[misc]
                assert scratch_files.children(own(), str(image)) == ((criu.pid,) if found else ()), place
            finally:
                criu.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes processes of another user")
@pytest.mark.parametrize("before", [(), ("unshare", "-r")], ids=["", "namespace"])
def test_children_of_another_user(before: tuple[str, ...]) -> None:
    """Who knows the mark, as all do that can list processes, could keep `recover` from its work for ever."""
    config = f"{scratch()}/{scratch_files.prefix('criu')}abc.conf"
    with called(config, 65534, *before) as theirs:
        wait_for(lambda: proc.comm(theirs.pid) == "sleep", "its start")
        assert scratch_files.children(own()) == ()
    with called(config, None, *before) as ours:
        wait_for(lambda: proc.comm(ours.pid) == "sleep", "its start")
        assert scratch_files.children(own()) == (ours.pid,)


def test_let_end() -> None:
    """It waits for the end, or until that is enough; past its patience it names what is still at work."""
    with called(f"/run/{scratch_files.prefix('criu')}abc.conf") as ours:
        scratch_files.let_end(own(), "c0ffee", enough=lambda: True)
        looks = []

        def end() -> bool:
            looks.append(1)
            ours.kill()
            ours.wait()
            return False

        scratch_files.let_end(own(), "c0ffee", enough=end)
        assert looks == [1]


def test_let_end_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says which process, and what to do."""
    monkeypatch.setattr(scratch_files, "_PATIENCE", -1.0)
    with (
        called(f"/run/{scratch_files.prefix('criu')}abc.conf") as ours,
        pytest.raises(GpusnapError) as caught,
    ):
        scratch_files.let_end(own(), "c0ffee")
    assert caught.value.sentence() == (
        "a program that a killed gpusnap started for container c0ffee is still running: process "
        f"{ours.pid}; wait for it, or kill {ours.pid}, then run gpusnap recover again [GPS-020]"
    )


def test_sweep(folder: Path) -> None:
    """Files and folders of that process go, and no link is followed; those of others stay."""
    (folder / f"{scratch_files.prefix('criu')}abc.conf").touch()
    inner = folder / f"{scratch_files.prefix('images')}abc"
    inner.mkdir()
    (folder / "kept").mkdir()
    (folder / "kept" / "file").touch()
    (inner / "link").symlink_to(folder / "kept")
    (folder / f"{scratch_files.prefix('images')}link").symlink_to(folder / "kept")
    other = "gpusnap-criu-1.1-abc.conf"
    (folder / other).touch()
    scratch_files.sweep(own())
    assert sorted(os.listdir(folder)) == [other, "kept"]
    assert (folder / "kept" / "file").exists()


def test_sweep_all(folder: Path) -> None:
    """Files of processes that are no more go; not those of one that lives, or whose runtime is at work."""
    with subprocess.Popen(["sleep", "600"]) as ended:
        started = proc.process(ended.pid)
        assert started is not None
        ended.kill()
    mark, lives = scratch_files.mark_of((ended.pid, started.start)), scratch_files.prefix("criu")
    config, log = folder / f"gpusnap-criu-{mark}-abc.conf", folder / f"gpusnap-log-{mark}-abc"
    elsewhere = f"gpusnap-criu-{mark}1-abc.conf"  # of another PID namespace
    others = {f"{lives}abc.conf", "gpusnap", "gpusnap-x", "gpusnap-criu-none", elsewhere}
    for name in (*others, config.name, log.name):
        (folder / name).touch()
    with called(str(config)):
        scratch_files.sweep_all()
        assert config.exists()
        assert log.exists()
    scratch_files.sweep_all()
    assert set(os.listdir(folder)) == others


def test_a_large_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed pull put together goes, too, and nothing else of that folder."""
    place = tmp_path / "large"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with subprocess.Popen(["sleep", "600"]) as ended:
        started = proc.process(ended.pid)
        assert started is not None
        ended.kill()
    left = place / f"gpusnap-image-{scratch_files.mark_of((ended.pid, started.start))}-abc"
    left.mkdir()
    (left / "pages-1.img").touch()
    mine = place / f"{scratch_files.prefix('layout')}abc"
    mine.mkdir()
    (place / "gpusnap-abc").mkdir()
    scratch_files.sweep_all()
    assert sorted(os.listdir(place)) == sorted([mine.name, "gpusnap-abc"])


@pytest.mark.parametrize("error", [GpusnapError("the kernel says no"), OSError(errno.EMFILE, "")])
def test_sweep_all_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What its caller has done is done: the next one removes them."""
    name = f"gpusnap-criu-{scratch_files.mark_of((1 << 22, 1))}-abc.conf"
    (folder / name).touch()

    def fail(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scratch_files, "children", fail)
        scratch_files.sweep_all()
    assert (folder / name).exists()
    scratch_files.sweep_all()
    assert not (folder / name).exists()


def test_sweep_all_without_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's trouble is not ours: the next one removes them."""
    monkeypatch.setattr(scratch_files, "scratch", lambda: "/proc/1/no-such")
    scratch_files.sweep_all()
