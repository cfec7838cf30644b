"""A flipped bit in any blob, and any blob cut short: each command finds it, and nothing wrong is accepted.

Whole command lines, on real small stores and a registry on loopback. And what ten checkpoints take.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import CHUNK, blob_path, damage, keep, noise
from criu_images import INVENTORY
from fake_podman import FakePodman
from fake_registry import FakeRegistry
from fakes import POISON
from oci_regions import CEILING, text

from gpusnap.cli import exit_codes
from gpusnap.cli import main as cli
from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks import artifact as artifact_module
from gpusnap.oci.chunks.artifact import Artifact, chunk_layers
from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.table import MEDIA_TYPES
from gpusnap.oci.chunks.verify import verify
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.registry.copy import TransferTotals
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.settings import Settings

Run = Callable[..., tuple[int, str]]
RECORDS = {"config.dump": b'{"name": "w"}', "checkpoint/inventory.img": INVENTORY, "checkpoint": None}
BELONGS = {
    "manifest": "the list of the checkpoint's parts",
    "part": "the list of the checkpoint's parts",
    "config": "gpusnap's manifest",
    "records": "the records",
    "rootfs": "the rootfs diff",
    "plain": "the region ",
    "zstd": "the region ",
}
CHUNKS = ("plain", "zstd")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's. Two chunks more make an index of manifests of a checkpoint."""
    mine = Settings(store=settings_file.Store(path=str(tmp_path / "store")))
    monkeypatch.setattr(settings_file, "load", lambda: mine)
    monkeypatch.setattr(artifact_module, "LARGEST_DOCUMENT", 4000)
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    (tmp_path / "auth.json").write_text("{}")
    return Store(tmp_path / "store")


@pytest.fixture
def gpusnap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command line; its exit code, and all that it says."""

    def run(*words: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["gpusnap", *map(str, words)])
        code = cli.main()
        said = capsys.readouterr()
        assert not [each for each in POISON if each in said.err.lower()]
        return code, said.out + said.err

    return run


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found
    assert found.wrong == []


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    return FakePodman(tmp_path / "podman", monkeypatch)


def a_checkpoint(store: Store) -> Descriptor:
    """One with every kind of blob, in an index of manifests."""
    region = noise(8, 1) + bytearray(text(2 * CHUNK))
    root = keep(store, region, names=["w"], records=RECORDS, rootfs={"etc/motd": b"hello"})
    assert len(artifact.read(root, store.read).documents) > 2
    return root


def a_part(store: Store, root: Descriptor, part: str) -> Descriptor:
    """One blob of that kind."""
    found = artifact.read(root, store.read)
    if part in CHUNKS:
        kind = MEDIA_TYPES["plain" if part == "plain" else "zstd"]
        return [each for each in found.chunks if each.media_type == kind][-1]
    one = {"manifest": root, "part": found.documents[-1]}.get(part) or getattr(found, part)
    assert isinstance(one, Descriptor)
    return one


def harm(path: Path, how: str) -> bytes:
    """Flip a bit of a file, or take its last byte; what it was."""
    content = path.read_bytes()
    if how == "flip":
        damage(path)
    else:
        path.write_bytes(content[:-1])
    return content


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("part", BELONGS)
def test_in_the_store(
    gpusnap: Run, registry: FakeRegistry, store: Store, podman: FakePodman, part: str, how: str
) -> None:
    """verify says whose it is; push and restore name it, and leave no name and no container."""
    blob = a_part(store, a_checkpoint(store), part)
    before = harm(blob_path(store, blob.digest), how)
    ref = f"http://{registry.host}/team/app:v1"
    for words in (["w"], ["--all"]):
        code, said = gpusnap("verify", "--json", *words)
        assert code == exit_codes.DAMAGED
        assert blob.digest in said
        assert BELONGS[part] in said
    lines = [["push", "w", ref], ["push", "w", ref, "--format", "podman"]]
    # The runtime reads the chunks.
    lines += [["restore", "w"]] * (part not in CHUNKS)
    for words in lines:
        code, said = gpusnap(*words)
        assert code == exit_codes.DAMAGED, words
        assert blob.digest in said
        assert registry.manifests == {}
        assert not podman.imported.exists()
    blob_path(store, blob.digest).write_bytes(before)
    assert gpusnap("push", "w", ref)[0] == exit_codes.DONE


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_what_the_runtime_finds(gpusnap: Run, store: Store, podman: FakePodman, how: str) -> None:
    """Podman has but one exit code: restore looks at the chunk that is named, and says whose it is."""
    blob = a_part(store, a_checkpoint(store), "plain")
    podman.fails(f"gpusnap: the blob {blob.digest} is not to be had")
    code, said = gpusnap("restore", "w")
    assert code == exit_codes.FAILED
    if how == "gone":
        blob_path(store, blob.digest).unlink()
    else:
        harm(blob_path(store, blob.digest), how)
    code, said = gpusnap("restore", "w")
    assert code == exit_codes.DAMAGED
    assert f"the blob {blob.digest} is not to be had (in the region " in said


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("part", BELONGS)
def test_mended(gpusnap: Run, registry: FakeRegistry, store: Store, part: str, how: str) -> None:
    """A pull brings what is damaged in the store, as verify advises, and that alone."""
    root = a_checkpoint(store)
    blob = a_part(store, root, part)
    ref = f"http://{registry.host}/team/app:v1"
    assert gpusnap("push", "w", ref)[0] == exit_codes.DONE
    harm(blob_path(store, blob.digest), how)
    code, said = gpusnap("pull", ref, "--json")
    assert code == exit_codes.DONE
    assert json.loads(said)["blobs"] <= 1
    found = [each for each in registry.asked("GET", "/(manifests|blobs)/") if blob.digest in each.path]
    assert len(found) == 1
    assert gpusnap("verify", "--all")[0] == exit_codes.DONE


@pytest.mark.parametrize("how", ["flip", "cut"])
@pytest.mark.parametrize("part", BELONGS)
def test_in_the_registry(
    gpusnap: Run,
    registry: FakeRegistry,
    store: Store,
    podman: FakePodman,
    tmp_path: Path,
    part: str,
    how: str,
) -> None:
    """verify --deep, pull, pull -o and restore name it; nothing has it, and a pull of a mended one works."""
    source = Store(tmp_path / "source")
    root = a_checkpoint(source)
    blob = a_part(source, root, part)
    transfer.push(root, source.layout, registry.repository(), tag="v1")
    ref, file = f"http://{registry.host}/team/app:v1", tmp_path / "w.tar"
    stored = registry.folder / "blobs" / blob.digest.removeprefix("sha256:")
    names = [name for name, (_, content) in registry.manifests.items() if digest_of(content) == blob.digest]
    if names:
        kind, content = registry.manifests[names[0]]
        stored.write_bytes(content)
    before = harm(stored, how)
    if names:
        # By its tag it would be another checkpoint, or none.
        ref = f"http://{registry.host}/team/app@{root.digest}"
        registry.manifests[names[0][0], blob.digest] = (kind, stored.read_bytes())
    code, said = gpusnap("verify", "--deep", "--json", ref)
    assert code == exit_codes.DAMAGED
    assert blob.digest in said
    if part != "manifest":
        assert BELONGS[part] in said
    lines: list[list[str | Path]] = [["pull", ref], ["pull", ref, "-o", file]]
    lines += [["restore", ref]] * (part not in CHUNKS)
    for words in lines:
        code, said = gpusnap(*words)
        assert code == exit_codes.DAMAGED, words
        assert blob.digest in said
        assert not Path(store.path).exists() or store.entries() == ()
        assert not file.exists()
        assert not podman.imported.exists()
    if names:
        registry.manifests[names[0][0], blob.digest] = (kind, before)
    stored.write_bytes(before)
    assert gpusnap("pull", ref)[0] == exit_codes.DONE
    assert verify(store.layout, root, threads=2) == ()


# Ten checkpoints of something that changes


def test_ten_checkpoints(store: Store, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that changes by 5 % between them: 1.6 times as large as one, and a push sends what is new."""
    monkeypatch.setattr(artifact_module, "LARGEST_DOCUMENT", 1 << 20)
    region, chunk = noise(3200, 0), 32 * CHUNK
    share, sizes, blobs, moved = len(region) // 20, [], dict[str, int](), TransferTotals()
    for number in range(10):
        # In one piece, and not where a chunk begins.
        at = 1234 + number * share
        region[at : at + share] = noise(share // CHUNK, 1 + number)
        with store.create().stage() as staging:
            tables = write(
                [Buffer(region)],
                staging.layout,
                threads=2,
                ceiling=CEILING,
                chunk_size=chunk,
                known=store.open_known_chunks(),
            )
            layers = chunk_layers(("1:7f0000000000", table) for table in tables)
            root = artifact.write(staging.layout, Artifact(chunks=layers))
            staging.commit(root, names=[f"w-{number}"], tables=tables)
        before = blobs
        blobs = {each.name: each.stat().st_size for each in Path(store.path, "blobs/sha256").iterdir()}
        sizes.append(sum(blobs.values()))
        if number >= 8:
            moved = transfer.push(root, store.layout, registry.repository(), tag=f"v{number}")
    new = blobs.keys() - before.keys()
    assert sizes[-1] <= 1.6 * sizes[0]
    assert (moved.blobs, moved.bytes) == (len(new), sum(blobs[each] for each in new))
    assert moved.bytes < 0.07 * sizes[0]
