"""CRIU under the real runtime: what we inject into it, and what it says."""

from __future__ import annotations

import os
import tempfile

__all__ = ["scratch"]


def scratch() -> str:
    """Where files of ours may lie for a moment: /run, which is never full of checkpoints."""
    return "/run" if os.access("/run", os.W_OK) else tempfile.gettempdir()
