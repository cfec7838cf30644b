"""dev_shm.py: no file of a shared /dev/shm gets into Podman's checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.runtime.podman import dev_shm
from gpusnap.runtime_shim.runtime.podman.dev_shm import LINK


def configuration(source: str, manager: str = "libpod") -> dict[str, Any]:
    mount = {"destination": "/dev/shm", "source": source, "type": "bind", "options": ["bind", "rprivate"]}
    return {"annotations": {"io.container.manager": manager}, "mounts": [mount]}


@pytest.mark.parametrize("there", ["nothing", "file", "link"])
@pytest.mark.parametrize(
    ("source", "runs_on"), [("/dev/shm", False), ("/dev/shm", True), ("BUNDLE/shm", True)]
)
def test_not_kept(tmp_path: Path, there: str, source: str, runs_on: bool) -> None:
    """Podman writes the archive to nowhere, and finds an empty one; what an earlier checkpoint kept goes."""
    path = tmp_path / LINK[0]
    if there == "file":
        path.write_text("all files of the host")
    elif there == "link":
        path.symlink_to("/dev/null")
    config = configuration(source.replace("BUNDLE", str(tmp_path)))
    dev_shm.prepare(config, str(tmp_path), runs_on=runs_on)
    assert os.readlink(path) == "/dev/null"
    with open(path, "wb") as file:
        file.write(b"all files of the host")
    assert path.read_bytes() == b""


def test_kept_again(tmp_path: Path) -> None:
    """A container that does not continue: Podman's copy is right, and replaces gpusnap's."""
    config = configuration(f"{tmp_path}/./shm/")
    dev_shm.prepare(config, str(tmp_path), runs_on=True)
    dev_shm.prepare(config, str(tmp_path), runs_on=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LINK[0]).write_text("an earlier checkpoint's")
    dev_shm.prepare(config, str(tmp_path), runs_on=False)
    assert (tmp_path / LINK[0]).read_text() == "an earlier checkpoint's"


def test_storage_behind_a_link(tmp_path: Path) -> None:
    """A runtime may name the bundle by its real path: it is the container's own all the same."""
    bundle = tmp_path / "disk/userdata"
    bundle.mkdir(parents=True)
    (tmp_path / "storage").symlink_to("disk")
    dev_shm.prepare(configuration(f"{tmp_path}/storage/userdata/shm"), str(bundle), runs_on=False)
    dev_shm.prepare(configuration(f"{bundle}/shm"), f"{tmp_path}/storage/userdata", runs_on=False)
    assert list(bundle.iterdir()) == []


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"annotations": [], "mounts": {}},
        configuration("/dev/shm", "another"),
        {"annotations": {"io.container.manager": "libpod"}, "mounts": []},
    ],
)
def test_others(tmp_path: Path, config: dict[str, Any]) -> None:
    """Of another engine, or none: nothing is changed."""
    dev_shm.prepare(config, str(tmp_path), runs_on=True)
    assert list(tmp_path.iterdir()) == []


def test_it_cannot_be_made(tmp_path: Path) -> None:
    """Then there is no checkpoint: a restore would harm other programs."""
    with pytest.raises(ImageError, match="Podman would keep the wrong files of /dev/shm"):
        dev_shm.prepare(configuration("/dev/shm"), str(tmp_path / "gone"), runs_on=False)
