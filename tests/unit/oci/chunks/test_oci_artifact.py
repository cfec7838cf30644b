"""Checkpoints as artifacts: what is written is read again, fits a registry, and is always the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusnap.oci.base.errors import LayoutError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import CHECKPOINT, CHUNKS, CONFIG, RECORDS, ROOTFS, Artifact, chunk_layers
from gpusnap.oci.chunks.table import CHUNK_SIZE, MEDIA_TYPES, Chunk, Table, make_table
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, EMPTY, INDEX, MANIFEST, Descriptor, empty_descriptor
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout

ZSTD = MEDIA_TYPES["zstd"]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def part(media_type: str, name: str, size: int = 7) -> Descriptor:
    return Descriptor(media_type, digest_of(name.encode()), size)


def chunks(count: int) -> tuple[Descriptor, ...]:
    return tuple(part(ZSTD, f"chunk {at}") for at in range(count))


WHOLE = Artifact(
    part(CONFIG, "config"),
    part(RECORDS, "records"),
    part(ROOTFS, "rootfs"),
    chunks(3),
    {"org.opencontainers.image.created": "2026-01-02T03:04:05Z", "io.gpusnap.gpus": "2"},
)


def untitled(found: Artifact) -> Artifact:
    """As it was before it was written: layers without titles, and no documents."""
    records, rootfs = (each and replace(each, annotations={}) for each in (found.records, found.rootfs))
    return replace(found, records=records, rootfs=rootfs, documents=())


def document(layout: Layout, at: Descriptor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(layout.read_blob(at))
    return found


def test_one_manifest(layout: Layout) -> None:
    """The manifest is what docs/format.md says, byte for byte, and reads back."""
    root = artifact.write(layout, WHOLE)
    assert (root.media_type, root.artifact_type) == (MANIFEST, CHECKPOINT)
    assert root.annotations == WHOLE.annotations
    found = document(layout, root)
    assert list(found) == ["schemaVersion", "mediaType", "artifactType", "annotations", "config", "layers"]
    assert found["artifactType"] == "application/vnd.gpusnap.checkpoint.v1+json"
    assert found["config"]["mediaType"] == "application/vnd.gpusnap.checkpoint.config.v1+json"
    assert [
        (each["mediaType"].split("gpusnap.")[1], each.get("annotations")) for each in found["layers"]
    ] == [
        ("checkpoint.records.v1.tar+zstd", {"org.opencontainers.image.title": "records.tar.zst"}),
        ("checkpoint.rootfs.v1.tar+zstd", {"org.opencontainers.image.title": "rootfs-diff.tar.zst"}),
        *[("chunk.v1+zstd", None)] * 3,
    ]
    again = artifact.read(root, layout.read_blob)
    assert untitled(again) == WHOLE
    assert again.documents == (root,)
    assert [each.digest for each in again.blobs()] == [
        digest_of(each) for each in (b"config", b"records", b"rootfs", b"chunk 0", b"chunk 1", b"chunk 2")
    ]


@pytest.mark.parametrize(
    "what",
    [
        Artifact(),
        Artifact(records=part(RECORDS, "r")),
        Artifact(part(CONFIG, "c")),
        Artifact(part(CONFIG, "c"), chunks=chunks(2)),
        Artifact(rootfs=part(ROOTFS, "f"), annotations={"a": ""}),
    ],
)
def test_parts_that_are_not_there(layout: Layout, what: Artifact) -> None:
    """Any part may be missing; there is a layer nevertheless, and the blob of every empty descriptor."""
    root = artifact.write(layout, what)
    assert untitled(artifact.read(root, layout.read_blob)) == what
    found = document(layout, root)
    assert found["layers"]
    for each in (found["config"], *found["layers"]):
        assert layout.has_blob(each["digest"], 2) == (each["mediaType"] == EMPTY)


def test_chunk_layers() -> None:
    """A blob comes once, where it is used first, and says what it is of."""
    one, two, three = (digest_of(each) for each in (b"1", b"2", b"3"))
    first = make_table(
        4 * CHUNK_SIZE,
        [
            Chunk(0, CHUNK_SIZE, one, two, 99, "zstd"),
            Chunk(CHUNK_SIZE, 4096, three, three, 4096, "plain"),
            Chunk(2 * CHUNK_SIZE, CHUNK_SIZE, one, two, 99, "zstd"),
        ],
    )
    second = make_table(8192, [Chunk(4096, 4096, three, three, 4096, "plain")])
    assert chunk_layers([("1:7f00", first), ("pages-1.img", second)]) == (
        Descriptor(
            "application/vnd.gpusnap.chunk.v1+zstd",
            two,
            99,
            {
                "io.gpusnap.chunk.region": "1:7f00",
                "io.gpusnap.chunk.offset": "0",
                "io.gpusnap.chunk.size": str(CHUNK_SIZE),
                "io.gpusnap.chunk.digest": one,
            },
        ),
        Descriptor(
            "application/vnd.gpusnap.chunk.v1",
            three,
            4096,
            {
                "io.gpusnap.chunk.region": "1:7f00",
                "io.gpusnap.chunk.offset": str(CHUNK_SIZE),
                "io.gpusnap.chunk.size": "4096",
                "io.gpusnap.chunk.digest": three,
            },
        ),
    )


def test_640_gib(layout: Layout) -> None:
    """640 GiB of chunks fit what a registry takes: every document is below 4 MiB, and all is named once."""
    regions = []
    for gpu in range(8):
        found = []
        for at in range((80 << 30) // CHUNK_SIZE):
            digest = digest_of(b"%d %d" % (gpu, at))
            found.append(
                Chunk(at * CHUNK_SIZE, CHUNK_SIZE, digest, digest_of(digest.encode()), 12345678, "zstd")
            )
        regions.append((f"{4194304 - gpu}:7f{gpu:02x}00000000", Table(80 << 30, tuple(found))))
    layers = chunk_layers(regions)
    assert sum(int(each.annotations[artifact.CHUNK_SIZE]) for each in layers) == 640 << 30
    what = replace(WHOLE, chunks=layers)
    root = artifact.write(layout, what)
    assert (root.media_type, root.artifact_type) == (INDEX, CHECKPOINT)
    found_index = document(layout, root)
    assert found_index["artifactType"] == CHECKPOINT
    assert found_index["annotations"] == dict(sorted(WHOLE.annotations.items())) | {
        artifact.PARTS: str(len(found_index["manifests"]))
    }
    documents = [each for each, content in walk(root, layout.read_blob) if content is not None]
    assert all(each.size <= artifact.LARGEST_DOCUMENT < DOCUMENT_LIMIT for each in documents)
    # As few as there can be: all but the last one are full.
    assert sum(each.size for each in documents) // artifact.LARGEST_DOCUMENT + 2 == len(documents)
    assert [each["artifactType"] for each in found_index["manifests"]] == [CHECKPOINT] + [CHUNKS] * (
        len(documents) - 2
    )
    again = artifact.read(root, layout.read_blob)
    assert untitled(again) == what
    assert again.documents[0] == root
    assert {each.digest for each in again.documents} == {each.digest for each in documents}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifests of a few chunks."""
    monkeypatch.setattr(artifact, "LARGEST_DOCUMENT", 2500)


@pytest.mark.usefixtures("small")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 60), st.integers(0, 40))
def test_any_number_of_chunks(layout: Layout, count: int, note: int) -> None:
    """All of them are there again, in order, in documents of the size that is allowed."""
    what = replace(WHOLE, chunks=chunks(count), annotations={"note": "n" * note})
    root = artifact.write(layout, what)
    assert untitled(artifact.read(root, layout.read_blob)) == what
    found = [each for each, content in walk(root, layout.read_blob) if content is not None]
    assert all(each.size <= 2500 for each in found)
    assert (len(found) > 1) == (root.media_type == INDEX)


@pytest.mark.usefixtures("small")
def test_same_content_same_bytes(layout: Layout) -> None:
    """The order of annotations and a chunk named twice make no other artifact; other content does."""
    roots = []
    for notes in ({"a": "1", "b": "2"}, {"b": "2", "a": "1"}, {"a": "1", "b": "3"}):
        for count in (5, 40):
            what = replace(WHOLE, chunks=chunks(count), annotations=notes)
            twice = replace(what, chunks=what.chunks + what.chunks[:3])
            assert artifact.write(layout, twice) == artifact.write(layout, what)
            roots.append(artifact.write(layout, what).digest)
    assert roots[:2] == roots[2:4]
    assert len(set(roots)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": part("a/b", "c")}, "the config sha256:.* is a a/b, not a application/vnd"),
        ({"records": part(ROOTFS, "r")}, "the records sha256:.* is a "),
        ({"rootfs": part(RECORDS, "r")}, "the rootfs sha256:.* is a "),
        ({"chunks": (part(RECORDS, "r"),)}, "the chunk sha256:.* is a "),
        (
            {"chunks": (part(ZSTD, "r", 1), part(ZSTD, "r", 2))},
            "listed as a .* of 1 bytes, and as a .* of 2 bytes",
        ),
    ],
)
def test_wrong_parts(layout: Layout, change: dict[str, Any], message: str) -> None:
    """What is no part of a checkpoint is not written into one."""
    with pytest.raises(LayoutError, match=message):
        artifact.write(layout, replace(WHOLE, **change))


@pytest.mark.usefixtures("small")
def test_too_large(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be cut, and more manifests than allowed, are errors with a sentence."""
    long = {"note": "n" * 3000}
    fat = tuple(replace(each, annotations=long) for each in chunks(2))
    with pytest.raises(LayoutError, match=r"annotations of the chunk sha256:.* too large for a manifest"):
        artifact.write(layout, replace(WHOLE, chunks=fat))
    with pytest.raises(LayoutError, match="annotations of the layers of a checkpoint are too large"):
        artifact.write(layout, replace(WHOLE, records=replace(part(RECORDS, "r"), annotations=long)))
    with pytest.raises(LayoutError, match=r"needs 2 manifests and an index of [0-9]+ bytes; "):
        artifact.write(layout, replace(WHOLE, chunks=chunks(12), annotations=long))
    monkeypatch.setattr(artifact, "MOST_MANIFESTS", 3)
    with pytest.raises(
        LayoutError, match=r"a checkpoint of 90 chunks needs [0-9]+ manifests .* 3 and 2500 are"
    ):
        artifact.write(layout, replace(WHOLE, chunks=chunks(90)))


# What comes from elsewhere

Change = Callable[[dict[str, Any]], object]


def changed(layout: Layout, root: Descriptor, change: Change) -> Descriptor:
    """A document, changed."""
    value = document(layout, root)
    change(value)
    return layout.add_blob(json.dumps(value, indent=1).encode(), media_type=root.media_type)


def unknown(value: dict[str, Any]) -> None:
    other = part("application/vnd.else", "else").to_json()
    value["layers"] = [other, *reversed(value["layers"]), other, other | {"size": 9}, *value["layers"]]
    value["com.example"] = {"a": [1]}


def test_any_order(layout: Layout) -> None:
    """Layers in any order, more than once, and such as are not known."""
    root = changed(layout, artifact.write(layout, WHOLE), unknown)
    found = untitled(artifact.read(root, layout.read_blob))
    assert replace(found, chunks=WHOLE.chunks) == WHOLE
    assert set(map(str, found.chunks)) == set(map(str, WHOLE.chunks))


def test_an_older_way(layout: Layout) -> None:
    """Without an artifactType the config's media type says what it is."""
    root = changed(layout, artifact.write(layout, WHOLE), lambda value: value.pop("artifactType"))
    assert untitled(artifact.read(root, layout.read_blob)) == WHOLE


def add(**members: object) -> Change:
    return lambda value: value.update(members)


def layer(*found: Descriptor) -> Change:
    return lambda value: value["layers"].extend(each.to_json() for each in found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add(artifactType="a/b"), "not a gpusnap checkpoint, but of type a/b"),
        (add(artifactType=CHUNKS), "not a gpusnap checkpoint, but of type application/vnd.gpusnap.chunks"),
        (add(config=part("a/c", "c").to_json()), "config of an unknown type, a/c"),
        (add(annotations={artifact.PARTS: "5"}), "is one of 5 manifests of a checkpoint; use the index"),
        (add(annotations={"a": 1}), "the manifest sha256:.* is broken: the annotations"),
        (add(layers={}), "the manifest sha256:.* is broken: layers is not a list"),
        (add(config=None), "the manifest sha256:.* is broken: "),
        (layer(part(RECORDS, "more")), "has 2 layers of type .*records"),
        (layer(part(ROOTFS, "more")), "has 2 layers of type .*rootfs"),
        (layer(part(ZSTD, "chunk 1", 8)), "listed as a .* of 7 bytes, and as a .* of 8 bytes"),
        (
            layer(part(MEDIA_TYPES["plain"], "chunk 1")),
            "is listed as a .*zstd of 7 bytes, and as a .*v1 of 7",
        ),
    ],
)
def test_broken_manifests(layout: Layout, change: Change, message: str) -> None:
    """What cannot be right is refused, in a sentence that names it."""
    root = changed(layout, artifact.write(layout, WHOLE), change)
    with pytest.raises(LayoutError, match=message):
        artifact.read(root, layout.read_blob)


def test_something_else(layout: Layout) -> None:
    """A blob of another kind is not even read."""
    with pytest.raises(LayoutError, match=r"not a gpusnap checkpoint, but of type application/vnd\.docker"):
        artifact.read(part("application/vnd.docker.distribution.manifest.v2+json", "x"), layout.read_blob)


@pytest.fixture
def large(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> tuple[Artifact, Descriptor]:
    """A checkpoint of three manifests or more, and its index."""
    monkeypatch.setattr(artifact, "LARGEST_DOCUMENT", 2500)
    what = replace(WHOLE, chunks=chunks(30))
    return what, artifact.write(layout, what)


def other_order(value: dict[str, Any]) -> None:
    strange = part("application/vnd.else", "else").to_json()
    value["manifests"] = [strange, *reversed(value["manifests"]), strange, *value["manifests"]]
    for each in value["manifests"]:
        each.pop("artifactType", None)


def test_any_order_of_manifests(layout: Layout, large: tuple[Artifact, Descriptor]) -> None:
    """The first manifest need not be the main one, one may come twice, and others are passed over."""
    what, root = large
    signature = changed(layout, artifact.write(layout, Artifact()), add(artifactType="a/signature"))

    def change(value: dict[str, Any]) -> None:
        other_order(value)
        value["manifests"].insert(1, signature.to_json())

    found = untitled(artifact.read(changed(layout, root, change), layout.read_blob))
    assert replace(found, chunks=what.chunks) == what
    assert sorted(map(str, found.chunks)) == sorted(map(str, what.chunks))


def drop(at: int) -> Change:
    return lambda value: value["manifests"].pop(at)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add(artifactType="a/b"), "not a gpusnap checkpoint, but of type a/b"),
        (add(manifests=[]), "has no manifests of a checkpoint instead of one"),
        (drop(0), "has no manifests of a checkpoint"),
        (drop(1), "of the [0-9]+ manifests of the checkpoint"),
        (drop(-1), "of the [0-9]+ manifests of the checkpoint"),
        (add(manifests=3), "manifests is not a list"),
    ],
)
def test_broken_indexes(
    layout: Layout, large: tuple[Artifact, Descriptor], change: Change, message: str
) -> None:
    """An index that lacks something is refused, also where it does not know how much it should have."""
    root = changed(layout, large[1], change)
    with pytest.raises(LayoutError, match=message):
        artifact.read(root, layout.read_blob)
    root = changed(layout, root, lambda value: value.pop("annotations"))
    with pytest.raises(LayoutError, match=message):
        artifact.read(root, layout.read_blob)


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (0, add(artifactType=CHUNKS), "which has its own"),
        (1, add(artifactType=CHECKPOINT), "has 2 manifests of a checkpoint"),
        (1, add(config=part(CONFIG, "other").to_json()), "which has its own"),
        (1, layer(part(RECORDS, "records")), "has records or a rootfs in a manifest of chunks"),
        (1, layer(part(ZSTD, "chunk 0", 8)), "listed as a .* of 7 bytes, and as a .* of 8 bytes"),
    ],
)
def test_broken_parts(
    layout: Layout, large: tuple[Artifact, Descriptor], at: int, change: Change, message: str
) -> None:
    """Two configs, two checkpoints, or chunks that contradict one another are refused."""

    def exchange(value: dict[str, Any]) -> None:
        old = Descriptor.from_json(value["manifests"][at])
        value["manifests"][at] = changed(layout, old, change).to_json()

    root = changed(layout, large[1], exchange)
    with pytest.raises(LayoutError, match=message):
        artifact.read(root, layout.read_blob)


def test_a_part_alone(layout: Layout, large: tuple[Artifact, Descriptor]) -> None:
    """The main manifest of several is not taken for the whole."""
    [main, *_] = document(layout, large[1])["manifests"]
    with pytest.raises(LayoutError, match=r"is one of [0-9]+ manifests of a checkpoint"):
        artifact.read(Descriptor.from_json(main), layout.read_blob)


def test_too_many_manifests(
    layout: Layout, large: tuple[Artifact, Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index that names more than is allowed is refused before they are read."""
    monkeypatch.setattr(artifact, "MOST_MANIFESTS", 2)
    with pytest.raises(LayoutError, match=r"lists [0-9]+ manifests, but at most 2 are allowed"):
        artifact.read(large[1], layout.read_blob)


@given(st.binary(max_size=200), st.sampled_from([MANIFEST, INDEX]))
def test_any_content(content: bytes, kind: str) -> None:
    """Any bytes are an error of ours."""
    root = Descriptor(kind, digest_of(content), len(content))
    with pytest.raises(LayoutError):
        artifact.read(root, lambda _: content)


def test_the_empty_config(layout: Layout) -> None:
    """A checkpoint without GPU state has the spec's empty config."""
    assert document(layout, artifact.write(layout, Artifact()))["config"] == empty_descriptor().to_json()
