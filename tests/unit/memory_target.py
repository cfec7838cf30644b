"""A process that other processes work on: it does what it is told by one thread while the others wait.

Also what /proc tells of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from select import select
from types import TracebackType

from fakes import DEADLINE, wait_for

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.stopping.stop import go_on, stop

__all__ = ["MIB", "Target", "smaps"]

MIB = 1 << 20

PROGRAM = """
import ctypes, errno, mmap, os, signal, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
libc.syscall.restype = ctypes.c_long
PRIVATE, WRITE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
awake, wake = os.pipe2(os.O_NONBLOCK)
for number in (signal.SIGUSR1, signal.SIGSYS):
    signal.signal(number, lambda *_: None)
signal.set_wakeup_fd(wake)
word = ctypes.c_int(7)
answers = {}

def new(size, flags=PRIVATE, protection=WRITE, address=None):
    return libc.mmap(address, size, protection, flags, -1, 0)

def raw(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(*map(ctypes.c_long, (number, *arguments)))
    return result, errno.errorcode.get(ctypes.get_errno(), "")

# One more thread, in a system call; its number.
def thread(name, *call):
    def run():
        begin = time.monotonic()
        answers[name] = (*raw(*call), time.monotonic() - begin)
    started = threading.Thread(target=run, daemon=True)
    started.start()
    return started.native_id

def filter_calls(number, action):
    rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, action), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code)))
    libc.prctl(38, 1, 0, 0, 0)
    return libc.prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)))

def serve():
    print(threading.get_native_id(), flush=True)
    for line in sys.stdin:
        try:
            answer = eval(line)
        except Exception as error:
            answer = repr(error)
        print(answer, flush=True)

threading.Thread(target=serve, daemon=True).start()
while True:
    signal.pause()
"""


class Target:
    """The process; as a context manager it is ended at the end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self.tid = int(self._line())
        """The thread that serves; the main one waits for signals."""

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select([self.process.stdout], [], [], DEADLINE)[0], "the process did not respond"
        return self.process.stdout.readline().strip()

    def tell(self, expression: str) -> None:
        """Have the serving thread evaluate it; nobody waits for that."""
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def ask(self, expression: str) -> str:
        """What it evaluates to, as text."""
        self.tell(expression)
        return self._line()

    def number(self, expression: str) -> int:
        """As `ask`, for a number."""
        return int(self.ask(expression))

    def stop(self) -> None:
        """Stop it when each thread waits for something."""
        wait_for(lambda: all(self.waits(tid) for tid in self.threads()), "every thread waits")
        stop([self.pid], timeout=60)

    def go_on(self) -> None:
        """Let it run."""
        go_on([self.pid])

    def threads(self) -> list[int]:
        """Its threads' numbers."""
        return sorted(map(int, os.listdir(f"/proc/{self.pid}/task")))

    def waits(self, tid: int, number: int | None = None) -> bool:
        """Whether a thread sleeps in a system call, or in that one."""
        with open(f"/proc/{self.pid}/task/{tid}/syscall") as file:
            word = file.read().split()[0]
        return word.isdigit() and number in (None, int(word))

    def status(self, tid: int, name: str) -> int:
        """A set of signals of a thread."""
        with open(f"/proc/{self.pid}/task/{tid}/status") as file:
            return next(int(line.split()[1], 16) for line in file if line.startswith(name + ":"))

    def blocks(self, tid: int) -> int:
        """The signals that a thread blocks."""
        return self.status(tid, "SigBlk")

    def untraced(self) -> bool:
        """Whether nobody traces any of its threads."""
        return all(self.status(tid, "TracerPid") == 0 for tid in self.threads())

    def well(self) -> bool:
        """Whether it runs when it is let, and answers."""
        assert proc.is_still(self.pid)
        assert self.untraced()
        self.go_on()
        return self.ask("6 * 7") == "42" and self.untraced()

    def send(self, tid: int, number: signal.Signals) -> None:
        """A signal for one thread."""
        ptrace.send(self.pid, tid, number)


def smaps(pid: int, address: int) -> dict[str, list[str]]:
    """What /proc/PID/smaps says of the mapping that holds an address: words by name."""
    found: dict[str, list[str]] = {}
    inside = False
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            name, *words = line.split()
            if not name.endswith(":"):
                start, end = (int(word, 16) for word in name.split("-"))
                inside = start <= address < end
            elif inside:
                found[name.rstrip(":")] = words
    return found
