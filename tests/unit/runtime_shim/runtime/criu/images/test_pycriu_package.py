"""CRIU's Python package: found where distributions put it, and missed in a sentence that names it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from criu_images import INVENTORY, images
from fakes import Scene, a_manifest

from gpusnap.runtime_shim.base.errors import Interrupted, Refused
from gpusnap.runtime_shim.base.transaction import make_interruptible
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.check import check
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight

CHECKOUT = Path(__file__).parents[6]
STANDINS = CHECKOUT / "tests/standins"


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A host without pycriu."""
    pycriu_package.load.cache_clear()
    known = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "pycriu"}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [each for each in sys.path if not Path(each, "pycriu").exists()])
        patch.setattr(pycriu_package, "directories", lambda: ())
        importlib.invalidate_caches()
        yield
    for name in [*sys.modules]:
        if name.partition(".")[0] == "pycriu":
            del sys.modules[name]
    sys.modules.update(known)
    pycriu_package.load.cache_clear()


@pytest.mark.usefixtures("nowhere")
def test_missing(tmp_path: Path) -> None:
    """Every image that has to be decoded is refused, and not called damaged."""
    for name, data in images().items():
        (tmp_path / name).write_bytes(data)
    assert not pycriu_package.is_there()
    with pytest.raises(Refused, match="pycriu is not installed") as caught:
        check(str(tmp_path), "x86_64")
    assert "python3-pycriu (Debian, Ubuntu)" in caught.value.hint


@pytest.mark.usefixtures("nowhere")
def test_a_signal_during_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not blamed for it."""
    (tmp_path / "pycriu").mkdir()
    (tmp_path / "pycriu/__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    with monkeypatch.context() as patch:
        patch.setattr(pycriu_package, "directories", lambda: (str(tmp_path),))
        with make_interruptible(), pytest.raises(Interrupted, match="stopped by SIGTERM"):
            pycriu_package.load()


@pytest.mark.usefixtures("nowhere")
def test_a_restore_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before it calls the runtime or writes anything."""
    with Scene(tmp_path, monkeypatch, capfd) as scene:
        scene.image.mkdir()
        draft, record = Draft(str(scene.image)), a_manifest()
        draft.begin()
        draft.prepare(record)
        draft.finish(record)
        (scene.image / "inventory.img").write_bytes(INVENTORY)
        done = scene.restore("--detach")
        assert done.code != 0
        assert "python3-pycriu" in done.stderr
        assert scene.runtime.calls("restore") == []


@pytest.mark.usefixtures("nowhere")
def test_a_checkpoint_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It does without."""
    preflight.check_pycriu()
    said = capfd.readouterr().err
    assert "this host cannot restore checkpoints without it" in said
    assert "python3-pycriu" in said


def test_there(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Then nothing is said."""
    assert pycriu_package.is_there()
    preflight.check_pycriu()
    assert capfd.readouterr().err == ""


def test_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """As pipx makes one: the system's packages are found beside it, and the path is as before afterwards."""
    program = f"""
import json, sys
sys.path[:] = [each for each in sys.path if "standins" not in each]
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
before = list(sys.path)
pycriu_package.directories = lambda: ("/nowhere", {str(STANDINS)!r})
found = pycriu_package.load()
pid = found.pb.pstree_entry(pid=7).pid
print(json.dumps([pycriu_package.is_there(), sys.path == before, pid, sys.modules["pycriu"].__file__]))
"""
    environ = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=True
    )
    there, same, pid, path = json.loads(done.stdout)
    assert (there, same, pid) == (True, True, 7)
    assert Path(path).is_relative_to(STANDINS)


@pytest.mark.usefixtures("nowhere")
def test_of_another_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What protobuf does not take is an error with its words, and not a missing package."""
    package = tmp_path / "pycriu/images"
    package.mkdir(parents=True)
    (tmp_path / "pycriu/__init__.py").write_text("")
    (package / "__init__.py").write_text("raise TypeError('Descriptors cannot be created directly')")
    monkeypatch.setattr(pycriu_package, "directories", lambda: (str(tmp_path),))
    with pytest.raises(Refused, match=r"cannot be imported by .*: Descriptors cannot be created") as caught:
        pycriu_package.load()
    assert "python3-protobuf" in caught.value.hint


def test_accelerated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether protobuf is the one in C is known; doctor tells it."""
    from google.protobuf.internal import api_implementation

    for kind, fast in (("python", False), ("upb", True)):
        pycriu_package.load.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(api_implementation, "Type", lambda kind=kind: kind)
            assert pycriu_package.load().accelerated is fast
    pycriu_package.load.cache_clear()
