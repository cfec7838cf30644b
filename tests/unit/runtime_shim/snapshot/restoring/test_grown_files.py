"""Files that were open for writing, by their size at the dump and now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.proc import Mount
from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile
from gpusnap.runtime_shim.snapshot.restoring import grown_files
from gpusnap.runtime_shim.snapshot.restoring.grown_files import OtherSize


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its root is an overlay; a volume, a single file of the host and a tmpfs are mounted in it."""
    for name in ("rootfs/data", "rootfs/scratch", "volume/inner"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("rootfs/log", "rootfs/data/hidden", "rootfs/scratch/x", "volume/inner/log", "single"):
        (tmp_path / name).write_text("0123456789")
    mounts = (Mount("0:9", "/", str(tmp_path / "rootfs"), (), (), "overlay"),)
    monkeypatch.setattr(proc, "mounts", lambda pid: mounts)
    return tmp_path


def configuration(bundle: Path) -> dict[str, Any]:
    return {
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/data/", "source": str(bundle / "volume"), "options": ["rbind"]},
            {"destination": "/etc/single", "source": str(bundle / "single"), "options": ["bind"]},
            {"destination": "/scratch", "source": "tmpfs", "type": "tmpfs"},
            {"destination": "/dev/shm", "source": "/dev/shm", "options": ["bind"]},
            7,
        ],
    }


def found(bundle: Path, path: str, size: int) -> tuple[OtherSize, ...]:
    return grown_files.find([WrittenFile(path, size)], (), configuration(bundle), str(bundle))


def test_in_its_own_file_system(bundle: Path) -> None:
    """Cut to what the process knows of; nothing to do if it has that size."""
    grown = found(bundle, "/log", 4)
    grown_files.check(grown, may_cut=False)
    assert grown_files.cut(grown) == ("/log",)
    assert (bundle / "rootfs/log").read_text() == "0123"
    assert found(bundle, "/log", 4) == ()


def test_one_that_is_restored(bundle: Path) -> None:
    """Its size now does not matter, whatever it is."""
    for size in (4, 40):
        files = [WrittenFile("log", size)]
        assert grown_files.find(files, {"/log"}, configuration(bundle), str(bundle)) == ()


def test_a_root_that_is_a_directory_of_the_host(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "mounts", lambda pid: ())
    with pytest.raises(Refused, match=r"rootfs/log, which the container has open for writing as /log"):
        grown_files.check(found(bundle, "/log", 4), may_cut=False)


@pytest.mark.parametrize(
    ("path", "here"), [("/data/inner/log", "volume/inner/log"), ("/etc/single", "single")]
)
def test_of_the_host(bundle: Path, path: str, here: str) -> None:
    """gpusnap removes nothing there; the message has what to do."""
    with pytest.raises(Refused) as refused:
        grown_files.check(found(bundle, path, 4), may_cut=False)
    said = refused.value.sentence()
    assert (
        f"{bundle / here}, which the container has open for writing as {path}, has grown from 4 to 10" in said
    )
    assert said.endswith(f"then: truncate --size 4 {bundle / here} [GPS-528]")
    assert (bundle / here).read_text() == "0123456789"
    grown = found(bundle, path, 4)
    grown_files.check(grown, may_cut=True)
    assert grown_files.cut(grown) == (path,)
    assert (bundle / here).read_text() == "0123"


def test_many_of_the_host(bundle: Path) -> None:
    """One is described, and as many as one may read are in the command."""
    files = []
    for number in range(5):
        (bundle / f"volume/a b{number}").write_text("0123456789")
        files.append(WrittenFile(f"/data/a b{number}", number))
    with pytest.raises(Refused, match="and so have 4 other files") as refused:
        grown_files.check(grown_files.find(files, (), configuration(bundle), str(bundle)), may_cut=False)
    assert refused.value.hint.count("truncate --size") == 3
    assert f"truncate --size 1 '{bundle}/volume/a b1' && " in refused.value.hint


@pytest.mark.parametrize("path", ["/log", "/data/inner/log"])
def test_shorter(bundle: Path, path: str) -> None:
    with pytest.raises(Refused, match=r"had 11 bytes at the checkpoint, and .* has 10"):
        grown_files.check(found(bundle, path, 11), may_cut=True)


@pytest.mark.parametrize(
    "path",
    ["/scratch/x", "/dev/shm/x", "/data/hidden", "/none", "/data", "/log/x", "/data/../../single", ".."],
)
def test_left_to_criu(bundle: Path, path: str) -> None:
    """What CRIU or gpusnap restores, what is not there, and what is no regular file."""
    Path("/dev/shm/x").unlink(missing_ok=True)
    assert found(bundle, path, 4) == ()


@pytest.mark.parametrize("name", ["rootfs/out", "volume/out"])
def test_no_link_is_followed(bundle: Path, name: str) -> None:
    outside = bundle / "outside"
    outside.write_text("0123456789")
    (bundle / name).symlink_to(outside)
    path = name.replace("rootfs", "").replace("volume", "/data")
    assert found(bundle, path, 4) == ()
    other = OtherSize(WrittenFile(path, 4), str((bundle / name).parent), "out", 10, own=True)
    with pytest.raises(ImageError, match="cannot be cut"):
        grown_files.cut([other])
    assert outside.read_text() == "0123456789"


def test_no_configuration(bundle: Path) -> None:
    configurations: tuple[dict[str, Any], ...] = ({}, {"root": {}, "mounts": {}}, {"root": {"path": 7}})
    for config in configurations:
        assert grown_files.find([WrittenFile("/log", 4)], (), config, str(bundle)) == ()
