"""One repository: manifests and blobs out of it and into it, whatever the registry or the network does."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_registry import CutAnswer, FakeRegistry, NoAnswer, Say
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oci_regions import blobs

from gpusnap.oci.base.errors import (
    BlobError,
    DigestError,
    DiskFull,
    LayoutError,
    NotARegistry,
    NotInRegistry,
    RegistryError,
    Rejected,
    Unreachable,
)
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, INDEX, MANIFEST, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry.credentials import Credentials

DATA = random.Random(1).randbytes(5 << 18)
KINDS = [MANIFEST, INDEX, "application/vnd.docker.distribution.manifest.v2+json"]


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as made:
        yield made
        assert made.wrong == []


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def manifest(registry: FakeRegistry, kind: str = MANIFEST) -> bytes:
    """A manifest of the one blob DATA, which is there."""
    layer = {"mediaType": "a/b", "digest": registry.add_blob(DATA), "size": len(DATA)}
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "config": layer, "layers": [layer]}).encode()


# Manifests


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_there_and_back(registry: FakeRegistry, kind: str) -> None:
    """It is found by its tag and by its digest, with its type; HEAD is enough to resolve it."""
    content, repository = manifest(registry, kind), registry.repository()
    put = repository.put_manifest(content, kind, "v1")
    assert put == Descriptor(kind, digest_of(content), len(content))
    for name in ("v1", put.digest):
        assert repository.resolve(name) == put
    assert registry.asked("GET") == []
    for name in ("v1", put.digest):
        assert repository.read_manifest(name) == (put, content)
    repository.put_manifest(content, kind)
    assert registry.asked("PUT", put.digest)


@pytest.mark.parametrize("name", ["v1", "sha256:" + "0" * 64])
def test_not_there(registry: FakeRegistry, name: str) -> None:
    """What the registry does not have is named."""
    repository = registry.repository()
    for ask in (repository.resolve, repository.read_manifest):
        with pytest.raises(
            NotInRegistry, match=rf"{registry.host}/team/app[:@]{name} cannot be read: not found"
        ):
            ask(name)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": MANIFEST, "Content-Length": "7"},
        {"Docker-Content-Digest": "sha256:12", "Content-Type": MANIFEST},
        {"Docker-Content-Digest": "sha256:" + "0" * 64, "Content-Type": "text/plain"},
        {"Docker-Content-Digest": "sha512:" + "0" * 128, "Content-Type": MANIFEST},
    ],
)
@pytest.mark.parametrize("status", [200, 405, 400])
def test_a_head_that_does_not_say_it_all(
    registry: FakeRegistry, headers: dict[str, str], status: int
) -> None:
    """Then the manifest is read."""
    content, repository = manifest(registry), registry.repository()
    put = repository.put_manifest(content, MANIFEST, "v1")
    registry.rule("HEAD", "manifests", Say(status, headers))
    assert repository.resolve("v1") == put


@pytest.mark.parametrize("kind", ["", "text/plain; charset=utf-8", "application/json"])
def test_a_server_that_knows_no_types(registry: FakeRegistry, kind: str) -> None:
    """Then the document's own type counts."""
    content = manifest(registry)
    registry.rule("GET", "manifests", Say(200, {"Content-Type": kind}, content))
    assert registry.repository().read_manifest("v1")[0].media_type == MANIFEST
    registry.rule("GET", "manifests", Say(200, {"Content-Type": MANIFEST + "; charset=utf-8"}, content))
    assert registry.repository().read_manifest("v1")[0].media_type == MANIFEST


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"mediaType":"x"}', b"nonsense"])
def test_documents_without_a_type(registry: FakeRegistry, content: bytes) -> None:
    """A document that nobody says the type of is none."""
    registry.rule("GET", "manifests", Say(200, {}, content))
    with pytest.raises(LayoutError, match=r"the manifest .*v1 (has an invalid media type|is not JSON)"):
        registry.repository().read_manifest("v1")


def test_another_manifest_than_asked_for(registry: FakeRegistry) -> None:
    """The digest is checked against what was asked for and against what the registry says."""
    content, repository = manifest(registry), registry.repository()
    wanted = digest_of(b"another")
    answer = Say(200, {"Content-Type": MANIFEST}, content)
    registry.rule("GET", "manifests", answer)
    with pytest.raises(BlobError, match=rf"was received as {digest_of(content)}, not as {wanted}"):
        repository.read_manifest(wanted)
    answer = Say(200, {"Content-Type": MANIFEST, "Docker-Content-Digest": wanted}, content)
    registry.rule("GET", "manifests", answer)
    with pytest.raises(BlobError, match=rf"v1 was received as {digest_of(content)}, not as {wanted}"):
        repository.read_manifest("v1")


def test_a_manifest_that_is_too_large(registry: FakeRegistry) -> None:
    """No more than 4 MiB and a byte of it are read."""
    registry.rule("GET", "manifests", Say(200, {"Content-Type": MANIFEST}, bytes(2 * DOCUMENT_LIMIT)))
    with pytest.raises(BlobError, match="more than the allowed 4194304 bytes"):
        registry.repository().read_manifest("v1")


def test_a_manifest_cut_short(registry: FakeRegistry) -> None:
    """It is read again."""
    content, repository = manifest(registry), registry.repository()
    repository.put_manifest(content, MANIFEST, "v1")
    registry.rule("GET", "manifests", CutAnswer(20))
    assert repository.read_manifest("v1")[1] == content


@pytest.mark.parametrize("what", [Say(500), NoAnswer()])
def test_putting_a_manifest_breaks(registry: FakeRegistry, what: Say | NoAnswer) -> None:
    """It is put again."""
    content = manifest(registry)
    registry.rule("PUT", "manifests", what)
    registry.repository().put_manifest(content, MANIFEST, "v1")
    assert registry.manifests["team/app", "v1"] == (MANIFEST, content)


def test_a_manifest_that_is_not_taken(registry: FakeRegistry) -> None:
    """A registry that takes it for something else, or refuses it, is quoted."""
    content, repository = manifest(registry), registry.repository()
    registry.rule("PUT", "manifests", Say(201, {"Docker-Content-Digest": "sha256:" + "0" * 64}))
    with pytest.raises(RegistryError, match=rf"stored the manifest {digest_of(content)} as 'sha256:0"):
        repository.put_manifest(content, MANIFEST, "v1")
    registry.rule("PUT", "manifests", Say(400, {}, b'{"errors":[{"code":"MANIFEST_INVALID"}]}'))
    with pytest.raises(
        Rejected, match=r"the manifest .*/team/app:v1 of \d+ bytes was rejected: .*MANIFEST_INVALID"
    ):
        repository.put_manifest(content, MANIFEST, "v1")
    with pytest.raises(BlobError, match="does not match its digest"):
        repository.put_manifest(content, MANIFEST, "sha256:" + "0" * 64)


@pytest.mark.parametrize("name", ["", ".", "a/b", "a?b", "a\r\nb", "x" * 129])
def test_names_that_are_none(registry: FakeRegistry, name: str) -> None:
    """They are not put into a URL."""
    with pytest.raises(RegistryError, match="is not a valid tag"):
        registry.repository().read_manifest(name)
    for call in (registry.repository().has_blob, registry.repository().resolve):
        with pytest.raises(DigestError):
            call("sha256:/../x")
    assert registry.seen == []


# Blobs


def wanted(registry: FakeRegistry, data: bytes = DATA) -> Descriptor:
    return Descriptor("a/b", registry.add_blob(data), len(data))


@pytest.mark.parametrize("length", ["\u00b2", "9" * 5000])
def test_a_length_that_is_no_number(registry: FakeRegistry, layout: Layout, length: str) -> None:
    """Python takes it for digits, or for too many: what comes is looked at all the same."""
    content, repository = manifest(registry), registry.repository()
    put, blob = repository.put_manifest(content, MANIFEST, "v1"), wanted(registry, DATA)
    headers = {"Content-Type": MANIFEST, "Content-Length": length, "Connection": "close"}
    registry.rule("HEAD", "manifests", Say(200, {"Docker-Content-Digest": put.digest, **headers}))
    registry.rule("GET", "manifests", Say(200, headers, content))
    assert repository.resolve("v1") == put
    registry.rule("GET", "blobs", Say(200, headers, DATA))
    repository.fetch_blob(blob, layout)
    assert layout.read_blob(blob) == DATA


def test_has_blob(registry: FakeRegistry) -> None:
    """It has what it has."""
    assert registry.repository().has_blob(registry.add_blob(DATA))
    assert not registry.repository().has_blob(registry.add_blob(b"x", "other"))


PAGE = b"<html>Log in</html>"


def page(registry: FakeRegistry, *methods: str) -> None:
    """From now on it is a web server that answers everything with one page."""
    for method in methods:
        registry.rule(method, "", Say(200, {"Content-Type": "text/html; charset=utf-8"}, PAGE), times=99)


def test_a_web_page_is_no_registry(registry: FakeRegistry, layout: Layout) -> None:
    """Nothing is there, and nothing is taken, where everything is answered with 200 and a page."""
    content, blob = manifest(registry), wanted(registry, DATA)
    page(registry, "HEAD", "GET", "POST", "PUT")
    repository = registry.repository()
    layout.add_blob(DATA)
    calls: list[Callable[[], object]] = [
        lambda: repository.has_blob(blob.digest, blob.size),
        lambda: repository.send_blob(blob, layout),
        lambda: repository.resolve("v1"),
        lambda: repository.read_manifest("v1"),
        lambda: repository.read_tags(),
        lambda: repository.put_manifest(content, MANIFEST, "v1"),
        lambda: repository.fetch_blob(blob, Layout(layout.path + "-2").create()),
    ]
    for call in calls:
        with pytest.raises(NotARegistry, match=f"^{registry.host} does not respond as a registry does: "):
            call()
    assert repository.read_referrers(blob.digest) is None


@pytest.mark.parametrize(
    ("headers", "there"),
    [
        ({"Docker-Content-Digest": "DIGEST", "Content-Type": "text/html"}, True),
        ({"Docker-Content-Digest": "DIGEST", "Content-Length": "0"}, True),
        ({"Docker-Content-Digest": "sha256:" + "0" * 64, "Content-Length": str(len(DATA))}, False),
        ({"Content-Type": "application/octet-stream", "Content-Length": str(len(DATA))}, True),
        ({"Content-Type": "binary/octet-stream", "Content-Length": ""}, True),
        ({"Content-Length": str(len(DATA) - 1)}, False),
        ({"Content-Type": "text/plain", "Content-Length": "2"}, False),
    ],
)
def test_what_a_head_is_believed_for(registry: FakeRegistry, headers: dict[str, str], there: bool) -> None:
    """The digest, else the size; the answer of a registry or a store of objects that leaves out both."""
    digest = registry.add_blob(DATA)
    said = {name: value.replace("DIGEST", digest) for name, value in headers.items()}
    registry.rule("HEAD", "blobs", Say(200, {"Connection": "close", **said}))
    assert registry.repository().has_blob(digest, len(DATA)) == there


@pytest.mark.parametrize("status", [200, 201, 202])
def test_a_manifest_that_is_taken_and_not_there(registry: FakeRegistry, status: int) -> None:
    """An answer without the digest is not believed: the registry is asked for it."""
    content, repository = manifest(registry), registry.repository()
    registry.rule("PUT", "manifests", Say(status), times=3)
    with pytest.raises(NotARegistry, match=r"reported that it stored the manifest sha256:\w+, but does not"):
        repository.put_manifest(content, MANIFEST, "v1")
    registry.manifests["team/app", "v1"] = (MANIFEST, b"{}")
    with pytest.raises(NotARegistry, match=r"stored the manifest sha256:\w+, but has sha256:"):
        repository.put_manifest(content, MANIFEST, "v1")
    registry.manifests["team/app", "v1"] = (MANIFEST, content)
    repository.put_manifest(content, MANIFEST, "v1")


def test_a_manifest_that_may_only_be_written(registry: FakeRegistry) -> None:
    """Who may not read it is not told that it is not there."""
    content, repository = manifest(registry), registry.repository()
    registry.rule("PUT", "manifests", Say(201))
    registry.rule("HEAD", "manifests", Say(403))
    repository.put_manifest(content, MANIFEST, "v1")


@pytest.mark.parametrize("data", [DATA, b"", b"x"])
def test_fetch(registry: FakeRegistry, layout: Layout, data: bytes) -> None:
    """The blob is in the layout, and nothing else."""
    blob = wanted(registry, data)
    registry.repository().fetch_blob(blob, layout)
    assert layout.read_blob(blob) == data
    assert len(blobs(Path(layout.path))) == 1


@pytest.mark.parametrize("ranges", [True, False])
def test_it_goes_on_after_a_break(registry: FakeRegistry, layout: Layout, ranges: bool) -> None:
    """Only what is missing is asked for; a server that sends all of it again does no harm."""
    blob = wanted(registry)
    registry.ranges = ranges
    cuts = [300_000, 400_000] if ranges else [300_000, 700_000]
    for at in cuts:
        registry.rule("GET", "blobs", CutAnswer(at))
    registry.repository().fetch_blob(blob, layout)
    layout.check_blob(blob)
    asked = [each.headers.get("range") for each in registry.asked("GET")]
    assert asked == [None, "bytes=300000-", "bytes=700000-"]


@given(cuts=st.lists(st.integers(0, 400_000), max_size=5), ranges=st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_breaks(registry: FakeRegistry, layout: Layout, cuts: list[int], ranges: bool) -> None:
    """Wherever it breaks, and whether or not the server knows ranges, the bytes are right."""
    registry.rules.clear()
    registry.ranges = ranges
    for at in cuts:
        registry.rule("GET", "blobs", CutAnswer(at))
    blob = wanted(registry)
    registry.repository().fetch_blob(blob, layout)
    layout.check_blob(blob)


def test_more_breaks_than_attempts(registry: FakeRegistry, layout: Layout) -> None:
    """As long as each attempt brings a MiB, there is no end to them."""
    data = random.Random(3).randbytes(9 << 20)
    blob = wanted(registry, data)
    registry.rule("GET", "blobs", CutAnswer(1 << 20), times=8)
    registry.repository(attempts=2).fetch_blob(blob, layout)
    layout.check_blob(blob)
    registry.rule("GET", "blobs", CutAnswer(10), times=99)
    with pytest.raises(Unreachable, match=rf"the blob {blob.digest} of 9437184 bytes \(2 attempts\)$"):
        registry.repository(attempts=2).fetch_blob(blob, layout)


@pytest.mark.parametrize(
    ("content", "headers", "message"),
    [
        (DATA[:-1] + b"\x00", {}, "was received with content that does not match its digest"),
        (DATA + b"x", {}, rf"has {len(DATA) + 1} bytes in .*/team/app, not {len(DATA)}"),
        (DATA[:-1], {}, rf"has {len(DATA) - 1} bytes in .*/team/app, not {len(DATA)}"),
        (DATA + b"x", {"Content-Length": "", "Connection": "close"}, f"has more than its {len(DATA)} bytes"),
    ],
)
def test_a_wrong_blob(
    registry: FakeRegistry, layout: Layout, content: bytes, headers: dict[str, str], message: str
) -> None:
    """What is not what its digest says is named and not kept, and not asked for again."""
    blob = wanted(registry)
    registry.rule("GET", "blobs", Say(200, headers, content))
    with pytest.raises(BlobError, match=f"the blob {blob.digest} {message}"):
        registry.repository().fetch_blob(blob, layout)
    assert blobs(Path(layout.path)) == {}
    assert len(registry.asked("GET")) == 1


@pytest.mark.parametrize("said", ["", "bytes 7-9/10", "bytes */10", "items 300000-1/2"])
def test_another_range_than_asked_for(registry: FakeRegistry, layout: Layout, said: str) -> None:
    """A part of the blob from elsewhere is not put where it does not belong."""
    registry.rule("GET", "blobs", CutAnswer(300_000))
    registry.rule("GET", "blobs", Say(206, {"Content-Range": said}, DATA[300_000:]))
    with pytest.raises(RegistryError, match="returned another part of sha256:"):
        registry.repository().fetch_blob(wanted(registry), layout)


def test_a_blob_that_is_not_there(registry: FakeRegistry, layout: Layout) -> None:
    """The message names it."""
    blob = Descriptor("a/b", "sha256:" + "0" * 64, 5)
    with pytest.raises(NotInRegistry, match=f"/team/app does not return the blob {blob.digest}: not found"):
        registry.repository().fetch_blob(blob, layout)
    assert blobs(Path(layout.path)) == {}


def test_a_full_disk(registry: FakeRegistry, small_disk: Path) -> None:
    """No other attempt is made; nothing is left."""
    layout = Layout(small_disk / "layout").create()
    with pytest.raises(DiskFull, match=r"is full: a blob of 1\.2 MiB did not fit"):
        registry.repository().fetch_blob(wanted(registry), layout)
    assert blobs(Path(layout.path)) == {}
    assert len(registry.asked("GET")) == 1


def test_steps(registry: FakeRegistry, layout: Layout) -> None:
    """`step` sees how far it is, and may end it."""
    blob, seen = wanted(registry), list[int]()
    registry.repository().fetch_blob(blob, layout, step=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(DATA)

    def stop(at: int) -> None:
        if at:
            raise KeyboardInterrupt

    other = Layout(layout.path + "2").create()
    with pytest.raises(KeyboardInterrupt):
        registry.repository().fetch_blob(blob, other, step=stop)
    assert blobs(Path(other.path)) == {}


def test_memory(registry: FakeRegistry, layout: Layout) -> None:
    """A blob of 48 MiB goes there and comes back, and no more than a few MiB of it are ever in memory."""
    piece = random.Random(4).randbytes(1 << 20)
    hashed = hashlib.sha256()
    path = Path(layout.path, "blobs/sha256/large")
    with path.open("wb") as file:
        for _ in range(48):
            hashed.update(piece)
            file.write(piece)
    path.rename(path.with_name(hashed.hexdigest()))
    blob = Descriptor("a/b", f"sha256:{hashed.hexdigest()}", 48 << 20)
    other = Layout(layout.path + "2").create()
    tracemalloc.start()
    try:
        registry.repository().send_blob(blob, layout)
        registry.repository().fetch_blob(blob, other)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    other.check_blob(blob)


def test_threads_share_it(registry: FakeRegistry, layout: Layout) -> None:
    """Any number of threads use one repository, and one token."""
    registry.login, registry.users = "bearer", {"someone": "words"}
    repository = registry.repository(credentials=Credentials("someone", "words"))
    found = [wanted(registry, DATA + bytes([at])) for at in range(8)]
    threads = [threading.Thread(target=repository.fetch_blob, args=(each, layout)) for each in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in found:
        layout.check_blob(each)
    assert len(registry.asked("GET", "^/token")) == 1
