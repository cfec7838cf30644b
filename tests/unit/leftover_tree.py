"""A GPU process and its children by fork, all of them real; only what stands for a GPU's files is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from select import select
from types import TracebackType

from fakes import DEADLINE, wait_for

from gpusnap.runtime_shim.process import proc

__all__ = ["CLONE_FILES", "CLONE_VFORK", "CLONE_VM", "MAPPED", "OPENED", "Tree"]

CLONE_VM, CLONE_FILES, CLONE_VFORK = 0x100, 0x400, 0x4000  # linux/sched.h

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
libc.clone.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
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

stacks = []

# A process that only waits, on a stack of its own: it touches nothing of what it shares with this one.
def share(flags):
    stacks.append(ctypes.create_string_buffer(1 << 16))
    top = ctypes.addressof(stacks[-1]) + (1 << 16) & ~15
    return libc.clone(ctypes.cast(libc.pause, ctypes.c_void_p), top, flags | signal.SIGCHLD, None)

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

    def sharing(self, flags: int) -> int:
        """A child of the GPU process that shares with it what clone(2) is told to; its PID."""
        self.tell(f"os.write(1, b'%d\\n' % share({flags}))")
        self.children.append(int(self._line()))
        return self.children[-1]

    def sharing_later(self, flags: int) -> tuple[int, Callable[[], None]]:
        """A child by fork, and what has it get such a child of its own."""
        block = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2]); say()"
        then = f"signal.sigwait([signal.SIGUSR2]); os.write(1, b'%d\\n' % share({flags}))"
        pid = self.child(f"{block}; {then}")

        def share() -> None:
            os.kill(pid, signal.SIGUSR2)
            self.children.append(int(self._line()))
            assert self._line() == str(pid)

        return pid, share

    def in_vfork(self) -> tuple[int, int]:
        """A child by fork that waits for a child of its own, with its memory, to exec; and that one."""
        pid = self.child(f"say(); share({CLONE_VM | CLONE_VFORK})")
        wait_for(lambda: self._of(pid), "its child")
        self.children += self._of(pid)
        return pid, self.children[-1]

    @staticmethod
    def _of(pid: int) -> list[int]:
        return [each for each in proc.pids() if proc.parent(each) == pid]

    def processes(self) -> tuple[proc.Process, ...]:
        """All of them."""
        found = (proc.process(pid) for pid in (self.pid, *self.children))
        return tuple(process for process in found if process is not None)

    def well(self, pid: int) -> bool:
        """Whether a child runs, and answers."""
        os.kill(pid, signal.SIGUSR1)
        return self._line() == f"{pid} well"
