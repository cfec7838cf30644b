"""The child process that decodes CRIU's images: a restore if it is killed, hangs or cannot start."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from criu_images import images
from fakes import Scene, a_manifest, wait_for

from gpusnap.runtime_shim.base import question_process, threads
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, no_thread
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu.images import check as check_module
from gpusnap.runtime_shim.runtime.criu.images import image_process
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record

ME = os.getpid()


@pytest.fixture
def made(tmp_path: Path) -> str:
    """A directory with images that can be restored."""
    folder = tmp_path / "images"
    folder.mkdir()
    for name, data in images().items():
        (folder / name).write_bytes(data)
    return str(folder)


# Has the check call a function first, with the number of the call; returns what lists the PIDs of the asked.
Asking = Callable[[Callable[[int], object]], Callable[[], list[int]]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asking]:
    path = tmp_path / "asked"
    real = check_module.check

    def install(first: Callable[[int], object]) -> Callable[[], list[int]]:
        def check(*arguments: object) -> None:
            with path.open("a") as file:
                file.write(f"{os.getpid()}\n")
            first(len(path.read_text().split()))
            real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(check_module, "check", check)
        question_process.start()  # the children are forked with it
        return lambda: [int(each) for each in path.read_text().split()] if path.exists() else []

    yield install
    question_process.end()


def kill(_: int) -> None:
    """As the kernel's OOM killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_first(count: int) -> None:
    if count == 1:
        kill(count)


def hang(_: int) -> None:
    while True:
        time.sleep(600)


def test_killed_once(made: str, asked: Asking) -> None:
    """Another one is asked."""
    pids = asked(kill_first)
    image_process.check(made, "x86_64", {})
    assert len(set(pids()) - {ME}) == 2


def test_killed_each_time(made: str, asked: Asking) -> None:
    """The message says what they were to read; gpusnap, which would be killed as well, does not do it."""
    pids = asked(kill)
    with pytest.raises(GpusnapError) as caught:
        image_process.check(made, "x86_64", {})
    said = f"a child process of gpusnap that was to read CRIU's images in {made} was killed"
    assert str(caught.value).startswith(said)
    assert caught.value.code == "GPS-003"
    assert "dmesg" in caught.value.hint
    assert len(set(pids()) - {ME}) == 2
    assert image_process.has_closed_connections(made) is False  # asked of a third one


def test_no_answer(made: str, asked: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed; the questions together have one deadline, below that of Podman."""
    monkeypatch.setattr(image_process, "_PATIENCE", 0.5)
    pids = asked(hang)
    with pytest.raises(ImageError, match=f"CRIU's images in {made} could not be read within") as caught:
        image_process.check(made, "x86_64", {})
    assert "the file server" in caught.value.hint
    (pid,) = pids()
    wait_for(lambda: not proc.is_running(pid), "its end")
    monkeypatch.setattr(image_process, "_PATIENCE", 60.0)
    image_process._spent[0] += 59.5
    began = time.monotonic()
    with pytest.raises(ImageError, match="could not be read within"):
        image_process.check(made, "x86_64", {})
    assert time.monotonic() - began < 30


def test_it_hangs_while_it_is_prepared(made: str, asked: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has it import pycriu: who comes then waits no longer than for its own question."""
    pids = asked(hang)
    caught: list[BaseException] = []

    def prepare() -> None:
        try:
            image_process.check(made, "x86_64", {})
        except BaseException as error:
            caught.append(error)

    first = threading.Thread(target=prepare)
    first.start()
    wait_for(lambda: len(pids()) == 1, "the first question")
    monkeypatch.setattr(image_process, "_PATIENCE", 0.5)
    with pytest.raises(ImageError, match="could not be read within"):
        image_process.has_closed_connections(made)
    assert first.is_alive()
    for count in (1, 2):  # the one that hangs, and the one that is asked after it
        wait_for(partial(has_come, pids, count), "the question")
        os.kill(pids()[-1], signal.SIGKILL)
    first.join()
    assert [getattr(error, "code", "") for error in caught] == ["GPS-003"]


def has_come(pids: Callable[[], list[int]], count: int) -> bool:
    """Whether so many questions have been asked."""
    return len(pids()) == count


@pytest.fixture(params=[errno.EAGAIN, errno.ENOMEM])
def no_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel permits no child process."""

    def refuse(*_: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(question_process._Forker, "worker", refuse)


def test_no_process_and_no_thread(
    made: str, asked: Asking, no_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing could end a read that does not end: it is not begun, and the error has a cure."""

    def refuse(_: threading.Thread) -> None:
        raise no_thread(RuntimeError("can't start new thread"))

    asked(lambda _: pytest.fail("it is read"))
    monkeypatch.setattr("gpusnap.runtime_shim.base.deadlines._idle", [])
    monkeypatch.setattr(threads, "start", refuse)
    with pytest.raises(GpusnapError, match="a thread cannot be started: can't start new thread") as caught:
        image_process.check(made, "x86_64", {})
    assert "ulimit -u" in caught.value.hint


def test_no_process_can_be_started(made: str, asked: Asking, no_process: None) -> None:
    """Then gpusnap decodes them itself, with a deadline."""
    who: list[str] = []
    pids = asked(lambda _: who.append(threading.current_thread().name))
    image_process.check(made, "x86_64", {})
    assert pids() == [ME]
    assert who == ["gpusnap-question"]
    Path(made, "inventory.img").write_bytes(b"damaged")
    with pytest.raises(ImageError, match=r"inventory\.img"):
        image_process.check(made, "x86_64", {})


def test_no_process_and_no_answer(made: str, asked: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a deadline without one, too."""
    over = threading.Event()
    asked(lambda _: over.wait())
    question_process.end()
    monkeypatch.setattr(image_process, "_PATIENCE", 0.3)
    with pytest.raises(ImageError, match="could not be read within"):
        image_process.check(made, "x86_64", {})
    over.set()


@pytest.mark.parametrize("first", [kill, hang])
def test_a_restore(
    asked: Asking,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    first: Callable[[int], object],
) -> None:
    """It fails before it calls the runtime; the checkpoint is as before, and nothing is to be recovered."""
    with Scene(tmp_path, monkeypatch, capfd) as scene:
        scene.image.mkdir()
        draft, record = Draft(str(scene.image)), a_manifest()
        draft.begin()
        draft.prepare(record)
        draft.finish(record)
        for name, data in images().items():
            (scene.image / name).write_bytes(data)
        before = {path: path.read_bytes() for path in scene.image.rglob("*") if path.is_file()}
        asked(first)
        monkeypatch.setattr(image_process, "_PATIENCE", 1.0)
        done = scene.restore("--detach")
        assert done.code == 1
        said = "was killed, or stopped by a signal" if first is kill else "could not be read within"
        assert said in done.stderr
        assert scene.runtime.calls("restore") == []
        assert {path: path.read_bytes() for path in scene.image.rglob("*") if path.is_file()} == before
        assert restore_record.entries() == ()
