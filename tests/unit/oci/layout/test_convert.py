"""An archive of Podman's taken apart and put together again: the same bytes, or a sentence."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from archives import CONFIG_DUMP, CREATED, listed, record, regions, written
from oci_regions import load

from gpusnap.checkpoints.formats import names as members
from gpusnap.checkpoints.formats import podman_reader
from gpusnap.checkpoints.formats.podman import give_out, take_in
from gpusnap.checkpoints.formats.podman_reader import ArchiveContents
from gpusnap.oci.base import files as files_module
from gpusnap.oci.base.errors import ArchiveError, BlobError, DiskFull
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import Chunk, descriptors, make_table
from gpusnap.oci.layout.blobs import FirstOf
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import EMPTY, Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import archive
from gpusnap.oci.tar.archive import Compression, Writer, entries
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import ImageError, ManifestError
from gpusnap.runtime_shim.records import manifest, manifest_json

BLOB = "checkpoint/gpusnap/blobs/sha256/"
MANIFEST = "checkpoint/gpusnap/manifest.json"


@pytest.fixture
def source(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "source").create()


@pytest.fixture
def staging(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "staging").create()


def names(layout: Layout) -> set[str]:
    return {"sha256:" + each for each in os.listdir(Path(layout.path, "blobs", "sha256"))}


def whole(taken: ArchiveContents) -> Artifact:
    return Artifact(taken.config, taken.records, taken.rootfs, taken.chunks, taken.annotations)


def of(layout: Layout, layer: Descriptor) -> dict[str, bytes | None]:
    with layout.open_blob(layer.digest, layer.size) as file:
        return {each.name: each.content.read() if each.content else None for each in entries(file)}


@pytest.mark.parametrize("compress", ["none", "zstd"])
@pytest.mark.parametrize("threads", [0, 1])
def test_there_and_back(
    tmp_path: Path, source: Layout, staging: Layout, compress: Compression, threads: int
) -> None:
    """Every file comes back, the regions too; each part of the artifact is what the format says."""
    tables = regions(source)
    path = written(
        tmp_path / "in.tar", source, record(tables), more={BLOB + "1" * 63: b"", "volumes/v.tar": b"v"}
    )
    taken = take_in(path, staging, threads=threads)
    before = listed(path)

    [volume] = taken.volumes
    memory, own = descriptors(tables), descriptors([volume.table])
    assert [each.digest for each in taken.chunks] == [each.digest for each in (*memory, *own)]
    assert taken.chunks[-1].annotations[artifact.CHUNK_REGION] == "volumes/v.tar"
    assert taken.annotations["io.gpusnap.volumes"] == "v"
    assert [label for label, _ in taken.tables] == ["1:100000000", "1:200000000"]
    assert taken.rootfs is not None
    parts = {taken.config.digest, taken.records.digest, taken.rootfs.digest}
    assert names(staging) == parts | {each.digest for each in taken.chunks}
    assert staging.read_blob(taken.config) == before[MANIFEST]
    assert load(staging, tables) == load(source, tables)
    records = of(staging, taken.records)
    assert {name for name in records if records[name] is not None} == {
        *("checkpoint/inventory.img", "checkpoint/pages-1.img", "config.dump", "spec.dump"),
        "volumes/v.tar.chunks",
    }
    artifact.write(staging, whole(taken))  # refuses parts of another kind

    out = tmp_path / "out.tar"
    give_out(whole(taken), staging, str(out), config=before[MANIFEST], compress=compress, threads=threads)
    after = listed(str(out))
    chunks = {BLOB + each.digest.removeprefix("sha256:") for each in memory}
    left_out = {BLOB + "1" * 63, "checkpoint/gpusnap/oci-layout", "checkpoint/gpusnap/index.json"}
    assert {name: after.get(name) for name in before.keys() - left_out} == {
        name: before[name] for name in before.keys() - left_out
    }
    assert list(after)[:2] == ["config.dump", "spec.dump"]
    assert out.stat().st_mode & 0o777 == 0o600

    # The layout in it is one for any tool, and has what the manifest names.
    for name in after:
        if name.startswith("checkpoint/gpusnap/"):
            place = tmp_path / "unpacked" / name.removeprefix("checkpoint/gpusnap/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(after[name])
    unpacked = Layout(tmp_path / "unpacked")
    unpacked.check()
    [root] = unpacked.read_index().manifests
    named = artifact.read(root, unpacked.read_blob)
    assert {BLOB + each.digest.removeprefix("sha256:") for each in named.chunks} == chunks

    again = take_in(str(out), Layout(tmp_path / "again").create())
    assert (again.config, again.chunks, again.rootfs) == (taken.config, taken.chunks, taken.rootfs)
    assert again.annotations == taken.annotations
    assert {*of(Layout(tmp_path / "again"), again.records).items()} == {*records.items()}


def test_what_is_written_can_be_synced(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Blobs that were dropped are no concern of the layout's."""
    path = written(
        tmp_path / "in.tar", source, record(regions(source)), more={BLOB + digest_of(b"x")[7:]: b"x"}
    )
    take_in(path, staging)
    staging.sync()
    assert digest_of(b"x") not in names(staging)


def test_config_among_the_blobs(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """A layout that has the manifest as a blob, or what the layout had before, does not lose it."""
    document = record(regions(source))
    data = manifest_json.encode(document)
    there = staging.add_blob(b"there before")
    more = {BLOB + digest_of(each)[7:]: each for each in (data, b"there before")}
    taken = take_in(written(tmp_path / "in.tar", source, document, more=more), staging)
    assert staging.read_blob(taken.config) == data
    assert staging.read_blob(there) == b"there before"


def test_owners_and_modes(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Headers of the records come back as they were: owners, modes, times, links, extended attributes."""
    path = written(tmp_path / "plain.tar", None, None)
    odd = tarfile.TarInfo("artifacts/odd")
    odd.uid, odd.gid, odd.mode, odd.mtime, odd.size = 1000, 1 << 22, 0o4755, 12.5, 3
    odd.pax_headers = {"SCHILY.xattr.security.selinux": "a:b\0", "mtime": "12.5"}
    link = tarfile.TarInfo("artifacts/link")
    link.type, link.linkname = tarfile.SYMTYPE, "odd"
    with Writer(tmp_path / "in.tar") as writer:
        for each in entries(path):
            writer.add(each.info, each.content)
        writer.add(odd, io.BytesIO(b"odd"))
        writer.add(link)
    taken = take_in(str(tmp_path / "in.tar"), staging)
    give_out(whole(taken), staging, str(tmp_path / "out.tar"), config=b"")
    found = {each.name: each.info for each in entries(str(tmp_path / "out.tar"))}
    for wanted in (odd, link):
        for field in ("uid", "gid", "mode", "mtime", "linkname", "type", "pax_headers"):
            assert getattr(found[wanted.name], field) == getattr(wanted, field), field


def test_without_gpus(tmp_path: Path, staging: Layout) -> None:
    """A checkpoint without GPU state has the empty config and no chunks, and comes back as it was."""
    path = written(tmp_path / "in.tar", None, None, without="rootfs-diff.tar")
    taken = take_in(path, staging)
    assert (taken.config.media_type, taken.rootfs, taken.chunks, taken.tables) == (EMPTY, None, (), ())
    assert taken.annotations["org.opencontainers.image.created"] == "2023-11-14T22:13:20Z"
    assert staging.read_blob(taken.config) == b"{}"
    give_out(whole(taken), staging, str(tmp_path / "out.tar"), config=b"")
    assert listed(str(tmp_path / "out.tar")) == listed(path)


def test_annotations(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """What the engine and the manifest say, printable and bounded; the runtime by the engine's name."""
    config = {**CONFIG_DUMP, "rootfsImageName": "x" * 5000, "pod": 7}
    path = written(
        tmp_path / "in.tar",
        source,
        record(regions(source)),
        more={"config.dump": json.dumps(config).encode()},
    )
    notes = take_in(path, staging).annotations
    assert notes == {
        "io.gpusnap.container.id": "ab" * 32,
        "io.gpusnap.driver": "nvidia 560.35.03",
        "io.gpusnap.gpus": "1 Soft H100",
        "io.gpusnap.memory": str(1 << 20),
        "io.gpusnap.processes": "1",
        "io.gpusnap.version": __version__,
        "org.criu.checkpoint.container.name": "serving?[31m",
        "org.criu.checkpoint.criu.version": "4.1",
        "org.criu.checkpoint.engine.name": "podman",
        "org.criu.checkpoint.host.arch": "x86_64",
        "org.criu.checkpoint.host.kernel": "6.12.0",
        "org.criu.checkpoint.rawImageName": "base",
        "org.criu.checkpoint.rootfsImageID": "cd" * 32,
        "org.criu.checkpoint.rootfsImageName": "x" * 256,
        "org.criu.checkpoint.runtime.name": "gpusnap-runtime",
        "org.criu.checkpoint.runtime.version": "1.21",
        "org.opencontainers.image.created": CREATED,
    }


@pytest.mark.parametrize(
    ("spec", "engine"),
    [
        (b'{"annotations": {"io.container.manager": "cri-o"}}', "cri-o"),
        (b'{"annotations": {"io.kubernetes.cri.container-type": "container"}}', "containerd"),
        (b'{"annotations": 5}', "podman"),
        (b"[" * 100_000, "podman"),
    ],
)
def test_engines(tmp_path: Path, staging: Layout, spec: bytes, engine: str) -> None:
    """Who made it is told by spec.dump, whatever that is."""
    taken = take_in(written(tmp_path / "in.tar", None, None, more={"spec.dump": spec}), staging)
    assert taken.annotations["org.criu.checkpoint.engine.name"] == engine


def test_missing_chunk(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """A chunk that is not in the archive is named, with what it is of."""
    tables = regions(source)
    gone = tables[1].chunks[-1]
    path = written(
        tmp_path / "in.tar", source, record(tables), without=BLOB + gone.blob.removeprefix("sha256:")
    )
    with pytest.raises(
        ImageError, match=rf"does not contain the blob {gone.blob} .*chunk at {gone.offset} of 1:200000000"
    ):
        take_in(path, staging)


def test_chunks_in_a_store(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Where the manifest refers to a store, the archive need not have the chunks."""
    tables = regions(source)
    taken = take_in(written(tmp_path / "in.tar", None, record(tables, pages="store")), staging)
    assert [each.digest for each in taken.chunks] == [each.digest for each in descriptors(tables)]
    assert not names(staging) & {each.digest for each in taken.chunks}
    # With the store's blobs beside the staging's, the archive has them again.
    config = staging.read_blob(taken.config)
    give_out(whole(taken), FirstOf([staging, source]), str(tmp_path / "out.tar"), config=config)
    again = take_in(str(tmp_path / "out.tar"), Layout(tmp_path / "again").create())
    assert again.chunks == taken.chunks
    assert {each.digest for each in again.chunks} <= names(Layout(tmp_path / "again"))
    give_out(whole(taken), staging, str(tmp_path / "small.tar"), config=config, embed=False)
    assert not [name for name in listed(str(tmp_path / "small.tar")) if "blobs" in name]


@pytest.mark.parametrize("pages", ["store", "chunks"])
def test_files_in_chunks(tmp_path: Path, source: Layout, staging: Layout, pages: str) -> None:
    """Images that are in chunks are treated as regions are, and in an archive for others they are images."""
    tables = regions(source)
    files = tuple(manifest.FileRecord(f"pages-{at}.img", table) for at, table in enumerate(tables))
    document = dataclasses.replace(record(tables[:1], pages=pages), files=files)
    taken = take_in(written(tmp_path / "in.tar", source, document), staging)
    assert [label for label, _ in taken.tables] == ["1:100000000", "pages-0.img", "pages-1.img"]
    give_out(whole(taken), staging, str(tmp_path / "out.tar"), config=staging.read_blob(taken.config))
    given = listed(str(tmp_path / "out.tar"))
    for at, table in enumerate(tables):
        image = given[f"checkpoint/pages-{at}.img"]
        assert len(image) == table.size
        for chunk in table.chunks:
            assert digest_of(image[chunk.offset : chunk.offset + chunk.size]) == chunk.plain
    said = manifest_json.decode(given[MANIFEST], "")
    assert (said.pages, said.files, said.processes) == ("chunks", (), document.processes)
    assert json.loads(given["checkpoint/gpusnap/index.json"])
    again = take_in(str(tmp_path / "out.tar"), Layout(tmp_path / "again").create())
    assert [each.digest for each in again.chunks] == [each.digest for each in descriptors(tables[:1])]


def test_known(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """A blob that comes from elsewhere is asked for by digest and size, and not read from the archive."""
    tables = regions(source)
    first = tables[0].chunks[0]
    spoilt = {BLOB + first.blob.removeprefix("sha256:"): bytes(first.stored)}
    path = written(tmp_path / "in.tar", source, record(tables), more=spoilt)
    asked = []

    def take(digest: str, size: int) -> bool:
        asked.append((digest, size))
        if digest == first.blob:
            staging.link_blob(digest, size, source)
            return True
        return False

    taken = take_in(path, staging, known=take)
    assert {digest for digest, _ in asked} == {each.digest for each in taken.chunks}
    assert load(staging, tables) == load(source, tables)


@pytest.mark.parametrize("small", [members.SMALL, 10])
def test_wrong_blob(
    tmp_path: Path, source: Layout, staging: Layout, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """A blob that its name does not fit is found, whether it passes in one piece or in many."""
    monkeypatch.setattr(podman_reader, "SMALL", small)
    tables = regions(source)
    chunk = tables[0].chunks[0]
    spoilt = {BLOB + chunk.blob.removeprefix("sha256:"): bytes(chunk.stored)}
    path = written(tmp_path / "in.tar", source, record(tables), more=spoilt)
    with pytest.raises(BlobError, match=rf"{chunk.blob} in .* does not match its digest"):
        take_in(path, staging)
    assert take_in(written(tmp_path / "right.tar", source, record(tables)), staging).tables


BAD = {
    "no config.dump": ({"without": "config.dump"}, "has no config.dump"),
    "broken manifest": ({"more": {MANIFEST: b"{"}}, "is cut short or not JSON"),
    "huge manifest": ({"more": {MANIFEST: bytes((64 << 20) + 1)}}, "bytes, but at most 67108864 are allowed"),
    "no manifest": ({"without": MANIFEST}, "has checkpoint/gpusnap, but no"),
    "huge dump": (
        {"more": {"config.dump": bytes((16 << 20) + 1)}},
        "bytes, but at most 16777216 are allowed",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_no_checkpoint(tmp_path: Path, source: Layout, staging: Layout, what: str) -> None:
    """An archive that is none of a checkpoint, or not a whole one, is refused with a reason."""
    words, message = BAD[what]
    path = written(tmp_path / "in.tar", source, record(regions(source)), **words)  # type: ignore[arg-type]
    with pytest.raises((ImageError, ManifestError), match=message):
        take_in(path, staging)


@pytest.mark.parametrize("name", ["config.dump", "spec.dump", "rootfs-diff.tar", MANIFEST])
@pytest.mark.parametrize("kind", ["link", "twice"])
def test_two_faced(tmp_path: Path, source: Layout, staging: Layout, name: str, kind: str) -> None:
    """What one reader takes for this and another for that is refused: links, and the same name twice."""
    path = written(tmp_path / "first.tar", source, record(regions(source)))
    with Writer(tmp_path / "in.tar") as writer:
        for each in entries(path):
            if kind == "link" and each.name == name:
                each.info.type, each.info.linkname, each.info.size = tarfile.SYMTYPE, "/etc/shadow", 0
            writer.add(each.info, each.content)
        if kind == "twice":
            more = tarfile.TarInfo("./" + name)
            writer.add(more)
    with pytest.raises(
        ImageError, match=f"{name} in .* is not a file" if kind == "link" else f"has {name} twice"
    ):
        take_in(str(tmp_path / "in.tar"), staging)


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint/gpusnap", "checkpoint/gpusnap/blobs/sha256"])
def test_link_for_a_folder(tmp_path: Path, staging: Layout, name: str) -> None:
    """A link in the place of a folder that others are to lie in is refused."""
    with Writer(tmp_path / "in.tar") as writer:
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        writer.add(link)
    with pytest.raises(ImageError, match=f"{name} in .* is not a directory"):
        take_in(str(tmp_path / "in.tar"), staging)


def test_cut_short(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Cut at any block, an archive is never taken for a whole one."""
    more = {"checkpoint/pages-1.img": b"p", "rootfs-diff.tar": b"r"}
    path = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    data = Path(path).read_bytes()
    assert take_in(path, staging)
    for end in range(0, len(data), 512):
        Path(path).write_bytes(data[:end])
        with pytest.raises(ArchiveError, match="cut short"):
            take_in(path, staging, threads=1)


def parts(tmp_path: Path, source: Layout) -> tuple[Artifact, Layout, bytes]:
    layout = Layout(tmp_path / "parts").create()
    taken = take_in(written(tmp_path / "in.tar", source, record(regions(source))), layout)
    return whole(taken), layout, layout.read_blob(taken.config)


@pytest.mark.parametrize("which", ["records", "rootfs", "chunk"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
@pytest.mark.parametrize("small", [members.SMALL, 10])
def test_give_out_wrong(
    tmp_path: Path, source: Layout, monkeypatch: pytest.MonkeyPatch, which: str, damage: str, small: int
) -> None:
    """A flipped bit, a blob cut short, and one that is missing: it is named, and no archive is made."""
    monkeypatch.setattr("gpusnap.checkpoints.formats.podman_writer.SMALL", small)
    found, layout, config = parts(tmp_path, source)
    part = {"records": found.records, "rootfs": found.rootfs, "chunk": found.chunks[1]}[which]
    assert part is not None
    blob = Path(layout.path, "blobs", "sha256", part.digest.removeprefix("sha256:"))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        blob.unlink()
    else:
        blob.write_bytes(data if damage == "flipped" else data[:-1])
    out = tmp_path / "out.tar"
    out.write_bytes(b"earlier")
    before = set(os.listdir(tmp_path))
    with pytest.raises(BlobError, match=part.digest):
        give_out(found, layout, str(out), config=config)
    assert out.read_bytes() == b"earlier"
    assert set(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("room", [0, 1, 5, 40])
def test_give_out_full(tmp_path: Path, source: Layout, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """A disk that is full after some writes: the path is named, nothing is left."""
    found, layout, config = parts(tmp_path, source)
    left, real = room, files_module.write_all

    def all_written(descriptor: int, data: bytes) -> None:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= 1
        real(descriptor, data)

    monkeypatch.setattr(archive, "write_all", all_written)
    before = set(os.listdir(tmp_path))
    with pytest.raises(DiskFull, match=r"is full: the archive out\.tar"):
        give_out(found, layout, str(tmp_path / "out.tar"), config=config)
    assert set(os.listdir(tmp_path)) == before


def test_records_that_are_more(tmp_path: Path, source: Layout) -> None:
    """Records from elsewhere cannot bring a manifest, a rootfs or blobs of their own along."""
    found, layout, config = parts(tmp_path, source)
    for name in (MANIFEST, BLOB + "0" * 64, "rootfs-diff.tar", "checkpoint", "checkpoint/gpusnap"):
        with Writer(tmp_path / "records", compress="zstd") as writer:
            writer.add(tarfile.TarInfo(name))
        layer = layout.add_blob((tmp_path / "records").read_bytes())
        (tmp_path / "records").unlink()
        with pytest.raises(ImageError, match=f"contain {name}"):
            give_out(
                dataclasses.replace(found, records=layer), layout, str(tmp_path / "out.tar"), config=config
            )


def test_no_records(tmp_path: Path, source: Layout) -> None:
    """The GPUs' side alone makes no archive."""
    found, layout, config = parts(tmp_path, source)
    with pytest.raises(ImageError, match="no engine records,"):
        give_out(dataclasses.replace(found, records=None), layout, str(tmp_path / "out.tar"), config=config)


def test_progress(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Both ways say how far they are, from little to all."""
    path = written(tmp_path / "in.tar", source, record(regions(source)))
    steps: list[tuple[int, int]] = []
    taken = take_in(path, staging, progress=lambda *step: steps.append(step))
    assert steps[-1] == (os.path.getsize(path), os.path.getsize(path))
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    steps.clear()
    config = staging.read_blob(taken.config)
    give_out(
        whole(taken),
        staging,
        str(tmp_path / "out.tar"),
        config=config,
        progress=lambda *step: steps.append(step),
    )
    assert taken.rootfs is not None
    total = sum(each.size for each in (taken.records, taken.rootfs, *taken.chunks))
    assert steps[-1] == (total, total)


def test_large_records(tmp_path: Path, staging: Layout) -> None:
    """64 MiB of an image pass through in pieces, and the layer is small where they are zeros."""
    path = written(tmp_path / "in.tar", None, None, more={"checkpoint/pages-9.img": bytes(64 << 20) + b"end"})
    taken = take_in(path, staging)
    assert taken.records.size < 1 << 20
    give_out(whole(taken), staging, str(tmp_path / "out.tar"), config=b"", compress="zstd")
    assert listed(str(tmp_path / "out.tar")) == listed(path)


def test_cannot_be_read(tmp_path: Path, staging: Layout) -> None:
    """A path that cannot be opened is named, in words that Podman shows."""
    with pytest.raises(ImageError, match="cannot be read: it does not exist"):
        take_in(str(tmp_path / "none"), staging)


def test_a_lying_table(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """A chunk of another size than its blob's is one that is missing."""
    tables = regions(source)
    first = tables[0].chunks[0]
    assert first.encoding == "zstd"
    lying = make_table(first.size, [Chunk(0, first.size, first.plain, first.blob, first.stored - 1, "zstd")])
    with pytest.raises(ImageError, match="does not contain the blob"):
        take_in(written(tmp_path / "in.tar", source, record((lying,))), staging)


def test_volumes_may_stay_away(tmp_path: Path, source: Layout, staging: Layout) -> None:
    """Where Podman is to leave its own as they are."""
    path = written(tmp_path / "in.tar", source, record(regions(source)), more={"volumes/v.tar": b"v"})
    taken = take_in(path, staging)
    config = staging.read_blob(taken.config)
    give_out(whole(taken), staging, str(tmp_path / "out.tar"), config=config, volumes=False)
    assert not [name for name in listed(str(tmp_path / "out.tar")) if name.startswith("volumes")]


def test_no_engine_writes_chunks_of_volumes(tmp_path: Path, staging: Layout) -> None:
    """What stands for a volume in records is never taken from an archive: it could name any chunk."""
    path = written(tmp_path / "in.tar", None, None, more={"volumes/v.tar.chunks": b"{}"})
    with pytest.raises(ImageError, match=r"has volumes/v\.tar\.chunks, which no engine writes"):
        take_in(path, staging)
