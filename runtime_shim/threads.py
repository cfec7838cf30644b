"""Threads of ours, where this host lets us have one more."""

from __future__ import annotations

import threading

from runtime_shim.errors import GpusnapError

__all__ = ["start"]


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises GpusnapError where the kernel gives none."""
    try:
        thread.start()
    except RuntimeError as error:
        raise GpusnapError(
            f"no thread could be started: {error}",
            hint="raise the limit on processes and threads for gpusnap (ulimit -u, pids.max)",
        ) from error
