"""The hook that brings lo up where runc makes the network at a restore."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gpusnap.runtime_shim.runtime import loopback

NEW = {"linux": {"namespaces": [{"type": "pid"}, {"type": "network"}]}}
GIVEN = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/a"}]}}
HOSTS: dict[str, Any] = {"linux": {"namespaces": [{"type": "pid"}]}}


@pytest.mark.parametrize(
    ("kind", "config", "wanted"),
    [
        ("runc", NEW, True),
        ("crun", NEW, False),
        ("runc", GIVEN, False),
        ("runc", HOSTS, False),
        ("runc", {}, False),
    ],
)
def test_where_it_is_needed(kind: str, config: dict[str, Any], wanted: bool) -> None:
    """runc alone leaves lo down, and only in a namespace that it makes."""
    assert (loopback.hook(kind, config) is not None) == wanted


def test_the_hook_runs_as_runc_starts_it() -> None:
    """With its own environment only: a process that has lo down in its network has it up afterwards."""
    hook = loopback.hook("runc", NEW)
    assert hook is not None
    environment = dict(each.split("=", 1) for each in hook["env"])
    script = (
        "mount -t sysfs sysfs /sys && cat /sys/class/net/lo/flags && read go && cat /sys/class/net/lo/flags"
    )
    words = ["unshare", "--net", "--mount", "sh", "-c", script]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert int(one.stdout.readline(), 16) & 1 == 0
        state = json.dumps({"ociVersion": "1.0.2", "id": "w", "status": "created", "pid": one.pid})
        done = subprocess.run(
            hook["args"], executable=hook["path"], env=environment, input=state, text=True,
            capture_output=True, timeout=hook["timeout"], check=True,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == ("", "")
        assert int(one.communicate("go\n", timeout=30)[0], 16) & 1 == 1


@pytest.mark.parametrize("state", ["", "{}", '{"pid": 0}', '{"pid": "x"}'])
def test_it_never_fails_the_restore(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(state.encode())))
    assert loopback.main() == 0
    assert "gpusnap: lo cannot be brought up in the container's network: " in capsys.readouterr().err
