"""A name without a tag, and a restore right after the checkpoint, as users of Podman expect them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import registryhost
from holding import held
from storehost import COMMAND, SETTINGS_BUT_RUNTIME, STORE, done, empty_store, gpusnap
from support import Container, good, podman, run, sentence, until

from gpusnap.oci.store.store import Store

WORK = ("--mib", "8")


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """An empty one, which the settings name, gone afterwards."""
    with empty_store() as made:
        yield made


def command(said: str) -> list[str]:
    """The command at the end of what gpusnap says."""
    return shlex.split(said.strip().splitlines()[-1].rpartition(": ")[2])


def test_checkpoint_and_restore(store: Store) -> None:
    """The same container goes on, with its log and its volume, any number of times, as it says."""
    container = Container.start("server", *WORK, options=["-v", "data:/data"])
    before = container.id
    for _ in range(2):
        said = gpusnap("checkpoint", "server")
        assert good(said)
        assert command(said.err) == ["gpusnap", "restore", "server"]
        assert "server has stopped" in said.err
        assert container.inspect()["State"]["Status"] == "exited"
        back = gpusnap("restore", "server")
        assert good(back).startswith(f"server  {before}")
        assert "restored from server:2" in back.err
        assert "volume" not in back.err
        container.goes_on()
    assert container.id == before
    assert len(store.list_tagged("server")) == 2
    good(podman("volume", "inspect", "data"))


def test_after_a_restart_of_the_host(store: Store) -> None:
    """Podman has forgotten that a checkpoint stopped the container; it goes on as the checkpoint has said."""
    container = Container.start("server", *WORK)
    before = container.id
    said = gpusnap("checkpoint", "server")
    assert good(said)
    for path in ("/run/libpod/alive", "/dev/shm/libpod_lock"):  # what Podman finds after a boot
        Path(path).unlink()
    assert not container.inspect()["State"].get("Checkpointed")
    assert good(run(*command(said.err))).startswith(f"server  {before}")
    container.goes_on()


def test_files_that_change_meanwhile(store: Store, tmp_path: Path) -> None:
    """In the stopped container: what was changed or removed comes back, and what was added stays."""
    script = "echo then >/etc/changed; echo then >/etc/removed; exec /gpuwork --tick 30"
    container = Container.start("server", script=script)
    good(gpusnap("checkpoint", "server"))
    upper = Path(container.inspect()["GraphDriver"]["Data"]["UpperDir"])
    now = tmp_path / "now"
    now.write_text("now\n")
    for name in ("changed", "added"):
        good(podman("cp", now, f"server:/etc/{name}"))
    assert (upper / "etc/changed").read_text() == "now\n"
    (upper / "etc/removed").unlink()
    assert good(gpusnap("restore", "server")).startswith(f"server  {container.id}")
    container.goes_on()
    found = [
        good(podman("exec", "server", "cat", f"/etc/{name}")) for name in ("changed", "removed", "added")
    ]
    assert found == ["then", "then", "now"]


def test_the_newest_of_several(store: Store) -> None:
    """Each command takes the newest; rm takes none of several, and nothing else is in the way."""
    container = Container.start("server", *WORK)
    first = done("checkpoint", "server", "--leave-running")
    until(lambda: time_has_passed(first["name"]), "another second")
    second = done("checkpoint", "server")
    assert first["name"] != second["name"]
    for word in ("server", "server:latest"):
        assert done("inspect", word)["artifact"]["digest"] == second["digest"]
        assert json.loads(good(gpusnap("verify", word, "--json")))[0]["digest"] == second["digest"]
        assert done("diff", first["name"], word)["b"]["digest"] == second["digest"]
    good(gpusnap("plan", "server"))
    assert done("tag", "server", "good")["digest"] == second["digest"]
    refused = gpusnap("rm", "server")
    assert refused.code == 2
    said = sentence(refused)
    assert first["name"] in said
    assert second["name"] in said
    # An older one is not what Podman's container has.
    assert "podman rm server" in sentence(gpusnap("restore", first["name"]))
    assert done("restore", "server")["digest"] == second["digest"]
    container.goes_on()
    assert len(done("rm", "--all", "server")["removed"]) == 2
    assert [each.name for each in store.entries()] == ["good"]
    assert gpusnap("restore", "server").code == 3


def time_has_passed(name: str) -> bool:
    """Whether the next checkpoint has another name."""
    now = run("date", "-u", "+%Y%m%d-%H%M%S").out.strip()
    return now > name.partition(":")[2]


def test_what_may_not_be_replaced(store: Store) -> None:
    """A container that was started since, or is another one, stays, and is named."""
    container = Container.start("server", *WORK)
    made = done("checkpoint", "server")
    good(podman("start", "server"))
    assert "Podman already has a container server" in sentence(gpusnap("restore", "server"))
    assert container.inspect()["State"]["Status"] == "running"
    good(podman("stop", "--time", "0", "server"))
    assert "podman rm server" in sentence(gpusnap("restore", "server"))
    container.remove()
    good(podman("create", "--name", "server", "localhost/base", "sleep", "100"))
    assert "podman rm server" in sentence(gpusnap("restore", made["name"]))
    good(podman("rm", "server"))
    good(gpusnap("restore", "server"))
    container.goes_on()


def test_a_restore_that_fails(store: Store) -> None:
    """The container and its checkpoint are as before, it says so, and the next restore continues it."""
    container = Container.start("server", *WORK)
    before = container.id
    good(gpusnap("checkpoint", "server"))
    said = sentence(gpusnap("restore", "--gpu-map", "0=7", "server"))
    assert "nothing is lost: Podman still has server" in said
    assert container.inspect()["State"]["Status"] == "exited"
    good(gpusnap("restore", "server"))
    container.goes_on()
    assert container.id == before


def test_killed_in_a_restore(store: Store, tmp_path: Path) -> None:
    """gpusnap dies (SIGKILL): Podman ends what it does, or the same command does."""
    container = Container.start("server", *WORK)
    good(gpusnap("checkpoint", "server"))
    with held(tmp_path, "crun", "restore", SETTINGS_BUT_RUNTIME) as crun:
        child = subprocess.Popen(
            [COMMAND, "restore", "server"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(crun.met, "Podman's restore")
        child.send_signal(signal.SIGKILL)
        child.wait()
    until(lambda: not run("pgrep", "-x", "podman").out, "the end of Podman")
    if container.inspect()["State"]["Status"] != "running":
        good(gpusnap("restore", "server"))
    container.goes_on()


def test_elsewhere(store: Store, tmp_path: Path) -> None:
    """From an archive and another store, too; a container with --rm is gone, and comes back by an import."""
    container = Container.start("server", *WORK)
    for place in (tmp_path / "w.tar", f"oci:{tmp_path}/other"):
        said = gpusnap("checkpoint", "server", "--to", place)
        good(said)
        good(run(COMMAND, *command(said.err)[1:]))
        container.goes_on()
    container.remove()
    container = Container.start("server", *WORK, options=["--rm"])
    said = gpusnap("checkpoint", "server")
    good(said)
    assert "has stopped and was removed (--rm)" in said.err
    good(gpusnap("restore", "server"))
    container.goes_on()


def test_leave_running(store: Store) -> None:
    """What it says goes back to the checkpoint."""
    container = Container.start("server", *WORK)
    said = gpusnap("checkpoint", "server", "--leave-running")
    good(said)
    assert "server continues to run" in said.err
    line = said.err.strip().splitlines()[-1].partition(": ")[2]
    good(run("sh", "-c", line))
    container.goes_on()


def test_without_a_gpu(store: Store) -> None:
    """The same of a container that has none."""
    script = "while :; do sleep 1; done"
    good(podman("run", "-d", "--name", "plain", "localhost/base", "sh", "-c", script))
    plain = Container("plain")
    before = plain.id
    good(gpusnap("checkpoint", "plain"))
    good(gpusnap("restore", "plain"))
    assert plain.inspect()["State"]["Status"] == "running"
    assert plain.id == before


def test_ls(store: Store) -> None:
    """What is in the store and in a registry, in 80 columns, with the driver's version."""
    Container.start("server", *WORK)
    made = done("checkpoint", "server", "--leave-running")
    with registryhost.running() as registry:
        good(gpusnap("push", "server", f"http://{registry.host}/team/server:v1"))
        there = f"{registry.host}/team/server"
        listed = good(run(COMMAND, "ls", f"http://{there}", env={**os.environ, "COLUMNS": "80"}))
        assert f"{there}:v1" in listed
        assert "560.35.03" in listed
    listed = good(run(COMMAND, "ls", env={**os.environ, "COLUMNS": "80"}))
    assert max(map(len, listed.splitlines()[:-1])) <= 80
    (row,) = (line for line in listed.splitlines() if line.startswith(f"{made['name']} "))
    assert "560.35.03" in row
    assert "ago" in row or "just now" in row
    assert good(gpusnap("ls", "-q", "server")) == made["digest"]
    good(gpusnap("rm", made["digest"]))
    assert good(gpusnap("ls", "-q")) == ""


USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", COMMAND)
NEEDS_ROOT = (
    "checkpoint server",
    "restore server",
    "restore /var/lib/w.tar",
    "recover",
    "doctor server",
    "ls",
    "inspect server",
    "inspect /root/w.tar",
    "verify --all",
    "verify server",
    "diff server server",
    "rm server",
    "tag server x",
    "gc",
    "push server localhost:1/x",
    "install",
)
NEEDS_NONE = ("--version", "explain GPS-005", "settings", "ls --help", "gpus", "install --dry-run")


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_without_root(store: Store, mode: int) -> None:
    """What needs root says so, and nothing else; the rest works."""
    Container.start("server", *WORK)
    good(gpusnap("checkpoint", "server", "--leave-running"))
    archive = Path("/var/lib/w.tar")
    try:
        good(gpusnap("checkpoint", "server", "--leave-running", "--to", archive))
        STORE.chmod(mode)
        for line in NEEDS_ROOT:
            said = run(*USER, *line.split())
            assert said.code == 1, (line, said)
            assert "as root" in sentence(said), line
            assert said.out == "", line
        archive.chmod(0o600)
        assert "run gpusnap as root" in sentence(run(*USER, "inspect", archive))
        archive.chmod(0o644)
        for line in (*NEEDS_NONE, f"inspect {archive}", f"verify {archive}"):
            good(run(*USER, *line.split()))
    finally:
        archive.unlink(missing_ok=True)


def test_a_registry_by_options(store: Store) -> None:
    """With --creds and --tls-verify=false alone; what the runtime fetches during the restore as well."""
    container = Container.start("server", *WORK)
    with registryhost.running(passwords=True) as registry:
        ref = f"{registry.host}/team/server:v1"
        login = ("--creds", f"{registryhost.USER}:{registryhost.PASSWORD}", "--tls-verify=false")
        assert "does not speak TLS" in sentence(gpusnap("checkpoint", "server", "--to", ref, *login[:2]))
        assert "log in" in sentence(gpusnap("checkpoint", "server", "--to", ref, login[2]))
        container.goes_on()
        said = gpusnap("checkpoint", "server", "--to", ref, *login)
        good(said)
        assert command(said.err) == ["gpusnap", "restore", ref, "--tls-verify=false"]
        container.remove()
        shutil.rmtree(store.path)
        assert done("restore", ref, *login)["kept"] == ref
        container.goes_on()
