"""gpusnap checkpoint, restore, push and pull: containers, stores, archives and a registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import registryhost
import waiting
from faulty_proxy import FaultyProxy
from holding import held
from storehost import COMMAND, SETTINGS_BUT_RUNTIME, STORE, done, empty_store, gpusnap
from support import DEADLINE, Container, Done, faults, good, no_faults_after, podman, run, sentence, until

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.records import reservations

JOURNAL = Path("/run/gpusnap/journal")
ENDS_AT_DUMP = ("--tcp-established",)
"""With it, the dump ends a container with --rm, as Podman does it, instead of leaving it stopped."""
WORK = ("--mib", "24")


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """An empty one, which the settings name, gone afterwards."""
    with empty_store() as made:
        yield made


def idle(store: Store) -> bool:
    """Nobody has left anything behind in it, and nothing is in it without a name."""
    return not list((Path(store.path) / "staging").iterdir()) and all(each.name for each in store.entries())


def test_into_the_store_and_back(store: Store) -> None:
    """The store has it once, whole and named; the container goes on, and so does its second checkpoint."""
    container = Container.start("w", *WORK)
    first = done("checkpoint", "w")
    assert re.fullmatch(r"w:\d{8}-\d{6}", first["name"])
    assert first["memory"] >= 24 << 20
    assert first["new"] == first["size"]
    assert [each.name for each in store.entries()] == [first["name"]]
    assert idle(store)
    container.remove()
    assert done("restore", first["name"])["container"] == "w"
    container.goes_on()
    second = done("checkpoint", "w", "--name", "again")
    assert second["new"] < second["size"]
    container.remove()
    good(gpusnap("restore", second["digest"].partition(":")[2][:10]))
    container.goes_on()
    assert idle(store)


def test_a_store_and_an_archive_elsewhere(store: Store, tmp_path: Path) -> None:
    """oci:DIR:NAME, and FILE; this host's own store is not made. A second one runs beside the first."""
    container = Container.start("w", *WORK)
    made = done("checkpoint", "w", "--leave-running", "--to", f"oci:{tmp_path}/store:one")
    assert made["name"] == "one"
    assert done("restore", f"oci:{tmp_path}/store", "--name", "other")["container"] == "other"
    Container("other").goes_on()
    archive = tmp_path / "w.tar.zst"
    assert done("checkpoint", "w", "--to", archive)["size"] == archive.stat().st_size
    assert not STORE.exists()
    container.remove()
    good(gpusnap("restore", archive))
    container.goes_on()


def test_a_store_that_is_mounted_read_only(store: Store, tmp_path: Path) -> None:
    """A restore only reads it; a checkpoint says that it is read-only, and the container runs on."""
    place, container = tmp_path / "disk", Container.start("w", *WORK)
    place.mkdir()
    good(run("mount", "-t", "tmpfs", "-o", "size=500m,mode=700", "none", place))
    try:
        done("checkpoint", "w", "--to", f"oci:{place}/store:one")
        container.remove()
        good(run("mount", "-o", "remount,ro", place))
        done("restore", f"oci:{place}/store:one")
        container = Container("w")
        container.goes_on()
        assert (
            f"the store {place}/store is read-only; remount it for writing, or name another store with "
            in (sentence(gpusnap("checkpoint", "w", "--to", f"oci:{place}/store:two")))
        )
        container.goes_on()
    finally:
        good(run("umount", place))


def test_without_a_gpu(store: Store) -> None:
    """All of it is in the records."""
    script = "while :; do sleep 1; done"
    good(podman("run", "-d", "--name", "plain", "localhost/base", "sh", "-c", script))
    made = done("checkpoint", "plain")
    assert made["memory"] == 0
    good(podman("rm", "plain"))
    good(gpusnap("restore", made["name"]))
    assert Container("plain").inspect()["State"]["Status"] == "running"


def used() -> list[int]:
    """The minors of the GPUs whose memory somebody uses."""
    found = json.loads(good(gpusnap("gpus", "--json")))["gpus"]
    return [gpu["minor"] for gpu in found if gpu["memory_used"]]


def test_a_missing_chunk(store: Store) -> None:
    """It is named, and no container is left."""
    container = Container.start("w", *WORK)
    made = done("checkpoint", "w")
    container.remove()
    found = json.loads(good(gpusnap("inspect", "--json", made["name"])))
    blob = found["processes"][0]["regions"][0]["chunks"][3][-1]
    (STORE / "blobs/sha256" / blob.removeprefix("sha256:")).unlink()
    assert blob.removeprefix("sha256:") in sentence(gpusnap("restore", made["name"]))
    assert good(podman("ps", "--all", "--quiet")) == ""


def test_what_cannot_be_checkpointed(store: Store) -> None:
    """Each is told from the others, by its sentence and its exit code."""
    missing = gpusnap("checkpoint", "nobody")
    assert missing.code == 3
    assert "there is no container nobody" in sentence(missing)
    good(podman("run", "-d", "--name", "plain", "localhost/base", "sleep", "100", runtime="crun"))
    assert "uses the runtime crun" in sentence(gpusnap("checkpoint", "plain"))
    good(podman("stop", "--time", "0", "plain"))
    assert "is not running: it is exited" in sentence(gpusnap("checkpoint", "plain"))
    assert gpusnap("restore", "nothing").code == 3


def started(pid: int) -> list[int]:
    """The children of a process, by PID."""
    found: list[int] = []
    for names in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # that thread has ended
            found += map(int, names.read_text().split())
    return found


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to those of the processes that are there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("after", ["ordered", "staged"])
def test_killed(store: Store, tmp_path: Path, after: str) -> None:
    """gpusnap dies (SIGKILL); Podman and the runtime end what they do, and the container can come back."""
    container = Container.start("w", *WORK)
    orders = Path("/run/gpusnap/orders") / f"{container.id}.json"

    def reached() -> bool:
        if after == "ordered":  # and Podman is there to obey
            return orders.exists() and any(proc.comm(pid) == "podman" for pid in started(child.pid))
        return len(list((STORE / "staging").iterdir())) > 1 if (STORE / "staging").exists() else False

    with held(tmp_path, "crun", "checkpoint", SETTINGS_BUT_RUNTIME):  # so that it is not over before
        child = subprocess.Popen(
            [COMMAND, "checkpoint", "w"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(reached, after)
        child.send_signal(signal.SIGKILL)
        child.wait()
    until(lambda: container.inspect()["State"]["Status"] == "exited", "the end of the container")
    until(lambda: not run("pgrep", "-x", "podman").out, "the end of Podman")
    good(podman("container", "restore", "w"))
    container.goes_on()


def test_killed_on_the_way_to_another_store(store: Store, tmp_path: Path) -> None:
    """recover has the command that continues the container from there, and gc and rm keep its memory.

    This host's store has memory of an earlier checkpoint of it, which does not help.
    """
    container, other = Container.start("w", *WORK), Store(tmp_path / "other")
    good(podman("container", "checkpoint", "w"))
    good(podman("container", "restore", "w"))
    with held(tmp_path, "crun", "checkpoint", SETTINGS_BUT_RUNTIME) as crun:
        child = subprocess.Popen(
            [COMMAND, "checkpoint", "w", "--to", f"oci:{other.path}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until(crun.met, "the runtime")
        child.kill()
        child.wait()
    until(lambda: container.inspect()["State"]["Status"] == "exited", "the end of the container")
    until(lambda: not run("pgrep", "-x", "podman").out, "the end of Podman")
    command = f"GPUSNAP_STORE={other.path} podman container restore w"
    for words in (["--list"], [], [], ["w"]):
        told = gpusnap("recover", *words)
        assert (told.code, told.err.count(f"; to continue it: {command}\n")) == (0, 1), told.err
        assert "nothing to recover" not in told.err
    assert "GPS-609" in podman("container", "restore", "w").err
    assert f"to continue w: {command}" in good(gpusnap("gc", f"oci:{other.path}"))
    (entry,) = other.entries()
    assert "GPS-706" in gpusnap("rm", f"oci:{other.path}:{entry.descriptor.digest}").err
    good(run("env", *command.split(" ")))
    container.goes_on()
    assert "podman container restore" not in gpusnap("recover").err
    assert not list(Path("/run/gpusnap/orders").glob("*.json"))


@contextmanager
def podman_killed(
    container: Container, folder: Path, *, stopped: bool, dumped: bool
) -> Iterator[subprocess.Popen[str]]:
    """Kill Podman before the dump, or when it is done; the command is stopped then, or has ended."""
    with held(folder, "crun", "checkpoint", SETTINGS_BUT_RUNTIME, after=dumped) as crun:
        child = subprocess.Popen(
            [COMMAND, "checkpoint", container.name],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        until(crun.met, "the runtime")
        runtime = crun.caller
        (engine,) = [pid for pid in started(child.pid) if proc.comm(pid) == "podman"]
        if stopped:
            child.send_signal(signal.SIGSTOP)
        os.kill(engine, signal.SIGKILL)
        if not stopped:
            assert "was killed by SIGKILL" in child.communicate(timeout=DEADLINE)[1]
    until(lambda: not proc.is_running(runtime), "the end of the runtime")
    yield child


@pytest.mark.parametrize("stopped", [True, False])
def test_podman_alone_is_killed_before_the_dump_ends(store: Store, tmp_path: Path, stopped: bool) -> None:
    """The container runs on: nobody would export its checkpoint."""
    container = Container.start("w", *WORK)
    with podman_killed(container, tmp_path, stopped=stopped, dumped=False) as child:
        container.unharmed()
        if stopped:
            child.send_signal(signal.SIGCONT)
            assert "was killed by SIGKILL" in child.communicate(timeout=DEADLINE)[1]
    good(gpusnap("recover"))  # the order, which a command that has ended left to its runtime
    assert store.entries() == ()
    assert list((STORE / "staging").iterdir()) == []
    assert not list(Path("/run/gpusnap/orders").glob("*.json"))
    good(gpusnap("checkpoint", "w"))
    good(gpusnap("restore", "w"))
    container.goes_on()


@pytest.mark.parametrize("stopped", [True, False])
def test_podman_alone_is_killed(store: Store, tmp_path: Path, stopped: bool) -> None:
    """The runtime completes the checkpoint, for a command that is stopped until then, or has ended."""
    container = Container.start("w", *WORK)
    with podman_killed(container, tmp_path, stopped=stopped, dumped=True) as child:
        pass
    until(lambda: container.inspect()["State"]["Status"] == "exited", "the end of the container")
    if stopped:
        assert len(store.list_handed_over()) == 1
        child.send_signal(signal.SIGCONT)
        assert "podman container restore w restores it" in child.communicate(timeout=DEADLINE)[1]
    assert [each.name for each in store.entries()] == [""]
    assert list((STORE / "staging").iterdir()) == []
    good(podman("container", "restore", "w"))
    container.goes_on()
    good(gpusnap("recover"))
    assert not list(Path("/run/gpusnap/orders").glob("*.json"))


@pytest.mark.parametrize("recover", [True, False])
@pytest.mark.parametrize("options", [[], ["--rm"]])
def test_killed_before_it_takes_the_memory(store: Store, options: list[str], recover: bool) -> None:
    """It has ordered the memory, and dies when Podman has ended: gc spares the memory, a restore finds it."""
    container = Container.start("w", *WORK, options=options)
    with stopped_checkpoint(container, *ENDS_AT_DUMP):
        (staging,) = store.list_handed_over()
        good(gpusnap("recover"))  # of a command that lives: nothing
        assert list(store.list_handed_over()) == [staging]
    good(gpusnap("gc"))
    assert list(store.list_handed_over()) == [staging]
    assert store.entries() == ()
    if not options:
        assert "podman container restore w" in gpusnap("recover", "--list").err
    if recover:
        assert "  the memory of its checkpoint is in the store " in good(gpusnap("recover"))
        said = gpusnap("recover").err
        assert said.count("podman container restore --import /") == (1 if options else 0)
        assert "nothing to recover" not in said
        good(gpusnap("gc"))
        assert [each.name for each in store.entries()] == [""]
    archives = list((STORE / "staging").glob("*/podman.tar"))
    good(podman("container", "restore", *(["--import", str(archives[0])] if options else ["w"])))
    container.goes_on()
    assert [each.name for each in store.entries()] == [""]
    assert store.list_handed_over() == {}
    good(gpusnap("checkpoint", "w"))
    for each in archives:
        shutil.rmtree(each.parent)
    assert list((STORE / "staging").iterdir()) == []


def test_the_only_memory_of_an_export(store: Store) -> None:
    """With --rm, only Podman's export says who needs the memory: it is found by name, and rm refuses."""
    container = Container.start("w", *WORK, options=["--rm"])
    container_id = container.id
    with stopped_checkpoint(container, *ENDS_AT_DUMP):
        pass
    removed(container)
    assert "; gpusnap recover names it" in gpusnap("restore", "w").err
    assert "the memory of the checkpoint of " in good(gpusnap("gc"))
    good(gpusnap("recover"))
    (entry,) = store.entries()
    (archive,) = (STORE / "staging").glob("*/podman.tar")
    command = f"podman container restore --import {archive}"
    for words in ((), ("w",), ("w", "--list"), (container_id,)):
        said = gpusnap("recover", *words)
        assert (command in said.err, "without a name" in said.err) == (True, False), said
        good(said)
    refused = gpusnap("rm", "--gc", entry.descriptor.digest).err
    assert f"the export of w, {archive}, needs {entry.descriptor.digest}" in refused
    assert f"; {command} continues it" in refused
    assert json.loads(good(gpusnap("gc", "--json")))["neededBy"][0]["container"] == container_id
    assert [each.name for each in store.entries()] == [""]
    good(podman("container", "restore", "--import", str(archive)))
    container.goes_on()
    shutil.rmtree(archive.parent)
    good(gpusnap("rm", "--gc", entry.descriptor.digest))


def test_restore_of_an_earlier_checkpoint(store: Store) -> None:
    """The command for a later one was killed: a note says so."""
    container = Container.start("w", *WORK, options=["--rm"])
    good(gpusnap("checkpoint", "w", "--leave-running"))
    with stopped_checkpoint(container, *ENDS_AT_DUMP):
        pass
    removed(container)
    said = gpusnap("restore", "w")
    good(said)
    assert "a later checkpoint of w was not completed: gpusnap recover w names it" in said.err
    assert "podman container restore --import " in gpusnap("recover", "w").err
    for archive in (STORE / "staging").glob("*/podman.tar"):
        shutil.rmtree(archive.parent)


@pytest.mark.parametrize("kind", ["store", "file"])
def test_another_place_after_a_reboot(store: Store, tmp_path: Path, kind: str) -> None:
    """With --rm, and without what was in /run, recover finds the store or the archive, and no more later."""
    container = Container.start("w", *WORK, options=["--rm"])
    notes = Path("/var/lib/gpusnap/in-progress")
    target = f"oci:{tmp_path}/other" if kind == "store" else f"{tmp_path}/w.tar"
    with stopped_checkpoint(container, *ENDS_AT_DUMP, "--to", target):
        assert len(list(notes.iterdir())) == 1
    shutil.rmtree("/run/gpusnap/orders")
    said = gpusnap("recover")
    good(said)
    if kind == "store":
        assert f"  the memory of its checkpoint is in the store {tmp_path}/other\n" in said.out
        (archive,) = (tmp_path / "other/staging").glob("*/podman.tar")
        good(
            run(
                "env",
                f"GPUSNAP_STORE={tmp_path}/other",
                "podman",
                "container",
                "restore",
                "--import",
                archive,
            )
        )
        shutil.rmtree(archive.parent)
    else:
        (archive,) = tmp_path.glob(".w.tar.*")
        assert f"mv {archive} {target} gives it its name" in said.err
        archive.rename(target)
        good(gpusnap("restore", target))
    container.goes_on()
    good(gpusnap("recover"))
    assert list(notes.iterdir()) == []


@pytest.mark.parametrize("listed", ["stopped", "running"])
def test_podman_is_killed_twice(store: Store, listed: str) -> None:
    """As the command and as the clean-up: it does not notice that the container has ended, until recover.

    As the command, it removes what conmon tells of the end before it records that.
    """
    container = Container.start("w", *WORK)

    def list_cleanups() -> list[int]:
        words = {"cleanup", container.id}
        return [pid for pid in proc.pids() if proc.comm(pid) == "podman" and words <= {*proc.command(pid)}]

    with waiting.Process(
        ["podman", "container", "checkpoint", "w"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # With a stopped process in it, the kernel may send SIGHUP to this whole process group (setpgid(2)).
        start_new_session=True,
    ) as child:

        def checkpoints(pid: int) -> bool:  # Podman asks its runtime for its version and for the state first
            return proc.comm(pid) == "gpusnap-runtime" and "checkpoint" in proc.command(pid)

        until(lambda: any(map(checkpoints, started(child.pid))), "the runtime")
        child.send_signal(signal.SIGSTOP)  # it has the container's lock, for which the clean-up waits
        until(list_cleanups, "the clean-up")
        for pid in list_cleanups():
            os.kill(pid, signal.SIGKILL)
        if listed == "running":
            (Path("/run/libpod/exits") / container.id).unlink()
        child.kill()
    assert container.inspect()["State"]["Status"] == listed
    assert "Podman was killed before it cleaned up" in good(gpusnap("recover", "--list"))
    assert "is running or paused" in podman("container", "restore", "w").err
    assert "checkpoint: podman container restore w" in good(gpusnap("recover", "w"))
    assert "Podman was killed before it cleaned up" not in good(gpusnap("recover", "--list"))
    good(podman("container", "restore", "w"))
    container.goes_on()


@contextmanager
def stopped_checkpoint(container: Container, *options: str) -> Iterator[None]:
    """In the block, Podman and its runtime have ended; the command was stopped, and is killed after it."""
    orders = Path("/run/gpusnap/orders") / f"{container.id}.json"
    child = subprocess.Popen(
        [COMMAND, "checkpoint", "w", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: orders.exists() and "podman" in map(proc.comm, started(child.pid)), "Podman")
        child.send_signal(signal.SIGSTOP)

        def has_podman() -> bool:
            return "podman" in [proc.comm(pid) for pid in started(child.pid) if proc.is_running(pid)]

        until(lambda: not has_podman(), "the end of Podman")
        yield
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def registry() -> Iterator[str]:
    """Host and port of an empty one."""
    with registryhost.running() as found:
        yield found.host


def empty(store: Store) -> None:
    shutil.rmtree(store.path)


def test_through_a_registry(store: Store, registry: str) -> None:
    """Into a registry and back: what an empty store lacks is fetched while CRIU restores, and kept.

    With every tenth connection dropped and every seventh request answered by an error.
    """
    container = Container.start("w", *WORK, gpus=["0"])
    with FaultyProxy(registry, drop=10, fail=7) as proxy:
        ref = f"{proxy.host}/team/w:v1"
        made = done("checkpoint", "w", "--to", ref, "--plain-http")
        assert made["pushed"]["reference"] == ref
        assert sorted(each.name for each in store.entries()) == sorted((ref, made["name"]))
        assert store.find("w").descriptor.digest == made["digest"]
        assert made["pushed"]["bytes"] >= 24 << 20
        container.remove()
        empty(store)
        restored = done("restore", f"http://{ref}", "--gpu-map", "0=1")
        assert proxy.dropped > 3 < proxy.failed
    assert (restored["digest"], restored["kept"]) == (made["digest"], ref)
    container.goes_on()
    assert used() == [1]
    assert [each.name for each in store.entries()] == [ref]
    assert idle(store)
    container.remove()
    good(gpusnap("restore", f"oci:{STORE}:{ref}"))
    container.goes_on()


def test_only_what_is_new(store: Store, registry: str) -> None:
    """A push of the second checkpoint, and a pull beside the first, move little."""
    Container.start("w", *WORK, "--slices", "24", "--touch", "1")
    ref = f"http://{registry}/team/w"
    first = done("checkpoint", "w", "--leave-running", "--to", f"{ref}:v1")
    second = done("checkpoint", "w", "--to", f"{ref}:v2")
    # The workload changes 1 MiB with each tick, and has some of them between the two.
    assert first["new"] > 24 << 20 > 2 * second["new"]
    assert second["pushed"]["bytes"] < 12 << 20
    mounted = done("push", second["name"], f"http://{registry}/other/w:v2")
    assert mounted["mounted"] > 10
    empty(store)
    good(gpusnap("pull", f"{ref}:v1"))
    pulled = done("pull", f"{ref}:v2")
    assert pulled["digest"] == second["digest"]
    assert pulled["bytes"] < 12 << 20 < pulled["skippedBytes"]


def test_archives_and_a_registry(store: Store, registry: str, tmp_path: Path) -> None:
    """push ARCHIVE, pull -o, and podman container restore --import meet; nothing is kept in the store."""
    container = Container.start("w", *WORK)
    archive, again = tmp_path / "w.tar", tmp_path / "again.tar.zst"
    good(container.checkpoint(archive, "--compress", "none"))
    container.remove()
    ref = f"http://{registry}/team/w:v1"
    assert done("push", archive, ref)["bytes"] >= 24 << 20
    assert done("pull", ref, "-o", again)["store"] == ""
    assert store.entries() == ()
    Container.restore("w", again).goes_on()


def test_an_archive_that_is_copied_into_a_store(store: Store, tmp_path: Path) -> None:
    """The checkpoint is restored from there, as any other."""
    container = Container.start("w", options=["--cgroups=split"])
    good(gpusnap("checkpoint", "w", "--to", tmp_path / "w.tar"))
    container.remove()
    good(gpusnap("copy", tmp_path / "w.tar", "w:copied"))
    (tmp_path / "w.tar").unlink()
    good(gpusnap("restore", "w:copied"))
    container.goes_on()


def test_a_self_contained_archive_of_a_store_s(store: Store, registry: str, tmp_path: Path) -> None:
    """What a store had is in the archive that `pull -o` writes, CRIU's images, too."""
    container = Container.start("w", *WORK)
    ref = f"http://{registry}/team/w:v1"
    good(gpusnap("checkpoint", "w", "--to", ref))
    container.remove()
    empty(store)
    good(gpusnap("pull", ref, "-o", tmp_path / "w.tar"))
    Container.restore("w", tmp_path / "w.tar").goes_on()


def test_an_image_for_podman(store: Store, registry: str) -> None:
    """push --format podman: `podman container restore IMAGE` brings it back, without the store."""
    container = Container.start("w", *WORK)
    made = done("checkpoint", "w")
    container.remove()
    done("push", made["name"], f"http://{registry}/team/w:image", "--format", "podman")
    empty(store)
    image = f"{registry}/team/w:image"
    good(podman("pull", "--quiet", "--tls-verify=false", image))
    good(podman("container", "restore", image))
    container.goes_on()
    container.remove()
    good(podman("rmi", image))


@pytest.mark.parametrize(
    ("operation", "number"),
    [("checkpoint", signal.SIGINT), ("checkpoint", signal.SIGTERM), ("restore", signal.SIGINT)],
)
def test_interrupted(store: Store, operation: str, number: signal.Signals) -> None:
    """A signal reaches the runtime, which undoes what it did: the container runs on, or none is left."""
    container = Container.start("w", *WORK)
    words = ["checkpoint", "w"]
    if operation == "restore":
        words = ["restore", done("checkpoint", "w")["name"]]
        container.remove()
    faults(f"{operation} hang=600000")
    child = subprocess.Popen([COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # More than its lock: a signal before that ends the runtime, which has done nothing yet.
    until(lambda: {path.suffix for path in JOURNAL.glob("*")} - {".lock"}, "something to undo")
    child.send_signal(number)
    with no_faults_after(4.0):  # by when it has come to the runtime: nobody sees that
        _, said = waiting.communicate(child, DEADLINE)
    assert child.returncode == 128 + number, said
    assert number.name in said
    assert not list(JOURNAL.glob("*"))
    if operation == "checkpoint":
        container.unharmed()
    else:
        assert good(podman("ps", "--all", "--quiet")) == ""
        good(gpusnap(*words))
        container.goes_on()
    assert idle(store)


def removed(container: Container) -> None:
    """Podman removes a container with --rm a moment after its end."""
    until(lambda: run("podman", "container", "exists", container.name).code == 1, "the removal")


def broken_checkpoint(to: str, *words: str) -> Done:
    """`gpusnap checkpoint` that fails when Podman has exported everything."""
    broken = (
        "gpusnap.checkpoints.formats.podman.take_in"
        if to == "store"
        else "gpusnap.operations.checkpointing.archive.put"
    )
    module, _, name = broken.rpartition(".")
    script = (
        f"import sys, {module} as broken\n"
        "def fails(*_, **__): raise OSError(28, 'full')\n"
        f"broken.{name} = fails\n"
        f"sys.argv = {['gpusnap', 'checkpoint', *words]!r}\n"
        "from gpusnap.cli.main import main\n"
        "sys.exit(main())\n"
    )
    return run(sys.executable, "-B", "-c", script)


def frozen(pid: int) -> bool:
    """Whether a process is in a frozen control group (version 2)."""
    path = next(
        line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0:")
    )
    return (
        "frozen 1" in (Path("/sys/fs/cgroup") / path.split(":")[2].lstrip("/") / "cgroup.events").read_text()
    )


def goes_on_unharmed(container: Container) -> None:
    """It runs on after a checkpoint that failed, and nothing of that is left."""
    container.goes_on()
    assert json.loads(good(gpusnap("recover", "--list", "--json"))) == []
    assert os.listdir("/run/gpusnap/stage") == []
    if STORE.exists():
        assert list((STORE / "staging").iterdir()) == []
        assert Store(STORE).entries() == ()


@pytest.mark.parametrize("ends_at_dump", [True, False])
@pytest.mark.parametrize("to", ["store", "file"])
def test_a_failure_with_rm(store: Store, tmp_path: Path, to: str, ends_at_dump: bool) -> None:
    """The container was left stopped, and runs on; or Podman's export of it stays, and brings it back."""
    container = Container.start("w", *WORK, options=["--rm"])
    words = ["w", *(["--to", str(tmp_path / "w.tar.zst")] if to == "file" else [])]
    said = sentence(broken_checkpoint(to, *words, *(ENDS_AT_DUMP if ends_at_dump else ())))
    if not ends_at_dump:
        assert "w continues to run" in said
        goes_on_unharmed(container)
        assert list(tmp_path.iterdir()) == []
        return
    (archive,) = re.findall(r"podman container restore --import (\S+) restores it", said)
    removed(container)
    if to == "store":
        good(gpusnap("gc"))
    good(podman("container", "restore", "--import", archive))
    container.goes_on()


def test_a_failure_of_one_that_podman_does_not_import(store: Store) -> None:
    """The message has commands that restore a container of Quadlet's all the same."""
    label = ("--label", "PODMAN_SYSTEMD_UNIT=w.service")
    container = Container.start("w", *WORK, options=["--rm", "--cgroups=split", *label])
    said = sentence(broken_checkpoint("store", "w", *ENDS_AT_DUMP))
    (command,) = re.findall(r"(gpusnap copy \S+ w:kept && gpusnap restore w:kept) restores it", said)
    removed(container)
    (archive,) = re.findall(r"w: gpusnap restore (\S+) restores it", gpusnap("recover").err)
    assert f"gpusnap copy {archive} NAME" in sentence(gpusnap("restore", archive))
    good(run("sh", "-c", command))
    container.goes_on()


@contextmanager
def interrupted_export(
    container: Container, *options: str
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`gpusnap checkpoint`, and the Podman that is stopped in the midst of its export."""
    container.fill_shared_memory(250)
    child = subprocess.Popen(
        [COMMAND, "checkpoint", container.name, *options], stderr=subprocess.PIPE, text=True
    )

    def exporting() -> bool:
        podmans[:] = [pid for pid in started(child.pid) if proc.comm(pid) == "podman"]
        signal_all(podmans, signal.SIGSTOP)
        archives = (STORE / "staging").glob("*/podman.tar")
        if any(each.stat().st_size > 1 << 20 for each in archives):
            return True
        signal_all(podmans, signal.SIGCONT)
        return child.poll() is not None

    podmans: list[int] = []
    try:
        until(exporting, "the export")
        yield child, podmans
    finally:
        signal_all(podmans, signal.SIGCONT)


def reserved_gpu_memory() -> int:
    """Bytes, on all GPUs."""
    return sum(size for name, size in reservations.read_reserved().items() if name.startswith("GPU-"))


def guardians(command: int) -> list[int]:
    """The processes that would notice that a command is killed."""
    return [pid for pid in started(command) if "gpusnap-guardian" in proc.command(pid)]


def test_the_command_is_killed_while_podman_exports(store: Store) -> None:
    """With --rm, the container runs on at once, although Podman exports to the end."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "300m"])
    init = container.pid
    with interrupted_export(container) as (child, podmans):
        assert len(guardians(child.pid)) == 1
        child.kill()
        until(lambda: not list(JOURNAL.glob(f"{container.id}@*.json")), "its guardian lets it run on")
        assert proc.is_running(init)
        assert not frozen(init)
    waiting.communicate(child, DEADLINE)
    until(lambda: not any(map(proc.is_running, podmans)), "the end of Podman")
    good(gpusnap("recover"))
    good(gpusnap("gc"))
    goes_on_unharmed(container)


@pytest.mark.parametrize("ends_at_dump", [True, False])
def test_ctrl_c_while_podman_exports(store: Store, ends_at_dump: bool) -> None:
    """With --rm, the container runs on; if its dump has ended it, what Podman exports to the end stays."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "300m"])
    with interrupted_export(container, *(ENDS_AT_DUMP if ends_at_dump else ())) as (child, _):
        child.send_signal(signal.SIGINT)
    said = waiting.communicate(child, DEADLINE)[1]
    assert child.returncode == 130, said
    if not ends_at_dump:
        goes_on_unharmed(container)
        return
    (archive,) = re.findall(r"podman container restore --import (\S+) restores it", said)
    removed(container)
    good(podman("container", "restore", "--import", archive))
    container.goes_on()


def test_killed_with_the_command_while_it_is_left_stopped(store: Store) -> None:
    """Such as by the kernel, out of memory: `gpusnap recover` keeps the memory of what was exported."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "300m"])
    init = container.pid
    with interrupted_export(container) as (child, podmans):
        child.kill()
        os.kill(init, signal.SIGKILL)
    waiting.communicate(child, DEADLINE)
    removed(container)
    until(lambda: not any(map(proc.is_running, podmans)), "the end of Podman")
    good(gpusnap("recover"))
    (archive,) = (STORE / "staging").glob("*/podman.tar")
    good(podman("container", "restore", "--import", archive))
    container.goes_on()


@pytest.mark.parametrize("recover", [False, True])
def test_killed_by_others_while_it_is_left_stopped(store: Store, recover: bool) -> None:
    """With --rm, Podman then removes it: what Podman exports to the end stays, with its memory."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "300m"])
    init = container.pid
    with interrupted_export(container) as (child, _):
        os.kill(init, signal.SIGKILL)
        child.send_signal(signal.SIGINT)
    said = waiting.communicate(child, DEADLINE)[1]
    assert child.returncode == 130, said
    (archive,) = re.findall(r"podman container restore --import (\S+) restores it", said)
    removed(container)
    if recover:
        good(gpusnap("recover"))
    good(podman("container", "restore", "--import", archive))
    container.goes_on()
    assert os.listdir("/run/gpusnap/stage") == []


@pytest.mark.parametrize("whom", ["podman", "both", "all"])
def test_podman_is_killed_while_it_exports(store: Store, whom: str) -> None:
    """With --rm, it is left stopped until then: the command lets it run on, its guardian, or `recover`."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "300m"])
    init = container.pid
    with interrupted_export(container) as (child, podmans):
        assert "gpusnap is working on it" in gpusnap("recover", "--list").out
        assert frozen(init), "no process of it runs after the dump"
        assert reserved_gpu_memory(), "it may have to run on"
        if whom == "all":
            signal_all(guardians(child.pid), signal.SIGKILL)
        if whom != "podman":
            child.kill()
        signal_all(podmans, signal.SIGKILL)
    said = waiting.communicate(child, DEADLINE)[1]
    if whom == "both":
        until(lambda: not list(JOURNAL.glob(f"{container.id}@*.json")), "its guardian lets it run on")
    if whom == "all":
        assert reserved_gpu_memory()
        assert f"w ({container.id[:12]})  running: " in good(gpusnap("recover"))
    assert not reserved_gpu_memory()
    if whom != "podman":
        good(gpusnap("gc"))  # what Podman has exported
    else:
        assert "podman container checkpoint was killed by SIGKILL" in said
        assert "w continues to run" in said
    goes_on_unharmed(container)
    good(gpusnap("checkpoint", "w"))
    removed(container)
    assert os.listdir("/run/gpusnap/stage") == []
    good(gpusnap("restore", "w"))
    container.goes_on()


@pytest.mark.parametrize("whom", ["runtime", "command", "both"])
def test_killed_after_the_dump_of_one_with_rm(store: Store, tmp_path: Path, whom: str) -> None:
    """Before its memory is handed over, too: it runs on; the runtime, the command or its guardian lets it."""
    container = Container.start("w", *WORK, options=["--rm"])
    with held(tmp_path, "crun", "checkpoint", SETTINGS_BUT_RUNTIME, after=True) as runtime:
        child = subprocess.Popen([COMMAND, "checkpoint", "w"], stderr=subprocess.PIPE, text=True)
        until(runtime.met, "the dump")
        if whom != "runtime":
            child.kill()
        if whom != "command":
            os.kill(runtime.caller, signal.SIGKILL)
        runtime.let_go()
        said = waiting.communicate(child, DEADLINE)[1]
        until(lambda: "podman" not in map(proc.comm, started(1)), "the end of Podman")
    if whom == "runtime":
        assert "w continues to run" in said
    else:
        until(lambda: not list(JOURNAL.glob(f"{container.id}@*.json")), "who lives lets it run on")
        good(gpusnap("recover"))
        good(gpusnap("gc"))
    goes_on_unharmed(container)


def test_another_container_depends_on_one_with_rm(store: Store) -> None:
    """Podman does not remove it then: it is ended, as by its dump."""
    container = Container.start("w", *WORK, options=["--rm"])
    good(podman("run", "-d", "--name", "other", "--requires", "w", "localhost/base", "sleep", "1000"))
    good(gpusnap("checkpoint", "w"))
    assert podman("inspect", "--format", "{{.State.Status}}", "w").out.strip() in ("exited", "stopped", "")
    good(podman("rm", "--force", "--time", "0", "other"))
    podman("rm", "--force", "--time", "0", "w")
    assert os.listdir("/run/gpusnap/stage") == []
    good(gpusnap("restore", "w"))
    container.goes_on()


def test_no_room(store: Store) -> None:
    """Refused before anything is done: what is in /dev/shm goes into the archive, and into the records."""
    container = Container.start("w", *WORK, options=["--rm", "--shm-size", "100m"])
    good(podman("exec", "w", "dd", "if=/dev/zero", "of=/dev/shm/x", "bs=1M", "count=60"))
    STORE.mkdir()
    good(run("mount", "-t", "tmpfs", "-o", "size=110m,mode=700", "none", STORE))
    try:
        assert "needs up to" in sentence(gpusnap("checkpoint", "w"))
    finally:
        good(run("umount", STORE))
    container.unharmed()


def test_two_at_once(store: Store, tmp_path: Path) -> None:
    """One of them does it as it was told, the other one is refused, or finds the container as it is after."""
    container = Container.start("w", *WORK).id
    archive = tmp_path / "a.tar"
    places = [["--to", str(archive)], ["--name", "x"]]
    words = [COMMAND, "checkpoint", "w", "--leave-running"]
    children = [
        subprocess.Popen([*words, *place], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for place in places
    ]
    errors = [waiting.communicate(child, 2 * DEADLINE)[1] for child in children]
    assert 0 in [child.returncode for child in children]
    for child, said in zip(children, errors, strict=True):
        assert child.returncode == 0 or "another gpusnap checkpoint, suspend or resume of" in said, said
    if children[0].returncode == 0:
        good(podman("rm", "--force", "--time", "0", "w"))
        shutil.rmtree(STORE, ignore_errors=True)
        good(gpusnap("restore", archive))
        Container("w").goes_on()
    assert not list(Path("/run/gpusnap/orders").glob(f"{container}.*"))
