"""What tests of several modules use."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes import wait_for
from hypothesis import settings as hypothesis_settings
from softgpu_box import Box, open_boxes

from gpusnap import hooks
from gpusnap.base import privileges
from gpusnap.checkpoints import migrations
from gpusnap.cli import main as cli
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import places
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base import question_process, transaction
from gpusnap.runtime_shim.process import mount_namespace, pidfd
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.runtime.criu.images import image_process
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.shim import dispatch, entry, overrides
from gpusnap.runtime_shim.snapshot.records import journal, reservations

# The constants that name this host's directories of state; test_state_directories.py finds a missing one.
_STATE_DIRECTORIES = (
    (dispatch, "JOURNAL"),
    (dispatch, "ORDERS"),
    (entry, "JOURNAL"),
    (entry, "WATCH"),
    (hooks, "RECORDS"),
    (journal, "FOLDER"),
    (migrations, "FOLDER"),
    (overrides, "FOLDER"),
    (places, "FOLDER"),
    (reservations, "FOLDER"),
    (tmpfs, "FOLDER"),
)

if importlib.util.find_spec("pycriu") is None:
    # CRIU's Python package is not on PyPI. Of programs that tests start, Python looks there as well.
    _STANDINS = str(Path(__file__).parents[1] / "standins")
    sys.path.append(_STANDINS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), _STANDINS]))

# How long an example takes says how busy the machine is.
hypothesis_settings.register_profile("gpusnap", deadline=None)
hypothesis_settings.load_profile("gpusnap")


def pytest_collection_finish() -> None:
    """What has been imported by now stays: no collection of garbage has to look through it."""
    gc.freeze()


@pytest.fixture(scope="session")
def state_of_all_tests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test has a directory for its state."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(autouse=True)
def own_state(state_of_all_tests: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a test's state in its own directories, not in those of this host's gpusnap."""
    own = tempfile.mkdtemp(dir=state_of_all_tests)
    for module, name in _STATE_DIRECTORIES:
        top, last = os.path.split(getattr(module, name))
        monkeypatch.setattr(module, name, os.path.join(own, top.strip("/").replace("/", "-"), last))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the tmpfs goes in this test, unmounted when nothing is in it."""
    if os.geteuid():
        pytest.skip("a mount needs root")
    place = tmp_path / "gpusnap" / "stage"
    monkeypatch.setattr(tmpfs, "FOLDER", str(place))
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: True)
    yield place
    assert not os.path.ismount(place)


@pytest.fixture(autouse=True)
def pids_of_other_tests() -> Iterator[None]:
    """PIDs come round again in a run of thousands of tests: what one test remembers is not another's."""
    yield
    pidfd.forget()


@pytest.fixture(autouse=True)
def signals_of_other_tests() -> Iterator[None]:
    """A gpusnap that a signal has stopped ends; a test goes on in a process that knows of none."""
    yield
    transaction._Signals.pending = transaction._Signals.raised = 0
    transaction._Signals.stopping = False


@pytest.fixture(autouse=True)
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that need root go on without it: what they would change is a test's own."""
    monkeypatch.setattr(privileges, "is_root", lambda: True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB; skips the test where none can be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs to mount a tmpfs")
    yield path
    # Busy for a moment where another process of this machine just looks at it, as df does.
    wait_for(lambda: subprocess.run(["umount", str(path)], check=False).returncode == 0, f"umount {path}")


@pytest.fixture
def host_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's store, by its settings, and no login to any registry."""
    found = Settings(store=settings_file.Store(path=str(tmp_path / "store")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    (tmp_path / "auth.json").write_text("{}")
    return Store(tmp_path / "store")


@pytest.fixture
def gpusnap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusnap", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return run


@pytest.fixture(autouse=True)
def no_child_of_an_earlier_test() -> Iterator[None]:
    """A child that asks for us was forked with what its test had replaced."""
    yield
    question_process.end()
    image_process._spent[0] = 0.0


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[Callable[..., Box]]:
    """Makes hosts of GPUs in software."""
    with open_boxes(tmp_path / "state") as make:
        yield make
