"""A driver that starts while something else is done."""

from __future__ import annotations

import threading
from typing import cast

import pytest

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.gpu import open_driver
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import DriverMissing

DEADLINE = 30.0


class Slow:
    """One that starts when it may, and then fails or not."""

    def __init__(self, plugin: object = None) -> None:
        self.plugin = plugin
        self.may = threading.Event()
        self.calls: list[str] = []

    def open(self) -> None:
        assert self.may.wait(DEADLINE)
        self.calls.append("open")
        raise DriverMissing("no libcuda.so.1")

    def host(self) -> None:
        self.calls.append("host")


def test_meanwhile() -> None:
    """The block runs meanwhile, and ends when it has started. Whoever opens it next has the error."""
    slow = Slow()
    with open_driver(cast(Driver, slow)):
        assert "open" not in slow.calls
        slow.may.set()
    assert sorted(slow.calls) == ["host", "open"]


def test_one_that_we_do_not_call() -> None:
    """CRIU's plugin does, and on some hosts there is none."""
    slow = Slow(plugin="amdgpu_plugin")
    slow.may.set()
    with open_driver(cast(Driver, slow)), open_driver(None):
        pass
    assert slow.calls == []


def test_one_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it without end."""
    monkeypatch.setattr(threads, "_PATIENCE", 0.05)
    slow = Slow()
    with open_driver(cast(Driver, slow)):
        pass
    assert "open" not in slow.calls
    slow.may.set()


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only saves time."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    slow = Slow()
    with open_driver(cast(Driver, slow)):
        pass
    assert slow.calls == []
