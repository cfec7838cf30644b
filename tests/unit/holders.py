"""Who holds threads of another process, and is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.tracee import hold

__all__ = ["be_killed", "blocked", "hold_and_be_killed"]


def blocked(pid: int, tid: int) -> int:
    """The signal mask that the kernel tells of a thread."""
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    return int(text.partition("SigBlk:")[2].split()[0], 16)


def be_killed(holding: AbstractContextManager[object]) -> None:
    """Have another process enter this, and be killed by SIGKILL within."""
    told, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        with suppress(BaseException), holding:
            os.write(tell, b"x")
            signal.pause()
        os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)


def hold_and_be_killed(pid: int, tids: Iterable[int], path: Path) -> None:
    """Have another process hold threads, and be killed by SIGKILL meanwhile."""

    @contextmanager
    def holding() -> Iterator[None]:
        with signal_masks.keep_masks(str(path)), ExitStack() as stack:
            for tid in tids:
                stack.enter_context(hold(pid, tid))
            yield

    be_killed(holding())
