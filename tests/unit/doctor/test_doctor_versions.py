"""`gpusnap version`: what is here with its version; nothing fails where something is missing or broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import FakeDriver

from gpusnap.doctor import versions as module
from gpusnap.doctor.versions import Versions, versions
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api.errors import DriverMissing
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with nothing on it but Python; the folder of its programs."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(locate, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(locate, "SETTINGS_FILE", str(tmp_path / "gpusnap.toml"))
    monkeypatch.setattr("gpusnap.doctor.base.sources._FOLDERS", str(programs))
    monkeypatch.setattr(module, "find_drivers", tuple)

    def load() -> object:
        raise Refused("gone")

    monkeypatch.setattr(pycriu_package, "load", load)
    monkeypatch.setattr(pycriu_package, "is_there", lambda: False)
    return programs


def a_program(folder: Path, name: str, said: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{said}\n")
    path.chmod(0o755)
    return str(path)


def faults(found: Versions) -> dict[str, str]:
    return {part.name: part.fault for part in found.parts() if part.fault}


def test_nothing_is_there(host: Path, gpusnap: Run) -> None:
    """Each missing thing is named, and the exit code is 0."""
    assert faults(versions()) == {
        "Podman": "not found",
        "real runtime": "not found",
        "CRIU": "not found",
        "pycriu": "not found",
        "GPU driver": "not found",
    }
    code, out, err = gpusnap("version")
    assert (code, err) == (0, "")
    assert out.startswith(f"gpusnap       {__version__} (")
    assert "\nCRIU          not found\n" in out


def test_all_is_there(host: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions and paths; a second name of the same file is no second runtime."""
    podman = a_program(host, "podman", "echo podman version 5.4.2")
    criu = a_program(host, "criu", "echo Version: 4.1.1; echo GitID: v4.1.1")
    runc = a_program(host, "runc", "echo runc version 1.1.15+ds1")
    crun = a_program(host, "crun", "echo crun version 1.21; echo +SYSTEMD +CRIU")
    (host / "elsewhere").mkdir()
    (host / "elsewhere/crun").symlink_to(crun)
    monkeypatch.setenv("PATH", f"{host}:{host}/elsewhere")
    monkeypatch.setattr(module, "find_drivers", lambda: (FakeDriver(),))
    code, out, err = gpusnap("version", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {*found} == {"gpusnap", "python", "kernel", "runtimes", "criu", "pycriu", "podman", "drivers"}
    assert {*found["gpusnap"]} == {"name", "version", "path", "note", "fault"}
    assert found["python"]["path"] == sys.executable
    assert [(each["version"], each["path"]) for each in found["runtimes"]] == [
        ("1.21", crun),
        ("1.1.15+ds1", runc),
    ]
    assert (found["criu"]["version"], found["criu"]["path"]) == ("4.1.1", criu)
    assert (found["podman"]["version"], found["podman"]["path"]) == ("5.4.2", podman)
    (driver,) = found["drivers"]
    assert (driver["name"], driver["version"]) == ("NVIDIA driver", "580.159.04")
    assert driver["note"] == "CUDA 13.0, 1 GPU"


def test_what_is_broken(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that fails, one that says something else, a driver that does not answer, wrong settings."""
    a_program(host, "podman", "exit 125")
    a_program(host, "criu", "echo nothing of type")
    a_program(host, "crun", "exit 3")
    a_program(host, "runc", "echo runc version unknown-but-something; echo and more")
    (Path(locate.SETTINGS_FILE)).write_text("runtime = './x'\n")
    monkeypatch.setattr(pycriu_package, "is_there", lambda: True)

    class Broken(FakeDriver):
        def host(self) -> object:  # type: ignore[override]
            raise DriverMissing("no libcuda")

    monkeypatch.setattr(module, "find_drivers", lambda: (Broken(),))
    found = faults(versions())
    assert found.pop("settings").startswith(f"runtime in {locate.SETTINGS_FILE} is './x'")
    assert found.pop("crun").startswith(f"{host}/crun --version failed with exit code 3")
    assert found == {
        "Podman": "podman --version does not report it",
        "CRIU": "criu --version does not report it",
        "pycriu": "gone",
        "NVIDIA driver": "no libcuda",
    }


def test_a_runtime_that_the_settings_name_and_that_is_not_there(host: Path) -> None:
    """It is said, and so is what takes its place."""
    a_program(host, "runc", "echo runc version 1.2.3")
    Path(locate.SETTINGS_FILE).write_text('runtime = "crun"\n')
    named, other = versions().runtimes
    assert (named.name, named.version) == ("crun", "")
    assert "neither in PATH nor in" in named.fault
    assert (other.name, other.version) == ("runc", "1.2.3")
