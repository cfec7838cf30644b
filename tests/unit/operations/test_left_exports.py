"""What Podman exported for a command that was killed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import left_exports, places
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


def test_beside_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how it gets its name. One that is still written is waited for, and an empty one is removed."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    archive = tmp_path / ".w.tar.1234"
    archive.touch()
    order = {"owner": [1, 1], "store": "", "archive": str(archive), "target": "/w.tar"}
    (tmp_path / "w.json").write_text(json.dumps(order))
    podman = tmp_path / "podman"
    podman.symlink_to("/bin/sh")
    with subprocess.Popen(
        [podman, "-c", "echo; read x", "container", "checkpoint", "--export", str(archive), "c0ffee"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (left,) = left_exports.list_left_beside()
        assert "Podman is still exporting" in left.said
        left_exports.remove_empty()
        child.communicate(b"")
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
