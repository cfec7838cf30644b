"""Finds the Podman of a container from the command line of conmon, which starts the runtime for it.

    conmon -c ID -b BUNDLE … --exit-command /usr/bin/podman --exit-command-arg --root --exit-command-arg … \
        --exit-command-arg container --exit-command-arg cleanup …

conmon runs that command when the container has ended. It has all of Podman's own options: where its storage
is, and its database (libpod, oci_conmon_common.go, createOCIContainer; specgenutil, CreateExitCommandArgs).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise

from gpusnap.runtime_shim.process import proc

PODMAN = "podman"
_NAME = "conmon"
_PROGRAM, _ARGUMENT = "--exit-command", "--exit-command-arg"
_CLEAN_UP = ("container", "cleanup")


def podman_above(container: str) -> tuple[str, ...]:
    """Return the Podman that lets this process restore a container, with its global options; else ().

    `container`: its full ID.
    """
    parent = proc.parent(os.getpid())
    return podman_of(proc.command(parent), container) if proc.comm(parent) == _NAME else ()


def podman_of(conmon: Sequence[str], container: str) -> tuple[str, ...]:
    """Like `podman_above`, from the command line of a conmon: another engine's has no options of Podman's."""
    program, arguments = _iterate_values(conmon, _PROGRAM), tuple(_iterate_values(conmon, _ARGUMENT))
    at = next((at for at in range(len(arguments)) if arguments[at : at + 2] == _CLEAN_UP), -1)
    ours = container in _iterate_values(conmon, "-c") and container in arguments[at + 2 :]
    (path,) = [*program][:1] or [""]
    return (path, *arguments[:at]) if ours and at >= 0 and os.path.basename(path) == PODMAN else ()


def is_podman(pid: int) -> bool:
    """Return whether a process runs the program of Podman, under whatever name."""
    if proc.comm(pid) == PODMAN:
        return True
    with suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) == PODMAN
    return False


def _iterate_values(words: Sequence[str], option: str) -> Iterator[str]:
    """Yield the values of an option: each in the next word, or after `=`."""
    for word, value in pairwise((*words, "")):
        if word == option:
            yield value
        elif word.startswith(option + "="):
            yield word.partition("=")[2]
