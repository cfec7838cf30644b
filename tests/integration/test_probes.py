"""What Podman, containerd and people ask a runtime besides checkpoint and restore."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import RUNTIME, good, podman, run

# Podman gives no more than this.
ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def test_support_probes(real: str) -> None:
    """The two questions by which Podman finds out whether a runtime can checkpoint, alone and in a pod."""
    assert run(RUNTIME, "checkpoint", "--help", env=ENV).code == 0
    asked = run(RUNTIME, "restore", "--lsm-mount-context", env=ENV)
    assert asked.code != 0
    words = "flag needs an argument" if real == "runc" else "requires an argument"
    assert words in asked.out + asked.err


def test_version(real: str) -> None:
    """The real runtime's lines first, ours last; Podman shows them."""
    lines = good(run(RUNTIME, "--version", env=ENV)).splitlines()
    assert lines[0].startswith(f"{real} version ")
    assert lines[-1].startswith("gpusnap-runtime version ")
    info = json.loads(good(podman("info", "--format", "json")))
    assert info["host"]["ociRuntime"]["path"] == RUNTIME
    assert f"{real} version" in info["host"]["ociRuntime"]["version"]


def test_features(real: str) -> None:
    """`features` is the real runtime's."""
    assert run(RUNTIME, "features", env=ENV).out == run(f"/usr/bin/{real}", "features", env=ENV).out


@pytest.mark.parametrize(
    "words", [["state", "nosuch"], ["kill", "nosuch", "TERM"], ["delete", "nosuch"], ["list"], []]
)
def test_passed_through(real: str, words: list[str]) -> None:
    """Every other command has the real runtime's output and exit code."""
    ours, bare = run(RUNTIME, *words, env=ENV), run(f"/usr/bin/{real}", *words, env=ENV)
    assert ours.code == bare.code
    assert _timeless(ours.out + ours.err) == _timeless(bare.out + bare.err)


def test_unknown_option_is_named(real: str, tmp_path: Path) -> None:
    """An option whose meaning is not known is never handed on; the JSON log says it too."""
    log = tmp_path / "log.json"
    words = ["--log", str(log), "--log-format", "json", "checkpoint", "--frobnicate", "x"]
    done = run(RUNTIME, *words, env=ENV)
    assert done.code != 0
    assert "--frobnicate" in done.err
    assert "--frobnicate" in json.loads(log.read_text())["msg"]


def test_container_that_is_not_there(real: str) -> None:
    """checkpoint of an unknown container: the real runtime's own words."""
    ours = run(RUNTIME, "checkpoint", "--image-path", "/tmp/none", "nosuch", env=ENV)
    bare = run(f"/usr/bin/{real}", "checkpoint", "--image-path", "/tmp/none", "nosuch", env=ENV)
    assert ours.code == bare.code
    assert _timeless(ours.err) == _timeless(bare.err)


def _timeless(text: str) -> str:
    """Without what differs from call to call."""
    return "\n".join(line.split(" level=", 1)[-1] for line in text.replace(RUNTIME, "").splitlines())
