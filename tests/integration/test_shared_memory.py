"""/dev/shm of Podman's containers: their own, which changes while they run on, and that of the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from storehost import empty_store, gpusnap
from support import GPUWORK_LINE, Container, Done, good, members, podman, sentence, until

from gpusnap.oci.store.store import Store

HOST = Path("/dev/shm")
LOCKS, NEIGHBOUR, OWN = HOST / "libpod_lock", HOST / "neighbour", HOST / "own"
# Everything that it has of the file is in its memory as well; a file that is older or newer is printed.
COUNTING = """
n=0; echo 0 >/dev/shm/n; mkdir /dev/shm/inner; echo closed >/dev/shm/inner/file
while :; do
    read v </dev/shm/n; [ "$v" = $n ] || echo "memory $n, file $v"
    n=$((n + 1)); echo $n >/dev/shm/n
done &
exec {gpuwork}
""".format(gpuwork=" ".join(GPUWORK_LINE))
HOLDING = f"printf mine >/dev/shm/own; exec 5</dev/shm/own; exec {' '.join(GPUWORK_LINE)}"


@pytest.fixture
def store(crun: None) -> Iterator[Store]:
    with empty_store() as found:
        yield found
    for path in (NEIGHBOUR, OWN):
        path.unlink(missing_ok=True)


def by_podman_in_place(container: Container, tmp_path: Path) -> Callable[[], Done]:
    good(podman("container", "checkpoint", "w"))
    return lambda: podman("container", "restore", "w")


def by_gpusnap_in_place(container: Container, tmp_path: Path) -> Callable[[], Done]:
    good(gpusnap("checkpoint", "w"))
    return lambda: gpusnap("restore", "w")


def by_an_archive(container: Container, tmp_path: Path) -> Callable[[], Done]:
    good(container.checkpoint(tmp_path / "a.tar.zst"))
    container.remove()
    return lambda: podman("container", "restore", "--import", tmp_path / "a.tar.zst")


def by_a_store(container: Container, tmp_path: Path) -> Callable[[], Done]:
    good(gpusnap("checkpoint", "w"))
    container.remove()
    return lambda: gpusnap("restore", "w")


@pytest.mark.parametrize("way", [by_podman_in_place, by_gpusnap_in_place, by_an_archive, by_a_store])
def test_the_host_s(store: Store, tmp_path: Path, way: Callable[..., Callable[[], Done]]) -> None:
    """What others have there stays as it is, with the locks of Podman; its own file comes back."""
    container = Container.start("w", options=["--ipc=host"], script=HOLDING)
    NEIGHBOUR.write_text("old")
    locks = LOCKS.stat().st_ino
    restore = way(container, tmp_path)
    NEIGHBOUR.write_text("new")
    OWN.unlink()
    if in_place := way in (by_podman_in_place, by_gpusnap_in_place):
        with OWN.open("w+") as other:
            print("another", file=other, flush=True)
            assert "/dev/shm/own open, in memory that is shared with this host" in sentence(restore())
            assert OWN.read_text() == "another\n"
        OWN.unlink()
    good(restore())
    assert (NEIGHBOUR.read_text(), LOCKS.stat().st_ino) == ("new", locks)
    container.goes_on()
    (pid,) = members(container)
    # An import makes a /dev/shm for the container alone.
    shared = HOST if in_place else shared_memory(container)
    assert [path.name for path in shared.iterdir() if path not in (NEIGHBOUR, LOCKS)] == ["own"]
    assert (shared / "own").read_text() == "mine"
    assert Path(f"/proc/{pid}/fd/5").stat().st_ino == (shared / "own").stat().st_ino


@pytest.mark.parametrize("way", ["podman", "store"])
def test_it_changes_after_the_dump(store: Store, tmp_path: Path, way: str) -> None:
    """Podman reads the container's files while it runs on: they would be newer than its memory."""
    container = Container.start("w", script=COUNTING)
    if way == "podman":
        good(container.checkpoint(tmp_path / "a.tar.zst", "--leave-running"))
    else:
        good(gpusnap("checkpoint", "--leave-running", "w"))
    container.goes_on()
    container.remove()
    if way == "podman":
        good(podman("container", "restore", "--import", tmp_path / "a.tar.zst"))
    else:
        good(gpusnap("restore", "w"))
    first = count(container)
    container.goes_on()
    until(lambda: count(container) > first + 10, "it counts on")
    assert re.findall(r"memory \d+, file \d*", container.log()) == []
    assert (shared_memory(container) / "inner/file").read_text() == "closed\n"
    # Podman keeps them again when it does not run on, and those of a checkpoint in the same place are gone.
    good(podman("container", "checkpoint", "--leave-running", "w"))
    first = count(container)
    until(lambda: count(container) > first + 10, "it counts on")
    good(podman("container", "checkpoint", "w"))
    good(podman("container", "restore", "w"))
    first = count(container)
    until(lambda: count(container) > first + 10, "it counts on")
    assert re.findall(r"memory \d+, file \d*", container.log()) == []


def test_a_file_that_shrinks(store: Store) -> None:
    """Podman reads it, logs that it became shorter, and writes it to /dev/null: nothing is lost."""
    script = (
        "(while :; do truncate -s 40M /dev/shm/a; sleep 0.02; truncate -s 1K /dev/shm/a; done) & "
        f"exec {' '.join(GPUWORK_LINE)}"
    )
    container = Container.start("w", script=script)
    for _ in range(4):
        good(gpusnap("checkpoint", "--leave-running", "w"))
    container.remove()
    good(gpusnap("restore", "w"))
    container.goes_on()


def count(container: Container) -> int:
    """What is in its file; 0 while it is being written."""
    return int((shared_memory(container) / "n").read_text() or 0)


def shared_memory(container: Container) -> Path:
    """Its /dev/shm."""
    return Path(f"/proc/{container.pid}/root/dev/shm")
