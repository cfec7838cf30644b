"""What a swap says, and does, where the second container cannot come in."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import FakeDriver

from gpusnap.operations.suspending import make_way, targets
from gpusnap.operations.suspending import swap as swapping
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Interrupted, Refused
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.snapshot.records import suspensions
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import resume


def on_file(name: str, stage: Stage = Stage.SUSPENDED) -> Suspension:
    """A container of that name whose first process is this one."""
    owner = state_files.owner()
    return Suspension(f"{name}@b", name, "podman", "", stage, owner, owner, "2026-11-22T19:00:00Z", "crun")


class Swap:
    """OUT runs and IN is suspended; a test says what resuming each of them does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = {"in": on_file("in")}
        self.resume: dict[str, Callable[[], object]] = {"in": lambda: None, "out": lambda: None}
        self.resumed: list[str] = []
        self.after_suspend: Callable[[], object] = lambda: None
        early: Any = SimpleNamespace(driver=FakeDriver, containers=(None, None))
        self.early = early
        container = SimpleNamespace(id="out", pid=os.getpid())
        for name, value in {
            "_check_order": lambda *_: None,
            "_begin_loading": lambda *_: None,
            "suspend_this": self._suspend,
            "resume_this": self._resume,
        }.items():
            monkeypatch.setattr(swapping, name, value)
        monkeypatch.setattr(targets, "find_suspended", lambda *_: self.files["in"])
        monkeypatch.setattr(targets, "find_running", lambda *_: (None, container, None))
        monkeypatch.setattr(containers, "processes", lambda *_: [])
        monkeypatch.setattr(resume, "check", lambda *_: None)
        monkeypatch.setattr(suspensions, "find_by_container", self.files.get)
        monkeypatch.setattr(suspensions, "read", lambda key: self.files.get(key.partition("@")[0]))

    def _suspend(self, *_: object, **__: object) -> object:
        self.files["out"] = on_file("out")
        self.after_suspend()
        return SimpleNamespace(container=self.files["out"])

    def _resume(self, found: Suspension, *_: object, **__: object) -> None:
        self.resumed.append(found.name)
        self.resume[found.name]()
        del self.files[found.name]

    def fails(self, name: str, error: GpusnapError, stage: Stage | None = Stage.SUSPENDED) -> None:
        """Have the resume of a container fail, and leave it at a stage; None: it runs."""

        def fail() -> None:
            if stage is None:
                del self.files[name]
            else:
                self.files[name] = replace(self.files[name], stage=stage)
            raise error

        self.resume[name] = fail

    def run(self) -> None:
        swapping.swap("out", "in", self.early)


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Swap:
    return Swap(monkeypatch)


def test_it_comes_back(swap: Swap) -> None:
    swap.fails("in", GpusnapError("the driver said no", hint="look at dmesg"))
    with pytest.raises(GpusnapError) as caught:
        swap.run()
    assert caught.value.sentence() == "the driver said no; look at dmesg; out continues to run"
    assert swap.resumed == ["in", "out"]


def test_an_error_that_nobody_expected(swap: Swap) -> None:
    """Such as no thread: the first comes back all the same, and that is said."""

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    swap.resume["in"] = fail
    with pytest.raises(GpusnapError, match="thread") as caught:
        swap.run()
    assert caught.value.hint.endswith("out continues to run")
    assert swap.resumed == ["in", "out"]


def test_somebody_else_suspends_the_first(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left to them."""

    def fail(*_: object, **__: object) -> None:
        swap.files["out"] = replace(on_file("out"), owner=(1, 1))
        raise GpusnapError("out is already suspended")

    monkeypatch.setattr(swapping, "suspend_this", fail)
    with pytest.raises(GpusnapError, match="already suspended"):
        swap.run()
    assert swap.resumed == []


def test_a_second_whose_resume_was_killed(swap: Swap) -> None:
    """Is refused before the first is touched."""
    swap.files["in"] = on_file("in", Stage.RESUMING)
    with pytest.raises(GpusnapError, match="in"):
        swap.run()
    assert (swap.resumed, set(swap.files)) == ([], {"in"})


def test_a_second_that_is_being_resumed(swap: Swap) -> None:
    """The other gpusnap is at work: it is not said to be dead, and recover would not help."""
    swap.files["in"] = replace(on_file("in", Stage.RESUMING), owner=state_files.owner(os.getppid()))
    with pytest.raises(GpusnapError, match="is still working on container in") as raised:
        swap.run()
    assert raised.value.code == "GPS-020"
    assert swap.resumed == []


def test_neither(swap: Swap) -> None:
    """Both hints are told: the first one says how to finish what holds the GPU."""
    swap.fails("in", GpusnapError("Podman said no", hint="gpusnap recover in tries again"), Stage.RESUMED)
    swap.fails("out", GpusnapError("no room"))
    with pytest.raises(GpusnapError) as caught:
        swap.run()
    assert caught.value.sentence() == (
        "Podman said no; gpusnap recover in tries again; out is suspended, and could not be resumed: no room"
    )


def test_only_the_command_of_the_second(swap: Swap) -> None:
    swap.fails("in", ContainerError("in is resumed, but its command failed"), None)
    with pytest.raises(ContainerError) as caught:
        swap.run()
    said = "in is resumed, but its command failed; in runs, and out is suspended"
    assert caught.value.sentence() == said
    assert swap.resumed == ["in"]


def test_only_the_command_of_the_first(swap: Swap) -> None:
    swap.fails("in", GpusnapError("the driver said no"))
    swap.fails("out", ContainerError("out is resumed, but its command failed"), None)
    with pytest.raises(GpusnapError) as caught:
        swap.run()
    said = "the driver said no; out continues to run; out is resumed, but its command failed"
    assert caught.value.sentence() == said


def test_a_file_that_cannot_be_read(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes no error's place, and keeps nobody from coming back."""

    def unreadable(_: str) -> None:
        raise GpusnapError("the record was not written by this version of gpusnap")

    swap.fails("in", GpusnapError("the driver said no"))
    monkeypatch.setattr(suspensions, "read", unreadable)
    with pytest.raises(GpusnapError, match=r"^the driver said no$") as caught:
        swap.run()
    assert caught.value.hint == "out continues to run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_the_two(swap: Swap, number: int) -> None:
    """The first is not left suspended without a word."""
    swap.after_suspend = lambda: os.kill(os.getpid(), number)
    with pytest.raises(Interrupted) as caught:
        swap.run()
    assert swap.resumed == ["out"]
    assert caught.value.hint.endswith("; out continues to run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_another_failure(
    swap: Swap, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """The search for the first is not stopped by it, so the first comes back."""
    swap.fails("in", GpusnapError("the driver said no"))

    def find(container: str) -> Suspension | None:
        os.kill(os.getpid(), number)
        return swap.files.get(container)

    monkeypatch.setattr(suspensions, "find_by_container", find)
    with pytest.raises(GpusnapError, match="the driver said no") as caught:
        swap.run()
    assert caught.value.hint == "out continues to run"
    assert swap.resumed == ["in", "out"]


def test_the_first_cannot_be_suspended(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise GpusnapError("it is busy", hint="the container continues to run")

    monkeypatch.setattr(swapping, "suspend_this", fail)
    with pytest.raises(GpusnapError) as caught:
        swap.run()
    assert caught.value.sentence() == "it is busy; the container continues to run"
    assert swap.resumed == []


def test_nobody_knows_whether_it_fits(swap: Swap, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is not even suspended; see test_make_way.py."""

    def refuse(*_: object) -> None:
        raise Refused("whether in fits in place of out is not known")

    monkeypatch.setattr(make_way, "check_swap", refuse)
    with pytest.raises(Refused, match="is not known"):
        swap.run()
    assert (swap.resumed, set(swap.files)) == ([], {"in"})
