"""A restore without --detach: the real runtime stays until the container ends, and we work beside it."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from runtime_shim import leavings
from runtime_shim.argv import RestoreCall
from runtime_shim.criu import scratch
from runtime_shim.errors import GpusnapError, RuntimeFailed, reason
from runtime_shim.invoke import Invoked
from runtime_shim.transaction import forwarded_signals, held_signals

__all__ = ["Beside", "pid_file"]


class Beside:
    """The real runtime, run by a thread of ours. `run` is told a function that takes the runtime's PID."""

    def __init__(self, run: Callable[[Callable[[int], object]], Invoked]) -> None:
        self._pids: list[int] = []
        self._ended: list[Invoked | GpusnapError] = []
        self._run = run
        self._thread = threading.Thread(target=self._work)

    def restored(self, pid_file: str) -> bool:
        """Start it, and wait until it says that the container is there; False where it ended before."""
        self._thread.start()
        while self._thread.is_alive() and not _written(pid_file):
            time.sleep(0.01)
        return self._thread.is_alive()

    def stand_for(self, name: str) -> Invoked:
        """Only stand for it from now on: signals go to it, and it hands them to the container.

        Raises GpusnapError where it could not be run.
        """
        with forwarded_signals(self._pids[0]) if self._pids else held_signals():
            self._thread.join()
        if not self._ended:
            raise RuntimeFailed(f"{name} could not be run")
        done = self._ended[0]
        if isinstance(done, GpusnapError):
            raise done
        return done

    def _work(self) -> None:
        try:
            self._ended.append(self._run(self._pids.append))
        except GpusnapError as error:
            self._ended.append(error)


@contextmanager
def pid_file(call: RestoreCall) -> Iterator[str]:
    """Where the runtime says that the container is restored; an old file there would say so too early."""
    if call.pid_file:
        try:
            if os.path.exists(call.pid_file):
                os.unlink(call.pid_file)
        except OSError as error:
            raise GpusnapError(f"the PID file {call.pid_file} cannot be used: {reason(error)}") from error
        yield call.pid_file
    else:
        with tempfile.TemporaryDirectory(prefix=leavings.prefix("pid"), dir=scratch()) as folder:
            yield os.path.join(folder, "pid")


def _written(path: str) -> bool:
    try:
        return os.path.getsize(path) > 0
    except OSError:
        return False
