"""The sources of the checks: files below a root, and other programs, which have a deadline."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Sequence
from typing import Any

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import child_process
from gpusnap.runtime_shim.runtime.child_process import Finished

# A service's or a user's PATH may lack the sbin folders, where Debian keeps criu and iptables.
_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEADLINE = 10.0
_LARGEST = 8 << 20


def join_root(root: str, path: str) -> str:
    """Return an absolute path below a root."""
    return os.path.join(root, path.lstrip("/"))


def text(root: str, path: str) -> str | None:
    """Return a file's text, at most 8 MiB of it; None if it does not exist, or is not readable."""
    try:
        with open(join_root(root, path), "rb") as file:
            return file.read(_LARGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def toml(root: str, path: str) -> dict[str, Any]:
    """Return a TOML file; empty if it does not exist. Raises ValueError, with the path, if it is not TOML."""
    found = text(root, path)
    try:
        return tomllib.loads(found) if found else {}
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def program(name: str) -> str | None:
    """Return the path of a program, in PATH or in the system's folders."""
    return shutil.which(name) or shutil.which(name, path=_FOLDERS)


def ask(argv: Sequence[str], *, seconds: float = _DEADLINE) -> Finished | None:
    """Run a program until its end; None if it cannot be started, or takes longer than `seconds`."""
    try:
        return child_process.run(argv, env=os.environ, seconds=seconds)
    except GpusnapError:
        return None


def version(found: str) -> tuple[int, ...]:
    """Return the first dotted number in a text: (5, 4, 2) of "podman version 5.4.2"; empty without one."""
    match = re.search(r"\d{1,9}(?:\.\d{1,9})+", found)
    return tuple(map(int, match[0].split("."))) if match else ()


def free(path: str) -> tuple[str, int, int]:
    """Return (folder, free bytes, all bytes) of a path's present or future file system. Raises OSError."""
    while not os.path.isdir(path) and path not in ("/", ""):
        path = os.path.dirname(path)
    place = os.statvfs(path or "/")
    return path or "/", place.f_bavail * place.f_frsize, place.f_blocks * place.f_frsize
