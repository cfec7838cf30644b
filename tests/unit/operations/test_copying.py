"""gpusnap copy, between stores, layouts, files and a registry on loopback."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from archives import listed
from fake_registry import FakeRegistry, Say
from kept_checkpoints import an_archive, keep
from oci_checkpoints import begin, blob_path, end, names, stagings, whole

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged, NotFound
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.locator import InFile, InLayoutFile, InRegistry, InStore
from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.layout.archive import LayoutArchive
from gpusnap.oci.layout.documents import Descriptor, Index, Manifest, empty_descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.partial_blob import Incoming
from gpusnap.oci.store.referrers import list_referring
from gpusnap.oci.store.store import Store
from gpusnap.operations import disk_space
from gpusnap.operations.copy import CopyResult, Destination, Source, copy
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, UsageError
from gpusnap.runtime_shim.base.units import human

QUIET = Progress(shown=False)
Run = Callable[..., tuple[int, str, str]]


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
def digest(store: Store, tmp_path: Path) -> str:
    """Of a checkpoint in it, called w."""
    return keep(store, an_archive(tmp_path), ["w"])


def at(registry: FakeRegistry, rest: str = "team/app:v1") -> InRegistry:
    return locator.parse_registry(f"http://{registry.host}/{rest}")


def copied(what: Source, to: Destination) -> CopyResult:
    return copy(what, to, progress=QUIET)


def signed(store: Store, digest: str, text: bytes = b"signature") -> Descriptor:
    """Have a store keep a manifest that refers to a checkpoint of its."""
    to = store.find(digest).descriptor
    with store.stage() as staging:
        config = staging.layout.add_blob(b"{}", media_type=empty_descriptor().media_type)
        layer = staging.layout.add_blob(text, media_type="application/x-signature")
        root = staging.layout.add_manifest(
            Manifest(config, (layer,), "application/x-signature", Descriptor(to.media_type, digest, to.size))
        )
        staging.commit(root)
    return root


def referrers(store: Store, digest: str) -> set[str]:
    entries = [each.descriptor for each in store.entries()]
    return {each.digest for each in list_referring(entries, store.read, digest)}


def test_the_round_trip(store: Store, digest: str, registry: FakeRegistry, tmp_path: Path) -> None:
    """Store, another store, a file, a registry, another registry, a third store: one digest, signed."""
    signature = signed(store, digest)
    other, third = Store(tmp_path / "other"), Store(tmp_path / "third")
    first, second = str(tmp_path / "first.tar"), str(tmp_path / "second.tar")
    with FakeRegistry(tmp_path / "elsewhere") as elsewhere:
        steps: list[tuple[Source, Destination]] = [
            (InStore(store, "w"), InStore(other, "")),
            (InStore(other, "w"), InLayoutFile(first)),
            (InFile(first), at(registry)),
            (at(registry), at(elsewhere, "copy/app:v2")),
            (at(elsewhere, "copy/app:v2"), InLayoutFile(second)),
            (InFile(second), InStore(third, "x")),
        ]
        for what, to in steps:
            assert copied(what, to).digest == digest
        assert elsewhere.wrong == []
    assert whole(other).keys() == {"w", signature.digest}
    assert whole(third).keys() == {"x", signature.digest}
    assert referrers(third, digest) == {signature.digest} == referrers(other, digest)
    for each in (store, other, third):
        assert stagings(each) == []
    # This host's store was only on the way between the registries.
    assert {entry.name for entry in store.entries()} == {"w", ""}


def test_nothing_is_copied_twice(store: Store, digest: str, registry: FakeRegistry, tmp_path: Path) -> None:
    """Not what a store or a registry has under another name either."""
    other = Store(tmp_path / "other")
    for to in (InStore(other, "a"), at(registry)):
        first, again = copied(InStore(store, "w"), to), copied(InStore(store, "w"), to)
        assert first.moved.blobs > 0
        assert (again.moved.blobs, again.moved.bytes) == (0, 0)
        assert again.moved.skipped_blobs == first.moved.blobs
    assert copied(at(registry), InStore(other, "b")).moved.blobs == 0
    assert whole(other) == {"a": digest, "b": digest}
    with FakeRegistry(tmp_path / "elsewhere") as elsewhere:
        copied(InStore(store, "w"), at(elsewhere))
        Store(tmp_path / "store").remove("w")
        Store(tmp_path / "store").collect()
        registry.seen.clear()
        moved = copied(at(registry), at(elsewhere, "team/app:v2")).moved
    assert moved.blobs == 1  # the manifest has another name
    # The config alone says what it is; of the rest nothing had to come.
    assert len(registry.asked("GET", "/blobs/")) == 1


def test_an_archive_of_podman(store: Store, digest: str, tmp_path: Path) -> None:
    """Out of a store, and into one, straight: the same files, and the name of `gpusnap checkpoint`."""
    for name in ("out.tar", "out.tar.zst"):
        done = copied(InStore(store, "w"), InFile(str(tmp_path / name)))
        assert (done.digest, done.file) == (digest, str(tmp_path / name))
        theirs = {each for each in listed(str(tmp_path / "in.tar")) if "gpusnap" not in each}
        assert theirs <= listed(str(tmp_path / name)).keys()
    other = Store(tmp_path / "other")
    done = copied(InFile(str(tmp_path / "out.tar")), InStore(other, ""))
    assert whole(other) == {done.name: done.digest}
    assert re.fullmatch("serving31m-[0-9a-f]{6}:20260203-040506", done.name)
    assert stagings(other) == []
    assert stagings(store) == []


def test_an_image_layout_of_another_tool(store: Store, digest: str, tmp_path: Path) -> None:
    """It is read as it is, and becomes a store where it is the destination."""
    theirs = Layout(tmp_path / "theirs").create()
    theirs.commit(Index())
    done = copied(InStore(store, "w"), InStore(Store(theirs.path), "y"))
    assert (done.store, done.name) == (theirs.path, "y")
    assert whole(Store(theirs.path)) == {"y": digest}


def test_the_archive_is_a_layout(store: Store, digest: str, tmp_path: Path) -> None:
    """Its index names the checkpoint as the store does, and what it marks is what anybody reads."""
    path = str(tmp_path / "w.tar")
    done = copied(InStore(store, "w"), InLayoutFile(path))
    assert (done.file, done.moved.skipped_blobs) == (path, 0)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with LayoutArchive(path) as found:
        (root,) = found.read_index().manifests
        assert (root.digest, root.annotations["org.opencontainers.image.ref.name"]) == (digest, "w")
        for each in found.read_manifest(root).layers:
            found.check_blob(each)
    copied(locator.find(f"oci-archive:{path}"), InStore(store, "again"))
    assert store.find("again").descriptor.digest == digest


@pytest.mark.parametrize("to", ["store", "w.tar", "layout", "from a registry"])
def test_no_room(
    store: Store,
    digest: str,
    registry: FakeRegistry,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
) -> None:
    """It is refused before anything is written; what the destination has needs none."""
    copied(InStore(store, "w"), at(registry))
    other = Store(tmp_path / "other")
    places: dict[str, Destination] = {
        "w.tar": InFile(f"{tmp_path}/w.tar"),
        "layout": InLayoutFile(f"{tmp_path}/l"),
    }
    place = places.get(to, InStore(other, "a"))
    what: Source = at(registry) if to == "from a registry" else InStore(store, "w")
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 100)
    with pytest.raises(GpusnapError, match=r" needs .* in .*, but only 100 B is free") as raised:
        copied(what, place)
    assert raised.value.code == "GPS-007"
    if to != "from a registry":
        assert raised.value.hint == "free some space there"  # no store is there: gpusnap can free nothing
    if to == "store":
        assert str(raised.value).startswith("the copy of w needs ")
        other.create()
        with pytest.raises(Refused) as raised:
            copied(what, place)
        assert raised.value.hint == (
            "free some space there, such as with gpusnap prune --gc or gpusnap rm --gc"
        )
    assert not os.path.exists(f"{tmp_path}/w.tar")
    assert not os.path.exists(f"{tmp_path}/l")
    if to in ("store", "from a registry"):
        assert not os.path.exists(other.path) or not other.entries()
        monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 1 << 40)
        copied(what, place)
        monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 0)
        copied(what, InStore(other, "b"))


def test_a_pull_onto_a_full_disk(
    store: Store, digest: str, registry: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all of it needs is said, not what the first file does."""
    copied(InStore(store, "w"), at(registry))
    other = Store(tmp_path / "other")

    def full(_: Store) -> Store:
        raise DiskFull("the store is full: the image layout of 30 B did not fit, 0 B are free")

    monkeypatch.setattr(Store, "create", full)
    with pytest.raises(GpusnapError, match="did not fit"):  # a quota, perhaps: the file system has room
        copied(at(registry), InStore(other, "a"))
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 0)
    with pytest.raises(Refused, match=r"the pull of .* needs .* in .*, but only 0 B is free") as raised:
        copied(at(registry), InStore(other, "a"))
    assert raised.value.code == "GPS-007"
    whole = kept.load(store.find(digest).descriptor, store.layout).size
    assert f"needs {human(whole)} in" in str(raised.value)


def test_in_the_same_store(store: Store, digest: str) -> None:
    """Another name; nothing is written but the index."""
    before = names(store.layout)
    done = copied(InStore(store, "w"), InStore(Store(store.path), "v"))
    assert (done.name, done.moved.blobs) == ("v", 0)
    assert whole(store) == {"w": digest, "v": digest}
    assert names(store.layout) == before
    with pytest.raises(UsageError, match="is the store that the checkpoint is already in"):
        copied(InStore(store, "w"), InStore(Store(store.path), ""))


def test_a_file_that_is_there(store: Store, digest: str, tmp_path: Path) -> None:
    """It is not replaced."""
    (tmp_path / "w.tar").write_text("earlier")
    for to in (InFile(str(tmp_path / "w.tar")), InLayoutFile(str(tmp_path / "w.tar"))):
        with pytest.raises(GpusnapError, match=r"w\.tar exists already"):
            copied(InStore(store, "w"), to)
    assert (tmp_path / "w.tar").read_text() == "earlier"


def test_a_directory_that_is_there(store: Store, digest: str, tmp_path: Path) -> None:
    """Nobody is told to remove it, and a missing one is noticed before anything is read."""
    for to in (InFile(str(tmp_path)), InLayoutFile(str(tmp_path))):
        with pytest.raises(GpusnapError, match="it is a directory") as caught:
            copied(InStore(store, "w"), to)
        assert caught.value.hint.startswith(f"name a file in it, such as {tmp_path}/checkpoint.tar.zst, ")
    with pytest.raises(GpusnapError, match=r"w\.tar cannot be written: .*/none is not a directory$"):
        copied(InStore(store, "w"), InFile(f"{tmp_path}/none/w.tar"))


def test_a_store_that_nothing_was_written_to(tmp_path: Path) -> None:
    """It is not called damaged, whichever place the copy has."""
    with pytest.raises(NotFound, match="is not a store, or has no checkpoint yet"):
        copied(InStore(Store(tmp_path), "w"), InStore(Store(tmp_path), "v"))


@pytest.mark.parametrize("kind", ["store", "file", "registry"])
def test_damage_stays_where_it_is(
    store: Store, digest: str, registry: FakeRegistry, tmp_path: Path, kind: str
) -> None:
    """A blob that is wrong is named, and the destination has no such checkpoint."""
    layer = store.layout.read_manifest(store.find("w").descriptor).layers[-1]
    path = blob_path(store.layout, layer.digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    other = Store(tmp_path / "other")
    places: dict[str, Destination] = {
        "store": InStore(other, "w"),
        "file": InLayoutFile(str(tmp_path / "w.tar")),
        "registry": at(registry),
    }
    to = places[kind]
    with pytest.raises(Damaged, match=layer.digest):
        copied(InStore(store, "w"), to)
    assert kind != "store" or other.entries() == ()
    assert not (tmp_path / "w.tar").exists()
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".new")]
    assert registry.manifests == {}
    data[-1] ^= 1
    path.write_bytes(data)
    assert copied(InStore(store, "w"), to).digest == digest


def test_damage_in_the_destination_is_mended(store: Store, digest: str, tmp_path: Path) -> None:
    """A blob of it that is not what its digest says comes again."""
    other = Store(tmp_path / "other")
    copied(InStore(store, "w"), InStore(other, "w"))
    layer = store.layout.read_manifest(store.find("w").descriptor).layers[-1]
    path = blob_path(other.layout, layer.digest)
    path.write_bytes(bytes(layer.size))
    assert copied(InStore(store, "w"), InStore(other, "w")).moved.blobs == 1
    assert whole(other) == {"w": digest}


def test_killed_half_way(store: Store, digest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The destination names nothing then, and the next copy takes what had come."""
    other, real, count = Store(tmp_path / "other").create(), Incoming.check, 0

    def third(incoming: Incoming) -> None:
        nonlocal count
        count += 1
        if count == 3:
            os._exit(9)
        real(incoming)

    def work() -> None:
        monkeypatch.setattr(Incoming, "check", third)
        monkeypatch.setattr("gpusnap.oci.registry.copy._THREADS", 1)
        copied(InStore(store, "w"), InStore(other, "w"))

    assert end(begin(work)) == 9
    assert other.entries() == ()
    assert len(stagings(other)) == 1
    done = copied(InStore(store, "w"), InStore(other, "w"))
    assert done.moved.skipped_blobs >= 1
    assert done.moved.blobs >= 1
    assert whole(other) == {"w": digest}
    assert stagings(other) == []


def test_a_relay_that_broke_goes_on(
    store: Store, digest: str, registry: FakeRegistry, tmp_path: Path
) -> None:
    """What had come out of the first registry does not come again."""
    copied(InStore(store, "w"), at(registry))
    store.remove("w")
    store.collect()
    with FakeRegistry(tmp_path / "elsewhere") as elsewhere:
        elsewhere.rule("POST", "/blobs/uploads/", Say(403), times=99)
        with pytest.raises(GpusnapError):
            copied(at(registry), at(elsewhere))
        assert elsewhere.manifests == {}
        elsewhere.rules.clear()
        registry.seen.clear()
        assert copied(at(registry), at(elsewhere)).digest == digest
        assert registry.asked("GET", "/blobs/") == []
    assert stagings(store) == []
    assert store.entries() == ()


def test_what_is_not_there(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    store.create()
    other = InStore(Store(tmp_path / "other"), "w")
    for what in (InStore(store, "gone"), at(registry, "team/gone:v1")):
        with pytest.raises(NotFound):
            copied(what, other)


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("oci-archive:./w.tar", InLayoutFile("./w.tar")),
        ("oci-archive:w", InLayoutFile("w")),
        ("./w.tar.zst", InFile("./w.tar.zst")),
        ("registry.example/w:v1", locator.parse_registry("registry.example/w:v1")),
        ("containerd:default/w:v1", locator.InContainerd("default", "w:v1")),
    ],
)
def test_destinations(word: str, found: Destination) -> None:
    assert locator.copy_destination(word) == found


def test_names_as_destinations(store: Store, tmp_path: Path) -> None:
    """Of this host's store, and of another."""
    here = locator.copy_destination("team/w:v1")
    there = locator.copy_destination(f"oci:{tmp_path}/x:w")
    assert isinstance(here, InStore)
    assert isinstance(there, InStore)
    assert (here.store.path, here.wanted) == (store.path, "team/w:v1")
    assert (there.store.path, there.wanted) == (f"{tmp_path}/x", "w")
    for word in ("a b", "abcdef", "oci-archive:", "oci:"):
        with pytest.raises(UsageError):
            locator.copy_destination(word)
    with pytest.raises(UsageError, match="only gpusnap copy writes those"):
        locator.destination("oci-archive:./w.tar")


def test_the_command(store: Store, digest: str, tmp_path: Path, gpusnap: Run) -> None:
    """A line that says where it is now, as another command takes it; and JSON."""
    file, other = f"{tmp_path}/w.tar", f"oci:{tmp_path}/other"
    code, out, err = gpusnap("copy", "w", f"oci-archive:{file}")
    assert (code, err) == (0, "")
    # The manifest is larger where BLAKE3 is installed.
    assert re.fullmatch(rf"{re.escape(file)}  {digest}  written: \d\.\d KiB in 10 blobs\n", out)
    code, out, err = gpusnap("copy", file, other)
    assert (code, err) == (0, "")
    assert out.startswith(f"{other}:w  {digest}  copied ")
    assert gpusnap("inspect", out.split()[0], "--json")[0] == 0
    code, out, err = gpusnap("copy", f"{other}:w", "second", "--json")
    found = json.loads(out)
    assert (code, err, found["name"], found["store"]) == (0, "", "second", store.path)
    assert (found["blobs"], found["digest"]) == (0, digest)
    assert found.keys() == {
        *("digest", "reference", "store", "name", "file", "image", "baseImage"),
        *("blobs", "bytes", "skippedBlobs", "skippedBytes", "mounted"),
    }
