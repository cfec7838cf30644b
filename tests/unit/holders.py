"""Who holds threads of another process, and is killed meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from gpusnap.runtime_shim.process.ptrace import signal_masks
from gpusnap.runtime_shim.process.ptrace.tracee import held

__all__ = ["blocked", "hold_and_be_killed"]


def blocked(pid: int, tid: int) -> int:
    """The signal mask that the kernel tells of a thread."""
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    return int(text.partition("SigBlk:")[2].split()[0], 16)


def hold_and_be_killed(pid: int, tids: Iterable[int], path: Path) -> None:
    """Have another process hold threads, and be killed by SIGKILL meanwhile."""
    told, tell = os.pipe()
    holder = os.fork()
    if holder == 0:
        with suppress(BaseException), signal_masks.kept(str(path)):
            holding = [held(pid, tid) for tid in tids]
            for each in holding:
                each.__enter__()
            os.write(tell, b"x")
            signal.pause()
        os._exit(1)
    os.close(tell)
    assert os.read(told, 1) == b"x"
    os.close(told)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
