"""Uploads: small and large blobs, and what happens when they break anywhere in between."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_registry import CutBody, FakeRegistry, NoAnswer, Say

from gpusnap.oci.base.errors import BlobError, Rejected, Unauthorized, Unreachable
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry import upload

CHUNK = 100_000
SMALL = random.Random(1).randbytes(CHUNK - 1)
LARGE = random.Random(2).randbytes(3 * CHUNK + 12_345)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRegistry]:
    """A registry whose client sends chunks of 100 kB."""
    monkeypatch.setattr(upload, "MONOLITHIC", CHUNK)
    with FakeRegistry(tmp_path / "registry") as made:
        yield made
        assert made.wrong == []


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


def sizes(registry: FakeRegistry, method: str) -> list[int]:
    return [int(each.headers["content-length"]) for each in registry.asked(method)]


def test_small_ones_go_at_once(registry: FakeRegistry, layout: Layout) -> None:
    """POST, then PUT with all of it."""
    blob = layout.add_blob(SMALL)
    assert registry.repository().send_blob(blob, layout) is False
    assert registry.blob(blob.digest) == SMALL
    assert [each.method for each in registry.seen] == ["POST", "PUT"]
    assert sizes(registry, "PUT") == [len(SMALL)]


def test_large_ones_go_in_chunks(registry: FakeRegistry, layout: Layout) -> None:
    """Where one PUT is too much: POST, a PATCH for each chunk, PUT with nothing; and so from then on."""
    registry.largest_put = CHUNK
    repository = registry.repository()
    for data, puts in ((LARGE, [len(LARGE), 0]), (LARGE[1:], [0])):
        registry.seen.clear()
        blob = layout.add_blob(data)
        repository.send_blob(blob, layout)
        assert registry.blob(blob.digest) == data
        assert sizes(registry, "PATCH") == [CHUNK, CHUNK, CHUNK, len(data) - 3 * CHUNK]
        assert sizes(registry, "PUT") == puts
    assert registry.waits == []


def test_large_ones_go_at_once(registry: FakeRegistry, layout: Layout) -> None:
    """A registry that takes no parts need not be asked for any."""
    registry.parts = False
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE
    assert [each.method for each in registry.seen] == ["POST", "PUT"]


@pytest.mark.parametrize("how", [Say(400), Say(405), Say(416), Say(501), Say(202, {"Range": "0-99"})])
@pytest.mark.parametrize("skip", [0, 1])
def test_parts_that_are_not_taken(registry: FakeRegistry, layout: Layout, how: Say, skip: int) -> None:
    """Where a part is refused, or its Range stays behind, the blob goes at once, and so do all after it."""
    registry.rule("PUT", "", CutBody(1))
    registry.rule("PATCH", "", how, skip=skip, times=99)
    repository = registry.repository()
    blob = layout.add_blob(LARGE)
    repository.send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE
    assert sizes(registry, "PUT") == [len(LARGE), len(LARGE)]
    assert len(registry.waits) <= 2
    parts = len(registry.asked("PATCH"))
    assert parts <= 2 + skip
    registry.rule("PUT", "", CutBody(1))
    blob = layout.add_blob(LARGE[1:])
    repository.send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE[1:]
    assert len(registry.asked("PATCH")) == parts


def test_neither_at_once_nor_in_parts(registry: FakeRegistry, layout: Layout) -> None:
    """A registry that takes a blob in no way is quoted."""
    registry.largest_put, registry.parts = CHUNK, False
    with pytest.raises(Rejected, match="SIZE_INVALID: too much"):
        registry.repository().send_blob(layout.add_blob(LARGE), layout)
    assert len(registry.asked("POST")) == 3


def test_a_large_put_that_breaks(registry: FakeRegistry, layout: Layout) -> None:
    """What the registry has of it does not go again."""
    registry.rule("PUT", "", CutBody(131_072))
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE
    assert registry.asked("PATCH")[0].headers["content-range"] == "131072-231071"
    assert len(registry.asked("POST")) == 1


@pytest.mark.parametrize("data", [b"", b"x"])
def test_the_smallest(registry: FakeRegistry, layout: Layout, data: bytes) -> None:
    """An empty blob is one, too."""
    blob = layout.add_blob(data)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == data


def test_absolute_locations(registry: FakeRegistry, layout: Layout) -> None:
    """A Location may be a whole URL."""
    registry.absolute = True
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE


@pytest.mark.parametrize(("least", "wanted"), [(1, CHUNK), (150_000, 150_000), (1 << 40, len(LARGE))])
def test_the_registrys_smallest_chunk(
    registry: FakeRegistry, layout: Layout, least: int, wanted: int
) -> None:
    """A registry may ask for larger chunks than ours, not for smaller ones."""
    registry.chunk_min_length, registry.largest_put = least, CHUNK
    registry.repository().send_blob(layout.add_blob(LARGE), layout)
    assert sizes(registry, "PATCH")[0] == wanted


@pytest.mark.parametrize("what", [Say(500), Say(503), NoAnswer(), CutBody(50_000), CutBody(1)])
@pytest.mark.parametrize("data", [SMALL, LARGE])
@pytest.mark.parametrize("method", ["POST", "PATCH", "PUT"])
@pytest.mark.parametrize("skip", [0, 1])
@pytest.mark.parametrize("largest", [0, CHUNK])
def test_every_break(
    registry: FakeRegistry,
    layout: Layout,
    method: str,
    data: bytes,
    what: Say | NoAnswer | CutBody,
    skip: int,
    largest: int,
) -> None:
    """Wherever it breaks, before or after the registry did what it was asked, the blob arrives."""
    registry.largest_put = largest
    registry.rule(method, "", what, skip=skip)
    registry.rule(method, "", what, skip=skip)
    blob = layout.add_blob(data)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == data
    assert registry.has(blob.digest)


def test_a_large_one_goes_on_from_where_it_was(registry: FakeRegistry, layout: Layout) -> None:
    """After a break in the third chunk the registry is asked how far it is, and nothing is sent twice."""
    registry.largest_put = CHUNK
    registry.rule("PATCH", "", CutBody(65_536), skip=2)
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE
    ranges = [each.headers["content-range"] for each in registry.asked("PATCH")]
    assert ranges[2:4] == ["200000-299999", "265536-312344"]
    assert len(registry.asked("GET", "uploads")) == 1
    assert len(registry.asked("POST")) == 2


def test_a_small_one_whose_answer_was_lost_is_not_sent_again(registry: FakeRegistry, layout: Layout) -> None:
    """The registry is asked for the blob before it is sent once more."""
    registry.rule("PUT", "", NoAnswer())
    registry.repository().send_blob(layout.add_blob(SMALL), layout)
    assert [each.method for each in registry.seen] == ["POST", "PUT", "HEAD"]


@pytest.mark.parametrize("status", [404, 416, 400])
def test_an_upload_that_is_given_up(registry: FakeRegistry, layout: Layout, status: int) -> None:
    """Where a registry knows nothing of an upload after a break, it begins anew."""
    registry.largest_put = CHUNK
    registry.rule("PATCH", "", CutBody(65_536), skip=2)
    registry.rule("GET", "uploads", Say(status))
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE
    assert len(registry.asked("POST")) == 3
    assert sum(registry.waits) <= 0.5


@pytest.mark.parametrize("status", [404, 416])
@pytest.mark.parametrize("skip", [0, 2])
def test_a_chunk_that_does_not_fit(registry: FakeRegistry, layout: Layout, status: int, skip: int) -> None:
    """A registry that stands elsewhere, or does not know the upload any more, gets a new one."""
    registry.rule("PUT", "", Say(500))
    registry.rule("PATCH", "", Say(status), skip=skip)
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE


@pytest.mark.parametrize("said", ["0-9999999", "bytes=0-5", "nonsense", ""])
def test_a_registry_that_says_odd_ranges(registry: FakeRegistry, layout: Layout, said: str) -> None:
    """A Range that cannot be is not believed: the blob arrives all the same."""
    registry.largest_put = CHUNK
    registry.rule("PATCH", "", Say(500), skip=1)
    registry.rule("GET", "uploads", Say(204, {"Range": said}))
    blob = layout.add_blob(LARGE)
    registry.repository().send_blob(blob, layout)
    assert registry.blob(blob.digest) == LARGE


@pytest.mark.parametrize("data", [SMALL, LARGE, LARGE * 4])
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit(registry: FakeRegistry, layout: Layout, data: bytes, at: int) -> None:
    """A blob that is not what its digest says is found here, once, and the registry never has it whole."""
    blob = layout.add_blob(data)
    path = Path(layout.path, "blobs/sha256", blob.digest.removeprefix("sha256:"))
    wrong = bytearray(data)
    wrong[at] ^= 1
    path.write_bytes(wrong)
    with pytest.raises(BlobError, match=f"the blob {blob.digest} does not match its digest"):
        registry.repository().send_blob(blob, layout)
    assert not registry.has(blob.digest)
    assert registry.waits == []


def test_a_blob_cut_short(registry: FakeRegistry, layout: Layout) -> None:
    """A blob of another size than its descriptor says is not sent at all."""
    blob = layout.add_blob(SMALL)
    path = Path(layout.path, "blobs/sha256", blob.digest.removeprefix("sha256:"))
    path.write_bytes(SMALL[:-1])
    with pytest.raises(BlobError, match=f"the blob {blob.digest} has 99998 bytes instead of 99999"):
        registry.repository().send_blob(blob, layout)


def test_an_empty_blob_of_another_digest(registry: FakeRegistry, layout: Layout) -> None:
    """No bytes are checked, too."""
    wrong = Descriptor("a/b", digest_of(b"x"), 0)
    Path(layout.path, "blobs/sha256", wrong.digest.removeprefix("sha256:")).touch()
    with pytest.raises(BlobError, match="does not match its digest"):
        registry.repository().send_blob(wrong, layout)


def test_mount(registry: FakeRegistry, layout: Layout) -> None:
    """A blob that another repository has is taken from there: nothing is sent."""
    blob = layout.add_blob(SMALL)
    registry.add_blob(SMALL, "other/app")
    mounts = ["none/here", "team/app", "other/app"]
    assert registry.repository().send_blob(blob, layout, mount_from=mounts) is True
    assert registry.has(blob.digest)
    assert ["mount" in each.path for each in registry.seen] == [True, True]


@pytest.mark.parametrize("what", [None, Say(500), NoAnswer(), Say(401), Say(403), Say(404), Say(405)])
def test_no_mount(registry: FakeRegistry, layout: Layout, what: Say | NoAnswer | None) -> None:
    """Where there is nothing to take, or it is not allowed, the blob goes in the upload that came of it."""
    registry.may_mount = False
    if what is not None:
        registry.rule("POST", "mount", what)
    blob = layout.add_blob(SMALL)
    assert registry.repository().send_blob(blob, layout, mount_from=["other/app"]) is False
    assert registry.blob(blob.digest) == SMALL
    assert len(registry.asked("PUT")) == 1
    assert len(registry.asked("POST")) == 1 + (what is not None)


def test_a_mount_whose_answer_was_lost(registry: FakeRegistry, layout: Layout) -> None:
    """It is there; nothing is sent."""
    registry.add_blob(SMALL, "other/app")
    registry.rule("POST", "mount", NoAnswer())
    registry.repository().send_blob(layout.add_blob(SMALL), layout, mount_from=["other/app"])
    assert registry.asked("PUT") == []


def test_refused(registry: FakeRegistry, layout: Layout) -> None:
    """A registry that does not take a blob is quoted; the message names the blob."""
    blob = layout.add_blob(SMALL)
    body = b'{"errors":[{"code":"SIZE_INVALID","message":"too much"}]}'
    registry.rule("PUT", "", Say(413, {}, body))
    with pytest.raises(
        Rejected, match=rf"{blob.digest} of 99999 bytes is rejected by .*SIZE_INVALID: too much"
    ):
        registry.repository().send_blob(blob, layout)
    registry.rule("POST", "", Say(403))
    with pytest.raises(Unauthorized, match="access denied"):
        registry.repository().send_blob(blob, layout)


def test_it_breaks_for_ever(registry: FakeRegistry, layout: Layout) -> None:
    """A registry that always gives up at the same place is left in the end."""
    registry.largest_put = CHUNK
    registry.rule("PATCH", "", CutBody(65_536), skip=0, times=999)
    registry.rule("GET", "uploads", Say(404), times=999)
    with pytest.raises(Unreachable, match=r"\(12 attempts\)$"):
        registry.repository().send_blob(layout.add_blob(LARGE), layout)


def test_steps(registry: FakeRegistry, layout: Layout) -> None:
    """`step` sees how far it is, and may end it."""
    registry.largest_put = CHUNK
    blob = layout.add_blob(LARGE)
    seen: list[int] = []
    registry.repository().send_blob(blob, layout, step=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(LARGE)

    def stop(at: int) -> None:
        if at >= 2 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.repository("another").send_blob(blob, layout, step=stop)
    assert not registry.has(blob.digest, "another")


def test_a_repository_that_refuses_mounts(registry: FakeRegistry, layout: Layout) -> None:
    """It is asked for the first blob, not for those after it."""
    registry.rule("POST", "mount", Say(403), times=99)
    repository = registry.repository()
    for data in (SMALL, SMALL[1:], SMALL[2:]):
        assert not repository.send_blob(layout.add_blob(data), layout, mount_from=["other/app"])
    assert len(registry.asked("POST", "mount")) == 1
