"""A GPU process and its children by fork, all of them real; only what stands for a GPU's files is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from select import select
from types import TracebackType

from fakes import DEADLINE

from runtime_shim import proc

__all__ = ["MAPPED", "OPENED", "Tree"]

# Stand in for a GPU's files: the first can be opened only, the second mapped as well.
OPENED, MAPPED = "/dev/full", "/dev/zero"

# A GPU process with two descriptors of a file, and a mapping of another. Each line on stdin is run by it, or
# by a child of its own, which then answers to SIGUSR1 for the rest of its life.
PROGRAM = f"""
import ctypes, mmap, os, signal, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
numbers = [os.open("{OPENED}", os.O_RDWR) for _ in range(2)]

def mapped():
    zero = os.open("{MAPPED}", os.O_RDWR)
    found = libc.mmap(None, 8192, mmap.PROT_READ, mmap.MAP_PRIVATE, zero, 0)
    os.close(zero)
    return found

keep = [mapped()]

# In one call: several processes write to this pipe.
def say(*words):
    os.write(1, (" ".join(map(str, (os.getpid(), *words))) + "\\n").encode())

def child(deed="", grandchild=False):
    pid = os.fork()
    if pid:
        return
    exec(deed)
    if grandchild:
        child()
    say()
    while True:
        woken = signal.sigwait([signal.SIGUSR1])
        say("well" if woken == signal.SIGUSR1 else woken)

say()
for line in sys.stdin:
    exec(line)
"""


class Tree:
    """The GPU process and its children, a process group of their own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
        )
        self.pid = self.process.pid
        self.children: list[int] = []
        self._said = b""
        self._line()

    def __enter__(self) -> Tree:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self.process.communicate()

    def _line(self) -> str:
        """The next line that one of them prints."""
        assert self.process.stdout is not None
        while b"\n" not in self._said:
            assert select([self.process.stdout], [], [], DEADLINE)[0], "no answer"
            self._said += os.read(self.process.stdout.fileno(), 4096)
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def tell(self, line: str) -> None:
        """Have the GPU process do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def child(self, deed: str = "") -> int:
        """One more child, which does something first; its PID."""
        self.tell(f"child({deed!r})")
        self.children.append(int(self._line()))
        return self.children[-1]

    def grandchild(self) -> tuple[int, int]:
        """A child, and a child of that one."""
        self.tell("child(grandchild=True)")
        pids = sorted((int(self._line()), int(self._line())), key=lambda pid: proc.parent(pid) != self.pid)
        self.children += pids
        return pids[0], pids[1]

    def processes(self) -> tuple[proc.Process, ...]:
        """All of them."""
        found = (proc.process(pid) for pid in (self.pid, *self.children))
        return tuple(process for process in found if process is not None)

    def well(self, pid: int) -> bool:
        """Whether a child runs, and answers."""
        os.kill(pid, signal.SIGUSR1)
        return self._line() == f"{pid} well"
