"""What a word stands for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.locator import InFile, InRegistry, InStore
from gpusnap.oci.layout.documents import EMPTY_BLOB, Index, Manifest, empty_descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import UsageError
from gpusnap.runtime_shim.settings import Settings


@pytest.fixture(autouse=True)
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's store; the words are taken in an empty folder."""
    found = Settings(store=settings_file.Store(path=str(tmp_path / "default")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return Store(tmp_path / "default")


def shown(place: locator.Place) -> tuple[str, ...]:
    match place:
        case InStore(store, wanted):
            return ("store", Path(store.path).name, wanted)
        case InFile(path):
            return ("file", path)
        case InRegistry(reference, plain_http):
            return ("registry", str(reference), "plain" if plain_http else "tls")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("oci:store", ("store", "store", "")),
        ("oci:./store:w:20261121-104105", ("store", "store", "w:20261121-104105")),
        ("oci:store:registry.example/w:v1", ("store", "store", "registry.example/w:v1")),
        ("./here", ("file", "./here")),
        ("there.tar", ("file", "there.tar")),
        ("bare", ("file", "bare")),
        ("images", ("file", "images")),
        ("folder", ("store", "default", "folder")),
        ("registry.example/w:v1", ("registry", "registry.example/w:v1", "tls")),
        ("http://localhost:5000/team/w", ("registry", "localhost:5000/team/w", "plain")),
        ("w:20261121-104105", ("store", "default", "w:20261121-104105")),
        ("team/w", ("store", "default", "team/w")),
        ("abcdef12", ("store", "default", "abcdef12")),
        ("sha256:abcdef12", ("store", "default", "sha256:abcdef12")),
    ],
)
def test_words(word: str, expected: tuple[str, ...]) -> None:
    """Each kind of word, in the order in which they are tried."""
    for name in ("here", "there.tar", "bare"):
        Path(name).touch()
    for name in ("store", "images/checkpoint", "folder"):
        Path(name).mkdir(parents=True)
    assert shown(locator.find(word)) == expected


def test_a_name_that_looks_like_a_reference() -> None:
    """In the store for who asks for nothing else."""
    assert shown(locator.find("registry.example/w:v1", remote=False))[0] == "store"
    assert shown(locator.in_store("registry.example/w:v1")) == ("store", "default", "registry.example/w:v1")
    with pytest.raises(UsageError, match="is in a registry, and this command only takes"):
        locator.in_store("http://registry.example/w:v1")


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        ("oci:", UsageError, "does not name a directory"),
        ("oci:gone:w", NotFound, "there is no store gone"),
        ("./gone.tar", NotFound, "there is no file ./gone.tar"),
        ("./empty", NotFound, "./empty is a directory without a checkpoint"),
        ("./fifo", UsageError, "./fifo is a FIFO, not a file"),
        ("fifo", UsageError, "fifo is a FIFO, not a file"),
        ("oci-archive:fifo", UsageError, "fifo is a FIFO, not a file"),
        ("/dev/zero", UsageError, "/dev/zero is a device, not a file"),
        ("sha256:abcd", UsageError, "'sha256:abcd' is not a digest: write sha256: and 6 to 64 digits"),
        ("two words", UsageError, "'two words' is not a checkpoint"),
        ("http://nohost/x", UsageError, "names no registry"),
        ("registry.example/W:v1", UsageError, "is not a valid repository name: use"),
    ],
)
def test_what_stands_for_nothing(word: str, kind: type[Exception], said: str) -> None:
    """One sentence each."""
    Path("empty").mkdir()
    os.mkfifo("fifo")
    with pytest.raises(kind, match=said.replace("(", r"\(")):
        locator.find(word)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("oci:new:w", ("store", "new", "w")),
        ("oci:new", ("store", "new", "")),
        ("./new", ("file", "./new")),
        ("new.tar.zst", ("file", "new.tar.zst")),
        ("registry.example/w:v1", ("registry", "registry.example/w:v1", "tls")),
    ],
)
def test_destinations(word: str, expected: tuple[str, ...]) -> None:
    """They need not be there."""
    assert shown(locator.destination(word)) == expected


@pytest.mark.parametrize("word", ["name", "oci:new:two words", "oci:new:abcdef12", "oci:"])
def test_what_is_no_destination(word: str) -> None:
    """A name alone is none, and nor is what a store could not find again."""
    with pytest.raises(UsageError):
        locator.destination(word)


def test_a_file_where_only_stores_count(default: Store, tmp_path: Path) -> None:
    """It exists, so nothing says that it is no file."""
    path = tmp_path / "r.tar.zst"
    with pytest.raises(UsageError, match="neither a file"):
        locator.in_store(str(path))
    path.touch()
    with pytest.raises(UsageError, match=f"^'{path}' is a file, and this command only takes checkpoints in"):
        locator.in_store(str(path))


def test_the_command_that_makes_a_store(tmp_path: Path) -> None:
    """It is complete, and quoted for a shell."""
    with pytest.raises(NotFound) as raised:
        locator.find(f"oci:{tmp_path}/no such dir")
    assert raised.value.hint == f"gpusnap checkpoint --to oci:'{tmp_path}/no such dir' CONTAINER makes one"


def put(store: Store, name: str) -> str:
    with store.create().stage() as staging:
        staging.layout.add_blob(EMPTY_BLOB)
        notes = {"for": name}
        root = staging.layout.add_manifest(
            Manifest(empty_descriptor(), (empty_descriptor(),), "application/x", None, notes)
        )
        staging.commit(root, names=[name])
        return root.digest


def test_the_only_one(tmp_path: Path) -> None:
    """oci:DIR alone is the one checkpoint there; not where there is none, or several."""
    store = Store("store").create()
    place = locator.find("oci:store")
    assert isinstance(place, InStore)
    with pytest.raises(NotFound, match=f"{store.path}"):
        place.entry()
    digest = put(store, "first")
    assert place.entry().descriptor.digest == digest
    put(store, "second")
    with pytest.raises(UsageError, match="keeps 2 checkpoints"):
        place.entry()


def test_an_entry(default: Store) -> None:
    """By its name, or not."""
    digest = put(default, "first")
    assert locator.in_store("first").entry().descriptor.digest == digest
    with pytest.raises(NotFound, match="did you mean first") as caught:
        locator.in_store("firs").entry()
    assert caught.value.hint == "gpusnap ls lists the checkpoints"
    elsewhere = Store("elsewhere")
    put(elsewhere, "second")
    with pytest.raises(NotFound) as caught:
        InStore(elsewhere, "first").entry()
    assert caught.value.hint == f"gpusnap ls oci:{elsewhere.path} lists the checkpoints"
    assert caught.value.code == "GPS-701"


def test_opening(default: Store) -> None:
    """A store that is not there is one sentence; another tool's layout becomes a store for who writes."""
    with pytest.raises(NotFound, match="is not a store, or has no checkpoint yet") as caught:
        locator.open_store(default)
    assert caught.value.hint == "gpusnap checkpoint CONTAINER makes one there"
    with pytest.raises(NotFound) as caught:
        locator.open_store(Store("el se"))
    place = os.path.abspath("el se")
    assert caught.value.hint == f"gpusnap checkpoint --to oci:'{place}' CONTAINER makes one there"
    Store("spilled").create().stage().close(leave=True)
    assert locator.open_store(Store("spilled"), write=True).entries() == ()
    foreign = Layout("foreign").create()
    foreign.commit(Index())
    before = sorted(os.listdir("foreign"))
    assert locator.open_store(Store("foreign")).entries() == ()
    assert sorted(os.listdir("foreign")) == before
    assert locator.open_store(Store("foreign"), write=True).entries() == ()
    assert "staging" in os.listdir("foreign")
