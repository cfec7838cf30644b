"""Processes locked together: nobody is left locked while another waits for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from fakes import FakeDriver, Family

from gpusnap.runtime_shim.base.errors import Interrupted
from gpusnap.runtime_shim.base.transaction import hold_signals, make_interruptible
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.gpu.api.errors import LockTimeout, NotSupported
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes import lock as locking
from gpusnap.runtime_shim.snapshot.gpu_processes.lock import lock
from gpusnap.runtime_shim.stopping.stop import stop

RUNNING, LOCKED = ProcessState.RUNNING, ProcessState.LOCKED
PATIENCE = 60.0
"""Seconds for what takes a moment, and on a busy machine more."""
TICK = threading.Event()
"""Never set: what is waited for by looking is looked for again when this has timed out."""


@dataclass
class Ranks(FakeDriver):
    """A driver whose processes have GPU work under way, which has to end before they are locked."""

    busy: dict[int, Callable[[float], bool]] = field(default_factory=dict)
    """By PID, what waits for its GPU work so many seconds, and whether that is done."""
    timeouts: list[tuple[int, float]] = field(default_factory=list)
    """PID and deadline of each lock."""

    def lock(self, pid: int, *, timeout: float) -> None:
        """As the protocol says."""
        self.timeouts.append((pid, timeout))
        if pid in self.busy and not self.busy[pid](timeout):
            raise LockTimeout(f"process {pid} has work under way", pid=pid)
        super().lock(pid, timeout=timeout)

    def waits_for(self, peer: int) -> Callable[[float], bool]:
        """Work that ends when the peer runs, with nothing that keeps it from launching its part."""

        def wait(seconds: float) -> bool:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if self.states[peer] is RUNNING and not proc.is_stopped(peer) and seen.wait(0):
                    return True
                if self.states[peer] is LOCKED:
                    seen.set()  # only what it does after that counts: before it had nothing to launch
                TICK.wait(0.0005)
            return False

        seen = threading.Event()
        return wait

    def all_in(self, state: ProcessState) -> bool:
        return set(self.states.values()) == {state}


@pytest.fixture
def family() -> Iterator[Family]:
    with Family() as found:
        yield found


@pytest.fixture
def driver() -> Ranks:
    return Ranks()


@pytest.fixture
def bystander() -> Iterator[None]:
    """A thread that gets what is sent to us while the first thread blocks it."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


def test_one_that_waits_for_another(family: Family, driver: Ranks) -> None:
    """The one that is locked is unlocked for a moment: then the other's work ends, and both are locked."""
    waiting, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[waiting] = driver.waits_for(free)
    told: list[str] = []
    assert lock(driver, [waiting, free], timeout=10, tell=told.append) == ()
    assert driver.all_in(LOCKED)
    assert free in driver.of("unlock")
    assert waiting not in driver.of("unlock")[: driver.of("unlock").index(free)]
    assert len(told) == 1
    assert told[0].startswith("the processes wait for each other's GPU work: locked in ")


def test_the_moment_ends_with_what_it_is_for(
    family: Family, driver: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that ran on would begin what the other cannot: it is locked as soon as the others are."""
    for name in ("_LEAST", "_MOST"):
        monkeypatch.setattr(locking, name, 10 * PATIENCE)
    waiting, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[waiting] = driver.waits_for(free)
    lock(driver, [waiting, free], timeout=10)
    assert driver.all_in(LOCKED)
    assert driver.of("lock").count(free) == 2


def test_only_some_wait(family: Family, driver: Ranks) -> None:
    """A chain of ranks, and one that has nothing to do with them."""
    pids = [driver.use(family.spawn()) for _ in range(4)]
    driver.busy = {pids[0]: driver.waits_for(pids[1]), pids[1]: driver.waits_for(pids[2])}
    lock(driver, pids, timeout=10)
    assert driver.all_in(LOCKED)


def test_at_once(family: Family, driver: Ranks) -> None:
    """Where nobody waits there is one try, and nothing is told."""
    pids = [driver.use(family.spawn()) for _ in range(3)]
    told: list[str] = []
    lock(driver, pids, timeout=10, tell=told.append)
    assert driver.all_in(LOCKED)
    assert (sorted(driver.of("lock")), driver.of("unlock"), told) == (sorted(pids), [], [])


def test_none_is_locked_at_first(family: Family, driver: Ranks) -> None:
    """Each waits for what the other has yet to begin: both run on, and are tried again."""
    pids = [driver.use(family.spawn()) for _ in range(2)]
    driver.fail("lock", pids[0], LockTimeout("its peer is late"), times=1)
    driver.fail("lock", pids[1], LockTimeout("its peer is late"), times=1)
    lock(driver, pids, timeout=10)
    assert driver.all_in(LOCKED)


def test_one_process_has_all_the_time(family: Family, driver: Ranks) -> None:
    """There is nobody that it could wait for: one call, as long as it may take."""
    pid = driver.use(family.spawn())
    lock(driver, [pid], timeout=7.5)
    assert driver.timeouts == [(pid, 7.5)]


def long_kernel(seconds: float) -> Callable[[float], bool]:
    """One kernel follows the other: only a call that waits so long sees an end."""

    def wait(timeout: float) -> bool:
        TICK.wait(min(seconds, timeout))
        return timeout >= seconds

    return wait


def test_long_kernels_of_one(family: Family, driver: Ranks) -> None:
    """One process has long kernels, and the other none."""
    busy, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[busy] = long_kernel(1.2)
    lock(driver, [busy, free], timeout=4)
    assert driver.all_in(LOCKED)


def test_long_kernels_of_all(family: Family, driver: Ranks) -> None:
    """Each has one at any time, and begins the next one as soon as it is let run."""
    pids = [driver.use(family.spawn()) for _ in range(2)]
    driver.busy = {pids[0]: long_kernel(0.9), pids[1]: long_kernel(1.2)}
    lock(driver, pids, timeout=4)
    assert driver.all_in(LOCKED)


def test_another_error(family: Family, driver: Ranks) -> None:
    """It is raised at once, and the other, which was locked, runs on."""
    good, bad = driver.use(family.spawn()), driver.use(family.spawn())
    driver.fail("lock", bad, NotSupported("managed memory"))
    began = time.monotonic()
    with pytest.raises(NotSupported, match="managed memory"):
        lock(driver, [good, bad], timeout=120)
    assert driver.all_in(RUNNING)
    assert time.monotonic() - began < 60


def test_too_late(family: Family, driver: Ranks) -> None:
    """The sentence names who was not locked, and how often; and nobody is locked."""
    busy, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[busy] = long_kernel(100)
    with pytest.raises(LockTimeout) as raised:
        lock(driver, [busy, free], timeout=0.7)
    assert driver.all_in(RUNNING)
    message = str(raised.value)
    assert message.startswith(
        f"the GPU driver could not lock process {busy} (sleep) at the same time as 1 more: "
        "its GPU work did not stop within 0.7 s, in "
    )
    assert message.endswith(" tries")
    assert "nvidia.lock-timeout" in raised.value.hint
    assert sum(wait for pid, wait in driver.timeouts if pid == busy) <= 0.75


def test_a_signal(family: Family, driver: Ranks) -> None:
    """It ends the tries long before the deadline, and nobody is locked."""
    busy, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[busy] = long_kernel(100)
    driver.when("unlock", lambda _: os.kill(os.getpid(), signal.SIGTERM), free)
    began = time.monotonic()
    with make_interruptible(), pytest.raises(Interrupted, match="SIGTERM"):
        lock(driver, [busy, free], timeout=120)
    assert driver.all_in(RUNNING)
    assert time.monotonic() - began < 60


def test_a_signal_that_another_thread_takes(family: Family, driver: Ranks, bystander: None) -> None:
    """A thread of ours from before, which blocks no signal: the first thread handles it all the same."""
    test_a_signal(family, driver)


def test_a_signal_that_another_thread_takes_and_is_held_back(
    family: Family, driver: Ranks, bystander: None
) -> None:
    """The same where it is not raised before the next `stop_if_asked`."""
    with hold_signals():
        test_a_signal(family, driver)


def test_a_signal_that_is_ignored(family: Family, driver: Ranks) -> None:
    """Under nohup the terminal's end is no reason to stop."""
    waiting, free = driver.use(family.spawn()), driver.use(family.spawn())
    driver.busy[waiting] = driver.waits_for(free)
    driver.when("lock", lambda _: os.kill(os.getpid(), signal.SIGHUP), free)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with make_interruptible():
            lock(driver, [waiting, free], timeout=10)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert driver.all_in(LOCKED)


def test_those_that_stand_wait_for_each_other(family: Family, driver: Ranks) -> None:
    """All of them run, at the same time, until all are locked; and stand afterwards."""
    pids = [driver.use(family.spawn()) for _ in range(3)]
    stop(pids, timeout=PATIENCE)
    driver.busy = {pids[0]: driver.waits_for(pids[1])}
    assert lock(driver, pids, timeout=10, held=pids) == tuple(sorted(pids))
    assert driver.all_in(LOCKED)
    assert all(map(proc.is_still, pids))


def test_those_that_stand_and_cannot_be_locked(family: Family, driver: Ranks) -> None:
    """As they were: they stand, and nobody is locked."""
    pids = [driver.use(family.spawn()) for _ in range(2)]
    stop(pids, timeout=PATIENCE)
    driver.busy = {pids[0]: long_kernel(100)}
    with pytest.raises(LockTimeout, match=f"process {pids[0]} "):
        lock(driver, pids, timeout=1, held=pids)
    assert driver.all_in(RUNNING)
    assert all(map(proc.is_still, pids))


def test_those_that_stand_and_are_refused(family: Family, driver: Ranks) -> None:
    """Another error than a timeout is raised; nobody had to run, and nobody is locked."""
    pids = [driver.use(family.spawn()) for _ in range(2)]
    stop(pids, timeout=PATIENCE)
    driver.fail("lock", pids[0], NotSupported("managed memory"))
    with pytest.raises(NotSupported, match="managed memory"):
        lock(driver, pids, timeout=10, held=pids)
    assert driver.all_in(RUNNING)
    assert all(map(proc.is_still, pids))


def test_lock_of_one_that_we_hold(family: Family, driver: FakeDriver) -> None:
    """It stands before and after; the thread that is let run is in the state that the driver finds."""
    pid = driver.use(family.spawn())
    stop([pid], timeout=PATIENCE)
    driver.when("lock", lambda _: seen.append(proc.is_still(pid)))
    seen: list[bool] = []
    assert lock(driver, [pid], timeout=5, held=[pid]) == ()
    assert seen == [False]
    assert proc.is_still(pid)
    assert driver.states[pid] is LOCKED


def test_lock_of_one_that_stands_within_a_call(family: Family, driver: FakeDriver) -> None:
    """Where the driver cannot lock it as it stands, it runs until it is locked, and stands again."""
    pid, other = driver.use(family.spawn()), driver.use(family.spawn())
    stop([pid, other], timeout=PATIENCE)
    driver.fail("lock", pid, LockTimeout("a call is in progress"), times=1)
    assert lock(driver, [pid, other], timeout=5, held=[pid, other]) == (pid,)
    assert driver.of("lock").count(pid) == 2
    assert proc.is_still(pid)
    assert driver.states[pid] is LOCKED


def test_lock_that_does_not_come(family: Family, driver: FakeDriver) -> None:
    """After the deadline it stands all the same, as it was found."""
    pid = driver.use(family.spawn())
    stop([pid], timeout=PATIENCE)
    driver.fail("lock", pid, LockTimeout("a call is in progress"))
    with pytest.raises(LockTimeout):
        lock(driver, [pid], timeout=5, held=[pid])
    assert proc.is_still(pid)
