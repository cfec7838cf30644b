"""Locks the GPU processes of a container together.

The driver locks a process when the GPU work in progress is done, and lets it begin no other. Ranks wait for
each other on the GPU: an NCCL collective ends on one GPU when all others have begun it. So if a rank is
locked before it begins one, the ranks that have begun it can never be locked (seen on two H100s with a
training loop that is idle most of the time: one lock of both for 10 s failed). Therefore, with more than one
process:

- All are locked at once, each by a thread of its own. Where some are locked and others are not, the locked
  ones are unlocked, all of them, run for a moment, and are locked again. The driver is still asked to lock
  the others: if what they wait for is begun now, they are locked. They begin nothing more meanwhile.
- The moment is as short as it can be: one that runs for longer begins the next collective too, and waits for
  those that are locked by then. Where it was too short and the same ones are still waited for, the next one
  is twice as long. Where others are waited for now, the ranks are nearly level, and it is a quarter as long.
- Each call of the driver's lock has a deadline, after which its process is asked anew. Without it, two
  processes would never be locked of which each has begun what the other has yet to begin: where none is
  locked, they run for a while.
- A locked process cannot tell whether another waits for it or has a long kernel, for which it has to wait
  longer. So one time of eight it waits for a third of the time since the start (0.1 s at least), a call takes
  as long as the time since the start (0.5 s at least), and in the last 40 % of the time nobody is unlocked.
  So with 10 s processes are locked, one or more of which have kernels of up to 3.8 s, one after another.

A single process waits for no other, and gets one call with all the time.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.api.errors import LockTimeout
from gpusnap.runtime_shim.gpu.api.parallel import run_at_once
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.snapshot.gpu_processes import driver_calls
from gpusnap.runtime_shim.stopping.stop import go_on, stop
from gpusnap.runtime_shim.transaction import is_asked_to_stop, stop_if_asked

# Seconds that the locked ones wait for the others, after the last change; at times, at least so many, and a
# share of the time since the start.
_BRIEFLY = 0.005
_PATIENTLY, _SHARE, _OFTEN = 0.1, 1 / 3, 8
# Seconds of one call of the driver's at least; and else the time since the start.
_CALL = 0.5
# Seconds that those that were locked run at first, where that was too short, and at most.
_LEAST, _MOST = 0.0005, 0.2
# The share of the time after which nobody is unlocked any more before the deadline.
_LAST = 0.6
# Seconds between two looks for a signal that asks us to stop.
_LOOK = 0.05


def lock(
    driver: Driver,
    pids: Iterable[int],
    *,
    timeout: float,
    held: Collection[int] = (),
    tell: Callable[[str], object] | None = None,
) -> tuple[int, ...]:
    """Lock processes, all at once; those of them in `held` stand and are to stand afterwards, too.

    Of these the driver's threads alone are let run. Where one was stopped within a call of CUDA, that call
    has to end before the driver can lock it: then the whole process runs until it is locked. Where it waits
    for others, all of `held` run until all are locked. Returns the PIDs of those that ran. `tell` is given a
    sentence where more than one try was needed. Raises LockTimeout after `timeout` seconds, and what else
    the driver answers, with nothing locked; Interrupted where a signal asks us to stop.
    """
    pids = tuple(dict.fromkeys(pids))
    stand = [pid for pid in pids if pid in held]
    if len(pids) == 1 and stand:
        ran = run_at_once(partial(driver_calls.lock, driver, timeout=timeout), pids)
        ran.raise_first()
        return tuple(pid for pid, did in ran.results.items() if did)
    if len(pids) < 2:
        run_at_once(partial(driver_calls.lock, driver, timeout=timeout), pids).raise_first()
        return ()
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
    """Lock processes of which some stand and none waits for another; the PIDs of those that had to run.

    None, and nothing is locked, where one was not within so many seconds.
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
    """Running processes, each with a thread that has the driver lock it; unlocked together, see above."""

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
        """`begin`: when the `timeout` seconds began; `tries` before that."""
        self._driver, self._pids, self._timeout, self._tell = driver, pids, timeout, tell
        self._begin = time.monotonic() if begin is None else begin
        self._deadline = self._begin + timeout
        self._tries = dict.fromkeys(pids, tries)
        self._asked = threading.Event()
        """Set when a signal asks us to stop."""
        self._changed = threading.Condition()
        self._locked: set[int] = set()
        self._away = set(pids)
        """Those that the driver is not asked to lock at the moment."""
        self._unlocking: set[int] = set()
        self._round = 0
        """Goes up when those that are locked are to be unlocked."""
        self._moved = 0.0
        """When the last one was locked, or asked for."""
        self._hold = _PATIENTLY
        self._run = 0.0
        self._again_at = 0.0
        self._stuck: frozenset[int] = frozenset()
        """Those that were not locked when the others were unlocked."""
        self._whole = self._failed = False
        self._late: int | None = None
        """The process that was the last not to be locked in time."""

    def lock(self) -> None:
        """Lock them all. Raises LockTimeout, or what else the driver answers, with none of them locked."""
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
        """Lock it, and unlock it again where others do not come to be locked."""
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
        """It was not locked in time. It runs for a while if nobody is locked: each may wait for the other."""
        with self._changed:
            self._away.add(pid)
            until = time.monotonic() + random.uniform(_LEAST, _MOST)
            while self._may_try_again() and not (self._locked or self._unlocking):
                left = until - time.monotonic()
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK))

    def _run_together(self, pid: int) -> None:
        """It is unlocked. It runs for a moment, which begins when all of them are unlocked."""
        with self._changed:
            self._unlocking.discard(pid)
            if not self._unlocking:
                self._again_at = time.monotonic() + self._run
                self._changed.notify_all()
            while self._may_try_again():
                left = self._again_at - time.monotonic() if not self._unlocking else _LOOK
                if left <= 0:
                    return
                self._changed.wait(min(left, _LOOK))

    def _call(self, now: float) -> float:
        """Seconds for a call of the driver's."""
        wanted = max(_CALL, now - self._begin)
        return self._deadline - now if self._is_last(now + wanted) else wanted

    def _is_last(self, moment: float) -> bool:
        """Whether nobody is to be unlocked any more at that moment."""
        return moment - self._begin >= _LAST * self._timeout

    def _may_try_again(self) -> bool:
        """Whether they are to be tried further."""
        ended = self._whole or self._failed or self._asked.is_set()
        return not (ended or time.monotonic() >= self._deadline)

    def _wait_for_others(self, pid: int) -> bool:
        """Wait, with this one locked, for the others; whether they are locked as well."""
        with self._changed:
            self._locked.add(pid)
            self._moved = time.monotonic()
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

    def _begin_round(self, now: float) -> None:
        """Have all that are locked unlocked."""
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
