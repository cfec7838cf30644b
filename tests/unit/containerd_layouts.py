"""Checkpoints of containerd's as `ctr images export` writes them, and a ctr that has them."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from archives import record, regions
from oci_regions import text

from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar import headers as tar
from gpusnap.runtime_shim.records import manifest_json

__all__ = ["BASE", "IMAGE", "FakeCtr", "Made", "a_checkpoint", "files_of", "packed"]

IMAGE = "localhost/w:cp"
BASE = "localhost/base:latest"
_TYPES = "application/vnd.containerd.container."
_HERE = {"architecture": "amd64", "os": "linux"}
_SPEC = {"linux": {"cgroupsPath": "/default/serving"}}


def packed(files: Mapping[str, bytes | tarfile.TarInfo]) -> bytes:
    """A tar of these, in order; a TarInfo is an entry without content."""
    found = []
    for name, content in files.items():
        info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
        info.mode, info.mtime = 0o600, 1_700_000_000
        data = b"" if isinstance(content, tarfile.TarInfo) else content
        info.size = len(data)
        found += list(tar.pieces(info, io.BytesIO(data)))
    return b"".join(found) + tar.END


@dataclass
class Made:
    """An image: its blobs by digest, and its index."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    index: dict[str, object] = field(default_factory=dict)
    name: str = IMAGE

    def add(self, data: bytes, media_type: str, **more: object) -> dict[str, object]:
        """A blob; its descriptor."""
        digest = digest_of(data)
        self.blobs[digest] = data
        return {"mediaType": media_type, "digest": digest, "size": len(data), **more}

    @property
    def document(self) -> bytes:
        return json.dumps(self.index).encode()

    def member(self, kind: str) -> dict[str, object]:
        """The descriptor of a kind in the index."""
        members = self.index["manifests"]
        assert isinstance(members, list)
        [found] = [each for each in members if kind in each["mediaType"]]
        assert isinstance(found, dict)
        return found

    def layout(self, *, without: str = "") -> dict[str, bytes]:
        """The files of the layout that ctr exports, but for a blob."""
        notes = {"io.containerd.image.name": self.name, "org.opencontainers.image.ref.name": "cp"}
        index = "application/vnd.oci.image.index.v1+json"
        top = {
            "mediaType": index,
            "digest": digest_of(self.document),
            "size": len(self.document),
            "annotations": notes,
        }
        every = {**self.blobs, digest_of(self.document): self.document}
        every.pop(without, None)
        return {
            **{f"blobs/sha256/{digest[7:]}": data for digest, data in sorted(every.items())},
            "index.json": json.dumps({"schemaVersion": 2, "manifests": [top]}).encode(),
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        }

    def written(self, path: Path, *, without: str = "") -> str:
        """The archive."""
        path.write_bytes(packed(self.layout(without=without)))
        return str(path)


def a_checkpoint(
    folder: Path,
    *,
    gpu: bool = True,
    pages: str = "chunks",
    base: bool = True,
    images: Mapping[str, bytes | tarfile.TarInfo] | None = None,
) -> Made:
    """What `ctr container checkpoint --task --rw [--image]` makes; `images`: more of CRIU's, by name.

    Chunks are in the image, or with pages="store" in the layout `folder`/source alone.
    """
    files: dict[str, bytes | tarfile.TarInfo] = {"core-1.img": b"core", "inventory.img": b"inventory"}
    if gpu:
        source = Layout(folder / "source").create()
        document = record(regions(source), pages=pages)
        blobs = sorted(Path(source.path, "blobs", "sha256").iterdir()) if pages == "chunks" else []
        files |= {f"gpusnap/blobs/sha256/{each.name}": each.read_bytes() for each in blobs}
        files["gpusnap/manifest.json"] = manifest_json.encode(document)
    files["pages-1.img"] = text(200_000, 3)
    files |= images or {}
    made = Made()
    members = []
    if base:
        manifest_type = "application/vnd.oci.image.manifest.v1+json"
        layer = "application/vnd.oci.image.layer.v1.tar+gzip"
        config = made.add(b'{"os":"linux"}', "application/vnd.oci.image.config.v1+json")
        layers = [made.add(text(2 << 20, 7), layer)]
        content = {"schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": layers}
        members.append(made.add(json.dumps(content).encode(), manifest_type))
    spec = json.dumps(_SPEC).encode()
    proto = b"\x0a\x04spec\x12" + bytes([len(spec)]) + spec
    members += [
        made.add(b"rw" * 51, "application/vnd.oci.image.layer.v1.tar+gzip", platform=_HERE),
        made.add(packed(files), f"{_TYPES}criu.checkpoint.criu.tar", platform=_HERE),
        made.add(proto, f"{_TYPES}checkpoint.config.v1+proto", platform=_HERE),
        made.add(b"options", f"{_TYPES}checkpoint.options.v1+proto", platform=_HERE),
    ]
    notes = {
        "io.containerd.checkpoint.runtime": "io.containerd.runc.v2",
        "io.containerd.checkpoint.snapshotter": "overlayfs",
        "org.opencontainers.image.ref.name": BASE,
    }
    made.index = {"schemaVersion": 2, "manifests": members, "annotations": notes}
    return made


def files_of(data: bytes) -> dict[str, bytes]:
    """The files of a tar by name, as tarfile finds them."""
    with tarfile.open(fileobj=io.BytesIO(data)) as found:
        contents = ((each.name, found.extractfile(each)) for each in found)
        return {name: content.read() for name, content in contents if content is not None}


_SCRIPT = """\
#!/bin/sh
F={folder}
echo "$*" >>$F/calls
[ ! -e $F/error ] || {{ echo "ctr: $(cat $F/error)" >&2; exit 1; }}
shift 2
case "$1 $2" in
"images ls") echo "REF TYPE DIGEST SIZE PLATFORMS LABELS"; cat $F/images;;
"content get") cat $F/blobs/$3 || {{ echo "ctr: content digest $3: not found" >&2; exit 1; }};;
"content ls") ls $F/blobs;;
"images import")
    [ ! -e $F/refuses ] || {{ head -c 1000 >/dev/null; echo "ctr: no room" >&2; exit 1; }}
    cat >$F/imported.new; mv $F/imported.new $F/imported;;
esac
"""


class FakeCtr:
    """`ctr` in PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "blobs").mkdir(parents=True)
        self.folder = folder
        (folder / "images").touch()
        self.program = folder / "ctr"
        self.program.write_text(_SCRIPT.format(folder=folder))
        self.program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.delenv("CONTAINERD_NAMESPACE", raising=False)

    def has(self, made: Made) -> None:
        """That checkpoint, and its blobs."""
        for digest, data in {**made.blobs, digest_of(made.document): made.document}.items():
            (self.folder / "blobs" / digest).write_bytes(data)
        self.lists(made.name, digest_of(made.document), "application/vnd.oci.image.index.v1+json")

    def lists(self, name: str, digest: str, media_type: str) -> None:
        """An image of that name."""
        with (self.folder / "images").open("a") as file:
            file.write(f"{name} {media_type} {digest} 1.4 KiB linux/amd64 -\n")

    def fails(self, text: str) -> None:
        (self.folder / "error").write_text(text)

    def refuses(self) -> None:
        """An import ends in the middle."""
        (self.folder / "refuses").touch()

    @property
    def imported(self) -> Path:
        return self.folder / "imported"

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()
