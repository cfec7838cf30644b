"""Room: two restores do not choose the same, what the dead left does not count, and nothing is followed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import POISON
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.records.reservations import claim, read_reserved

A, B = "GPU-aaaa", "GPU-bbbb"
# A PID that no process has: the largest there can be (include/linux/threads.h, PID_MAX_LIMIT).
NONE = 4194304

# Takes whichever of two GPUs nobody has, says which, and keeps it until its input ends.
RESTORE = """
import sys
from gpusnap.runtime_shim.snapshot.records.reservations import claim
with claim(sys.argv[1]) as room:
    free = [uuid for uuid in ("GPU-aaaa", "GPU-bbbb") if uuid not in room.reserved]
    room.record({free[0]: 5} if free else {})
    print(free[0] if free else "none", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "gpusnap" / "room")


def restore(folder: str) -> subprocess.Popen[str]:
    """Another process that restores."""
    return subprocess.Popen(
        [sys.executable, "-c", RESTORE, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[5],
    )


def said(process: subprocess.Popen[str]) -> str:
    """What it chose."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def entry(**changes: Any) -> str:
    """What a restore of this very process writes, with changes."""
    own = proc.process(os.getpid())
    assert own is not None
    return json.dumps({"pid": own.pid, "start": own.start, "bytes": {A: 7}} | changes)


def locked(folder: str) -> bool:
    """Whether somebody keeps others from choosing."""
    path = os.path.join(folder, "lock")
    if not os.path.exists(path):
        return False
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_take_and_leave(folder: str) -> None:
    """The lock is held up to the taking, the file is there up to the end, and only we may look."""
    with claim(folder) as ours:
        assert ours.reserved == {}
        assert locked(folder)
        ours.record({A: 5, B: 0})
        assert not locked(folder)
        assert read_reserved(folder) == {A: 5, B: 0}
        (name,) = {*os.listdir(folder)} - {"lock"}
        assert json.loads(Path(folder, name).read_text())["pid"] == os.getpid()
        assert Path(folder, name).stat().st_mode & 0o777 == 0o600
    assert os.listdir(folder) == []
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert Path(folder).parent.stat().st_mode & 0o777 == 0o700
    assert read_reserved(folder) == {}


def test_a_plan_that_fails(folder: str) -> None:
    """Without a taking nothing is claimed, and nothing stays locked."""
    with pytest.raises(KeyError), claim(folder):
        raise KeyError
    assert os.listdir(folder) == []
    assert not locked(folder)


def test_a_restore_that_fails(folder: str) -> None:
    """An error after the taking gives the room back."""

    def fail() -> None:
        with claim(folder) as ours:
            ours.record({A: 5})
            assert len(os.listdir(folder)) == 1
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.listdir(folder) == []


def test_claims_add_up(folder: str) -> None:
    """Several restores on one GPU count together, also those of one process."""
    with claim(folder) as first:
        first.record({A: 5})
        with claim(folder) as second:
            assert second.reserved == {A: 5}
            second.record({A: 6, B: 1})
            with claim(folder) as third:
                assert third.reserved == {A: 11, B: 1}
        with claim(folder) as fourth:
            assert fourth.reserved == {A: 5}


def test_memory_of_a_process(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """What is kept for a process counts until it has it again, or ends; whoever kept it may have ended."""
    monkeypatch.setattr(reservations, "FOLDER", folder)
    first, second = (subprocess.Popen(["sleep", "1000"]) for _ in range(2))
    try:
        keep = [(first, {A: 5}), (second, {A: 6, B: 1})]
        code = "import sys, json; from gpusnap.runtime_shim.snapshot.records import reservations as r\n"
        code += "r.FOLDER = sys.argv[1]\nfor each in json.loads(sys.argv[2]): r.keep_for('c0ffee', *each)"
        words = json.dumps([(child.pid, sizes) for child, sizes in keep])
        root = Path(__file__).parents[5]
        subprocess.run([sys.executable, "-c", code, folder, words], cwd=root, check=True)
        with claim(folder) as other:  # which removes those of the dead
            assert other.reserved == {A: 11, B: 1}
        reservations.release("c0ffee", second.pid)
        assert read_reserved(folder) == {A: 5}
        reservations.release_all("c0ffe")
        reservations.release("c0ffee", second.pid)
        assert read_reserved(folder) == {A: 5}
        first.kill()
        first.wait()
        assert read_reserved(folder) == {}
        reservations.keep_for("c0ffee", first.pid, {A: 5})
        assert os.listdir(folder) == [f"c0ffee.{first.pid}.json"]
        reservations.keep_for("c0ffee", second.pid, {A: 6})
        reservations.release_all("c0ffee")
        assert os.listdir(folder) == []
        reservations.keep_for("c0ffee", second.pid, {A: 6})
        journal.remove("c0ffee")
        assert os.listdir(folder) == []
    finally:
        for child in (first, second):
            child.kill()
            child.wait()


def test_memory_of_a_process_that_was_killed(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """It is not needed any more, even if the process takes long to end."""
    monkeypatch.setattr(reservations, "FOLDER", folder)
    reservations.keep_for("c0ffee", os.getpid(), {A: 5})
    assert read_reserved(folder) == {A: 5}
    monkeypatch.setattr(proc, "is_dying", lambda pid: pid == os.getpid())
    assert read_reserved(folder) == {}


def test_memory_of_a_process_while_others_choose(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Nobody who keeps the lock for too long keeps a process from its memory, nor does a bad directory."""
    monkeypatch.setattr(reservations, "FOLDER", folder)
    monkeypatch.setattr(reservations, "PATIENCE", 0.0)
    with claim(folder):
        reservations.keep_for("c0ffee", os.getpid(), {A: 5})
        assert read_reserved(folder) == {A: 5}
    monkeypatch.setattr(reservations, "FOLDER", "/dev/null/room")
    reservations.keep_for("c0ffee", os.getpid(), {A: 5})
    reservations.release("c0ffee", os.getpid())
    reservations.release_all("c0ffee")


def test_a_race(folder: str) -> None:
    """Three processes at once, two GPUs: each GPU goes to one of them."""
    racers = [restore(folder) for _ in range(3)]
    try:
        assert sorted(said(racer) for racer in racers) == [A, B, "none"]
        assert read_reserved(folder) == {A: 5, B: 5}
    finally:
        for racer in racers:
            racer.communicate()
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert os.listdir(folder) == []


def test_a_killed_restore(folder: str) -> None:
    """What a killed process had taken is free again, and its file is removed by who comes next."""
    with restore(folder) as killed:
        assert said(killed) == A
        with claim(folder) as ours:
            assert ours.reserved == {A: 5}
        killed.kill()
        killed.wait()
    assert len(os.listdir(folder)) == 1
    assert read_reserved(folder) == {}
    assert len(os.listdir(folder)) == 1
    with claim(folder) as ours:
        assert ours.reserved == {}
        assert os.listdir(folder) == ["lock"]


def test_killed_while_choosing(folder: str) -> None:
    """The kernel lets go of the lock of who is killed."""
    program = (
        "import sys; from gpusnap.runtime_shim.snapshot.records import reservations as r"
        "\nwith r.claim(sys.argv[1]): print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[5],
    ) as chooser:
        assert chooser.stdout is not None
        chooser.stdout.readline()
        with pytest.raises(GpusnapError), claim(folder, patience=0):
            pytest.fail("two are choosing")
        chooser.kill()
        chooser.wait()
    with claim(folder, patience=0) as ours:
        assert ours.reserved == {}


@pytest.mark.parametrize("taken", [True, False])
def test_a_child_does_not_keep_the_lock(folder: str, taken: bool) -> None:
    """A child forked while we choose has the lock's descriptor, and yet others may choose when we have."""
    ready, go = os.pipe(), os.pipe()
    with claim(folder) as ours:
        child = os.fork()
        if child == 0:
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            os._exit(0)
        os.read(ready[0], 1)
        if taken:
            ours.record({A: 1})
    try:
        with claim(folder, patience=0) as ours:
            assert ours.reserved == {}
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *go):
            os.close(descriptor)


def start_of_another() -> dict[str, Any]:
    own = proc.process(os.getpid())
    assert own is not None
    return {"start": own.start + 1}


BROKEN: dict[str, Callable[[], str]] = {
    "a PID that nobody has": lambda: entry(pid=NONE),
    "a PID that another process has": lambda: entry(**start_of_another()),
    "empty": lambda: "",
    "cut short": lambda: entry()[:-5],
    "not an object": lambda: "[]",
    "huge": lambda: entry() + " " * (64 << 10),
    "deep": lambda: "[" * 60000,
    "not UTF-8": lambda: "\udcff",
    "PID 0": lambda: entry(pid=0),
    "PID beyond all": lambda: entry(pid=NONE + 1),
    "PID true": lambda: entry(pid=True),
    "PID a path": lambda: entry(pid="self"),
    "start missing": lambda: entry(start=None),
    "bytes below 0": lambda: entry(bytes={A: -1}),
    "bytes beyond all": lambda: entry(bytes={A: 1 << 60}),
    "bytes no number": lambda: entry(bytes={A: 1.5}),
    "bytes no object": lambda: entry(bytes=[A]),
    "too many GPUs": lambda: entry(bytes=dict.fromkeys(map(str, range(257)), 1)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_does_not_count(folder: str, what: str) -> None:
    """A file of the dead, or one that no restore wrote, is passed over and removed."""
    os.makedirs(folder, mode=0o700)
    path = Path(folder, "some.json")
    path.write_text(BROKEN[what](), "utf-8", "surrogateescape")
    assert read_reserved(folder) == {}
    assert path.exists()
    with claim(folder) as ours:
        assert ours.reserved == {}
        assert not path.exists()


def test_what_counts(folder: str) -> None:
    """The same file counts where nothing is wrong with it, so the others are passed over for their faults."""
    os.makedirs(folder, mode=0o700)
    Path(folder, "some.json").write_text(entry())
    with claim(folder) as ours:
        assert ours.reserved == {A: 7}
        assert {*os.listdir(folder)} == {"lock", "some.json"}


def test_links_and_pipes(folder: str, tmp_path: Path) -> None:
    """A link is not followed, a pipe not waited for, a folder left alone."""
    os.makedirs(folder, mode=0o700)
    target = tmp_path / "target"
    target.write_text(entry())
    Path(folder, "link.json").symlink_to(target)
    os.mkfifo(Path(folder, "pipe.json"))
    Path(folder, "folder.json").mkdir()
    with claim(folder) as ours:
        assert ours.reserved == {}
        assert {*os.listdir(folder)} == {"lock", "folder.json"}
    assert target.read_text() == entry()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_one_that_cannot_be_read_now(folder: str, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """It may be that of a process that lives, and stays."""
    os.makedirs(folder, mode=0o700)
    Path(folder, "some.json").write_text(entry())

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(state_files, "read", fail)
        with claim(folder):
            pass
    assert read_reserved(folder) == {A: 7}


@settings(deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No content of a file makes a claim fail."""
    own = tmp_path_factory.mktemp("room")
    own.chmod(0o700)
    (own / "some.json").write_bytes(data)
    with claim(str(own)) as ours:
        assert ours.reserved == {}


def test_what_is_left_of_a_claim(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts from then on, whoever is choosing meanwhile; where it cannot be written, all of it does."""
    with claim(folder) as ours:
        ours.record({A: 5, reservations.RAM: 9})
        with claim(folder) as others:
            assert others.reserved == {A: 5, reservations.RAM: 9}
            ours.change({A: 5, reservations.RAM: 2})
        assert read_reserved(folder) == {A: 5, reservations.RAM: 2}
        monkeypatch.setattr(os, "replace", refusing("replace", errno.ENOSPC))
        ours.change({reservations.RAM: 1})
        monkeypatch.undo()
        assert read_reserved(folder) == {A: 5, reservations.RAM: 2}
        assert len(os.listdir(folder)) == 1
    assert os.listdir(folder) == []


def test_the_wait_has_an_end(folder: str) -> None:
    """Where others do not stop choosing, an error names the folder and what to look at."""
    with claim(folder):
        begin = time.monotonic()
        with pytest.raises(GpusnapError) as caught, claim(folder, patience=0.1):
            pytest.fail("two are choosing")
        assert time.monotonic() - begin >= 0.1
        assert locked(folder)
    assert caught.value.sentence() == (
        f"another gpusnap has kept {folder} locked for more than 0.1 s; try again; run fuser "
        f"{folder}/lock to see which process has it open"
    )


def refusing(call: str, error: int) -> Callable[..., Any]:
    """A system call that fails."""

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize("call", ["mkdir", "open", "listdir"])
@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (errno.EPERM, "gpusnap needs root and a writable /run"),
        (errno.EACCES, "gpusnap needs root and a writable /run"),
        (errno.EROFS, "gpusnap needs root and a writable /run"),
        (errno.ENOSPC, "free some space there"),
        (errno.EMFILE, "raise the limit on open files for gpusnap (ulimit -n, LimitNOFILE= of a unit)"),
        (errno.ENFILE, "this host has too many files open: end what opens them, or raise fs.file-max"),
        (errno.ENOMEM, "free some memory and try again"),
    ],
)
def test_no_usable_run(
    folder: str, monkeypatch: pytest.MonkeyPatch, call: str, error: int, hint: str
) -> None:
    """One sentence that Podman shows as it is: who is not root is told so, and nobody else."""
    monkeypatch.setattr(os, call, refusing(call, error))
    with pytest.raises(GpusnapError) as caught, claim(folder):
        pytest.fail("claimed nothing")
    text = caught.value.sentence()
    assert text.startswith(f"memory cannot be reserved in {folder}: ")
    assert text.endswith(f"; {hint}")
    assert not any(words in text.lower() for words in POISON)


def test_no_outer_folder(tmp_path: Path) -> None:
    """Without /run itself there is an error, and no trace."""
    with pytest.raises(GpusnapError, match="it does not exist"), claim(str(tmp_path / "run/gpusnap/room")):
        pytest.fail("claimed nothing")
    assert os.listdir(tmp_path) == []


def test_a_full_run(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No space for our file: an error, others still kept out until the block is left, and no trace then."""
    with claim(folder) as ours:
        monkeypatch.setattr(os, "replace", refusing("replace", 28))
        with pytest.raises(GpusnapError, match="No space left"):
            ours.record({A: 1})
        monkeypatch.undo()
        assert locked(folder)
    assert os.listdir(folder) == []


def others_write(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    folder.parent.mkdir()
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


def a_file(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch(0o600)


@pytest.mark.parametrize("made", [others_write, a_link, a_file])
def test_a_folder_that_is_not_ours(folder: str, made: Callable[[Path], None]) -> None:
    """A folder that others may write, or a link in its place, is not used."""
    made(Path(folder))
    with (
        pytest.raises(GpusnapError, match="other users can write to it, or it is not a directory") as caught,
        claim(folder),
    ):
        pytest.fail("claimed nothing")
    assert folder in caught.value.sentence()


def test_a_lock_that_is_a_link(folder: str, tmp_path: Path) -> None:
    """The lock file is not made through a link."""
    os.makedirs(folder, mode=0o700)
    Path(folder, "lock").symlink_to(tmp_path / "target")
    with pytest.raises(GpusnapError), claim(folder):
        pytest.fail("claimed nothing")
    assert not (tmp_path / "target").exists()


def test_without_proc(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not see itself cannot say that it lives."""
    with claim(folder) as ours:
        monkeypatch.setattr(proc, "PROC", "/nowhere")
        with pytest.raises(GpusnapError, match="/nowhere does not show this process"):
            ours.record({A: 1})
    assert os.listdir(folder) == []


def test_show_without_a_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who only looks makes nothing, and is told where he may not look."""
    assert read_reserved(folder) == {}
    assert not os.path.exists(folder)
    monkeypatch.setattr(os, "listdir", refusing("listdir", 13))
    with pytest.raises(GpusnapError, match="cannot be read: access is refused") as caught:
        read_reserved(folder)
    assert (caught.value.hint, caught.value.code) == ("run it as root", "GPS-005")
    monkeypatch.setattr(os, "listdir", refusing("listdir", errno.EMFILE))
    with pytest.raises(GpusnapError, match="cannot be read: Too many open files") as caught:
        read_reserved(folder)
    assert caught.value.hint.startswith("raise the limit on open files")
    assert not caught.value.code


def test_where() -> None:
    """The folder lies on /run, which is empty after a boot: no PID of an earlier boot is met there."""
    assert reservations.FOLDER.endswith("/run-gpusnap/room")  # below a directory of this test: conftest.py
