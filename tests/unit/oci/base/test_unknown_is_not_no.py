"""Where the kernel cannot say whether something is there, it is not taken for missing."""

from __future__ import annotations

import ast
import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes import a_manifest

from gpusnap.oci.base import files
from gpusnap.oci.base.errors import OciError
from gpusnap.oci.layout.documents import Index
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError
from gpusnap.runtime_shim.gpu.amd import driver as amd
from gpusnap.runtime_shim.gpu.api import device_files
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.nvidia import driver as nvidia
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import cri_layout, manifest, manifest_file
from gpusnap.runtime_shim.runtime import cgroup_freezer
from gpusnap.runtime_shim.snapshot.restoring.gpus import _check_all_there

ROOT = Path(__file__).resolve().parents[4]
# Where a wrong no costs a better message, room on the disk, or a refusal.
HARMLESS = {
    "hooks/hooksd.py": 1,
    "oci/registry/certificates.py": 1,
    "oci/store/store.py": 1,
    "runtime_shim/base/errors.py": 1,
    "runtime_shim/gpu/amd/topology.py": 2,
    "runtime_shim/process/proc.py": 1,
    "runtime_shim/records/manifest_file.py": 3,
    "runtime_shim/runtime/bundle.py": 1,
    "runtime_shim/runtime/criu/external_mounts.py": 1,
    "runtime_shim/runtime/criu/images/pycriu_package.py": 1,
    "runtime_shim/runtime/criu/plugins.py": 2,
    "runtime_shim/runtime/criu/scratch_files.py": 1,
    "runtime_shim/snapshot/devices/nvidia_hooks.py": 2,
    "runtime_shim/snapshot/devices/remap.py": 1,
    "runtime_shim/snapshot/records/reservations.py": 1,
    "runtime_shim/snapshot/memory/chunk_cache.py": 1,
    "runtime_shim/snapshot/records/volumes.py": 1,
    "runtime_shim/snapshot/recovery/restore.py": 1,
}

Fail = Callable[[str, str, int], None]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Have a function of os fail for the paths that end so; all others are as they are."""

    def begin(name: str, ending: str, number: int) -> None:
        real = getattr(os, name)

        def failing(path: object, *arguments: object, **named: object) -> object:
            if isinstance(path, str | os.PathLike) and os.fspath(path).endswith(ending):
                raise OSError(number, os.strerror(number), os.fspath(path))
            return real(path, *arguments, **named)

        monkeypatch.setattr(os, name, failing)

    return begin


def test_a_look_at_the_code() -> None:
    """os.path.exists says no for EIO; gpusnap.oci.base.files.exists is for what depends on the answer."""
    names = {"exists", "lexists", "isdir", "isfile", "ismount"}
    found: Counter[str] = Counter()
    for path in sorted(
        path for top in ("hooks", "oci", "runtime_shim") for path in (ROOT / top).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in names
                and ast.unparse(node.value) == "os.path"
            ):
                found[str(path.relative_to(ROOT))] += 1
    assert found == HARMLESS


def test_exists(tmp_path: Path, fail: Fail) -> None:
    """Nothing, a loop of links and what lies behind a file are not there; all else is raised."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("nowhere")
    assert files.exists(f"{tmp_path}/file")
    assert not files.is_folder(f"{tmp_path}/file")
    assert files.is_folder(str(tmp_path))
    assert not files.exists(f"{tmp_path}/none")
    assert not files.exists(f"{tmp_path}/file/none")
    assert not files.exists(f"{tmp_path}/loop")
    assert not files.exists(f"{tmp_path}/{'n' * 300}")
    assert not files.exists(f"{tmp_path}/link")
    assert files.exists(f"{tmp_path}/link", follow=False)
    fail("stat", "/file", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        files.exists(f"{tmp_path}/file")


def test_whose_images(tmp_path: Path, fail: Fail) -> None:
    """Images with GPU state are not handed to the real runtime, which would restore them without."""
    (tmp_path / manifest.FOLDER).mkdir()
    assert manifest_file.is_ours(str(tmp_path))
    fail("stat", f"/{manifest.FOLDER}", errno.ENOMEM)
    with pytest.raises(ImageError, match=r"whether gpusnap made the images in .*: Cannot allocate memory"):
        manifest_file.is_ours(str(tmp_path))


def test_a_restored_process(tmp_path: Path, fail: Fail) -> None:
    """An image that cannot be seen says nothing of whether its process was in the dump."""
    (process,) = a_manifest().processes[:1]
    fail("stat", f"/core-{process.pid}.img", errno.EIO)
    with pytest.raises(ImageError, match=r"whether .*core-\d+.img exists: Input/output error"):
        _check_all_there([process], (), str(tmp_path))


def test_an_index(tmp_path: Path, fail: Fail) -> None:
    """A store is not made anew over one whose index cannot be seen for a moment."""
    store = Store(tmp_path / "store").create()
    index = tmp_path / "store/index.json"
    before = index.read_bytes()
    (tmp_path / "store/oci-layout").unlink()  # so that it is not taken for one
    fail("stat", "/index.json", errno.EIO)
    written: list[Index] = []
    store.layout.commit = written.append  # type: ignore[method-assign,assignment]
    with pytest.raises(OciError, match="Input/output error"):
        store.create()
    assert written == []
    assert index.read_bytes() == before


@pytest.mark.parametrize("present", [nvidia.is_present, amd.is_present])
def test_a_driver(present: Callable[[], bool], fail: Fail) -> None:
    """A host whose driver cannot be seen is not taken for one without GPUs: a dump would lose their state."""
    fail("stat", "/proc/driver/nvidia/version", errno.ENOMEM)
    fail("stat", "/dev/kfd", errno.ENOMEM)
    with pytest.raises(GpuError, match="cannot determine whether this host has"):
        present()


def test_the_table_of_drivers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By /proc/devices a device file is known for a GPU's."""
    monkeypatch.setattr(proc, "_PATIENCE", 0.0)
    assert device_files.character_drivers(str(tmp_path / "none")) == ()
    monkeypatch.setattr(proc, "_content", failing(errno.EMFILE))
    with pytest.raises(GpusnapError, match="/proc/devices cannot be read: Too many open files"):
        device_files.character_drivers()


def failing(number: int) -> Callable[[str], str]:
    """A function that reads no file."""

    def read(path: str) -> str:
        raise OSError(number, os.strerror(number), path)

    return read


def test_what_a_process_has_open(monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    """Not seeing its descriptors is not the same as there being none."""
    monkeypatch.setattr(proc, "_PATIENCE", 0.0)
    assert list(proc.open_files(os.getpid()))
    fail("listdir", "/fd", errno.EMFILE)
    with pytest.raises(GpusnapError, match="Too many open files"):
        list(proc.open_files(os.getpid()))


def test_a_namespace(monkeypatch: pytest.MonkeyPatch, fail: Fail) -> None:
    """A process in another namespace is not told from ours by an error."""
    monkeypatch.setattr(proc, "_PATIENCE", 0.0)
    fail("readlink", "/ns/pid", errno.ENOMEM)
    with pytest.raises(GpusnapError, match="Cannot allocate memory"):
        proc.namespace(os.getpid(), "pid")


def test_members_of_a_cgroup(tmp_path: Path, fail: Fail) -> None:
    """None is missed because its cgroup could not be read; one that has been removed has none."""
    for name, pid in (("", 5), ("inner", 7)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "cgroup.procs").write_text(f"{pid}\n0\n")
    assert list(cgroup_freezer.members(str(tmp_path))) == [5, 7]
    assert list(cgroup_freezer.members(str(tmp_path / "none"))) == []
    fail("scandir", "/inner", errno.ENOMEM)
    with pytest.raises(GpusnapError, match=r"inner cannot be read: Cannot allocate memory"):
        list(cgroup_freezer.members(str(tmp_path)))


def test_a_frozen_cgroup(tmp_path: Path, fail: Fail) -> None:
    """Whether it is frozen, and whether it is there."""
    group = tmp_path / "group"
    assert cgroup_freezer.is_gone(str(group))
    assert not cgroup_freezer.is_frozen(str(group))
    group.mkdir()
    assert not cgroup_freezer.is_gone(str(group))
    (group / "cgroup.freeze").mkdir()  # read as a file it fails with EISDIR
    with pytest.raises(GpusnapError, match="cannot be read"):
        cgroup_freezer.is_frozen(str(group))
    fail("stat", "/group", errno.EIO)
    with pytest.raises(GpusnapError, match="cannot be read: Input/output error"):
        cgroup_freezer.is_gone(str(group))


def test_images_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that cannot be listed are said to be so."""

    def listdir(path: object) -> list[str]:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(ImageError, match=f"the images in {tmp_path} cannot be listed: Cannot allocate"):
        cri_layout.unfold(str(tmp_path))
