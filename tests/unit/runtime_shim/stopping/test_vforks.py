"""Processes that wait within vfork(2): found, and their children let run up to their programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import wait_for
from pairs import Pair, a_pair

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import PermissionRefused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.stopping import vfork
from gpusnap.runtime_shim.stopping.stop import go_on, stop, wait_until_stopped
from gpusnap.runtime_shim.stopping.vfork import WaitingParent, finish, iterate_waiting


@pytest.fixture(params=["/bin/cat"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    found = a_pair(tmp_path, request.param)
    yield found
    for pid in (found.child, found.parent):
        if proc.parent(pid) in (os.getpid(), found.parent):
            os.kill(pid, signal.SIGKILL)
    found.process.communicate()


def halt(pair: Pair) -> None:
    for pid in pair.pids:
        os.kill(pid, signal.SIGSTOP)


def test_waiting(pair: Pair) -> None:
    """The two are found where both are among those asked about, until the program has begun."""
    assert list(iterate_waiting(pair.pids)) == [WaitingParent(pair.parent, pair.child)]
    assert list(iterate_waiting([pair.parent])) == list(iterate_waiting([pair.child])) == []
    writer = pair.open()
    wait_for(lambda: proc.comm(pair.child) == "cat", "the program")
    assert list(iterate_waiting(pair.pids)) == []
    os.close(writer)


@pytest.mark.parametrize("then", ["D", "S"])
def test_woken_for_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """A thaw wakes the parent, which sleeps again as soon as it gets to it."""
    states = iter("RRR")
    monkeypatch.setattr(proc, "states", lambda _: iter([next(states, then)]))
    assert [each.child for each in iterate_waiting(pair.pids)] == [pair.child] * (then == "D")
    assert next(states, None) is None


def test_nobody_waits() -> None:
    """A child by fork has a memory of its own, and its parent does not sleep."""
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        wait_for(lambda: shell.pid in proc.parents().values(), "the child")
        child = next(pid for pid, parent in proc.parents().items() if parent == shell.pid)
        assert list(iterate_waiting([shell.pid, child, os.getpid(), 2**22 + 1])) == []
        os.kill(child, signal.SIGKILL)


def test_a_stop_does_not_reach_the_parent(pair: Pair) -> None:
    """That is why all this is needed."""
    with pytest.raises(GpusnapError, match="did not stop"):
        stop(pair.pids, timeout=0.3)


def test_up_to_the_program(pair: Pair) -> None:
    """Both stand then, and the program has not run an instruction."""
    halt(pair)
    writer = pair.open()
    os.write(writer, b"read by the program\n")
    finish(pair.pids, timeout=60)
    assert list(iterate_waiting(pair.pids)) == []
    wait_until_stopped(pair.pids, timeout=60)
    assert os.readlink(f"/proc/{pair.child}/exe") == os.path.realpath("/bin/cat")
    assert "libc" not in proc.maps(pair.child)  # its loader has not begun
    go_on(pair.pids)
    os.close(writer)
    said = pair.said()
    assert "read by the program\n" in said
    assert "begun 0\n" in said


@pytest.mark.parametrize("pair", ["/bin/none"], indirect=True)
def test_the_child_ends(pair: Pair) -> None:
    """There is no such program: the child ends, and the parent stands."""
    halt(pair)
    writer = pair.open()
    finish(pair.pids, timeout=60)
    wait_until_stopped([pair.parent], timeout=60)
    go_on([pair.parent])
    os.close(writer)
    assert pair.process.wait(60) != 0


def test_its_mask_is_its_own(pair: Pair) -> None:
    """posix_spawn has the child block all signals, and the program begin with the parent's mask."""
    halt(pair)
    writer = pair.open()
    finish(pair.pids, timeout=60)
    status = Path(f"/proc/{pair.child}/status").read_text()
    assert "SigBlk:\t0000000000000000\n" in status
    go_on(pair.pids)
    os.close(writer)
    pair.process.wait(60)


def test_a_signal_reaches_the_program(pair: Pair) -> None:
    """What was sent to it meanwhile is not lost."""
    halt(pair)
    os.kill(pair.child, signal.SIGTERM)
    writer = pair.open()
    finish(pair.pids, timeout=60)
    go_on(pair.pids)
    assert f"begun {int(signal.SIGTERM)}\n" in pair.said()
    os.close(writer)


def test_too_long(pair: Pair) -> None:
    """The child stands where it was, and goes on from there."""
    halt(pair)
    wanted = rf"process {pair.parent} \(\S+\) waits for its child {pair.child} .* longer than 0\.3 s"
    with pytest.raises(GpusnapError, match=wanted):
        finish(pair.pids, timeout=0.3)
    wait_until_stopped([pair.child], timeout=60)
    go_on(pair.pids)
    writer = pair.open()
    wait_for(lambda: proc.comm(pair.child) == "cat", "the program")
    os.close(writer)
    assert "begun 0\n" in pair.said()


@pytest.mark.parametrize("at", ["before", "in a signal"])
def test_cut_short(pair: Pair, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """A signal to us while the child runs, or has stopped for one of its own: it is free, and gets that."""
    halt(pair)
    os.kill(pair.child, signal.SIGTERM)
    writer = pair.open()
    go = ptrace.go

    def cut(tid: int, which: int = 0) -> None:
        if at == "before":
            go(tid, which)
            raise KeyboardInterrupt
        if which == signal.SIGTERM:
            raise KeyboardInterrupt
        go(tid, which)

    monkeypatch.setattr(ptrace, "go", cut)
    with pytest.raises(KeyboardInterrupt):
        finish(pair.pids, timeout=60)
    assert "TracerPid:\t0\n" in Path(f"/proc/{pair.child}/status").read_text()
    go_on(pair.pids)
    assert f"begun {int(signal.SIGTERM)}\n" in pair.said()
    os.close(writer)


def test_a_debugger_has_it(pair: Pair) -> None:
    """It cannot be traced by two."""
    halt(pair)
    tracer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\n"
            "from gpusnap.runtime_shim.process.ptrace import calls\ncalls.seize(int(sys.argv[1]))\n"
            "print(flush=True)\ntime.sleep(60)",
            str(pair.child),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert tracer.stdout is not None
        tracer.stdout.readline()
        with pytest.raises(PermissionRefused, match="cannot be traced"):
            finish(pair.pids, timeout=60)
    finally:
        tracer.kill()
        tracer.communicate()


def test_killed_meanwhile(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is killed in our hands is none to wait for."""
    halt(pair)
    go = ptrace.go

    def killed(tid: int, which: int = 0) -> None:
        os.kill(pair.child, signal.SIGKILL)
        wait_for(lambda: not proc.is_running(pair.child), "its end")
        go(tid, which)

    monkeypatch.setattr(ptrace, "go", killed)
    finish(pair.pids, timeout=60)
    assert list(iterate_waiting(pair.pids)) == []
    go_on([pair.parent])
    assert f"begun {int(signal.SIGKILL)}\n" in pair.said()  # its parent gets to know


def test_a_child_that_waits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one of a chain comes first."""
    left = [WaitingParent(1, 2), WaitingParent(2, 3)]
    begun = []

    def begin(each: WaitingParent, *_: float) -> None:
        begun.append(each)
        left.remove(each)

    monkeypatch.setattr(vfork, "_begin", begin)
    monkeypatch.setattr(vfork, "iterate_waiting", lambda _: iter(left))
    finish([1, 2, 3], timeout=1)
    assert begun == [WaitingParent(2, 3), WaitingParent(1, 2)]
