"""Starts a process that loads the memory of a checkpoint for `gpusnap restore`; see load_process.py.

The load process itself imports the modules that it needs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from functools import partial

from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.base.question_process import Companion
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.loading.board import VARIABLE

# Seconds for the load process to start, and to end after it is killed: a disk that hangs may delay it.
_START, _ENDING = 5.0, 10.0

_process = Companion(here=False)


def prepare() -> None:
    """Start the process, with its modules imported, before it is known what to load.

    Raises GpusnapError if this fails.
    """
    _process.ask(_import_modules, within=_START)


class LoadProcess:
    """A load process, or none if there cannot be one. A context manager: it ends with the block."""

    def __init__(self, record: Manifest | None, layout: str, settings: Memory) -> None:
        """Start to load a checkpoint from the layout at a path, and do not wait for that."""
        self._path = ""
        self._given_up = threading.Event()
        self._thread: threading.Thread | None = None
        if record is None:
            return
        work = partial(self._begin, record, os.path.abspath(layout), settings)
        thread = threading.Thread(target=work, name="gpusnap-load-process", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started; loading only saves time
            thread.start()
            self._thread = thread

    def __enter__(self) -> LoadProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def environment(self) -> Mapping[str, str]:
        """The environment with which the restore's runtime finds it; empty if nothing is loaded."""
        if self._thread is not None:
            self._thread.join(_START)
            if self._thread.is_alive():
                self._given_up.set()
        return {VARIABLE: self._path} if self._path and not self._given_up.is_set() else {}

    def end(self) -> None:
        """Kill it, and unmount the tmpfs of its files if nothing else uses that."""
        if self._thread is None:
            return
        self._given_up.set()
        self._thread.join(_START)
        self._thread = None
        _process.end(within=_ENDING)
        if self._path:
            from gpusnap.runtime_shim.process.memory import tmpfs

            with contextlib.suppress(OSError):
                tmpfs.unmount_if_empty()

    def _begin(self, record: Manifest, layout: str, settings: Memory) -> None:
        with contextlib.suppress(OSError, GpusnapError, OciError, RuntimeError):
            path = _process.ask(_load, record, layout, settings, within=_START)
            if self._given_up.is_set():  # nobody would use it
                _process.end(within=_ENDING)
            self._path = path


def _import_modules() -> None:
    """Import the modules; runs in the load process."""
    from gpusnap.runtime_shim.snapshot.loading import load_process  # noqa: F401


def _load(record: Manifest, layout: str, settings: Memory) -> str:
    """Load; runs in the load process."""
    from gpusnap.runtime_shim.snapshot.loading import load_process

    return load_process.load(record, layout, settings)
