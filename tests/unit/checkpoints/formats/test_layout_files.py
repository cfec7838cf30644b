"""Checkpoints in oci-archives: each command reads them as those of any layout."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from archives import listed
from fake_podman import FakePodman
from fake_registry import FakeRegistry
from kept_checkpoints import an_archive, keep
from layout_tars import oci_archive

from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import Damaged
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats.layout_archive import opened_layout
from gpusnap.checkpoints.formats.podman import give_out
from gpusnap.checkpoints.locator import InFile, InStore
from gpusnap.cli.exit_codes import exit_code
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout import image_marks, single_layer_image
from gpusnap.oci.layout.documents import Descriptor, Manifest
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import Writer
from gpusnap.operations import open as source
from gpusnap.operations import push_pull, sources
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.operations.verify import verify_one
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused, UsageError

QUIET = Progress(shown=False)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(status="exited")
    return found


@pytest.fixture
def podmans(tmp_path: Path) -> str:
    return an_archive(tmp_path)


@pytest.fixture
def other(tmp_path: Path, podmans: str) -> Store:
    """Another store that has a checkpoint "w"."""
    found = Store(tmp_path / "other")
    keep(found, podmans, ["w"])
    return found


def root_of(of: Store) -> Descriptor:
    return of.find("w").descriptor


@pytest.fixture(params=["without a name", "with a name"])
def copied(request: pytest.FixtureRequest, tmp_path: Path, other: Store) -> str:
    root = root_of(other)
    names = {root.digest: "team/w:v1"} if request.param == "with a name" else {}
    return oci_archive(tmp_path / "w.oci.tar", other.layout, [root], names=names)


def an_image(other: Store, archive: str, form: image_marks.Format = "podman") -> Descriptor:
    """A checkpoint as an ordinary image, in a store as "i"."""
    with other.create().stage() as staging:
        notes = {
            f"{image_marks.CRIU}runtime.name": "crun",
            f"{image_marks.CRIU}container.name": "w",
        }
        root = single_layer_image.write_image(staging.layout, archive, format=form, annotations=notes)
        staging.commit(root, names=["i"])
    return root


def test_inspect_and_verify(copied: str, other: Store) -> None:
    """What there is of it, its records file by file, and every blob."""
    with source.open_checkpoint(copied) as found, source.open_checkpoint(f"oci:{other.path}:w") as same:
        assert found.manifest == same.manifest
        assert found.stored is not None
        assert same.stored is not None
        assert tuple(found.stored.artifact.blobs()) == tuple(same.stored.artifact.blobs())
        assert found.stored.where == copied
        layer = found.stored.artifact.records
        assert layer is not None
        with found.stored.blobs.open_blob(layer.digest, layer.size) as file:
            assert len(file.read()) == layer.size
    checked = verify_one(copied)
    assert checked.digest == root_of(other).digest
    assert checked.read
    assert checked.damaged == ()


def test_damage(tmp_path: Path, other: Store) -> None:
    """A blob that is missing, or not what its name says, is named; a copy cut short is damaged."""
    root = root_of(other)
    chunk = artifact.read(root, other.read).chunks[0]
    path = oci_archive(tmp_path / "less.tar", other.layout, [root], without=chunk.digest)
    assert [each.digest for each in verify_one(path).damaged] == [chunk.digest]
    whole = oci_archive(tmp_path / "wrong.tar", other.layout, [root])
    data = bytearray(Path(whole).read_bytes())
    with other.layout.open_blob(chunk.digest) as file:
        at = data.index(file.read())
    data[at] ^= 1
    Path(whole).write_bytes(data)
    assert [each.digest for each in verify_one(whole).damaged] == [chunk.digest]
    Path(whole).write_bytes(data[: len(data) // 2])
    with pytest.raises(Damaged, match="cut short"):
        verify_one(whole)


def test_push(copied: str, other: Store, registry: FakeRegistry) -> None:
    """The same bytes under the same digest; nothing is kept here."""
    pushed = push_pull.push(
        InFile(copied), locator.parse_registry(f"http://{registry.host}/team/w:v1"), progress=QUIET
    )
    root = root_of(other)
    assert pushed.digest == root.digest
    assert registry.manifests["team/w", "v1"][1] == other.read(root)
    for each in artifact.read(root, other.read).blobs():
        assert registry.has(each.digest, "team/w")
    form = locator.parse_registry(f"http://{registry.host}/team/w:image")
    push_pull.push(InFile(copied), form, format="podman", progress=QUIET)
    assert len(json.loads(registry.manifests["team/w", "image"][1])["layers"]) == 1


def test_restore(copied: str, podmans: str, other: Store, store: Store, fake: FakePodman) -> None:
    """Podman gets an archive that has all of it; nothing is left of that."""
    done = restoring.restore(RestoreRequest(what=InFile(copied)), QUIET)
    assert done.digest == root_of(other).digest
    given = listed(str(fake.imported))
    before = listed(podmans)
    assert given["checkpoint/gpusnap/manifest.json"] == before["checkpoint/gpusnap/manifest.json"]
    for each in artifact.read(root_of(other), other.read).chunks:
        assert f"checkpoint/gpusnap/blobs/sha256/{each.digest[7:]}" in given
    assert "GPUSNAP_STORE" not in fake.environment()
    assert not os.path.exists(store.path)
    assert not list(Path(os.environ.get("TMPDIR") or "/var/tmp").glob(f"gpusnap-*/{Path(copied).name}"))


def test_which_one(tmp_path: Path, other: Store) -> None:
    """One among ordinary images is found; of two it cannot be told, and none is no damage."""
    with other.stage() as staging:
        config = staging.layout.add_blob(b"{}", media_type=image_marks.CONFIG)
        layer = staging.layout.add_blob(b"layer", media_type="application/vnd.oci.image.layer.v1.tar")
        ordinary = staging.layout.add_manifest(Manifest(config, (layer,)))
        staging.commit(ordinary, names=["debian"])
    root, second = root_of(other), an_image(other, str(an_archive(_folder(tmp_path, "more"))))
    with opened_layout(oci_archive(tmp_path / "1.tar", other.layout, [ordinary, root, root])) as found:
        assert (found.root.digest, found.kind) == (root.digest, "checkpoint")
    with (
        pytest.raises(UsageError, match="has 2 checkpoints"),
        opened_layout(oci_archive(tmp_path / "2.tar", other.layout, [root, second])),
    ):
        pass
    path = oci_archive(tmp_path / "3.tar", other.layout, [ordinary])
    for command in (
        lambda: verify_one(path),
        lambda: restoring.restore(RestoreRequest(what=InFile(path)), QUIET),
    ):
        with pytest.raises(GpusnapError, match="is an image layout without a checkpoint") as raised:
            command()
        assert exit_code(raised.value) == 1


def _folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


# Images for engines


@pytest.fixture(params=["store", "file", "registry"])
def image_word(
    request: pytest.FixtureRequest, tmp_path: Path, other: Store, podmans: str, registry: FakeRegistry
) -> Callable[[image_marks.Format], str]:
    """A checkpoint as an image: what it is called where it lies."""

    def word(form: image_marks.Format) -> str:
        if request.param == "registry":
            ref = f"http://{registry.host}/team/i:v1"
            push_pull.push(InStore(other, "w"), locator.parse_registry(ref), format=form, progress=QUIET)
            return ref
        root = an_image(other, podmans, form)
        if request.param == "file":
            return oci_archive(tmp_path / "i.tar", other.layout, [root])
        return f"oci:{other.path}:i"

    return word


def test_podmans_image(
    image_word: Callable[[image_marks.Format], str], podmans: str, fake: FakePodman, store: Store
) -> None:
    """It is read and restored as the archive in it; nothing of it is kept."""
    word = image_word("podman")
    with source.open_checkpoint(word) as found, source.open_checkpoint(podmans) as same:
        assert found.manifest == same.manifest
        assert found.stored is None
    assert verify_one(word, deep=True).damaged == ()
    restoring.restore(RestoreRequest(what=locator.find(word), name="x"), QUIET)
    given, before = listed(str(fake.imported)), listed(podmans)
    assert given["config.dump"] == before["config.dump"]
    assert given["checkpoint/gpusnap/manifest.json"] == before["checkpoint/gpusnap/manifest.json"]
    assert fake.calls()[-1].endswith(" --name x")
    if os.path.exists(store.path):
        assert store.entries() == ()
        assert os.listdir(store.path + "/staging") == []


def test_kubernetes_image(image_word: Callable[[image_marks.Format], str], fake: FakePodman) -> None:
    """Podman cannot; what can is said, and it is not called damaged."""
    word = image_word("cri")
    with pytest.raises(GpusnapError, match="a checkpoint as an image, which Kubernetes restores") as raised:
        restoring.restore(RestoreRequest(what=locator.find(word)), QUIET)
    assert exit_code(raised.value) == 1
    assert "in a new pod" in raised.value.hint


def test_an_image_is_not_pulled(other: Store, podmans: str, registry: FakeRegistry) -> None:
    """Who takes it is said."""
    ref = locator.parse_registry(f"http://{registry.host}/team/i:v1")
    push_pull.push(InStore(other, "w"), ref, format="podman", progress=QUIET)
    with pytest.raises(GpusnapError, match="which Podman restores") as raised:
        push_pull.pull(ref, progress=QUIET)
    assert exit_code(raised.value) == 1
    assert "podman container restore IMAGE" in raised.value.hint


def test_several_layers(other: Store, podmans: str) -> None:
    """An image that somebody built upon one is Podman's."""
    root = an_image(other, podmans)
    with other.stage() as staging:
        made = Manifest.from_json(json.loads(other.read(root)))
        more = staging.layout.add_blob(b"x", media_type=made.layers[0].media_type)
        for each in (made.config, *made.layers):
            staging.take(each.digest, each.size)
        two = staging.layout.add_manifest(
            Manifest(made.config, (*made.layers, more), annotations=made.annotations)
        )
        staging.commit(two, names=["two"])
    with pytest.raises(Refused, match="an image of 2 layers, which Podman alone restores"):
        restoring.restore(RestoreRequest(what=InStore(other, "two")), QUIET)


# Links

_REFUSED = r"is .*(?:link|not a file)|does not point to a directory"


@pytest.mark.parametrize(
    ("name", "target", "refused"),
    [
        ("checkpoint/core-1.img", "/etc/passwd", True),
        ("config.dump", "/etc/passwd", True),
        ("checkpoint/zz.img", "/etc/passwd", True),
        ("checkpoint/parent", "/var/lib/other", True),
        ("checkpoint/parent", "../pre-checkpoint", False),
        ("checkpoint/notes", "/etc/passwd", False),
    ],
)
@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_links(
    tmp_path: Path, fake: FakePodman, store: Store, name: str, target: str, refused: bool, compress: str
) -> None:
    """Neither Podman nor CRIU gets an image that is a link; one that CRIU makes itself is none."""
    path = tmp_path / "links.tar"
    before = tarfile.open(an_archive(_folder(tmp_path, "in")))
    with before, Writer(path, compress=compress) as writer:  # type: ignore[arg-type]
        for info in before:
            if info.name != name:
                writer.add(info, before.extractfile(info))
        link = tarfile.TarInfo(name)
        link.type, link.linkname = tarfile.SYMTYPE, target
        if name == "checkpoint/zz.img":  # a hard link of a link is one
            link.name = "checkpoint/notes"
            writer.add(link)
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.LNKTYPE, "checkpoint/notes"
        writer.add(link)
    if not refused:
        restoring.restore(RestoreRequest(what=InFile(str(path))), QUIET)
        return
    with pytest.raises(GpusnapError, match=f"{os.path.basename(name)} in .* ({_REFUSED})"):
        restoring.restore(RestoreRequest(what=InFile(str(path))), QUIET)
    assert not (fake.folder / "calls").exists() or fake.calls() == []
    with (
        pytest.raises(ImageError, match=_REFUSED),
        store.create().stage() as made,
    ):
        sources.take_in(made, str(path), QUIET)


def test_links_in_records(tmp_path: Path, fake: FakePodman, store: Store, other: Store) -> None:
    """Those of an artifact, which another tool made."""
    parts = artifact.read(root_of(other), other.read)
    path = tmp_path / "records.tar"
    with Writer(path, compress="zstd") as writer:
        for name in ("config.dump", "spec.dump", "checkpoint/inventory.img"):
            info = tarfile.TarInfo(name)
            if name.startswith("checkpoint"):
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            writer.add(info)
    with other.stage() as staging:
        for each in parts.blobs():
            staging.take(each.digest, each.size)
        with path.open("rb") as file:
            records = staging.layout.add_blob(file, media_type=artifact.RECORDS)
        made = artifact.Artifact(parts.config, records, None, parts.chunks, parts.annotations)
        staging.commit(artifact.write(staging.layout, made), names=["links"])
    with pytest.raises(GpusnapError, match=r"inventory\.img in the records .* is a symbolic link"):
        restoring.restore(RestoreRequest(what=InStore(other, "links")), QUIET)
    assert not (fake.folder / "calls").exists() or fake.calls() == []
    with (
        kept.hold_artifact(InStore(other, "links")) as (_, found),
        pytest.raises(ImageError, match="is a symbolic"),
    ):
        give_out(found.artifact, other.layout, str(tmp_path / "out.tar"), config=found.config)
