"""A manifest is compared with its schema in a process beside ours, and here where there is none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import ManifestError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest_json

BAD = b'{"version": "1.0", "gpusnap": 7}'


@pytest.fixture(autouse=True)
def beside() -> Iterator[None]:
    """Such a process may be had, and nothing is imported here."""
    question_process.start()
    manifest_json._validator.cache_clear()
    yield
    manifest_json._COMPANION.end()
    manifest_json._validator.cache_clear()


def here() -> bool:
    return bool(manifest_json._validator.cache_info().currsize)


def fault() -> str:
    with pytest.raises(ManifestError) as found:
        manifest_json.decode(BAD, "it")
    return str(found.value)


def test_beside_us() -> None:
    """It is imported there, once, and says the same as here."""
    manifest_json.prepare()
    pid = manifest_json._COMPANION.ask(os.getpid, within=9)
    told = fault()
    assert "it is not a gpusnap manifest: at " in told
    assert manifest_json._COMPANION.ask(os.getpid, within=9) == pid != os.getpid()
    assert not here()
    manifest_json._load()
    assert fault() == told
    assert here()


@pytest.mark.parametrize("way", ["none", "killed", "slow"])
def test_without_it(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, or an answer in time, it is done here; one that is killed is replaced."""
    if way == "none":
        question_process.end()
    elif way == "killed":
        pid = manifest_json._COMPANION.ask(os.getpid, within=9)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not proc.is_running(pid), "its end")
    else:
        os.kill(manifest_json._COMPANION.ask(os.getpid, within=9), signal.SIGSTOP)
        monkeypatch.setattr(manifest_json, "_PATIENCE", 0.05)
    assert "it is not a gpusnap manifest: at " in fault()
    assert here() == (way != "killed")


def test_what_is_too_deep_for_a_message() -> None:
    """A document from anywhere may be as deep as JSON can be read."""
    deep = sys.getrecursionlimit() - 100
    document = BAD[:-1] + b', "gpus": ' + b"[" * deep + b"]" * deep + b"}"
    with pytest.raises(ManifestError):
        manifest_json.decode(document, "it")
