"""What the checks read: files below a root, and other programs, which get a deadline."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from typing import Any

from gpusnap.oci.base.dataclass import dataclass

# A service's or a user's PATH may lack the sbin folders, where Debian keeps criu and iptables.
_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEADLINE = 10.0
_LARGEST = 8 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program said, as text."""

    code: int
    out: str
    err: str


def join_root(root: str, path: str) -> str:
    """An absolute path below a root."""
    return os.path.join(root, path.lstrip("/"))


def text(root: str, path: str) -> str | None:
    """A file's text, 8 MiB of it at most; None where it is not there, or not for us to read."""
    try:
        with open(join_root(root, path), "rb") as file:
            return file.read(_LARGEST).decode("utf-8", "surrogateescape")
    except OSError:
        return None


def toml(root: str, path: str) -> dict[str, Any]:
    """A TOML file; empty where it is not there. Raises ValueError, with the path, where it is not TOML."""
    found = text(root, path)
    try:
        return tomllib.loads(found) if found else {}
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None


def program(name: str) -> str | None:
    """The path of a program, in PATH or in the system's folders."""
    return shutil.which(name) or shutil.which(name, path=_FOLDERS)


def ask(argv: Sequence[str], *, seconds: float = _DEADLINE) -> Answer | None:
    """Run a program to its end; None where it cannot be started, or takes longer than that."""
    try:
        done = subprocess.run(
            list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    out, err = (stream.decode("utf-8", "backslashreplace") for stream in (done.stdout, done.stderr))
    return Answer(done.returncode, out, err)


def version(found: str) -> tuple[int, ...]:
    """The first dotted number in a text: (5, 4, 2) of "podman version 5.4.2"; empty without one."""
    match = re.search(r"\d{1,9}(?:\.\d{1,9})+", found)
    return tuple(map(int, match[0].split("."))) if match else ()


def free(path: str) -> tuple[str, int, int]:
    """(folder, free bytes, all bytes) of the file system that a path is or would be on. Raises OSError."""
    while not os.path.isdir(path) and path not in ("/", ""):
        path = os.path.dirname(path)
    place = os.statvfs(path or "/")
    return path or "/", place.f_bavail * place.f_frsize, place.f_blocks * place.f_frsize
