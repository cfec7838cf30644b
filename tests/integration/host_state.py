"""What every process of the test host does, for the message of a test that has waited for too long.

    python3 host_state.py                   prints it

Processes as a tree, each with its threads: their state, and where in the kernel they wait; which files are
locked, by whom, and who waits for them; which control groups are frozen; gpusnap's own notes. The kernel may
not answer who asks about a process that is stuck: `describe` asks in a child, and leaves that behind where it
takes too long.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
NOTES = Path("/run/gpusnap")
FAULTS = Path("/run/softgpu/faults")
# Seconds for all of it, and characters of a command line and of a note.
_PATIENCE, _LONGEST_LINE, _LONGEST_NOTE = 30.0, 240, 600
_SYMBOL = re.compile(r"\] (\S+?)\+0x")
# Where every system call begins.
_COMMON = ("entry_SYSCALL", "do_syscall", "__do_sys_", "__x64_sys_", "el0t_", "el0_svc", "invoke_syscall")


def describe() -> str:
    """All of it; as far as it came within half a minute."""
    child = subprocess.Popen(
        [sys.executable, "-B", "-u", __file__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        return child.communicate(timeout=_PATIENCE)[0]
    except subprocess.TimeoutExpired as error:
        child.kill()  # one that waits in the kernel does not end; nobody waits for it
        said = error.output or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return f"{text}\n(no more within {_PATIENCE:g} s)"


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError as error:
        return f"({error.strerror})" if not isinstance(error, FileNotFoundError) else ""


def _pids() -> list[int]:
    return sorted(int(name) for name in os.listdir(PROC) if name.isdigit())


def _fields(path: Path) -> list[str]:
    """The fields of a stat file from the state on: a name may hold blanks and brackets."""
    return _read(path / "stat").rpartition(")")[2].split()


def _list_processes() -> Iterator[str]:
    parents = {pid: int(found[1]) for pid in _pids() if len(found := _fields(PROC / str(pid))) > 1}
    roots = [pid for pid, parent in parents.items() if parent not in parents]
    waiting = [(pid, 0) for pid in reversed(roots)]
    while waiting:
        pid, depth = waiting.pop()
        yield from _list_threads(pid, parents[pid], "  " * depth)
        waiting += [(each, depth + 1) for each in sorted(parents, reverse=True) if parents[each] == pid]


def _list_threads(pid: int, parent: int, margin: str) -> Iterator[str]:
    folder = PROC / str(pid)
    line = _read(folder / "cmdline").replace("\0", " ").strip() or f"[{_read(folder / 'comm').strip()}]"
    line = line.replace("\n", " ")
    if len(line) > _LONGEST_LINE:
        line = line[:_LONGEST_LINE] + "…"
    yield f"{margin}{pid} (parent {parent}): {line}"
    with contextlib.suppress(OSError):
        for tid in sorted(map(int, os.listdir(folder / "task"))):
            yield f"{margin}    {_describe_thread(folder / 'task' / str(tid), tid)}"


def _describe_thread(folder: Path, tid: int) -> str:
    state = (_fields(folder) or ["gone"])[0]
    tracer = re.search(r"^TracerPid:\t([1-9]\d*)$", _read(folder / "status"), re.MULTILINE)
    call = _read(folder / "syscall").split(" ")
    names = [each for each in _SYMBOL.findall(_read(folder / "stack")) if not each.startswith(_COMMON)]
    said = f"{tid} {_read(folder / 'comm').strip()}: {state}, in {_read(folder / 'wchan') or '?'}"
    if tracer is not None:
        said += f", traced by {tracer[1]}"
    if call[0].strip().isdigit():
        said += f", call {call[0]}({', '.join(call[1:4])})"
    return f"{said}, stack {' < '.join(names)}" if names else said


def _list_locks() -> Iterator[str]:
    """The kernel's list, and after it the files: a holder's descriptors say which they have locked."""
    yield from _read(PROC / "locks").splitlines()
    for pid in _pids():
        with contextlib.suppress(OSError):
            for name in os.listdir(PROC / str(pid) / "fdinfo"):
                for line in _read(PROC / str(pid) / "fdinfo" / name).splitlines():
                    if line.startswith("lock:"):
                        target = os.readlink(PROC / str(pid) / "fd" / name)
                        yield f"{pid} has {target} open: {line.removeprefix('lock:').strip()}"


def _list_frozen() -> Iterator[str]:
    for file in CGROUPS.rglob("cgroup.freeze"):
        events = _read(file.with_name("cgroup.events"))
        if _read(file).strip() == "1" or "frozen 1" in events:
            members = " ".join(_read(file.with_name("cgroup.procs")).split())
            yield f"{file.parent}: {_read(file).strip()}, {' '.join(events.split())}, PIDs {members}"


def _list_notes() -> Iterator[str]:
    for file in (FAULTS, *sorted(each for each in NOTES.rglob("*") if each.is_file())):
        if file.is_relative_to(NOTES / "stage"):
            yield f"{file}: {file.stat().st_size} bytes"
        elif text := _read(file).strip():
            # Some are not text.
            yield f"{file}: {text[:_LONGEST_NOTE] if text.isprintable() else ascii(text[:_LONGEST_NOTE])}"


def _say() -> None:
    for what, lines in (
        ("processes", _list_processes),
        ("locks", _list_locks),
        ("frozen control groups", _list_frozen),
        ("notes", _list_notes),
    ):
        print(f"--- {what}")
        try:
            for line in lines():
                print(line)
        except OSError as error:  # what is described changes meanwhile
            print(f"({error})")


if __name__ == "__main__":
    _say()
