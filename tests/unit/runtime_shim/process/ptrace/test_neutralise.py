"""Descriptors and mappings replaced in a process that does not notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
from memory_target import Target

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process.memory.maps import Mapping, mappings
from gpusnap.runtime_shim.process.ptrace import neutralise as handles
from gpusnap.runtime_shim.process.ptrace.neutralise import neutralise
from gpusnap.runtime_shim.process.ptrace.remote_syscall import Saved, put_back

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="of x86-64 alone")


@pytest.fixture
def target() -> Iterator[Target]:
    """With /dev/full open as 70 and 71, the second one kept by exec, and with /dev/zero mapped."""
    with Target() as found:
        for number, kept in ((70, False), (71, True)):
            found.ask(f"os.dup2(os.open('/dev/full', os.O_RDWR), {number}, {kept})")
        found.ask("globals().update(held=mmap.mmap(os.open('/dev/zero', os.O_RDWR), 8192, mmap.MAP_PRIVATE))")
        yield found


def unrecorded(_: Saved) -> AbstractContextManager[None]:
    """Where nobody is killed, nothing needs to be on file."""
    return nullcontext()


def mapped(target: Target) -> list[Mapping]:
    return [each for each in mappings(target.pid) if each.name == "/dev/zero"]


def led(target: Target, number: int) -> str:
    return os.readlink(f"/proc/{target.pid}/fd/{number}")


def test_neutralise(target: Target) -> None:
    """Numbers, their fate at exec and addresses stay, with nothing behind them; the rest is as it was."""
    target.stop()
    (old,) = mapped(target)
    before = {number: led(target, int(number)) for number in os.listdir(f"/proc/{target.pid}/fd")}
    done = neutralise(target.pid, [71, 70, 70], [(old.start, old.end)], lent=unrecorded)
    assert done.descriptors == ((70, "/dev/full"), (71, "/dev/full"))
    assert done.mappings == (old,)
    after = {number: led(target, int(number)) for number in os.listdir(f"/proc/{target.pid}/fd")}
    assert after == before | {"70": "/dev/null", "71": "/dev/null"}
    assert not mapped(target)
    (new,) = [each for each in mappings(target.pid) if each.start <= old.start < each.end]
    assert (new.permissions, new.inode) == ("---p", 0)
    assert target.well()
    assert target.ask("[os.get_inheritable(number) for number in (70, 71)]") == "[False, True]"
    assert target.ask("os.write(70, b'abc')") == "3"


def test_lent(target: Target) -> None:
    """What a killed caller would have to put back is handed out before the first call, and until the last."""
    target.stop()
    seen: list[Saved] = []

    @contextmanager
    def lent(saved: Saved) -> Iterator[None]:
        assert led(target, 70) == "/dev/full"
        seen.append(saved)
        yield
        assert led(target, 70) == "/dev/null"
        seen.append(saved)

    neutralise(target.pid, [70], [], lent=lent)
    assert len(seen) == 2
    assert seen[0].tid in target.threads()
    put_back(target.pid, seen[0])
    assert target.well()


def test_nothing_to_do(target: Target) -> None:
    """No descriptor is opened for nothing."""
    target.stop()
    before = os.listdir(f"/proc/{target.pid}/fd")
    assert neutralise(target.pid, [], [], lent=unrecorded) == handles.NeutraliseResult((), ())
    assert os.listdir(f"/proc/{target.pid}/fd") == before
    assert target.well()


def test_no_null_device(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another device behind the name is refused, with nothing replaced and nothing left open."""
    monkeypatch.setattr(handles, "_NULL", os.makedev(1, 9))
    target.stop()
    (old,) = mapped(target)
    before = os.listdir(f"/proc/{target.pid}/fd")
    with pytest.raises(Refused, match=f"/dev/null of process {target.pid} is not the null device"):
        neutralise(target.pid, [70], [(old.start, old.end)], lent=unrecorded)
    assert led(target, 70) == "/dev/full"
    assert mapped(target) == [old]
    assert os.listdir(f"/proc/{target.pid}/fd") == before
    assert target.well()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its root")
def test_no_dev_at_all(target: Target) -> None:
    """A process whose root has no /dev/null is refused in one sentence."""
    target.ask("os.chroot('/proc/self/fdinfo')")
    target.stop()
    with pytest.raises(Refused, match=f"process {target.pid} .*null device"):
        neutralise(target.pid, [70], [], lent=unrecorded)
    assert led(target, 70) == "/dev/full"
    assert target.well()


def test_what_is_not_there(target: Target) -> None:
    """A part of a mapping is refused, a descriptor that is not open an error; nothing is replaced."""
    target.stop()
    (old,) = mapped(target)
    with pytest.raises(Refused, match=f"no mapping at {old.start:#x}-{old.start + 4096:#x}"):
        neutralise(target.pid, [70], [(old.start, old.start + 4096)], lent=unrecorded)
    with pytest.raises(FileNotFoundError):
        neutralise(target.pid, [70, 999], [(old.start, old.end)], lent=unrecorded)
    assert led(target, 70) == "/dev/full"
    assert mapped(target) == [old]
    assert target.well()
