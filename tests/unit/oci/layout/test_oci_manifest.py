"""Descriptors, manifests and indexes: what we write reads back, and what is none is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.layout.digests import check_digest, digest_of, get_hex
from gpusnap.oci.layout.documents import (
    EMPTY_BLOB,
    Descriptor,
    Index,
    Manifest,
    empty_descriptor,
    encode_document,
    parse_document,
)

GOOD = "sha256:" + "0a" * 32
texts = st.text(max_size=20)
descriptors = st.builds(
    Descriptor,
    st.sampled_from(["a/b", "application/vnd.oci.image.layer.v1.tar+zstd"]),
    st.binary().map(digest_of),
    st.integers(0, (1 << 63) - 1),
    st.dictionaries(texts, texts, max_size=3),
    st.sampled_from(["", "application/x"]),
)
manifests = st.builds(
    Manifest,
    descriptors,
    st.lists(descriptors, max_size=3).map(tuple),
    st.sampled_from(["", "a/b"]),
    st.none() | descriptors,
)


@given(manifests)
def test_manifest_round_trip(manifest: Manifest) -> None:
    """A manifest reads back as it was written."""
    assert Manifest.from_json(parse_document(encode_document(manifest.to_json()), "it")) == manifest


@given(st.lists(descriptors, max_size=3).map(tuple))
def test_index_round_trip(found: tuple[Descriptor, ...]) -> None:
    """So does an index."""
    index = Index(found, "a/b", {"x": "y"})
    assert Index.from_json(parse_document(encode_document(index.to_json()), "it")) == index


def test_empty_descriptor() -> None:
    """The blob that stands for no configuration is the one in the spec."""
    digest = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert (empty_descriptor().digest, empty_descriptor().size) == (digest, len(EMPTY_BLOB))


def test_unknown_fields_and_media_types() -> None:
    """Fields that nobody knows are passed over, media types and digest algorithms too."""
    value = {
        "mediaType": "x/unknown",
        "digest": "sha512+b64u:ab=",
        "size": 1,
        "urls": ["http://x"],
        "data": "e30=",
    }
    assert Descriptor.from_json(value) == Descriptor("x/unknown", "sha512+b64u:ab=", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": -1}, "size"),
        ({"size": True}, "size"),
        ({"size": 1.0}, "size"),
        ({"size": 1 << 63}, "size"),
        ({"size": None}, "size"),
        ({"digest": "sha256:" + "0A" * 32}, "sha256 digest"),
        ({"digest": "sha256:00"}, "sha256 digest"),
        ({"digest": "nothing"}, "is not a digest"),
        ({"digest": GOOD + "\n"}, "is not a digest"),
        ({"digest": None}, "is not a digest"),
        ({"mediaType": "none"}, "media type"),
        ({"mediaType": 3}, "media type"),
        ({"artifactType": "none"}, "media type"),
        ({"annotations": {"a": 1}}, "annotations"),
        ({"annotations": []}, "annotations"),
    ],
)
def test_bad_descriptors(change: dict[str, object], words: str) -> None:
    """Each field that is wrong is named, and so is the descriptor."""
    value = {"mediaType": "a/b", "digest": GOOD, "size": 1} | change
    index = {"schemaVersion": 2, "manifests": [value]}
    with pytest.raises(LayoutError, match=f"manifest 0.*{words}|{words}.*manifest 0"):
        Index.from_json(index)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([], "not a JSON object"),
        ({"schemaVersion": 1, "layers": []}, "schemaVersion"),
        ({"schemaVersion": 2, "mediaType": "a/b"}, "media type"),
        ({"schemaVersion": 2, "config": {}}, "config"),
        ({"schemaVersion": 2, "config": empty_descriptor().to_json()}, "layers is not a list"),
        ({"schemaVersion": 2, "config": empty_descriptor().to_json(), "layers": [3]}, "layer 0"),
    ],
)
def test_bad_manifests(value: object, words: str) -> None:
    """A manifest that is none says why."""
    with pytest.raises(LayoutError, match=words):
        Manifest.from_json(value)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"{" + b"1" * 9000, b"1" * 9000])
def test_no_json(data: bytes) -> None:
    """Bytes that are no JSON, or JSON made to break its reader, are refused."""
    with pytest.raises(LayoutError, match="is not JSON"):
        parse_document(data, "the index")


def test_any_text_is_written() -> None:
    """Half a surrogate pair, which JSON may hold, is written too."""
    value = json.loads('{"a": "\\ud800"}')
    assert parse_document(encode_document(value), "it") == value


@given(st.text() | st.from_regex(r"sha(256|512):[0-9a-f/]{63}[0-9a-f]?", fullmatch=True))
@example("sha256:" + "0f" * 32)
def test_any_digest(text: str) -> None:
    """What is no digest raises DigestError; sha256 hex digits are safe as a file's name."""
    try:
        assert check_digest(text) == text
        assert "/" not in get_hex(text)
    except DigestError:
        pass


def test_the_digest() -> None:
    """The digest of nothing is the one that everybody knows."""
    assert get_hex(digest_of(b"")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
