"""Named volumes, with real Podman: kept once, never overwritten; what is in use is told apart."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import waiting
from storehost import COMMAND, PLAIN, done, empty_store, gpusnap
from support import Container, good, podman, run, sentence, until

from gpusnap.oci.store.store import Store

MIB = 1 << 20
# A large file, and enough small ones that none of them is in a chunk of its own.
FILL = (
    "dd if=/dev/urandom of=/data/large bs=1M count=12 2>/dev/null; "
    "for at in $(seq 200); do echo $at >/data/small$at; done"
)


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """An empty one, and no volume is left."""
    with empty_store(PLAIN) as made:
        yield made
    for name in run("podman", "ps", "--all", "--quiet").out.split():
        run("podman", "rm", "--force", "--time", "0", name)
    for name in ("cache", "weights"):
        run("podman", "volume", "rm", "--force", name)


def filled(*volumes: str) -> None:
    for name in volumes:
        good(podman("run", "--rm", "-v", f"{name}:/data", "localhost/base", "sh", "-c", FILL))


def sums(volume: str) -> str:
    """The digests of all files in it."""
    return good(
        podman("run", "--rm", "-v", f"{volume}:/data:ro", "localhost/base", "sh", "-c", "sha256sum /data/*")
    )


def start(name: str, *volumes: str, options: tuple[str, ...] = ()) -> Container:
    mounts = [word for each in volumes for word in ("-v", f"{each}:/{each}")]
    return Container.start(name, "--mib", "2", options=(*mounts, *options))


def volumes() -> set[str]:
    return set(run("podman", "volume", "ls", "--quiet").out.split())


def test_kept_once_and_back(store: Store) -> None:
    """A second checkpoint writes little; without the volume it comes back, byte by byte."""
    filled("weights")
    before = sums("weights")
    container = start("w", "weights")
    told = {each["name"]: each for each in done("doctor", "w")["checks"]}
    [listed] = told["volumes"]["facts"]["volumes"]
    assert (listed["name"], listed["size"] > 12 * MIB) == ("weights", True)
    first = done("checkpoint", "w", "--leave-running", "--name", "one")
    assert first["new"] > 12 * MIB
    second = done("checkpoint", "w", "--name", "two")
    assert second["new"] < first["new"] - 11 * MIB  # the memory has changed
    container.remove()
    good(run("podman", "volume", "rm", "weights"))
    assert done("restore", "two")["container"] == "w"
    container.goes_on()
    assert sums("weights") == before
    good(gpusnap("verify", "two"))


def test_a_volume_that_is_there(store: Store) -> None:
    """On the same host it is used as it is: what was written since is not lost, and a note says so."""
    filled("weights")
    container = start("w", "weights")
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(podman("run", "--rm", "-v", "weights:/data", "localhost/base", "sh", "-c", "echo new >/data/new"))
    back = gpusnap("restore", "one")
    good(back)
    assert "gpusnap: note: the existing volume weights is used as it is, and may be newer" in back.err
    container.goes_on()
    assert "/data/new" in sums("weights")
    again = gpusnap("restore", "one", "--name", "second")
    good(again)
    assert "(also used by w)" in again.err


def test_left_out(store: Store, tmp_path: Path) -> None:
    """--ignore-volumes on both sides, for a store and for an archive."""
    filled("weights")
    container = start("w", "weights")
    assert done("checkpoint", "w", "--name", "one", "--ignore-volumes")["size"] < 12 * MIB
    container.remove()
    good(gpusnap("restore", "one"))
    archive = str(tmp_path / "w.tar.zst")
    assert done("checkpoint", "w", "--to", archive, "--ignore-volumes")["size"] < 12 * MIB
    container.remove()
    good(run("podman", "volume", "rm", "weights"))
    for what in ("one", archive):
        assert sentence(gpusnap("restore", what)).startswith(
            "Podman has no volume weights, and the checkpoint"
        )
        assert volumes() == set()
    good(gpusnap("restore", archive, "--ignore-volumes"))
    container.goes_on()
    assert volumes() == {"weights"}


@pytest.fixture
def without_cache(store: Store) -> tuple[Container, dict[str, str]]:
    """A container that has ended, of whose two volumes one is left; and the digests of both, by name."""
    filled("weights", "cache")
    before = {each: sums(each) for each in ("weights", "cache")}
    container = start("w", *before)
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(run("podman", "volume", "rm", "cache"))
    return container, before


def test_one_of_two(without_cache: tuple[Container, dict[str, str]]) -> None:
    """Podman could only ignore both: the one that is missing is made from the checkpoint before."""
    container, before = without_cache
    back = gpusnap("restore", "one")
    good(back)
    assert "the existing volume weights is used as it is" in back.err
    assert "cache" not in back.err
    container.goes_on()
    assert {each: sums(each) for each in before} == before


# Podman, which does not come to fill a volume.
_STOPS = """#!/bin/sh
case "$1 $2" in "volume import") echo $$ >{met}.new; mv {met}.new {met}; exec sleep 1000;; esac
exec /usr/bin/podman "$@"
"""


def test_killed_while_one_is_filled(without_cache: tuple[Container, dict[str, str]], tmp_path: Path) -> None:
    """No restore uses what it left; the next one makes it anew, as the message says."""
    container, before = without_cache
    wrapper, met = tmp_path / "podman", tmp_path / "met"
    wrapper.write_text(_STOPS.format(met=met))
    wrapper.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = [COMMAND, "restore", "one"]
    with waiting.Process(line, stderr=subprocess.DEVNULL, env=environment) as killed:
        until(met.exists, "the import of files into the volume")
        os.kill(killed.pid, signal.SIGKILL)
    os.kill(int(met.read_text()), signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    said = sentence(gpusnap("restore", "one"))
    assert said.startswith("the volume cache lacks files: gpusnap was killed while it filled it")
    good(run("podman", "volume", "rm", "cache"))
    good(gpusnap("restore", "one"))
    container.goes_on()
    assert {each: sums(each) for each in before} == before


def test_what_is_in_use(store: Store) -> None:
    """A port and a name have sentences of their own; nothing is left of a restore that failed."""
    filled("weights")
    container = start("w", "weights", options=("--network", "bridge", "--publish", "18080:80"))
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(run("podman", "volume", "rm", "weights"))
    with socket.create_server(("", 18080)):
        said = sentence(gpusnap("restore", "one"))
    assert said.startswith("the TCP port 18080 of this host, which the container publishes, is in use; give")
    assert said.endswith("[GPS-519]")
    assert volumes() == set()
    assert run("podman", "ps", "--all", "--quiet").out == ""
    good(gpusnap("restore", "one"))
    assert sentence(gpusnap("restore", "one")).startswith(
        "Podman already has a container w, and it is running; "
    )


def test_an_address_in_use(store: Store) -> None:
    """Whose it is now, and how to go on without it."""
    good(run("podman", "network", "create", "--disable-dns", "--subnet", "10.99.0.0/24", "n1"))
    options = ("--network", "n1", "--ip", "10.99.0.7")
    container = start("w", options=options)
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(podman("run", "-d", "--name", "other", *options, "localhost/base", "sleep", "1000"))
    said = sentence(gpusnap("restore", "one"))
    assert said.startswith("the address 10.99.0.7 of the container is in use by the container other; ")
    good(gpusnap("restore", "one", "--ignore-static-ip", "--ignore-static-mac"))
    container.goes_on()
    for name in ("w", "other"):
        good(run("podman", "rm", "--force", "--time", "0", name))
    good(run("podman", "network", "rm", "n1"))
