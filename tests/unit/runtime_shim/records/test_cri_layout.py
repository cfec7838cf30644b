"""gpusnap's folder as files of the image directory, for an engine that takes no folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.records import cri_layout, manifest_file

FILES = {
    "inventory.img": b"criu",
    "gpusnap/manifest.json": b"{}",
    "gpusnap/oci-layout": b"1",
    "gpusnap/blobs/sha256/00ff": b"chunk",
}
CRI = {"io.kubernetes.cri.container-type": "container"}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_there_and_back(images: Path) -> None:
    """Folded there are files alone, each of the same content; unfolded all is as it was."""
    cri_layout.fold(str(images))
    assert not manifest_file.is_ours(str(images))
    assert all(entry.is_file() for entry in os.scandir(images))
    assert {cri_layout.name_naturally(name): data for name, data in content(images).items()} == FILES
    for _ in range(2):
        cri_layout.unfold(str(images))
        assert content(images) == FILES


def test_the_manifest_comes_back_last(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restore that was cut off has left nothing that looks whole, and the next one goes on."""
    cri_layout.fold(str(images))
    rename = os.rename
    done: list[str] = []

    def fails(source: str, target: str, **where: int) -> None:
        if len(done) == 2:
            raise OSError(30, "Read-only file system")
        rename(source, target, **where)
        done.append(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(ImageError, match=r"cannot be renamed to gpusnap/manifest\.json"):
            cri_layout.unfold(str(images))
    assert not (images / "gpusnap/manifest.json").exists()
    cri_layout.unfold(str(images))
    assert content(images) == FILES


@pytest.mark.parametrize(
    "name",
    ["gpusnap%2F..%2F..%2Fetc", "gpusnap%2F", "gpusnap%2F%2Fx", "gpusnap%2Fa\nb", "inventory.img", "gpusnap"],
)
def test_names_that_stay(tmp_path: Path, name: str) -> None:
    """What we have not written leads nowhere."""
    assert cri_layout.name_naturally(name) == name
    (tmp_path / name).write_bytes(b"")
    cri_layout.unfold(str(tmp_path))
    assert os.listdir(tmp_path) == [name]


def test_a_directory_that_is_not_there() -> None:
    """It is for others to say so."""
    cri_layout.unfold("/no/such/folder")


def test_fold_says_what_failed(tmp_path: Path) -> None:
    """Such as a name that is taken."""
    (tmp_path / "gpusnap").mkdir()
    (tmp_path / "gpusnap" / "manifest.json").write_bytes(b"")
    (tmp_path / "gpusnap%2Fmanifest.json").mkdir()
    with pytest.raises(ImageError, match=r"cannot be renamed to what containerd expects"):
        cri_layout.fold(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "annotations", "expected"),
    [
        ("/tmp/ctrd-checkpoint123", CRI, True),
        ("/run/user/0/ctrd-checkpoint123/", CRI, True),
        ("/tmp/ctrd-checkpoint123", {}, False),
        ("/var/lib/images", CRI, False),
    ],
    ids=["cri", "slash", "ctr", "ctr of a pod's"],
)
def test_wanted(path: str, annotations: dict[str, str], expected: bool) -> None:
    """Only where the path and the container are CRI's; ctr keeps folders."""
    assert cri_layout.is_wanted(path, annotations) is expected


@pytest.mark.parametrize("folder", ["gpusnap", "gpusnap/blobs", "gpusnap/blobs/sha256"])
def test_no_link_is_followed(images: Path, tmp_path_factory: pytest.TempPathFactory, folder: str) -> None:
    """An archive that brings a link where a folder of ours goes writes nothing outside of its images."""
    outside = tmp_path_factory.mktemp("outside")
    cri_layout.fold(str(images))
    link = images / folder
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(ImageError, match="cannot be renamed"):
        cri_layout.unfold(str(images))
    assert not list(outside.iterdir())


def test_nothing_gives_way(images: Path) -> None:
    """A file that is there under the name stays, and a link is not moved."""
    cri_layout.fold(str(images))
    (images / "gpusnap").mkdir()
    (images / "gpusnap/manifest.json").write_bytes(b"there")
    with pytest.raises(ImageError, match=r"manifest\.json"):
        cri_layout.unfold(str(images))
    assert (images / "gpusnap/manifest.json").read_bytes() == b"there"
    (images / "gpusnap%2Fother").symlink_to("/etc/passwd")
    with pytest.raises(ImageError, match="gpusnap%2Fother"):
        cri_layout.unfold(str(images))
    assert not (images / "gpusnap/other").is_symlink()
