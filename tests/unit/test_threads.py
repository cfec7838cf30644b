"""Threads that this host does not give."""

from __future__ import annotations

import threading

import pytest

from runtime_shim import threads
from runtime_shim.errors import GpusnapError
from runtime_shim.snapshot.memory.prefetch import Filling


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, with what to do."""
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    with pytest.raises(GpusnapError, match="no thread could be started: can't start new thread") as caught:
        threads.start(threading.Thread())
    assert "pids.max" in caught.value.hint


def test_a_restore_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged for a restore is let go of, though the thread that was to check it never began."""
    filling = Filling.__new__(Filling)
    done: list[str] = []
    filling._checking, filling._areas, filling._regions = None, [object()], []  # type: ignore[list-item]
    filling._path, filling._key = "", ""

    class Reading:
        def wait(self) -> None:
            done.append("wait")

        def close(self) -> None:
            done.append("close")

    filling._reading = Reading()  # type: ignore[assignment]
    monkeypatch.setattr(Filling, "_drop", lambda _: done.append("drop"))
    monkeypatch.setattr("runtime_shim.snapshot.memory.transfer.give", lambda *_, **__: {})
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    monkeypatch.setattr("runtime_shim.snapshot.memory.prefetch.zip", lambda *_, **__: (), raising=False)
    with pytest.raises(GpusnapError, match="no thread could be started"):
        filling.deliver({})
    filling.close()
    assert done == ["wait", "close", "drop"]


def test_what_is_staged_is_removed_at_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure that passes does not leave it in RAM; one that stays is said."""
    filling = Filling.__new__(Filling)
    filling._areas = []
    failures = [1]

    class Stage:
        def remove(self) -> None:
            if failures:
                failures.pop()
                raise OSError(12, "Cannot allocate memory")

    filling._stage = Stage()  # type: ignore[assignment]
    filling._drop()
    assert not failures
    assert capsys.readouterr().err == ""
    failures += [1] * 10
    filling._drop()
    assert "still takes RAM: Cannot allocate memory; gpusnap recover frees it" in capsys.readouterr().err
