"""What the commands record, and that nothing about metrics fails a checkpoint."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_podman import FakePodman
from kept_checkpoints import an_archive

from gpusnap.base.user_errors import NotFound
from gpusnap.metrics import record as module
from gpusnap.metrics.textfile import NAME
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import places
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.settings import Metrics, Settings
from gpusnap.runtime_shim.shim import overrides

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def podman(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """A container that can be checkpointed."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.has()
    fake.exports(an_archive(tmp_path))
    return fake


@pytest.fixture
def metrics(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Have settings with these metrics; the textfile's path."""

    def have(*, textfile: str = "", journal: bool = False) -> Path:
        store = settings_file.Store(path=host_store.path)
        mine = Settings(store=store, metrics=Metrics(textfile, journal))
        monkeypatch.setattr(settings_file, "load", lambda: mine)
        return Path(textfile or tmp_path, NAME)

    return have


def values(path: Path) -> dict[str, float]:
    found = re.findall(r"^([^#\n]+) (\S+)$", path.read_text(), re.M)
    return {name: float(value) for name, value in found}


def test_checkpoint_restore_and_failure(
    metrics: Callable[..., Path], gpusnap: Run, tmp_path: Path, podman: FakePodman
) -> None:
    """Each is counted, with what it took; the failure by its code."""
    path = metrics(textfile=str(tmp_path))
    assert gpusnap("checkpoint", "w", "--name", "mine", "--leave-running")[0] == 0
    assert gpusnap("checkpoint", "w", "--name", "mine2", "--leave-running")[0] == 0
    assert gpusnap("restore", "mine")[0] == 0
    assert gpusnap("checkpoint", "w", "--to", str(tmp_path / "in.tar"))[0] == 1
    found = values(path)
    w = '{container="w"}'
    assert found[f"gpusnap_checkpoints_total{w}"] == 2
    assert found[f"gpusnap_restores_total{w}"] == 1
    assert found['gpusnap_failures_total{code="GPS-103",operation="checkpoint"}'] == 1
    assert found[f"gpusnap_checkpoint_gpu_memory_bytes{w}"] == 1 << 20
    assert found[f"gpusnap_checkpoint_new_bytes{w}"] == 0
    assert (
        found[f"gpusnap_checkpoint_written_bytes_total{w}"] == found[f"gpusnap_checkpoint_size_bytes{w}"] > 0
    )
    assert (
        found[f"gpusnap_last_restore_timestamp_seconds{w}"]
        >= found[f"gpusnap_last_checkpoint_timestamp_seconds{w}"]
    )


@pytest.mark.parametrize("kind", ["store", "file", "unknown"])
def test_the_container_of_a_failed_restore(
    metrics: Callable[..., Path], gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its name is in the label, whatever the checkpoint is called."""
    path = metrics(textfile=str(tmp_path))
    if kind == "file":
        assert gpusnap("checkpoint", "w", "--to", str(tmp_path / "mine.tar"))[0] == 0
    else:
        assert gpusnap("checkpoint", "w", "--name", "mine:1")[0] == 0

    def fail(*_: object, **__: object) -> None:
        raise GpusnapError("Podman failed")

    monkeypatch.setattr("gpusnap.operations.restoring.restore.restore", fail)
    word = {"store": "mine", "file": str(tmp_path / "mine.tar"), "unknown": "other:1"}[kind]
    assert gpusnap("restore", word)[0] != 0
    # As the checkpoint has it, whose escape is not obeyed; a backslash is doubled in the file.
    name = {"store": "serving?[31m", "file": r"serving\\x1b[31m", "unknown": "other"}[kind]
    series = f'gpusnap_last_failure_timestamp_seconds{{container="{name}",operation="restore"}}'
    assert values(path)[series] > 0


@pytest.mark.parametrize(
    ("words", "code"),
    [(("checkpoint", "gone"), 3), (("restore", "mine", "--name", "-bad"), 2)],
)
def test_a_slip_of_the_keyboard_is_no_failure(
    metrics: Callable[..., Path],
    gpusnap: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    code: int,
) -> None:
    """The alert of the example counts failures: nothing was tried."""
    path = metrics(textfile=str(tmp_path))
    assert gpusnap("checkpoint", "w", "--name", "mine", "--leave-running")[0] == 0

    def unknown(*_: object) -> None:
        raise NotFound("there is no container gone")

    monkeypatch.setattr("gpusnap.operations.checkpointing.checkpoint.checkpoint", unknown)
    assert gpusnap(*words)[0] == code
    assert [each for each in values(path) if "failure" in each] == []


def test_nothing_by_default(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, and no word into any log."""
    monkeypatch.setattr(socket, "socket", None)
    code, _, err = gpusnap("checkpoint", "w", "--leave-running")
    assert (code, err.count("\n")) == (0, 1)  # what has become of the container


def test_the_journal(
    metrics: Callable[..., Path], gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of JSON each, by the protocol of syslog."""
    monkeypatch.setattr(module, "SYSTEM_LOG", str(tmp_path / "log"))
    metrics(journal=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "log"))
        log.settimeout(10)
        assert gpusnap("checkpoint", "w", "--name", "mine", "--leave-running")[0] == 0
        head, _, line = log.recv(65536).decode().partition(": ")
        event = json.loads(line)
        assert gpusnap("restore", "gone")[0] == 3
        failed = json.loads(log.recv(65536).decode().partition(": ")[2])
    assert head == f"<30>gpusnap[{os.getpid()}]"
    assert (event["operation"], event["container"], event["result"], event["name"]) == (
        *("checkpoint", "w", "success", "mine"),
    )
    assert event["size"] >= event["new"] > 0
    assert (failed["operation"], failed["result"]) == ("restore", "failure")
    assert "gone" in failed["error"]


@pytest.mark.parametrize("what", ["not a directory", "a file", "full", "no log"])
def test_metrics_that_cannot_be_written(
    metrics: Callable[..., Path],
    gpusnap: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """The checkpoint is made all the same, with a note."""
    monkeypatch.setattr(module, "SYSTEM_LOG", str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    if what == "full":
        monkeypatch.setattr("gpusnap.metrics.textfile.put_file", full)
    folder = {"not a directory": "/nowhere", "a file": str(tmp_path / "file"), "full": str(tmp_path)}.get(
        what, ""
    )
    metrics(textfile=folder, journal=what == "no log")
    code, out, err = gpusnap("checkpoint", "w", "--name", "mine", "--leave-running")
    assert (code, out.startswith("mine  sha256:")) == (0, True)
    key = "journal" if what == "no log" else "textfile"
    assert f"note: metrics.{key}: this checkpoint is not recorded: " in err
    assert what != "no log" or f"{tmp_path / 'nothing'}: it does not exist; check" in err
    assert (f"there is no directory {folder};" in err) == (what in ("not a directory", "a file"))


def full(path: str, data: bytes, mode: int, *, sync: bool) -> None:
    raise OSError(28, "No space left on device")
