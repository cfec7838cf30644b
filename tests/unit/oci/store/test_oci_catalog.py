"""The index of a store: names and digests are found and moved; what another tool put there stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from oci_checkpoints import commit, index, names, put, stagings, whole

from gpusnap.oci.base.errors import Ambiguous, LayoutError, NotThere, StoreError
from gpusnap.oci.layout.documents import MANIFEST, Descriptor, encode_document
from gpusnap.oci.store.index import check_name
from gpusnap.oci.store.store import Store

DOCKER = "application/vnd.docker.distribution.manifest.v2+json"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


def test_commit_and_find(store: Store) -> None:
    """What is committed is found by name, digest and the beginning of one, and is all in the store."""
    with store.stage() as staging:
        root = put(staging.layout, b"1", b"2")
        created = {"org.opencontainers.image.created": "2026-01-02T03:04:05Z"}
        staging.commit(replace(root, annotations=created), names=["a", "b/c:latest"])
        assert names(staging.layout) == set()
    assert stagings(store) == []
    for wanted in ("a", "b/c:latest", root.digest, root.digest[:13], root.digest[7:13], root.digest[7:]):
        entry = store.find(wanted)
        assert entry.descriptor.digest == root.digest
        assert entry.created == "2026-01-02T03:04:05Z"
    assert [each.name for each in store.entries()] == ["a", "b/c:latest"]
    assert whole(store) == {"a": root.digest, "b/c:latest": root.digest}
    assert store.read(store.find("a").descriptor) == store.layout.read_blob(root)


def test_not_found(store: Store) -> None:
    """What is not there is said with names that are near; a beginning of two digests is refused."""
    with pytest.raises(NotThere, match=r"nothing in .*/store has the name or digest 'server'$"):
        store.find("server")
    commit(store, b"x", names=("my-server",))
    with pytest.raises(NotThere, match="did you mean my-server"):
        store.find("my-servr")
    for wanted in ("", "sha256:", "abc", "sha256:" + "0" * 64, "../../x"):
        with pytest.raises(NotThere):
            store.find(wanted)


def test_ambiguous(store: Store) -> None:
    """The beginning of two digests, and a name that another tool gave to two, are not guessed at."""
    value = index(store)
    for end in "12":
        entry = Descriptor(MANIFEST, f"sha256:{'a' * 63}{end}", 1).to_json()
        value["manifests"].append(entry | {"annotations": {"org.opencontainers.image.ref.name": "n"}})
    Path(store.path, "index.json").write_text(json.dumps(value))
    for wanted in ("aaaaaa", "n"):
        with pytest.raises(Ambiguous, match=r"matches 2 checkpoints in .*: sha256:a{63}1, sha256:a{63}2"):
            store.find(wanted)
    assert store.find("a" * 63 + "2").descriptor.digest.endswith("2")


@pytest.mark.parametrize("name", ["a", "v1.2", "localhost:5000/a/b:c", "A--b", "a+b_c@d"])
def test_names(name: str) -> None:
    """image-spec's grammar."""
    assert check_name(name) == name


BAD_NAMES = ["", " ", "a/", "-a", "a..b", "ä", "a b", "a\n", "n" * 256, "deadbeef", "sha256:abcdef", "0" * 64]


@pytest.mark.parametrize("name", [*BAD_NAMES, "sha512:x"])
def test_bad_names(store: Store, name: str) -> None:
    """What breaks the grammar, or looks like a digest, is nobody's name."""
    root = commit(store, b"x")
    with pytest.raises(StoreError, match="is not a valid name: "):
        store.tag(root.digest, name)
    with store.stage() as staging, pytest.raises(StoreError, match="is not a valid name: "):
        staging.commit(put(staging.layout, b"y"), names=["good", name])
    assert whole(store) == {root.digest: root.digest}


def test_tag_loses_nothing(store: Store) -> None:
    """A name that moves leaves its old digest there, without a name where it had no other."""
    old, new = commit(store, b"old", names=("a",)), commit(store, b"new", names=("b",))
    store.tag("b", "a")
    assert whole(store) == {"a": new.digest, "b": new.digest, old.digest: old.digest}
    store.tag(old.digest, "c")
    store.tag("c", "d")
    assert len(store.entries()) == 4
    store.tag("b", "d")
    assert whole(store) == {"a": new.digest, "b": new.digest, "d": new.digest, "c": old.digest}
    before = Path(store.path, "index.json").read_bytes()
    store.tag("a", "a")
    assert Path(store.path, "index.json").read_bytes() == before
    assert store.collect().blobs == 0


def test_remove(store: Store) -> None:
    """A name goes alone, a digest with all its names; the blobs go with gc."""
    one, two = commit(store, b"1", names=("a", "b")), commit(store, b"2", names=("c", "d"))
    assert store.remove("a") == ("a",)
    assert whole(store) == {"b": one.digest, "c": two.digest, "d": two.digest}
    assert store.remove(two.digest) == ("c", "d")
    assert store.layout.has_blob(two.digest, two.size)
    assert store.remove("b") == ("b",)
    with pytest.raises(NotThere):
        store.remove("b")
    done = store.collect()
    assert (done.blobs, done.live_blobs) == (5, 0)
    assert names(store.layout) == set()


def test_commit_again(store: Store) -> None:
    """The same thing committed twice is there once; another of that name takes the name over."""
    for _ in range(2):
        root = commit(store, b"x", names=("a",))
        assert whole(store) == {"a": root.digest}
    commit(store, b"x")
    assert whole(store) == {"a": root.digest}
    other = commit(store, b"y", names=("a",))
    assert whole(store) == {root.digest: root.digest, "a": other.digest}


# Another tool's index


def foreign(store: Store) -> dict[str, Any]:
    """An index with members that are not known here, and Docker's media types."""
    layer = store.layout.add_blob(b"layer", media_type="a/layer").to_json()
    config = store.layout.add_blob(b"config", media_type="a/config").to_json()
    manifest = encode_document({"mediaType": DOCKER, "config": config, "layers": [layer]})
    docker = store.layout.add_blob(manifest, media_type=DOCKER).to_json()
    value = index(store)
    value["manifests"] = [
        {"x": [1, {"y": None}], "platform": {"os": "linux"}, **docker, "urls": []},
        {
            **docker,
            "annotations": {"org.opencontainers.image.ref.name": "its-own_name", "k": "\U0001f600"},
        },
    ]
    value |= {
        "annotations": {"com.example": "é"},
        "big": 1 << 80,
        "real": 0.1,
        "none": None,
        "subject": docker,
    }
    Path(store.path, "index.json").write_text(json.dumps(value, indent=3))
    return value


def test_a_foreign_index(store: Store) -> None:
    """All members that are not of our matter keep their values, whatever is done to the store."""
    value = foreign(store)
    root = commit(store, b"x", names=("a",))
    digest = value["manifests"][0]["digest"]
    assert index(store)["manifests"][:2] == value["manifests"]
    store.tag(digest, "b")
    store.tag(root.digest, "its-own_name")
    found = index(store)
    rest = {key: each for key, each in value.items() if key != "manifests"}
    assert {key: each for key, each in found.items() if key != "manifests"} == rest
    first, *_ = found["manifests"]
    note = {"annotations": {"org.opencontainers.image.ref.name": "b"}}
    assert first == value["manifests"][0] | note
    assert store.find("its-own_name").descriptor.digest == root.digest
    assert store.collect().blobs == 0
    assert whole(store)["b"] == digest
    store.remove("b")
    assert store.collect().blobs == 3


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'{"schemaVersion":2}', b'{"a":1e999}', b'{"a":NaN}', b"[" * 9999]
)
def test_a_broken_index(store: Store, content: bytes) -> None:
    """One that cannot be understood, or not be written again, is not touched."""
    Path(store.path, "index.json").write_bytes(content)
    calls: list[Callable[[], object]] = [
        store.entries,
        store.collect,
        lambda: store.tag("a", "b"),
        lambda: commit(store, b"x", names=("a",)),
    ]
    for call in calls:
        with pytest.raises(LayoutError):
            call()
    assert Path(store.path, "index.json").read_bytes() == content


def test_a_full_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index of more bytes than anybody reads is not written."""
    commit(store, b"x", names=("a",))
    monkeypatch.setattr("gpusnap.oci.store.index.DOCUMENT_LIMIT", 500)
    with pytest.raises(
        StoreError, match=r"the index of .* would have [0-9]+ bytes, but at most 500 are allowed; remove"
    ):
        commit(store, b"y", names=("n" * 200,))
    assert [each.name for each in store.entries()] == ["a"]
