"""A second checkpoint of a container writes what has changed, whatever became of what was kept."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shimhost
from support import Container, good

# The test host has /var/lib/containers, with the images, on a file system of its own.
KEPT = Path("/var/lib/containers/gpusnap-kept")
MIB = 1 << 20
# A tick changes the first MiB of 60 on one GPU; the rest stays as it is.
WORK = ("--mib", "60", "--touch", "1")
CHUNKS = '[memory]\npages = "chunks"\nchunk-size = "1M"\n'

under_crun = pytest.mark.parametrize("real", ["crun"], indirect=True)


@pytest.fixture
def chunks(settings: shimhost.Writer) -> None:
    """Chunks, kept where the images are."""
    shutil.rmtree(KEPT, ignore_errors=True)
    settings(f'{CHUNKS}keep-folder = "{KEPT}"\n')


def kept(container: Container) -> list[Path]:
    """The blobs that are kept of a container."""
    return sorted((KEPT / container.id / "blobs/sha256").glob("*"))


def written(archive: Path) -> dict[str, int]:
    """What became of the GPU memory: bytes of new blobs, of memory that was known, of zeros."""
    with tarfile.open(archive) as tar:  # without compression: no program has to be run for it
        file = tar.extractfile("checkpoint/gpusnap/manifest.json")
        assert file is not None
        found: dict[str, Any] = json.load(file)["written"]
    return {name: int(found[name]) for name in ("bytes", "known", "zero")}


def running(container: Container, archive: Path, *, image: bool = False) -> dict[str, int]:
    """A checkpoint after which it runs on. Podman leaves its image there; `image`: leave it too."""
    good(container.checkpoint(archive, "--leave-running", "--compress", "none"))
    container.goes_on()
    if not image:
        shutil.rmtree(container.image_path)
    return written(archive)


def test_a_second_checkpoint(chunks: None, real: str, tmp_path: Path) -> None:
    """It writes less than 2 % of the bytes, and its archive, which stands for itself, is restored."""
    container = Container.start("w", *WORK, gpus=("0",))
    first = running(container, tmp_path / "1.tar")
    assert first["bytes"] > 56 * MIB
    assert first["known"] == 0
    second = running(container, tmp_path / "2.tar")
    assert second["bytes"] < 0.02 * first["bytes"]
    assert second["known"] > 56 * MIB
    container.remove()
    shutil.rmtree(KEPT)
    Container.restore("w", tmp_path / "2.tar").goes_on()


@under_crun
def test_memory_that_changed(chunks: None, real: str, tmp_path: Path) -> None:
    """What has changed is written, no more, and of the first checkpoint nothing else is kept."""
    container = Container.start("w", "--mib", "60", "--touch", "20", gpus=("0",))
    first = running(container, tmp_path / "1.tar")
    second = running(container, tmp_path / "2.tar")
    assert 18 * MIB < second["bytes"] < 24 * MIB
    assert sum(path.stat().st_size for path in kept(container)) < first["bytes"] + 5 * MIB


@under_crun
def test_a_checkpoint_that_ends_it(chunks: None, real: str, tmp_path: Path) -> None:
    """It links to what is there as well; afterwards nothing is kept, and the restored container goes on."""
    container = Container.start("w", *WORK, gpus=("0",))
    first = running(container, tmp_path / "1.tar")
    assert kept(container)
    good(container.checkpoint(tmp_path / "2.tar", "--compress", "none"))
    assert written(tmp_path / "2.tar")["bytes"] < 0.02 * first["bytes"]
    assert list(KEPT.iterdir()) == []
    container.remove()
    Container.restore("w", tmp_path / "2.tar").goes_on()


@under_crun
def test_a_container_that_is_gone(chunks: None, real: str, tmp_path: Path) -> None:
    """The next checkpoint of another one removes what is kept of it."""
    gone = Container.start("gone", "--mib", "20", gpus=("0",))
    running(gone, tmp_path / "1.tar")
    folder = KEPT / gone.id
    assert folder.exists()
    gone.remove()
    running(Container.start("w", "--mib", "20", gpus=("0",)), tmp_path / "2.tar")
    assert not folder.exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_some(folder: Path) -> None:
    for path in sorted((folder / "blobs/sha256").iterdir())[::7]:
        flip(path)


def cut_some(folder: Path) -> None:
    for path in sorted((folder / "blobs/sha256").iterdir())[::7]:
        os.truncate(path, 4096)


def remove_some(folder: Path) -> None:
    for path in sorted((folder / "blobs/sha256").iterdir())[::7]:
        path.unlink()


def mix_up(folder: Path) -> None:
    """Blobs under one another's names."""
    one, two, *_ = sorted((folder / "blobs/sha256").iterdir())
    one.rename(folder / "aside")
    two.rename(one)
    (folder / "aside").rename(two)


HARM: dict[str, Callable[[Path], object]] = {
    "flipped": flip_some,
    "cut off": cut_some,
    "some gone": remove_some,
    "mixed up": mix_up,
    "no blobs": lambda folder: shutil.rmtree(folder / "blobs"),
    "no record": lambda folder: (folder / "kept.json").write_text("{"),
    "no index": lambda folder: (folder / "known.json").write_bytes(b"\0" * 99),
    "all gone": shutil.rmtree,
}


@under_crun
def test_whatever_happens_to_what_is_kept(chunks: None, real: str, tmp_path: Path) -> None:
    """The checkpoint after it is right, and links to what is still right; the last one of all is restored."""
    container = Container.start("w", *WORK, gpus=("0",))
    first = running(container, tmp_path / "a.tar")
    for harm in HARM.values():
        assert len(kept(container)) > 50
        harm(KEPT / container.id)
        assert running(container, tmp_path / "b.tar")["bytes"] > 0
        assert running(container, tmp_path / "a.tar")["bytes"] < 0.02 * first["bytes"]
    flip_some(KEPT / container.id)
    running(container, tmp_path / "last.tar")
    container.remove()
    Container.restore("w", tmp_path / "last.tar").goes_on()


@under_crun
@pytest.mark.parametrize("image", [False, True], ids=["image gone", "image there"])
@pytest.mark.parametrize("harm", ["flipped", "mixed up", "some gone"])
def test_restored_after_harm(chunks: None, real: str, tmp_path: Path, harm: str, image: bool) -> None:
    """Every byte is right in the checkpoint that was made just after.

    While the image is there, it has the same files, and the next checkpoint comes into its place.
    """
    container = Container.start("w", *WORK, gpus=("0",))
    running(container, tmp_path / "1.tar", image=image)
    HARM[harm](KEPT / container.id)
    running(container, tmp_path / "2.tar", image=image)
    container.remove()
    Container.restore("w", tmp_path / "2.tar").goes_on()


@under_crun
def test_in_the_place_of_an_earlier_one(chunks: None, real: str, tmp_path: Path) -> None:
    """An archive holds the blobs of its own checkpoint, and none that the image's folder had before."""
    container = Container.start("w", "--mib", "50", "--touch", "25", gpus=("0",))
    sizes = []
    for _ in range(3):
        running(container, tmp_path / "a.tar", image=True)
        sizes.append((tmp_path / "a.tar").stat().st_size)
    assert max(sizes) < sizes[0] + 10 * MIB


@under_crun
def test_on_another_file_system(real: str, settings: shimhost.Writer, tmp_path: Path) -> None:
    """Where no links can be made nothing is kept, as one line says; the checkpoint is as good as ever."""
    folder = tmp_path / "kept"
    settings(f'{CHUNKS}keep-folder = "{folder}"\n')
    container = Container.start("w", *WORK, gpus=("0",))
    for _ in range(2):
        done = container.checkpoint(tmp_path / "a.tar", "--leave-running", "--compress", "none")
        good(done)
        assert written(tmp_path / "a.tar")["known"] == 0
        (line,) = [line for line in done.err.splitlines() if "gpusnap: " in line]
        assert "is on another file system than" in line
        assert "memory.keep-folder" in line
    assert list(folder.iterdir()) == []
    container.remove()
    Container.restore("w", tmp_path / "a.tar").goes_on()


@under_crun
def test_switched_off(real: str, settings: shimhost.Writer, tmp_path: Path) -> None:
    """memory.keep = false: every checkpoint writes everything, and nothing is left on the disk."""
    settings(f'{CHUNKS}keep = false\nkeep-folder = "{KEPT}"\n')
    container = Container.start("w", *WORK, gpus=("0",))
    first, second = (running(container, tmp_path / "a.tar") for _ in range(2))
    assert second["bytes"] > 0.9 * first["bytes"]
    assert not KEPT.exists() or not list(KEPT.iterdir())
