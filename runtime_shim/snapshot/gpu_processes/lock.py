"""Locks the GPU processes of a container together.

When the driver locks a process, it waits for the GPU work in progress and lets the process begin no more.
Ranks wait for each other on the GPU: an NCCL collective ends on one GPU when all others have begun it. So if
a rank is locked before it begins a collective, the ranks that have begun it can never be locked. (On two
H100s, with a training loop that is idle most of the time, one attempt to lock both for 10 s failed.)
Therefore, with more than one process:

- One thread per process asks the driver to lock it, all at the same time. If some processes are locked and
  others are not, all locked ones are unlocked, run for a moment, and are locked again. Meanwhile the driver
  is still asked to lock the others: if what they wait for now begins, they are locked. They begin nothing
  more.
- The moment is as short as possible. A rank that runs longer begins the next collective too, and then waits
  for the ranks that are locked by then. If the moment was too short and the same ranks still wait, the next
  one is twice as long. If other ranks wait now, the ranks are nearly level, and the next one is a quarter as
  long.
- Each call of the driver's lock has a deadline. After it, the process is locked anew. Without a deadline, two
  processes that have each begun what the other has not yet begun would never be locked. If no process is
  locked, they run for a while.
- gpusnap cannot tell whether a process that is not locked waits for a locked one, or runs a long kernel for
  some time. So one time in eight, the locked ones wait for a third of the time since the start (at least 0.1
  s). A call takes as long as the time since the start (at least 0.5 s). In the last 40 % of the time, none is
  unlocked. So a timeout of 10 s is enough for processes whose kernels take up to 3.8 s, one after another.

A single process waits for no other, and gets one call with all the time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from gpusnap.runtime_shim.base.transaction import is_asked_to_stop, stop_if_asked
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import LockTimeout
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.stopping.stop import go_on, stop

# Seconds that locked processes wait for the others after the last change: usually; one time in _OFTEN at
# least _PATIENTLY, and this share of the time since the start.
_BRIEFLY = 0.005
_PATIENTLY, _SHARE, _OFTEN = 0.1, 1 / 3, 8
# A call of the driver takes as many seconds as have passed since the start, and at least these.
_CALL = 0.5
# Seconds that processes run after they were locked: the first time, if that was too short, and at most.
_LEAST, _MOST = 0.0005, 0.2
# After this share of the time, no process is unlocked before the deadline.
_LAST = 0.6
# Seconds between two checks for a signal that asks gpusnap to stop.
_LOOK = 0.05


def lock(
    driver: Driver,
    pids: Iterable[int],
    *,
    timeout: float,
    held: Collection[int] = (),
    tell: Callable[[str], object] | None = None,
) -> tuple[int, ...]:
    """Lock all of these processes at once. Those in `held` are stopped, and are stopped again afterwards.

    Of the stopped processes, only the driver's threads run at first. If a process was stopped within a call
    of CUDA, that call must end before the driver can lock it; then the whole process runs until it is locked.
    If it waits for other processes, all of `held` run until all are locked. Returns the PIDs of the processes
    that ran. `tell` gets a sentence if more than one try was needed.

    Raises LockTimeout after `timeout` seconds, and other errors of the driver, with no process locked;
    Interrupted if a signal asks gpusnap to stop.
    """
    pids = tuple(dict.fromkeys(pids))
    stand = [pid for pid in pids if pid in held]
    if len(pids) < 2:
        ran = run_at_once(partial(driver_calls.lock, driver, timeout=timeout), pids)
        ran.raise_first()
        return tuple(pid for pid in stand if ran.results[pid])
    if not stand:
        _Together(driver, pids, timeout, tell).lock()
        return ()
    begin = time.monotonic()
    alone = _lock_each(driver, pids, timeout=min(_CALL, timeout / 4))
    if alone is not None:
        return alone
    try:
        go_on(stand)
        _Together(driver, pids, timeout, tell, begin=begin, tries=1).lock()
    finally:
        stop(stand, timeout=timeout)
    return tuple(sorted(stand))


def _lock_each(driver: Driver, pids: Sequence[int], *, timeout: float) -> tuple[int, ...] | None:
    """Lock processes, some of them stopped, that do not wait for each other; return the PIDs that had to run.

    None, with no process locked, if one was not locked within `timeout` seconds.
    """

    outcome = run_at_once(partial(driver_calls.lock, driver, timeout=timeout), pids)
    if not outcome.errors:
        return tuple(sorted(pid for pid, ran in outcome.results.items() if ran))
    unlocked = run_at_once(partial(driver_calls.unlock, driver), outcome.results)
    for error in outcome.errors.values():
        if not isinstance(error, LockTimeout):
            raise error
    unlocked.raise_first()
    return None


class _Together:
    """Running processes, each with a thread that locks it; they are unlocked together (see the module)."""

    def __init__(
        self,
        driver: Driver,
        pids: Sequence[int],
        timeout: float,
        tell: Callable[[str], object] | None,
        *,
        begin: float | None = None,
        tries: int = 0,
    ) -> None:
        """`begin`: when the `timeout` seconds began. `tries`: tries before that."""
        self._driver, self._pids, self._timeout, self._tell = driver, pids, timeout, tell
        self._begin = time.monotonic() if begin is None else begin
        self._deadline = self._begin + timeout
        self._tries = dict.fromkeys(pids, tries)
        self._asked = threading.Event()
        """Set when a signal asks gpusnap to stop."""
        self._changed = threading.Condition()
        self._locked: set[int] = set()
        self._away = set(pids)
        """The processes that the driver is not asked to lock at the moment."""
        self._unlocking: set[int] = set()
        self._round = 0
        """Increases when the locked processes are to be unlocked."""
        self._moved = 0.0
        """When the last process was locked, or the driver was asked to lock it."""
        self._hold = _PATIENTLY
        self._run = 0.0
        self._again_at = 0.0
        self._stuck: frozenset[int] = frozenset()
        """The processes that were not locked when the others were unlocked."""
        self._whole = self._failed = False
        self._late: int | None = None
        """The last process that was not locked in time."""

    def lock(self) -> None:
        """Lock all of them. Raises LockTimeout or other errors of the driver, with none of them locked."""
        outcome = run_at_once(self._lock_one, self._pids, look=self._look)
        outcome.raise_first()
        stop_if_asked()
        tries = max(self._tries.values())
        if not self._whole:
            raise self._make_timeout(tries)
        if self._tell is not None and tries > 1:
            took = time.monotonic() - self._begin
            self._tell(f"the processes wait for each other's GPU work: locked in {tries} tries, {took:.1f} s")

    def _look(self) -> None:
        if is_asked_to_stop():
            self._asked.set()

    def _lock_one(self, pid: int) -> None:
        try:
            while self._may_try_again():
                self._try_one(pid)
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    def _try_one(self, pid: int) -> None:
        """Lock one process, and unlock it again if others cannot be locked."""
        with self._changed:
            self._away.discard(pid)
            self._moved = now = time.monotonic()
            self._changed.notify_all()
        self._tries[pid] += 1
        try:
            driver_calls.lock(self._driver, pid, timeout=max(self._call(now), 0.001))
        except LockTimeout:
            self._late = pid
            self._run_alone(pid)
            return
        if not self._wait_for_others(pid):
            driver_calls.unlock(self._driver, pid)
            self._run_together(pid)

    def _run_alone(self, pid: int) -> None:
        """After a lock that timed out: run for a while if none is locked, as each may wait for the other."""
        with self._changed:
            self._away.add(pid)
            until = time.monotonic() + random.uniform(_LEAST, _MOST)
            while self._may_try_again() and not (self._locked or self._unlocking):
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK))

    def _run_together(self, pid: int) -> None:
        """After an unlock: run for a moment, which begins when all of them are unlocked."""
        with self._changed:
            self._unlocking.discard(pid)
            if not self._unlocking:
                level = bool(self._locked) and not self._is_one_stuck()
                self._again_at = time.monotonic() + (0.0 if level else self._run)
                self._changed.notify_all()
            while self._may_try_again():
                left = self._again_at - time.monotonic() if not self._unlocking else _LOOK
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK))

    def _call(self, now: float) -> float:
        """The seconds for a call of the driver."""
        wanted = max(_CALL, now - self._begin)
        return self._deadline - now if self._is_last(now + wanted) else wanted

    def _is_last(self, moment: float) -> bool:
        """Whether it is too late at that moment to unlock any process."""
        return moment - self._begin >= _LAST * self._timeout

    def _may_try_again(self) -> bool:
        """Whether to try again."""
        ended = self._whole or self._failed or self._asked.is_set()
        return not (ended or time.monotonic() >= self._deadline)

    def _wait_for_others(self, pid: int) -> bool:
        """With this process locked, wait for the others; return whether all are locked."""
        with self._changed:
            self._locked.add(pid)
            self._moved = time.monotonic()
            if not self._is_one_stuck():  # the others have run for long enough
                self._again_at = self._moved
                self._changed.notify_all()
            if len(self._locked) == len(self._pids):
                self._whole = True
                self._changed.notify_all()
            now_on = self._round
            while self._may_try_again() and self._round == now_on:
                now = time.monotonic()
                left = self._moved + self._hold - now
                if left > 0 or self._away or self._is_last(now):
                    self._changed.wait(min(left, _LOOK) if left > 0 else _LOOK)
                else:
                    self._begin_round(now)
            self._locked.discard(pid)
            self._away.add(pid)
            return self._whole

    def _is_one_stuck(self) -> bool:
        """Whether the driver is asked to lock a process that is not locked yet."""
        return len(self._locked) + len(self._away) < len(self._pids)

    def _begin_round(self, now: float) -> None:
        """Make all locked processes be unlocked."""
        self._round += 1
        stuck = frozenset(self._pids) - self._locked
        self._run = min(max(2 * self._run, _LEAST), _MOST) if stuck == self._stuck else self._run / 4
        self._stuck = stuck
        self._unlocking = set(self._locked)
        patient = self._round % _OFTEN == 0
        self._hold = max(_PATIENTLY, (now - self._begin) * _SHARE) if patient else _BRIEFLY
        self._changed.notify_all()

    def _make_timeout(self, tries: int) -> LockTimeout:
        pid = self._pids[0] if self._late is None else self._late
        others = len(self._pids) - 1
        return LockTimeout(
            f"the GPU driver could not lock process {pid} ({proc.comm(pid)}) at the same time as "
            f"{others} more: its GPU work did not stop within {self._timeout:g} s, in {tries} tries",
            hint="increase nvidia.lock-timeout, or checkpoint when the program does less GPU work",
            code_name="CUDA_ERROR_NOT_READY",
            pid=pid,
        )
