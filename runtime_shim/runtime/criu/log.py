"""CRIU's log (dump.log, restore.log in the work path): finds the one line with the reason."""

from __future__ import annotations

import os

from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later

# "(00.012345) Error (criu/files-ext.c:98): Can't dump file 5 of that type [20000] (chr 195:0)";
# a restored task's PID is before it as in "(00.012345)    123: Error …".
_ERROR = compile_later(r"^\(\d+\.\d+\)\s+(?:\d+:\s+)?Error \([^)]*\): (.*)$")
# Errors on hosts where CRIU then continues without harm.
_HARMLESS = ("Can't setup RLIMIT_NOFILE", "Can't raise limit", "Can't set file limit")
_TAIL = 4 << 20


def first_error(path: str) -> str:
    """Return the first error of the log that matters; empty without a log or an error in its last 4 MiB."""
    try:
        file, size = open_below(*os.path.split(path))
        with file:
            file.seek(max(0, size - _TAIL))
            text = file.read(_TAIL).decode("utf-8", "backslashreplace")
    except (OSError, ValueError):
        return ""
    for line in text.splitlines():
        match = _ERROR.match(line)
        if match and not any(words in match[1] for words in _HARMLESS):
            return match[1].strip()[:300]
    return ""
