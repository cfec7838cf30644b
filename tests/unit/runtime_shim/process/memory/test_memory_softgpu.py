"""The whole way of GPU memory past CRIU, with the driver in software: populate, copy out, free, fill."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest
from memory_target import smaps
from softgpu_box import MIB, OK, Agent, Box

from gpusnap.oci.chunks.buffers import is_zero
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies
from gpusnap.runtime_shim.process.memory.maps import mappings, regions
from gpusnap.runtime_shim.process.ptrace.remote_syscall import enter_thread
from gpusnap.runtime_shim.stopping.stop import go_on, run_only, run_populating, stop

SIZE = 96 * MIB

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


@pytest.fixture
def agents(boxes: Callable[..., Box]) -> tuple[Agent, Agent]:
    """One that calls the driver, and one that has memory on the GPU."""
    box = boxes(1)
    return box.agent().start(), box.agent().start(0)


def test_there_and_back(agents: tuple[Agent, Agent]) -> None:
    """The driver's mapping is populated for it and found; it comes back from our copy, to the last byte."""
    caller, target = agents
    address, pid = target.alloc(SIZE), target.pid
    assert target.write(address, 7, SIZE) == OK
    content = target.read(address, SIZE)
    assert caller.lock(pid) == OK
    stop([pid], timeout=60)
    before = mappings(pid)
    tid = caller.restore_thread(pid)
    with run_populating(pid, tid) as done:
        assert caller.checkpoint(pid) == OK
    assert (done.mappings, done.why_not) == (1, "")
    assert done.size >= SIZE
    (region,) = regions(before, mappings(pid))
    assert region.size >= done.size
    ours = mmap.mmap(-1, region.size)
    copies.read(pid, region.start, ours)
    assert not is_zero(memoryview(ours))
    with enter_thread(pid) as there:
        there.madvise(region.start, region.size, mmap.MADV_DONTNEED)
    assert smaps(pid, region.start)["Rss"] == ["0", "kB"]
    assert proc.is_still(pid)
    copies.write(pid, region.start, ours)
    with run_only(pid, tid):
        assert caller.restore(pid) == OK
    go_on([pid])
    assert caller.unlock(pid) == OK
    assert target.read(address, SIZE) == content
    assert not regions(before, mappings(pid))
    ours.close()
