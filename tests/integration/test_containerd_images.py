"""Checkpoints of containerd's in a registry, by its ctr, and in containerd again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from containerdhost import BASE, Containerd, Work, containerd
from registryhost import Registry, running
from support import GPUS_CONF, Done, good, run, sentence, until

IMAGE = "localhost/w:cp"
_COUNT = "i=0; while :; do i=$((i+1)); echo $i >/count.new; mv /count.new /count; sleep 0.05; done"


@pytest.fixture(scope="module")
def server(host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with containerd(tmp_path_factory.mktemp("containerd")) as found:
        yield found


@pytest.fixture
def registry(server: Containerd) -> Iterator[Registry]:
    shimhost.write_settings('runtime = "runc"\n')
    with running() as made:
        yield made
    shimhost.write_settings("")


@pytest.fixture(autouse=True)
def _clean(server: Containerd, registry: Registry) -> Iterator[None]:
    """Nothing is left in containerd but the base image, as long as the settings name the runtime."""
    yield
    forget(server)
    server.ctr("image", "import", "/usr/share/gpusnap/base.oci.tar")


def gpusnap(server: Containerd, *words: str | os.PathLike[str]) -> Done:
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "CONTAINERD_ADDRESS": str(server.address)}
    return run("gpusnap", *words, env=environment)


def count(server: Containerd, name: str) -> int:
    """What the counter in a container's own files has come to."""
    said = server.ctr("task", "exec", "--exec-id", os.urandom(4).hex(), name, "cat", "/count", check=False)
    return int(said.stdout or 0)


def forget(server: Containerd) -> None:
    """Have containerd know nothing of any container or image."""
    server.remove_all()
    server.ctr("image", "rm", "--sync", *server.ctr("image", "ls", "-q").stdout.split())
    assert server.ctr("content", "ls", "-q").stdout == ""


def test_without_a_gpu(server: Containerd, registry: Registry, tmp_path: Path) -> None:
    """Straight out of containerd and as an archive it is the same artifact, and either way back runs on."""
    ref = f"http://{registry.host}/team/w:v1"
    server.start("w", "sh", "-c", _COUNT)
    until(lambda: count(server, "w") > 3, "the counter")
    server.ctr("container", "checkpoint", "--task", "--rw", "--image", "w", IMAGE)
    server.remove("w")
    pushed = json.loads(good(gpusnap(server, "push", f"containerd:{IMAGE}", ref, "--json")))
    exported = tmp_path / "cp.tar"
    server.ctr("images", "export", "--local", "--skip-manifest-json", exported, IMAGE)
    again = json.loads(good(gpusnap(server, "push", exported, ref, "--json")))
    assert again["digest"] == pushed["digest"]
    assert again["blobs"] == 0
    assert "containerd" in good(gpusnap(server, "inspect", ref))
    assert "containerd" in sentence(gpusnap(server, "restore", ref))
    assert "Podman cannot restore" in sentence(gpusnap(server, "restore", exported))

    forget(server)
    brought = json.loads(
        good(gpusnap(server, "pull", ref, "--to", "containerd:default/localhost/w:back", "--json"))
    )
    assert (brought["image"], brought["baseImage"]) == ("localhost/w:back", BASE)
    server.ctr("container", "restore", "--rw", "--live", "w2", "localhost/w:back")
    before = until(lambda: count(server, "w2"), "the counter after its restore")
    assert before > 3
    until(lambda: count(server, "w2") > before, "the counter after its restore")

    forget(server)
    good(gpusnap(server, "pull", ref, "-o", tmp_path / "out.tar"))
    server.ctr("images", "import", "--no-unpack", tmp_path / "out.tar")
    [base] = [line.split()[2] for line in server.ctr("image", "ls").stdout.splitlines() if BASE in line]
    server.ctr("snapshots", "unpack", base)
    server.ctr("container", "restore", "--rw", "--live", "w3", f"{registry.host}/team/w:v1")
    until(lambda: count(server, "w3") > 3, "the counter after its restore")


def test_another_base_image(server: Containerd, registry: Registry, tmp_path: Path) -> None:
    """containerd's own image of that name stays, and nothing else comes in."""
    ref = f"http://{registry.host}/team/w:v1"
    server.start("w", "sleep", "1000")
    server.ctr("container", "checkpoint", "--task", "--image", "w", IMAGE)
    good(gpusnap(server, "push", f"containerd:{IMAGE}", ref))
    server.remove("w")
    server.ctr("image", "tag", IMAGE, "localhost/other")
    server.ctr("image", "rm", IMAGE, BASE)
    server.ctr("image", "tag", "localhost/other", BASE)
    before = server.ctr("image", "ls").stdout
    assert f"another image {BASE}" in sentence(gpusnap(server, "pull", ref, "--to", f"containerd:{IMAGE}"))
    assert server.ctr("image", "ls").stdout == before


def test_with_a_gpu(server: Containerd, registry: Registry, tmp_path: Path) -> None:
    """A second checkpoint sends what has changed; restored, every byte is right."""
    ref = f"http://{registry.host}/team/w"
    work = Work.start(server, "w", tmp_path / "out", GPUS_CONF, "--mib", "48", "--touch", "1", minors=[0])
    server.ctr("container", "checkpoint", "--task", "--rw", "--image", "w", IMAGE)
    first = json.loads(good(gpusnap(server, "push", f"containerd:{IMAGE}", f"{ref}:1", "--json")))
    # As long as containerd has the first one, a second one of the same container comes without CRIU's images.
    server.ctr("image", "rm", "--sync", IMAGE)
    server.ctr("container", "checkpoint", "--task", "--rw", "--image", "w", "localhost/w:2")
    second = json.loads(good(gpusnap(server, "push", "containerd:localhost/w:2", f"{ref}:2", "--json")))
    assert second["bytes"] < first["bytes"] / 2
    assert "1 Soft H100" in good(gpusnap(server, "inspect", f"{ref}:2"))
    difference = json.loads(good(gpusnap(server, "diff", f"{ref}:1", f"{ref}:2", "--json")))
    assert difference["chunks"]["same"] > difference["chunks"]["changed"] > 0
    forget(server)
    work.clear_log()
    good(gpusnap(server, "pull", f"{ref}:2", "--to", "containerd:localhost/w:back"))
    server.ctr("container", "restore", "--rw", "--live", "w", "localhost/w:back")
    work.back()


def test_what_is_none(server: Containerd, registry: Registry) -> None:
    """What is not there, or is no checkpoint, is said."""
    assert "no image localhost/gone:v1" in sentence(
        gpusnap(server, "push", "containerd:localhost/gone:v1", f"http://{registry.host}/w")
    )
    assert "not a containerd checkpoint" in sentence(
        gpusnap(server, "push", f"containerd:{BASE}", f"http://{registry.host}/w")
    )
