"""What can go wrong in a hook. No container fails of it: gpusnap.hooks.main turns it into one line on stderr."""

from __future__ import annotations

from gpusnap.runtime_shim.errors import GpusnapError

__all__ = ["HookError"]


class HookError(GpusnapError):
    """What a hook was given is not what it should be, or its record cannot be kept."""
