"""What a CRIU does with a socket: tried on a process of ours."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.runtime_shim.runtime.criu import version

TCP = (socket.AF_INET, socket.SOCK_STREAM, 0)
REFUSED = "(00.03) Error (criu/sockets.c:628): sockets: Can't get 1:16 opt: Operation not supported"
OTHER = "(00.03) Error (criu/cr-dump.c:99): Cannot seize task 7: Operation not permitted"
Install = Callable[[str], Path]


@pytest.fixture
def criu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a CRIU in place that does as its script says, with its process in $pid and its folder in $dir."""

    def install(script: str) -> Path:
        path = tmp_path / "criu"
        cases = "--tree=*) pid=${word#*=};; --images-dir=*) dir=${word#*=};;"
        words = f"for word; do case $word in {cases} esac; done"
        path.write_text(f"#!/bin/sh\n{words}\n{script}\n")
        path.chmod(0o755)
        version.refuses.cache_clear()
        return tmp_path

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    yield install
    version.refuses.cache_clear()


@pytest.mark.parametrize(
    ("log", "refuses"),
    [
        (REFUSED, True),
        ("Error (criu/sk-inet.c:140): inet: Unsupported proto 262 for socket 1", True),
        (OTHER, False),
        ("", False),
    ],
)
def test_what_criu_says(criu: Install, log: str, refuses: bool) -> None:
    """Only its words about such a socket count; whatever else fails says nothing of sockets."""
    criu(f'echo "{log}" > $dir/log; exit 1')
    assert version.refuses(*TCP) is refuses


def test_what_it_is_tried_on(criu: Install) -> None:
    """A process that has the socket, which is gone afterwards with all that CRIU wrote."""
    folder = criu("echo $pid $dir > ${0%/*}/seen; readlink /proc/$pid/fd/* >> ${0%/*}/seen; : > $dir/log")
    assert not version.refuses(*TCP)
    first, *files = (folder / "seen").read_text().splitlines()
    pid, images = first.split()
    assert any(each.startswith("socket:") for each in files)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(images).exists()


def test_it_cannot_be_tried(criu: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CRIU, or one that writes no log or hangs, nothing is refused."""
    criu("exit 1")
    assert not version.refuses(*TCP)
    criu("exec sleep 60")
    monkeypatch.setattr(version, "_PATIENCE", 0.1)
    assert not version.refuses(*TCP)
    version.criu_version.cache_clear()
    assert version.criu_version() == "unknown"
    version.criu_version.cache_clear()
    monkeypatch.setattr(version, "_program", lambda: None)
    version.refuses.cache_clear()
    assert not version.refuses(*TCP)
