"""stdout and stderr of a command whose reader may go away, as in `gpusnap ls | head -1`.

What nobody reads is dropped, and the command goes on: a checkpoint is not cut off in its middle, and the exit
code is that of the work. Another failure to write, as on a full disk, is raised once. Python would raise
either again when it flushes at its end, with a traceback and the exit code 120.
"""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Pipe(io.FileIO):
    """A descriptor to write to; what comes after its reader has gone, or after a failure, is dropped."""

    _failed = False

    def write(self, data: ReadableBuffer, /) -> int:
        """As FileIO.write, but for a pipe that nobody reads; a full disk (ENOSPC) and the like raise once."""
        if not self._failed:
            try:
                return super().write(data)
            except BrokenPipeError:
                pass
            except OSError as error:
                self._failed = error.errno != errno.EINTR
                raise
        return memoryview(data).nbytes


def forgive_closed_pipes() -> None:
    """Put such streams in the places of sys.stdout and sys.stderr; any that is not the process' own stays."""
    if sys.stdout is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _forgiving(sys.stdout)
    if sys.stderr is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _forgiving(sys.stderr)


def _forgiving(stream: TextIO) -> TextIO:
    stream.flush()
    file = io.BufferedWriter(_Pipe(stream.fileno(), "wb", closefd=False))
    lines = stream is sys.__stderr__ or stream.isatty()
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=lines)
