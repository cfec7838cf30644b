"""gpusnap restore: what Podman is given, and what the runtime under it is told."""

from __future__ import annotations

import bz2
import errno
import io
import json
import lzma
import os
import signal
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from archives import CONFIG_DUMP, listed, record, regions, written
from checkpoints import tar_of
from fake_podman import ID, FakePodman
from fake_registry import FakeRegistry
from kept_checkpoints import an_archive, keep, keep_pages, leave_export

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged, NotFound
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator, migrations
from gpusnap.checkpoints.locator import InFile, InStore
from gpusnap.cli.exit_codes import exit_code
from gpusnap.engines import podman, podman_objects, podman_work
from gpusnap.oci.base.errors import StoreBusy
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.operations import push_pull
from gpusnap.operations.restoring import podman_restore, volumes
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoredContainer, RestoreRequest
from gpusnap.operations.restoring.restore import RestoreResult, _run_command
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, Refused, SettingsError, UsageError
from gpusnap.runtime_shim.records.manifest import VERSION, Manifest
from gpusnap.runtime_shim.settings import Memory, load
from gpusnap.runtime_shim.snapshot.loading.board import VARIABLE

QUIET = Progress(shown=False)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(status="exited")
    return found


def restored(what: locator.Place, **more: object) -> RestoreResult:
    return restoring.restore(RestoreRequest(what=what, **more), QUIET)  # type: ignore[arg-type]


AFTERWARDS = [
    (MemoryError(), "this host has no memory left for gpusnap"),
    (
        OSError(errno.ENOMEM, "Cannot allocate memory", "/store/staging"),
        "/store/staging: Cannot allocate memory",
    ),
    (StoreBusy("the store is busy"), "the store is busy"),
    (GpusnapError("it cannot be removed"), "it cannot be removed"),
]


@pytest.mark.parametrize(("error", "said"), AFTERWARDS)
@pytest.mark.parametrize("where", ["LoadProcess.__exit__", "_make_folder", "migrations.forget"])
def test_what_fails_when_the_container_runs(
    fake: FakePodman,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    said: str,
    where: str,
) -> None:
    """Is a note: whoever is told of a failure restores again, beside a container that runs."""
    if where == "migrations.forget" and not isinstance(error, GpusnapError | OSError):
        pytest.skip("does not come from there")
    digest = keep(store, an_archive(tmp_path), ["w"])

    def fail(*_: object) -> None:
        raise error

    @contextmanager
    def make_folder(of: Store) -> Iterator[str]:
        with real(of) as found:
            yield found
        raise error

    real = podman_restore._make_folder
    path = "gpusnap.operations.restoring.podman_restore."
    monkeypatch.setattr(path + where, make_folder if where == "_make_folder" else fail)
    done = restored(InStore(store, "w"), not_migrated=True)
    assert (done.container, done.digest, done.name) == (ID, digest, "w")
    err = capsys.readouterr().err
    assert f"note: the container is restored, but not all is tidied up: {said}" in err
    assert len(fake.calls()) == 1


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "")])
def test_what_fails_before_the_container_runs(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It is the restore's own error."""
    keep(store, an_archive(tmp_path), ["w"])

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(podman_work, "restore", fail)
    with pytest.raises(type(error)):
        restored(InStore(store, "w"))


def test_ctrl_c_when_the_container_runs(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to restore it again."""
    keep(store, an_archive(tmp_path), ["w"])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpusnap.operations.restoring.podman_restore.LoadProcess.__exit__", interrupt)
    with pytest.raises(Interrupted, match=rf"^interrupted, but the container {ID} is restored already$"):
        restored(InStore(store, "w"))


@pytest.mark.parametrize("annotated", [False, True])
def test_a_signal_as_podman_ends(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotated: bool
) -> None:
    """The container runs, and that is said; also that a command of its own was not run."""
    keep(store, an_archive(tmp_path), ["w"])
    fake.has(status="exited")
    real = podman_work._pass_signals_on

    @contextmanager
    def interrupted(*words: object) -> Iterator[object]:
        with real(*words) as relay:  # type: ignore[arg-type]
            yield relay
        raise KeyboardInterrupt

    monkeypatch.setattr(podman_work, "_pass_signals_on", interrupted)
    monkeypatch.setattr(volumes, "read_text", lambda _, key: "w" if key == "name" else "")
    real_choose = volumes.choose
    monkeypatch.setattr(
        volumes,
        "choose",
        lambda inside, **more: real_choose(replace(inside, annotated=annotated), **more),
    )
    with pytest.raises(
        Interrupted, match=r"^interrupted, but the container w is restored already$"
    ) as raised:
        restored(InStore(store, "w"))
    assert ("post-restore, that was not run" in raised.value.hint) is annotated
    assert not [call for call in fake.calls() if call.startswith("rm ")]


def test_a_podman_that_cannot_be_asked_afterwards(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the container has a command to be run, that it was not is said with what is done."""

    def fail(wanted: str) -> None:
        raise GpusnapError("podman cannot be run: Cannot allocate memory", hint="free some memory")

    monkeypatch.setattr(podman, "inspect_container", fail)
    assert _run_command(RestoredContainer(ID, "w", annotated=False), QUIET) == "w"
    assert _run_command(RestoredContainer(ID, "", annotated=False), QUIET) == ID
    with pytest.raises(GpusnapError, match=r"^the container is restored, but no command .* Cannot allocate"):
        _run_command(RestoredContainer(ID, "w", annotated=True), QUIET)


def test_from_a_store(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """A small archive; the runtime finds the memory in that store."""
    archive = an_archive(tmp_path)
    digest = keep(store, archive, ["w"])
    done = restored(InStore(store, "w"), name="x", gpu_map="0=1", tcp_established=True, ignore_rootfs=True)
    assert (done.container, done.digest) == (ID, digest)
    given = listed(str(fake.imported))
    assert given["checkpoint/gpusnap/manifest.json"] == listed(archive)["checkpoint/gpusnap/manifest.json"]
    assert not [name for name in given if "/blobs/" in name]
    environment = fake.environment()
    assert environment["GPUSNAP_STORE"] == store.path
    assert environment["GPUSNAP_GPU_MAP"] == "0=1"
    assert "GPUSNAP_PULL_FROM" not in environment
    (call,) = fake.calls()
    assert call.endswith("podman.tar --tcp-established --ignore-rootfs --name x")
    assert os.listdir(store.path + "/staging") == []


NAMED = {**CONFIG_DUMP, "name": "w7"}


@pytest.mark.parametrize(
    ("config", "spec", "asked"),
    [
        (NAMED, {}, 0),
        (CONFIG_DUMP, {}, 1),  # not a name that Podman gives
        ({**NAMED, "labels": {"io.gpusnap.post-restore": "true"}}, {}, 1),
        (NAMED, {"annotations": {"io.gpusnap.post-restore": "true"}}, 1),
    ],
)
def test_what_podman_is_asked_afterwards(
    fake: FakePodman, tmp_path: Path, config: Mapping[str, object], spec: Mapping[str, object], asked: int
) -> None:
    """Of the container, where it may have a command that is run now; else the checkpoint has said it all."""
    source = Layout(tmp_path / "source").create()
    more = {"config.dump": json.dumps(config).encode(), "spec.dump": json.dumps(spec).encode()}
    archive = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    done = restored(InFile(archive))
    assert (done.container, done.name) == (ID, "w" if asked else "w7")
    calls = (fake.folder / "calls").read_text().splitlines()
    assert len([call for call in calls if call.startswith("container inspect")]) == asked


def test_the_load_process(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It works while Podman does, and its runtime has where."""
    keep(store, an_archive(tmp_path), ["w"])
    seen: list[object] = []

    class Process:
        def __init__(self, record: Manifest, layout: str, settings: Memory) -> None:
            seen.extend((record.version, layout, settings, fake.calls()))

        def __enter__(self) -> Process:
            return self

        def __exit__(self, *_: object) -> None:
            seen.append(len(fake.calls()))

        def environment(self) -> dict[str, str]:
            return {VARIABLE: "/where"}

    monkeypatch.setattr(podman_restore, "LoadProcess", Process)
    restored(InStore(store, "w"))
    assert seen == [VERSION, store.layout.path, Memory(), [], 1]
    assert fake.environment()[VARIABLE] == "/where"


def test_from_a_file(fake: FakePodman, tmp_path: Path, store: Store) -> None:
    """As it is; where its chunks are is for the settings to say."""
    restored(InFile(an_archive(tmp_path)))
    assert fake.calls() == [f"container restore --import {tmp_path}/in.tar"]
    assert not {"GPUSNAP_STORE", "GPUSNAP_GPU_MAP"} & fake.environment().keys()
    assert not os.path.exists(store.path)
    with pytest.raises(UsageError, match="is a directory"):
        restored(InFile(str(tmp_path)))


def test_from_a_registry(fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """The chunks are for the runtime to fetch: here it does, and then the store has all, under one name."""
    other = Store(tmp_path / "other")
    keep_pages(other)
    digest = keep(other, an_archive(tmp_path, pages="store"), ["w"])
    ref = f"{registry.host}/team/app:v1"
    push_pull.push(InStore(other, "w"), locator.parse_registry(f"http://{ref}"), progress=QUIET)
    other.remove("w")
    fake.first(
        f"find {store.path}/staging -type f -path '*/blobs/*' >{tmp_path}/staged\n"
        f"cp {other.path}/blobs/sha256/* {store.path}/blobs/sha256/\n"
        f"cp {other.path}/index.json {store.path}/\n"
    )
    done = restored(locator.parse_registry(f"http://{ref}"))
    assert (done.digest, done.kept) == (digest, ref)
    assert fake.environment()["GPUSNAP_PULL_FROM"] == f"http://{registry.host}/team/app"
    assert fake.environment()["GPUSNAP_STORE"] == store.path
    # Manifest, config, records, rootfs.
    assert len((tmp_path / "staged").read_text().split()) == 4
    assert [(each.name, each.descriptor.digest) for each in store.entries()] == [(ref, digest)]
    assert os.listdir(store.path + "/staging") == []


def test_much_comes_first(
    fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Podman would not wait for is in the store, and named, before it is asked."""
    monkeypatch.setattr(podman_restore, "_MOST_MEANWHILE", 100)
    ref = f"{registry.host}/team/app:v1"
    push_pull.push(InFile(an_archive(tmp_path)), locator.parse_registry(f"http://{ref}"), progress=QUIET)
    fake.fails("gpusnap: no GPU fits\n")
    with pytest.raises(GpusnapError, match="no GPU fits"):
        restored(locator.parse_registry(f"http://{ref}"))
    assert [each.name for each in store.entries()] == [ref]
    registry.seen.clear()
    (fake.folder / "error").unlink()
    fake.has(status="exited")
    assert restored(locator.parse_registry(f"http://{ref}")).kept == ref
    assert registry.asked("GET", "blobs/") == []


def test_one_that_may_run_elsewhere_is_not_fetched(
    fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused when its manifest is there: a restore with much memory would fetch that before."""
    monkeypatch.setattr(podman_restore, "_MOST_MEANWHILE", 100)
    ref = locator.parse_registry(f"http://{registry.host}/team/app:v1")
    digest = push_pull.push(InFile(an_archive(tmp_path)), ref, progress=QUIET).digest

    def check(wanted: str) -> None:
        if wanted == digest:
            raise Refused("the container w may run on gpu2")

    monkeypatch.setattr(migrations, "check", check)
    registry.seen.clear()
    with pytest.raises(Refused, match="may run on gpu2"):
        restored(ref)
    assert len(registry.asked("GET", "blobs/")) <= 1  # its config
    assert fake.calls() == []


def test_what_the_store_has_stays_while_podman_works(
    fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name may be removed and gc run meanwhile; and others who want the same need not wait."""
    monkeypatch.setattr(podman_restore, "_MOST_MEANWHILE", 100)
    ref = locator.parse_registry(f"http://{registry.host}/team/app:v1")
    digest = push_pull.push(InFile(an_archive(tmp_path)), ref, progress=QUIET).digest
    real, free = podman_work.restore, []

    def restore(*words: object, **more: object) -> str:
        store.remove(digest)
        store.collect()
        free.append(not list(Path(store.path, "staging").glob("pull-*")))
        with kept.hold_artifact(InStore(other, "w")) as (_, found):
            for each in found.artifact.chunks:
                store.layout.check_blob(each)
        return real(*words, **more)  # type: ignore[arg-type]

    other = Store(tmp_path / "other")
    keep(other, str(tmp_path / "in.tar"), ["w"])
    monkeypatch.setattr(podman_work, "restore", restore)
    restored(ref)
    assert free == [True]


def test_all_or_no_name(fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """Where the runtime did not keep the chunks, the container runs, and the store names nothing."""
    ref = locator.parse_registry(f"http://{registry.host}/team/app:v1")
    push_pull.push(InFile(an_archive(tmp_path)), ref, progress=QUIET)
    assert restored(ref).kept == ""
    assert store.entries() == ()


def test_podman_refuses(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """In its own words."""
    keep(store, an_archive(tmp_path), ["w"])
    fake.fails("Error: no image of that name\n")
    with pytest.raises(GpusnapError, match="Podman failed: no image of that name"):
        restored(InStore(store, "w"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "creating container storage: that ID is already in use"),
        ("x", 'creating container storage: the container name "x" is already in use by abc. You have to'),
    ],
)
def test_the_container_is_there(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """As after a checkpoint that ended it: the sentence says which one, and what to do."""
    keep(store, an_archive(tmp_path), ["w"])
    monkeypatch.setattr(volumes, "read_text", lambda _, key: "w" if key == "name" else "")
    fake.lists(ID)
    fake.fails(f"Error: {text}\n")
    with pytest.raises(GpusnapError) as raised:
        restored(InStore(store, "w"), name=name)
    found = name or "w"
    assert raised.value.sentence() == (
        f"Podman already has a container {found}; remove it with podman rm {found}, or give another name "
        "with --name [GPS-508]"
    )


def test_the_container_runs(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """`podman rm` alone would refuse, so the command has --force."""
    keep(store, an_archive(tmp_path), ["w"])
    fake.has(name="x")
    fake.lists(ID)
    fake.fails('Error: creating container storage: the container name "x" is already in use by abc.\n')
    with pytest.raises(GpusnapError) as raised:
        restored(InStore(store, "w"), name="x")
    assert raised.value.sentence() == (
        "Podman already has a container x, and it is running; give a second copy another name with "
        "--name; to return to the checkpoint, and lose what the container has done since, remove it "
        "first: podman rm --force x [GPS-508]"
    )


@pytest.mark.parametrize("status", ["exited", "stopped", "paused"])
def test_somebody_runs_one_of_that_name_meanwhile(
    fake: FakePodman, store: Store, tmp_path: Path, status: str
) -> None:
    """It has ended, or stands: none that a failed import leaves has ever run."""
    keep(store, an_archive(tmp_path), ["w"])
    fake.has(name="x", status=status)
    fake.fails("gpusnap: no GPU fits\n")
    with pytest.raises(GpusnapError, match="no GPU fits"):
        restored(InStore(store, "w"), name="x")
    assert not [call for call in fake.calls() if call.startswith("rm ")]


def test_somebody_creates_one_of_that_name_meanwhile(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """It is new and does not run, as what a failed import leaves; and it is somebody else's, and stays."""
    keep(store, an_archive(tmp_path), ["w"])
    fake.has(name="x", status="created")
    fake.fails('Error: creating container storage: the container name "x" is already in use by abc.\n')
    with pytest.raises(GpusnapError, match=r"Podman already has a container x$"):
        restored(InStore(store, "w"), name="x")
    assert not [call for call in fake.calls() if call.startswith("rm ")]


@pytest.mark.parametrize("what", ["store", "file"])
@pytest.mark.parametrize("known", [False, True])
def test_nothing_is_left(fake: FakePodman, store: Store, tmp_path: Path, what: str, known: bool) -> None:
    """Podman leaves a container of an import that failed; it goes, but not one that was there before."""
    archive = an_archive(tmp_path)
    keep(store, archive, ["w"])
    fake.has(status="created")
    fake.lists(*[ID] if known else [])
    fake.fails("gpusnap: no GPU fits\n")
    with pytest.raises(GpusnapError, match="no GPU fits"):
        restored(InStore(store, "w") if what == "store" else InFile(archive))
    assert (fake.calls()[-1] == f"rm {ID}") is not known


def test_a_second_signal(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks into neither what cleans up after the first one: container and volumes go."""
    config = {**CONFIG_DUMP, "namedVolumes": [{"volumeName": "data", "dest": "/data"}]}
    more = {"config.dump": json.dumps(config).encode(), "volumes/data.tar": tar_of({"data": b"data"})}
    source = Layout(tmp_path / "source").create()
    archive = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    fake.has(status="created", Created="2026-01-02T03:04:05Z", volumes={"data": "/d"})
    fake.describes_volume("data", "2026-01-02T03:04:06Z")
    fake.first("echo data >>$F/volumes; kill -INT $PPID; while :; do sleep 0.02; done")

    def interrupted(work: Callable[[str], None]) -> Callable[[str], None]:
        def work_interrupted(one: str) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            work(one)

        return work_interrupted

    monkeypatch.setattr(podman, "remove", interrupted(podman.remove))
    monkeypatch.setattr(podman_objects, "remove_volume", interrupted(podman_objects.remove_volume))
    with pytest.raises(Interrupted, match="podman container restore was interrupted"):
        restored(InFile(archive))
    assert fake.calls()[-2:] == [f"rm {ID}", "volume rm data"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_pages_only(fake: FakePodman, store: Store) -> None:
    """It says what it is, and Podman does nothing."""
    digest = keep_pages(store)
    with pytest.raises(Refused, match="has only the memory"):
        restored(InStore(store, digest))
    assert fake.calls() == []


@pytest.mark.parametrize(("wanted", "later"), [("k", True), ("k:latest", True), ("k:1", True), ("k", False)])
def test_a_later_checkpoint_was_not_completed(
    fake: FakePodman,
    store: Store,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    wanted: str,
    later: bool,
) -> None:
    """A note refers to recover, unless a tag says which checkpoint is meant."""
    keep(store, an_archive(tmp_path), ["k:1"])
    leave_export(store, tmp_path / "exported", created=f"20{26 + later}-02-03T04:05:06Z")
    assert restored(InStore(store, wanted)).container == ID
    said = "note: a later checkpoint of k was not completed: gpusnap recover k names it\n"
    assert (said in capsys.readouterr().err) == (later and wanted != "k:1")


def test_not_there(fake: FakePodman, store: Store) -> None:
    """No store, no name."""
    with pytest.raises(NotFound, match="is not a store, or has no checkpoint yet"):
        restored(InStore(store, "w"))
    store.create()
    with pytest.raises(NotFound):
        restored(InStore(store, "w"))


@pytest.mark.parametrize("part", ["config", "records"])
def test_damaged(fake: FakePodman, store: Store, tmp_path: Path, part: str) -> None:
    """Found before Podman does anything."""
    keep(store, an_archive(tmp_path), ["w"])
    with kept.hold_artifact(InStore(store, "w")) as (_, found):
        blob = getattr(found.artifact, part).digest
    path = Path(store.path, "blobs/sha256", blob.removeprefix("sha256:"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=blob):
        restored(InStore(store, "w"))
    assert fake.calls() == []


NOWHERE = "127.0.0.1:1/team/app:v1"


def test_a_registry_that_is_away(
    fake: FakePodman, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The store's copy of that name is taken, and a note says so; without one the error is the registry's."""
    place = locator.parse_registry(f"http://{NOWHERE}")
    with pytest.raises(GpusnapError, match="connection refused"):
        restored(place)
    digest = keep(store, an_archive(tmp_path), [NOWHERE])
    assert restored(place).digest == digest
    note = capsys.readouterr().err
    assert f"using {NOWHERE} from this host's store {store.path} instead" in note
    assert "may have a newer one" in note


def test_a_registry_that_has_it_not(
    fake: FakePodman, store: Store, registry: FakeRegistry, tmp_path: Path
) -> None:
    """It answers, so the store's copy is not taken, but named."""
    ref = f"{registry.host}/team/app:v1"
    keep(store, an_archive(tmp_path), [ref])
    for act in (restored, lambda place: push_pull.pull(place, progress=QUIET)):
        with pytest.raises(NotFound) as raised:
            act(locator.parse_registry(f"http://{ref}"))
        assert f"one with that name: oci:{store.path}:{ref}" in raised.value.sentence()
    assert not (fake.folder / "calls").exists()


@pytest.mark.parametrize("how", ["cut short", "a byte"])
def test_an_archive_that_is_damaged(fake: FakePodman, tmp_path: Path, how: str) -> None:
    """It is named, and not Podman's copy of what is in it; one that is whole is not blamed."""
    path = Path(an_archive(tmp_path))
    fake.fails("Error: unexpected EOF\n")
    with pytest.raises(GpusnapError, match="Podman failed: unexpected EOF") as raised:
        restored(InFile(str(path)))
    assert not isinstance(raised.value, Damaged)
    data = bytearray(path.read_bytes())
    if how == "cut short":
        del data[len(data) // 2 :]
    else:
        (blob,) = [name for name in listed(str(path)) if "/blobs/sha256/" in name][:1]
        data[data.index(blob.encode()) + 512] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match=f"{path} is ") as raised:
        restored(InFile(str(path)))
    assert exit_code(raised.value) == 4
    assert raised.value.hint == "use another copy of it; gpusnap verify lists all damage"


def _tar(*found: tuple[str, bytes, str]) -> bytes:
    """A tar with entries of these names, types and targets of links."""
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name, kind, target in found:
                info = tarfile.TarInfo(name)
                info.type, info.linkname = kind, target
                archive.addfile(info)
        return file.getvalue()


_DEVICE = ("null", tarfile.CHRTYPE, "")
_THROUGH = (("checkpoint/l", tarfile.SYMTYPE, "/etc"), ("checkpoint/l/evil", tarfile.REGTYPE, ""))


@pytest.mark.parametrize(
    "data",
    [
        _tar(*_THROUGH),
        _tar(_DEVICE, *_THROUGH),
        _tar(_DEVICE, ("config.dump", tarfile.FIFOTYPE, "")),
        _tar(_DEVICE, ("checkpoint/pages-1.img", tarfile.SYMTYPE, "/etc/shadow")),
        lzma.compress(_tar(*_THROUGH)),
        bz2.compress(_tar(*_THROUGH)),
    ],
    ids=["through a link", "that behind a device", "a FIFO behind one", "a link behind one", "xz", "bzip2"],
)
def test_what_cannot_be_looked_through(fake: FakePodman, tmp_path: Path, data: bytes) -> None:
    """Podman, which reads on and knows more compressions, is not given it."""
    path = tmp_path / "in.tar"
    path.write_bytes(data)
    with pytest.raises(GpusnapError, match="is not a checkpoint archive"):
        restored(InFile(str(path)))
    assert not (fake.folder / "calls").exists()


@pytest.mark.parametrize("name", ["a/b", "-x", "bad name", "x\n"])
def test_a_name_that_podman_would_not_give(fake: FakePodman, tmp_path: Path, name: str) -> None:
    """Podman takes it at a restore, though it refuses it for a new container; gpusnap does not ask it."""
    with pytest.raises(UsageError, match="is not a valid container name"):
        restored(InFile(an_archive(tmp_path)), name=name)
    assert not (fake.folder / "calls").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("memory.levle = 1\n", "unknown setting memory.levle"),
        ("memory.level = 99\n", "memory.level in .* is 99"),
        ("[memory\n", "is not TOML"),
        ('runtime = "no-such-runtime"\n', "no-such-runtime"),
    ],
)
def test_broken_settings(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    """They are said before Podman is asked, which would only say that its runtime supports no checkpoints."""
    path = tmp_path / "gpusnap.toml"
    path.write_text(text)
    monkeypatch.setattr(settings_file, "load", lambda: load(str(path)))
    with pytest.raises(SettingsError, match=why):
        restored(InFile(an_archive(tmp_path)))
    assert not (fake.folder / "calls").exists()
