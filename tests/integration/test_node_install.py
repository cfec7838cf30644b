"""deploy/kubernetes/node.sh: gpusnap on a node whose root is mounted, and gone again."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import Done, good, run

SRC = Path(__file__).resolve().parents[2]
NODE_SH = SRC / "deploy" / "kubernetes" / "node.sh"
TREE_SH = SRC / "deploy" / "kubernetes" / "tree.sh"
CONTAINERD = Path("etc/containerd")
# Where an installation may leave something.
PLACES = ("etc", "opt", "usr/local", "usr/bin")


@dataclass(frozen=True)
class Node:
    """This host's root, mounted once more, and the image's tree."""

    root: Path
    image: Path
    log: Path

    def sh(self, *words: str) -> Done:
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOST": str(self.root),
            "IMAGE": str(self.image),
        }
        return run("sh", NODE_SH, *words, env=environment)

    def restarts(self) -> int:
        return self.log.read_text().count("restart containerd") if self.log.exists() else 0

    def files(self) -> set[str]:
        """All that is in the places where something may be left."""
        found = set()
        for place in PLACES:
            for folder, folders, files in os.walk(self.root / place):
                found |= {
                    os.path.relpath(os.path.join(folder, name), self.root) for name in [*folders, *files]
                }
        return found


def _image(folder: Path) -> Path:
    """As tree.sh makes it, of what this host has: its programs are taken from the script."""
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = folder / "lib" / python
    shutil.copytree(
        sysconfig.get_path("purelib"), library, ignore=shutil.ignore_patterns("__pycache__", "pip")
    )
    shutil.copytree(SRC / "gpusnap", library / "gpusnap", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "bin").mkdir()
    functions = TREE_SH.read_text().partition("program() {")[2].partition("# By its content")[0]
    good(run("sh", "-euc", f"tree={folder}\nprogram() {{{functions}"))
    (folder / "version").write_text("one\n")
    return folder


@pytest.fixture
def node(host: None, tmp_path: Path) -> Iterator[Node]:
    """A node with containerd, of whose configuration there is nothing yet, and without a /opt of its own."""
    image = _image(tmp_path / "image")
    root = tmp_path / "host"
    root.mkdir()
    good(run("mount", "--rbind", "/", root))
    good(run("mount", "--make-rslave", root))
    for place in ("opt", "usr/local", *([str(CONTAINERD)] if (root / CONTAINERD).exists() else [])):
        good(run("mount", "-t", "tmpfs", "-o", "mode=0755", "none", root / place))
    log = root / "opt" / "systemctl.log"
    program = root / "usr/local/bin/systemctl"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n[ "$SYSTEMD_IGNORE_CHROOT" = 1 ] && echo "$@" >> /opt/systemctl.log\n')
    program.chmod(0o755)
    log.touch()
    made = Node(root, image, log)
    yield made
    made.sh("uninstall")
    good(run("umount", "--lazy", root))


def test_there_and_gone(node: Node) -> None:
    """The handler and the commands; containerd restarts when it has to; nothing is left after."""
    before = node.files()
    first = node.sh("install", "--containerd")
    good(first)
    assert node.restarts() == 1
    assert os.readlink(node.root / "opt/gpusnap") == "gpusnap-one"
    assert "gpusnap-runtime" in good(run("chroot", node.root, "/opt/gpusnap/bin/gpusnap", "--help"))
    assert "crun" in good(run("chroot", node.root, "/opt/gpusnap/bin/gpusnap-runtime", "--version"))
    written = [path for path in (node.root / CONTAINERD).rglob("*.toml") if "gpusnap" in path.read_text()]
    assert written

    good(node.sh("install", "--containerd"))
    assert node.restarts() == 1

    (node.image / "version").write_text("two\n")
    good(node.sh("install", "--containerd"))
    (node.image / "version").write_text("three\n")
    good(node.sh("install", "--containerd"))
    versions = sorted(path.name for path in (node.root / "opt").glob("gpusnap-*"))
    assert versions == ["gpusnap-three", "gpusnap-two"]
    # What the engine is told has no version in it.
    assert node.restarts() == 1

    good(node.sh("uninstall"))
    assert node.restarts() == 2
    assert node.files() - before == set()
    assert "nothing to take away" in node.sh("uninstall").err


def test_a_configuration_of_the_node_s_own(node: Node) -> None:
    """It is not touched; what is missing in it is said, and once it is there, the next run is content."""
    config = node.root / CONTAINERD / "config.toml"
    config.parent.mkdir(exist_ok=True)
    own = 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "registry.example/pause:3"\n'
    config.write_text(own)
    failed = node.sh("install", "--containerd")
    assert failed.code == 1
    assert "has no handler for gpusnap-runtime" in failed.err
    assert config.read_text() == own
    config.write_text(own + (node.root / "etc/gpusnap/containerd.toml").read_text())
    good(node.sh("install", "--containerd"))
    assert node.restarts() == 1
    config.unlink()


def test_interrupted(node: Node) -> None:
    """What a run that was killed left half done, the next one completes."""
    half = node.root / "opt/gpusnap-one.new"
    half.mkdir()
    (half / "rest").touch()
    (node.root / "opt/gpusnap.new").symlink_to("gpusnap-one")
    good(node.sh("install", "--containerd"))
    assert not half.exists()
    assert (node.root / "opt/gpusnap/bin/gpusnap").exists()


@pytest.mark.parametrize(
    ("hidden", "says"),
    [("python3", "no /usr/bin/python3 of version 3.11"), ("criu", "this node has no criu")],
)
def test_what_a_node_lacks(node: Node, hidden: str, says: str) -> None:
    """It is said, before anything is written."""
    before = node.files()
    path = next(
        node.root / folder / hidden
        for folder in ("usr/bin", "usr/sbin")
        if (node.root / folder / hidden).exists()
    )
    good(run("mount", "--bind", "/dev/null", path.resolve()))
    failed = node.sh("install", "--containerd")
    good(run("umount", path.resolve()))
    assert failed.code == 1
    assert says in failed.err
    assert node.files() == before


def test_an_image_for_other_nodes(node: Node) -> None:
    """Without the packages for the node's Python it says so."""
    shutil.rmtree(node.image / "lib")
    failed = node.sh("install")
    assert failed.code == 1
    assert "this image has nothing for the node's python3." in failed.err


def test_usage() -> None:
    said = run("sh", NODE_SH)
    assert said.code == 2
    assert "node.sh install" in said.err
    assert "set -eu" not in said.err
