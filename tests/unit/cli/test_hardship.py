"""Full disks, killed commands and commands at the same time: nothing is lost, and the same command goes on.

Whole command lines, on real small stores and a registry on loopback.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import CHUNK, blob_path, keep, noise
from criu_images import INVENTORY
from fake_podman import FakePodman
from fake_registry import FakeRegistry, Say
from fakes import POISON
from kept_checkpoints import an_archive
from oci_checkpoints import stagings, whole
from oci_regions import text

from gpusnap.cli import exit_codes
from gpusnap.cli import main as cli
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.store.store import Store
from gpusnap.operations import disk_space
from gpusnap.operations.checkpointing import places
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.shim import overrides

ROOT = Path(__file__).parents[3]
# Of a push or a pull, see gpusnap.oci.registry.copy.
CONNECTIONS = 8
Run = Callable[..., tuple[int, str]]
REF = "team/app:v1"
RECORDS = {"config.dump": b'{"name": "w"}', "checkpoint/inventory.img": INVENTORY, "checkpoint": None}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this host's store shall be."""
    path = tmp_path / "store"
    mine = Settings(store=settings_file.Store(path=str(path)))
    monkeypatch.setattr(settings_file, "load", lambda: mine)
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    monkeypatch.setattr(os, "fsync", lambda _: None)  # the host does not crash here
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    (tmp_path / "auth.json").write_text("{}")
    return path


@pytest.fixture
def gpusnap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; its exit code, and what it says of it or against it."""

    def run(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpusnap", *map(str, words)])
        code = cli.main()
        said = capsys.readouterr()
        assert not [each for each in POISON if each in said.err.lower()]
        assert code == exit_codes.DONE or said.err.startswith("gpusnap: ")
        return code, said.out + said.err

    return run


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found
    assert found.wrong == []


def ref(registry: FakeRegistry, rest: str = REF) -> str:
    return f"http://{registry.host}/{rest}"


def a_checkpoint(store: Store, *names: str, seed: int = 0, chunks: int = 8) -> Descriptor:
    """One with every kind of blob."""
    region = noise(chunks, seed) + bytearray(text(2 * CHUNK, seed))
    return keep(store, region, names=names, records=RECORDS, rootfs={"etc/motd": b"hello"})


def check_whole(store: Store, *names: str) -> None:
    """It has these names, all that they stand for, and no writer's leavings."""
    assert set(whole(store)) == set(names)
    assert stagings(store) == []


# Full disks


def free_bytes(path: Path) -> int:
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def as_it_fills(disk: Path, step: int, work: Callable[[int], bool]) -> None:
    """Do some work with more and more room on a disk, until there is enough and it succeeds."""
    filler, everything = disk / "filler", free_bytes(disk)
    for room in range(0, everything, step):
        filler.write_bytes(bytes(max(0, free_bytes(disk) - room)))
        done = work(room)
        filler.unlink()
        if done:
            assert room, "it takes room"
            return
    raise AssertionError("it does not fit")


def refused(disk: Path, outcome: tuple[int, str]) -> bool:
    """Whether it failed for want of room, which the sentence says, and where, and what to do."""
    code, said = outcome
    if code == exit_codes.DONE:
        return False
    assert code == exit_codes.FAILED
    assert str(disk) in said or "no space left on device" in said.lower(), said
    assert said.count("\n") == 1
    assert (
        ("is full" in said and "free some space" in said) or "nothing is lost" in said or "Podman" in said
    ), said
    return True


PODMAN_FAILS = """\
[ "$2" != checkpoint ] || cp $F/archive "$4" || {
    rm -f "$4"; echo "Error: writing the archive: No space left on device" >&2; exit 125; }
"""


@pytest.mark.parametrize("to", ["store", "file"])
def test_a_checkpoint_without_room(
    gpusnap: Run, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Where Podman fails the container runs on, and else Podman has it; what was kept before is whole."""
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.exports(an_archive(tmp_path))
    fake.first(PODMAN_FAILS)
    # Others fill the disk after it was looked at.
    monkeypatch.setattr("gpusnap.operations.disk_space.check", lambda *_, **__: None)
    store = Store(small_disk / "store")
    a_checkpoint(store, "before")
    file = small_disk / "w.tar"
    seen = set()

    def attempt(_: int) -> bool:
        fake.has()
        outcome = gpusnap("checkpoint", "w", "--to", file if to == "file" else f"oci:{store.path}:now")
        if not refused(small_disk, outcome):
            return True
        seen.add(fake.status())
        assert (fake.status() == "running") != ("podman container restore w" in outcome[1])
        check_whole(store, "before")
        assert {each.name for each in small_disk.iterdir()} == {"store", "filler"}
        return False

    as_it_fills(small_disk, 32 << 10, attempt)
    assert "running" in seen
    check_whole(store, "before", *["now"] * (to == "store"))
    assert gpusnap("verify", f"oci:{store.path}", "--all")[0] == exit_codes.DONE


def test_a_push_without_room(gpusnap: Run, small_disk: Path, registry: FakeRegistry, tmp_path: Path) -> None:
    """Of an archive: it is taken apart in this host's store, which is as it was afterwards."""
    store = Store(small_disk / "store")
    tmp_path.joinpath("store").symlink_to(store.path)
    a_checkpoint(store, "before")
    archive = an_archive(tmp_path)

    def attempt(_: int) -> bool:
        outcome = gpusnap("push", archive, ref(registry))
        check_whole(store, "before")
        assert not refused(small_disk, outcome) or not registry.manifests
        return outcome[0] == exit_codes.DONE

    as_it_fills(small_disk, 16 << 10, attempt)
    assert gpusnap("verify", ref(registry), "--deep")[0] == exit_codes.DONE


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for room first, as where somebody else fills the disk meanwhile."""
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 1 << 60)


@pytest.mark.usefixtures("unchecked")
def test_a_pull_without_room(gpusnap: Run, small_disk: Path, registry: FakeRegistry, tmp_path: Path) -> None:
    """What has come is not asked for again once there is more."""
    source, store = Store(tmp_path / "source"), Store(small_disk / "store")
    a_checkpoint(source, "w", seed=1, chunks=40)
    gpusnap("push", f"oci:{source.path}:w", ref(registry))
    a_checkpoint(store, "before")
    asked = []

    def attempt(_: int) -> bool:
        outcome = gpusnap("pull", ref(registry), "--to", f"oci:{store.path}:now")
        asked.append(len(registry.asked("GET", "/blobs/")))
        registry.seen.clear()
        if not refused(small_disk, outcome):
            return True
        assert set(whole(store)) == {"before"}
        return False

    as_it_fills(small_disk, 48 << 10, attempt)
    assert asked[-1] < 40
    check_whole(store, "before", "now")


def test_a_store_that_is_mounted_read_only(
    gpusnap: Run, small_disk: Path, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a checkpoint is told of the option that names another store: other commands may not have it."""
    store = Store(small_disk / "store")
    a_checkpoint(store, "w")
    assert gpusnap("push", f"oci:{store.path}:w", ref(registry))[0] == exit_codes.DONE
    FakePodman(tmp_path / "podman", monkeypatch).has()
    monkeypatch.setattr("gpusnap.operations.disk_space.check", lambda *_, **__: None)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    place, option = f"oci:{store.path}", ", or name another store with --to oci:DIR"
    for words, more in (
        (("gc", place), ""),
        (("rm", f"{place}:w"), ""),
        (("tag", f"{place}:w", "v"), ""),
        (("copy", ref(registry), f"{place}:v"), ""),
        (("pull", ref(registry), "--to", f"{place}:v"), ""),
        (("checkpoint", "w", "--to", f"{place}:v"), option),
    ):
        said = f"gpusnap: the store {store.path} is read-only; remount it for writing{more} [GPS-704]\n"
        assert gpusnap(*words) == (exit_codes.FAILED, said), words


@pytest.mark.parametrize("where", ["the archive", "temporary files"])
@pytest.mark.usefixtures("unchecked")
def test_an_archive_without_room(
    gpusnap: Run,
    small_disk: Path,
    registry: FakeRegistry,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """pull -o: there is no half an archive."""
    store = Store(place)
    a_checkpoint(store, "w", chunks=40)
    gpusnap("push", "w", ref(registry))
    file = small_disk / "w.tar"
    if where != "the archive":
        file = place.parent / "w.tar"
        monkeypatch.setattr("tempfile.tempdir", str(small_disk))
        monkeypatch.setenv("TMPDIR", str(small_disk))

    def attempt(_: int) -> bool:
        outcome = gpusnap("pull", ref(registry), "-o", file)
        if not refused(small_disk, outcome):
            return True
        assert not file.exists()
        assert {each.name for each in small_disk.iterdir()} == {"filler"}
        return False

    as_it_fills(small_disk, 32 << 10, attempt)
    assert gpusnap("verify", file)[0] == exit_codes.DONE
    check_whole(store, "w")


def test_no_temporary_folder(
    gpusnap: Run, registry: FakeRegistry, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That too is a sentence."""
    a_checkpoint(Store(place), "w")
    gpusnap("push", "w", ref(registry))

    def full(path: str, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    for words in (
        ["pull", ref(registry), "-o", "w.tar"],
        ["inspect", ref(registry)],
        ["verify", ref(registry)],
    ):
        with monkeypatch.context() as patch:
            patch.chdir(place.parent)
            patch.setattr("tempfile._os.mkdir", full)
            code, said = gpusnap(*words)
        assert code == exit_codes.FAILED
        assert "is full" in said or "No space left" in said
        assert not (place.parent / "w.tar").exists()


def test_a_name_without_room(gpusnap: Run, small_disk: Path) -> None:
    """tag and rm change all or nothing; gc works on a full disk, and makes room for them."""
    store = Store(small_disk / "store")
    a_checkpoint(store, "w")
    a_checkpoint(store, "gone", seed=1)
    store.remove("gone")
    index = Path(store.path, "index.json").read_bytes()
    (small_disk / "filler").write_bytes(bytes(free_bytes(small_disk)))
    for words in (["tag", "w", "x"], ["rm", "w"]):
        words[1] = f"oci:{store.path}:w"
        assert refused(small_disk, gpusnap(*words)), words
        assert Path(store.path, "index.json").read_bytes() == index
    assert gpusnap("gc", f"oci:{store.path}")[0] == exit_codes.DONE
    assert gpusnap("tag", f"oci:{store.path}:w", "x")[0] == exit_codes.DONE
    check_whole(store, "w", "x")


# Killed


PROGRAM = """
import sys
from gpusnap.cli import main as cli
from gpusnap.runtime_shim import settings
mine = settings.Settings(store=settings.Store(path=sys.argv.pop(1)))
settings.load = lambda: mine
sys.exit(cli.main())
"""


# Seconds for a process to get on, where several others start on each core.
PATIENCE = 60.0


def started(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """A command line in a process of its own."""
    argv = [sys.executable, "-B", "-c", PROGRAM, str(place), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def until(child: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """Wait for something, as long as that process lives."""
    deadline = time.monotonic() + PATIENCE
    while not condition() and child.poll() is None:
        if time.monotonic() > deadline:
            child.kill()
            raise AssertionError(f"not within {PATIENCE:g} s")
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.01)


def ended(child: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, said = child.communicate(timeout=PATIENCE)
    return child.returncode, said.decode()


def killed(registry: FakeRegistry, method: str, place: Path, *words: str) -> None:
    """Have it killed when 20 blobs have gone through, and each of its connections waits."""
    registry.rule(method, "/blobs/", Say(503, {"Retry-After": "200"}), skip=20, times=99)
    with started(place, *words) as child:
        until(child, lambda: registry.rules[-1].times <= 99 - CONNECTIONS)
        child.kill()
    assert child.returncode == -9
    registry.rules.clear()
    registry.seen.clear()


@pytest.mark.parametrize(("what", "collected"), [("store", False), ("archive", True)])
def test_a_killed_push(
    gpusnap: Run, registry: FakeRegistry, place: Path, tmp_path: Path, what: str, collected: bool
) -> None:
    """The next one sends the rest; gc in between does no harm."""
    store = Store(place)
    a_checkpoint(store, "w", chunks=40)
    word = "w"
    if what == "archive":
        word = str(tmp_path / "w.tar")
        gpusnap("push", "w", ref(registry, "other/app:v1"))
        assert gpusnap("pull", ref(registry, "other/app:v1"), "-o", word)[0] == exit_codes.DONE
        registry.may_mount = False
    killed(registry, "PUT", place, "push", word, ref(registry))
    assert not [name for repository, name in registry.manifests if repository == "team/app"]
    if collected:
        assert gpusnap("gc")[0] == exit_codes.DONE
        assert stagings(store) == []
    code, said = gpusnap("push", word, ref(registry), "--json")
    assert code == exit_codes.DONE
    done = json.loads(said)
    assert done["skippedBlobs"] >= 15
    assert len(registry.asked("PUT", "/blobs/")) == done["blobs"] - 1 <= 30
    assert gpusnap("verify", ref(registry), "--deep")[0] == exit_codes.DONE


@pytest.mark.parametrize("collected", [True, False])
def test_a_killed_pull(
    gpusnap: Run, registry: FakeRegistry, place: Path, tmp_path: Path, collected: bool
) -> None:
    """The next one fetches the rest, or all that gc took in between."""
    source = Store(tmp_path / "source")
    a_checkpoint(source, "w", chunks=40)
    gpusnap("push", f"oci:{source.path}:w", ref(registry))
    killed(registry, "GET", place, "pull", ref(registry))
    store = Store(place)
    assert whole(store) == {}
    if collected:
        assert gpusnap("gc")[0] == exit_codes.DONE
        assert stagings(store) == []
    assert gpusnap("pull", ref(registry), "--to", f"oci:{place}:now")[0] == exit_codes.DONE
    asked = len(registry.asked("GET", "/blobs/"))
    assert asked > 40 if collected else asked <= 30
    check_whole(store, "now")


# At once


def test_two_pushes(gpusnap: Run, registry: FakeRegistry, place: Path) -> None:
    """Of the same to the same, by two processes."""
    a_checkpoint(Store(place), "w", chunks=40)
    both = [started(place, "push", "w", ref(registry)) for _ in range(2)]
    assert [ended(each) for each in both] == [(0, "")] * 2
    assert gpusnap("verify", ref(registry), "--deep")[0] == exit_codes.DONE


def during(registry: FakeRegistry, method: str, path: str, work: Callable[[], object]) -> list[object]:
    """Do that once, while somebody waits for the answer to such a request."""
    act, results = registry.act, list[object]()

    def watched(asked: str, at: str) -> object:
        if asked == method and path in at and not results:
            results.append(None)
            results[0] = work()
        return act(asked, at)

    registry.act = watched  # type: ignore[method-assign,assignment]
    return results


def test_two_pulls(gpusnap: Run, registry: FakeRegistry, place: Path, tmp_path: Path) -> None:
    """Of the same into the same store: both have it, and each blob comes once."""
    source = Store(tmp_path / "source")
    a_checkpoint(source, "w", chunks=40)
    gpusnap("push", f"oci:{source.path}:w", ref(registry))
    registry.seen.clear()
    others: list[subprocess.Popen[bytes]] = []

    def another() -> None:
        others.append(started(place, "pull", ref(registry), "--to", f"oci:{place}:other"))
        # Both have asked by then what the tag stands for.
        until(others[0], lambda: len(registry.asked("HEAD", "/manifests/")) > 1)

    during(registry, "GET", "/blobs/", another)
    assert gpusnap("pull", ref(registry), "--to", f"oci:{place}:mine")[0] == exit_codes.DONE
    assert [ended(each) for each in others] == [(0, "")]
    blobs = [each.path for each in registry.asked("GET", "/blobs/")]
    assert len(blobs) == len(set(blobs)) > 40
    check_whole(Store(place), "other", "mine")


@pytest.mark.parametrize("what", ["store", "archive"])
def test_gc_during_a_push(
    gpusnap: Run, registry: FakeRegistry, place: Path, tmp_path: Path, what: str
) -> None:
    """Even where what is pushed has been removed."""
    store = Store(place)
    word = an_archive(tmp_path)
    if what == "store":
        word = "w"
        a_checkpoint(store, "w")

    def collect() -> int:
        for each in store.entries():
            store.remove(each.descriptor.digest)
        return store.collect().blobs

    results = during(registry, "PUT", "/blobs/", collect)
    assert gpusnap("push", word, ref(registry))[0] == exit_codes.DONE
    assert results == [0]
    assert gpusnap("verify", ref(registry), "--deep")[0] == exit_codes.DONE
    gpusnap("gc")
    assert os.listdir(place / "blobs/sha256") == []


def test_gc_during_a_pull(gpusnap: Run, registry: FakeRegistry, place: Path, tmp_path: Path) -> None:
    """What it has taken over stays, though nothing else names it; what gc was faster with is fetched."""
    store = Store(place)
    a_checkpoint(store, "w", chunks=40)
    gpusnap("push", "w", ref(registry))
    gone = artifact.read(store.find("w").descriptor, store.read).chunks[7]
    store.remove("w")
    a_checkpoint(store, "some", chunks=30)
    store.remove("some")
    blob_path(store, gone.digest).unlink()
    results = during(registry, "GET", gone.digest, store.collect)
    assert gpusnap("pull", ref(registry), "--to", f"oci:{place}:now")[0] == exit_codes.DONE
    assert results
    check_whole(store, "now")
