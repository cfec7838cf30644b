"""Lets a container that was left stopped run on if `gpusnap checkpoint` is killed.

Podman's runtime has ended by then, and nobody else would notice: the container would stay frozen until
`gpusnap recover` (runtime_shim/snapshot/left_stopped.py). A shell waits for the end of a pipe, which the
kernel closes with the command. It has a session of its own, so that Ctrl-C does not end it. If all processes
of a control group are killed (by systemd, or because it is out of memory), the shell is too: then somebody
must run `gpusnap recover`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpusnap.base.program import find_program
from gpusnap.runtime_shim.base.errors import reason
from gpusnap.runtime_shim.base.log import note

_ENDING = 10.0  # seconds for the shell to end
# `read` fails at the end of the pipe.
_SCRIPT = 'read -r _ || exec "$1" recover --left-stopped "$2"'


@contextmanager
def guard(container: str) -> Iterator[Callable[[], None]]:
    """Let the container of that ID run on if this process is killed in the block.

    What it yields, if called, ends that before the end of the block.
    """
    reader, writer = os.pipe()
    try:
        child = _start(container, reader)
    finally:
        os.close(reader)

    def dismiss() -> None:
        if child is None or child.returncode is not None:
            return
        with suppress(BrokenPipeError):  # it was killed
            os.write(writer, b"\n")
        try:
            child.wait(_ENDING)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            child.kill()
            child.wait()

    try:
        yield dismiss
    finally:
        dismiss()
        os.close(writer)


def _start(container: str, reader: int) -> subprocess.Popen[bytes] | None:
    """Start the shell that waits at the pipe; None, with a note, if that is not possible."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "gpusnap-guardian", find_program(), container],
            stdin=reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
    except OSError as error:
        note(
            f"if this command is killed, gpusnap recover must be run: /bin/sh cannot be run: {reason(error)}"
        )
        return None
