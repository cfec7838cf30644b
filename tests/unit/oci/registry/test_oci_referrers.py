"""Signatures and SBOMs of a checkpoint: they come along out of a registry, and into another."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_registry import FakeRegistry, Say
from kept_checkpoints import an_archive, keep

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import locator
from gpusnap.checkpoints.list import listing
from gpusnap.checkpoints.locator import InFile, InStore
from gpusnap.cli import main as cli
from gpusnap.oci.base.errors import Unreachable
from gpusnap.oci.layout.documents import (
    INDEX,
    Descriptor,
    Index,
    Manifest,
    empty_descriptor,
    encode_document,
)
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.registry import referrers
from gpusnap.oci.store.referrers import list_referring
from gpusnap.oci.store.store import Store
from gpusnap.operations import push_pull

QUIET = Progress(shown=False)


@pytest.fixture(params=["api", "tag"])
def registry(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        found.lists_referrers = request.param == "api"
        found.page = 1
        yield found
        assert found.wrong == []


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


def referring(layout: Layout, to: Descriptor, text: bytes, kind: str = "application/spdx+json") -> Descriptor:
    """A manifest about another one."""
    config = layout.add_blob(b"{}", media_type=empty_descriptor().media_type)
    layer = layout.add_blob(text, media_type=kind)
    return layout.add_manifest(
        Manifest(config, (layer,), kind, Descriptor(to.media_type, to.digest, to.size))
    )


@pytest.fixture
def pushed(registry: FakeRegistry, tmp_path: Path) -> dict[str, Descriptor]:
    """A checkpoint, its SBOM, that one's signature, and its own signature, in a registry by other tools."""
    other = Store(tmp_path / "made")
    keep(other, an_archive(tmp_path), ["w"])
    root = other.find("w").descriptor
    layout = Layout(tmp_path / "more").create()
    sbom = referring(layout, root, b"a bill of materials")
    found = {
        "root": root,
        "sbom": sbom,
        "of the sbom": referring(layout, sbom, b"its signature", "application/sig"),
        "signature": referring(layout, root, b"a signature", "application/sig"),
    }
    with registry.repository() as repository:
        transfer.push(root, other.layout, repository, tag="v1")
        for name in ("sbom", "of the sbom", "signature"):
            transfer.push(found[name], layout, repository)
        if not registry.lists_referrers:
            # As clients such as oras and cosign keep the list (distribution-spec v1.1, Referrers Tag Schema).
            for subject, names in (("root", ("sbom", "signature")), ("sbom", ("of the sbom",))):
                content = encode_document(Index(tuple(found[name] for name in names)).to_json())
                tag = found[subject].digest.replace(":", "-")
                repository.put_manifest(content, INDEX, tag)
    return found


def ref(registry: FakeRegistry, name: str) -> locator.InRegistry:
    return locator.parse_registry(f"http://{registry.host}/{name}")


def known(registry: FakeRegistry, name: str, digest: str) -> set[str]:
    """What a registry says refers to a manifest, with either way to ask."""
    if not registry.lists_referrers:
        _, content = registry.manifests.get((name, digest.replace(":", "-")), ("", b'{"manifests": []}'))
        return {each["digest"] for each in json.loads(content)["manifests"]}
    with registry.repository(name) as repository:
        return {each.digest for each in repository.read_referrers(digest) or ()}


def test_there_and_back(registry: FakeRegistry, pushed: dict[str, Descriptor], store: Store) -> None:
    """Out of one repository and into another: all of them, under their digests; twice is once."""
    pulled = push_pull.pull(ref(registry, "team/app:v1"), progress=QUIET)
    assert {each.descriptor.digest for each in store.entries()} == {each.digest for each in pushed.values()}
    assert [each.name for each in store.entries() if each.name] == [pulled.name]
    for _ in range(2):
        push_pull.push(InStore(store, pulled.name), ref(registry, "copy/w:v1"), progress=QUIET)
        root, sbom = pushed["root"].digest, pushed["sbom"].digest
        assert known(registry, "copy/w", root) == {sbom, pushed["signature"].digest}
        assert known(registry, "copy/w", sbom) == {pushed["of the sbom"].digest}
    assert registry.has(Manifest.from_json(json.loads(store.read(pushed["sbom"]))).layers[0].digest, "copy/w")
    # A second pull brings none of it again.
    again = push_pull.pull(ref(registry, "team/app:v1"), progress=QUIET)
    assert again.moved.bytes == 0


def test_in_the_store(registry: FakeRegistry, pushed: dict[str, Descriptor], store: Store) -> None:
    """gc keeps them with the checkpoint, which is still the one that the store has; rm takes them along."""
    pulled = push_pull.pull(ref(registry, "team/app:v1"), progress=QUIET)
    assert store.collect().blobs == 0
    rows = {row.digest: row for row in listing(store).rows}
    assert rows[pushed["sbom"].digest].kind == "referrer"
    assert rows[pushed["sbom"].digest].subject == pushed["root"].digest
    assert InStore(store, "").entry().descriptor.digest == pushed["root"].digest
    store.tag(pulled.name, "second")
    done = CliRunner().invoke(cli.command, ["rm", pulled.name], catch_exceptions=False)
    assert done.exit_code == 0
    assert len(store.entries()) == 4
    CliRunner().invoke(cli.command, ["rm", "second"], catch_exceptions=False)
    assert store.entries() == ()


def test_nothing_of_it_in_a_file(
    registry: FakeRegistry, pushed: dict[str, Descriptor], store: Store, tmp_path: Path
) -> None:
    """An archive of Podman's has no place for them: they are not asked for."""
    push_pull.pull(ref(registry, "team/app:v1"), file=str(tmp_path / "out.tar"), progress=QUIET)
    assert not registry.asked("GET", "/referrers/")
    assert push_pull.push(InFile(str(tmp_path / "out.tar")), ref(registry, "again/w:v1"), progress=QUIET)


def test_lies(registry: FakeRegistry, pushed: dict[str, Descriptor], store: Store) -> None:
    """What a list names and refers to something else, or is not there, is left where it is."""
    with registry.repository() as repository:
        layout = Layout(store.create().path)
        wrong = referring(layout, dataclasses.replace(pushed["root"], digest="sha256:" + "0" * 64), b"x")
        transfer.push(wrong, layout, repository)
        gone = dataclasses.replace(wrong, digest="sha256:" + "1" * 64)
    content = encode_document(Index((wrong, gone, pushed["signature"])).to_json())
    registry.manifests["team/app", pushed["root"].digest.replace(":", "-")] = INDEX, content
    registry.lists_referrers = False
    found, _ = referrers.pull(registry.repository(), pushed["root"].digest, store.layout)
    assert [each.digest for each in found] == [pushed["signature"].digest]


def test_no_end_of_lies(registry: FakeRegistry, pushed: dict[str, Descriptor], store: Store) -> None:
    """Each is asked for, so there may not be any number of them."""
    registry.page = 100
    root = pushed["root"]
    gone = [dataclasses.replace(pushed["sbom"], digest=f"sha256:{at:064x}") for at in range(3000)]
    content = encode_document(Index(tuple(gone)).to_json())
    registry.manifests["team/app", root.digest.replace(":", "-")] = INDEX, content
    registry.lists_referrers = False
    assert referrers.pull(registry.repository(), root.digest, store.layout)[0] == ()
    assert len(registry.asked("GET", "/manifests/sha256:")) == referrers._MOST_LISTED


def test_no_end_of_pages(registry: FakeRegistry, pushed: dict[str, Descriptor]) -> None:
    """Large ones are not all kept in memory."""
    root = pushed["root"]
    lists = Index((pushed["sbom"],) * 3000).to_json()
    body = json.dumps(lists).encode()
    path = f"/v2/team/app/referrers/{root.digest}"
    say = Say(200, {"Content-Type": INDEX, "Link": f'<{path}?n=1>; rel="next"', **length(body)}, body)
    registry.rule("GET", "/referrers/", say, times=99)
    assert len(registry.repository().read_referrers(root.digest) or ()) == 6000


def length(body: bytes) -> dict[str, str]:
    return {"Content-Length": str(len(body))}


@pytest.mark.parametrize("status", [400, 403, 404, 405])
def test_registries_without_lists(registry: FakeRegistry, pushed: dict[str, Descriptor], status: int) -> None:
    """Whatever they answer to such a question; one that breaks is asked again."""
    registry.rule("GET", "/referrers/", Say(status), times=9)
    assert registry.repository().read_referrers(pushed["root"].digest) is None
    registry.rules.clear()
    registry.rule("GET", "/referrers/", Say(503), times=99)
    with pytest.raises(Unreachable, match="cannot list the referrers of"):
        registry.repository(attempts=2).read_referrers(pushed["root"].digest)


def test_a_loop(registry: FakeRegistry, tmp_path: Path) -> None:
    """The chain of what refers to what is followed for some steps only."""
    layout = Layout(tmp_path / "chain").create()
    chain = [referring(layout, Descriptor(INDEX, "sha256:" + "2" * 64, 2), b"0")]
    for at in range(8):
        chain.append(referring(layout, chain[-1], b"%d" % at))
    found = list_referring(chain, layout.read_blob, chain[0].digest)
    assert [each.digest for each in found] == [each.digest for each in chain[1:4]]
