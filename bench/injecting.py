"""Runs gpusnap, and makes one of its system calls fail: with ptrace(2), so only on x86-64 and as root.

    injecting.py --calls FILE [--at N [--kind KIND] --error ENOSPC] [--after PATH] -- COMMAND…

The calls that can fail with an error are numbered from 0 for each error, in the order in which gpusnap makes
them, all threads and forks together. A child that starts another program (crun, CRIU) is released there.
Numbering begins when a file is opened whose path ends in --after. With --kind, only calls of that kind
(`kind`) are numbered; between two runs of the same command, kinds differ less than the order does. FILE gets
the name and the path of the call that failed; without --at, it gets those of all calls, and which errors fit
each. The exit status is that of the command.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpusnap.runtime_shim.process.ptrace import calls as ptrace
from gpusnap.runtime_shim.process.ptrace.arch import X86_64

# linux/ptrace.h
_TRACEFORK, _TRACEVFORK, _TRACECLONE, _EXITKILL = 1 << 1, 1 << 2, 1 << 3, 1 << 20
_OPTIONS = ptrace.TRACESYSGOOD | ptrace.TRACEEXEC | _TRACEFORK | _TRACEVFORK | _TRACECLONE | _EXITKILL
_WALL = 0x40000000  # linux/wait.h
_O_CREAT, _F_DUPFD, _F_DUPFD_CLOEXEC = 0o100, 0, 1030  # asm-generic/fcntl.h, linux/fcntl.h
_TCGETS = 0x5401  # asm-generic/ioctls.h

# arch/x86/entry/syscalls/syscall_64.tbl: calls that may return one of these errors (see their manual pages).
CALLS = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "lstat": 6, "poll": 7, "mmap": 9, "mprotect": 10,
    "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "mremap": 25,
    "dup": 32, "sendfile": 40, "socket": 41, "connect": 42, "sendmsg": 46, "recvmsg": 47, "socketpair": 53,
    "clone": 56, "fork": 57, "vfork": 58, "fcntl": 72, "fsync": 74, "fdatasync": 75, "truncate": 76,
    "ftruncate": 77, "rename": 82, "mkdir": 83, "rmdir": 84, "link": 86, "unlink": 87, "symlink": 88,
    "readlink": 89, "ptrace": 101, "mknod": 133, "mount": 165, "setxattr": 188, "fsetxattr": 190,
    "getdents64": 217, "openat": 257, "mkdirat": 258, "mknodat": 259, "newfstatat": 262, "unlinkat": 263,
    "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "faccessat": 269, "ppoll": 271,
    "unshare": 272, "sync_file_range": 277, "fallocate": 285, "accept4": 288, "eventfd2": 290,
    "epoll_create1": 291, "dup3": 292, "pipe2": 293, "inotify_init1": 294, "syncfs": 306, "setns": 308,
    "process_vm_readv": 310,
    "process_vm_writev": 311, "renameat2": 316, "memfd_create": 319, "userfaultfd": 323,
    "copy_file_range": 326, "statx": 332, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "pidfd_open": 434, "clone3": 435, "faccessat2": 439,
}  # fmt: skip
_BY_PATH = "mkdir mkdirat rename renameat renameat2 link linkat symlink symlinkat mknod mknodat"
_WRITES = (
    "write pwrite64 writev fsync fdatasync syncfs sync_file_range ftruncate truncate fallocate "
    "copy_file_range sendfile"
)
_FILES = f"open openat {_BY_PATH} {_WRITES}"
_DESCRIPTORS = (
    "open openat dup dup3 pipe2 socket socketpair accept4 epoll_create1 eventfd2 memfd_create pidfd_open "
    "userfaultfd inotify_init1 open_tree fsopen"
)
# Without unlink and rmdir: files that cannot be removed are left.
FITTING = {
    "ENOSPC": f"{_FILES} setxattr fsetxattr mount",
    "EDQUOT": f"{_FILES} setxattr fsetxattr",
    "EIO": f"{_FILES} read pread64 readv stat lstat newfstatat statx readlink readlinkat getdents64 "
    "close ptrace mount ioctl",
    "ENOMEM": f"{_BY_PATH} {_DESCRIPTORS} mmap mprotect mremap stat lstat newfstatat statx access faccessat "
    "faccessat2 readlink readlinkat clone clone3 fork vfork mount ioctl connect "
    "sendmsg recvmsg poll ppoll unshare setns process_vm_readv process_vm_writev move_mount fallocate "
    "getdents64",
    "EMFILE": f"{_DESCRIPTORS} fcntl",
}
_NO_ROOM = ("ENOSPC", "EDQUOT")
_OF_CONTENT = {"read", "write", "pread64", "pwrite64", "readv", "writev", "close", "sendfile"}
_NAMES = {number: name for name, number in CALLS.items()}
_FITTING = {error: set(names.split()) for error, names in FITTING.items()}
# Calls whose first or second argument is a path.
_PATH_AT = {"open": 0, "mkdir": 0, "rename": 0, "link": 0, "unlink": 0, "stat": 0, "lstat": 0, "access": 0}
_PATH_AT |= {"rmdir": 0, "readlink": 0, "truncate": 0, "symlink": 0, "mount": 1, "setxattr": 0}
_PATH_AT |= {name: 1 for name in CALLS if name.endswith("at") and name not in ("newfstatat", "symlinkat")}
_PATH_AT |= {"newfstatat": 1, "symlinkat": 2, "statx": 1, "renameat2": 1, "faccessat2": 1, "open_tree": 1}


@dataclass
class Tracer:
    """Traces a command. `inject`: number and error of the call that fails; None to list the calls."""

    calls: int
    """The descriptor of the file that lists the calls."""
    after: str
    inject: tuple[int, str] | None
    wanted: str = ""
    """The kind of calls that are numbered; all if empty."""
    number: int = 0
    begun: bool = False
    done: bool = False
    inside: set[int] = field(default_factory=set)
    """Threads within a system call."""
    failing: dict[int, int] = field(default_factory=dict)
    """By thread: the value that its call must return."""

    def run(self, argv: list[str]) -> int:
        """Run a command to its end; return its exit status, 128 + N if signal N killed it."""
        self.begun = not self.after
        root = os.fork()
        if root == 0:
            try:
                os.kill(os.getpid(), signal.SIGSTOP)
                os.execvp(argv[0], argv)
            finally:
                os._exit(127)
        os.waitpid(root, os.WUNTRACED)
        ptrace.seize(root)
        os.waitpid(root, _WALL)  # seizing a stopped process reports that it is stopped
        ptrace.set_options(root, _OPTIONS)
        os.kill(root, signal.SIGCONT)
        ptrace.go_to_call(root)
        while True:
            tid, status = os.waitpid(-1, _WALL)
            if os.WIFSTOPPED(status):
                self._handle_stop(tid, root, ptrace.Stop(os.WSTOPSIG(status), status >> 16))
                continue
            self.inside.discard(tid)
            if tid == root:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code

    def _handle_stop(self, tid: int, root: int, stop: ptrace.Stop) -> None:
        try:
            if stop.is_at_exec and tid != root:
                ptrace.let_go(tid)
                self.inside.discard(tid)
            elif stop.is_at_call:
                if tid in self.inside:
                    self.inside.discard(tid)
                    self._leaves(tid)
                else:
                    self.inside.add(tid)
                    self._enters(tid)
                self._go(tid)
            else:
                self._go(tid, 0 if stop.event else stop.signal)
        except ProcessLookupError:  # it was killed meanwhile
            self.inside.discard(tid)

    def _enters(self, tid: int) -> None:
        registers = ptrace.registers(tid)
        number, arguments = X86_64.get_call(registers)
        name = _NAMES.get(number, "")
        if not self.begun:
            at = _PATH_AT.get(name)
            self.begun = at is not None and _text(tid, arguments[at]).endswith(self.after)
            return
        errors = [
            error for error in FITTING if name in _FITTING[error] and _fits(tid, name, arguments, error)
        ]
        if not errors:
            return
        if self.inject is None:
            self._write(f"{','.join(errors)} {name} {_describe_call(tid, name, arguments)}")
        elif self.inject[1] in errors:
            described = f"{name} {_describe_call(tid, name, arguments)}"
            if self.wanted and kind(described) != self.wanted:
                return
            if self.number == self.inject[0]:
                self._write(described)
                error: int = getattr(errno, self.inject[1])
                self.failing[tid] = -error
                if name != "close":  # close closes the descriptor even if it fails
                    ptrace.set_registers(tid, X86_64.replace_values(registers, {X86_64.number: -1}))
            self.number += 1

    def _write(self, line: str) -> None:
        os.write(self.calls, f"{line}\n".encode())

    def _go(self, tid: int, which: int = 0) -> None:
        """Continue a thread: to its next call until a call has failed, then without stops at calls."""
        if self.done:
            ptrace.go(tid, which)
        else:
            ptrace.go_to_call(tid, which)

    def _leaves(self, tid: int) -> None:
        answer = self.failing.pop(tid, None)
        if answer is not None:
            registers = ptrace.registers(tid)
            ptrace.set_registers(tid, X86_64.replace_values(registers, {X86_64.result: answer}))
            self.done = True


# Values that differ in each run: IDs, UUIDs and digests, random names, numbers of blocks and descriptors.
_DRAWN = re.compile(
    r"0x[0-9a-f]+|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12,}|(?<=tmp)\w{8}|(?<=[.-])\w{8}\b|\d+"
)
# Modules and the directories in which Python looks for them.
_OF_IMPORTS = re.compile(
    r"\.py[c.\d]*$|__pycache__|/(site|dist)-packages|/lib/python3|\.so\b|^\w+ /src(/\w+)*$"
)


def kind(call: str) -> str:
    """Return a call and its file or values, without the parts that differ in each run."""
    name, _, subject = call.partition(" ")
    return f"{name} imports" if of_imports(call) else f"{name} {_DRAWN.sub('N', subject)}"


def of_imports(call: str) -> bool:
    """Whether a call belongs to an import: Python makes many of them."""
    return bool(_OF_IMPORTS.search(call))


def _fits(tid: int, name: str, arguments: tuple[int, ...], error: str) -> bool:
    """Whether this call, with these arguments, could fail with this error."""
    if name in ("open", "openat"):
        flags = arguments[1 if name == "open" else 2]
        return error not in _NO_ROOM or bool(flags & _O_CREAT)
    if name == "fcntl":
        return arguments[1] in (_F_DUPFD, _F_DUPFD_CLOEXEC)
    if name == "ioctl":
        return arguments[1] != _TCGETS  # Python asks whether each file is a terminal; any error means no
    if name in _OF_CONTENT:
        try:
            target = os.readlink(f"/proc/{tid}/fd/{arguments[0]}")
        except OSError:
            return False
        if arguments[0] < 3 or not target.startswith("/"):
            return False
        return error not in _NO_ROOM or not target.startswith(("/proc", "/sys", "/dev/"))
    return True


def _describe_call(tid: int, name: str, arguments: tuple[int, ...]) -> str:
    at = _PATH_AT.get(name)
    if at is not None:
        return _text(tid, arguments[at])
    try:
        return os.readlink(f"/proc/{tid}/fd/{arguments[4 if name == 'mmap' else 0]}")
    except OSError:
        return " ".join(hex(each) for each in arguments[:4])


def _text(tid: int, address: int) -> str:
    """Return the string at an address of a stopped thread; "" if it cannot be read."""
    try:
        with open(f"/proc/{tid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(min(512, 4096 - address % 4096)).partition(b"\0")[0].decode(errors="replace")
    except (OSError, ValueError, OverflowError):
        return ""


def main() -> int:
    """Read the command line, and trace the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=Path, required=True)
    parser.add_argument("--at", type=int)
    parser.add_argument("--kind", default="")
    parser.add_argument("--error", choices=FITTING, default="EIO")
    parser.add_argument("--after", default="")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    calls = os.open(given.calls, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    inject = None if given.at is None else (given.at, given.error)
    return Tracer(calls, given.after, inject, given.kind).run(given.command)


if __name__ == "__main__":
    sys.exit(main())
