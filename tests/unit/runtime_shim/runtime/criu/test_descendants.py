"""What is below this process at a checkpoint: it goes on where a signal has stopped it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime.criu import descendants

# The second one is below the first, as CRIU is below the runtime.
_BOTH_STOP = "sh -c 'kill -STOP $$; exit 3'; code=$?; kill -STOP $$; exit $code"


@contextmanager
def started(script: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sh", "-c", script]) as child:
        try:
            yield child
        finally:
            child.kill()


def test_stopped_ones_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other; each is told of. Who was there before is left alone."""
    monkeypatch.setattr(descendants, "_STOPPED", 0.2)
    monkeypatch.setattr(descendants, "_LOOK", 0.05)
    with started("kill -STOP $$; exit 4") as before:
        wait_for(lambda: proc.is_still(before.pid), "the stop")
        with descendants.continue_stopped(), started(_BOTH_STOP) as ours:
            assert ours.wait(30) == 3
        assert proc.is_still(before.pid)
    err = capsys.readouterr().err
    assert err.count("was stopped by a signal, and has to go on: SIGCONT sent") == 2
    assert f"sh (process {ours.pid})" in err


def test_not_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is stopped for a moment only is let go on by whoever did that, and after the block by nobody."""
    monkeypatch.setattr(descendants, "_STOPPED", 1000.0)
    monkeypatch.setattr(descendants, "_LOOK", 0.02)
    sent: list[int] = []
    looks: list[int] = []
    is_stopped = proc.is_thread_stopped

    def look(pid: int, tid: int) -> bool:
        looks.append(pid)
        return is_stopped(pid, tid)

    monkeypatch.setattr(proc, "is_thread_stopped", look)
    monkeypatch.setattr(
        "gpusnap.runtime_shim.runtime.criu.descendants.pidfd.send", lambda pid, number: sent.append(number)
    )
    with descendants.continue_stopped(), started("kill -STOP $$; exit 3") as ours:
        wait_for(lambda: proc.is_still(ours.pid), "the stop")
        looks.clear()
        wait_for(lambda: looks.count(ours.pid) > 3, "some looks")
        assert sent == []
        ours.send_signal(signal.SIGCONT)
        assert ours.wait(30) == 3
