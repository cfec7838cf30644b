"""Who could change what root is going to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusnap.engines.install import permissions as install_trust
from gpusnap.engines.install.permissions import fault

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="files of other users are made by root")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that counts as the root of all: those above are everybody's."""
    real = install_trust._way
    above = {"/", *map(str, tmp_path.parents)}
    monkeypatch.setattr(
        install_trust, "_way", lambda path: (each for each in real(path) if each not in above)
    )
    tmp_path.chmod(0o755)
    for folder in ("venv/bin", "modules", "python/bin", "links"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "python/bin/python3").touch(0o755)
    (tmp_path / "venv/bin/python").symlink_to("../../python/bin/python3")
    script(tmp_path).write_text(f"#!{tmp_path}/venv/bin/python -I\n")
    (tmp_path / "links/gpusnap-runtime").symlink_to(script(tmp_path))
    return tmp_path


def script(place: Path) -> Path:
    return place / "venv/bin/gpusnap-runtime"


def found(place: Path) -> str:
    return fault(str(place / "links/gpusnap-runtime"), str(place / "modules")).replace(f"{place}/", "")


def test_roots_own(place: Path) -> None:
    assert found(place) == ""


@pytest.mark.parametrize(
    "path",
    ["venv", "venv/bin", "venv/bin/gpusnap-runtime", "links", "python", "python/bin/python3", "modules"],
)
def test_each_place(place: Path, path: str) -> None:
    """The script, its interpreter, the modules, and every folder above, wherever links lead."""
    os.chmod(place / path, 0o757)
    assert found(place) == f"every user can write to {place}/{path}".replace(f"{place}/", "")
    os.chmod(place / path, 0o1757)
    assert found(place)
    os.chmod(place / path, 0o775)
    assert found(place) == ""  # the group is root's
    os.chown(place / path, 0, 1234)
    assert found(place) == f"a group can write to {path}"
    os.chmod(place / path, 0o755)
    assert found(place) == ""
    os.chown(place / path, 54321, 0)
    assert found(place) == f"{path} belongs to user 54321"


def test_a_long_first_line(place: Path) -> None:
    """As pip has it where the path of the interpreter is too long for one."""
    text = f"#!/bin/sh\n'''exec' \"{place}/venv/bin/python\" \"$0\" \"$@\"\n' '''\n"
    script(place).write_text(text)
    assert found(place) == ""
    os.chmod(place / "python/bin/python3", 0o777)
    assert "python/bin/python3" in found(place)


def test_a_folder_of_everybody() -> None:
    """Sticky, too: there others can put what is not there yet."""
    assert fault("/tmp/venv/bin/gpusnap-runtime", "/") == "every user can write to /tmp"


def test_odd_ones(place: Path) -> None:
    """What there is not, links in a circle, and what is no script, are no reason."""
    (place / "venv/bin/python").unlink()
    (place / "venv/bin/python").symlink_to("python")
    assert found(place) == ""
    script(place).write_bytes(b"\x7fELF\xff")
    assert found(place) == ""
    script(place).unlink()
    assert found(place) == ""
