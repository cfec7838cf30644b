"""A parent that waits within vfork(2) for its child, for as long as a test likes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from fakes import wait_for

from gpusnap.runtime_shim.process import proc

# glibc's posix_spawn is a vfork; the child opens the FIFO before its program begins, and waits for a writer.
_PARENT = """
import os, sys
action = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
pid = os.posix_spawn(sys.argv[2], ["program"], {}, file_actions=[action])
print("begun", os.waitpid(pid, 0)[1], flush=True)
"""


@dataclass
class Pair:
    """A parent that waits until somebody opens the FIFO for writing."""

    process: subprocess.Popen[str]
    child: int
    fifo: Path

    @property
    def parent(self) -> int:
        return self.process.pid

    @property
    def pids(self) -> tuple[int, int]:
        return self.parent, self.child

    def open(self) -> int:
        return os.open(self.fifo, os.O_RDWR)

    def said(self) -> str:
        """What the parent printed; it has ended by then."""
        return self.process.communicate(timeout=10)[0]


def a_pair(folder: Path, program: str) -> Pair:
    """The two, whose FIFO is made in the folder; it is the caller's to end them."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    words = [sys.executable, "-c", _PARENT, str(fifo), program]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: process.pid in proc.parents().values(), "the child")
    child = next(pid for pid, parent in proc.parents().items() if parent == process.pid)
    wait_for(lambda: proc.activity(process.pid, process.pid)[0] == "D", "the wait")
    return Pair(process, child, fifo)
