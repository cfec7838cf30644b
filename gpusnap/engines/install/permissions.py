"""Checks who can change a program that root will run: every file and folder on the path to it.

Engines run gpusnap-runtime as root. Whoever can write to the script, to its interpreter, to gpusnap's modules
or to a folder above one of them is root with the next container. The sticky bit of a folder such as /tmp is
not enough: it protects a name only while the file exists.
"""

from __future__ import annotations

import os
import pwd
import shlex
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpusnap import runtime_shim

# The kernel's own limit (path_resolution(7)).
_MOST_LINKS = 40
_LONGEST = 4096


def fault(program: str, modules: str = str(Path(runtime_shim.__file__).parent)) -> str:
    """Say, as half a sentence, why a user other than root can change a program; "" if nobody can."""
    seen = set()
    for path in (program, *_interpreter(program), modules):
        for place in _way(path):
            if place not in seen and (found := _fault(place)):
                return found
            seen.add(place)
    return ""


def _interpreter(program: str) -> Iterator[str]:
    """Yield the interpreter of a script: from its first line, or in pip's form for a long path."""
    try:
        with open(program, "rb") as file:
            lines = os.fsdecode(file.read(_LONGEST)).splitlines()
    except OSError:
        return
    if not lines or not lines[0].startswith("#!"):
        return
    yield from lines[0][2:].split()[:1]
    if lines[1:] and lines[1].startswith("'''exec'"):
        with suppress(ValueError):
            yield from shlex.split(lines[1])[1:2]


def _way(path: str) -> Iterator[str]:
    """Yield the folders and the file on a path, all links followed."""
    at, links = "/", 0
    rest = path.split("/")[::-1]
    yield at
    while rest:
        name = rest.pop()
        if name in ("", ".", ".."):
            at = os.path.dirname(at) if name == ".." else at
            continue
        here = os.path.join(at, name)
        if os.path.islink(here):
            links += 1
            if links > _MOST_LINKS:
                return
            target = os.readlink(here)
            at = "/" if target.startswith("/") else at
            rest += target.split("/")[::-1]
            continue
        at = here
        yield here


def _fault(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return ""
    if found.st_uid:
        return f"{path} belongs to {_name(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write to {path}"
    if found.st_mode & stat.S_IWGRP and found.st_gid:
        return f"a group can write to {path}"
    return ""


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
