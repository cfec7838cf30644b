"""memory.pages = "chunks": the GPUs' memory beside CRIU's images, in chunks of an OCI layout."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import shimhost
from support import Container, faults, good, manifest, podman, run, sentence

JOURNAL = Path("/run/gpusnap/journal")
# Of two GPUs: some dozens of chunks, in one mapping that is large enough to be populated for the driver.
WORK = ("--mib", "20")
# More than a ceiling, and than what gpusnap holds beside it.
LARGE = ("--mib", "100")


# What does not depend on the runtime.
under_crun = pytest.mark.parametrize("real", ["crun"], indirect=True)


@pytest.fixture
def chunks(settings: shimhost.Writer) -> None:
    """Small chunks, so that there are many."""
    settings('[memory]\npages = "chunks"\nchunk-size = "1M"\n')


def blobs(archive: Path) -> list[tuple[str, int]]:
    """Names and sizes of the blobs in an archive."""
    lines = good(run("tar", "-tvf", archive)).splitlines()
    found = [line.split() for line in lines if "/gpusnap/blobs/sha256/" in line and not line.endswith("/")]
    return [(words[5].rpartition("/")[2], int(words[2])) for words in found]


def test_export_and_import_twice_in_a_row(chunks: None, real: str, tmp_path: Path) -> None:
    """Every byte is right, twice; CRIU's images are small, the bytes are in blobs named by their digest."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", *WORK)
    for _ in range(2):
        good(container.checkpoint(archive, "--compress", "none"))
        container.remove()
        found = blobs(archive)
        assert sum(size for _, size in found) >= 40 << 20
        record = manifest(archive)
        assert record["pages"] == "chunks"
        (process,) = record["processes"]
        assert sum(region["size"] for region in process["regions"]) >= 40 << 20
        sizes = {
            line.split()[5]: int(line.split()[2]) for line in good(run("tar", "-tvf", archive)).splitlines()
        }
        assert sum(size for name, size in sizes.items() if name.endswith(".img")) < 20 << 20
        container = Container.restore("w", archive)
        container.goes_on()
    assert list(JOURNAL.glob("*")) == []


@under_crun
def test_the_layout_is_anyones_to_read(chunks: None, real: str, tmp_path: Path) -> None:
    """index.json names a manifest whose layers are the chunks; each blob has the digest of its name."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, "--compress", "none"))
    good(run("tar", "-C", tmp_path, "-xf", archive, "checkpoint/gpusnap"))
    layout = tmp_path / "checkpoint/gpusnap"
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    artifact = json.loads((layout / "blobs/sha256" / entry["digest"].partition(":")[2]).read_text())
    assert artifact["artifactType"] == "application/vnd.gpusnap.checkpoint.v1+json"
    names = {layer["digest"].partition(":")[2] for layer in artifact["layers"]}
    assert names <= {name for name, _ in blobs(archive)}
    for line in good(run("sha256sum", *(layout / "blobs/sha256").iterdir())).splitlines():
        digest, path = line.split()
        assert path.endswith(digest)


def test_leave_running(chunks: None, real: str, tmp_path: Path) -> None:
    """It runs on beside its checkpoint, which can be restored."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", *WORK)
    for _ in range(2):
        good(container.checkpoint(archive, "--leave-running"))
        container.goes_on()
    container.remove()
    Container.restore("w", archive).goes_on()


@under_crun
def test_several_processes_and_gpus(chunks: None, real: str, tmp_path: Path) -> None:
    """Three processes on two GPUs each."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", "--mib", "20", "--procs", "3", workers=3)
    good(container.checkpoint(archive))
    container.remove()
    assert len([p for p in manifest(archive)["processes"] if p["regions"]]) == 3
    Container.restore("w", archive).goes_on()


@under_crun
@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_above_the_ceiling(
    real: str, settings: shimhost.Writer, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """A region larger than what gpusnap may hold goes chunk by chunk, and comes back so; a note says it."""
    settings('[memory]\nchunk-size = "1M"\nceiling = "48M"\n')
    archive = tmp_path / "a.tar"
    container = Container.start("w", *LARGE)
    good(container.checkpoint(archive, *options))
    if options:
        container.goes_on()
    container.remove()
    record = manifest(archive)
    size = sum(region["size"] for process in record["processes"] for region in process["regions"])
    assert record["peakMemory"] < 160 << 20 < size
    (note,) = [step["note"] for step in record["timing"] if "note" in step]
    assert "exceeds memory.ceiling" in note
    Container.restore("w", archive).goes_on()
    assert not os.path.ismount("/run/gpusnap/stage")


@under_crun
def test_what_it_stages_is_gone(chunks: None, real: str, tmp_path: Path) -> None:
    """By default it stages, without a note; afterwards no file and no mount is left, in no process either."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", *LARGE)
    good(container.checkpoint(archive, "--leave-running"))
    record = manifest(archive)
    assert [step for step in record["timing"] if "note" in step] == []
    assert record["peakMemory"] > 100 << 20
    assert not os.path.ismount("/run/gpusnap/stage")
    assert "gpusnap" not in Path(f"/proc/{container.pid}/maps").read_text()
    container.goes_on()
    container.remove()
    restored = Container.restore("w", archive)
    assert not os.path.ismount("/run/gpusnap/stage")
    assert "gpusnap" not in Path(f"/proc/{restored.pid}/maps").read_text()
    restored.goes_on()


@under_crun
@pytest.mark.parametrize(
    "fault", ["checkpoint result=CUDA_ERROR_UNKNOWN", "checkpoint result=CUDA_ERROR_OUT_OF_MEMORY"]
)
def test_a_failed_checkpoint_is_undone(chunks: None, real: str, tmp_path: Path, fault: str) -> None:
    """It runs on, every byte right, and no blob is left."""
    container = Container.start("w", *WORK)
    faults(fault)
    sentence(container.checkpoint(tmp_path / "a.tar"))
    faults("")
    container.unharmed()
    assert not (container.image_path / "gpusnap").exists()
    assert list(JOURNAL.glob("*")) == []


@under_crun
def test_a_dump_that_fails_is_undone(
    chunks: None, real: str, settings: shimhost.Writer, tmp_path: Path
) -> None:
    """After the regions were freed, their bytes come back from the chunks."""
    settings('[memory]\npages = "chunks"\nchunk-size = "1M"\n[criu]\noptions = ["no-such-option"]\n')
    container = Container.start("w", *WORK)
    sentence(container.checkpoint(tmp_path / "a.tar"))
    container.unharmed()
    assert list(JOURNAL.glob("*")) == []


@under_crun
def test_a_damaged_blob(chunks: None, real: str, tmp_path: Path) -> None:
    """One flipped byte is found before the container runs; nothing is left of it."""
    archive = tmp_path / "a.tar"
    container = Container.start("w", *WORK)
    good(container.checkpoint(archive, "--compress", "none"))
    container.remove()
    good(run("tar", "-C", tmp_path, "-xf", archive))
    record = json.loads((tmp_path / "checkpoint/gpusnap/manifest.json").read_text())
    row = record["processes"][0]["regions"][0]["chunks"][-1]
    blob = tmp_path / "checkpoint/gpusnap/blobs/sha256" / row[-1]
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)
    names = [path.name for path in tmp_path.iterdir() if path.name != "a.tar"]
    good(run("tar", "-C", tmp_path, "-cf", tmp_path / "b.tar", *names))
    text = sentence(podman("container", "restore", "--import", tmp_path / "b.tar"))
    assert blob.name[:12] in text
    assert good(podman("ps", "--quiet")) == ""
    podman("rm", "--force", "--all", "--time", "0")
    Container.restore("w", archive).goes_on()
