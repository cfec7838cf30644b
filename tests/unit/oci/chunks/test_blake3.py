"""BLAKE3 of chunks: written and checked where the package is installed, and SHA-256 where it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from oci_regions import CEILING, PAGE, Far, fill, load, save

from gpusnap.oci.base.errors import BlobError, ChunkError
from gpusnap.oci.chunks import blake3_digests
from gpusnap.oci.chunks.blake3_digests import compute_blake3, differ, start_blake3
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.reader import Reader, read
from gpusnap.oci.chunks.table import Chunk, Table, descriptors, from_json, make_table, to_json
from gpusnap.oci.chunks.verify import Contents
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout

MIB = 1 << 20
OTHER = blake3(b"other").hexdigest()
# Of the empty input: test_vectors.json of the BLAKE3 team.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package cannot be imported."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    blake3_digests._import.cache_clear()
    yield
    blake3_digests._import.cache_clear()


def numbers(size: int) -> bytes:
    """Chunks that get planes."""
    made = bytearray(fill(size, "random"))
    made[1::2] = b"\x3c" * (size // 2)
    return bytes(made)


CONTENT = bytearray(fill(MIB, "text") + fill(MIB, "random") + bytes(MIB) + numbers(MIB))
ENCODINGS = ["zstd", "plain", "planes"]


def stored(layout: Layout) -> Table:
    """A table with a chunk of each encoding."""
    (table,) = save(layout, CONTENT, chunk_size=MIB)
    assert [chunk.encoding for chunk in table.chunks] == ENCODINGS
    return table


def alone(chunk: Chunk, **other: str) -> tuple[Table, ...]:
    """A table of that chunk, with some members changed."""
    return (Table(chunk.size, (replace(chunk, offset=0, **other),)),)  # type: ignore[arg-type]


def without(table: Table) -> Table:
    """As a gpusnap without the package writes it."""
    return Table(table.size, tuple(replace(chunk, blake3="") for chunk in table.chunks))


def load_later(layout: Layout, tables: tuple[Table, ...]) -> None:
    """Read into memory of ours, and check afterwards."""
    targets = [Buffer(bytearray(table.size)) for table in tables]
    with Reader(tables, layout, threads=2, ceiling=CEILING, targets=targets, verify_later=True) as reading:
        reading.wait()
        reading.verify()


def test_it_is_blake3() -> None:
    assert compute_blake3(b"") == EMPTY
    hasher = start_blake3()
    hasher.update(b"ab")
    hasher.update(memoryview(b"c"))
    assert hasher.hexdigest() == compute_blake3(b"abc") == blake3(b"abc").hexdigest()


def test_what_differs() -> None:
    """Only what is known on both sides."""
    assert differ("a", "b")
    assert not any(differ(*pair) for pair in (("a", "a"), ("", "b"), ("a", ""), ("", "")))


def test_written_and_read(layout: Layout) -> None:
    """Every chunk has that of its plain bytes, in JSON too."""
    table = stored(layout)
    for chunk in table.chunks:
        assert chunk.blake3 == blake3(CONTENT[chunk.offset : chunk.offset + chunk.size]).hexdigest()
    assert from_json(json.loads(json.dumps(to_json(table)))) == table
    assert load(layout, (table,)) == [CONTENT]


def test_some_chunks_have_it(layout: Layout) -> None:
    table = stored(layout)
    mixed = Table(table.size, (replace(table.chunks[0], blake3=""), *table.chunks[1:]))
    document = to_json(mixed)
    assert document["blake3"] == [None, table.chunks[1].blake3, table.chunks[2].blake3]
    assert from_json(document) == mixed
    assert load(layout, (mixed,)) == [CONTENT]


def test_rows_are_as_before(layout: Layout) -> None:
    """An older gpusnap ignores a member that it does not know, and refuses a row of another length."""
    table = stored(layout)
    document = to_json(table)
    assert len(document.pop("blake3")) == 3  # type: ignore[arg-type]
    assert document == to_json(without(table))
    assert from_json(document) == without(table)


@pytest.mark.parametrize("at", range(3), ids=ENCODINGS)
def test_blake3_decides(layout: Layout, at: int) -> None:
    """Where the table has it, SHA-256 of the plain bytes is not computed: so a wrong one is not seen."""
    chunk = stored(layout).chunks[at]
    wrong = alone(chunk, blake3=OTHER)
    for action in (load, load_later):
        with pytest.raises(ChunkError, match=f"does not contain the chunk at 0, {chunk.plain}"):
            action(layout, wrong)
    if chunk.encoding == "plain":
        return  # its plain digest is that of the blob
    lie = digest_of(b"other")
    load(layout, alone(chunk, plain=lie))
    load_later(layout, alone(chunk, plain=lie))
    for action in (load, load_later):
        with pytest.raises(ChunkError, match=f"does not contain the chunk at 0, {lie}"):
            action(layout, alone(chunk, plain=lie, blake3=""))


@pytest.mark.parametrize("kind", [Buffer, Far])
@pytest.mark.parametrize("at", range(3), ids=ENCODINGS)
def test_damage(layout: Layout, at: int, kind: type[Buffer]) -> None:
    """A damaged blob is named as ever."""
    chunk = stored(layout).chunks[at]
    path = Path(layout.path, "blobs/sha256", chunk.blob.removeprefix("sha256:"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    target = kind(bytearray(chunk.size))
    with pytest.raises(BlobError, match=f"{chunk.blob} does not match its digest"):
        read(alone(chunk), layout, [target], threads=1, ceiling=CEILING)


@pytest.mark.parametrize("at", range(3), ids=ENCODINGS)
def test_verify(layout: Layout, at: int) -> None:
    """A table with a wrong one is reported: a restore with the package would refuse it."""
    table = stored(layout)
    chunk = table.chunks[at]
    (blob,) = descriptors(alone(chunk))
    assert Contents([table]).fault(layout, blob) == ""
    assert Contents([without(table)]).fault(layout, blob) == ""
    assert Contents(alone(chunk, blake3=OTHER)).fault(layout, blob) == (
        f"holds the chunk {chunk.plain} of {MIB} bytes, but its table has another BLAKE3 for that"
    )


@pytest.mark.usefixtures("absent")
class TestAbsent:
    """The package is not installed."""

    def test_nothing_is_computed(self) -> None:
        hasher = start_blake3()
        hasher.update(b"abc")
        assert (compute_blake3(b"abc"), hasher.hexdigest()) == ("", "")

    def test_it_is_asked_for_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert compute_blake3(b"abc") == ""
        monkeypatch.delitem(sys.modules, "blake3")
        assert compute_blake3(b"abc") == ""

    def test_the_table_has_none(self, layout: Layout) -> None:
        table = stored(layout)
        assert "blake3" not in to_json(table)
        assert load(layout, (table,)) == [CONTENT]

    @pytest.mark.parametrize("at", range(3), ids=ENCODINGS)
    def test_sha256_decides(self, layout: Layout, at: int) -> None:
        """Whatever BLAKE3 a table has."""
        chunk = stored(layout).chunks[at]
        load(layout, alone(chunk, blake3=OTHER))
        load_later(layout, alone(chunk, blake3=OTHER))
        (blob,) = descriptors(alone(chunk))
        assert Contents(alone(chunk, blake3=OTHER)).fault(layout, blob) == ""
        if chunk.encoding != "plain":
            for action in (load, load_later):
                with pytest.raises(ChunkError, match="does not contain the chunk"):
                    action(layout, alone(chunk, plain=digest_of(b"other"), blake3=chunk.blake3))


def test_chunks_of_an_earlier_checkpoint(layout: Layout, tmp_path: Path) -> None:
    """A chunk that is linked has it, whatever the earlier table had."""
    table = stored(layout)
    known = Known(tmp_path / "known.json")
    known.learn([without(table)], layout)
    other = Layout(tmp_path / "other").create()
    (again,) = write([Buffer(CONTENT)], other, threads=2, ceiling=CEILING, chunk_size=MIB, known=known)
    assert again == table


def test_chunks_that_were_met(layout: Layout) -> None:
    """A chunk that was written ahead keeps its own, or gets it."""
    table = stored(layout)
    first, second, third = table.chunks
    met = {
        first.plain: replace(first, blake3=OTHER),
        second.plain: replace(second, blake3=""),
        third.plain: third,
    }
    (again,) = write(
        [Buffer(CONTENT)], layout, threads=2, ceiling=CEILING, chunk_size=MIB, written_before=met
    )
    assert [chunk.blake3 for chunk in again.chunks] == [OTHER, second.blake3, third.blake3]


def test_what_was_met_is_known_by_it(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that was written ahead and is the same is not hashed by SHA-256 again; another one is."""
    table = stored(layout)
    met = {chunk.plain: chunk for chunk in table.chunks}
    hashed: list[int] = []

    def counted(view: memoryview) -> str:
        hashed.append(view.nbytes)
        return digest_of(view)

    monkeypatch.setattr("gpusnap.oci.chunks.writer.digest_of", counted)
    limits = {"threads": 2, "ceiling": CEILING, "chunk_size": MIB}
    (again,) = write([Buffer(CONTENT)], layout, written_before=met, **limits)  # type: ignore[arg-type]
    assert again == table
    assert hashed == []
    other = bytearray(CONTENT)
    other[MIB + 5] ^= 1
    (changed,) = write([Buffer(other)], layout, written_before=met, **limits)  # type: ignore[arg-type]
    assert hashed
    assert [c.plain == d.plain for c, d in zip(changed.chunks, table.chunks, strict=True)] == [
        True,
        False,
        True,
    ]


HEX = digest_of(b"a").removeprefix("sha256:")


@pytest.mark.parametrize(
    "hashes",
    [
        None,
        EMPTY,
        [],
        [EMPTY, EMPTY],
        [5],
        [True],
        [""],
        [EMPTY[1:]],
        [EMPTY + "0"],
        [EMPTY.upper()],
        [f"{EMPTY[1:]}\n"],
        [f"blake3:{EMPTY}"],
        [[EMPTY]],
    ],
)
def test_bad_json(hashes: object) -> None:
    """As many as there are rows, each of 64 small hex digits or null."""
    table = {"size": PAGE, "digest": "sha256", "chunks": [[0, PAGE, HEX]]}
    assert from_json({**table, "blake3": [EMPTY]}).chunks[0].blake3 == EMPTY
    assert from_json({**table, "blake3": [None]}) == from_json(table)
    with pytest.raises(ChunkError, match="BLAKE3"):
        from_json({**table, "blake3": hashes})


def test_a_bad_table() -> None:
    chunk = Chunk(0, PAGE, digest_of(b"a"), digest_of(b"a"), PAGE, "plain", EMPTY)
    assert make_table(PAGE, [chunk]).chunks == (chunk,)
    with pytest.raises(ChunkError, match=r"chunk 0 at 0 has a BLAKE3 digest that is none: '\.\./x'"):
        make_table(PAGE, [replace(chunk, blake3="../x")])


def test_imported_when_used() -> None:
    """A command that hashes no chunk does not import the package."""
    program = (
        "import sys, gpusnap.oci.chunks.reader, gpusnap.oci.chunks.writer as w, gpusnap.oci.chunks.verify;"
        "print('blake3' in sys.modules); w.compute_blake3(b''); print('blake3' in sys.modules)"
    )
    found = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    assert found.split() == ["False", "True"]
