"""What a restore changes: decided from the manifest, the plan and this host."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDriver, a_manifest, gpu, uuid

from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, Refused
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.gpu.nvidia.driver_files import DriverFiles, File, MappedFile, describe_mapped
from gpusnap.runtime_shim.records.manifest import DriverMount, Manifest
from gpusnap.runtime_shim.runtime.criu.images import dev
from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes, remap
from gpusnap.runtime_shim.snapshot.devices.remap import Remap

OLD, NEW = "580.159.04", "580.200.01"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so."
PAIR = ((uuid(0), uuid(1)),)
NOTHING = DriverFiles(NEW, ())


def record(**changed: Any) -> Manifest:
    return replace(a_manifest(), **({"libraries": ()} | changed))


def made(
    found: Manifest,
    *,
    pairs: Sequence[tuple[str, str]] = PAIR,
    binds: Sequence[str] = (),
    config: Mapping[str, Any] | None = None,
    known: DriverFiles = NOTHING,
    keep_names: bool = False,
) -> Remap:
    """On a host with GPU 1 (and GPU 2) and driver NEW."""
    driver = FakeDriver(gpus=(replace(gpu(1), pci="0000:07:00.0"), gpu(2)), version=NEW)
    mounts = [{"source": path, "destination": path, "options": ["rbind"]} for path in binds]
    return remap.make(
        found,
        driver,
        driver.host(),
        pairs,
        config or {"mounts": mounts},
        known=lambda: known,
        keep_names=keep_names,
    )


def test_nodes_and_pairs() -> None:
    """The node becomes the target's; what the container has afterwards is known; a GPU outside is strange."""
    found = made(record())
    assert found.edits.changes == (
        Change(Node("/dev/nvidia0", 195, 0, uuid(0)), (Node("/dev/nvidia1", 195, 1),)),
    )
    assert found.expected == (Node("/dev/nvidia1", 195, 1), Node("/dev/nvidiactl", 195, 255))
    assert [node.path for node in found.edits.strange] == ["/dev/nvidia2"]
    assert found.list_pairs([uuid(0)]) == PAIR
    assert not found.identity


def test_a_checkpoint_that_names_no_nodes() -> None:
    """It can come back where it was, and nowhere else."""
    with pytest.raises(Refused, match="does not list the device nodes"):
        made(record(nodes=()))
    assert made(record(nodes=()), pairs=[(uuid(0), uuid(0))]).edits.changes == ()


def test_bind_mounted_nodes_and_folders_of_the_gpu() -> None:
    """A mount of the old GPU's node, or of its folder in /proc, is the new GPU's; others stay."""
    old = replace(record().gpus[0], pci="0000:41:00.0")
    folder = "/proc/driver/nvidia/gpus/"
    mount = DriverMount("gpusnap-0", folder + "0000:41:00.0", folder + "0000:41:00.0")
    found = made(record(gpus=(old,), mounts=(mount,)), binds=["/dev/nvidia0", "/etc", "/dev/null"])
    assert found.edits.sources["/dev/nvidia0"] == "/dev/nvidia1"
    assert found.edits.sources["/etc"] == "/etc"
    assert found.mounts == (replace(mount, source=folder + "0000:07:00.0"),)
    assert not found.moved_libraries


def test_libraries_of_another_version(tmp_path: Path) -> None:
    """A file of the driver that is not here is taken from this host's; one that nobody has stays."""
    real = tmp_path / "libcuda.so"
    real.touch()
    known = DriverFiles(NEW, (File(LIBRARY + NEW, LIBRARY + NEW, 64, 0),))
    found = made(record(), binds=[LIBRARY + OLD, "/usr/bin/nvidia-never"], known=known)
    assert found.edits.sources == {
        LIBRARY + OLD: LIBRARY + NEW,
        "/usr/bin/nvidia-never": "/usr/bin/nvidia-never",
    }
    assert found.moved_libraries


def test_a_library_of_another_build(tmp_path: Path) -> None:
    """A process that has it mapped cannot come back, and is told so; the same build passes."""
    path = tmp_path / "libcuda.so"
    path.write_bytes(b"x" * 100)
    here = describe_mapped(str(path))
    config = {"mounts": [{"source": str(path), "destination": "/lib/libcuda.so.1", "options": ["bind"]}]}
    same = MappedFile("/lib/libcuda.so.1", here.size, here.build_id, here.mode)
    made(record(libraries=(same,)), config=config)
    with pytest.raises(
        Refused, match=r"execute /lib/libcuda\.so\.1 of driver 580\.159\.04, but .* 100 bytes"
    ):
        made(record(libraries=(replace(same, size=99),)), config=config)
    made(record(libraries=(replace(same, size=99, path="/opt/own/libcuda.so.1"),)), config=config)


def test_a_mount_of_a_gpu_outside_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither config.json nor the manifest can bring one in."""
    real = os.stat

    def stat(path: Any, *words: Any, **more: Any) -> Any:
        if path != "/dev/nvidia2":
            return real(path, *words, **more)
        return os.stat_result((0o20666, 0, 0, 0, 0, 0, 0, 0, 0, 0), {"st_rdev": os.makedev(195, 2)})

    monkeypatch.setattr(os, "stat", stat)
    for arguments in (
        {"binds": ["/dev/nvidia2"]},
        {"found": record(mounts=(DriverMount("gpusnap-0", "/dev/nvidia2", "/dev/nvidia2"),))},
    ):
        with pytest.raises(Refused, match="mount /dev/nvidia2, the device of GPU"):
            made(**({"found": record()} | arguments))


def an_image(folder: Path, *names: tuple[str, int, int]) -> str:
    """CRIU's image of a /dev with such character devices; its name."""
    with tarfile.open(folder / "tmpfs-dev-7.tar.gz.img", "w:gz", format=tarfile.GNU_FORMAT) as tar:
        for name, major, minor in names:
            entry = tarfile.TarInfo(f"./{name}")
            entry.type, entry.devmajor, entry.devminor, entry.mode = tarfile.CHRTYPE, major, minor, 0o666
            tar.addfile(entry)
    return "tmpfs-dev-7.tar.gz.img"


def test_the_image_of_dev(tmp_path: Path) -> None:
    """It is read in another form, and stays as it is; one that needs nothing is not replaced."""
    name = an_image(tmp_path, ("null", 1, 3), ("nvidia0", 195, 0), ("nvidiactl", 195, 255))
    before = (tmp_path / name).read_bytes()
    found = record(dev=name)
    replaced = remap.image(found, str(tmp_path), made(found), {})
    with tarfile.open(fileobj=io.BytesIO(replaced[name])) as tar:
        assert [(e.name, e.devminor) for e in tar] == [
            ("./null", 3),
            ("./nvidia1", 1),
            ("./nvidiactl", 255),
        ]
    assert (tmp_path / name).read_bytes() == before
    assert remap.image(record(dev=""), str(tmp_path), made(found), {}) == {}


def test_a_device_that_nobody_gave(tmp_path: Path) -> None:
    """In /dev there is what config.json gives, and GPUs' nodes of the manifest; anything else is named."""
    name = an_image(tmp_path, ("nvidia0", 195, 0), ("fuse", 10, 229))
    found = record(dev=name)
    with pytest.raises(ImageError, match="fuse"):
        remap.image(found, str(tmp_path), made(found), {})
    fuse = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}
    assert remap.image(found, str(tmp_path), made(found), {"linux": {"devices": [fuse]}})
    os.symlink(name, tmp_path / "tmpfs-dev-8.tar.gz.img")
    with pytest.raises(ImageError, match="cannot be read"):
        remap.image(record(dev="tmpfs-dev-8.tar.gz.img"), str(tmp_path), made(found), {})


def test_the_image_of_dev_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-way, or as it is closed."""

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    found = record(dev=an_image(tmp_path, ("nvidia0", 195, 0)))
    edits = made(found)
    monkeypatch.setattr(dev, "rewrite", fail)
    with pytest.raises(ImageError, match="cannot be read: Input/output error"):
        remap.image(found, str(tmp_path), edits, {})


def test_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mounted nodes are replaced, the others are in the image already; then /dev must be as planned."""
    done: list[Sequence[Change]] = []
    monkeypatch.setattr(bind_mounted_nodes, "mounted_nodes", lambda init: (("/dev/nvidia0", 195, 0),))
    monkeypatch.setattr(bind_mounted_nodes, "replace_nodes", lambda init, changes: done.append(changes))
    found = made(record())
    driver = FakeDriver(gpus=(gpu(1),), dev=tuple(found.expected))
    remap.settle(7, found, driver)
    assert done == [list(found.edits.changes)]
    driver.dev = (Node("/dev/nvidia0", 195, 0),)
    monkeypatch.setattr(remap, "_has_hosts_dev", lambda init: True)
    remap.settle(7, found, driver)
    monkeypatch.setattr(remap, "_has_hosts_dev", lambda init: False)
    with pytest.raises(GpusnapError, match=r"has the GPU devices /dev/nvidia0 \(195:0\) after the restore"):
        remap.settle(7, found, driver)


def test_swapped_nodes_that_are_mounts() -> None:
    """Nothing moves in /dev, so each mount shows this host's node of its name; a moved one shows the new."""
    two = replace(record().gpus[0], uuid=uuid(2), minor=2, index=2)
    one = replace(record().gpus[0], uuid=uuid(1), minor=1, index=1)
    nodes = tuple(Node(f"/dev/nvidia{n}", 195, n, uuid(n)) for n in (1, 2))
    found = record(gpus=(one, two), nodes=nodes)
    swapped = [(uuid(1), uuid(2)), (uuid(2), uuid(1))]
    made_of = made(found, pairs=swapped, binds=["/dev/nvidia1", "/dev/nvidia2"])
    assert made_of.edits.changes == ()
    assert made_of.edits.sources == {"/dev/nvidia1": "/dev/nvidia1", "/dev/nvidia2": "/dev/nvidia2"}
    alone = made(record(), binds=["/dev/nvidia0"])
    assert alone.edits.sources == {"/dev/nvidia0": "/dev/nvidia1"}
