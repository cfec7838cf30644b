"""An archive that somebody has changed: it is refused by name, and brings nothing into a container."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support import Container, good, podman, run, sentence

Edit = Callable[[Path], None]


@pytest.fixture
def unpacked(crun: None, tmp_path: Path) -> Path:
    """An archive of a container with GPU 0, as a folder."""
    archive = tmp_path / "whole.tar"
    container = Container.start("w", "--mib", "4", gpus=("0",))
    good(container.checkpoint(archive, "--compress", "none"))
    container.remove()
    folder = tmp_path / "unpacked"
    folder.mkdir()
    good(run("tar", "-C", folder, "-xpf", archive))
    return folder


def imported(folder: Path) -> tuple[str, Path]:
    """The sentence of the import's refusal; no container runs then."""
    archive = folder.parent / "changed.tar"
    good(run("tar", "-C", folder, "-cf", archive, "."))
    text = sentence(podman("container", "restore", "--import", archive))
    assert good(podman("ps", "--quiet")) == ""
    assert run("pgrep", "-x", "gpuwork").out == ""
    return text, archive


def manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "checkpoint/gpusnap/manifest.json"
    document = json.loads(path.read_text())
    change(document)
    write_manifest(folder, json.dumps(document))


def write_manifest(folder: Path, text: str) -> None:
    """With its digest in the layout's index, as who means harm would do."""
    path = folder / "checkpoint/gpusnap/manifest.json"
    path.write_text(text)
    index = json.loads(path.with_name("index.json").read_text())
    index["annotations"]["io.gpusnap.manifest.digest"] = f"sha256:{sha256(text.encode()).hexdigest()}"
    path.with_name("index.json").write_text(json.dumps(index))


def dev(folder: Path) -> Path:
    name: str = json.loads((folder / "checkpoint/gpusnap/manifest.json").read_text())["dev"]
    return folder / "checkpoint" / name


def with_entry(folder: Path, change: Callable[[tarfile.TarInfo], Any], add: tarfile.TarInfo | None) -> None:
    """Write the image of /dev anew, each entry changed."""
    path = dev(folder)
    out = io.BytesIO()
    with (
        tarfile.open(path) as old,
        tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as new,
    ):
        for entry in old:
            content = old.extractfile(entry) if entry.isreg() else None
            change(entry)
            new.addfile(entry, content)
        if add is not None:
            new.addfile(add)
    path.write_bytes(gzip.compress(out.getvalue()))


def node(name: str, kind: bytes, major: int, minor: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(f"./{name}")
    entry.type, entry.devmajor, entry.devminor, entry.mode = kind, major, minor, 0o666
    return entry


def link(name: str, target: str) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(f"./{name}")
    entry.type, entry.linkname = tarfile.LNKTYPE, target
    return entry


def test_unchanged(unpacked: Path) -> None:
    """Packed again as it was, it is restored: the refusals below are of the changes."""
    archive = unpacked.parent / "again.tar"
    good(run("tar", "-C", unpacked, "-cf", archive, "."))
    Container.restore("w", archive).goes_on()


@pytest.mark.parametrize(
    ("added", "said"),
    [
        (node("disk", tarfile.BLKTYPE, 8, 0), "disk"),
        (node("kmsg", tarfile.CHRTYPE, 1, 11), "kmsg"),
        (node("nvidia1", tarfile.CHRTYPE, 195, 1), "nvidia1"),
        (link("other", "./nvidia0"), "other"),
        (node("../../escape", tarfile.CHRTYPE, 195, 0), "escape"),
    ],
    ids=["a disk", "another device", "a GPU outside the manifest", "a hard link", "a path outside"],
)
def test_a_device_in_the_image_of_dev(unpacked: Path, added: tarfile.TarInfo, said: str) -> None:
    """What neither config.json nor the manifest gives the container is refused by name."""
    with_entry(unpacked, lambda entry: None, added)
    assert said in imported(unpacked)[0]


def test_other_numbers_under_a_gpus_name(unpacked: Path) -> None:
    """The node that is to become the GPU's must be the one of the manifest."""

    def renumber(entry: tarfile.TarInfo) -> None:
        if entry.name == "./nvidia0":
            entry.devmajor, entry.devminor = 1, 1  # /dev/mem

    with_entry(unpacked, renumber, None)
    assert "nvidia0" in imported(unpacked)[0]


def test_the_manifest_names_other_things(unpacked: Path) -> None:
    """A node that is none of a GPU's, another image for /dev, a path of this host as a mount."""
    whole = (unpacked / "checkpoint/gpusnap/manifest.json").read_text()
    changes: list[tuple[Callable[[dict[str, Any]], object], str]] = [
        (lambda m: m["nodes"].append({"path": "/dev/sda", "major": 8, "minor": 0, "gpu": ""}), "/dev/sda"),
        (lambda m: m.update(dev="../config.dump"), "config.dump"),
        (lambda m: m["nodes"][0].update(path="/dev/nvidia0/../sda"), "sda"),
        (lambda m: m["mounts"].append({"key": "gpusnap-9", "destination": "/x", "source": "/etc"}), "/x"),
        (lambda m: m["gpus"].extend([m["gpus"][0]] * 300), "gpus"),
    ]
    for change, said in changes:
        write_manifest(unpacked, whole)
        manifest(unpacked, lambda m, change=change: void(change(m)))  # type: ignore[misc]
        assert said in imported(unpacked)[0]
        podman("rm", "--force", "--all", "--time", "0")


def void(_: object) -> None:
    """Drop a value."""


def test_a_rule_for_another_gpu(unpacked: Path) -> None:
    """config.json of the archive allows GPU 1 and lists its node: neither arrives in the container."""
    path = unpacked / "spec.dump"
    spec = json.loads(path.read_text())
    extra = {"path": "/dev/nvidia1", "type": "c", "major": 195, "minor": 1, "fileMode": 438}
    rule = {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"}
    spec["linux"].setdefault("devices", []).append(extra)
    spec["linux"]["resources"].setdefault("devices", []).append(rule)
    path.write_text(json.dumps(spec))
    archive = unpacked.parent / "rules.tar"
    good(run("tar", "-C", unpacked, "-cf", archive, "."))
    again = Container.restore("w", archive)
    again.goes_on()
    assert "nvidia1" not in good(podman("exec", "w", "ls", "/dev"))
    root = f"/proc/{again.pid}/root/tmp/one"
    os.mknod(root, 0o20666, os.makedev(195, 1))
    assert "Operation not permitted" in podman("exec", "w", "sh", "-c", ": </tmp/one").err
    config = json.loads((again.image_path.parent / "config.json").read_text())
    assert extra not in config["linux"]["devices"]


def test_a_mount_of_another_gpu(unpacked: Path) -> None:
    """config.json of the archive mounts GPU 1's node."""
    path = unpacked / "spec.dump"
    spec = json.loads(path.read_text())
    mount = {"destination": "/gpu", "source": "/dev/nvidia1", "type": "bind", "options": ["bind"]}
    spec["mounts"].append(mount)
    path.write_text(json.dumps(spec))
    assert "/dev/nvidia1" in imported(unpacked)[0]


def test_an_image_that_never_ends(unpacked: Path) -> None:
    """A /dev that unpacks to gigabytes is refused without being held in memory."""
    path = dev(unpacked)
    with open(path, "wb") as out:
        subprocess.run("head -c 2G /dev/zero | gzip -1", shell=True, stdout=out, check=True)
    assert "the image of the container's /dev" in imported(unpacked)[0]
