"""A name without a tag stands for the newest checkpoint of that name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from oci_checkpoints import commit, index

from gpusnap.oci.base.errors import Ambiguous, NotThere
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import MEDIA_TYPES
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import base, by_age

CREATED = "org.opencontainers.image.created"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", patience=5).create()


def add(store: Store, content: bytes, *names: str, created: str = "", within: str = "") -> str:
    """Something with these names, made at `created`; `within`: as only its manifest says."""
    with store.stage() as staging:
        notes = {CREATED: within} if within else {}
        chunk = staging.layout.add_blob(content, media_type=MEDIA_TYPES["zstd"])
        root = artifact.write(staging.layout, Artifact(chunks=(chunk,), annotations=notes))
        staging.commit(replace(root, annotations={CREATED: created} if created else {}), names=names)
    return root.digest


def test_the_newest(store: Store) -> None:
    """By when it was made, in any order; "latest" is the same, unless somebody has written it."""
    add(store, b"1", "server:1", created="2026-01-01T00:00:00Z")
    last = add(store, b"3", "server:3", created="2026-01-03T01:00:00+02:00")
    add(store, b"2", "server:2", created="2026-01-02T22:59:59Z")
    other = add(store, b"4", "server-2:1", "server/x:1", created="2026-02-01T00:00:00Z")
    for wanted in ("server", "server:latest"):
        assert store.find(wanted).name == "server:3"
        assert store.find(wanted).descriptor.digest == last
    assert store.find("server-2").descriptor.digest == other
    assert [each.name for each in store.list_tagged("server")] == ["server:1", "server:3", "server:2"]
    written = add(store, b"5", "server:latest", created="2025-01-01T00:00:00Z")
    assert store.find("server:latest").descriptor.digest == written
    assert store.find("server").descriptor.digest == last
    exact = add(store, b"6", "server", created="2024-01-01T00:00:00Z")
    assert store.find("server").descriptor.digest == exact


def test_names_of_registries(store: Store) -> None:
    """A port is no tag, and neither is what follows it."""
    made = add(store, b"1", "localhost:5000/team/app:v1", created="2026-01-01T00:00:00Z")
    assert store.find("localhost:5000/team/app").descriptor.digest == made
    with pytest.raises(NotThere):
        store.find("localhost")
    assert base("localhost:5000/app") == "localhost:5000/app"


def test_it_moves_with_what_is_there(store: Store) -> None:
    """It is what the index has at that moment, and nothing else is written for it."""
    first = add(store, b"1", "server:1", created="2026-01-01T00:00:00Z")
    add(store, b"2", "server:2", created="2026-01-02T00:00:00Z")
    store.remove("server:2")
    assert store.find("server").descriptor.digest == first
    assert [each.name for each in store.entries()] == ["server:1"]
    store.remove("server:1")
    with pytest.raises(NotThere):
        store.find("server")


def test_as_new(store: Store) -> None:
    """Nobody guesses between two; two names of one are no two."""
    digest = add(store, b"1", "server:1", "server:one", created="2026-01-01T00:00:00Z")
    assert store.find("server").descriptor.digest == digest
    add(store, b"2", "server:2", created="2026-01-01T00:00:00Z")
    with pytest.raises(Ambiguous, match=r"these are equally new: server:1, server:2, server:one$"):
        store.find("server")


def test_a_clock_that_was_ahead(store: Store) -> None:
    """A checkpoint of then is not taken for the newest once another one was added after it."""
    add(store, b"1", "server:1", created="2026-01-01T00:00:00Z")
    ahead = add(store, b"2", "server:2", created="2999-01-02T00:00:00Z")
    assert store.find("server").descriptor.digest == ahead, "it is the last one"
    add(store, b"3", "server:3", created="2026-01-03T00:00:00Z")
    said = r"server:2 is dated in the future, 2999-01-02T00:00:00Z, and server:3 was added after it"
    with pytest.raises(Ambiguous, match=said):
        store.find("server")
    assert store.find("server:2").descriptor.digest == ahead
    store.remove("server:2")
    assert store.find("server").name == "server:3"


def test_a_clock_that_is_behind(store: Store) -> None:
    """All are dated in the future: the last one is the newest."""
    for year in (2997, 2998, 2999):
        add(store, b"%d" % year, f"server:{year}", created=f"{year}-01-01T00:00:00Z")
    assert store.find("server").name == "server:2999"


def test_of_another_tool(store: Store) -> None:
    """Without a time in the index its manifest has one; without any there is no newest of two."""
    add(store, b"1", "server:1", within="2026-01-01T00:00:00Z")
    last = add(store, b"2", "server:2", within="2026-01-02T00:00:00Z")
    assert not any(each.created for each in store.entries())
    assert store.find("server").descriptor.digest == last
    add(store, b"3", "server:3")
    with pytest.raises(Ambiguous, match="it is unknown when server:3 was made"):
        store.find("server")
    alone = add(store, b"4", "other:1")
    assert store.find("other").descriptor.digest == alone


def test_the_beginning_of_a_digest(store: Store) -> None:
    """What is both is refused, with all that it may stand for; the whole digest is always that."""
    digest = commit(store, b"x", names=("w",)).digest
    begin = digest[7:13]
    value = index(store)
    entry = {**value["manifests"][0], "annotations": {"org.opencontainers.image.ref.name": f"{begin}:1"}}
    entry["digest"] = "sha256:" + "5" * 64
    value["manifests"].append(entry)
    Path(store.path, "index.json").write_text(json.dumps(value))
    with pytest.raises(Ambiguous, match=f"{begin}:1, {digest}$"):
        store.find(begin)
    assert store.find(digest).descriptor.digest == digest
    assert store.find(digest[7:]).descriptor.digest == digest
    assert store.find(begin + ":1").name == f"{begin}:1"


def test_what_changes_takes_exact_names(store: Store) -> None:
    """Nothing is removed or named by a name that may mean another one a moment later."""
    add(store, b"1", "server:1", created="2026-01-01T00:00:00Z")
    for change in (lambda: store.remove("server"), lambda: store.tag("server", "x")):
        with pytest.raises(NotThere, match="did you mean server:1"):
            change()
    with pytest.raises(NotThere, match="did you mean server"):
        store.find("sever")
    add(store, b"2", "registry.example:5000/team/web:v1", created="2026-01-01T00:00:00Z")
    with pytest.raises(NotThere, match=r"did you mean registry\.example:5000/team/web:v1"):
        store.find("web")


def test_by_age() -> None:
    """Times are compared, not their texts; what is no time comes first."""
    times = ["2026-01-01T00:00:00.5Z", "2026-01-01T00:00:00Z", "2026-01-01T08:30:00+09:00", "never"]
    assert sorted(times, key=by_age) == [times[3], times[2], times[1], times[0]]
