"""What can go wrong in a hook. gpusnap.hooks.main turns it into a line on stderr; no container fails."""

from __future__ import annotations

from gpusnap.runtime_shim.errors import GpusnapError


class HookError(GpusnapError):
    """What a hook was given is not what it should be, or its record cannot be kept."""
