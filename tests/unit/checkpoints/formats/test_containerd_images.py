"""gpusnap push and pull of containerd's checkpoints: a registry on loopback, and a ctr that is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from containerd_layouts import BASE, IMAGE, FakeCtr, Made, a_checkpoint, files_of
from fake_registry import FakeRegistry
from kept_checkpoints import an_archive

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.formats.containerd import REF_NAME
from gpusnap.checkpoints.formats.containerd_images import ImportedImage
from gpusnap.checkpoints.locator import InContainerd, InFile, InRegistry, InStore
from gpusnap.cli.commands.push_pull import pull
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import INDEX
from gpusnap.oci.store.store import Store
from gpusnap.operations import push_pull
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, UsageError

QUIET = Progress(shown=False)
THERE = InContainerd("team", IMAGE)


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found
    assert found.wrong == []


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def ctr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCtr:
    return FakeCtr(tmp_path / "ctr", monkeypatch)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return a_checkpoint(tmp_path)


def at(registry: FakeRegistry, rest: str = "team/app:v1") -> InRegistry:
    return locator.parse_registry(f"http://{registry.host}/{rest}")


def test_there_and_back(
    registry: FakeRegistry, store: Store, ctr: FakeCtr, made: Made, tmp_path: Path
) -> None:
    """Out of containerd or an archive it is the same; in again, the base image is ready by its name."""
    ctr.has(made)
    pushed = push_pull.push(THERE, at(registry), progress=QUIET)
    archive = made.written(tmp_path / "cp.tar")
    again = push_pull.push(InFile(archive), at(registry), progress=QUIET)
    assert (again.digest, again.moved.blobs) == (pushed.digest, 0)
    pulled = push_pull.pull(at(registry), to=InContainerd("x", "y:z"), progress=QUIET)
    assert (pulled.digest, pulled.image, pulled.name) == (pushed.digest, ImportedImage("y:z", BASE, True), "")
    files = files_of(ctr.imported.read_bytes())
    assert b'"io.containerd.image.name":"y:z"' in files["index.json"]
    base = made.member("image.manifest")["digest"]
    assert ctr.calls()[-1] == f"--namespace x snapshots --snapshotter overlayfs unpack {base}"
    push_pull.pull(at(registry), file=str(tmp_path / "out.tar"), progress=QUIET)
    out = files_of((tmp_path / "out.tar").read_bytes())
    assert {name: data for name, data in out.items() if name != "index.json"} == {
        name: data for name, data in files.items() if name != "index.json"
    }
    assert f'"io.containerd.image.name":"{registry.host}/team/app:v1"'.encode() in out["index.json"]
    assert IMAGE.encode() not in out["index.json"]
    assert store.entries() == ()
    assert os.listdir(store.path + "/staging") == []


def test_by_a_store(registry: FakeRegistry, store: Store, made: Made, tmp_path: Path) -> None:
    """A store keeps it as any, and it goes on from there."""
    pushed = push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    push_pull.pull(at(registry), to=InStore(store, "w"), progress=QUIET)
    other = at(registry, "team/other:v1")
    assert push_pull.push(InStore(store, "w"), other, progress=QUIET).digest == pushed.digest
    with pytest.raises(Refused, match="containerd checkpoint, which Podman cannot restore"):
        restoring.restore(RestoreRequest(what=InStore(store, "w")), QUIET)
    with pytest.raises(Refused, match="which Podman cannot restore"):
        push_pull.push(InStore(store, "w"), other, format="podman", progress=QUIET)


@pytest.mark.parametrize("form", ["podman", "cri"])
def test_no_images_for_others(
    registry: FakeRegistry, ctr: FakeCtr, made: Made, tmp_path: Path, form: push_pull.Format
) -> None:
    """Neither Podman nor CRI-O could restore them."""
    archive = made.written(tmp_path / "cp.tar")
    for what in (InFile(archive), THERE):
        with pytest.raises(
            Refused, match=f"a containerd checkpoint cannot be converted to an image for {form}"
        ):
            push_pull.push(what, at(registry), format=form, progress=QUIET)
    with pytest.raises(Refused, match="is an image layout"):
        restoring.restore(RestoreRequest(what=InFile(archive)), QUIET)


def test_podmans(registry: FakeRegistry, ctr: FakeCtr, tmp_path: Path) -> None:
    """What Podman made is none of containerd's, and nothing is asked of it."""
    push_pull.push(InFile(an_archive(tmp_path)), at(registry), progress=QUIET)
    with pytest.raises(Refused, match="which ctr cannot restore") as caught:
        push_pull.pull(at(registry), to=THERE, progress=QUIET)
    assert "gpusnap restore" in caught.value.hint
    # Nor has more of it come than its manifest.
    assert len(registry.asked("GET", "blobs/")) == 1
    assert not (ctr.folder / "calls").exists()


def test_another_base_image(registry: FakeRegistry, ctr: FakeCtr, made: Made, tmp_path: Path) -> None:
    """A checkpoint cannot put its own image in the place of another."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    ctr.lists(BASE, digest_of(b"another"), "a/b")
    with pytest.raises(Refused, match=f"containerd has another image {BASE}"):
        push_pull.pull(at(registry), to=THERE, progress=QUIET)
    assert not ctr.imported.exists()


def test_names_that_are_taken(registry: FakeRegistry, ctr: FakeCtr, made: Made, tmp_path: Path) -> None:
    """Neither its own base image nor any other image is replaced by it; an earlier checkpoint may be."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    with pytest.raises(Refused, match=f"cannot be named {BASE}: that is the name of its base image"):
        push_pull.pull(at(registry), to=InContainerd("team", BASE), progress=QUIET)
    base = made.member("image.manifest")
    for name, kind in (("localhost/plain:1", base["mediaType"]), ("localhost/all:1", INDEX)):
        ctr.lists(name, str(base["digest"]), str(kind))
        (ctr.folder / "blobs" / str(base["digest"])).write_bytes(made.blobs[str(base["digest"])])
        with pytest.raises(Refused, match=f"has an image {name} already, which is not a checkpoint"):
            push_pull.pull(at(registry), to=InContainerd("team", name), progress=QUIET)
    assert not ctr.imported.exists()
    (tmp_path / "b").mkdir()
    ctr.has(a_checkpoint(tmp_path / "b", images={"core-7.img": b"earlier"}))
    push_pull.pull(at(registry), to=THERE, progress=QUIET)
    assert ctr.imported.exists()


def test_the_name_in_a_file(registry: FakeRegistry, made: Made, tmp_path: Path) -> None:
    """It is the reference that was typed, and what the maker called it is not there; both names are said."""
    made.name = "docker.io/library/alpine:latest"
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    out = tmp_path / "out.tar"
    done = CliRunner().invoke(pull, [f"http://{registry.host}/team/app:v1", "-o", str(out)])
    assert done.exit_code == 0, done.output
    name = f"{registry.host}/team/app:v1"
    assert f"creates the images {name} and {BASE}, and replaces any existing image of" in done.stderr
    assert b"alpine" not in b"".join(files_of(out.read_bytes()).values())
    made.index["annotations"] = {**made.index["annotations"], REF_NAME: name}  # type: ignore[dict-item]
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    with pytest.raises(Refused, match=f"cannot be named {name}: that is the name of its base image"):
        push_pull.pull(at(registry), file=str(tmp_path / "b.tar"), progress=QUIET)


def test_what_comes_before_it_is_refused(
    registry: FakeRegistry, ctr: FakeCtr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name, a base image or a ctr that will not do costs no more than a manifest and the records."""
    made = a_checkpoint(tmp_path)
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    ctr.lists(BASE, digest_of(b"another"), "a/b")
    ctr.lists("localhost/plain:1", digest_of(b"plain"), "a/b")

    def blobs(error: type[GpusnapError], says: str, **more: Any) -> int:
        before = len(registry.asked("GET", "blobs/"))
        with pytest.raises(error, match=says):
            push_pull.pull(at(registry), progress=QUIET, **more)
        return len(registry.asked("GET", "blobs/")) - before

    # The config, which is kept; the records where they have to be looked into.
    assert blobs(UsageError, "a plain tar archive", file=str(tmp_path / "out.tar.zst")) == 1
    assert blobs(Refused, "which is not a checkpoint", to=InContainerd("x", "localhost/plain:1")) == 0
    assert blobs(Refused, "another image", to=THERE) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    assert blobs(GpusnapError, "ctr cannot be run", to=THERE) == 0


def test_what_was_moved(registry: FakeRegistry, ctr: FakeCtr, made: Made, tmp_path: Path) -> None:
    """What came to be looked into counts as what came."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    plain = push_pull.pull(at(registry), to=InStore(Store(tmp_path / "other"), "w"), progress=QUIET)
    brought = push_pull.pull(at(registry), to=THERE, progress=QUIET)
    assert brought.moved.bytes == plain.moved.bytes
    assert (brought.moved.blobs, brought.moved.skipped_blobs) == (
        plain.moved.blobs,
        plain.moved.skipped_blobs,
    )


def test_without_the_base_image(registry: FakeRegistry, ctr: FakeCtr, tmp_path: Path) -> None:
    """It is said whether containerd has it."""
    made = a_checkpoint(tmp_path, base=False)
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    for there in (False, True):
        assert push_pull.pull(at(registry), to=THERE, progress=QUIET).image == ImportedImage(
            IMAGE, BASE, there
        )
        ctr.lists(BASE, digest_of(b"any"), "a/b")
    assert not [call for call in ctr.calls() if "unpack " in call.replace("--no-unpack", "")]


def test_the_base_image_is_not_sent_twice(registry: FakeRegistry, made: Made, tmp_path: Path) -> None:
    """Another checkpoint of the same image brings only what is new."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    (tmp_path / "b").mkdir()
    second = a_checkpoint(tmp_path / "b", images={"core-7.img": b"new"})
    moved = push_pull.push(InFile(second.written(tmp_path / "2.tar")), at(registry), progress=QUIET).moved
    assert moved.blobs == 2  # the records and the manifest
    assert moved.skipped_bytes > 2 << 20


def test_other_endings(registry: FakeRegistry, made: Made, tmp_path: Path) -> None:
    """ctr takes plain tars."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    with pytest.raises(UsageError, match="a plain tar archive"):
        push_pull.pull(at(registry), file=str(tmp_path / "out.tar.zst"), progress=QUIET)
    assert not (tmp_path / "out.tar.zst").exists()


def test_an_unpacking_that_fails(registry: FakeRegistry, ctr: FakeCtr, made: Made, tmp_path: Path) -> None:
    """What is there by then, and what is left to do."""
    push_pull.push(InFile(made.written(tmp_path / "cp.tar")), at(registry), progress=QUIET)
    script = ctr.folder / "ctr"
    script.write_text(
        script.read_text() + 'case "$*" in *overlayfs*) echo "ctr: no room" >&2; exit 1;; esac\n'
    )
    with pytest.raises(GpusnapError, match=r"in containerd, but its base image .* no room") as caught:
        push_pull.pull(at(registry), to=THERE, progress=QUIET)
    assert "snapshots unpack sha256:" in caught.value.hint
    assert ctr.imported.exists()


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("containerd:localhost/w:cp", InContainerd("default", "localhost/w:cp")),
        ("containerd:team/localhost/w:cp", InContainerd("team", "localhost/w:cp")),
        ("containerd:k8s.io/docker.io/w:cp", InContainerd("k8s.io", "docker.io/w:cp")),
        ("containerd:docker.io/library/w:cp", InContainerd("default", "docker.io/library/w:cp")),
        ("containerd:w", InContainerd("default", "w")),
        ("containerd", None),
        ("oci:dir", None),
    ],
)
def test_words(word: str, place: InContainerd | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which word is which image."""
    monkeypatch.delenv("CONTAINERD_NAMESPACE", raising=False)
    assert locator.in_containerd(word) == place


def test_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctr's own variable is the default; what is no name is said."""
    monkeypatch.setenv("CONTAINERD_NAMESPACE", "blue")
    assert locator.in_containerd("containerd:w") == InContainerd("blue", "w")
    for word in ("containerd:", "containerd:team/", "containerd:-x", 'containerd:a"b', "containerd:a b"):
        with pytest.raises(UsageError, match="does not name an image"):
            locator.in_containerd(word)
    for ask in (locator.find, locator.destination):
        with pytest.raises(UsageError, match="only gpusnap push, pull --to and copy handle those"):
            ask("containerd:w")
