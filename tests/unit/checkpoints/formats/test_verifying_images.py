"""checkpoints/formats/criu_images.py: what a restore refuses of CRIU's images, told of an archive."""

from __future__ import annotations

import io
import tarfile

import pytest
from criu_images import INVENTORY

from gpusnap.checkpoints.formats.criu_images import Images, Links
from gpusnap.oci.tar.archive import Entry, entries
from gpusnap.runtime_shim.base.errors import ImageError


def one(name: str, kind: bytes, target: str = "") -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return Entry(name, info, None)


@pytest.mark.parametrize("target", ["../../other/earlier", "/earlier", "..", "deeper/than/one"])
def test_an_earlier_dump_elsewhere(target: str) -> None:
    """CRIU would give a container the memory that it finds there, which may be another one's."""
    with pytest.raises(ImageError, match="does not point to a directory next to it"):
        Links("a.tar").check(one("checkpoint/parent", tarfile.SYMTYPE, target))


def test_an_earlier_dump() -> None:
    """The link that CRIU makes is none to be refused."""
    entry = one("checkpoint/parent", tarfile.SYMTYPE, "../pre-checkpoint")
    Links("a.tar").check(entry)
    images = Images("a.tar")
    images.add(entry)
    assert "inventory.img" in images.fault(None)


@pytest.mark.parametrize("name", ["parent", "parent/pages-1.img"])
def test_an_earlier_dump_within(name: str) -> None:
    """A directory in the place of the link, whether it has an entry of its own or not."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("checkpoint/inventory.img")
        info.size = len(INVENTORY)
        tar.addfile(info, io.BytesIO(INVENTORY))
        info = tarfile.TarInfo(f"checkpoint/{name}")
        info.type = tarfile.DIRTYPE if name == "parent" else tarfile.REGTYPE
        tar.addfile(info)
    file.seek(0)
    images = Images("a.tar")
    for entry in entries(file, where="a.tar"):
        images.add(entry)
    assert "parent in a.tar is a directory or a file, not a link" in images.fault(None)


@pytest.mark.parametrize(
    "entry",
    [
        one("config.dump", tarfile.SYMTYPE, "/etc/passwd"),
        one("checkpoint/parent", tarfile.SYMTYPE, "../../other/earlier"),
        one("checkpoint/core-1.img", tarfile.SYMTYPE, "core-2.img"),
    ],
    ids=lambda entry: str(entry.name),
)
def test_verify_says_what_a_restore_refuses(entry: Entry) -> None:
    """Of links in the place of files."""
    with pytest.raises(ImageError) as refused:
        Links("a.tar").check(entry)
    images = Images("a.tar")
    images.add(entry)
    assert images.fault(None) == str(refused.value)
