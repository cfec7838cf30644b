"""Signals reach the process that was listed, or nobody."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes import wait_for

from gpusnap.runtime_shim.process import pidfd, proc


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    pidfd.forget()
    yield
    pidfd.forget()


@contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with sleeper() as process:
        yield process


def start(pid: int) -> int:
    found = proc.process(pid)
    assert found is not None
    return found.start


def open_pidfds() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # listdir's own
            continue
    return sum("pidfd" in link for link in links)


def test_sent(child: subprocess.Popen[bytes]) -> None:
    """Stopped, let go on, and ended; also one that nobody has remembered."""
    pidfd.remember([(child.pid, start(child.pid))])
    assert open_pidfds() == 1
    pidfd.send(child.pid, signal.SIGSTOP)
    wait_for(lambda: proc.is_still(child.pid), "the stop")
    pidfd.send(child.pid, signal.SIGCONT)
    wait_for(lambda: not proc.is_still(child.pid), "going on")
    pidfd.forget()
    pidfd.send(child.pid, signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM


def test_one_that_has_ended(child: subprocess.Popen[bytes]) -> None:
    """No error, whether its parent has waited for it or not."""
    pidfd.remember([(child.pid, start(child.pid))])
    child.kill()
    wait_for(lambda: not proc.is_running(child.pid), "the end")
    pidfd.send(child.pid, signal.SIGCONT)
    child.wait()
    pidfd.send(child.pid, signal.SIGCONT)
    pidfd.forget()
    pidfd.send(child.pid, signal.SIGCONT)


@pytest.mark.parametrize("kept", [True, False])
def test_a_pid_that_was_used_again(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """The PID comes round while the first is remembered: the second process gets nothing."""
    if not kept:
        monkeypatch.setattr(pidfd, "_FEWEST", 0)
        monkeypatch.setattr(pidfd, "_SHARE", 1 << 30)
    script = f"""
import ctypes, os, signal, sys, time
sys.path.insert(0, {os.getcwd()!r})
from gpusnap.runtime_shim.process import pidfd as pidfds; from gpusnap.runtime_shim.process import proc
def child():
    pid = os.fork()
    if not pid:
        signal.pause()
    return pid
if not {kept}:
    pidfds._FEWEST, pidfds._SHARE = 0, 1 << 30
first = child()
begun = proc.process(first).start
pidfds.remember([(first, begun)])
assert bool(pidfds._kept) == {kept}
os.kill(first, signal.SIGKILL)
os.waitpid(first, 0)
deadline = time.monotonic() + 5
while True:
    time.sleep(0.01)  # start times are in ticks of 10 ms
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(first - 1))
    second = child()
    if second == first:
        break
    os.kill(second, signal.SIGKILL)
    os.waitpid(second, 0)
    assert time.monotonic() < deadline
assert proc.process(second).start != begun
pidfds.send(second, signal.SIGKILL)
assert os.waitpid(second, os.WNOHANG) == (0, 0)
assert proc.is_running(second) and not proc.is_dying(second)
pidfds.remember([(second, proc.process(second).start)])
pidfds.send(second, signal.SIGKILL)
assert os.waitpid(second, 0)[1] == signal.SIGKILL
print("right")
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip("making a PID namespace is not allowed here")
    assert (done.stdout, done.stderr) == ("right\n", "")


def test_no_descriptor_is_lost() -> None:
    """Over many rounds only those of processes that are there are open; none is inherited."""
    for _ in range(60):
        with sleeper() as child:
            pidfd.remember([(child.pid, start(child.pid)), (child.pid, start(child.pid))])
            pidfd.remember([(child.pid, start(child.pid))])
            assert open_pidfds() <= 2  # that of the last round is closed at the next
            assert not any(os.get_inheritable(number) for number in pidfd._kept.values())
    with sleeper() as child:
        pidfd.remember([(child.pid, start(child.pid))])
        assert open_pidfds() == 1


def test_more_processes_than_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the limit at most is used, and the rest get their signals all the same."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    monkeypatch.setattr(pidfd, "_FEWEST", 2)
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(8)]
    try:
        pidfd.remember([(each.pid, start(each.pid)) for each in children])
        assert open_pidfds() == 4
        for each in children:
            pidfd.send(each.pid, signal.SIGTERM)
        assert [each.wait(60) for each in children] == [-signal.SIGTERM] * 8
    finally:
        for each in children:
            each.kill()
            each.wait()


def test_without_a_descriptor_left(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits to be let go on gets its signal, and a later one of the PID does not."""

    def none(pid: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none)
    pidfd.remember([(child.pid, start(child.pid) - 1)])
    pidfd.send(child.pid, signal.SIGKILL)
    assert child.poll() is None
    pidfd.remember([(child.pid, start(child.pid))])
    pidfd.send(child.pid, signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
