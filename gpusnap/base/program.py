"""Which program this process is, to start another one of it."""

from __future__ import annotations

import os
import shutil
import sys


def find_program() -> str:
    """Return the absolute path of the command `gpusnap` that runs."""
    return os.path.abspath(shutil.which(sys.argv[0]) or sys.argv[0])
