"""A checkpoint of a container in the hands of skopeo, oras and Podman, and their layouts in ours."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import registryhost
import shimhost
from storehost import SETTINGS, STORE, done, empty_store, gpusnap
from support import Container, good, podman, run, sentence

from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks import artifact as artifact_module
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.chunks.table import MEDIA_TYPES
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.layout.documents import INDEX
from gpusnap.oci.store.store import Store
from gpusnap.oci.tar.archive import entries

WORK = ("--mib", "8")
BOTH = ("--src-tls-verify=false", "--dest-tls-verify=false")


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """This host's, empty, gone afterwards."""
    with empty_store() as made:
        yield made


@pytest.fixture(scope="module")
def made(host: None, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a checkpoint "w" of a container that has gone; nobody changes it."""
    path = tmp_path_factory.mktemp("made") / "store"
    shimhost.write_settings(SETTINGS)
    container = Container.start("w", *WORK)
    good(gpusnap("checkpoint", "w", "--to", f"oci:{path}:w"))
    container.remove()
    return Store(path)


@pytest.fixture(scope="module")
def host_of(made: Store) -> Iterator[str]:
    """Host and port of a registry that has it as team/w:v1."""
    with registryhost.running() as found:
        good(gpusnap("push", f"oci:{made.path}:w", f"http://{found.host}/team/w:v1"))
        yield found.host


def digest(store: Store) -> str:
    return store.find("w").descriptor.digest


def check_copies(made: Store, *places: str) -> None:
    """All of it is there, byte by byte, under the same digest."""
    for found in done("verify", "--deep", *places):
        assert found["digest"] == digest(made)
        assert found["damaged"] == []


def check_restored(place: str) -> None:
    """It comes to life from there, and every byte is right."""
    good(gpusnap("restore", place))
    container = Container("w")
    container.goes_on()
    container.remove()


def test_skopeo_inspect(made: Store, host_of: str) -> None:
    """--raw is the very manifest; without it skopeo says that it is an artifact, and no image."""
    name = f"docker://{host_of}/team/w:v1"
    raw = good(run("skopeo", "inspect", "--raw", "--tls-verify=false", name))
    assert hashlib.sha256(raw.encode()).hexdigest() == digest(made).partition(":")[2]
    assert json.loads(raw)["artifactType"] == artifact.CHECKPOINT
    inside = good(run("skopeo", "inspect", "--raw", f"oci:{made.path}:w"))
    assert inside == raw
    shown = run("skopeo", "inspect", "--tls-verify=false", name)
    assert shown.code == 1
    assert "unsupported image-specific operation on artifact" in shown.err


@pytest.mark.parametrize("name", ["", ":w", ":team/w:v1"])
def test_skopeo_archive(made: Store, host_of: str, tmp_path: Path, name: str) -> None:
    """An oci-archive, out of a registry or a layout, with and without a name: each command reads it."""
    path, second = tmp_path / "w.tar", tmp_path / "second.tar"
    good(run("skopeo", "copy", *BOTH, f"docker://{host_of}/team/w:v1", f"oci-archive:{path}{name}"))
    good(run("skopeo", "copy", f"oci:{made.path}:w", f"oci-archive:{second}{name}"))
    check_copies(made, str(path), str(second))
    shown = done("inspect", path)
    assert shown["artifact"]["digest"] == digest(made)
    assert done("inspect", f"oci:{made.path}:w")["processes"] == shown["processes"]
    assert done("plan", path)
    copy = f"http://{host_of}/archive/w:v1"
    assert done("push", path, copy)["digest"] == digest(made)
    check_copies(made, copy)
    check_restored(str(path))
    assert not STORE.exists() or Store(STORE).entries() == ()


def test_carried_without_a_network(made: Store, tmp_path: Path) -> None:
    """`gpusnap copy` writes an oci-archive that skopeo takes, and it is restored out of any copy of it."""
    file, theirs = tmp_path / "w.tar", tmp_path / "theirs"
    assert done("copy", f"oci:{made.path}:w", f"oci-archive:{file}")["digest"] == digest(made)
    good(run("skopeo", "copy", f"oci-archive:{file}:w", f"oci:{theirs}:w"))
    check_copies(made, str(file), f"oci:{theirs}:w")
    copied = done("copy", f"oci:{theirs}:w", "mine")
    assert (copied["digest"], copied["name"]) == (digest(made), "mine")
    assert done("copy", str(file), "again")["blobs"] == 0
    check_copies(made, "mine")
    check_restored("mine")
    check_restored(f"oci-archive:{file}")
    archive = tmp_path / "podman.tar.zst"
    good(gpusnap("copy", "mine", archive))
    good(podman("container", "restore", "--import", str(archive)))
    container = Container("w")
    container.goes_on()
    container.remove()


@pytest.mark.parametrize("how", ["pull", "image"])
def test_checkpointctl_shows_processes(made: Store, host_of: str, tmp_path: Path, how: str) -> None:
    """It reads command lines out of CRIU's images of memory, which a store has in chunks."""
    path = tmp_path / "w.tar"
    assert any(each["name"] == "pages-1.img" for each in done("inspect", f"oci:{made.path}:w")["files"])
    if how == "pull":
        good(gpusnap("pull", f"http://{host_of}/team/w:v1", "-o", path))
    else:
        ref = f"{host_of}/whole/w:v1"
        good(gpusnap("push", f"oci:{made.path}:w", f"http://{ref}", "--format", "podman"))
        good(run("skopeo", "copy", BOTH[0], f"docker://{ref}", f"oci:{tmp_path}/i:w"))
        (layer,) = json.loads(good(run("skopeo", "inspect", "--raw", f"oci:{tmp_path}/i:w")))["layers"]
        path = tmp_path / "i" / "blobs" / "sha256" / layer["digest"][7:]
    shown = good(run("checkpointctl", "inspect", "--ps-tree-cmd", path))
    assert re.search(r"\[1\] .*gpuwork.* --mib 8", shown), shown
    if how == "pull":
        assert done("verify", path)[0]["damaged"] == []
        check_restored(str(path))


def test_images_of_engines(made: Store, host_of: str, tmp_path: Path) -> None:
    """What gpusnap pushes for Podman, and what Podman makes itself: both are known, and restored."""
    ref, path = f"http://{host_of}/image/w:v1", tmp_path / "image.tar"
    good(gpusnap("push", f"oci:{made.path}:w", ref, "--format", "podman"))
    good(run("skopeo", "copy", *BOTH, f"docker://{host_of}/image/w:v1", f"oci-archive:{path}"))
    good(
        run(
            "skopeo",
            "copy",
            "--format",
            "v2s2",
            BOTH[0],
            f"docker://{host_of}/image/w:v1",
            f"dir:{tmp_path}/d",
        )
    )
    for word in (ref, str(path)):
        assert done("inspect", word)["processes"]
        check_restored(word)
    container = Container.start("w", *WORK)
    good(podman("container", "checkpoint", "--create-image", "localhost/theirs", "w"))
    container.remove()
    theirs = tmp_path / "theirs.tar"
    good(run("skopeo", "copy", "containers-storage:localhost/theirs", f"oci-archive:{theirs}"))
    assert done("inspect", theirs)["processes"]
    check_restored(str(theirs))
    good(podman("rmi", "localhost/theirs"))


def test_skopeo_copy(made: Store, host_of: str, tmp_path: Path) -> None:
    """From the registry to a layout, from a store to one, and into a registry; what comes out runs."""
    one, two, name = f"oci:{tmp_path}/one:w", f"oci:{tmp_path}/two:w", f"{host_of}/skopeo/w:v1"
    for source, target in (
        (f"docker://{host_of}/team/w:v1", one),
        (f"oci:{made.path}:w", two),
        (two, f"docker://{name}"),
    ):
        good(run("skopeo", "copy", *BOTH, source, target))
    check_copies(made, one, two, f"http://{name}")
    check_restored(two)


def test_oras_manifest(made: Store, host_of: str) -> None:
    """The manifest, and its descriptor, from the registry and from the store."""
    fetch = ("oras", "manifest", "fetch")
    for place in (("--plain-http", f"{host_of}/team/w:v1"), ("--oci-layout", f"{made.path}:w")):
        content = good(run(*fetch, *place))
        assert json.loads(content)["artifactType"] == artifact.CHECKPOINT
        assert json.loads(good(run(*fetch, "--descriptor", *place)))["digest"] == digest(made)


def test_oras_pull(made: Store, host_of: str, tmp_path: Path) -> None:
    """What has a title is a file then: the records and the rootfs diff; chunks are left out."""
    files = tmp_path / "files"
    out = good(run("oras", "pull", "--plain-http", "--output", files, f"{host_of}/team/w:v1"))
    assert "Skipped pulling layers without file name" in out
    whole = artifact.read(made.find("w").descriptor, made.read)
    assert whole.records is not None
    assert whole.rootfs is not None
    wanted = {"records.tar.zst": whole.records, "rootfs-diff.tar.zst": whole.rootfs}
    found = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files.iterdir()}
    assert found == {name: each.digest.partition(":")[2] for name, each in wanted.items()}
    with (files / "records.tar.zst").open("rb") as file:
        assert "config.dump" in {each.name for each in entries(file, where="records.tar.zst")}


def test_oras_cp(made: Store, host_of: str, tmp_path: Path) -> None:
    """To another repository and into a layout, with all that refers to it; both can be restored."""
    name, layout = f"{host_of}/oras/w:v1", tmp_path / "layout"
    source = f"{host_of}/team/w:v1"
    good(run("oras", "cp", "--recursive", "--from-plain-http", "--to-plain-http", source, name))
    good(run("oras", "cp", "--recursive", "--from-plain-http", "--to-oci-layout", source, f"{layout}:w"))
    check_copies(made, f"oci:{layout}:w")
    assert done("pull", f"http://{name}")["digest"] == digest(made)
    check_restored(f"oci:{layout}:w")


def test_an_index_of_manifests(
    made: Store, host_of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is too large for one manifest, as it looks to them: an index, which they copy whole."""
    monkeypatch.setattr(artifact_module, "LARGEST_DOCUMENT", 8000)
    large = Store(tmp_path / "large").create()
    with large.stage() as staging:
        whole = artifact.read(made.find("w").descriptor, made.read)
        for each in whole.blobs():
            staging.layout.link_blob(each.digest, each.size, made.layout)
        more = tuple(
            staging.layout.add_blob(b"%d" % number, media_type=MEDIA_TYPES["plain"]) for number in range(60)
        )
        parts = Artifact(whole.config, whole.records, whole.rootfs, (*whole.chunks, *more), whole.annotations)
        root = artifact.write(staging.layout, parts)
        staging.commit(root, names=["w"])
    assert root.media_type == INDEX
    first = f"{host_of}/large/w:v1"
    good(gpusnap("push", f"oci:{large.path}:w", f"http://{first}"))
    good(run("skopeo", "copy", "--all", *BOTH, f"docker://{first}", f"oci:{tmp_path}/skopeo:w"))
    good(run("oras", "cp", "--from-plain-http", "--to-oci-layout", first, f"{tmp_path}/oras:w"))
    second = f"{host_of}/larger/w:v1"
    good(run("oras", "cp", "--from-plain-http", "--to-plain-http", first, second))
    check_copies(large, f"oci:{tmp_path}/skopeo:w", f"oci:{tmp_path}/oras:w")
    # Without --all skopeo takes the first manifest alone; that is not taken for the whole.
    part = f"oci:{tmp_path}/part:w"
    good(run("skopeo", "copy", *BOTH, f"docker://{first}", part))
    outcome = gpusnap("restore", part)
    assert outcome.code == 4
    assert re.search(r"is one of \d manifests of a checkpoint", sentence(outcome))
    assert done("pull", f"http://{second}")["digest"] == root.digest
    check_restored(f"oci:{STORE}:{second}")


TOOLS = ["skopeo", "oras", "podman"]


@pytest.mark.parametrize("tool", TOOLS)
def test_a_layout_of_another_tool(made: Store, host_of: str, tmp_path: Path, tool: str) -> None:
    """We keep in it, push from it, and clear it; what was there stays, and the tool reads and writes it."""
    path = tmp_path / "layout"
    theirs = tmp_path / "notes.txt"
    theirs.write_text("words\n" * 1000)

    def write(name: str) -> None:
        if tool == "oras":
            words = [
                "oras",
                "push",
                "--oci-layout",
                "--disable-path-validation",
                f"{path}:{name}",
                str(theirs),
            ]
        else:
            image = "containers-storage:localhost/base" if tool == "skopeo" else "localhost/base"
            words = [tool, "copy" if tool == "skopeo" else "push", image, f"oci:{path}:{name}"]
        good(run(*words))

    write("theirs")
    entries = json.loads((path / "index.json").read_text())["manifests"]
    blobs = {each.name for each in (path / "blobs/sha256").iterdir()}
    if tool == "skopeo":
        container = Container.start("w", *WORK)
        good(gpusnap("checkpoint", "w", "--to", f"oci:{path}:w"))
        container.remove()
    else:
        good(gpusnap("pull", f"http://{host_of}/team/w:v1", "--to", f"oci:{path}:w"))
    kinds = {each["names"][0]: each["kind"] for each in done("ls", f"oci:{path}")["checkpoints"]}
    assert kinds == {"theirs": "other", "w": "checkpoint"}
    good(gpusnap("tag", f"oci:{path}:w", "again"))
    good(gpusnap("push", f"oci:{path}:w", f"http://{host_of}/foreign/{tool}:v1"))
    good(gpusnap("rm", "--gc", f"oci:{path}:again"))
    after = json.loads((path / "index.json").read_text())["manifests"]
    assert after[: len(entries)] == entries
    assert blobs <= {each.name for each in (path / "blobs/sha256").iterdir()}
    good(run("skopeo", "inspect", "--raw", f"oci:{path}:theirs"))
    good(run("oras", "manifest", "fetch", "--oci-layout", f"{path}:theirs"))
    good(run("skopeo", "copy", f"oci:{path}:w", f"oci:{tmp_path}/copy:w"))
    write("more")
    good(gpusnap("gc", f"oci:{path}"))
    assert done("verify", "--all", f"oci:{path}")[0]["damaged"] == []
    assert {each.name for each in Store(path).entries()} == {"theirs", "w", "more"}
    if tool == "skopeo":
        check_restored(f"oci:{path}:w")


def test_a_damaged_chunk(made: Store, host_of: str, store: Store) -> None:
    """The runtime reads it: it is named, with what it is of, and no container is left; a pull mends it."""
    ref = f"http://{host_of}/team/w:v1"
    good(gpusnap("pull", ref))
    name = f"oci:{STORE}:{store.entries()[0].name}"
    chunk = artifact.read(store.entries()[0].descriptor, store.read).chunks[-1]
    path = STORE / "blobs/sha256" / chunk.digest.partition(":")[2]
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for harmed in (flipped, content[:-1]):
        path.write_bytes(harmed)
        outcome = gpusnap("restore", name)
        assert outcome.code == 4
        said = sentence(outcome)
        assert path.name in said
        assert re.search(r"\(in (the region|CRIU's image) ", said)
        assert good(podman("ps", "--all", "--quiet")) == ""
        assert done("pull", ref)["blobs"] == 1
    assert verify(store.layout, store.entries()[0].descriptor, threads=2) == ()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    good(run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path))
    yield path
    good(run("umount", path))


def test_without_room(disk: Path) -> None:
    """Found out at once the container runs on, and found out late it comes back as the sentence says."""
    container, store = Container.start("w", *WORK), Store(disk / "store")
    late = []
    for size in (16, 28, 48):
        good(run("mount", "-o", f"remount,size={size}m", disk))
        outcome = gpusnap("checkpoint", "w", "--to", f"oci:{store.path}:w")
        if outcome.code == 0:
            break
        said = sentence(outcome)
        assert outcome.code == 1
        assert str(disk) in said
        late.append("nothing is lost" in said)
        if late[-1]:
            words = said.strip().rpartition("; ")[2].partition(" restores it")[0]
            good(run("sh", "-c", words))
        container.goes_on()
        assert not [each for each in store.entries() if each.name]
        for each in store.entries():
            store.remove(each.descriptor.digest)
        good(gpusnap("gc", f"oci:{store.path}"))
    # 28 MiB is about what it takes: it may be enough, or not.
    assert late[0] is False
    assert verify(store.layout, store.find("w").descriptor, threads=2) == ()


def test_what_oras_attaches(made: Store, host_of: str, tmp_path: Path) -> None:
    """An SBOM goes along out of a registry into a store, and into another repository, for oras to find."""
    first, second = f"{host_of}/attached/w:v1", f"{host_of}/attached/copy:v1"
    good(gpusnap("push", f"oci:{made.path}:w", f"http://{first}"))
    (tmp_path / "sbom.json").write_text('{"spdxVersion": "SPDX-2.3"}')
    kind = "application/spdx+json"
    words = ("oras", "attach", "--plain-http", "--disable-path-validation", "--artifact-type", kind, first)
    good(run(*words, f"{tmp_path}/sbom.json:{kind}"))
    assert done("pull", f"http://{first}")["digest"] == digest(made)
    rows = done("ls")["checkpoints"]
    assert [row["subject"] for row in rows if row["kind"] == "referrer"] == [digest(made)]
    good(gpusnap("gc"))
    good(gpusnap("push", first, f"http://{second}"))
    found = json.loads(good(run("oras", "discover", "--plain-http", "--format", "json", second)))
    listed = found.get("manifests") or found.get("referrers")
    assert [each["artifactType"] for each in listed] == [kind]
    sbom = f"{host_of}/attached/copy@{listed[0]['digest']}"
    (layer,) = json.loads(good(run("oras", "manifest", "fetch", "--plain-http", sbom)))["layers"]
    blob = f"{sbom.partition('@')[0]}@{layer['digest']}"
    copy = good(run("oras", "blob", "fetch", "--plain-http", "--output", "-", blob))
    assert copy == (tmp_path / "sbom.json").read_text()
    good(gpusnap("rm", first, "--gc"))
    assert done("ls")["checkpoints"] == []
