"""crun's empty folder: what a dump named otherwise than the restore is told to CRIU, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from criu_images import INVENTORY, varint
from fakes import Scene, a_manifest

from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime.criu.config import restore_text
from gpusnap.runtime_shim.runtime.criu.images import masked_paths
from gpusnap.runtime_shim.runtime.criu.images.overlay import view
from gpusnap.runtime_shim.settings import Criu
from gpusnap.runtime_shim.snapshot import restore
from gpusnap.runtime_shim.snapshot.restoring import plan as restore_plan

DUMPED = "/run/crun/.empty-directory"
OWN = "/run/containerd/runc/k8s.io/.empty-directory"
ROOT = "/run/containerd/runc/k8s.io"


def field(number: int, text: str) -> bytes:
    """A string of protobuf."""
    return varint(number << 3 | 2) + varint(len(text.encode())) + text.encode()


def entry(key: str, source: str = "tmpfs") -> bytes:
    """A mount as CRIU writes one (criu/images/mnt.proto): root, mountpoint, source, options; and its key."""
    data = field(6, OWN) + field(7, "./proc/acpi") + field(8, source) + field(9, "mode=755")
    data += b"\x68\x01" + field(18, key)
    return len(data).to_bytes(4, "little") + data


def written(folder: Path, *keys: str) -> Path:
    folder.mkdir(exist_ok=True)
    content = b"\x19\x43\x56\x54\x28\x39\x56\x55" + b"".join(map(entry, keys))
    (folder / "mountpoints-12.img").write_bytes(content)
    return folder


def test_another_root(tmp_path: Path) -> None:
    """What was dumped by the default root's name is the folder in this root."""
    images = written(tmp_path, "/dev/null", DUMPED, DUMPED, "gpusnap-0")
    [mount] = masked_paths.mounts(str(images), "crun", ROOT, {})
    assert f"external mnt[{DUMPED}]:{OWN}" in restore_text(Criu(), [mount]).splitlines()


@pytest.mark.parametrize("replaced", [{}, {"tmpfs-dev-1.tar.gz.img": b""}])
def test_a_restore_tells_criu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    replaced: dict[str, bytes],
) -> None:
    """In the configuration file that the runtime hands to CRIU, also where that reads a view of links."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with Scene(tmp_path, monkeypatch, capfd) as scene:
        scene.image.mkdir()
        draft, record = Draft(str(scene.image)), replace(a_manifest(), processes=(), gpus=(), nodes=())
        draft.begin()
        draft.prepare(record)
        draft.finish(record)
        (scene.image / "inventory.img").write_bytes(INVENTORY)
        written(scene.image, OWN)
        monkeypatch.setattr(restore, "find_driver", lambda: None)
        monkeypatch.setattr(restore_plan, "view", lambda images, *_, **__: view(images, replaced))
        assert scene.restore("--detach").code == 0
        assert f"external mnt[{OWN}]:{DUMPED}\n" in scene.runtime.criu_config()


@pytest.mark.parametrize(
    "key",
    [
        f"/{'a' * 45}/.empty-directory",
        f"/{'b' * 150}/.empty-directory",
        "/srv/a+b/.empty-directory",
        "/srv/träge~@{}/.empty-directory",
    ],
)
def test_names(tmp_path: Path, key: str) -> None:
    """Of any length, and with whatever CRIU's configuration takes as one word."""
    assert [mount.key for mount in masked_paths.mounts(str(written(tmp_path, key)), "crun", ROOT, {})] == [
        key
    ]


@pytest.mark.parametrize(
    ("kind", "root", "environ", "key"),
    [
        ("crun", None, {}, DUMPED),
        ("crun", ROOT, {"XDG_RUNTIME_DIR": "/run/user/0"}, OWN),
        ("crun", None, {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/user/0/crun/.empty-directory"),
        ("runc", ROOT, {}, DUMPED),
        ("crun", ROOT, {}, "/run/crun/.empty-directory-of-another"),
        ("crun", ROOT, {}, "/run/a b]:/ #/.empty-directory"),
        ("crun", ROOT, {}, "/run/\n/.empty-directory"),
        ("crun", ROOT, {}, "/run/\x85\x1b/.empty-directory"),
        ("crun", ROOT, {}, "/run/a]b/.empty-directory"),
        ("crun", ROOT, {}, "/run/a#b/.empty-directory"),
    ],
)
def test_nothing_to_be_told(
    tmp_path: Path, kind: str, root: str | None, environ: dict[str, str], key: str
) -> None:
    """The same name, another runtime, and names that no crun gives."""
    assert masked_paths.mounts(str(written(tmp_path, key)), kind, root, environ) == ()


@pytest.mark.parametrize("data", [b"", b"\x19\x43\x56\x54\x28\x39\x56\x55\xff\xff\xff\x7f", b"x" * 40])
def test_damaged(tmp_path: Path, data: bytes) -> None:
    """One that is no image of mounts is named."""
    (tmp_path / "mountpoints-12.img").write_bytes(data)
    with pytest.raises(
        ImageError, match=r"mountpoints-12\.img (is cut short|has a message|does not start like)"
    ):
        masked_paths.mounts(str(tmp_path), "crun", ROOT, {})


def test_not_readable(tmp_path: Path) -> None:
    """An image that cannot be read is named."""
    os.mkdir(tmp_path / "mountpoints-12.img")
    with pytest.raises(ImageError, match=r"mountpoints-12\.img cannot be read"):
        masked_paths.mounts(str(tmp_path), "crun", ROOT, {})
