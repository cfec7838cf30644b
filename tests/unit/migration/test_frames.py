"""The protocol of `gpusnap migrate` over pipes: a broken or hostile side ends with a sentence, in time."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kept_checkpoints import an_archive, keep

from gpusnap.checkpoints.list import blobs_of
from gpusnap.migration.blobs import Remote, check_answer, serve
from gpusnap.migration.frames import Channel, LinkLost
from gpusnap.oci.base.errors import BlobError
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError

SILENCE = 0.3


class Ends:
    """Two channels that talk to each other, and the raw ends of the second one."""

    def __init__(self) -> None:
        from_here, to_there = os.pipe()
        from_there, to_here = os.pipe()
        self.raw_in, self.raw_out = from_here, to_here
        self.open = [from_here, to_there, from_there, to_here]
        self.here = Channel(from_there, to_there, "there", silence=SILENCE)

    def there(self) -> Channel:
        return Channel(self.raw_in, self.raw_out, "here", silence=SILENCE)

    def close(self, *which: int) -> None:
        for each in which or tuple(self.open):
            if each in self.open:
                self.open.remove(each)
                os.close(each)


@pytest.fixture
def ends() -> Iterator[Ends]:
    found = Ends()
    yield found
    found.close()


def framed(value: object, payload: bytes = b"") -> bytes:
    data = json.dumps(value).encode()
    return len(data).to_bytes(4, "big") + data + payload


def test_there_and_back(ends: Ends) -> None:
    """Frames, payloads in pieces, and signs of life, which nobody sees."""
    there = ends.there()
    there.greet()
    ends.here.expect_greeting()
    ends.here.send({"alive": True})
    ends.here.send({"a": 1}, [b"ab", b"c"], 3)
    ends.here.send({"b": 2})
    assert there.receive() == {"a": 1, "payload": 3}
    assert b"".join(there.payload(3)) == b"abc"
    assert there.receive() == {"b": 2}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "has sent nothing for 0.3 s"),
        (b"\x00\x00", "has sent nothing for 0.3 s"),
        (b"\x00\x00\x00\x00", "a frame of 0 bytes"),
        (b"\xff\xff\xff\xff", "a frame of 4294967295 bytes"),
        (b"\x00\x00\x00\x02{]", "a frame that is not JSON"),
        (b"\x00\x00\x00\x04" + b"[" * 4, "a frame that is not JSON"),
        (framed([1]), "a frame that is not an object"),
        (framed({"payload": -1}), "whose payload has no size"),
        (framed({"payload": True}), "whose payload has no size"),
        (framed({"payload": 1 << 62}), "whose payload has no size"),
    ],
)
def test_what_is_no_frame(ends: Ends, data: bytes, said: str) -> None:
    """Nothing is waited for without end, or read without limit."""
    os.write(ends.raw_out, data)
    with pytest.raises(LinkLost, match=said):
        ends.here.receive()


def test_an_end(ends: Ends) -> None:
    """In the middle of a frame, of a payload, and before what is to be sent."""
    os.write(ends.raw_out, framed({"payload": 5}, b"ab"))
    ends.close(ends.raw_out)
    assert ends.here.receive() == {"payload": 5}
    with pytest.raises(LinkLost, match="the connection to there ended"):
        list(ends.here.payload(5))
    ends.close(ends.raw_in)
    with pytest.raises(LinkLost, match="the connection to there ended"):
        ends.here.send({})


def test_nobody_reads(ends: Ends) -> None:
    """What is sent fills the pipe, and no more is waited for."""
    began = time.monotonic()
    with pytest.raises(LinkLost, match=r"there has received nothing for 0\.3 s"):
        ends.here.send({}, [bytes(1 << 20)], 1 << 20)
    assert time.monotonic() - began < 20 * SILENCE


@pytest.mark.parametrize(
    ("pieces", "said"), [([b"ab"], "1 bytes shorter"), ([b"ab", b"cd"], "1 bytes longer")]
)
def test_a_payload_of_another_size(ends: Ends, pieces: list[bytes], said: str) -> None:
    """Nobody waits for the rest, which signs of life would otherwise be taken for."""
    with pytest.raises(LinkLost, match=f"a file changed while it was sent to .*: it is {said} than before"):
        ends.here.send({"blob": "x"}, pieces, 3)


@pytest.mark.parametrize("text", [b"Welcome to gpu2!\n", b"gpusnap-migrate 2\n", b"gpusnap: \x1b[31mno\n"])
def test_another_greeting(ends: Ends, text: bytes) -> None:
    """A shell's, or another version's: it is shown, and obeyed in nothing."""
    os.write(ends.raw_out, text)
    with pytest.raises(LinkLost, match="did not respond as gpusnap does, but with: ") as raised:
        ends.here.expect_greeting()
    assert raised.value.code == "GPS-821"
    assert "\x1b" not in str(raised.value)


def test_signs_of_life(ends: Ends) -> None:
    """They come while the block runs; whoever cannot send one any more is told, once."""
    here = Channel(ends.open[2], ends.open[1], "there", silence=SILENCE, every=0.01)
    lost = threading.Event()
    with here.keep_alive(lambda: ("memory", 1), lost.set):
        assert framed({"alive": ["memory", 1]}).startswith(os.read(ends.raw_in, 4))
        ends.close(ends.raw_in)
        assert lost.wait(60)


@pytest.mark.parametrize("stage", ["restore", ""])
def test_a_side_that_only_lives(ends: Ends, stage: str) -> None:
    """Signs of life do not hold for ever: they have to say that something gets further."""
    ends.here.patience = 0.2
    there = Channel(ends.raw_in, ends.raw_out, "here", silence=SILENCE, every=0.02)
    answer = threading.Timer(20, there.send, ({"too": "late"},))
    answer.start()
    try:
        with (
            there.keep_alive(lambda: (stage, 7)),
            pytest.raises(
                LinkLost, match=r"there has made no progress for 0\.2 s" + (": restore" if stage else "$")
            ),
        ):
            ends.here.receive()
    finally:
        answer.cancel()


def test_a_side_that_gets_further(ends: Ends) -> None:
    """However long it takes: more bytes, or another step."""
    ends.here.patience = 0.2
    there = Channel(ends.raw_in, ends.raw_out, "here", silence=SILENCE, every=0.02)
    began = time.monotonic()
    answered = threading.Event()

    def mark() -> object:
        passed = time.monotonic() - began
        if passed > 5 * ends.here.patience and not answered.is_set():
            answered.set()
            threading.Thread(target=there.send, args=({"ok": {}},)).start()
        return ("restore", int(passed / 0.05))

    with there.keep_alive(mark):
        assert ends.here.receive() == {"ok": {}}
    assert time.monotonic() - began > 5 * ends.here.patience


@pytest.fixture
def stores(host_store: Store, tmp_path: Path) -> tuple[Store, Store]:
    return host_store, Store(f"{tmp_path}/other").create()


def fetched(ends: Ends, root: Descriptor, to: Store) -> None:
    """Have the other side fetch a checkpoint, and say how that went."""
    there = ends.there()
    try:
        with to.stage() as staging:
            transfer.pull(Remote(there, root), root.digest, staging.layout)
            staging.commit(root, names=["came"])
        there.send({"ok": {}})
    except (BlobError, GpusnapError) as error:
        there.send({"error": str(error)})


@pytest.mark.parametrize("damage", ["", "other bytes", "cut short", "gone"])
def test_blobs(ends: Ends, stores: tuple[Store, Store], tmp_path: Path, damage: str) -> None:
    """All of a checkpoint goes over; a wrong blob gets no name there, and the sentence comes back."""
    source, to = stores
    digest = keep(source, an_archive(tmp_path), ["w"])
    root = source.find(digest).descriptor
    layer = max(source.layout.read_manifest(root).layers, key=lambda each: each.size)
    path = Path(source.path, "blobs/sha256", layer.digest.removeprefix("sha256:"))
    data = path.read_bytes()
    match damage:
        case "other bytes":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case "cut short":
            path.write_bytes(data[:-1])
        case "gone":
            path.unlink()
    worker = threading.Thread(target=fetched, args=(ends, root, to))
    worker.start()
    answer = serve(ends.here, source.layout, blobs_of(source, root), lambda sent: None)
    worker.join(30)
    if damage:
        with pytest.raises(GpusnapError, match=layer.digest):
            check_answer(answer, "there")
        assert to.entries() == ()
        assert not os.path.exists(path.as_posix().replace(source.path, to.path))
    else:
        check_answer(answer, "there")
        assert [each.name for each in to.entries()] == ["came"]


def test_blobs_of_another_checkpoint(ends: Ends, stores: tuple[Store, Store], tmp_path: Path) -> None:
    """The other side gets what it is sent, and nothing else that the store has."""
    source, _ = stores
    digest = keep(source, an_archive(tmp_path), ["w"])
    root = source.find(digest).descriptor
    other = Path(source.path, "blobs/sha256", "0" * 64)
    other.write_bytes(b"somebody else's")
    there = ends.there()
    there.send({"want": f"sha256:{'0' * 64}"})
    there.send({"want": "sha256:../../index.json"})
    there.send({"want": root.digest})
    there.send({"ok": {}})
    serve(ends.here, source.layout, blobs_of(source, root), lambda sent: None)
    for _ in range(2):
        assert "does not belong to the checkpoint that is being sent" in there.receive()["error"]
    frame = there.receive()
    assert frame == {"blob": root.digest, "payload": root.size}
