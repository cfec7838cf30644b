"""Push and pull with Debian's docker-registry, and a network that breaks; other tools read what is there."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty_proxy import FaultyProxy
from registryhost import PASSWORD, USER, Registry, running
from support import good, run

from gpusnap.oci.base.errors import BlobError, NotInRegistry, Unauthorized
from gpusnap.oci.layout.documents import Descriptor, Manifest, empty_descriptor
from gpusnap.oci.layout.graph import walk
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.layout.reference import Reference
from gpusnap.oci.registry import upload
from gpusnap.oci.registry.client import Client
from gpusnap.oci.registry.copy import TransferTotals, pull, push
from gpusnap.oci.registry.credentials import Credentials, find
from gpusnap.oci.registry.repository import Repository

TYPE = "application/vnd.gpusnap.checkpoint.v1+json"
CHUNK = "application/vnd.gpusnap.chunk.v1"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with running() as made:
        yield made


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout").create()


@pytest.fixture
def other(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "other").create()


def artifact(layout: Layout, count: int = 40, *, large: int = 3 << 20) -> Descriptor:
    """A manifest of many blobs of up to 256 KiB and a large one."""
    sizes = [random.Random(at).randrange(1 << 18) for at in range(count)]
    data = [random.Random(f"data {at}").randbytes(size) for at, size in enumerate([*sizes, large])]
    layers = tuple(layout.add_blob(each, media_type=CHUNK) for each in data)
    config = layout.add_blob(b"{}", media_type=empty_descriptor().media_type)
    return layout.add_manifest(Manifest(config, layers, TYPE))


def everything(layout: Layout, root: Descriptor) -> dict[str, int]:
    """Digests and sizes of all that belongs to it, each checked."""
    found = {one.digest: one for one, _ in walk(root, layout.read_blob)}
    for one in found.values():
        layout.check_blob(one)
    return {digest: one.size for digest, one in found.items()}


def repository(host: str, name: str = "team/app", credentials: Credentials | None = None) -> Repository:
    # What is broken here works again at once: nothing is won by waiting.
    client = Client(host, plain_http=True, credentials=credentials, wait=lambda seconds: None)
    return Repository(Reference(host, name), client)


def test_there_and_back(registry: Registry, layout: Layout, other: Layout) -> None:
    """Same bytes, by tag and by digest; a second push and a second pull move nothing."""
    root = artifact(layout)
    there = everything(layout, root)
    with repository(registry.host) as mine:
        assert push(root, layout, mine, tag="v1") == TransferTotals(len(there), sum(there.values()))
        assert push(root, layout, mine, tag="v1") == TransferTotals(0, 0, len(there), sum(there.values()))
        for name in ("v1", root.digest):
            found, moved = pull(mine, name, other)
            assert everything(other, found) == there
        assert moved == TransferTotals(0, 0, len(there), sum(there.values()))
        with pytest.raises(NotInRegistry, match=r"team/app:v2 cannot be read: not found"):
            pull(mine, "v2", other)


@pytest.mark.parametrize("chunk", [32 << 20, 1 << 20], ids=["at once", "in chunks"])
def test_a_network_that_breaks(
    registry: Registry, layout: Layout, other: Layout, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Every tenth connection is dropped, and every seventh request answered with 500: same bytes."""
    monkeypatch.setattr(upload, "MONOLITHIC", chunk)
    root = artifact(layout)
    with FaultyProxy(registry.host, drop=10, fail=7) as proxy, repository(proxy.host) as mine:
        push(root, layout, mine, tag="v1")
        pull(mine, "v1", other)
        assert proxy.dropped >= 15
        assert proxy.failed >= 20
    assert everything(other, root) == everything(layout, root)


def test_mounted(registry: Registry, layout: Layout) -> None:
    """What another repository of the registry has is not sent."""
    root = artifact(layout, 8)
    there = everything(layout, root)
    with repository(registry.host, "other/app") as others, repository(registry.host) as mine:
        push(root, layout, others, tag="v1")
        moved = push(root, layout, mine, tag="v1", mount_from=["nothing/here", "other/app"])
    assert (moved.blobs, moved.mounted) == (1, len(there) - 1)


def test_passwords(layout: Layout, other: Layout, tmp_path: Path) -> None:
    """The password of Podman's file lets in; without one, and with a wrong one, the message says so."""
    root = artifact(layout, 8)
    with running(passwords=True) as registry:
        good(
            run(
                *("skopeo", "login", "--tls-verify=false", "--authfile", tmp_path / "auth.json"),
                *("--username", USER, "--password", PASSWORD, registry.host),
            )
        )
        someone = find(registry.host, "team/app", {"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")})
        assert someone is not None
        with repository(registry.host, credentials=someone) as mine:
            push(root, layout, mine, tag="v1")
            pull(mine, "v1", other)
        wrong = base64.b64encode(f"{USER}:wrong".encode()).decode()
        (tmp_path / "wrong.json").write_text(json.dumps({"auths": {registry.host: {"auth": wrong}}}))
        stranger = find(registry.host, "team/app", {"REGISTRY_AUTH_FILE": str(tmp_path / "wrong.json")})
        with (
            repository(registry.host, credentials=stranger) as mine,
            pytest.raises(
                Unauthorized, match=r"does not accept the credentials of .*wrong.json: log in again"
            ),
        ):
            push(root, layout, mine, tag="v2")
        with (
            repository(registry.host) as mine,
            pytest.raises(Unauthorized, match=rf"log in first \(podman login {registry.host}\)"),
        ):
            pull(mine, "v1", other)


def test_other_tools_read_it(registry: Registry, layout: Layout, tmp_path: Path) -> None:
    """skopeo copies it, oras fetches the manifest: both see the very bytes."""
    root = artifact(layout, 8)
    with repository(registry.host) as mine:
        push(root, layout, mine, tag="v1")
    name = f"{registry.host}/team/app:v1"
    raw = good(run("skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"))
    assert raw.encode() == layout.read_blob(root)
    fetched = good(run("oras", "manifest", "fetch", "--plain-http", name))
    assert json.loads(fetched) == json.loads(raw)
    assert json.loads(raw)["artifactType"] == TYPE
    described = good(run("oras", "manifest", "fetch", "--plain-http", "--descriptor", name))
    assert json.loads(described)["digest"] == root.digest
    copy = tmp_path / "copy"
    good(run("skopeo", "copy", "--src-tls-verify=false", f"docker://{name}", f"oci:{copy}:v1"))
    assert everything(Layout(copy), root) == everything(layout, root)


def test_what_other_tools_push(registry: Registry, other: Layout, tmp_path: Path) -> None:
    """What oras pushes can be pulled."""
    (tmp_path / "notes.txt").write_text("words\n" * 1000)
    good(
        run(
            *("oras", "push", "--plain-http", "--artifact-type", TYPE, "--disable-path-validation"),
            *(f"{registry.host}/team/notes:v1", str(tmp_path / "notes.txt")),
        )
    )
    with repository(registry.host, "team/notes") as mine:
        root, _ = pull(mine, "v1", other)
    (layer,) = other.read_manifest(root).layers
    assert other.read_blob(layer) == b"words\n" * 1000


def test_a_flipped_bit_in_the_registry(registry: Registry, layout: Layout, other: Layout) -> None:
    """A blob that rots in the registry is named and not accepted."""
    root = artifact(layout, 8)
    with repository(registry.host) as mine:
        push(root, layout, mine, tag="v1")
        rotten = layout.read_manifest(root).layers[3]
        name = rotten.digest.removeprefix("sha256:")
        (path,) = registry.data.glob(f"docker/registry/v2/blobs/sha256/*/{name}/data")
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)
        with pytest.raises(
            BlobError, match=f"the blob {rotten.digest} was received with content that does not match"
        ):
            pull(mine, "v1", other)
    assert not other.has_blob(rotten.digest, rotten.size)
