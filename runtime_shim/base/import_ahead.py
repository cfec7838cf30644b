"""Imports modules while the caller waits for something else."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, suppress
from functools import partial

from gpusnap.runtime_shim.base import threads


def import_meanwhile(*names: str) -> AbstractContextManager[None]:
    """Import modules, one after another, while the block runs; see threads.run_meanwhile."""
    return threads.run_meanwhile(partial(_import, names), name="gpusnap-import")


def _import(names: tuple[str, ...]) -> None:
    for name in names:
        with suppress(Exception):
            importlib.import_module(name)
