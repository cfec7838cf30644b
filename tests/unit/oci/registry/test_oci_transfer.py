"""Push and pull of whole artifacts: same bytes, nothing twice, the right order, every way to be cut off."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_registry import CutAnswer, CutBody, FakeRegistry, NoAnswer, Say
from oci_regions import blobs

from gpusnap.oci.base.errors import BlobError, NotInRegistry, Rejected, Unreachable
from gpusnap.oci.layout.documents import INDEX, Descriptor, Index, Manifest, encode_document
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry import upload
from gpusnap.oci.registry.copy import TransferProgress, TransferTotals, pull, push
from gpusnap.oci.registry.credentials import Credentials
from gpusnap.oci.registry.repository import Repository

ROOT = Path(__file__).parents[4]
SIZES = [0, 1, 70_000, 300_000, 5, 250_000, 1000, 100_000]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistry]:
    monkeypatch.setattr(upload, "MONOLITHIC", 100_000)
    with FakeRegistry(tmp_path / "registry") as made:
        yield made
        assert made.wrong == []


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def other(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "other").create()


def artifact(layout: Layout, seed: int = 0, *, sizes: list[int] = SIZES) -> Descriptor:
    """A manifest of blobs of these sizes; the first one is the same for every seed."""
    data = [random.Random(at and f"{seed} {at}").randbytes(size) for at, size in enumerate(sizes)]
    layers = tuple(layout.add_blob(each) for each in data)
    return layout.add_manifest(Manifest(layers[0], layers, "a/b"))


def index(layout: Layout, count: int = 3) -> Descriptor:
    """An index of manifests."""
    manifests = tuple(replace(artifact(layout, at), artifact_type="") for at in range(count))
    return layout.add_blob(encode_document(Index((*manifests, manifests[0])).to_json()), media_type=INDEX)


def everything(layout: Layout, root: Descriptor) -> dict[str, int]:
    """Digests and sizes of all that belongs to it, each checked."""
    found = {one.digest: one for one, _ in walk(root, layout.read_blob)}
    for one in found.values():
        layout.check_blob(one)
    return {digest: one.size for digest, one in found.items()}


@pytest.mark.parametrize("make", [artifact, index])
def test_there_and_back(registry: FakeRegistry, layout: Layout, other: Layout, make: object) -> None:
    """What is pulled is what was pushed, by its tag and by its digest."""
    root = artifact(layout) if make is artifact else index(layout)
    there = everything(layout, root)
    moved = push(root, layout, registry.repository(), tag="v1")
    assert moved == TransferTotals(len(there), sum(there.values()))
    for name in ("v1", root.digest):
        found, moved = pull(registry.repository(), name, other)
        assert (found.digest, found.size, found.media_type) == (root.digest, root.size, root.media_type)
        assert everything(other, found) == there
    assert moved == TransferTotals(0, 0, len(there), sum(there.values()))
    assert {name for name, _ in registry.manifests} == {"team/app"}
    assert set(blobs(Path(other.path))) == {digest.removeprefix("sha256:") for digest in there}


def test_a_second_push_sends_nothing(registry: FakeRegistry, layout: Layout) -> None:
    """All is asked for, nothing is sent."""
    root = artifact(layout)
    first = push(root, layout, registry.repository(), tag="v1")
    registry.seen.clear()
    second = push(root, layout, registry.repository(), tag="v1")
    assert second == TransferTotals(0, 0, first.blobs, first.bytes)
    assert {each.method for each in registry.seen} == {"HEAD"}
    third = push(root, layout, registry.repository(), tag="v2")
    assert third == TransferTotals(1, root.size, first.blobs - 1, first.bytes - root.size)


def test_only_what_is_new_is_sent(registry: FakeRegistry, layout: Layout) -> None:
    """Another artifact that shares a blob sends the others."""
    push(artifact(layout, 1, sizes=[70_000, 10]), layout, registry.repository(), tag="v1")
    root = artifact(layout, 2, sizes=[70_000, 10])
    assert push(root, layout, registry.repository(), tag="v2") == TransferTotals(2, 10 + root.size, 1, 70_000)


def test_without_a_tag(registry: FakeRegistry, layout: Layout) -> None:
    """It is there by its digest alone."""
    root = artifact(layout)
    push(root, layout, registry.repository())
    assert [name for _, name in registry.manifests] == [root.digest]


def test_manifests_last(registry: FakeRegistry, layout: Layout) -> None:
    """No manifest before the blobs, no index before its manifests; the registry refuses such."""
    push(index(layout), layout, registry.repository(), tag="v1")
    puts = [each.path for each in registry.asked("PUT")]
    first = next(at for at, path in enumerate(puts) if "manifests" in path)
    assert all("manifests" in path for path in puts[first:])
    assert puts[-1].endswith("/manifests/v1")


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.parametrize("lost", [1, 0])
def test_a_registry_that_loses_blobs(
    registry: FakeRegistry, layout: Layout, monkeypatch: pytest.MonkeyPatch, status: int, lost: int
) -> None:
    """What it had confirmed, and has no more when the manifest comes, is sent again, once."""
    root = artifact(layout)
    digests = [each.digest for each in layout.read_manifest(root).layers[2 : 2 + lost]]
    real = Repository.put_manifest

    def put(self: Repository, content: bytes, media_type: str, wanted: str = "") -> Descriptor:
        registry.members["team/app"].difference_update(each.removeprefix("sha256:") for each in digests)
        body = json.dumps({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN", "message": "blob unknown"}]})
        registry.rule("PUT", "/manifests/", Say(status, body=body.encode()), times=2 - lost)
        monkeypatch.setattr(Repository, "put_manifest", real)
        return real(self, content, media_type, wanted)

    monkeypatch.setattr(Repository, "put_manifest", put)
    if lost:
        found = push(root, layout, registry.repository(), tag="v1")
        assert (found.blobs, found.bytes) == (len(SIZES) + 2, sum(SIZES) + SIZES[2] + root.size)
        assert ("team/app", "v1") in registry.manifests
    else:  # it says so of blobs that it has
        with pytest.raises(Rejected, match="MANIFEST_BLOB_UNKNOWN"):
            push(root, layout, registry.repository(), tag="v1")


def test_mounted(registry: FakeRegistry, layout: Layout) -> None:
    """What another repository of the registry has is not sent."""
    root = artifact(layout)
    first = push(root, layout, registry.repository("other/app"), tag="v1")
    moved = push(root, layout, registry.repository(), tag="v1", mount_from=["other/app"])
    count = first.blobs - 1
    assert moved == TransferTotals(1, root.size, count, first.bytes - root.size, mounted=count)


def test_a_registry_that_wants_tokens(registry: FakeRegistry, layout: Layout, other: Layout) -> None:
    """One login serves all threads, and mounts."""
    registry.login, registry.users = "bearer", {"someone": "words"}
    someone = Credentials("someone", "words")
    root = artifact(layout)
    push(root, layout, registry.repository("other/app", credentials=someone), tag="v1")
    mine = registry.repository(credentials=someone)
    assert push(root, layout, mine, tag="v1", mount_from=["other/app"]).mounted == len(SIZES)
    pull(mine, "v1", other)
    assert everything(other, root) == everything(layout, root)


def test_what_only_the_registry_has(registry: FakeRegistry, layout: Layout) -> None:
    """A blob that this layout has lost is no error where the registry has it; else it is named."""
    root = artifact(layout)
    push(root, layout, registry.repository(), tag="v1")
    lost = layout.read_manifest(replace(root, artifact_type="")).layers[3]
    Path(layout.path, "blobs/sha256", lost.digest.removeprefix("sha256:")).unlink()
    push(root, layout, registry.repository(), tag="v2")
    with pytest.raises(BlobError, match=f"the blob {lost.digest} cannot be read: it does not exist"):
        push(root, layout, registry.repository("new/app"), tag="v1")
    assert [name for name in registry.manifests if name[0] == "new/app"] == []


@pytest.mark.parametrize("at", range(1, len(SIZES)))
def test_a_flipped_bit_is_not_pushed(registry: FakeRegistry, layout: Layout, at: int) -> None:
    """Whichever blob it is in: it is named, and the registry gets no manifest."""
    root = artifact(layout)
    blob = layout.read_manifest(root).layers[at]
    path = Path(layout.path, "blobs/sha256", blob.digest.removeprefix("sha256:"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(BlobError, match=f"the blob {blob.digest} does not match"):
        push(root, layout, registry.repository(), tag="v1")
    assert registry.manifests == {}
    assert not registry.has(blob.digest)


@pytest.mark.parametrize("at", range(1, len(SIZES)))
def test_a_flipped_bit_is_not_pulled(registry: FakeRegistry, layout: Layout, other: Layout, at: int) -> None:
    """Whichever blob it is in: it is named and has no name in the layout."""
    root = artifact(layout)
    push(root, layout, registry.repository(), tag="v1")
    blob = layout.read_manifest(root).layers[at]
    path = registry.folder / "blobs" / blob.digest.removeprefix("sha256:")
    data = bytearray(path.read_bytes())
    data[0] ^= 0x01
    path.write_bytes(data)
    with pytest.raises(
        BlobError, match=f"the blob {blob.digest} was received with content that does not match"
    ):
        pull(registry.repository(), "v1", other)
    assert not other.has_blob(blob.digest, blob.size)


def test_what_a_killed_pull_left(registry: FakeRegistry, layout: Layout, other: Layout) -> None:
    """Blobs that are there and right do not come again; wrong and short ones do."""
    root = artifact(layout)
    push(root, layout, registry.repository(), tag="v1")
    layers = layout.read_manifest(root).layers
    folder = Path(other.path, "blobs/sha256")
    for at, change in (
        (2, lambda data: data),
        (3, lambda data: bytes(len(data))),
        (5, lambda data: data[:-1]),
    ):
        name = layers[at].digest.removeprefix("sha256:")
        (folder / name).write_bytes(change(Path(layout.path, "blobs/sha256", name).read_bytes()))
    (folder / root.digest.removeprefix("sha256:")).write_bytes(bytes(root.size))
    _, moved = pull(registry.repository(), "v1", other)
    assert (moved.skipped_blobs, moved.skipped_bytes) == (1, SIZES[2])
    assert everything(other, root) == everything(layout, root)


def test_have_and_wanted(registry: FakeRegistry, layout: Layout, other: Layout) -> None:
    """The caller may bring blobs from elsewhere, and leave some out."""
    root = artifact(layout)
    push(root, layout, registry.repository(), tag="v1")
    layers = layout.read_manifest(root).layers

    def have(one: Descriptor) -> bool:
        if one.size == 70_000 or one.digest == root.digest:
            other.link_blob(one.digest, one.size, layout)
            return True
        return False

    found, moved = pull(registry.repository(), "v1", other, have=have, wanted=lambda one: one.size < 200_000)
    assert found.digest == root.digest
    kept = [each for each in layers if each.size < 200_000]
    assert moved.skipped_bytes == 70_000 + root.size
    assert moved.blobs == len(kept) - 1
    assert [other.has_blob(each.digest, each.size) for each in layers] == [each in kept for each in layers]


@pytest.mark.parametrize("threads", [1, 8])
def test_through_thick_and_thin(registry: FakeRegistry, layout: Layout, other: Layout, threads: int) -> None:
    """With breaks of every kind all along, the bytes are the same."""
    root = index(layout)
    whats: list[Say | NoAnswer | CutBody | CutAnswer] = [
        Say(500),
        NoAnswer(),
        Say(429, {"Retry-After": "1"}),
        CutBody(30_000),
        CutAnswer(40_000),
    ]
    for method in ("HEAD", "POST", "PATCH", "PUT", "GET"):
        # Each fourth request of a kind breaks, in one way after the other.
        for at, what in enumerate(whats * 2):
            registry.rule(method, "", what, skip=3 + 4 * at - at)
    mine = registry.repository()
    push(root, layout, mine, tag="v1", threads=threads)
    pull(mine, "v1", other, threads=threads)
    assert everything(other, root) == everything(layout, root)
    assert len([rule for rule in registry.rules if not rule.times]) > 20


def test_a_registry_that_stops_answering(registry: FakeRegistry, layout: Layout) -> None:
    """It ends, and the message names what could not be sent; the next push goes on from there."""
    root = artifact(layout)
    registry.rule("PUT", "blobs", Say(503), skip=3, times=999)
    with pytest.raises(
        Unreachable, match=r"team/app rejected the blob sha256:\w+ of \d+ bytes \(12 attempts\)$"
    ):
        push(root, layout, registry.repository(), tag="v1", threads=1)
    registry.rules.clear()
    assert push(root, layout, registry.repository(), tag="v1").skipped_blobs == 3


def test_a_tag_that_is_not_there(registry: FakeRegistry, other: Layout) -> None:
    """Nothing is written."""
    with pytest.raises(NotInRegistry, match="team/app:v1 cannot be read: not found"):
        pull(registry.repository(), "v1", other)
    assert blobs(Path(other.path)) == {}


def test_progress(registry: FakeRegistry, layout: Layout, other: Layout) -> None:
    """It ends with what was moved, is told by one thread at a time, and its error ends the transfer."""
    root, calls, inside = artifact(layout), list[TransferProgress](), threading.Lock()

    def tell(underway: TransferProgress) -> None:
        assert inside.acquire(blocking=False)
        calls.append(underway)
        inside.release()

    moved = push(root, layout, registry.repository(), tag="v1", progress=tell)
    assert calls[-1] == TransferProgress(moved, moved.bytes)
    calls.clear()
    _, moved = pull(registry.repository(), "v1", other, progress=tell)
    assert calls[-1] == TransferProgress(moved, moved.bytes)

    def fail(underway: TransferProgress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        push(root, layout, registry.repository("b"), progress=fail)


PROGRAM = """
import sys
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.repository import Repository
from gpusnap.oci.registry.copy import pull, push
way, host, path, digest, kind, size = sys.argv[1:]
repository = Repository(Reference(host, "team/app"), Client(host, plain_http=True))
if way == "push":
    push(Descriptor(kind, digest, int(size)), Layout(path), repository, tag="v1", threads=2)
else:
    pull(repository, "v1", Layout(path), threads=2)
"""


@pytest.mark.parametrize("way", ["push", "pull"])
def test_killed(registry: FakeRegistry, layout: Layout, other: Layout, way: str) -> None:
    """A killed push or pull leaves nothing wrong, and the next one moves only the rest."""
    root = artifact(layout, sizes=[10_000] * 40)
    if way == "pull":
        push(root, layout, registry.repository(), tag="v1")
    before = len(registry.seen)
    path = layout.path if way == "push" else other.path
    argv = [
        sys.executable,
        "-c",
        PROGRAM,
        way,
        registry.host,
        path,
        root.digest,
        root.media_type,
        str(root.size),
    ]
    # It stands still in the middle until it is killed.
    registry.rule(
        "PUT" if way == "push" else "GET", "blobs", Say(503, {"Retry-After": "200"}), skip=15, times=999
    )
    child = subprocess.Popen(argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        end = time.monotonic() + 20
        while registry.rules[-1].times > 997 and child.poll() is None and time.monotonic() < end:
            os.sched_yield()
        assert registry.rules[-1].times <= 997, f"{len(registry.seen) - before} requests"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    registry.rules.clear()
    if way == "push":
        assert registry.manifests == {}
        moved = push(root, layout, registry.repository(), tag="v1")
    else:
        _, moved = pull(registry.repository(), "v1", other)
        assert everything(other, root) == everything(layout, root)
    assert moved.skipped_blobs >= 15


def test_two_pushes_of_the_same(registry: FakeRegistry, layout: Layout, other: Layout) -> None:
    """Both succeed."""
    root, errors = artifact(layout), list[BaseException]()

    def one() -> None:
        try:
            push(root, layout, registry.repository(), tag="v1")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    pull(registry.repository(), "v1", other)
    assert everything(other, root) == everything(layout, root)


def test_into_a_new_repository(registry: FakeRegistry, layout: Layout) -> None:
    """All requests of a push ask for the right to push: to pull out of what is not there yet, nobody has."""
    registry.login, registry.users, registry.strict = "bearer", {"someone": "words"}, True
    root = artifact(layout)
    repository = registry.repository("team/new", credentials=Credentials("someone", "words"))
    moved = push(root, layout, repository, tag="v1")
    assert moved.bytes == sum(everything(layout, root).values())
    assert push(root, layout, repository, tag="v1").blobs == 0
