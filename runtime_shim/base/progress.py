"""The current step of a checkpoint or a restore, for the command that waits for it.

The command has a piece of memory without a name (memfd_create(2)), and its runtime writes to it through
/proc: neither leaves anything behind when it is killed. Nothing depends on it: a runtime that cannot write
reports nothing, and an incomplete record counts as none.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.json_text import parse_json

VARIABLE = "GPUSNAP_PROGRESS"
"""The variable in the environment of a restore's runtime: the path of a `Board`."""
_NAME = "gpusnap-progress"
_SIZE = 1024  # bytes
_EVERY = 0.1  # seconds between two records of a step that moves data


@dataclass(frozen=True, slots=True)
class Record:
    """The current step."""

    step: str = ""
    """As transaction.Step.name."""
    done: int = 0
    """Bytes of the step that are done."""
    whole: int = 0
    """All bytes of the step; 0 if it moves no data."""
    resumed: float = 0.0
    """Seconds from the start until the container ran again, in a checkpoint that leaves it running."""


class Board:
    """The command's side. Close it."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.truncate(self._file, _SIZE)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)

    def read(self) -> Record | None:
        """Return the last record; None if there is none, or an incomplete one."""
        try:
            found = parse_json(os.pread(self._file, _SIZE, 0).rstrip(b"\0 "))
            return Record(
                str(found["step"]), int(found["done"]), int(found["whole"]), float(found["resumed"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


class Reporter:
    """The runtime's side. Its methods can be used from any thread, and raise nothing."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._written = 0.0
        self._now = Record()

    def report_to(self, path: str) -> None:
        """Write to a board from now on, if it is one."""
        with contextlib.suppress(OSError):
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(file)
            if stat.S_ISREG(found.st_mode) and found.st_size == _SIZE:
                self._file = file
            else:
                os.close(file)

    def step(self, name: str) -> None:
        """Report that a step begins."""
        self._say(Record(name, resumed=self._now.resumed))

    def move(self, done: int, whole: int) -> None:
        """Report that `done` of `whole` bytes of the step are done."""
        if self._file is not None and (done >= whole or time.monotonic() - self._written >= _EVERY):
            self._say(Record(self._now.step, done, whole, self._now.resumed))

    def note_resumed(self) -> None:
        """Report that the container runs again; the remaining work does not affect it."""
        self._say(Record(self._now.step, resumed=time.monotonic() - self._begin))

    def _say(self, record: Record) -> None:
        if self._file is None:
            return
        with self._lock:
            self._now, self._written = record, time.monotonic()
            fields = {each: getattr(record, each) for each in Record.__slots__}
            with contextlib.suppress(OSError):
                os.pwrite(self._file, json.dumps(fields).encode()[:_SIZE].ljust(_SIZE), 0)


reporter = Reporter()
"""The reporter of this process."""
