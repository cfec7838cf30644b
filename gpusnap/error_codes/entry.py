"""One code: a short name, the cause of the error, and what to do about it."""

from __future__ import annotations

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """Both texts are Markdown with `code` alone; other pages are named as docs/NAME.md."""

    code: str
    """GPS- and three digits, of which the first is that of the group. It never changes."""
    name: str
    """Lower-case words with hyphens. It never changes."""
    cause: str
    cure: str
