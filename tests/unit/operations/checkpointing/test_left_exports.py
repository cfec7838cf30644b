"""What Podman exported for a command that was killed."""

from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import exporting

from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import left_exports, places
from gpusnap.runtime_shim.base import deadlines
from gpusnap.runtime_shim.shim import overrides


def test_in_a_store(tmp_path: Path) -> None:
    """It says how it is restored; not while its command lives, and not one that was not to be kept."""
    store = Store(tmp_path / "store").create()
    kept, other = store.stage(), store.stage()
    for staging in (kept, other):
        Path(staging.path, "podman.tar").touch()
    kept.mark_precious("podman container restore --import it")
    assert left_exports.list_left(store.path) == ()
    for staging in (kept, other):
        staging.close(leave=True)
    (left,) = left_exports.list_left(store.path)
    assert (left.archive, left.said) == (f"{kept.path}/podman.tar", "podman container restore --import it")
    assert left_exports.list_left(str(tmp_path / "none")) == ()


def test_in_a_store_that_two_export_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named, though both are of one container."""
    monkeypatch.setattr(overrides, "list_ended", lambda: {("c0ffee", "/a"), ("c0ffee", "/b")})
    with exporting(tmp_path, "/a/staging/1/podman.tar"), exporting(tmp_path, "/b/staging/2/podman.tar"):
        begun = left_exports.list_begun()
    assert [each.archive for each in begun] == ["/a/staging/1/podman.tar", "/b/staging/2/podman.tar"]


def test_a_file_system_that_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its archive may be there: it is named and stays, and nobody waits for long."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    order = {"owner": [1, 1], "store": "", "archive": "/silent/.w.tar.1", "target": "/silent/w.tar"}
    (tmp_path / "w.json").write_text(json.dumps(order))
    end, stat = threading.Event(), os.stat

    def wait(path: Any, *words: Any, **more: Any) -> os.stat_result:
        if str(path).startswith("/silent"):
            assert threading.current_thread() is not threading.main_thread()
            end.wait(60)
        return stat(path, *words, **more)

    monkeypatch.setattr(os, "stat", wait)
    monkeypatch.setattr(os.path, "getsize", lambda path: wait(path).st_size)
    monkeypatch.setattr(deadlines, "ask", partial(deadlines.ask, within=0.05))
    try:
        left_exports.remove_empty()
        (left,) = left_exports.list_left_beside()
        assert "/silent/w.tar" in left.said
        left_exports.forget(())
        assert (tmp_path / "w.json").exists()
    finally:
        end.set()


def test_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how it gets its name. One that is still written is waited for, and an empty one is removed."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    archive = tmp_path / ".w.tar.1234"
    archive.touch()
    order = {"owner": [1, 1], "store": "", "archive": str(archive), "target": "/w.tar"}
    (tmp_path / "w.json").write_text(json.dumps(order))
    with exporting(tmp_path, str(archive)), exporting(tmp_path, "/elsewhere/.w.tar.5678"):
        # The second one is a user's who tries again: it waits for the first.
        (left,) = left_exports.list_left_beside()
        assert "Podman is still exporting" in left.said
        left_exports.remove_empty()
    archive.write_text("content")
    left_exports.remove_empty()
    (left,) = left_exports.list_left_beside()
    assert left.said.startswith(
        f"{archive} is Podman's export of a container, for a killed gpusnap checkpoint --to /w.tar. gpusnap "
    )
    assert left.said.endswith(f"mv {archive} /w.tar gives it its name; if not, remove it")
    archive.write_text("")
    assert left_exports.list_left_beside() == ()
    left_exports.remove_empty()
    assert not archive.exists()
