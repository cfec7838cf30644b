"""A container image of one program, made of this machine's own files: no network is needed."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
from pathlib import Path

from report import DemoError

_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp")
_NEEDED = re.compile(r"(/\S+) \(0x")  # of ldd: `libc.so.6 => /lib/libc.so.6 (0x…)`, `/lib64/ld-linux… (0x…)`


def write(path: Path, program: Path, libraries: tuple[str, ...]) -> None:
    """Write a root file system as a tar: `program` at /NAME, and what it and `libraries` need.

    The libraries themselves are left out: they come with the GPU.
    """
    needed = sorted({name for file in (str(program), *libraries) for name in _needs(file)} - set(libraries))
    with tarfile.open(path, "w", dereference=True) as tar:
        for folder in _FOLDERS:
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        user = tarfile.TarInfo("etc/passwd")
        line = b"root:x:0:0:root:/:/bin/sh\n"
        user.size = len(line)
        tar.addfile(user, io.BytesIO(line))
        tar.add(program, program.name)
        for name in needed:
            tar.add(name)


def _needs(file: str) -> list[str]:
    done = subprocess.run(["ldd", file], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"`ldd {file}` failed; see that the file is there and made for this machine")
    return _NEEDED.findall(done.stdout)
