"""Threads that this host does not give."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpusnap.runtime_shim.base import threads
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.loading.prefetch import Prefetch


def _refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence, with what to do."""
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    with pytest.raises(GpusnapError, match="a thread cannot be started: can't start new thread") as caught:
        threads.start(threading.Thread())
    assert "pids.max" in caught.value.hint


def test_one_that_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel made it, and had no memory for what it does first: nobody waits for ever, pools neither."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # put back afterwards
    threads.bound_thread_starts()
    ran = threading.Event()
    threads.start(threading.Thread(target=ran.set))
    assert ran.wait(60)
    monkeypatch.setattr(threads, "_BEGINNING", 0.05)
    for name in ("_start_new_thread", "_start_joinable_thread"):  # before Python 3.13, and from it on
        monkeypatch.setattr(threading, name, lambda *_, **__: None, raising=False)
    with pytest.raises(GpusnapError, match="it ended before it began"):
        threads.start(threading.Thread(target=ran.set))
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="it ended before it began"):
        pool.submit(ran.set)


def test_one_that_begins_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where gpusnap itself was stopped meanwhile: what nobody waits for does nothing."""
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # put back afterwards
    monkeypatch.setattr(threads, "_BEGINNING", 0.05)
    threads.bound_thread_starts()
    go, ended, ran = threading.Event(), threading.Event(), threading.Event()

    class Late(threading.Thread):
        def _bootstrap_inner(self) -> None:
            go.wait()
            try:
                super()._bootstrap_inner()  # type: ignore[misc]
            finally:
                ended.set()

        def run(self) -> None:
            ran.set()

    with pytest.raises(GpusnapError, match="it ended before it began"):
        threads.start(Late(daemon=True))
    go.set()
    assert ended.wait(60)
    assert not ran.is_set()


def test_a_restore_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged for a restore is let go of, though the thread that was to check it never began."""
    prefetch = Prefetch.__new__(Prefetch)
    done: list[str] = []
    prefetch._checking, prefetch._areas, prefetch._regions = None, [object()], ()  # type: ignore[list-item]
    prefetch._loaded = None
    prefetch._path, prefetch._key, prefetch._paging = "", "", None
    prefetch._reads = prefetch._turns = threading.Semaphore()
    prefetch._workers = 1

    class Reader:
        def wait(self) -> None:
            done.append("wait")

        def close(self) -> None:
            done.append("close")

    prefetch._reading = Reader()  # type: ignore[assignment]
    monkeypatch.setattr(Prefetch, "_drop", lambda _: done.append("drop"))
    monkeypatch.setattr("gpusnap.runtime_shim.snapshot.memory.transfer.map_areas", lambda *_, **__: {})
    monkeypatch.setattr(threading.Thread, "start", _refuse)
    monkeypatch.setattr(
        "gpusnap.runtime_shim.snapshot.loading.prefetch.zip", lambda *_, **__: (), raising=False
    )
    with pytest.raises(GpusnapError, match="a thread cannot be started"):
        prefetch.deliver({})
    prefetch.close()
    assert done == ["wait", "close", "drop"]


def test_what_is_staged_is_removed_at_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure that passes does not leave it in RAM; one that stays is said."""
    prefetch = Prefetch.__new__(Prefetch)
    prefetch._areas, prefetch._paging = [], None
    failures = [1]

    class Stage:
        def remove(self) -> None:
            if failures:
                failures.pop()
                raise OSError(12, "Cannot allocate memory")

    prefetch._stage = Stage()  # type: ignore[assignment]
    prefetch._drop()
    assert not failures
    assert capsys.readouterr().err == ""
    failures += [1] * 10
    prefetch._drop()
    assert "still use RAM: Cannot allocate memory; gpusnap recover frees it" in capsys.readouterr().err
