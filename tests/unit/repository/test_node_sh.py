"""deploy/kubernetes/node.sh on a folder that stands for a node's root, with a chroot that plays a node."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

NODE_SH = Path(__file__).resolve().parents[3] / "deploy/kubernetes/node.sh"
DROP_INS = {
    "containerd": "etc/containerd/conf.d/gpusnap.toml",
    "crio": "etc/crio/crio.conf.d/90-gpusnap.conf",
}
# `gpusnap install` and `uninstall` are a drop-in that is there or not.
CHROOT = """\
#!/bin/sh
host=$1
shift 3
echo "$*" >>{log}
case "$*" in
*sys.version_info*print* | *print*) echo python3.11;;
*pycriu*) [ ! -e {log}.bare ] || exit 1;;
*"gpusnap install --crio"*) [ ! -e {log}.fails ] || exit 1; echo gpusnap-runtime >"$host/{crio}";;
*"gpusnap install"*) [ ! -e {log}.fails ] || exit 1; echo gpusnap-runtime >"$host/{containerd}";;
*"gpusnap uninstall"*) [ ! -e {log}.fails ] || exit 1; rm -f "$host/{containerd}" "$host/{crio}";;
esac
"""


@dataclass(frozen=True)
class Node:
    """Its root, the image's tree, and what was run on it."""

    folder: Path

    @property
    def opt(self) -> Path:
        return self.folder / "host/opt"

    def sh(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(NODE_SH), *words],
            env={
                "PATH": f"{self.folder}:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOST": str(self.folder / "host"),
                "IMAGE": str(self.folder / "image"),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def well(self, *words: str, **environment: str) -> None:
        done = self.sh(*words, **environment)
        assert done.returncode == 0, done.stderr

    def version(self, version: str) -> None:
        (self.folder / "image/version").write_text(f"{version}\n")

    def fails(self, *, on: bool) -> None:
        path = self.folder / "log.fails"
        if on:
            path.touch()
        else:
            path.unlink()

    def restarts(self) -> list[str]:
        """The units, and forget them."""
        log = self.folder / "log"
        found = [line.split()[-1] for line in log.read_text().splitlines() if "systemctl restart" in line]
        log.write_text("")
        return found

    def names(self) -> list[str]:
        return sorted(os.listdir(self.opt)) if self.opt.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    for path in DROP_INS.values():
        (tmp_path / "host" / path).parent.mkdir(parents=True)
    for name in ("bin", "lib/python3.11"):
        (tmp_path / "image" / name).mkdir(parents=True)
    (tmp_path / "image/bin/gpusnap").touch(0o755)
    (tmp_path / "log").touch()
    (tmp_path / "chroot").write_text(CHROOT.format(log=tmp_path / "log", **DROP_INS))
    (tmp_path / "chroot").chmod(0o755)
    made = Node(tmp_path)
    made.version("one")
    return made


def test_folders_of_others(node: Node) -> None:
    """Neither an installation nor an uninstallation touches them, whatever they are called."""
    others = {"gpusnap-data": None, "gpusnap-venv": "3.1\n", "gpusnap-old.new": None}
    for name, version in others.items():
        (node.opt / name).mkdir(parents=True)
        (node.opt / name / "file").touch()
        if version:
            (node.opt / name / "version").write_text(version)
    (node.opt / "gpusnap-link").symlink_to("gpusnap-data")
    before = node.names()
    for version in ("one", "two", "three"):
        node.version(version)
        node.well("install", "--containerd")
    assert {"gpusnap-two", "gpusnap-three"} <= set(node.names())
    assert "gpusnap-one" not in node.names()
    node.well("uninstall")
    assert node.names() == before
    assert all((node.opt / name / "file").exists() for name in others)


def test_no_pycriu(node: Node) -> None:
    """A node that could restore nothing is told of the package, and stays as it was."""
    (node.folder / "log.bare").touch()
    done = node.sh("install", "--containerd")
    assert done.returncode == 1
    assert "python3-pycriu" in done.stderr
    assert node.names() == []


def test_a_place_of_somebody(node: Node) -> None:
    """/opt/gpusnap as a folder, or a link to another place, is not node.sh's."""
    own = node.opt / "gpusnap"
    (own / "bin").mkdir(parents=True)
    (own / "bin/gpusnap").touch(0o755)
    for _ in range(2):
        done = node.sh("install", "--containerd")
        assert done.returncode == 1
        assert "an /opt/gpusnap that is not of node.sh" in done.stderr
        assert "nothing to take away" in node.sh("uninstall").stderr
        assert (own / "bin/gpusnap").exists()
        assert node.names() in (["gpusnap"], ["gpusnap", "own"])
        if not own.is_symlink():
            own.rename(node.opt / "own")
            own.symlink_to("own")


def test_an_upgrade_that_fails(node: Node) -> None:
    """The version in use stays, however often it is tried, until one was installed after it."""
    node.well("install", "--containerd")
    node.version("two")
    node.fails(on=True)
    for _ in range(2):
        assert node.sh("install", "--containerd").returncode
        assert {"gpusnap-one", "gpusnap-two"} <= set(node.names())
    node.fails(on=False)
    node.well("install", "--containerd")
    assert {"gpusnap-one", "gpusnap-two"} <= set(node.names())
    node.version("three")
    node.well("install", "--containerd")
    assert "gpusnap-one" not in node.names()
    assert os.readlink(node.opt / "gpusnap") == "gpusnap-three"


def test_which_unit(node: Node) -> None:
    """That of the engine whose configuration changed, when it changed; or the one that is named; or none."""
    node.well("install", "--crio")
    assert node.restarts() == ["crio"]
    node.well("install", "--containerd")
    node.well("install", "--containerd")
    assert node.restarts() == ["containerd"]
    node.well("uninstall")
    assert node.restarts() == ["containerd", "crio"]
    node.well("install", "--containerd", UNIT="k3s")
    node.well("uninstall", UNIT="")
    assert node.restarts() == ["k3s"]


def test_an_uninstall_that_is_refused(node: Node) -> None:
    """Nothing is removed."""
    node.well("install", "--containerd")
    before = node.names()
    node.fails(on=True)
    assert node.sh("uninstall").returncode
    assert node.names() == before


def test_cut_off(node: Node) -> None:
    """A copy that was begun, and an uninstallation that was nearly done, leave nothing in the end."""
    half = node.opt / "gpusnap-zero.new"
    half.mkdir(parents=True)
    (half / "version").write_text("zero\n")
    node.well("install", "--containerd")
    assert not half.exists()
    subprocess.run(["rm", "-r", str(node.opt / "gpusnap-one")], check=True)
    node.well("uninstall")
    assert node.names() == []


def test_a_disk_that_cannot_be_synced(node: Node) -> None:
    """A version gets its name when all of it is on disk; the next run copies it anew."""
    (node.folder / "sync").write_text('#!/bin/sh\ntest -e "$2/bin/gpusnap" && exit 1\n')
    (node.folder / "sync").chmod(0o755)
    assert node.sh("install").returncode != 0
    assert node.names() == ["gpusnap-one.new"]
    (node.folder / "sync").unlink()
    node.well("install")
    assert node.names()[:2] == ["gpusnap", "gpusnap-one"]
