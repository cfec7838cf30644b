"""Modules that are imported while whoever needs them waits for something else."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PATIENCE = 60.0  # seconds; a disk that does not answer then


@contextmanager
def importing(*names: str) -> Iterator[None]:
    """Import modules in a thread while the block runs, and wait for that.

    Nothing is decided here: who uses a module imports it, too, and has the error.
    """
    thread = threading.Thread(target=_import, args=(names,), name="gpusnap-import", daemon=True)
    begun = False
    with suppress(RuntimeError):  # no thread is to be had, and it only saves time
        thread.start()
        begun = True
    try:
        yield
    finally:
        if begun:
            thread.join(_PATIENCE)


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
