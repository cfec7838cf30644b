"""How the other host is named, and what is said where it cannot be reached."""

from __future__ import annotations

import errno
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gpusnap.migration import link
from gpusnap.migration.link import Destination, Route, connect, destination
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError


@pytest.mark.parametrize(
    ("text", "found", "words"),
    [
        ("ssh://gpu2", Destination("gpu2"), ["-T", "--", "gpu2"]),
        (
            "ssh://me@gpu2.example:2222/",
            Destination("gpu2.example", "me", 2222),
            ["-T", "-p", "2222", "--", "me@gpu2.example"],
        ),
        (
            "ssh://[fe80::1%eth0]:22",
            Destination("fe80::1%eth0", "", 22),
            ["-T", "-p", "22", "--", "fe80::1%eth0"],
        ),
    ],
)
def test_hosts(text: str, found: Destination, words: list[str]) -> None:
    assert destination(text) == found
    assert found.words() == words


@pytest.mark.parametrize(
    "text",
    [
        "gpu2",
        "ssh://",
        "ssh://-oProxyCommand=x",
        "ssh://a b",
        "ssh://h:0",
        "ssh://h:65536",
        "ssh://h/x",
        "http://h",
    ],
)
def test_what_is_no_host(text: str) -> None:
    """An option for ssh, say."""
    with pytest.raises(UsageError, match="is not a valid host"):
        destination(text)


def an_ssh(folder: Path, script: str) -> Route:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Route(to=Destination("gpu2"), ssh=str(path))


@pytest.mark.parametrize(
    ("script", "said", "code"),
    [
        (
            "echo 'Host key verification failed.' >&2; exit 255",
            "gpu2 cannot be reached: Host key verification",
            "GPS-820",
        ),
        ("exit 255", "gpu2 cannot be reached: the connection to gpu2 ended", "GPS-820"),
        (
            "echo 'sudo: a password is required' >&2; exit 1",
            "gpusnap does not run on gpu2: sudo: a password",
            "GPS-820",
        ),
        ("echo 'gpusnap: it needs root' >&2; exit 1", "gpu2: it needs root", "GPS-820"),
        ("echo 'Last login: today'; cat", "but with: Last login: today", "GPS-821"),
    ],
)
def test_not_reached(tmp_path: Path, script: str, said: str, code: str) -> None:
    """What ssh, or the shell over there, says is passed on."""
    began = time.monotonic()
    with pytest.raises(GpusnapError, match=said) as raised, connect(an_ssh(tmp_path, script)):
        raise AssertionError
    assert time.monotonic() - began < 20
    assert raised.value.code == code
    assert raised.value.hint


def test_how_to_try_it(tmp_path: Path) -> None:
    """The hint is the command itself, with the options of this one."""
    route = replace(an_ssh(tmp_path, "exit 255"), program="sudo gpusnap")
    with pytest.raises(GpusnapError) as raised, connect(route):
        raise AssertionError
    tried = f"{tmp_path}/ssh -T -- gpu2 'sudo gpusnap version'"
    assert raised.value.hint == f"check that this works as the same user: {tried}"


def test_no_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSH is missing only if nobody named another program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for options, hint in (({}, "install OpenSSH's client"), ({"ssh": f"{tmp_path}/gone"}, "check --ssh")):
        with (
            pytest.raises(GpusnapError, match="cannot be run") as raised,
            connect(Route(to=Destination("h"), **options)),
        ):
            raise AssertionError
        assert raised.value.hint == hint


def test_no_ssh_for_want_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That says nothing about ssh's being installed."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("gpusnap.migration.link.subprocess.Popen", fail)
    with pytest.raises(GpusnapError) as raised, connect(Route(to=Destination("h"))):
        raise AssertionError
    assert raised.value.hint.startswith("raise the limit on processes")
    assert not raised.value.code


def test_the_command_line(tmp_path: Path) -> None:
    """ssh's own options, then the host, then gpusnap's command in one word; it ends with the block."""
    program = f"import sys; open({str(tmp_path / 'words')!r}, 'w').write(repr(sys.argv[1:]))"
    (tmp_path / "p.py").write_text(
        f"{program}\nsys.stdout.write('gpusnap-migrate 1\\n'); sys.stdout.flush(); sys.stdin.read()\n"
    )
    route = Route(
        to=Destination("h", "me", 22),
        ssh=f"{sys.executable} {tmp_path}/p.py -i KEY",
        program="sudo -n gpusnap",
    )
    with connect(route) as channel:
        channel.send({"ask": "end"})
    words = ["-i", "KEY", "-T", "-p", "22", "--", "me@h", "sudo -n gpusnap migrate --server"]
    assert (tmp_path / "words").read_text() == repr(words)


@pytest.mark.parametrize("text", ["", "  ", "ssh 'x"])
def test_no_command_line(text: str) -> None:
    with pytest.raises(UsageError, match="--ssh"):
        link.check_command_line(text, "--ssh")
