"""The test host's parts that need no root: parsing, naming, the cache."""

from __future__ import annotations

import fcntl
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "host"))

import gpuhost
from testhost import build, cgroups, cli, packages, recipe, report, rootfs
from testhost.cache import STAGING, Cache

GPUS_CONF = """\
# two GPUs
driver 580.159.04
cuda 13.0
gpu uuid=GPU-11111111-2222-3333-4444-555555555555 minor=0 cc=9.0 memory=1GiB name=NVIDIA H100 80GB HBM3
gpu uuid=GPU-11111111-2222-3333-4444-666666666666 minor=3 cc=9.0 memory=1GiB name=NVIDIA H100 80GB HBM3
"""
HYBRID_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
HYBRID_GROUPS = "4:memory:/some/one\n2:cpuacct,cpu:/\n1:name=systemd:/\n0::/\n"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path)
    cache.prepare()
    return cache


class FakeBuilder:
    """Builds nothing, or fails in the middle."""

    fails = False

    def __init__(self, tree: Path, _cache: Cache, _suite: recipe.Suite) -> None:
        self.tree = tree

    def bootstrap(self) -> None:
        (self.tree / "etc").mkdir()

    def install_packages(self) -> None:
        if self.fails:
            raise KeyboardInterrupt

    install_newer = install_wheels = configure = make_images = install_packages


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> type[FakeBuilder]:
    monkeypatch.setattr(build, "Builder", FakeBuilder)
    monkeypatch.setattr(packages, "ensure", list)
    return FakeBuilder


def test_a_complete_tree_is_built_once_and_older_ones_go(
    cache: Cache, fake_builder: type[FakeBuilder], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.tree("older").mkdir()
    for _ in range(2):
        tree, fd = build.ensure_tree(cache, recipe.TRIXIE)
        os.close(fd)
    assert (tree / "etc").is_dir()
    assert not cache.tree("older").exists()
    assert capsys.readouterr().err.count("building") == 1


def test_the_trees_of_two_suites_lie_side_by_side(cache: Cache, fake_builder: type[FakeBuilder]) -> None:
    trees = []
    for suite in (recipe.TRIXIE, recipe.SID, recipe.TRIXIE):
        tree, fd = build.ensure_tree(cache, suite)
        os.close(fd)
        trees.append(tree)
    assert trees[0] == trees[2] != trees[1]
    assert all(tree.is_dir() for tree in trees)


def test_an_interrupted_build_leaves_no_tree(
    cache: Cache, fake_builder: type[FakeBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_builder, "fails", True)
    with pytest.raises(KeyboardInterrupt):
        build.ensure_tree(cache, recipe.TRIXIE)
    assert {path.name for path in cache.top.iterdir() if path.is_dir()} == {"mount", "runs"}


def test_the_wreck_of_a_killed_build_is_cleared(cache: Cache, fake_builder: type[FakeBuilder]) -> None:
    wreck = cache.top / (STAGING + "1234")
    wreck.mkdir()
    os.close(build.ensure_tree(cache, recipe.TRIXIE)[1])
    assert not wreck.exists()


def test_a_tree_in_use_is_not_pruned(cache: Cache) -> None:
    tree = cache.tree("used")
    tree.mkdir()
    fd = cache.use("used")
    assert cache.prune() == [tree]
    os.close(fd)
    assert cache.prune() == []
    assert not tree.exists()


def test_a_lock_on_a_removed_file_is_not_taken_for_one(cache: Cache) -> None:
    with cache.locked():
        cache.remove()
    with cache.locked():
        fd = os.open(cache.top / ".lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)


def test_the_digest_follows_the_recipe() -> None:
    before = recipe.digest(recipe.TRIXIE)
    assert before == recipe.digest(recipe.TRIXIE) != recipe.digest(recipe.SID)
    other = replace(recipe.TRIXIE, requirements=(recipe.HERE / "README.md",))
    assert recipe.digest(other) != before


@pytest.mark.parametrize("text", ["/etc", "/etc:relative", "/etc:/x:rx", ":/x", "/no/such:/x"])
def test_a_bad_bind_is_named(text: str) -> None:
    with pytest.raises(report.HostError, match=text):
        rootfs.Bind.parse(text)


def test_a_bind_is_parsed() -> None:
    assert rootfs.Bind.parse("/etc:/x:ro") == rootfs.Bind("/etc", "/x", read_only=True)
    assert not rootfs.Bind.parse("/etc:/x").read_only


def test_hierarchies_of_a_hybrid_host() -> None:
    found = {h.name: h for h in cgroups.hierarchies(HYBRID_MOUNTS, HYBRID_GROUPS)}
    assert set(found) == {"cpu,cpuacct", "memory", "systemd", "unified"}
    assert found["memory"].group("r") == Path("/sys/fs/cgroup/memory/some/one/r")
    assert found["systemd"].options == "none,name=systemd"
    assert found["unified"].v2


def test_hierarchies_of_a_pure_v2_host() -> None:
    (only,) = cgroups.hierarchies(
        "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n", "0::/user.slice/a.scope\n"
    )
    # Below the root of the mount: the scope holds processes, and could give its children no controllers.
    assert only.group("r") == Path("/sys/fs/cgroup/r")


def test_mirrors_are_told_from_other_archives() -> None:
    ours = ["http://deb.debian.org/debian", "http://snapshot.debian.org/archive/debian/20250520T000000Z"]
    others = ["http://deb.debian.org/debian-security", "https://deb.example.org/node", "file:/srv/debian"]
    assert packages.candidates([ours[0] + "/", *others, *ours]) == ours


@pytest.mark.skipif(os.geteuid() != 0, reason="the check for root comes first")
def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["enter", "--cgroup", "v2", "--"]) == 1
    assert "no command" in capsys.readouterr().err


def test_the_cdi_specification_names_each_gpu_three_ways() -> None:
    driver = gpuhost.Driver.parse(GPUS_CONF)
    assert [gpu.minor for gpu in driver.gpus] == [0, 3]
    spec = gpuhost.cdi_spec(driver, ["/usr/lib/libcuda.so.580"], "/lib/firmware/x", modified_params=False)
    nodes = {d["name"]: [n["path"] for n in d["containerEdits"]["deviceNodes"]] for d in spec["devices"]}
    assert nodes["1"] == nodes[driver.gpus[1].uuid] == ["/dev/nvidia3"]
    assert nodes["all"] == ["/dev/nvidia0", "/dev/nvidia3"]


def test_a_gpus_conf_without_a_driver_is_refused() -> None:
    with pytest.raises(ValueError, match="driver"):
        gpuhost.Driver.parse("cuda 13.0\n")
