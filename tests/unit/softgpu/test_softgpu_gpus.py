"""softgpu's GPUs: restore onto others, memory and its limits, visibility, NVML, the driver API's calls."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

import pytest
from softgpu_box import (
    CHECKPOINTED,
    DEADLINE,
    GIB,
    LOCKED,
    MIB,
    OK,
    Agent,
    Box,
    gpu_line,
    uuid,
    wait_until,
)


def pairs(mapping: dict[int, int]) -> list[list[str]]:
    return [[uuid(old), uuid(new)] for old, new in mapping.items()]


def checkpointed(caller: Agent, target: Agent) -> None:
    assert [caller.lock(target.pid), caller.checkpoint(target.pid)] == [OK, OK]


class Filled:
    """A target with memory on each of its GPUs."""

    def __init__(self, target: Agent, count: int, size: int = 3 * MIB) -> None:
        self.target, self.size = target, size
        self.addresses = []
        for ordinal in range(count):
            assert target.context(ordinal) == OK
            self.addresses.append(target.alloc(size))
            assert target.write(self.addresses[-1], ordinal, size) == OK
        self.before = self.digests()

    def digests(self) -> list[str]:
        return [self.target.read(address, self.size) for address in self.addresses]


@pytest.mark.parametrize("mapping", [{0: 0, 1: 1}, {0: 1, 1: 0}])
def test_every_visible_gpu_must_be_in_the_list(boxes: Callable[..., Box], mapping: dict[int, int]) -> None:
    """CUDA_VISIBLE_DEVICES does not narrow the list, unused GPUs count, and a refused call does no harm."""
    box = boxes(2)
    caller = box.agent().start()
    target = box.agent(CUDA_VISIBLE_DEVICES="0").start(0)
    assert target.uuids() == [uuid(0)]
    filled = Filled(target, 1)
    checkpointed(caller, target)
    wrong: list[dict[int, int]] = [{0: 1}, {1: 0}, {0: 1, 1: 1}, {0: 1, 1: 2}, {0: 1, 3: 0}]
    for attempt in wrong:
        assert caller.restore(target.pid, pairs(attempt)) == "INVALID_VALUE", attempt
    assert caller.restore(target.pid, [*pairs(mapping), [uuid(7), uuid(7)]]) == "INVALID_VALUE"
    assert caller.restore(target.pid, [[uuid(0), uuid(0)], [uuid(0), uuid(1)]]) == "INVALID_VALUE"
    assert caller.state(target.pid) == CHECKPOINTED
    assert caller.restore(target.pid, pairs(mapping)) == OK
    assert caller.unlock(target.pid) == OK
    assert target.uuids() == [uuid(mapping[0])]
    assert filled.digests() == filled.before


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[5::6])
def test_four_gpus_in_any_order(boxes: Callable[..., Box], order: tuple[int, ...]) -> None:
    """Ordinals stay, UUIDs are the new GPUs', and the process can be checkpointed again and go home."""
    box = boxes(4)
    caller, target = box.agent().start(), box.agent().start()
    filled = Filled(target, 4)
    there = dict(enumerate(order))
    for mapping in (there, {new: old for old, new in there.items()}):
        checkpointed(caller, target)
        assert caller.restore(target.pid, pairs(mapping)) == OK
        assert caller.unlock(target.pid) == OK
        assert filled.digests() == filled.before
        expected = [uuid(there[i]) for i in range(4)] if mapping is there else [uuid(i) for i in range(4)]
        assert target.uuids() == expected


def test_one_gpu_moves_when_its_node_is_exchanged(boxes: Callable[..., Box]) -> None:
    """A container sees one GPU and, after the remap, another; the driver opens that one's node."""
    host, container = boxes(2), boxes(2, nodes=[0])
    caller, target = host.agent().start(), container.agent().start(0)
    filled = Filled(target, 1)
    checkpointed(caller, target)
    assert caller.restore(target.pid, pairs({0: 1})) == "INVALID_VALUE"
    container.remove_node(0)
    container.add_node(1)
    assert caller.restore(target.pid) == "INVALID_DEVICE"
    assert caller.restore(target.pid, pairs({0: 1})) == OK
    assert target.gpu_descriptors() == ["/dev/nvidia1", "/dev/nvidiactl"]
    assert [caller.unlock(target.pid), target.uuids(), filled.digests()] == [OK, [uuid(1)], filled.before]


def test_a_node_with_the_wrong_number_is_not_the_gpu(boxes: Callable[..., Box]) -> None:
    box = boxes(2, nodes=[1])
    box.run("mknod", "-m", "666", "/dev/nvidia0", "c", "195", "1")
    assert box.agent().start().uuids() == [uuid(1)]


def test_restore_on_another_host(boxes: Callable[..., Box]) -> None:
    """gpus.conf is read again: another driver, other GPUs, one of another model."""
    box = boxes(4, nodes=[0])
    caller, target = box.agent().start(), box.agent().start(0)
    filled = Filled(target, 1)
    checkpointed(caller, target)
    box.describe([gpu_line(2), gpu_line(3, model="NVIDIA L4", cc="8.9")], driver="590.10")
    box.remove_node(0)
    box.add_node(2)
    box.add_node(3)
    assert caller.restore(target.pid) == "INVALID_DEVICE"
    assert caller.restore(target.pid, pairs({0: 3})) == "INVALID_VALUE"
    assert [caller.restore(target.pid, pairs({0: 2})), caller.unlock(target.pid)] == [OK, OK]
    assert filled.digests() == filled.before


def test_no_room_on_the_target(boxes: Callable[..., Box]) -> None:
    """Nothing stays behind on the GPU that had room; as with driver 580.159, no later restore works."""
    box = boxes(3, gpus=[gpu_line(0), gpu_line(1), gpu_line(2, memory="16MiB")])
    caller, other = box.agent().start(), box.agent().start(2)
    target = box.agent().start()
    Filled(target, 2, size=4 * MIB)
    hog = other.alloc(12 * MIB)
    checkpointed(caller, target)
    mapping = pairs({0: 1, 1: 2, 2: 0})
    files = box.client_files()
    assert caller.restore(target.pid, mapping) == "OUT_OF_MEMORY"
    assert caller.state(target.pid) == CHECKPOINTED
    assert box.client_files() == files
    assert target.gpu_descriptors() == []
    assert other.free(hog) == OK
    assert [caller.restore(target.pid, mapping) for _ in range(2)] == ["OPERATING_SYSTEM"] * 2
    assert caller.state(target.pid) == CHECKPOINTED


def test_memory_is_accounted_in_granules(boxes: Callable[..., Box]) -> None:
    """A context takes 2 MiB, each allocation whole 2 MiB; a checkpointed process takes nothing."""
    box = boxes(1, gpus=[gpu_line(0, memory="16MiB")])
    caller, target = box.agent().start(0), box.agent().start(0)
    assert target.memory() == [12 * MIB, 16 * MIB]
    address = target.alloc(2 * MIB + 1)
    assert target.memory() == [8 * MIB, 16 * MIB]
    assert target.alloc(8 * MIB + 1) == "OUT_OF_MEMORY"
    assert target.free(address) == OK
    assert target.memory() == [12 * MIB, 16 * MIB]
    checkpointed(caller, target)
    assert caller.memory() == [14 * MIB, 16 * MIB]


def test_memory_of_a_killed_process_is_reaped(boxes: Callable[..., Box]) -> None:
    box = boxes(1)
    keeper, victim = box.agent().start(0), box.agent().start(0)
    assert victim.alloc(512 * MIB) > 0
    assert keeper.alloc(600 * MIB) == "OUT_OF_MEMORY"
    victim.kill()
    assert keeper.alloc(600 * MIB) > 0
    assert len(box.client_files()) == 1


def test_memory_of_a_process_that_ends_goes_at_once(boxes: Callable[..., Box]) -> None:
    box = boxes(1)
    agent = box.agent().start(0)
    agent.process.communicate(timeout=DEADLINE)
    box.agents.remove(agent)
    assert agent.process.returncode == 0
    assert box.client_files() == []


def test_a_fork_child_does_not_keep_dead_memory(boxes: Callable[..., Box]) -> None:
    """The lock is the parent's: its death frees the memory although a child lives that had the file open."""
    box = boxes(1)
    keeper, parent = box.agent().start(0), box.agent().start(0)
    assert parent.alloc(64 * MIB) > 0
    parent.fork()
    parent.kill()
    wait_until(lambda: bool(keeper.memory()[0] == GIB - 2 * MIB), "the parent's memory to be free")


@pytest.mark.parametrize("mode", ["exclusive-process", "prohibited"])
def test_compute_mode(boxes: Callable[..., Box], mode: str) -> None:
    box = boxes(1, gpus=[gpu_line(0, extra=f"compute-mode={mode}")])
    first, second = box.agent().start(), box.agent().start()
    assert first.context(0) == (OK if mode == "exclusive-process" else "DEVICE_UNAVAILABLE")
    assert second.context(0) == "DEVICE_UNAVAILABLE"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("1,0", [1, 0]),
        (uuid(2), [2]),
        ("GPU-5067b0de", None),
        ("2,-1,0", [2]),
        ("", None),
        ("9", None),
        ("0,0", None),
    ],
)
def test_cuda_visible_devices(boxes: Callable[..., Box], wanted: str, expected: list[int] | None) -> None:
    agent = boxes(3).agent(CUDA_VISIBLE_DEVICES=wanted)
    assert agent.init() == (OK if expected else "NO_DEVICE")
    if expected:
        assert agent.uuids() == [uuid(minor) for minor in expected]


def test_no_gpu_here(boxes: Callable[..., Box]) -> None:
    """No nodes, nodes that may not be opened, no description: no device, and NVML has no driver."""
    assert boxes(1, nodes=[]).agent().init() == "NO_DEVICE"
    forbidden = boxes(1, options="mode=755,nodev").agent()
    assert [forbidden.init(), forbidden.nvml()] == ["NO_DEVICE", 9]
    mig = boxes(1, gpus=[gpu_line(0, extra="mig=on")]).agent()
    assert [mig.init(), mig.nvml()[0]["mig"]] == ["NO_DEVICE", 1]
    box = boxes(1)
    (box.state / "gpus.conf").write_text("driver 580.95.05\ncuda 13.0\ngpu minor=zero\n")
    assert box.agent().init() == "SYSTEM_NOT_READY"
    (box.state / "gpus.conf").unlink()
    agent = box.agent()
    assert [agent.init(), agent.nvml()] == ["NO_DEVICE", 9]


def test_nvml_inventory(boxes: Callable[..., Box]) -> None:
    pytest.importorskip("pynvml")
    extra = "compute-mode=exclusive-process persistence=on pci=0000:c1:00.0"
    box = boxes(3, gpus=[gpu_line(0), gpu_line(1), gpu_line(2, memory="80GiB", extra=extra)], nodes=[0, 2])
    first, last = box.agent().nvml()
    assert [first["uuid"], first["minor"], first["index"]] == [uuid(0), 0, 0]
    expected: dict[str, Any] = {
        "uuid": uuid(2),
        "minor": 2,
        "index": 1,
        "name": "NVIDIA H100 80GB HBM3",
        "cc": [9, 0],
        "mig": 0,
    }
    expected |= {"compute_mode": 3, "persistence": 1, "bus": "00000000:C1:00.0", "total": 80 * GIB, "used": 0}
    expected |= {"processes": [], "driver": "580.95.05", "cuda": 13000}
    assert last == expected


def test_nvml_lists_processes_as_the_caller_sees_them(boxes: Callable[..., Box]) -> None:
    """Also from a process that has CUDA itself, whose lock must survive that, and across PID namespaces."""
    pytest.importorskip("pynvml")
    box = boxes(1)
    outer, inner = box.agent().start(0), box.agent(own_pids=True).start(0)
    assert outer.alloc(4 * MIB) > 0
    assert sorted(outer.nvml()[0]["processes"]) == [[outer.pid, 6 * MIB], [inner.pid, 2 * MIB]]
    assert inner.nvml()[0]["processes"] == [[1, 2 * MIB]]
    assert box.agent().nvml()[0]["used"] == 8 * MIB
    checkpointed(outer, inner)
    assert outer.nvml()[0]["processes"] == [[outer.pid, 6 * MIB]]


def test_nvml_handles_stay_out_of_the_way(boxes: Callable[..., Box]) -> None:
    """A process may use NVML and still be checkpointed with nothing of the GPU open."""
    pytest.importorskip("pynvml")
    box = boxes(1)
    caller, target = box.agent().start(), box.agent().start(0)
    target.nvml()
    checkpointed(caller, target)
    assert target.gpu_descriptors() == []


def test_device_pointers_cannot_be_followed(boxes: Callable[..., Box]) -> None:
    target = boxes(1).agent().start(0)
    address = target.alloc(MIB)
    assert target.peek(address) == f"ended with {-signal.SIGSEGV}"


def test_copies_fills_and_kernels(boxes: Callable[..., Box]) -> None:
    """Values of memset, copies between GPUs and add_one, their bounds; fresh memory reads zero."""
    agent = boxes(2).agent().start(0)
    first = agent.alloc(3 * MIB)
    assert agent.context(1) == OK
    second = agent.alloc(3 * MIB)
    count = 3 * MIB // 4
    assert agent.fill(first, 41, count) == OK
    assert [agent.kernel("add_one"), agent.launch("add_one", count, first, count - 1)] == [OK, OK]
    assert agent.copy(second, first, 3 * MIB) == OK
    assert agent.words(second + 3 * MIB - 12, 3) == [42, 42, 41]
    assert agent.launch("add_one", count + 1, first, count + 1) == "ILLEGAL_ADDRESS"
    assert agent.kernel("sub_one") == "NOT_FOUND"
    assert agent.words(first + 4, count) == "INVALID_VALUE"
    assert agent.copy(second, first, 3 * MIB + 1) == "INVALID_VALUE"
    assert [agent.free(first), agent.free(first)] == [OK, "INVALID_VALUE"]
    fresh = agent.alloc(MIB)
    assert agent.words(fresh, 2) == [0, 0]


def test_managed_memory_works_like_the_rest(boxes: Callable[..., Box]) -> None:
    agent = boxes(1).agent().start(0)
    address = agent.managed(MIB)
    assert agent.fill(address, 6, MIB // 4) == OK
    assert [agent.kernel("add_one"), agent.launch("add_one", 256, address, 256)] == [OK, OK]
    assert agent.words(address + 4 * 255, 2) == [7, 6]
    assert agent.peek(address) == "07"


def test_memory_and_lock_in_use_by_threads(boxes: Callable[..., Box]) -> None:
    """Threads allocate, write, read and free while the process is locked and unlocked again and again."""
    box = boxes(1)
    caller, target = box.agent().start(), box.agent().start(0)
    addresses = [target.alloc(MIB) for _ in range(4)]
    for round_ in range(5):
        for i, address in enumerate(addresses):
            target.begin(f"t{i}", 0, "write", address, round_, MIB)
        assert caller.lock(target.pid) == OK
        assert caller.state(target.pid) == LOCKED
        assert caller.unlock(target.pid) == OK
        assert [target.end(f"t{i}") for i in range(4)] == [OK] * 4
        assert len({target.read(address, MIB) for address in addresses}) == 1
