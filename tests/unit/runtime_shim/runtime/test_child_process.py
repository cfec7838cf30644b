"""Child processes: what they said, and what is said of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.runtime import child_process


def test_output_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has ended when that is said."""
    pids: list[int] = []

    def fail(process: subprocess.Popen[bytes], **_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess.Popen, "communicate", fail)
    with pytest.raises(
        GpusnapError, match=f"what {sys.executable} said cannot be read: Cannot allocate memory"
    ):
        child_process.run([sys.executable, "-c", ""], started=pids.append)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
