"""What can be seen, from outside, when a process opens GPU memory of another process: needs a GPU.

    python3 bench/ipc_signs.py [--json F]

One process exports 4 MiB (cuIpcGetMemHandle), another opens it (cuIpcOpenMemHandle) and closes it again.
Before, meanwhile and afterwards, this lists for each process the descriptors and mappings of the driver's
files, its Unix sockets, and which open files the two share (kcmp). A check before a checkpoint could use what
differs between the first two: the driver suspends such processes, and cannot restore them
(runtime_shim/snapshot/preflight/nccl.py). The last lines say whether the driver restored them this time.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(CHECKOUT))

from gpusnap.runtime_shim.process.kcmp import EQUAL, FILE, compare  # noqa: E402

MIB = 1 << 20
LIBRARY = "libcuda.so.1"
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
PRIVATE = re.compile(r"0x[0-9a-f]+|\[\d+\]")
SECONDS = 60


class Handle(ctypes.Structure):
    """CUipcMemHandle of CUDA's driver API."""

    _fields_ = (("data", ctypes.c_ubyte * 64),)


def work(role: str) -> None:
    """Do the work of one of the two processes, one step for each line on stdin."""
    cuda = ctypes.CDLL(LIBRARY)

    def call(name: str, *arguments: Any) -> None:
        code = getattr(cuda, name)(*arguments)
        if code:
            raise SystemExit(f"{role}: {name} gave {code}")

    call("cuInit", 0)
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    handle = Handle()
    if role == "exporter":
        call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4 * MIB))
        call("cuIpcGetMemHandle", ctypes.byref(handle), memory)
        print(bytes(handle.data).hex(), flush=True)
    else:
        print("ready", flush=True)
        handle = Handle.from_buffer_copy(bytes.fromhex(sys.stdin.readline()))
        call("cuIpcOpenMemHandle_v2", ctypes.byref(memory), handle, LAZY_PEER_ACCESS)
        print("open", flush=True)
        sys.stdin.readline()
        call("cuIpcCloseMemHandle", memory)
        print("closed", flush=True)
    sys.stdin.readline()


class Process:
    """One of the two processes."""

    def __init__(self, role: str) -> None:
        words = [sys.executable, __file__, "--role", role]
        self._popen = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._popen.pid
        self.said = self.read()

    def read(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def say(self, line: str) -> str:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()
        return self.read()

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait(SECONDS)

    def descriptors(self) -> dict[int, str]:
        folder = Path(f"/proc/{self.pid}/fd")
        return {int(each.name): os.readlink(each) for each in folder.iterdir()}

    def signs(self) -> dict[str, list[str]]:
        """Return its open files and sockets, and its mappings of files in /dev."""
        sockets = {}
        for line in Path(f"/proc/{self.pid}/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            sockets[fields[6]] = f"unix socket, state {fields[5]}, {' '.join(fields[7:]) or 'no name'}"
        named = []
        for target in self.descriptors().values():
            inode = target[8:-1] if target.startswith("socket:[") else ""
            named.append(sockets.get(inode, PRIVATE.sub("", target)))
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        files = [line.split(maxsplit=5) for line in maps]
        mapped = [f"{each[1]} {each[5]}" for each in files if len(each) > 5 and each[5].startswith("/dev")]
        return {"descriptors": sorted(named), "mappings": sorted(mapped)}


def common(one: Process, other: Process) -> list[str]:
    """Return the open files that both processes share."""
    return sorted(
        f"{target} ({number} and {other_number})"
        for number, target in one.descriptors().items()
        for other_number in other.descriptors()
        if number > 2 and compare(one.pid, other.pid, FILE, number, other_number) == EQUAL
    )


def suspend(pids: list[int]) -> dict[str, list[int]]:
    """Call the driver's checkpoint functions for each process in turn; return the codes by function."""
    cuda = ctypes.CDLL(LIBRARY)
    cuda.cuInit(0)
    arguments = (ctypes.c_uint64 * 8)()
    calls: dict[str, Callable[[int], int]] = {
        name: lambda pid, name=name: getattr(cuda, f"cuCheckpointProcess{name}")(pid, arguments)  # type: ignore[misc]
        for name in ("Lock", "Checkpoint", "Restore", "Unlock")
    }
    return {name: [call(pid) for pid in pids] for name, call in calls.items()}


def main() -> None:
    """Run both processes, and print what differs between the steps."""
    given = argparse.ArgumentParser(description="signs of CUDA IPC")
    given.add_argument("--role", help=argparse.SUPPRESS)
    given.add_argument("--json", metavar="F", help="everything, as JSON")
    options = given.parse_args()
    if options.role:
        work(options.role)
        return
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise SystemExit(f"needs a GPU and its driver: {error}") from error
    exporter, importer = Process("exporter"), Process("importer")
    found: dict[str, Any] = {}

    def look(when: str) -> None:
        found[when] = {
            "exporter": exporter.signs(),
            "importer": importer.signs(),
            "common": common(exporter, importer),
        }

    try:
        look("before")
        importer.say(exporter.said)
        look("open")
        importer.say("")
        look("closed")
        importer.end()
        importer = Process("importer")
        importer.say(exporter.said)
        found["driver"] = suspend([exporter.pid, importer.pid])
    finally:
        exporter.end()
        importer.end()
    for when in ("open", "closed"):
        print(f"{when}: in common {found[when]['common'] or 'nothing'}")
        for who in ("exporter", "importer"):
            for what, now in found[when][who].items():
                there, before = Counter(now), Counter(found["before"][who][what])
                new, gone = list((there - before).elements()), list((before - there).elements())
                print(f"  {who}, {what}: new {new or 'none'}; gone {gone or 'none'}")
    for name, codes in found["driver"].items():
        print(f"{name}: {codes}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
