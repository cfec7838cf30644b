"""Podman's checkpoints and restores: how they fail, and who gets a signal."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from fakes import wait_for

from gpusnap.base.user_errors import Killed
from gpusnap.engines import podman, podman_work
from gpusnap.runtime_shim.base.errors import MAKE_ROOM, GpusnapError, Interrupted
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.podman import dev_shm

FOUND = podman.Container(ID, "w", "gpusnap-runtime", "running")
# It notes each signal, and ends with the second.
_RUNTIME = """\
trap 'echo {name} >>{folder}/got; [ ! -e {folder}/second ] || exit 1; : >{folder}/second' {name}
: >{folder}/ready
while :; do sleep 0.02; done
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    (tmp_path / "archive").write_bytes(b"archive")
    found.exports(tmp_path / "archive")
    return found


def test_a_checkpoint(fake: FakePodman, tmp_path: Path) -> None:
    """The archive is there, and `tick` was called."""
    fake.has()
    ticks: list[int] = []
    found = podman.inspect_container("w")
    assert not podman_work.checkpoint(
        found, str(tmp_path / "out"), ["--leave-running"], tick=lambda: ticks.append(1)
    )
    assert (tmp_path / "out").read_bytes() == b"archive"
    assert ticks
    assert fake.calls() == [f"container checkpoint --export {tmp_path}/out --leave-running {ID}"]


def test_a_restore(fake: FakePodman, tmp_path: Path) -> None:
    """With our environment; the ID is what comes back."""
    fake.has(status="exited")
    found = podman_work.restore(
        ["--import", str(tmp_path / "archive"), "--name", "x"], {"GPUSNAP_STORE": "/s"}
    )
    assert found == ID
    assert fake.environment()["GPUSNAP_STORE"] == "/s"


@pytest.mark.parametrize(
    "stderr",
    [
        "Error: `/usr/local/bin/gpusnap-runtime checkpoint --image-path /x` failed: signal: killed\n",
        'Error: container create failed (no logs from conmon): conmon bytes "": readObjectStart: expect {\n',
        "gpusnap: note: a\nError: `/usr/local/bin/gpusnap-runtime checkpoint x` failed: signal: killed\n",
    ],
)
def test_a_runtime_that_was_killed(fake: FakePodman, stderr: str) -> None:
    """In place of Podman's words for it, what to do: the container may stand still."""
    fake.fails(stderr)
    with pytest.raises(GpusnapError, match="restore, was killed or exited without a message") as raised:
        podman_work.restore(["--import", "x"], {})
    assert "gpusnap recover" in raised.value.hint


def cut_off(path: str) -> str:
    said = f"Can't add file {path} to tar: archive/tar: missed writing 7 bytes; skipping"
    return f'cat >&2 <<\'end\'\ntime="now" level=error msg="{said}"\nend\n'


def test_shared_memory_that_is_cut_off(fake: FakePodman, tmp_path: Path) -> None:
    """Podman writes it to /dev/null if gpusnap keeps it; else it is lost."""
    own = tmp_path / f"overlay-containers/{FOUND.id}/userdata"
    own.mkdir(parents=True)
    others = (tmp_path / f"overlay-containers/{'0b' * 32}/userdata/shm/a", "/dev/shm/a")
    (own / dev_shm.LINK[0]).symlink_to(dev_shm.LINK[1])
    for path in (own / "shm/a", *others):
        fake.has()
        fake.first(cut_off(str(path)))
        podman_work.checkpoint(FOUND, str(tmp_path / "out"), [])
    (own / dev_shm.LINK[0]).unlink()
    fake.has()
    fake.first(cut_off(f"{own}/shm/a"))
    with pytest.raises(GpusnapError, match="lacks files of the container"):
        podman_work.checkpoint(FOUND, str(tmp_path / "out"), [])


def test_an_archive_that_is_cut_off(fake: FakePodman, tmp_path: Path) -> None:
    """Podman only logs it, and succeeds; a restore would fail ("unexpected EOF")."""
    fake.has()
    fake.first(cut_off("/m/b"))
    with pytest.raises(GpusnapError, match="lacks files of the container") as raised:
        podman_work.checkpoint(FOUND, str(tmp_path / "out"), [])
    assert raised.value.code == "GPS-907"


@pytest.mark.parametrize("said", ["no space left on device", "disk quota exceeded"])
def test_a_full_disk(fake: FakePodman, said: str) -> None:
    """Podman says only that; the hint is what to do."""
    fake.fails(f"Error: write /srv/w.tar: {said}\n")
    with pytest.raises(GpusnapError, match=rf"^Podman failed: write /srv/w\.tar: {said}$") as raised:
        podman_work.restore(["--import", "x"], {})
    assert (raised.value.hint, raised.value.code) == (MAKE_ROOM, "GPS-007")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_podman_that_was_killed(fake: FakePodman, number: signal.Signals) -> None:
    """What it had begun may go on, so that is what is said, and what finds it."""
    fake.first(f"kill -{number.value} $$\n")
    with pytest.raises(Killed) as raised:
        podman_work.restore(["--import", "x"], {})
    assert f"podman container restore was killed by {number.name}" in str(raised.value)
    assert "run gpusnap recover" in raised.value.hint


@pytest.mark.parametrize("where", ["os.memfd_create", "gpusnap.engines.podman_command.Child"])
@pytest.mark.parametrize(
    ("number", "hint"),
    [
        (errno.EMFILE, "raise the limit on open files"),
        (errno.ENOMEM, "free some memory"),
        (errno.EAGAIN, "raise the limit on processes"),
    ],
)
def test_no_podman_for_want_of_something(
    fake: FakePodman, monkeypatch: pytest.MonkeyPatch, where: str, number: int, hint: str
) -> None:
    """What the kernel has run out of; that says nothing about Podman's being installed."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, fail)
    with pytest.raises(GpusnapError) as raised:
        podman_work.restore(["--import", "x"], {})
    assert str(raised.value) == f"podman cannot be run: {os.strerror(number)}"
    assert raised.value.hint.startswith(hint)
    assert "GPS-901" not in raised.value.sentence()


def test_notes_are_passed_on(fake: FakePodman, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What gpusnap-runtime noted in a success reaches the user; its other lines and Podman's do not."""
    fake.has(status="exited")
    (fake.folder / "first.sh").write_text("printf 'gpusnap: note: a\\ngpusnap: step b\\nc\\n' >&2\n")
    podman_work.restore(["--import", str(tmp_path / "archive")], {})
    assert capsys.readouterr().err == "gpusnap: note: a\n"


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("gpusnap: too old; get a new one\nError: `/x` failed: exit status 1\n", "too old; get a new one"),
        ("gpusnap: note: a\ngpusnap: too old\nError: `/x` failed: exit status 1\n", "too old"),
        ("Error: OCI runtime error: gpusnap-runtime: gpusnap: too old\n", "too old"),
        (
            'time="2026" level=warning msg="gpusnap: x"\nError: the name "w" is in use\n',
            'the name "w" is in use',
        ),
        (
            "gpusnap: this is not kept, a note\nError: open /x: read-only file system\n",
            "open /x: read-only file system",
        ),
        ('time="2026" level=error msg="no room"\n', "Podman failed: no room"),
        ("", "Podman failed: exit code 125"),
    ],
)
def test_a_failure(fake: FakePodman, stderr: str, said: str) -> None:
    """gpusnap's own sentence, or else Podman's."""
    fake.fails(stderr)
    with pytest.raises(GpusnapError) as raised:
        podman_work.restore(["--import", "x"], {})
    assert str(raised.value).removeprefix("Podman failed: ") == said.removeprefix("Podman failed: ")


def test_a_pod_that_does_not_fit(fake: FakePodman) -> None:
    """What to do is said beside Podman's own words."""
    fake.fails("Error: pod 794863b6981e does not share the IPC namespace\n")
    with pytest.raises(GpusnapError, match="does not share the IPC namespace") as raised:
        podman_work.restore(["--import", "x"], {})
    assert raised.value.code == "GPS-522"
    assert "podman pod create --share" in raised.value.hint


def test_a_failure_with_a_code(fake: FakePodman) -> None:
    """It is the error's own again, and stays at the end of whatever is said after it."""
    fake.fails("Error: OCI runtime error: gpusnap-runtime: gpusnap: too old; update [GPS-302]\n")
    with pytest.raises(GpusnapError) as raised:
        podman_work.restore(["--import", "x"], {})
    assert (str(raised.value), raised.value.code) == ("too old; update", "GPS-302")
    assert raised.value.sentence() == "too old; update [GPS-302]"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_for_the_runtime(fake: FakePodman, tmp_path: Path, number: signal.Signals) -> None:
    """It undoes what it did; Podman itself is left alone, and says so. A second one goes the same way."""
    name = number.name.removeprefix("SIG")
    (tmp_path / "runtime").write_text(_RUNTIME.format(name=name, folder=tmp_path))
    fake.first(
        f"sh {tmp_path}/runtime checkpoint --image-path x || {{ echo 'gpusnap: stopped' >&2; exit 125; }}\n"
    )

    def ask() -> None:
        wait_for((tmp_path / "ready").exists, "the runtime")
        os.kill(os.getpid(), number)
        wait_for((tmp_path / "second").exists, "the first signal")
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=ask)
    thread.start()
    said: list[str] = []
    with pytest.raises(Interrupted, match=r"^stopped$"):
        podman_work.checkpoint(FOUND, str(tmp_path / "out"), [], say=said.append)
    thread.join()
    assert (tmp_path / "got").read_text() == f"{name}\n" * 2
    assert said == [f"{number.name}: undoing the checkpoint"]
    assert signal.getsignal(number) == before


def test_the_search_for_the_runtime_asks_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a child of Podman or conmon, and none older than Podman: one may not answer about its memory."""
    asked: list[int] = []

    def command(pid: int) -> tuple[str, ...]:
        asked.append(pid)
        if pid == 3:
            raise GpusnapError("the kernel does not answer")
        return ("gpusnap-runtime", "--image-path", "x")

    begins = {1: 1, 2: 5, 3: 30, 4: 40, 5: 50, 9: 20}
    parents = {1: 0, 2: 7, 3: 7, 4: 7, 5: 1, 9: 0}
    monkeypatch.setattr(proc, "pids", lambda: iter((1, 2, 3, 4, 5, 9)))
    monkeypatch.setattr(proc, "parent", parents.get)
    monkeypatch.setattr(proc, "start_time", begins.get)
    monkeypatch.setattr(proc, "comm", lambda pid: "conmon" if pid == 7 else "other")
    monkeypatch.setattr(proc, "command", command)
    monkeypatch.setattr(podman_work, "_has", lambda pid, mark: pid == 4)
    assert podman_work._worker(9, "mark") == 4
    assert asked == [3, 4]


def test_a_signal_with_no_runtime(fake: FakePodman, tmp_path: Path) -> None:
    """Podman gets it."""
    fake.first(f"trap 'exit 1' INT; : >{tmp_path}/ready; while :; do sleep 0.02; done\n")

    def ask() -> None:
        wait_for((tmp_path / "ready").exists, "Podman")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(Interrupted, match="podman container checkpoint was interrupted"):
        podman_work.checkpoint(FOUND, str(tmp_path / "out"), [])
    thread.join()


@pytest.mark.parametrize("begun", [False, True])
def test_a_signal_when_the_runtime_of_a_restore_has_ended(
    fake: FakePodman, tmp_path: Path, begun: bool
) -> None:
    """The container runs, and Podman, which only records that, is left alone; before it begins, it is not."""
    fake.first(f"trap 'exit 1' INT; : >{tmp_path}/ready\nwhile [ ! -e {tmp_path}/on ]; do sleep 0.02; done\n")
    fake.has(status="exited")
    came: list[int] = []

    def ask() -> None:
        wait_for((tmp_path / "ready").exists, "Podman")
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: came, "the signal")
        if begun:
            (tmp_path / "on").touch()

    def has_begun() -> bool:
        came.append(1)
        return begun

    thread = threading.Thread(target=ask)
    thread.start()
    said: list[str] = []
    words = {"has_begun": has_begun, "say": said.append}
    if begun:
        assert podman_work.restore(["--import", "x"], {}, **words)  # type: ignore[arg-type]
        assert said == ["SIGINT: the container is restored already; Podman completes its records first"]
    else:
        with pytest.raises(Interrupted):
            podman_work.restore(["--import", "x"], {}, **words)  # type: ignore[arg-type]
    thread.join()


def test_stderr_on_a_full_disk(fake: FakePodman, tmp_path: Path) -> None:
    """What cannot be shown does not abandon a Podman at work."""
    fake.has(status="exited")
    fake.first("sleep 0.6\n")

    def tick() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert podman_work.restore(["--import", str(tmp_path / "x")], {}, tick=tick)


@pytest.mark.parametrize("failing", [False, True])
def test_a_signal_while_podman_exports(fake: FakePodman, tmp_path: Path, failing: bool) -> None:
    """The container has ended by then: Podman is left alone, and the caller hears of it at the end."""
    fake.first(
        f"trap 'exit 1' INT; : >{tmp_path}/ready\nwhile [ ! -e {tmp_path}/on ]; do sleep 0.02; done\n"
        + ("echo 'Error: no room' >&2; exit 125\n" if failing else "")
    )
    with subprocess.Popen(["sleep", "100"]) as init:
        found = replace(FOUND, init=init.pid)

        def ask() -> None:
            wait_for((tmp_path / "ready").exists, "Podman")
            init.kill()
            init.wait()
            os.kill(os.getpid(), signal.SIGINT)
            (tmp_path / "on").touch()

        thread = threading.Thread(target=ask)
        thread.start()
        said: list[str] = []
        if failing:
            with pytest.raises(GpusnapError, match="Podman failed: no room"):
                podman_work.checkpoint(found, str(tmp_path / "out"), [], say=said.append)
        else:
            assert podman_work.checkpoint(found, str(tmp_path / "out"), [], say=said.append)
            assert said == ["SIGINT: the container has stopped; completing Podman's export first"]
            assert (tmp_path / "out").read_bytes() == b"archive"
        thread.join()
