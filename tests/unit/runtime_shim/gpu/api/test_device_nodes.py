"""Device nodes: found in a /dev, and changed for those of other GPUs."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api import device_nodes
from gpusnap.runtime_shim.gpu.api.device_nodes import Change, plan_changes
from gpusnap.runtime_shim.gpu.api.driver import Gpu, Node


def uuid(number: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


def gpu(index: int, minor: int | None = None) -> Gpu:
    return Gpu(
        uuid(index),
        index if minor is None else minor,
        index,
        "Soft",
        "9.0",
        1 << 30,
        0,
        False,
        "default",
        f"0000:{index:02x}:00.0",
    )


CTL = Node("/dev/nvidiactl", 195, 255)
UVM = Node("/dev/nvidia-uvm", 511, 0)
UVM_HERE = Node("/dev/nvidia-uvm", 240, 0)


def node(number: int, of: int, major: int = 195) -> Node:
    return Node(f"/dev/nvidia{number}", major, number, uuid(of))


HERE = (*(node(number, 10 + number) for number in range(4)), CTL, UVM_HERE)


def bare(*found: Node) -> tuple[Node, ...]:
    return tuple(Node(n.path, n.major, n.minor) for n in found)


def test_another_gpu_and_another_major() -> None:
    """The GPU's node becomes the target's; nvidia-uvm gets this host's major; nvidiactl stays."""
    found = plan_changes((node(0, 0), CTL, UVM), HERE, [(uuid(0), uuid(13))])
    assert found == (Change(node(0, 0), bare(node(3, 13))), Change(UVM, bare(UVM_HERE)))


def test_the_same_gpus() -> None:
    """Nothing changes, nor when two GPUs trade places: the container has the same two nodes."""
    old = (node(0, 10), node(1, 11), CTL)
    assert plan_changes(old, HERE, [(uuid(10), uuid(10)), (uuid(11), uuid(11))]) == ()
    assert plan_changes(old, HERE, [(uuid(10), uuid(11)), (uuid(11), uuid(10))]) == ()


def test_one_stays_and_one_moves() -> None:
    """0 goes to 1 and 1 to 2: in /dev, 0 has become 2."""
    old = (node(0, 10), node(1, 11))
    found = plan_changes(old, HERE, [(uuid(10), uuid(11)), (uuid(11), uuid(12))])
    assert found == (Change(node(0, 10), bare(node(2, 12))),)


def test_keep_names() -> None:
    """The old name has the new number, and the new name is there too; no name is made twice."""
    found = plan_changes((node(0, 0),), HERE, [(uuid(0), uuid(13))], keep_names=True)
    assert found == (Change(node(0, 0), (Node("/dev/nvidia0", 195, 3), *bare(node(3, 13)))),)
    swapped = [(uuid(10), uuid(11)), (uuid(11), uuid(10))]
    found = plan_changes((node(0, 10), node(1, 11)), HERE, swapped, keep_names=True)
    assert [change.new for change in found] == [
        (Node("/dev/nvidia0", 195, 1),),
        (Node("/dev/nvidia1", 195, 0),),
    ]


def test_a_second_name_goes() -> None:
    """What keep-names left behind is taken away by the next restore without it."""
    old = (Node("/dev/nvidia0", 195, 3, uuid(13)), node(3, 13))
    found = plan_changes(old, HERE, [(uuid(13), uuid(13))])
    assert found == (Change(old[0], ()),)


@pytest.mark.parametrize("missing", [UVM, Node("/dev/dri/renderD128", 226, 128, uuid(0))])
def test_no_counterpart(missing: Node) -> None:
    """A device that this host lacks is named."""
    here = [n for n in HERE if n.path != missing.path]
    with pytest.raises(Refused, match=missing.path):
        plan_changes((missing,), here, [(uuid(0), uuid(13))])


@given(st.permutations(range(4)), st.integers(0, 4), st.booleans())
def test_no_node_of_a_gpu_outside_the_plan(order: Sequence[int], count: int, keep: bool) -> None:
    """Whatever the plan: every node is one of its GPUs', each has one, and no path is there twice."""
    old = [node(number, number) for number in range(count)]
    pairs = [(uuid(number), uuid(10 + order[number])) for number in range(count)]
    found = plan_changes(old, HERE, pairs, keep_names=keep)
    gone = {change.old.path for change in found}
    after = [n for n in bare(*old) if n.path not in gone] + [new for change in found for new in change.new]
    assert {n.minor for n in after} == {order[number] for number in range(count)}
    assert len({n.path for n in after}) == len(after)
    if keep:
        assert {n.path for n in old} <= {n.path for n in after}
    else:
        assert {n.path for n in after} == {f"/dev/nvidia{order[number]}" for number in range(count)}


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A /dev with the nodes of GPU 0, a link to one, and a disk; needs the right to make devices."""
    folder = tmp_path / "root" / "dev"
    (folder / "dri").mkdir(parents=True)
    try:
        for path, device in (
            ("nvidia0", (195, 0)),
            ("nvidia9", (195, 9)),
            ("renamed", (195, 1)),
            ("nvidiactl", (195, 255)),
            ("nvidia-uvm", (511, 0)),
            ("null", (1, 3)),
        ):
            os.mknod(folder / path, stat.S_IFCHR | 0o666, os.makedev(*device))
        os.mknod(folder / "nvidia7", stat.S_IFBLK | 0o666, os.makedev(8, 0))
    except PermissionError:
        pytest.skip("making device nodes is not allowed here")
    os.symlink("nvidia0", folder / "nvidia2")
    return folder


def test_in_a_container(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Character devices by number; no link, no block device, no GPU that this host does not list."""
    monkeypatch.setattr(device_nodes, "_read_listed_majors", lambda: {"nvidia": 195})
    found = dict(device_nodes._devices(str(dev)))
    assert "nvidia2" not in found
    assert "nvidia7" not in found
    gpus = (gpu(0), gpu(1))
    known = [
        device_nodes._identify(p, os.major(d), os.minor(d), {"nvidia": 195}, gpus) for p, d in found.items()
    ]
    assert sorted(n for n in known if n is not None) == [
        Node("/dev/nvidia-uvm", 511, 0),
        Node("/dev/nvidia0", 195, 0, uuid(0)),
        Node("/dev/nvidiactl", 195, 255),
        Node("/dev/renamed", 195, 1, uuid(1)),
    ]


def test_majors(dev: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """/proc/devices counts before the nodes in /dev, which count where it is silent."""
    table = tmp_path / "devices"
    table.write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n240 nvidia-uvm\n\nBlock devices:\n8 sd\n"
    )
    listed = device_nodes._read_listed_majors(str(table))
    assert listed == {"mem": 1, "nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 240}
    monkeypatch.setattr(device_nodes, "_read_listed_majors", lambda: listed)
    assert device_nodes._majors(str(dev))["nvidia-uvm"] == 240
    monkeypatch.setattr(device_nodes, "_read_listed_majors", dict)
    assert device_nodes._majors(str(dev))["nvidia-uvm"] == 511


def test_on_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU has its node by its minor, whether or not somebody has made it; AMD's kfd by its own major."""
    monkeypatch.setattr(
        device_nodes, "_read_listed_majors", lambda: {"nvidia-frontend": 195, "nvidia-uvm": 240, "kfd": 235}
    )
    monkeypatch.setattr(device_nodes, "_devices", lambda dev: iter(()))
    found = device_nodes.on_host([gpu(0, 5)])
    assert Node("/dev/nvidia5", 195, 5, uuid(0)) in found
    assert Node("/dev/nvidia-uvm-tools", 240, 1) in found
    assert Node("/dev/kfd", 235, 0) in found


def test_render_nodes_go_by_pci_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/dri/renderD129 is the GPU's whose PCI address sysfs gives for it."""
    monkeypatch.setattr(device_nodes, "_pci", {128: "0000:00:00.0", 129: "0000:01:00.0"}.get)
    of = {
        path: device_nodes._identify(path, 226, minor, {}, [gpu(0), gpu(1)])
        for path, minor in (("dri/renderD128", 128), ("dri/renderD129", 129))
    }
    assert [n.gpu for n in of.values() if n is not None] == [uuid(0), uuid(1)]
    there = Node("/dev/dri/renderD129", 226, 129, uuid(1))
    old = Node("/dev/dri/renderD128", 226, 128, uuid(7))
    assert plan_changes((old,), (there,), [(uuid(7), uuid(1))]) == (Change(old, bare(there)),)
