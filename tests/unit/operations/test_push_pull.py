"""gpusnap push and pull, against a registry on loopback."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archives import listed
from fake_registry import FakeRegistry, Say
from fakes import wait_for
from kept_checkpoints import an_archive, keep, keep_pages

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.locator import InFile, InRegistry, InStore
from gpusnap.checkpoints.names import store_name
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.reference import Reference, parse
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.registry.copy import TransferTotals
from gpusnap.oci.store.store import Store
from gpusnap.operations import pull as pulling
from gpusnap.operations import push_pull
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, UsageError


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found
    assert found.wrong == []


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def archive(tmp_path: Path) -> str:
    return an_archive(tmp_path)


QUIET = Progress(shown=False)


def at(registry: FakeRegistry, rest: str = "team/app:v1") -> InRegistry:
    return locator.parse_registry(f"http://{registry.host}/{rest}")


def test_there_and_back(registry: FakeRegistry, store: Store, archive: str, tmp_path: Path) -> None:
    """Store, registry, another store: the same digest, every byte there, under the reference as its name."""
    digest = keep(store, archive, ["w"])
    pushed = push_pull.push(InStore(store, "w"), at(registry), progress=QUIET)
    assert (pushed.reference, pushed.digest) == (f"{registry.host}/team/app:v1", digest)
    again = push_pull.push(InStore(store, "w"), at(registry), progress=QUIET)
    assert again.moved.blobs == 0
    other = Store(tmp_path / "other")
    pulled = push_pull.pull(at(registry), to=InStore(other, ""), progress=QUIET)
    assert (pulled.digest, pulled.name, pulled.store) == (digest, pushed.reference, other.path)
    assert pulled.moved.skipped_blobs == 0  # its store was empty
    assert (pulled.moved.blobs, pulled.moved.bytes) == (pushed.moved.blobs, pushed.moved.bytes)
    with kept.hold_artifact(InStore(other, pulled.name)) as (_, found):
        for each in found.artifact.blobs():
            other.layout.check_blob(each)
        chunks = [chunk for table in found.tables for chunk in table.chunks]
    # What a compressed one holds is only what the one who pushed it says.
    known = other.open_known_chunks()
    assert any(chunk.encoding == "zstd" for chunk in chunks)
    assert all((known.find(chunk.plain) is not None) == (chunk.encoding == "plain") for chunk in chunks)
    assert os.listdir(other.path + "/staging") == []


def test_an_archive_and_back(registry: FakeRegistry, store: Store, archive: str, tmp_path: Path) -> None:
    """What Podman exported can be imported again; nothing of it stays in the store."""
    push_pull.push(InFile(archive), at(registry), progress=QUIET)
    for name in ("out.tar", "out.tar.zst"):
        pulled = push_pull.pull(at(registry), file=str(tmp_path / name), progress=QUIET)
        assert (pulled.store, pulled.name, pulled.file) == ("", "", str(tmp_path / name))
        before, after = listed(archive), listed(pulled.file)
        ours = {name for name in before if name.startswith("checkpoint/gpusnap/")}
        assert {name: after.get(name) for name in before.keys() - ours} == {
            name: before[name] for name in before.keys() - ours
        }
        assert {name for name in ours if "/blobs/" in name} <= after.keys()
    assert store.entries() == ()
    assert os.listdir(store.path + "/staging") == []
    with pytest.raises(UsageError, match="compressed by gzip"):
        push_pull.pull(at(registry), file="out.tgz", progress=QUIET)


def test_pull_to_a_file_that_is_there(registry: FakeRegistry, tmp_path: Path) -> None:
    """It is not replaced, and nothing is asked for."""
    (tmp_path / "out.tar").write_text("earlier")
    with pytest.raises(GpusnapError, match=r"out\.tar exists already"):
        push_pull.pull(at(registry), file=str(tmp_path / "out.tar"), progress=QUIET)
    assert (tmp_path / "out.tar").read_text() == "earlier"


def test_both(registry: FakeRegistry, store: Store, archive: str, tmp_path: Path) -> None:
    """-o with --to."""
    push_pull.push(InFile(archive), at(registry), progress=QUIET)
    pulled = push_pull.pull(
        at(registry), file=str(tmp_path / "out.tar"), to=InStore(store, "x"), progress=QUIET
    )
    assert [each.name for each in store.entries()] == ["x"] == [pulled.name]
    assert os.path.exists(pulled.file)


def test_a_pull_that_broke_goes_on(
    registry: FakeRegistry, store: Store, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What had come is not asked for again, and nothing was named before all had."""
    push_pull.push(InFile(archive), at(registry), progress=QUIET)
    document = registry.manifests["team/app", "v1"][1]
    layers = [each["digest"] for each in json.loads(document)["layers"]]
    registry.rule("GET", layers[-1], Say(403), times=99)
    act, first = registry.act, f"staging/*/blobs/sha256/{layers[0].removeprefix('sha256:')}"

    def late(method: str, path: str) -> object:
        if method == "GET" and layers[-1] in path:
            wait_for(lambda: list(Path(store.path).glob(first)), "another blob")
        return act(method, path)

    with monkeypatch.context() as patched:
        patched.setattr(registry, "act", late)
        with pytest.raises(GpusnapError):
            push_pull.pull(at(registry), progress=QUIET)
    assert store.entries() == ()
    registry.rules.clear()
    registry.seen.clear()
    push_pull.pull(at(registry), progress=QUIET)
    assert len(registry.asked("GET", "blobs/")) < len(layers)
    assert len(store.entries()) == 1
    assert os.listdir(store.path + "/staging") == []


def test_what_the_store_has_does_not_come(registry: FakeRegistry, store: Store, archive: str) -> None:
    """Though it has it under another name."""
    keep(store, archive, ["w"])
    push_pull.push(InStore(store, "w"), at(registry), progress=QUIET)
    registry.seen.clear()
    assert push_pull.pull(at(registry), progress=QUIET).moved.bytes == 0
    assert registry.asked("GET", "blobs/") == []
    assert {each.name for each in store.entries()} == {"w", f"{registry.host}/team/app:v1"}


def test_siblings(registry: FakeRegistry, store: Store, archive: str) -> None:
    """What went to another repository of the registry is taken from there."""
    keep(store, archive, ["w", f"{registry.host}/team/app:v1"])
    push_pull.push(InStore(store, "w"), at(registry), progress=QUIET)
    moved = push_pull.push(InStore(store, "w"), at(registry, "team/other:v1"), progress=QUIET).moved
    assert moved.mounted > 0
    assert moved.blobs == 1


@pytest.mark.parametrize("form", ["podman", "cri"])
@pytest.mark.parametrize("what", ["store", "file"])
def test_images(
    registry: FakeRegistry, store: Store, archive: str, form: push_pull.Format, what: str
) -> None:
    """An ordinary image of one layer, from either, that says what it is to the engine."""
    keep(store, archive, ["w"])
    source = InStore(store, "w") if what == "store" else InFile(archive)
    pushed = push_pull.push(source, at(registry), format=form, progress=QUIET)
    manifest = json.loads(registry.manifests["team/app", "v1"][1])
    assert manifest["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
    assert len(manifest["layers"]) == 1
    notes = {
        "podman": "io.podman.annotations.checkpoint.runtime.name",
        "cri": "org.criu.checkpoint.container.name",
    }
    assert manifest["annotations"][notes[form]]
    assert os.listdir(store.path + "/staging") == []
    with pytest.raises(GpusnapError, match="is a checkpoint as an image, which"):
        push_pull.pull(at(registry, f"team/app@{pushed.digest}"), progress=QUIET)


def test_the_latest(registry: FakeRegistry, store: Store, archive: str) -> None:
    """Without a tag, both ways; a digest of something else is no place to push to."""
    digest = keep(store, archive, ["w"])
    pushed = push_pull.push(InStore(store, "w"), at(registry, "team/app"), progress=QUIET)
    assert pushed.reference.endswith("/team/app:latest")
    assert push_pull.pull(at(registry, "team/app"), progress=QUIET).digest == digest
    assert push_pull.pull(at(registry, f"team/app@{digest}"), progress=QUIET).digest == digest
    with pytest.raises(UsageError, match="names another digest"):
        push_pull.push(InStore(store, "w"), at(registry, f"team/app@sha256:{'0' * 64}"), progress=QUIET)


def test_what_is_not_there(registry: FakeRegistry, store: Store) -> None:
    """In the registry, and in the store."""
    store.create()
    with pytest.raises(NotFound):
        push_pull.pull(at(registry, "team/gone:v1"), progress=QUIET)
    with pytest.raises(NotFound):
        push_pull.push(InStore(store, "gone"), at(registry), progress=QUIET)


def test_tls_is_for_all(registry: FakeRegistry, store: Store, archive: str) -> None:
    """Without a word nothing goes over plain HTTP, to loopback neither."""
    keep(store, archive, ["w"])
    with pytest.raises(GpusnapError):
        push_pull.push(InStore(store, "w"), locator.parse_registry(f"{registry.host}/a:b"), progress=QUIET)
    assert registry.asked("PUT") == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("registry.example/team/w:v1", "registry.example/team/w:v1"),
        ("[::1]:5000/w:v1", "1:5000/w:v1"),
        ("registry.example/a__b:v1-", "registry.example/a_b:v1"),
    ],
)
def test_names_in_the_store(text: str, name: str) -> None:
    """A reference, in the narrower grammar of a store."""
    found: Reference = parse(text)
    assert store_name(found) == name


def test_pages_only_is_no_archive(registry: FakeRegistry, store: Store) -> None:
    """It has no records."""
    digest = keep_pages(store)
    with pytest.raises(Refused, match="has only the memory"):
        push_pull.push(InStore(store, digest), at(registry), format="podman", progress=QUIET)


@pytest.mark.parametrize(("speed", "stays"), [(1 << 30, True), (1, False)])
def test_a_slow_network(
    registry: FakeRegistry,
    store: Store,
    archive: str,
    monkeypatch: pytest.MonkeyPatch,
    speed: int,
    stays: bool,
) -> None:
    """What would not come in time comes first, by how fast some of it does."""
    push_pull.push(InFile(archive), at(registry), progress=QUIET)
    monkeypatch.setattr(pulling, "_NOTHING", 0)
    now = 0.0
    real = transfer.pull

    def pull(*words: object, **more: object) -> tuple[Descriptor, TransferTotals]:
        nonlocal now
        root, moved = real(*words, **more)  # type: ignore[arg-type]
        now += moved.bytes / speed
        return root, moved

    monkeypatch.setattr(transfer, "pull", pull)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pulling.fetch(store, at(registry), leave=1 << 30, seconds=1.0, progress=QUIET) as (
        staging,
        found,
        _,
    ):
        there = [staging.layout.has_blob(each.digest, each.size) for each in found.artifact.chunks]
    assert all(there) is not stays
    # The first one shows how fast.
    assert there[0]


def test_what_the_store_has_is_not_read_for_a_restore(
    registry: FakeRegistry, store: Store, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read when it is used; a pull reads it, and brings what is damaged."""
    keep(store, archive, ["w"])
    push_pull.push(InStore(store, "w"), at(registry), progress=QUIET)
    read: list[str] = []
    real = Layout.check_blob

    def check(layout: Layout, wanted: Descriptor) -> None:
        read.append(wanted.digest)
        real(layout, wanted)

    monkeypatch.setattr(Layout, "check_blob", check)
    with pulling.fetch(store, at(registry), leave=1 << 30, seconds=1.0, progress=QUIET) as (_, found, _):
        chunks = {each.digest for each in found.artifact.chunks}
        assert not chunks & set(read)
    with pulling.fetch(store, at(registry), progress=QUIET):
        assert sorted(chunks) == sorted(set(read) & chunks)
        assert all(read.count(each) == 1 for each in chunks)


def test_another_pull_of_the_same_that_does_not_end(
    registry: FakeRegistry, store: Store, archive: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not waited for without end."""
    push_pull.push(InFile(archive), at(registry), progress=QUIET)
    monkeypatch.setattr(pulling, "_PATIENCE", 0)
    with (
        pulling.fetch(store, at(registry), progress=QUIET),
        pytest.raises(GpusnapError, match="another process is working"),
    ):
        push_pull.pull(at(registry), progress=QUIET)
