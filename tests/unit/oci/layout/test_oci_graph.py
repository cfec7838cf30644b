"""What a manifest names: OCI's and Docker's, each blob once, children first, hostile ones refused."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.base.errors import DigestError, LayoutError
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.graph import INDEXES, MANIFESTS, children, is_document, walk

CONFIG = {"mediaType": "a/config", "digest": digest_of(b"config"), "size": 6}
LAYER = {"mediaType": "a/layer", "digest": digest_of(b"layer"), "size": 5, "annotations": {"a": "b"}}


class Documents:
    """Manifests and indexes by digest, and how often each was read."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.reads: list[str] = []

    def add(self, media_type: str, value: object) -> Descriptor:
        """A new one."""
        content = json.dumps(value).encode()
        self.contents[digest_of(content)] = content
        return Descriptor(media_type, digest_of(content), len(content))

    def manifest(self, *layers: object, kind: str = MANIFESTS[0]) -> Descriptor:
        """A manifest of these layers."""
        return self.add(kind, {"config": CONFIG, "layers": layers})

    def index(self, *manifests: Descriptor, kind: str = INDEXES[0]) -> Descriptor:
        """An index of these manifests."""
        return self.add(kind, {"manifests": [each.to_json() for each in manifests]})

    def read(self, descriptor: Descriptor) -> bytes:
        """The content of one."""
        self.reads.append(descriptor.digest)
        return self.contents[descriptor.digest]

    def walked(self, root: Descriptor) -> list[str]:
        """Digests in the order of the walk."""
        return [found.digest for found, _ in walk(root, self.read)]


@pytest.mark.parametrize("kind", MANIFESTS)
def test_children_of_a_manifest(kind: str) -> None:
    """Config and layers, in order; the subject is none of them."""
    documents = Documents()
    root = documents.add(kind, {"config": CONFIG, "layers": [LAYER, LAYER], "subject": CONFIG})
    found = children(root, documents.read(root))
    assert [each.digest for each in found] == [CONFIG["digest"], LAYER["digest"], LAYER["digest"]]
    assert found[1].annotations == {"a": "b"}


@pytest.mark.parametrize("kind", INDEXES)
def test_a_walk(kind: str) -> None:
    """Children before parents, each once, and each document is read once and comes with its content."""
    documents = Documents()
    first, second = documents.manifest(LAYER), documents.manifest()
    inner = documents.index(second, first, kind=kind)
    root = documents.index(first, inner, second, first, kind=kind)
    found = list(walk(root, documents.read))
    assert [each.digest for each, _ in found] == [
        CONFIG["digest"],
        LAYER["digest"],
        first.digest,
        second.digest,
        inner.digest,
        root.digest,
    ]
    assert sorted(documents.reads) == sorted(documents.contents)
    assert all(content == documents.contents.get(each.digest) for each, content in found)


def test_a_leaf() -> None:
    """What is no document has no children, and is not read."""
    leaf = Descriptor("application/vnd.other+json", digest_of(b"x"), 1)
    assert not is_document(leaf)
    assert Documents().walked(leaf) == [leaf.digest]


BROKEN: list[tuple[Callable[[Documents], Descriptor], str]] = [
    (lambda documents: documents.add(MANIFESTS[0], []), "is not a JSON object"),
    (lambda documents: documents.add(MANIFESTS[0], {"config": CONFIG}), "layers of .* are not a list"),
    (lambda documents: documents.add(MANIFESTS[0], {"layers": []}), "config of .* is not a JSON object"),
    (lambda documents: documents.add(INDEXES[0], {"manifests": {}}), "manifests of .* are not a list"),
    (
        lambda documents: documents.add(INDEXES[1], {"manifests": [3]}),
        "manifests of .*, 0, is not a JSON object",
    ),
    (lambda documents: documents.manifest(LAYER | {"size": -1}), "size of .* is invalid"),
    (lambda documents: documents.manifest(LAYER, LAYER | {"digest": "../x"}), "digest of the layers .*, 1,"),
]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_broken_documents(make: Callable[[Documents], Descriptor], message: str) -> None:
    """A document that does not follow the spec is an error that names it."""
    documents = Documents()
    root = make(documents)
    with pytest.raises(LayoutError, match=message) as error:
        documents.walked(root)
    assert root.digest in str(error.value)


def test_a_root_without_a_digest() -> None:
    """A digest is checked before it is used."""
    with pytest.raises(DigestError):
        Documents().walked(Descriptor(MANIFESTS[0], "sha256:../../etc/passwd", 1))


def test_indexes_for_ever() -> None:
    """Eight indexes within one another are followed, and no more."""
    documents = Documents()
    root = documents.manifest(LAYER)
    for _ in range(8):
        root = documents.index(root)
    assert len(documents.walked(root)) == 11
    with pytest.raises(LayoutError, match="below more than 8 indexes"):
        documents.walked(documents.index(root))


@given(st.binary(max_size=200), st.sampled_from([*MANIFESTS, *INDEXES]))
def test_any_content(content: bytes, kind: str) -> None:
    """Content of any bytes is an error of ours."""
    at = Descriptor(kind, digest_of(content), len(content))
    with pytest.raises(LayoutError):
        children(at, content)


def test_named_as_two_things() -> None:
    """A manifest that is named as a layer first is followed where it is named as one."""
    documents = Documents()
    inner = documents.manifest(LAYER)
    outer = documents.manifest({**inner.to_json(), "mediaType": "a/layer"})
    root = documents.index(outer, inner)
    walked = documents.walked(root)
    assert LAYER["digest"] in walked
    assert walked.count(inner.digest) == 2
