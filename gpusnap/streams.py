"""stdout and stderr of a command whose reader may go away, as in `gpusnap ls | head -1`.

What nobody reads is dropped, and the command goes on: a checkpoint is not cut off in its middle, and the exit
code is that of the work. Python would raise BrokenPipeError, and once more when it flushes at its end, where
the exit code becomes 120.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["forgive_closed_pipes"]


class _Pipe(io.FileIO):
    """A descriptor to write to; what comes after its reader has gone is dropped."""

    def write(self, data: ReadableBuffer, /) -> int:
        """As FileIO.write, but for a pipe that nobody reads."""
        try:
            return super().write(data)
        except BrokenPipeError:
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
