"""What nobody foresaw is a sentence for whoever called, and not a traceback."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from pathlib import Path

import pytest

import gpusnap.oci.base as oci_base
from gpusnap.runtime_shim.base.errors import GpusnapError, make_unforeseen
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.shim import dispatch, entry


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("x"), "KeyError: 'x' (test_shim_unforeseen.py:23)"),
        (FileNotFoundError(2, "No such file or directory", "/a"), "/a: it does not exist (test_shim"),
        (NameError("_driver"), "NameError: _driver (test_shim"),
    ],
)
def test_the_sentence(error: Exception, said: str) -> None:
    """Which it was, and the line that it came from: enough to tell us."""
    found = make_unforeseen(raised(error)).sentence()
    assert found.startswith(said)
    assert found.endswith("; internal error: please report it, with the output of gpusnap report [GPS-001]")


def test_ctrl_c_before_anything_is_begun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One sentence, and the exit code of a shell."""

    def interrupted(_: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_answer", interrupted)
    monkeypatch.setattr(sys, "argv", ["gpusnap-runtime", "checkpoint", "c0ffee"])
    assert entry.main() == 130
    assert capfd.readouterr().err == "gpusnap: interrupted\n"


def test_a_module_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's import system finds its directory unreadable: a link that leads to itself."""
    path = tmp_path / "modules"
    path.mkdir()
    monkeypatch.syspath_prepend(path)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere")
    path.rmdir()
    path.symlink_to(path)
    with pytest.raises(OSError, match="Too many levels") as raised:
        importlib.import_module("nowhere")
    found = make_unforeseen(raised.value).sentence()
    assert found.startswith(f"gpusnap cannot read its own file {path}: Too many levels")
    assert found.endswith("[GPS-002]")


@pytest.mark.parametrize("call", [CheckpointCall, RestoreCall])
def test_a_journal_that_cannot_be_read(
    call: type[CheckpointCall | RestoreCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows then what a killed gpusnap left of the container."""

    def fail(path: str) -> bool:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(dispatch, "exists", fail)
    with pytest.raises(GpusnapError, match=r"/w.*\.restore cannot be read: Input/output error"):
        dispatch._take_away(call(container_id="w"), RealRuntime(Path("/crun"), "crun", (1, 21)), None)


def test_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """containerd and Podman read --log, and nothing else."""

    def answer(args: list[str]) -> int:
        raise ImportError("No module named 'zstandard'")

    log = tmp_path / "log.json"
    monkeypatch.setattr(entry, "_answer", answer)
    monkeypatch.setattr(locate, "take_launcher", lambda: None)
    line = ["gpusnap-runtime", "--log", str(log), "--log-format", "json", "checkpoint", "c"]
    monkeypatch.setattr(sys, "argv", line)
    assert entry.main() == 1
    (said,) = [json.loads(each) for each in log.read_text().splitlines()]
    assert said["level"] == "error"
    assert said["msg"].startswith(
        "gpusnap: a module of gpusnap is missing: No module named 'zstandard'; try again if"
    )
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("again", [True, False])
def test_no_module_can_be_read(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sentence all the same: in the log if the directory can be read again, else on stderr."""
    names = ["gpusnap.runtime_shim.base.log", "gpusnap.oci.base.json_text"]

    def answer(args: list[str]) -> int:
        for name in names:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for path in oci_base.__path__:
            # What Python keeps of a directory whose stat() failed.
            monkeypatch.setitem(sys.path_importer_cache, path, None)
        return importlib.import_module(names[1]) is None

    def unreadable(path: str) -> bool:
        return False

    monkeypatch.setattr(entry, "_answer", answer)
    log = tmp_path / "log.json"
    line = ["gpusnap-runtime", "--log", str(log), "--log-format", "json", "checkpoint", "c"]
    monkeypatch.setattr(sys, "argv", line)
    if not again:
        monkeypatch.setattr("importlib._bootstrap_external._path_isdir", unreadable)
    assert entry.main() == 1
    said = "gpusnap: a module of gpusnap is missing: No module named 'gpusnap.oci.base.json_text'; try again"
    if again:
        assert json.loads(log.read_text())["msg"].startswith(said)
    assert capfd.readouterr().err.startswith(said)
