"""gpusnap checkpoint: what Podman exports becomes an artifact, and nothing is lost where that fails."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from archives import written
from checkpoints import tar_of
from fake_podman import ID, FakePodman
from fake_registry import FakeRegistry, Say
from kept_checkpoints import an_archive, hand_over_pages
from synced import Synced

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats import podman as convert
from gpusnap.engines import podman, podman_work
from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.chunks import artifact as artifacts
from gpusnap.oci.chunks import writer
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.reference import parse
from gpusnap.oci.store.staging import Staging
from gpusnap.oci.store.store import Store
from gpusnap.operations import disk_space
from gpusnap.operations.checkpointing import archive, failed_export, places
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.checkpointing.checkpoint import CheckpointRequest, CheckpointResult
from gpusnap.operations.checkpointing.failed_export import Export, explain_export_errors
from gpusnap.operations.checkpointing.ordered_memory import OrderedMemory
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, SettingsError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.settings import Settings, load
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot import left_stopped
from gpusnap.runtime_shim.snapshot.memory import handover
from gpusnap.runtime_shim.snapshot.memory.handover import HandedOverMemory
from gpusnap.runtime_shim.snapshot.records import journal


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's."""
    found = Settings(store=settings_file.Store(path=str(tmp_path / "store")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    return Store(tmp_path / "store")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has()
    found.exports(an_archive(tmp_path))
    return found


@pytest.fixture
def pages(fake: FakePodman, store: Store, tmp_path: Path) -> FakePodman:
    """A runtime that hands the pages over, as it was ordered to, before Podman exports the rest."""
    (tmp_path / "other").mkdir()
    hand_over_pages(Store(tmp_path / "other"), "given", state_files.owner())
    folder = tmp_path / "with"
    folder.mkdir()
    fake.exports(an_archive(folder, pages="store"))
    ordered = f'"pages": "store", "store": "{store.path}", "staging": "\\([0-9a-f]*\\)"'
    fake.first(
        f"name=$(sed -n 's|.*{ordered}.*|\\1|p' {tmp_path}/orders/{ID}.json)\n"
        '[ "$name" ] || exit 9\n'
        f"cp -r {tmp_path}/other/staging/given {store.path}/staging/$name\n"
    )
    return fake


ENDS_AT_DUMP = {"tcp_established": True}
"""With it, the dump ends a container with --rm, instead of leaving it stopped."""


def made(**more: object) -> CheckpointResult:
    return checkpointing.checkpoint(CheckpointRequest(container="w", **more), Progress(shown=False))  # type: ignore[arg-type]


def test_pages_in_the_store(pages: FakePodman, store: Store) -> None:
    """They were handed over; one artifact has them and the records."""
    done = made()
    (entry,) = store.entries()
    assert entry.name == done.name
    assert re.fullmatch(r"w:\d{8}-\d{6}", done.name)
    with kept.hold_artifact(locator.InStore(store, done.name)) as (_, found):
        assert found.root.digest == done.digest
        assert found.artifact.records is not None
        assert found.record is not None
        assert found.record.pages == "store"
        assert done.size == found.size
        for each in found.artifact.blobs():
            store.layout.check_blob(each)
    assert done.new == done.size
    assert done.gpu_memory == 1 << 20
    assert pages.status() == "exited"
    assert os.listdir(store.path + "/staging") == []
    assert not os.path.exists(f"{overrides.FOLDER}/{ID}.json")


def test_a_task_of_containerd(fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman is not all that there is: the message names what checkpoints it."""
    (fake.folder / "inspect.json").unlink()
    monkeypatch.setattr(targets, "CONTAINERD_ROOT", str(tmp_path / "runc"))
    with pytest.raises(NotFound, match=r"^there is no container w$"):
        made()
    (tmp_path / "runc/default/w").mkdir(parents=True)
    (tmp_path / "runc/default/w/state.json").touch()
    with pytest.raises(NotFound, match="but containerd has a task of that name") as caught:
        made()
    assert caught.value.hint.startswith("ctr container checkpoint --task ")


def test_words_for_podman(fake: FakePodman) -> None:
    """Plain, as it is read again at once; options as given."""
    made(leave_running=True, tcp_established=True, file_locks=True, ignore_rootfs=True, ignore_volumes=True)
    (call,) = fake.calls()
    assert re.fullmatch(
        r"container checkpoint --export /\S+/staging/\w+/podman\.tar --compress none "
        rf"--leave-running --tcp-established --file-locks --ignore-rootfs --ignore-volumes {ID}",
        call,
    )


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("force", [False, True])
def test_force_reaches_the_runtime(fake: FakePodman, tmp_path: Path, archive: bool, force: bool) -> None:
    """By the order, since Podman hands down no option that it does not know."""
    fake.first(f"grep -q '\"force\": {str(force).lower()},' {tmp_path}/orders/{ID}.json || exit 9\n")
    made(force=force, to=locator.destination(str(tmp_path / "w.tar")) if archive else None)


@pytest.mark.parametrize(
    ("container", "given", "name"),
    [
        ("w", "mine", "mine"),
        ("a__b-", "", r"a_b-[0-9a-f]{6}:\d{8}-\d{6}"),
        ("-._", "", r"abababababab:\d{8}-\d{6}"),
    ],
)
def test_names(fake: FakePodman, container: str, given: str, name: str) -> None:
    """As given, or such as a store takes."""
    fake.has(name=container)
    assert re.fullmatch(name, made(name=given).name)


def test_a_bad_name_is_said_first(fake: FakePodman) -> None:
    """Before anything is done to the container."""
    with pytest.raises(GpusnapError, match="is not a valid name"):
        made(name="two words")
    assert fake.status() == "running"


def test_another_store(fake: FakePodman, tmp_path: Path, store: Store) -> None:
    """oci:DIR:NAME."""
    done = made(to=locator.destination(f"oci:{tmp_path}/there:x"))
    assert (done.store, done.name) == (f"{tmp_path}/there", "x")
    assert not os.path.exists(store.path)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("w.tar", "none"), ("w.tar.zst", "zstd"), ("w.tgz", "gzip"), ("w.tar.gz", "gzip"), ("./w", "zstd")],
)
def test_a_file(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, compress: str
) -> None:
    """Podman's own archive, under its name when it is whole."""
    monkeypatch.chdir(tmp_path / "podman")
    fake.first(f'grep -q \'"pages": "chunks"\' {tmp_path}/orders/{ID}.json || exit 9\n')
    done = made(to=locator.destination(name))
    assert done.file == str(tmp_path / "podman" / name)
    assert Path(done.file).read_bytes() == Path(fake.folder, "archive").read_bytes()
    assert done.size == os.path.getsize(done.file)
    (call,) = fake.calls()
    assert "/.w" in call
    assert f"--compress {compress} " in call
    assert not [each for each in os.listdir(fake.folder) if each.startswith(".")]


@pytest.mark.parametrize("to", ["own", "store", "file"])
def test_remembered_after_a_reboot(fake: FakePodman, store: Store, tmp_path: Path, to: str) -> None:
    """While Podman works, a file on disk names where it writes; this host's store is known anyway."""
    other = Store(tmp_path / "elsewhere").create()
    fake.first(f"cat {places.FOLDER}/* >$F/noted 2>/dev/null || :\n")
    place: locator.Place | None = None
    if to == "store":
        place = locator.InStore(other, "")
    elif to == "file":
        place = locator.InFile(f"{tmp_path}/w.tar")
    made(to=place)
    text = (fake.folder / "noted").read_text()
    if to == "own":
        assert text == ""
    else:
        noted = json.loads(text)
        assert noted["place"] == (other.path if to == "store" else str(tmp_path))
        assert noted["archive"].startswith(f"{tmp_path}/.w.tar." if to == "file" else "")
        assert os.listdir(places.FOLDER) == []


def test_a_file_in_no_folder(fake: FakePodman, tmp_path: Path) -> None:
    """Said before anything is done."""
    with pytest.raises(GpusnapError, match="is not a directory"):
        made(to=locator.InFile(f"{tmp_path}/gone/w.tar"))
    assert fake.status() == "running"


@pytest.mark.parametrize("kind", ["folder", "fifo"])
def test_what_is_no_file(fake: FakePodman, tmp_path: Path, kind: str) -> None:
    """It is there, and cannot be replaced by an archive: said before the container is ended."""
    if kind == "folder":
        (tmp_path / "backup").mkdir()
    else:
        os.mkfifo(tmp_path / "backup")
    with pytest.raises(GpusnapError, match=r"backup cannot be written: it .* (directory|not a file)$"):
        made(to=locator.InFile(f"{tmp_path}/backup"))
    assert fake.status() == "running"
    assert [name for name in os.listdir(tmp_path) if "backup" in name] == ["backup"]


def test_a_file_that_is_there(fake: FakePodman, tmp_path: Path) -> None:
    """It may be an earlier checkpoint, and is not replaced."""
    (tmp_path / "w.tar").write_text("earlier")
    with pytest.raises(GpusnapError, match=r"w\.tar exists already"):
        made(to=locator.InFile(f"{tmp_path}/w.tar"))
    assert fake.status() == "running"
    assert (tmp_path / "w.tar").read_text() == "earlier"


@pytest.mark.parametrize("leave_running", [True, False])
@pytest.mark.parametrize("auto_remove", [True, False])
def test_a_file_that_somebody_made_meanwhile(
    fake: FakePodman, tmp_path: Path, leave_running: bool, auto_remove: bool
) -> None:
    """Neither checkpoint is lost: the later one is kept beside, and said to be."""
    fake.has(auto_remove=auto_remove)
    folder = tmp_path / "to"
    folder.mkdir()
    fake.first(f"echo the other one >{folder}/w.tar.zst\n")
    with pytest.raises(
        GpusnapError, match=r"w\.tar\.zst was created by another process in the meantime"
    ) as raised:
        made(to=locator.InFile(f"{folder}/w.tar.zst"), leave_running=leave_running)
    assert (folder / "w.tar.zst").read_text() == "the other one\n"
    (aside,) = set(os.listdir(folder)) - {"w.tar.zst"}
    assert re.fullmatch(r"checkpoint-of-w-[0-9a-f]{8}\.tar\.zst", aside)
    assert f"is complete, and kept as {folder}/{aside}; rename that file as" in raised.value.sentence()
    assert (folder / aside).read_bytes() == (fake.folder / "archive").read_bytes()


def test_a_file_that_cannot_be_made(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the reason is."""
    real = os.open

    def refuses(path: str, flags: int, *more: int) -> int:
        if flags & os.O_EXCL and "w.tar" in path:
            raise OSError(errno.EDQUOT, "")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuses)
    with pytest.raises(GpusnapError, match=r"w\.tar cannot be written: Disk quota exceeded"):
        made(to=locator.InFile(f"{tmp_path}/w.tar"))
    assert fake.status() == "running"


def test_a_file_in_a_folder_that_is_read_only(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the container is ended for it."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    with pytest.raises(GpusnapError, match=f"w.tar cannot be written: {tmp_path} is read-only"):
        made(to=locator.InFile(f"{tmp_path}/w.tar"))
    assert fake.status() == "running"


def test_podman_fails_and_the_container_runs_on(fake: FakePodman, store: Store) -> None:
    """The runtime's sentence, and nothing else."""
    fake.fails("gpusnap: no room; make some\n")
    with pytest.raises(GpusnapError, match=r"^no room; make some$"):
        made()
    assert os.listdir(store.path + "/staging") == []


def test_podman_fails_after_the_end(fake: FakePodman) -> None:
    """Where the container is, and how it comes back."""
    fake.first(fake.ends("inventory.img", "gpusnap/manifest.json"))
    fake.fails("Error: writing the archive: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made()
    assert raised.value.sentence() == (
        "Podman failed: writing the archive: no space left; nothing is lost: Podman has the checkpoint of "
        "w in its storage; podman container restore w restores it"
    )


def test_the_runtime_fails_after_the_end(fake: FakePodman, tmp_path: Path) -> None:
    """The checkpoint has no manifest yet: a restore would be refused before it is completed."""
    fake.first(fake.ends("inventory.img", "gpusnap/manifest.pending"))
    fake.fails(
        f"gpusnap: the store is busy; the container is dumped: run gpusnap recover {ID} to try again\n"
    )
    with pytest.raises(GpusnapError) as raised:
        made(to=locator.destination(f"oci:{tmp_path}/there"))
    assert raised.value.sentence() == (
        f"the store is busy; the container is dumped: run gpusnap recover {ID} to try again; nothing is "
        "lost: Podman has the checkpoint of w in its storage, but it is incomplete; run gpusnap recover "
        f"{ID} to complete it, then GPUSNAP_STORE={tmp_path}/there podman container restore w restores it"
    )


@pytest.mark.parametrize("earlier", [False, True])
def test_the_clock_is_set_back(fake: FakePodman, earlier: bool) -> None:
    """The new checkpoint looks older than its beginning, or than an earlier one, and is found."""
    images = fake.folder / "checkpoint"
    if earlier:
        images.mkdir()
        (images / "inventory.img").touch()
    fake.first(fake.ends("inventory.img") + "touch -d @1000000000 $F/checkpoint/inventory.img\n")
    fake.fails("Error: the disk failed\n")
    with pytest.raises(GpusnapError, match=r"nothing is lost: Podman has the checkpoint of w"):
        made()


@pytest.mark.parametrize("when", ["before", "after"])
def test_podmans_storage_cannot_be_read(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Then nobody says that there is no checkpoint."""
    ended = tmp_path / "ended"

    def is_folder(path: str) -> bool:
        if ended.exists() == (when == "after"):
            raise OSError(errno.EIO, "Input/output error", path)
        return os.path.isdir(path)

    fake.first(fake.ends("inventory.img") + f"touch {ended}\n")
    fake.fails("Error: the disk failed\n")
    monkeypatch.setattr(failed_export, "is_folder", is_folder)
    with pytest.raises(GpusnapError) as raised:
        made()
    assert raised.value.sentence() == "Podman failed: the disk failed"


@pytest.mark.parametrize("earlier", [False, True])
def test_it_ends_by_itself(fake: FakePodman, earlier: bool) -> None:
    """There is no checkpoint then, or one of before, and nobody says that there is."""
    if earlier:
        (fake.folder / "checkpoint").mkdir()
        (fake.folder / "checkpoint/inventory.img").touch()
    fake.first(fake.ends())
    fake.fails("Error: the container is not running\n")
    with pytest.raises(GpusnapError) as raised:
        made()
    assert raised.value.sentence() == (
        "Podman failed: the container is not running; the container w has stopped, and there is no "
        "checkpoint of it"
    )


@pytest.mark.parametrize(
    "error", [DiskFull("the disk is full"), KeyboardInterrupt(), MemoryError(), ZeroDivisionError("a bug")]
)
def test_we_fail_after_the_end(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The same; the store keeps the pages, which what Podman has refers to."""

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(convert, "take_in", fails)
    with pytest.raises(GpusnapError) as raised:
        made()
    assert "podman container restore w restores it" in raised.value.sentence()
    assert isinstance(raised.value, Interrupted) == isinstance(error, KeyboardInterrupt)
    (entry,) = store.entries()
    assert entry.name == ""
    assert os.listdir(store.path + "/staging") == []


def test_the_disk_is_full_after_the_end(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room of Podman's export, and of the records, is free before the pages are committed alone."""
    commit = Staging.commit
    found: list[int] = []

    def commit_if_fits(self: Staging, root: Descriptor, **options: Any) -> None:
        if options.get("names"):
            raise DiskFull("the disk is full")
        assert not list(Path(store.path, "staging").glob("*/*.tar"))
        found.append(len(list(Path(self.path, "blobs", "sha256").iterdir())))
        commit(self, root, **options)

    monkeypatch.setattr(Staging, "commit", commit_if_fits)
    with pytest.raises(GpusnapError, match="disk is full; nothing is lost: Podman has the checkpoint of w"):
        made()
    (entry,) = store.entries()
    root = artifacts.read(entry.descriptor, store.read)
    assert found == [len({each.digest for each in root.blobs()}) + 1]
    assert root.records is None


def test_we_fail_and_it_runs_on(pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing refers to the pages then, and nothing is left of them."""

    def fails(*_: object, **__: object) -> None:
        raise DiskFull("the disk is full")

    def settle(self: OrderedMemory, runs: bool) -> None:
        # Where the disk is full its room is needed for whatever follows.
        assert not list(Path(store.path, "staging").glob("*/*.tar"))
        really(self, runs)

    really = OrderedMemory.settle
    monkeypatch.setattr(convert, "take_in", fails)
    monkeypatch.setattr(OrderedMemory, "settle", settle)
    with pytest.raises(GpusnapError, match=r"^the disk is full$") as raised:
        made(leave_running=True)
    assert raised.value.hint.endswith("; w continues to run")
    assert store.entries() == ()
    assert os.listdir(store.path + "/staging") == []


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("status", "said"), [("running", "continues to run"), ("paused", "stays suspended")])
def test_what_became_of_it(fake: FakePodman, tmp_path: Path, status: str, said: str, whole: bool) -> None:
    """A suspended container, which Podman lists as paused, is not said to run after an interruption."""
    container = replace(podman.inspect_container("w"), status=status)
    export = Export(found=container, archive=str(tmp_path / "archive"), keep=str)
    export.whole = whole
    with pytest.raises(Interrupted) as raised, explain_export_errors(export):
        raise KeyboardInterrupt
    assert raised.value.sentence() == f"interrupted during the checkpoint; w {said}"


def test_interrupted_before_the_runtime_began(fake: FakePodman, tmp_path: Path) -> None:
    """Nobody else has said that the container runs on."""
    export = Export(found=podman.inspect_container("w"), archive=str(tmp_path / "archive"), keep=str)
    said = "podman container checkpoint was interrupted"  # as gpusnap.engines.podman_work has it
    with pytest.raises(Interrupted) as raised, explain_export_errors(export):
        raise Interrupted(said)
    assert raised.value.sentence() == f"{said}; w continues to run"


def test_a_module_is_gone_after_the_end(pages: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what is left, though the memory cannot be put into the store now either."""

    def fails(*_: object, **__: object) -> None:
        raise ImportError("No module named 'x'")

    monkeypatch.setattr(convert, "take_in", fails)
    monkeypatch.setattr(HandedOverMemory, "commit", fails)
    with pytest.raises(GpusnapError, match="nothing is lost: Podman has the checkpoint of w"):
        made()


@pytest.mark.parametrize("leave_running", [True, False])
def test_podman_fails_after_the_pages_were_handed_over(
    pages: FakePodman, store: Store, leave_running: bool
) -> None:
    """The store keeps them only where Podman has a checkpoint that needs them."""
    pages.fails("Error: writing the archive: no space left\n")
    if not leave_running:
        before = (pages.folder / "first.sh").read_text()
        pages.first(before + pages.ends("inventory.img", "gpusnap/manifest.json"))
    with pytest.raises(GpusnapError, match="no space left"):
        made(leave_running=leave_running)
    assert [each.name for each in store.entries()] == ([] if leave_running else [""])
    assert os.listdir(store.path + "/staging") == []


@pytest.mark.parametrize("leave_running", [True, False])
def test_the_pages_come_while_we_look(
    fake: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, leave_running: bool
) -> None:
    """If Podman alone is killed, its runtime may end the container after we saw it run: they stay."""
    find_left = failed_export._find_left

    def find_left_and_dump(export: failed_export.Export) -> str:
        left = find_left(export)
        order = json.loads(Path(overrides.FOLDER, f"{ID}.json").read_text())
        hand_over_pages(store, order["staging"], state_files.owner())
        return left

    fake.fails("Error: killed\n")
    monkeypatch.setattr(failed_export, "_find_left", find_left_and_dump)
    with pytest.raises(GpusnapError, match="killed"):
        made(leave_running=leave_running)
    assert len(store.list_handed_over()) == 1
    monkeypatch.setattr(proc, "is_same", lambda *_: False)
    assert len(tuple(handover.commit_left(store))) == 1


def test_another_process_has_the_pid(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed Podman shows the container as running; that its PID is in use again does not mean that."""
    pages.has(init=os.getpid())
    script = (pages.folder / "first.sh").read_text()
    pages.first(f"{script}mkdir -p $F/checkpoint\n: >$F/checkpoint/inventory.img\n")
    pages.fails("Error: killed\n")
    monkeypatch.setattr(proc, "is_same", lambda *_: False)
    with pytest.raises(GpusnapError, match="Podman has the checkpoint of w in its storage"):
        made()
    assert [each.name for each in store.entries()] == [""]


@pytest.mark.parametrize("leave_running", [True, False])
def test_the_journal_needs_the_pages(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, leave_running: bool
) -> None:
    """What `gpusnap recover` still has to put right finds them as they are."""
    pages.fails("gpusnap: a process could not be resumed\n")
    named = f"{store.path}/staging"
    monkeypatch.setattr(
        journal, "entries", lambda _: [entry_of(f"{named}/{each}") for each in os.listdir(named)]
    )
    with pytest.raises(GpusnapError, match="could not be resumed"):
        made(leave_running=leave_running)
    assert store.entries() == ()
    ((_, note),) = store.list_handed_over().items()
    assert note


def entry_of(path: str) -> journal.Entry:
    return journal.Entry(ID, "/image", (1, 1), (), path)


@pytest.mark.parametrize("moment", ["after the commit", "before the commit"])
def test_killed_with_the_pages(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whoever looks after it keeps them once: with the records if these were committed, else without."""

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    if moment == "after the commit":
        monkeypatch.setattr(OrderedMemory, "finish", die)
    else:
        monkeypatch.setattr(kept, "load", die)
    with pytest.raises(Killed):
        made()
    assert tuple(handover.commit_left(store)) == ()  # its command lives: this process
    monkeypatch.setattr(proc, "is_same", lambda *_: False)
    assert len(tuple(handover.commit_left(store))) == 1
    (entry,) = store.entries()
    assert bool(entry.name) == (moment == "after the commit")
    assert tuple(handover.commit_left(store)) == ()
    assert store.list_handed_over() == {}
    root = artifacts.read(entry.descriptor, store.read)
    assert (root.records is not None) == bool(entry.name)
    for each in root.blobs():
        store.layout.check_blob(each)


@pytest.mark.parametrize("fails", ["the records", "also the memory"])
def test_recover_finds_the_store(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """By the order, which is there until the memory is in the store, and stays if it cannot get there."""
    order = f"{overrides.FOLDER}/{ID}.json"

    def fail(*_: object, **__: object) -> None:
        assert overrides.list_stores() == {store.path}
        raise DiskFull("the disk is full")

    monkeypatch.setattr(convert, "take_in", fail)
    if fails == "also the memory":
        monkeypatch.setattr(handover.HandedOverMemory, "commit", fail)
    with pytest.raises(GpusnapError, match="the disk is full"):
        made()
    assert os.path.exists(order) == bool(store.list_handed_over()) == (fails == "also the memory")


def test_a_runtime_that_is_still_at_work(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """If its Podman is killed, it may hand the memory over after the end of the command: the order stays."""
    fake.first(
        f'name=$(sed -n \'s|.*"staging": "\\([0-9a-f]*\\)".*|\\1|p\' {tmp_path}/orders/{ID}.json)\n'
        f"mkdir {store.path}/staging/$name\n"
    )
    fake.fails("Error: killed\n")
    with pytest.raises(GpusnapError, match="killed"):
        made()
    assert overrides.list_stores() == {store.path}
    store.collect()
    assert os.listdir(f"{store.path}/staging") == []


@pytest.mark.parametrize("leave_running", [True, False])
def test_a_second_signal(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_running: bool
) -> None:
    """It does not keep us from saying what has become of the container, and leaves no file."""

    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    find_left = failed_export._find_left

    def find_left_interrupted(export: failed_export.Export) -> str:
        interrupt()
        return find_left(export)

    fake.first("" if leave_running else fake.ends("inventory.img"))
    monkeypatch.setattr(failed_export, "_find_left", find_left_interrupted)
    monkeypatch.setattr(archive, "put", interrupt)
    place = tmp_path / "out"
    place.mkdir()
    with pytest.raises(Interrupted) as raised:
        made(to=locator.InFile(str(place / "w.tar")), leave_running=leave_running)
    said = "w continues to run" if leave_running else "podman container restore w restores it"
    assert said in raised.value.sentence()
    assert os.listdir(place) == []


@pytest.mark.parametrize("to", ["", "oci", "registry.example/w:v1"])
@pytest.mark.parametrize("error", [DiskFull("the disk is full"), KeyboardInterrupt()])
def test_we_fail_and_podman_removes_it(
    pages: FakePodman,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    to: str,
) -> None:
    """With --rm the archive is all there is: it stays, also through gc, and so does what it refers to."""

    def fails(*_: object, **__: object) -> None:
        raise error

    pages.has(auto_remove=True)
    monkeypatch.setattr(checkpointing, "_ask", lambda *_, **__: None)
    monkeypatch.setattr(convert, "take_in", fails)
    place = locator.destination(f"oci:{store.path}" if to == "oci" else to) if to else None
    disk = Synced(tmp_path, monkeypatch)
    with pytest.raises(GpusnapError) as raised:
        made(**ENDS_AT_DUMP, to=place)
    said = raised.value.sentence()
    (kept_as,) = re.findall(r"Podman's export of w is kept as (\S+);", said)
    environment = f"GPUSNAP_STORE={store.path} " if to == "oci" else ""
    assert f"; {environment}podman container restore --import {kept_as} restores it" in said
    assert (f"and gpusnap push {kept_as} {to} pushes it" in said) is (to not in ("", "oci"))
    assert isinstance(raised.value, Interrupted) == isinstance(error, KeyboardInterrupt)
    assert store.collect().spared
    assert Path(kept_as).read_bytes() == (pages.folder / "archive").read_bytes()
    assert disk.has_file(kept_as)
    (entry,) = store.entries()
    assert entry.name == ""


def test_the_export_cannot_be_flushed(
    fake: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that it is safe."""

    def fails(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(archive, "sync", fails)
    fake.has(auto_remove=True)
    fake.first('cp $F/archive "$4"; rm $F/inspect.json\n')
    fake.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError, match=r"kept as /.*, but cannot be flushed to disk: Input/output"):
        made(**ENDS_AT_DUMP)


def test_podman_is_about_to_remove_it(
    fake: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That Podman still shows it is no reason to count on its checkpoint."""
    monkeypatch.setattr(failed_export, "_REMOVAL", 0.0)
    fake.has(auto_remove=True)
    fake.first(f'{fake.ends("inventory.img")}cp $F/archive "$4"\n')
    fake.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError, match="Podman's export of w is kept as /"):
        made(**ENDS_AT_DUMP)


def test_podman_no_longer_answers(fake: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its removal is waited for: the message names the export all the same."""
    inspect, asked = podman.inspect_container, list[str]()

    def inspect_once(wanted: str) -> podman.Container:
        asked.append(wanted)
        if len(asked) > 2:
            raise GpusnapError("Podman did not answer")
        return inspect(wanted)

    fake.has(auto_remove=True)
    fake.first(f'{fake.ends("inventory.img")}cp $F/archive "$4"\n')
    fake.fails("Error: cleaning up: no space left\n")
    monkeypatch.setattr(podman, "inspect_container", inspect_once)
    with pytest.raises(GpusnapError, match="Podman's export of w is kept as /"):
        made(**ENDS_AT_DUMP)
    assert len(asked) == 3


def test_podman_removes_one_of_its_volumes(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """The command makes that one from the export: the other one exists, so Podman would make none."""
    fake.has(auto_remove=True, volumes={"data": "", "0a1b": ""})
    fake.has_volumes("data")
    fake.first('cp $F/archive "$4"; rm $F/inspect.json\n')
    fake.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made(**ENDS_AT_DUMP)
    (kept_as,) = re.findall(r"Podman's export of w is kept as (\S+);", raised.value.sentence())
    assert raised.value.hint == (
        f"podman volume create 0a1b && tar -xOf {kept_as} volumes/0a1b.tar >0a1b.tar && "
        "podman volume import 0a1b 0a1b.tar && "
        f"podman container restore --import {kept_as} --ignore-volumes restores it"
    )


def test_an_export_without_volumes(fake: FakePodman, store: Store) -> None:
    """Podman makes an empty one of each that it has removed."""
    fake.has(auto_remove=True, volumes={"data": "", "0a1b": ""})
    fake.has_volumes("data")
    fake.first('cp $F/archive "$4"; rm $F/inspect.json\n')
    fake.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made(**ENDS_AT_DUMP, ignore_volumes=True)
    assert raised.value.hint.startswith("podman container restore --import ")
    assert raised.value.hint.endswith(" --ignore-volumes restores it")


def test_podman_removes_it(pages: FakePodman, store: Store) -> None:
    """Where nothing fails, nothing is left; if gpusnap were killed, gc would spare what Podman exports."""
    pages.has(auto_remove=True)
    script = (pages.folder / "first.sh").read_text()
    pages.first(f'{script}[ -e "$(dirname "$4")/precious" ] || exit 9\n')
    done = made(**ENDS_AT_DUMP)
    assert [each.name for each in store.entries()] == [done.name]
    assert os.listdir(store.path + "/staging") == []


@pytest.mark.parametrize("whole", [False, True])
def test_podman_fails_and_removes_it(fake: FakePodman, store: Store, whole: bool) -> None:
    """What it exported stays if there is all of it; else it is gone, and that is said."""
    fake.has(auto_remove=True)
    size = os.path.getsize(fake.folder / "archive") - (0 if whole else 2048)
    fake.first(f'head -c {size} $F/archive >"$4"\nrm $F/inspect.json\n')
    fake.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made(**ENDS_AT_DUMP)
    if whole:
        assert "podman container restore --import /" in raised.value.sentence()
    else:
        assert raised.value.sentence().endswith(
            "no space left; the container w has stopped, and Podman removes it (--rm) with its checkpoint"
        )
    assert len(os.listdir(store.path + "/staging")) == whole


def test_a_removed_container_and_a_file(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The archive stays, under a name that says what it is."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "")

    fake.has(auto_remove=True)
    (tmp_path / "to").mkdir()
    monkeypatch.setattr(archive, "put", fails)
    with pytest.raises(GpusnapError) as raised:
        made(**ENDS_AT_DUMP, to=locator.InFile(f"{tmp_path}/to/w.tar.zst"))
    (left,) = os.listdir(tmp_path / "to")
    assert re.fullmatch(r"checkpoint-of-w-[0-9a-f]{8}\.tar\.zst", left)
    assert f"ner restore --import {tmp_path}/to/{left} restores it" in raised.value.sentence()
    assert (tmp_path / "to" / left).read_bytes() == (fake.folder / "archive").read_bytes()


def test_a_signal_when_it_has_ended(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said when Podman is done."""
    real = podman_work.checkpoint

    def asked(*words: object, **more: object) -> bool:
        real(*words, **more)  # type: ignore[arg-type]
        return True

    monkeypatch.setattr(podman_work, "checkpoint", asked)
    for auto_remove, said in ((False, "podman container restore w"), (True, "restore --import /")):
        fake.has(auto_remove=auto_remove)
        with pytest.raises(Interrupted) as raised:
            made(**ENDS_AT_DUMP)
        assert said in raised.value.sentence()


def test_left_stopped_until_it_is_stored(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --rm, Podman leaves it running, and the command removes it; gc would not spare what it exports."""
    freed = list[str]()
    monkeypatch.setattr(left_stopped, "forget", freed.append)
    pages.has(auto_remove=True)
    script = (pages.folder / "first.sh").read_text()
    pages.first(f'{script}[ ! -e "$(dirname "$4")/precious" ] || exit 9\n')
    done = made()
    assert [each.name for each in store.entries()] == [done.name]
    ordered, removed = pages.calls()
    assert " --leave-running " in ordered
    assert removed == f"rm --force --ignore --time 0 --volumes {ID}"
    assert freed == [ID]


def test_it_cannot_be_left_stopped(pages: FakePodman, store: Store) -> None:
    """The runtime refuses that: then the dump ends it, and what Podman exports is spared."""
    pages.has(auto_remove=True)
    script = (pages.folder / "first.sh").read_text()
    refusal = f"Error: OCI runtime error: gpusnap-runtime: {left_stopped.make_refusal('why').sentence()}"
    pages.first(
        f"case \"$*\" in *--leave-running*) echo '{refusal} [{left_stopped.CODE}]' >&2; exit 125;; esac\n"
        f'{script}[ -e "$(dirname "$4")/precious" ] || exit 9\n'
    )
    done = made()
    assert [each.name for each in store.entries()] == [done.name]
    assert ["--leave-running" in each for each in pages.calls()] == [True, False]
    assert os.listdir(store.path + "/staging") == []


_LOST = (GpusnapError("the driver does not answer"), ImportError("No module named 'x'"))


@pytest.mark.parametrize("lost", [None, *_LOST])
def test_a_failure_while_it_is_stopped(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch, lost: Exception | None
) -> None:
    """It is brought back; if that fails, the message says how it is done again."""

    def bring_back(container: str, *_: object) -> None:
        brought.append(container)
        if lost is not None:
            raise lost

    brought = list[str]()
    monkeypatch.setattr(left_stopped, "bring_back", bring_back)
    pages.has(auto_remove=True)
    pages.fails("Error: cleaning up: no space left\n")
    with pytest.raises(GpusnapError) as raised:
        made()
    said = raised.value.sentence()
    assert brought == [ID]
    assert ("w continues to run" in said) is (lost is None)
    if lost is not None:
        why = said.partition("w is stopped, and nothing of it is lost: ")[2]
        assert str(lost) in why
        assert f"; gpusnap recover {ID[:12]} lets it run on" in why
    assert store.entries() == ()
    assert os.listdir(store.path + "/staging") == []


def test_a_signal_while_it_is_removed(
    pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is stored, and Podman goes on with the removal: it must not run on meanwhile."""
    freed = list[str]()
    monkeypatch.setattr(left_stopped, "forget", freed.append)
    monkeypatch.setattr(podman, "remove_running", lambda _: os.kill(os.getpid(), signal.SIGINT))
    pages.has(auto_remove=True)
    done = made()
    assert [each.name for each in store.entries()] == [done.name]
    assert freed == [ID]


def test_it_cannot_be_removed(pages: FakePodman, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on, and the message names its checkpoint, which is stored."""

    def fails(_: str) -> None:
        raise GpusnapError("the container cannot be removed")

    monkeypatch.setattr(podman, "remove_running", fails)
    monkeypatch.setattr(podman, "kill", fails)
    monkeypatch.setattr(left_stopped, "bring_back", lambda *_: None)
    pages.has(auto_remove=True)
    with pytest.raises(GpusnapError) as raised:
        made()
    (entry,) = store.entries()
    said = raised.value.sentence()
    assert f"the checkpoint of w is stored as {entry.name}, but the container cannot be removed" in said
    assert "w continues to run" in said


def test_an_archive_without_its_memory(fake: FakePodman, tmp_path: Path) -> None:
    """Such as a runtime makes that was ordered something else: not taken for a checkpoint."""
    (tmp_path / "with").mkdir()
    fake.exports(an_archive(tmp_path / "with", pages="store"))
    fake.has(auto_remove=True)
    with pytest.raises(GpusnapError, match="does not contain its memory, which is in a store"):
        made(to=locator.InFile(f"{tmp_path}/w.tar"), **ENDS_AT_DUMP)
    assert not (tmp_path / "w.tar").exists()


def test_an_archive_without_records(fake: FakePodman, tmp_path: Path) -> None:
    """Podman said that all is well."""
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.dump"))
    fake.exports(tmp_path / "bad.tar")
    for to in (None, locator.InFile(f"{tmp_path}/w.tar")):
        fake.has()
        with pytest.raises(
            GpusnapError, match=r"export of w does not contain spec\.dump; nothing is lost: Podman has"
        ):
            made(to=to)
    assert not (tmp_path / "w.tar").exists()


def test_two_at_once(fake: FakePodman, tmp_path: Path) -> None:
    """The second one is refused, and changes nothing."""
    with overrides.order(ID, pages="chunks"):
        for to in (None, locator.InFile(f"{tmp_path}/w.tar")):
            with pytest.raises(
                GpusnapError, match=r"another gpusnap .* suspend or resume of the container abababababab is"
            ):
                made(to=to)
    assert fake.status() == "running"
    assert not [name for name in os.listdir(tmp_path) if "w.tar" in name]


def test_no_room(fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before Podman is asked: what it may export, and the records beside it."""
    (tmp_path / "upper/etc").mkdir(parents=True)
    (tmp_path / "upper/etc/large").write_bytes(b"x" * (5 << 20))
    fake.has(upper=str(tmp_path / "upper"))
    real = os.statvfs
    monkeypatch.setattr(disk_space, "_RECORDS", 1 << 20)

    def room(free: int) -> None:
        found = list(real(tmp_path))
        found[0], found[1], found[4] = 4096, 4096, free // 4096
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found, {"f_fsid": 1}))

    for to, need in ((None, 12 << 20), (locator.InFile(f"{tmp_path}/w.tar"), 6 << 20)):
        room(need - 4096)
        with pytest.raises(
            GpusnapError, match=r"the checkpoint of w needs up to .* in .*, but only .* is free"
        ):
            made(to=to)
        assert fake.status() == "running"
        room(need)
        made(to=to)
        fake.has(upper=str(tmp_path / "upper"))
    room(2 << 20)
    made(ignore_rootfs=True)


def test_the_whole_amount_on_a_full_disk(
    fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU memory included, which the runtime would ask for next; a store that is not there is not begun."""
    found = list(os.statvfs(tmp_path))
    found[4] = 0
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(found, {"f_fsid": 1}))
    monkeypatch.setattr(disk_space, "_RECORDS", 1 << 20)
    monkeypatch.setattr(disk_space, "memory", lambda _, gpus: (3 << 30) if not gpus else 63 << 30)
    monkeypatch.setattr(disk_space, "measure_gpu_memory", lambda _: 60 << 30)
    for to, amount in (
        (locator.InStore(Store(tmp_path / "new"), ""), "66.0 GiB"),
        (locator.InFile(f"{tmp_path}/w.tar"), "63.0 GiB"),
    ):
        with pytest.raises(
            GpusnapError, match=rf"needs up to {amount} in .*, but only 0 B is free"
        ) as caught:
            made(to=to)
        assert caught.value.code == "GPS-007"
    assert not (tmp_path / "new").exists()
    assert fake.status() == "running"


def test_no_room_for_volumes(fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman copies them first, then come the archive and the records; holes count, and links do not."""
    folder = tmp_path / "volume"
    folder.mkdir()
    with open(folder / "large", "wb") as file:
        file.truncate(5 << 20)
    os.link(folder / "large", folder / "again")
    monkeypatch.setattr(disk_space, "_RECORDS", 0)
    monkeypatch.setattr(disk_space, "_HEADERS", 0)
    real = list(os.statvfs(tmp_path))

    def room(free: int) -> None:
        real[0], real[1], real[4] = 4096, 4096, free // 4096
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(real, {"f_fsid": 1}))

    fake.has(volumes={"vol": str(folder)})
    (fake.folder / "checkpoint").mkdir()
    room((15 << 20) - 4096)
    with pytest.raises(GpusnapError, match=r"needs up to 15\.0 MiB in .*, 5\.0 MiB of it for volumes, which"):
        made()
    assert fake.calls() == []
    made(ignore_volumes=True)
    fake.has(volumes={"vol": str(folder)})
    room(15 << 20)
    made()


def test_volumes_are_kept_once(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """Their chunks are known from then on, and linked."""
    data = tar_of({"weights": os.urandom(3 << 20)})
    fake.exports(written(tmp_path / "v.tar", None, None, more={"volumes/vol.tar": data}))
    first = made(name="one")
    assert first.new > 3 << 20
    assert len(store.open_known_chunks()) >= 1
    fake.has()
    fake.exports(written(tmp_path / "w.tar", None, None, more={"volumes/vol.tar": data, "artifacts/x": b"x"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer._Tools, "pack", lambda *_: pytest.fail("it was compressed again"))
        assert made(name="two").new < 1 << 20


def test_pages_that_are_not_there(pages: FakePodman, store: Store, tmp_path: Path) -> None:
    """A chunk that the runtime should have put into the store is named."""
    (tmp_path / "podman/first.sh").unlink()
    shutil.rmtree(tmp_path / "other")
    with pytest.raises(GpusnapError, match=r"the chunk sha256:[0-9a-f]{64} of .* is neither in"):
        made()


def test_a_registry_is_asked_first(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """One that does not let us in costs no container: it runs on, and nothing was made of it."""
    with FakeRegistry(tmp_path / "registry") as registry:
        registry.rule("HEAD", "/blobs/", Say(403), times=99)
        to = locator.InRegistry(parse(f"{registry.host}/team/app:v1"), plain_http=True)
        with pytest.raises(GpusnapError, match="team/app"):
            made(to=to)
        assert fake.calls() == []
        assert fake.status() == "running"
        registry.rules.clear()
        done = made(to=to)
        assert done.pushed is not None
        assert ("team/app", "v1") in registry.manifests
        # `gpusnap restore w` means it: it is the newest one of that name.
        assert re.fullmatch(r"w:\d{8}-\d{6}", done.name)
        assert {each.name for each in store.entries()} == {done.name, str(to.reference)}
        assert store.find("w").descriptor.digest == done.digest


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
        made()
    assert not (fake.folder / "calls").exists()


@pytest.mark.parametrize("pod", ["", "p1"])
def test_a_container_that_depends_on_another(fake: FakePodman, pod: str) -> None:
    """Podman would end it, and not export it then; the infra container of its own pod is no such one."""
    others = ["cd" * 32] if not pod else ["infra", "cd" * 32]
    fake.has(Pod=pod, Dependencies=others)
    with pytest.raises(GpusnapError) as raised:
        made()
    assert str(raised.value) == (
        "the container w depends on the container cdcdcdcdcdcd, and Podman cannot export the checkpoint "
        "of such a container"
    )
    assert raised.value.code == "GPS-204"
    assert fake.calls() == []
    fake.has(Pod="p1", Dependencies=["infra"])
    made()


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"Config": {"Secrets": [{"Name": "s"}]}}, "a secret that is a file"),
        (
            {"Mounts": [{"Type": "bind", "Source": "/s/userdata/overlay/1/merge"}]},
            "an overlay or image mount",
        ),
    ],
)
def test_what_podman_cannot_restore(fake: FakePodman, more: dict[str, object], what: str) -> None:
    """Refused before anything is done to it, but on demand."""
    fake.has(**more)  # type: ignore[arg-type]
    with pytest.raises(GpusnapError, match=rf"the container w has {what} .*cannot restore") as raised:
        made()
    assert raised.value.code == "GPS-205"
    assert fake.calls() == []
    made(force=True)
    fake.has(Config={"Healthcheck": {"Test": ["CMD", "true"]}})
    made()
