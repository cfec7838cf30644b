"""Which CRIU the real runtime will start."""

from __future__ import annotations

import functools
import shutil

from runtime_shim.child import run
from runtime_shim.errors import RuntimeFailed

__all__ = ["criu_version"]

# Podman's environment has a PATH, but a service's may lack the sbin folders where Debian keeps criu.
_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@functools.cache
def criu_version() -> str:
    """Its version, e.g. 4.1.1; "unknown" where it cannot be asked: the runtime will say so better."""
    program = shutil.which("criu") or shutil.which("criu", path=_FOLDERS)
    if program is None:
        return "unknown"
    try:
        out = run([program, "--version"]).out
    except RuntimeFailed:
        return "unknown"
    words = out.split()
    return words[1][:64] if len(words) > 1 and words[0] == "Version:" else "unknown"
