"""Which program the engines are to run, and the settings file that comes with it."""

from __future__ import annotations

import os
import re
import sysconfig
import tomllib
from pathlib import Path

import pytest

from gpusnap.engines.install.launcher import (
    ANOTHER_LAUNCHER,
    ENTRY,
    LAUNCHER,
    find_program,
    program,
    settings_item,
    settings_text,
)
from gpusnap.runtime_shim import setting_keys, settings
from gpusnap.runtime_shim.base.errors import GpusnapError

SETUP = Path(__file__).parents[4] / "setup.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """gpusnap-runtime in an environment, whose gpusnap is linked from elsewhere, as by pipx."""
    place = tmp_path / "venv/bin"
    place.mkdir(parents=True)
    for name in ("gpusnap", "gpusnap-runtime"):
        (place / name).write_text("#!/usr/bin/python3\n")
        (place / name).chmod(0o755)
    link = tmp_path / "gpusnap"
    link.symlink_to(place / "gpusnap")
    monkeypatch.setattr("sys.argv", [str(link)])
    return str(place / "gpusnap-runtime")


def test_a_wheel_with_the_launcher(script: str, tmp_path: Path) -> None:
    """It is copied, and the path that it has compiled in leads to the environment's script."""
    packaged = tmp_path / "launcher"
    packaged.write_bytes(b"\x7fELF")
    found = program(packaged=packaged)
    assert (found.path, found.notes) == (LAUNCHER, ())
    link, copy = found.items
    assert (link.path, link.target) == (ENTRY, script)
    assert (copy.path, copy.data, copy.mode) == (LAUNCHER, b"\x7fELF", 0o755)


def test_the_path_that_is_compiled_in() -> None:
    assert f'ENTRY = "{ENTRY}"' in SETUP.read_text()


def test_without_the_launcher(script: str, tmp_path: Path) -> None:
    found = program(packaged=tmp_path / "none")
    assert (found.path, found.items) == (script, ())
    assert "30 ms" in found.notes[0]


def test_a_package(script: str, tmp_path: Path) -> None:
    """Of a distribution: what is beside the command is the launcher."""
    Path(script).write_bytes(b"\x7fELF")
    found = program(packaged=tmp_path / "none")
    assert (found.path, found.items, found.notes) == (script, (), ())


def test_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(tmp_path / "gpusnap")])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "bin"))
    with pytest.raises(GpusnapError, match=r"gpusnap-runtime is not in .* or ") as caught:
        find_program()
    assert "install gpusnap, from pipx" in caught.value.hint


def test_in_a_tree(script: str, tmp_path: Path) -> None:
    """Paths are the tree's: of an environment in it, and of a package where this machine has it, too."""
    assert find_program(str(tmp_path)) == "/venv/bin/gpusnap-runtime"
    tree = tmp_path / "tree"
    with pytest.raises(GpusnapError, match="is not in"):
        find_program(str(tree))
    there = tree / script[1:]
    there.parent.mkdir(parents=True)
    os.link(script, there)
    assert find_program(str(tree)) == script


def test_a_folder_that_is_a_link(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is named, not the version that it leads to now, also where each command is a link."""
    (tmp_path / "current").symlink_to("venv")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "current/bin/gpusnap")])
    assert find_program() == str(tmp_path / "current/bin/gpusnap-runtime")
    assert find_program(str(tmp_path)) == "/current/bin/gpusnap-runtime"
    (tmp_path / "gpusnap-runtime").symlink_to(script)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "gpusnap")])
    assert find_program() == str(tmp_path / "gpusnap-runtime")


def test_the_launcher_does_not_call_itself(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beside a link in the launcher's folder may be the launcher, or pipx's link to the script."""
    packaged = tmp_path / "launcher"
    packaged.write_bytes(b"\x7fELF")
    place = tmp_path / LAUNCHER[1:]
    place.parent.mkdir(parents=True)
    (place.parent / "gpusnap").symlink_to("../../../venv/bin/gpusnap")
    place.write_bytes(b"\x7fELF")
    place.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(place.parent / "gpusnap")])
    root = str(tmp_path)
    monkeypatch.setattr("gpusnap.engines.install.launcher.LAUNCHER", str(place))
    assert find_program() == script
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", [script.removesuffix("-runtime")])
    assert program(root, packaged).path == LAUNCHER
    place.unlink()
    for target in ("/venv/bin/gpusnap-runtime", "../../../venv/bin/gpusnap-runtime"):
        place.symlink_to(target)
        found = program(root, packaged)
        assert (found.path, found.items[1].path) == (ANOTHER_LAUNCHER, ANOTHER_LAUNCHER)
        assert found.items[0].target == "/venv/bin/gpusnap-runtime"
        place.unlink()
    # pip without an environment: the script is where the launcher would be.
    place.write_text("#!/usr/bin/python3\n")
    place.chmod(0o755)
    (place.parent / "gpusnap").unlink()
    (place.parent / "gpusnap").touch()
    monkeypatch.setattr("sys.argv", [str(place.parent / "gpusnap")])
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(place.parent))
    monkeypatch.setattr("gpusnap.engines.install.launcher.LAUNCHER", str(place))
    found = program(packaged=packaged)
    assert (found.path, found.items) == (str(place), ())
    assert "30 ms" in found.notes[0]


def test_settings(tmp_path: Path) -> None:
    """As it is it sets nothing; with each comment taken off it sets what holds anyway."""
    path = tmp_path / "gpusnap.toml"
    text = settings_text()
    path.write_text(text)
    assert settings.load(str(path)) == settings.Settings()
    assert not any(tomllib.loads(text).get(name) for name in ("runtime", "retries"))
    bare = re.sub(r"(?m)^# (?=[\w.-]+ = )", "", text)
    path.write_text(bare)
    assert settings.load(str(path)) == settings.Settings()
    found = tomllib.loads(bare)
    assert "\n[" not in text
    path.write_text(text + 'memory.level = 0\nruntime = "runc"\n[criu]\ntimeout = 7\n')
    appended = settings.load(str(path))
    assert (appended.memory.level, appended.runtime, appended.criu.timeout) == (0, "runc", 7)
    flat = {name for name, value in found.items() if not isinstance(value, dict)}
    flat |= {f"{table}.{name}" for table, value in found.items() if isinstance(value, dict) for name in value}
    assert flat == set(setting_keys.TABLE)
    assert settings_item().yields
