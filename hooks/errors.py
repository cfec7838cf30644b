"""Errors of a hook. gpusnap.hooks.main turns them into a line on stderr; no container fails."""

from __future__ import annotations

from gpusnap.runtime_shim.errors import GpusnapError


class HookError(GpusnapError):
    """The input of a hook is invalid, or its record cannot be written."""
