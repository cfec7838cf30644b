"""Modules that are imported while something else is done."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.base import import_ahead, threads
from gpusnap.runtime_shim.base.import_ahead import import_meanwhile


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_meanwhile(folder: Path) -> None:
    """They are there at the end of the block; one that fails is the business of who uses it."""
    (folder / "ahead_good.py").write_text("")
    (folder / "ahead_bad.py").write_text("raise RuntimeError('bad')")
    with import_meanwhile("ahead_bad", "ahead_good"):
        wait_for(lambda: "ahead_good" in sys.modules, "its import")
    with pytest.raises(RuntimeError, match="bad"):
        __import__("ahead_bad")


def test_the_error_of_the_block(folder: Path) -> None:
    (folder / "ahead_other.py").write_text("")
    with pytest.raises(ValueError, match="of the block"), import_meanwhile("ahead_other"):
        raise ValueError("of the block")
    assert "ahead_other" in sys.modules


def test_one_that_never_comes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it without end."""
    monkeypatch.setattr(threads, "_PATIENCE", 0.05)
    may, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(import_ahead, "_import", lambda names: waited.append(may.wait(60)))
    with import_meanwhile("ahead_never"):
        pass
    assert waited == []
    may.set()


def test_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It only saves time."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with import_meanwhile("json"):
        pass
