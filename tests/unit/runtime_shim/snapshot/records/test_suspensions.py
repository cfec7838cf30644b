"""What is on file of a suspended container, and what becomes of it when the container has ended."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeDriver
from holders import blocked, hold_and_be_killed

from gpusnap.operations.suspending.recover import needs_recovery
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import AlreadyPaused, ContainerError, GpusnapError, ImageError, Refused
from gpusnap.runtime_shim.base.transaction import Transaction
from gpusnap.runtime_shim.gpu.api.driver import Driver, Gpu, Host, ProcessState
from gpusnap.runtime_shim.gpu.api.gpu_map import parse_map
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.settings import Memory, Settings
from gpusnap.runtime_shim.shim import entry, overrides, suspended
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls, paused_container
from gpusnap.runtime_shim.snapshot.gpu_processes import job as jobs
from gpusnap.runtime_shim.snapshot.memory import suspended_memory, transfer
from gpusnap.runtime_shim.snapshot.memory.capture import Chunks
from gpusnap.runtime_shim.snapshot.memory.ram import NoDestination
from gpusnap.runtime_shim.snapshot.preflight import space
from gpusnap.runtime_shim.snapshot.records import journal, suspensions
from gpusnap.runtime_shim.snapshot.records.reservations import RAM, claim, read_reserved
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, SuspendedProcess, Suspension
from gpusnap.runtime_shim.snapshot.recovery import bring_back
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recover_checkpoint
from gpusnap.runtime_shim.snapshot.suspended_containers import preflight, resume, suspend, take
from gpusnap.runtime_shim.snapshot.suspended_containers.engine import Engine
from gpusnap.runtime_shim.snapshot.suspended_containers.sweep import sweep

GONE = (1 << 22, 1)
"""PID and start time of nobody."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all suspended containers, and everything else of gpusnap's below /run."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "gpusnap" / "journal"))
    monkeypatch.setattr(tmpfs, "FOLDER", str(tmp_path / "gpusnap" / "stage"))
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "gpusnap" / "orders"))
    return tmp_path / "gpusnap" / "suspended"


def suspension(container: str = "c0ffee", root: str = "/run/crun", **changed: object) -> Suspension:
    gpu = GpuRecord("GPU-1", 0, 0, "Soft", "9.0", 1 << 30, 1 << 20, "0000:01:00.0")
    found = Suspension(
        key=container_key.key(root, container),
        name="w",
        engine="podman",
        namespace="",
        stage=Stage.SUSPENDED,
        owner=state_files.owner(),
        init=state_files.owner(),
        since="2026-11-22T19:00:00Z",
        runtime="crun",
        driver_version="580.1",
        gpus=(gpu,),
        processes=(SuspendedProcess(7, 8, 1, (("GPU-1", 1 << 20),)),),
        pairs=(("GPU-1", "GPU-2"),),
    )
    return replace(found, **changed)  # type: ignore[arg-type]


def test_as_it_was_written(folder: Path) -> None:
    """Every field comes back; the folder, for which the launcher looks, is there as long as there is one."""
    first, second = suspension(), suspension("beef", stage=Stage.RESUMING)
    for each in (first, second):
        suspensions.write(each)
        assert suspensions.read(each.key) == each
    assert sorted(suspensions.find(), key=lambda each: each.key) == sorted(
        [first, second], key=lambda each: each.key
    )
    assert suspensions.find_by_container("beef") == second
    assert suspensions.find_by_container("bee") is None
    assert (first.container, first.gpu_memory, first.is_alive, first.at_work) == (
        "c0ffee",
        1 << 20,
        True,
        True,
    )
    suspensions.drop(first.key)
    assert folder.is_dir()
    suspensions.drop(second.key)
    assert not folder.exists()
    assert suspensions.read(first.key) is None


def test_a_file_of_a_newer_version(folder: Path) -> None:
    """Its members may mean something else, though they have the same names."""
    found = suspension()
    suspensions.write(found)
    document = journal.load(found.key, journal.SUSPENDED)
    journal.write_document(found.key, journal.SUSPENDED, {**document, "version": document["version"] + 1})
    with pytest.raises(GpusnapError, match=r"c0ffee was not written by this version .* version 2"):
        suspensions.read(found.key)


def test_a_file_of_another_version(folder: Path) -> None:
    """Is no suspended container, and said so."""
    found = suspension()
    journal.write_document(found.key, journal.SUSPENDED, {"stage": "floating"})
    with pytest.raises(GpusnapError, match="c0ffee was not written by this version of gpusnap"):
        suspensions.read(found.key)


def test_sweep(folder: Path) -> None:
    """What is kept of a container that has ended goes; of one that lives it stays."""
    lives, ended = suspension(), suspension("beef", init=GONE)
    for each in (lives, ended):
        suspensions.write(each)
        journal.write(each.key, "", {os.getpid(): ()})
    sweep()
    assert list(suspensions.find()) == [lives]
    assert journal.list_noted("json") == (lives.key,)


def answer(command: str, *words: str, root: str | None = None, code: int = 0) -> int | None:
    return suspended.answer(command, words, root, lambda: code)


def test_commands_of_others() -> None:
    """What is not suspended goes to the real runtime, whatever the command is; the root tells which it is."""
    suspensions.write(suspension())
    for command in entry.WATCHED_COMMANDS:
        assert answer(command, "beef") is None
        assert answer(command, "--force", "../c0ffee") is None
        assert answer(command, "c0ffee", root="/run/other") is None


def test_resume_is_refused() -> None:
    """But while gpusnap itself has the engine do it, or an order says that nothing is to be done."""
    found = suspension()
    for stage in (Stage.SUSPENDED, Stage.RESUMING):
        suspensions.write(replace(found, stage=stage))
        for root in (None, "/run/crun"):
            with pytest.raises(ContainerError, match="w is suspended") as caught:
                answer("resume", "c0ffee", root=root)
            assert caught.value.hint == "gpusnap resume w"
        with overrides.order("c0ffee", pages="store", asleep=True):
            assert answer("resume", "c0ffee") == 0
            assert answer("pause", "c0ffee") == 0
        with overrides.order("c0ffee", pages="store"), pytest.raises(ContainerError):
            answer("resume", "c0ffee")
    for stage in (Stage.UNDONE, Stage.RESUMED):
        suspensions.write(replace(found, stage=stage))
        assert answer("resume", "c0ffee") is None


@pytest.mark.parametrize(
    ("parent", "refused"),
    [
        (("podman", "healthcheck", "run", "c0ffee"), True),
        (("/usr/bin/podman", "--log-level", "debug", "healthcheck", "run", "c0ffee"), True),
        (("podman", "kill", "c0ffee"), False),
        (("sh", "healthcheck"), False),
    ],
)
def test_a_kill(monkeypatch: pytest.MonkeyPatch, parent: tuple[str, ...], refused: bool) -> None:
    """Ends a suspended container, but not for its health check, which cannot run there."""
    monkeypatch.setattr(proc, "comm", lambda _: os.path.basename(parent[0]))
    monkeypatch.setattr(proc, "command", lambda _: parent)
    suspensions.write(suspension())
    with pytest.raises(ContainerError, match="w is suspended, so") if refused else nullcontext():
        assert answer("kill", "c0ffee", "9") is None
    assert answer("kill", "beef", "9") is None
    suspensions.write(suspension(init=GONE))
    assert answer("kill", "--all", "c0ffee", "9") is None


def test_resume_of_one_that_is_being_suspended() -> None:
    """Is refused as long as somebody is at work on it: it would come when that is done."""
    found = suspension(stage=Stage.SUSPENDING)
    suspensions.write(found)
    with pytest.raises(ContainerError, match="w is being suspended"):
        answer("resume", "c0ffee")
    assert answer("pause", "c0ffee") is None
    suspensions.write(replace(found, owner=GONE))
    assert answer("resume", "c0ffee") is None


def an_engine(go_on: Callable[[], object], pause: Callable[[], object] = lambda: None) -> Engine:
    """One that gives no device node back, as none is lost."""
    return Engine("podman", "w", "", pause, go_on, list)


def back(found: Suspension, go_on: Callable[[], object]) -> suspend._Undo:
    container: Any = SimpleNamespace(key=found.key)
    return suspend._Undo(container, found, an_engine(go_on))


def job(found: Suspension, *, suspended: bool = False) -> Any:
    pages = Chunks("", found.key, Settings().memory, destination=NoDestination(found.key))
    return SimpleNamespace(suspended=suspended, stuck=None, pages=pages)


@pytest.mark.parametrize("stuck", [False, True])
def test_an_engine_that_does_not_let_it_go_on(monkeypatch: pytest.MonkeyPatch, stuck: bool) -> None:
    """The note stays, by which `gpusnap recover` finds the paused container, and the error names that."""
    found = suspension(stage=Stage.SUSPENDING)

    def go_on() -> None:
        if stuck:
            raise GpusnapError("podman cannot be run")

    way_back = back(found, go_on)
    way_back.job = job(found)
    hints: list[str] = []
    try:
        way_back.go_on()
    except GpusnapError as error:
        hints.append(error.hint)
    way_back.forget()
    assert list(suspensions.find()) == ([replace(found, stage=Stage.UNDONE)] if stuck else [])
    assert hints == ["gpusnap recover c0ffee tries again"] * stuck


def test_a_container_that_somebody_else_has_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between our look and our pause: it stays so, and nothing of the suspend is left."""
    begun = suspension(stage=Stage.SUSPENDING)
    seen = preflight.InitialState(SimpleNamespace(), None, (), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(preflight, "inspect", lambda *_: seen)
    monkeypatch.setattr(suspend, "_make_suspension", lambda *_: begun)
    done: list[str] = []

    def pause() -> None:
        assert [each.stage for each in suspensions.find()] == [Stage.SUSPENDING]
        raise AlreadyPaused("w")

    container = SimpleNamespace(key=begun.key, id="c0ffee", root="/run/crun", pid=1)
    engine = an_engine(lambda: done.append("to continue"), pause)
    with pytest.raises(AlreadyPaused, match="the container w was paused by another process"):
        suspend.suspend(container, None, Settings(), FakeDriver(), engine)  # type: ignore[arg-type]
    assert done == []
    assert list(suspensions.find()) == []


def test_a_container_that_ends_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the suspend is on file as done: it is undone, and no success."""
    begun = suspension(stage=Stage.SUSPENDING)
    done: list[str] = []
    for name in ("_check", "thaw", "suspend_all"):
        monkeypatch.setattr(take, name, lambda *_: 0)
    seen = preflight.InitialState(SimpleNamespace(), None, (), 0)  # type: ignore[arg-type]
    monkeypatch.setattr(preflight, "inspect", lambda *_: seen)
    monkeypatch.setattr(suspend._Undo, "forget", lambda _: None)
    frozen: Any = SimpleNamespace(freeze=lambda: done.append("frozen"))
    job_of = take.job_of

    def paused(*words: Any) -> Any:
        made = job_of(*words)
        made.paused = frozen
        return made

    monkeypatch.setattr(take, "job_of", paused)
    monkeypatch.setattr(suspend, "_make_suspension", lambda *_: begun)
    monkeypatch.setattr(take, "_describe", lambda *_: replace(begun, stage=Stage.SUSPENDED, init=GONE))
    container = SimpleNamespace(key=begun.key, id="c0ffee", root="/run/crun", pid=1)
    engine = an_engine(lambda: done.append("to continue"))
    with pytest.raises(ContainerError, match="container w exited while it was suspended"):
        suspend.suspend(container, None, Settings(), FakeDriver(), engine)  # type: ignore[arg-type]
    assert done == ["frozen", "to continue"]
    assert [each.stage for each in suspensions.find()] == [Stage.UNDONE]  # `forget` would drop it


def test_the_early_claim_ends_when_the_ram_is_claimed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before that it counts for others, and from then on it would count twice."""
    begun = suspension(stage=Stage.SUSPENDING)
    seen = preflight.InitialState(SimpleNamespace(), None, (), 7)  # type: ignore[arg-type]
    monkeypatch.setattr(preflight, "inspect", lambda *_: seen)
    monkeypatch.setattr(suspend, "_make_suspension", lambda *_: begun)
    for name in ("_check", "thaw"):
        monkeypatch.setattr(take, name, lambda *_: None)
    monkeypatch.setattr(take, "suspend_all", lambda job: jobs._suspend_these(job, []))
    monkeypatch.setattr(containers, "inner_pids", lambda *_: {})
    monkeypatch.setattr(jobs, "record", lambda *_: [])
    monkeypatch.setattr(jobs, "claim", lambda: claim(str(tmp_path / "gpusnap/room")))
    done: list[str] = []

    def take_off(*_: object) -> None:
        done.append("taken off")
        raise GpusnapError("that is all")

    monkeypatch.setattr(jobs, "_take_off", take_off)

    @contextmanager
    def room(need: int) -> Iterator[Callable[[], object]]:
        done.append(f"{need} bytes claimed")
        yield lambda: done.append("no longer")

    container = SimpleNamespace(key=begun.key, id="c0ffee", root="/run/crun", pid=1)
    engine = an_engine(lambda: None, lambda: done.append("paused"))
    with pytest.raises(GpusnapError, match="that is all"):
        suspend.suspend(container, None, Settings(), FakeDriver(), engine, room=room)  # type: ignore[arg-type]
    assert done == ["7 bytes claimed", "paused", "no longer", "taken off"]


def test_a_file_of_an_earlier_run() -> None:
    """A container that was started again under its ID is paused and goes on as any other."""
    for stage in Stage:
        suspensions.write(suspension(init=GONE, stage=stage))
        for command in ("pause", "resume"):
            assert answer(command, "c0ffee") is None


@pytest.mark.parametrize("missing", [False, True])
def test_a_full_run_keeps_no_container_paused(monkeypatch: pytest.MonkeyPatch, missing: bool) -> None:
    """Where it cannot be noted that it may go on there is no note; but for one that misses GPU state."""
    found = suspension(stage=Stage.SUSPENDING)
    suspensions.write(found)
    seen: list[Suspension | None] = []
    way_back = back(found, lambda: seen.append(suspensions.read(found.key)))
    way_back.job = job(found, suspended=missing)
    way_back.go_on()
    assert seen == [replace(found, stage=Stage.UNDONE)]
    suspensions.write(found)

    def full(key: str, kind: str, document: object) -> None:
        raise GpusnapError("no room")

    monkeypatch.setattr(journal, "write_document", full)
    if missing:
        with pytest.raises(GpusnapError, match="no room"):
            way_back.go_on()
        assert (len(seen), suspensions.read(found.key)) == (1, found)
    else:
        way_back.go_on()
        assert seen[1:] == [None]


def test_delete(folder: Path) -> None:
    """The real runtime's exit code; what was kept goes where the container has ended, and only then."""
    suspensions.write(suspension())
    assert answer("delete", "--force", "c0ffee", code=3) == 3
    assert folder.exists()
    suspensions.write(suspension(init=GONE))
    assert answer("delete", "c0ffee") == 0
    assert not folder.exists()


def test_a_pass_through_stays_cheap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a command that may mean something else is looked at closely; so is one that cannot be read."""
    monkeypatch.setattr(entry, "WATCH", str(folder))
    watched = entry._is_watched
    assert not watched("resume", ["c0ffee"])
    found = suspension()
    suspensions.write(found)
    assert watched("resume", ["c0ffee"])
    assert watched("delete", ["--force", "c0ffee"])
    assert not watched("resume", ["c0ff"])
    assert not watched("delete", ["beef"])
    for stage in (Stage.SUSPENDING, Stage.UNDONE, Stage.RESUMED):
        suspensions.write(replace(found, stage=stage))
        assert not watched("pause", ["c0ffee"])
        assert watched("resume", ["c0ffee"]) == (stage is Stage.SUSPENDING)
        assert watched("delete", ["c0ffee"])
    (folder / f"{found.key}.suspended").unlink()
    (folder / f"{found.key}.suspended").mkdir()
    assert watched("resume", ["c0ffee"])


def host(*free: int) -> Host:
    """A host with GPUs of 1 GiB, GPU-1 and so on, of which so many bytes are free."""
    gpus = tuple(
        Gpu(f"GPU-{number}", number, number, "Soft", "9.0", 1 << 30, (1 << 30) - left, False, "default")
        for number, left in enumerate(free, 1)
    )
    return Host("nvidia", "580.1", "13.0", gpus)


def test_the_gpu_of_a_resume() -> None:
    """The one that it was on; another one that it sees, where that has room; none that it does not see."""
    one = suspension()
    two = replace(one, gpus=(*one.gpus, replace(one.gpus[0], uuid="GPU-2", minor=1, index=1, memory_used=0)))
    room, full = 1 << 29, 1 << 10
    assert resume.check(one, host(room, room), ()) == (("GPU-1", "GPU-1"),)
    assert dict(resume.check(two, host(full, room), ())) == {"GPU-1": "GPU-2", "GPU-2": "GPU-1"}
    with pytest.raises(resume.NoRoom, match="no GPU that container w can see fits its GPU 0") as caught:
        resume.check(one, host(full, room), ())
    assert caught.value.hint == (
        "gpusnap swap OTHER w; to move it to GPU 2 of this host: gpusnap checkpoint w && podman rm --force w "
        "&& gpusnap restore --gpu-map 0=2 w"
    )
    with pytest.raises(resume.NoRoom) as caught:
        resume.check(one, host(full, full), ())
    assert caught.value.sentence() == (
        "no GPU that container w can see fits its GPU 0 (Soft): GPU 1: 0.0 MiB free, 1.0 MiB needed; "
        "gpusnap swap OTHER w [GPS-401]"
    )
    with pytest.raises(Refused):
        resume.check(one, host(room, room), (), {"GPU-1": room, "GPU-2": room})


@pytest.mark.parametrize(
    ("request_", "here", "said"),
    [
        ("5=0", (1 << 29,), "the GPU map names GPU 5 of container w, which has GPU 0"),
        (
            "0=2",
            (1 << 29, 1 << 29),
            (
                "GPU 0 of container w cannot move to GPU 2 of this host, as requested by the GPU map: "
                "container w cannot see it; to move it to GPU 2 of this host: gpusnap "
                "checkpoint w && podman rm --force w && gpusnap restore --gpu-map 0=2 w [GPS-403]"
            ),
        ),
        (
            "0=1",
            (0, 0),
            "GPU 0 of container w cannot move to GPU 1 of this host, as requested by the GPU map: ",
        ),
    ],
)
def test_what_a_refused_resume_speaks_of(request_: str, here: tuple[int, ...], said: str) -> None:
    """Of the suspended container: there is neither a checkpoint nor a new container."""
    with pytest.raises(Refused) as caught:
        resume.check(suspension(), host(*here), parse_map(request_))
    sentence = caught.value.sentence()
    assert sentence.startswith(said)
    assert "the checkpoint" not in sentence
    assert "new container" not in sentence


def test_a_suspended_container_whose_gpu_is_gone() -> None:
    """It can only go to another host."""
    with pytest.raises(Refused) as caught:
        resume.check(suspension(), replace(host(1 << 29), gpus=()), ())
    assert caught.value.sentence() == (
        "container w needs 1 GPU, but this host has none; to move it to a host that has such GPUs: "
        "gpusnap checkpoint w && podman rm --force w, then gpusnap restore w there [GPS-401]"
    )


@pytest.mark.parametrize("error", [GpusnapError("the driver failed"), ImportError("cannot map it")])
@pytest.mark.parametrize(
    ("stage", "cut_off"),
    [(Stage.RESUMING, False), (Stage.RESUMING, True), (Stage.SUSPENDING, True)],
)
def test_a_resume_that_fails(
    monkeypatch: pytest.MonkeyPatch, error: Exception, stage: Stage, cut_off: bool
) -> None:
    """Whatever is raised, the container stays suspended as it was; not where a suspend was killed before."""
    found = suspension(stage=stage)
    noted = journal.Entry(found.key, "", (1, 1), ())
    stayed: list[str] = []

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(journal, "read", lambda key: noted)
    monkeypatch.setattr(bring_back, "bring_back", fail)

    def stay(found: Suspension, entry: journal.Entry, driver: Driver) -> None:
        stayed.append(found.name)

    monkeypatch.setattr(resume, "_stay_suspended", stay)
    with pytest.raises(type(error), match=str(error)):
        resume._bring_back(found, Settings(), FakeDriver(), Transaction(), {}, list, cut_off=cut_off)
    assert stayed == ([found.name] if stage is Stage.RESUMING else [])


@pytest.fixture
def held(folder: Path) -> Iterator[tuple[Suspension, int]]:
    """A suspended container, and a process of it whose signals stay blocked after a gpusnap that failed."""
    found = suspension()
    suspensions.write(found)
    Path(journal.FOLDER).mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            hold_and_be_killed(child.pid, [child.pid], Path(journal.masks(found.key)))
            assert blocked(child.pid, child.pid)
            yield found, child.pid
        finally:
            child.kill()


def test_recover_gives_a_mask_back(held: tuple[Suspension, int]) -> None:
    """The container stays suspended."""
    found, pid = held
    assert needs_recovery(found)
    engine: Any = SimpleNamespace(allow=list, go_on=list)
    said = resume.recover(found.key, Settings(), FakeDriver(), engine)
    assert said.startswith("it is suspended, and its threads have their signal masks")
    assert not blocked(pid, pid)
    assert journal.list_noted(journal.MASKS) == ()
    assert not needs_recovery(found)
    assert list(suspensions.find()) == [found]


def test_a_resume_gives_a_mask_back(held: tuple[Suspension, int]) -> None:
    found, pid = held
    with journal.hold(found.key):
        bring_back.bring_back(
            journal.Entry(found.key, "", (1, 1), ()), FakeDriver(), Memory(), None, cut_off=False
        )
    assert not blocked(pid, pid)
    assert journal.list_noted(journal.MASKS) == ()


def test_a_mask_outlives_the_memory(held: tuple[Suspension, int]) -> None:
    """The thread of a resumed container still needs it; nobody needs it once the thread has ended."""
    found, pid = held
    with journal.hold(found.key):
        suspended_memory.free(found.key)
    assert journal.list_noted(journal.MASKS) == (found.key,)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with journal.hold(found.key):
        suspended_memory.free(found.key)
    assert journal.list_noted(journal.MASKS) == ()


def test_recover_has_others_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML may not answer: a child process that can be left behind is there before anybody is asked."""
    there: list[str] = []
    monkeypatch.setattr(question_process, "start", lambda: there.append("a child"))

    def read(key: str) -> None:
        assert there == ["a child"]

    monkeypatch.setattr(suspensions, "read", read)
    engine = SimpleNamespace(allow=list, go_on=list)
    assert resume.recover(suspension().key, Settings(), FakeDriver(), engine) == (  # type: ignore[arg-type]
        "another process has already repaired it"
    )
    assert there == ["a child"]


class Trouble:
    """A resume's surroundings, one call of which fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(resume, "claim", nullcontext)
        monkeypatch.setattr(resume, "_plan", lambda *_: (("GPU-1", "GPU-1"),))
        monkeypatch.setattr(resume, "_measure_spilled", lambda found: {})
        monkeypatch.setattr(bring_back, "bring_back", lambda *_, **__: None)
        monkeypatch.setattr(bring_back, "list_alive", lambda entry: (journal.JournalProcess(7, 8, ()),))

    def at(self, module: object, name: str, error: Exception, *, after: int = 0) -> None:
        """Have a function raise the error, once it was called so often."""
        calls, before = iter(range(1 << 10)), getattr(module, name)

        def fail(*words: object, **named: object) -> object:
            if next(calls) >= after:
                raise error
            return before(*words, **named)

        self.monkeypatch.setattr(module, name, fail)

    def caught(self, go_on: Callable[[], object] = lambda: None) -> str:
        """What a resume says."""
        found = suspension()
        suspensions.write(found)
        journal.write(found.key, "", {os.getpid(): ()})
        with pytest.raises(GpusnapError) as caught:
            resume.resume(found.key, Settings(), FakeDriver(), an_engine(go_on))
        return caught.value.sentence()


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Trouble:
    return Trouble(monkeypatch)


RECOVER = "gpusnap recover c0ffee tries again"
ERRORS = pytest.mark.parametrize("error", [GpusnapError("no files", hint="free"), OSError(errno.EMFILE, "")])
ALL_ERRORS = pytest.mark.parametrize(
    "error", [GpusnapError("no files", hint="free"), OSError(errno.EMFILE, ""), ImportError("no module")]
)


@ALL_ERRORS
@pytest.mark.parametrize(
    ("module", "name"),
    [(journal, "read"), (bring_back, "bring_back"), (paused_container, "reopen")],
)
def test_a_resume_that_does_not_stay_suspended(
    trouble: Trouble, monkeypatch: pytest.MonkeyPatch, module: object, name: str, error: Exception
) -> None:
    """Nobody can tell how far it is: the error says who puts it right, wherever it came from."""
    monkeypatch.setattr(driver_calls, "state", lambda *_: ProcessState.RUNNING)
    found = suspension()
    suspensions.write(found)
    journal.write(found.key, "", {os.getpid(): ()})
    trouble.at(module, name, error)
    assert RECOVER in trouble.caught()
    now = suspensions.read(found.key)
    assert now is not None
    assert now.stage is Stage.RESUMING


def test_what_a_resume_could_not_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpusnap recover` does, of a container that is on file as suspended no more."""
    found = suspension()
    journal.write(found.key, "", {os.getpid(): ()})
    monkeypatch.setattr(journal.Entry, "at_work", False)
    freed: list[str] = []
    monkeypatch.setattr(tmpfs, "remove", freed.append)
    (entry,) = journal.entries()
    assert "running: " in recover_checkpoint.recover(entry, FakeDriver(), Settings().memory)
    assert journal.entries() == ()
    assert freed == [found.key]


def test_a_resume_that_stays_suspended(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is nothing to recover, and the error does not say so."""
    monkeypatch.setattr(driver_calls, "state", lambda *_: ProcessState.CHECKPOINTED)
    monkeypatch.setattr(transfer, "release_memory", lambda *_: None)
    trouble.at(bring_back, "bring_back", GpusnapError("the driver failed"))
    assert trouble.caught() == "the driver failed"
    now = suspensions.read(suspension().key)
    assert now is not None
    assert now.stage is Stage.SUSPENDED


def test_memory_that_cannot_be_read(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says that the container is still suspended."""
    monkeypatch.setattr(driver_calls, "state", lambda *_: ProcessState.CHECKPOINTED)
    monkeypatch.setattr(transfer, "release_memory", lambda *_: None)
    trouble.at(bring_back, "bring_back", ImageError("nothing could be read", hint="try again"))
    assert trouble.caught() == "nothing could be read; try again; w is suspended as before"


def test_a_resume_is_interrupted_while_it_reads(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may never respond: a signal ends the wait, and the container stays suspended."""
    monkeypatch.setattr(driver_calls, "state", lambda *_: ProcessState.CHECKPOINTED)
    monkeypatch.setattr(transfer, "release_memory", lambda *_: None)

    def fill(*_: object, interrupt: Callable[[], object], **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupt()

    monkeypatch.setattr(bring_back, "bring_back", fill)
    assert trouble.caught() == "stopped by SIGINT; the container was left in its original state"
    now = suspensions.read(suspension().key)
    assert now is not None
    assert now.stage is Stage.SUSPENDED


def test_the_ram_of_a_resume_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read through it counts for others, and theirs counts for it."""
    folder, heap, size = str(tmp_path / "gpusnap" / "room"), 150 << 20, 1 << 20
    monkeypatch.setattr(space, "_measure_available", lambda: heap + 2 * size)
    monkeypatch.setattr(space, "_limit", lambda init: None)

    def plan() -> dict[str, int]:
        with claim(folder) as room:
            resume._plan(suspension(), host(1 << 30), (), Settings(), room, {7: size})
            return dict(read_reserved(folder))

    assert plan() == {"GPU-1": 1 << 20, RAM: size}
    assert read_reserved(folder) == {}
    with claim(folder) as other:
        other.record({RAM: size + 1})
        with pytest.raises(Refused, match="of GPU memory must move to RAM"):
            plan()


@ERRORS
def test_a_resume_that_cannot_be_noted(trouble: Trouble, error: Exception) -> None:
    """Before anything was changed it is suspended as before; once its state is back, recover goes on."""
    found = suspension()
    suspensions.write(found)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(suspensions, "write", raising(error))
        with pytest.raises(type(error)) as caught:
            resume.resume(found.key, Settings(), FakeDriver(), an_engine(lambda: None))
    assert "gpusnap recover" not in str(caught.value)
    assert suspensions.read(found.key) == found
    assert trouble.caught(raising(error)).endswith(RECOVER)
    now = suspensions.read(found.key)
    assert now is not None
    assert now.stage is Stage.RESUMED


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises it."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), GpusnapError("the stage cannot be removed")]
)
def test_what_cannot_be_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """The container runs all the same, and it is said."""
    found = suspension(init=GONE)
    gone_on: list[str] = []

    def fail(key: str) -> None:
        raise error

    monkeypatch.setattr("gpusnap.runtime_shim.snapshot.memory.suspended_memory.free", fail)
    monkeypatch.setattr(containers, "frozen_group", lambda init, container: None)
    resume._finish(found, Transaction(), lambda: gone_on.append(found.name))
    assert gone_on == ["w"]
    assert suspensions.read(found.key) is None
    said = capsys.readouterr().err
    assert "files of the suspended container w could not be removed" in said
    assert "gpusnap recover removes them" in said
