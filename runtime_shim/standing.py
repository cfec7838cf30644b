"""A call of the driver's on a process that stands, and is to stand afterwards.

Seen by hand on an H100 with driver 580.159.04 and PyTorch, the process stopped by SIGSTOP, ten tries:

- The thread that does the driver's work answers for the state, alone. Asked of a process of which no thread
  may run, the driver waits for ever; its thread's number it tells at once.
- To lock, that thread alone is not enough: the driver waits, beyond its own timeout. With the driver's second
  thread (cuda-EvtHandlr) a process that had nothing under way was locked in 1.4 ms.
- Where the process was stopped within a call of CUDA's, that call has to end first. Then the whole process is
  let run until the driver has answered: locked 0.5 to 1.9 ms after the SIGCONT, and standing again 1.0 to
  3.0 ms after it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from runtime_shim import proc
from runtime_shim.gpu.driver import Driver
from runtime_shim.gpu.errors import DriverNotReady, GpuError, LockTimeout, ProcessGone
from runtime_shim.gpu.handles import ends
from runtime_shim.stillness import go_on, several, stop

__all__ = ["asked"]

# Seconds for an answer while the driver's threads alone run: it takes 1.4 ms, or does not come.
_BRIEFLY = 0.2
# Seconds beyond the driver's own deadline, which it keeps for a process that runs.
_MARGIN = 5.0
# Seconds that a killed process may take to be gone.
_DYING = 0.2
# As NVIDIA's driver names its threads in a process; what runs there is the driver's, but for what a program
# gave cuLaunchHostFunc, which a locked or idle process has none of under way.
_NAME = "cuda"


def asked(driver: Driver, pid: int, call: Callable[[], object], *, timeout: float) -> bool:
    """Make the `call` of the driver's, on a stopped process; whether all of it had to run for that.

    First its driver's threads alone run; where no answer comes, or that something is under way, the whole
    process does until there is one, `timeout` seconds at most. It is stopped in any case. Raises what `call`
    raises; DriverNotReady where it does not end; ProcessGone.
    """
    answer = _Answer(call)
    try:
        with several(pid, _threads(driver, pid)):
            answer.begin()
            answer.wait(_BRIEFLY)
        if answer.came and not isinstance(answer.error, LockTimeout):
            answer.raise_error()
            return False
        go_on([pid])
        try:
            if answer.came:
                answer = _Answer(call)
                answer.begin()
            answer.wait(timeout + _MARGIN)
        finally:
            stop([pid], timeout=timeout)
    except GpuError as error:
        if not isinstance(error, ProcessGone) and ends(pid, within=_DYING):
            raise ProcessGone(f"process {pid} ended in the GPU driver's hands: {error}", pid=pid) from error
        raise
    if not answer.came:
        raise DriverNotReady(
            f"the GPU driver does not answer for process {pid} ({proc.comm(pid)})",
            hint="see with nvidia-smi that the driver works, and look for Xid lines in the kernel log",
            pid=pid,
        )
    answer.raise_error()
    return True


def _threads(driver: Driver, pid: int) -> list[int]:
    """The threads of the process that are the driver's."""
    found = {driver.restore_thread(pid)}
    try:
        tasks = [int(name) for name in os.listdir(f"{proc.PROC}/{pid}/task")]
    except OSError:
        tasks = []
    return sorted(found | {task for task in tasks if proc.thread_name(pid, task).startswith(_NAME)})


class _Answer:
    """A call in a thread of its own: into the driver, which cannot be called off."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._done = threading.Event()
        self.error: Exception | None = None

    @property
    def came(self) -> bool:
        return self._done.is_set()

    def begin(self) -> None:
        threading.Thread(target=self._run, name="gpusnap-asking", daemon=True).start()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error
        finally:
            self._done.set()
