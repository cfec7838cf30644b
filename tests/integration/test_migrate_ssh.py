"""gpusnap migrate through OpenSSH's client and server: the way there, and each way in which that fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cutting_ssh
import pytest
import waiting
from otherhost import FOLDER, OtherHost, other_host
from sshdhost import Sshd, children, sshd
from storehost import COMMAND, SETTINGS, empty_store, gpusnap
from support import Container, Done, good, run, sentence, until
from test_migrate import WORK, goes_on_there, names, nothing_there, runs_here, ticks

from gpusnap.oci.store.store import Store

CUTTING = f"{sys.executable} {cutting_ssh.__file__} {FOLDER}/plan --"


@pytest.fixture
def store(real: str) -> Iterator[Store]:
    with empty_store(SETTINGS.replace('"crun"', f'"{real}"')) as found:
        yield found


@pytest.fixture
def one_runtime(crun: None) -> Iterator[Store]:
    with empty_store() as found:
        yield found


@pytest.fixture
def other() -> Iterator[OtherHost]:
    with other_host() as found:
        yield found


@pytest.fixture
def server(other: OtherHost) -> Iterator[Sshd]:
    with sshd() as found:
        yield found


def words(server: Sshd, *more: str, client: str = "") -> list[str]:
    return ["migrate", "w", server.to, "--quiet", "--ssh", client or server.client(), *more]


def migrate(server: Sshd, *more: str, key: str = "key", known: str = "known") -> Done:
    return gpusnap(*words(server, *more, client=server.client(key=key, known=known)))


def clients(pid: int) -> list[int]:
    """The ssh below the program that a gpusnap has started."""
    below = [inner for each in children(pid) for inner in children(each)]
    return [each for each in below if Path(f"/proc/{each}/comm").read_text() == "ssh\n"]


def test_by_ssh(store: Store, other: OtherHost, server: Sshd) -> None:
    """It runs there, with every byte right; nothing is left here, nor a session there."""
    container = Container.start("w", *WORK, gpus=["0"])
    last = max(max(each) for each in container.ticks().values())
    done = json.loads(good(migrate(server, "--gpu-map", "0=1", "--json")))
    assert (done["host"], done["name"]) == ("127.0.0.1", "w")
    goes_on_there(other)
    assert ticks(other)[-1] > last
    assert run("podman", "ps", "--all", "--quiet").out == ""
    assert names(store) == []
    until(lambda: not server.sessions(), "the session there has ended")


def test_who_is_not_let_in(one_runtime: Store, other: OtherHost, server: Sshd) -> None:
    """A sentence each, before anything is changed."""
    container = Container.start("w", *WORK, gpus=["0"])
    said = sentence(migrate(server, known="wrong-known"))
    assert "127.0.0.1 cannot be reached: " in said
    assert "Host key verification failed" in said
    assert "its host key is not the one that ssh knows" in said
    said = sentence(migrate(server, known="none-known"))
    assert "Host key verification failed" in said
    assert "log in manually once" in said
    said = sentence(migrate(server, key="other-key"))
    assert "access is refused (publickey)" in said
    assert "--ssh 'ssh -i KEY'" in said
    said = sentence(migrate(server, "--remote-command", "gpusnap-of-nobody"))
    assert "gpusnap does not run on 127.0.0.1: " in said
    assert "gpusnap-of-nobody: command not found" in said
    said = sentence(gpusnap("migrate", "w", "ssh://root@127.0.0.1:1", "--quiet", "--ssh", server.client()))
    assert "Connection refused" in said
    assert "check that sshd is running there" in said
    runs_here(container)
    assert names(one_runtime) == []
    assert nothing_there(other)


@pytest.mark.parametrize("side", ["ssh", "sshd"])
@pytest.mark.parametrize("plan", ["to blob 3", "to restore 1"])
def test_the_connection_is_cut(
    one_runtime: Store, other: OtherHost, server: Sshd, plan: str, side: str
) -> None:
    """While the memory comes, and once it was stopped: it runs here, and the next try brings it there."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks(f"{plan} pause")
    with waiting.Process(
        [COMMAND, *words(server, client=f"{CUTTING} {server.client()}")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as migration:
        until(lambda: (FOLDER / "plan.paused").exists(), f"{plan} is on its way")
        pids = server.sessions() if side == "sshd" else clients(migration.pid)
        assert pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        _, err = waiting.communicate(migration, 120)
    said = sentence(Done(migration.returncode, "", err.decode()))
    assert "127.0.0.1" in said
    runs_here(container)
    until(lambda: nothing_there(other), "the other host has undone it")
    assert names(one_runtime) == []
    good(migrate(server))
    goes_on_there(other)


def test_a_shell_that_greets(one_runtime: Store, other: OtherHost, server: Sshd) -> None:
    """What a login prints is no protocol: the sentence shows it."""
    container = Container.start("w", *WORK, gpus=["0"])
    server.write("config", (server.folder / "config").read_text() + "ForceCommand echo welcome to gpu2\n")
    os.kill(server.pid, signal.SIGHUP)
    ssh = (*server.client().split(), "-p", str(server.port), "root@127.0.0.1")
    until(lambda: "welcome" in run(*ssh).out, "sshd has read its configuration")
    assert "did not respond as gpusnap does, but with: welcome to gpu2" in sentence(migrate(server))
    runs_here(container)
