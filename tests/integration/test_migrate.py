"""gpusnap migrate, to a second host within the test host; what breaks is broken by cutting_ssh.py."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import waiting
from otherhost import SSH, OtherHost, other_host
from storehost import COMMAND, SETTINGS, STORE, empty_store, gpusnap
from support import STATE, Container, Done, faults, good, podman, run, sentence, until

from gpusnap.migration.records import MARK
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc

WORK = ("--mib", "24", "--slices", "24", "--touch", "1")
TO = "ssh://gpu2"


@pytest.fixture
def store(real: str) -> Iterator[Store]:
    with empty_store(SETTINGS.replace('"crun"', f'"{real}"')) as found:
        yield found


@pytest.fixture
def one_runtime(crun: None) -> Iterator[Store]:
    with empty_store() as found:
        yield found


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[OtherHost]:
    with other_host() as found:
        yield found


@pytest.fixture
def volumes() -> Iterator[None]:
    """Volumes of the test's container are removed after it."""
    yield
    run("podman", "rm", "--all", "--force", "--time", "0")
    good(run("podman", "volume", "rm", "--all", "--force"))


def migrate(*words: str) -> Done:
    return gpusnap("migrate", "w", TO, "--quiet", "--ssh", str(SSH), *words)


def ticks(other: OtherHost, name: str = "w") -> list[int]:
    """The ticks of a container over there, each of which found every byte right."""
    lines = good(other.podman("logs", name)).splitlines()
    found = [each for line in lines if (each := re.search(r"tick=(\d+) (ok|BAD)", line))]
    assert all(each[2] == "ok" for each in found), lines
    return [int(each[1]) for each in found]


def goes_on_there(other: OtherHost, name: str = "w") -> None:
    first = until(lambda: ticks(other, name), f"a tick of {name} there")[-1]
    until(lambda: ticks(other, name)[-1] > first + 2, f"more ticks of {name} there")


def nothing_there(other: OtherHost) -> bool:
    """Neither a container, nor a checkpoint that was sent ahead.

    What came last may be in the store.
    """
    ahead = "migrating" in other.run(COMMAND, "ls").out
    return other.containers() == [] and not ahead


def recovered(other: OtherHost) -> None:
    """A gpusnap that was killed there leaves what came ahead; `gpusnap recover` takes that away."""
    until(
        lambda: "w to this host was interrupted" in other.run(COMMAND, "recover", "--list").out,
        "the killed one is gone",
    )
    assert "w to this host was interrupted" in good(other.run(COMMAND, "recover"))
    assert "nothing to recover" in other.run(COMMAND, "recover", "--list").err


def names(store: Store) -> list[str]:
    """What this host's store has; it comes to be with the first checkpoint."""
    return [each.name for each in store.entries()] if (STORE / "index.json").exists() else []


def runs_here(container: Container) -> None:
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()


def test_there(store: Store, other: OtherHost) -> None:
    """It runs there, most of its memory came ahead, and nothing of it is left here."""
    container = Container.start("w", *WORK, gpus=["0"])
    last = max(max(each) for each in container.ticks().values())
    done = json.loads(good(migrate("--gpu-map", "0=1", "--json")))
    assert done["ahead"] > 24 << 20 > 2 * done["after"] > 0
    assert 0 < done["pause"] < done["seconds"]
    assert [each["new"][-1] for each in done["gpus"]] == ["1"]
    goes_on_there(other)
    assert ticks(other)[-1] > last
    assert run("podman", "ps", "--all", "--quiet").out == ""
    assert names(store) == []
    there = json.loads(good(other.run(COMMAND, "ls", "--json")))["checkpoints"]
    assert [(len(each["names"]), each["digest"]) for each in there] == [(1, done["digest"])]
    assert re.fullmatch(r"w:\d{8}-\d{6}", there[0]["names"][0])


def test_there_without_sending_ahead(one_runtime: Store, other: OtherHost) -> None:
    """All goes while it stands still; --keep leaves the container, --name gives another one; and back."""
    Container.start("w", *WORK, gpus=["0"])
    done = json.loads(good(migrate("--precopy", "0", "--keep", "--name", "x", "--json")))
    assert (done["ahead"], done["name"]) == (0, "x")
    assert done["after"] > 24 << 20
    goes_on_there(other, "x")
    assert good(podman("ps", "--all", "--format", "{{.Names}} {{.State}}")) == "w exited"
    assert len(one_runtime.entries()) == 1


def test_a_dry_run(one_runtime: Store, other: OtherHost) -> None:
    """It says what would be done; nothing is changed on either host."""
    container = Container.start("w", *WORK, gpus=["0"])
    done = json.loads(good(migrate("--dry-run", "--json")))
    assert done["dryRun"]
    assert done["free"] > done["needs"] > 24 << 20
    assert done["gpus"]
    assert "w can be migrated to gpu2; nothing was changed" in good(migrate("--dry-run"))
    runs_here(container)
    assert nothing_there(other)


def test_what_is_refused_first(one_runtime: Store, other: OtherHost) -> None:
    """The container was not touched, and the sentence says what is wrong over there."""
    container = Container.start("w", *WORK, gpus=["0"])
    assert "GPU 7" in sentence(migrate("--gpu-map", "0=7"))
    good(other.podman("create", "--name", "w", "localhost/base"))
    assert "gpu2: Podman already has a container w there" in sentence(migrate())
    good(other.podman("rm", "w"))
    good(other.podman("rmi", "localhost/base"))
    said = sentence(migrate())
    assert "gpu2: Podman there does not have the image localhost/base" in said
    assert "podman save" in said
    other.first("echo welcome; exit 0\n")
    assert "did not respond as gpusnap does, but with: welcome" in sentence(migrate())
    other.first("echo 'ssh: connect to host gpu2 port 22: Connection refused' >&2; exit 255\n")
    assert "gpu2 cannot be reached: ssh: connect to host gpu2 port 22: Connection refused" in sentence(
        migrate()
    )
    other.first("echo 'sh: 1: gpusnap: not found' >&2; exit 127\n")
    assert "gpusnap does not run on gpu2" in sentence(migrate())
    runs_here(container)
    assert names(one_runtime) == []


@pytest.mark.parametrize(
    "plan", ["to fetch 1 kill", "to blob 3 cut", "to blob 3 garble", "from fetch 1 cut", "to plan 1 kill"]
)
def test_broken_while_it_runs(one_runtime: Store, other: OtherHost, plan: str) -> None:
    """Nothing has happened to the container; the next try goes on."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks(plan)
    said = sentence(migrate())
    assert "gpu2" in said
    assert ("digest" in said) == ("garble" in plan)
    runs_here(container)
    if plan.endswith("kill") and plan != "to fetch 1 kill":  # of which nothing had come
        recovered(other)
    until(lambda: nothing_there(other), "the other host has undone it")
    assert names(one_runtime) == []
    good(migrate())
    goes_on_there(other)


# One runtime each: what breaks is between the hosts.
@pytest.mark.parametrize(
    ("plan", "real"),
    [
        ("to fetch 2 kill", "crun"),
        ("from fetch 2 cut", "runc"),
        ("to restore 1 kill", "crun"),
        ("to restore 1 working", "runc"),
        ("from restore 1 cut", "crun"),
        ("from restore 1 kill", "runc"),
        ("to confirm 1 cut", "crun"),
        ("to confirm 1 kill", "runc"),
    ],
    indirect=["real"],
)
def test_broken_once_it_was_stopped(store: Store, other: OtherHost, plan: str) -> None:
    """It runs here again, and not there."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks(plan)
    said = sentence(migrate())
    assert said.startswith("w was not migrated, and runs on this host again: ")
    runs_here(container)
    if plan == "to fetch 2 kill":  # nobody need ask that host what has become of it
        recovered(other)
    until(lambda: nothing_there(other), "the other host has undone it")
    assert names(store) == []


@pytest.mark.parametrize("receiver", ["lives", "is killed"])
@pytest.mark.parametrize("real", ["crun", "runc"], indirect=True)
def test_podman_is_killed_there(store: Store, other: OtherHost, receiver: str) -> None:
    """Its runtime continues: what that restores is ended, before the container runs on this host again."""
    container = Container.start("w", *WORK, gpus=["0"])
    faults("restore hang=80000 count=1")
    words = (COMMAND, "migrate", "w", TO, "--name", "x", "--precopy", "0", "--quiet", "--ssh", SSH)
    with waiting.Process(words, stderr=subprocess.PIPE, text=True) as child:
        until(lambda: (STATE / "faults").read_text() == "", "the driver restores there")
        (at_work,) = podmen()
        if receiver == "is killed":
            os.kill(proc.parent(at_work), signal.SIGKILL)
        os.kill(at_work, signal.SIGKILL)
        until(lambda: other.calls() > 1, "that host is asked about the container")
        faults("")
        said = child.communicate(timeout=90)[1]
    assert "w was not migrated, and runs on this host again: " in said
    assert nothing_there(other)
    assert "nothing to recover" in other.run(COMMAND, "recover", "--list").err
    runs_here(container)


def podmen() -> list[int]:
    """The PIDs of Podman while it restores for a migration."""
    at_work = (pid for pid in proc.pids() if proc.comm(pid) == "podman")
    return [pid for pid in at_work if MARK in proc.environment(pid)]


def test_the_last_word_is_lost(one_runtime: Store, other: OtherHost) -> None:
    """The other host has taken it over, and says so when it is asked again."""
    Container.start("w", *WORK, gpus=["0"])
    other.breaks("from confirm 1 cut")
    good(migrate())
    assert other.calls() == 3  # it is asked, and told that it need not remember it
    goes_on_there(other)
    assert run("podman", "ps", "--all", "--quiet").out == ""


def test_nobody_can_be_asked(one_runtime: Store, other: OtherHost) -> None:
    """Rather none than two: it stays stopped, and the sentence says how to continue it."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks("from restore 1 cut")
    other.first(f'[ "$(wc -l <{SSH.parent}/calls)" -le 1 ] || exit 255\n')
    said = sentence(migrate())
    assert "is unknown whether the container runs there" in said
    assert container.inspect()["State"]["Status"] == "exited"
    until(lambda: nothing_there(other), "the other host has undone it by itself")
    command = refused_here(one_runtime)
    assert command in said
    good(gpusnap(*command.split()))
    runs_here(container)


@pytest.mark.parametrize(
    "plan", ["to fetch 1 sender", "to fetch 2 sender", "to restore 1 sender", "from restore 1 sender"]
)
def test_killed_here(one_runtime: Store, other: OtherHost, plan: str) -> None:
    """The other host undoes what it did; here the container runs, or its checkpoint continues it.

    Once that was asked to restore, `gpusnap recover` finds out first that it does not run there.
    """
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks(plan)
    assert migrate().code < 0
    until(lambda: nothing_there(other), "the other host has undone it")
    assert "the migration of w to gpu2 was interrupted" in good(gpusnap("recover", "--list"))
    if "restore" in plan:
        refused_here(one_runtime)
        assert "w does not run on gpu2; gpusnap restore w:" in good(gpusnap("recover", "w"))
    else:
        assert "w was not migrated to gpu2" in good(gpusnap("recover"))
        assert "w:migrating" not in names(one_runtime)
    assert "nothing to recover" in gpusnap("recover", "--list").err
    if plan != "to fetch 1 sender":
        assert container.inspect()["State"]["Status"] == "exited"
        good(gpusnap("restore", "w"))
    runs_here(container)
    good(migrate())
    goes_on_there(other)


def refused_here(store: Store) -> str:
    """The last checkpoint is not restored, and every list says why; its name."""
    said = sentence(gpusnap("restore", "w"))
    assert "w may run on gpu2: its migration with the checkpoint w:" in said
    (command,) = re.findall(r"gpusnap (restore --not-migrated w:\S+) continues it here", said)
    assert "(may run on gpu2)" in good(gpusnap("ls"))
    assert "(may run on gpu2)" in good(gpusnap("history", "w"))
    assert "may run on gpu2" in good(gpusnap("prune", "w", "--keep-last", "1", "--dry-run"))
    assert run("podman", "ps", "--quiet").out == ""
    return str(command)


@pytest.mark.parametrize("real", ["crun", "runc"], indirect=True)
def test_killed_here_after_its_last_word(store: Store, other: OtherHost) -> None:
    """The container runs there; what is left here is not restored, and `gpusnap recover` removes it."""
    Container.start("w", *WORK, gpus=["0"])
    other.breaks("from confirm 1 sender")
    assert migrate().code < 0
    goes_on_there(other)
    refused_here(store)
    said = good(gpusnap("recover"))
    assert "w was migrated to gpu2; its checkpoint w:" in said
    assert run("podman", "ps", "--all", "--quiet").out == ""
    assert names(store) == []
    assert "nothing to recover" in gpusnap("recover").err
    goes_on_there(other)


def test_killed_there_after_its_last_word(one_runtime: Store, other: OtherHost) -> None:
    """It had taken the container over, and whoever is asked there next knows that."""
    Container.start("w", *WORK, gpus=["0"])
    other.breaks("from confirm 1 kill")
    good(migrate())
    goes_on_there(other)
    assert names(one_runtime) == []


def test_somebody_has_looked(one_runtime: Store, other: OtherHost) -> None:
    """Where the other host cannot be asked, whoever has seen that it does not run there continues it here."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks("from restore 1 sender")
    assert migrate().code < 0
    until(lambda: nothing_there(other), "the other host has undone it")
    command = refused_here(one_runtime)
    other.first("exit 255\n")
    assert "gpu2 cannot be reached" in sentence(gpusnap("recover"))
    good(gpusnap(*command.split()))
    runs_here(container)
    assert "nothing to recover" in gpusnap("recover", "--list").err


@pytest.mark.parametrize("plan", ["to fetch 1 sigint", "to fetch 2 sigint", "to restore 1 sigint"])
def test_interrupted(one_runtime: Store, other: OtherHost, plan: str) -> None:
    """Ctrl-C undoes all of it, on both sides."""
    container = Container.start("w", *WORK, gpus=["0"])
    other.breaks(plan)
    done = migrate()
    assert done.code == 130, done.err
    runs_here(container)
    until(lambda: nothing_there(other), "the other host has undone it")
    assert names(one_runtime) == []


def test_a_record_of_an_earlier_migration(one_runtime: Store, other: OtherHost) -> None:
    """A receiver was killed, and its container removed by hand: the next one with the same ID stays there."""
    Container.start("w", *WORK, gpus=["0"])
    other.breaks("from restore 1 kill")
    other.first(f'[ "$(wc -l <{SSH.parent}/calls)" -le 1 ] || exit 255\n')
    assert "is unknown whether the container runs there" in sentence(migrate())
    command = refused_here(one_runtime)
    good(other.podman("rm", "--force", "--time", "0", "w"))
    assert "was interrupted" in other.run(COMMAND, "recover", "--list").out
    good(gpusnap(*command.split()))
    other.first("")
    good(migrate())
    goes_on_there(other)
    assert "nothing to recover" in other.run(COMMAND, "recover").err
    goes_on_there(other)


def test_a_volume_of_that_name_there(one_runtime: Store, other: OtherHost, volumes: None) -> None:
    """Its files would not fit the memory: refused while the container runs; without it, they come along."""
    container = Container.start("w", *WORK, gpus=["0"], options=("-v", "data:/data"))
    good(podman("exec", "w", "sh", "-c", "echo one >/data/file"))
    good(other.podman("volume", "create", "data"))
    assert "already has the volume data" in sentence(migrate())
    runs_here(container)
    good(other.podman("volume", "rm", "data"))
    good(migrate())
    assert good(other.podman("exec", "w", "cat", "/data/file")) == "one"


@pytest.mark.parametrize("plan", ["to fetch 2 sigint", "to restore 1 cut", "from restore 1 cut"])
def test_an_anonymous_volume_comes_back(
    one_runtime: Store, other: OtherHost, volumes: None, plan: str
) -> None:
    """With --rm, Podman removes it with the container, and keeps the other one: both have their files."""
    container = Container.start("w", *WORK, gpus=["0"], options=("--rm", "-v", "data:/data", "-v", "/more"))
    good(podman("exec", "w", "sh", "-c", "echo one >/data/file; echo two >/more/file"))
    other.breaks(plan)
    assert "w was not migrated, and runs on this host again: " in migrate().err
    runs_here(container)
    assert good(podman("exec", "w", "cat", "/data/file", "/more/file")) == "one\ntwo"
    until(lambda: nothing_there(other), "the other host has undone it")
    assert good(other.podman("volume", "ls", "--quiet")) == ""  # they would refuse the next try
    good(migrate())
    assert good(other.podman("exec", "w", "cat", "/data/file", "/more/file")) == "one\ntwo"


@pytest.mark.parametrize("real", ["crun", "runc"], indirect=True)
def test_interrupted_once_it_has_ended(store: Store, other: OtherHost) -> None:
    """Ctrl-C while Podman exports the last checkpoint: Podman restores it from its storage."""
    container = Container.start("w", *WORK, gpus=["0"])
    first = os.pidfd_open(container.inspect()["State"]["Pid"])
    words = (COMMAND, "migrate", "w", TO, "--quiet", "--ssh", SSH)
    with waiting.Process(words, stderr=subprocess.PIPE, text=True) as child:
        assert select.select([first], [], [], 90)[0]
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=90)[1]
    os.close(first)
    assert child.returncode == 130, said
    runs_here(container)
    until(lambda: nothing_there(other), "the other host has undone it")


def test_interrupted_while_it_is_frozen(one_runtime: Store, other: OtherHost, volumes: None) -> None:
    """Ctrl-C while Podman exports the last checkpoint of one with --rm: it runs on, as it was."""
    options = ("--rm", "-v", "data:/data", "-v", "/more", "--shm-size", "500m")
    container = Container.start("w", *WORK, gpus=["0"], options=options)
    container.fill_shared_memory(400)
    init, records = container.pid, Path("/run/gpusnap/journal")

    def is_left_stopped() -> bool:
        with suppress(FileNotFoundError):
            return any(
                '"left-stopped"' in each.read_text() for each in records.glob(f"{container_id}@*.json")
            )
        return False

    container_id = container.id
    words = (COMMAND, "migrate", "w", TO, "--precopy", "0", "--quiet", "--ssh", SSH)
    with waiting.Process(words, stderr=subprocess.PIPE, text=True) as child:
        until(is_left_stopped, "the dump")
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=90)[1]
    assert child.returncode == 130, said
    assert container.pid == init
    runs_here(container)
    until(lambda: nothing_there(other), "the other host has undone it")
