"""The GPU processes of a container, locked together.

The driver locks a process when the GPU work that it has under way is done, and lets it begin no other. Ranks
wait for each other on the GPU: a collective of NCCL's ends on one GPU when all others have begun it. So a
rank that is locked before it begins one keeps those that have begun it from ever being locked (seen on two
H100s with a training loop that is idle most of the time: one lock of both for 10 s failed). Therefore, with
more than one process:

- All are locked at once, each by a thread of its own. Where some are locked and others are not, the locked
  ones wait for a moment, then all of them are unlocked together, run for a moment of random length, and are
  locked again. The driver is still asked to lock the others: if what they waited for is begun now, they are
  locked. They begin nothing more meanwhile, so the ranks draw level after a few such moments, in a loop that
  is never idle too. If all were let run between two tries, they would seldom be level at the next one.
- Each call of the driver's lock has a deadline, after which its process runs for a moment. Without it, two
  processes would never be locked of which each has begun what the other has yet to begin.
- A locked process cannot tell whether another waits for it or has a long kernel, for which it has to wait
  longer. So both times grow: a locked process waits for a third of the time since the start (0.1 s at least:
  13 tries in 10 s), a call takes as long as the time since the start (0.5 s at least), and what would reach
  into the last 40 % of the time gets all that is left. So with 10 s processes are locked, one or more of
  which have kernels of up to 3.8 s, one after another.

One process has nobody to wait for, and gets one call with all the time.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from runtime_shim import driver_calls, proc
from runtime_shim.gpu.driver import Driver
from runtime_shim.gpu.errors import LockTimeout
from runtime_shim.gpu.together import at_once
from runtime_shim.stillness import go_on, stop
from runtime_shim.transaction import stop_if_asked

__all__ = ["lock"]

# Seconds that the locked ones wait at least, and their share of the time since the start.
_WAIT, _SHARE = 0.1, 1 / 3
# Seconds of one call of the driver's at least; and else the time since the start.
_CALL = 0.5
# Seconds that they run between two tries. Short ones keep a rank from running ahead of the others, long ones
# let it come to its next launch on a busy machine.
_SHORT, _LONG = 0.002, 0.2
# The share of the time after which nobody is unlocked any more before the deadline.
_LAST = 0.6
# Seconds between two looks for a signal that asks us to stop.
_LOOK = 0.05
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
        ran = at_once(partial(driver_calls.lock, driver, timeout=timeout), pids)
        ran.raise_first()
        return tuple(pid for pid, did in ran.results.items() if did)
    if len(pids) < 2:
        at_once(partial(driver_calls.lock, driver, timeout=timeout), pids).raise_first()
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

    outcome = at_once(partial(driver_calls.lock, driver, timeout=timeout), pids)
    if not outcome.errors:
        return tuple(sorted(pid for pid, ran in outcome.results.items() if ran))
    unlocked = at_once(partial(driver_calls.unlock, driver), outcome.results)
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
        # One that is ignored (nohup) is pending as well while it is blocked.
        self._stops = {number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN}
        self._changed = threading.Condition()
        self._locked: set[int] = set()
        self._unlock_at = self._again_at = 0.0
        """When those that are locked now are unlocked, and asked again."""
        self._whole = self._failed = False
        self._late: int | None = None
        """The process that was the last not to be locked in time."""

    def lock(self) -> None:
        """Lock them all. Raises LockTimeout, or what else the driver answers, with none of them locked."""
        outcome = at_once(self._lock_one, self._pids)
        outcome.raise_first()
        stop_if_asked()
        tries = max(self._tries.values())
        if not self._whole:
            raise self._too_late(tries)
        if self._tell is not None and tries > 1:
            took = time.monotonic() - self._begin
            self._tell(f"the processes wait for each other's GPU work: locked in {tries} tries, {took:.1f} s")

    def _lock_one(self, pid: int) -> None:
        try:
            while self._goes_on():
                self._try_one(pid)
        except BaseException:
            with self._changed:
                self._failed = True
                self._changed.notify_all()
            raise

    def _try_one(self, pid: int) -> None:
        """Lock it, and unlock it again where others do not come to be locked."""
        now = time.monotonic()
        self._tries[pid] += 1
        try:
            driver_calls.lock(self._driver, pid, timeout=max(self._call(now), 0.001))
        except LockTimeout:
            self._late = pid
            again_at = time.monotonic() + random.uniform(_SHORT, _LONG)
        else:
            if self._all_come(pid):
                return
            driver_calls.unlock(self._driver, pid)
            again_at = self._again_at
        with self._changed:
            while self._goes_on() and (left := again_at - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))

    def _call(self, now: float) -> float:
        """Seconds for a call of the driver's."""
        wanted = max(_CALL, now - self._begin)
        return self._deadline - now if self._is_last(now + wanted) else wanted

    def _is_last(self, moment: float) -> bool:
        """Whether nobody is to be unlocked any more at that moment."""
        return moment - self._begin >= _LAST * self._timeout

    def _goes_on(self) -> bool:
        """Whether they are to be tried further. The signals that ask us to stop are blocked in at_once."""
        asked_to_stop = bool(self._stops & signal.sigpending())
        return not (self._whole or self._failed or asked_to_stop or time.monotonic() >= self._deadline)

    def _all_come(self, pid: int) -> bool:
        """Wait, with this one locked, for the others; whether they are locked as well."""
        with self._changed:
            if not self._locked:
                self._set_times()
            self._locked.add(pid)
            if len(self._locked) == len(self._pids):
                self._whole = True
                self._changed.notify_all()
            while self._goes_on() and (left := self._unlock_at - time.monotonic()) > 0:
                self._changed.wait(min(left, _LOOK))
            self._locked.discard(pid)
            return self._whole

    def _set_times(self) -> None:
        now = time.monotonic()
        wait = max(_WAIT, (now - self._begin) * _SHARE)
        self._unlock_at = self._deadline if self._is_last(now + wait) else now + wait
        self._again_at = self._unlock_at + random.uniform(_SHORT, min(_LONG, wait))

    def _too_late(self, tries: int) -> LockTimeout:
        pid = self._pids[0] if self._late is None else self._late
        others = len(self._pids) - 1
        return LockTimeout(
            f"the GPU driver could not lock process {pid} ({proc.comm(pid)}) at the same time as "
            f"{others} more: its GPU work did not stop within {self._timeout:g} s, in {tries} tries",
            hint="give it longer (nvidia.lock-timeout), or checkpoint when the program does less GPU work",
            code_name="CUDA_ERROR_NOT_READY",
            pid=pid,
        )
