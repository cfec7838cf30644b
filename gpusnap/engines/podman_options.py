"""Options of a container that `podman container restore` does not restore from an archive.

Seen with Podman 5.4 and crun: CRIU expects mounts that Podman does not make for an imported container. The
timer of a health check is made by init and start, and not by restore (libpod, Container.restore).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpusnap.oci.base.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """An option of the container, and what to do about it."""

    what: str
    todo: str
    fatal: bool = True
    """The restore fails; otherwise the container runs without the option."""


_SECRET = Option(
    "a secret that is a file (--secret)",
    "give it as an environment variable (--secret NAME,type=env), or bind-mount a file",
)
_OVERLAY = Option(
    "an overlay or image mount (-v DIR:DIR:O, --mount type=image)",
    "bind-mount the directory read-only, or use a named volume",
)
_HEALTH = Option(
    "a health check",
    "run podman healthcheck run from a timer of your own after a restore",
    fatal=False,
)


def list_unrestored(found: Mapping[str, Any]) -> Iterator[Option]:
    """Yield such options of a container, by the output of `podman container inspect`."""
    config = found.get("Config") or {}
    if config.get("Secrets"):
        yield _SECRET
    if any("/userdata/overlay/" in str(each.get("Source")) for each in found.get("Mounts") or ()):
        yield _OVERLAY
    if config.get("Healthcheck"):
        yield _HEALTH
