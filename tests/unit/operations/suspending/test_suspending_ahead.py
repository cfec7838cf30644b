"""What suspend, resume and swap ask for before their modules are imported."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from gpusnap.engines import podman
from gpusnap.operations.suspending import ahead as asking
from gpusnap.operations.suspending.ahead import start_ahead
from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import DriverTooOld

DEADLINE = 90.0


class Slow:
    """A driver that does not start before it may."""

    plugin = None

    def __init__(self) -> None:
        self.may = threading.Event()
        self.calls: list[str] = []

    def open(self) -> None:
        assert self.may.wait(DEADLINE)
        self.calls.append("open")
        raise DriverTooOld("the GPU driver has no checkpoint API")

    def host(self) -> None:
        assert self.may.wait(DEADLINE)
        self.calls.append("host")


class Told(podman.Inspection):
    """A question to Podman, which is closed when nobody waits for it."""

    made: list[str]

    def __init__(self, wanted: str, *, seconds: float | None = None) -> None:
        self.made.append(wanted)

    def __exit__(self, *_: object) -> None:
        self.made.remove(self.made[-1])


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names that Podman is being asked for."""
    found: list[str] = []
    monkeypatch.setattr(Told, "made", found, raising=False)
    monkeypatch.setattr(podman, "Inspection", Told)
    yield found
    question_process.end()


def test_all_at_once(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The block runs while Podman and the driver have not answered; it ends when the driver has started."""
    slow = Slow()
    monkeypatch.setattr(asking, "needed_driver", lambda: cast(Driver, slow))
    with start_ahead("llama", "qwen") as early:
        assert asked == ["llama", "qwen"]
        assert early.container is early.containers[0]
        assert early.driver() is cast(Driver, slow)
        assert not slow.calls
        slow.may.set()
    assert sorted(slow.calls) == ["host", "open"]  # what it raised is whoever's who calls it
    assert not asked


def test_a_failure_meanwhile(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which the driver starts does not end before that is done."""
    slow = Slow()
    monkeypatch.setattr(asking, "needed_driver", lambda: cast(Driver, slow))

    def fail() -> None:
        with start_ahead("llama"):
            threading.Timer(0.05, slow.may.set).start()
            raise GpusnapError("it is no container")

    with pytest.raises(GpusnapError, match="it is no container"):
        fail()
    assert sorted(slow.calls) == ["host", "open"]
    assert not asked


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever needs it hears of that, after what else is to be said."""

    def none() -> Driver:
        raise GpusnapError("this host has no GPU driver")

    monkeypatch.setattr(asking, "needed_driver", none)
    with start_ahead("llama") as early, pytest.raises(GpusnapError, match="this host has no GPU driver"):
        early.driver()
