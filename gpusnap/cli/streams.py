"""stdout and stderr of a command whose reader may go away, as in `gpusnap ls | head -1`.

Output that nobody reads is dropped, and the command continues: a checkpoint is not cut off in the middle, and
the exit code is that of the work. Any other failure to write, such as a full disk, is raised once. Python
would raise both again when it flushes at its end, with a traceback and the exit code 120.

What is written is in the locale's encoding. That of C or POSIX is ASCII here, where Python would write UTF-8
(PEP 540). A character that an encoding does not have is replaced by ASCII that looks like it, or is escaped.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_ALIKE = {
    "→": "->",
    "…": "...",
    "█": "#",
    "▏": "|",
    "│": "|",
    "─": "-",
    "━": "-",
    "╸": "-",
    "╺": "-",
    "—": "-",
    "’": "'",
}
_C_LOCALES = ("", "C", "POSIX")
# What Python itself puts into LC_CTYPE for one of these (PEP 538).
_COERCED = ("C.UTF-8", "C.utf8")


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """An error handler of encoders: ASCII for what an encoding does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    text = "".join(_ALIKE.get(each) or each.encode("ascii", "backslashreplace").decode() for each in found)
    return text, error.end


codecs.register_error("gpusnap-alike", _replace_unencodable)


class _Pipe(io.FileIO):
    """A descriptor to write to; what comes after its reader has gone, or after a failure, is dropped."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._failed = False
        self._is_terminal = self.isatty()  # one that is closed no longer says so

    def write(self, data: ReadableBuffer, /) -> int:
        """As FileIO.write, but for a pipe that nobody reads, or a terminal that was closed.

        A full disk (ENOSPC) and the like raise once.
        """
        if not self._failed:
            try:
                return super().write(data)
            except BrokenPipeError:
                pass
            except OSError as error:
                self._failed = error.errno != errno.EINTR
                if not (self._is_terminal and error.errno == errno.EIO):
                    raise
        return memoryview(data).nbytes


def forgive_closed_pipes() -> None:
    """Put such streams in the places of sys.stdout and sys.stderr; any that is not the process' own stays."""
    if (own := sys.__stdout__) is not None and sys.stdout is own:
        sys.stdout = _wrap_stream(own)
    if (own := sys.__stderr__) is not None and sys.stderr is own:
        sys.stderr = _wrap_stream(own)


def _wrap_stream(stream: TextIO) -> TextIO:
    stream.flush()
    file = io.BufferedWriter(_Pipe(stream.fileno()))
    lines = stream is sys.__stderr__ or stream.isatty()
    encoding = "ascii" if _is_c_locale() else stream.encoding
    # Bytes of a file's name that are no text (surrogates) go out as they came in.
    errors = "gpusnap-alike" if stream.errors != "surrogateescape" or encoding == "ascii" else stream.errors
    return io.TextIOWrapper(file, encoding, errors, line_buffering=lines)


def _is_c_locale() -> bool:
    """Whether the environment asks for no other encoding than ASCII."""
    environ = os.environ
    if environ.get("PYTHONIOENCODING") or environ.get("PYTHONUTF8"):
        return False
    if every := environ.get("LC_ALL"):
        return every in _C_LOCALES
    named = environ.get("LC_CTYPE", "")
    if named in _C_LOCALES or named in _COERCED:
        return environ.get("LANG", "") in _C_LOCALES
    return False
